"""Lock files that the kernel releases when the holder dies, however it dies.

The package filelock cannot be used: set-up takes a lock before any package is installed, and its children inherit it.
"""

from __future__ import annotations

import fcntl
import os
import platform
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator, Optional


class Held(Exception):
    """Another process has the lock; the message is its process id and computer, "unknown" if it could not write
    them."""


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock file `path`, which is made if it is missing; call `waiting` once if another process has it.

    Yields the descriptor.  A child started with ``pass_fds=(descriptor,)`` keeps the lock as long as it runs, so no
    other process writes its files even if its parent is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _taken(path, waiting)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Claim:
    """Hold the lock file `path` until `release`, which removes it, or until this process ends.  Does not wait.

    A file that a killed process left behind is no lock.  Raises Held, and OSError if the file cannot be made.
    """

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = _taken(path, None)
        with suppress(OSError):  # a full disk: the lock holds, and its holder is unknown
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"{os.getpid()} on {platform.node()}\n".encode())

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        if self.descriptor >= 0:
            with suppress(OSError):
                self.path.unlink()  # while it is held, so that it is not another process's file
            os.close(self.descriptor)
            self.descriptor = -1


def _taken(path: Path, waiting: Optional[Callable[[], None]]) -> int:
    """Lock the file and return its descriptor; without locks of the file system, return it unlocked.

    Raises Held if `waiting` is None and another process has the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # it is written to
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise Held(os.read(descriptor, 200).decode("utf-8", "replace").strip() or "unknown") from None
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                return descriptor
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file (a release, `make clean`): take the new one
        path.parent.mkdir(parents=True, exist_ok=True)
