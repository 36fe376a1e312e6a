"""Time forward and forward+backward of both scopes, without a profiler, in a process for each round: the timing pass.

Leaves are made anew for every sample, untimed.  Every sample is kept, warm-up samples too (marked), with the load of
other processes beside it.

- CPU: perf_counter_ns at both ends.  The warm-up is on the batches that take most memory: else the first larger batch
  would pay for new pages and take up to twice its time.  With --allocator reuse the heap then gets as much again in one
  piece, since smaller steps split what was free.
- CUDA: events and wall time, synchronised at both ends, and a warm-up on each batch: its kernels, its sizes in the
  allocator.  All inputs are on the device before the first sample, or it would idle in between and lower its clocks.

The correctness pass judges a loss in a fresh process.  After the last sample this one judges it again, untimed, after
many calls on several batches; a loss that is wrong then has no times:

- The loss of the last timed step of each batch, against the float64 loss.
- Of the last timed step of the scope: its inputs, which must be what they were bit for bit, and its gradient g along
  one random direction d: <g, d> against (L(x + e d) - L(x - e d)) / 2 e in float64.  d is drawn after the last sample,
  and longer in a leaf whose gradient is shorter: a wrong gradient of encoder_out counts beside that of the weight,
  which is a thousand times as long.
- Where repeats have the same numbers, as on CUDA: one more step on other numbers.
"""

from __future__ import annotations

import copy
import gc
import math
import os
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.text import finite
from rnnt_bench.data.batching import heaviest, lightest
from rnnt_bench.instruments import device, sampling
from rnnt_bench.instruments.clock import Clock, time_step
from rnnt_bench.losses import layouts, oracle, rounding
from rnnt_bench.losses.inputs import OUTPUTS
from rnnt_bench.losses.passes import correctness, small_batches
from rnnt_bench.losses.step import LossStep, changed, fingerprints, leaves_of, prepare, remembered
from rnnt_bench.records.schema import Sample, Stop
from rnnt_bench.system import memory

#: Repeat of the further step: its numbers are those of no timed step, and the same for all losses of a round.
FURTHER_REPEAT = 1 << 20
#: Length of the steps along the direction.
EPSILON = 1e-5


@dataclass
class Taken:
    """The last timed step of a batch: its loss, and the ranges of a pruned one."""

    repeat: int
    loss: float
    ranges: Optional[torch.Tensor]


@dataclass
class Direction:
    """A random direction of the leaves of a step.

    weights: a power of two for each leaf, 1 for the leaf with the shortest gradient and less for longer ones, so that
    <g, d> has as much of each; right gradients have the same weights, so that losses share the oracle's answers."""

    seed: int
    weights: Dict[str, float]

    @classmethod
    def drawn(cls, context, gradients: Mapping[str, Optional[torch.Tensor]]) -> Direction:
        """Return a direction for these gradients; the seed is the same for all losses of a round."""
        question = ("seed of a direction", context.round)
        (seed,) = remembered(context.shared, question, {}, lambda: [float(int.from_bytes(os.urandom(6), "big"))])
        lengths = {name: 0.0 if value is None else float(value.double().norm()) for name, value in gradients.items()}
        measured = [length for length in lengths.values() if 0 < length < math.inf]
        weights = dict.fromkeys(lengths, 1.0)
        for name, length in lengths.items():
            if length in measured:
                weights[name] = 2.0 ** -round(math.log2(length / min(measured)))
        return cls(int(seed), weights)

    def of(self, name: str, leaf: torch.Tensor) -> torch.Tensor:
        """Return the direction of a leaf, float64."""
        generator = torch.Generator().manual_seed(self.seed + list(self.weights).index(name))
        drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        return self.weights[name] * drawn.to(leaf.device)


@dataclass
class Last:
    """The last timed step of a scope."""

    batch: int
    inputs: Dict[str, bytes]  # fingerprints of what the loss may only read
    direction: Direction
    along: float  # <g, d>
    length: float  # of g, each leaf times its weight

    @classmethod
    def of(cls, context, scope: str, batch: int, step: LossStep) -> Last:
        read = {name: getattr(step.batch, name) for name in ("targets", "T_lengths", "U_lengths", *OUTPUTS)}
        along = square = 0.0
        gradients = step.gradients()
        direction = Direction.drawn(context, gradients if scope == "step" else {})
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name != "given":
                along += float((gradient.double() * direction.of(name, gradient)).sum())
                square += float((direction.weights[name] * gradient.double()).square().sum())
                continue
            cells = layouts.of(context.adapter).cells(step.batch, step.prepared, {name: gradient}, {name: gradient})
            cells.seed = direction.seed
            for n in range(len(step.batch.shapes)):
                for begin, end, part, *_ in correctness.frames(cells, n):
                    along += float((part * cells.direction(n, begin, end, part)).sum())
                    square += float((part * part).sum())
        return cls(batch, fingerprints(read), direction, along, square**0.5)


def expected(
    context, scope: str, batch: Any, prepared: Any, shift: float = 0.0, direction: Optional[Direction] = None
) -> Tuple[float, float]:
    """Return (the right loss of a step, summed over the batch; the largest magnitude of its logits).

    The scores of some frames at a time are made in float64 from encoder and decoder outputs, in both scopes.  Losses
    that are given the same numbers in a round share the answer.  shift: so far along the direction.
    """
    adapter, layout, model = context.adapter, layouts.of(context.adapter), context.model
    leaves = leaves_of(model, batch)
    tensors = {**leaves, "targets": batch.targets, "ranges": getattr(prepared, "ranges", None)}
    question = [layout.step_cells.__qualname__, adapter.lattice, adapter.blank, context.dtype, batch.shapes, shift]
    if direction or layout.approximate:
        question.append(scope)
    if direction:
        question.append(direction)
    if direction and scope == "step":
        leaves = {name: leaf.detach().double() + shift * direction.of(name, leaf) for name, leaf in leaves.items()}

    def of_lattice() -> List[float]:
        loss = 0.0
        cells, double_model = layout.step_cells(batch, prepared, leaves, {}), copy.deepcopy(model).double()
        if direction and scope == "loss":
            cells.shift, cells.seed = shift, direction.seed
        double_model.load_state_dict({name: leaves[name] for name, _ in model.named_parameters()})
        for n, (T, U) in enumerate(batch.shapes):
            loss -= oracle.log_likelihood(adapter.lattice.arcs(correctness.parts(cells, n, adapter)))
            if scope == "step":
                single = small_batches.utterance(batch, n)
                single.encoder_out = leaves["encoder_out"][n : n + 1, :T].double()
                single.decoder_out = leaves["decoder_out"][n : n + 1, : U + 1].double()
                with torch.no_grad():
                    loss += float(layout.trained_beside(double_model, single))
        return [loss, cells.score]

    loss, score = remembered(context.shared, question, tensors, of_lattice)
    return loss, score


def check(context, scope: str, taken: Dict[int, Taken], last: Last) -> Tuple[float, float, str]:
    """Return (the largest relative error of the losses, the error of the gradient, what is wrong in words or "")."""
    errors, grad_error, wrong = [0.0], 0.0, []
    for batch, step in taken.items():
        inputs = context.new_batch(batch, 0 if batch in context.held else step.repeat)
        where = f"after timing, scope {scope}, batch {batch} ({small_batches.sizes(inputs.shapes)})"
        if batch == last.batch:
            overwritten = changed(last.inputs, {name: getattr(inputs, name) for name in last.inputs})
            if overwritten:
                wrong.append(f"{where}: it overwrites {', '.join(overwritten)}, which it may only read")
        prepared = context.adapter.prepare(inputs)
        if step.ranges is not None:
            prepared.ranges = step.ranges
        error, words = compared(context, scope, inputs, prepared, step.loss)
        errors.append(error)
        wrong += [f"{where}: of the last timed step, {words}"] if words else []
        if batch == last.batch and not words and not context.forward_only:
            shifts = (EPSILON, -EPSILON)
            ahead, behind = (expected(context, scope, inputs, prepared, e, last.direction)[0] for e in shifts)
            right = (ahead - behind) / (2 * EPSILON)
            tolerance = rounding.PRECISIONS[precision(context)].direction
            grad_error = abs(last.along - right) / max(last.length, abs(right), 1e-30)
            if not grad_error <= tolerance:
                words = f"along a random direction {last.along:.6g}, expected {right:.6g}; {tolerance:.0e} is allowed"
                wrong.append(f"{where}: the gradient of the last timed step is {words}")
    if context.held and not context.loops_in_python:
        inputs = context.new_batch(last.batch, FURTHER_REPEAT)
        further = prepare(context.adapter, context.model, inputs, scope)
        error, words = compared(context, scope, inputs, further.prepared, float(further.run()))
        errors.append(error)
        wrong += [f"after timing, scope {scope}: of one more step with other numbers, {words}"] if words else []
    return finite(max(errors)), finite(grad_error), wrong[0] if wrong else ""


def compared(context, scope: str, inputs: Any, prepared: Any, loss: float) -> Tuple[float, str]:
    """Return (relative error of the loss, what is wrong in words or "")."""
    right, score = expected(context, scope, inputs, prepared)
    limits = rounding.allowed(precision(context), inputs.shapes, score, right)
    error = abs(loss - right) / max(abs(right), 1e-30)
    if error <= limits.loss:
        return error, ""
    guess = small_batches.guess(loss, right, inputs.shapes)
    return error, f"the loss is {loss:.6g}, expected {right:.6g}{guess}; {limits.loss:.0e} is allowed"


def precision(context) -> str:
    """Return the key of rounding.PRECISIONS of what is timed."""
    return "tf32" if context.settings.tf32 else context.settings.dtype


#: On a CPU the loss alone is timed on one in BATCHES_FOR_A_LOSS batches of a round, for a small share of a step's time
#: cap: making its logits takes the joiner's time, which no sample shows.
BATCHES_FOR_A_LOSS = 3
LOSS_SHARE_OF_SECONDS = 0.05
#: Samples before the first level of memory, and at least between it and the last.
LEAST_KEPT = 3


class OfScope:
    """Takes the samples of a scope, and keeps what is judged after them."""

    def __init__(self, context, clock: Clock, scope: str):
        self.context, self.clock, self.scope = context, clock, scope
        self.taken: Dict[int, Taken] = {}
        self.latest: List[Tuple[int, LossStep]] = []  # the step of the last sample, which the next one drops first
        self.count, self.level = 0, 0  # samples; bytes in use once each batch and LEAST_KEPT samples were measured

    def sample(self, batch: int, repeat: int, warmup: bool) -> Sample:
        """Return a sample; arguments as of sampling.Sampler."""
        self.latest.clear()
        if not warmup:
            if self.count == max(LEAST_KEPT, len(self.taken)):
                self.level = in_use(self.context.device)
            self.count += 1
        numbers = 4 * repeat + 2 * warmup + (self.scope == "step")  # its own: a loss must not know an answer before
        step = self.context.step(self.scope, batch, numbers)
        timed, loss = time_step(step, self.clock, read=float)
        self.latest.append((batch, step))
        if not warmup:
            self.taken[batch] = Taken(numbers, loss, getattr(step.prepared, "ranges", None))
        of = {"scope": self.scope, "round": self.context.round, "batch": batch, "repeat": repeat, "warmup": warmup}
        return Sample(**of, loss=finite(loss), **timed)

    def kept(self) -> Optional[int]:
        """Return how many bytes more are in use after each further sample, once the last step is dropped; None where
        there were too few samples to tell, or the system does not."""
        self.latest.clear()
        further = self.count - max(LEAST_KEPT, len(self.taken))
        if further < LEAST_KEPT or not self.level:
            return None
        return max(in_use(self.context.device) - self.level, 0) // further


def in_use(where: torch.device) -> int:
    """Return the bytes that torch has on this GPU, or malloc in this process; 0 where the C library does not tell."""
    gc.collect()
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else memory.allocated_bytes() or 0


def run(context) -> Iterator[Union[Sample, Stop]]:
    """Yield the ``sample`` records of every scope, then their ``stop`` records; raise WrongResult if a loss was wrong.

    Rounds differ in the order of scopes.  If they have batches of their own on a CPU, each measures the step, which
    also warms up the loss, and then the loss alone on some of its batches.  A loss that loops in Python needs no
    warm-up and takes seconds: only the lightest batch of the first round is measured.
    """
    settings, clock = context.settings, Clock(context.device, context.settings.l2 == "cold")
    if clock.cuda:
        context.hold_inputs(context.batches)
    differing, number, threads = settings.own_batches, context.round or 1, device.host_threads(context.device)
    if differing and context.loops_in_python and number > 1:
        return
    batches, warm_up = context.batches, context.batches
    if context.loops_in_python:
        batches, warm_up = [lightest(context.all_batches, batches)], []
    elif not clock.cuda:
        warm_up = heaviest(context.all_batches, batches)
    loss_last, before = differing and not clock.cuda, memory.status_bytes("VmRSS")
    scopes = list(settings.scopes)
    weights = dict(context.model.named_parameters())
    of_weights = fingerprints(weights)
    ends: List[Tuple[Stop, Dict[int, Taken], Optional[Last]]] = []
    for scope in scopes[::-1] if loss_last or number // 2 % 2 else scopes:
        of_scope = OfScope(context, clock, scope)
        chosen, seconds, after_step = batches, settings.max_seconds, loss_last and scope == "loss" and len(scopes) > 1
        if after_step:  # a third of the batches, at least one; others in the next round: they may be sorted by size
            count = max(1, len(batches) // BATCHES_FOR_A_LOSS)
            chosen = [batches[(number * count + index) % len(batches)] for index in range(count)]
            seconds *= LOSS_SHARE_OF_SECONDS
        else:
            yield from sampling.warm_up(of_scope.sample, warm_up, settings.max_seconds, threads)
            if settings.allocator == "reuse" and not clock.cuda and before is not None:
                memory.widen_heap((memory.status_bytes("VmRSS") or 0) - before)
        caps = {"spread": settings.spread, "max_samples": settings.max_samples, "max_seconds": seconds}
        yield from sampling.sweep(of_scope.sample, chosen, **caps, threads=threads)
        last = None
        if of_scope.taken:
            last = Last.of(context, scope, *of_scope.latest.pop())
        ends.append((Stop(scope=scope, round=context.round, kept_bytes=of_scope.kept()), of_scope.taken, last))
    now, rounded = device.state(), ", ".join(changed(of_weights, weights))
    of_process = [name for name, value in context.state.items() if value != now[name]]
    for end, taken, last in ends:
        wrong, end.changed = "", of_process
        if last is not None:
            end.loss_error, end.grad_error, wrong = check(context, end.scope, taken, last)
        if rounded:
            wrong = f"after timing: it overwrites {rounded}, which it may only read"
        yield end
        if wrong:
            raise WrongResult(wrong)
