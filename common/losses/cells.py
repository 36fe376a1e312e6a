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
    """The cells of what a loss is given, in scope "loss".

    Made of the layout, the inputs, what the adapter made of them, the leaves of a
    rnnt_bench.losses.step.LossStep and the gradients that the loss computed, by the names of the
    leaves.  `score` is the largest magnitude of the logits seen so far, and `factors` those of the
    losses of the utterances.
    """

    dtype = torch.float64  # of the logits that it gives

    def __init__(
        self, layout: Any, batch: Batch, prepared: Any, leaves: Tensors, gradients: Gradients
    ):
        self.layout, self.batch, self.prepared = layout, batch, prepared
        self.leaves, self.gradients = leaves, gradients
        self.score = 0.0
        self.factors = [1.0] * len(batch.shapes)

    @property
    def width(self) -> int:
        """Return the number of elements of a cell."""
        return self.leaves["given"].size(-1)

    def scores(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the logits (frames, cells of a frame, V) of these frames; differentiable in a
        step."""
        given = self.leaves["given"].detach()
        return self.layout.cells_of(given, self.batch.shapes, n, begin, end).to(self.dtype)

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
        if self.layout.approximate:
            return self.prepared.ranges[n, begin:end].long()
        U1 = self.batch.shapes[n][1] + 1
        return torch.arange(U1, device=self.batch.targets.device).expand(end - begin, U1)

    def computed(self, n: int, frames: Frames) -> torch.Tensor | None:
        """Return the loss's gradient of these frames, for a factor of 1."""
        gradient = self.gradients["given"]
        if gradient is None:
            return None
        shapes, begin, end = self.batch.shapes, frames.begin, frames.end
        return self.layout.cells_of(gradient, shapes, n, begin, end) / self.factors[n]


class StepCells(Cells):
    """The cells of a step, whose gradients of outputs and weights autograd makes from those of the
    logits, in float64.

    They are sums over cells, so they are compared after the last utterance, padding included.
    `leaves` are those of the step in float64, of which several steps share the weights: these are
    compared with the last step.
    """

    @property
    def width(self):
        return max(self.leaves["output.weight"].shape)

    def scores(self, n, begin, end):
        U1 = self.batch.shapes[n][1] + 1
        with torch.enable_grad():
            decoder_out = self.leaves["decoder_out"][n, None, :U1]
            if self.layout.approximate:
                decoder_out = self.leaves["decoder_out"][n][self.symbols(n, begin, end)]
            joined = torch.tanh(self.leaves["encoder_out"][n, begin:end, None] + decoder_out)
            return torch.nn.functional.linear(
                joined, self.leaves["output.weight"], self.leaves["output.bias"]
            )


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude: 0 for no values, infinite if one is NaN."""
    magnitude = values.abs().max().item() if values.numel() else 0.0
    return float("inf") if magnitude != magnitude else magnitude
