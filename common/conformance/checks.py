"""Judge the questions that need more than one loss and its gradient: a function for each, which
returns an Outcome.

A function raises answers.Refused if the loss raises an error, and NotAsked if the question does not
apply; rnnt_bench.conformance.judge turns these into outcomes.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import torch
from msgspec.structs import replace as changed

from rnnt_bench.conformance.answers import Examination, NotAsked, Refused, attempt, listed
from rnnt_bench.conformance.outcomes import DIFFERS, PASS, REFUSES, Outcome
from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.core.questions import FEW
from rnnt_bench.losses.judge import ONE
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.step import differentiate, run_together


def agrees(exam: Examination) -> Outcome:
    """Judge loss and gradient, that of padded cells included; a batch without a path may be
    refused."""
    try:
        return exam.outcome()
    except Refused as refusal:
        if exam.question.may_refuse and not exam.question.refusal:
            return Outcome(PASS, f"refuses: {refusal}")
        if exam.right_losses().isfinite().all():
            raise
        return Outcome(PASS, f"no path through its lattice; refuses: {refusal}")


def of_one_symbol(exam: Examination) -> Outcome:
    if exam.adapter.topology == "regular":
        raise NotAsked("its lattice has a path for every utterance")
    return agrees(exam)


def many_targets(exam: Examination) -> Outcome:
    with suppress(Refused):  # for more targets than frames, perhaps
        if exam.adapter.topology not in ONE_SYMBOL:
            return agrees(exam)
    return agrees(exam.but(shapes=[(1101, 1100)]))  # a path may have to end with a blank


def unmet_cells(exam: Examination) -> Outcome:
    answer = (exam.but(durations="1,2") if exam.adapter.topology == "tdt" else exam).answer()
    ((_, derivatives),) = answer.lattices
    gradient = answer.given.get("given")
    unmet = (derivatives[:, :-1] == 0).all(-1)
    if gradient is None or not unmet.any():
        raise NotAsked("a path meets every cell")
    return _zero(gradient.reshape(*unmet.shape, -1)[unmet], "")


def padding_gradient(exam: Examination) -> Outcome:
    outside = exam.answer().errors.padding
    if outside is None:
        raise NotAsked("its layout has no padding")
    return _zero(torch.tensor(outside), " in the padding")


def _zero(values: torch.Tensor, where: str) -> Outcome:
    if (values == 0).all():
        return Outcome(PASS)
    return Outcome(DIFFERS, f"gradient{where} up to {values.abs().max():.1e} instead of 0")


def must_refuse(exam: Examination) -> Outcome:
    """Judge an impossible input of two utterances: an error is right, any answer is wrong."""
    if exam.interpreted:
        raise NotAsked("arrays of the simulator check their indices, those of a GPU do not")
    steps = exam.ready()[2]
    try:
        return Outcome(DIFFERS, f"answers {listed(*attempt(run_together, steps, [ONE]))}")
    except Refused as refusal:
        return Outcome(PASS, f"refuses: {refusal}")


def laid_out(exam: Examination) -> Outcome:
    """Judge inputs of equal values in another memory layout: slices of wider tensors, or, if the
    question is no slice, tensors whose first and last dimension are swapped in memory."""

    def run_on_views(steps, factors):
        for step in steps:
            for name, leaf in step.leaves.items():
                values = leaf.detach()
                if exam.question.name == "slice":
                    view = torch.nn.functional.pad(values, (1, 1), value=100.0)[..., 1:-1]
                else:
                    view = values.transpose(0, -1).contiguous().transpose(0, -1)
                step.leaves[name] = view.detach().requires_grad_()
        return run_together(steps, factors)

    return exam.outcome(run_on_views)


def upstream_zero(exam: Examination) -> Outcome:
    given = exam.answer().given
    given["loss"] = given["loss"] * 0
    values = [value.reshape(-1) for value in given.values() if value is not None]
    return _zero(torch.cat(values), "")


def _reductions(exam: Examination, reduction: str) -> dict[str, torch.Tensor]:
    """Return the weights of utterances in what packages compute under this name, by description."""
    T, U = (torch.tensor(lengths, dtype=torch.float64) for lengths in zip(*exam.question.shapes))
    if reduction == "mean":
        return {
            "mean over utterances": torch.ones_like(T) / len(T),
            "mean over utterances of the loss per target": 1 / U / len(U),
            "mean over utterances of the loss per frame": 1 / T / len(T),
            "sum over all targets of the batch": 1 / U.sum() * torch.ones_like(T),
            "sum over all frames of the batch": 1 / T.sum() * torch.ones_like(T),
        }
    start = f"{reduction} of each loss per"
    return {"": torch.ones_like(T), f"{start} frame": 1 / T, f"{start} target": 1 / U}


def package_reduction(exam: Examination) -> Outcome:
    """Judge a reduction of the package; any mean is right if the gradient is of the same one, and
    the message says which."""
    reduction = exam.question.name.partition("-")[2]
    if reduction not in exam.adapter.reductions:
        raise NotAsked(
            f"it has no reduction {reduction!r}, only {', '.join(exam.adapter.reductions)}"
        )
    exam = replace(exam, adapter=exam.adapter.but(reduction=reduction, repairs=False))
    outcomes = []

    def run(steps, _):
        loss = steps[0].forward()
        differentiate(loss.sum(), steps)
        return [loss.detach()]

    for name, weights in _reductions(exam, reduction).items():
        answer = exam.answer(run, [weights])
        weighted = answer.of_utterances * weights
        answer.rights = weighted if reduction == "none" else weighted.sum().reshape(1)
        if answer.losses.numel() == answer.rights.numel():
            outcome = exam.compare(answer, run)
        else:
            words = f"{answer.losses.numel()} losses instead of {answer.rights.numel()}"
            outcome = Outcome(DIFFERS, words, math.inf)
        if outcome.result == PASS and (reduction == "mean" or not name):
            return changed(outcome, message=name)
        words = outcome.message or "value and gradient are another's"
        if name:
            words = f"{words}, compared with the {name}"
        outcomes.append(changed(outcome, result=DIFFERS, message=words))
    return min(outcomes, key=lambda outcome: outcome.loss_error or 0.0)


def second_backward(exam: Examination) -> Outcome:
    """Judge the gradient of a second backward through the same graph."""
    seconds = []

    def run(steps, factors):
        (step,), (factor,) = steps, factors
        loss = step.forward()
        total = (loss * factor.to(loss)).sum()
        step.answer = loss.detach()
        differentiate(total, steps, again=True)
        for leaf in step.leaves.values():
            leaf.grad = None
        seconds.append(step)
        differentiate(total, steps)
        return [step.answer]

    try:
        outcome = exam.outcome(run)
    except Refused as refusal:
        if not seconds:
            raise
        reason = str(refusal).removeprefix("in backward: ")
        return Outcome(REFUSES, f"in the second backward: {reason}")
    if outcome.result == PASS:
        return outcome
    return changed(outcome, message=f"in the second backward: {outcome.message}")


def unmodified(exam: Examination) -> Outcome:
    strict = replace(exam, adapter=exam.adapter.but(overwrites_logits=False))
    overwritten = strict.answer().overwritten
    if overwritten == ["logits"] and exam.adapter.overwrites_logits:
        return Outcome(PASS, "overwrites the logits, as it documents")
    return (
        Outcome(DIFFERS, f"overwrites {', '.join(overwritten)}") if overwritten else Outcome(PASS)
    )


def deterministic(exam: Examination) -> Outcome:
    exam = exam.but(shapes=FEW) if exam.interpreted else exam  # a simulator takes minutes for more
    first, *others = [exam.answer().given for _ in range(5)]
    errors = {
        name: max(relative_error(other[name], value) for other in others)
        for name, value in first.items()
    }
    if not any(errors.values()):
        return Outcome(PASS)
    off = errors.pop("loss")
    spread = max(errors.values())
    message = f"repeats differ: loss by {off:.1e}, gradient by {spread:.1e}"
    return Outcome(DIFFERS, message, off, spread)


def without_gradient(exam: Examination) -> Outcome:
    """Judge a forward of logits that require no gradient, or under torch.no_grad."""
    detached, trains = exam.question.name == "no-gradient", []

    def run(steps, _):
        (step,) = steps
        if detached:
            step.leaves.update({name: leaf.detach() for name, leaf in step.leaves.items()})
        with torch.set_grad_enabled(detached):
            loss = step.forward()
        trains.append(loss.requires_grad)
        return [loss.detach()]

    outcome = exam.outcome(run, has_gradient=False)
    return Outcome(DIFFERS, "its loss requires a gradient") if any(trains) else outcome
