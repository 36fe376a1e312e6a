"""Judge the cases: one function for each kind of case, from an examination and the case's values to an Outcome.

A function asks a question, lets the loss answer, and compares.  It raises questions.Refused if the loss raises an
error, and NotAsked if the case does not apply; rnnt_bench.conformance.judge turns these into outcomes.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from msgspec.structs import replace as changed

from rnnt_bench.conformance.cases import DIFFERS, PASS, REFUSES, Outcome
from rnnt_bench.conformance.questions import Examination, NotAsked, Question, Refused, compare, listed, right_of, size
from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.losses.oracle import relative_error

#: (T, U) of each utterance of a batch that is ragged in both.
RAGGED = [(9, 4), (6, 5), (8, 1)]
#: A ragged batch of few numbers.
SMALL = [(4, 2), (3, 1)]


def agrees(
    exam: Examination,
    shapes=RAGGED,
    *,
    dtype: str = "float32",
    integers: str = "",
    may_refuse: bool = False,
    slow: bool = False,
    **how: Any,
) -> Outcome:
    """Judge the summed loss and its gradient, that of padded cells included; a batch without a path may be refused.

    dtype: of the logits; integers: of targets and lengths, instead of those that the adapter chooses; may_refuse: an
    error is as right as the answer; slow: a simulator would take hours; how: goes to Examination.ask.
    """
    if exam.interpreted and slow:
        raise NotAsked("not in a simulator, which would take hours")
    if exam.interpreted and dtype not in exam.adapter.dtypes:
        raise NotAsked(f"its kernels have no {dtype}; a simulator computes with any dtype")
    convert = getattr(torch, integers) if integers else None
    question = exam.ask(shapes, dtype=getattr(torch, dtype), convert=convert, **how)
    try:
        loss = question.loss()
        return compare(question, loss, question.backward(loss), *right_of(question))
    except Refused as refusal:
        if may_refuse:
            return Outcome(PASS, f"refuses: {refusal}")
        if torch.isfinite(question.expected()[0]).all():
            raise
        return Outcome(PASS, f"no path through its lattice; refuses: {refusal}")


def with_durations(
    exam: Examination, durations: Optional[str] = None, sigma: Optional[float] = None, shapes=RAGGED
) -> Outcome:
    """Judge a loss with other durations, which one of tokens and durations is asked for, or with another sigma."""
    if not exam.adapter.lattice.durations or (durations and exam.adapter.topology != "tdt"):
        raise NotAsked("it predicts no durations")
    return agrees(_lasting(exam, durations, sigma), shapes)


def _lasting(exam: Examination, durations: Optional[str], sigma: Optional[float] = None) -> Examination:
    """Return the examination with other durations and another sigma; None: those of the lattice."""
    changed = replace(exam.adapter.settings, durations=durations, sigma=sigma)
    return replace(exam, adapter=exam.adapter.but(settings=changed))


def unmet_cells(exam: Examination) -> Outcome:
    question = (_lasting(exam, "1,2") if exam.adapter.topology == "tdt" else exam).ask([(5, 3)])
    _, gradient = question.answer()
    unmet = (right_of(question)[1] == 0).all(-1)
    if not unmet.any() or question.layout.tensors != ("logits",):
        raise NotAsked("a path meets every cell")
    return _zero(gradient, unmet, "")


def padding_gradient(exam: Examination) -> Outcome:
    question = exam.ask(SMALL)
    if question.padding is None:
        raise NotAsked("its layout has no padding")
    return _zero(question.answer()[1], question.padding, " in the padding")


def _zero(gradient: torch.Tensor, cells: torch.Tensor, where: str) -> Outcome:
    values = gradient.detach().cpu()[cells]
    if (values == 0).all():
        return Outcome(PASS)
    return Outcome(DIFFERS, f"gradient{where} up to {size(values.abs().max().item())} instead of 0")


def must_refuse(exam: Examination, **how: Any) -> Outcome:
    """Judge an impossible input of two utterances: an error is right, any answer is wrong."""
    if exam.interpreted:
        raise NotAsked("arrays of the simulator check their indices, those of a GPU do not")
    question = exam.ask([(6, 3), (5, 2)], **how)
    try:
        loss, _ = question.answer()
    except Refused as refusal:
        return Outcome(PASS, f"refuses: {refusal}")
    return Outcome(DIFFERS, f"answers {listed(loss.detach())}")


def laid_out(exam: Examination, sliced: bool) -> Outcome:
    """Judge logits that are columns of a wider tensor, or, if not `sliced`, not contiguous."""
    question = exam.ask(RAGGED)
    values = question.leaf.detach()
    wider = torch.nn.functional.pad(values, (1, 1), value=100.0)[..., 1:-1]
    turned = values.transpose(0, -1).contiguous().transpose(0, -1)
    question.leaf = (wider if sliced else turned).detach().requires_grad_()
    return compare(question, *question.answer(), *right_of(question))


def upstream(exam: Examination, weights: Sequence[float]) -> Outcome:
    """Judge a loss that is multiplied by a factor before its backward, or the losses of two utterances by one each."""
    each = len(weights) > 1
    question, factors = exam.ask(SMALL, reduction="none" if each else None), torch.tensor(weights, dtype=torch.float64)
    losses = question.loss()
    if each and losses.numel() != len(weights):
        return Outcome(DIFFERS, f"a loss of shape {tuple(losses.shape)} instead of ({len(weights)},)")
    total = (losses.reshape(-1) * factors.to(losses)).sum()
    right = right_of(question, lambda expected: (expected * factors).sum())
    return compare(question, total, question.backward(total), *right)


def _reductions(reduction: str) -> Dict[str, Any]:
    """Return what packages compute under this name, from (N,) losses, by description."""
    T, U = (torch.tensor(lengths, dtype=torch.float64) for lengths in zip(*RAGGED))
    if reduction == "mean":
        return {
            "mean over utterances": torch.mean,
            "mean over utterances of the loss per target": lambda losses: (losses / U).mean(),
            "mean over utterances of the loss per frame": lambda losses: (losses / T).mean(),
            "sum over all targets of the batch": lambda losses: losses.sum() / U.sum(),
            "sum over all frames of the batch": lambda losses: losses.sum() / T.sum(),
        }
    reduce: Any = torch.sum if reduction == "sum" else torch.clone
    return {
        "": reduce,
        f"{reduction} of each loss per frame": lambda losses: reduce(losses / T),
        f"{reduction} of each loss per target": lambda losses: reduce(losses / U),
    }


def package_reduction(exam: Examination, reduction: str) -> Outcome:
    """Judge a reduction of the package; any mean is right if the gradient is of the same one, and the message says
    which."""
    question = exam.ask(RAGGED, reduction=reduction, repaired=False)
    answer = question.answer()
    known = _reductions(reduction)
    outcomes = {name: compare(question, *answer, *right_of(question, reduce)) for name, reduce in known.items()}
    for name in known if reduction == "mean" else [""]:
        if outcomes[name].result == PASS:
            return changed(outcomes[name], message=name)

    # no error of a loss of another shape
    errors = {name: math.inf if each.loss_error is None else each.loss_error for name, each in outcomes.items()}
    name = min(known, key=errors.__getitem__)
    words = f"compared with the {name}" if name else ""
    message = ", ".join(filter(None, [outcomes[name].message or "value and gradient are another's", words]))
    return changed(outcomes[name], result=DIFFERS, message=message)


def second_backward(exam: Examination) -> Outcome:
    """Judge the gradient of a second backward through the same graph."""
    question = exam.ask(SMALL)
    total = question.loss() * 2
    question.backward(total, retain_graph=True)
    try:
        second = question.backward(total)
    except Refused as refusal:
        return Outcome(REFUSES, f"in the second backward: {refusal.reason}")
    outcome = compare(question, total, second, *right_of(question, lambda losses: losses.sum() * 2))
    return outcome if outcome.result == PASS else changed(outcome, message=f"second {outcome.message}")


def numeric_gradient(exam: Examination) -> Outcome:
    """Judge the gradient, that of the padding included, by central differences of the package's own loss."""
    question = exam.ask([(3, 2), (2, 1)], V=4, dtype=torch.float64)
    try:
        loss, gradient = (each.detach().cpu().double() for each in question.answer())
    except Refused as refusal:
        raise NotAsked(f"it does not take float64: {refusal}") from None
    noise, words = _rounding(loss, right_of(question)[0])
    step = min(max((3 * noise) ** (1 / 3), 1e-5), 1e-2)  # rounding and the third derivative give equal errors
    numeric = torch.empty_like(gradient)
    for index in range(gradient.numel()):
        up, down = (_value_at(question, index, by) for by in (step, -step))
        numeric.view(-1)[index] = (up - down) / (2 * step)
    error = relative_error(gradient, numeric)
    if error <= 1e-6 + 2 * noise / step + step**2:
        return Outcome(PASS, words, grad_error=error)
    return Outcome(DIFFERS, f"gradient off by {size(error)} of central differences, steps {step:.0e}", None, error)


def _rounding(loss: torch.Tensor, right: torch.Tensor) -> Tuple[float, str]:
    """Return (by how much rounding may change the loss, a remark on it for the outcome or "")."""
    largest, error = right.abs().item(), relative_error(loss.reshape(right.shape), right)
    if error <= 1e-12:
        return torch.finfo(torch.float64).eps * largest, ""
    precision = min(max(error, torch.finfo(torch.float32).eps), 1e-5)  # a larger error is not rounding
    return precision * largest, f"of a loss that is off by {size(error)}, so in larger steps"


def _value_at(question: Question, index: int, by: float) -> float:
    """Return the loss after adding `by` to number `index` of its leaf.  A simulator runs the kernels of the gradient in
    forward, for minutes, so there the leaf requires none."""
    moved = question.truth.clone()
    moved.view(-1)[index] += by
    leaf = moved.to(question.leaf.device)  # a new tensor each time, since some losses overwrite it
    return question.loss(leaf.requires_grad_(not question.adapter.simulated)).item()


def unmodified(exam: Examination) -> Outcome:
    question = exam.ask(SMALL)
    tensors = {"logits": question.leaf}
    tensors.update({k: v for k, v in vars(question.prepared).items() if isinstance(v, torch.Tensor)})
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    question.answer()
    overwritten = [name for name, tensor in tensors.items() if not torch.equal(tensor.detach(), before[name])]
    if overwritten == ["logits"] and exam.adapter.overwrites_logits:
        return Outcome(PASS, "overwrites the logits, as it documents")
    return Outcome(DIFFERS, f"overwrites {', '.join(overwritten)}") if overwritten else Outcome(PASS)


def deterministic(exam: Examination) -> Outcome:
    shapes = SMALL if exam.interpreted else [(30, 12), (26, 9), (17, 10)]  # a simulator takes minutes for these
    repeats = [[each.detach().clone() for each in exam.ask(shapes, V=11).answer()] for _ in range(5)]
    (loss, gradient), *others = repeats
    if all(torch.equal(loss, other) and torch.equal(gradient, grad) for other, grad in others):
        return Outcome(PASS)
    spread = max(relative_error(grad, gradient) for _, grad in others)
    off = max(relative_error(other, loss) for other, _ in others)
    return Outcome(DIFFERS, f"repeats differ: loss by {size(off)}, gradient by {size(spread)}", off, spread)


def without_gradient(exam: Examination, detached: bool) -> Outcome:
    """Judge a forward of logits that require no gradient, or, if not `detached`, under torch.no_grad."""
    question = exam.ask(RAGGED)
    if detached:
        question.leaf = question.leaf.detach()
    with torch.set_grad_enabled(detached):
        loss = question.loss()
    if loss.requires_grad:
        return Outcome(DIFFERS, "its loss requires a gradient")
    return compare(question, loss, None, *right_of(question))


def many_targets(exam: Examination) -> Outcome:
    with suppress(Refused):  # for more targets than frames, perhaps
        if exam.adapter.topology not in ONE_SYMBOL:
            return agrees(exam, [(4, 1100)], V=5, slow=True)
    return agrees(exam, [(1101, 1100)], V=5, slow=True)  # a path may have to end with a blank


def more_targets_than_frames(exam: Examination) -> Outcome:
    if exam.adapter.topology == "regular":
        raise NotAsked("its lattice has a path for every utterance")
    return agrees(exam, [(3, 5)])
