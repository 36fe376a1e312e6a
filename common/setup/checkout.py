"""Which suite a checkout holds, whatever git knows of it."""

from __future__ import annotations

import hashlib

from common.core.paths import ROOT

#: What measures.
_SOURCES = ("common/**/*.py", "benchmark_*.py", "losses/*.py", "fused_transducer/**/*.py", "requirements/*.txt")


def suite() -> str:
    """Hash of what measures: two checkouts with the same one measure the same."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
