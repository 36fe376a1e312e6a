"""Draws pipelines below each other, each a bar of its stages."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from common.core.text import number
from common.present.style import Figure, Look, Trace, axis, bar_of, bars, lanes, layout, shown
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
        "Forward FLOPs of every call, the mean over examples, counted as `rnnt-bench flops` does.",
        "GFLOPs",
        lambda costs: _giga(costs.flops),
    ),
)


def figures(pipelines: Sequence[Pipeline]) -> List[Figure]:
    """Return a figure of each quantity that all stages of a pipeline have."""
    result = []
    for quantity in QUANTITIES:
        known = [pipeline for pipeline in pipelines if _has(pipeline, quantity)]
        if known:
            result.append(_figure(quantity, known))
    return result


def _has(pipeline: Pipeline, quantity: Quantity) -> bool:
    return bool(pipeline.stages) and all(quantity.of(stage) is not None for stage in pipeline.stages)


def _figure(quantity: Quantity, pipelines: Sequence[Pipeline]) -> Figure:
    data: List[Trace] = []
    for number_of_stage in range(max(len(pipeline.stages) for pipeline in pipelines)):
        some = [
            (lane, pipeline.stages[number_of_stage])
            for lane, pipeline in enumerate(pipelines)
            if number_of_stage < len(pipeline.stages)
        ]
        values = [quantity.of(stage) or 0.0 for _, stage in some]
        names = [shown(f"{stage.name} {number(value)} {quantity.unit}") for (_, stage), value in zip(some, values)]
        hover = "%{customdata}"
        at = [-lane for lane, _ in some]
        data.append(
            bars(
                f"stage {number_of_stage + 1}",
                values,
                at,
                bar_of(Look(number_of_stage, number_of_stage)),
                hover,
                orientation="h",
                width=WIDTH,
                customdata=names,
            )
        )
    totals = [f"{number(quantity.of(pipeline.whole))} {quantity.unit}" for pipeline in pipelines]
    words = [
        f"{shown(pipeline.name)}  <b>{total}</b>  {_parts(pipeline)}" for pipeline, total in zip(pipelines, totals)
    ]
    summary = "; ".join(f"{pipeline.name} {total}" for pipeline, total in zip(pipelines, totals))
    frame = {**lanes(words, LANE, ABOVE), "xaxis": axis(quantity.unit), "barmode": "stack"}
    rows = [_row(quantity, pipeline, stage) for pipeline in pipelines for stage in pipeline.stages]
    return Figure(
        quantity.key,
        quantity.title,
        quantity.caption,
        f"{quantity.title}: {summary}",
        data,
        layout(LANE * len(pipelines) + 64, LEGEND, **frame),
        tabulated(quantity.key, quantity.title, rows),
    )


def _parts(pipeline: Pipeline) -> str:
    return shown(" + ".join(stage.name for stage in pipeline.stages))


def _row(quantity: Quantity, pipeline: Pipeline, stage: Costs) -> Dict[str, Cell]:
    return {"pipeline": Cell(pipeline.name), "stage": Cell(stage.name), quantity.unit: measured(quantity.of(stage))}
