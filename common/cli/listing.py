"""List the losses, where each would run and what it lacks: the command `list`.  No loss is
imported."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from rnnt_bench.cli.parser import add_setting
from rnnt_bench.core import implementations
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import EXIT_OK
from rnnt_bench.core.files import CACHE, INSTALLED, ROOT
from rnnt_bench.setup import environments, interpreters
from rnnt_bench.system.processes import output

DESCRIPTION = """List the losses with their file and kind, where each would run on a device, and what it lacks.

Exit code: 0, or 2 for bad usage."""
EXAMPLES = """examples:
  %(prog)s
  %(prog)s --device cuda"""
#: A program that prints a JSON list of those of its arguments that are packages of its Python.
FIND_PACKAGES = "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p)]))"


def parser() -> Parser:
    """Return the parser of the flags of `list`."""
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_setting(result, "device", "Device to run on: auto, cpu, cuda or cuda:N. Default: auto")
    return result


def main(options: Namespace) -> int:
    """Print a line for each row, then how further rows are named; return the exit code."""
    rows = implementations.with_variants()
    choices = interpreters.choose_all([row.name for row in rows], in_place=False)
    device = interpreters.resolve_device(
        options.device, [choice.python for choice in choices.values()]
    )
    states = states_of(choices, device)
    cells = [(row.name, row.file, row.kind) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row, line in zip(rows, cells):
        print(*map(str.ljust, line, widths), states[row.name])
    print(
        f"an exact loss that takes logits, on an utterance at a time: NAME:{implementations.BY_UTTERANCE}"
    )
    if not INSTALLED:  # an installed suite has no environments
        names = ", NAME@".join(implementations.environments())
        print(f"any of them under the torch of an environment: NAME@{names}")
    print(
        "any of them with MKL on the path that it takes on Intel's processors, "
        f"which makes torch's products faster on AMD's: NAME@{implementations.FAST_MKL}"
    )
    return EXIT_OK


def states_of(python_of: Mapping[str, interpreters.Choice], device: str) -> dict[str, str]:
    """Return where each row would run on a device: {"k2": "environment k2"}.  A row that cannot
    run has "missing: ..." or "unsupported: ..." instead.  No loss is imported."""
    packages = dict.fromkeys(["torch", *(implementations.find(name).package for name in python_of)])
    pythons = {choice.python for choice in python_of.values() if choice.python}
    packages_of = {python: _installed(python, [*packages]) for python in pythons}
    device_type = device.partition(":")[0]
    return {
        name: _state(implementations.find(name), choice, packages_of, device_type)
        for name, choice in python_of.items()
    }


def _installed(python: Path, packages: Sequence[str]) -> list[str]:
    """Return which of the packages a Python has."""
    answer = output([str(python), "-c", FIND_PACKAGES, *packages], timeout=120, cwd=ROOT).strip()
    last_line = answer.rpartition("\n")[2]  # a site's Python may print other lines before
    return list(json.loads(last_line or "[]"))


def _state(
    row: implementations.Implementation,
    choice: interpreters.Choice,
    packages_of: Mapping[Path, Sequence[str]],
    device_type: str,
) -> str:
    """Return where a row would run, or why it cannot.

    packages_of: the installed packages of each Python; device_type: "cpu" or "cuda"."""
    if choice.python is None:
        return f"missing: {choice.reason}"
    attributes = implementations.attributes_of(row).of_variant(row.variant)
    if device_type not in attributes.devices:
        return f"unsupported: it runs on {' and '.join(attributes.devices)} only"
    managed = choice.python == environments.interpreter(row.environment)
    location = f"environment {row.environment}" if managed else str(choice.python)
    needed = {"torch"} if row.built else {"torch", row.package}
    absent = sorted(needed.difference(packages_of[choice.python]))
    if absent:
        return f"missing: {location} lacks {' and '.join(absent)}: {attributes.hint}"
    if row.built and not any(CACHE.glob(f"{row.package}-*-{device_type}-*/")):
        return f"{location}, compiled when it is first run"
    return location
