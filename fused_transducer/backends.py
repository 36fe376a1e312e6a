"""Which code computes the loss: "native" (C++, CPU), "triton" (CUDA) or "torch" (PyTorch alone, any device).

A backend is a module with `rows`, `forward` and `backward` (see `plain`).  All give the same numbers.
"""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType
from typing import Optional

import torch

#: Backend -> its module, and whether it stores cells of utterances only (else of the padding too).
MODULES = {"native": "native", "triton": "triton_backend", "torch": "plain"}
PACKED = {"native": True, "triton": False, "torch": False}
#: Backends that keep logits for backward -> bytes into which those of all cells must fit, unless the call says more.
KEPT_BYTES = {"native": 2**21}


def module_of(backend: str) -> ModuleType:
    return importlib.import_module("fused_transducer." + MODULES[backend])


def check_name(backend: Optional[str]) -> None:
    """Raise ValueError for a backend that there is none of; None stands for the fastest."""
    if backend is not None and backend not in MODULES:
        raise ValueError(f"backend: there are {', '.join(MODULES)}, not {backend!r}")


@cache
def _warn_of_torch(reason: str) -> None:
    warnings.warn(f"fused_transducer: {reason}; the plain PyTorch code runs instead, slower", stacklevel=4)


@torch.compiler.assume_constant_result
def backend_of(device_type: str, dtype: torch.dtype, wanted: Optional[str] = None) -> str:
    """Return the backend for tensors of a device ("cpu", "cuda", ...) and dtype.

    wanted: one of MODULES, or None: that of the environment variable FUSED_TRANSDUCER_BACKEND, or else the fastest that
    is available.  Raises ValueError for one that is not.
    """
    wanted = wanted or os.environ.get("FUSED_TRANSDUCER_BACKEND") or None
    check_name(wanted)
    best = {"cpu": "native", "cuda": "triton"}.get(device_type, "torch")
    backend = wanted or best
    if backend == "torch":
        return backend
    reason = module_of(backend).unavailable(device_type, dtype)
    if not reason:
        return backend
    if wanted:
        raise ValueError(f"backend {wanted!r} cannot be used: {reason}")
    if dtype != torch.float64 or backend != "triton":
        _warn_of_torch(reason)
    return "torch"
