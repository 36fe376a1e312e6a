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

#: Seconds to wait for a quiet machine, where neither --wait nor the preset says otherwise.
WAIT_SECONDS = 60.0


def add_flags(parser: ArgumentParser, without: Collection[str] = ()) -> None:
    """Add the flags of a run.  A setting whose flag is not given is None: the preset decides.

    without: names of flags that the command does not take; their values are None."""
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
    """Add the flag of a setting to a command that takes few of them.

    key: of settings.SETTINGS; help: what it means in that command; arguments: further
    arguments of add_argument, which replace the setting's own of the same name."""
    group.add_argument(
        settings.SETTINGS[key].flag,
        help=help,
        **{**settings.SETTINGS[key].arguments(), **arguments},
    )


def add(group: Any, flag: str, short: str = "", **arguments: Any) -> None:
    """Add a flag as add_argument does.

    short: the sentence of the short --help; "" for a flag that only --help-all shows."""
    group.add_argument(flag, **arguments).short = short


def read_settings(arguments: Namespace) -> settings.Values:
    """Return {key: value} of the settings of the run, as `settings.resolve` takes them: without the
    device, and None for a flag that is not given.  With --shape-file, "file_vocab_size" is a key
    too.

    Raises UserError for a shape file that is not there, and for a --min-duration above
    --max-duration."""
    flags = {key: vars(arguments).get(key) for key in settings.SETTINGS if key != "device"}
    if flags["shape_file"] is not None:
        flags.update(_shape_file_settings(flags["shape_file"]))
    shortest = flags["min_duration"]
    longest = flags["max_duration"]
    if shortest is not None and longest is not None and shortest > longest:
        raise UserError(
            f"--min-duration {shortest:g} is above --max-duration {longest:g}: no utterance is between"
        )
    return flags


def _shape_file_settings(file: Path) -> settings.Values:
    """Return the settings of a shape file: its path, relative to the suite if it lies in there, and
    the vocabulary size with which its tokens were counted, None if that is not known.  Raises
    UserError."""
    from rnnt_bench.data import shapes  # imports numpy, which commands that only read do not need

    if problem := files.not_a_file(file):
        advice = f"make one with {command('shapes')} or remove the flag"
        raise UserError(f"--shape-file {file}: {problem}; {advice}")
    path = file.resolve()
    is_inside = files.ROOT in path.parents
    return {
        "shape_file": str(path.relative_to(files.ROOT) if is_inside else path),
        "file_vocab_size": shapes.vocab_size(path),
    }


def with_limits(arguments: Namespace, resolved: settings.Settings) -> bool:
    """Return whether the device's limits are measured: as --limits says, or by default unless the
    run is quick, has a budget or is a sweep."""
    if arguments.limits is not None:
        return bool(arguments.limits)
    is_quick = flag_types.size_and_workload(resolved.preset)[0] == "quick"
    return not (is_quick or arguments.budget or arguments.sweep)


def seconds_to_wait(arguments: Namespace) -> float:
    """Return how many seconds to wait, in all, for a quiet machine: as --wait says, or by default
    WAIT_SECONDS; 0 if the run is quick or a sweep."""
    if arguments.wait is not None:
        return float(arguments.wait)
    return WAIT_SECONDS if settings.waits(arguments.preset, dict(arguments.sweep)) else 0.0


def implementations(everything: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a flag that takes implementations, with commas between them.

    Each is the name of a row, or a file such as benchmark_flash.py; :VARIANT and @ENVIRONMENT may
    follow.  A file becomes a row of the table.  The word "all" means `everything`.

    Files become names first, so that `some_of` can check and sort all names at once."""

    def parse(text: str) -> tuple[str, ...]:
        names = []
        unlisted = []  # names of rows that `with_variants` lacks: the table makes them on demand
        for word in map(str.strip, text.split(",")):
            file = re.match(r".+?\.py(?=[:@]|$)", word)  # "flash.py" of "flash.py:modified@k2"
            name = of_file(file[0]).name + word[file.end() :] if file else word
            if "@" in name or name.endswith(f":{BY_UTTERANCE}"):
                name = find(name).name  # "k2@k2" is "k2"
                unlisted.append(name)
            names.append(name)
        listed = [row.name for row in with_variants()]  # with the rows that `of_file` added
        choices = list(dict.fromkeys([*listed, *unlisted]))
        return flag_types.some_of(choices, everything)(",".join(names))

    return parse


def add_loss(group: Any) -> None:
    """Add --loss, which names functions that are measured without a script of their own."""
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
    """Parse [NAME=]MODULE:FUNCTION or [NAME=]FILE.py:FUNCTION, write a script that measures the
    function, add its row to the table, and return the name of the row.  Raises UserError."""
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
        folder, path = _folder_and_file(module)
        name = name or f"{module}.{function}"
        folders = (str(folder),)
    if path.suffix == ".py" and path.is_file():  # a module in an archive is not checked
        _check_function(path, function)
    return of_file(str(_written_script(name, target, folders))).name


def _written_script(name: str, target: str, folders: tuple[str, ...]) -> Path:
    """Write the script that measures a function, in a folder of files.BUILD; return its path.
    Raises UserError if it cannot be written.

    name: the name of the function's row; target: FILE.py:FUNCTION or MODULE:FUNCTION; folders:
    where to import the module from."""
    script = files.BUILD / "losses" / f"loss_of_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.py"
    content = (
        f'"""Made by --loss {target}."""\nfrom rnnt_bench.losses.adapter import OfFunction\n\nclass Own(OfFunction):\n'
        f"    name = {name!r}\n    target = {target!r}\n    folders = {folders!r}\n\n\nADAPTER = Own\n"
    )
    advice = "make it writable"
    files.make_folder(script.parent, advice)
    files.write_whole((script, content), advice=advice)
    return script


def _folder_and_file(module: str) -> tuple[Path, Path]:
    """Return the folder from which a module can be imported, and the module's file; import nothing.

    The current folder is searched first.  A namespace package has no file, so its folder is returned
    instead.  Raises UserError if the module is not found.

    module: its name, such as "package.module"."""
    locations: list[Path] = []
    search = [os.getcwd(), *sys.path]
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            raise UserError(
                f"{module} is not found here, nor by {sys.executable}; install it or give FILE.py:FUNCTION"
            )
        search = list(spec.submodule_search_locations or ())  # for the next part
        locations.append(Path(spec.origin or search[0]).resolve())
    first, last = locations[0], locations[-1]
    if first.name == "__init__.py":  # the package is the folder in which this file lies
        first = first.parent
    return first.parent, last


def _check_function(path: Path, function: str) -> None:
    """Raise UserError for a file that is not Python, or where the name of the function does not
    appear.  A file that may get names from elsewhere is not refused."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: not Python ({error.msg})") from error
    name = function.partition(".")[0]
    if not re.search(rf"\b{re.escape(name)}\b|import \*|__getattr__", source):
        names = re.findall(r"(?m)^(?:def|class) (\w+)", source)  # "loss" of "def loss(logits):"
        raise UserError(f"{path}: has no function {name}{closest(name, names)}")


def standard() -> tuple[str, ...]:
    """Return the default of --only: every row of the table but templates, and some by utterance.

    A run measures fewer of these if the user names none: see `benchmark.default_rows`."""
    rows = [row for row in IMPLEMENTATIONS if not row.template]
    return (
        *(row.name for row in rows),
        *(f"{row.name}:{BY_UTTERANCE}" for row in rows if row.by_utterance),
    )


def add_choice(parser: ArgumentParser) -> None:
    """Add the flags that choose implementations, which `chosen` reads."""
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
        "Default: all losses, without their variants. These rows are added: two losses by utterance; of each kind one "
        "loss under each other torch; where torch multiplies slowly (with --limits), the first losses with "
        f"@{FAST_MKL}",
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
    skip = "All losses but these."
    add(group, "--skip", skip, type=names, metavar="A,B", default=(), help=skip)


def chosen(arguments: Namespace) -> list[str]:
    """Return the names of the rows that --loss, --only, --topology and --skip choose, those of
    --loss first.  Raises UserError where there are none.

    --topology leaves out the rows on other lattices.  Where --only has its default, the variants
    are candidates too: most rows of another lattice are variants."""
    only = arguments.only
    if set(arguments.skip).issuperset([*arguments.loss, *only]):
        raise UserError("--skip: it leaves nothing of --only")
    if arguments.topology and only == standard():
        # A template is measured only where it is named.
        only = [row.name for row in with_variants() if not row.template]
    candidates = dict.fromkeys([*arguments.loss, *only])
    names = [name for name in candidates if name not in arguments.skip]
    if arguments.topology:
        names = [name for name in names if find(name).kind == arguments.topology]
        if not names:
            raise UserError(f"--topology: no loss of --only is on the lattice {arguments.topology}")
    return names
