"""Judge loss and gradient against the float64 oracle: the correctness pass.

- Small batches: all questions of `core/questions.py` that a run asks, in both scopes.  Judged are
  the gradient of what the loss is given, and the step's gradients of encoder_out, decoder_out and
  every weight.
- A measured batch, with the run's own N, T, U and V.  It shows errors that only a large batch has:
  an index that overflows, a block that is left out, sums that lose their digits, results kept from
  other numbers of the same shape.
- A batch as long as the longest utterance of the shape file.

A pruned loss is judged with its range widened to all of U, where it must be exact.  The record also
has its gap to the exact loss at the run's own range.

A row may have the same code as another one of the run (`same_as`), under another library of
matrix products or cut in pieces.  Such a row is asked the first question and the measured batch, in
the scopes that are measured.  The other row answers the rest for both.

A question that fails is asked again in a fork that has asked nothing before.  A loss that is right
there keeps something from an earlier call.  A loss that is off by little in float32, and right in
float64, is not wrong, but imprecise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
from rnnt_bench.losses.inputs import Batch, Joiner
from rnnt_bench.losses.judge import Answer, Judged, ask, failing, judge
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import LossStep, changed, fingerprints
from rnnt_bench.records.schema import AtSize, Correctness
from rnnt_bench.system.processes import Fork

#: Least `reference_error` of a record: a fifth of the error that rounding.PRECISIONS allows a loss
#: in float32.
LEAST_ROUNDING = 2e-5
#: Seconds to wait for the answer of a fork, which has one thread.
FORK_SECONDS = 60.0
#: Utterances whose gap to the exact loss is measured, half a second each.
GAP_UTTERANCES = 20
#: In nats.  The gap to an exact loss of this size or less would be that of rounding.
SMALLEST_LOSS = 1e-6
#: Targets of the batch that is as long as the longest utterance of the file: few, so that it takes
#: little.
LONG_U = 4
#: Number of the draw of random inputs with which the first question is asked again at the end: no
#: other question has these numbers.
LAST_DRAW = 20


class Error(NamedTuple):
    """Hold a relative error, and the largest that a right loss may have; errors compare by
    value."""

    value: float = 0.0
    allowed: float = 0.0


class Failure(NamedTuple):
    """Hold a question that a loss fails, and what is wrong in words."""

    question: Question
    words: str


class Checked(NamedTuple):
    """Hold what several questions show of a loss.

    Attributes:
        loss: the largest error of the loss, over the questions with random, unscaled logits.
        gradient: the largest error of a gradient, over the same questions.
        slope: the largest difference to 1 of the factor that fits a gradient best, over the same.
        failure: the first failure of an utterance alone, else the first of a batch; None if there
            is none.
        imprecise: the largest error that only float64 shows to be rounding, None if there is none.
    """

    loss: Error
    gradient: Error
    slope: Error
    failure: Failure | None
    imprecise: float | None

    @property
    def wrong(self) -> str:
        """Return what is wrong in words, "" if nothing is."""
        return self.failure.words if self.failure else ""


def check(
    adapter: Adapter, device: torch.device, asked: Sequence[Question] | None = None
) -> Checked:
    """Ask each question in its scopes (`questions.scopes_of`), and return what the answers show.

    asked: the questions; None: all of small batches that a run asks."""
    losses, gradients, slopes = [Error()], [Error()], [Error()]
    failures: list[Failure] = []
    imprecise: list[float] = []
    asked = asked or list(questions.small(adapter, device))
    for question, answer in questions.answers(adapter, device, asked):
        verdict = questions.verdict(adapter, device, question, answer)
        if verdict.imprecise is not None:
            imprecise.append(verdict.imprecise)
        # Not others: larger or sharper logits have larger errors, and larger limits.
        if question.logits == "random" and question.largest is None:
            limits = verdict.limits
            losses.append(Error(answer.loss_error, limits.loss))
            gradients.append(Error(answer.grad_error, limits.gradient))
            slopes.append(Error(answer.slope_error, limits.slope))
        if verdict.wrong or answer.overwritten:
            mistakes = words.mistakes(adapter, question, device)
            title = f"with {question.title}: " if question.title else ""
            shapes = words.of_small(question.shapes)
            what = words.of_answer(answer, verdict.wrong, mistakes)
            failures.append(Failure(question, f"{title}{shapes}: {what}"))
    # An utterance alone tells the author of the loss more than a batch.
    failures.sort(key=lambda failure: len(failure.question.shapes) > 1)
    return Checked(
        max(losses),  # that of the largest value, with the limit of its own question
        max(gradients),
        max(slopes),
        failures[0] if failures else None,
        max(imprecise, default=None),
    )


def wrong_of(loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32") -> str:
    """Return in words what is wrong with a function loss(logits, targets, T_lengths, U_lengths); ""
    if nothing is.

    The function is called in this process, and what it raises is raised.  Its name is added to
    BY_NAME, and stays there.
    """

    class Given(OfFunction):
        name = getattr(loss, "__name__", "") or "loss"
        given = staticmethod(loss)

    # An adapter looks up its row here by its name. No run measures a template that is not named.
    BY_NAME.setdefault(Given.name, Implementation(Given.name, "", "main", "torch", template=True))
    adapter = Given(settings.resolve({"preset": "quick", "dtype": dtype}, device))
    return check(adapter, torch.device(device)).wrong


def answers_at_size(context, index: int) -> tuple[list[Answer], list[str]]:
    """Return the answer about a batch in each scope, and the names of what did not repeat in the
    first scope.

    Before each answer, `run_before` runs steps, one of them on the numbers of the answer.  The
    second list names what has other bits in the answer than in that step: "loss", and the leaves
    whose gradient has.

    For a loss that loops in Python, and for a row of the same code as another, no steps come before
    the answer, and the second list is empty.  A row of the same code is asked only in the scopes
    that are measured.
    """
    result: list[Answer] = []
    differing: list[str] = []
    has_steps_before = not (context.loops_in_python or context.same_as)
    scopes = context.settings.scopes if context.same_as else layouts.of(context.adapter).scopes
    for scope in scopes:
        earlier = run_before(context, scope, index) if has_steps_before else {}
        answer = ask(partial(ready, context, scope, index), scope)
        if not result:  # the first scope; without steps before it, nothing differs
            differing = changed(earlier, answer.computed)
        answer.computed.clear()  # a gradient takes as much memory as its leaf, such as the logits
        result.append(answer)
    return result, differing


def ready(context, scope: str, index: int) -> tuple[Adapter, Joiner, list[LossStep]]:
    """Return the adapter, the joiner and a step on a batch, the same numbers each time."""
    return context.adapter, context.model, [context.step(scope, index)]


def run_before(context, scope: str, index: int) -> dict[str, bytes]:
    """Run three steps of the same shapes: the second on the numbers of `ready`, the first and the
    third on other numbers.  Return the digests of the second's loss and gradients by name.

    The answer that follows is on the second's numbers.  So a loss that keeps its first result of
    these shapes, or returns that of the call before, gives a wrong answer then."""
    digests: dict[str, bytes] = {}
    for repeat in (1, 0, 1):  # `ready` makes its step with repeat 0, the default
        step = context.step(scope, index, repeat)
        outputs = {"loss": step.run(), **step.gradients()}
        if repeat == 0:
            digests = fingerprints(outputs)
        del step, outputs  # before the next one takes as much memory
    return digests


def check_at_size(
    context,
    places: float = rounding.PLACES,
    right_in_float64_only: bool = False,
    batch_name: str = "a measured batch",
) -> tuple[AtSize, str]:
    """Judge the measured batch with the most padded cells; for a loss that loops over cells in
    Python, that with the fewest.  Return its errors, and what is wrong in words, "" if nothing is.

    `imprecise` of the result is the largest error that is allowed but above `Judged.precise`.  So
    large an error is rounding only where the terms of a sum cancel.

    Args:
        places: how many units in the last place a sum as large as the loss may lose, see
          `rounding.allowed`.
        right_in_float64_only: whether the loss is right on small batches only in float64, and
          imprecise in float32.
        batch_name: what the words call the batch.
    """
    adapter, dtype = context.adapter, context.settings.dtype
    if context.loops_in_python:
        index = batching.lightest(context.all_batches, context.batches)
    else:
        index = batching.heaviest(context.all_batches, context.batches)[0]
    # The answers differ in scope only: what depends on the inputs alone is that of the first.
    answers, differing = answers_at_size(context, index)
    judged: list[Judged] = []
    wrong: list[str] = []
    tolerances: list[Allowed] = []
    for answer in answers:
        limits = answer.allowed(adapter, dtype, places)
        if right_in_float64_only:
            limits = limits.imprecise()  # rounding.IMPRECISE times as wide
        tolerances.append(limits)
        judged += judge(answer, limits)
        above = failing(answer, limits)
        if above or answer.overwritten:
            wrong.append(words.of_answer(answer, above))
    # Several errors may have one name: the dict `errors` keeps the last, so the largest.
    judged.sort(key=lambda line: finite(line.error))
    shapes = answers[0].shapes
    N, T, U = inputs.padded_sizes(shapes)
    posteriors = [adapter.lattice.posterior(solved.derivatives) for solved in answers[0].lattices]
    reference_error = None
    if dtype == "float32":
        reference_error = max(answers[0].float32_error(adapter.lattice), LEAST_ROUNDING)
    result = AtSize(
        batch=index,
        N=N,
        T_max=T,
        U_max=U,
        useful_cells=sum(frames * (tokens + 1) for frames, tokens in shapes),
        needed_cells=sum(oracle.needed_cells(cells, context.dtype) for cells in posteriors),
        loss_error=max(finite(answer.loss_error) for answer in answers),
        loss_tolerance=max(limits.loss for limits in tolerances),
        grad_error=max(finite(answer.grad_error) for answer in answers),
        grad_tolerance=max(limits.gradient for limits in tolerances),
        reference_error=reference_error,
        errors={line.what: finite(line.error) for line in judged},
        differing=differing,
        ok=not wrong,
    )
    if wrong:
        return result, f"on {batch_name} ({words.sizes(shapes)}): {wrong[0]}"
    result.imprecise = max(
        (line.error for line in judged if line.error > line.precise), default=None
    )
    return result, ""


def check_small(context) -> Checked:
    """Ask the questions of small batches; return what they show.  If the row runs the same code as
    another row, ask only the first question.

    The question that fails first is asked again in a fork that has asked nothing before.  If the
    loss is right in the fork, the words of the failure say that the loss keeps something.
    """
    adapter, device = context.adapter, context.device

    def judge_in_fork(pipe: Connection) -> None:
        torch.set_num_threads(1)  # OpenMP's other threads are not in a fork
        pipe.send(check(adapter, device, [pipe.recv()]).wrong)

    with Fork(judge_in_fork, possible=device.type == "cpu") as fork:
        checked = check(adapter, device, [questions.first(adapter)] if context.same_as else None)
        failure = checked.failure
        # The fork answers "" if the loss is right in it, None if it has died or is too slow.
        if failure is None or fork.ask(failure.question, FORK_SECONDS) != "":
            return checked
    kept = "right when asked first: it keeps something from an earlier call"
    return checked._replace(failure=failure._replace(words=f"{kept}; {failure.words}"))


def approximation_gap(context) -> float | None:
    """Return the median of `gap_of`, a pruned loss's relative gap to the exact loss, over at most
    GAP_UTTERANCES utterances of the measured batches, all with targets.  Return None if `gap_of`
    does for each of them.

    It is computed in float64, so that it is the gap of the method and not of the dtype.
    """
    adapter = context.adapter
    double = replace(context, dtype=torch.float64)
    model = layouts.of(adapter).model(context.device, torch.float64)
    every = [
        (batch, n)
        for batch in context.batches
        for n, (_, U) in enumerate(context.all_batches[batch])
        if U > 0
    ]
    stride = math.ceil(len(every) / GAP_UTTERANCES) or 1
    utterances = (double.make_batch(batch).utterance(n) for batch, n in every[::stride])
    every_gap = [gap_of(adapter, model, alone) for alone in utterances]
    gaps = [gap for gap in every_gap if gap is not None]
    return statistics.median(gaps) if gaps else None


def gap_of(adapter: Adapter, model: Joiner, alone: Batch) -> float | None:
    """Return (loss - exact loss) / exact loss of a batch of one utterance; None if the exact loss is
    almost 0."""
    layout = layouts.of(adapter)
    prepared = adapter.prepare(alone)
    with torch.no_grad():
        loss = float(layout.loss(layout.given(model, alone, prepared), alone, prepared))
        exact_losses = oracle.losses(
            model.logits(alone), alone.targets, alone.shapes, adapter.blank, adapter.lattice
        )
    exact = float(exact_losses.sum())
    return finite((loss - exact) / exact) if exact > SMALLEST_LOSS else None


def check_long(context, measured: AtSize, imprecise: bool) -> str:
    """Judge a made-up batch as long as the longest utterance of the file, if that is longer than
    the measured batch and than 2 x LONG_U frames; return what is wrong in words, "" if nothing is.

    A loss that loops in Python is not judged, nor a row with the same code as another row: the
    answer is "" then.

    Args:
        context: a subject.Context.
        measured: the sizes and errors of the measured batch.
        imprecise: whether the loss is right on small batches only in float64, and imprecise in
          float32.
    """
    T = int(context.all_batches.longest().max())
    # Above 2 x LONG_U, each utterance of `shapes` has more frames than targets.
    if T <= max(measured.T_max, 2 * LONG_U) or context.loops_in_python or context.same_as:
        return ""
    shapes = np.array([(T, LONG_U), (T - 1, LONG_U - 1), (T // 2, LONG_U - 2)])
    long = batching.fixed_size(shapes, len(shapes))
    places = rounding.PLACES + T // rounding.FRAMES_A_PLACE
    _, wrong = check_at_size(
        replace(context, all_batches=long, batches=[0]),
        places,
        imprecise,
        batch_name="a made-up batch as long as the file's longest utterance",
    )
    return wrong


def run(context) -> Iterator[Correctness]:
    """Judge the loss of a subject.Context: yield one ``correctness`` record, then raise WrongResult
    if the loss is wrong.

    Ask on small batches, on a measured batch, on a long made-up one, and the first question again,
    until an answer is wrong."""
    adapter, device = context.adapter, context.device
    is_approximate = layouts.of(adapter).approximate
    small = check_small(context)
    wrong = small.wrong
    gap = approximation_gap(context) if is_approximate else None
    at_size: AtSize | None = None
    reached: list[str] = []
    if not wrong and not adapter.simulated:  # a simulator would take hours
        is_imprecise = small.imprecise is not None
        at_size, wrong = check_at_size(context, right_in_float64_only=is_imprecise)
        wrong = wrong or check_long(context, at_size, is_imprecise)
        if not wrong:
            # The calls since the first question may have left something behind.
            again = questions.first(adapter).but(draw=LAST_DRAW)
            wrong = check(adapter, device, [again]).wrong
            reached = questions.reached_by_padding(adapter, device)
        if small.imprecise is not None:  # `at_size` keeps the larger, of small batches or measured
            at_size.imprecise = max(small.imprecise, at_size.imprecise or 0.0)
    yield Correctness(
        loss_error=finite(small.loss.value),
        loss_tolerance=finite(small.loss.allowed),
        grad_error=finite(small.gradient.value),
        grad_tolerance=finite(small.gradient.allowed),
        slope_error=finite(small.slope.value),
        slope_tolerance=finite(small.slope.allowed),
        tolerance=rounding.PRECISIONS[context.settings.dtype].error,
        ok=not wrong,
        same_as=context.same_as,
        approximation_gap=gap,
        approximation_gaps={context.settings.logits: gap} if is_approximate else None,
        at_size=at_size,
        differing=at_size.differing if at_size else [],
        reached_by_padding=reached,
        fewest_frames=adapter.fewest_frames,
        fewest_targets=adapter.fewest_targets,
        note="approximate; judged with its range widened to all of U" if is_approximate else "",
    )
    if wrong:
        raise WrongResult(wrong)
