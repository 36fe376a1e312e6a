"""The flags of every benchmark script: the settings of a run, as common.core.settings declares them, and a few more.

``--help-all`` shows every flag; ``--help`` those that are given a short text.
"""

from __future__ import annotations

import argparse
from typing import Any, Dict

from common.core import files, grid, settings
from common.core import flag_types as types
from common.core.settings import SETTINGS

SWITCH = {"action": "store_true"}

EXAMPLES = """examples
  {prog} --preset quick                          a smoke run
  {prog} --device cuda --vocab-size 4096         on my GPU, with my vocabulary
  {prog} --find-largest batch-size --memory-limit 16GB
  {prog} --shape-file mine.pt --min-duration 1 --max-duration 20
  {prog} --sweep vocab-size=500,1000,4096 --frames 100 --tokens 20
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every benchmark script takes.  A setting that is not given stays None; the preset decides."""
    groups: Dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        add(groups[setting.group], setting.flag, short=setting.short, help=setting.help_text(), **setting.arguments())
    add(
        groups[settings.TIMING],
        "--limits",
        type=types.str2bool,
        metavar="BOOL",
        help="Measure how fast the device reads, writes, multiplies and takes exponentials at the beginning of each "
        "round, for about two seconds each. '%% of limit' needs it. Default: true; false with --preset quick, --budget "
        "and --sweep",
    )
    _add_flags_of_run(parser.add_argument_group("the run"))


def _add_flags_of_run(run: Any) -> None:
    add(
        run,
        "--log-dir",
        type=types.path,
        default=files.LOG,
        metavar="DIR",
        short="Folder of the results.",
        help="Folder in which each run makes its own, <name>-<batch size>, with .2, .3 ... where that exists. Default: "
        "log/ beside this script",
    )
    add(
        run,
        "--timeout",
        type=types.positive,
        default=1800.0,
        metavar="S",
        help="End a process of an implementation after S seconds; its row says timeout. Default: 1800",
    )
    add(
        run,
        "--wait",
        type=types.whole(0),
        metavar="S",
        help="Wait up to S seconds in all for a quiet machine, then repeat the timing rounds that ran beside other "
        "load; 0 repeats none. Default: 60; 0 with --preset quick, --budget and --sweep",
    )
    add(
        run,
        "--resume",
        **SWITCH,
        short="Continue after an interruption.",
        help="Continue the newest unfinished run, or sweep, with the same settings instead of starting one.",
    )
    add(
        run,
        "--in-place",
        **SWITCH,
        help="Run everything in this Python, with what it has installed, and use no environment of `make setup`.",
    )
    add(run, "--quiet", **SWITCH, help="Print no progress on stderr; the table still goes to stdout.")
    add(
        run,
        "--details",
        **SWITCH,
        short="Also print stages, options, limits and notes.",
        help="Print the whole table with stages, options, limits, errors and notes, as in details.txt of --log-dir. "
        "Default: a summary on one screen",
    )
    add(
        run,
        "--sweep",
        action="append",
        default=[],
        type=grid.axis,
        metavar="KEY=A,B,...",
        short="Measure at each of these values: vocab-size=500,4096.",
        help="Measure at each of these values; if given several times, at all combinations, each in a run of its own, "
        f"without traces. KEY is one of {', '.join(settings.SWEEPABLE)}. Default: no sweep",
    )


def add_setting(group: Any, key: str, help: str, **arguments: Any) -> None:
    """Add the flag of a setting to another command, which says in its own words what it means there."""
    group.add_argument(SETTINGS[key].flag, help=help, **{**SETTINGS[key].arguments(), **arguments})


def add(group: Any, flag: str, short: str = "", **arguments: Any) -> None:
    """Add a flag as add_argument does.  short: the sentence of --help; "" leaves it to --help-all."""
    group.add_argument(flag, **arguments).short = short
