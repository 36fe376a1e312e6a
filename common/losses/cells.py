"""Give access to the cells of a batch that is judged at size: some frames of an utterance at a
time, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rnnt_bench.losses.layouts import Layout
from rnnt_bench.losses.step import LossStep

#: Elements of the logits that are converted to float64 at a time.
CHUNK = 1 << 23
Tensors = Mapping[str, torch.Tensor]
Gradients = Mapping[str, torch.Tensor | None]


class Frames(NamedTuple):
    """Hold the frames [begin, end) of utterance n."""

    n: int
    begin: int
    end: int
    logits: torch.Tensor  # (frames, cells, V), without a graph
    u: torch.Tensor  # (frames, cells), that of each cell; at most U + 1
    target: torch.Tensor  # (frames, cells), the next target of each cell


class Cells:
    """The cells of a step in scope "loss", which is given the logits.

    Args:
        leaves: the tensors that the logits are made from, by name.
        gradients: what the loss computed, by the names of the leaves.
        factors: what the loss of each utterance was multiplied by before backward.
        dtype: of the logits that are made.
    """

    def __init__(
        self,
        layout: Layout,
        step: LossStep,
        leaves: Tensors,
        gradients: Gradients,
        factors: Sequence[float],
        dtype: torch.dtype = torch.float64,
    ):
        self.layout = layout
        self.batch = step.batch
        self.prepared = step.prepared
        self.leaves = leaves
        self.gradients = gradients
        self.factors = factors
        self.dtype = dtype
        self.score = 0.0  # the largest magnitude of the logits made so far

    @property
    def width(self) -> int:
        """Return the number of logits of a cell."""
        return self.leaves["given"].size(-1)

    def logits(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the logits (frames, cells of a frame, V) of frames [begin, end) of utterance n."""
        given = self.leaves["given"].detach()
        return self.layout.cells_of(given, self.batch.shapes, n, begin, end).to(self.dtype)

    def frames(self, n: int) -> Iterator[Frames]:
        """Yield the frames of an utterance, as many at a time as have at most CHUNK elements, but
        at least one frame.

        Before each yield, set `last` to the logits of these frames, and raise `score` to their
        largest magnitude."""
        T, U = self.batch.shapes[n]
        # The last u has no next target; the 0 that is added for it is read, but no path uses it.
        targets = torch.nn.functional.pad(self.batch.targets[n].long(), (0, 1))
        count = max(1, CHUNK // ((U + 1) * self.width))
        for begin in range(0, T, count):
            end = min(begin + count, T)
            self.last = self.logits(n, begin, end)  # with its graph, see StepCells.backward
            logits = self.last.detach()
            score = largest(logits)
            if not math.isfinite(score):  # a masked symbol has -inf
                score = largest(logits[logits.isfinite()])
            self.score = max(self.score, score)
            # A pruned range may reach beyond U: such cells get u = U + 1, and any target.
            u = self.u_of(n, begin, end)
            target = targets[u.clamp(max=len(targets) - 1)]
            yield Frames(n, begin, end, logits, u.clamp(max=U + 1), target)

    def u_of(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the u of each cell of frames [begin, end) of utterance n: (frames, cells of a
        frame)."""
        if self.layout.approximate:
            return self.prepared.ranges[n, begin:end].long()
        U1 = self.batch.shapes[n][1] + 1
        return torch.arange(U1, device=self.batch.targets.device).expand(end - begin, U1)

    def computed(self, frames: Frames) -> torch.Tensor | None:
        """Return the gradient of the logits of these frames that the loss computed, divided by the
        utterance's factor; None if the loss computed none."""
        gradient = self.gradients["given"]
        if gradient is None:
            return None
        n, begin, end = frames.n, frames.begin, frames.end
        return self.layout.cells_of(gradient, self.batch.shapes, n, begin, end) / self.factors[n]


class StepCells(Cells):
    """The cells of a step in scope "step", whose logits the joiner makes.

    Autograd makes the right gradients of outputs and weights from those of the logits.  They are
    sums over cells, so they are complete after the last utterance.  Several steps may share the
    leaves of the weights.
    """

    @property
    def width(self):
        # The weight is (V, D): a cell has D elements before the output layer, and V after it.
        return max(self.leaves["output.weight"].shape)

    def logits(self, n, begin, end):
        with torch.enable_grad():
            decoder_out = self.leaves["decoder_out"][n]
            if self.layout.approximate:  # each frame has positions u of its own
                decoder_out = decoder_out[self.u_of(n, begin, end)]
            else:
                _, U = self.batch.shapes[n]
                decoder_out = decoder_out[: U + 1]
            joined = torch.tanh(self.leaves["encoder_out"][n, begin:end, None] + decoder_out)
            return torch.nn.functional.linear(
                joined, self.leaves["output.weight"], self.leaves["output.bias"]
            )

    def backward(self, frames: Frames, gradient: torch.Tensor) -> None:
        """Add what `frames` contribute to the right gradients of the leaves (`grad`).

        frames: those that were yielded last; gradient: the right gradient of their logits, for a
        factor of 1."""
        self.last.backward(gradient * self.factors[frames.n])


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude: 0 for no values, infinite if one is NaN."""
    magnitude = values.abs().max().item() if values.numel() else 0.0
    return math.inf if math.isnan(magnitude) else magnitude
