"""What the k2 adapters share: how to get k2, and the boundary tensor it takes.  No torch at import."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from common.losses.inputs import Batch

HINT = "run `make setup` (k2 1.23.4 for Python 3.11), or take the wheel for your torch from https://k2-fsa.github.io/k2"


def version(module: ModuleType) -> str:
    """k2 says its version in __dev_version__ and its distribution, not in __version__."""
    try:
        return metadata.version("k2")
    except metadata.PackageNotFoundError:
        return str(getattr(module, "__dev_version__", "unknown"))


def boundary(batch: Batch) -> torch.Tensor:
    """(N, 4) int64 on the batch's device: first symbol, first frame, U, T of each utterance."""
    import torch

    begin = torch.zeros_like(batch.T_lengths)
    return torch.stack([begin, begin, batch.U_lengths, batch.T_lengths], dim=1).long()
