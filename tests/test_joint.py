"""A loss without logits, through the real commands: found right or wrong by each of its four gradients."""

from __future__ import annotations

import pytest
import torch
from rnnt_bench.core import implementations, settings
from rnnt_bench.core.errors import NotRunnable, WrongResult
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.losses import layouts, step, subject
from rnnt_bench.losses.passes import correctness, timing

import own_joint
from commands import ROOT, rows_of, run
from fixtures_runs import records_of
from test_broken_losses import judged
from test_contract import context_of

SCRIPT = ROOT / "tests" / "own_joint.py"
QUICK = ["--in-place", "--preset", "quick", "--limits", "false", "--quiet", "--rounds", "1", "--max-seconds", "0.05"]


def adapter_of(**flags):
    adapter = own_joint.Joint(settings.resolve({"preset": "quick", "vocab_size": 40, **flags}, "cpu"))
    adapter.load("cpu")
    return adapter


def test_it_is_measured_beside_others_and_its_loss_columns_stay_empty(tmp_path, tiny_shapes):
    flags = [*QUICK, "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log"]
    done = run("benchmark_all.py", "--only", f"{SCRIPT},reference", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "log")
    row, other = rows["own_joint"], rows["reference"]
    assert row["status"] == other["status"] == "ok" and row["kind"] == "exact"
    assert row["step_ms"] > 0 and row["loss_ms"] is None and other["loss_ms"] > 0
    assert row["grad_error"] < 1e-4 and row["average_step_time_us"] > 0
    assert row["memory"]["step"]["process_mb"] > 0 and "loss" not in row["memory"]
    records = records_of(tmp_path / "log" / "own_joint-2")
    (judged,) = [record for record in records if record["record"] == "correctness"]
    assert judged["ok"] and judged["at_size"]["ok"] and judged["at_size"]["N"] == 2
    assert {record["scope"] for record in records if record["record"] == "sample"} == {"step"}


def test_only_scope_loss_is_unsupported_and_says_what_is_not():
    with pytest.raises(NotRunnable, match="encoder_out.*--scope step") as refused:
        subject.prepare(JobSpec(settings.resolve({"scopes": ("loss",)}, "cpu"), script=str(SCRIPT)))
    assert refused.value.status == "unsupported"


@pytest.mark.parametrize("name", own_joint.FACTORS)
def test_each_of_its_gradients_is_judged(monkeypatch, name):
    context = context_of(adapter_of())
    right, _ = judged(context)
    assert right.ok and right.grad_error < 1e-4 and right.at_size.grad_error < 1e-4
    monkeypatch.setitem(own_joint.FACTORS, name, 1.001)  # off by a thousandth
    checked = correctness.check(context.adapter, context.device)
    assert f"gradient of {name}".replace("weight", "output.weight").replace("bias", "output.bias") in checked.wrong
    assert checked.slope[0] == pytest.approx(1e-3, rel=0.1)
    monkeypatch.setitem(own_joint.FACTORS, name, 1.01)
    wrong, _ = judged(context)
    assert not wrong.ok and wrong.grad_error == pytest.approx(1e-2, rel=1e-2)
    result, _ = correctness.check_at_size(context)
    assert not result.ok and result.grad_error == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("frozen", ["weight", "encoder_out"])
def test_a_gradient_that_is_missing_where_another_is_not_wanted_is_refused(frozen, monkeypatch):
    """A kernel may look at one input alone to see which gradients are wanted."""
    adapter = adapter_of()
    right = adapter.loss_of

    def stops(tensors, prepared):
        wanted = tensors[frozen].requires_grad
        return right({name: leaf if wanted else leaf.detach() + 0 * leaf for name, leaf in tensors.items()}, prepared)

    monkeypatch.setattr(adapter, "loss_of", stops)
    assert "frozen" in correctness.check(adapter, torch.device("cpu")).wrong


@pytest.mark.parametrize("name", ["encoder_out", "weight"])
def test_what_is_wrong_at_size_only_is_found(monkeypatch, name):
    """The loss keeps no gradient of the frames from the 64th on."""
    adapter = adapter_of()
    right = adapter.loss_of

    def cut(tensors, prepared):
        late = tensors["encoder_out"][:, 64:]
        if name == "encoder_out":
            late = late.detach()
        loss = right({**tensors, "encoder_out": torch.cat([tensors["encoder_out"][:, :64], late], 1)}, prepared)
        if name == "weight" and late.numel():
            extra = 0.1 * tensors["weight"].sum()
            loss = loss + extra - extra.detach()
        return loss

    monkeypatch.setattr(adapter, "loss_of", cut)
    record, _ = judged(context_of(adapter))
    assert record.grad_error <= record.tolerance and not record.ok and not record.at_size.ok


def packed_once(tensors, known):
    """The weight as it was when its address was first met."""
    kept = known.setdefault(tensors["weight"].data_ptr(), tensors["weight"].detach().clone())
    return {**tensors, "weight": tensors["weight"] - tensors["weight"].detach() + kept}


def none_of(name, frozen):
    """No gradient of `name` where `frozen` needs none."""

    def changed(tensors, known):
        leaf = tensors[name]
        return {**tensors, name: leaf if tensors[frozen].requires_grad else leaf.detach() + 0 * leaf}

    return changed


def padding_counts(tensors, known):
    """Hidden values are scaled by the largest output, which may lie in the padding."""
    scale = tensors["encoder_out"].abs().max().detach().clamp(min=10) / 10
    return {**tensors, "weight": tensors["weight"] / scale}


LARGE_PATH = {
    "a weight packed once": (packed_once, 0),
    "no gradient with a frozen joiner": (none_of("decoder_out", "weight"), 1),
    "no gradient with frozen outputs": (none_of("weight", "encoder_out"), 2),
    "padding that counts": (padding_counts, 0),
}


@pytest.mark.parametrize("name", LARGE_PATH)
def test_a_large_path_that_is_wrong_when_asked_more_has_no_times(name, monkeypatch):
    change, number = LARGE_PATH[name]
    adapter = adapter_of(allocator="system", max_samples=3, rounds=3)
    right = adapter.loss_of
    known = {}

    def loss_of(tensors, prepared):
        return right(change(tensors, known) if tensors["encoder_out"].size(1) > 48 else tensors, prepared)

    monkeypatch.setattr(adapter, "loss_of", loss_of)
    context = context_of(adapter, [(70, 34), (66, 2), (52, 9), (70, 7)], 4)
    assert judged(context)[1] == ""
    context.round = number + 1
    with pytest.raises(WrongResult, match="after timing, asked for two losses in flight"):
        list(timing.run(context))


def test_every_layout_has_a_class_and_a_kind():
    assert set(layouts.LAYOUTS) == set(implementations.LAYOUTS)
    assert set(implementations.LAYOUTS.values()) <= set(implementations.KINDS)


def test_more_outputs_than_symbols(monkeypatch):
    """A joiner may predict more than the V symbols that targets are drawn from, such as durations."""
    monkeypatch.setattr(own_joint.Joint, "outputs", lambda self, vocab_size: vocab_size + 5)
    adapter = adapter_of(vocab_size=8)
    context = context_of(adapter)
    taken = step.prepare(adapter, context.model, context.make_batch(0), "step")
    taken.run()
    assert context.model.output.weight.grad.shape[0] == 13 and taken.batch.targets.max() < 8
    trained = adapter_of(vocab_size=101, encoder_dim=128, logits="trained")
    assert layouts.of(trained).model(torch.device("cpu"), torch.float32).output.weight.shape[0] == 106
