"""Run the pass of a loss that a job asks for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from msgspec.structs import replace

from common.core.errors import NotRunnable, WrongResult
from common.core.settings import Settings
from common.losses.context import Context, prepare
from common.measure import device
from common.records.schema import Environment, JobLine


def run(job: Mapping[str, Any]) -> Iterator[JobLine]:
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


def environment(context: Context, pass_name: str) -> Environment:
    """Return the ``environment`` record of a job of this pass."""
    from common.data import distribution, measured_batches, shapes

    settings, every, chosen = context.settings, context.all_batches, context.batches
    here = device.environment(settings, context.device)
    here.warnings[:0] = measured_batches.warnings(every, chosen, settings)
    # The same for every job of the run, so one of them tells; a search changes the batches.
    whole = pass_name == "correctness" and not settings.find_largest
    return replace(
        here,
        implementation_version=context.adapter.version(),
        options=context.adapter.described_options(),
        l2=settings.l2 if context.device.type == "cuda" else None,
        shape_file=settings.shape_file,
        shape_file_sha256=shapes.sha256(Path(settings.shape_file)),
        shape_file_totals=None if context.pool else every.totals(),
        shape_distribution=distribution.of_run(every, chosen) if whole else None,
        batches=[every.describe(index, settings.prune_range) for index in chosen],
    )


def run_pass(context: Context, name: str, round_number: Optional[int], folder: Path) -> Iterator[JobLine]:
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


def _checked(context: Context) -> Iterator[JobLine]:
    """Yield the record of the correctness pass; raise WrongResult if it is not ok."""
    from common.losses.passes import correctness

    for record in correctness.run(context):
        yield record
        if not record.ok:
            raise WrongResult("; ".join(filter(None, [correctness.in_words(record), context.wrong])))
