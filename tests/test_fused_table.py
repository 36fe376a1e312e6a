"""benchmarks/fused_table.py at toy size; no speed is asserted."""

from __future__ import annotations

import sys

from commands import ROOT, assert_user_error, run

sys.path.append(str(ROOT / "benchmarks"))

SCRIPT = "benchmarks/fused_table.py"


def test_a_line_of_the_table(tmp_path, tiny_shapes):
    small = ("--in-place", "--limits", "false", "--shape-file", tiny_shapes, "--frames", 12, "--tokens", 4)
    choice = (
        "--workloads",
        "long-form",
        "--logits",
        "peaky",
        "--size",
        "quick",
        "--peers",
        "reference",
        "--log-dir",
        tmp_path,
    )
    done = run(SCRIPT, *choice, "--", *small)
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    heads, _, row = lines
    of = dict(zip(heads, row))
    assert len(row) == len(heads) and of["logits"] == "peaky"
    for unit, kind in (("ms", "time"), ("MB", "memory")):
        peer, name = of[f"best exact {unit}"].rstrip(")").split(" (")
        ratio = float(of[f"{kind}, of it"].split()[0])  # two digits
        assert name == "reference" and abs(ratio - float(of[f"fused {unit}"]) / float(peer)) < 0.06 * ratio


def test_the_best_peer_is_chosen_over_shared_batches():
    import fused_table

    found = fused_table.best({"1": 2.0, "2": 8.0}, {"a": {"1": 10.0}, "b": {"1": 4.0, "2": 1.0}})
    assert found == (2.0, 4.0, "b") and found.value == 0.5
    assert fused_table.best({"1": 2.0}, {}) is None


def test_flags_that_benchmark_all_refuses(tmp_path):
    done = run(SCRIPT, "--log-dir", tmp_path, "--workloads", "bpe500", "--", "--vocab-size", 1)
    assert done.returncode == 2 and "--vocab-size" in done.stderr and "Traceback" not in done.stderr
    assert_user_error(run(SCRIPT, "--workloads", "bpe50"), "--workloads", "bpe50")
