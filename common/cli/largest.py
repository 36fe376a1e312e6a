"""Find the largest batch of each loss that fits into memory: the command `largest`."""

from __future__ import annotations

import argparse

from rnnt_bench.cli import benchmark
from rnnt_bench.cli.parser import add_choice, add_flags, chosen
from rnnt_bench.core.arguments import Parser

DESCRIPTION = """Find the largest batch that fits each loss, and what it needs.

Every size is tried in a process of its own.  Exit code: 0 if every row that could run did, 1 if some failed, 2 for bad
usage."""
EXAMPLES = """examples
  {prog} --memory-limit 16GB
  {prog} --only torchaudio,fused --device cuda --vocab-size 4096
"""


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, examples=EXAMPLES)
    add_choice(result)
    add_flags(result, without=("budget",))
    result.set_defaults(find_largest="batch-size")
    return result


def main(options: argparse.Namespace) -> int:
    return benchmark.benchmark(chosen(options), options, options.loss)
