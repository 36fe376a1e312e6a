"""The parser of every command; the flags of every benchmark script, and what is read from them.  No torch here."""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import fill
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

from rnnt_bench.core import errors, files, flag_types, settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import (
    BY_UTTERANCE,
    FAST_MKL,
    IMPLEMENTATIONS,
    LATTICES,
    find,
    of_file,
    with_variants,
)
from rnnt_bench.core.text import closest

#: The default of --wait.
WAIT_SECONDS = 60.0
EXAMPLES = """examples
  {prog} --preset quick                          a smoke run
  {prog} --device cuda --vocab-size 4096         on my GPU, with my vocabulary
  {prog} --find-largest batch-size --memory-limit 16GB
  {prog} --shape-file mine.pt --min-duration 1 --max-duration 20
  {prog} --sweep vocab-size=500,1000,4096 --frames 100 --tokens 20
"""
#: The texts of --help-all.
HELP = {
    "--limits": "Measure how fast the device reads, writes and multiplies, before every third round. '%% of limit' "
    "needs it. Default: true; false with --preset quick, --budget and --sweep",
    "--log-dir": "Folder in which each run makes its own, <name>-<batch size>, with .2, .3 ... where that exists. "
    "Default: log/ beside this script",
    "--timeout": "End a process of an implementation after S seconds; its row says timeout. Default: 1800",
    "--wait": "Wait up to S seconds in all for a quiet machine, then repeat the timing rounds that ran beside other "
    "load; 0 repeats none. Default: 60; 0 with --preset quick and --sweep",
    "--resume": "Continue the newest unfinished run, or sweep, with the same settings instead of starting one.",
    "--in-place": "Run everything in this Python, with what it has installed, and use no other environment.",
    "--quiet": "Print no progress on stderr; the table still goes to stdout.",
    "--details": "Print the whole table with stages, options, limits, errors and notes, as in details.txt of "
    "--log-dir. Default: a summary on one screen",
    "--sweep": "Measure at each of these values; if given several times, at all combinations, each in a run of its "
    f"own, without traces. KEY is one of {', '.join(settings.SWEEPABLE)}. Default: no sweep",
    "--loss": "Also measure this function, called as loss(logits, targets, T_lengths, U_lengths), which returns the "
    "summed loss. NAME=MODULE:FUNCTION gives its row a name, FILE.py:FUNCTION takes it from a file. Repeatable.",
    "--skip": "All losses but these.",
    "--topology": f"Losses on another lattice. {'; '.join(map(': '.join, LATTICES.items()))}. Default: the "
    "transducer's",
}


class Parser(argparse.ArgumentParser):
    """argparse's parser, but an error is one line, and an epilog of several lines is printed as it is.

    examples: commands that the short --help ends with, below the flags with a text for it (add)."""

    def __init__(self, *arguments: Any, examples: str = "", **options: Any):
        errors.safe_streams()  # before --help or an error is printed
        if "\n" in (options.get("epilog") or ""):
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        called = errors.program_called or options.get("prog") or Path(sys.argv[0]).name
        super().__init__(*arguments, **{**options, "prog": called})
        if self.add_help:
            self._actions[0].help = "Show this help and exit."
        self.examples = examples
        if examples:
            words = "Show every flag, with its unit and default."
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=words)

    def print_help(self, file: Any = None) -> None:
        self._print_message(self.format_short_help() if self.examples else self.format_help(), file or sys.stdout)

    def format_short_help(self) -> str:
        """Return the first paragraph of the description, the flags that have a short text, and the examples."""
        lines = []
        for action in self._actions:
            text = getattr(action, "short", "")
            if text:
                value = "" if action.nargs == 0 else f" {action.metavar or 'VALUE'}"
                lines.append(f"  {action.option_strings[0] + value:<26}  {text}")
        usage = f"usage: {self.prog} [flags]     (--help-all: every flag, with unit and default)"
        first = " ".join((self.description or "").strip().partition("\n\n")[0].split())
        parts = usage, fill(first, 100, break_on_hyphens=False), "\n".join(lines), self.examples.format(prog=self.prog)
        return "\n\n".join(parts)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what could follow
            with suppress(ImportError):
                import argcomplete  # type: ignore[import-not-found, unused-ignore]  # a user's own

                argcomplete.autocomplete(self)
        return super().parse_known_args(*arguments, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            words = f"give one of {', '.join(choices)}, not {value!r}{closest(str(value), choices)}"
            raise argparse.ArgumentError(action, words)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            message += closest(message.split()[2].partition("=")[0], self._option_string_actions)
        self.exit(errors.EXIT_USAGE, f"{self.prog}: error: {message} (--help tells more)\n")

    def exit(self, status: int = 0, message: Optional[str] = None) -> NoReturn:
        super().exit(errors.finished(status), message)

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # as Python 3.12 does: a help that cannot be written is no error
            super()._print_message(errors.as_called(message), file)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every benchmark script takes.  A setting that is not given stays None; the preset decides."""
    groups: Dict[str, argparse._ArgumentGroup] = {}
    for setting in settings.SETTINGS.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        add(groups[setting.group], setting.flag, short=setting.short, help=setting.help_text(), **setting.arguments())
    add(groups[settings.TIMING], "--limits", type=flag_types.str2bool, metavar="BOOL")
    run = parser.add_argument_group("the run")
    add(run, "--log-dir", "Folder of the results.", type=flag_types.path, default=files.LOG, metavar="DIR")
    add(run, "--timeout", type=flag_types.positive, default=1800.0, metavar="S")
    add(run, "--wait", type=flag_types.whole(0), metavar="S")
    add(run, "--resume", "Continue after an interruption.", action="store_true")
    add(run, "--in-place", action="store_true")
    add(run, "--quiet", action="store_true")
    add(run, "--details", "Also print stages, options, limits and notes.", action="store_true")
    short = "Measure at each of these values: vocab-size=500,4096."
    add(run, "--sweep", short, action="append", default=[], type=settings.axis, metavar="KEY=A,B,...")


def add_setting(group: Any, key: str, help: str, **arguments: Any) -> None:
    """Add the flag of a setting to another command, which says in its own words what it means there."""
    group.add_argument(settings.SETTINGS[key].flag, help=help, **{**settings.SETTINGS[key].arguments(), **arguments})


def add(group: Any, flag: str, short: str = "", **arguments: Any) -> None:
    """Add a flag as add_argument does.  short: the sentence of --help; "" leaves it to --help-all."""
    group.add_argument(flag, **{"help": HELP.get(flag), **arguments}).short = short


def given_settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    """Return the flags that are settings of the run (see rnnt_bench.core.settings), None for those not given.  Raises
    UserError for a shape file that is not there, before anything is started."""
    given = {key: vars(arguments).get(key) for key in settings.SETTINGS if key != "device"}
    shape_file: Optional[Path] = given["shape_file"]
    if shape_file is not None:
        from rnnt_bench.data import shapes  # brings numpy, which no reader waits for

        path, advice = shape_file.resolve(), "make one with generate_shape_info.py or remove the flag"
        if problem := files.not_a_file(shape_file):
            raise UserError(f"--shape-file {shape_file}: {problem}; {advice}")
        given["shape_file"] = str(path.relative_to(files.ROOT) if files.ROOT in path.parents else path)
        given["file_vocab_size"] = shapes.known_vocab_size(path)
    shortest, longest = given["min_duration"], given["max_duration"]
    if shortest is not None and longest is not None and shortest > longest:
        raise UserError(f"--min-duration {shortest:g} is above --max-duration {longest:g}: no utterance is between")
    return given


def with_limits(arguments: argparse.Namespace, resolved: settings.Settings) -> bool:
    """Tell whether the device's limits are measured: as --limits says, else as the preset does."""
    if arguments.limits is not None:
        return bool(arguments.limits)
    return flag_types.parts(resolved.preset)[0] != "quick" and not (arguments.budget or arguments.sweep)


def wait(arguments: argparse.Namespace) -> float:
    """Return how many seconds to wait, in all, for a quiet machine: as --wait says, else as the preset does."""
    if arguments.wait is not None:
        return float(arguments.wait)
    return WAIT_SECONDS if settings.waits(arguments.preset, dict(arguments.sweep)) else 0.0


def implementations(everything: Sequence[str]) -> Callable[[str], Tuple[str, ...]]:
    """Return the type of a flag that takes names of the table, and files such as benchmark_flash.py, whose rows are
    known from then on, with :VARIANT and @ENVIRONMENT behind them.  "all" is `everything`."""

    def parse(text: str) -> Tuple[str, ...]:
        words, others = [], []
        for word in map(str.strip, text.split(",")):
            file = re.match(r".+?\.py(?=[:@]|$)", word)
            name = of_file(file[0]).name + word[file.end() :] if file else word
            if "@" in name or name.endswith(f":{BY_UTTERANCE}"):
                name = find(name).name  # its own where that is the environment
                others.append(name)
            words.append(name)
        known = dict.fromkeys([*(row.name for row in with_variants()), *others])
        return flag_types.some_of(list(known), everything)(",".join(words))

    return parse


def add_loss(group: Any) -> None:
    """Add --loss, which names functions to measure without a script of theirs."""
    short = "A loss of your own: mypackage.rnnt:loss or file.py:loss."
    add(group, "--loss", short, action="append", default=[], type=own_loss, metavar="MODULE:FUNCTION")


def own_loss(text: str) -> str:
    """Parse [NAME=]MODULE:FUNCTION or [NAME=]FILE.py:FUNCTION, and write the script that measures it beside what is
    compiled; return the name of its row."""
    name, _, target = text.rpartition("=")
    module, _, function = target.rpartition(":")
    if not (module and function):
        raise UserError(f"give MODULE:FUNCTION or FILE.py:FUNCTION, not {text!r}")
    folders: Tuple[str, ...] = ()
    if module.endswith(".py"):
        path = Path(module).resolve()
        problem = files.not_a_file(path)
        if problem:
            raise UserError(f"{module}: {problem}")
        name, target = name or f"{path.stem}.{function}", f"{path}:{function}"
    else:
        name, folders = name or f"{module}.{function}", (_folder_of(module.partition(".")[0]),)
    script = files.BUILD / "losses" / f"loss_of_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.py"
    body = f"    name = {name!r}\n    target = {target!r}\n    folders = {folders!r}\n"
    head = (
        f'"""Made by --loss {target}."""\nfrom rnnt_bench.losses.adapter import OfFunction\n\nclass Own(OfFunction):\n'
    )
    files.make_folder(script.parent, "make it writable")
    files.write_whole("make it writable", (script, f"{head}{body}\n\nADAPTER = Own\n"))
    return of_file(str(script)).name


def _folder_of(package: str) -> str:
    """Return the folder that a package or module lies in, the current folder first."""
    spec = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
    candidates = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    found_at = next(filter(None, candidates), None)
    if found_at is None:
        raise UserError(f"{package} is not found here, nor by {sys.executable}; install it or give FILE.py:FUNCTION")
    return str(Path(found_at).resolve().parent)


def standard() -> Tuple[str, ...]:
    """Return the names of what is measured by default."""
    rows = [row for row in IMPLEMENTATIONS if not row.template]
    return (*(row.name for row in rows), *(f"{row.name}:{BY_UTTERANCE}" for row in rows if row.by_utterance))


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the log folders that a reader searches."""
    words = "Log folders, which are searched; a results.jsonl or a single trace works too. Default: log"
    parser.add_argument("log", nargs="*", metavar="LOG", type=flag_types.path, help=words)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose implementations; `chosen` reads them."""
    group = parser.add_argument_group("which implementations")
    variants = ", ".join(row.name for row in with_variants() if ":" in row.name)
    which = (
        f"Only these losses: {', '.join(standard())}; variants, which call them in another way: {variants}; "
        f"or a loss of your own, by its file (benchmark_flash.py). With :{BY_UTTERANCE} an exact loss gets the logits "
        "of an utterance at a time, under torch.utils.checkpoint. With @ENVIRONMENT a loss runs under the torch of "
        f"another environment: fast_rnnt@k2; with @{FAST_MKL} MKL takes the path that it takes on Intel's processors. "
        "Default: all but the variants, two by utterance, for each other torch one control of each kind, and where "
        f"torch multiplies slowly (with --limits) the first losses with @{FAST_MKL}"
    )
    names_of = implementations(standard())
    add(group, "--only", "Only these losses.", type=names_of, metavar="A,B", default=standard(), help=which)
    add_loss(group)
    add(group, "--topology", "Losses on another lattice: tdt, hat, modified, ...", choices=tuple(LATTICES))
    add(group, "--skip", HELP["--skip"], type=names_of, metavar="A,B", default=())


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> List[str]:
    """Return the names that the flags of `add_choice` choose, the user's own first."""
    names = [name for name in dict.fromkeys([*arguments.loss, *arguments.only]) if name not in arguments.skip]
    if not names:
        parser.error("argument --skip: it leaves nothing of --only")
    if arguments.topology:
        given = [row.name for row in with_variants() if not row.template] if arguments.only == standard() else names
        names = [name for name in given if find(name).kind == arguments.topology and name not in arguments.skip]
        if not names:
            parser.error(f"argument --topology: no loss of --only is on the lattice {arguments.topology}")
    return names
