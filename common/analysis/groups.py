"""Group rows that measured the same, order and label them, and head each group with what its rows
have in common.

Rows measured the same if their settings, machine and shape file agree. What a row does not know
sets it apart from no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rnnt_bench.analysis import machines, standing
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import implementations, settings, text
from rnnt_bench.records import schema, store

LONGEST_LABEL = 40  # characters
Item = TypeVar("Item")


@dataclass
class Group:
    """Hold the rows of one configuration, exact ones first, then by step time."""

    heading: str
    rows: list[Row]


def collect(rows: Sequence[Row]) -> list[Group]:
    """Return the groups of rows, each with its heading. Set the labels, standings and `other_torch`
    of the rows."""
    collected = [Group(heading(group), group) for group in groups(rows)]
    for group in collected:
        label(group.rows)
    return collected


def label(rows: Sequence[Row]) -> None:
    """Set the label of each row of a group: its name, with the folder where other rows have that
    name.

    A long label is cut. A number follows where two labels would be the same."""
    names = [text.plain(row.name) or "(no name)" for row in rows]
    labels: list[str] = []  # without the numbers
    for row, name in zip(rows, names):
        short = name if names.count(name) == 1 else f"{name} ({text.plain(row.folder.name)})"
        if len(short) > LONGEST_LABEL:
            short = short[: LONGEST_LABEL - 1] + "\u2026"  # an ellipsis
        same = labels.count(short)
        row.label = f"{short} {same + 1}" if same else short
        labels.append(short)


#: Settings that may differ within a group, such as options of one implementation.
NOT_PARTING = {key for key, setting in settings.SETTINGS.items() if not setting.parts_tables}


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each configuration as a list, sorted by `rank`. Set their standings and
    `other_torch`.

    The groups are in the order of `rows`; those without records of this suite come last."""

    def fits(group: list[Row], row: Row) -> bool:
        """Tell whether a row measured the same as the first row of a group."""
        first = group[0]
        if row.unreadable != first.unreadable:
            return False
        if bool(row.configuration) != bool(first.configuration):
            return False
        different = {*differing(first.configuration, row.configuration)} - NOT_PARTING
        return not different and not machines.apart(first, row)

    def unknown(row: Row) -> int:
        """Return how many values of the row's configuration are not known."""
        return list(row.configuration.values()).count(None)

    # Rows with fewer unknown values come first and begin groups; rows that lack values join them.
    result = grouped(sorted(rows, key=unknown), fits)
    for group in result:
        standing.rank_times(group)
        group.sort(key=rank)
    return sorted(
        result, key=lambda group: (not group[0].configuration, min(map(rows.index, group)))
    )


def kind_rank(row: Row) -> tuple[int, str]:
    """Return a sort key: the position of the row's kind in tables, then its `other_torch`."""
    kinds = implementations.KINDS
    # Rows of unknown kind (traces without records) stand among the exact ones.
    position = kinds.index(row.kind) if row.kind in kinds else 0
    return position, row.other_torch


#: Kind -> the title above its rows.
TITLES = {
    "exact": "exact",
    implementations.BY_UTTERANCE: "exact, an utterance at a time",
    **{
        name: f"exact, on another lattice ({words})"
        for name, words in implementations.LATTICES.items()
    },
    "pruned": "approximate",
}


def kind_title(row: Row) -> str:
    """Return the title of a row's kind: "exact", or "exact, under torch 1.13.1" where most rows
    have another torch."""
    title = TITLES.get(row.kind or "", "")
    return f"{title}, {row.other_torch}" if title and row.other_torch else title


def rank(row: Row) -> tuple[Any, ...]:
    """Return the sort key of a row: its kind, whether it is ranked by the step, its time over the
    fastest, then its times and its name.

    An approximation that is faster is not the faster loss, so the kind comes first."""
    numbers = (
        row.over_fastest,
        row.median_ms("step"),
        row.median_ms("loss"),
        row.profile.average_step_time_us,
    )
    by_step = row.against_fastest is not None and row.against_fastest.scope == "step"
    return (
        kind_rank(row),
        not by_step,
        *(math.inf if value is None else value for value in numbers),
        row.name,
    )


def heading(group: Sequence[Row]) -> str:
    """Return one line on what the rows of a group have in common: settings, machine, environment
    variables, number of rounds, padding."""
    if group[0].unreadable:
        return "unreadable"
    # Rows of a group differ only in settings of NOT_PARTING, and in what is not known.
    common = {
        key: value for row in group for key, value in row.configuration.items() if value is not None
    }
    if not common:
        return "traces without records of this suite"
    # Where records have only the name of a processor, several may have that name: their rates tell
    # them apart.
    if common.get("device") == "cpu" and not common.get("processor"):
        rates = next(filter(None, map(machines.rates, group)), "")
        common["processor"] = f"({rates})" if rates else None
    measured = {len(row.batches) for row in group} - {0}
    if len(measured) == 1:
        common["num_batches"] = measured.pop()
    parts = [*settings.heading(common), *_tuned_variables(group)]
    parts.append(text.count(max(row.rounds for row in group), "round"))
    useful = {row.useful_fraction for row in group if row.useful_fraction is not None}
    if len(useful) == 1:
        parts.append(f"{100 * useful.pop():.0f}% of the padded cells useful")
    return text.plain(", ".join(filter(None, parts)))


def _tuned_variables(group: Sequence[Row]) -> list[str]:
    """Return the environment variables of rows, as "KEY=value", sorted, without those that have the
    usual value of settings.VARIABLES.

    Rows of another torch do not count: the title above them tells how they were run."""
    variables = {
        f"{key}={text.without_folders(value)}"
        for row in group
        if not row.other_torch
        for key, value in row.environment.variables.items()
    }
    usual = {f"{key}={value}" for key, value in settings.VARIABLES.items()}
    return sorted(variables - usual)


# What measured the same.


def differing(first: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the keys whose values differ; None, which is not known, differs from nothing."""
    return [
        key
        for key, value in first.items()
        if value is not None and other.get(key) is not None and other[key] != value
    ]


def conditions(row: Row) -> dict[str, object]:
    """Return what must agree between two runs that are compared: name for messages -> value."""
    digest = row.configuration["shape_file_sha256"]
    result = {
        setting.label: row.configuration.get(key)
        for key, setting in settings.SETTINGS.items()
        if setting.label
    }
    result["shape file"] = digest and f"sha256 {digest[:12]}"
    # The names of CPUs are compared by `machines.apart`, see `differences`.
    result["device name"] = row.device_name if row.device != "cpu" else None
    if row.environment.mkl_as_intel is not None:
        result["MKL"] = "as on Intel" if row.environment.mkl_as_intel else "as it is"
    return result


def differences(first: Row, other: Row) -> list[str]:
    """Return why two runs cannot be compared: ["dtype float32 / float64"].  [] if they can."""
    mine, theirs = conditions(first), conditions(other)
    different = [f"{label} {mine[label]} / {theirs[label]}" for label in differing(mine, theirs)]
    return [*different, *_other_batches(first, other), *machines.apart(first, other)]


def _other_batches(first: Row, other: Row) -> list[str]:
    """Return ["batches ... / ..."] if two runs have no batch index in common, or different numbers
    of cells for the same index; else [].  Return [] too if the batches of a run are not known.

    Batches of one run alone are no difference: only that run may have had the time for further
    rounds, which add batches of their own."""
    mine = {batch.index: (batch.useful_cells, batch.padded_cells) for batch in first.batches}
    theirs = {batch.index: (batch.useful_cells, batch.padded_cells) for batch in other.batches}
    shared = mine.keys() & theirs.keys()
    are_alike = all(mine[index] == theirs[index] for index in shared)
    if not mine or not theirs or (shared and are_alike):
        return []
    return [f"batches {_batches(first)} / {_batches(other)}"]


def _batches(row: Row) -> str:
    """Return the number of a row's batches, the index of the first, and their cells without and with
    padding: "20 from 0 on of 12345 cells (23456 padded)"."""
    useful, padded = row.cells
    return f"{len(row.batches)} from {row.batches[0].index} on of {useful} cells ({padded} padded)"


def grouped(items: Iterable[Item], fits: Callable[[list[Item], Item], bool]) -> list[list[Item]]:
    """Return the items in groups: each item joins the first group that it fits, or begins a new
    one."""
    result: list[list[Item]] = []
    for item in items:
        for group in result:
            if fits(group, item):
                group.append(item)
                break
        else:
            result.append([item])
    return result


def newest_first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by the start of their runs, the newest first; rows that measured nothing come
    last. Runs that began at the same time come in the reverse order of `rows`."""
    oldest_first = sorted(rows, key=lambda row: (not row.is_empty, row.header.started))
    return oldest_first[::-1]


def newest_of_each(rows: Sequence[Row], same: Callable[[Row, Row], bool]) -> list[Row]:
    """Return the newest row of each configuration, in the order of `rows`. A row that measured
    nothing is only returned if all rows of its configuration measured nothing.

    Sets `stopped` of each returned row to the newer rows, which measured nothing, and `earlier` to
    all others of its configuration. Warns if a returned row has earlier ones and began in the
    future.

    same: tells whether two rows are of one configuration
    """
    kept = []
    for newest, *others in grouped(newest_first(rows), lambda group, row: same(group[0], row)):
        # As `newest_first` puts rows that measured nothing last, only such rows can be newer here.
        began = newest.header.started
        newest.stopped = [row for row in others if row.header.started > began]
        newest.earlier = [row for row in others if row.header.started <= began]
        if newest.earlier:
            store.warn_of_clock(newest.folder, began)
        kept.append(newest)
    return [row for row in rows if row in kept]


# Sweeps: ordinary runs whose headers name the settings that vary.


@dataclass
class Sweep:
    """Hold the runs of a sweep: ordinary runs, one or more for each cell of a grid.

    grid: setting -> its values
    """

    grid: dict[str, list[Any]]
    rows: list[Row]

    @property
    def heading(self) -> str:
        """Return one line: the grid, and what all cells have in common."""
        axes = [
            f"{settings.flag(key)} {', '.join(map(settings.worded, values))}"
            for key, values in self.grid.items()
        ]
        # The function `heading` leaves out settings that are None, so set the varied ones to None.
        varied = dict.fromkeys(self.grid)
        shared = [replace(row, configuration={**row.configuration, **varied}) for row in self.rows]
        return text.plain(f"sweep over {' x '.join(axes)}; {heading(shared)}")

    def cells(self) -> list[tuple[Mapping[str, Any], list[Row]]]:
        """Return (swept setting -> its value there, rows) of each cell, in the order of the
        rows."""
        by_cell = text.gathered((_cell_index(row, self.grid), row) for row in self.rows)
        return [(rows[0].header.values, rows) for rows in by_cell.values()]


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Return the sweeps that rows with swept settings belong to. Set the standings and labels of
    the rows, cell by cell.

    Rows of one sweep vary the same settings, and agree in all others and in their machine."""

    def fits(group: list[Row], row: Row) -> bool:
        """Tell whether a row belongs to the same sweep as the first row of a group."""
        are_alike = _without_swept(group[0]) == _without_swept(row)
        return are_alike and not machines.differences(group[0], row)

    result = []
    for group in grouped(rows, fits):
        grid: dict[str, list[Any]] = {}
        for key in group[0].header.values:
            values = list(dict.fromkeys(row.header.values[key] for row in group))
            grid[key] = sorted(values) if is_numeric(values) else values
        sweep = Sweep(grid, group)
        for _, cell in sweep.cells():
            standing.rank_times(cell)
            label(cell)
        # Only now: `rank` reads the standings.
        sweep.rows.sort(key=lambda row: (_cell_index(row, grid), rank(row)))
        result.append(sweep)
    return result


def _without_swept(row: Row) -> tuple[list[str], dict[str, Any]]:
    """Return (names of the settings that the row's run sweeps, its other settings by name)."""
    swept = row.header.values
    recorded = schema.as_written(row.header.settings)
    return list(swept), {key: value for key, value in recorded.items() if key not in swept}


def _cell_index(row: Row, grid: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    """Return the place of a row's cell on each axis of the grid."""
    return tuple(values.index(row.header.values[key]) for key, values in grid.items())


def is_numeric(values: Sequence[Any]) -> bool:
    """Return whether a plot can place the values of a setting on an axis."""
    return all(type(value) in (int, float) for value in values)
