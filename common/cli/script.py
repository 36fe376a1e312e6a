"""The main of every benchmark_<x>.py."""

from __future__ import annotations

from typing import Optional, Sequence


def script_main(file: str, description: Optional[str], argv: Optional[Sequence[str]] = None) -> int:
    """The benchmark script `file` of one implementation, from flags to exit code.  A template, or a copy of one,
    measures every other implementation too, to be compared with them."""
    # Here and not above: every worker imports a script, and needs none of this.
    from common.cli import benchmark, flag_types, flags
    from common.cli.parser import Parser, add_choice, chosen
    from common.core import scripts
    from common.core.errors import UserError
    from common.core.guard import guarded

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
    return guarded(parser.prog, lambda: benchmark.benchmark([*own, *others], arguments, own=own))
