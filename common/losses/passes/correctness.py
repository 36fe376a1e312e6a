"""Judge loss and gradient against the float64 oracle: the correctness pass.

All questions of `core/questions.py` that a run asks, on small batches, in both scopes: the gradient
of what the loss is given, and the step's gradients of encoder_out, decoder_out and every weight.  A
pruned loss is judged with its range widened to all of U, where it must be exact; the record also
has its gap to the exact loss at the run's own range.  A loss that passes is then judged on a
measured batch and on one as long as the longest of the shape file.

The measured batch has the run's own N, T, U and V.  It shows errors that only a large batch has: an
index that overflows, a block that is left out, sums that lose their digits, results kept from other
numbers of the same shape.

A row may have the same code as another one of the run (`same_as`), under another library of
products or cut in pieces.  It is asked the first question and the measured batch, in the scopes
that are measured: the other answers the rest for both.

A case that fails is asked again in a fork that has asked nothing before: a loss that is right there
keeps something from an earlier call.  One that fails by little in float32, and is right in float64,
is not wrong, but imprecise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from rnnt_bench.core import settings
from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.implementations import BY_NAME, Implementation
from rnnt_bench.core.questions import Question
from rnnt_bench.core.text import finite
from rnnt_bench.data import batching
from rnnt_bench.losses import inputs, layouts, oracle, questions, rounding, words
from rnnt_bench.losses.adapter import Adapter, OfFunction
from rnnt_bench.losses.judge import Answer, Judged, ask, failing, judge
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import changed, fingerprints
from rnnt_bench.records.schema import AtSize, Correctness
from rnnt_bench.system.processes import Fork

#: A fifth of the error that right float32 losses of short sums have at most.
LEAST_ROUNDING = 2e-5
#: Seconds to wait for the answer of a fork, which has one thread.
FORK_SECONDS = 60.0


class Checked(NamedTuple):
    """Hold the largest relative errors of a loss over several questions, each with what was allowed
    of it."""

    loss: tuple[float, float]  # over the questions with plain logits
    gradient: tuple[float, float]  # likewise
    slope: tuple[float, float]  # likewise, the largest difference of a factor from 1
    wrong: str  # what is wrong in words
    question: Question | None  # the one that failed
    imprecise: float | None  # the largest error that only float64 shows to be rounding


def check(
    adapter: Adapter, device: torch.device, asked: Sequence[Question] | None = None
) -> Checked:
    """Return the errors over all questions and scopes, and what is wrong in the first that fails.

    One of a single utterance comes before one of a batch, since it tells its author more.
    """
    imprecise = []
    plain = [((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))]
    wrong: list[tuple[bool, Question | None, str]] = []
    asked = asked or list(questions.small(adapter, device))
    for question, answer in questions.answers(adapter, device, asked):
        verdict = questions.verdict(adapter, device, question, answer)
        limits = verdict.limits
        if verdict.imprecise is not None:
            imprecise.append(verdict.imprecise)
        if question.logits == "random" and question.largest is None:
            loss = answer.loss_error, limits.loss
            gradient = answer.grad_error, limits.gradient
            plain.append((loss, gradient, (answer.slope_error, limits.slope)))
        if verdict.wrong or answer.overwritten:
            fitting = words.mistakes(adapter, question, device)
            line = words.of_answer(answer, verdict.wrong, fitting)
            line = f"{words.of_small(question.shapes)}: {line}"
            if question.title:
                line = f"with {question.title}: {line}"
            wrong.append((len(question.shapes) > 1, question, line))
    # min keeps the first of equals
    _, failed, reason = min(wrong, key=lambda failure: failure[0], default=(False, None, ""))
    loss, gradient, slope = map(max, zip(*plain))
    return Checked(loss, gradient, slope, reason, failed, max(imprecise, default=None))


def wrong_of(loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32") -> str:
    """Return what is wrong with a function in words, "" if it is right; it is called in this
    process and may raise."""

    class Given(OfFunction):
        name = getattr(loss, "__name__", "") or "loss"
        given = staticmethod(loss)

    BY_NAME.setdefault(Given.name, Implementation(Given.name, "", "main", "torch", template=True))
    adapter = Given(settings.resolve({"preset": "quick", "dtype": dtype}, device))
    return check(adapter, torch.device(device)).wrong


def answers_at_size(context, index: int) -> tuple[list[Answer], list[str]]:
    """Return the answer about a batch in each scope, and what has other bits than before.

    It comes after steps on these and on other numbers of the same shapes; a loss that loops in
    Python, or a row of the same code as another, takes one step alone, in the latter case in the
    scopes that are measured."""
    result: list[Answer] = []
    differing: list[str] = []
    every = layouts.of(context.adapter).scopes
    for scope in context.settings.scopes if context.same_as else every:

        def ready(repeat: int = 0, scope: str = scope) -> tuple[Any, Any, list[Any]]:
            return context.adapter, context.model, [context.step(scope, index, repeat)]

        earlier: dict[str, bytes] = {}
        for repeat in () if context.loops_in_python or context.same_as else (1, 0, 1):
            (step,) = ready(repeat)[2]
            taken = {"loss": step.run(), **step.gradients()}
            if repeat == 0:
                earlier = fingerprints(taken)
            del step, taken
        answer = ask(ready, scope)
        if not result:
            differing = changed(earlier, answer.computed)
        answer.computed.clear()
        result.append(answer)
    return result, differing


def check_at_size(
    context,
    places: float = rounding.PLACES,
    imprecise: bool = False,
    batch_name: str = "a measured batch",
) -> tuple[AtSize, str]:
    """Judge the measured batch with the most padded cells, that with the fewest if the loss loops
    over cells in Python; return its errors, and what is wrong in words, "" if nothing is.

    An error that only rounding explains which is large beside sums that cancel is not wrong, but
    ``imprecise``.

    Args:
        places: units in the last place that sums as large as the loss may lose, see
          `rounding.allowed`.
        imprecise: whether the loss is right on small batches in float64 alone.
        batch_name: of the batch, in these words.
    """
    adapter, dtype = context.adapter, context.settings.dtype
    measured = context.all_batches, context.batches
    index = (
        batching.lightest(*measured) if context.loops_in_python else batching.heaviest(*measured)[0]
    )
    answers, differing = answers_at_size(context, index)
    judged: list[Judged] = []
    wrong: list[str] = []
    tolerances: list[Allowed] = []
    for answer in answers:
        limits = answer.allowed(adapter, dtype, places)
        tolerances.append(limits.imprecise() if imprecise else limits)
        judged += judge(answer, tolerances[-1])
        above = failing(answer, tolerances[-1])
        if above or answer.overwritten:
            wrong.append(words.of_answer(answer, above))
    judged.sort(key=lambda line: finite(line.error))  # of two of a name the larger one is kept
    shapes = answers[0].shapes
    N, T, U = inputs.padded_sizes(shapes)
    needed = [
        oracle.needed_cells(adapter.lattice.posterior(lattice.derivatives), context.dtype)
        for lattice in answers[0].lattices
    ]
    reference_error = None
    if dtype == "float32":
        reference_error = max(answers[0].float32_error(adapter.lattice), LEAST_ROUNDING)
    result = AtSize(
        batch=index,
        N=N,
        T_max=T,
        U_max=U,
        useful_cells=sum(T * (U + 1) for T, U in shapes),
        needed_cells=sum(needed),
        loss_error=max(finite(answer.loss_error) for answer in answers),
        loss_tolerance=max(limits.loss for limits in tolerances),
        grad_error=max(finite(answer.grad_error) for answer in answers),
        grad_tolerance=max(limits.gradient for limits in tolerances),
        reference_error=reference_error,
        errors={line.what: finite(line.error) for line in judged},
        differing=differing,
        ok=not wrong,
    )
    if result.ok:
        result.imprecise = max(
            (line.error for line in judged if line.error > line.precise), default=None
        )
        return result, ""
    return result, f"on {batch_name} ({words.sizes(shapes)}): {wrong[0]}"


#: Utterances whose gap to the exact loss is measured, half a second each.
GAP_UTTERANCES = 20
#: Nats; a difference between smaller losses is rounding.
SMALLEST_LOSS = 1e-6
#: Targets of a batch as long as the longest of the file, where no measured one is: few, so that it
#: takes little.
LONG_U = 4
#: Number of the draw of random inputs with which the first question is asked again at the end: no
#: other question has these numbers.
LAST_DRAW = 20


def check_small(context) -> Checked:
    """Judge the small made-up batches, a row of the same code as another on the first alone.

    A question that fails is asked again in a fork that has asked nothing before; where the loss is
    right there, the words say that it keeps something."""
    adapter, device = context.adapter, context.device

    def judge_in_fork(pipe: Connection) -> None:
        torch.set_num_threads(1)  # OpenMP's other threads are not in a fork
        pipe.send(check(adapter, device, [pipe.recv()]).wrong)

    with Fork(judge_in_fork, possible=device.type == "cpu") as fork:
        checked = check(adapter, device, [questions.first(adapter)] if context.same_as else None)
        is_right_when_first = bool(checked.question) and (
            fork.ask(checked.question, FORK_SECONDS) == ""  # None is no answer
        )
    if not is_right_when_first:
        return checked
    kept = "right when asked first: it keeps something from an earlier call"
    return checked._replace(wrong=f"{kept}; {checked.wrong}")


def approximation_gap(context) -> float | None:
    """Return the median (loss - exact loss) / exact loss of a pruned loss over some of the run's
    utterances.

    Each alone and in float64: it is the gap of the method and not of the dtype.  None if the exact
    losses are almost 0.
    """
    adapter, double = context.adapter, replace(context, dtype=torch.float64)
    layout = layouts.of(adapter)
    model, gaps = layout.model(context.device, torch.float64), []
    every = [
        (batch, n)
        for batch in context.batches
        for n, (_, U) in enumerate(context.all_batches[batch])
        if U > 0
    ]
    for batch, n in every[:: math.ceil(len(every) / GAP_UTTERANCES) or 1]:
        alone = double.make_batch(batch).utterance(n)
        prepared = adapter.prepare(alone)
        with torch.no_grad():
            loss = float(layout.loss(layout.given(model, alone, prepared), alone, prepared))
            logits = model.logits(alone)
            exact = float(
                oracle.losses(
                    logits, alone.targets, alone.shapes, adapter.blank, adapter.lattice
                ).sum()
            )
        if exact > SMALLEST_LOSS:
            gaps.append(finite((loss - exact) / exact))
    return statistics.median(gaps) if gaps else None


def check_long(context, measured: AtSize, imprecise: bool) -> str:
    """Judge a made-up batch as long as the longest utterance of the file, if that is longer than
    the measured batch; return what is wrong in words, "" if nothing is."""
    T = int(context.all_batches.longest().max())
    is_longer = T > max(measured.T_max, 2 * LONG_U)
    if not is_longer or context.loops_in_python or context.same_as:
        return ""
    long = batching.fixed_size(
        np.array([(T, LONG_U), (T - 1, LONG_U - 1), (T // 2, LONG_U - 2)]), 3
    )
    places = rounding.PLACES + T // rounding.FRAMES_A_PLACE
    _, wrong = check_at_size(
        replace(context, all_batches=long, batches=[0]),
        places,
        imprecise,
        "a made-up batch as long as the file's longest utterance",
    )
    return wrong


def check_again(adapter: Adapter, device: torch.device) -> str:
    """Judge the first question once more, of other numbers; return what is wrong in words."""
    return check(adapter, device, [questions.first(adapter).but(draw=LAST_DRAW)]).wrong


def run(context) -> Iterator[Correctness]:
    """Yield one ``correctness`` record of a subject.Context; raise WrongResult, in words, after one
    that is not ok."""
    adapter, device = context.adapter, context.device
    layout, tolerance = layouts.of(adapter), rounding.PRECISIONS[context.settings.dtype].error
    small = check_small(context)
    wrong = small.wrong
    gap = approximation_gap(context) if layout.approximate else None
    at_its_size: AtSize | None = None
    reached: list[str] = []
    if not wrong and not adapter.simulated:  # a simulator would take hours
        imprecise = small.imprecise is not None
        at_its_size, wrong = check_at_size(context, imprecise=imprecise)
        wrong = wrong or check_long(context, at_its_size, imprecise)
        if not wrong:
            wrong = check_again(adapter, device)
            reached = questions.reached_by_padding(adapter, device)
        if small.imprecise is not None:
            at_its_size.imprecise = max(small.imprecise, at_its_size.imprecise or 0.0)
    yield Correctness(
        loss_error=finite(small.loss[0]),
        loss_tolerance=finite(small.loss[1]),
        grad_error=finite(small.gradient[0]),
        grad_tolerance=finite(small.gradient[1]),
        slope_error=finite(small.slope[0]),
        slope_tolerance=finite(small.slope[1]),
        tolerance=tolerance,
        ok=not wrong,
        same_as=context.same_as,
        approximation_gap=gap,
        approximation_gaps={context.settings.logits: gap} if layout.approximate else None,
        at_size=at_its_size,
        differing=at_its_size.differing if at_its_size else [],
        reached_by_padding=reached,
        fewest_frames=adapter.fewest_frames,
        fewest_targets=adapter.fewest_targets,
        note="approximate; judged with its range widened to all of U" if layout.approximate else "",
    )
    if wrong:
        raise WrongResult(wrong)
