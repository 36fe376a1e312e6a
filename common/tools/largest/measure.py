"""Try the steps of a size under a memory limit, and judge the largest size that fits.

A probe runs steps in a process of its own.  A step that runs out of memory does not fit, whatever
the error is called.

- The probe of a loss runs a step of each of the heaviest batches of a size.
- The probe of a training runs two steps of a bucket, since the second has the optimizer's states.
  Its limit counts from the process that has imported torch and the model's module.  So it holds the
  weights, the optimizer's states and the batch.

The correctness pass of a search judges few utterances, since it comes before the size is known.  So
a step of the heaviest batch at the size found is judged too: its loss, and random sums of its
gradient.  The oracle computes some frames at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

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
    job = replace(job, pass_name=request.pass_name, script=request.script, variant=request.variant)
    context = subject.prepare(job)
    batches = context.all_batches
    subject.check_shortest(context.adapter, batches, range(len(batches)))
    passes: dict[str, Callable[[subject.Context], Iterator[JobLine]]] = {
        "correctness": correctness.run,
        "probe": partial(probe, request=request),
        "judge": partial(judge, request=request),
    }
    yield from subject.carried_out(context, passes[request.pass_name])


def limit_of(request: Request, device: torch.device) -> Limit:
    """Return the memory limit of this process, counted from what the process holds now.  So call
    this when all that a step needs is loaded."""
    if device.type == "cuda":
        return Device(request.memory_limit, device)
    return AddressSpace(request.limit_bytes or 0)  # never 0: on a CPU each request has a limit


def limit_once_loaded(context: subject.Context, request: Request) -> Limit:
    """Run a step of one utterance, which loads and compiles all that a step needs.  Return the
    memory limit, counted from what the process holds after this.

    On CUDA run a step of one utterance of each of the heaviest batches: a size may have kernels of
    its own, which take memory when they are first launched."""
    (scope,) = context.settings.scopes
    batches = (
        heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    )
    for batch in batches:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    return limit_of(request, context.device)


def probe(context: subject.Context, request: Request) -> Iterator[Measured]:
    """Run a step of each of the heaviest batches under the memory limit.

    Yield a record with a Try before each step. After the step yield the Try once more, with the
    peak of the step."""
    (scope,) = context.settings.scopes
    limit = limit_once_loaded(context, request)
    for batch in heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        tried = Try(N=sizes["N"], T=sizes["T_max"], U=sizes["U_max"], limit_bytes=limit.bytes)
        yield Measured(value=as_written(tried))
        with limit.making():  # a wider limit: whether the inputs can be made is not the question
            step = context.step(scope, batch)
        with limit.enforced():
            step.run()
        del step
        tried.peak_bytes = limit.peak_bytes
        yield Measured(value=as_written(tried))
        context.model.zero_grad(set_to_none=True)


def judge(context: subject.Context, request: Request) -> Iterator[Stop]:
    """Yield a ``stop`` record with the errors of a step of the heaviest batch.

    The step runs under `Limit.making`, a wider limit than a probe's: it only protects the machine.
    The oracle runs without a limit.  Raises WrongResult, after the record, if an error is too
    large."""
    (scope,) = context.settings.scopes
    batch = heaviest(context.all_batches)[0]
    with limit_once_loaded(context, request).making():
        # Its numbers are those of no probe, so that a loss cannot know the answer from one.
        step = context.step(scope, batch, after_timing.FURTHER_REPEAT)
        loss = float(step.run())
        ranges = getattr(step.prepared, "ranges", None)  # of a pruned loss
        taken = after_timing.Taken(after_timing.FURTHER_REPEAT, loss, ranges)
        taken.keep(context, scope, step)  # digests of its inputs, and its gradients as sums
        del step  # the oracle needs its memory
        context.model.zero_grad(set_to_none=True)
    end = Stop(scope=scope, round=context.round)
    end.loss_error, end.grad_error, wrong = after_timing.check(context, scope, {batch: taken})
    yield end
    if wrong:
        raise WrongResult(f"at the size found, {wrong}")


def train(settings: Settings, request: Steps) -> Iterator[JobLine]:
    """Run `rounds` steps of each Try of a request, in random order, under its `share` of the limit.

    Yield the environment.  Before each step yield its Try; after the step yield the Try again, with
    the duration.  At the end yield the last Try once more, with the peak memory of all steps.
    Raises OutOfMemory, and UserError for any other failure of the model."""
    device = set_up_torch(settings)
    yield environment(settings, device)
    loading.module(request.model.rpartition(":")[0])  # imported before the limit counts
    optimizer = loading.imported(f"torch.optim:{request.optimizer}")
    _load_libraries(optimizer, device)
    limit = limit_of(request, device)
    order = request.tries * request.rounds
    random.Random(settings.seed).shuffle(order)
    torch.manual_seed(settings.seed)
    tried = order[0]  # the step to name if the training cannot be made
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
    except Exception as error:  # a model may raise anything
        raise _failure(error, tried) from error
    tried.peak_bytes = limit.peak_bytes
    yield Measured(value=as_written(tried))


def _load_libraries(optimizer: Any, device: torch.device) -> None:
    """Run a small step, which starts threads and loads what torch loads at first use."""
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    optimizer([weight], lr=0.0).step()


def _failure(error: Exception, step: Try) -> Exception:
    """Return the error of a training as OutOfMemory if memory ran out, else as a UserError that
    names the bucket.

    If the error has a cause, that tells whether memory ran out: where a model is made, the model's
    own error is the cause of a UserError.

    step: the step that failed, or the first step if the training could not be made"""
    reason = str(error) if isinstance(error, UserError) else reason_of(error)
    if is_out_of_memory(error.__cause__ or error):
        return OutOfMemory(reason)
    return UserError(f"bucket {step.bucket} (N {step.N}, T {step.T}, U {step.U}): {reason}")
