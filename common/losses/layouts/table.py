"""List the layouts by name: padded and packed logits, losses that contain the joiner, and pruned logits."""

from __future__ import annotations

from typing import Dict, List, Type

import torch

from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.layouts.base import Layout, Region, Shapes
from common.losses.layouts.cells import PackedCells
from common.losses.layouts.pruned import Pruned
from common.measure.stages import stage


class Padded(Layout):
    """The layout of padded logits (N, T, U+1, V)."""

    def given(self, model, batch, prepared):
        return model.logits(batch)


class Packed(Layout):
    """The layout of packed logits (sum T_i (U_i+1), V), without padding."""

    cells = PackedCells

    def given(self, model, batch, prepared):
        return model.packed_logits(batch)

    def padded(self, given, batch):
        T, U = batch.targets.new_tensor(batch.shapes).amax(0).tolist()
        parts = given.split([t * (u + 1) for t, u in batch.shapes])
        return torch.stack(
            [
                torch.nn.functional.pad(part.view(t, u + 1, -1), (0, 0, 0, U - u, 0, T - t))
                for part, (t, u) in zip(parts, batch.shapes)
            ]
        )

    def padding(self, shapes, T, U):
        return None

    def take(self, logits, batch, prepared):
        if all((T, U + 1) == logits.shape[1:3] for T, U in batch.shapes):
            return logits.flatten(0, 2)  # a view, where there is no padding
        return torch.cat([logits[n, :T, : U + 1].flatten(0, 1) for n, (T, U) in enumerate(batch.shapes)])


class Joint(Layout):
    """The layout of losses that contain the joiner: encoder and decoder outputs, and the output layer.

    logits = tanh(encoder_out[t] + decoder_out[u]) weight^T + bias.  Such a loss gives the gradients of all four.  It
    has no scope "loss", since it takes no logits; its scope "step" is compared with that of the joiner and another
    loss.  Conformance cases ask with D = V, so that all four tensors are rows of one, each a view: N T of encoder_out,
    N (U+1) of decoder_out, V of weight, and one of bias.
    """

    scopes = ("step",)
    tensors = ("encoder_out", "decoder_out", "weight", "bias")

    def step(self, model, batch, prepared):
        tensors = (batch.encoder_out, batch.decoder_out, model.output.weight, model.output.bias)
        with stage("joiner and loss"), self.autocast(batch):
            return self.adapter.loss_of(dict(zip(self.tensors, tensors)), prepared)

    def parts(self, given: torch.Tensor, batch: Batch) -> Dict[str, torch.Tensor]:
        """Return `tensors` by name, as views of `given`."""
        (N, U), V = batch.targets.shape, given.size(1)
        of_targets = N * (U + 1)
        rows = given.split([len(given) - of_targets - V - 1, of_targets, V, 1])
        views = (rows[0].view(N, -1, V), rows[1].view(N, U + 1, V), rows[2], rows[3][0])
        return dict(zip(self.tensors, views))

    def loss(self, given, batch, prepared):
        return self.adapter.loss_of(self.parts(given, batch), prepared)

    def padded(self, given, batch):
        encoder_out, decoder_out, weight, bias = self.parts(given, batch).values()
        joined = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
        return torch.nn.functional.linear(joined, weight, bias)

    def of_symbol(self, symbol):
        return -1, symbol

    def size(self, N, T, U, V):
        return N * T + N * (U + 1) + V + 1, V

    def padding(self, shapes: Shapes, T: int, U: int) -> List[Region]:
        regions: List[Region] = []
        for n, (frames, targets) in enumerate(shapes):
            first = len(shapes) * T + n * (U + 1)
            for begin, end in ((n * T + frames, (n + 1) * T), (first + targets + 1, first + U + 1)):
                regions += [(slice(begin, end),)] if begin < end else []
        return regions


#: By the names that adapters use; common.core.implementations.LAYOUTS has the kind of loss of each.
LAYOUTS: Dict[str, Type[Layout]] = {"padded": Padded, "packed": Packed, "joint": Joint, "pruned": Pruned}


def of(adapter: Adapter) -> Layout:
    """Return the layout of an adapter, bound to it."""
    return LAYOUTS[adapter.layout](adapter)
