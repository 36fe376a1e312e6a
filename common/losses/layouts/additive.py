"""Define the layout of an additive joiner: logits of a cell are am[t] + lm[u], scores of encoder and decoder.

Such a loss never holds logits (N, T, U+1, V): one matrix product gives the normaliser of every cell.  It trains another
model than the other losses, so it is never ranked with them.  Its step projects both outputs to V and differentiates
the loss of these scores; the joiner is not used.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch

from common.losses import inputs
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts.base import scale_output
from common.losses.layouts.cells import Cells, StepCells
from common.losses.layouts.rows import Rows, split
from common.measure.stages import stage


def project(model: Joiner, batch: Batch) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the scores am (N, T, V) and lm (N, U+1, V)."""
    with stage("projections"):
        return model.extra["am"](batch.encoder_out), model.extra["lm"](batch.decoder_out)


def sums(am: torch.Tensor, lm: torch.Tensor) -> torch.Tensor:
    """Return the logits (N, T, U+1, V) of am and lm."""
    return am.unsqueeze(2) + lm.unsqueeze(1)


class AdditiveCells(Cells):
    """Cells of am and lm.  The gradient of lm is a sum over frames, so it is compared after the last frame."""

    by_cell = False

    def __init__(self, batch: Batch, *others: Any):
        super().__init__(batch, *others)
        self.am, self.lm = split(self.given, *batch.targets.shape)[:2]
        self.am_gradient, self.lm_gradient = split(self.gradient, *batch.targets.shape)[:2]
        self.lm_right = torch.zeros_like(self.lm, dtype=torch.float64)

    def logits(self, n, begin, end):
        _, U = self.batch.shapes[n]
        return self.am[n, begin:end, None].double() + self.lm[n, None, : U + 1].double()

    def compare(self, n, begin, end, right):
        self.lm_right[n, : right.size(1)] += right.sum(0)
        yield "am", self.am_gradient[n, begin:end], right.sum(1)

    def compare_rest(self, n):
        yield "lm", self.lm_gradient[n], self.lm_right[n]

    def padding(self, n):
        yield "am", self.am_gradient[n, self.batch.shapes[n][0] :]


class AdditiveStepCells(StepCells):
    """Cells of a step that projects encoder and decoder outputs."""

    def scores(self, n, begin, end):
        am, lm = (
            torch.nn.functional.linear(values, self.leaves[f"extra.{name}.weight"], self.leaves[f"extra.{name}.bias"])
            for name, values in (
                ("am", self.leaves["encoder_out"][n, begin:end, None]),
                ("lm", self.decoder_out(n, begin, end)),
            )
        )
        return am + lm


class Additive(Rows):
    """The layout whose `given` is (N T + N (U+1), V): the rows of am, then those of lm."""

    tensors = ("am", "lm")
    cells = AdditiveCells
    step_cells = AdditiveStepCells
    never_large = "it takes am and lm, which are never that large"

    def projections(self, device, dtype):
        return inputs.simple_projections(self.adapter.settings, device, dtype)

    def given(self, model, batch, prepared):
        return torch.cat([scores.flatten(0, 1) for scores in project(model, batch)])

    def step(self, model, batch, prepared):
        with self.autocast(batch):
            am, lm = map(self.fit, project(model, batch))
        with stage("loss"):
            return self.adapter.loss_of({"am": am, "lm": lm}, prepared)

    def padded(self, given, batch):
        return sums(**self.parts(given, batch))

    def expected_step(self, model, batch):
        return self.right(sums(*project(model, batch)), batch)

    def score_up_to(self, largest, model, batch):
        for name, scores in zip(("am", "lm"), project(model, batch)):
            scale_output(model.extra[name], scores, largest / 2)
