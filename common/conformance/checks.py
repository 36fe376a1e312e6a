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
from rnnt_bench.conformance.questions import Examination, NotAsked, Question, Refused, compare, in_padding, listed, size
from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.step import changed as different
from rnnt_bench.losses.step import fingerprints

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
        question.backward(loss)
        return compare(question, loss)
    except Refused as refusal:
        if may_refuse:
            return Outcome(PASS, f"refuses: {refusal}")
        if torch.isfinite(question.right_losses()).all():
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
    question.answer()
    right = question.right()
    (((_, derivatives),),), _ = right.lattices()
    unmet = (derivatives[:, :-1] == 0).all(-1)
    if "given" not in question.leaves or not unmet.any():
        raise NotAsked("a path meets every cell")
    return _zero(right.cells[0].of(right.cells[0].gradient, 0, 0, 5)[unmet], "")


def padding_gradient(exam: Examination) -> Outcome:
    question = exam.ask(SMALL)
    question.answer()
    outside = in_padding(question.right().cells[0])
    if not len(outside):
        raise NotAsked("its layout has no padding")
    return _zero(outside, " in the padding")


def _zero(values: torch.Tensor, where: str) -> Outcome:
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
    for name, leaf in question.leaves.items():
        wider = torch.nn.functional.pad(leaf.detach(), (1, 1), value=100.0)[..., 1:-1]
        turned = leaf.detach().transpose(0, -1).contiguous().transpose(0, -1)
        question.leaves[name] = (wider if sliced else turned).detach().requires_grad_()
    return compare(question, question.answer()[0])


def upstream(exam: Examination, weights: Sequence[float]) -> Outcome:
    """Judge a loss that is multiplied by a factor before its backward, or the losses of two utterances by one each."""
    each = len(weights) > 1
    question, factors = exam.ask(SMALL, reduction="none" if each else None), torch.tensor(weights, dtype=torch.float64)
    losses = question.loss()
    if each and losses.numel() != len(weights):
        return Outcome(DIFFERS, f"a loss of shape {tuple(losses.shape)} instead of ({len(weights)},)")
    total = (losses.reshape(-1) * factors.to(losses)).sum()
    gradients = question.backward(total)
    if not factors.any():
        return _zero(torch.cat([total.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)]), "")
    return compare(question, total, factors if each else factors[0])


def _reductions(reduction: str) -> Dict[str, torch.Tensor]:
    """Return the weights of utterances in what packages compute under this name, by description."""
    T, U = (torch.tensor(lengths, dtype=torch.float64) for lengths in zip(*RAGGED))
    if reduction == "mean":
        return {
            "mean over utterances": torch.ones_like(T) / len(T),
            "mean over utterances of the loss per target": 1 / U / len(U),
            "mean over utterances of the loss per frame": 1 / T / len(T),
            "sum over all targets of the batch": 1 / U.sum(),
            "sum over all frames of the batch": 1 / T.sum(),
        }
    each = f"{reduction} of each loss per"
    return {"": torch.ones(()), f"{each} frame": 1 / T, f"{each} target": 1 / U}


def package_reduction(exam: Examination, reduction: str) -> Outcome:
    """Judge a reduction of the package; any mean is right if the gradient is of the same one, and the message says
    which."""
    question = exam.ask(RAGGED, reduction=reduction, repaired=False)
    loss, known = question.answer()[0], _reductions(reduction)
    of_each = reduction == "none"
    outcomes = {name: compare(question, loss, weights, of_each=of_each) for name, weights in known.items()}
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
        question.backward(total)
    except Refused as refusal:
        return Outcome(REFUSES, f"in the second backward: {refusal.reason}")
    outcome = compare(question, total, torch.tensor(2.0))
    return outcome if outcome.result == PASS else changed(outcome, message=f"second {outcome.message}")


def numeric_gradient(exam: Examination) -> Outcome:
    """Judge the gradient, that of the padding included, by central differences of the package's own loss."""
    question = exam.ask([(3, 2), (2, 1)], V=4, dtype=torch.float64)
    try:
        loss, gradients = question.answer()
    except Refused as refusal:
        raise NotAsked(f"it does not take float64: {refusal}") from None
    gradient = torch.cat([each.detach().cpu().double().reshape(-1) for each in gradients])
    noise, words = _rounding(loss.detach().cpu().double(), question.right_losses().sum())
    step = min(max((3 * noise) ** (1 / 3), 1e-5), 1e-2)  # rounding and the third derivative give equal errors
    places = [(name, index) for name, leaf in question.leaves.items() for index in range(leaf.numel())]
    rises = [_value_at(question, *place, step) - _value_at(question, *place, -step) for place in places]
    error = relative_error(gradient, torch.tensor(rises, dtype=torch.float64) / (2 * step))
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


def _value_at(question: Question, name: str, index: int, by: float) -> float:
    """Return the loss after adding `by` to number `index` of a leaf.  A simulator runs the kernels of the gradient in
    forward, for minutes, so there the leaf requires none."""
    moved = Question(question.adapter, question.ready)  # new tensors each time, since some losses overwrite them
    moved.leaves[name].data.view(-1)[index] += by
    for leaf in moved.leaves.values():
        leaf.requires_grad_(not question.adapter.simulated)
    return moved.loss().item()


def unmodified(exam: Examination) -> Outcome:
    question = exam.ask(SMALL)
    before = fingerprints(question.step.inputs())
    question.answer()
    overwritten = different(before, question.step.inputs())
    if overwritten == ["logits"] and exam.adapter.overwrites_logits:
        return Outcome(PASS, "overwrites the logits, as it documents")
    return Outcome(DIFFERS, f"overwrites {', '.join(overwritten)}") if overwritten else Outcome(PASS)


def deterministic(exam: Examination) -> Outcome:
    shapes = SMALL if exam.interpreted else [(30, 12), (26, 9), (17, 10)]  # a simulator takes minutes for these
    (loss, first), *others = (exam.ask(shapes, V=11).answer() for _ in range(5))
    off = max(relative_error(other, loss) for other, _ in others)
    spread = max(relative_error(*pair) for _, gradients in others for pair in zip(gradients, first))
    if off == spread == 0:
        return Outcome(PASS)
    return Outcome(DIFFERS, f"repeats differ: loss by {size(off)}, gradient by {size(spread)}", off, spread)


def without_gradient(exam: Examination, detached: bool) -> Outcome:
    """Judge a forward of logits that require no gradient, or, if not `detached`, under torch.no_grad."""
    question = exam.ask(RAGGED)
    if detached:
        question.leaves.update({name: leaf.detach() for name, leaf in question.leaves.items()})
    with torch.set_grad_enabled(detached):
        loss = question.loss()
    if loss.requires_grad:
        return Outcome(DIFFERS, "its loss requires a gradient")
    return compare(question, loss, has_gradient=False)


def many_targets(exam: Examination) -> Outcome:
    with suppress(Refused):  # for more targets than frames, perhaps
        if exam.adapter.topology not in ONE_SYMBOL:
            return agrees(exam, [(4, 1100)], V=5, slow=True)
    return agrees(exam, [(1101, 1100)], V=5, slow=True)  # a path may have to end with a blank


def more_targets_than_frames(exam: Examination) -> Outcome:
    if exam.adapter.topology == "regular":
        raise NotAsked("its lattice has a path for every utterance")
    return agrees(exam, [(3, 5)])
