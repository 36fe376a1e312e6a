"""One at a time: a file lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
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


class Held(Exception):
    """Another process has the lock; `holder`: its number and computer, "unknown" where it did not get to say."""

    def __init__(self, holder: str):
        super().__init__(holder)
        self.holder = holder


class Claim:
    """The lock file `path`, held without waiting until `release`, which removes it, or until this process ends.

    A file that a killed process left is no lock.  Where the file system has no locks, nothing is held.  Raises Held,
    and OSError when the file cannot be made.
    """

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = self._taken()
        with contextlib.suppress(OSError):  # a full disk: the lock holds, and its holder is unknown
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"{os.getpid()} on {platform.node()}\n".encode())

    def _taken(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 200).decode("utf-8", "replace").strip()
                os.close(descriptor)
                raise Held(holder or "unknown") from None
            except OSError:
                return descriptor
            if _is(self.path, descriptor):
                return descriptor
            os.close(descriptor)  # its holder released it in between

    def release(self) -> None:
        """May be called again."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()  # while it is held: nobody else's file
            os.close(self.descriptor)
            self.descriptor = -1
