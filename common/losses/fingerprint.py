"""Compute fingerprints of tensors, to tell without a copy whether a tensor was changed or two are equal bit for bit."""

from __future__ import annotations

import hashlib
from typing import Dict, List, Mapping, Optional

import torch

#: Elements that are brought to the host at a time.
CHUNK = 1 << 24


def fingerprint(tensor: Optional[torch.Tensor]) -> bytes:
    """Return a digest of the bits of `tensor`; that of no bits for None."""
    digest = hashlib.blake2b(digest_size=16)
    if tensor is not None:
        for chunk in tensor.detach().reshape(-1).split(CHUNK):
            host = chunk.cpu().clone(memory_format=torch.contiguous_format)
            digest.update(host.view(torch.uint8).numpy())
    return digest.digest()


def fingerprints(tensors: Mapping[str, Optional[torch.Tensor]]) -> Dict[str, bytes]:
    """Return the digest of each tensor, by name."""
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def changed(before: Mapping[str, bytes], tensors: Mapping[str, Optional[torch.Tensor]]) -> List[str]:
    """Return the names of `before` whose tensors now have other bits."""
    return [name for name, digest in before.items() if fingerprint(tensors[name]) != digest]
