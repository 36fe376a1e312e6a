"""Draw machines side by side."""

from __future__ import annotations

from typing import List, Optional, Sequence

from common.analysis.machines import Machine, rows_by_name
from common.analysis.row import Row
from common.core.text import number
from common.present import scales
from common.present.style import Figure, Trace, lanes, layout, parts, shown
from common.show.bars import GOES_ON, arrows, until

BAR, NAME = 20, 34  # pixels: a bar with its gap, and a name above the bars of a lane

Ratios = Sequence[Optional[float]]


def relative_times(family: Sequence[Machine]) -> Optional[Figure]:
    """Draw bars of the step over the fastest exact loss of the same machine; return None where fewer than two machines
    have one."""
    of_one_model = {name: row for name, row in rows_by_name(family).items() if row.of_one_model}
    ratios = {name: [each.over_fastest(each.row(name)) for each in family] for name in of_one_model}
    ratios = {name: values for name, values in ratios.items() if any(values)}
    if sum(each.fastest is not None for each in family) < 2 or not ratios:
        return None
    end = scales.cut([value for values in ratios.values() for value in values if value])
    lane = NAME + BAR * len(family)
    data: List[Trace] = []
    for at, machine in enumerate(family):
        data += _bars(machine, at, len(family), [of_one_model[name] for name in ratios], list(ratios.values()), lane)
    drawn = [end for bar in data if not bar.get("showlegend", True) for end in zip(bar["x"], bar["y"])]
    beyond = [height for ratio, height in drawn if end and ratio > end]
    data += [arrows(end, beyond, 14)] if beyond else []
    names = [f"{shown(of_one_model[name].label)}  {_listed(family, values)}" for name, values in ratios.items()]
    summary = "; ".join(
        f"{name} " + ", ".join(f"{number(value, 3)} on {each.letter}" for each, value in zip(family, values) if value)
        for name, values in ratios.items()
    )
    all_exact = all(of_one_model[name].is_exact for name in ratios)
    caption = [
        "1 is the fastest exact loss of the machine"
        + ("." if all_exact else "; pruned ones, which approximate, may take less."),
        *([GOES_ON] if beyond else []),
        "; ".join(each.title for each in family) + ".",
    ]
    frame = {**lanes(names, lane, lane // 2 - 20), "xaxis": until(end, "times the fastest exact")}
    return Figure(
        "machines",
        "Step time over the fastest exact loss of the same machine",
        " ".join(caption),
        f"Step time over the fastest exact loss of the same machine: {summary}",
        data,
        layout(lane * len(ratios) + 64, 40 + 7 * max(len(each.name) for each in family), bargap=0, **frame),
        None,  # above the plot
    )


def _listed(family: Sequence[Machine], values: Ratios) -> str:
    return "  ".join(f"{machine.letter} <b>{number(value, 3)}</b>" for machine, value in zip(family, values))


def _bars(
    machine: Machine, at: int, machines: int, rows: Sequence[Row], values: Sequence[Ratios], height: int
) -> List[Trace]:
    """Return the bars of one machine, with their entry in the legend."""
    below = (NAME / 2 - 6 + BAR * (at - (machines - 1) / 2)) / height  # the middle; the name is above the bars
    known = [(lane, ratio) for lane, of_row in enumerate(values) for ratio in of_row[at : at + 1] if ratio]
    x, y = [ratio for _, ratio in known], [-lane - below for lane, _ in known]
    hover = f"%{{x:.3g}} times the fastest exact<extra>{shown(machine.name)}</extra>"
    markers = [rows[lane].look for lane, _ in known]
    return parts(f"{machine.letter}: {machine.name}", x, y, markers, at, hover, (BAR - 4) / height)
