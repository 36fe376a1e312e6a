"""Compute fingerprints of tensors, to tell without a copy whether two are equal bit for bit, and keep answers by them.

All losses of a timing round are given the same numbers, and the oracle of these numbers takes longer than a step.  So
the jobs of a run leave right answers in a folder; one is found again by a digest of every bit that it depends on.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional

import torch

from common.core.errors import UserError
from common.core.files import write_whole

#: Elements that are brought to the host at a time.
CHUNK = 1 << 24
Tensors = Mapping[str, Optional[torch.Tensor]]


def fingerprint(tensor: Optional[torch.Tensor]) -> bytes:
    """Return a digest of the bits of `tensor`; that of no bits for None."""
    digest = hashlib.blake2b(digest_size=16)
    if tensor is not None:
        for chunk in tensor.detach().reshape(-1).split(CHUNK):
            host = chunk.cpu().clone(memory_format=torch.contiguous_format)
            digest.update(host.view(torch.uint8).numpy())
    return digest.digest()


def fingerprints(tensors: Tensors) -> Dict[str, bytes]:
    """Return the digest of each tensor, by name."""
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def changed(before: Mapping[str, bytes], tensors: Tensors) -> List[str]:
    """Return the names of `before` whose tensors now have other bits."""
    return [name for name, digest in before.items() if fingerprint(tensors[name]) != digest]


def remembered(
    folder: Optional[Path], question: object, tensors: Tensors, compute: Callable[[], List[float]]
) -> List[float]:
    """Return the numbers that `compute` makes of `tensors`, from `folder` where another job has left them.

    question: what is computed, in words and numbers; folder: None to compute in any case.
    """
    if folder is None:
        return compute()
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    key = repr((question, sorted(fingerprints(tensors).items()), sorted(shapes.items(), key=str)))
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, ValueError):
        return [float(value) for value in json.loads(path.read_text(encoding="utf-8"))]
    numbers = compute()
    with suppress(UserError):  # a full disk costs time alone
        write_whole("", (path, json.dumps(numbers)))
    return numbers
