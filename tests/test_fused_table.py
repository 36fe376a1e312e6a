"""benchmarks/fused_table.py at toy size; no speed is asserted."""

from __future__ import annotations

import shutil
import sys

from commands import ROOT, assert_user_error, run

sys.path.append(str(ROOT / "benchmarks"))

import fused_table  # noqa: E402

SCRIPT = "benchmarks/fused_table.py"


def test_a_line_of_the_table(tmp_path, tiny_shapes):
    small = (
        "--in-place",
        "--rounds",
        1,
        "--limits",
        "false",
        "--shape-file",
        tiny_shapes,
        "--frames",
        12,
        "--tokens",
        4,
        "--vocab-size",
        101,
        "--encoder-dim",
        128,
    )
    choice = (
        "--workloads",
        "long-form",
        "--logits",
        "trained",
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
    assert len(row) == len(heads) and of["logits"] == "trained"
    for unit, times in (("ms", "times faster"), ("MB", "times smaller")):
        peer, name = of[f"best exact {unit}"].rstrip(")").split(" (")
        ratio = float(peer) / float(of[f"fused {unit}"])
        assert name == "reference" and abs(float(of[times]) - ratio) < 0.06 * ratio


def test_a_row_that_fails_is_named_and_the_others_are_compared(tmp_path):
    """fast_rnnt, say, whose memory does not suffice."""
    (kept,) = [path for path in (ROOT / "results").iterdir() if path.name.endswith("-cores")]
    for name in ("fused-2", "optimized_transducer-2", "fast_rnnt-2", "torchaudio-2"):
        to = tmp_path / ("bpe500-memory" if name == "torchaudio-2" else "bpe500-random") / name
        shutil.copytree(kept / name, to)
        if name == "fast_rnnt-2":
            text = (to / "results.jsonl").read_text()
            (to / "results.jsonl").write_text(text.replace('"status":"ok"', '"status":"oom"'))
    page = fused_table.render(tmp_path)
    assert " (optimized_transducer) |" in page and "bpe500-random: fast_rnnt: oom" in page
    assert " (torchaudio) | " in page  # the smallest, from the run that measured memory alone


def test_the_best_peer_is_chosen_over_shared_batches():
    chosen = fused_table.best({"1": 2.0, "2": 8.0}, {"a": {"1": 10.0}, "b": {"1": 4.0, "2": 1.0}})
    assert chosen == (2.0, 4.0, "b") and chosen.value == 0.5
    assert fused_table.best({"1": 2.0}, {}) is None


def test_flags_that_benchmark_all_refuses(tmp_path):
    done = run(SCRIPT, "--log-dir", tmp_path, "--workloads", "bpe500", "--", "--vocab-size", 1)
    assert done.returncode == 2 and "--vocab-size" in done.stderr and "Traceback" not in done.stderr
    assert_user_error(run(SCRIPT, "--workloads", "bpe50"), "--workloads", "bpe50")
