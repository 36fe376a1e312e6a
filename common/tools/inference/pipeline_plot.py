"""Pipelines below each other, each a bar of its stages."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from common.core.text import number
from common.present.style import Figure, Trace, axis, bar_of, bars, lanes, layout, shown
from common.present.table import Cell, measured, tabulated
from common.tools.inference.pipeline_rows import Costs, Pipeline

LANE, ABOVE, LEGEND = 62, 14, 110  # pixels
WIDTH = 0.36  # of a bar, in lanes


class Quantity(NamedTuple):
    key: str
    title: str
    caption: str
    unit: str
    of: Callable[[Costs], Optional[float]]


def _giga(value: Optional[float]) -> Optional[float]:
    return None if value is None else value / 1e9


QUANTITIES = (
    Quantity(
        "pipeline-time",
        "Run time of an utterance, by stage",
        "The mean over examples of each one's median; the inputs of a stage are made before it is timed.",
        "s",
        lambda costs: costs.run_time_s,
    ),
    Quantity(
        "pipeline-flops",
        "Operations of an utterance, by stage",
        "Forward FLOPs of every call, the mean over examples, counted as count_flops.py does.",
        "GFLOPs",
        lambda costs: _giga(costs.flops),
    ),
)


def figures(found: Sequence[Pipeline]) -> List[Figure]:
    result = []
    for quantity in QUANTITIES:
        some = [one for one in found if one.stages and all(quantity.of(stage) is not None for stage in one.stages)]
        if some:
            result.append(_figure(quantity, some))
    return result


def _figure(quantity: Quantity, found: Sequence[Pipeline]) -> Figure:
    data: List[Trace] = []
    for place in range(max(len(one.stages) for one in found)):
        some = [(at, one.stages[place]) for at, one in enumerate(found) if place < len(one.stages)]
        values = [quantity.of(stage) or 0.0 for _, stage in some]
        names = [shown(f"{stage.name} {number(value)} {quantity.unit}") for (_, stage), value in zip(some, values)]
        hover = "%{customdata}"
        at = [-lane for lane, _ in some]
        data.append(
            bars(f"stage {place + 1}", values, at, bar_of(place), hover, orientation="h", width=WIDTH, customdata=names)
        )
    totals = [quantity.of(one.whole) for one in found]
    both = list(zip(found, totals))
    words = [f"{shown(one.name)}  <b>{number(total)} {quantity.unit}</b>  {_parts(one)}" for one, total in both]
    said = "; ".join(f"{one.name} {number(total)} {quantity.unit}" for one, total in both)
    frame = {**lanes(words, LANE, ABOVE), "xaxis": axis(quantity.unit), "barmode": "stack"}
    rows = [_row(quantity, one, stage) for one in found for stage in one.stages]
    return Figure(
        quantity.key,
        quantity.title,
        quantity.caption,
        f"{quantity.title}: {said}",
        data,
        layout(LANE * len(found) + 64, LEGEND, **frame),
        tabulated(quantity.key, quantity.title, rows),
    )


def _parts(one: Pipeline) -> str:
    return shown(" + ".join(stage.name for stage in one.stages))


def _row(quantity: Quantity, one: Pipeline, stage: Costs) -> Dict[str, Cell]:
    return {"pipeline": Cell(one.name), "stage": Cell(stage.name), quantity.unit: measured(quantity.of(stage))}
