"""benchmark_all.py --list: prints each implementation and variant, where it would run here, and what it lacks.

No package is imported: it counts as installed where its Python finds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, FrozenSet, List, Mapping, Sequence

from common.core import implementations, scripts
from common.core.errors import EXIT_OK, NOT_RUNNABLE
from common.core.paths import ROOT
from common.setup import environments, extensions, interpreters
from common.system.processes import output

#: What follows the place of a loss that has yet to be compiled.
TO_COMPILE = ", compiled when it is first run"
FINDS = "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p)]))"


def show(wanted: str) -> int:
    """Print the list for a device, as --device names it; return the exit code."""
    rows = implementations.with_variants()
    choices = {row.name: interpreters.choose(row, in_place=False, prefer_here=False) for row in rows}
    pythons = list(dict.fromkeys(choice.python for choice in choices.values() if choice.python))
    device = interpreters.resolve_device(wanted, pythons).partition(":")[0]
    places = states(choices, device)
    for row in rows:
        print(f"{row.name:30s} {row.file:38s} {row.kind:10s} {places[row.name]}")
    names = ", ".join(f"NAME@{environment}" for environment in implementations.environments())
    print(f"any of them under the torch of an environment: {names}")
    return EXIT_OK


def states(python_of: Mapping[str, interpreters.Choice], device: str) -> Dict[str, str]:
    """Return where each row would run on `device`, or "missing: ..." or "unsupported: ..."; nothing is imported."""
    rows = [implementations.find(name) for name in python_of]
    wanted = [row.package for row in rows if not row.built]
    pythons = {choice.python for choice in python_of.values() if choice.python}
    installed = {python: packages(python, wanted) for python in pythons}
    kind = device.partition(":")[0]
    return {
        row.name: state(row, choice, kind, installed[choice.python]) if choice.python else f"missing: {choice.reason}"
        for row, choice in zip(rows, python_of.values())
    }


def runnable(states: Mapping[str, str]) -> List[str]:
    """Return the rows that would run.  states: of each row, as `states` returns them."""
    return [name for name, state in states.items() if not state.startswith(NOT_RUNNABLE)]


def packages(python: Path, names: Sequence[str]) -> FrozenSet[str]:
    """Return those of the packages that a Python finds."""
    printed = output([str(python), "-c", FINDS, *dict.fromkeys(names)], timeout=120, cwd=ROOT)
    return frozenset(json.loads(printed or "[]"))


def state(
    row: implementations.Implementation, choice: interpreters.Choice, device: str, installed: FrozenSet[str]
) -> str:
    """Return where an implementation would run, or why it would not.  installed: packages that its Python finds."""
    attributes = scripts.described(row)
    managed = choice.python == environments.interpreter(row.environment)
    where = f"environment {row.environment}" if managed else str(choice.python)
    if device not in attributes.devices:
        return f"unsupported: it runs on {' and '.join(attributes.devices)} only ({where})"
    if row.built:
        compiled = any(extensions.CACHE.glob(f"{row.package}-*-{device}-*/"))
        return where + ("" if compiled else TO_COMPILE)
    return where if row.package in installed else f"missing: {row.package} is not in {where}: {attributes.hint}"
