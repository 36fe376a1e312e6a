"""torch.compile of the parts of a step that are plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from common.core.errors import NotRunnable


def check() -> None:
    """Raises NotRunnable where this torch has no torch.compile."""
    if not hasattr(torch, "compile"):
        raise NotRunnable("unsupported", f"torch {torch.__version__} has no torch.compile; it needs 2.0 or newer")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile, for tensors of any size.  Raises NotRunnable."""
    check()
    return torch.compile(function, dynamic=True)
