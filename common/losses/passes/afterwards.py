"""Check after the timed steps whether their losses were right, and whether the inputs are unchanged.

The correctness pass judges a loss in a fresh process.  This judges it after many calls on several batches: first the
loss of the last timed step of each batch, against the float64 loss; then one more step on other numbers, whose inputs
must stay the same bit for bit.  Every third round has that step, of the scopes in turn.  None of this is timed.  Leaves
out gradients; losses that loop in Python get no further step, which would take seconds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from common.core.text import finite
from common.data.batching import lightest
from common.losses import fingerprint, oracle, remembered
from common.losses.inputs import OUTPUTS
from common.losses.layouts import table
from common.losses.layouts.base import Layout
from common.losses.passes import at_size, diagnosis
from common.losses.passes.answers import utterance
from common.losses.step import LossStep, leaves_of, prepare

#: TF32 rounds the factors of products to 10 bits, as float16 does.
TF32_TOLERANCE = oracle.TOLERANCE["float16"]
#: Repeat of the further step: its numbers are those of no timed step, and the same for all losses of a round.
FURTHER_REPEAT = 1 << 20


@dataclass(frozen=True)
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


def expected(context, scope: str, batch: Any, prepared: Any) -> Tuple[float, float]:
    """Return (the right loss of a step, by how much rounding may change it), both summed over the batch.

    The scores of some frames at a time are made in float64 from encoder and decoder outputs, in both scopes.  Losses
    that are given the same numbers in a round share the answer (see remembered.py).
    """
    adapter, layout, model = context.adapter, table.of(context.adapter), context.model
    leaves = leaves_of(model, batch)
    tensors = {**leaves, "targets": batch.targets, "ranges": getattr(prepared, "ranges", None)}
    question = [layout.step_cells.__qualname__, adapter.lattice, adapter.blank, context.dtype, batch.shapes]

    def of_lattice() -> List[float]:
        loss = rounding = 0.0
        eps = torch.finfo(torch.float64 if context.dtype == torch.float64 else torch.float32).eps
        cells = layout.step_cells(batch, prepared, leaves, {})
        for n, (T, U) in enumerate(batch.shapes):
            loss -= oracle.log_likelihood(adapter.lattice.arcs(at_size.parts(cells, n, adapter)))
            rounding += eps * (T + U) * cells.largest_score()
        return [loss, rounding]

    def beside() -> List[float]:
        loss, double_model = 0.0, copy.deepcopy(model).double()
        for n in range(len(batch.shapes)):
            single = utterance(batch, n)
            outputs = {name: getattr(single, name).detach().double() for name in OUTPUTS}
            with torch.no_grad():
                loss += float(layout.trained_beside(double_model, replace(single, **outputs)))
        return [loss]

    loss, rounding = remembered.answer(context.shared, question, tensors, of_lattice)
    if scope == "step" and type(layout).trained_beside is not Layout.trained_beside:
        tensors.pop("ranges")
        loss += remembered.answer(context.shared, [adapter.name, "beside", *question], tensors, beside)[0]
    return loss, rounding


def check(context, scope: str, taken: Dict[int, Taken], with_further: bool = True) -> Tuple[Optional[float], str]:
    """Return (the largest relative error of the losses, what is wrong in words or "").

    Args:
        context: common.losses.context.Context.
        scope: "loss" or "step".
        taken: the last timed step of each batch.
        with_further: whether to take a step on other numbers too.
    """
    errors, wrong = [0.0], []
    for batch, last in taken.items():
        held = context.held.get(batch)
        inputs = context.new_batch(batch, 0 if held else last.repeat)
        if held:
            names = ("targets", "T_lengths", "U_lengths", *OUTPUTS)
            before = fingerprint.fingerprints({name: getattr(inputs, name) for name in names})
            changed = fingerprint.changed(before, {name: getattr(held, name) for name in names})
            wrong += _overwritten(changed, scope, batch, inputs.shapes)
        error, words = _compared(context, scope, inputs, last.loss, last.ranges)
        errors.append(error)
        if words:
            wrong.append(f"{_where(scope, batch, inputs.shapes)}: of the last timed step, {words}")
    if with_further and not context.loops_in_python:
        error, lines = _one_more(context, scope, taken)
        errors.append(error)
        wrong += lines
    return finite(max(errors)), wrong[0] if wrong else ""


def _one_more(context, scope: str, taken: Dict[int, Taken]) -> Tuple[float, List[str]]:
    """Take a step of the lightest batch with numbers that no timed step had; return its error and what is wrong."""
    batch = lightest(context.all_batches, list(taken))
    inputs = context.new_batch(batch, FURTHER_REPEAT)
    step = prepare(context.adapter, context.model, inputs, scope)
    before = fingerprint.fingerprints(step.inputs())
    step.run()
    last = Taken.of(step, 0)
    changed = fingerprint.changed(before, step.inputs())
    if changed:
        return 0.0, _overwritten(changed, scope, batch, inputs.shapes)
    error, words = _compared(context, scope, inputs, last.loss, last.ranges)
    return error, [
        f"{_where(scope, batch, inputs.shapes)}: of one more step with other numbers, {words}"
    ] if words else []


def _compared(context, scope: str, inputs: Any, loss: float, ranges: Optional[torch.Tensor]) -> Tuple[float, str]:
    """Return (relative error of the loss, what is wrong in words or "")."""
    prepared = context.adapter.prepare(inputs)
    if ranges is not None:
        prepared.ranges = ranges
    right, rounding = expected(context, scope, inputs, prepared)
    size = max(abs(right), 1e-30)
    base = TF32_TOLERANCE if context.settings.tf32 else oracle.TOLERANCE[context.settings.precision]
    tolerance, error = base + rounding / size, abs(loss - right) / size
    if error <= tolerance:
        return error, ""
    guess = diagnosis.guess(loss, right, inputs.shapes)
    return error, f"the loss is {loss:.6g}, expected {right:.6g}{guess}; {tolerance:.0e} is allowed"


def _overwritten(changed: Sequence[str], scope: str, batch: int, shapes: Sequence[Tuple[int, int]]) -> List[str]:
    """Return a line about inputs that the loss has changed, [] if there are none."""
    if not changed:
        return []
    return [f"{_where(scope, batch, shapes)}: it overwrites {', '.join(changed)}, which it may only read"]


def _where(scope: str, batch: int, shapes: Sequence[Tuple[int, int]]) -> str:
    """Return the scope and the size of a batch in words."""
    T, U = max(T for T, _ in shapes), max(U for _, U in shapes)
    return f"after timing, scope {scope}, batch {batch} (N {len(shapes)}, T {T}, U {U})"
