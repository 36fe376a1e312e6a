"""Find the files of runs that are about a model and no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Protocol, TypeVar

#: Keys of a header that make two runs the same.
IDENTITY = ("record", "name", "config", "grid", "stages", "examples", "settings")


class ReadRun(Protocol):
    """A run that was read of a file; header: None where it cannot be read."""

    @property
    def path(self) -> Path: ...

    @property
    def header(self) -> Any: ...


Kept = TypeVar("Kept", bound=ReadRun)


def files(paths: Any, file_name: str) -> List[Path]:
    """Return the files of this name in, at or under `paths`."""
    every = (
        file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob(file_name)))
    )
    return list(dict.fromkeys(file for file in every if file.name == file_name))


def holding(file_name: str) -> Callable[[Path], bool]:
    """Return a function that tells whether a file of this name is in, at or under a path."""
    return lambda path: bool(files([path], file_name))


def newest(runs: Iterable[Kept]) -> List[Kept]:
    """Return the newest of several runs of the same on one machine, ordered by path."""
    kept: Dict[str, Kept] = {}
    for run in sorted(runs, key=lambda run: run.header.started if run.header else ""):
        same = [getattr(run.header, key, None) for key in (*IDENTITY, "machine")] if run.header else run.path
        kept[repr(same)] = run
    return sorted(kept.values(), key=lambda run: str(run.path))
