"""Define the flags of a run of the losses, and read them.  No torch here."""

from __future__ import annotations

import ast
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rnnt_bench.core import files, flag_types, settings
from rnnt_bench.core.called import command
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


def add_flags(parser: ArgumentParser, without: Collection[str] = ()) -> None:
    """Add the flags of a run.  A setting that is not given stays None; the preset decides.

    without: flags that the command has no use for; they are as if they were not given."""
    groups: dict[str, Any] = {}
    parser.set_defaults(**dict.fromkeys(without))
    for key, setting in settings.SETTINGS.items():
        if key in without or not setting.help:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        add(
            groups[setting.group],
            setting.flag,
            setting.short,
            help=setting.help_text(),
            **setting.arguments(),
        )
    add(
        groups[settings.TIMING],
        "--limits",
        type=flag_types.str2bool,
        metavar="BOOL",
        help="Measure how fast the device reads, writes and multiplies, before every third round. '%% of limit' "
        "needs it. Default: true; false with --preset quick, --budget and --sweep",
    )
    run = parser.add_argument_group("the run")
    add(
        run,
        "--log-dir",
        "Folder of the results.",
        type=flag_types.path,
        default=files.LOG,
        metavar="DIR",
        help="Folder in which each run makes its own, <name>-<batch size>, with .2, .3 ... where that exists. "
        "Default: log/ beside this script",
    )
    add(
        run,
        "--timeout",
        type=flag_types.positive,
        default=1800.0,
        metavar="S",
        help="End a process of an implementation after S seconds; its row says timeout. Default: 1800",
    )
    add(
        run,
        "--wait",
        type=flag_types.Whole(0),
        metavar="S",
        help="Wait up to S seconds in all for a quiet machine, then repeat the timing rounds that ran beside other "
        "load; 0 repeats none. Default: 60; 0 with --preset quick and --sweep",
    )
    add(
        run,
        "--resume",
        "Continue after an interruption.",
        action="store_true",
        help="Continue the newest unfinished run, or sweep, with the same settings instead of starting one.",
    )
    add(
        run,
        "--in-place",
        action="store_true",
        help="Run everything in this Python, with what it has installed, and use no other environment.",
    )
    add(
        run,
        "--quiet",
        action="store_true",
        help="Print no progress on stderr; the table still goes to stdout.",
    )
    add(
        run,
        "--details",
        "Also print stages, options, limits and notes.",
        action="store_true",
        help="Print the whole table with stages, options, limits, errors and notes, as in details.txt of --log-dir. "
        "Default: a summary on one screen",
    )
    if "sweep" not in without:
        add(
            run,
            "--sweep",
            "Measure at each of these values: vocab-size=500,4096.",
            action="append",
            default=[],
            type=settings.axis,
            metavar="KEY=A,B,...",
            help="Measure at each of these values; if given several times, at all combinations, each in a run of its "
            f"own, without traces. KEY is one of {', '.join(settings.SWEEPABLE)}. Default: no sweep",
        )


def add_setting(group: Any, key: str, help: str, **arguments: Any) -> None:
    """Add the flag of a setting to another command, which says in its own words what it means
    there."""
    group.add_argument(
        settings.SETTINGS[key].flag,
        help=help,
        **{**settings.SETTINGS[key].arguments(), **arguments},
    )


def add(group: Any, flag: str, short: str = "", **arguments: Any) -> None:
    """Add a flag as add_argument does.  short: the sentence of --help; "" leaves it to
    --help-all."""
    group.add_argument(flag, **arguments).short = short


def read_settings(arguments: Namespace) -> settings.Values:
    """Return the flags that are settings of the run (see rnnt_bench.core.settings), None for those
    not given.  Raises UserError for a shape file that is not there, before anything is started."""
    flags = {key: vars(arguments).get(key) for key in settings.SETTINGS if key != "device"}
    shape_file: Path | None = flags["shape_file"]
    if shape_file is not None:
        from rnnt_bench.data import shapes  # brings numpy, which no reader waits for

        if problem := files.not_a_file(shape_file):
            advice = f"make one with {command('shapes')} or remove the flag"
            raise UserError(f"--shape-file {shape_file}: {problem}; {advice}")
        path = shape_file.resolve()
        flags["shape_file"] = str(
            path.relative_to(files.ROOT) if files.ROOT in path.parents else path
        )
        flags["file_vocab_size"] = shapes.vocab_size(path)
    shortest, longest = flags["min_duration"], flags["max_duration"]
    if shortest is not None and longest is not None and shortest > longest:
        raise UserError(
            f"--min-duration {shortest:g} is above --max-duration {longest:g}: no utterance is between"
        )
    return flags


def with_limits(arguments: Namespace, resolved: settings.Settings) -> bool:
    """Tell whether the device's limits are measured: as --limits says, else as the preset does."""
    if arguments.limits is not None:
        return bool(arguments.limits)
    return flag_types.size_and_workload(resolved.preset)[0] != "quick" and not (
        arguments.budget or arguments.sweep
    )


def wait(arguments: Namespace) -> float:
    """Return how many seconds to wait, in all, for a quiet machine: as --wait says, else as the
    preset does."""
    if arguments.wait is not None:
        return float(arguments.wait)
    return WAIT_SECONDS if settings.waits(arguments.preset, dict(arguments.sweep)) else 0.0


def implementations(everything: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a flag that takes names of the table, and files such as
    benchmark_flash.py, with :VARIANT and @ENVIRONMENT behind them.  The row of a file is in the
    table from then on.  "all" is `everything`."""

    def parse(text: str) -> tuple[str, ...]:
        names, others = [], []
        for word in map(str.strip, text.split(",")):
            file = re.match(r".+?\.py(?=[:@]|$)", word)
            name = of_file(file[0]).name + word[file.end() :] if file else word
            if "@" in name or name.endswith(f":{BY_UTTERANCE}"):
                name = find(name).name  # its own where that is the environment
                others.append(name)
            names.append(name)
        choices = dict.fromkeys([*(row.name for row in with_variants()), *others])
        return flag_types.some_of(list(choices), everything)(",".join(names))

    return parse


def add_loss(group: Any) -> None:
    """Add --loss, which names functions to measure without a script of theirs."""
    add(
        group,
        "--loss",
        "A loss of your own: mypackage.rnnt:loss or file.py:loss.",
        action="append",
        default=[],
        type=own_loss,
        metavar="MODULE:FUNCTION",
        help="Also measure this function, called as loss(logits, targets, T_lengths, U_lengths), which returns the "
        "summed loss. NAME=MODULE:FUNCTION gives its row a name, FILE.py:FUNCTION takes it from a file. Repeatable.",
    )


def own_loss(text: str) -> str:
    """Parse [NAME=]MODULE:FUNCTION or [NAME=]FILE.py:FUNCTION, and write the script that measures
    it beside what is compiled; return the name of its row."""
    name, _, target = text.rpartition("=")
    module, _, function = target.rpartition(":")
    if not (module and function):
        raise UserError(f"give MODULE:FUNCTION or FILE.py:FUNCTION, not {text!r}")
    folders: tuple[str, ...] = ()
    if module.endswith(".py"):
        path = Path(module).resolve()
        if problem := files.not_a_file(path):
            raise UserError(f"{module}: {problem}")
        name = name or f"{path.stem}.{function}"
        target = f"{path}:{function}"
    else:
        folder, path = _location_of(module)
        name = name or f"{module}.{function}"
        folders = (str(folder),)
    if path.suffix == ".py" and path.is_file():  # not within an archive
        _need_function(path, function)
    script = files.BUILD / "losses" / f"loss_of_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.py"
    content = (
        f'"""Made by --loss {target}."""\nfrom rnnt_bench.losses.adapter import OfFunction\n\nclass Own(OfFunction):\n'
        f"    name = {name!r}\n    target = {target!r}\n    folders = {folders!r}\n\n\nADAPTER = Own\n"
    )
    files.make_folder(script.parent, "make it writable")
    files.write_whole("make it writable", (script, content))
    return of_file(str(script)).name


def _location_of(module: str) -> tuple[Path, Path]:
    """Return the folder that the package of a module lies in, the current folder first, and the
    module's file, or its folder where it has no file.  Raises UserError."""
    locations: list[Path] = []
    search = [os.getcwd(), *sys.path]
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search)
        search = list(spec.submodule_search_locations or ()) if spec else []
        location = (spec and spec.origin) or next(iter(search), None)
        if location is None:
            raise UserError(
                f"{module} is not found here, nor by {sys.executable}; install it or give FILE.py:FUNCTION"
            )
        locations.append(Path(location).resolve())
    top, file = locations[0], locations[-1]
    package = top.parent if top.name == "__init__.py" else top
    return package.parent, file


def _need_function(path: Path, function: str) -> None:
    """Raise UserError for a file that is no Python, or nowhere has the name of the function."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: not Python ({error.msg})") from error
    name = function.partition(".")[0]
    if not re.search(rf"\b{re.escape(name)}\b|import \*|__getattr__", source):
        names = re.findall(r"(?m)^(?:def|class) (\w+)", source)
        raise UserError(f"{path}: has no function {name}{closest(name, names)}")


def standard() -> tuple[str, ...]:
    """Return the names of what is measured by default."""
    rows = [row for row in IMPLEMENTATIONS if not row.template]
    return (
        *(row.name for row in rows),
        *(f"{row.name}:{BY_UTTERANCE}" for row in rows if row.by_utterance),
    )


def add_choice(parser: ArgumentParser) -> None:
    """Add the flags that choose implementations; `chosen` reads them."""
    group = parser.add_argument_group("which implementations")
    names = implementations(standard())
    variants = ", ".join(row.name for row in with_variants() if ":" in row.name)
    add(
        group,
        "--only",
        "Only these losses.",
        type=names,
        metavar="A,B",
        default=standard(),
        help=f"Only these losses: {', '.join(standard())}; variants, which call them in another way: {variants}; "
        f"or a loss of your own, by its file (benchmark_flash.py). With :{BY_UTTERANCE} an exact loss gets the logits "
        "of an utterance at a time, under torch.utils.checkpoint. With @ENVIRONMENT a loss runs under the torch of "
        f"another environment: fast_rnnt@k2; with @{FAST_MKL} MKL takes the path that it takes on Intel's processors. "
        "Default: all but the variants, two by utterance, for each other torch one control of each kind, and where "
        f"torch multiplies slowly (with --limits) the first losses with @{FAST_MKL}",
    )
    add_loss(group)
    lattices = "; ".join(map(": ".join, LATTICES.items()))
    add(
        group,
        "--topology",
        "Losses on another lattice: tdt, hat, modified, ...",
        choices=tuple(LATTICES),
        help=f"Losses on another lattice. {lattices}. Default: the transducer's",
    )
    words = "All losses but these."
    add(group, "--skip", words, type=names, metavar="A,B", default=(), help=words)


def chosen(arguments: Namespace) -> list[str]:
    """Return the names that the flags of `add_choice` choose, the user's own first.  Raises
    UserError."""
    names = [
        name
        for name in dict.fromkeys([*arguments.loss, *arguments.only])
        if name not in arguments.skip
    ]
    if not names:
        raise UserError("--skip: it leaves nothing of --only")
    if arguments.topology:
        if arguments.only == standard():
            names = [row.name for row in with_variants() if not row.template]
        names = [
            name
            for name in names
            if find(name).kind == arguments.topology and name not in arguments.skip
        ]
        if not names:
            raise UserError(f"--topology: no loss of --only is on the lattice {arguments.topology}")
    return names
