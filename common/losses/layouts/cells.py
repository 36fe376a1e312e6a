"""Give access to the cells of a batch that is judged at size: some frames of an utterance at a time, in float64."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Tuple

import torch

from common.losses.inputs import Batch

#: (name of a leaf, the loss's gradient of a part of it, the right gradient of that part).
Compared = Tuple[str, Optional[torch.Tensor], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


class Cells:
    """The cells of padded logits in scope "loss"; subclasses are for other layouts and scopes.

    Args:
        batch: the inputs.
        prepared: what the adapter made of them.
        leaves: those of a common.losses.step.LossStep.
        gradients: those that the loss computed, by the names of the leaves.

    Its attribute U is the number of targets of the padded batch, and width the elements of a cell.
    """

    by_cell = True  # whether `compare` yields the gradients of the logits of all cells

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Tensors):
        self.batch, self.U = batch, batch.targets.shape[1]
        self.given, self.gradient = leaves["given"].detach(), gradients["given"]
        self.width = self.given.size(-1)

    def of(self, tensor: torch.Tensor, n: int, begin: int, end: int) -> torch.Tensor:
        """Return frames [begin, end) of utterance n, of the leaf or its gradient: (frames, cells of a frame, V)."""
        return tensor[n, begin:end, : self.batch.shapes[n][1] + 1]

    def logits(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the logits (frames, cells of a frame, V) of these frames, float64."""
        return self.of(self.given, n, begin, end).double()

    def symbols(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the u of each cell of these frames: (frames, cells of a frame)."""
        _, U = self.batch.shapes[n]
        return torch.arange(U + 1, device=self.batch.targets.device).expand(end - begin, U + 1)

    def largest_score(self) -> float:
        """Return the largest magnitude of the input of the loss, or of the logits that `logits` returned so far."""
        return largest(self.given)

    def compare(self, n: int, begin: int, end: int, right: torch.Tensor) -> Iterator[Compared]:
        """Yield the gradients of these frames; `right` is that of the logits of their cells."""
        yield "given", self.of(self.gradient, n, begin, end), right

    def compare_rest(self, n: int) -> Iterator[Compared]:
        """Yield the gradients that are known once all frames of the utterance have been compared."""
        return iter(())

    def padding(self, n: int) -> Iterator[Tuple[str, torch.Tensor]]:
        """Yield (name of a leaf, its gradient in the padding of the utterance), which must be 0."""
        T, U = self.batch.shapes[n]
        yield "given", self.gradient[n, T:]
        yield "given", self.gradient[n, :T, U + 1 :]


class StepCells(Cells):
    """The cells of a step, whose gradients of outputs and weights autograd makes from those of the logits, in float64.

    These gradients are sums over cells, so they are compared after the last utterance, padding included.
    """

    by_cell = False

    def __init__(self, batch: Batch, prepared: Any, leaves: Tensors, gradients: Tensors):
        self.batch, self.prepared, self.U = batch, prepared, batch.targets.shape[1]
        self.leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        self.gradients = gradients
        self.width = max(self.leaves["output.weight"].shape)
        self.score = 0.0

    def decoder_out(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return the decoder outputs of the cells of these frames: (frames or 1, cells of a frame, D)."""
        return self.leaves["decoder_out"][n, None, : self.batch.shapes[n][1] + 1]

    def scores(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Return `logits`, differentiable."""
        joined = torch.tanh(self.leaves["encoder_out"][n, begin:end, None] + self.decoder_out(n, begin, end))
        return torch.nn.functional.linear(joined, self.leaves["output.weight"], self.leaves["output.bias"])

    def logits(self, n, begin, end):
        with torch.enable_grad():
            self.last = self.scores(n, begin, end)
        scores = self.last.detach()
        self.score = max(self.score, largest(scores))
        return scores

    def largest_score(self):
        return self.score

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


def largest(values: torch.Tensor) -> float:
    """Return the largest magnitude: 0 for no values, infinite if one is NaN."""
    magnitude = values.abs().max().item() if values.numel() else 0.0
    return float("inf") if magnitude != magnitude else magnitude
