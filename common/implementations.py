"""The table of implementations: one line each, read by every script.  Adding one = one benchmark_<x>.py and one line.

No import of torch or of any loss here: the parent process and the summarizer read this too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Implementation:
    """name: as in tables and log folders; script: the module at the top level that holds its ADAPTER; environment: the
    key of common.setup.environments.ENVIRONMENTS that has it; package: what must import for it to run as installed;
    built: the suite can build the package from source where it is not installed; exact: False for losses that
    approximate by design."""

    name: str
    script: str
    environment: str
    package: str
    built: bool = False
    exact: bool = True


IMPLEMENTATIONS = (
    Implementation("torchaudio", "benchmark_torchaudio", "main", "torchaudio"),
    Implementation("optimized_transducer", "benchmark_ot", "main", "optimized_transducer", built=True),
    Implementation("fast_rnnt", "benchmark_fast_rnnt", "main", "fast_rnnt", built=True),
    Implementation("k2", "benchmark_k2", "k2", "k2"),
    Implementation("fast_rnnt-pruned", "benchmark_fast_rnnt_pruned", "main", "fast_rnnt", built=True, exact=False),
    Implementation("k2-pruned", "benchmark_k2_pruned", "k2", "k2", exact=False),
)

BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
