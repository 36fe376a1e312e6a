"""Try the steps of a size under a limit on memory, and judge the largest that fits.

A probe runs steps in a process of its own, under an enforced limit: a step that runs out of memory,
whatever the error is called, does not fit.  Of a loss it is one step of the heaviest batches of a
size.  Of a training it is two of a bucket, since the second has the optimizer's states; the limit
counts from the process with torch and the model's module imported, so it holds the weights, the
states and the batch too.

The correctness pass of a search judges few utterances, since it comes before the size is known.  So
a step of the heaviest batch at the size found is judged too, as one after timing is: its loss, and
random sums of its gradient.  The oracle computes some frames at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import msgspec
import torch

from rnnt_bench.core.errors import OutOfMemory, UserError, WrongResult
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import Settings
from rnnt_bench.core.text import reason_of
from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.device import environment, set_up_torch
from rnnt_bench.instruments.memory import AddressSpace, Device, Limit
from rnnt_bench.losses import subject
from rnnt_bench.losses.passes import after_timing, correctness
from rnnt_bench.records.schema import JobLine, Measured, Stop, as_written
from rnnt_bench.system.memory import is_out_of_memory
from rnnt_bench.tools import loading
from rnnt_bench.tools.largest.buckets import Steps
from rnnt_bench.tools.largest.losses import Pass
from rnnt_bench.tools.largest.model import Training
from rnnt_bench.tools.largest.search import Request, Try


def run(job: JobSpec) -> Iterator[JobLine]:
    """Yield the records of a pass of a loss, or of steps of a training."""
    request = msgspec.convert(job.request, Pass | Steps)
    if isinstance(request, Steps):
        yield from train(job.settings, request)
        return
    context = subject.prepare(
        replace(
            job,
            pass_name=request.pass_name,
            script=request.script,
            variant=request.variant,
        )
    )
    batches = context.all_batches
    subject.check_shortest(context.adapter, batches, range(len(batches)))
    passes: dict[str, Callable[[subject.Context], Iterator[JobLine]]] = {
        "correctness": correctness.run,
        "probe": partial(probe, request=request),
        "judge": partial(judge, request=request),
    }
    yield from subject.carried_out(context, passes[request.pass_name])


def limit_of(request: Request, device: torch.device) -> Limit:
    """Return the memory limit of a process with everything loaded."""
    if device.type == "cuda":
        return Device(request.memory_limit, device)
    return AddressSpace(request.limit_bytes or 0)


def loaded(context, request: Request) -> Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a
    first step does.

    On CUDA a step of one utterance of each batch: each size may have kernels of its own, which take
    memory when first launched.
    """
    (scope,) = context.settings.scopes
    tried = heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    for batch in tried:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    return limit_of(request, context.device)


def probe(context, request: Request) -> Iterator[Measured]:
    """Yield what is tried before each step, and what it took after it."""
    (scope,) = context.settings.scopes
    limit = loaded(context, request)
    for batch in heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        tried = Try(N=sizes["N"], T=sizes["T_max"], U=sizes["U_max"], limit_bytes=limit.bytes)
        yield Measured(value=as_written(tried))
        with limit.making():
            step = context.step(scope, batch)
        with limit.enforced():
            step.run()
        del step
        tried.peak_bytes = limit.peak_bytes
        yield Measured(value=as_written(tried))
        context.model.zero_grad(set_to_none=True)


def judge(context, request: Request) -> Iterator[Stop]:
    """Yield a ``stop`` record of the errors of a step of the heaviest batch; raise WrongResult if
    it is wrong.

    The limit protects the machine, with the slack for inputs; the oracle is outside of it."""
    (scope,) = context.settings.scopes
    batch = heaviest(context.all_batches)[0]
    with loaded(context, request).making():
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


def train(settings: Settings, request: Steps) -> Iterator[JobLine]:
    """Yield what is tried before each step of a training, what it took after it, and the peak of
    all.  The buckets are in random order.

    Raises OutOfMemory, and UserError for a model that cannot be made, or refuses a batch."""
    device = set_up_torch(settings)
    yield environment(settings, device)
    loading.module(request.model.rpartition(":")[0])
    optimizer = loading.imported(f"torch.optim:{request.optimizer}")
    warm = torch.ones(64, 64, device=device, requires_grad=True)
    (warm @ warm).sum().backward()  # starts the threads and loads the library
    optimizer([warm], lr=0.0).step()  # which loads modules when it first runs
    limit = limit_of(request, device)
    order = request.tries * request.rounds
    random.Random(settings.seed).shuffle(order)
    torch.manual_seed(settings.seed)
    step = order[0]
    try:
        with limit.within(int(limit.bytes * request.share)):
            training = Training(request, device, optimizer)
            for step in order:
                tried = msgspec.structs.replace(step, limit_bytes=limit.bytes)
                yield Measured(value=as_written(tried))
                begin = time.perf_counter_ns()
                training.step(step.N, step.T, step.U)
                tried.ns = time.perf_counter_ns() - begin
                yield Measured(value=as_written(tried))
            del training
    except Exception as error:  # whatever a stranger's model raises
        reason = str(error) if isinstance(error, UserError) else reason_of(error)
        if is_out_of_memory(error.__cause__ or error):
            raise OutOfMemory(reason) from error
        where = f"bucket {step.bucket} (N {step.N}, T {step.T}, U {step.U})"
        raise UserError(f"{where}: {reason}") from error
    tried.peak_bytes = limit.peak_bytes  # of all steps
    yield Measured(value=as_written(tried))
