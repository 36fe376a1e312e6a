"""Losses that are wrong in ways that a small random batch does not show: each is refused, before or after it is timed,
and every implementation stays right."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import own_joint
import pytest
import torch
from test_contract import adapter_of, is_left_out

from common.core import settings
from common.core.errors import WrongResult
from common.core.implementations import IMPLEMENTATIONS, find, with_variants
from common.data import batching
from common.losses import fingerprint, oracle, vectorised
from common.losses.context import Context
from common.losses.layouts import table
from common.losses.passes import afterwards, correctness, small_batches, timing

CPU = torch.device("cpu")
#: (T, U), two utterances a batch.
SHAPES = [(70, 34), (66, 2), (64, 9), (50, 7), (20, 3), (21, 5)]


def context_of(adapter, shapes=SHAPES, N=2):
    dtype = getattr(torch, adapter.settings.dtype)
    layout, batches = table.of(adapter), batching.fixed_size(shapes, N)
    chosen = replace(adapter.settings, scopes=layout.scopes)
    return Context(chosen, adapter, CPU, dtype, layout.model(CPU, dtype), batches, list(range(len(batches))))


class Kernel(torch.autograd.Function):
    """The reference's losses (N,) and their gradient, as a kernel computes both in forward; `broken` changes them."""

    @staticmethod
    def forward(ctx, logits, broken, *given):
        with torch.enable_grad():
            leaf = broken.logits(logits.detach()).clone().requires_grad_()
            losses = vectorised.transducer_loss(leaf, *given, reduction="none")
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

    def __call__(
        self, logits, targets, logit_lengths, target_lengths, blank, reduction, by_compiler=False, topology=None
    ):
        self.calls += 1
        losses = self.losses(logits, targets, logit_lengths, target_lengths, blank)
        return losses if reduction == "none" else losses.sum()


def wrong_where(condition, factor=1.01):
    """losses with a factor where `condition`(self, logits) holds."""

    class Wrong(Broken):
        def losses(self, logits, *given):
            losses = super().losses(logits, *given)
            return losses * factor if condition(self, logits) else losses

    return Wrong


class CachesItsFirstAnswer(Broken):
    def losses(self, *given):
        losses = super().losses(*given)
        if not hasattr(self, "first"):
            self.first = losses.detach().mean()
        return losses - losses.detach() + self.first


class CachesByShape(Broken):
    """From `least` frames on."""

    least = 0

    def __init__(self):
        super().__init__()
        self.known = {}

    def losses(self, logits, *given):
        losses = super().losses(logits, *given)
        if logits.size(1) < self.least:
            return losses
        return losses - losses.detach() + self.known.setdefault(logits.shape, losses.detach())


class CachesGradientsByShape(Broken):
    def __init__(self):
        super().__init__()
        self.known = {}

    def gradient(self, gradient):
        return self.known.setdefault(gradient.shape, gradient)


class StaleAfterALargerBatch(Broken):
    def __init__(self):
        super().__init__()
        self.largest = 0

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


class IgnoresTheSign(Broken):
    def upstream(self, upstream):
        return upstream.abs()


class IgnoresUpstream(Broken):
    def upstream(self, upstream):
        return torch.ones_like(upstream)


class IgnoresUpstreamOfUtterances(Broken):
    def upstream(self, upstream):
        return upstream[:1].expand_as(upstream)


class Clamps(Broken):
    def logits(self, logits):
        return logits.clamp(-50, 50)


class SoftmaxWithoutMaximum(Broken):
    def logits(self, logits):
        return logits - logits.exp().sum(-1, keepdim=True).log()


class GradientTimes(Broken):
    factor = 1.001

    def gradient(self, gradient):
        return gradient * self.factor


class GradientSlightlyOff(GradientTimes):
    factor = 1.00005


class OverwritesTargets(Broken):
    def losses(self, logits, targets, *given):
        targets.fill_(1)
        return super().losses(logits, targets, *given)


class OverwritesTargetsAtTheEnd(Broken):
    def losses(self, logits, targets, *given):
        losses = super().losses(logits, targets, *given)
        targets.fill_(1)
        return losses


class OverwritesLengths(Broken):
    def losses(self, logits, targets, T_lengths, *given):
        losses = super().losses(logits, targets, T_lengths, *given)
        T_lengths.sub_(1)
        return losses


class RoundsItsInput(Broken):
    def losses(self, logits, *given):
        logits.data.copy_(logits.data.bfloat16())
        return super().losses(logits, *given)


class RoundsInside(Broken):
    def logits(self, logits):
        return logits.bfloat16().float()


SMALL = [
    CachesItsFirstAnswer,
    CachesByShape,
    CachesGradientsByShape,
    StaleAfterALargerBatch,
    PreviousLengths,
    ThirdUtterance,
    IgnoresTheSign,
    IgnoresUpstream,
    IgnoresUpstreamOfUtterances,
    Clamps,
    SoftmaxWithoutMaximum,
    GradientTimes,
    GradientSlightlyOff,
    OverwritesTargets,
    OverwritesTargetsAtTheEnd,
    OverwritesLengths,
    RoundsItsInput,
    RoundsInside,
    wrong_where(lambda self, logits: self.calls >= 3),
    wrong_where(lambda self, logits: self.calls >= 10),
    wrong_where(lambda self, logits: logits.size(1) % 16 == 0),
    wrong_where(lambda self, logits: logits.size(2) % 16 == 0),
]


def broken(kernel, monkeypatch, **flags):
    """The context of the reference's adapter with `kernel` for its function."""
    flags = {"vocab_size": 40, "encoder_dim": 16, "allocator": "system", **flags}
    flags = {"max_samples": 9, "max_seconds": 100.0, **flags}
    adapter = adapter_of(find("reference"), "cpu", **flags)
    monkeypatch.setattr(adapter, "function", lambda: kernel)
    return context_of(adapter)


def test_a_kernel_without_a_fault_is_right_before_and_after_timing(monkeypatch):
    context = broken(Broken(), monkeypatch)
    (record,) = correctness.run(context)
    assert record.ok, context.wrong
    assert record.slope_error < 1e-5 and record.differing == []
    ends = [line for line in timing.run(context, 1) if isinstance(line, timing.Stop)]
    assert {end.scope for end in ends} == {"loss", "step"} and all(end.loss_error < 1e-5 for end in ends)


@pytest.mark.parametrize("name, reached", [("torchaudio", []), ("fast_rnnt", ["given"]), ("fused", [])])
def test_nan_in_the_padding_that_reaches_a_gradient_is_said(name, reached):
    adapter = adapter_of(find(name), "cpu", vocab_size=40, encoder_dim=16)
    adapter.load("cpu")
    assert small_batches.reached_by_padding(adapter, torch.device("cpu"), torch.float32) == reached


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.__name__)
def test_a_broken_kernel_is_not_timed(kernel, monkeypatch):
    context = broken(kernel(), monkeypatch)
    (record,) = correctness.run(context)
    assert not record.ok and context.wrong


@pytest.mark.parametrize(
    "kernel, words",
    [
        (OverwritesTargets, "overwrites targets"),
        (OverwritesLengths, "T_lengths"),
        (RoundsItsInput, "overwrites logits"),
        (GradientTimes, "1.001"),
        (IgnoresTheSign, "a loss times -2"),
        (Clamps, "logits of"),
    ],
)
def test_the_reason_names_the_fault(kernel, words, monkeypatch):
    context = broken(kernel(), monkeypatch)
    list(correctness.run(context))
    assert words in context.wrong


def test_a_loss_that_may_overwrite_its_logits_is_right(monkeypatch):
    context = broken(RoundsItsInput(), monkeypatch)
    monkeypatch.setattr(context.adapter, "overwrites_logits", True)
    asked = [small_batches.Case("", [(4, 2)], 0)]
    ((_, answer),) = list(small_batches.answered(context.adapter, CPU, torch.float32, asked))[:1]
    assert answer.changed == []


@pytest.mark.parametrize("name", own_joint.FACTORS)
def test_one_gradient_of_four_that_is_off_by_a_thousandth_is_refused(name, monkeypatch):
    adapter = own_joint.Joint(settings.resolve({"preset": "quick", "vocab_size": 40}, "cpu"))
    adapter.load("cpu")
    assert small_batches.check(adapter, CPU, torch.float32).wrong == ""
    monkeypatch.setitem(own_joint.FACTORS, name, 1.001)
    checked = small_batches.check(adapter, CPU, torch.float32)
    assert f"gradient of {name}".replace("weight", "output.weight").replace("bias", "output.bias") in checked.wrong
    assert checked.slope_error == pytest.approx(1e-3, rel=0.1)


def test_a_factor_at_size_is_found_by_its_slope(monkeypatch):
    """Right on all small batches; smaller than the largest rounding error of a right loss."""

    class Late(Broken):
        def gradient(self, gradient):
            return gradient * 1.002 if gradient.size(1) > 48 else gradient

    (record,) = correctness.run(broken(Late(), monkeypatch))
    assert not record.ok and record.at_size.slope_errors["given"] == pytest.approx(2e-3, rel=0.05)


# Only the timed steps show these: they are right as often as the correctness pass asks, or on the batches that it has.


class OverwritesTargetsLater(Broken):
    def losses(self, logits, targets, *given):
        losses = super().losses(logits, targets, *given)
        if self.calls > 8:
            targets.fill_(1)
        return losses


class CachesLongOnes(CachesByShape):
    least = 60


TIMED = [
    wrong_where(lambda self, logits: self.calls > 8),
    wrong_where(lambda self, logits: logits.size(1) == 64, 1.001),
    wrong_where(lambda self, logits: logits.size(1) == 21, 1.001),
    wrong_where(lambda self, logits: self.calls > 8, float("nan")),
    StaleAfterALargerBatch,
    CachesLongOnes,
    OverwritesTargetsLater,
]


@pytest.mark.parametrize("number", range(len(TIMED)))
def test_a_kernel_that_breaks_while_it_is_timed_has_no_times(number, monkeypatch):
    context = broken(TIMED[number](), monkeypatch)
    records = []
    with pytest.raises(WrongResult, match="after timing"):
        for record in timing.run(context, 1):
            records.append(record)
    assert {"Sample", "Stop"} <= {type(record).__name__ for record in records}


def test_what_is_kept_of_held_inputs_is_found(monkeypatch):
    """Inputs are held as on CUDA, where all repeats of a batch have the same numbers."""
    context = broken(CachesLongOnes(), monkeypatch)
    context.batches = [0]
    context.hold_inputs(context.batches)
    with pytest.raises(WrongResult, match="other numbers"):
        list(timing.run(context, 1))


@pytest.mark.environment_contract
@pytest.mark.parametrize(
    "implementation, logits",
    [*product(with_variants(), ["random"]), *product(IMPLEMENTATIONS, ["trained"])],
    ids=lambda given: getattr(given, "name", given),
)
def test_the_last_timed_steps_of_every_implementation_are_right(implementation, logits, thorough):
    flags = {"vocab_size": 101, "encoder_dim": 128, "allocator": "system", "max_samples": 3, "prune_range": 3}
    adapter = adapter_of(implementation, "cpu", logits=logits, **flags)
    if is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    if adapter.simulated:
        pytest.skip("in a simulator nothing is timed")
    try:
        ends = [line for line in timing.run(context_of(adapter), 1) if isinstance(line, timing.Stop)]
    except RuntimeError as error:
        if "total scores" not in str(error):
            raise
        pytest.skip(f"its own check is too strict for such logits: {error}")
    assert ends and all(end.loss_error is not None for end in ends)  # a wrong one raises WrongResult


@pytest.mark.environment_contract
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_every_implementation_is_right_on_the_small_batches(implementation, thorough):
    adapter = adapter_of(implementation, "cpu")
    if is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    if adapter.simulated:
        pytest.skip("in a simulator it takes minutes")
    checked = small_batches.check(adapter, CPU, torch.float32)
    assert checked.wrong == ""
    again = small_batches.judge(adapter, CPU, torch.float32, [small_batches.again(adapter)])
    assert again.wrong == ""


def test_a_fingerprint_has_every_bit():
    values = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    before = fingerprint.fingerprints({"values": values, "rows": values[:, 1], "none": None})
    assert fingerprint.changed(before, {"values": values.clone(), "rows": values[:, 1], "none": None}) == []
    values[0, 0] = -0.0
    assert fingerprint.changed(before, {"values": values, "rows": values[:, 1], "none": None}) == ["values"]


def test_right_answers_are_made_once_for_all_losses_of_a_round(tmp_path, monkeypatch):
    context = broken(Broken(), monkeypatch)
    context.shared = tmp_path
    first, other = (afterwards.expected(context, "step", context.new_batch(0, repeat), None) for repeat in (0, 1))
    monkeypatch.setattr(oracle, "log_likelihood", lambda arcs: math.nan)
    assert afterwards.expected(context, "step", context.new_batch(0, 0), None) == first != other
    with torch.no_grad():
        context.model.output.bias[3] += 1e-6
    assert math.isnan(afterwards.expected(context, "step", context.new_batch(0, 0), None)[0])


def test_a_loss_that_breaks_is_found_by_shared_answers_too(tmp_path, monkeypatch):
    right = broken(Broken(), monkeypatch)
    wrong = broken(wrong_where(lambda self, logits: self.calls > 8)(), monkeypatch)
    right.shared = wrong.shared = tmp_path
    list(timing.run(right, 1))
    assert list(tmp_path.iterdir())
    with pytest.raises(WrongResult, match="after timing"):
        list(timing.run(wrong, 1))
