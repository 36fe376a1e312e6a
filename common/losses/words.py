"""Tell the author of a loss in one line what is wrong with its answer, where, and what it looks
like."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rnnt_bench.core.text import UNBOUNDED
from rnnt_bench.losses import oracle
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.inputs import Batch
from rnnt_bench.losses.judge import Answer, Judged, gradient_of
from rnnt_bench.losses.rounding import TINY

Shapes = Sequence[tuple[int, int]]
#: Largest relative difference between the ratio of the two values and a ratio with a known cause.
NEAR = 1e-3
#: Errors that the message names; the record has all.
MOST_WRONG = 2


def of_small(shapes: Shapes, answer: Answer, wrong: list[Judged], fitting: dict[str, float]) -> str:
    """Return what is wrong with an answer about a small batch of `shapes`, and where.

    Args:
        wrong: the errors above what is allowed, the worst first.
        fitting: the loss with each usual mistake, by its words.
    """
    where = f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"
    if len(shapes) == 1:
        where = f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    if answer.overwritten:
        return f"{where}: it overwrites {', '.join(answer.overwritten)}, which it may only read"
    return f"{where}: {of_worst(shapes, answer, wrong[0], fitting)}"


def of_worst(shapes: Shapes, answer: Answer, worst: Judged, fitting: dict[str, float]) -> str:
    """Return what is wrong with an answer by its worst error."""
    if not worst.leaf:
        return of_loss(answer, shapes, fitting)
    where = "the loss is right"
    leaf = answer.errors.leaves[worst.leaf]
    name = gradient_of(worst.leaf)
    if leaf.missing:
        return f"{where}, the {name} is missing"
    left = math.sqrt(
        max(leaf.distance - (leaf.factor - 1) ** 2 * leaf.square, 0.0) / max(leaf.square, TINY)
    )
    if left < min(NEAR * abs(leaf.factor), abs(leaf.factor - 1) / 2):
        digits = 4 if abs(leaf.factor - 1) > NEAR / 2 else 8
        reason = guess(leaf.factor, 1.0, shapes)
        words = f"{where}, the {name} is {leaf.factor:.{digits}g} times what is right{reason}"
        return f"{words}; {worst.most:.0e} is allowed"
    return f"{where}, the {name} is not: at {leaf.furthest}"


def of_loss(answer: Answer, shapes: Shapes, fitting: dict[str, float]) -> str:
    """Return the loss that is furthest off, the right one, and a guess at the cause."""
    n = int((answer.losses - answer.rights).abs().nan_to_num(nan=math.inf).argmax())
    loss, right = float(answer.losses[n]), float(answer.rights[n])
    causes = [
        f", {words}?" for words, value in fitting.items() if math.isclose(loss, value, rel_tol=NEAR)
    ]
    return f"loss {loss:.6g}, expected {right:.6g}{causes[0] if causes else guess(loss, right, shapes)}"


def at_size(answer: Answer, wrong: list[Judged]) -> str:
    """Return what is wrong with an answer about a batch of a run's size, by its errors above what
    is allowed, the worst first."""
    words = [f"{line.what} {size(line.error)}, {line.most:.0e} is allowed" for line in wrong]
    if answer.overwritten:
        words.insert(0, f"it overwrites {', '.join(answer.overwritten)}")
    del words[MOST_WRONG:]
    if wrong and not wrong[0].leaf:
        words.append(of_loss(answer, answer.shapes, {}))
    leaf = next((line.leaf for line in wrong if line.leaf), "")
    if leaf and answer.errors.leaves[leaf].furthest:
        words.append(f"{gradient_of(leaf)} furthest off in {answer.errors.leaves[leaf].furthest}")
    return "; ".join(words)


def size(error: float) -> str:
    return "not finite" if not error < UNBOUNDED else f"off by {error:.1e}"


def sizes(shapes: Shapes) -> str:
    return f"N {len(shapes)}, T {max(T for T, _ in shapes)}, U {max(U for _, U in shapes)}"


def mistakes(adapter: Adapter, logits: torch.Tensor, batch: Batch) -> dict[str, float]:
    """Return the summed loss with each usual mistake that this batch can show, by what the mistake
    is.

    logits: (N, T, U+1, V) float64 on the CPU."""
    lattice, blank, shapes = adapter.lattice, adapter.blank, batch.shapes
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
