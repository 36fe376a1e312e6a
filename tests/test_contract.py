"""What every implementation must do, taken from the table alone: a new line there is tested here by itself.

Run in every environment; those that this Python does not have are skipped with the reason.
"""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import pytest
import torch

from common.core import settings
from common.core.errors import NotRunnable
from common.core.implementations import IMPLEMENTATIONS, find, with_variants
from common.losses import inputs, oracle, step
from common.losses.layouts import table
from common.losses.passes import answers
from common.measure.stages import observed_by

pytestmark = pytest.mark.environment_contract

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
V, D = 13, 16
BATCHES = {
    "ragged": [(9, 4), (6, 5), (8, 1)],
    "one frame, one target": [(1, 1)],
    "one frame in a batch": [(7, 3), (1, 1)],
    "no target in a batch": [(7, 3), (4, 0)],
    "one utterance": [(6, 3)],
}


def adapter_of(implementation, device, **flags):
    chosen = settings.resolve({"preset": "quick", "vocab_size": V, "encoder_dim": D, **flags}, device)
    adapter = importlib.import_module(implementation.script).ADAPTER(chosen, implementation.variant)
    try:
        adapter.load(device)
    except NotRunnable as reason:
        pytest.skip(f"{implementation.name}: {reason}")
    return adapter


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=with_variants(), ids=lambda implementation: implementation.name)
def adapter(request, device):
    return adapter_of(request.param, device)


def is_left_out(adapter, thorough):
    """Return whether a loss is compiled for each kind of shapes: that takes long, so most are for --thorough."""
    return getattr(adapter, "by_compiler", False) and not thorough


def setting_of(adapter, shapes, device, key=0):
    """(model, batch, the adapter under which its result must be exact)"""
    where = torch.device(device)
    model = table.of(adapter).model(where, torch.float32)
    batch = inputs.make_batch(shapes, vocab_size=V, encoder_dim=D, device=where, dtype=torch.float32, key=(3, key))
    return model, batch, adapter.widened(max(U for _, U in shapes))


def expected_of(adapter, shapes, device):
    """The reference's summed loss of the batch under the adapter's topology."""
    _, batch, wide = setting_of(adapter, shapes, device)
    N, T, U = inputs.padded_sizes(shapes)
    zeros = torch.zeros(N, T, U + 1, V + wide.lattice.extra, dtype=torch.float64)
    return oracle.losses(zeros, batch.targets, batch.shapes, 0, wide.lattice).sum().item()


def refuses(adapter, shapes, device):
    """Return whether the adapter says that it takes no such batch; then it must refuse it.  Nothing is
    asked of a batch that its topology has no path through."""
    if not math.isfinite(expected_of(adapter, shapes, device)):
        return True
    if min(U for _, U in shapes) >= adapter.fewest_targets:
        return False
    model, batch, wide = setting_of(adapter, shapes, device)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        step.prepare(wide, model, batch, "step").run()
    return True


@pytest.mark.parametrize("case", BATCHES)
def test_loss_and_gradient_given_logits(adapter, device, case, thorough):
    if case != "ragged" and is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    if "loss" not in table.of(adapter).scopes:
        pytest.skip(f"{adapter.name} takes no logits: the test of the step judges it")
    if refuses(adapter, BATCHES[case], device):
        return
    model, batch, wide = setting_of(adapter, BATCHES[case], device)
    loss_error, grad_error = answers.loss_scope(wide, model, batch).errors
    assert loss_error < 1e-5 and grad_error < 1e-4


@pytest.mark.parametrize("case", BATCHES)
def test_loss_and_gradients_of_the_step(adapter, device, case, thorough):
    if case != "ragged" and is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    if refuses(adapter, BATCHES[case], device):
        return
    model, batch, wide = setting_of(adapter, BATCHES[case], device)
    loss_error, grad_error = answers.step_scope(wide, model, batch).errors
    assert loss_error < 1e-5 and grad_error < 1e-4


def test_a_gradient_over_the_logits_is_not_copied(device):
    """No training step copies it either."""
    adapter = adapter_of(find("optimized_transducer"), device)
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    prepared = step.prepare(wide, model, batch, "loss")
    prepared.run()
    assert prepared.gradients()["given"].data_ptr() == prepared.given.data_ptr() and prepared.given.grad is None


def test_a_wrong_target_is_noticed(adapter, device):
    """The judge itself: targets changed behind the loss's back must show as an error."""
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    changed = replace(batch, targets=batch.targets % (V - 1) + 1)
    if "loss" not in table.of(wide).scopes:
        right, wrong = (step.prepare(wide, model, inputs, "step").run() for inputs in (batch, changed))
        assert oracle.relative_error(wrong, right) > 1e-3
        return
    prepared = step.prepare(wide, model, changed, "loss")
    expected = table.of(wide).expected(prepared.given.detach().cpu().double(), batch).sum()
    assert oracle.relative_error(prepared.run(), expected) > 1e-3


def test_padding_of_the_inputs_does_not_matter(adapter, device):
    shapes = BATCHES["ragged"]
    model, batch, wide = setting_of(adapter, shapes, device)
    loss = step.prepare(wide, model, batch, "step").run()
    _, other, _ = setting_of(adapter, shapes, device)
    with torch.no_grad():
        for n, (T, U) in enumerate(shapes):
            other.encoder_out[n, T:] = 1e3
            other.decoder_out[n, U + 1 :] = -1e3
            other.targets[n, U:] = 1
    assert step.prepare(wide, model, other, "step").run().item() == pytest.approx(loss.item(), rel=1e-5)


def test_inputs_are_left_as_they_were(adapter, device):
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    tensors = [
        batch.encoder_out,
        batch.decoder_out,
        batch.targets,
        batch.T_lengths,
        batch.U_lengths,
        *model.parameters(),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    step.prepare(wide, model, batch, "step").run()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before))


def test_options_are_told_with_their_defaults(adapter, device):
    told = adapter.described_options()
    written = {name: vars(option) for name, option in told.items()}
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    plain = (bool, int, float, str, type(None))
    ours = {name: value if isinstance(value, plain) else str(value) for name, value in adapter.options().items()}
    assert {name: told[name].ours for name in adapter.options()} == ours
    assert not any(name in told for name in ("logits", "targets", "symbols", "boundary"))


def test_the_step_names_its_stages(adapter, device):
    model, batch, _ = setting_of(adapter, BATCHES["ragged"], device)
    seen = []

    class Note:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    with observed_by(Note):
        step.prepare(adapter, model, batch, "step").run()
    first = "joiner"
    assert any(first in name for name in seen) and any("loss" in name for name in seen) and seen[-1] == "backward"


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i.kind == "pruned"], ids=lambda i: i.name)
def test_pruned_gap_is_zero_at_full_range_and_positive_below(implementation, device):
    shapes = [(30, 12)]
    adapter = adapter_of(implementation, device)
    model, batch, wide = setting_of(adapter, shapes, device)
    assert abs(table.of(wide).gap(model, batch)) < 1e-5
    narrow = adapter_of(implementation, device, prune_range=3)
    assert table.of(narrow).gap(model, batch) > 1e-4


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i.kind == "pruned"], ids=lambda i: i.name)
def test_the_recipe_of_2022_differentiates_the_pruned_loss_alone(implementation, device):
    adapter = adapter_of(implementation, device, pruned_recipe="benchmark-2022")
    model, batch, wide = setting_of(adapter, BATCHES["ragged"], device)
    assert list(model.extra) == []
    loss_error, grad_error = answers.step_scope(wide, model, batch).errors
    assert loss_error < 1e-5 and grad_error < 1e-4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def test_the_table_and_the_script_name_the_same_variants(implementation):
    adapter = importlib.import_module(implementation.script).ADAPTER
    assert adapter.name == implementation.name
    assert set(implementation.variants) <= set(adapter.variants)
    for variant, kind in implementation.variants.items():
        chosen = adapter(settings.resolve({"preset": "quick"}, "cpu"), variant)
        assert chosen.kind == kind and (kind == "pruned" or kind == chosen.topology.replace("regular", "exact"))


def test_available_somewhere():
    """This Python has at least one implementation: a contract that is skipped everywhere proves nothing."""
    loaded = 0
    for implementation in IMPLEMENTATIONS:
        chosen = settings.resolve({"preset": "quick"}, "cpu")
        try:
            importlib.import_module(implementation.script).ADAPTER(chosen).load("cpu")
            loaded += 1
        except NotRunnable:
            pass
    assert loaded >= 1
