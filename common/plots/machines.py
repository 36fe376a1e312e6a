"""Machines side by side."""

from __future__ import annotations

from typing import List, Optional, Sequence

from common.analysis.machines import Machine, rows_by_name
from common.analysis.row import Row
from common.core.text import number
from common.plots.bars import GOES_ON, arrows, until
from common.present import scales
from common.present.style import Figure, Trace, lanes, layout, parts, shown

BAR, NAME = 20, 34  # pixels: a bar with its gap, and a name above the bars of a lane

Ratios = Sequence[Optional[float]]


def relative_times(family: Sequence[Machine]) -> Optional[Figure]:
    """Bars of the step over that of the fastest exact loss of the same machine; None where fewer than two have one."""
    of_one_model = {name: row for name, row in rows_by_name(family).items() if row.of_one_model}
    ratios = {name: [one.over_fastest(one.row(name)) for one in family] for name in of_one_model}
    ratios = {name: values for name, values in ratios.items() if any(values)}
    if sum(one.fastest is not None for one in family) < 2 or not ratios:
        return None
    end = scales.cut([value for values in ratios.values() for value in values if value])
    lane = NAME + BAR * len(family)
    data: List[Trace] = []
    for at, machine in enumerate(family):
        data += _bars(machine, at, len(family), [of_one_model[name] for name in ratios], list(ratios.values()), lane)
    drawn = [place for bar in data if not bar.get("showlegend", True) for place in zip(bar["x"], bar["y"])]
    beyond = [height for ratio, height in drawn if end and ratio > end]
    data += [arrows(end, beyond, 14)] if beyond else []
    names = [f"{shown(of_one_model[name].label)}  {_listed(family, values)}" for name, values in ratios.items()]
    said = "; ".join(
        f"{name} " + ", ".join(f"{number(value, 3)} on {one.letter}" for one, value in zip(family, values) if value)
        for name, values in ratios.items()
    )
    all_exact = all(of_one_model[name].is_exact for name in ratios)
    caption = [
        "1 is the fastest exact loss of the machine"
        + ("." if all_exact else "; pruned ones, which approximate, may take less."),
        *([GOES_ON] if beyond else []),
        "; ".join(one.title for one in family) + ".",
    ]
    frame = {**lanes(names, lane, lane // 2 - 20), "xaxis": until(end, "times the fastest exact")}
    return Figure(
        "machines",
        "Step time over the fastest exact loss of the same machine",
        " ".join(caption),
        f"Step time over the fastest exact loss of the same machine: {said}",
        data,
        layout(lane * len(ratios) + 64, 40 + 7 * max(len(one.name) for one in family), bargap=0, **frame),
        None,  # above the plot
    )


def _listed(family: Sequence[Machine], values: Ratios) -> str:
    return "  ".join(f"{one.letter} <b>{number(value, 3)}</b>" for one, value in zip(family, values))


def _bars(
    machine: Machine, at: int, machines: int, rows: Sequence[Row], values: Sequence[Ratios], lane: int
) -> List[Trace]:
    """Of one machine, with their entry in the legend."""
    below = (NAME / 2 - 6 + BAR * (at - (machines - 1) / 2)) / lane  # the middle; the name is above the bars
    known = [(place, ratio) for place, of_row in enumerate(values) for ratio in of_row[at : at + 1] if ratio]
    x, y = [ratio for _, ratio in known], [-place - below for place, _ in known]
    hover = f"%{{x:.3g}} times the fastest exact<extra>{shown(machine.name)}</extra>"
    looks = [rows[place].look for place, _ in known]
    return parts(f"{machine.letter}: {machine.name}", x, y, looks, at, hover, (BAR - 4) / lane)
