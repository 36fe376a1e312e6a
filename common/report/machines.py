"""Machines side by side: configurations that differ in nothing but the machine, in one table and one plot.

Times of different machines are not compared: within each machine every loss is set against the fastest exact one of
that machine, and it is these ratios that stand beside each other.
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.report import scales
from common.report.bars import GOES_ON, INK, arrows, legend_below, pattern, until
from common.report.collect import Entry, Group
from common.report.look import Figure, Trace, color, lanes, layout, shown
from common.report.markup import Cell, Column, Table, table, text
from common.report.plots import plot
from common.results import ranking, tables
from common.results.exports import plain
from common.results.summary import same_configuration
from common.results.wording import number

TITLE = "Machines side by side"
#: Of a configuration, what is of the machine.
MACHINE = ("device", "device_name", "cores", "threads")
BAR, NAME = 20, 34  # pixels: a bar with its gap, and a name above the bars of a lane


class Machine(NamedTuple):
    """A group of the report as one of several machines.  letter: "A"; name: what it is; place: of the group."""

    letter: str
    name: str
    place: int
    entries: List[Entry]

    @property
    def title(self) -> str:
        return f"Machine {self.letter}: {self.name}"

    def entry(self, name: str) -> Optional[Entry]:
        """The entry of an implementation, the fastest where it was measured in several ways (two prune ranges, say)."""
        return next((entry for entry in self.entries if entry.row["name"] == name), None)

    @property
    def fastest_exact(self) -> Optional[Entry]:
        """By its step."""
        exact = {id(entry.row): entry for entry in self.entries if entry.exact}
        found = ranking.standings([entry.row for entry in exact.values()], "step")
        return exact[id(found[0].row)] if found else None


def families(groups: Sequence[Group]) -> List[List[Machine]]:
    """The groups that differ only in their machine, together; machines that have no other are left out."""
    found: List[Tuple[Dict[str, Any], List[int]]] = []
    for place, group in enumerate(groups):
        known = tables.known_configuration([entry.row for entry in group.entries])
        if group.search or not known:
            continue
        rest = {"configuration": {key: value for key, value in known.items() if key not in (*MACHINE, *tables.OWN)}}
        family = next((places for other, places in found if same_configuration(other, rest)), None)
        if family is None:
            found.append((rest, [place]))
        else:
            family.append(place)
    return [_machines(groups, places) for _, places in found if len(places) > 1]


def _machines(groups: Sequence[Group], places: Sequence[int]) -> List[Machine]:
    return [
        Machine(_letter(at), _name(groups[place].entries), place, groups[place].entries)
        for at, place in enumerate(places)
    ]


def _letter(at: int) -> str:
    """A, B, ..., Z, A2, ..."""
    turn, letter = divmod(at, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(turn + 1) if turn else "")


def _name(entries: Sequence[Entry]) -> str:
    """ "AMD EPYC, 2 threads of 4 cores"."""
    known = tables.known_configuration([entry.row for entry in entries])
    name = plain(known.get("device_name") or known.get("device") or "unknown")
    if known.get("device") != "cpu":
        return name
    cores, threads = known.get("cores"), known.get("threads")
    if cores is None:
        return f"{name}, {threads} threads"
    return f"{name}, {cores} cores" if threads in (None, cores) else f"{name}, {threads} threads of {cores} cores"


def section(family: Sequence[Machine], place: int, figures: Dict[str, Figure], base: Path) -> str:
    """One section of the page; its plot is added to `figures`."""
    common = tables.heading([{**entry.row, "configuration": _rest(entry)} for entry in family[0].entries])
    figure = relative_times(family)
    links = "".join(f'<li><a href="#group-{one.place}">{text(one.title)}</a></li>' for one in family)
    return (
        f'<section class="group" id="machines-{place}" aria-labelledby="machines-title-{place}">\n'
        f'<h2 id="machines-title-{place}">{TITLE}</h2>\n<p class="configuration">{text(common)}</p>\n'
        "<p>These configurations differ in nothing but the machine. Ratios to the fastest exact loss of the same "
        f"machine may be compared from one to the other; milliseconds may not.</p>\n<ul>{links}</ul>\n"
        + table(numbers(family), base)
        + (plot(figure, f"machines-{place}", figures, base) if figure else "")
        + "</section>\n"
    )


def _rest(entry: Entry) -> Dict[str, Any]:
    return {key: value for key, value in entry.row["configuration"].items() if key not in MACHINE}


def _names(family: Sequence[Machine]) -> Dict[str, Entry]:
    """Every implementation with its first entry, by kind."""
    met: Dict[str, Entry] = {}
    for machine in family:
        for entry in machine.entries:
            met.setdefault(entry.row["name"], entry)
    return dict(sorted(met.items(), key=lambda item: tables.kind_rank(item[1].row)))


def over_fastest_exact(entry: Optional[Entry], fastest: Optional[Entry]) -> Optional[float]:
    """Its step over that of the fastest exact loss of its machine."""
    if entry is None or fastest is None or entry.row["status"] != "ok":
        return None
    if entry is fastest:
        return 1.0
    ratio = ranking.over(fastest.row, entry.row, "step")
    return ratio and ratio.ratio


def numbers(family: Sequence[Machine]) -> Table:
    """A row for each implementation, its numbers on every machine in it."""
    titles = ("step ms", "over the fastest exact", "% of limit", "peak MB")
    columns = [Column("implementation", False)]
    columns += [Column(f"{title}, {machine.letter}") for title in titles for machine in family]
    fastest = {machine.letter: machine.fastest_exact for machine in family}
    rows = []
    for name, first in _names(family).items():
        found = {machine.letter: machine.entry(name) for machine in family}
        cells = [Cell(first.marked, mark="name")]
        for entry in found.values():
            ms = entry and entry.step_ms and entry.step_ms["median"]
            cells.append(_cell(ms, entry, number(ms) if ms else _why_not(entry)))
        cells += [_cell(over_fastest_exact(entry, fastest[letter]), entry) for letter, entry in found.items()]
        for entry in found.values():
            percent = entry and tables.limit_percent(entry.row, "step")
            cells.append(_cell(percent, entry, number(percent, 2)))
        cells += [_cell(entry and entry.peak_mb, entry) for entry in found.values()]
        rows.append(cells)
    return Table("machines", TITLE, columns, rows)


def _cell(value: Optional[float], entry: Optional[Entry], words: Optional[str] = None) -> Cell:
    return Cell(words or number(value, 3), value, entry and entry.results)


def _why_not(entry: Optional[Entry]) -> str:
    return "-" if entry is None or entry.row["status"] == "ok" else plain(entry.row["status"])


def relative_times(family: Sequence[Machine]) -> Optional[Figure]:
    """Bars of the step over that of the fastest exact loss of the same machine; None where fewer than two have one."""
    ratios: Dict[str, List[Optional[float]]] = {}
    of_one_model = {name: entry for name, entry in _names(family).items() if entry.of_one_model}
    fastest = {machine.letter: machine.fastest_exact for machine in family}
    for name in of_one_model:
        of_each = [over_fastest_exact(one.entry(name), fastest[one.letter]) for one in family]
        if any(of_each):
            ratios[name] = of_each
    if sum(entry is not None for entry in fastest.values()) < 2 or not ratios:
        return None
    end = scales.cut([value for values in ratios.values() for value in values if value])
    lane = NAME + BAR * len(family)
    data = [_bars(machine, at, family, list(ratios.values()), lane) for at, machine in enumerate(family)]
    beyond = [
        -row - _offset(at, family, lane)
        for row, values in enumerate(ratios.values())
        for at, value in enumerate(values)
        if end and value and value > end
    ]
    if beyond:
        data.append(arrows(end, beyond, 14))
    names = [f"{shown(of_one_model[name].label)}  {_listed(family, values)}" for name, values in ratios.items()]
    height = lane * len(ratios) + 64
    said = "; ".join(
        f"{name} " + ", ".join(f"{number(value, 3)} on {one.letter}" for one, value in zip(family, values) if value)
        for name, values in ratios.items()
    )
    all_exact = all(of_one_model[name].exact for name in ratios)
    frame = lanes(names, lane, lane // 2 - 20)
    legend = legend_below(40 + 7 * max(len(one.name) for one in family))
    caption = [
        "1 is the fastest exact loss of the machine"
        + ("." if all_exact else "; pruned ones, which approximate, may take less."),
        *([GOES_ON] if beyond else []),
        "; ".join(one.title for one in family) + ".",
    ]
    return Figure(
        "machines",
        "Step time over the fastest exact loss of the same machine",
        " ".join(caption),
        f"Step time over the fastest exact loss of the same machine: {said}",
        data,
        layout(height, **frame, bargap=0, xaxis=until(end, "times the fastest exact"), legend=legend),
        None,  # above the plot
        height,
    )


def _offset(at: int, family: Sequence[Machine], lane: int) -> float:
    """Of the middle of a machine's bar below the middle of its lane, in lanes; the name is above the bars."""
    return (NAME / 2 - 6 + BAR * (at - (len(family) - 1) / 2)) / lane


def _listed(family: Sequence[Machine], values: Sequence[Optional[float]]) -> str:
    return "  ".join(f"{one.letter} <b>{number(value, 3)}</b>" for one, value in zip(family, values))


def _bars(
    machine: Machine, at: int, family: Sequence[Machine], values: Sequence[Sequence[Optional[float]]], lane: int
) -> Trace:
    known = [(row, of_each[at]) for row, of_each in enumerate(values) if of_each[at]]
    return {
        "type": "bar",
        "orientation": "h",
        "name": shown(f"{machine.letter}: {machine.name}"),
        "x": [value for _, value in known],
        "y": [-row - _offset(at, family, lane) for row, _ in known],
        "width": (BAR - 4) / lane,
        "marker": {"color": color(at), "pattern": pattern(at), "line": {"width": 1, "color": INK}},
        "hovertemplate": f"%{{x:.3g}} times the fastest exact<extra>{shown(machine.name)}</extra>",
    }
