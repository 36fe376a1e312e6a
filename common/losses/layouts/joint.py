"""Define the layout of losses that contain the joiner: encoder and decoder outputs, and the output layer.

logits = tanh(encoder_out[t] + decoder_out[u]) weight^T + bias.  Such a loss gives the gradients of all four.  It has no
scope "loss", since it takes no logits; its scope "step" is compared with that of the joiner and another loss.
"""

from __future__ import annotations

import torch

from common.losses.layouts.rows import Rows, split
from common.measure.stages import stage


class Joint(Rows):
    """The layout of a loss that contains the joiner.

    conformance.py asks with D = V, so that all four tensors are rows of one: N T of encoder_out, N (U+1) of
    decoder_out, V of weight, and one of bias.
    """

    scopes = ("step",)
    tensors = ("encoder_out", "decoder_out", "weight", "bias")
    never_large = "it takes encoder and decoder outputs, which are never that large"

    def step(self, model, batch, prepared):
        tensors = (batch.encoder_out, batch.decoder_out, model.output.weight, model.output.bias)
        with stage("joiner and loss"), self.autocast(batch):
            return self.adapter.loss_of(dict(zip(self.tensors, tensors)), prepared)

    def padded(self, given, batch):
        encoder_out, decoder_out, weight, bias = self.parts(given, batch).values()
        joined = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
        return torch.nn.functional.linear(joined, weight, bias)

    def rows(self, V):
        return V + 1

    def parts(self, given, batch):
        N, U = batch.targets.shape
        encoder_out, decoder_out, layer = split(given, N, U, self.rows(given.size(1)))
        return dict(zip(self.tensors, (encoder_out, decoder_out, layer[:-1], layer[-1])))

    def of_symbol(self, symbol):
        return -1, symbol
