"""benchmark_all.py --list: prints each implementation and variant, where it would run here, and what it lacks.

No package is imported: it counts as installed where its Python finds it.
"""

from __future__ import annotations

import json
from typing import Dict, Mapping

from common.core import implementations
from common.core.errors import EXIT_OK
from common.core.files import ROOT
from common.setup import environments, extensions, interpreters
from common.system.processes import output

#: Words behind the place of a loss that has yet to be compiled.
TO_COMPILE = ", compiled when it is first run"
FINDS = "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p)]))"


def show(wanted: str) -> int:
    """Print the list for a device, as --device names it; return the exit code."""
    rows = implementations.with_variants()
    choices = interpreters.choose_all([row.name for row in rows], in_place=False)
    places = states(choices, interpreters.device_of(wanted, choices).partition(":")[0])
    for row in rows:
        print(f"{row.name:30s} {row.file:38s} {row.kind:10s} {places[row.name]}")
    names = ", ".join(f"NAME@{environment}" for environment in implementations.environments())
    print(f"any of them under the torch of an environment: {names}")
    return EXIT_OK


def states(python_of: Mapping[str, interpreters.Choice], device: str) -> Dict[str, str]:
    """Return where each row would run on `device`, or "missing: ..." or "unsupported: ..."; nothing is imported."""
    packages = dict.fromkeys(implementations.find(name).package for name in python_of)
    installed = {}
    for python in {choice.python for choice in python_of.values() if choice.python}:
        answer = output([str(python), "-c", FINDS, *packages], timeout=120, cwd=ROOT).strip()
        installed[python] = json.loads(answer.rpartition("\n")[2] or "[]")  # a site's Python may print before it
    places = {}
    for name, choice in python_of.items():
        row = implementations.find(name)
        attributes, kind = implementations.described(row), device.partition(":")[0]
        managed = choice.python == environments.interpreter(row.environment)
        where = f"environment {row.environment}" if managed else str(choice.python)
        if choice.python is None:
            places[name] = f"missing: {choice.reason}"
        elif kind not in attributes.devices:
            places[name] = f"unsupported: it runs on {' and '.join(attributes.devices)} only ({where})"
        elif row.built:
            compiled = any(extensions.CACHE.glob(f"{row.package}-*-{kind}-*/"))
            places[name] = where + ("" if compiled else TO_COMPILE)
        elif row.package in installed[choice.python]:
            places[name] = where
        else:
            places[name] = f"missing: {row.package} is not in {where}: {attributes.hint}"
    return places
