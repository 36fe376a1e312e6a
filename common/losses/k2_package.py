"""What the adapters of k2 and of fast_rnnt, from which k2's functions were made, share.  No torch at import."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

from common.core.errors import UserError
from common.losses.adapter import Adapter, described


class K2Package(Adapter):
    """k2.  Its version is that of its distribution; it has no __version__."""

    hint = "run `make setup` (k2 1.23.4 for Python 3.11), or take the wheel for your torch from https://k2-fsa.github.io/k2"
    dtypes = ("float32", "float64")

    def version(self):
        try:
            return metadata.version("k2")
        except metadata.PackageNotFoundError:
            return str(getattr(self.module, "__dev_version__", "unknown"))


class FastRnntPackage(Adapter):
    """fast_rnnt, which refuses an utterance without a target."""

    hint = "pip install fast_rnnt, or run `make setup`, which builds it"
    dtypes = ("float32", "float64")
    fewest_targets = 1


class K2Loss(Adapter):
    """A loss of either package.  `boundary` (N, 4) int64: first symbol, first frame, U, T of each utterance."""

    def prepare(self, batch):
        import torch

        begin = torch.zeros_like(batch.T_lengths)
        boundary = torch.stack([begin, begin, batch.U_lengths, batch.T_lengths], dim=1).long()
        return SimpleNamespace(symbols=batch.targets.long(), boundary=boundary)

    def options(self):
        return {"termination_symbol": self.blank, "rnnt_type": self.topology, "reduction": self.reduction}


class FullLoss(K2Loss):
    """rnnt_loss: padded logits (N, T, U+1, V), unpruned."""

    variants = {"modified": {"topology": "modified"}, "constrained": {"topology": "constrained"}}

    def function(self):
        return self.module.rnnt_loss


class SimpleLoss(K2Loss):
    """rnnt_loss_simple: am (N, T, V) and lm (N, U+1, V), not normalised."""

    layout = "additive"
    largest_score = 20.0  # its normaliser is a product of exponentials of am and of lm, which underflows
    named = True  # lm comes first

    def function(self):
        return self.module.rnnt_loss_simple


class PrunedLoss(K2Loss):
    """rnnt_loss_pruned, and the functions that find and keep the `prune_range` symbols of each frame: see
    common.losses.layouts.pruned."""

    layout = "pruned"
    lm_only_scale = 0.25

    def __init__(self, settings, variant=""):
        super().__init__(settings, variant)
        if settings.pruned_recipe == "benchmark-2022" and settings.encoder_dim < settings.vocab_size:
            raise UserError(
                f"--pruned-recipe benchmark-2022 takes encoder outputs for scores and needs --encoder-dim of at least "
                f"--vocab-size, not {settings.encoder_dim} under {settings.vocab_size}"
            )

    def function(self):
        return self.module.rnnt_loss_pruned

    def simple_options(self):
        return {
            "termination_symbol": self.blank,
            "lm_only_scale": self.lm_only_scale,
            "am_only_scale": 0.0,
            "reduction": "sum",
            "return_grad": True,
        }

    def described_options(self):
        simple = described(self.module.rnnt_loss_smoothed, self.simple_options(), prefix="rnnt_loss_smoothed.")
        return {**super().described_options(), "s_range": {"ours": self.prune_range, "default": "-"}, **simple}

    def simple_loss(self, am, lm, prepared):
        """(the summed loss of the smoothed scores am (N, T, V) and lm (N, U+1, V), gradients of its arcs)."""
        return self.module.rnnt_loss_smoothed(
            lm=lm, am=am, symbols=prepared.symbols, boundary=prepared.boundary, **self.simple_options()
        )

    def ranges(self, arc_gradients, prepared):
        """(N, T, S): the S symbols that matter at each frame."""
        px_grad, py_grad = arc_gradients
        return self.module.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=prepared.boundary, s_range=self.prune_range
        )

    def pruned(self, encoder_out, decoder_out, ranges):
        """Both as (N, T, S, D), for the cells in `ranges`."""
        return self.module.do_rnnt_pruning(am=encoder_out, lm=decoder_out, ranges=ranges)
