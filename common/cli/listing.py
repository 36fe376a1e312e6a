"""benchmark_all.py --list: each implementation and variant, where it would run here, and what it lacks.

No package is imported: it counts as there where its Python finds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import FrozenSet, Sequence

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
    there = {python: packages(python, [one.package for one in rows if not one.built]) for python in pythons}
    for one in rows:
        choice = choices[one.name]
        where = state(one, choice, device, there[choice.python]) if choice.python else f"missing: {choice.reason}"
        print(f"{one.name:30s} {one.script + '.py':30s} {one.kind:10s} {where}")
    names = ", ".join(f"NAME@{one}" for one in implementations.environments())
    print(f"any of them under the torch of an environment: {names}")
    return EXIT_OK


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
