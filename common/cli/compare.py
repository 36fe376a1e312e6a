"""`rnnt-bench compare`: say what changed between two measurements, see docs/comparing.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Sequence

from common.analysis import comparison
from common.analysis.comparison import Sides
from common.analysis.row import SCOPES
from common.analysis.standing import percent
from common.cli.flags import add_flags
from common.cli.parser import Parser, add_choice, chosen
from common.cli.screen import how
from common.core import flag_types
from common.core.errors import EXIT_FAILED, EXIT_OK, UserError
from common.core.guard import guarded
from common.core.settings import with_correctness
from common.core.statistics import TOLERANCE
from common.core.text import plain
from common.jobs import revisions
from common.setup import interpreters
from common.show.comparison import FORMATS, on_one_side, render, screen, write

#: With --rev, where the flags do not say: the fewest and the most rounds, the passes, the slowdown to show.
REVISION_ROUNDS, REVISION_PASSES, DETECT = (10, 50), ("timing", "memory"), 0.1

NAME = "rnnt-bench compare"
DESCRIPTION = """\
Compare two measurements, implementation by implementation and batch by batch: time, memory and correctness.

  compare BASELINE NEW       two log folders, run folders or results.jsonl files
  compare --in LOG A B       two implementations of one log folder: compare --in log torchaudio fast_rnnt
  compare --rev A --rev B    two git revisions, measured now in turn (A, B, B, A, ...), in temporary work trees;
                             WORKTREE is a copy of your files. Flags of benchmark_all.py follow after --:
                             compare --rev main --rev WORKTREE -- --only torchaudio --rounds 10

The ratio of the times, new / baseline, is the geometric mean over the batches that both sides have. Its interval is
over rounds, which are fresh processes. Verdicts: faster or slower if the whole interval is beyond the tolerance; same
if all of it is within (--same); beside load if too few rounds are free of other load; else unclear. Fewer than 3 rounds
on a side are always unclear. So are two separate runs that ran beside other load, or that drift as much as they differ.
"""
EXIT_CODES = """\
Exit code: 0 if the comparison was made, also if it is "unclear"; 1 with --fail-on-slower P% if the whole interval of
an implementation is above P%, or if one that the baseline measured failed or is missing in NEW (--only leaves it out);
2 for bad usage and for two runs that cannot be compared (other shapes, batches, sizes, dtype, device, threads,
denormals, seed or CPU, or two losses under two torches); 130 after Ctrl-C, 143 after SIGTERM.
"""


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog=NAME,
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        usage=f"{NAME} [options] BASELINE NEW | --in LOG A B | --rev A --rev B [-- BENCHMARK FLAGS]",
    )
    result.add_argument(
        "sides", nargs="*", type=flag_types.named, metavar="BASELINE NEW", help="The two sides, the baseline first."
    )
    result.add_argument(
        "--in", dest="log", type=flag_types.path, metavar="LOG", help="Compare two implementations of this log folder."
    )
    result.add_argument(
        "--rev",
        dest="revisions",
        action="append",
        default=[],
        metavar="REV",
        help="Measure this git revision; give two.",
    )
    result.add_argument(
        "--log-dir",
        type=flag_types.path,
        metavar="DIR",
        help="With --rev: keep the results in DIR/baseline and DIR/new. Default: a new folder in .build/compare",
    )
    result.add_argument(
        "--only",
        type=flag_types.words,
        default=(),
        metavar="A,B",
        help="Compare only these implementations of BASELINE and NEW. Default: all that both have",
    )
    result.add_argument("--scope", choices=SCOPES, help="Compare only the whole step or the loss alone. Default: both")
    result.add_argument(
        "--tolerance",
        type=flag_types.percentage,
        default=TOLERANCE,
        metavar="P%",
        help="Largest change of time or memory that does not matter. Default: 2%%",
    )
    result.add_argument(
        "--same",
        type=flag_types.percentage,
        metavar="P%",
        help="Call times the same where the whole interval is within P%%. Default: the tolerance",
    )
    result.add_argument(
        "--detect",
        type=flag_types.percentage,
        metavar="P%",
        help="With --rev: measure until a slowdown of P%% would show in each step time with a probability of 80%%, "
        "in 10 to 50 rounds. -- --rounds N measures N rounds instead. Default: 10%%",
    )
    result.add_argument(
        "--fail-on-slower",
        type=flag_types.percentage,
        metavar="P%",
        help="Exit with 1 when a time grew by more than P%%. Default: never",
    )
    result.add_argument(
        "--details", action="store_true", help="Print every number with its reason, and what changed in the code."
    )
    result.add_argument(
        "--output",
        type=flag_types.path,
        metavar="FILE",
        help="Also write a page that opens offline, such as FILE.html.",
    )
    result.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="Format of what is printed; json is a list of objects. Default: table",
    )
    return result


def sides_of(options: argparse.Namespace, flags: Sequence[str]) -> Sides:
    """Return the pairs to compare, and what could not be paired.  Raises UserError."""
    if len(options.revisions or options.sides) != 2 or (options.revisions and (options.sides or options.log)):
        raise UserError("give BASELINE and NEW, or --in LOG and two names, or --rev twice (--help tells more)")
    if flags and not options.revisions:
        raise UserError(f"{flags[0]}: flags after -- are for the benchmarks of --rev")
    for flag, given in (("--log-dir", options.log_dir), ("--detect", options.detect)):
        if given is not None and not options.revisions:
            raise UserError(f"{flag}: only --rev measures")
    if options.only and (options.revisions or options.log):
        instead = "give it after --, to what is measured" if options.revisions else "--in names two already"
        raise UserError(f"--only is for BASELINE and NEW; {instead}")
    if options.same is not None and options.same < options.tolerance:
        raise UserError(f"--same: has to be at least the tolerance, {percent(options.tolerance)} (--tolerance)")
    if options.log:
        return Sides(comparison.within(options.log, *options.sides))
    if not options.revisions:
        baseline, new = map(Path, options.sides)
        return comparison.two_sides(baseline, new, options.only)
    if options.detect is not None and options.detect <= options.tolerance:
        raise UserError(f"--detect: has to be above the tolerance, {percent(options.tolerance)} (--tolerance)")
    change = options.detect or max(DETECT, 2 * options.tolerance)

    def rounds_of(baseline: Path, new: Path) -> int:
        return comparison.rounds_to_detect(compared(comparison.two_sides(baseline, new), options), change) or 0

    logs = revisions.measure(options.revisions, benchmark_flags(flags), rounds_of, options.log_dir)
    return comparison.two_sides(*logs)


def compared(sides: Sides, options: argparse.Namespace) -> List[comparison.Change]:
    scopes = [options.scope] if options.scope else SCOPES
    return comparison.compare(sides.pairs, scopes, options.tolerance, options.same)


def benchmark_flags(given: Sequence[str]) -> revisions.Flags:
    """Return the flags after ``--``, checked before anything is checked out."""
    benchmark = Parser(prog=f"{NAME} --rev A --rev B --")
    add_choice(benchmark)
    add_flags(benchmark)
    parsed = benchmark.parse_args(given)
    for flag in ("--resume", "--log-dir"):
        if any(word == flag or word.startswith(f"{flag}=") for word in given):
            advice = "which makes folders of its own (--log-dir before the -- names them)"
            raise UserError(f"{flag}: not for --rev, {advice}")
    if parsed.find_largest:
        raise UserError("--find-largest: not for --rev, which compares the times of the same batches")
    if parsed.sweep:
        raise UserError("--sweep: not for --rev, which compares one configuration; name it with the flags themselves")
    passes = [name for name in with_correctness(parsed.passes or REVISION_PASSES) if name != "trace"]
    fewest, most = (parsed.rounds, parsed.rounds) if parsed.rounds else REVISION_ROUNDS
    return revisions.Flags(given, chosen(benchmark, parsed), fewest, most, passes, parsed.in_place)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    mine, flags = list(arguments), []
    if "--" in mine:
        end = mine.index("--")
        mine, flags = mine[:end], mine[end + 1 :]
    options = parser().parse_args(mine)
    return guarded(NAME, lambda: _compared(options, flags))


def _compared(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if options.output is not None and interpreters.lacks("msgspec", "jinja2"):
        interpreters.continue_in("main")  # returns where there is no such environment
    sides = sides_of(options, flags)
    rows = compared(sides, options)
    failures = []
    if options.fail_on_slower is not None:
        failures = comparison.regressions(rows, options.fail_on_slower) + comparison.gone(sides)
    if options.format == "table" and not options.details:
        text = screen(rows, on_one_side(sides), **how())
    else:
        text = render(rows, on_one_side(sides), options.format)
    print(text, end="", flush=True)
    if options.output is not None:
        print(f"page: {write(rows, on_one_side(sides), options.output)}", file=sys.stderr)
    for failure in failures:
        print(f"--fail-on-slower: {plain(failure)}", file=sys.stderr)
    return EXIT_FAILED if failures else EXIT_OK
