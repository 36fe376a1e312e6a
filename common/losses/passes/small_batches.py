"""Judge a loss on small batches, on which it must be right before it is timed, and tell its author what is wrong.

The ragged batch, and each of its utterances alone; frames and targets in multiples of 16, where kernels have blocks;
logits of a trained model, and beyond what exp() takes; an upstream gradient that is not 1, and one for each
utterance.  The corner cases are those of `rnnt-bench check`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from rnnt_bench.core import settings
from rnnt_bench.core.implementations import BY_NAME, ONE_SYMBOL, Implementation
from rnnt_bench.losses import inputs, layouts, oracle, rounding
from rnnt_bench.losses.adapter import Adapter, OfFunction
from rnnt_bench.losses.inputs import OUTPUTS, Batch, Joiner
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import NotOfEach, changed, fingerprints, leaves_of, prepare, weighted

#: (the loss's gradient or None, the right one) by name of the leaf.
Gradients = Dict[str, Tuple[Optional[torch.Tensor], torch.Tensor]]


class Answer(NamedTuple):
    """The answer of a loss and the right one."""

    loss: torch.Tensor
    right: torch.Tensor  # the oracle's loss
    gradients: Gradients
    losses: torch.Tensor  # (N,), the oracle's loss of each utterance
    score: float  # largest magnitude of the logits
    changed: List[str]  # names of inputs that the loss has overwritten
    mistakes: Callable[[], Dict[str, float]]  # the loss with each usual mistake, by its words

    @property
    def errors(self) -> Tuple[float, float]:
        """Return the error of the loss and the largest of any gradient; one that is missing is infinitely wrong."""
        errors = [math.inf if got is None else relative_error(got, right) for got, right in self.gradients.values()]
        return relative_error(self.loss, self.right), max(errors)

    @property
    def slopes(self) -> Dict[str, float]:
        """Return, by tensor, the factor of the right gradient that fits the loss's best: rounding hardly moves it."""
        pairs = [(name, got, right) for name, (got, right) in self.gradients.items() if got is not None and right.any()]
        fits = ((name, (got.detach().cpu().double() * right).sum(), (right**2).sum()) for name, got, right in pairs)
        return {name: float(along / square) for name, along, square in fits}

    @property
    def largest(self) -> float:
        """Return the magnitude of the largest entry of the right gradients."""
        return max(float(right.abs().max()) for _, right in self.gradients.values())

    @property
    def slope_error(self) -> float:
        return max((abs(value - 1) if math.isfinite(value) else math.inf for value in self.slopes.values()), default=0)


def answer(
    adapter: Adapter, model: Joiner, batches: Sequence[Batch], scope: str, upstream: Optional[torch.Tensor] = None
) -> Answer:
    """Run one forward for each batch and one backward of their sum; return the answer.

    Padded cells count in scope "loss": their gradient must be zero.

    Args:
        batches: one; or each utterance alone, for a loss without the reduction "none" to be given a factor for each.  A
            loss that keeps what its backward needs where the next call finds it is wrong then.
        upstream: factors (N,) of the losses, or (1,) of their sum; None for 1.
    """
    layout, double_model = layouts.of(adapter), copy.deepcopy(model).cpu().double()
    steps, leaves, losses, scores = [], [], [], []
    for batch in batches:
        with torch.no_grad():
            scores.append(float(model.logits(batch).abs().max()))
        step = prepare(adapter, model, batch, scope)
        if scope == "loss":  # a copy: the loss may overwrite its logits
            right_leaves = {"given": step.given.detach().cpu().double().clone().requires_grad_()}
            logits = layout.padded(right_leaves["given"], batch)
            losses.append(layout.right(logits, batch))
        else:
            outputs = {name: getattr(batch, name).detach().cpu().double().clone() for name in OUTPUTS}
            for name, leaf in outputs.items():
                leaf.requires_grad_(getattr(batch, name).requires_grad)
            double_batch = replace(batch, **outputs, targets=batch.targets.cpu().clone())
            right_leaves = leaves_of(double_model, double_batch)
            logits = double_model.logits(double_batch)
            losses.append(layout.right(logits, double_batch) + layout.trained_beside(double_model, double_batch))
        steps.append(step)
        leaves.append(right_leaves)
    of_each = torch.cat(losses)
    right = of_each.sum() if upstream is None else weighted(of_each, upstream.expand(len(of_each)))
    right.backward()
    before = [fingerprints(step.inputs()) for step in steps]
    if len(steps) > 1 and upstream is not None:
        actual = weighted(torch.stack([step.forward().reshape(()) for step in steps]), upstream)
        actual.backward()
    else:
        steps[0].upstream = upstream
        actual = steps[0].run()
    gradients: Gradients = {}
    for n, (step, right_leaves) in enumerate(zip(steps, leaves)):
        of = f" of utterance {n + 1}" if len(steps) > 1 else ""
        for name, leaf in right_leaves.items():
            if leaf.grad is not None:  # a loss need not use every weight
                gradients[f"{name}{of if name in ('given', *OUTPUTS) else ''}"] = step.gradients()[name], leaf.grad
    overwritten = sorted({name for step, was in zip(steps, before) for name in changed(was, step.inputs())})
    return Answer(
        loss=actual.detach(),
        right=right.detach(),
        gradients=gradients,
        losses=of_each.detach(),
        score=max(scores),
        changed=overwritten,
        mistakes=partial(mistakes, adapter, logits.detach(), batches[-1]),
    )


def mistakes(adapter: Adapter, logits: torch.Tensor, batch: Batch) -> Dict[str, float]:
    """Return the summed loss with each usual mistake that this batch can show, by what the mistake is.

    logits: (N, T, U+1, V) float64 on the CPU."""
    lattice, blank, shapes = adapter.lattice, adapter.blank, batch.shapes
    targets = batch.targets.cpu()
    losses: Dict[str, float] = {}
    if min(T for T, _ in shapes) > 1:
        shorter = [(T - 1, U) for T, U in shapes]
        losses["the loss of T - 1 frames"] = float(oracle.losses(logits, targets, shorter, blank, lattice).sum())
    ends = torch.stack([logits[n, T - 1, U] for n, (T, U) in enumerate(shapes)])
    final = lattice.parts(ends, torch.zeros(len(shapes), dtype=torch.int64), blank)[:, 0].sum()
    right = oracle.losses(logits, targets, shapes, blank, lattice).sum()
    losses["the loss without the final blank"] = float(right + final)
    if not lattice.extra:
        unnormalised = oracle.arc_losses(logits, targets, shapes, blank, lattice).sum()
        losses["the loss of logits without log_softmax"] = float(unnormalised)
    return losses


def utterance(batch: Batch, n: int) -> Batch:
    """Return the utterance `n` alone, without padding, as a batch of new tensors."""
    piece = batch.utterance(n)
    new = {name: getattr(piece, name).clone() for name in ("targets", "T_lengths", "U_lengths")}
    return replace(piece, **new, **{name: getattr(piece, name).clone().requires_grad_() for name in OUTPUTS})


Shapes = List[Tuple[int, int]]  # (T, U) of each utterance
#: Ragged in both, T = 1 and U = 0 among them.
SHAPES: Shapes = [(11, 5), (7, 4), (9, 2), (1, 0)]
BLOCKS: Shapes = [(32, 8), (16, 15), (17, 14), (48, 3)]
RAGGED: Shapes = [(9, 4), (6, 5), (8, 1)]
SIX: Shapes = [(6, 3), (5, 2), (7, 4), (4, 1), (3, 2), (8, 5)]
#: Tokens as many as frames, and more: none of a lattice with one symbol a frame.
MANY_TOKENS: Shapes = [(3, 5), (4, 4), (2, 3)]
#: Sizes of the joiner, and of that with logits "trained".
RANDOM: Dict[str, Any] = {"vocab_size": 17, "encoder_dim": 24}
TRAINED: Dict[str, Any] = {"vocab_size": 101, "encoder_dim": 128}
#: Logits whose exponential is infinite in float32, or 0 where they are negative.
LARGEST_SCORE = 100.0
#: Factors of the loss, as gradient accumulation, AMP and a loss that is subtracted have, and of each utterance.
UPSTREAM, WEIGHTS = (-2.0,), (2.0, -1.0, 0.5)
#: The first scale of torch.amp.GradScaler.
LOSS_SCALE = 2.0**16


class Case(NamedTuple):
    """A small batch and how the loss is asked on it."""

    name: str  # what is special about it, in words; "" for nothing
    shapes: Shapes
    draw: int  # number of the draw of random inputs
    logits: str = "random"  # or "trained"
    largest: Optional[float] = None  # the largest logit, see Layout.score_up_to
    upstream: Sequence[float] = ()  # one factor of the summed loss, or one for each utterance
    frozen: str = ""  # "joiner" or "outputs" (of encoder and decoder): what needs no gradient


def ragged(adapter: Adapter) -> Shapes:
    """Return the shapes of the first case, with utterances that are long enough for the loss."""
    return adapter.lengthened(SHAPES)


def again(adapter: Adapter) -> Case:
    """Return the case that is asked after all others, to catch a loss that reuses results for the same shapes."""
    return Case("other numbers in the first batch's shapes", ragged(adapter), 11)


def cases(adapter: Adapter) -> Iterator[Case]:
    """Yield the cases of a loss; in a simulator, which would take hours, the ragged batch and its utterances alone."""
    shapes = ragged(adapter)
    yield Case("", shapes, 0)
    for n, (T, U) in enumerate(shapes):
        if U > 0:  # some losses refuse a batch with no target at all: the conformance cases ask for that
            yield Case("", [(T, U)], n + 1)
    if adapter.simulated:
        return
    yield Case("", BLOCKS, 5)
    yield Case("", SIX, 13)
    if adapter.takes_many_targets and adapter.topology not in ONE_SYMBOL:
        yield Case("", MANY_TOKENS, 14)
    if adapter.settings.dtype != "float16":  # whose largest number is below it
        yield Case(f"a loss times {LOSS_SCALE:g}", RAGGED, 15, upstream=(LOSS_SCALE,))
    yield Case(f"a loss times {UPSTREAM[0]:g}", RAGGED, 6, upstream=UPSTREAM)
    yield Case("a factor for each utterance", RAGGED, 7, upstream=WEIGHTS)
    for frozen in ("joiner", "outputs"):
        yield Case(f"frozen {frozen}", RAGGED, 12, frozen=frozen)
    yield Case("logits of a trained model", BLOCKS, 8, logits="trained")
    yield Case(f"logits of up to {LARGEST_SCORE:g}", RAGGED, 9, largest=LARGEST_SCORE)
    yield Case(f"logits of at most -{LARGEST_SCORE:g}", RAGGED, 10, largest=-LARGEST_SCORE)


class Checked(NamedTuple):
    """The largest relative errors of a loss over several cases, each with what was allowed of it in its case."""

    loss: Tuple[float, float]  # over the cases with plain logits
    gradient: Tuple[float, float]  # likewise
    slope: Tuple[float, float]  # the largest difference of a slope from 1, where rounding is small
    wrong: str  # what is wrong in words, "" if nothing is


def check(
    adapter: Adapter, device: torch.device, dtype: torch.dtype, asked: Optional[Sequence[Case]] = None
) -> Checked:
    """Return the errors over all cases (`cases`) and scopes, and what is wrong in the first that fails.

    A case of a single utterance comes before one of a batch, since it tells its author more.
    """
    losses, gradients, slopes, wrong = [], [], [], []
    for case, answer in answered(adapter, device, dtype, list(cases(adapter)) if asked is None else asked):
        limits, (loss_error, grad_error) = allowed(case, answer, adapter), answer.errors
        of_loss = loss_error, limits.loss
        of_gradient = grad_error, limits.gradient
        of_slope = answer.slope_error, limits.slope
        if case.logits == "random" and case.largest is None:
            losses.append(of_loss)
            gradients.append(of_gradient)
        if case.largest is None:
            slopes.append(of_slope)
        if answer.changed or not all(error <= most for error, most in (of_loss, of_gradient, of_slope)):
            words = in_words(case.shapes, answer, limits)
            wrong.append((len(case.shapes) > 1, f"with {case.name}: {words}" if case.name else words))
    first = min(wrong, key=lambda each: each[0])[1] if wrong else ""  # min keeps the first of equals
    nothing = (0.0, 0.0)
    return Checked(
        loss=max(losses, default=nothing),
        gradient=max(gradients, default=nothing),
        slope=max(slopes, default=nothing),
        wrong=first,
    )


def wrong_of(loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32") -> str:
    """Return what is wrong with a function in words, "" if it is right; it is called in this process and may raise."""

    class Given(OfFunction):
        name = getattr(loss, "__name__", "") or "loss"
        given = staticmethod(loss)

    BY_NAME.setdefault(Given.name, Implementation(Given.name, "", "main", "torch", template=True))
    adapter = Given(settings.resolve({"preset": "quick", "dtype": dtype}, device))
    return check(adapter, torch.device(device), getattr(torch, dtype)).wrong


def allowed(case: Case, answer: Answer, adapter: Adapter) -> Allowed:
    """Return how far a right loss may be off in this answer."""
    return rounding.allowed(
        adapter.settings.dtype,
        case.shapes,
        answer.score,
        float(answer.losses.abs().max()),
        right=float(answer.right),
        largest=answer.largest,
        negligible=adapter.negligible,
    )


def answered(
    adapter: Adapter, device: torch.device, dtype: torch.dtype, asked: Sequence[Case]
) -> Iterator[Tuple[Case, Answer]]:
    """Yield the answer of each case in each scope that it is asked in."""
    for case in asked:
        scopes = layouts.of(adapter).scopes
        if (case.logits == "trained" or case.largest) and dtype in (torch.float16, torch.bfloat16):
            scopes = tuple(scope for scope in scopes if scope == "loss")  # the joiner's own rounding is larger
        elif case.frozen:
            scopes = ("step",)
        factors = torch.tensor(case.upstream, dtype=torch.float64) if case.upstream else None
        of_each = factors is not None and len(factors) > 1
        for scope in scopes[:1] if of_each else scopes:
            wide, model, batch = given(adapter, case, device, dtype)  # anew: the loss may have written over another's
            batches = [batch]
            if of_each and ("none" in adapter.reductions or isinstance(adapter, OfFunction)):
                wide.reduction = "none"
                with contextlib.suppress(NotOfEach):  # a function, or an adapter's own `loss`, may return the sum
                    yield case, answer(wide, model, batches, scope, factors)
                    continue
            if of_each:
                wide.reduction = adapter.reduction
                batches = [utterance(batch, n) for n in range(len(batch.shapes))]
            yield case, answer(wide, model, batches, scope, factors)


def given(adapter: Adapter, case: Case, device: torch.device, dtype: torch.dtype) -> Tuple[Adapter, Joiner, Batch]:
    """Return (the adapter with its range widened to all of U, the joiner, the batch) of a case."""
    sizes, widest = TRAINED if case.logits == "trained" else RANDOM, max(U for _, U in case.shapes)
    small = adapter.but(settings=replace(adapter.settings, **sizes, logits=case.logits), prune_range=widest + 1)
    model = layouts.of(small).model(device, dtype)
    key, source = (small.settings.seed, case.draw), inputs.source_of(small.settings)
    batch = inputs.make_batch(case.shapes, **sizes, device=device, dtype=dtype, key=key, source=source)
    for leaf in {"": (), "joiner": model.parameters(), "outputs": (batch.encoder_out, batch.decoder_out)}[case.frozen]:
        leaf.requires_grad_(False)
    if case.largest is not None:
        layouts.of(small).score_up_to(case.largest, model, batch)
    return small, model, batch


def repeated(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Tuple[List[str], List[str]]:
    """Ask the first case twice more, the last time with NaN in its padding.

    Returns what has other bits when it is asked for again, and what is not finite where the padding holds NaN.
    """
    answers = []
    for padding in (0.0, 0.0, math.nan):
        wide, model, batch = given(adapter, next(cases(adapter)), device, dtype)
        if padding:
            with torch.no_grad():
                for n, (T, U) in enumerate(batch.shapes):
                    batch.encoder_out[n, T:] = batch.decoder_out[n, U + 1 :] = padding
        step = prepare(wide, model, batch, layouts.of(wide).scopes[0])
        answers.append({"loss": step.run(), **step.gradients()})
    first, again, reached = answers
    differing = changed(fingerprints(first), again)
    return differing, [name for name, values in reached.items() if values is not None and not values.isfinite().all()]


#: Largest relative difference between the ratio of the two values and a ratio with a known cause.
NEAR = 1e-3


def in_words(shapes: Shapes, answer: Any, limits: Allowed) -> str:
    """Return what is wrong in one line with an answer that is off or has overwritten an input, on `shapes`."""
    where = f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"
    if len(shapes) == 1:
        where = f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    if answer.changed:
        return f"{where}: it overwrites {', '.join(answer.changed)}, which it may only read"
    loss_error, grad_error = answer.errors
    if not loss_error <= limits.loss:
        got, right = float(answer.loss), float(answer.right)
        fitting = [f", {words}?" for words, loss in answer.mistakes().items() if math.isclose(got, loss, rel_tol=NEAR)]
        cause = "".join(fitting[:1]) or guess(got, right, shapes)
        return f"{where}: loss {got:.6g}, expected {right:.6g}{cause}"
    where = f"{where}: the loss is right"
    if grad_error <= limits.gradient:
        name, factor = max(answer.slopes.items(), key=lambda each: abs(each[1] - 1))
        return f"{where}, the {of(name)} is {factor:.8g} times what is right; {limits.slope:.0e} is allowed"
    errors: Dict[str, float] = {}
    for name, (gradient, right) in answer.gradients.items():
        if gradient is None:
            return f"{where}, the {of(name)} is missing"
        errors[name] = relative_error(gradient, right)
    name = max(errors, key=lambda each: errors[each])
    gradient, right = (tensor.detach().cpu().double() for tensor in answer.gradients[name])
    factor = answer.slopes.get(name, 1.0)
    left = float((gradient - factor * right).abs().max())
    if left <= min(NEAR * abs(factor), abs(factor - 1) / 2) * float(right.abs().max()):
        reason = guess(factor, 1.0, shapes)
        return f"{where}, the {of(name)} is {factor:.4g} times what is right{reason}"
    at = position((gradient - right).abs().nan_to_num(nan=math.inf))
    element = f"{[*at]}"
    if name == "given" and len(at) == 4:
        n, t, u, v = at
        T, U = shapes[n]
        outside = " (in the padding)" if t >= T or u > U else ""
        element = f"utterance {n + 1} (T {T}, U {U}), t {t}, u {u}, symbol {v}{outside}"
    values = f"{float(gradient[at]):.4g}, expected {float(right[at]):.4g}"
    return f"{where}, the {of(name)} is not: at {element}: {values}"


def of(name: str) -> str:
    return "gradient" if name == "given" else f"gradient of {name}"


def sizes(shapes: Shapes) -> str:
    return f"N {len(shapes)}, T {max(T for T, _ in shapes)}, U {max(U for _, U in shapes)}"


def guess(got: float, right: float, shapes: Shapes) -> str:
    """Return a guess at the cause of the ratio of two losses, with a comma before it; "" if none is known."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    N, (T, U) = len(shapes), shapes[0]
    ratios: List[Tuple[float, str]] = [(-1.0, "its negative: the log-likelihood?")]
    if N > 1:
        ratios.append((1 / N, f"1/{N} of it, 1/N: a mean over the batch?"))
    else:
        divisors = (("T", T), ("U", U), ("T + U", T + U), ("U + 1", U + 1), ("T x (U + 1)", T * (U + 1)))
        ratios += [(1 / size, f"1/{size} of it: divided by {name}?") for name, size in divisors if size > 1]
    ratios += [(1 / math.log(2), "1/log(2) times it: logarithms to the base 2?"), (2.0, "twice it: counted twice?")]
    for factor, words in ratios:
        if abs(got / right / factor - 1) < NEAR:
            return f", {words}"
    return ", is it always 0?" if got == 0 else ""


def position(difference: torch.Tensor) -> Tuple[int, ...]:
    """Return the index of the largest difference."""
    return tuple(int(index) for index in np.unravel_index(int(difference.argmax()), tuple(difference.shape)))
