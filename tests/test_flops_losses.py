"""Every transducer loss that this Python has, and torchaudio's operators: counted, or named."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from msgspec import structs
from rnnt_bench.analysis import times
from rnnt_bench.core.implementations import find, with_variants
from rnnt_bench.flops.counter import FlopCounter, NotCounted
from rnnt_bench.losses.step import prepare
from rnnt_bench.records.schema import Batch

from test_contract import V, adapter_of, setting_of

SHAPES = [(9, 4), (8, 3)]


def count(work):
    """(FLOPs by operator, MACs by operator, names of what was not counted)."""
    with FlopCounter() as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCounted)
        work()
    flops, macs = Counter(), Counter()
    for entry in counter.document()["counts"]:
        flops[entry["operator"]] += entry["flops"]
        macs[entry["operator"]] += entry["macs"]
    return flops, macs, counter.not_counted()


def counted(row, scope, shapes=SHAPES):
    adapter = adapter_of(find(row) if isinstance(row, str) else row, "cpu")
    model, batch, _ = setting_of(adapter, list(shapes), "cpu")
    return adapter, model, count(prepare(adapter, model, batch, scope).run)


@pytest.mark.environment_contract
@pytest.mark.parametrize("row", with_variants(), ids=lambda row: row.name)
def test_every_loss_is_counted_or_named(row):
    """A loss with a rule counts at least the softmax over V of each cell (pruned ones project to V, too)."""
    layout = adapter_of(row, "cpu").layout
    adapter, _, (flops, _, missing) = counted(row, "loss" if layout in ("padded", "packed") else "step")
    assert missing or sum(flops.values()) >= 2 * V * sum(T * (U + 1) for T, U in SHAPES)
    if adapter.implementation.package in ("torchaudio", "optimized_transducer", "fast_rnnt", "k2", "fused_transducer"):
        assert not missing


#: T = 2, U = 1: 4 cells, one of them inner, 2 on the edges.  Log-probabilities 4 + 2; both recursions 6 + 2 each, the
#: last blank 1; gradient 2 + 3 V for each cell, 3 for each of 2 blanks and 2 targets, 2 for the last blank.
KERNEL = 6 + (8 + 8 + 1) + 4 * (2 + 3 * V) + 3 * 4 + 2
DENOMINATORS = 4 * 2 * V
OF_OT = "optimized_transducer.transducer_loss.TransducerLossFunction"


@pytest.mark.environment_contract
@pytest.mark.parametrize(
    "name, shape, expected",
    [
        # the gradient times the upstream one
        ("torchaudio", (2, 1), {"torchaudio::rnnt_loss_forward": DENOMINATORS + KERNEL, "aten::mul": 4 * V}),
        ("optimized_transducer", (2, 1), {OF_OT: KERNEL, "aten::logsumexp": DENOMINATORS}),
        # one symbol a frame: as two frames of the regular one; log-probabilities are of all six cells
        ("optimized_transducer:modified", (3, 1), {OF_OT: KERNEL + 3}),
        # two inner cells, three on the edges; 6 and 1 forward, 7 and 1 for the derivative
        *(
            (package, (2, 1), {f"{package}.mutual_information.MutualInformationRecursionFunction": 2 * (6 + 7) + 6})
            for package in ("fast_rnnt", "k2")
        ),
    ],
)
def test_a_kernel_by_hand(name, shape, expected):
    _, _, (flops, _, missing) = counted(name, "loss", [shape])
    assert not missing and {operator: flops[operator] for operator in expected} == expected


def test_torchaudio_counts_its_own_lattices_and_the_padded_denominators():
    operator, shapes = "torchaudio::rnnt_loss_forward", [(7, 3), (5, 2)]
    each = [counted("torchaudio", "loss", of)[2][0][operator] for of in ([shapes[0]], [shapes[1]], shapes)]
    assert each[2] == each[0] + each[1] + 2 * V * (7 * 4 - 5 * 3)


@pytest.mark.parametrize("name, times", [("fused", 3), ("fused:all-cells", 3), ("fused:torch", 4)])
def test_the_fused_loss_multiplies_the_cells_of_utterances(name, times):
    """Forward and both gradients; the plain code, which keeps no logits, computes them again."""
    adapter, model, (_, macs, missing) = counted(name, "step")
    modes = pytest.importorskip("torch.utils.flop_counter")
    step = prepare(adapter, model, setting_of(adapter, SHAPES, "cpu")[1], "step")
    with modes.FlopCounterMode(display=False) as counter:
        step.run()
    assert counter.get_total_flops() == 2 * sum(macs.values())
    assert {name for name, each in macs.items() if each} == {"fused_transducer::losses", "fused_transducer::gradients"}
    assert sum(macs.values()) == times * model.output.weight.numel() * sum(T * (U + 1) for T, U in SHAPES)
    assert not missing


def test_torchaudio_s_filters_and_features_are_counted_and_its_aligner_named():
    torchaudio = pytest.importorskip("torchaudio")
    x, a, b = torch.randn(1, 1600), torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.2])
    _, macs, missing = count(lambda: torchaudio.functional.lfilter(x, a, b))
    assert sum(macs.values()) == (2 + 1) * 1600 and not missing  # two coefficients; the first of the recursion is 1
    features = [torchaudio.transforms.MelSpectrogram(n_mels=20), torchaudio.transforms.Resample(16000, 8000)]
    for work in (*features, torchaudio.compliance.kaldi.fbank):
        _, macs, missing = count(partial(work, x))
        assert sum(macs.values()) > 0 and not missing
    scores, targets = torch.randn(1, 20, 5).log_softmax(-1), torch.tensor([[1, 2]], dtype=torch.int32)
    assert count(lambda: torchaudio.functional.forced_align(scores, targets))[2] == ["torchaudio::forced_align"]


@pytest.mark.parametrize("name", ["torchaudio", "optimized_transducer", "fast_rnnt", "fast_rnnt-pruned", "reference"])
def test_the_roofline_s_formula_is_what_the_step_multiplies(name):
    """Each in its own layout. The pruned loss multiplies once more, a matrix by a vector, to smooth."""
    adapter, _, (_, macs, _) = counted(name, "step")
    N, T, U = len(SHAPES), *map(max, zip(*SHAPES))
    shapes = SHAPES if adapter.layout == "packed" else [(T, U)] * N  # padding is multiplied too
    cells = sum(t * (u + 1) for t, u in shapes)
    described = structs.replace(
        Batch(0, N, T, U, useful_cells=cells, padded_cells=cells),
        frames=sum(t for t, _ in shapes),
        tokens=sum(u for _, u in shapes),
        one_symbol_cells=cells,
        pruned_cells=sum(t * min(adapter.settings.prune_range, u + 1) for t, u in shapes),
    )
    kind = adapter.implementation.kind
    simple = 4 * cells * adapter.settings.vocab_size if kind == "pruned" else 0  # its gradient is not in the bound
    products = sum(macs.values()) - macs["aten::mv"]
    assert 2 * products == times.least_work("step", kind, described, adapter.settings, 1.0)[1] + simple
