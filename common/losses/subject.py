"""Run the pass of a loss that a job asks for."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional

from common.core.errors import NotRunnable, WrongResult
from common.core.settings import Settings
from common.losses.context import Context, prepare
from common.measure.device import facts
from common.system import machine


def run(job: Mapping[str, Any]) -> Iterator[Dict[str, Any]]:
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


def environment(context: Context, pass_name: str) -> Dict[str, Any]:
    """Return the ``environment`` record of a job of this pass."""
    import torch

    from common.data import distribution, measured_batches, shapes

    placement, device = machine.placement(), facts(context.device)
    spoiled = machine.spoiled_by(placement, device["threads"]) if context.device.type == "cpu" else []
    # The same for every job of the run, so one of them tells; a search changes the batches.
    whole = pass_name == "correctness" and not context.settings.find_largest
    return {
        "record": "environment",
        "python": platform.python_version(),
        **device,
        "implementation_version": context.adapter.version(),
        "options": context.adapter.described_options(),
        "cuda": torch.version.cuda if context.device.type == "cuda" else None,
        "l2": context.settings.l2 if context.device.type == "cuda" else None,
        "denormals": context.settings.denormals,
        "allocator": context.settings.allocator,
        **machine.tuning(),
        **placement,
        "shape_file": context.settings.shape_file,
        "shape_file_sha256": shapes.sha256(Path(context.settings.shape_file)),
        **({} if context.pool else {"shape_file_totals": context.all_batches.totals()}),
        **({"shape_distribution": distribution.of_run(context.all_batches, context.batches)} if whole else {}),
        "batches": [context.all_batches.describe(index, context.settings.prune_range) for index in context.batches],
        "warnings": measured_batches.warnings(context.all_batches, context.batches, context.settings) + spoiled,
    }


def run_pass(context: Context, name: str, round_number: Optional[int], folder: Path) -> Iterator[Dict[str, Any]]:
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


def _checked(context: Context) -> Iterator[Dict[str, Any]]:
    """Yield the record of the correctness pass; raise WrongResult if it is not ok."""
    from common.losses.passes import correctness

    for record in correctness.run(context):
        yield record
        if not record["ok"]:
            raise WrongResult("; ".join(filter(None, [correctness.in_words(record), context.wrong])))
