"""Inputs: the same bits under every torch and numpy, independent between batches; logits of a model in training."""

from __future__ import annotations

import hashlib
import runpy

import numpy as np
import pytest
import torch
from rnnt_bench.core import settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.data import shapes
from rnnt_bench.losses import inputs, oracle
from rnnt_bench.losses.inputs import Joiner

from commands import ROOT
from fixtures_runs import write_sweep

pytestmark = pytest.mark.environment_contract

SHAPES = [(37, 9), (52, 0), (11, 14)]
CPU = torch.device("cpu")

#: Of every input below, made once; each environment has to make the same.  A change means that old and new results were
#: measured on different inputs: raise records.SCHEMA with it.
DIGEST = "222812b020cd927c7cf2f436dbe3e3a9304b5b9b4fda4d679758c188a0d66629"


def make(key=(7, 3, 0)):
    return inputs.make_batch(SHAPES, vocab_size=500, encoder_dim=33, device=CPU, dtype=torch.float32, key=key)


def digest(*tensors):
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(np.ascontiguousarray(torch.as_tensor(tensor).detach().numpy()).tobytes())
    return state.hexdigest()


def test_same_bits_in_every_environment():
    batch = make()
    parts = [batch.encoder_out, batch.decoder_out, batch.targets, batch.T_lengths, batch.U_lengths]
    assert digest(*parts, *inputs.drawn(33, 50, (7, 1))) == DIGEST


def test_sizes_ranges_and_types():
    batch = make()
    sizes = [tuple(tensor.shape) for tensor in (batch.encoder_out, batch.decoder_out, batch.targets)]
    assert sizes == [(3, 52, 33), (3, 15, 33), (3, 14)] and batch.targets.dtype == torch.int32
    assert batch.encoder_out.is_leaf and batch.encoder_out.requires_grad and batch.decoder_out.requires_grad
    assert 0 <= batch.encoder_out.min() and batch.encoder_out.max() < 1
    assert 1 <= batch.targets.min() and batch.targets.max() < 500
    assert batch.T_lengths.tolist() == [37, 52, 11] and batch.U_lengths.tolist() == [9, 0, 14]


def test_numbers_are_uniform_and_all_symbols_but_blank_are_drawn():
    drawn = shapes.uniform(200_001, 1, 2, 3)
    assert len(drawn) == 200_001 and abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.var() - 1 / 12) < 0.002
    assert set(shapes.symbols((50, 40), 7, 0).ravel().tolist()) == {1, 2, 3, 4, 5, 6}


def test_keys_give_different_numbers_and_the_same_key_the_same():
    assert digest(make().encoder_out) == digest(make().encoder_out)
    assert digest(make().encoder_out) != digest(make((7, 4, 0)).encoder_out)
    assert not np.array_equal(shapes.uniform(64, shapes.ENCODER, 1), shapes.uniform(64, shapes.DECODER, 1))


# Of a model in training: real passages of any length, the same logits at any size, and what they cannot do.

PASSAGES = [(60, 13), (45, 0), (12, 12), (300, 60), (1, 1)]
V, H = inputs.load("trained")["decoder"].shape


def chosen(**given):
    return settings.resolve({"logits": "trained", "vocab_size": V, "encoder_dim": H, **given}, "cpu")


def made(flags, shapes=PASSAGES, dtype=torch.float32, key=0):
    """Return (model, batch)."""
    model = Joiner(inputs.layer("output", flags, CPU, dtype), {})
    sizes = {"vocab_size": flags.vocab_size, "encoder_dim": flags.encoder_dim}
    source = inputs.source_of(flags)
    return model, inputs.make_batch(shapes, **sizes, device=CPU, dtype=dtype, key=(flags.seed, key), source=source)


def losses_of(flags, shapes=PASSAGES):
    """Return the float64 losses (N,)."""
    model, batch = made(flags, shapes, torch.float64)
    with torch.no_grad():
        return oracle.losses(model.logits(batch), batch.targets, batch.shapes)


def test_a_passage_by_hand():
    """Two utterances of 4 and 3 frames, with two symbols and one."""
    lists = {"targets": [5, 6, 7], "frames": [1, 3, 5], "T_lengths": [4, 3], "U_lengths": [2, 1]}
    arrays = {"encoder_out": np.zeros((7, 1)), **{name: np.array(values) for name, values in lists.items()}}

    def passage(*given):
        return tuple(part.tolist() for part in inputs.passage(arrays, *given))

    assert passage(5, 2, 0.0) == ([0, 1, 2, 3, 4], [5, 6])  # up to the frame of the next symbol
    assert passage(8, 2, 0.0) == ([0, 0, 1, 2, 2, 3, 4, 4], [5, 6])  # frames without a symbol are repeated
    assert passage(2, 2, 0.0) == ([1, 3], [5, 6]) and passage(1, 2, 0.0) == ([1], [5, 6])
    assert passage(3, 0, 0.5) == ([4, 4, 4], [])
    frames, symbols = passage(6, 2, 0.9)  # from the last utterance to the first
    assert symbols == [7, 5] and {5, 1} <= set(frames) and frames[0] == 4


def test_sizes_of_a_batch_and_the_same_bits_for_a_key():
    digests = set()
    for key in (0, 0, 1):
        model, batch = made(chosen(), key=key)
        assert batch.encoder_out.shape == (5, 300, H) and batch.decoder_out.shape == (5, 61, H)
        assert batch.targets.min() >= 1 and batch.targets.max() < V and torch.isfinite(batch.encoder_out).all()
        tensors = (batch.encoder_out, batch.decoder_out, batch.targets, model.output.weight, model.output.bias)
        digests.add(hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest())
    assert len(digests) == 2


@pytest.mark.parametrize("sizes", [{"encoder_dim": 300}, {"encoder_dim": 512}, {"vocab_size": 500}])
def test_other_sizes_have_the_same_loss(sizes):
    assert torch.allclose(losses_of(chosen(**sizes)), losses_of(chosen()), rtol=2e-2, atol=2e-2)
    if "vocab_size" not in sizes:
        assert torch.allclose(losses_of(chosen(**sizes)), losses_of(chosen()), rtol=1e-6)


def test_the_loss_falls_from_stage_to_stage():
    """The passages are as dense as the speech; the files say the loss of whole utterances."""
    shapes = [(140, 30), (90, 20), (230, 50)]
    symbols = sum(U for _, U in shapes)
    nats = [float(losses_of(chosen(logits=stage), shapes).sum()) / symbols for stage in settings.STAGES]
    assert nats[0] > 5 > nats[1] > nats[2] < 0.5
    for stage, value in zip(settings.STAGES, nats):
        assert 1 / 4 < value / float(inputs.load(stage)["nats"]) < 4


def test_sizes_that_it_does_not_have():
    for flag, sizes in ((f"--vocab-size {V}", {"vocab_size": V - 1}), (f"--encoder-dim {H}", {"encoder_dim": 32})):
        with pytest.raises(UserError, match=f"--logits trained.*{flag}"):
            inputs.source_of(chosen(**sizes))


def test_the_table_of_a_sweep_over_logits(tmp_path):
    write_sweep(tmp_path / "sweep", {"logits": ["random", "trained"]}, names=("torchaudio", "fast_rnnt-pruned"))
    table = runpy.run_path(str(ROOT / "docs" / "_figures.py"))["logits"](str(tmp_path))
    heads, _, *lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert {"torchaudio ms", "fast_rnnt-pruned ms", "pruned gap"} <= set(heads)
    assert [line[0] for line in lines] == ["random", "trained"] and all(float(line[2]) == 10 for line in lines)
