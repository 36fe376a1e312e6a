"""Run the pass of a loss that a job asks for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional

from common.core.emitted import Emitted
from common.core.errors import NotRunnable, WrongResult
from common.core.settings import Settings
from common.losses.context import Context, prepare
from common.measure import device
from common.measure.device import Environment

if TYPE_CHECKING:
    from common.data.batching import Totals
    from common.data.distribution import Distribution
    from common.losses.adapter import Option


@dataclass(frozen=True)
class LossEnvironment(Environment):
    """The first record of a job about a loss."""

    left_out = ("shape_file_totals", "shape_distribution")

    implementation_version: str
    options: Mapping[str, Option]
    l2: Optional[str]  # "cold" or "warm"; None on a CPU
    shape_file: str
    shape_file_sha256: str
    shape_file_totals: Optional[Totals]  # None of a throughput job, which has other batches
    shape_distribution: Optional[Distribution]  # of the correctness job alone
    batches: List[Dict[str, int]]


def run(job: Mapping[str, Any]) -> Iterator[Emitted]:
    """Yield the ``environment`` record of a job of common.jobs.spec, then the records of its pass.

    Raises NotRunnable, UserError, WrongResult, and whatever the loss raises.
    """
    context = prepare(job, Settings.from_json(job["settings"]))
    try:
        yield environment(context, job["pass"])
        yield from run_pass(context, job["pass"], job["round"], Path(job["folder"]))
    except ModuleNotFoundError as error:  # within the loss: this suite's modules and the package itself are imported
        needed = f"{context.adapter.name} needs {error.name}: {context.adapter.hint}"
        raise NotRunnable("missing", needed) from error


def environment(context: Context, pass_name: str) -> LossEnvironment:
    """Return the ``environment`` record of a job of this pass."""
    from common.data import distribution, measured_batches, shapes

    settings, every, chosen = context.settings, context.all_batches, context.batches
    here = device.environment(settings, context.device)
    here.warnings[:0] = measured_batches.warnings(every, chosen, settings)
    # The same for every job of the run, so one of them tells; a search changes the batches.
    whole = pass_name == "correctness" and not settings.find_largest
    return LossEnvironment(
        **vars(here),
        implementation_version=context.adapter.version(),
        options=context.adapter.described_options(),
        l2=settings.l2 if context.device.type == "cuda" else None,
        shape_file=settings.shape_file,
        shape_file_sha256=shapes.sha256(Path(settings.shape_file)),
        shape_file_totals=None if context.pool else every.totals(),
        shape_distribution=distribution.of_run(every, chosen) if whole else None,
        batches=[every.describe(index, settings.prune_range) for index in chosen],
    )


def run_pass(context: Context, name: str, round_number: Optional[int], folder: Path) -> Iterator[Emitted]:
    """Yield the records of the pass `name`; raise WrongResult after that of a correctness pass that is not ok."""
    if context.adapter.simulated and name != "correctness":
        raise NotRunnable(
            "unsupported",
            f"under {context.adapter.simulator_variables} its kernels run in a simulator, whose times say nothing: use "
            "--passes correctness",
        )
    if name == "trace":
        from common.losses.passes import trace

        return trace.run(context, folder)
    if name == "correctness":
        return _checked(context)
    return importlib.import_module(f"common.losses.passes.{name}").run(context, round_number)


def _checked(context: Context) -> Iterator[Emitted]:
    """Yield the record of the correctness pass; raise WrongResult if it is not ok."""
    from common.losses.passes import correctness

    for record in correctness.run(context):
        yield record
        if not record.ok:
            raise WrongResult("; ".join(filter(None, [correctness.in_words(record), context.wrong])))
