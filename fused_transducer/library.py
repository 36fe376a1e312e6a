"""Finds the compiled C++ code: beside the package, or else in a cache, where it is compiled first.

A library runs its code when it is loaded, so one that others can have written is not: neither it nor its folder may
belong to another user, or be open to others for writing.  Where there is no such folder, it is compiled for this
process alone.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator, Optional

from fused_transducer import compiling


def cache_folder() -> Optional[Path]:
    """Return $FUSED_TRANSDUCER_CACHE, or the folder fused_transducer of the user's cache; None without a home."""
    given = os.environ.get("FUSED_TRANSDUCER_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # its specification: empty or relative is as if it were not set
        base = os.path.expanduser("~/.cache")
    return Path(base) / "fused_transducer" if os.path.isabs(base) else None


def refusal(path: Path) -> str:
    """Return why a file or folder must not be trusted, or ""."""
    status = path.stat()
    if not hasattr(os, "getuid"):
        return ""
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path} (chmod go-w mends that)"
    return ""


def _is_usable(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not refusal(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from compiling meanwhile; where files cannot be locked, they do the same work twice."""
    try:
        import fcntl

        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compiled_in(folder: Path) -> Path:
    """Return the library in a cache, compiled first where it is not there.  Raises BuildError, OSError."""
    path = folder / compiling.library_name()
    if not _is_usable(path):
        with _locked(folder):
            if not _is_usable(path):
                compiling.build(path)
    return path


def _why_no_cache(folder: Optional[Path]) -> str:
    """Return why a folder cannot be the cache, or "" for one that can, which is there then."""
    if folder is None:
        return "there is no home directory"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.environ.get("FUSED_TRANSDUCER_CACHE"):  # else it may be a folder with other things
            with suppress(PermissionError):  # of root, say, who has put the library there
                folder.chmod(0o700)
        return refusal(folder)
    except OSError as error:
        return str(error)


@contextmanager
def located() -> Iterator[Path]:
    """Yield the path of the library, which need not be there later.  Raises BuildError, OSError."""
    installed = Path(__file__).parent / compiling.library_name()
    if installed.is_file():
        yield installed
        return
    folder = cache_folder()
    reason = _why_no_cache(folder)
    path = None
    if folder is not None and not reason:
        try:
            path = _compiled_in(folder)
        except OSError as error:  # a full disk, say
            reason = str(error)
    if path is not None:
        yield path
        return
    warnings.warn(
        f"fused_transducer: no cache for the compiled code: {reason}; it is compiled for this process alone. Set "
        "FUSED_TRANSDUCER_CACHE to a folder of your own, to which nobody else can write",
        stacklevel=4,
    )
    with tempfile.TemporaryDirectory(prefix="fused_transducer-") as private:
        yield _compiled_in(Path(private))
