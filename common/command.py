"""Starts the scripts of the top level: the one module that knows every tool of the suite.

A tool of its own is one line of `_slices`.  Workers import this too, so nothing heavy is imported above.
"""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

from common.present import slices
from common.present.slices import Slice


def _slices() -> Tuple[Slice, ...]:
    """Return every tool, in the order of the page."""
    from common.conformance.slice import CONFORMANCE
    from common.tools.flops.slice import FLOPS
    from common.tools.inference.slice import INFERENCE, PIPELINES
    from common.tools.profile.slice import PROFILE

    return PROFILE, FLOPS, INFERENCE, PIPELINES, CONFORMANCE


def register() -> None:
    """Let the page, the summary and the verdict know every tool."""
    slices.provide(_slices)


def run(name: str, main: Callable[[], int]) -> int:
    """Run the main function of the script `name` with every tool known; return the exit code, see guard.guarded."""
    from common.core.guard import guarded

    register()
    return guarded(name, main)


def script_main(file: str, description: Optional[str], argv: Optional[Sequence[str]] = None) -> int:
    """The benchmark script `file` of one implementation, from flags to exit code.  A template, or a copy of one,
    measures every other implementation too, to be compared with them."""
    # Here and not above: every worker imports a script, and needs none of this.
    from common.cli import benchmark, flag_types, flags
    from common.cli.parser import Parser, add_choice, chosen
    from common.core import scripts
    from common.core.errors import UserError

    parser = Parser(
        description=description,
        epilog="docs/reading.md tells how to read the table; summarize.py prints it again for any log folder.",
    )
    try:
        implementation = scripts.of_file(file)
    except UserError as error:
        parser.error(str(error))
    parser.shorten(flags.short(parser.prog, description or "", implementation.template))
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
    return run(parser.prog, lambda: benchmark.benchmark([*own, *others], arguments, own=own))
