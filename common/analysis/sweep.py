"""Read sweeps from disk: a row for each cell and implementation that was begun, like that of an ordinary run.

``read`` raises for nothing that a file holds: a sweep that cannot be read has its `reason`.
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
    """Hold the row of one implementation in one cell.  values: of the swept settings."""

    cell: int
    values: grid.Values
    row: Row


@dataclass
class Sweep:
    """Hold a sweep.

    Attributes:
        runs: by cell, then as tables rank them.
        reason: why it could not be read; "" where it was.
        earlier: how many older sweeps of the same grid and settings are left out.
    """

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
        """Return the values of each swept setting."""
        return {key: list(values) for key, values in self.header.grid.items()} if self.header else {}

    @property
    def absent(self) -> int:
        """Return the number of (cell, implementation) pairs that were not begun."""
        cells = math.prod(len(values) for values in self.grid.values())
        names = {*(self.header.names if self.header else ()), *(run.row.name for run in self.runs)}
        return cells * len(names) - len(self.runs)

    @property
    def rows(self) -> List[Row]:
        return [run.row for run in self.runs]


class Exponent(NamedTuple):
    """Hold how time grows with a swept setting: as its power `slope`, from its value `low` to `high`.

    The power is the least squares line through the logarithms of `points` medians, between which the allocator does not
    change how it takes memory.
    """

    name: str
    key: str
    scope: str
    slope: float
    low: float
    high: float
    points: int


def find(paths: Sequence[Any] = ()) -> List[Sweep]:
    """Return the sweeps in, at or under `paths` (default: ``log``)."""
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


def newest(sweeps: Iterable[Sweep]) -> List[Sweep]:
    """Return the newest of several sweeps of the same grid, settings, machine and implementations."""
    kept: Dict[str, Sweep] = {}
    for sweep in sorted(sweeps, key=lambda one: one.header.started if one.header else ""):
        same = str(sweep.path)
        if sweep.header:
            identity = (sweep.header.grid, sweep.header.settings, sweep.header.names, sweep.header.machine)
            same = repr(identity)
        sweep.earlier = kept.pop(same).earlier + 1 if same in kept else 0
        kept[same] = sweep
    return sorted(kept.values(), key=lambda sweep: str(sweep.path))


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_numeric(values: Sequence[Any]) -> bool:
    """Return whether a plot can place the values of a setting on an axis."""
    return all(is_number(value) for value in values)


def along(sweep: Sweep, key: str) -> List[SweptRun]:
    """Return the runs in which only `key` varies; every other setting has the first of its values."""
    others = {other: values[0] for other, values in sweep.grid.items() if other != key}
    return [run for run in sweep.runs if all(run.values[other] == value for other, value in others.items())]


def median_ms(row: Row) -> Optional[Tuple[str, Summary]]:
    """Return (scope, times) of a run that ended well, of the step where it was measured; None for other runs."""
    if row.status != "ok":
        return None
    return next(((scope, times) for scope in SCOPES if (times := row.ms(scope))), None)


def exponents(sweep: Sweep) -> List[Exponent]:
    """Return how the times of each implementation grow with each numeric setting, where enough values were measured."""
    result = []
    for key, values in sweep.grid.items():
        if not is_numeric(values) or min(values) <= 0:
            continue
        for (name, scope), points in _points(sweep, key).items():
            for same in _stretches(points):
                if len(same) >= FEWEST_POINTS:
                    slope, low, high = _slope(same), same[0].value, same[-1].value
                    result.append(Exponent(name, key, scope, slope, low, high, len(same)))
    return result


class _Point(NamedTuple):
    """Hold a median time in ms at one value.  faults: the median of the pages mapped in a step; None where it was not
    recorded."""

    value: float
    ms: float
    faults: Optional[float]


def _points(sweep: Sweep, key: str) -> Dict[Tuple[str, str], List[_Point]]:
    """Return (implementation, scope) -> its points, sorted by the setting."""
    points: Dict[Tuple[str, str], List[_Point]] = {}
    for scope in SCOPES:
        for run in sorted(along(sweep, key), key=lambda run: float(run.values[key])):
            times = run.row.ms(scope)
            if run.row.status == "ok" and times and times.median > 0:
                point = _Point(run.values[key], times.median, _faults(run.row, scope))
                points.setdefault((run.row.name, scope), []).append(point)
    return points


def _faults(row: Row, scope: str) -> Optional[float]:
    lines = [line for of_job in row.jobs.values() for line in of_job if isinstance(line, Sample) and not line.warmup]
    faults = [line.minor_faults for line in lines if line.scope == scope and line.minor_faults is not None]
    return median(faults) if faults else None


def _stretches(points: Sequence[_Point]) -> List[List[_Point]]:
    """Split the points where the allocator begins or stops to map memory anew in each step, which takes time of its
    own.

    There the page faults change FAULTS_JUMP times as much as the time.
    """
    stretches: List[List[_Point]] = []
    for point in points:
        before = stretches[-1][-1] if stretches else None
        if before is None or _other_regime(before, point):
            stretches.append([])
        stretches[-1].append(point)
    return stretches


def _other_regime(first: _Point, other: _Point) -> bool:
    if first.faults is None or other.faults is None:
        return False
    few, many = sorted((first, other), key=lambda point: point.faults or 0.0)
    jump = ((many.faults or 0.0) + FEW_FAULTS) / ((few.faults or 0.0) + FEW_FAULTS)
    return jump > FAULTS_JUMP * max(many.ms / few.ms, 1.0)


def _slope(points: Sequence[_Point]) -> float:
    """Return the slope of the least squares line through the logarithms."""
    pairs = [(math.log(point.value), math.log(point.ms)) for point in points]
    x_mean, y_mean = mean([x for x, _ in pairs]), mean([y for _, y in pairs])
    return sum((x - x_mean) * (y - y_mean) for x, y in pairs) / sum((x - x_mean) ** 2 for x, _ in pairs)


def growth(sweep: Sweep, of_key: Optional[str] = None) -> List[str]:
    """Return lines that say how time grows with each numeric setting, or with `of_key`: one for each scope."""
    of_scope = gathered(((each.key, each.scope), each) for each in exponents(sweep) if of_key in (None, each.key))
    lines = []
    for (key, scope), of_key_and_scope in of_scope.items():
        others = {other: values[0] for other, values in sweep.grid.items() if other != key}
        where = f" (at {grid.words(others)})" if others else ""
        slopes = ", ".join(f"{each.name} {each.slope:.2f}{_where_less(each, sweep)}" for each in of_key_and_scope)
        lines.append(f"{scope} time grows as {grid.flag(key)} to the power of{where}: {slopes}")
    return lines + _borders(sweep, of_key)


def _borders(sweep: Sweep, of_key: Optional[str]) -> List[str]:
    """Return lines that say where there is no exponent, since the allocator begins or stops to map memory anew."""
    sentences = []
    for key in (key for key, values in sweep.grid.items() if is_numeric(values) and of_key in (None, key)):
        for (name, scope), points in _points(sweep, key).items():
            for first, other in zip(points, points[1:]):
                if _other_regime(first, other):
                    between = f"{grid.flag(key)} {number(first.value)} and {number(other.value)}"
                    faults = f"{number(first.faults)} -> {number(other.faults)} page faults a step"
                    sentences.append(
                        f"{name} {scope}: no scaling exponent between {between}: the allocator maps memory in another "
                        f"way ({faults})"
                    )
    return sentences


def _where_less(exponent: Exponent, sweep: Sweep) -> str:
    """Return the range of an exponent in words; "" where it is over all values."""
    whole = exponent.points == len(sweep.grid[exponent.key])
    return "" if whole else f" ({number(exponent.low)} to {number(exponent.high)})"
