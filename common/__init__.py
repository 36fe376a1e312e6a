"""Find out which transducer (RNN-T) loss is fast, small and right on this machine: rnnt-bench.

``rnnt-bench --help`` lists the commands.  From Python, api.py has `load`, `measure` and `check`;
`assert_is_transducer_loss` for tests; `FlopCounter` and its `flop_rules`, which need torch.
Examples are in docs/install.md and docs/flops.md.  Importing this package imports nothing of the
suite, and no torch.

The package lies in the folder common/; a checkout imports it through the link rnnt_bench beside
that.  CONTRIBUTING.md, "Find your way in the code", describes its folders and which may import
which.
"""

import sys

OLDEST = (3, 10)
__version__ = "0.1.0"
__all__ = [
    "Check",
    "FlopCounter",
    "Results",
    "assert_is_transducer_loss",
    "check",
    "flop_rules",
    "load",
    "measure",
]

if sys.version_info < OLDEST:  # older Pythons have to parse this file: no f-strings here
    sys.stderr.write(
        "error: Python {} is too old: use {}.{} or newer\n".format(sys.version.split()[0], *OLDEST)
    )
    raise SystemExit(2)


def __getattr__(name):
    """Return an attribute of `rnnt_bench.api`, which is imported now."""
    if name not in __all__:
        raise AttributeError("module 'rnnt_bench' has no attribute " + repr(name))
    from rnnt_bench import api

    return getattr(api, name)
