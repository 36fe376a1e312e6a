"""The pruned transducer loss (Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022) as two steps.

Recipe "icefall", the default: what icefall trains (egs/librispeech/ASR/pruned_transducer_stateless2): encoder and
decoder outputs are projected to V, the smoothed simple loss with lm scale 0.25 and am scale 0 gives ranges and a loss
of its own, and the sum 0.5 x simple + pruned is differentiated.  Recipe "benchmark-2022": the older suite's lighter
step: no projections (the first V of the D dimensions count as scores), and only the pruned loss is differentiated.

Works with any package that has k2's functions.  No torch at import.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Optional

from common.errors import UserError
from common.losses import k2_package
from common.losses.adapter import Adapter
from common.losses.options import described
from common.losses.stages import stage

if TYPE_CHECKING:
    import torch

SIMPLE_LOSS_SCALE = 0.5
LM_ONLY_SCALE = 0.25
AM_ONLY_SCALE = 0.0
#: Nats; of less, a difference is rounding.
SMALLEST_LOSS = 1e-6


class Pruned(Adapter):
    """`prune_range`: symbols kept per frame; with all U+1 of them the pruned loss is the exact one."""

    layout = "pruned"

    def __init__(self, settings, variant=""):
        super().__init__(settings, variant)
        self.prune_range = settings.prune_range
        if settings.pruned_recipe == "benchmark-2022" and settings.encoder_dim < settings.vocab_size:
            raise UserError(
                f"--pruned-recipe benchmark-2022 takes encoder outputs for scores and needs --encoder-dim of at least "
                f"--vocab-size, not {settings.encoder_dim} under {settings.vocab_size}"
            )

    def widened(self, U):
        wide = copy.copy(self)
        wide.prune_range = U + 1
        return wide

    def weights(self, device, dtype):
        from common.losses import inputs

        if self.settings.pruned_recipe == "benchmark-2022":
            return {}
        am, lm = inputs.simple_projections(self.settings, device, dtype)
        return {"simple_am_projection": am, "simple_lm_projection": lm}

    def prepare(self, batch):
        return SimpleNamespace(symbols=batch.targets.long(), boundary=k2_package.boundary(batch))

    def projections(self, model, batch):
        """Scores of the simple joiner: am (N, T, V), lm (N, U+1, V)."""
        if not model.extra:
            return batch.encoder_out, batch.decoder_out
        with stage("projections"):
            return model.extra["simple_am_projection"](batch.encoder_out), model.extra["simple_lm_projection"](
                batch.decoder_out
            )

    def simple_options(self):
        return {
            "termination_symbol": self.blank,
            "lm_only_scale": LM_ONLY_SCALE,
            "am_only_scale": AM_ONLY_SCALE,
            "reduction": "sum",
            "return_grad": True,
        }

    def simple_loss(self, am, lm, prepared):
        """(summed simple loss, gradients of its arcs)."""
        with stage("simple loss"):
            return self.module.rnnt_loss_smoothed(
                lm=lm,
                am=am,
                symbols=prepared.symbols,
                boundary=prepared.boundary,
                **self.simple_options(),
            )

    def pruned_logits(self, model, batch, arc_gradients, prepared):
        """Logits (N, T, S, V) of the `prune_range` symbols that matter at each frame, whose indices go to
        `prepared`."""
        with stage("prune ranges"):
            px_grad, py_grad = arc_gradients
            prepared.ranges = self.module.get_rnnt_prune_ranges(
                px_grad=px_grad, py_grad=py_grad, boundary=prepared.boundary, s_range=self.prune_range
            )
        with stage("pruning"):
            am, lm = self.module.do_rnnt_pruning(am=batch.encoder_out, lm=batch.decoder_out, ranges=prepared.ranges)
        with stage("joiner"):
            return model(am + lm)

    def logits(self, model, batch, prepared):
        _, arc_gradients = self.simple_loss(*self.projections(model, batch), prepared)
        return self.pruned_logits(model, batch, arc_gradients, prepared)

    def take(self, logits, batch, prepared):
        """All of U in the range of every frame, where the pruned loss is the exact one."""
        import torch

        N, T, U1, _ = logits.shape
        prepared.ranges = torch.arange(U1, device=logits.device).expand(N, T, U1)
        return logits

    def function(self):
        return self.module.rnnt_loss_pruned

    def options(self):
        return {"termination_symbol": self.blank, "rnnt_type": self.topology, "reduction": self.reduction}

    def described_options(self):
        smoothed = self.module.rnnt_loss_smoothed
        simple = described(smoothed, self.simple_options(), prefix="rnnt_loss_smoothed.")
        return {**super().described_options(), "s_range": {"ours": self.prune_range, "default": "-"}, **simple}

    def step(self, model, batch, prepared):
        simple_loss, arc_gradients = self.simple_loss(*self.projections(model, batch), prepared)
        logits = self.pruned_logits(model, batch, arc_gradients, prepared)
        with stage("pruned loss"):
            pruned_loss = self.loss(logits, prepared)
        if self.settings.pruned_recipe == "benchmark-2022":
            return pruned_loss
        return SIMPLE_LOSS_SCALE * simple_loss + pruned_loss

    def expected_step(self, model, batch):
        from common.losses import reference

        exact = super().expected_step(model, batch)
        if self.settings.pruned_recipe == "benchmark-2022":
            return exact
        am, lm = self.projections(model, batch)
        joint = (am.unsqueeze(2) + lm.unsqueeze(1)).log_softmax(-1)
        smoothed = (1 - LM_ONLY_SCALE - AM_ONLY_SCALE) * joint + LM_ONLY_SCALE * lm.log_softmax(-1).unsqueeze(1)
        return SIMPLE_LOSS_SCALE * reference.arc_losses(smoothed, batch.targets, batch.shapes).sum() + exact


def approximation_gap(adapter: Pruned, model: torch.nn.Module, batch) -> Optional[float]:
    """(pruned loss at the run's range - exact loss) / exact loss for one batch: 0 where pruning loses nothing, None
    where the exact loss is nothing, too."""
    import torch

    from common.losses import reference

    with torch.no_grad():
        prepared = adapter.prepare(batch)
        pruned_loss = float(adapter.loss(adapter.logits(model, batch, prepared), prepared))
        exact = float(reference.losses(model.logits(batch, "padded"), batch.targets, batch.shapes).sum())
    return (pruned_loss - exact) / exact if exact > SMALLEST_LOSS else None
