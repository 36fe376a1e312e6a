"""Word the commands that a message advises.

In a checkout these are its scripts and make; where the suite is installed with pip, rnnt-bench."""

from __future__ import annotations

from rnnt_bench.core.files import INSTALLED

PROGRAM = "rnnt-bench"
#: Command of rnnt-bench -> the script of a checkout that does the same.
SCRIPTS = {
    "run": "./benchmark_all.py",
    "list": "./benchmark_all.py --list",
    "summarize": "./summarize.py",
    "shapes": "./generate_shape_info.py",
}
#: The environments that `make setup` makes when none is named.
USUAL = ("main", "k2")


def command(name: str) -> str:
    """Return what the user types to start a command.

    For "summarize" that is "./summarize.py" in a checkout, "rnnt-bench summarize" if installed."""
    if INSTALLED:
        return f"{PROGRAM} {name}"
    return SCRIPTS.get(name, f"./{PROGRAM} {name}")


def or_set_up(advice: str, environment: str = "main") -> str:
    """Return the advice with `make setup` before it: "run `make setup`, or pip install k2".

    An installed suite has no Makefile, so there `advice` is returned as it is.

    advice: what else helps, such as "pip install k2"; environment: the one that has the package."""
    if INSTALLED:
        return advice
    chosen = "" if environment in USUAL else f" ENVIRONMENTS={environment}"
    return f"run `make setup{chosen}`, or {advice}"
