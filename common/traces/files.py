"""Find, sort and remove the trace files of a folder."""

from __future__ import annotations

import gzip
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, List, Tuple

from common.core.files import open_file

HEAD = 1 << 16  # bytes of a file that are searched for the list of events
_NAME = re.compile(r"(?P<worker>.*?)(?:\.(?P<time>\d+))?\.pt\.trace\.json(\.gz)?$", re.DOTALL)


def is_trace(path: Path) -> bool:
    """Return whether a file is a chrome trace, packed or not: by its name, or by how it begins."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    if _NAME.match(path.name):
        return True
    with suppress(OSError, EOFError, zlib.error), open_file(path) as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        unpacked: Any = gzip.open(stream) if packed else stream
        return b'"traceEvents"' in unpacked.read(HEAD)
    return False


def trace_files(folder: Path) -> List[Path]:
    """Return the trace files directly in a folder, sorted by the time in their names."""
    return sorted(filter(is_trace, folder.iterdir()), key=order)


def order(path: Path) -> Tuple[int, int, str]:
    """Return a key that sorts the traces of a worker by the time in the name, then by name.

    The unit of that time depends on the torch version, so more digits are later.
    """
    match = _NAME.match(path.name)
    time = (match["time"] if match else None) or ""
    return (len(time), int(time or 0), path.name)


def worker(path: Path) -> str:
    """Return the part of the file name before its time: by default host and process, which differ for each rank."""
    match = _NAME.match(path.name)
    return match["worker"] if match else path.name


def perhaps_packed(path: Path) -> Path:
    """Return the path of the trace, or of the .gz file that has replaced it."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def remove(folder: Path) -> None:
    """Delete all files, complete or not, that an earlier attempt of the trace pass left in a folder."""
    for path in [*folder.glob("*.pt.trace.json*"), folder / f"{folder.name}.txt"]:
        path.unlink(missing_ok=True)
