"""A small Parakeet of transformers, of random weights, for `rnnt-bench largest --model`: its loss
is an argument."""

import torch
from finetune_tdt import loss_of, make_batch, make_model  # examples/finetune_tdt.py

from fused_transducer import recipes

VOCAB = 500


def small(loss="fused"):
    """Return the model, with fused_transducer's loss in place, or with torchaudio's of its
    logits."""
    if loss not in ("fused", "torchaudio"):
        raise ValueError(f"there is no loss {loss!r}; choose from fused, torchaudio")
    model = make_model("parakeet-rnnt", VOCAB, width=128)
    return recipes.patch(model) if loss == "fused" else model


def batch(N, T, U):
    """Return the model's arguments for N random utterances of T frames of 10 ms and U symbols."""
    pairs = [(torch.randn(T // 4, 160), torch.randint(1, VOCAB, (U,))) for _ in range(N)]
    return make_batch(pairs, VOCAB, "cpu")


def step(model, batch):
    """Return the loss of a batch."""
    return loss_of(model, batch)
