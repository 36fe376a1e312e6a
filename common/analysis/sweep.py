"""Sweeps on disk -> rows: one for each cell and implementation that was begun, as an ordinary run's (see measured.py).

``read`` never raises for what is in a file: a sweep that cannot be read says so in its `reason`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import measured, ranking
from common.analysis.groups import rank, short_label
from common.analysis.row import SCOPES, Row
from common.core import grid
from common.core.errors import UserError
from common.core.statistics import mean
from common.core.text import number, plain
from common.records import schema, store
from common.records.schema import SweepHeader

FEWEST_POINTS = 3  # of a scaling exponent: two points say nothing of whether it is one


class SweptRun(NamedTuple):
    """The row of one implementation in one cell.  values: of the swept settings."""

    cell: int
    values: Dict[str, Any]
    row: Row


@dataclass
class Sweep:
    """runs: by cell, then as tables rank them; reason: why it could not be read, else empty; earlier: sweeps of the
    same that it stands for."""

    path: Path
    header: Optional[SweepHeader] = None
    runs: List[SweptRun] = field(default_factory=list)
    reason: str = ""
    earlier: int = 0

    @property
    def name(self) -> str:
        return self.path.resolve().parent.name

    @property
    def grid(self) -> Dict[str, List[Any]]:
        """The values of each swept setting."""
        return {key: list(values) for key, values in self.header.grid.items()} if self.header else {}

    @property
    def absent(self) -> int:
        """Pairs of a cell and an implementation that were not begun."""
        cells = math.prod(len(values) for values in self.grid.values())
        names = {*(self.header.names if self.header else ()), *(run.row.name for run in self.runs)}
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


def find(paths: Sequence[Any] = ()) -> List[Sweep]:
    """The sweeps in, at or under `paths` (default: ``log``)."""
    files = [file for path in paths or ["log"] for file in _files(Path(path))]
    return [read(file) for file in dict.fromkeys(files)]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file() and path.name == schema.SWEEP_FILE_NAME:
        yield path
    for folder, below, names in os.walk(path):
        below.sort()
        if schema.SWEEP_FILE_NAME in names:
            yield Path(folder) / schema.SWEEP_FILE_NAME


def read(path: Path) -> Sweep:
    try:
        header, records = store.read_sweep(path)
    except UserError as error:
        return Sweep(path, reason=str(error))
    runs = []
    for (cell, _), lines in records.items():
        row = measured.row(lines, path.parent, path.name, traces=False)
        row.label = short_label(plain(row.name) or "(no name)")
        values = {key: row.header.values[key] for key in header.grid}
        row.sweep = {"id": header.sweep_id, "cell": cell, **values}
        runs.append(SweptRun(cell, values, row))
    for cell in {run.cell for run in runs}:
        ranking.rank_times([run.row for run in runs if run.cell == cell])
    return Sweep(path, header, sorted(runs, key=lambda run: (run.cell, rank(run.row))))


def newest(found: Iterable[Sweep]) -> List[Sweep]:
    """Of several sweeps of the same grid, settings, machine and implementations the newest."""
    kept: Dict[str, Sweep] = {}
    for sweep in sorted(found, key=lambda one: one.header.started if one.header else ""):
        same = str(sweep.path)
        if sweep.header:
            about = (sweep.header.grid, sweep.header.settings, sweep.header.names, sweep.header.machine)
            same = repr(about)
        sweep.earlier = kept.pop(same).earlier + 1 if same in kept else 0
        kept[same] = sweep
    return sorted(kept.values(), key=lambda sweep: str(sweep.path))


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
    if row.status != "ok":
        return None
    return next(((scope, times) for scope in SCOPES if (times := row.ms(scope))), None)


def exponents(sweep: Sweep) -> List[Exponent]:
    """How the times of each implementation grow with each numeric setting, where enough of them were measured."""
    found = []
    for key, values in sweep.grid.items():
        if not is_numeric(values) or min(values) <= 0:
            continue
        points: Dict[Tuple[str, str], List[Tuple[float, float]]] = {}
        for scope in SCOPES:
            for run in along(sweep, key):
                median = (run.row.ms(scope) or {}).get("median", 0)
                if run.row.status == "ok" and median > 0:
                    points.setdefault((run.row.name, scope), []).append((run.values[key], median))
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


def growth(sweep: Sweep, of_key: Optional[str] = None) -> List[str]:
    """How time grows with each numeric setting, or `of_key`, one line for each scope."""
    by_scope: Dict[Tuple[str, str], List[Exponent]] = {}
    for one in exponents(sweep):
        if of_key in (None, one.key):
            by_scope.setdefault((one.key, one.scope), []).append(one)
    lines = []
    for (key, scope), found in by_scope.items():
        others = {other: values[0] for other, values in sweep.grid.items() if other != key}
        where = f" (at {grid.words(others)})" if others else ""
        slopes = ", ".join(f"{one.name} {one.slope:.2f}{_where_less(one, sweep)}" for one in found)
        lines.append(f"{scope} time grows as {grid.flag(key)} to the power of{where}: {slopes}")
    return lines


def _where_less(one: Exponent, sweep: Sweep) -> str:
    """The range of an exponent that is not of all values."""
    whole = one.points == len(sweep.grid[one.key])
    return "" if whole else f" ({number(one.low)} to {number(one.high)})"
