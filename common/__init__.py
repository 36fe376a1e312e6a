"""rnnt-bench: which transducer (RNN-T) loss is fast, small and right on this machine.

``rnnt-bench --help`` lists the commands.  From Python: `load`, `measure`, `check`; for tests
`assert_is_transducer_loss`; `FlopCounter` and its `flop_rules`, which need torch (api.py; examples
are in docs/install.md and docs/flops.md).  Importing this package imports nothing of the suite, and
no torch.

The package lies in the folder common/; the link rnnt_bench beside it is what a checkout imports.
Its folders, and who may import whom: CONTRIBUTING.md, "Find your way in the code".
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

if sys.version_info < OLDEST:  # in words that older Pythons read
    sys.stderr.write(
        "error: Python {} is too old: use {}.{} or newer\n".format(sys.version.split()[0], *OLDEST)
    )
    raise SystemExit(2)


def __getattr__(name):
    if name not in __all__:
        raise AttributeError("module 'rnnt_bench' has no attribute " + repr(name))
    from rnnt_bench import api

    return getattr(api, name)
