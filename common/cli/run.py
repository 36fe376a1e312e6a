"""Define the flags of the command `run`, and of the benchmark scripts of single losses.
benchmark.py does what they say."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from rnnt_bench.cli import benchmark, cluster, listing
from rnnt_bench.cli.parser import add_choice, add_flags, chosen, standard
from rnnt_bench.core import implementations
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.called import command

DESCRIPTION = """Measure every loss and print which one to use.

Each pass and round of a loss has a process of its own, so a crash, a hang or a missing package
costs only that row. Ctrl-C and SIGTERM keep what is measured.  Exit code: 0 if every row that could
run did, 1 if some failed, 2 for bad usage.
"""
EXAMPLES = """examples
  {prog} --preset quick                          a smoke run
  {prog} --device cuda --vocab-size 4096         on my GPU, with my vocabulary
  {prog} --shape-file mine.pt --min-duration 1 --max-duration 20
  {prog} --sweep vocab-size=500,1000,4096 --frames 100 --tokens 20
"""


def parser() -> Parser:
    """Return the parser of the flags of `run`."""
    result = Parser(description=DESCRIPTION, examples=EXAMPLES)
    add_choice(result)
    result.add_argument(
        "--list",
        action="store_true",
        help="List the implementations, where each would run and what it lacks, and stop.",
    )
    add_flags(result)
    cluster.add_flags(result)
    return result


def main(options: Namespace) -> int:
    """List the losses with --list, else measure them; return the exit code."""
    return listing.main(options) if options.list else benchmark.main(options)


@dataclass(frozen=True)
class Script:
    """Describe the script of one implementation as a command, which command.run runs.

    A script made from the template benchmark_mine.py measures all other losses beside its own."""

    file: str
    description: str | None

    @property
    def implementation(self) -> implementations.Implementation:
        """Return the script's row in the table of implementations; add a row if the script has
        none.

        Raises UserError for a file that is no script of a loss, see implementations.of_file."""
        return implementations.of_file(self.file)

    def parser(self) -> Parser:
        """Return the parser of the script's flags.  Raises UserError as `implementation` does."""
        epilog = (
            f"docs/reading.md tells how to read the table; {command('summarize')} prints it again."
        )
        result = Parser(description=self.description, examples=EXAMPLES, epilog=epilog)
        if self.implementation.template:
            add_choice(result)
        add_flags(result)
        return result

    def main(self, options: Namespace) -> int:
        """Measure the implementation; return the exit code.  Raises UserError.

        A script made from the template also measures the losses that the flags choose."""
        row = self.implementation
        names = [row.name]
        needed = [row.name]
        if row.template:
            # Where --only has its default, a loss on another lattice is compared with losses on
            # that lattice.
            if options.only == standard() and row.kind in implementations.LATTICES:
                options.topology = options.topology or row.kind
            names += chosen(options)
            needed += options.loss
        return benchmark.benchmark(list(dict.fromkeys(names)), options, needed)
