"""List the losses, where each would run and what it lacks: the command `list`.  No loss is
imported."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping

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
FINDS = "import importlib.util as u, json, sys; print(json.dumps([p for p in sys.argv[1:] if u.find_spec(p)]))"


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_setting(result, "device", "Device to run on: auto, cpu, cuda or cuda:N. Default: auto")
    return result


def main(options: Namespace) -> int:
    rows = implementations.with_variants()
    choices = interpreters.choose_all([row.name for row in rows], in_place=False)
    device = interpreters.resolve_device(
        options.device, [choice.python for choice in choices.values()]
    )
    places = states(choices, device)
    cells = [(row.name, row.file, row.kind) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for name, *others in cells:
        print(*map(str.ljust, (name, *others), widths), places[name])
    print(
        f"an exact loss that takes logits, on an utterance at a time: NAME:{implementations.BY_UTTERANCE}"
    )
    if not INSTALLED:  # an installed suite has no environments
        names = ", NAME@".join(implementations.environments())
        print(f"any of them under the torch of an environment: NAME@{names}")
    words = "with MKL on the path that it takes on Intel's processors, which makes torch's products faster on AMD's"
    print(f"any of them {words}: NAME@{implementations.FAST_MKL}")
    return EXIT_OK


def states(python_of: Mapping[str, interpreters.Choice], device: str) -> dict[str, str]:
    """Return where each row would run on `device`, or "missing: ..." or "unsupported: ..."; nothing
    is imported."""
    packages = dict.fromkeys(["torch", *(implementations.find(name).package for name in python_of)])
    installed = {}
    for python in {choice.python for choice in python_of.values() if choice.python}:
        answer = output([str(python), "-c", FINDS, *packages], timeout=120, cwd=ROOT).strip()
        # a site's Python may print before it
        installed[python] = json.loads(answer.rpartition("\n")[2] or "[]")
    places = {}
    for name, choice in python_of.items():
        row = implementations.find(name)
        attributes = implementations.attributes_of(row).of_variant(row.variant)
        kind = device.partition(":")[0]
        managed = choice.python == environments.interpreter(row.environment)
        where = f"environment {row.environment}" if managed else str(choice.python)
        needed = {"torch"} if row.built else {"torch", row.package}
        if choice.python is None:
            places[name] = f"missing: {choice.reason}"
        elif kind not in attributes.devices:
            places[name] = f"unsupported: it runs on {' and '.join(attributes.devices)} only"
        elif absent := needed.difference(installed[choice.python]):
            places[name] = (
                f"missing: {where} lacks {' and '.join(sorted(absent))}: {attributes.hint}"
            )
        elif row.built:
            compiled = any(CACHE.glob(f"{row.package}-*-{kind}-*/"))
            places[name] = where if compiled else f"{where}, compiled when it is first run"
        else:
            places[name] = where
    return places
