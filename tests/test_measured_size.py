"""What the correctness pass finds only at the measured size: right adapters, and the reference made wrong in ways that
small batches do not show."""

from __future__ import annotations

import pytest
import torch
from test_contract import adapter_of

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
def test_every_implementation_is_right_at_size(implementation, monkeypatch):
    monkeypatch.setattr(at_size, "CHUNK", 5000)  # some frames at a time
    adapter = adapter_of(implementation, "cpu", vocab_size=40)
    if adapter.simulated:
        pytest.skip("in a simulator it takes hours")
    shapes = [(T, max(U, adapter.fewest_targets)) for T, U in [*SHAPES, (6, 0)]]
    found = at_size.check(context_of(adapter, shapes), 1e-4)
    assert found["ok"], found
    assert (found["batch"], found["N"], found["T_max"], found["U_max"]) == (0, 10, 70, 34)
    assert 0 < found["grad_error"] <= found["grad_tolerance"] < 1e-3


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
    return loss(torch.cat([logits[..., :32], logits[..., 32:].detach()], -1), given)


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
    assert max(record["loss_error"], record["grad_error"]) <= record["tolerance"]  # the small batches are right
    assert not record["ok"] and not record["at_size"]["ok"], record
    assert "on a measured batch (N 9, T 70, U 34)" in correctness.in_words(record)


def test_a_loss_that_is_not_a_number_is_called_so(monkeypatch):
    adapter = reference()
    right = adapter.loss
    monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given) * float("nan"))
    (record,) = correctness.run(context_of(adapter))
    assert not record["ok"] and record["at_size"] is None
    assert correctness.in_words(record) == "loss not finite, gradient not finite; 1e-04 is allowed"


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(dtype):
    found = at_size.check(context_of(reference(dtype=dtype)), oracle.TOLERANCE[dtype])
    assert found["ok"] and found["grad_tolerance"] < 1.01 * oracle.TOLERANCE[dtype] + 1e-4


def test_a_search_judges_two_utterances():
    searched = settings.resolve({"preset": "quick", "vocab_size": 40, "find_largest": "batch-size"}, "cpu")
    adapter = reference()
    adapter.settings = searched
    (record,) = correctness.run(context_of(adapter))
    assert record["ok"] and (record["at_size"]["N"], record["at_size"]["T_max"]) == (2, 70)
