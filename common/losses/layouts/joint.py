"""Encoder and decoder outputs and the joiner's output layer: losses that contain the joiner and hold no logits.

logits = tanh(encoder_out[t] + decoder_out[u]) weight^T + bias.  Such a loss gives the gradients of all four.  It has no
scope "loss", since it takes no logits; its scope "step" is compared with that of the joiner and another loss.
"""

from __future__ import annotations

from typing import Any

import torch

from common.losses.inputs import Batch
from common.losses.layouts.cells import Cells, Tensors, largest
from common.losses.layouts.rows import Rows, split
from common.measure.stages import stage


class JointCells(Cells):
    """The gradients of weight and bias are sums over all cells, so they are compared after the last utterance."""

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Tensors):
        self.batch, self.U = batch, batch.targets.shape[1]
        names = ("encoder_out", "decoder_out", "output.weight", "output.bias")
        self.encoder_out, self.decoder_out, self.weight, self.bias = (leaves[name].detach().double() for name in names)
        self.gradients = gradients
        self.right = {name: torch.zeros_like(leaves[name], dtype=torch.float64) for name in names[1:]}
        self.width = max(self.weight.shape)
        self.score = 0.0

    def joined(self, n: int, begin: int, end: int) -> torch.Tensor:
        """(frames, U_n+1, D)."""
        _, U = self.batch.shapes[n]
        return torch.tanh(self.encoder_out[n, begin:end, None] + self.decoder_out[n, None, : U + 1])

    def logits(self, n, begin, end):
        found = torch.nn.functional.linear(self.joined(n, begin, end), self.weight, self.bias)
        self.score = max(self.score, largest(found))
        return found

    def largest_score(self):
        return self.score

    def compare(self, n, begin, end, right):
        joined = self.joined(n, begin, end)
        sums = (right @ self.weight) * (1 - joined.square())  # the gradient of encoder_out + decoder_out
        self.right["decoder_out"][n, : sums.size(1)] += sums.sum(0)
        self.right["output.weight"] += right.flatten(0, 1).T @ joined.flatten(0, 1)
        self.right["output.bias"] += right.sum((0, 1))
        yield "encoder_out", self.gradients["encoder_out"][n, begin:end], sums.sum(1)

    def compare_rest(self, n):
        yield "decoder_out", self.gradients["decoder_out"][n], self.right["decoder_out"][n]
        if n == len(self.batch.shapes) - 1:
            for name in ("output.weight", "output.bias"):
                yield name, self.gradients[name], self.right[name]

    def padding(self, n):
        yield "encoder_out", self.gradients["encoder_out"][n, self.batch.shapes[n][0] :]


class Joint(Rows):
    """conformance.py asks with D = V, so that all four fit into rows of one tensor: those of encoder_out (N T), of
    decoder_out (N (U+1)), of weight (V), and one of bias."""

    scopes = ("step",)
    cells = JointCells
    tensors = ("encoder_out", "decoder_out", "weight", "bias")
    never_large = "it takes encoder and decoder outputs, which are never that large"

    def step(self, model, batch, prepared):
        tensors = (batch.encoder_out, batch.decoder_out, model.output.weight, model.output.bias)
        with stage("joiner and loss"):
            return self.adapter.loss_of(dict(zip(self.tensors, tensors)), prepared)

    def padded(self, given, batch):
        encoder_out, decoder_out, weight, bias = self.parts(given, batch).values()
        joined = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
        return torch.nn.functional.linear(joined, weight, bias)

    def rows(self, V):
        return V + 1

    def parts(self, given, batch):
        encoder_out, decoder_out, layer = split(given, *batch.targets.shape, self.rows(given.size(1)))
        return dict(zip(self.tensors, (encoder_out, decoder_out, layer[:-1], layer[-1])))

    def of_symbol(self, symbol):
        return -1, symbol
