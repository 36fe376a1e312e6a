"""Say where the suite lies and what is wrong with a path that a user gives; read, write and lock
files.

The kernel releases a lock when its holder dies; the package filelock cannot be used: set-up takes a
lock before any package is installed, and its children inherit it.
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
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from rnnt_bench.core.errors import UserError

#: The folder of the package rnnt_bench: common/ in a checkout.
PACKAGE = Path(__file__).resolve().parents[1]
#: Whether it is installed: then the scripts of losses lie within it, and the running Python alone
#: measures.
INSTALLED = (PACKAGE / "scripts").is_dir()
#: The folder that holds the scripts and what they read.
ROOT = PACKAGE / "scripts" if INSTALLED else PACKAGE.parent
_CACHE_HOME = os.environ.get("XDG_CACHE_HOME", "")
#: The user's cache.  By its specification a relative variable is as if it were not set.
_USER_CACHE = (
    Path(_CACHE_HOME if os.path.isabs(_CACHE_HOME) else os.path.expanduser("~/.cache"))
    / "rnnt-bench"
)
#: Where compiled losses are kept.
CACHE = _USER_CACHE / "losses"
#: Where kernels are kept, and results without --log-dir: an installed suite writes nothing beside
#: itself.
BUILD = _USER_CACHE if INSTALLED else ROOT / ".build"
LOG = Path("log") if INSTALLED else ROOT / "log"
#: Folders of the package whose code changes no measurement, and that of the adapters, which a job
#: notes.
_NOT_MEASURING = {"analysis", "cli", "present", "show", "scripts"}


def digest(*paths: Path) -> str:
    """Return a digest of the bytes of files.  Raises OSError."""
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


@cache
def code() -> str:
    """Return a digest of the suite's code that measures, but for the adapters'."""
    modules = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in _NOT_MEASURING
    ]
    return digest(*sorted([*modules, *(ROOT / "fused_transducer" / "csrc").glob("*")]))


def _why_not(kind: str, fits: Callable[[int], bool], needed: int, path: str | Path) -> str:
    """Return why a path is none of the kind or cannot be read ("no such file", "Permission
    denied"); "" if it can."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if os.path.islink(path) else f"no such {kind}"
    # too long, a loop of links, a folder above it that is closed; a zero byte
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    if not fits(mode):
        return f"not a {kind}"
    return "" if os.access(path, needed) else os.strerror(errno.EACCES)


not_a_file = partial(_why_not, "file", stat.S_ISREG, os.R_OK)
not_a_folder = partial(_why_not, "folder", stat.S_ISDIR, os.R_OK | os.X_OK)
not_there = partial(
    _why_not, "file or folder", lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode), os.R_OK
)


_DEVICES = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))
#: The content of a file: text, bytes, or a function that writes to the stream that it is given.
Content = str | bytes | Callable[[BinaryIO], None]
#: Bytes of the largest file that is held in memory as a whole.
LARGEST = 2**30

#: The writer of a file that nobody holds counts as killed when the file is older.
LEFT_SECONDS = 60.0

#: Folder for temporary files of this process, whose owner removes it, however we end; None: the
#: system's.
scratch: Path | None = None


def scratch_folder() -> TemporaryDirectory[str]:
    """Return a temporary folder, which a `with` block removes at its end."""
    return TemporaryDirectory(dir=scratch)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to read its bytes.  Raises OSError, also for a pipe or a device, which
    may never end."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    return stream


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file.  Raises OSError as `open_file` does, and for more than
    `largest` bytes."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise OSError(
                errno.EFBIG, f"{size:,} bytes, more than the {largest:,} that are read", str(path)
            )
        return stream.read() or b""


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8 of at most `largest` bytes.  Raises UserError."""
    reason = not_a_file(path)
    try:
        if not reason:
            return read_bytes(path, largest).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise UserError(f"cannot read {path}: {reason}")


def cannot_write(path: Path, error: OSError, advice: str) -> str:
    """Return the error message for a file that cannot be written.  advice: what to do next."""
    reason = (
        "it is a link, or below one that leads nowhere"
        if error.errno == errno.ELOOP
        else error.strerror or error
    )
    return f"cannot write {path}: {reason}; {advice}"


def refusal(path: Path) -> str:
    """Return why what lies in a file or folder must not be run, as others may have written it; ""
    where it may."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {status.st_uid})"
    return f"others can write to {path}" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def another(flag: str, what: str = "file") -> str:
    """Return the advice where a flag names what is written."""
    return f"name another {what} with {flag}"


def make_folder(folder: Path, advice: str) -> None:
    """Make a folder and those above it, unless it is there.  Raises UserError.  advice: see
    `cannot_write`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(cannot_write(folder, error, advice)) from error


def write_whole(advice: str, *contents: tuple[Path, Content]) -> None:
    """Write each (path, content) to a new file beside it, then rename all: a reader, or a full
    disk, meets the old ones or the new.  A link is replaced; a pipe or /dev/stdout is written to.
    Raises UserError with `advice`."""
    path = Path()
    with ExitStack() as stack:
        new: list[tuple[Path, Path]] = []
        try:
            for path, content in contents:
                in_place = path.parent in _DEVICES or (path.exists() and not path.is_file())
                stream = stack.enter_context(open(path, "wb") if in_place else _beside(path))
                new += [] if in_place else [(Path(stream.name), path)]
                if callable(content):
                    content(stream)
                else:
                    stream.write(
                        content.encode("utf-8", "backslashreplace")
                        if isinstance(content, str)
                        else content
                    )
                stream.flush()
                if not in_place:
                    os.fsync(stream.fileno())
            for temporary, path in new:
                os.replace(temporary, path)
        except OSError as error:
            raise UserError(cannot_write(path, error, advice)) from error
        finally:
            for temporary, _ in new:
                with suppress(OSError):  # it was renamed
                    temporary.unlink()


def _beside(path: Path) -> BinaryIO:
    """Open a new file beside `path`, locked as long as it is open; remove those whose writers were
    killed."""
    for other in path.parent.glob(f".rnnt-bench-{'[0-9a-f]' * 12}.tmp"):
        with suppress(OSError), open(other, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A newer one may be about to be locked.
            if time.time() - other.stat().st_mtime > LEFT_SECONDS:
                other.unlink()
    stream = open(path.with_name(f".rnnt-bench-{secrets.token_hex(6)}.tmp"), "xb")
    with suppress(OSError):  # no locks here
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return stream


class Held(Exception):
    """Raised where another process has the lock; the message is its process id and computer, or
    "unknown"."""


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock file `path`; call `waiting` once if another process has it.  Yields the
    descriptor.

    A child started with ``pass_fds=(descriptor,)`` keeps the lock as long as it runs, even if its
    parent is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _taken(path, waiting)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Claim:
    """Hold the lock file `path` until `release`, which removes it, or until this process ends.
    Does not wait.

    Raises Held, and OSError if the file cannot be made."""

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


def _taken(path: Path, waiting: Callable[[], None] | None) -> int:
    """Lock the file, where the file system has locks, and return its descriptor.  Raises Held if
    `waiting` is None."""
    while True:
        # A Claim writes its holder into the file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise Held(
                        os.read(descriptor, 200).decode("utf-8", "replace").strip() or "unknown"
                    ) from None
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
        # its holder removed the file (a release, `make clean`): take the new one
        os.close(descriptor)
        path.parent.mkdir(parents=True, exist_ok=True)
