"""Share code between the adapters of k2 and of fast_rnnt, from which k2's losses were made.  Does not import torch."""

from __future__ import annotations

import inspect
from importlib import metadata
from types import SimpleNamespace

from common.core.errors import NotRunnable, UserError
from common.core.implementations import ONE_SYMBOL
from common.losses.adapter import HAT, Adapter, Option, described


class K2Package(Adapter):
    """The package k2, which has no __version__: its version is that of its distribution."""

    hint = "run `make setup` (k2 1.23.4 for Python 3.11), or take the wheel for your torch from https://k2-fsa.github.io/k2"
    dtypes = ("float32", "float64")

    def version(self):
        try:
            return metadata.version("k2")
        except metadata.PackageNotFoundError:
            return str(getattr(self.module, "__dev_version__", "unknown"))


class FastRnntPackage(Adapter):
    """The package fast_rnnt, which refuses an utterance without a target."""

    hint = "pip install fast_rnnt, or run `make setup`, which builds it"
    dtypes = ("float32", "float64")
    fewest_targets = 1


class K2Loss(Adapter):
    """A loss of either package; its `boundary` (N, 4) int64 is first symbol, first frame, U, T of each utterance."""

    def prepare(self, batch):
        import torch

        begin = torch.zeros_like(batch.T_lengths)
        boundary = torch.stack([begin, begin, batch.U_lengths, batch.T_lengths], dim=1).long()
        return SimpleNamespace(symbols=batch.targets.long(), boundary=boundary)

    def options(self):
        rnnt_type = self.topology if self.topology in ONE_SYMBOL else "regular"
        options = {"termination_symbol": self.blank, "rnnt_type": rnnt_type, "reduction": self.reduction}
        return {**options, "delay_penalty": self.lattice.penalty} if self.topology == "delay-penalty" else options


class FullLoss(K2Loss):
    """The exact loss, rnnt_loss, of padded logits (N, T, U+1, V)."""

    variants = {"hat": HAT, **{name: {"topology": name} for name in ("modified", "constrained", "delay-penalty")}}

    def function(self):
        return self.module.rnnt_loss


class SimpleLoss(K2Loss):
    """The loss of an additive joiner, rnnt_loss_simple, of unnormalised am (N, T, V) and lm (N, U+1, V)."""

    layout = "additive"
    largest_score = 20.0  # its normaliser is a product of exponentials of am and of lm, which underflows
    named = True  # lm comes first

    def function(self):
        return self.module.rnnt_loss_simple


class PrunedLoss(K2Loss):
    """The pruned loss, rnnt_loss_pruned, with the functions that choose the `prune_range` symbols of each frame.

    See common.losses.layouts.pruned.
    """

    layout = "pruned"
    lm_only_scale = 0.25

    def __init__(self, settings, variant=""):
        super().__init__(settings, variant)
        if settings.pruned_recipe == "benchmark-2022" and settings.encoder_dim < settings.vocab_size:
            raise UserError(
                f"--pruned-recipe benchmark-2022 uses encoder outputs as scores: --encoder-dim "
                f"({settings.encoder_dim}) must be at least --vocab-size ({settings.vocab_size})"
            )

    def load(self, device):
        super().load(device)
        if self.topology == "hat" and "use_hat_loss" not in inspect.signature(self.function()).parameters:
            raise NotRunnable(
                "unsupported", f"{self.package} {self.version()} has no use_hat_loss; k2 1.24.4 or newer has it"
            )

    def function(self):
        return self.module.rnnt_loss_pruned

    def options(self):
        return {**super().options(), "use_hat_loss": True} if self.topology == "hat" else super().options()

    def simple_options(self):
        """Return the options of the simple loss that chooses the symbols."""
        return {
            "termination_symbol": self.blank,
            "lm_only_scale": self.lm_only_scale,
            "am_only_scale": 0.0,
            "reduction": "sum",
            "return_grad": True,
        }

    def described_options(self):
        simple = described(self.module.rnnt_loss_smoothed, self.simple_options(), prefix="rnnt_loss_smoothed.")
        return {**super().described_options(), "s_range": Option(self.prune_range, "-"), **simple}

    def simple_loss(self, am, lm, prepared):
        """Return (the summed loss of the smoothed scores am (N, T, V) and lm (N, U+1, V), gradients of its arcs)."""
        return self.module.rnnt_loss_smoothed(
            lm=lm, am=am, symbols=prepared.symbols, boundary=prepared.boundary, **self.simple_options()
        )

    def ranges(self, arc_gradients, prepared):
        """Return the ranges (N, T, S): the S symbols that matter at each frame."""
        px_grad, py_grad = arc_gradients
        return self.module.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=prepared.boundary, s_range=self.prune_range
        )

    def pruned(self, encoder_out, decoder_out, ranges):
        """Return encoder and decoder outputs of the cells in `ranges`, both (N, T, S, D)."""
        return self.module.do_rnnt_pruning(am=encoder_out, lm=decoder_out, ranges=ranges)
