"""Starts the scripts of the top level and rnnt-bench: the one module that knows every tool of the suite.

A tool of its own is one line of `_slices`, a command of rnnt-bench one of COMMANDS.  Workers import this too, so
nothing heavy is imported above.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from rnnt_bench.present import parts
from rnnt_bench.present.parts import Slice


class Command(NamedTuple):
    """script: the top-level file that it runs, or a module: one named `command` has a `parser` and a `main` of what
    that parsed, others a `main`, or the function behind a colon, of the words; before: flags put before the user's."""

    summary: str
    script: str
    before: Tuple[str, ...] = ()


#: The commands of rnnt-bench, in the order of its help.
COMMANDS: Dict[str, Command] = {
    "run": Command("Measure time, memory and correctness of the losses, and print the verdict.", "benchmark_all.py"),
    "list": Command("List the losses, where each would run and what it lacks.", "benchmark_all.py", ("--list",)),
    "largest": Command(
        "Find the largest batch that fits each loss.", "benchmark_all.py", ("--find-largest", "batch-size")
    ),
    "sweep": Command("Measure at each of several values: rnnt-bench sweep vocab-size=500,4096.", "benchmark_all.py"),
    "check": Command("Check the losses in corner cases: which is right in which.", "rnnt_bench.conformance.command"),
    "compare": Command("Compare two measurements.", "rnnt_bench.cli.compare"),
    "summarize": Command("Print the table of log folders.", "summarize.py"),
    "report": Command("Write one HTML page from log folders.", "rnnt_bench.cli.compare:report"),
    "submit": Command("Make a folder of results/ from a log folder, or check one.", "rnnt_bench.tools.submit"),
    "shapes": Command("Make a shape file from a corpus.", "generate_shape_info.py"),
    "flops": Command("Count the operations of a model.", "rnnt_bench.tools.flops.command"),
    "profile": Command("Profile a training step of a model and its loss.", "rnnt_bench.tools.profile.command"),
    "inference": Command(
        "Measure whether a speech model is faster than real time.", "rnnt_bench.tools.inference.command"
    ),
    "pipelines": Command("Measure what an utterance costs in a speech system.", "rnnt_bench.tools.pipelines.command"),
}
PROGRAM = "rnnt-bench"
#: Patterns of advice that only a checkout can follow, and what stands in its place for an installed package.
IN_A_CHECKOUT = {
    "`make bench`": f"`{PROGRAM} run`",
    r"(, (or|then) )?run `make setup[^`]*`( again)?( \([^)]*\))?(, which builds it|,? or )?": "",
    "see --list": f"see {PROGRAM} list",
}


def _slices() -> Tuple[Slice, ...]:
    """Return every tool, in the order of the page."""
    from rnnt_bench.conformance.show import CONFORMANCE
    from rnnt_bench.tools.flops import show as flops
    from rnnt_bench.tools.inference import rows as inference
    from rnnt_bench.tools.kept import slice_of
    from rnnt_bench.tools.pipelines import rows as pipelines
    from rnnt_bench.tools.profile import rows as profile

    kept = [slice_of(each.TOOL, each.TITLE, each.answer) for each in (profile, flops, inference, pipelines)]
    return *kept, CONFORMANCE


def register() -> None:
    """Let the page, the summary and the verdict know every tool."""
    parts.slices = _slices


def run(name: str, main: Callable[[], int]) -> int:
    """Run the main function of the script `name` with every tool known; return the exit code, see errors.guarded."""
    from rnnt_bench.core.errors import guarded

    register()
    return guarded(name, main)


def main(argv: Sequence[str]) -> int:
    """Run `rnnt-bench` with these arguments; return its exit code."""
    import os
    import re
    import runpy
    import sys
    from importlib import import_module

    from rnnt_bench.core import errors
    from rnnt_bench.core.files import INSTALLED, ROOT
    from rnnt_bench.core.text import closest

    errors.safe_streams()
    name, *others = argv or ["--help"]
    if name in ("-h", "--help", "help", "-V", "-v", "--version"):
        print(_version() if "v" in name.lower() else _help())
        return errors.EXIT_OK
    if name not in COMMANDS:
        errors.say(f"{PROGRAM}: error: no command is named {name!r}{closest(name, COMMANDS)} (--help tells more)")
        return errors.EXIT_USAGE
    errors.require("msgspec")
    command = COMMANDS[name]
    errors.program_called = f"{PROGRAM} {name}"
    for other, of in reversed(COMMANDS.items()):  # run, and not list, is benchmark_all.py
        errors.names_of_scripts[rf"(?<![\w/])(\./)?{re.escape(of.script)}(?!\w)"] = f"{PROGRAM} {other}"
    if INSTALLED:
        sys.path.insert(0, str(ROOT))  # the scripts of losses
        errors.names_of_scripts.update(IN_A_CHECKOUT)
    if name == "sweep":
        is_axis = [word for word in others if "=" in word and not word.startswith("-")]
        others = [f"--sweep={word}" if word in is_axis else word for word in others]
        if not any(word.startswith(("--sweep", "--help", "-h")) for word in others):
            errors.say(f"{PROGRAM} sweep: error: give what to vary, as in vocab-size=500,4096 (--help tells more)")
            return errors.EXIT_USAGE
    arguments = [*command.before, *others]
    if not command.script.endswith(".py"):
        register()
        sys.argv = [str(ROOT / PROGRAM), name, *others]
        module_name, _, function = command.script.partition(":")
        module = import_module(module_name)
        if module_name.endswith(".command"):
            parsed = module.parser().parse_args(arguments)
            return errors.guarded(f"{PROGRAM} {name}", lambda: module.main(parsed))
        return int(getattr(module, function or "main")(arguments))
    sys.argv = [os.path.join(ROOT, command.script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")  # ends in SystemExit, as the script does
    return errors.EXIT_OK


def _help() -> str:
    """Return what `rnnt-bench --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}s}  {command.summary}" for name, command in COMMANDS.items()]
    usage = f"usage: {PROGRAM} COMMAND [flags]     ({PROGRAM} COMMAND --help: its flags)"
    words = "Find out which transducer (RNN-T) loss is fast, small and right on this machine."
    return "\n".join([usage, "", words, "", *lines, "", f"  {PROGRAM} --version"])


def _version() -> str:
    """Return "rnnt-bench 0.1.0", with the revision of a checkout."""
    import rnnt_bench
    from rnnt_bench.core.files import ROOT
    from rnnt_bench.system import machine

    revision, changed = machine.git_state(ROOT)
    state = " with changes" if changed else ""
    return f"{PROGRAM} {rnnt_bench.__version__}" + (f" ({revision[:12]}{state})" if revision else "")


def script_main(file: str, description: Optional[str]) -> int:
    """Run the benchmark script `file` of one implementation, of a template with all others; return the exit code."""
    # Here and not above: every worker imports a script, and needs none of this.
    from rnnt_bench.cli import benchmark
    from rnnt_bench.cli.parser import EXAMPLES, Parser, add_choice, add_flags, chosen, standard
    from rnnt_bench.core import implementations
    from rnnt_bench.core.errors import UserError
    from rnnt_bench.core.implementations import LATTICES

    epilog = "docs/reading.md tells how to read the table; summarize.py prints it again for any log folder."
    parser = Parser(description=description, examples=EXAMPLES, epilog=epilog)
    try:
        implementation = implementations.of_file(file)
    except UserError as error:
        parser.error(str(error))
    if implementation.template:
        add_choice(parser)
    add_flags(parser)
    arguments = parser.parse_args()
    is_default = implementation.template and arguments.only == standard()
    if is_default and implementation.kind in LATTICES:
        arguments.topology = arguments.topology or implementation.kind  # beside losses on the same lattice
    names = dict.fromkeys([implementation.name, *(chosen(parser, arguments) if implementation.template else ())])
    return run(parser.prog, lambda: benchmark.benchmark(list(names), arguments, [implementation.name]))
