"""Start the commands of rnnt-bench and the scripts of the top level.

Every process that measures imports the scripts of losses, and so this module; and any Python may
start them, with no package installed.  So nothing heavy is imported at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.core import errors
from rnnt_bench.core.called import PROGRAM


class Command(NamedTuple):
    """Describe a command.

    Attributes:
        summary: the sentence of --help
        module: has ``parser()``, which makes the parser of the flags, and ``main(options)``, which
          takes the parsed flags and returns the exit code
    """

    summary: str
    module: str


#: The commands of rnnt-bench, in the order of its help.
COMMANDS: dict[str, Command] = {
    "run": Command(
        "Measure time, memory and correctness of the losses, and print the verdict.",
        "rnnt_bench.cli.run",
    ),
    "list": Command(
        "List the losses, where each would run and what it lacks.", "rnnt_bench.cli.listing"
    ),
    "largest": Command(
        "Find the largest batch that fits each loss.", "rnnt_bench.tools.largest.command"
    ),
    "sweep": Command(
        "Measure at each of several values: vocab-size=500,4096.", "rnnt_bench.cli.sweep"
    ),
    "check": Command(
        "Check the losses in corner cases: which is right in which.",
        "rnnt_bench.conformance.command",
    ),
    "compare": Command("Compare two measurements.", "rnnt_bench.cli.compare"),
    "summarize": Command("Print the table of log folders.", "rnnt_bench.show.summarize"),
    "report": Command("Write one HTML page from log folders.", "rnnt_bench.show.report"),
    "submit": Command(
        "Make a folder of results/ from a log folder, or check one.", "rnnt_bench.tools.submit"
    ),
    "shapes": Command("Make a shape file from a corpus.", "rnnt_bench.cli.shapes"),
    "flops": Command("Count the operations of a model.", "rnnt_bench.tools.flops.command"),
    "profile": Command(
        "Profile a training step of a model and its loss.", "rnnt_bench.tools.profile.command"
    ),
    "inference": Command(
        "Measure whether a speech model is faster than real time.",
        "rnnt_bench.tools.inference.command",
    ),
    "pipelines": Command(
        "Measure what an utterance costs in a speech system.", "rnnt_bench.tools.pipelines.command"
    ),
    "tensorboard": Command(
        "Write log folders as scalars of TensorBoard.", "rnnt_bench.show.tensorboard"
    ),
    "trace-viewer": Command(
        "Show a trace in Perfetto's own page, offline.", "rnnt_bench.show.trace_viewer"
    ),
}


def main(words: Sequence[str]) -> int:
    """Run `rnnt-bench` with the words of a command line; return its exit code."""
    from rnnt_bench.core.text import closest

    errors.safe_streams()
    name, *others = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return errors.flushed()
    if name in ("-V", "-v", "--version"):
        print(_version())
        return errors.flushed()
    if name not in COMMANDS:
        errors.say(
            f"{PROGRAM}: error: no command is named {name!r}{closest(name, COMMANDS)} (--help tells more)"
        )
        return errors.EXIT_USAGE
    return run(f"{PROGRAM} {name}", others, lambda: import_module(COMMANDS[name].module))


def script(name: str) -> int:
    """Run a command under the name of the script that was started, such as summarize.py; return the
    exit code."""
    return run(Path(sys.argv[0]).name, sys.argv[1:], lambda: import_module(COMMANDS[name].module))


def script_main(file: str, description: str | None) -> int:
    """Run the benchmark script of one implementation; return the exit code.

    file, description: the script, and its docstring for --help."""

    def load() -> Any:
        from rnnt_bench.cli.run import Script

        return Script(file, description)

    return run(Path(sys.argv[0]).name, sys.argv[1:], load)


def run(program: str, words: Sequence[str], load: Callable[[], Any]) -> int:
    """Run a command, and return its exit code.

    If the running Python lacks msgspec, the command is restarted in the environment main; with
    --in-place that is an error instead.

    Args:
        program: the name of the command in messages: "rnnt-bench run"
        words: the words behind that name on the command line
        load: imports the command, and returns its module, or an object with the same `parser` and
            `main`
    """
    from rnnt_bench.setup import interpreters

    def parsed_and_run() -> int:
        interpreters.need("msgspec", in_place="--in-place" in words)
        command = load()
        parser = command.parser()
        parser.prog = program
        return int(command.main(parser.parse_args(words)))

    return errors.guarded(program, parsed_and_run)


def _help() -> str:
    """Return the text of `rnnt-bench --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}s}  {command.summary}" for name, command in COMMANDS.items()]
    usage = f"usage: {PROGRAM} COMMAND [flags]     ({PROGRAM} COMMAND --help: its flags)"
    purpose = "Find out which transducer (RNN-T) loss is fast, small and right on this machine."
    return "\n".join([usage, "", purpose, "", *lines, "", f"  {PROGRAM} --version"])


def _version() -> str:
    """Return "rnnt-bench 0.1.0"; in a checkout with its revision, "rnnt-bench 0.1.0 (1a2b3c4d5e6f
    with changes)"."""
    import rnnt_bench
    from rnnt_bench.core.files import ROOT
    from rnnt_bench.system import machine

    version = f"{PROGRAM} {rnnt_bench.__version__}"
    revision, changed = machine.git_state(ROOT)
    if not revision:
        return version
    return f"{version} ({revision[:12]}{' with changes' if changed else ''})"
