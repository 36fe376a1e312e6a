"""Sweeps on disk -> rows: one for each cell and implementation that was begun, as an ordinary run's (see measured.py).

``read`` never raises for what is in a file: a sweep that cannot be read says so in its `reason`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from common.errors import UserError
from common.results import ranking, records
from common.results.measured import fill
from common.results.statistics import mean
from common.results.summary import Row, new_row
from common.results.tables import rank

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
SCOPES = ("step", "loss")
FEWEST_POINTS = 3  # of a scaling exponent: two points say nothing of whether it is one


class SweptRun(NamedTuple):
    """One implementation in one cell: its row and the records that the row is of.  values: of the swept settings."""

    cell: int
    values: Dict[str, Any]
    row: Row
    records: List[records.Record]


@dataclass
class Sweep:
    """grid: the values of each swept setting; runs: by cell, then as tables rank them; reason: why it could not be
    read, else empty; earlier: sweeps of the same that it stands for."""

    path: Path
    header: Dict[str, Any] = field(default_factory=dict)
    grid: Dict[str, List[Any]] = field(default_factory=dict)
    runs: List[SweptRun] = field(default_factory=list)
    reason: str = ""
    earlier: int = 0

    @property
    def name(self) -> str:
        return self.path.resolve().parent.name

    @property
    def absent(self) -> int:
        """Pairs of a cell and an implementation that were not begun."""
        cells = math.prod(len(values) for values in self.grid.values())
        names = {*(self.header.get("names") or ()), *(run.row["name"] for run in self.runs)}
        return cells * len(names) - len(self.runs)

    @property
    def rows(self) -> List[Row]:
        return [run.row for run in self.runs]


class Exponent(NamedTuple):
    """Time grows as the swept setting to the power `slope`, between its values `low` and `high`, by least squares over
    the logarithms of `points` medians."""

    name: str
    key: str
    scope: str
    slope: float
    low: float
    high: float
    points: int


def find(paths: Sequence[Any] = (), all_runs: bool = False) -> List[Sweep]:
    """The sweeps in, at or under `paths` (default: ``log``), of several of the same grid, settings, machine and
    implementations only the newest, unless `all_runs`."""
    found: Dict[Path, Sweep] = {}
    for path in [Path(path) for path in paths] or [Path("log")]:
        for file in _files(path):
            found[file] = read(file)
    return list(found.values()) if all_runs else _newest(found.values())


def _files(path: Path) -> Iterator[Path]:
    if path.is_file() and path.name == records.SWEEP_FILE_NAME:
        yield path
    for folder, below, names in os.walk(path):
        below.sort()
        if records.SWEEP_FILE_NAME in names:
            yield Path(folder) / records.SWEEP_FILE_NAME


def read(path: Path) -> Sweep:
    try:
        return _read(path)
    except UserError as error:
        return Sweep(path, reason=str(error))
    except MALFORMED as error:
        said = f"{type(error).__name__}: {error}"
        return Sweep(path, reason=f"{path}: a record is not as this suite writes it ({said}); delete the folder")


def _read(path: Path) -> Sweep:
    found = records.read(path)
    if not found or found[0]["record"] != "sweep":
        raise UserError(f"{path}: does not begin with a sweep record; delete the folder and run again")
    grid = {str(key): list(values) for key, values in found[0]["grid"].items()}
    by_run: Dict[Tuple[int, str], List[records.Record]] = {}
    for record in found[1:]:
        by_run.setdefault((record["cell"], record["implementation"]), []).append(record)
    runs = []
    for (cell, _), lines in by_run.items():
        row = new_row(path.parent, path.parent.resolve().name)
        fill(row, lines, path.parent)
        values = {key: lines[0]["values"][key] for key in grid}
        row["sweep"] = {"id": str(found[0]["sweep_id"]), "cell": cell, **values}
        runs.append(SweptRun(cell, values, row, lines))
    for cell in {run.cell for run in runs}:
        ranking.fill([run.row for run in runs if run.cell == cell])
    return Sweep(path, found[0], grid, sorted(runs, key=lambda run: (run.cell, rank(run.row))))


def _newest(found: Iterable[Sweep]) -> List[Sweep]:
    newest: Dict[str, Sweep] = {}
    for sweep in sorted(found, key=lambda one: str(one.header.get("started") or "")):
        keys = ("grid", "settings", "names", "machine")
        same = json.dumps([sweep.header.get(key) for key in keys] if sweep.header else str(sweep.path), default=str)
        if same in newest:
            sweep.earlier = newest.pop(same).earlier + 1
        newest[same] = sweep
    return sorted(newest.values(), key=lambda sweep: str(sweep.path))


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_numeric(values: Sequence[Any]) -> bool:
    """Is it a setting that has an order and distances?"""
    return all(is_number(value) for value in values)


def along(sweep: Sweep, key: str) -> List[SweptRun]:
    """The runs in which only `key` varies: every other setting has the first of its values."""
    others = {other: values[0] for other, values in sweep.grid.items() if other != key}
    return [run for run in sweep.runs if all(run.values[other] == value for other, value in others.items())]


def median_ms(row: Row) -> Optional[Tuple[str, Dict[str, float]]]:
    """(scope, times) of a run that ended well: the step's where it was measured."""
    if row["status"] != "ok":
        return None
    return next(
        ((scope, row[f"{scope}_ms"]) for scope in SCOPES if (row[f"{scope}_ms"] or {}).get("median", 0) > 0),
        None,
    )


def exponents(sweep: Sweep) -> List[Exponent]:
    """How the times of each implementation grow with each numeric setting, where enough of them were measured."""
    found = []
    for key, values in sweep.grid.items():
        if not is_numeric(values) or min(values) <= 0:
            continue
        points: Dict[Tuple[str, str], List[Tuple[float, float]]] = {}
        for scope in SCOPES:
            for run in along(sweep, key):
                median = (run.row[f"{scope}_ms"] or {}).get("median", 0)
                if run.row["status"] == "ok" and median > 0:
                    points.setdefault((run.row["name"], scope), []).append((run.values[key], median))
        for (name, scope), pairs in points.items():
            if len(pairs) >= FEWEST_POINTS:
                ends = [x for x, _ in pairs]
                found.append(Exponent(name, key, scope, _slope(pairs), min(ends), max(ends), len(pairs)))
    return found


def _slope(pairs: Sequence[Tuple[float, float]]) -> float:
    """Of the least squares line through the logarithms."""
    pairs = [(math.log(x), math.log(y)) for x, y in pairs]
    x_mean, y_mean = mean([x for x, _ in pairs]), mean([y for _, y in pairs])
    return sum((x - x_mean) * (y - y_mean) for x, y in pairs) / sum((x - x_mean) ** 2 for x, _ in pairs)
