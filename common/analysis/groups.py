"""Group rows by configuration, order and label them, and head each group with what its rows have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from common.analysis import ranking
from common.analysis.identity import grouped, same_configuration
from common.analysis.row import Configuration, Row
from common.core import settings
from common.core.implementations import BY_NAME, KINDS, with_variants
from common.core.text import plain, without_folders
from common.present.style import FAMILIES, PALETTE, Look

LONGEST_LABEL = 40  # characters


@dataclass
class Group:
    """Hold the rows of one configuration, exact ones first, then by step time.

    Attributes:
        heading: what the rows have in common.
        search: the rows are of --find-largest, and ordered by throughput.
    """

    heading: str
    rows: List[Row]
    search: bool = False


def collect(rows: Sequence[Row]) -> List[Group]:
    """Return the rows as groups, each row with a label of its own; searches last."""
    collected = [Group(heading(group), _labelled(group), search=bool(group[0].largest)) for group in groups(rows)]
    return sorted(collected, key=lambda group: group.search)


def apart(entries: Sequence[Row]) -> List[Tuple[str, str, List[Row]]]:
    """Return (end of the key, end of the title, rows) of each plot: one of the exact losses, one of the others.

    The others have other stages and take far less time and memory.  One plot where all rows are of one sort.
    """
    exact, others = ([entry for entry in entries if entry.is_exact is is_exact] for is_exact in (True, False))
    if exact and others:
        return [("", ", exact losses", exact), ("-others", ", losses of other kinds", others)]
    return [("", "", list(entries))] if entries else []


def _labelled(rows: Sequence[Row]) -> List[Row]:
    """Give each row a label of its own, and return them."""
    names = [plain(row.name) or "(no name)" for row in rows]
    labels: List[str] = []
    for row, name in zip(rows, names):
        label = short_label(name if names.count(name) == 1 else f"{name} ({plain(Path(row.log_dir).name)})")
        same = labels.count(label)
        row.label = f"{label} {same + 1}" if same else label
        labels.append(row.label)
    return list(rows)


def give_looks(rows: Sequence[Row]) -> None:
    """Give each implementation a colour and a form, the same in every plot."""
    measured = {row.name for row in rows if row.is_measured}
    look_of = look_of_each({row.name: row.kind for row in rows}, measured)
    for row in rows:
        row.look = look_of[row.name]


def look_of_each(kind_of: Mapping[str, Optional[str]], first: Collection[str] = ()) -> Dict[str, Look]:
    """Return the look of each implementation: the colour of its family, and the form of its kind.

    Where another implementation of that colour has that form already, it gets the next free form.  kind_of: name ->
    kind; first: names that get their form before the others.
    """
    order = {implementation.name: index for index, implementation in enumerate(with_variants())}

    def rank_of(name: str) -> Tuple[bool, bool, int, str]:
        return name not in first, "@" in name, order.get(name.partition("@")[0], len(order)), name

    look_of: Dict[str, Look] = {}
    for name in sorted(kind_of, key=rank_of):
        color = _color(name, {look.color for look in look_of.values()})
        forms = (FORMS.get(kind_of[name] or "exact", 0) + step for step in range(len(kind_of)))
        free = (look for form in forms if (look := Look(color, form)) not in look_of.values())
        look_of[name] = next(free)
    return look_of


#: The form of the first loss of a kind in its family.
FORMS = {"exact": 0, "pruned": 1, "additive": 2}


def _color(name: str, taken: Set[int]) -> int:
    """Return the number of a loss's colour: that of its family, or the first free one for a loss without a family."""
    implementation = BY_NAME.get(name.partition("@")[0].partition(":")[0])
    if implementation and implementation.package in FAMILIES:
        return FAMILIES[implementation.package]
    return next((color for color in reversed(range(len(PALETTE))) if color not in taken), 0)


def short_label(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\u2026"


def pareto(points: Sequence[Tuple[float, float]]) -> List[int]:
    """Return the indices of the points that no other point undercuts in both coordinates, ordered by the first
    coordinate."""
    order = sorted(range(len(points)), key=lambda index: points[index])
    front: List[int] = []
    for index in order:
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


#: Settings that part no groups.
OWN = [key for key, setting in settings.SETTINGS.items() if not setting.parts_tables]


def groups(rows: Sequence[Row]) -> List[List[Row]]:
    """Return the rows of one configuration together, the fastest step first.

    Each is compared with the fastest of its kind (see ranking.py), except rows of --find-largest, which were timed on
    batches of their own.  Rows stay together if they differ only in an implementation's own options or in the scopes
    that were timed.
    """
    ordered = sorted(rows, key=lambda row: sum(value is None for value in row.configuration.values()))
    result = grouped(ordered, lambda group, row: _fit(group[0], row))
    for group in result:
        if not group[0].largest:
            ranking.rank_times(group)
        group.sort(key=rank)
    return sorted(result, key=lambda group: not group[0].configuration)


def _fit(first: Row, other: Row) -> bool:
    kinds = [(row.unreadable, bool(row.configuration), bool(row.largest)) for row in (first, other)]
    return kinds[0] == kinds[1] and same_configuration(_shared(first), _shared(other))


def _shared(row: Row) -> Configuration:
    return {key: value for key, value in row.configuration.items() if key not in OWN}


def kind_rank(row: Row) -> int:
    return KINDS.index(row.kind) if row.kind in KINDS else 0


def rank(row: Row) -> Tuple[Any, ...]:
    """Return the sort key of a row: its kind, since an approximation that is faster is not the faster loss, then its
    step time, or its throughput for --find-largest."""
    if row.largest:
        speed = row.utterances_per_second
        return kind_rank(row), math.inf if speed is None else -speed, row.name
    medians = [times.median if times else math.inf for times in (row.step_ms, row.loss_ms)]
    profiled = row.average_step_time_us
    profiled = math.inf if profiled is None else profiled
    ratio = math.inf if row.over_fastest is None else row.over_fastest
    by_step = row.against_fastest is not None and row.against_fastest.scope == "step"
    return kind_rank(row), not by_step, ratio, *medians, profiled, row.name


def known_configuration(group: Sequence[Row]) -> Configuration:
    """Return the known settings on which all rows agree."""
    known: Configuration = {}
    for row in group:
        known.update({key: value for key, value in row.configuration.items() if value is not None})
    return known


def heading(group: Sequence[Row]) -> str:
    """Return one line on what the rows of a group have in common."""
    known = known_configuration(group)
    if group[0].unreadable:
        return "unreadable"
    if not known:
        return "traces without records of this suite"
    measured = {row.measured_batches for row in group} - {None}
    if len(measured) == 1 and not known.get("find_largest"):
        known["num_batches"] = measured.pop()
    parts = [*settings.heading(known), *_variables(group)]
    most = max(row.rounds for row in group)
    parts.append(f"{most} round{'' if most == 1 else 's'}")
    useful = {row.useful_fraction for row in group if row.useful_fraction is not None}
    if len(useful) == 1:
        parts.append(f"{100 * useful.pop():.0f}% of the padded cells useful")
    return plain(", ".join(filter(None, parts))) + _search_heading(group)


def _variables(group: Sequence[Row]) -> List[str]:
    """Return the environment variables that tune a run, without the suite's own."""
    given = {f"{key}={without_folders(value)}" for row in group for key, value in row.environment.variables.items()}
    return sorted(given - {f"{key}={value}" for key, value in settings.VARIABLES.items()})


def _search_heading(group: Sequence[Row]) -> str:
    """Return what the rows of a search have in common beside the configuration; "" for other rows."""
    searches = [row.largest for row in group if row.largest]
    if not searches:
        return ""
    timed = [search.timed_over for search in searches if search.timed_over]
    same = ""
    if timed and all(counts == timed[0] for counts in timed):
        same = f"; throughput over the same {timed[0]['utterances']} utterances ({timed[0]['frames']} frames)"
    elif timed:
        same = "; throughput NOT over the same utterances: run these together"
    return f"; scope {searches[0].scope}{same}"
