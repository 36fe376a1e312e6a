"""The training of train.py for `rnnt-bench largest --model examples/largest.py:small`: model, batch
and step."""

import torch
from train import Model, check_loss  # examples/train.py

VOCAB = 500


def small(loss="fused"):
    """Return the model; `loss` is one of those of train.py."""
    check_loss(loss)
    model = Model(VOCAB)
    model.kind = loss
    return model


def batch(N, T, U):
    """Return N random utterances of T frames of 10 ms, four of them in a row of 160 features, and
    of U symbols."""
    return [
        (torch.randn(T // 4, 160), torch.randint(1, VOCAB, (U,), dtype=torch.int32))
        for _ in range(N)
    ]


def step(model, batch):
    """Return the loss of a batch."""
    return model.loss(batch, model.kind)
