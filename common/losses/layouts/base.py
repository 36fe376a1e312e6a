"""Define the base of layouts: make the input of a loss from the joiner and a batch, and the right answer for it.

A layout is bound to one adapter.  It knows nothing of the lattice (the adapter's `topology`) and does not set the
number of the joiner's outputs (the adapter's `outputs`).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Optional, Sequence, Tuple, Type, Union

import torch

from common.core.settings import SCOPES
from common.losses import inputs, oracle
from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts.cells import Cells, StepCells
from common.measure.stages import stage

Shapes = Sequence[Tuple[int, int]]
#: An index into a tensor: integers, slices and "...".
Region = Tuple[Any, ...]


class Layout:
    """A kind of input, bound to one adapter."""

    scopes: Tuple[str, ...] = SCOPES  # the scopes that such a loss has
    cells: Type[Cells] = Cells  # how scope "loss" is judged at size
    step_cells: Type[StepCells] = StepCells  # how scope "step" is judged at size
    approximate = False  # whether the loss is approximate by design, with a `gap` to the exact loss
    tensors: Tuple[str, ...] = ("logits",)  # names of the first arguments of the package's function

    def __init__(self, adapter: Adapter):
        self.adapter = adapter

    # -- what the loss takes -----------------------------------------------------------------------------------------

    def model(self, device: torch.device, dtype: torch.dtype) -> Joiner:
        """Return the joiner under the adapter's settings, with `projections`."""
        settings = self.adapter.settings
        output = inputs.output_layer(settings, self.adapter.outputs(settings.vocab_size), device, dtype)
        return Joiner(output, self.projections(device, dtype), settings.compile)

    def projections(self, device: torch.device, dtype: torch.dtype) -> Dict[str, torch.nn.Module]:
        """Return the layers beside the joiner's that the step trains, by name."""
        return {}

    def given(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the one tensor that `loss` takes, whose gradient is the end of scope "loss"."""
        raise NotImplementedError

    def autocast(self, batch: Batch) -> ContextManager[Any]:
        """Return the context manager for the joiner: torch.autocast with --amp, else one that does nothing."""
        amp = self.adapter.settings.amp
        if amp is None:
            return nullcontext()
        return torch.autocast(batch.encoder_out.device.type, dtype=getattr(torch, amp))

    def fit(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, in float32 if autocast made them of a dtype that the loss does not take."""
        amp = self.adapter.settings.amp
        is_foreign = amp and scores.dtype == getattr(torch, amp) and amp not in self.adapter.dtypes
        return scores.float() if is_foreign else scores

    def taken(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return `given`, made under `autocast` and then passed through `fit`."""
        with self.autocast(batch):
            given = self.given(model, batch, prepared)
        return self.fit(given)

    def loss(self, given: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the adapter's loss of `given`.  Timed."""
        return self.adapter.loss(given, prepared)

    def step(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the summed loss to differentiate, from encoder and decoder outputs.  Timed."""
        with stage("joiner"):
            given = self.taken(model, batch, prepared)
        with stage("loss"):
            return self.loss(given, batch, prepared)

    # -- the right answer --------------------------------------------------------------------------------------------

    def right(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the (N,) float64 losses of padded logits on the adapter's lattice; differentiable."""
        return oracle.losses(logits, batch.targets, batch.shapes, self.adapter.blank, self.adapter.lattice)

    def padded(self, given: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the logits (N, T, U+1, V) that `given` stands for; differentiable."""
        return given

    def expected(self, given: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the right (N,) losses of `given`, which is float64 on the CPU; differentiable."""
        return self.right(self.padded(given, batch), batch)

    def expected_step(self, model: Joiner, batch: Batch) -> torch.Tensor:
        """Return the (N,) losses whose sum `step` must be, for a float64 model and batch on the CPU; differentiable."""
        return self.right(model.logits(batch), batch) + self.trained_beside(model, batch)

    def trained_beside(self, model: Joiner, batch: Batch) -> Union[float, torch.Tensor]:
        """Return the (N,) float64 losses that the step adds to those of the lattice, 0.0 for none; differentiable."""
        return 0.0

    def score_up_to(self, largest: float, model: Joiner, batch: Batch) -> None:
        """Scale the weights so that the largest logit is the magnitude of `largest`; if negative, none is above it."""
        with torch.no_grad():
            factor = abs(largest) / model.logits(batch).max()
            model.output.weight.mul_(factor)
            model.output.bias.mul_(factor)
            model.output.bias.add_(min(2 * largest, 0.0))

    def gap(self, model: Joiner, batch: Batch, shared: Optional[Path] = None) -> Optional[float]:
        """Return (loss - exact loss) / exact loss of an approximate loss at the run's settings.

        None if the exact loss is almost 0.  shared: folder where exact losses are kept, see fingerprint.remembered.
        """
        raise NotImplementedError

    # -- what the conformance cases ask ------------------------------------------------------------------------------

    def size(self, N: int, T: int, U: int, V: int) -> Tuple[int, ...]:
        """Return the size of the tensor `logits` of made-up numbers that a question is about: rows of V outputs."""
        return N, T, U + 1, V

    def padding(self, shapes: Shapes, T: int, U: int) -> Optional[List[Region]]:
        """Return the regions of that tensor that belong to no utterance; None if the layout has no padding."""
        regions: List[Region] = []
        for n, (frames, targets) in enumerate(shapes):
            regions += [(n, slice(frames, None))] if frames < T else []
            regions += [(n, slice(None), slice(targets + 1, None))] if targets < U else []
        return regions

    def of_symbol(self, symbol: int) -> Region:
        """Return the region of that tensor that must be -inf to mask a symbol."""
        return ..., symbol

    def take(self, logits: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return `given`, the input of `loss`, made from that tensor; may add to `prepared`."""
        return logits
