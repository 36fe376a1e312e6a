"""Tell the author of a loss in one line what is wrong with its answer, where, and what it looks
like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from rnnt_bench.core.questions import Question, Shapes
from rnnt_bench.core.text import UNBOUNDED
from rnnt_bench.losses import oracle, questions
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.judge import Answer, Judged, gradient_of
from rnnt_bench.losses.rounding import TINY

#: Largest relative difference between the ratio of the two values and a ratio with a known cause.
NEAR = 1e-3


def of_answer(answer: Answer, wrong: Sequence[Judged], fitting: Mapping[str, float] = {}) -> str:
    """Return what is wrong with an answer, and where.

    Args:
        wrong: the errors above what is allowed, the worst first.
        fitting: the loss with each usual mistake, by its words.
    """
    lines = []
    if answer.overwritten:
        lines.append(f"it overwrites {', '.join(answer.overwritten)}, which it may only read")
    if wrong:
        lines.append(of_errors(answer, wrong, fitting))
    return "; ".join(lines)


def of_errors(answer: Answer, wrong: Sequence[Judged], fitting: Mapping[str, float]) -> str:
    """Return the loss that is furthest off, or what is wrong with a gradient where no loss is."""
    worst = wrong[0]
    allowed = f"{worst.most:.0e} is allowed"
    name = next((line.leaf for line in wrong if line.leaf), "")
    leaf = answer.errors.leaves.get(name)
    if leaf is None or not worst.leaf:
        n = int((answer.losses - answer.rights).abs().nan_to_num(nan=math.inf).argmax())
        loss = float(answer.losses[n])
        values = of_values(loss, float(answer.rights[n]), answer.shapes, fitting)
        if leaf is None or not leaf.furthest:
            return f"{values}; {allowed}"
        return f"{values}; {allowed}; {gradient_of(name)} furthest off at {leaf.furthest}"
    words = f"the loss is right, the {gradient_of(name)} is"
    if leaf.missing:
        return f"{words} missing"
    rest = leaf.distance - (leaf.factor - 1) ** 2 * leaf.square
    left = math.sqrt(max(rest, 0.0) / max(leaf.square, TINY))
    if left < min(NEAR * abs(leaf.factor), abs(leaf.factor - 1) / 2):
        digits = 4 if abs(leaf.factor - 1) > NEAR / 2 else 8
        reason = guess(leaf.factor, 1.0, answer.shapes)
        return f"{words} {leaf.factor:.{digits}g} times what is right{reason}; {allowed}"
    return f"{words} not: at {leaf.furthest}; {worst.what} {size(worst.error)}, {allowed}"


def of_values(loss: float, right: float, shapes: Shapes, fitting: Mapping[str, float] = {}) -> str:
    """Return a loss, the right one, and a guess at the cause."""
    causes = [words for words, value in fitting.items() if math.isclose(loss, value, rel_tol=NEAR)]
    cause = f", {causes[0]}?" if causes else guess(loss, right, shapes)
    return f"loss {loss:.6g}, expected {right:.6g}{cause}"


def size(error: float) -> str:
    return "not finite" if not error < UNBOUNDED else f"off by {error:.1e}"


def sizes(shapes: Shapes) -> str:
    return f"N {len(shapes)}, T {max(T for T, _ in shapes)}, U {max(U for _, U in shapes)}"


def of_small(shapes: Shapes) -> str:
    """Return the sizes of a small batch, of all its utterances."""
    if len(shapes) == 1:
        return f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    return f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"


def mistakes(adapter: Adapter, question: Question, device: torch.device) -> dict[str, float]:
    """Return the summed loss with each usual mistake that the batch of a question can show, by what
    the mistake is; none where several losses are summed or scaled."""
    if question.upstream or question.largest:
        return {}
    wide, model, (batch,) = questions.made(adapter, question, device)
    with torch.no_grad():
        logits = model.logits(batch).cpu().double()
    lattice, blank, shapes = wide.lattice, wide.blank, batch.shapes
    targets = batch.targets.cpu()
    losses: dict[str, float] = {}
    if min(T for T, _ in shapes) > 1:
        shorter = [(T - 1, U) for T, U in shapes]
        losses["the loss of T - 1 frames"] = float(
            oracle.losses(logits, targets, shorter, blank, lattice).sum()
        )
    ends = torch.stack([logits[n, T - 1, U] for n, (T, U) in enumerate(shapes)])
    final = lattice.parts(ends, torch.zeros(len(shapes), dtype=torch.int64), blank)[:, 0].sum()
    right = oracle.losses(logits, targets, shapes, blank, lattice).sum()
    losses["the loss without the final blank"] = float(right + final)
    if not lattice.extra:
        unnormalised = oracle.arc_losses(logits, targets, shapes, blank, lattice).sum()
        losses["the loss of logits without log_softmax"] = float(unnormalised)
    return losses


def guess(got: float, right: float, shapes: Shapes) -> str:
    """Return a guess at the cause of the ratio of two losses, with a comma before it; "" if none is
    known."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    N, (T, U) = len(shapes), shapes[0]
    ratios: list[tuple[float, str]] = [(-1.0, "its negative: the log-likelihood?")]
    if N > 1:
        ratios.append((1 / N, f"1/{N} of it, 1/N: a mean over the batch?"))
    else:
        divisors = (
            ("T", T),
            ("U", U),
            ("T + U", T + U),
            ("U + 1", U + 1),
            ("T x (U + 1)", T * (U + 1)),
        )
        ratios += [
            (1 / size, f"1/{size} of it: divided by {name}?") for name, size in divisors if size > 1
        ]
    ratios += [
        (1 / math.log(2), "1/log(2) times it: logarithms to the base 2?"),
        (2.0, "twice it: counted twice?"),
    ]
    for factor, words in ratios:
        if abs(got / right / factor - 1) < NEAR:
            return f", {words}"
    return ", is it always 0?" if got == 0 else ""
