"""Give access to the cells of a batch that is judged at size: some frames of an utterance at a
time, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from rnnt_bench.losses.inputs import Batch

#: Elements of the logits that are converted to float64 at a time.
CHUNK = 1 << 23
Tensors = Mapping[str, torch.Tensor]
Gradients = Mapping[str, torch.Tensor | None]


class Frames(NamedTuple):
    """Hold some frames of an utterance."""

    begin: int
    end: int
    logits: torch.Tensor  # (frames, cells, V), float64
    u: torch.Tensor  # of each cell
    target: torch.Tensor  # the next one of each cell


class Cells:
    """The cells of padded logits in scope "loss"; subclasses are for other layouts and scopes.

    Made of the inputs, what the adapter made of them, the leaves of a
    rnnt_bench.losses.step.LossStep and the gradients that the loss computed, by the names of the
    leaves.  `width` is the number of elements of a cell, `score` the largest magnitude of the
    logits seen so far, and `factors` those of the losses of the utterances.
    """

    dtype = torch.float64  # of the logits that it gives

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Gradients):
        self.batch, self.prepared, self.score = batch, prepared, 0.0
        self.factors = [1.0] * len(batch.shapes)
        self.given = leaves["given"].detach()
        self.gradients = gradients
        self.gradient: Any = gradients.get("given")
        self.width = self.given.size(-1)

    def of(self, tensor: torch.Tensor, n: int, begin: int, end: int) -> torch.Tensor:
        """Return frames [begin, end) of utterance n, of the leaf or its gradient: (frames, cells of
        a frame, V)."""
        return tensor[n, begin:end, : self.batch.shapes[n][1] + 1]

    def scores(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the logits (frames, cells of a frame, V) of these frames; differentiable in a
        step."""
        return self.of(self.given, n, begin, end).to(self.dtype)

    def frames(self, n: int) -> Iterator[Frames]:
        """Yield some frames of an utterance at a time, at most CHUNK elements; note the largest
        score."""
        T, U = self.batch.shapes[n]
        targets = torch.nn.functional.pad(self.batch.targets[n].long(), (0, 2))
        count = max(1, CHUNK // ((U + 1) * self.width))
        for begin in range(0, T, count):
            end = min(begin + count, T)
            symbols = self.symbols(n, begin, end)
            self.last = self.scores(n, begin, end)
            logits = self.last.detach()
            most = largest(logits)
            finite = most if math.isfinite(most) else largest(logits[logits.isfinite()])
            self.score = max(self.score, finite)
            target = targets[symbols.clamp(max=len(targets) - 2)]
            yield Frames(begin, end, logits, symbols.clamp(max=U + 1), target)

    def symbols(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the u of each cell of these frames: (frames, cells of a frame)."""
        U1 = self.batch.shapes[n][1] + 1
        return torch.arange(U1, device=self.batch.targets.device).expand(end - begin, U1)

    def computed(self, n: int, frames: Frames) -> torch.Tensor | None:
        """Return the loss's gradient of these frames, for a factor of 1."""
        if self.gradient is None:
            return None
        return self.of(self.gradient, n, frames.begin, frames.end) / self.factors[n]


class PackedCells(Cells):
    def of(self, tensor, n, begin, end):
        shapes, row = self.batch.shapes, self.batch.shapes[n][1] + 1
        first = sum(T * (U + 1) for T, U in shapes[:n])
        return tensor[first + begin * row : first + end * row].view(end - begin, row, -1)


class PrunedCells(Cells):
    """The cells of pruned logits (N, T, S, V)."""

    def of(self, tensor, n, begin, end):
        return tensor[n, begin:end]

    def symbols(self, n, begin, end):
        return self.prepared.ranges[n, begin:end].long()


class StepCells(Cells):
    """The cells of a step, whose gradients of outputs and weights autograd makes from those of the
    logits, in float64.

    They are sums over cells, so they are compared after the last utterance, padding included.
    `leaves` are those of the step in float64, of which several steps share the weights: these are
    compared with the last step.
    """

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Gradients):
        self.batch, self.prepared, self.score = batch, prepared, 0.0
        self.factors = [1.0] * len(batch.shapes)
        self.leaves, self.gradients = leaves, gradients
        self.width = max(leaves["output.weight"].shape)

    def decoder_out(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the decoder outputs of the cells of these frames: (frames or 1, cells of a frame,
        D)."""
        return self.leaves["decoder_out"][n, None, : self.batch.shapes[n][1] + 1]

    def scores(self, n, begin, end):
        with torch.enable_grad():
            joined = torch.tanh(
                self.leaves["encoder_out"][n, begin:end, None] + self.decoder_out(n, begin, end)
            )
            return torch.nn.functional.linear(
                joined, self.leaves["output.weight"], self.leaves["output.bias"]
            )


class PrunedStepCells(StepCells):
    def symbols(self, n, begin, end):
        return self.prepared.ranges[n, begin:end].long()

    def decoder_out(self, n, begin, end):
        return self.leaves["decoder_out"][n][self.symbols(n, begin, end)]


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude: 0 for no values, infinite if one is NaN."""
    magnitude = values.abs().max().item() if values.numel() else 0.0
    return float("inf") if magnitude != magnitude else magnitude
