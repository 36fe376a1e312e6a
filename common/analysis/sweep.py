"""Gather the rows of a sweep: ordinary runs whose headers name the settings that vary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from common.analysis import groups, standing
from common.analysis.row import Row
from common.core.grid import flag
from common.core.setting import worded
from common.core.text import gathered, plain


@dataclass
class Sweep:
    """Hold the rows of a sweep, by cell, then as tables rank them.  grid: the values of each swept setting."""

    grid: Dict[str, List[Any]]
    rows: List[Row]

    @property
    def name(self) -> str:
        return "sweep-" + "_".join(map(flag, self.grid))

    @property
    def heading(self) -> str:
        """Return one line: the grid, and what all cells have in common."""
        axes = " x ".join(f"{flag(key)} {', '.join(map(worded, values))}" for key, values in self.grid.items())
        varied = dict.fromkeys(self.grid)
        shared = [replace(row, configuration={**row.configuration, **varied}) for row in self.rows]
        return plain(f"sweep over {axes}; {groups.heading(shared)}")

    def cells(self) -> List[Tuple[Mapping[str, Any], List[Row]]]:
        """Return (values, rows) of each cell."""
        by_cell = gathered((_place(row, self.grid), row) for row in self.rows)
        return [(rows[0].header.values, rows) for rows in by_cell.values()]

    def along(self, key: str) -> List[Row]:
        """Return the rows in which only `key` varies; every other setting has the first of its values."""
        others = {other: values[0] for other, values in self.grid.items() if other != key}
        return [row for row in self.rows if all(row.header.values[other] == value for other, value in others.items())]


def sweeps(rows: Sequence[Row]) -> List[Sweep]:
    """Return the sweeps of rows with swept settings: those of equal keys whose other settings agree."""
    result = []
    for group in groups.grouped(rows, lambda group, row: _without_swept(group[0]) == _without_swept(row)):
        axes: Dict[str, List[Any]] = {
            key: list(dict.fromkeys(row.header.values[key] for row in group)) for key in group[0].header.values
        }
        axes = {key: sorted(values) if is_numeric(values) else values for key, values in axes.items()}
        made = Sweep(axes, sorted(group, key=lambda row: _place(row, axes)))
        for _, of_cell in made.cells():
            standing.rank_times(of_cell)
            groups.label(of_cell)
        made.rows.sort(key=lambda row: (_place(row, axes), groups.rank(row)))
        result.append(made)
    return result


def _without_swept(row: Row) -> Any:
    """Return what rows of one sweep share: its keys, and the other settings of the run."""
    swept = row.header.values
    return (
        list(swept),
        {key: value for key, value in row.header.settings.items() if key not in swept},
        row.header.machine,
    )


def _place(row: Row, axes: Mapping[str, Sequence[Any]]) -> Tuple[int, ...]:
    return tuple(values.index(row.header.values[key]) for key, values in axes.items())


def is_numeric(values: Sequence[Any]) -> bool:
    """Return whether a plot can place the values of a setting on an axis."""
    return all(type(value) in (int, float) for value in values)
