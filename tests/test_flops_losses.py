"""Every transducer loss that this Python has, and torchaudio's operators: counted, or named."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_contract import V, adapter_of, setting_of

from common.core.implementations import with_variants
from common.flops.counter import FlopCounter, NotCounted
from common.losses.step import prepare

SHAPES = [(9, 4), (8, 3)]


def count(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCounted)
        with FlopCounter() as counter:
            work()
    document = counter.document()
    operators = {}
    for entry in document["counts"]:
        operators[entry["operator"]] = operators.get(entry["operator"], 0) + entry["flops"]
    return operators, document["not_counted"]


@pytest.mark.environment_contract
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda one: one.name)
def test_every_loss_is_counted_or_named(implementation):
    """A loss with a rule counts at least the softmax over V of each cell (pruned ones project to V, too).

    A loss without one is named with its custom function.
    """
    adapter = adapter_of(implementation, "cpu")
    model, batch, _ = setting_of(adapter, SHAPES, "cpu")
    work = prepare(adapter, model, batch, "loss" if adapter.layout in ("padded", "packed") else "step")
    operators, missing = count(work.run)
    assert missing or sum(operators.values()) >= 2 * V * sum(T * (U + 1) for T, U in SHAPES)
    if adapter.package in ("torchaudio", "optimized_transducer", "fast_rnnt", "k2", "warprnnt_numba"):
        assert not missing


def loss_of(name, shapes=((2, 1),)):
    """FLOPs by operator, forward and backward, of a loss given logits."""
    from common.core.implementations import find

    adapter = adapter_of(find(name), "cpu")
    model, batch, _ = setting_of(adapter, list(shapes), "cpu")
    operators, missing = count(prepare(adapter, model, batch, "loss").run)
    assert not missing
    return operators


#: T = 2, U = 1: 4 cells, one of them inner, 2 on the edges.  Log-probabilities 4 + 2; both recursions 6 + 2 each, the
#: last blank 1; gradient 2 + 3 V for each cell, 3 for each of 2 blanks and 2 targets, 2 for the last blank.
KERNEL = 6 + (8 + 8 + 1) + 4 * (2 + 3 * V) + 3 * 4 + 2
DENOMINATORS = 4 * 2 * V


def test_torchaudio_by_hand():
    operators = loss_of("torchaudio")
    assert operators["torchaudio::rnnt_loss_forward"] == DENOMINATORS + KERNEL
    assert operators["aten::mul"] == 4 * V  # the gradient times the upstream one


def test_torchaudio_counts_its_own_lattices_and_the_padded_denominators():
    alone = sum(loss_of("torchaudio", [shape])["torchaudio::rnnt_loss_forward"] for shape in ((7, 3), (5, 2)))
    together = loss_of("torchaudio", [(7, 3), (5, 2)])["torchaudio::rnnt_loss_forward"]
    assert together == alone + 2 * V * (7 * 4 - 5 * 3)


def test_optimized_transducer_by_hand():
    operators = loss_of("optimized_transducer")
    assert operators["optimized_transducer.transducer_loss.TransducerLossFunction"] == KERNEL
    assert operators["aten::logsumexp"] == DENOMINATORS


def test_one_symbol_a_frame_walks_a_smaller_lattice():
    """T = 3, U = 1: as two frames of the regular one; log-probabilities are of all six cells."""
    operators = loss_of("optimized_transducer:modified", [(3, 1)])
    assert operators["optimized_transducer.transducer_loss.TransducerLossFunction"] == KERNEL + 3


@pytest.mark.parametrize("name, times", [("fused", 3), ("fused:all-cells", 3), ("fused:torch", 4)])
def test_the_fused_loss_multiplies_the_cells_of_utterances(name, times):
    """Forward and both gradients; the plain code, which keeps no logits, computes them again."""
    from common.core.implementations import find

    adapter = adapter_of(find(name), "cpu")
    model, batch, _ = setting_of(adapter, SHAPES, "cpu")
    with FlopCounter() as counter:
        prepare(adapter, model, batch, "step").run()
    macs = {entry["operator"]: entry["macs"] for entry in counter.document()["counts"] if entry["macs"]}
    assert set(macs) == {"fused_transducer::losses", "fused_transducer::gradients"}
    V, D = model.output.weight.shape
    assert sum(macs.values()) == times * D * V * sum(T * (U + 1) for T, U in SHAPES)


@pytest.mark.environment_contract
@pytest.mark.parametrize("package", ["fast_rnnt", "k2"])
def test_the_recursion_of_fast_rnnt_and_k2_by_hand(package):
    """T = 2, U = 1: two inner cells, three on the edges; 6 and 1 forward, 7 and 1 for the derivative."""
    operators = loss_of(package)
    name = f"{package}.mutual_information.MutualInformationRecursionFunction"
    assert operators[name] == 2 * 6 + 3 + 2 * 7 + 3


def test_torchaudio_filters_and_features():
    torchaudio = pytest.importorskip("torchaudio")
    x, a, b = torch.randn(1, 100), torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.2])
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCounted)
        with FlopCounter() as counter, torch.no_grad():
            torchaudio.functional.lfilter(x, a, b)
        assert counter.total().macs == (2 + 1) * 100  # two coefficients; the first of the recursion is 1
        for work, wave in (
            (torchaudio.transforms.MelSpectrogram(n_mels=20), torch.randn(1, 1600)),
            (torchaudio.transforms.Resample(16000, 8000), torch.randn(1, 1600)),
            (torchaudio.compliance.kaldi.fbank, torch.randn(1, 1600)),
        ):
            with FlopCounter() as counter:
                work(wave)
            assert counter.total().macs > 0


def test_torchaudio_s_aligner_is_named():
    torchaudio = pytest.importorskip("torchaudio")
    _, missing = count(
        lambda: torchaudio.functional.forced_align(
            torch.randn(1, 20, 5).log_softmax(-1), torch.tensor([[1, 2]], dtype=torch.int32)
        )
    )
    assert [entry["operator"] for entry in missing] == ["torchaudio::forced_align"]


@pytest.mark.environment_contract
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda one: one.name)
def test_the_roofline_s_formula_is_what_the_step_multiplies(implementation):
    """Each in its own layout. The pruned loss multiplies once more, a matrix by a vector, to smooth."""
    from msgspec import structs

    from common.analysis import times
    from common.records.schema import Batch

    adapter = adapter_of(implementation, "cpu")
    if adapter.topology != "regular" and adapter.layout == "packed":
        pytest.skip("a packed loss of one symbol a frame projects cells that no path meets, too")
    if adapter.lattice.extra:
        pytest.skip("the formula leaves out the few columns that a lattice adds to V")
    if adapter.layout == "joint":
        pytest.skip("a joint loss may compute logits twice and leave out cells, which the formula does not")
    model, batch, _ = setting_of(adapter, SHAPES, "cpu")
    settings = adapter.settings
    with FlopCounter() as counter:
        prepare(adapter, model, batch, "step").run()
    macs = sum(entry["macs"] for entry in counter.document()["counts"] if entry["operator"] != "aten::mv")
    N, T, U = len(SHAPES), *map(max, zip(*SHAPES))
    shapes = SHAPES if adapter.layout == "packed" else [(T, U)] * N  # padding is multiplied too
    cells = sum(t * (u + 1) for t, u in shapes)
    described = Batch(0, N, T, U, useful_cells=cells, padded_cells=cells)
    described = structs.replace(described, frames=sum(t for t, _ in shapes), tokens=sum(u for _, u in shapes))
    pruned = sum(t * min(settings.prune_range, u + 1) for t, u in shapes)
    described = structs.replace(described, one_symbol_cells=cells, pruned_cells=pruned)
    simple = 4 * cells * settings.vocab_size if adapter.kind == "pruned" else 0  # its gradient is not in the bound
    assert 2 * macs == times.least_work("step", adapter.kind, described, vars(settings), 1.0)[1] + simple
