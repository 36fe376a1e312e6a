"""Compile the parts of a step that are plain PyTorch by torch.compile."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from common.core.errors import NotRunnable


def check() -> None:
    """Raise NotRunnable if this torch has no torch.compile."""
    if not hasattr(torch, "compile"):
        raise NotRunnable("unsupported", f"torch {torch.__version__} has no torch.compile; it needs 2.0 or newer")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled for tensors of any size; raise NotRunnable if this torch has no torch.compile."""
    check()
    return torch.compile(function, dynamic=True)
