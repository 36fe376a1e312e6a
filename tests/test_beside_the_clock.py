"""What a loss does beside its answer in the processes that measure it: work that no clock sees, memory, their state."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from test_contract import adapter_of, context_of

from rnnt_bench.core.implementations import find
from rnnt_bench.measure.clock import Clock, time_step

CPU = torch.device("cpu")
SHAPES = [(20, 5), (16, 3)]


def reference(**flags):
    return adapter_of(find("reference"), "cpu", **{"vocab_size": 40, "encoder_dim": 16, **flags})


# Work that no clock sees.


@pytest.mark.parametrize("name", ["reference", "reference:by-utterance"])
def test_what_is_prepared_before_the_clock_has_no_outputs(name, monkeypatch):
    adapter = adapter_of(find(name), "cpu", vocab_size=40, encoder_dim=16)
    right = adapter.prepare

    def joins(batch):
        prepared = right(batch)
        prepared.joined = batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1)
        return prepared

    monkeypatch.setattr(adapter, "prepare", joins)
    with pytest.raises(AttributeError, match="encoder_out"):
        context_of(adapter, SHAPES, 2).step("step", 0)


class Lazy(torch.Tensor):
    pass


class LazyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.as_subclass(Lazy)


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_what_may_put_off_its_work_is_refused(wrong, monkeypatch):
    adapter = reference()
    right = adapter.loss
    if wrong == "loss":
        monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given).as_subclass(Lazy))
    else:
        monkeypatch.setattr(adapter, "loss", lambda logits, given: right(LazyGradient.apply(logits), given))
    taken = context_of(adapter, SHAPES, 2).step("loss", 0)
    with pytest.raises(TypeError, match=f"the {wrong}.* is a Lazy"):
        taken.run()
        taken.gradients()


def test_the_answer_is_read_before_the_clock_ends():
    def read(answer):
        time.sleep(0.02)
        return answer + 1

    timed, value = time_step(SimpleNamespace(run=lambda after_forward: after_forward() or 1), Clock(CPU), read)
    assert value == 2 and timed["total_wall_ns"] >= 20e6 > timed["forward_wall_ns"]
