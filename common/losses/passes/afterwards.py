"""Check after the timed steps whether their losses and gradients were right, and whether the inputs are unchanged.

The correctness pass judges a loss in a fresh process.  This judges it after many calls on several batches:

- The loss of the last timed step of each batch, against the float64 loss.
- Of the last timed step of the scope: its inputs, which must be what they were bit for bit, and its gradient g along
  one random direction d: <g, d> against (L(x + e d) - L(x - e d)) / 2 e in float64.
- Where repeats have the same numbers, as on CUDA: one more step on other numbers.

None of this is timed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch

from common.core.text import finite
from common.losses import oracle
from common.losses.fingerprint import changed, fingerprints, remembered
from common.losses.inputs import OUTPUTS
from common.losses.layouts import table
from common.losses.passes import at_size, diagnosis
from common.losses.passes.answers import utterance
from common.losses.step import LossStep, leaves_of, prepare

#: TF32 rounds the factors of products to 10 bits, as float16 does.
TF32_TOLERANCE = oracle.TOLERANCE["float16"]
#: Repeat of the further step: its numbers are those of no timed step, and the same for all losses of a round.
FURTHER_REPEAT = 1 << 20
#: Length of the steps along the direction, and the largest error of the gradient along it as a share of its length,
#: in float32 or float64 throughout, and where anything is rounded to fewer digits.  A wrong gradient is off by 0.3.
EPSILON = 1e-5
GRADIENT_TOLERANCE, ROUNDED_TOLERANCE = 1e-2, 1e-1


@dataclass
class Taken:
    """The last timed step of a batch: its loss, and the ranges of a pruned one."""

    repeat: int
    loss: float
    ranges: Optional[torch.Tensor]

    @classmethod
    def of(cls, step: LossStep, repeat: int) -> Taken:
        """Return the record of a step that has run."""
        assert step.answer is not None
        return cls(repeat, float(step.answer), getattr(step.prepared, "ranges", None))


@dataclass
class Last:
    """The last timed step of a scope."""

    batch: int
    inputs: Dict[str, bytes]  # fingerprints of what the loss may only read
    along: float  # <g, d>
    length: float  # of g

    @classmethod
    def of(cls, context, scope: str, batch: int, step: LossStep) -> Last:
        """Return the record of a step that has run."""
        read = {name: getattr(step.batch, name) for name in ("targets", "T_lengths", "U_lengths", *OUTPUTS)}
        along = square = 0.0
        for number, (name, gradient) in enumerate(step.gradients().items()):
            if gradient is None:
                continue
            if name != "given":
                along += float((gradient.double() * direction(gradient, number)).sum())
                square += float((gradient.double() ** 2).sum())
                continue
            cells = table.of(context.adapter).cells(step.batch, step.prepared, {name: gradient}, {name: gradient})
            for n in range(len(step.batch.shapes)):
                for begin, end, part, *_ in at_size.frames(cells, n):
                    along += float((part * cells.direction(n, begin, end, part)).sum())
                    square += float((part * part).sum())
        return cls(batch, fingerprints(read), along, square**0.5)


def direction(leaf: torch.Tensor, number: int) -> torch.Tensor:
    """Return the random direction, float64, of the leaf with this number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)


def expected(context, scope: str, batch: Any, prepared: Any, shift: float = 0.0) -> Tuple[float, float]:
    """Return (the right loss of a step, by how much rounding may change it), both summed over the batch.

    The scores of some frames at a time are made in float64 from encoder and decoder outputs, in both scopes.  Losses
    that are given the same numbers in a round share the answer.

    Args:
        context: common.losses.subject.Context.
        scope: "loss" or "step".
        batch, prepared: the inputs of the step.
        shift: so far along the direction.
    """
    adapter, layout, model = context.adapter, table.of(context.adapter), context.model
    leaves = leaves_of(model, batch)
    tensors = {**leaves, "targets": batch.targets, "ranges": getattr(prepared, "ranges", None)}
    question = [layout.step_cells.__qualname__, adapter.lattice, adapter.blank, context.dtype, batch.shapes, shift]
    if shift or layout.approximate:
        question.append(scope)
    if shift and scope == "step":
        moved = enumerate(leaves.items())
        leaves = {name: leaf.detach().double() + shift * direction(leaf, number) for number, (name, leaf) in moved}

    def of_lattice() -> List[float]:
        loss = rounding = 0.0
        eps = torch.finfo(torch.float64 if context.dtype == torch.float64 else torch.float32).eps
        cells, double_model = layout.step_cells(batch, prepared, leaves, {}), copy.deepcopy(model).double()
        cells.shift = shift if scope == "loss" else 0.0
        double_model.load_state_dict({name: leaves[name] for name, _ in model.named_parameters()})
        for n, (T, U) in enumerate(batch.shapes):
            loss -= oracle.log_likelihood(adapter.lattice.arcs(at_size.parts(cells, n, adapter)))
            rounding += eps * (T + U) * cells.score
            if scope == "step":
                single = utterance(batch, n)
                single.encoder_out = leaves["encoder_out"][n : n + 1, :T].double()
                single.decoder_out = leaves["decoder_out"][n : n + 1, : U + 1].double()
                with torch.no_grad():
                    loss += float(layout.trained_beside(double_model, single))
        return [loss, rounding]

    loss, rounding = remembered(context.shared, question, tensors, of_lattice)
    return loss, rounding


def check(context, scope: str, taken: Dict[int, Taken], last: Last) -> Tuple[float, float, str]:
    """Return (the largest relative error of the losses, the error of the gradient, what is wrong in words or "").

    Args:
        context: common.losses.subject.Context.
        scope: "loss" or "step".
        taken: the last timed step of each batch.
        last: the last of them.
    """
    errors, grad_error, wrong = [0.0], 0.0, []
    for batch, step in taken.items():
        inputs = context.new_batch(batch, 0 if batch in context.held else step.repeat)
        where = f"after timing, scope {scope}, batch {batch} ({diagnosis.sizes(inputs.shapes)})"
        if batch == last.batch:
            overwritten = changed(last.inputs, {name: getattr(inputs, name) for name in last.inputs})
            if overwritten:
                wrong.append(f"{where}: it overwrites {', '.join(overwritten)}, which it may only read")
        prepared = context.adapter.prepare(inputs)
        if step.ranges is not None:
            prepared.ranges = step.ranges
        error, words = _compared(context, scope, inputs, prepared, step.loss)
        errors.append(error)
        wrong += [f"{where}: of the last timed step, {words}"] if words else []
        if batch == last.batch and not words:
            ahead, behind = (expected(context, scope, inputs, prepared, shift)[0] for shift in (EPSILON, -EPSILON))
            right = (ahead - behind) / (2 * EPSILON)
            settings = context.settings
            is_rounded = settings.tf32 or settings.amp or settings.dtype not in ("float32", "float64")
            tolerance = ROUNDED_TOLERANCE if is_rounded else GRADIENT_TOLERANCE
            grad_error = abs(last.along - right) / max(last.length, abs(right), 1e-30)
            if not grad_error <= tolerance:
                words = f"along a random direction {last.along:.6g}, expected {right:.6g}; {tolerance:.0e} is allowed"
                wrong.append(f"{where}: the gradient of the last timed step is {words}")
    if context.held and not context.loops_in_python:
        inputs = context.new_batch(last.batch, FURTHER_REPEAT)
        further = prepare(context.adapter, context.model, inputs, scope)
        error, words = _compared(context, scope, inputs, further.prepared, float(further.run()))
        errors.append(error)
        wrong += [f"after timing, scope {scope}: of one more step with other numbers, {words}"] if words else []
    return finite(max(errors)), finite(grad_error), wrong[0] if wrong else ""


def _compared(context, scope: str, inputs: Any, prepared: Any, loss: float) -> Tuple[float, str]:
    """Return (relative error of the loss, what is wrong in words or "")."""
    right, rounding = expected(context, scope, inputs, prepared)
    size = max(abs(right), 1e-30)
    base = TF32_TOLERANCE if context.settings.tf32 else oracle.TOLERANCE[context.settings.precision]
    tolerance, error = base + rounding / size, abs(loss - right) / size
    if error <= tolerance:
        return error, ""
    guess = diagnosis.guess(loss, right, inputs.shapes)
    return error, f"the loss is {loss:.6g}, expected {right:.6g}{guess}; {tolerance:.0e} is allowed"
