"""The figures of all runs of models in a log, for PNGs."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Tuple

from common.analysis.inference import find as find_inference
from common.analysis.pipeline import find as find_pipelines
from common.plots import inference, pipeline
from common.plots.style import Figure


def named(paths: Sequence[Any]) -> Iterator[Tuple[str, Figure]]:
    """Each with the name of its file: rtf, rtf-profile-2 of a second profile, pipeline-time."""
    for place, one in enumerate(find_inference(paths)):
        for figure in inference.figures(one):
            yield f"{figure.key}-profile-{place + 1}" if place else figure.key, figure
    for figure in pipeline.figures([one for one in find_pipelines(paths) if not one.reason]):
        yield figure.key, figure
