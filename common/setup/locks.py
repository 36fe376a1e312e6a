"""One at a time: a file lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Callable, Iterator


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock file `path` (made when missing); `waiting` is called once when another process has it.

    Yields the descriptor: a child started with ``pass_fds=(descriptor,)`` keeps the lock as long as it runs, so that
    the files it writes stay its own even when its parent was killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(path, descriptor):
                yield descriptor
                return
            # The holder removed the file (`make clean`): take the new one.
            path.parent.mkdir(parents=True, exist_ok=True)
        finally:
            os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
