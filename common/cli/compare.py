"""`rnnt-bench compare`: say what changed between two measurements, see docs/comparing.md."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rnnt_bench.analysis import comparison, logs
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import flag_types
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, EXIT_UNDECIDED, UserError, say
from rnnt_bench.core.files import cannot_write
from rnnt_bench.core.settings import FEWEST_ROUNDS
from rnnt_bench.core.statistics import TOLERANCE
from rnnt_bench.core.text import count, plain
from rnnt_bench.records import schema, store
from rnnt_bench.setup import interpreters
from rnnt_bench.show import tables
from rnnt_bench.show.comparison import FORMATS, on_one_side, render, screen, write

DESCRIPTION = """\
Compare two measurements, implementation by implementation and batch by batch: time, memory and correctness.

  compare BASELINE NEW               two log folders, run folders or results.jsonl files
  compare --in LOG A B               two implementations of one log folder: compare --in log torchaudio fast_rnnt
  compare --save-baseline NAME LOG   keep what LOG holds now under a name
  compare --baseline NAME LOG        what changed in LOG since then

Two versions of a loss: keep the old one beside the new as a script of its own and measure both in one run, whose rounds
alternate. The ratio of the times, new / baseline, is the geometric mean over the batches that both sides have. Its
interval is over rounds, which are fresh processes. Verdicts: faster or slower if the whole interval is beyond the
tolerance; same if all of it is within; beside load if too few rounds are free of other load; else unclear.
Fewer than 3 rounds on a side are always unclear. So are two separate runs that ran beside other load, or that drift as
much as they differ. A ratio of two separate runs is judged over that of the rows that did not change; without three
such rows it is unclear below 1.3.
"""
EXIT_CODES = """\
Exit code: 0 if the comparison was made, also if it is "unclear"; 1 with --fail-on-slower P% if the whole interval of
an implementation is above P%, or if one that the baseline measured failed or is missing in NEW (--only leaves it out);
3 with --strict if none surely is above P%, but one may be;
2 for bad usage and for two runs that cannot be compared (other shapes, batches, sizes, dtype, device, threads,
denormals, seed or machine, or two losses under two torches); 130 after Ctrl-C, 143 after SIGTERM.
"""


def parser() -> Parser:
    """Return the parser of the flags of `compare`."""
    usage = "%(prog)s [options] BASELINE NEW | --in LOG A B | [--save-]baseline NAME [LOG]"
    result = Parser(description=DESCRIPTION, epilog=EXIT_CODES, usage=usage)
    add = result.add_argument
    add(
        "sides",
        nargs="*",
        type=flag_types.name,
        metavar="BASELINE NEW",
        help="The baseline first.",
    )
    add(
        "--in",
        dest="log",
        type=flag_types.path,
        metavar="LOG",
        help="Compare two implementations of this log folder.",
    )
    add(
        "--save-baseline",
        type=flag_types.name,
        metavar="NAME",
        help="Keep what LOG (default: log) holds now as NAME, in the folder baselines of LOG; an older NAME becomes "
        "NAME.1.",
    )
    add(
        "--baseline",
        type=flag_types.name,
        metavar="NAME",
        help="Compare the baseline NAME of LOG (default: log) with what LOG holds now.",
    )
    add(
        "--only",
        type=flag_types.names,
        default=(),
        metavar="A,B",
        help="Only these implementations. Default: all",
    )
    add(
        "--scope",
        choices=SCOPES,
        help="Compare only the whole step or the loss alone. Default: both",
    )
    add(
        "--tolerance",
        type=flag_types.percentage,
        default=TOLERANCE,
        metavar="P%",
        help="Largest change of time or memory that does not matter. Default: 2%%",
    )
    add(
        "--fail-on-slower",
        type=flag_types.percentage,
        metavar="P%",
        help="Exit with 1 when a time grew by more than P%%. Default: never",
    )
    add(
        "--strict",
        action="store_true",
        help="With --fail-on-slower, exit with 3 where a time may have grown by more than P%%, though not surely: "
        "beside other load, say, or if its interval reaches above P%%.",
    )
    add(
        "--details",
        action="store_true",
        help="Print every number with its reason, and what changed in the code.",
    )
    add(
        "--output",
        type=flag_types.path,
        metavar="FILE",
        help="Also write a page that opens offline, such as FILE.html.",
    )
    add(
        "--format",
        choices=FORMATS,
        default="table",
        help="Format of what is printed; json is a list of objects. Default: table",
    )
    return result


def sides_of(options: Namespace) -> comparison.Sides:
    """Return the two sides that the flags name: the pairs of rows to compare, and the rows without
    a partner.  Raises UserError."""
    sides = options.sides
    # `options.log` is the LOG of --in; with --baseline the positional arguments are only its LOG.
    if options.baseline:
        log = Path(sides[0] if sides else "log")
        # A word after LOG makes this longer than two, which is refused below.
        sides = [kept_as(log, options.baseline), log, *sides[1:]]
    if len(sides) != 2 or (options.baseline and options.log):
        raise UserError(
            "give BASELINE and NEW, --in LOG and two names, or --baseline NAME [LOG] (--help tells more)"
        )
    if options.only and options.log:
        raise UserError("--only is for BASELINE and NEW; --in names two already")
    if options.log:
        return comparison.Sides([comparison.within(options.log, *sides)])
    baseline, new = map(Path, sides)
    return comparison.two_sides(baseline, new, options.only)


def kept_as(log: Path, name: str) -> Path:
    """Return the folder of the baseline `name` of a log folder.  Raises UserError where there is
    none."""
    folder = log / store.BASELINES / name
    if not folder.is_dir():
        names = ", ".join(sorted(path.name for path in folder.parent.glob("*"))) or "none"
        raise UserError(
            f"--baseline {name}: {log} keeps no such baseline; there are: {names} (--save-baseline NAME)"
        )
    return folder


def unfit_reason(row: Row) -> str:
    """Return why a row can be no baseline: the times of a scope have too few rounds without other
    load. Return "" if the row can be a baseline."""
    for times in map(row.times_of, SCOPES):
        rounds = len(times.medians)
        loaded = len(times.loaded)
        if rounds and rounds - loaded < FEWEST_ROUNDS:
            beside = f", {loaded} of them beside other load" if loaded else ""
            return f"it has {count(rounds, 'round')}{beside}; {FEWEST_ROUNDS} quiet ones are needed"
    return ""


def save(log: Path, name: str) -> Path:
    """Keep the records of the newest runs of a log folder as the baseline `name`; return its
    folder.  Rename an older baseline of this name, and say so.  Raises UserError."""
    # A letter, digit or '_', then more of these, '.' and '-': "main", "v1.2-gpu".
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(
            f"--save-baseline {name!r}: give a name of letters, digits, '.', '-' and '_'"
        )
    folder = log / store.BASELINES / name
    runs = runs_to_keep(log)
    try:
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            new = Path(scratch) / "new"
            for run in runs:
                copy = new / run.relative_to(log)
                copy.mkdir(parents=True)
                shutil.copyfile(run / schema.FILE_NAME, copy / schema.FILE_NAME)
            move_aside(folder)
            new.rename(folder)
    except OSError as error:
        raise UserError(cannot_write(folder, error, "free some space")) from error
    return folder


def runs_to_keep(log: Path) -> list[Path]:
    """Return the folders of the newest runs of a log folder, without those whose times cannot be
    compared (`unfit_reason`); warn of each run that is left out.  Raises UserError if none is left.
    """
    rows = [row for row in logs.read([log]).rows if (row.folder / schema.FILE_NAME).is_file()]
    if not rows:
        raise UserError(f"--save-baseline: no runs under {log}: run `{command('run')}` first")
    unfit = [(row, reason) for row in rows if (reason := unfit_reason(row))]
    left_out = [row.folder for row, _ in unfit]
    runs = [row.folder for row in rows if row.folder not in left_out]
    if not runs:
        reasons = "; ".join(f"{plain(row.name)}: {reason}" for row, reason in unfit)
        raise UserError(
            f"--save-baseline: {reasons}: what is compared with it would have no verdict"
        )
    for row, reason in unfit:
        store.warn(f"--save-baseline: {row.name} is left out: {reason}")
    return runs


def move_aside(folder: Path) -> None:
    """Rename a folder that is there to NAME.1, or NAME.2, ... where that is taken, and say so."""
    if not os.path.lexists(folder):
        return
    number = 1
    older = Path(f"{folder}.1")
    while os.path.lexists(older):
        number += 1
        older = Path(f"{folder}.{number}")
    folder.rename(older)
    say(f"the older {folder.name} is {older} now")


def main(options: Namespace) -> int:
    """Compare, or save a baseline, as the flags say; return the exit code."""
    if options.strict and options.fail_on_slower is None:
        raise UserError(
            "--strict only applies with --fail-on-slower P%: add that, or remove --strict"
        )
    if options.output is not None:
        interpreters.need("jinja2")
    if options.save_baseline:
        if len(options.sides) > 1 or options.baseline or options.log:
            raise UserError("--save-baseline NAME takes one log folder and no other side")
        print(f"kept as {save(Path(*(options.sides or ['log'])), options.save_baseline)}")
        return EXIT_OK
    sides = sides_of(options)
    scopes = [options.scope] if options.scope else SCOPES
    changes = comparison.compare(sides.pairs, scopes, options.tolerance)
    remarks = on_one_side(sides)
    if options.format == "table" and not options.details:
        text = screen(changes, remarks, tables.this_terminal())
    else:
        text = render(changes, remarks, options.format)
    print(text, end="", flush=True)
    if options.output is not None:
        say(f"page: {write(changes, remarks, options.output)}")
    if options.fail_on_slower is None:
        return EXIT_OK
    failures = comparison.regressions(changes, options.fail_on_slower) + comparison.missing_runs(
        sides
    )
    return judged(failures, comparison.undecided(changes, options.fail_on_slower), options.strict)


def judged(failures: Sequence[str], undecided: Sequence[str], strict: bool) -> int:
    """Print what --fail-on-slower found, and return the exit code.

    failures: the times that surely grew, and rows that are missing; undecided: the times that may
    have grown; strict: whether these have an exit code of their own."""
    for failure in failures:
        say(f"--fail-on-slower: {plain(failure)}")
    if undecided:
        first, *others = undecided
        and_others = f", and {count(len(others), 'more time')} (--details)" if others else ""
        advice = "" if strict else "; --strict exits with 3"
        say(f"warning: --fail-on-slower: not decided: {plain(first)}{and_others}{advice}")
    if failures:
        return EXIT_FAILED
    return EXIT_UNDECIDED if undecided and strict else EXIT_OK
