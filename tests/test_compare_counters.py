"""benchmarks/compare_counters.py: it makes the table of docs/flops.md, and leaves out what is not installed."""

from __future__ import annotations

import importlib.util

import pytest
from commands import ROOT, assert_user_error, run

SCRIPT = "benchmarks/compare_counters.py"


def rows(text, first="model"):
    """{model: {column: value}} of the first table of this text whose first column is called so."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    heads, _, *body = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    return {row[0]: dict(zip(heads[1:], row[1:])) for row in body}


@pytest.mark.thorough
def test_the_documentation_has_what_it_prints():
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr
    page, counted = rows((ROOT / "docs" / "flops.md").read_text(encoding="utf-8")), rows(done.stdout)
    assert list(counted) == list(page) and "hubert_base on 1 s" in counted
    assert counted == {name: {column: page[name][column] for column in row} for name, row in counted.items()}
    assert {"MACs", "FLOPs"} < set(counted["softmax of (2, 5)"])
    both_ways = rows(done.stdout, "forward and backward")
    assert both_ways == rows((ROOT / "docs" / "flops.md").read_text(encoding="utf-8"), "forward and backward")
    grouped = both_ways["Conv1d(16, 16, 3, groups=16) on length 10"]
    assert grouped["MACs"] == str(2 * 480) and int(grouped["more"]) > 0


def test_a_counter_that_is_not_installed_is_left_out():
    missing = [package for package in ("fvcore", "deepspeed") if not importlib.util.find_spec(package)]
    done = run(SCRIPT, "--only", "softmax")
    assert done.returncode == 0 and "| softmax of (2, 5) | 0 | 30 |" in done.stdout
    for package in missing:
        assert f"skipped: {package} " in done.stderr and package not in done.stdout.lower()


def test_an_unknown_row_is_one_line():
    assert_user_error(run(SCRIPT, "--only", "nothing"), "--only nothing")
