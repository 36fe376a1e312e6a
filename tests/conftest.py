"""Fixtures that several test files use."""

from __future__ import annotations

import pytest


@pytest.fixture
def tiny_shapes(tmp_path):
    """A shape file of twelve short utterances: a benchmark on it takes no time beside starting Python."""
    import torch

    path = tmp_path / "tiny.pt"
    torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(12)], dtype=torch.int32), path)
    return path
