"""Judge an examination: the functions that the `check` of a question names.

Most questions have `agrees`, which compares loss and gradient with the oracle's.  A function
returns an Outcome.  It raises Refused if the loss raises an error, and NotAsked if the question
does not apply to the loss; rnnt_bench.conformance.judge turns both into outcomes.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import torch
from msgspec.structs import replace as changed

from rnnt_bench.conformance.answers import (
    Examination,
    NotAsked,
    Refused,
    attempt,
    gradient_entries,
    listed,
)
from rnnt_bench.conformance.outcomes import DIFFERS, PASS, REFUSES, Outcome
from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.core.questions import FEW
from rnnt_bench.losses.judge import ONE
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.step import differentiate, run_together

#: Calls whose bits are compared.
REPEATS = 5


def agrees(exam: Examination) -> Outcome:
    """Judge loss and gradient, also in the padding.

    If the loss raises an error, return PASS in two cases, else raise Refused.  In the first, an
    error is a right answer to the question (`may_refuse` is true and `refusal` is "").  In the
    second, an utterance has no path through the lattice, so that the right loss is infinite."""
    try:
        return exam.outcome()
    except Refused as refusal:
        # With `may_refuse` and a `refusal`, a run accepts the error, the matrix calls it a fault.
        if exam.question.may_refuse and not exam.question.refusal:
            return Outcome(PASS, f"refuses: {refusal}")
        if exam.right_losses().isfinite().all():
            raise
        return Outcome(PASS, f"no path through its lattice; refuses: {refusal}")


def of_one_symbol(exam: Examination) -> Outcome:
    """Judge loss and gradient on an utterance that has no path if a frame takes one symbol at most.

    Raises NotAsked for a loss on the regular lattice, which always has a path.  All other lattices
    are asked: the right loss is infinite where the lattice has no path."""
    if exam.adapter.topology == "regular":
        raise NotAsked("its lattice has a path for every utterance")
    return agrees(exam)


def many_targets(exam: Examination) -> Outcome:
    """Judge an utterance with many targets and few frames.

    If the loss takes at most one target a frame, or refuses that utterance, judge one with more
    frames than targets."""
    if exam.adapter.topology not in ONE_SYMBOL:
        with suppress(Refused):
            return agrees(exam)
    # One frame more than targets, since a path may have to end with a blank.
    return agrees(exam.but(shapes=[(1101, 1100)]))


def unmet_cells(exam: Examination) -> Outcome:
    """Judge the gradient of the cells that no path meets, which must be 0.

    Raises NotAsked if the loss gives no gradient of logits, or if a path meets every cell."""
    if exam.adapter.topology == "tdt":
        exam = exam.but(durations="1,2")  # with duration 0 a path would meet every cell
    answer = exam.answer()
    lattice = answer.lattices[0]  # of the only utterance
    gradient = answer.computed.get("given")
    # (T, U + 1): the likelihood depends on no arc of the cell.
    is_unmet = (lattice.derivatives == 0).all(-1)
    if gradient is None or not is_unmet.any():
        raise NotAsked("a path meets every cell")
    return _zero(gradient.reshape(*is_unmet.shape, -1)[is_unmet])


def padding_gradient(exam: Examination) -> Outcome:
    """Judge the gradient of the padding, which must be 0.  Raises NotAsked without padding."""
    largest = exam.answer().errors.padding
    if largest is None:
        raise NotAsked("its layout has no padding")
    return _zero(torch.tensor(largest), where=" in the padding")


def _zero(values: torch.Tensor, where: str = "") -> Outcome:
    """Return the outcome of entries of a gradient that must be 0; `where` is part of the message."""
    if (values == 0).all():
        return Outcome(PASS)
    return Outcome(DIFFERS, f"gradient{where} up to {values.abs().max():.1e} instead of 0")


def must_refuse(exam: Examination) -> Outcome:
    """Judge a batch of two utterances with an impossible input: an error is right, any loss is
    wrong."""
    if exam.interpreted:
        raise NotAsked("arrays of the simulator check their indices, those of a GPU do not")
    _, _, steps = exam.ready()
    try:
        (loss,) = attempt(run_together, steps, factors=[ONE])
    except Refused as refusal:  # `attempt` turns an error of the loss into this
        return Outcome(PASS, f"refuses: {refusal}")
    return Outcome(DIFFERS, f"answers {listed(loss)}")


def laid_out(exam: Examination) -> Outcome:
    """Judge inputs of equal values in another memory layout.

    They are slices of wider tensors, or tensors whose first and last dimension are swapped in
    memory, as the name of the question says.
    """

    def view(values: torch.Tensor) -> torch.Tensor:
        """Return the same values in the memory layout that the question names."""
        if exam.question.name == "slice":
            # A loss that ignores the strides reads the border of 100.0, and gets it wrong.
            return torch.nn.functional.pad(values, (1, 1), value=100.0)[..., 1:-1]
        # The question "not-contiguous": the first dimension has stride 1.
        return values.transpose(0, -1).contiguous().transpose(0, -1)

    def run_on_views(steps, factors):
        """Run the steps on leaves in that layout; return their losses."""
        for step in steps:
            for name, leaf in step.leaves.items():
                # A leaf of its own: no graph leads back to the leaf in the usual layout.
                step.leaves[name] = view(leaf.detach()).detach().requires_grad_()
        return run_together(steps, factors)

    return exam.outcome(run_on_views)


def upstream_zero(exam: Examination) -> Outcome:
    """Judge the gradient of a loss times 0: it must be 0, and so must the loss times 0."""
    answer = exam.answer()
    products = answer.computed["loss"].reshape(-1) * 0  # NaN if the loss is not finite
    return _zero(torch.cat([products, gradient_entries(answer)]))


def _reductions(exam: Examination, reduction: str) -> dict[str, torch.Tensor]:
    """Return {description: weights} for all that packages compute under the name of a reduction.

    The weights (N,) float64 are the factors of the utterances' losses.  For "mean" all of these
    weights are right, for "none" and "sum" only those with the description ""."""
    shapes = torch.tensor(exam.question.shapes, dtype=torch.float64)  # (N, 2)
    T, U = shapes.unbind(1)
    same = torch.ones_like(T)
    if reduction == "mean":
        return {
            "mean over utterances": same / len(T),
            "mean over utterances of the loss per target": 1 / U / len(T),
            "mean over utterances of the loss per frame": 1 / T / len(T),
            "sum over all targets of the batch": same / U.sum(),
            "sum over all frames of the batch": same / T.sum(),
        }
    start = f"{reduction} of each loss per"
    return {"": same, f"{start} frame": 1 / T, f"{start} target": 1 / U}


def package_reduction(exam: Examination) -> Outcome:
    """Judge the package's own reduction that the question's name ends with: none, mean or sum.

    A mean is right if value and gradient are both those of one of the known means; the message says
    of which.  For "none" and "sum" only the reduction without a description is right.  The message
    of a wrong answer compares it with the known reduction whose loss is nearest.  Raises NotAsked
    if the package has no such reduction.
    """
    reduction = exam.question.name.partition("-")[2]
    available = exam.adapter.reductions
    if reduction not in available:
        raise NotAsked(f"it has no reduction {reduction!r}, only {', '.join(available)}")
    exam = replace(exam, adapter=exam.adapter.but(reduction=reduction, repairs=False))
    wrong = []
    for description, weights in _reductions(exam, reduction).items():
        outcome = _reduced(exam, weights, reduction)
        may_be_right = reduction == "mean" or not description
        if may_be_right and outcome.result == PASS:
            return changed(outcome, message=description)
        message = outcome.message or "value and gradient are right"
        if description:
            message += f", compared with the {description}"
        wrong.append(changed(outcome, result=DIFFERS, message=message))
    # loss_error is None only without a path; these questions have paths, so no loss lacks it.
    return min(wrong, key=lambda outcome: outcome.loss_error or 0.0)


def _reduced(exam: Examination, weights: torch.Tensor, reduction: str) -> Outcome:
    """Return the outcome of the loss under the package's own reduction.

    The right answer is made of the products of the utterances' right losses and `weights` (N,): all
    products if `reduction` is "none", else their sum.  With another number of losses than that, the
    outcome is DIFFERS with an infinite error."""

    def run(steps, _):
        # Only the oracle needs the factors, `weights`: the package's reduction has them in it.
        loss = steps[0].forward()
        differentiate(loss.sum(), steps)
        return [loss.detach()]

    answer = exam.answer(run, [weights])
    # So far `rights` are the utterances' losses, or their sum, without the weights.
    weighted = answer.right_of_utterances * weights
    answer.rights = weighted if reduction == "none" else weighted.sum().reshape(1)
    count = answer.losses.numel()
    if count == len(answer.rights):
        return exam.compare(answer, run)
    return Outcome(DIFFERS, f"{count} losses instead of {len(answer.rights)}", loss_error=math.inf)


def second_backward(exam: Examination) -> Outcome:
    """Judge the gradient of a second backward through the same graph.

    The outcome is REFUSES if the loss refuses the second backward. Raises Refused if the loss
    refuses earlier."""
    reached = []  # the steps whose second backward began

    def run(steps, factors):
        """Run a step with two backwards; leave the gradient of the second in its leaves."""
        (step,), (factor,) = steps, factors
        loss = step.forward()
        step.answer = loss.detach()  # an error after this counts as one of the backward
        total = (loss * factor.to(loss)).sum()
        differentiate(total, steps, again=True)
        for leaf in step.leaves.values():
            leaf.grad = None  # so that only the gradient of the second backward is judged
        reached.append(step)
        differentiate(total, steps)
        return [step.answer]

    try:
        outcome = exam.outcome(run)
    except Refused as refusal:
        if not reached:
            raise
        return Outcome(REFUSES, f"in the second backward: {refusal.reason}")
    if outcome.result == PASS:
        return outcome
    return changed(outcome, message=f"in the second backward: {outcome.message}")


def unmodified(exam: Examination) -> Outcome:
    """Judge whether the inputs are the same bits after the step as before.

    A loss that overwrites nothing but its logits passes, too, if its adapter says so."""
    # An answer does not check the logits if the adapter says that the loss overwrites them.
    strict = replace(exam, adapter=exam.adapter.but(overwrites_logits=False))
    overwritten = strict.answer().overwritten
    if not overwritten:
        return Outcome(PASS)
    if overwritten == ["logits"] and exam.adapter.overwrites_logits:
        return Outcome(PASS, "overwrites the logits, as it documents")
    return Outcome(DIFFERS, f"overwrites {', '.join(overwritten)}")


def deterministic(exam: Examination) -> Outcome:
    """Judge whether loss and gradient have the same bits in every repeat."""
    if exam.interpreted:
        exam = exam.but(shapes=FEW)  # a simulator takes minutes for more
    first, *others = [exam.answer().computed for _ in range(REPEATS)]
    errors = {
        name: max(relative_error(other[name], value) for other in others)
        for name, value in first.items()
    }
    if not any(errors.values()):
        return Outcome(PASS)
    loss_error = errors.pop("loss")
    grad_error = max(errors.values())
    message = f"repeats differ: loss by {loss_error:.1e}, gradient by {grad_error:.1e}"
    return Outcome(DIFFERS, message, loss_error, grad_error)


def without_gradient(exam: Examination) -> Outcome:
    """Judge the loss without a gradient.  The loss must not require one, either.

    For the question "no-gradient" the inputs require no gradient, and torch's gradients are on.
    For the other question the inputs require gradients, and the loss runs under torch.no_grad."""
    is_detached = exam.question.name == "no-gradient"
    requires_grad = []  # of each loss

    def run(steps, _factors):
        (step,) = steps
        if is_detached:
            step.leaves.update({name: leaf.detach() for name, leaf in step.leaves.items()})
        # Either the inputs or torch's gradients keep the loss from a gradient, never both.
        with torch.set_grad_enabled(is_detached):
            loss = step.forward()
        requires_grad.append(loss.requires_grad)
        return [loss.detach()]

    outcome = exam.outcome(run, has_gradient=False)
    if any(requires_grad):
        return Outcome(DIFFERS, "its loss requires a gradient")
    return outcome
