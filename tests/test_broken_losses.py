"""Losses that are wrong where a small random batch does not show it: each is refused, in words for its author."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rnnt_bench.analysis import logs, measured
from rnnt_bench.core import implementations, settings, text
from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.implementations import BY_NAME, find
from rnnt_bench.data import batching
from rnnt_bench.instruments import device
from rnnt_bench.losses import gradients, judge, layouts, oracle, questions, rounding, step, topologies
from rnnt_bench.losses import words as sentences
from rnnt_bench.losses.passes import after_timing, correctness, timing
from rnnt_bench.records.schema import Stop
from rnnt_bench.tools.largest import measure
from rnnt_bench.tools.largest.search import Request

import right_losses
from commands import ROOT, rows_of, run
from fixtures_runs import correctness as correctness_of_run
from fixtures_runs import write_run
from test_contract import TRAINED, adapter_of, context_of

CPU = torch.device("cpu")
#: (T, U), two utterances a batch.
SHAPES = [(70, 34), (66, 2), (64, 9), (50, 7), (20, 3), (21, 5)]
RESULT = "return losses.masked_fill(losses > -LOG_ZERO / 2, torch.inf).sum()"


def judged(context):
    """Return the record of the correctness pass, and what is wrong in words."""
    running = correctness.run(context)
    record = next(running)
    try:
        next(running, None)
    except WrongResult as error:
        assert not record.ok
        return record, str(error)
    assert record.ok
    return record, ""


def reference(**flags):
    return adapter_of(find("reference"), "cpu", **{"vocab_size": 40, **flags})


class Kernel(torch.autograd.Function):
    """The reference's losses (N,) and their gradient, as a kernel computes both in forward; `broken` changes them."""

    @staticmethod
    def forward(ctx, logits, broken, *given):
        with torch.enable_grad():
            leaf = broken.logits(logits.detach()).clone().requires_grad_()
            losses = topologies.transducer_loss(leaf, *given, reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.broken = broken
        ctx.save_for_backward(broken.gradient(gradient))
        return losses.detach()

    @staticmethod
    def backward(ctx, upstream):
        factors = ctx.broken.upstream(upstream).view(-1, 1, 1, 1)
        return (factors * ctx.saved_tensors[0], *[None] * 5)


class Broken:
    """A kernel without a fault; each subclass has one."""

    def __init__(self):
        self.calls = 0

    def logits(self, logits):
        return logits

    def gradient(self, gradient):
        return gradient

    def upstream(self, upstream):
        return upstream

    def losses(self, logits, targets, T_lengths, U_lengths, blank):
        return Kernel.apply(logits, self, targets, T_lengths, U_lengths, blank)

    def __call__(self, logits, targets, logit_lengths, target_lengths, blank, reduction, topology=None):
        self.calls += 1
        losses = self.losses(logits, targets, logit_lengths, target_lengths, blank)
        return losses if reduction == "none" else losses.sum()


def fault(name, kernel=Broken, **attributes):
    """A kernel whose attributes of these names are others."""
    return type(name, (kernel,), attributes)


def wrong_where(condition, factor=1.01):
    """losses with a factor where `condition`(self, logits) holds."""

    def losses(self, logits, *given):
        losses = Broken.losses(self, logits, *given)
        return losses * factor if condition(self, logits) else losses

    return fault("WrongWhere", losses=losses)


class Keeps(Broken):
    """Keeps, by shape, what it gave first from `least` frames on: losses, or the gradient, as a captured graph does."""

    kept, least = "losses", 0

    def __init__(self):
        super().__init__()
        self.known = {}

    def losses(self, logits, *given):
        losses = super().losses(logits, *given)
        if self.kept != "losses" or logits.size(1) < self.least:
            return losses
        return losses - losses.detach() + self.known.setdefault(logits.shape, losses.detach())

    def gradient(self, gradient):
        if self.kept != "gradient" or gradient.size(1) < self.least:
            return gradient
        return self.known.setdefault(gradient.shape, gradient)


class CachesItsFirstAnswer(Broken):
    def losses(self, *given):
        losses = super().losses(*given)
        if not hasattr(self, "first"):
            self.first = losses.detach().mean()
        return losses - losses.detach() + self.first


class StaleAfterALargerBatch(Broken):
    largest = 0

    def losses(self, logits, *given):
        losses = super().losses(logits, *given)
        self.largest = max(self.largest, logits.size(1))
        return losses * 1.01 if logits.size(1) < self.largest else losses


class PreviousLengths(Broken):
    def losses(self, logits, targets, T_lengths, U_lengths, blank):
        before = getattr(self, "before", T_lengths)
        self.before = T_lengths
        same = before.shape == T_lengths.shape and int(before.max()) <= logits.size(1)
        return super().losses(logits, targets, before if same else T_lengths, U_lengths, blank)


class ThirdUtterance(Broken):
    def losses(self, logits, *given):
        factors = torch.ones(len(logits))
        factors[2:3] = 1.01
        return super().losses(logits, *given) * factors


class GradientOfTheCallBefore(Broken):
    def gradient(self, gradient):
        before, self.before = getattr(self, "before", gradient), gradient
        return before if before.shape == gradient.shape and gradient.size(1) > 48 else gradient


class Overwrites(Broken):
    """Writes over its targets or lengths, before or after it has read them, from some call on."""

    of, before, first = "targets", False, 0

    def losses(self, logits, targets, T_lengths, *given):
        written = targets if self.of == "targets" else T_lengths
        if self.before:
            written.fill_(1)
        losses = super().losses(logits, targets, T_lengths, *given)
        if self.calls > self.first:
            written.sub_(written - 1)
        return losses


class RoundsItsInput(Broken):
    def losses(self, logits, *given):
        logits.data.copy_(logits.data.bfloat16())
        return super().losses(logits, *given)


class AsManyTargetsAsFrames(Broken):
    """Takes no more than T - 1 targets."""

    def losses(self, logits, targets, T_lengths, U_lengths, blank):
        return super().losses(logits, targets, T_lengths, torch.minimum(U_lengths, T_lengths - 1).clamp(min=0), blank)


class ClampsTheLastGradient(Broken):
    """After the upstream factor."""

    def losses(self, logits, *given):
        same = logits.view_as(logits)
        if same.requires_grad:
            same.register_hook(lambda gradient: gradient.clamp(-10, 10))
        return super().losses(same, *given)


class LengthsByShape(Broken):
    """Keeps lengths by the padded shape, from `least` frames on."""

    least = 0

    def __init__(self):
        super().__init__()
        self.known = {}

    def losses(self, logits, targets, T_lengths, U_lengths, blank):
        lengths = T_lengths.clone(), U_lengths.clone()
        if logits.size(1) >= self.least:
            lengths = self.known.setdefault(logits.shape, lengths)
        return super().losses(logits, targets, *lengths, blank)


class TargetsByShape(LengthsByShape):
    def losses(self, logits, targets, *given):
        kept = self.known.setdefault(targets.shape, targets.clone()) if logits.size(1) >= self.least else targets
        return Broken.losses(self, logits, kept, *given)


class SharedBuffer(Broken):
    """Two losses in flight share the buffer of the gradient, from `least` frames on."""

    least = 0

    def gradient(self, gradient):
        if gradient.size(1) < self.least:
            return gradient
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault(gradient.shape, torch.empty_like(gradient)).copy_(gradient).data


class TheFirstIsTheLongest(Broken):
    """Cuts all utterances to the frames of the first, from `least` frames on."""

    least = 0

    def losses(self, logits, targets, T_lengths, *given):
        cut = torch.minimum(T_lengths, T_lengths[0]) if logits.size(1) >= self.least else T_lengths
        return super().losses(logits, targets, cut, *given)


class HalfForOtherShapes(Broken):
    """Half the gradient for every other shape than the first of `least` frames."""

    least = 0

    def gradient(self, gradient):
        first = self.__dict__.setdefault("first", gradient.shape) if gradient.size(1) >= self.least else gradient.shape
        return gradient * (1.0 if first == gradient.shape else 0.5)


def no_maximum(self, logits):
    return logits - logits.exp().sum(-1, keepdim=True).log()


def clamped_log_probs(self, logits):
    return logits.log_softmax(-1).clamp(min=-20)


def at_size(change):
    """The change of logits or gradients of 49 frames and more."""
    return lambda self, values: change(self, values) if values.size(1) > 48 else values


def of_upstream(change):
    """A change of the upstream factors where the gradient has 49 frames and more."""

    def gradient(self, gradient):
        self.large = gradient.size(1) > 48
        return gradient

    def upstream(self, upstream):
        return change(upstream) if self.large else upstream

    return {"gradient": gradient, "upstream": upstream}


def zero_from(u):
    def gradient(self, gradient):
        cut = gradient.clone()
        cut[:, :, u:] = 0
        return cut

    return gradient


def multiplied_mask(self, logits, targets, T_lengths, U_lengths, blank):
    """Multiplies by 0 what is infinite for large logits in the padding."""
    inside = (torch.arange(logits.size(1)) < T_lengths.view(-1, 1)).view(*logits.shape[:2], 1, 1)
    nothing = (logits.exp() * ~inside).sum((1, 2, 3)) * 0
    return Broken.losses(self, logits, targets, T_lengths, U_lengths, blank) + nothing


def no_loss_without_tokens(self, logits, targets, T_lengths, U_lengths, blank):
    losses = Broken.losses(self, logits, targets, T_lengths, U_lengths, blank)
    return losses if int(U_lengths.max()) else losses * 0


OfFive = wrong_where(lambda self, logits: len(logits) > 4)
IgnoresTheSign = fault("IgnoresTheSign", upstream=lambda self, upstream: upstream.abs())
Clamps = fault("Clamps", logits=lambda self, logits: logits.clamp(-50, 50))
GradientTimes = fault("GradientTimes", gradient=lambda self, gradient: gradient * 1.001)
OverwritesTargets = fault("OverwritesTargets", Overwrites, before=True)
OverwritesLengths = fault("OverwritesLengths", Overwrites, of="T_lengths")
CachesByShape = fault("CachesByShape", Keeps)
ZeroFromU101 = fault("ZeroFromU101", gradient=zero_from(101))
NoLossWithoutTokens = fault("NoLossWithoutTokens", losses=no_loss_without_tokens)
SMALL = [
    CachesItsFirstAnswer,
    CachesByShape,
    fault("CachesGradientsByShape", Keeps, kept="gradient"),
    StaleAfterALargerBatch,
    PreviousLengths,
    ThirdUtterance,
    IgnoresTheSign,
    fault("IgnoresUpstream", upstream=lambda self, upstream: torch.ones_like(upstream)),
    fault("MeanUpstream", upstream=lambda self, upstream: upstream.mean().expand_as(upstream)),
    fault("UpstreamInHalf", upstream=lambda self, upstream: upstream.half().float()),
    fault("UpstreamInBfloat16", upstream=lambda self, upstream: upstream.bfloat16().float()),
    fault("UpstreamTwice", upstream=lambda self, upstream: upstream.square()),
    LengthsByShape,
    TargetsByShape,
    SharedBuffer,
    TheFirstIsTheLongest,
    HalfForOtherShapes,
    fault("ClampedLogProbs", logits=clamped_log_probs),
    ZeroFromU101,
    fault("ZeroFromU140", gradient=zero_from(140)),
    fault("MultipliedMask", losses=multiplied_mask),
    NoLossWithoutTokens,
    fault("IgnoresUpstreamOfUtterances", upstream=lambda self, upstream: upstream[:1].expand_as(upstream)),
    Clamps,
    fault("SoftmaxWithoutMaximum", logits=lambda self, logits: logits - logits.exp().sum(-1, keepdim=True).log()),
    GradientTimes,
    fault("GradientSlightlyOff", gradient=lambda self, gradient: gradient * 1.00005),
    OverwritesTargets,
    fault("OverwritesTargetsAtTheEnd", Overwrites),
    OverwritesLengths,
    RoundsItsInput,
    fault("RoundsInside", logits=lambda self, logits: logits.bfloat16().float()),
    AsManyTargetsAsFrames,
    ClampsTheLastGradient,
    OfFive,
    wrong_where(lambda self, logits: self.calls >= 3),
    wrong_where(lambda self, logits: self.calls >= 10),
    wrong_where(lambda self, logits: logits.size(1) % 16 == 0),
    wrong_where(lambda self, logits: logits.size(2) % 16 == 0),
]


def broken(kernel, monkeypatch, **flags):
    """The context of the reference's adapter with `kernel` for its function."""
    adapter = reference(allocator="system", max_samples=9, max_seconds=100.0, **flags)
    monkeypatch.setattr(adapter, "function", lambda: kernel)
    return context_of(adapter, SHAPES, 2)


@pytest.mark.parametrize("loss", right_losses.RIGHT, ids=lambda loss: loss.__name__)
def test_a_right_loss_of_any_kind_is_right_before_and_after_timing(loss, monkeypatch):
    def kernel(logits, targets, logit_lengths, target_lengths, blank, reduction, topology=None):
        losses = loss(logits, targets, logit_lengths, target_lengths)
        return losses if reduction == "none" else losses.sum()

    context = broken(kernel, monkeypatch, rounds=1)
    context.adapter.overwrites_logits = loss is right_losses.in_place
    judged(context)
    assert [line for line in timing.run(context) if isinstance(line, Stop)]


def test_float16_whose_sums_are_float32_is_right():
    assert correctness.wrong_of(right_losses.float32_sums, dtype="float16") == ""


def test_a_kernel_without_a_fault_is_right_before_and_after_timing(monkeypatch):
    context = broken(Broken(), monkeypatch)
    record, _ = judged(context)
    assert record.slope_error <= record.slope_tolerance and record.differing == []
    ends = [line for line in timing.run(context) if isinstance(line, Stop)]
    assert {end.scope for end in ends} == {"loss", "step"}
    assert all(end.loss_error < 1e-5 and end.grad_error < 1e-3 for end in ends)


@pytest.mark.parametrize("name, reached", [("torchaudio", []), ("fast_rnnt", ["given"]), ("fused", [])])
def test_nan_in_the_padding_that_reaches_a_gradient_is_said(name, reached):
    adapter = adapter_of(find(name), "cpu", vocab_size=40, encoder_dim=16)
    assert questions.reached_by_padding(adapter, CPU) == reached


WORDS = {OverwritesTargets: "overwrites targets", OverwritesLengths: "T_lengths", RoundsItsInput: "overwrites logits"}
WORDS.update({GradientTimes: "1.001", IgnoresTheSign: "a loss times -2", Clamps: "logits of"})
WORDS.update(dict.fromkeys([CachesByShape, TargetsByShape, HalfForOtherShapes], "right when asked first"))
WORDS.update(dict.fromkeys([LengthsByShape, SharedBuffer], "two losses in flight"))
WORDS.update({NoLossWithoutTokens: "U = 0", ZeroFromU101: "T, U: 3, 140"})
WORDS.update({ClampsTheLastGradient: "a loss times", OfFive: "a batch of 5"})


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.__name__)
def test_a_broken_kernel_is_not_timed_and_the_reason_names_the_fault(kernel, monkeypatch):
    _, wrong = judged(broken(kernel(), monkeypatch))
    assert wrong and WORDS.get(kernel, "") in wrong


def test_a_loss_that_may_overwrite_its_logits_is_right(monkeypatch):
    context = broken(RoundsItsInput(), monkeypatch)
    monkeypatch.setattr(context.adapter, "overwrites_logits", True)
    asked = questions.Question(shapes=[(4, 2)])
    assert questions.answer(context.adapter, asked, CPU, "loss").overwritten == []


# Only a measured batch shows these.

#: Smaller than the largest rounding error of a right loss: the factor of the whole shows it.
Late = fault("Late", gradient=lambda self, gradient: gradient * (1.002 if gradient.size(1) > 48 else 1))
KeepsLongGradients = fault("KeepsLongGradients", Keeps, kept="gradient", least=49)
KeepsLongTargets = fault("KeepsLongTargets", TargetsByShape, least=49)


def of_others(*place):
    """A loss of logits that are others at `place`."""

    def wrong(loss, logits, given):
        extra = torch.zeros_like(logits)
        if logits.size(1) > 48:
            extra[place] = 0.02 * torch.arange(logits.size(-1))
        return loss(logits + extra, given)

    return wrong


LATE_FRAMES, LATE_TARGETS = of_others(slice(None), slice(64, None)), of_others(..., slice(32, None), slice(None))


def of_the_first_eight(loss, logits, given):
    few = {name: tensor[:8] for name, tensor in vars(given).items()}
    return loss(logits[:8], type(given)(**few))


def of_some_symbols(loss, logits, given):
    first = 32 if logits.size(1) > 48 else logits.size(-1)
    return loss(torch.cat([logits[..., :first], logits[..., first:].detach()], -1), given)


def with_gradient_in_padding(loss, logits, given):
    outside = torch.zeros_like(logits)
    outside[1:2, 68:] = 1e-2
    return loss(logits, given) + (logits * outside).sum() - (logits * outside).sum().detach()


@pytest.mark.parametrize("kernel", [Late, KeepsLongGradients, KeepsLongTargets, GradientOfTheCallBefore])
def test_a_kernel_that_breaks_at_size_is_not_timed(kernel, monkeypatch):
    record, wrong = judged(broken(kernel(), monkeypatch))
    assert "on a measured batch (N 2, T 70, U 34)" in wrong and not record.at_size.ok
    if kernel is Late:
        assert record.at_size.errors["gradient by a factor"] == pytest.approx(2e-3, rel=0.05)


def test_a_kernel_that_is_wrong_on_the_longest_of_the_file_is_not_timed(monkeypatch):
    context = broken(wrong_where(lambda self, logits: logits.size(1) > 100)(), monkeypatch)
    context.all_batches = batching.fixed_size([*SHAPES, (130, 40), (9, 1)], 2)
    _, wrong = judged(context)
    assert "on a made-up batch as long as the file's longest utterance (N 3, T 130, U 4)" in wrong


AT_SIZE = [LATE_FRAMES, LATE_TARGETS, of_the_first_eight, of_some_symbols, with_gradient_in_padding]


@pytest.mark.parametrize("wrong", AT_SIZE)
def test_what_is_wrong_at_size_only_is_found(wrong, monkeypatch):
    adapter = reference()
    right = adapter.loss
    monkeypatch.setattr(adapter, "loss", lambda logits, given: wrong(right, logits, given))
    record, words = judged(context_of(adapter))
    assert max(record.loss_error, record.grad_error) <= record.tolerance  # the small batches are right
    assert not record.at_size.ok and "on a measured batch (N 9, T 70, U 34)" in words


def with_gradient(right, breaks):
    """A right loss of padded logits; `breaks`(gradient, logits, given) is its gradient from V = 110 and T = 60 on."""

    def loss(logits, given):
        same = logits.clone()
        if logits.size(-1) >= 110 and logits.size(1) >= 60 and same.requires_grad:
            same.register_hook(lambda gradient: breaks(gradient, logits.detach(), given))
        return right(same, given)

    return loss


def non_target(logits, given):
    """1 for the entries that are neither the blank's nor the next target's, else 0."""
    gradient = torch.ones_like(logits)
    gradient[..., 0] = 0
    targets = given.targets.long()[:, None, :, None].expand(-1, logits.size(1), -1, 1)
    gradient[:, :, :-1].scatter_(3, targets, 0.0)
    return gradient


def with_softmax(replaced):
    """The gradient with other probabilities, which `replaced` makes of the logits."""

    def breaks(gradient, logits, given):
        right, others = logits.softmax(-1), non_target(logits, given)
        posterior = (gradient * others).sum(-1, keepdim=True) / (right * others).sum(-1, keepdim=True)
        return gradient + posterior * (replaced(logits) - right)

    return breaks


def only_targets(gradient, logits, given):
    return gradient * (1 - non_target(logits, given))


def only_targets_at_the_end(gradient, logits, given):
    late = torch.arange(logits.size(1)) >= (given.logit_lengths * 9 // 10).view(-1, 1)
    return torch.where(late[:, :, None, None], only_targets(gradient, logits, given), gradient)


def three_quarters(logits):
    kept = logits.size(-1) * 3 // 4
    return torch.nn.functional.pad(logits[..., :kept].softmax(-1), (0, logits.size(-1) - kept))


SMALL_ENTRIES = {
    "no non-target part": (4096, only_targets, "symbol"),
    "a quarter dropped": (4096, with_softmax(three_quarters), "symbol"),
    "mean softmax": (4096, with_softmax(lambda logits: torch.full_like(logits, 1 / logits.size(-1))), "symbol"),
    "end of an utterance": (4096, only_targets_at_the_end, "frame"),
    "small zeroed": (500, lambda gradient, *_: gradient.masked_fill(gradient.abs() < 1.4e-3, 0), "frame"),
    "flipped": (500, lambda gradient, *_: torch.where(gradient.abs() < 7e-4, -gradient, gradient), "frame"),
}


@pytest.mark.parametrize("of", SMALL_ENTRIES)
def test_what_is_wrong_where_it_is_small_is_refused(of, monkeypatch):
    V, breaks, word = SMALL_ENTRIES[of]
    adapter = adapter_of(find("reference"), "cpu", vocab_size=V)
    context = context_of(adapter, [(62, 6), (60, 4)])
    monkeypatch.setattr(adapter, "loss", with_gradient(adapter.loss, breaks))
    record, words = judged(context)
    assert max(record.loss_error, record.grad_error) <= record.tolerance  # the small batches are right
    assert record.at_size.loss_error < 1e-6 and record.at_size.errors[f"the gradient of a {word} in sum"] > 0.1
    assert "on a measured batch" in words


def test_a_joiner_weight_without_gradient_at_size_is_refused():
    class Linear(torch.nn.Linear):
        def forward(self, joined):
            weight = self.weight.detach() if joined[..., 0].numel() > 300 else self.weight
            return torch.nn.functional.linear(joined, weight + 0 * self.weight, self.bias)

    context = context_of(adapter_of(find("reference"), "cpu", vocab_size=500), [(62, 6), (60, 4)])
    broken = Linear(*context.model.output.weight.T.shape)
    broken.load_state_dict(context.model.output.state_dict())
    context.model.output = broken
    record, words = judged(context)
    assert record.at_size.errors["gradient"] < 1e-3 and "gradient of output.weight off by 1.0e+00" in words


# Rounding.


def test_what_rounding_explains():
    """Paths have 64 and 36 steps, scores are up to 10, a loss of 100 is one of 200 in all: eps is 2^-23."""
    eps, of_a_posterior = 2**-23, 64 * 10 + 4 * 100  # sqrt(64) / 2 is 4 as well
    limits = rounding.allowed("float32", [(60, 4), (36, 0)], 10.0, -100.0, right=200.0, largest=0.5, negligible=1e-9)
    neglected = 1e-9 * 60 * 5
    assert limits.loss == pytest.approx(1e-4 + eps * 10 * 100 / 200, rel=1e-12)
    assert limits.gradient == pytest.approx(1e-4 + eps * (of_a_posterior + 4) / 0.5 + neglected, rel=1e-12)
    assert limits.slope == pytest.approx(limits.gradient - 1e-4 + 2e-5, rel=1e-12)
    assert limits.precise_gradient == pytest.approx(1e-4 + eps * of_a_posterior + neglected, rel=1e-12)
    assert (limits.precise_loss, limits.length) == (1e-4, limits.gradient - 1e-4 + 1e-2)
    assert limits.rows - limits.sums == pytest.approx(eps * 4 / 0.5 * 100, rel=1e-9)
    longer = rounding.allowed("float32", [(10000, 0)], 0.0, 100.0)
    assert longer.gradient == pytest.approx(1e-4 + eps * 50 * 101, rel=1e-12)  # 50: sqrt(10000) / 2
    assert rounding.allowed("float64", [(60, 4)], 10.0, 100.0).gradient < 1.01e-9


def test_products_that_sum_in_another_order_are_no_fault(tmp_path):
    """MKL's compatible kernels put the bias's gradient of torchaudio further off than others do."""
    flags = ["--preset", "quick", "--only", "torchaudio", "--passes", "correctness", "--in-place", "--quiet"]
    variables = {**os.environ, "MKL_CBWR": "COMPATIBLE"}
    done = run("benchmark_all.py", *flags, "--log-dir", tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("by, outcome", [(1e-7, "right"), (3e-4, "imprecise"), (0.3, "wrong")])
def test_a_small_loss_of_large_scores_may_be_imprecise(by, outcome, monkeypatch):
    """Scores of up to 46 along 220 steps cancel to a loss of 0.3."""
    adapter = adapter_of(find("reference"), "cpu", **TRAINED)
    right, context = adapter.loss, context_of(adapter, [(200, 20)])
    with torch.no_grad():
        context.model.output.weight.mul_(2)
        context.model.output.bias.mul_(2)
    rounding = {True: by, False: 0.0}
    monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given) + rounding[logits.size(1) > 60])
    record, _ = judged(context)
    imprecise = record.at_size.imprecise
    assert record.ok is (outcome != "wrong") and (imprecise is not None) is (outcome == "imprecise")
    if imprecise:
        assert imprecise == record.at_size.loss_error > record.tolerance


@pytest.mark.parametrize("factor, right", [(1.0001, True), (1.01, False)])
def test_what_is_a_little_off_in_float32_and_right_in_float64_is_imprecise(factor, right, monkeypatch):
    def gradient(self, gradient):
        return gradient * (factor if gradient.dtype == torch.float32 else 1)

    record, wrong = judged(broken(fault("OffInFloat32", gradient=gradient)(), monkeypatch))
    assert record.ok is right
    if right:
        assert record.at_size.imprecise == pytest.approx(1e-4, rel=0.3) and measured._is_right(record)


def test_a_pruned_loss_whose_large_path_does_not_reach_the_encoder_is_refused(monkeypatch):
    adapter = adapter_of(find("fast_rnnt-pruned"), "cpu", vocab_size=40)
    right = adapter.pruned

    def pruned(encoder_out, *others):
        return right(encoder_out.detach() if encoder_out.size(1) == 70 else encoder_out, *others)

    monkeypatch.setattr(adapter, "pruned", pruned)
    _, wrong = judged(context_of(adapter))
    assert "on a measured batch" in wrong and "gradient of encoder_out" in wrong


@pytest.mark.parametrize("blank", [12.0, 14.0])
def test_posteriors_that_cancel_are_imprecise(blank):
    context = context_of(adapter_of(find("reference"), "cpu", vocab_size=20), [(70, 0)])
    with torch.no_grad():
        context.model.output.weight.mul_(0.01)
        context.model.output.bias.zero_()[0] = blank
    result, wrong = correctness.check_at_size(context)
    assert wrong == "" and result.imprecise > 1e-4 and result.errors["the gradient of a frame in sum"] < 1e-5


def test_a_gradient_of_float16_is_far_beyond_what_sums_in_float32_lose(monkeypatch):
    """It is right within the tolerance, so the record says how far a loss in float32 is off."""

    def halved(self, gradient):
        return (1.5 * gradient).half().float() / 1.5 if gradient.size(1) > 48 else gradient

    halves = fault("Halves", gradient=halved)
    for kernel, computes_in_less in ((Broken, False), (halves, True)):
        record, _ = judged(broken(kernel(), monkeypatch, **TRAINED))
        assert (record.at_size.grad_error > 10 * record.at_size.reference_error) is computes_in_less
    assert correctness.check_at_size(context_of(reference(dtype="float16")))[0].reference_error is None


@pytest.mark.parametrize("name", ["torchaudio", "optimized_transducer", "fast_rnnt", "fused"])
def test_packages_compute_in_float32(name):
    adapter = adapter_of(find(name), "cpu", **TRAINED)
    result, _ = correctness.check_at_size(context_of(adapter, [(300, 60), (202, 38)]))
    assert result.ok and result.grad_error < 10 * result.reference_error


@pytest.mark.parametrize("factor", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_a_number_is_called_so(factor, monkeypatch):
    adapter = reference()
    right = adapter.loss
    monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given) * float(factor))
    record, wrong = judged(context_of(adapter))
    assert record.at_size is None and f"loss {factor}" in wrong
    assert text.finite(float(factor)) == text.UNBOUNDED


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(dtype):
    result, _ = correctness.check_at_size(context_of(reference(dtype=dtype)))
    assert result.ok and result.grad_tolerance < 1.01 * rounding.PRECISIONS[dtype].error + 1e-4


# Only the timed steps show these: they are right as often as the correctness pass asks, or on the batches that it has.


class LeavesOutTheFifth(Broken):
    """And those behind it of long utterances, as a kernel does whose grid is too small."""

    def losses(self, logits, *given):
        return super().losses(logits, *given) * first_four(logits)


def first_four(logits):
    """Return the mask of the first four utterances, where they are long; of all short ones."""
    return (torch.arange(len(logits)) < 4) | (logits.size(1) < 48)


LeavesOutTheGradientOfTheFifth = fault(
    "LeavesOutTheGradientOfTheFifth",
    gradient=lambda self, gradient: gradient * first_four(gradient).view(-1, 1, 1, 1),
)


def searched(context):
    """Return what is judged of a step at the size found; it may raise."""
    context.settings = replace(context.settings, scopes=context.settings.scopes[:1])
    (end,) = measure.judge(context, Request(limit_bytes=2**30))
    return end


@pytest.mark.parametrize("scope", ["step", "loss"])
@pytest.mark.parametrize("name", ["torchaudio", "optimized_transducer", "fused", "fast_rnnt-pruned", "k2"])
def test_a_right_loss_is_right_at_the_size_found(name, scope):
    context = context_of(adapter_of(find(name), "cpu", vocab_size=40))
    if scope not in context.settings.scopes:
        pytest.skip("it takes no logits")
    context.settings = replace(context.settings, scopes=(scope,))
    end = searched(context)
    assert 0 <= end.loss_error < 1e-4 and 0 < end.grad_error < 1e-2


@pytest.mark.parametrize("scope", ["step", "loss"])
def test_a_search_judges_all_utterances_of_the_size_found(scope, monkeypatch):
    faults = {LeavesOutTheFifth: "loss ", LeavesOutTheGradientOfTheFifth: "the gradient"}
    for kernel, words in faults.items():
        context = broken(kernel(), monkeypatch)
        _, wrong = judged(context)
        assert not wrong  # on few utterances
        context.all_batches, context.batches = batching.fixed_size(SHAPES, 6), [0]
        context.settings = replace(context.settings, scopes=(scope,))
        with pytest.raises(WrongResult, match=f"at the size found.*N 6, T 70, U 34.*{words}"):
            searched(context)


CachesLongOnes = fault("CachesLongOnes", Keeps, least=60)
TIMED = [
    wrong_where(lambda self, logits: self.calls > 8),
    wrong_where(lambda self, logits: logits.size(1) == 64, 1.001),
    wrong_where(lambda self, logits: logits.size(1) == 21, 1.001),
    wrong_where(lambda self, logits: self.calls > 8, float("nan")),
    StaleAfterALargerBatch,
    CachesLongOnes,
    fault("OverwritesTargetsLater", Overwrites, first=8),
    fault("KeepsAnyGradient", Keeps, kept="gradient"),
    GradientOfTheCallBefore,
    fault("NoGradientLater", gradient=lambda self, gradient: gradient * (self.calls <= 8)),
]


#: Right on small batches, where the kernel has another path; each is asked a hard question at size.
LARGE_PATH = {
    "lengths by shape": fault("Large", LengthsByShape, least=49),
    "a buffer shared in flight": fault("Large", SharedBuffer, least=49),
    "the first is the longest": fault("Large", TheFirstIsTheLongest, least=49),
    "half for other shapes": fault("Large", HalfForOtherShapes, least=49),
    "no maximum": fault("Large", logits=at_size(no_maximum)),
    "clamped log-probabilities": fault("Large", logits=at_size(clamped_log_probs)),
    "clamped logits": fault("Large", logits=at_size(lambda self, logits: logits.clamp(-50, 50))),
    "no upstream": fault("Large", **of_upstream(torch.ones_like)),
    "upstream's sign": fault("Large", **of_upstream(torch.abs)),
    "upstream at most 1000": fault("Large", **of_upstream(lambda upstream: upstream.clamp(-1000, 1000))),
}


@pytest.mark.parametrize("name", LARGE_PATH)
def test_a_large_path_that_is_wrong_when_asked_more_has_no_times(name, monkeypatch):
    context = broken(LARGE_PATH[name](), monkeypatch, rounds=1)
    context.all_batches, context.batches = batching.fixed_size([(70, 34), (66, 2), (52, 9), (70, 7)], 4), [0]
    assert judged(context)[1] == ""  # the fresh process asks nothing more at size
    with pytest.raises(WrongResult, match="after timing, asked for two losses in flight"):
        list(timing.run(context))


def test_each_round_asks_a_hard_question_and_a_single_one_all():
    context = context_of(reference(rounds=6))

    def asked(number):
        return [question.frozen for question in after_timing.hard_questions(replace(context, round=number))]

    rounds = [asked(number) for number in (1, 2, 3)]
    assert not asked(4) and not asked(6)
    assert not after_timing.hard_questions(replace(context, same_as="reference"))
    context.settings = replace(context.settings, rounds=1)
    every = [question.frozen for question in after_timing.hard_questions(context)]
    assert sorted(sum(rounds, [])) == sorted(every) and len(every) == 3 and all(len(asked) == 1 for asked in rounds)


def test_a_row_of_the_same_code_is_asked_less_and_its_record_names_the_other(monkeypatch):
    calls = []

    def kernel(*given, **options):
        calls.append(given)
        return topologies.transducer_loss(*given, **options)

    whole = judged(broken(kernel, monkeypatch))
    several = len(calls)
    same = judged(replace(broken(kernel, monkeypatch), same_as="reference"))
    assert [(record.ok, record.same_as, words) for record, words in (whole, same)] == [
        (True, "", ""),
        (True, "reference", ""),
    ]
    assert same[0].at_size and 0 < 5 * (len(calls) - several) < several


@pytest.mark.parametrize("number", range(len(TIMED)))
def test_a_kernel_that_breaks_while_it_is_timed_has_no_times(number, monkeypatch):
    context = broken(TIMED[number](), monkeypatch)
    if TIMED[number] is GradientOfTheCallBefore:
        context.batches = [0]
    kinds = set()
    with pytest.raises(WrongResult, match="after timing"):
        kinds.update(type(record).__name__ for record in timing.run(context))
    assert {"Sample", "Stop"} <= kinds


class Scaled(torch.autograd.Function):
    """The input itself, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


@pytest.mark.parametrize(
    "leaf, factor", [("encoder_out", 0.0), ("encoder_out", 10.0), ("decoder_out", 0.5), ("decoder_out", 2.0)]
)
def test_each_leaf_of_the_timed_step_counts(leaf, factor, monkeypatch):
    """encoder_out's gradient is far shorter than the weight's; only from the ninth step on is it wrong."""
    context, right, steps = context_of(reference(max_samples=9, allocator="system"), SHAPES, 2), layouts.Layout.step, []

    def step_of(layout, model, batch, prepared):
        steps.append(batch)
        wrong = Scaled.apply(getattr(batch, leaf), factor if len(steps) > 8 else 1.0)
        return right(layout, model, replace(batch, **{leaf: wrong}), prepared)

    context.settings = replace(context.settings, scopes=("step",))
    monkeypatch.setattr(layouts.Layout, "step", step_of)
    with pytest.raises(WrongResult, match=f"of the last step, the gradient of {leaf}"):
        list(timing.run(context))
    assert len(steps) > 8


@pytest.mark.parametrize("frames", [70, 64, 21])
def test_over_the_rounds_the_gradient_of_every_batch_is_judged(frames, monkeypatch):
    half = fault("Half", gradient=lambda self, gradient: gradient * (0.5 if gradient.size(1) == frames else 1.0))
    monkeypatch.setattr(after_timing, "hard_questions", lambda context: ())
    refused = []
    for number in (1, 2, 3):
        context = broken(half(), monkeypatch, rounds=3)
        context.round, context.settings = number, replace(context.settings, scopes=("step",))
        try:
            list(timing.run(context))
        except WrongResult as error:
            refused.append(f"T {frames}" in str(error))
    assert refused == [True]


def test_the_sketch_of_a_difference_has_its_length():
    random = torch.Generator().manual_seed(1)
    right = torch.randn(50, 7, 30, generator=random)
    wrong = right + 0.1 * torch.randn(50, 7, 30, generator=random)
    for seed in range(20):
        sketches = gradients.Sketch(seed), gradients.Sketch(seed)
        for sketch, values in zip(sketches, (right, wrong)):
            for n in range(0, 50, 25):
                sketch.note("given", values[n : n + 25], 0, n)
        length = sketches[0].squares["given"] ** 0.5
        assert length == pytest.approx(float(right.norm()), rel=1e-6)
        (error,) = sketches[1].errors({"given": [length, *sketches[0].sums["given"].tolist()]}).values()
        assert error == pytest.approx(0.1, rel=0.6)
        assert sketches[0].errors({"given": [length, *sketches[0].sums["given"].tolist()]}) == {"given": 0.0}


def test_the_sketch_of_a_square_leaf_tells_a_transposed_gradient():
    right = torch.randn(20, 20, generator=torch.Generator().manual_seed(1))
    sketches = [gradients.Sketch(1), gradients.Sketch(1)]
    for sketch, values in zip(sketches, (right, right.T)):
        sketch.note("output.weight", values)
    error = sketches[1].errors(sketches[0].numbers())["output.weight"]
    assert error == pytest.approx(float((right.T - right).norm() / right.norm()), rel=0.6)


def test_right_losses_share_the_seed_and_the_sketch_of_the_right_gradients(tmp_path, monkeypatch):
    shared = []
    for name in ("reference", "torchaudio", "fused"):
        context = context_of(adapter_of(find(name), "cpu", vocab_size=40), SHAPES, 2)
        context.shared = tmp_path
        shared.append(after_timing.rights_of(context, "step", [context.step("step", 0)]))
        monkeypatch.setattr(judge.Right, "sketch", None)
    assert shared[0] == shared[1] == shared[2] and len(shared[0].leaves) == 4


def test_no_sample_has_numbers_that_the_loss_has_seen(monkeypatch):
    """A kernel that remembers answers by content would be too fast on them."""
    seen = []

    class Notes(Broken):
        def logits(self, logits):
            seen.append(step.fingerprint(logits))
            return logits

    list(timing.run(broken(Notes(), monkeypatch)))
    assert len(seen) > 12 and len(set(seen)) == len(seen)


def test_what_a_loss_changes_of_its_process_is_said(monkeypatch):
    threads = torch.get_num_threads()
    more = fault("MoreThreads", logits=lambda self, logits: torch.set_num_threads(threads + 1) or logits)
    context = broken(more(), monkeypatch)
    context.state = device.state()
    try:
        ends = [line for line in timing.run(context) if isinstance(line, Stop)]
    finally:
        torch.set_num_threads(threads)
    assert all(end.changed == ["the number of threads"] for end in ends)


def test_what_is_kept_of_held_inputs_is_found(monkeypatch):
    """Inputs are held as on CUDA, where all repeats of a batch have the same numbers."""
    context = broken(CachesLongOnes(), monkeypatch)
    context.batches = [0]
    context.hold_inputs(context.batches)
    with pytest.raises(WrongResult, match="other numbers"):
        list(timing.run(context))


def test_a_fingerprint_has_every_bit():
    values = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    before = step.fingerprints({"values": values, "rows": values[:, 1], "none": None})
    assert step.changed(before, {"values": values.clone(), "rows": values[:, 1], "none": None}) == []
    values[0, 0] = -0.0
    assert step.changed(before, {"values": values, "rows": values[:, 1], "none": None}) == ["values"]


def test_the_digest_of_a_gpu_has_every_bit_and_its_place():
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        values = torch.randn(1001, generator=random).to(dtype)
        values[7] = not values[8]
        before = step.weighted_bits(values)
        assert torch.equal(step.weighted_bits(values.clone()), before) and before.shape == (1,)
        for place in (0, 7, 500, 1000):
            other = values.clone()
            other.view(torch.uint8)[place * values.element_size()] ^= 1
            assert not torch.equal(step.weighted_bits(other), before)
        swapped = values.clone()
        swapped[7:9] = values[7:9].flip(0)
        assert not torch.equal(step.weighted_bits(swapped), before)


def test_right_answers_are_made_once_for_all_losses_of_a_round(tmp_path, monkeypatch):
    context = broken(Broken(), monkeypatch)
    context.shared = tmp_path

    def error(repeat):
        return after_timing.judge_loss(context, "step", context.new_batch(0, repeat), None, 1.0)[0]

    first, other = error(0), error(1)
    monkeypatch.setattr(oracle, "of_parts", lambda parts, *_: (math.nan, parts))
    assert error(0) == first != other
    with torch.no_grad():
        context.model.output.bias[3] += 1e-6
    assert math.isnan(error(0))


def test_a_loss_that_breaks_is_found_by_shared_answers_too(tmp_path, monkeypatch):
    right = broken(Broken(), monkeypatch)
    wrong = broken(wrong_where(lambda self, logits: self.calls > 8)(), monkeypatch)
    right.shared = wrong.shared = tmp_path
    list(timing.run(right))
    assert list(tmp_path.iterdir())
    with pytest.raises(WrongResult, match="after timing"):
        list(timing.run(wrong))


@pytest.mark.parametrize("name, error, status", [("grad", 0.5, "error"), ("loss", 0.5, "error"), ("grad", 1e-5, "ok")])
def test_a_record_that_calls_itself_right_is_judged_by_what_it_allowed(name, error, status, tmp_path):
    errors = {f"{name}_error": error, f"{name}_tolerance": 1e-4}
    write_run(tmp_path / "log", jobs=[correctness_of_run(**errors)], passes=["correctness"])
    (row,) = logs.rows([tmp_path / "log"])
    assert row.status == status


# What its author is told: copies of the template with another expression.


FULL = "T_lengths, U_lengths = T_lengths * 0 + len(logits[0]), U_lengths * 0 + targets.size(1)"


@pytest.fixture
def checked(tmp_path):
    """Errors and words of a copy of the template with other text."""

    def check(new, old=RESULT):
        text = (ROOT / "benchmark_mine.py").read_text()
        assert text.count(old) == 1
        path = tmp_path / "benchmark_flash.py"
        path.write_text(text.replace(old, new))
        try:
            adapter = implementations.load(str(path))(settings.resolve({"preset": "quick"}, "cpu"))
            adapter.load("cpu")
            return correctness.check(adapter, CPU)
        finally:
            BY_NAME.pop("flash", None)

    return check


@pytest.mark.parametrize(
    "old, new, words",
    [
        (RESULT, "return losses.sum()", []),
        (RESULT, "return losses.mean()", ["a batch of 4", "1/4", "1/N", "a mean"]),
        (RESULT, "return (losses / T_lengths).sum()", ["T 11, U 5", "1/11", "divided by T?"]),
        (RESULT, "return (losses / U_lengths.clamp(min=1)).sum()", ["T 11, U 5", "1/5", "divided by U?"]),
        (RESULT, "return -losses.sum()", ["negative"]),
        (RESULT, "return losses.sum() / 0.6931471805599453", ["base 2"]),
        (RESULT, "return losses.sum() * 0 + logits.sum() * 0", ["always 0"]),
        (RESULT, "return losses[:3].sum() + losses[3:].sum().detach()", ["the loss is right", "the gradient"]),
        (RESULT, "return losses.sum() + 2 * (losses.sum() - losses.sum().detach())", ["the loss is right", "3 times"]),
        (RESULT, "return losses.sum() + 1000", ["loss 10", "expected"]),
        (
            "import torch",
            "import torch\n    T_lengths = (T_lengths - 1).clamp(min=1)",
            ["T 11, U 5", "of T - 1 frames?"],
        ),
        ("import torch", "import torch\n    U_lengths = (U_lengths - 1).clamp(min=0)", ["T 11, U 5"]),
        (" + blank[last])", ")", ["expected", "without the final blank?"]),
        (".log_softmax(-1, dtype)", "", ["without log_softmax?"]),
        ("log_probs[..., 0]", "log_probs[..., -1]", ["expected"]),
        ("log_softmax(-1, dtype)", "bfloat16().log_softmax(-1).to(dtype)", ["expected"]),
        ("log_softmax(-1, dtype)", "half().log_softmax(-1).to(dtype)", ["expected"]),
        ("import torch", f"import torch\n    {FULL}", ["a batch of 4"]),
    ],
)
def test_the_utterance_the_numbers_and_a_guess(checked, old, new, words):
    reason = checked(new, old).wrong
    assert all(word in reason for word in words) and bool(reason) is bool(words), reason


def test_what_only_a_measured_batch_shows_has_a_place_on_the_screen(tmp_path):
    """Right on small batches of fewer utterances; many gradients are off, and the place is not cut off behind them."""
    path, shapes = tmp_path / "benchmark_flash.py", tmp_path / "shapes.pt"
    torch.save(torch.tensor([[60 + n, 2 + n] for n in range(10)], dtype=torch.int32), shapes)
    path.write_text((ROOT / "benchmark_mine.py").read_text().replace(RESULT, "return losses[:8].sum()"))
    flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--quiet", "--shape-file", shapes]
    done = run("benchmark_all.py", *flags, "--only", path, "--log-dir", tmp_path / "log", "--batch-size", "10")
    reason, printed = rows_of(tmp_path / "log")["flash"]["reason"], " ".join(done.stdout.split())
    assert done.returncode == 1 and "on a measured batch" in reason and "utterance" in reason
    assert re.search(r"loss [\d.]+, expected [\d.]+; .* utterance (9|10) \(T \d+, U \d+\).* expected -?[\d.]+", printed)


def test_a_function_that_scales_all_utterances_by_the_first_one_s_factor_is_wrong():
    """(N,) losses are judged with a factor each."""

    def function(kernel):
        return lambda logits, targets, T_lengths, U_lengths: kernel(logits, targets, T_lengths, U_lengths, 0, "none")

    by_the_first = fault("ByTheFirst", upstream=lambda self, upstream: upstream[:1].expand_as(upstream))
    assert "a factor for each utterance" in correctness.wrong_of(function(by_the_first()))
    assert correctness.wrong_of(function(Broken())) == ""


def test_the_words_name_the_leaf_that_is_furthest_off():
    errors, right = gradients.Errors(reference()), torch.ones(2, 3, dtype=torch.float64)
    for name, factor in (("encoder_out", 1.01), ("output.bias", 3.0)):
        errors.note_leaf(name, right * factor, right)
    answer = SimpleNamespace(errors=errors, overwritten=[], shapes=[(4, 2)], loss_error=0.0)
    words = sentences.of_answer(answer, judge.failing(answer, rounding.allowed("float32", [(4, 2)], 1.0, 1.0)))
    assert "gradient of output.bias is 3 times what is right" in words
