"""Losses of the additive joiner: the logits of a cell are am[t] + lm[u], scores of encoder and decoder, with no tanh.

Such a loss never holds logits (N, T, U+1, V): the normaliser of every cell comes from one matrix product.  Another
model than the others train, so it is never ranked with them.  Its step: both outputs are projected to V, and the loss
of the scores is differentiated; the joiner is not used.  No torch at import.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Tuple

from common.errors import NotRunnable
from common.losses.adapter import Adapter
from common.losses.stages import stage

if TYPE_CHECKING:
    import torch


class Additive(Adapter):
    """`loss` takes one tensor (N T + N (U+1), V): the rows of am, then those of lm, so that both are contiguous."""

    layout = "additive"

    def weights(self, device, dtype):
        from common.losses import inputs

        am, lm = inputs.simple_projections(self.settings, device, dtype)
        return {"am_projection": am, "lm_projection": lm}

    def scores_loss(self, am: torch.Tensor, lm: torch.Tensor, prepared: SimpleNamespace) -> torch.Tensor:
        """The reduced loss of am (N, T, V) and lm (N, U+1, V)."""
        return self.function()(am, lm, **vars(prepared), **self.options())

    def scores(self, model, batch) -> Tuple[torch.Tensor, torch.Tensor]:
        """am and lm of the step."""
        with stage("projections"):
            return model.extra["am_projection"](batch.encoder_out), model.extra["lm_projection"](batch.decoder_out)

    def logits(self, model, batch, prepared):
        import torch

        return torch.cat([part.flatten(0, 1) for part in self.scores(model, batch)])

    def loss(self, logits, prepared):
        N, U = next(iter(vars(prepared).values())).shape  # of the targets
        return self.scores_loss(*parts(logits, N, U), prepared)

    def step(self, model, batch, prepared):
        am, lm = self.scores(model, batch)
        with stage("loss"):
            return self.scores_loss(am, lm, prepared)

    def take(self, logits, batch, prepared):
        raise NotRunnable("unsupported", f"{self.name} takes no logits, only am and lm whose sums they are")

    def expected(self, given, batch):
        return self.losses(*parts(given, *batch.targets.shape), batch)

    def expected_step(self, model, batch):
        return self.losses(*self.scores(model, batch), batch).sum()

    def losses(self, am, lm, batch) -> torch.Tensor:
        """(N,) of the reference."""
        from common.losses import reference

        logits = am.unsqueeze(2) + lm.unsqueeze(1)
        return reference.losses(logits, batch.targets, batch.shapes, self.blank, self.topology)


def parts(scores: torch.Tensor, N: int, U: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """am (N, T, V) and lm (N, U+1, V) as views of what `loss` takes."""
    am, lm = scores.split([len(scores) - N * (U + 1), N * (U + 1)])
    return am.view(N, -1, scores.size(1)), lm.view(N, U + 1, scores.size(1))
