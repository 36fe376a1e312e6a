"""List the layouts by name."""

from __future__ import annotations

from typing import Dict, Type

from common.losses.adapter import Adapter
from common.losses.layouts.base import Layout
from common.losses.layouts.joint import Joint
from common.losses.layouts.logits import Packed, Padded
from common.losses.layouts.pruned import Pruned

#: By the names that adapters use; common.core.implementations.LAYOUTS has the kind of loss of each.
LAYOUTS: Dict[str, Type[Layout]] = {
    "padded": Padded,
    "packed": Packed,
    "joint": Joint,
    "pruned": Pruned,
}


def of(adapter: Adapter) -> Layout:
    """Return the layout of an adapter, bound to it."""
    return LAYOUTS[adapter.layout](adapter)
