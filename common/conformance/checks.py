"""Judge the cases: one function for each kind of case, from an examination and the case's values to an Outcome.

A function asks a question, lets the loss answer, and compares.  It raises questions.Refused if the loss raises an
error, and NotAsked if the case does not apply; common.conformance.judge turns these into outcomes.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from common.conformance.answers import compare, listed, size
from common.conformance.large import more_than_2_31_elements as more_than_2_31_elements
from common.conformance.questions import Examination, NotAsked, Question, Refused
from common.conformance.records import DIFFERS, PASS, REFUSES, Outcome
from common.core.implementations import ONE_SYMBOL
from common.losses import oracle
from common.losses.inputs import Batch
from common.losses.oracle import relative_error
from common.losses.topologies import Topology

#: (T, U) of each utterance of a batch that is ragged in both.
RAGGED = [(9, 4), (6, 5), (8, 1)]
#: A ragged batch of few numbers, so that its reproduction is short enough to paste.
SMALL = [(4, 2), (3, 1)]
#: Weights of the losses of the utterances of SMALL.
WEIGHTS = [2.0, -1.0]


def right_of(question: Question, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return (expected value, expected gradient of the leaf), float64, for the losses (N,) reduced by `reduce`."""
    losses, truth = question.expected()
    value = reduce(losses)
    (gradient,) = torch.autograd.grad(value.sum(), truth)
    return value.detach(), gradient


def agrees(exam: Examination, shapes=RAGGED, **how: Any) -> Outcome:
    """Judge the summed loss and its gradient, that of padded cells included; a batch without a path may be refused.

    `how` goes to Examination.ask.
    """
    question = exam.ask(shapes, **how)
    try:
        loss = question.forward()
    except Refused as refusal:
        if torch.isfinite(question.expected()[0]).all():
            raise
        return Outcome(PASS, f"no path through its lattice; refuses: {refusal}")
    gradient = question.backward(loss)
    return compare(question, loss, gradient, *right_of(question, torch.sum))


def repeated_labels(exam: Examination) -> Outcome:
    """Judge targets that are all the same symbol."""
    return agrees(exam, alter=lambda batch: replace(batch, targets=torch.full_like(batch.targets, 3)))


def minus_inf(exam: Examination) -> Outcome:
    """Judge a batch in which the last symbol has a logit of -inf everywhere and is no target."""
    return agrees(exam, minus_inf=6, alter=lambda batch: replace(batch, targets=batch.targets.clamp(max=5)))


def blank_target(exam: Examination) -> Outcome:
    """Judge a batch in which the second target of the first utterance is the blank, symbol 0; it may be refused."""
    try:
        return agrees(exam, SMALL, alter=_changed("targets", (0, 1), 0))
    except Refused as refusal:
        return Outcome(PASS, f"refuses: {refusal}")


def with_durations(
    exam: Examination, durations: Optional[str] = None, sigma: Optional[float] = None, shapes=RAGGED
) -> Outcome:
    """Judge a loss with other durations, which one of tokens and durations is asked for, or with another sigma."""
    if not exam.adapter.lattice.durations or (durations and exam.adapter.topology != "tdt"):
        raise NotAsked("it predicts no durations")
    return agrees(_lasting(exam, durations, sigma), shapes)


def _lasting(exam: Examination, durations: Optional[str], sigma: Optional[float] = None) -> Examination:
    """Return the examination with other durations and another sigma; None: those of the lattice."""
    adapter = copy.copy(exam.adapter)
    adapter.settings = replace(adapter.settings, durations=durations, sigma=sigma)
    return replace(exam, adapter=adapter)


def unmet_cells(exam: Examination) -> Outcome:
    """Judge whether the gradient of cells that no path meets is exactly 0."""
    question = (_lasting(exam, "1,2") if exam.adapter.topology == "tdt" else exam).ask([(5, 3)])
    gradient = question.backward(question.forward()).detach().cpu().double()
    _, expected = right_of(question, torch.sum)
    unmet = (expected == 0).all(-1)
    if not unmet.any() or question.layout.tensors != ("logits",):
        raise NotAsked("a path meets every cell")
    if (gradient[unmet] == 0).all():
        return Outcome(PASS)
    return Outcome(DIFFERS, f"gradient up to {size(gradient[unmet].abs().max().item())} instead of 0")


def impossible_target(exam: Examination) -> Outcome:
    """Judge an utterance in which a target has a logit of -inf everywhere."""
    return agrees(exam, [(4, 2)], minus_inf=3, alter=_changed("targets", (0, 1), 3))


def long(exam: Examination) -> Outcome:
    """Judge an utterance of many frames and targets."""
    if exam.adapter.simulated:
        raise NotAsked("not in a simulator, which would take hours")
    return agrees(exam, [(370, 96)], V=40)


def on_a_dtype(exam: Examination, dtype: str) -> Outcome:
    """Judge logits of a floating-point dtype ("float16")."""
    if exam.adapter.simulated and dtype not in exam.adapter.dtypes:
        raise NotAsked(f"its kernels have no {dtype}; a simulator computes with any dtype")
    return agrees(exam, dtype=getattr(torch, dtype))


def on_integers(exam: Examination, dtype: str) -> Outcome:
    """Judge targets and lengths of one integer dtype ("int32"), instead of those that the adapter chooses."""
    return agrees(exam, convert=getattr(torch, dtype))


def padding_gradient(exam: Examination) -> Outcome:
    """Judge whether the gradient of padded cells is exactly 0."""
    question = exam.ask(SMALL)
    if question.padding is None:
        raise NotAsked("its layout has no padding")
    outside = question.backward(question.forward()).detach().cpu().double()[question.padding]
    if (outside == 0).all():
        return Outcome(PASS)
    return Outcome(DIFFERS, f"gradient in the padding up to {size(outside.abs().max().item())} instead of 0")


def nan_padding(exam: Examination) -> Outcome:
    """Judge a batch whose padding holds NaN."""
    outcome = agrees(exam, SMALL, fill=math.nan)
    if outcome.result == DIFFERS and exam.adapter.log_probs:
        return replace(outcome, message=f"{outcome.message} (behind torch's log_softmax, whose gradient is nan there)")
    return outcome


# -- what must be refused --------------------------------------------------------------------------------------------


def _changed(name: str, index: tuple, value: int) -> Callable[[Batch], Batch]:
    """Return a function that sets `index` of the tensor `name` of a batch to `value`."""

    def alter(batch: Batch) -> Batch:
        changed = getattr(batch, name).clone()
        changed[index] = value
        return replace(batch, **{name: changed})

    return alter


#: By case: the field that is changed of a batch [(6, 3), (5, 2)] with V = 7, the index in it, and the new value.
IMPOSSIBLE: Dict[str, tuple] = {
    "target-too-large": ("targets", (1, 0), 7),
    "target-negative": ("targets", (1, 0), -1),
    "frames-over": ("T_lengths", (0,), 9),
    "targets-over": ("U_lengths", (0,), 5),
}


def must_refuse(exam: Examination, what: str) -> Outcome:
    """Judge an impossible input `what` of IMPOSSIBLE: an error is right, any answer is wrong."""
    if exam.adapter.simulated:
        raise NotAsked("arrays of the simulator check their indices, those of a GPU do not")
    question = exam.ask([(6, 3), (5, 2)], alter=_changed(*IMPOSSIBLE[what]))
    try:
        loss = question.forward()
        answer = f"answers {listed(loss.detach())}"
        question.backward(loss)
    except Refused as refusal:
        return Outcome(PASS, f"refuses: {refusal}")
    return Outcome(DIFFERS, answer)


# -- layouts, upstream gradients, reductions -------------------------------------------------------------------------


def not_contiguous(exam: Examination) -> Outcome:
    """Judge logits that are not contiguous."""
    question = exam.ask(RAGGED)
    values = question.leaf.detach()
    leaf = values.transpose(0, -1).contiguous().transpose(0, -1)
    assert not leaf.is_contiguous() and torch.equal(leaf, values)
    question.leaf = leaf.requires_grad_()
    question.made.append("logits = logits.transpose(0, -1).contiguous().transpose(0, -1)")
    return _of_leaf(question)


def a_slice(exam: Examination) -> Outcome:
    """Judge logits that are columns of a wider tensor."""
    question = exam.ask(RAGGED)
    wide = torch.nn.functional.pad(question.leaf.detach(), (1, 1), value=100.0)
    question.leaf = wide[..., 1:-1].detach().requires_grad_()
    question.made.append("logits = torch.nn.functional.pad(logits, (1, 1), value=100.0)[..., 1:-1]")
    return _of_leaf(question)


def _of_leaf(question: Question) -> Outcome:
    """Return the outcome of the summed loss and its gradient, for the leaf that the question has now."""
    loss = question.forward()
    gradient = question.backward(loss)
    return compare(question, loss, gradient, *right_of(question, torch.sum))


def upstream(exam: Examination, factor: float) -> Outcome:
    """Judge a loss that is multiplied by a factor before its backward."""
    question = exam.ask(SMALL)
    question.factor = factor
    loss = question.forward() * factor
    gradient = question.backward(loss)
    return compare(question, loss, gradient, *right_of(question, lambda losses: losses.sum() * factor))


#: Lambda of FastEmit.
EMIT = 0.1


def fastemit(exam: Examination) -> Outcome:
    """Judge value and gradient with FastEmit; the message says which of its two values the package returns."""
    adapter = copy.copy(exam.adapter)
    adapter.fastemit = EMIT
    if adapter.options() == exam.adapter.options():
        raise NotAsked("it has no FastEmit")
    question = replace(exam, adapter=adapter).ask(RAGGED)
    loss = question.forward()
    gradient = question.backward(loss)
    truth = question.truth.clone().requires_grad_()
    logits, batch, lattice = question.layout.padded(truth, question.batch), question.batch, _emitting(adapter.lattice)
    value = oracle.losses(logits, batch.targets, batch.shapes, question.adapter.blank, lattice).sum()
    (expected,) = torch.autograd.grad(value, truth)
    outcome = compare(question, loss, gradient, value, expected)
    times = compare(question, loss, gradient, value * (1 + EMIT), expected)
    if (times.loss_error or 0) < (outcome.loss_error or 0):
        return replace(times, message=times.message or "returns the loss times (1 + lambda)")
    return replace(outcome, message=outcome.message or "returns the loss")


def _emitting(lattice: Topology) -> Topology:
    """Return the lattice with FastEmit: the derivatives of its target arcs are multiplied by 1 + EMIT."""

    def arcs(self, parts, frames=None):
        weighted = []
        for arc in type(lattice).arcs(self, parts, frames):
            weight = arc.weight.clone()
            if arc.du and weight.requires_grad:
                weight.register_hook(lambda derivative: derivative * (1 + EMIT))
            weighted.append(arc._replace(weight=weight))
        return weighted

    return type("FastEmit", (type(lattice),), {"arcs": arcs})(**vars(lattice))


def upstream_weights(exam: Examination) -> Outcome:
    """Judge the sum of the losses of utterances, weighted by WEIGHTS."""
    question = exam.ask(SMALL, reduction="none")
    losses = question.forward()
    if losses.numel() != len(WEIGHTS):
        return Outcome(DIFFERS, f"a loss of shape {tuple(losses.shape)} instead of ({len(WEIGHTS)},)")
    total = (losses.reshape(-1) * losses.new_tensor(WEIGHTS)).sum()
    gradient = question.backward(total)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return compare(question, total, gradient, *right_of(question, lambda losses: (losses * weights).sum()))


def reduction_none(exam: Examination) -> Outcome:
    """Judge reduction "none": one loss for each utterance."""
    question = exam.ask(RAGGED, reduction="none", repaired=False)
    losses = question.forward()
    return _of_each(question, losses, question.backward(losses.sum()), lambda losses: losses)


def reduction_sum(exam: Examination) -> Outcome:
    """Judge reduction "sum"."""
    question = exam.ask(RAGGED, reduction="sum", repaired=False)
    loss = question.forward()
    return _of_each(question, loss, question.backward(loss), torch.sum)


def _of_each(question: Question, loss: torch.Tensor, gradient: torch.Tensor, reduce: Callable) -> Outcome:
    """Judge a sum, or the losses: if they are divided by T or U, the message tells so."""

    def divided_by(length: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return right_of(question, lambda losses: reduce(losses / length))

    outcome = compare(question, loss, gradient, *right_of(question, reduce))
    T, U = _lengths(question.batch.shapes)
    for name, length in (("frame", T), ("target", U)):
        divided = divided_by(length)
        if outcome.result == DIFFERS and compare(question, loss, None, *divided).result == PASS:
            both = compare(question, loss, gradient, *divided).result == PASS
            too = "the gradient too" if both else "not the gradient"
            return replace(outcome, message=f"{outcome.message} (the value is that of each loss per {name}, {too})")
    return outcome


def _lengths(shapes) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return T and U of the utterances, each (N,) float64."""
    T, U = (torch.tensor(lengths, dtype=torch.float64) for lengths in zip(*shapes))
    return T, U


def means(shapes) -> Dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the functions that packages call "mean", from (N,) losses to a scalar, by description."""
    T, U = _lengths(shapes)
    return {
        "mean over utterances": torch.mean,
        "mean over utterances of the loss per target": lambda losses: (losses / U).mean(),
        "mean over utterances of the loss per frame": lambda losses: (losses / T).mean(),
        "sum over all targets of the batch": lambda losses: losses.sum() / U.sum(),
        "sum over all frames of the batch": lambda losses: losses.sum() / T.sum(),
    }


def reduction_mean(exam: Examination) -> Outcome:
    """Judge reduction "mean": any of `means` is right if the gradient is of the same one; the message says which."""
    question = exam.ask(RAGGED, reduction="mean", repaired=False)
    loss = question.forward()
    gradient = question.backward(loss)
    mismatches = []
    for name, mean in means(RAGGED).items():
        outcome = compare(question, loss, gradient, *right_of(question, mean))
        if outcome.result == PASS:
            return replace(outcome, message=name)
        error = math.inf if outcome.loss_error is None else outcome.loss_error  # None of a loss of another shape
        mismatches.append((error, name, mean, outcome))
    _, name, question.reduce, outcome = min(mismatches, key=lambda mismatch: mismatch[0])
    return replace(outcome, message=f"{outcome.message} (compared with the {name})")


# -- autograd --------------------------------------------------------------------------------------------------------


def second_backward(exam: Examination) -> Outcome:
    """Judge the gradient of a second backward through the same graph."""
    question = exam.ask(SMALL)
    total = question.forward() * 2
    first = question.backward(total, retain_graph=True).clone()
    try:
        second = question.backward(total)
    except Refused as refusal:
        return Outcome(REFUSES, f"in the second backward: {refusal.reason}")
    value, expected = right_of(question, lambda losses: losses.sum() * 2)
    outcome = compare(question, total, second, value, expected)
    if outcome.result == PASS:
        return outcome
    was = relative_error(first, expected)
    return replace(outcome, message=f"second {outcome.message}; first off by {size(was)}")


def numeric_gradient(exam: Examination) -> Outcome:
    """Judge the gradient, that of the padding included, by central differences of the package's own loss."""
    question = exam.ask([(3, 2), (2, 1)], V=4, dtype=torch.float64)
    try:
        loss = question.forward()
        gradient = question.backward(loss).detach().cpu().double()
    except Refused as refusal:
        raise NotAsked(f"it does not take float64: {refusal}") from None
    value, _ = right_of(question, torch.sum)
    noise, words = _rounding(loss.detach().cpu().double(), value)
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
    """Return the loss after adding `by` to the number `index` of its flattened leaf.

    A simulator runs the kernels of the gradient in forward, for minutes, so there the leaf requires none.
    """
    moved = question.truth.clone()
    moved.view(-1)[index] += by
    leaf = moved.to(question.leaf.device)  # a new tensor each time, since some losses overwrite it
    leaf.requires_grad_(not question.adapter.simulated)
    return question.loss_of(leaf).item()


def unmodified(exam: Examination) -> Outcome:
    """Judge whether logits, targets and lengths are unchanged after forward and backward."""
    question = exam.ask(SMALL)
    tensors = {"logits": question.leaf}
    tensors.update({k: v for k, v in vars(question.prepared).items() if isinstance(v, torch.Tensor)})
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    question.backward(question.forward())
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor.detach(), before[name])]
    if not changed:
        return Outcome(PASS)
    if changed == ["logits"] and exam.adapter.overwrites_logits:
        return Outcome(PASS, "overwrites the logits, as it documents")
    return Outcome(DIFFERS, f"overwrites {', '.join(changed)}")


def deterministic(exam: Examination) -> Outcome:
    """Judge whether five repeats give the same bits of loss and gradient."""
    shapes = SMALL if exam.adapter.simulated else [(30, 12), (26, 9), (17, 10)]  # a simulator takes minutes for these
    answers = []
    for _ in range(5):
        question = exam.ask(shapes, V=11)
        loss = question.forward()
        answers.append((loss.detach().clone(), question.backward(loss).clone()))
    (loss, gradient), *others = answers
    if all(torch.equal(loss, other) and torch.equal(gradient, grad) for other, grad in others):
        return Outcome(PASS)
    spread = max(relative_error(grad, gradient) for _, grad in others)
    off = max(relative_error(other, loss) for other, _ in others)
    return Outcome(DIFFERS, f"repeats differ: loss by {size(off)}, gradient by {size(spread)}", off, spread)


def without_gradient(exam: Examination, mode: str) -> Outcome:
    """Judge a forward without gradient.

    With mode "leaf" the logits require none; with "no_grad" they do, but torch.no_grad is active.
    """
    question = exam.ask(RAGGED)
    if mode == "leaf":
        question.leaf = question.leaf.detach()
    with torch.set_grad_enabled(mode == "leaf"):
        loss = question.forward()
    if loss.requires_grad:
        return Outcome(DIFFERS, "its loss requires a gradient")
    return compare(question, loss, None, *right_of(question, torch.sum))


def many_targets(exam: Examination) -> Outcome:
    """Judge an utterance of more targets than a CUDA block has threads."""
    if exam.adapter.simulated:
        raise NotAsked("not in a simulator, which would take hours")
    if exam.adapter.topology not in ONE_SYMBOL:
        with suppress(Refused):  # for more targets than frames, perhaps
            return agrees(exam, [(4, 1100)], V=5)
    return agrees(exam, [(1101, 1100)], V=5)  # a path may have to end with a blank


def second_device(exam: Examination) -> Outcome:
    """Judge tensors on cuda:1 while cuda:0 is the current device, as in a process that uses both."""
    if exam.device.type != "cuda":
        raise NotAsked("not on CUDA")
    if torch.cuda.device_count() < 2:
        raise NotAsked("there is one CUDA device only")
    torch.cuda.set_device(0)
    exam.device = torch.device("cuda", 1)
    return agrees(exam)


def more_targets_than_frames(exam: Examination) -> Outcome:
    """Judge an utterance of more targets than frames on a lattice with at most one symbol per frame."""
    if exam.adapter.topology == "regular":
        raise NotAsked("its lattice has a path for every utterance")
    return agrees(exam, [(3, 5)])
