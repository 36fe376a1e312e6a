"""What every implementation must do, taken from the table alone: a new line there is tested here by itself, in every
environment.  Rows that stand for the layouts and lattices are asked what the checks of a run do not ask."""

from __future__ import annotations

import importlib
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from rnnt_bench.core import settings
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import BY_UTTERANCE, IMPLEMENTATIONS, find, with_variants
from rnnt_bench.data import batching
from rnnt_bench.instruments import memory
from rnnt_bench.instruments.clock import observed_by
from rnnt_bench.losses import cells, inputs, judge, layouts, oracle, step
from rnnt_bench.losses.adapter import described
from rnnt_bench.losses.passes import correctness, timing
from rnnt_bench.losses.subject import Context
from rnnt_bench.records.schema import Option, Stop

pytestmark = pytest.mark.environment_contract

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
V, D = 13, 16
BATCHES = {
    "ragged": [(9, 4), (6, 5), (8, 1)],
    "one frame, one target": [(1, 1)],
    "one frame in a batch": [(7, 3), (1, 1)],
    "no target in a batch": [(7, 3), (4, 0)],
}
#: A row for each layout, each package that runs on a CPU, and lattices with more outputs or another normaliser.
REPRESENTATIVE = [
    *("torchaudio", "optimized_transducer", "fast_rnnt:modified", "k2", "fused", "fused:hat", "fast_rnnt-pruned"),
    *("k2-pruned", "transformers", "reference:multi-blank"),
]
#: Every exact loss that takes logits, on an utterance at a time.
IN_PIECES = [
    find(f"{row.name}:{BY_UTTERANCE}")
    for row in IMPLEMENTATIONS
    if row.kind == "exact" and row.takes_logits and not row.template
]
PRUNED = [implementation for implementation in IMPLEMENTATIONS if implementation.kind == "pruned"]
#: (T, U) of a measured batch, some frames of which are judged at a time.
LARGE = [(70, 34), (66, 2), *[(5, 3)] * 7]
#: Sizes of the model of --logits trained.
TRAINED = {"logits": "trained", "vocab_size": 101, "encoder_dim": 128}


def adapter_of(implementation, device, **flags):
    chosen = settings.resolve({"preset": "quick", "vocab_size": V, "encoder_dim": D, **flags}, device)
    adapter = importlib.import_module(implementation.script).ADAPTER(chosen, implementation.variant)
    try:
        adapter.load(device)
    except NotRunnable as reason:
        pytest.skip(f"{implementation.name}: {reason}")
    return adapter


def context_of(adapter, shapes=LARGE, N=None):
    """A context on the CPU whose measured batches are all those of `shapes`, N utterances each, all in one for None."""
    where, dtype, layout = torch.device("cpu"), getattr(torch, adapter.settings.dtype), layouts.of(adapter)
    chosen, batches = replace(adapter.settings, scopes=layout.scopes), batching.fixed_size(shapes, N or len(shapes))
    return Context(chosen, adapter, where, dtype, layout.model(where, dtype), batches, list(range(len(batches))))


def setting_of(adapter, shapes, device, key=0):
    """(model, batch, the adapter under which its result must be exact)"""
    where = torch.device(device)
    model = layouts.of(adapter).model(where, torch.float32)
    batch = inputs.make_batch(shapes, vocab_size=V, encoder_dim=D, device=where, dtype=torch.float32, key=(3, key))
    return model, batch, adapter.but(prune_range=1 + max(U for _, U in shapes))


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=[find(name) for name in REPRESENTATIVE], ids=lambda implementation: implementation.name)
def adapter(request, device):
    return adapter_of(request.param, device)


@pytest.mark.parametrize(
    "implementation", [*with_variants(), *IN_PIECES], ids=lambda implementation: implementation.name
)
def test_every_row_passes_correctness_and_is_right_after_timing(implementation, monkeypatch):
    adapter = adapter_of(implementation, "cpu", vocab_size=40)
    if adapter.simulated:
        assert correctness.check(adapter, torch.device("cpu")).wrong == ""
        return
    monkeypatch.setattr(cells, "CHUNK", 5000)  # some frames at a time
    shapes = adapter.lengthened([*LARGE, (6, 0)])
    (record,) = correctness.run(context_of(adapter, shapes))  # raises WrongResult
    judged = record.at_size
    assert (judged.batch, judged.N, judged.T_max, judged.U_max) == (0, 10, 70, 34)
    assert record.ok and 0 < judged.grad_error <= judged.grad_tolerance < 1e-3
    flags = {**TRAINED, "allocator": "system", "max_samples": 3, "prune_range": 3}
    sharp = context_of(adapter_of(implementation, "cpu", **flags), [(70, 34), (66, 3), (20, 3), (21, 5)], 2)
    try:
        ends = [line for line in timing.run(sharp) if isinstance(line, Stop)]
    except RuntimeError as error:
        if "total scores" not in str(error):
            raise
        pytest.skip(f"its own check is too strict for such logits: {error}")
    assert ends and all(end.loss_error < 1e-3 and end.grad_error < 1e-2 for end in ends)


@pytest.mark.parametrize("case", BATCHES)
def test_loss_and_gradients_of_small_batches(adapter, device, case):
    """A batch with utterances too short for the adapter is refused, or wrong where it says how many frames it needs;
    nothing is asked where no path is possible."""
    shapes = BATCHES[case]
    model, batch, wide = setting_of(adapter, shapes, device)
    N, T, U = inputs.padded_sizes(shapes)
    zeros = torch.zeros(N, T, U + 1, V + wide.lattice.extra, dtype=torch.float64)
    if not math.isfinite(oracle.losses(zeros, batch.targets, batch.shapes, 0, wide.lattice).sum()):
        return

    def asked(scope):
        return judge.ask(lambda: (wide, model, [step.prepare(wide, model, batch.fresh(), scope)]), scope)

    if not adapter.takes(shapes):
        try:
            wrong = asked("step")
        except (AssertionError, RuntimeError, ValueError):
            return
        assert adapter.fewest_frames > 1 and wrong.grad_error > 1e-3
        return
    for scope in layouts.of(adapter).scopes:
        answer = asked(scope)
        assert answer.loss_error < 1e-5 and answer.grad_error < 1e-4


@pytest.mark.parametrize("implementation", IN_PIECES, ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("device", DEVICES)
def test_pieces_have_the_reductions_and_gradients_of_the_whole_batch(implementation, device):
    whole = adapter_of(find(implementation.name.partition(":")[0]), device)
    pieces = adapter_of(implementation, device)
    for reduction in whole.reductions:
        answers = []
        for adapter in (whole.but(reduction=reduction), pieces.but(reduction=reduction)):
            model, batch, _ = setting_of(adapter, BATCHES["ragged"], device)
            run = step.prepare(adapter, model, batch, "step")
            losses = run.forward()
            (losses.reshape(-1) * torch.arange(1, losses.numel() + 1, device=device)).sum().backward()
            answers.append({"loss": losses.detach().reshape(-1), **run.gradients()})
        for name, right in answers[0].items():
            torch.testing.assert_close(answers[1][name], right, rtol=2e-4, atol=2e-5, msg=f"{reduction}: {name}")


@pytest.mark.parametrize("name", ["torchaudio", "optimized_transducer", "fast_rnnt"])
def test_pieces_hold_the_logits_of_one_utterance(name):
    peaks_of = {}
    for row in (name, f"{name}:{BY_UTTERANCE}"):
        context = context_of(adapter_of(find(row), "cpu", vocab_size=100), [(60, 20)] * 8, 8)
        for utterances in (1, 8):
            peaks = memory.peaks(partial(context.step, "step", 0, 0, utterances), torch.device("cpu"))
            peaks_of[row, utterances] = peaks["torch_allocated_bytes"]
    logits = 60 * 21 * 100 * 4  # bytes of one utterance
    assert peaks_of[name, 8] > peaks_of[name, 1] + 7 * logits
    assert peaks_of[f"{name}:{BY_UTTERANCE}", 8] < peaks_of[f"{name}:{BY_UTTERANCE}", 1] + logits


def test_a_wrong_target_is_noticed(adapter, device):
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    changed = replace(batch, targets=batch.targets % (V - 1) + 1)
    right, wrong = (step.prepare(wide, model, inputs, "step").run() for inputs in (batch, changed))
    assert oracle.relative_error(wrong, right) > 1e-3
    assert oracle.relative_error(wrong, right + math.inf) == oracle.relative_error(wrong + math.inf, right) == math.inf


def test_padding_of_the_inputs_does_not_matter_and_inputs_stay(adapter, device):
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    taken = step.prepare(wide, model, batch, "step")
    before = {name: tensor.detach().clone() for name, tensor in taken.inputs().items()}
    loss = taken.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in taken.inputs().items() if name in before)
    _, other, _ = setting_of(adapter, BATCHES["ragged"], device)
    with torch.no_grad():
        for n, (T, U) in enumerate(BATCHES["ragged"]):
            other.encoder_out[n, T:] = 1e3
            other.decoder_out[n, U + 1 :] = -1e3
            other.targets[n, U:] = 1
    assert step.prepare(wide, model, other, "step").run().item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_gradient_over_the_logits_is_not_copied(device):
    adapter = adapter_of(find("optimized_transducer"), device)
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    prepared = step.prepare(wide, model, batch, "loss")
    prepared.run()
    assert prepared.gradients()["given"].data_ptr() == prepared.given.data_ptr() and prepared.given.grad is None


def test_options_are_told_with_their_defaults(adapter, device):
    told, plain = adapter.described_options(), (bool, int, float, str, type(None))
    json.dumps([[option.ours, option.default] for option in told.values()], allow_nan=False)
    given = adapter.options().items()
    ours = {name: value if isinstance(value, plain) else str(getattr(value, "name", value)) for name, value in given}
    assert {name: told[name].ours for name in adapter.options()} == ours
    assert not any(name in told for name in ("logits", "targets", "symbols", "boundary"))


def test_options_of_any_function():
    def function(logits, targets, blank=-1, reduction="mean", boundary=None, scale=math.inf):
        return logits

    assert described(function, {"blank": 0, "extra": (1, 2)}) == {
        "blank": Option(0, -1),
        "extra": Option("(1, 2)", "-"),
        "reduction": Option("mean", "mean"),
        "scale": Option("inf", "inf"),
    }
    hidden = type("Loss", (), {"__signature__": 1, "__call__": lambda self: None})()
    assert described(hidden, {"blank": 0}, "Loss.") == {"Loss.blank": Option(0, "-")}


def test_the_step_names_its_stages(adapter, device):
    model, batch, _ = setting_of(adapter, BATCHES["ragged"], device)
    seen = []
    with observed_by(lambda name: nullcontext(seen.append(name))):
        step.prepare(adapter, model, batch, "step").run()
    assert all(any(word in name for name in seen) for word in ("joiner", "loss")) and seen[-1] == "backward"


@pytest.mark.parametrize("implementation", PRUNED, ids=lambda implementation: implementation.name)
def test_the_gap_of_a_pruned_loss(implementation):
    """0 at full range, positive below, little on logits of a trained model; none where nothing is left to prune."""
    shapes = [(60, 20), (30, 5), (40, 12)]
    wide, narrow = (context_of(adapter_of(implementation, "cpu", prune_range=S), shapes, 2) for S in (21, 3))
    assert abs(correctness.approximation_gap(wide)) < 1e-5 < 1e-4 < correctness.approximation_gap(narrow)
    trained = context_of(adapter_of(implementation, "cpu", prune_range=5, **TRAINED), shapes, 2)
    assert abs(correctness.approximation_gap(trained)) < correctness.approximation_gap(narrow)
    narrow.batches = []
    assert correctness.approximation_gap(narrow) is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def test_the_table_and_the_script_name_the_same_variants(implementation):
    adapter = importlib.import_module(implementation.script).ADAPTER
    assert adapter.name == implementation.name
    assert set(implementation.variants) <= set(adapter.variants)
    for variant, kind in implementation.variants.items():
        chosen = adapter(settings.resolve({"preset": "quick"}, "cpu"), variant)
        assert chosen.implementation.kind == kind in ("pruned", chosen.topology.replace("regular", "exact"))
