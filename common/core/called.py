"""Word the commands that a text advises: a script or make in a checkout, rnnt-bench where it is
installed."""

from __future__ import annotations

from rnnt_bench.core.files import INSTALLED

PROGRAM = "rnnt-bench"
#: The script of a checkout that does the same as a command of rnnt-bench.
SCRIPTS = {
    "run": "./benchmark_all.py",
    "list": "./benchmark_all.py --list",
    "summarize": "./summarize.py",
    "shapes": "./generate_shape_info.py",
}
#: The environments that `make setup` makes unasked.
USUAL = ("main", "k2")


def command(name: str) -> str:
    """Return what the user types for a command: "./summarize.py", or "rnnt-bench summarize" where
    it is installed."""
    if INSTALLED:
        return f"{PROGRAM} {name}"
    return SCRIPTS.get(name, f"./{PROGRAM} {name}")


def or_set_up(advice: str, environment: str = "main") -> str:
    """Return "run `make setup`, or pip install x" of the advice "pip install x", which alone serves
    an installed suite.

    environment: the one that has it."""
    if INSTALLED:
        return advice
    chosen = "" if environment in USUAL else f" ENVIRONMENTS={environment}"
    return f"run `make setup{chosen}`, or {advice}"
