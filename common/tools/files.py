"""Find the files of runs that are about a model and no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, List

#: Keys of a header that make two runs the same.
IDENTITY = ("record", "name", "config", "grid", "stages", "examples", "settings")


def files(paths: Any, file_name: str) -> List[Path]:
    """Return the files of this name in, at or under `paths`."""
    every = (
        file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob(file_name)))
    )
    return list(dict.fromkeys(file for file in every if file.name == file_name))


def newest(runs: Iterable[Any]) -> List[Any]:
    """Return the newest of several runs of the same on one machine, ordered by path.

    runs: what was read of files, each with a `path`, and a `header` or None.
    """
    kept: Dict[str, Any] = {}
    for run in sorted(runs, key=lambda run: run.header.started if run.header else ""):
        same = [getattr(run.header, key, None) for key in (*IDENTITY, "machine")] if run.header else run.path
        kept[repr(same)] = run
    return sorted(kept.values(), key=lambda run: str(run.path))
