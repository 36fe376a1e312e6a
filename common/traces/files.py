"""The files of traces in a folder: their names, their order, and what the trace pass leaves beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Tuple

#: What the trace pass writes on CUDA, if asked.
MEMORY_SNAPSHOT = "memory_snapshot.pickle"
_NAME = re.compile(r"(?P<worker>.*?)(?:\.(?P<time>\d+))?\.pt\.trace\.json(\.gz)?$", re.DOTALL)


def is_trace(name: str) -> bool:
    return _NAME.match(name) is not None


def trace_files(folder: Path) -> List[Path]:
    """The trace files directly in a folder, by the time in their names."""
    return sorted((path for path in folder.iterdir() if is_trace(path.name) and path.is_file()), key=order)


def order(path: Path) -> Tuple[int, int, str]:
    """Sorts the windows of a worker: by the time in the name (its unit depends on the torch version), then by name."""
    found = _NAME.match(path.name)
    time = (found["time"] if found else None) or ""
    return (len(time), int(time or 0), path.name)


def worker(path: Path) -> str:
    """The part of the file name before its time: host and process by default, one for each rank."""
    found = _NAME.match(path.name)
    return found["worker"] if found else path.name


def perhaps_packed(path: Path) -> Path:
    """The trace itself, or what gzip made of it since."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def remove(folder: Path) -> None:
    """What an attempt of the trace pass left in the folder of a run, whole or in part."""
    for path in [*folder.glob("*.pt.trace.json*"), folder / MEMORY_SNAPSHOT, folder / f"{folder.name}.txt"]:
        path.unlink(missing_ok=True)
