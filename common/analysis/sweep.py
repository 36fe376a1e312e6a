"""Sweeps on disk -> rows: one for each cell and implementation that was begun, as an ordinary run's (see measured.py).

``read`` never raises for what is in a file: a sweep that cannot be read says so in its `reason`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import measured, ranking
from common.analysis.folders import files_named
from common.analysis.groups import give_looks, rank, short_label
from common.analysis.row import SCOPES, Row
from common.core import grid
from common.core.errors import UserError
from common.core.statistics import Summary, mean, median
from common.core.text import gathered, number, plain
from common.records import schema, store
from common.records.schema import Sample, SweepHeader

FEWEST_POINTS = 3  # of a scaling exponent: two points say nothing of whether it is one
FAULTS_JUMP, FEW_FAULTS = 10.0, 64.0  # see _stretches; so many more or fewer are no other way to take memory


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
    the logarithms of `points` medians, all with the same way to take memory."""

    name: str
    key: str
    scope: str
    slope: float
    low: float
    high: float
    points: int


def find(paths: Sequence[Any] = ()) -> List[Sweep]:
    """The sweeps in, at or under `paths` (default: ``log``)."""
    files = [file for path in paths or ["log"] for file in files_named(schema.SWEEP_FILE_NAME, Path(path))]
    return [read(file) for file in dict.fromkeys(files)]


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
    give_looks([run.row for run in runs])
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


def median_ms(row: Row) -> Optional[Tuple[str, Summary]]:
    """Return (scope, times) of a run that ended well, those of the step where it was measured; else None."""
    if row.status != "ok":
        return None
    return next(((scope, times) for scope in SCOPES if (times := row.ms(scope))), None)


def exponents(sweep: Sweep) -> List[Exponent]:
    """How the times of each implementation grow with each numeric setting, where enough of them were measured."""
    found = []
    for key, values in sweep.grid.items():
        if not is_numeric(values) or min(values) <= 0:
            continue
        for (name, scope), points in _points(sweep, key).items():
            for same in _stretches(points):
                if len(same) >= FEWEST_POINTS:
                    slope, low, high = _slope(same), same[0].value, same[-1].value
                    found.append(Exponent(name, key, scope, slope, low, high, len(same)))
    return found


class _Point(NamedTuple):
    """faults: pages that the system mapped within a step, the median; None where it was not recorded."""

    value: float
    ms: float
    faults: Optional[float]


def _points(sweep: Sweep, key: str) -> Dict[Tuple[str, str], List[_Point]]:
    """Of each implementation and scope, by value."""
    found: Dict[Tuple[str, str], List[_Point]] = {}
    for scope in SCOPES:
        for run in sorted(along(sweep, key), key=lambda run: float(run.values[key])):
            times = run.row.ms(scope)
            if run.row.status == "ok" and times and times.median > 0:
                point = _Point(run.values[key], times.median, _faults(run.row, scope))
                found.setdefault((run.row.name, scope), []).append(point)
    return found


def _faults(row: Row, scope: str) -> Optional[float]:
    lines = [line for of_job in row.jobs.values() for line in of_job if isinstance(line, Sample) and not line.warmup]
    found = [line.minor_faults for line in lines if line.scope == scope and line.minor_faults is not None]
    return median(found) if found else None


def _stretches(points: Sequence[_Point]) -> List[List[_Point]]:
    """Parted where the allocator begins or ends to map memory anew in each step, which takes time of its own: there the
    faults change FAULTS_JUMP times as much as the time."""
    found: List[List[_Point]] = []
    for point in points:
        before = found[-1][-1] if found else None
        if before is None or _other_regime(before, point):
            found.append([])
        found[-1].append(point)
    return found


def _other_regime(one: _Point, other: _Point) -> bool:
    if one.faults is None or other.faults is None:
        return False
    few, many = sorted((one, other), key=lambda point: point.faults or 0.0)
    jump = ((many.faults or 0.0) + FEW_FAULTS) / ((few.faults or 0.0) + FEW_FAULTS)
    return jump > FAULTS_JUMP * max(many.ms / few.ms, 1.0)


def _slope(points: Sequence[_Point]) -> float:
    """Of the least squares line through the logarithms."""
    pairs = [(math.log(point.value), math.log(point.ms)) for point in points]
    x_mean, y_mean = mean([x for x, _ in pairs]), mean([y for _, y in pairs])
    return sum((x - x_mean) * (y - y_mean) for x, y in pairs) / sum((x - x_mean) ** 2 for x, _ in pairs)


def growth(sweep: Sweep, of_key: Optional[str] = None) -> List[str]:
    """How time grows with each numeric setting, or `of_key`, one line for each scope."""
    of_scope = gathered(((one.key, one.scope), one) for one in exponents(sweep) if of_key in (None, one.key))
    lines = []
    for (key, scope), found in of_scope.items():
        others = {other: values[0] for other, values in sweep.grid.items() if other != key}
        where = f" (at {grid.words(others)})" if others else ""
        slopes = ", ".join(f"{one.name} {one.slope:.2f}{_where_less(one, sweep)}" for one in found)
        lines.append(f"{scope} time grows as {grid.flag(key)} to the power of{where}: {slopes}")
    return lines + _borders(sweep, of_key)


def _borders(sweep: Sweep, of_key: Optional[str]) -> List[str]:
    """Where no power is given, since memory is taken in another way on the other side."""
    found = []
    for key in (key for key, values in sweep.grid.items() if is_numeric(values) and of_key in (None, key)):
        for (name, scope), points in _points(sweep, key).items():
            for one, other in zip(points, points[1:]):
                if _other_regime(one, other):
                    between = f"{grid.flag(key)} {number(one.value)} and {number(other.value)}"
                    faults = f"{number(one.faults)} and {number(other.faults)} page faults a step"
                    found.append(
                        f"{name} {scope}: no power across {between}: memory is taken in another way ({faults})"
                    )
    return found


def _where_less(one: Exponent, sweep: Sweep) -> str:
    """The range of an exponent that is not of all values."""
    whole = one.points == len(sweep.grid[one.key])
    return "" if whole else f" ({number(one.low)} to {number(one.high)})"
