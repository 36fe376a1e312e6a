"""Tell the author of a loss in one line what is wrong with its answer: where, and a guess at the
cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from rnnt_bench.core.questions import Question, Shapes
from rnnt_bench.core.text import UNBOUNDED
from rnnt_bench.losses import oracle, questions
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.judge import Answer, Judged, gradient_of

#: A value is taken for one with a known cause if they differ by at most this share.
NEAR = 1e-3


def of_answer(answer: Answer, wrong: Sequence[Judged], fitting: Mapping[str, float] = {}) -> str:
    """Return what is wrong with an answer, and where; "" if nothing is.

    Args:
        wrong: the errors above what is allowed, the worst first; that of the loss before all.
        fitting: {a usual mistake, in words: the loss with it}, see `mistakes`.
    """
    lines = []
    if answer.overwritten:
        lines.append(f"it overwrites {', '.join(answer.overwritten)}, which it may only read")
    if wrong:
        worst = wrong[0]
        allowed = f"{worst.limit:.0e} is allowed"
        if worst.leaf:
            line = of_gradient(answer, worst, allowed)
        else:
            line = f"{of_losses(answer, fitting)}; {allowed}"
            # The leaf with the worst gradient; "" if no gradient is wrong.
            name = next((error.leaf for error in wrong if error.leaf), "")
            furthest = answer.errors.leaves[name].furthest if name else ""
            if furthest:
                line += f"; {gradient_of(name)} furthest off at {furthest}"
        lines.append(line)
    return "; ".join(lines)


def of_gradient(answer: Answer, worst: Judged, allowed: str) -> str:
    """Return what is wrong with the gradient of a leaf, where no loss is wrong.

    worst: the worst error of this gradient; allowed: its limit, in words."""
    leaf = answer.errors.leaves[worst.leaf]
    subject = f"the loss is right, the {gradient_of(worst.leaf)} is"
    if leaf.missing:
        return f"{subject} missing"
    explained = abs(leaf.factor - 1)  # the error that is due to the factor
    # The factor is the cause if the error beside it is small, and less than half of `explained`.
    if leaf.beside_factor < min(NEAR * abs(leaf.factor), explained / 2):
        digits = 4 if explained > NEAR / 2 else 8  # so that it does not read "1 times"
        cause = guess(leaf.factor, 1.0, answer.shapes)
        return f"{subject} {leaf.factor:.{digits}g} times what is right{cause}; {allowed}"
    return f"{subject} not: at {leaf.furthest}; {worst.what} {size(worst.error)}, {allowed}"


def of_losses(answer: Answer, fitting: Mapping[str, float]) -> str:
    """Return, in words, the loss that is furthest off, the right loss, and a guess at the cause.

    fitting: as in `of_answer`."""
    n = int((answer.losses - answer.rights).abs().nan_to_num(nan=math.inf).argmax())
    return of_values(float(answer.losses[n]), float(answer.rights[n]), answer.shapes, fitting)


def of_values(loss: float, right: float, shapes: Shapes, fitting: Mapping[str, float] = {}) -> str:
    """Return, in words, a loss, the right loss, and a guess at the cause.

    fitting: {a usual mistake, in words: the loss with it}."""
    cause = guess(loss, right, shapes)
    for mistake, value in fitting.items():
        if math.isclose(loss, value, rel_tol=NEAR):
            cause = f", {mistake}?"
            break
    return f"loss {loss:.6g}, expected {right:.6g}{cause}"


def size(error: float) -> str:
    """Return how large an error is: "off by 1.2e-03"."""
    return f"off by {error:.1e}" if error < UNBOUNDED else "not finite"


def sizes(shapes: Shapes) -> str:
    """Return the padded sizes of a batch: "N 3, T 9, U 5"."""
    return f"N {len(shapes)}, T {max(T for T, _ in shapes)}, U {max(U for _, U in shapes)}"


def of_small(shapes: Shapes) -> str:
    """Return the sizes of each utterance of a small batch."""
    if len(shapes) == 1:
        return f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    return f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"


def mistakes(adapter: Adapter, question: Question, device: torch.device) -> dict[str, float]:
    """Return {mistake in words: summed loss of the question's batch with this mistake}, for each
    usual mistake.

    A mistake is left out if the batch cannot show it.  The result is empty for a question with an
    upstream gradient or scaled weights.
    """
    if question.upstream or question.largest:
        return {}
    wide, model, (batch,) = questions.made(adapter, question, device)
    with torch.no_grad():
        logits = model.logits(batch).cpu().double()
    topology, blank, shapes = wide.lattice, wide.blank, batch.shapes
    targets = batch.targets.cpu()
    losses: dict[str, torch.Tensor] = {}
    if min(T for T, _ in shapes) > 1:
        shorter = [(T - 1, U) for T, U in shapes]
        losses["the loss of T - 1 frames"] = oracle.losses(
            logits, targets, shorter, blank, topology
        )
    ends = torch.stack([logits[n, T - 1, U] for n, (T, U) in enumerate(shapes)])
    any_target = torch.zeros(len(shapes), dtype=torch.int64)  # the blank's part is the same for all
    final_blank = topology.parts(ends, any_target, blank)[:, 0]  # part 0 is the blank's
    right = oracle.losses(logits, targets, shapes, blank, topology)
    # A loss is minus a log-probability: adding that of the blank takes it out.
    losses["the loss without the final blank"] = right + final_blank
    if not topology.extra:  # arc_losses takes cells of a blank and a target, without durations
        unnormalised = oracle.arc_losses(logits, targets, shapes, blank, topology)
        losses["the loss of logits without log_softmax"] = unnormalised
    return {mistake: float(values.sum()) for mistake, values in losses.items()}


def guess(got: float, right: float, shapes: Shapes) -> str:
    """Return a guess at the cause of a wrong value from its ratio to the right one.

    It begins with a comma: ", twice it: counted twice?".  "" if no cause is known."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    if got == 0:
        return ", is it always 0?"
    N = len(shapes)
    T, U = shapes[0]
    causes = {-1.0: "its negative: the log-likelihood?"}
    if N > 1:
        causes[1 / N] = f"1/{N} of it, 1/N: a mean over the batch?"
    else:
        divisors = {
            "T": T,
            "U": U,
            "T + U": T + U,
            "U + 1": U + 1,
            "T x (U + 1)": T * (U + 1),
        }
        for name, divisor in divisors.items():
            if divisor > 1:
                # setdefault: of equal numbers, such as T = U, the first name stays
                causes.setdefault(1 / divisor, f"1/{divisor} of it: divided by {name}?")
    causes[1 / math.log(2)] = "1/log(2) times it: logarithms to the base 2?"
    causes[2.0] = "twice it: counted twice?"
    for ratio, cause in causes.items():
        if math.isclose(got / right, ratio, rel_tol=NEAR):
            return f", {cause}"
    return ""
