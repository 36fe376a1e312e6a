"""What the correctness pass finds only at the measured size: right adapters, and the reference made wrong in ways that
small batches do not show."""

from __future__ import annotations

import pytest
import torch
from test_contract import adapter_of, is_left_out

from common.core import settings
from common.core.implementations import find, with_variants
from common.data import batching
from common.losses import oracle
from common.losses.context import Context
from common.losses.layouts import table
from common.losses.passes import at_size, correctness

SHAPES = [(70, 34), (66, 2), *[(5, 3)] * 7]


def context_of(adapter, shapes=SHAPES):
    where, dtype = torch.device("cpu"), getattr(torch, adapter.settings.dtype)
    model = table.of(adapter).model(where, dtype)
    return Context(adapter.settings, adapter, where, dtype, model, batching.fixed_size(shapes, len(shapes)), [0])


def reference(**flags):
    return adapter_of(find("reference"), "cpu", vocab_size=40, **flags)


@pytest.mark.environment_contract
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_every_implementation_is_right_at_size(implementation, monkeypatch, thorough):
    monkeypatch.setattr(at_size, "CHUNK", 5000)  # some frames at a time
    adapter = adapter_of(implementation, "cpu", vocab_size=40)
    if is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    if adapter.simulated:
        pytest.skip("in a simulator it takes hours")
    shapes = [(T, max(U, adapter.fewest_targets)) for T, U in [*SHAPES, (6, 0)]]
    result, _ = at_size.check(context_of(adapter, shapes), 1e-4)
    assert result.ok, result
    assert (result.batch, result.N, result.T_max, result.U_max) == (0, 10, 70, 34)
    assert 0 < result.grad_error <= result.grad_tolerance < 1e-3


def of_late_frames(loss, logits, given):
    extra = torch.zeros_like(logits)
    extra[:, 64:] = 0.02 * torch.arange(logits.size(-1))
    return loss(logits + extra, given)


def of_late_targets(loss, logits, given):
    extra = torch.zeros_like(logits)
    extra[:, :, 32:] = 0.02 * torch.arange(logits.size(-1))
    return loss(logits + extra, given)


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


@pytest.mark.parametrize(
    "wrong", [of_late_frames, of_late_targets, of_the_first_eight, of_some_symbols, with_gradient_in_padding]
)
def test_what_is_wrong_at_size_only_is_found(wrong, monkeypatch):
    adapter = reference()
    right = adapter.loss
    monkeypatch.setattr(adapter, "loss", lambda logits, given: wrong(right, logits, given))
    (record,) = correctness.run(context_of(adapter))
    assert max(record.loss_error, record.grad_error) <= record.tolerance  # the small batches are right
    assert not record.ok and not record.at_size.ok, record
    assert "on a measured batch (N 9, T 70, U 34)" in correctness.in_words(record)


# Gradients that are wrong where they are small, from V = 100 and T = 60 on.


class Broken(torch.autograd.Function):
    """A right loss of padded logits; `breaks`(gradient, logits, given) is its gradient at size."""

    @staticmethod
    def forward(ctx, logits, right, breaks, given):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = right(leaf, given)
            (gradient,) = torch.autograd.grad(loss, leaf)
        at_size = logits.size(-1) >= 100 and logits.size(1) >= 60
        ctx.save_for_backward(breaks(gradient, logits.detach(), given) if at_size else gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0], None, None, None


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


def without_small_ones(gradient, logits, given):
    return gradient.masked_fill(gradient.abs() < 1.4e-3, 0)


def with_small_ones_flipped(gradient, logits, given):
    return torch.where(gradient.abs() < 7e-4, -gradient, gradient)


@pytest.mark.parametrize(
    "V, breaks, word",
    [
        (4096, only_targets, "symbol"),
        (4096, with_softmax(three_quarters), "symbol"),
        (4096, with_softmax(lambda logits: torch.full_like(logits, 1 / logits.size(-1))), "symbol"),
        (4096, only_targets_at_the_end, "frame"),
        (500, without_small_ones, "frame"),
        (500, with_small_ones_flipped, "frame"),
    ],
    ids=["no non-target part", "a quarter dropped", "mean softmax", "end of an utterance", "small zeroed", "flipped"],
)
def test_what_is_wrong_where_it_is_small_is_refused(V, breaks, word, monkeypatch):
    adapter = adapter_of(find("reference"), "cpu", vocab_size=V)
    right = adapter.loss
    context = context_of(adapter, [(62, 6), (60, 4)])
    assert at_size.check(context, 1e-4)[0].ok
    monkeypatch.setattr(adapter, "loss", lambda logits, given: Broken.apply(logits, right, breaks, given))
    (record,) = correctness.run(context)
    assert max(record.loss_error, record.grad_error) <= record.tolerance  # the small batches are right
    result = record.at_size
    assert not record.ok and result.loss_error < 1e-6
    assert result.sum_errors[word] > 0.1 > 5 * result.sum_tolerance
    assert any(f"{word} in sum off by" in line for line in at_size.wrong(result))
    assert "on a measured batch" in correctness.in_words(record)


def test_a_joiner_weight_without_gradient_at_size_is_refused(monkeypatch):
    class Linear(torch.nn.Linear):
        def forward(self, joined):
            weight = self.weight.detach() if joined[..., 0].numel() > 300 else self.weight
            return torch.nn.functional.linear(joined, weight + 0 * self.weight, self.bias)

    adapter = adapter_of(find("reference"), "cpu", vocab_size=500)
    context = context_of(adapter, [(62, 6), (60, 4)])
    broken = Linear(*context.model.output.weight.T.shape)
    broken.load_state_dict(context.model.output.state_dict())
    context.model.output = broken
    (record,) = correctness.run(context)
    assert not record.ok and record.at_size.grad_errors["given"] < 1e-3
    assert record.at_size.grad_errors["output.weight"] == pytest.approx(1)
    assert "gradient of output.weight off by" in correctness.in_words(record)


# Rounding.


class Rounded(torch.autograd.Function):
    """A right loss that is off by `by`, as the rounding of its sums would make it."""

    @staticmethod
    def forward(ctx, loss, by):
        return loss + by

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


@pytest.mark.parametrize("by, outcome", [(1e-7, "right"), (3e-4, "imprecise"), (0.3, "wrong")])
def test_a_small_loss_of_large_scores_may_be_imprecise(by, outcome, monkeypatch):
    """Scores of up to 46 along 220 steps cancel to a loss of 0.3."""
    adapter = adapter_of(find("reference"), "cpu", vocab_size=101, logits="trained", encoder_dim=128)
    right, context = adapter.loss, context_of(adapter, [(200, 20)])
    with torch.no_grad():
        context.model.output.weight.mul_(2)
        context.model.output.bias.mul_(2)
    monkeypatch.setattr(
        adapter, "loss", lambda logits, given: Rounded.apply(right(logits, given), by if logits.size(1) > 60 else 0.0)
    )
    (record,) = correctness.run(context)
    imprecise = record.at_size.imprecise
    assert record.ok is (outcome != "wrong") and (imprecise is not None) is (outcome == "imprecise")
    if imprecise:
        assert imprecise == record.at_size.loss_error > record.tolerance


@pytest.mark.parametrize("blank", [12.0, 14.0])
def test_posteriors_that_cancel_are_imprecise(blank):
    context = context_of(adapter_of(find("reference"), "cpu", vocab_size=20), [(70, 0)])
    with torch.no_grad():
        context.model.output.weight.mul_(0.01)
        context.model.output.bias.zero_()[0] = blank
    result, _ = at_size.check(context, 1e-4)
    assert result.ok and result.imprecise > 1e-4 and result.sum_errors["frame"] < 1e-5


def test_a_loss_that_is_not_a_number_is_called_so(monkeypatch):
    adapter = reference()
    right = adapter.loss
    monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given) * float("nan"))
    (record,) = correctness.run(context_of(adapter))
    assert not record.ok and record.at_size is None
    assert "loss not finite" in correctness.in_words(record)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(dtype):
    result, _ = at_size.check(context_of(reference(dtype=dtype)), oracle.TOLERANCE[dtype])
    assert result.ok and result.grad_tolerance < 1.01 * oracle.TOLERANCE[dtype] + 1e-4


def test_a_search_judges_two_utterances():
    searched = settings.resolve({"preset": "quick", "vocab_size": 40, "find_largest": "batch-size"}, "cpu")
    adapter = reference()
    adapter.settings = searched
    (record,) = correctness.run(context_of(adapter))
    assert record.ok and (record.at_size.N, record.at_size.T_max) == (2, 70)
