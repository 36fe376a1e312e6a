"""Give access to the cells of a batch that is judged at size: some frames of an utterance at a time, in float64."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Tuple

import torch

from rnnt_bench.losses.inputs import Batch

#: (name of a leaf, the loss's gradient of a part of it, the right gradient of that part).
Compared = Tuple[str, Optional[torch.Tensor], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


class Cells:
    """The cells of padded logits in scope "loss"; subclasses are for other layouts and scopes.

    Made of the inputs, what the adapter made of them, the leaves of a rnnt_bench.losses.step.LossStep and the gradients
    that the loss computed, by the names of the leaves.  `width` is the number of elements of a cell, and `score` the
    largest magnitude of the logits seen so far.
    """

    by_cell = True  # whether `compare` yields the gradients of the logits of all cells
    shift, seed = 0.0, 0  # how far along `direction` the logits are moved, and the seed of that

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Tensors):
        self.batch, self.prepared, self.score = batch, prepared, 0.0
        self.given, self.gradient = leaves["given"].detach(), gradients["given"]
        self.width = self.given.size(-1)

    def of(self, tensor: torch.Tensor, n: int, begin: int, end: int) -> torch.Tensor:
        """Return frames [begin, end) of utterance n, of the leaf or its gradient: (frames, cells of a frame, V)."""
        return tensor[n, begin:end, : self.batch.shapes[n][1] + 1]

    def scores(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the logits (frames, cells of a frame, V) of these frames, float64; differentiable in a step."""
        return self.of(self.given, n, begin, end).double()

    def logits(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return `scores`, detached, and note the largest."""
        self.last = self.scores(n, begin, end)
        scores = self.last.detach()
        self.score = max(self.score, largest(scores))
        return scores + self.shift * self.direction(n, begin, end, scores) if self.shift else scores

    def direction(self, n: int, begin: int, end: int, logits: torch.Tensor) -> torch.Tensor:
        """Return a random direction of the logits of these frames, by utterance and frame, u and symbol."""
        sizes = self.batch.encoder_out.size(1), *logits.shape[1:]
        generator = torch.Generator().manual_seed(self.seed + n)
        of_t, of_u, of_v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        return (of_t[begin:end, None] * of_u).to(logits.device).unsqueeze(2) * of_v.to(logits.device)

    def symbols(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the u of each cell of these frames: (frames, cells of a frame)."""
        U1 = self.batch.shapes[n][1] + 1
        return torch.arange(U1, device=self.batch.targets.device).expand(end - begin, U1)

    def compare(self, n: int, begin: int, end: int, right: torch.Tensor) -> Iterator[Compared]:
        """Yield the gradients of these frames; `right` is that of the logits of their cells."""
        yield "given", self.of(self.gradient, n, begin, end), right

    def compare_rest(self, n: int) -> Iterator[Compared]:
        """Yield the gradients that are known once all frames of the utterance have been compared."""
        return iter(())

    def padding(self, n: int) -> Iterator[torch.Tensor]:
        """Yield the gradient of the input in the padding of the utterance, which must be 0."""
        T, U = self.batch.shapes[n]
        yield from (self.gradient[n, T:], self.gradient[n, :T, U + 1 :])


class PackedCells(Cells):
    def of(self, tensor, n, begin, end):
        shapes, row = self.batch.shapes, self.batch.shapes[n][1] + 1
        first = sum(T * (U + 1) for T, U in shapes[:n])
        return tensor[first + begin * row : first + end * row].view(end - begin, row, -1)

    def padding(self, n):
        return iter(())


class PrunedCells(Cells):
    """The cells of pruned logits (N, T, S, V)."""

    def of(self, tensor, n, begin, end):
        return tensor[n, begin:end]

    def symbols(self, n, begin, end):
        return self.prepared.ranges[n, begin:end].long()

    def padding(self, n):
        yield self.gradient[n, self.batch.shapes[n][0] :]


class StepCells(Cells):
    """The cells of a step, whose gradients of outputs and weights autograd makes from those of the logits, in float64.

    They are sums over cells, so they are compared after the last utterance, padding included.
    """

    by_cell = False

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Tensors):
        self.batch, self.prepared, self.gradients, self.score = batch, prepared, gradients, 0.0
        self.leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        self.width = max(self.leaves["output.weight"].shape)

    def decoder_out(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the decoder outputs of the cells of these frames: (frames or 1, cells of a frame, D)."""
        return self.leaves["decoder_out"][n, None, : self.batch.shapes[n][1] + 1]

    def scores(self, n, begin, end):
        with torch.enable_grad():
            joined = torch.tanh(self.leaves["encoder_out"][n, begin:end, None] + self.decoder_out(n, begin, end))
            return torch.nn.functional.linear(joined, self.leaves["output.weight"], self.leaves["output.bias"])

    def compare(self, n, begin, end, right):
        self.last.backward(right)
        return iter(())

    def compare_rest(self, n):
        if n == len(self.batch.shapes) - 1:
            for name, leaf in self.leaves.items():
                if leaf.grad is not None:  # a loss may not use all of the joiner
                    yield name, self.gradients[name], leaf.grad

    def padding(self, n):
        return iter(())


class PrunedStepCells(StepCells):
    """The cells of a pruned step; with a simple loss only the joiner's weights are compared, the others are of both."""

    def symbols(self, n, begin, end):
        return self.prepared.ranges[n, begin:end].long()

    def decoder_out(self, n, begin, end):
        return self.leaves["decoder_out"][n][self.symbols(n, begin, end)]

    def compare_rest(self, n):
        both = any(name.startswith("extra.") for name in self.leaves)
        return (each for each in super().compare_rest(n) if not both or each[0].startswith("output."))


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude: 0 for no values, infinite if one is NaN."""
    magnitude = values.abs().max().item() if values.numel() else 0.0
    return float("inf") if magnitude != magnitude else magnitude
