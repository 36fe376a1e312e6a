"""Inputs: the same bits under every torch and numpy, in range, and independent between batches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from common.data import streams
from common.losses import inputs

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
        state.update(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
    return state.hexdigest()


def test_same_bits_in_every_environment():
    batch = make()
    layer = inputs.linear(33, 50, device=CPU, dtype=torch.float32, key=(7, 1))
    parts = [batch.encoder_out, batch.decoder_out, batch.targets, batch.T_lengths, batch.U_lengths]
    assert digest(*parts, layer.weight, layer.bias) == DIGEST


def test_sizes_ranges_and_types():
    batch = make()
    assert (
        batch.encoder_out.shape == (3, 52, 33)
        and batch.decoder_out.shape == (3, 15, 33)
        and batch.targets.shape == (3, 14)
    )
    assert batch.encoder_out.dtype == torch.float32 and batch.targets.dtype == torch.int32
    assert batch.encoder_out.is_leaf and batch.encoder_out.requires_grad and batch.decoder_out.requires_grad
    assert 0 <= batch.encoder_out.min() and batch.encoder_out.max() < 1
    assert 1 <= batch.targets.min() and batch.targets.max() < 500
    assert batch.T_lengths.tolist() == [37, 52, 11] and batch.U_lengths.tolist() == [9, 0, 14]


def test_uniform_has_the_moments_of_a_uniform():
    drawn = streams.uniform(200_001, 1, 2, 3)
    assert len(drawn) == 200_001
    assert abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.var() - 1 / 12) < 0.002


def test_all_symbols_but_blank_are_drawn():
    assert set(streams.symbols((50, 40), 7, 0).ravel().tolist()) == {1, 2, 3, 4, 5, 6}
    assert set(streams.symbols((2, 3), 2, 0).ravel().tolist()) == {1}


def test_keys_give_different_numbers_and_the_same_key_the_same():
    assert digest(make().encoder_out) == digest(make().encoder_out)
    assert digest(make().encoder_out) != digest(make((7, 4, 0)).encoder_out)
    assert not np.array_equal(streams.uniform(64, streams.ENCODER, 1), streams.uniform(64, streams.DECODER, 1))
