"""What it takes to get the package of an implementation.  No torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import FrozenSet, Optional

from common.core.errors import UserError
from common.core.implementations import Implementation, find
from common.core.paths import ROOT
from common.setup import environments


def implementation_of(name: str) -> Optional[Implementation]:
    """Return the implementation of this name, a variant too; None where this suite has none."""
    try:
        return find(name)
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
