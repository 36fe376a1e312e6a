"""Try the steps of a size under a limit on memory, and judge the largest that fits.

A probe runs one step of the heaviest batches of a size, in a process of its own, under an enforced limit: a step that
runs out of memory, whatever the error is called, does not fit.

The correctness pass of a search judges few utterances, since it comes before the size is known.  So a step of the
heaviest batch at the size found is judged too: its loss against one forward of the oracle, some frames at a time, and
of its gradient that of one utterance, drawn from all.  It takes about as long as a step, and no memory of the batch's
size.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any, Dict, Iterator, Mapping, Tuple

import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.settings import Settings
from rnnt_bench.core.text import finite
from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.memory import AddressSpace, Device, Limit
from rnnt_bench.losses import layouts, rounding, subject, words
from rnnt_bench.losses.judge import Errors, Right, gradient_of
from rnnt_bench.losses.passes import after_timing, correctness
from rnnt_bench.losses.questions import alone
from rnnt_bench.losses.step import LossStep, prepare
from rnnt_bench.records.schema import JobLine, Measured, Stop, as_written
from rnnt_bench.tools.largest import model
from rnnt_bench.tools.largest.search import Try


def run(job: Mapping[str, Any]) -> Iterator[JobLine]:
    """Yield the records of a pass of a loss ("correctness", "probe" or "judge"), or of steps of a model."""
    given = job["given"]
    if "model" in given:
        yield from model.run(job)
        return
    name = given["pass"]
    context = subject.prepare({**given, "shared": job.get("shared")}, Settings.from_json(job["settings"]))
    if name == "correctness":
        yield from subject.carried_out(context, correctness.run)
    else:
        subject.check_shortest(context.adapter, context.all_batches, range(len(context.all_batches)))
        function = probe if name == "probe" else judge
        yield from subject.carried_out(context, partial(function, given=given))


def limit_of(context, scope: str, given: Mapping[str, Any]) -> Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a first step does.

    On CUDA a step of one utterance of each batch: each size may have kernels of its own, which take memory when first
    launched.
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
    """Yield a ``stop`` record of the errors of a step; raise WrongResult if it is wrong.

    The limit protects the machine, with the slack for inputs; the oracle is outside of it."""
    (scope,) = context.settings.scopes
    end, wrong = judged(context, scope, limit_of(context, scope, given))
    yield end
    if wrong:
        raise WrongResult(wrong)


def judged(context, scope: str, limited: Limit) -> Tuple[Stop, str]:
    """Return the errors of a step of the heaviest batch, and what is wrong with it in words."""
    batch = heaviest(context.all_batches)[0]
    inputs = context.new_batch(batch, after_timing.FURTHER_REPEAT)
    where, n = f"at {words.sizes(inputs.shapes)}", random.SystemRandom().randrange(len(inputs.shapes))
    with limited.making():
        step = context.step(scope, batch, after_timing.FURTHER_REPEAT)
        loss, prepared = float(step.run()), step.prepared
        has_none = context.forward_only or layouts.of(context.adapter).approximate
        gradients = {} if has_none else of_utterance(context, step, n)
        del step
        context.model.zero_grad(set_to_none=True)
    end = Stop(scope=scope, round=context.round)
    error, line = after_timing.compared(context, scope, inputs, prepared, loss)
    end.loss_error = finite(error)
    if not line and gradients:
        end.grad_error, line = judge_utterance(context, scope, alone(inputs, n), gradients)
        line = line and f"utterance {n + 1} of {len(inputs.shapes)}: {line}"
    return end, f"{where}: {line}" if line else ""


def of_utterance(context, step: LossStep, n: int) -> Dict[str, torch.Tensor]:
    """Return copies of the gradients of one utterance: of its outputs, or of what the loss is given, by leaf."""
    gradients: Dict[str, Any] = step.gradients()
    T, U = step.batch.shapes[n]
    if "given" in gradients:
        cells = layouts.of(context.adapter).cells(step.batch, step.prepared, gradients, gradients)
        return {"given": cells.of(gradients["given"], n, 0, T).clone()}
    sizes = {"encoder_out": T, "decoder_out": U + 1}
    return {name: gradients[name][n : n + 1, :size].clone() for name, size in sizes.items()}


def judge_utterance(context, scope: str, single: Any, gradients: Dict[str, Any]) -> Tuple[float, str]:
    """Return the error of the gradients of an utterance, and what is wrong in words."""
    adapter = context.adapter
    step, errors = prepare(adapter, context.model, single, scope), Errors(adapter)
    if scope == "loss":
        gradients = {"given": gradients["given"].reshape(step.given.shape)}
    step.computed = gradients  # of weights those are of all utterances
    right = Right(adapter, context.model, scope, [step], [after_timing.ONE])
    errors.collect(right.parts(right.lattices()[0]))
    limits = rounding.allowed(
        after_timing.precision(context),
        single.shapes,
        right.score,
        abs(float(right.losses[0].max())),
        largest=max(leaf.largest for leaf in errors.leaves.values()),
        negligible=adapter.negligible,
    )
    name = max(errors.leaves, key=lambda name: errors.leaves[name].error)
    error = finite(errors.leaves[name].error)
    if error <= limits.gradient:
        return error, ""
    return error, f"the {gradient_of(name)} {words.size(error)}, {limits.gradient:.0e} is allowed"
