"""How to run a reproduction: which Python has the package, and how to get it.  No torch.

The commands run in the suite's own folder, on a file SHOWN that holds the code as it is printed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import FrozenSet, Optional

from common.core import scripts
from common.core.errors import UserError
from common.core.implementations import Implementation, find
from common.core.paths import ROOT
from common.setup import environments

SHOWN = "shown.py"
#: What a matrix adds to the name of a row whose kernels ran in a simulator.
SIMULATED = " (simulated)"


def implementation_of(name: str) -> Optional[Implementation]:
    """Return the implementation that a finding names, a variant or a simulated one too; None where this suite has
    none."""
    try:
        return find(name.partition(SIMULATED)[0])
    except UserError:
        return None


def effort(name: str) -> int:
    """Return 0 where `make setup` brings its package, 1 where an environment on request does, 2 where a user must
    install it."""
    implementation = implementation_of(name)
    if implementation is None:
        return 2
    environment = environments.ENVIRONMENTS[implementation.environment]
    if environment.optional:
        return 1
    return 0 if implementation.built or implementation.package in _locked(ROOT / environment.requirements) else 2


@cache
def _locked(path: Path) -> FrozenSet[str]:
    """Return the names of the packages in a lock; read once, as each finding of a matrix asks for those of several
    rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition("==")[0].replace("-", "_") for line in lines)


def source(name: str) -> str:
    """Return in a few words where its package is from; the adapter's hint where set-up does not bring it."""
    implementation = implementation_of(name)
    if implementation is None:
        return "not an implementation of this suite"
    if effort(name) < 2:
        return f"`{environments.ENVIRONMENTS[implementation.environment].command}` brings it"
    return scripts.described(implementation).hint


def command(name: str) -> str:
    """Return a shell line that runs SHOWN with the package of `name`; "" where this suite has no such
    implementation."""
    implementation = implementation_of(name)
    if implementation is None:
        return ""
    python = f".venv/{implementation.environment}/bin/python"
    before = ""
    if name.endswith(SIMULATED):
        simulator = scripts.described(implementation).simulator
        before = "".join(f"{variable}={value} " for variable, value in simulator.items())
    if implementation.built:
        before += f'PYTHONPATH="$({python} -m common.setup.extensions path {implementation.package})" '
    return f"{before}{python} {SHOWN}"
