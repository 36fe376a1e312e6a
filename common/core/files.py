"""Reads and writes files whole, and words the error for a file that cannot be written."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Callable, List, Tuple, Union

from common.core.errors import UserError
from common.core.paths import not_a_file

_DEVICES = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))
#: The content of a file: text, bytes, or a function that writes to the stream that it is given.
Content = Union[str, bytes, Callable[[BinaryIO], None]]
#: Bytes of the largest file that is held in memory as a whole.
LARGEST = 2**30

_scratch: List[Path] = []


def keep_scratch_in(folder: Path) -> None:
    """Put the scratch folders of this process below `folder` from now on.  Its owner removes it, however we end."""
    _scratch[:] = [folder]


def scratch_folder() -> TemporaryDirectory[str]:
    """Return a temporary folder, which a `with` block removes at its end."""
    return TemporaryDirectory(dir=_scratch[0] if _scratch else None)


def open_file(path: Union[str, Path]) -> BinaryIO:
    """Open a regular file to read its bytes, without waiting for a writer.  Raises OSError where it cannot be opened,
    and for a pipe, a socket or a device, which may never end."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    return stream


def read_bytes(path: Union[str, Path], largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file.  Raises OSError as `open_file` does, and for more than `largest` bytes."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than the {largest:,} that are read", str(path))
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
    reason = "it is a link, or below one that leads nowhere" if error.errno == errno.ELOOP else error.strerror or error
    return f"cannot write {path}: {reason}; {advice}"


def another(flag: str, what: str = "file") -> str:
    """Return the advice where a flag names what is written."""
    return f"name another {what} with {flag}"


def make_folder(folder: Path, advice: str) -> None:
    """Make a folder and those above it, unless it is there.  Raises UserError.  advice: see `cannot_write`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(cannot_write(folder, error, advice)) from error


def write_whole(advice: str, *contents: Tuple[Path, Content]) -> None:
    """Write each (path, content) in order to a new file beside it, then rename all.

    So a reader, or a full disk, meets the old files or the new ones.  A link is replaced; a pipe or /dev/stdout is
    written to.  Raises UserError.  advice: see `cannot_write`."""
    new: List[Tuple[Path, Path]] = []
    path = Path()
    try:
        for path, content in contents:
            if path.parent in _DEVICES or (path.exists() and not path.is_file()):
                with open(path, "wb") as stream:
                    _write(stream, content)
                continue
            new.append((path.parent / f".{secrets.token_hex(6)}.tmp", path))
            with open(new[-1][0], "xb") as stream:
                _write(stream, content)
                stream.flush()
                os.fsync(stream.fileno())
        for temporary, path in new:
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(cannot_write(path, error, advice)) from error
    finally:
        for temporary, _ in new:
            with suppress(OSError):  # it was renamed, or never made
                temporary.unlink()


def _write(stream: BinaryIO, content: Content) -> None:
    if callable(content):
        content(stream)
    else:
        stream.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
