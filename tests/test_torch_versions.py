"""benchmarks/torch_versions.py: what became of a loss under a torch, in one word with the reason below the table."""

from __future__ import annotations

import importlib

import pytest

torch_versions = importlib.import_module("benchmarks.torch_versions")


@pytest.mark.parametrize(
    "status, reason, outcome",
    [
        ("ok", "", "right"),
        ("error", "correctness: wrong result: loss 3, expected 4", "wrong"),
        ("missing", "k2 does not import", "does not run"),
        ("timeout", "took more than 900 s", "no answer in time"),
    ],
)
def test_the_outcome_of_a_row(status, reason, outcome):
    result = torch_versions.outcome_of({"status": status, "reason": reason, "implementation_version": "1.0"})
    assert result == {"outcome": outcome, "version": "1.0", "reason": reason}


def test_a_table_has_a_column_for_each_torch_and_each_reason_once():
    failed = {"outcome": "does not run", "version": "", "reason": "built for a|b"}
    right = {"outcome": "right", "version": "1", "reason": ""}
    versions = [
        {"torch": "2.8.0+cu128", "losses": {"fused": right, "k2": failed}},
        {"torch": "2.15.0", "losses": {"k2": failed}},
    ]
    lines = torch_versions.table({"versions": versions}).splitlines()
    assert lines[0] == "| loss | torch 2.8.0 | torch 2.15.0 |"
    assert lines[2:4] == ["| k2 | does not run (1) | does not run (1) |", "| fused | right | - |"]
    assert lines[5:] == ["1. built for a\\|b"]
