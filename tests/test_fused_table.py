"""benchmarks/fused_table.py at toy size; no speed is asserted."""

from __future__ import annotations

import shutil
import sys

from commands import ROOT, assert_user_error, run

from common.analysis.row import Row
from common.records.schema import Batch, Environment, Header

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


def test_percent_of_limit_is_the_product_of_the_shares():
    """Half of the operations needed, at half the best rate, in half of the time: an eighth of the limit.

    Of ten cells, all of which forward computed, four are needed: 4 x 3 x 2 H V of 1440 operations.
    """
    parts = dict.fromkeys(("preparing", "activations", "exponentials", "lattice", "adding", "waiting"), 0)
    forward = {"ns": 1_000, "flops": 600, "parts_ns": {**parts, "products": 1_000, "waiting": 1_000}}
    cells = {"useful_cells": 10, "padded_cells": 10, "one_symbol_cells": 9, "pruned_cells": 10}
    batch = Batch(index=7, N=1, T_max=5, U_max=1, frames=5, tokens=1, **cells)
    settings = {"dtype": "float32", "vocab_size": 10, "encoder_dim": 3, "prune_range": 5}
    row = Row(
        header=Header(name="fused", settings=settings),
        jobs={"timing-1": [Environment(job="timing-1", batches=[batch])]},
        needed_share=0.4,
        flops_per_second=2.88e9,
        limit_percent={"step": {"packed": 12.5}},
    )
    measured = fused_table.Measured(fused_table.WORKLOADS["bpe500"], "random", "bpe500-random", {"fused": row}, {})
    both = {"forward": forward, "backward": {**forward, "flops": 840}}
    line = fused_table.parts_line(measured, {"run": "bpe500-random", "batch": 7, "threads": 2, **both})
    shown = {head: cell.shown for head, cell in line.items()}
    shares = ("operations: needed of done", "products: of the best rate", "time: products", "waiting", "rest")
    assert [shown[share] for share in shares] == ["50", "50", "50", "50", "0"]


def test_the_best_peer_is_chosen_over_shared_batches():
    chosen = fused_table.best({"1": 2.0, "2": 8.0}, {"a": {"1": 10.0}, "b": {"1": 4.0, "2": 1.0}})
    assert chosen == (2.0, 4.0, "b") and chosen.value == 0.5
    assert fused_table.best({"1": 2.0}, {}) is None


def test_flags_that_benchmark_all_refuses(tmp_path):
    done = run(SCRIPT, "--log-dir", tmp_path, "--workloads", "bpe500", "--", "--vocab-size", 1)
    assert done.returncode == 2 and "--vocab-size" in done.stderr and "Traceback" not in done.stderr
    assert_user_error(run(SCRIPT, "--workloads", "bpe50"), "--workloads", "bpe50")
