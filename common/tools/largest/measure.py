"""Try the steps of a size under a limit on memory, and judge the largest that fits.

A probe runs one step of the heaviest batches of a size, in a process of its own, under an enforced
limit: a step that runs out of memory, whatever the error is called, does not fit.

The correctness pass of a search judges few utterances, since it comes before the size is known.  So
a step of the heaviest batch at the size found is judged too, as one after timing is: its loss, and
random sums of its gradient.  The oracle computes some frames at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.memory import AddressSpace, Device, Limit
from rnnt_bench.losses import subject
from rnnt_bench.losses.passes import after_timing, correctness
from rnnt_bench.records.schema import JobLine, Measured, Stop, as_written
from rnnt_bench.tools.largest import model
from rnnt_bench.tools.largest.search import Try


def run(job: JobSpec) -> Iterator[JobLine]:
    """Yield the records of a pass of a loss ("correctness", "probe" or "judge"), or of steps of a
    model."""
    given = job.request
    if "model" in given:
        yield from model.run(job)
        return
    name = given["pass"]
    loss = {key: given[key] for key in ("script", "variant")}
    context = subject.prepare(replace(job, pass_name=name, **loss))
    if name == "correctness":
        yield from subject.carried_out(context, correctness.run)
    else:
        subject.check_shortest(
            context.adapter, context.all_batches, range(len(context.all_batches))
        )
        function = probe if name == "probe" else judge
        yield from subject.carried_out(context, partial(function, given=given))


def limit_of(context, scope: str, given: Mapping[str, Any]) -> Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a
    first step does.

    On CUDA a step of one utterance of each batch: each size may have kernels of its own, which take
    memory when first launched.
    """
    tried = heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    for batch in tried:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    if context.device.type == "cuda":
        return Device(given["memory_limit"], context.device)
    return AddressSpace(given["limit_bytes"])


def probe(context, given: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield what is tried before each step, and what it took after it."""
    (scope,) = context.settings.scopes
    limited = limit_of(context, scope, given)
    for batch in heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        tried = Try(N=sizes["N"], T=sizes["T_max"], U=sizes["U_max"], limit_bytes=limited.bytes)
        yield Measured(value=as_written(tried))
        with limited.making():
            step = context.step(scope, batch)
        with limited.enforced():
            loss = float(step.run())
        del step
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of a batch that fits is {loss}")
        tried.peak_bytes = limited.peak_bytes
        yield Measured(value=as_written(tried))
        context.model.zero_grad(set_to_none=True)


def judge(context, given: Mapping[str, Any]) -> Iterator[Stop]:
    """Yield a ``stop`` record of the errors of a step of the heaviest batch; raise WrongResult if
    it is wrong.

    The limit protects the machine, with the slack for inputs; the oracle is outside of it."""
    (scope,) = context.settings.scopes
    batch = heaviest(context.all_batches)[0]
    with limit_of(context, scope, given).making():
        step = context.step(scope, batch, after_timing.FURTHER_REPEAT)
        loss = float(step.run())
        ranges = getattr(step.prepared, "ranges", None)
        taken = after_timing.Taken(after_timing.FURTHER_REPEAT, loss, ranges)
        taken.keep(context, scope, step)
        del step
        context.model.zero_grad(set_to_none=True)
    end = Stop(scope=scope, round=context.round)
    end.loss_error, end.grad_error, wrong = after_timing.check(context, scope, {batch: taken})
    yield end
    if wrong:
        raise WrongResult(f"at the size found, {wrong}")
