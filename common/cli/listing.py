"""benchmark_all.py --list: each implementation and variant, where it would run here, and what it lacks.

No package is imported: it counts as there where its Python finds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, FrozenSet, Mapping, Sequence

from common.core import implementations, scripts
from common.core.errors import EXIT_OK
from common.core.paths import BUILD, ROOT
from common.setup import environments, interpreters
from common.system.processes import output

#: What follows the place of a loss that has yet to be compiled.
TO_COMPILE = ", compiled when it is first run"
FINDS = "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p)]))"


def show(wanted: str) -> int:
    """wanted: the device, as of --device."""
    rows = implementations.with_variants()
    choices = {one.name: interpreters.choose(one, in_place=False, prefer_here=False) for one in rows}
    pythons = list(dict.fromkeys(choice.python for choice in choices.values() if choice.python))
    device = interpreters.resolve_device(wanted, pythons).partition(":")[0]
    where = states(choices, device)
    for one in rows:
        print(f"{one.name:30s} {one.script + '.py':30s} {one.kind:10s} {where[one.name]}")
    names = ", ".join(f"NAME@{one}" for one in implementations.environments())
    print(f"any of them under the torch of an environment: {names}")
    return EXIT_OK


def states(python_of: Mapping[str, interpreters.Choice], device: str) -> Dict[str, str]:
    """Return where each row would run on `device`, or "missing: ..." or "unsupported: ..."; nothing is imported."""
    rows = [implementations.find(name) for name in python_of]
    wanted = [row.package for row in rows if not row.built]
    there = {python: packages(python, wanted) for python in {choice.python for choice in python_of.values()} if python}
    kind = device.partition(":")[0]
    return {
        row.name: state(row, choice, kind, there[choice.python]) if choice.python else f"missing: {choice.reason}"
        for row, choice in zip(rows, python_of.values())
    }


def packages(python: Path, wanted: Sequence[str]) -> FrozenSet[str]:
    """Those of the packages that a Python finds."""
    said = output([str(python), "-c", FINDS, *dict.fromkeys(wanted)], timeout=120, cwd=ROOT)
    return frozenset(json.loads(said or "[]"))


def state(one: implementations.Implementation, choice: interpreters.Choice, device: str, there: FrozenSet[str]) -> str:
    """Where it would run, or why it would not."""
    attributes = scripts.described(scripts.file_of(one))
    managed = choice.python == environments.interpreter(one.environment)
    where = f"environment {one.environment}" if managed else str(choice.python)
    if device not in attributes["devices"]:
        return f"unsupported: it has no {device} version and runs on {' and '.join(attributes['devices'])} ({where})"
    if one.built:
        compiled = any(BUILD.glob(f"{one.package}-*-{device}-*/"))
        return where + ("" if compiled else TO_COMPILE)
    return where if one.package in there else f"missing: {one.package} is not in {where}: {attributes['hint']}"
