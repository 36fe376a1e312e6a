"""Define the layout of the pruned loss, which takes the logits of some symbols per frame only.

Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022.  Recipe "icefall", the default, is what
icefall trains (egs/librispeech/ASR/pruned_transducer_stateless2).  Encoder and decoder outputs are projected to V.  The
smoothed simple loss of these scores gives the ranges, and 0.5 x simple + pruned loss is differentiated.  Recipe
"benchmark-2022" is the lighter step of the older suite: without projections (the first V of the D dimensions are the
scores), and only the pruned loss is differentiated.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch

from common.losses import inputs, oracle
from common.losses.fingerprint import remembered
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts.base import Layout
from common.losses.layouts.cells import PrunedCells, PrunedStepCells
from common.measure.stages import stage

SIMPLE_LOSS_SCALE = 0.5
#: Nats; a difference between smaller losses is rounding.
SMALLEST_LOSS = 1e-6


class Pruned(Layout):
    """The layout of pruned logits (N, T, S, V) of the S symbols in `prepared.ranges` (N, T, S).

    The adapter is a benchmark_k2_pruned.K2Pruned, or has its methods.
    """

    approximate = True
    cells = PrunedCells
    step_cells = PrunedStepCells
    adapter: Any

    @property
    def trains_simple_loss(self) -> bool:
        """Return whether the simple loss is part of the loss that is differentiated."""
        return self.adapter.settings.pruned_recipe != "benchmark-2022"

    def projections(self, device, dtype):
        return inputs.simple_projections(self.adapter.settings, device, dtype) if self.trains_simple_loss else {}

    def scores(self, model: Joiner, batch: Batch) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the scores am (N, T, V) and lm (N, U+1, V) of the simple loss."""
        if not self.trains_simple_loss:
            return batch.encoder_out, batch.decoder_out
        with stage("projections"):
            return model.extra["am"](batch.encoder_out), model.extra["lm"](batch.decoder_out)

    def both(self, model: Joiner, batch: Batch, prepared: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return (summed simple loss, pruned logits); set `prepared.ranges` to the ranges that it gives."""
        with self.autocast(batch):
            am, lm = map(self.fit, self.scores(model, batch))
        with stage("simple loss"):
            simple_loss, arc_gradients = self.adapter.simple_loss(am, lm, prepared)
        with stage("prune ranges"):
            prepared.ranges = self.adapter.ranges(arc_gradients, prepared)
        with stage("pruning"):
            encoder_out, decoder_out = self.adapter.pruned(batch.encoder_out, batch.decoder_out, prepared.ranges)
        with stage("joiner"), self.autocast(batch):
            return simple_loss, self.fit(model(encoder_out + decoder_out))

    def given(self, model, batch, prepared):
        return self.both(model, batch, prepared)[1]

    def taken(self, model, batch, prepared):
        return self.given(model, batch, prepared)  # the simple loss is within, and not under autocast

    def step(self, model, batch, prepared):
        simple_loss, logits = self.both(model, batch, prepared)
        with stage("pruned loss"):
            pruned_loss = self.loss(logits, batch, prepared)
        return SIMPLE_LOSS_SCALE * simple_loss + pruned_loss if self.trains_simple_loss else pruned_loss

    def trained_beside(self, model, batch):
        if not self.trains_simple_loss:
            return 0.0
        am, lm = self.scores(model, batch)
        joint, lm_alone = (am.unsqueeze(2) + lm.unsqueeze(1)).log_softmax(-1), lm.log_softmax(-1).unsqueeze(1)
        lm_scale = self.adapter.lm_only_scale
        smoothed = (1 - lm_scale) * joint + lm_scale * lm_alone
        return SIMPLE_LOSS_SCALE * oracle.arc_losses(smoothed, batch.targets, batch.shapes)

    def take(self, logits, batch, prepared):
        """Return the logits, with all of U in the range of every frame, so that the pruned loss is exact."""
        N, T, U1, _ = logits.shape
        prepared.ranges = torch.arange(U1, device=logits.device).expand(N, T, U1)
        return logits

    def gap(self, model, batch, shared=None):
        with torch.no_grad():
            prepared = self.adapter.prepare(batch)
            pruned_loss = float(self.loss(self.given(model, batch, prepared), batch, prepared))
            tensors = {"encoder_out": batch.encoder_out, "decoder_out": batch.decoder_out, "targets": batch.targets}
            tensors.update(model.output.named_parameters())
            question = "exact loss", self.adapter.lattice, self.adapter.blank, batch.shapes
            (exact,) = remembered(
                shared, question, tensors, lambda: [float(self.right(model.logits(batch), batch).sum())]
            )
        return (pruned_loss - exact) / exact if exact > SMALLEST_LOSS else None
