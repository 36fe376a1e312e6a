"""Say where the suite's files are; check the paths that a user gives; read, write and lock files.

A lock is flock(2), which the kernel releases when its holder dies.  The package filelock is not
used: set-up takes a lock before any package is installed, and its child processes keep it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from rnnt_bench.core.errors import UserError

#: The folder of the package rnnt_bench: common/ in a checkout.
PACKAGE = Path(__file__).resolve().parents[1]
#: Whether the suite is installed with pip.  Then the scripts of losses are inside the package, and
#: losses are measured only in the running Python.
INSTALLED = (PACKAGE / "scripts").is_dir()
#: The folder that holds the scripts and what they read.
ROOT = PACKAGE / "scripts" if INSTALLED else PACKAGE.parent
_CACHE_HOME = os.environ.get("XDG_CACHE_HOME", "")
#: The suite's folder in the user's cache.  The XDG specification says to ignore a relative path.
_USER_CACHE = (
    Path(_CACHE_HOME if os.path.isabs(_CACHE_HOME) else os.path.expanduser("~/.cache"))
    / "rnnt-bench"
)
#: Folder of compiled losses.
CACHE = _USER_CACHE / "losses"
#: Folder of the suite's own compiled kernels and C libraries, and of scripts that it writes.
BUILD = _USER_CACHE if INSTALLED else ROOT / ".build"
#: Folder of results without --log-dir.  An installed suite writes nothing beside its own code.
LOG = Path("log") if INSTALLED else ROOT / "log"
#: Folders of the package that `code_digest` leaves out: the first four change no measurement;
#: scripts has the adapters, whose digests the records of jobs have.
_NOT_MEASURING = {"analysis", "cli", "present", "show", "scripts"}


def digest(*paths: Path) -> str:
    """Return 12 hex digits of the SHA-256 of some files, one after the other.  Raises OSError."""
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


@cache
def code_digest() -> str:
    """Return the digest of the suite's code that can change a measurement, except the adapters."""
    modules = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in _NOT_MEASURING
    ]
    return digest(*sorted([*modules, *(ROOT / "fused_transducer" / "csrc").glob("*")]))


def not_a_file(path: str | Path) -> str:
    """Return why a path is no readable file, such as "no such file"; "" if it is one."""
    return _problem(path, "file", stat.S_ISREG)


def not_a_folder(path: str | Path) -> str:
    """Return why a path is no readable folder, such as "no such folder"; "" if it is one."""
    return _problem(path, "folder", stat.S_ISDIR, os.R_OK | os.X_OK)


def not_a_file_or_folder(path: str | Path) -> str:
    """Return why a path is neither a readable file nor a folder; "" if it is one of them."""
    return _problem(path, "file or folder", lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _problem(
    path: str | Path, noun: str, is_wanted: Callable[[int], bool], access: int = os.R_OK
) -> str:
    """Return why a path is not what it should be, or cannot be read; "" if all is well.

    Args:
        noun: what the path should be, for the message.
        is_wanted: takes the mode of os.stat, and tells whether the path is what it should be.
        access: the permissions that are needed, as os.access takes them."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if os.path.islink(path) else f"no such {noun}"
    # OSError: the path is too long, a loop of links, or in a closed folder.  ValueError: it has a
    # zero byte.
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    if not is_wanted(mode):
        return f"not a {noun}"
    return "" if os.access(path, access) else os.strerror(errno.EACCES)


#: Folders of special files, which are written to and not replaced.
_DEVICES = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))
#: The content of a file: text, bytes, or a function that writes to the stream that it is given.
Content = str | bytes | Callable[[BinaryIO], None]
#: Bytes of the largest file that is read as a whole.
LARGEST = 2**30

#: A temporary file that is older than this and not locked is removed: its writer was killed.
LEFT_SECONDS = 60.0

#: Folder for the temporary files of this process; None for the system's.  In the process of a job
#: it is a folder of the command, which removes it, also after this process was killed.
scratch: Path | None = None


def scratch_folder() -> TemporaryDirectory[str]:
    """Return a temporary folder in `scratch`, which a `with` block removes at its end."""
    return TemporaryDirectory(dir=scratch)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises OSError, also for a pipe or a device: reading one may never end."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    return stream


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file.  Raises OSError, also for more than `largest` bytes."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise OSError(
                errno.EFBIG, f"{size:,} bytes, more than the {largest:,} that are read", str(path)
            )
        return stream.read() or b""  # None if a read would block


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8.

    Raises UserError for what cannot be read, and for more than `largest` bytes."""
    reason = not_a_file(path)
    try:
        if not reason:
            return read_bytes(path, largest).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise UserError(f"cannot read {path}: {reason}")


def cannot_write(path: Path, error: OSError, advice: str) -> str:
    """Return the message of an error that a write to `path` raised.  advice: what to do next."""
    if error.errno == errno.ELOOP:
        reason = "it is a link, or below a link that leads nowhere"
    else:
        reason = error.strerror or str(error)
    return f"cannot write {path}: {reason}; {advice}"


def refusal(path: Path) -> str:
    """Return why the code in a file or folder must not be run; "" where it may be run.

    It may be run if this user or root owns it, and nobody else can write to it.  Raises OSError."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path}"
    return ""


def advise_another(flag: str, what: str = "file") -> str:
    """Return advice for a path that a flag gave: "name another file with --output"."""
    return f"name another {what} with {flag}"


def make_folder(folder: Path, advice: str) -> None:
    """Make a folder and those above it, unless it is there.

    Raises UserError, whose message ends with `advice`: what to do next."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(cannot_write(folder, error, advice)) from error


def write_whole(*contents: tuple[Path, Content], advice: str) -> None:
    """Write (path, content) pairs so that a reader never meets a half-written file.

    Each content goes to a temporary file beside its path; when all are written, they are renamed.
    After an error, such as a full disk, the old files are still there.  A link is replaced; a pipe
    or a device, such as /dev/stdout, is written to.

    Raises UserError, whose message ends with `advice`: what to do next."""
    path = Path()  # the path that an error is about
    temporaries: dict[Path, Path] = {}  # temporary file -> path
    with ExitStack() as stack:
        try:
            for path, content in contents:
                in_place = path.parent in _DEVICES or (path.exists() and not path.is_file())
                if in_place:
                    _write(content, stack.enter_context(open(path, "wb")))
                    continue
                # open, and so locked, until it is renamed
                stream = stack.enter_context(_open_beside(path))
                temporaries[Path(stream.name)] = path
                _write(content, stream)
                os.fsync(stream.fileno())
            for temporary, path in temporaries.items():
                os.replace(temporary, path)
        except OSError as error:
            raise UserError(cannot_write(path, error, advice)) from error
        finally:
            for temporary in temporaries:
                with suppress(OSError):  # a file that was renamed is not there
                    temporary.unlink()


def _write(content: Content, stream: BinaryIO) -> None:
    """Write a content to a stream; text becomes UTF-8, and what has no UTF-8 is escaped."""
    if callable(content):
        content(stream)
    elif isinstance(content, str):
        stream.write(content.encode("utf-8", "backslashreplace"))
    else:
        stream.write(content)
    stream.flush()


def _open_beside(path: Path) -> BinaryIO:
    """Return a new temporary file in the folder of `path`, open for writing.  The file is locked
    until it is closed.

    First remove temporary files that killed writers left in that folder: old ones without a
    lock."""
    for other in path.parent.glob(f".rnnt-bench-{'[0-9a-f]' * 12}.tmp"):
        with suppress(OSError), open(other, "rb") as stream:
            # While its writer has the lock, this raises an OSError, and the file stays.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The writer of a new file may not have locked it yet.
            if time.time() - other.stat().st_mtime > LEFT_SECONDS:
                other.unlink()
    new = open(path.with_name(f".rnnt-bench-{secrets.token_hex(6)}.tmp"), "xb")
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return new


class Held(Exception):
    """Raised where another process has the lock.

    The message is its process id and computer, "1234 on host", or "unknown"."""


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock file `path`, and yield its descriptor.

    A child started with ``pass_fds=(descriptor,)`` keeps the lock as long as it runs, even if its
    parent is killed.

    waiting: is called once if another process has the lock, before we wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, waiting)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Claim:
    """Hold the lock file `path` from now until `release`, or until this process ends.

    Raises Held at once if another process has the lock, and OSError if the file cannot be made."""

    def __init__(self, path: Path):
        self.path = path
        # With None it does not wait: it raises Held if another process has the lock.
        self.descriptor = _open_locked(path, waiting=None)
        with suppress(OSError):  # On a full disk the lock holds, but its holder is unknown.
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"{os.getpid()} on {platform.node()}\n".encode())

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        if self.descriptor >= 0:
            with suppress(OSError):
                self.path.unlink()  # before the release: then another process may own the file
            os.close(self.descriptor)
            self.descriptor = -1


def _open_locked(path: Path, waiting: Callable[[], None] | None) -> int:
    """Open the file `path`, made if need be, lock it, and return its descriptor.

    Where the file system has no locks, the file stays unlocked.

    waiting: see `_lock`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if not _lock(descriptor, waiting):
                return descriptor
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The last holder removed the file that we locked (a release, `make clean`): try again.
        os.close(descriptor)
        path.parent.mkdir(parents=True, exist_ok=True)


def _lock(descriptor: int, waiting: Callable[[], None] | None) -> bool:
    """Lock an open file, and return True; return False where its file system has no locks.

    waiting: is called once if another process has the lock, before we wait for it; with None, Held
    is raised instead."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip()
            raise Held(holder or "unknown") from None
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
