"""The one command line of every benchmark script: from flags (common.flags) to names, settings and an exit code.

No torch here: ``--help`` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

from common import flag_types, flags, scripts, settings
from common.commands import guarded
from common.errors import EXIT_USAGE, UserError
from common.implementations import IMPLEMENTATIONS, with_variants


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (--help tells more)\n")


def given_settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    """The flags that are settings of the run (see common.settings), those not given as None.

    Raises UserError for a shape file that is not there, before anything is started.
    """
    values = vars(arguments)
    known = [field.name for field in settings.fields(settings.Settings)]
    given = {key: values.get(key) for key in known if key != "device"}
    shape_file: Optional[Path] = given["shape_file"]
    if shape_file is not None:
        if not shape_file.is_file():
            raise UserError(
                f"--shape-file {shape_file}: no such file; make one with generate_shape_info.py or leave the flag out"
            )
        path = shape_file.resolve()
        inside = settings.ROOT in path.parents
        given["shape_file"] = str(path.relative_to(settings.ROOT) if inside else path)
    return given


def implementations(everything: Sequence[str]) -> Callable[[str], Tuple[str, ...]]:
    """The type of a flag: names of the table, and files such as benchmark_flash.py (or benchmark_flash.py:variant),
    whose rows are known from then on; "all" is `everything`."""

    def parse(text: str) -> Tuple[str, ...]:
        words = []
        for word in text.split(","):
            script, colon, variant = word.strip().partition(":")
            try:
                words.append((scripts.of_file(script).name if script.endswith(".py") else script) + colon + variant)
            except UserError as error:
                raise argparse.ArgumentTypeError(str(error)) from error
        return flag_types.some_of([one.name for one in with_variants()], everything)(",".join(words))

    return parse


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Flags that choose implementations; `chosen` reads them."""
    names = tuple(one.name for one in with_variants())
    standard = tuple(one.name for one in IMPLEMENTATIONS if not one.template)
    group = parser.add_argument_group("which implementations")
    group.add_argument(
        "--only",
        type=implementations(standard),
        metavar="A,B",
        default=standard,
        help=(
            f"these: {', '.join(standard)}; or, in another way of calling it, "
            f"{', '.join(name for name in names if ':' in name)}; or a loss of your own, by its file "
            "(benchmark_flash.py). Default: all but those variants"
        ),
    )
    group.add_argument("--skip", type=implementations(standard), metavar="A,B", default=(), help="all but these")


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> List[str]:
    """Names of the implementations that the flags of `add_choice` choose."""
    names = [name for name in arguments.only if name not in arguments.skip]
    if not names:
        parser.error("argument --skip: nothing is left of --only")
    return names


def script_main(file: str, description: Optional[str], argv: Optional[Sequence[str]] = None) -> int:
    """The benchmark script `file` of one implementation, from flags to exit code.

    A template, or a copy of one, measures every other implementation too: it is there to be compared with them.
    """
    from common.running import runner

    parser = Parser(
        prog=f"{Path(sys.argv[0]).name}",
        description=description,
        epilog="Results: README.md tells how to read them; summarize.py prints the table of any log folder again.",
    )
    try:
        implementation = scripts.of_file(file)
    except UserError as error:
        parser.error(str(error))
    name, variants = implementation.name, implementation.variants
    if variants:
        parser.add_argument(
            "--variant",
            type=flag_types.some_of(("default", *variants)),
            metavar="A,B",
            default=("default",),
            help=f"the way of calling it: default, {', '.join(variants)}, or several. Default: default",
        )
    if implementation.template:
        add_choice(parser)
    flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    own = [name if word == "default" else f"{name}:{word}" for word in getattr(arguments, "variant", ("default",))]
    others = [other for other in chosen(parser, arguments) if other not in own] if implementation.template else []
    return guarded(parser.prog, lambda: runner.benchmark([*own, *others], arguments, own=own))
