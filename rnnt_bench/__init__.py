"""rnnt-bench: which transducer (RNN-T) loss is fast, small and right on this machine.

``rnnt-bench --help`` lists the commands.  From Python: `load`, `measure`, `check`; for tests
`assert_is_transducer_loss`; `FlopCounter` and its `flop_rules`, which need torch (rnnt_bench/api.py; examples are in
docs/install.md and docs/flops.md).  The suite itself lies in `_suite` beside this file, or around it in a checkout;
importing this package imports nothing of it, and no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: The folder of this package, and that of the suite: within an installed package, or the checkout around it.
HERE = Path(__file__).resolve().parent
SUITE = HERE / "_suite" if (HERE / "_suite").is_dir() else HERE.parent
__version__ = "0.1.0"
__all__ = ["Check", "FlopCounter", "Results", "assert_is_transducer_loss", "check", "flop_rules", "load", "measure"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rnnt_bench' has no attribute {name!r}")
    from rnnt_bench import api

    return getattr(api, name)
