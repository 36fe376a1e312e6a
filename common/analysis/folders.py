"""Find the folders of runs, and the files of records in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List

from common.records import schema
from common.traces.files import is_trace


def run_folders(top: Path) -> Iterator[Path]:
    """Yield the folders at or under `top` that hold records of a run or traces, then those that this user may not
    read."""
    closed: List[Path] = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):  # and none that is gone meanwhile
            closed.append(Path(error.filename))

    for folder, below, names in os.walk(top, onerror=note):
        below.sort()
        if schema.TOOL_FILE_NAME in names:
            below.clear()  # its traces are of its own jobs
            continue
        if schema.FILE_NAME in names or any(map(is_trace, names)):
            yield Path(folder)
    yield from closed


def files_named(name: str, path: Path) -> List[Path]:
    """Return the files of this name at or under `path`, sorted; `path` itself where it is such a file."""
    if os.path.isfile(path):
        return [path] if path.name == name else []
    return sorted(Path(folder) / name for folder, _, names in os.walk(path) if name in names)
