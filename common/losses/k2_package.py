"""What the adapters of k2 and of fast_rnnt, from which k2's functions were made, share.  No torch at import."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING

from common.losses.adapter import Adapter
from common.losses.additive import Additive
from common.setup import extensions

if TYPE_CHECKING:
    import torch

    from common.losses.inputs import Batch


def boundary(batch: Batch) -> torch.Tensor:
    """(N, 4) int64 on the batch's device: first symbol, first frame, U, T of each utterance."""
    import torch

    begin = torch.zeros_like(batch.T_lengths)
    return torch.stack([begin, begin, batch.U_lengths, batch.T_lengths], dim=1).long()


class K2Package(Adapter):
    """Where k2 comes from and its version, which it says in its distribution, not in __version__."""

    hint = "run `make setup` (k2 1.23.4 for Python 3.11), or take the wheel for your torch from https://k2-fsa.github.io/k2"
    dtypes = ("float32", "float64")

    def version(self):
        try:
            return metadata.version("k2")
        except metadata.PackageNotFoundError:
            return str(getattr(self.module, "__dev_version__", "unknown"))


class FastRnntPackage(Adapter):
    """fast_rnnt: the installed one, or built once from its own source package.  Refuses an utterance without a
    target."""

    hint = "pip install fast_rnnt, or run `make setup`, which builds it"
    dtypes = ("float32", "float64")
    fewest_targets = 1

    def import_module(self, device):
        return extensions.load(self.package, device)


class FullLoss(Adapter):
    """rnnt_loss of either package: padded logits (N, T, U+1, V), unpruned."""

    variants = {"modified": {"topology": "modified"}, "constrained": {"topology": "constrained"}}

    def prepare(self, batch):
        return SimpleNamespace(symbols=batch.targets.long(), boundary=boundary(batch))

    def function(self):
        return self.module.rnnt_loss

    def options(self):
        return {"termination_symbol": self.blank, "rnnt_type": self.topology, "reduction": self.reduction}


class SimpleLoss(Additive):
    """rnnt_loss_simple of either package: am (N, T, V) and lm (N, U+1, V), not normalised."""

    def prepare(self, batch):
        return SimpleNamespace(symbols=batch.targets.long(), boundary=boundary(batch))

    def function(self):
        return self.module.rnnt_loss_simple

    def options(self):
        return {"termination_symbol": self.blank, "rnnt_type": self.topology, "reduction": self.reduction}

    def scores_loss(self, am, lm, prepared):
        return self.function()(lm, am, **vars(prepared), **self.options())
