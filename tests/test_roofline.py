"""How near a time is to what the device must do at least: by hand."""

from __future__ import annotations

import pytest
import torch
from commands import ROOT
from fixtures_runs import (
    correctness,
    environment,
    one_row,
    records_of,
    sample,
    status,
    summarize,
    write_records,
    write_run,
)

from common.analysis import logs, times
from common.losses import oracle
from common.records import schema

SETTINGS = {"dtype": "float32", "vocab_size": 10, "encoder_dim": 3, "pruned_recipe": "icefall", "prune_range": 5}
#: Two utterances, of T 5 and U 2, and of T 1 and U 1: 16 rows and 17 cells, of which 12 are met by one symbol a frame.
BATCH = {"index": 7, "N": 2, "T_max": 5, "U_max": 2, "useful_cells": 17, "padded_cells": 30}
BATCH.update(frames=6, tokens=8, one_symbol_cells=12, pruned_cells=6)
AT_SIZE = {"batch": 7, "N": 2, "T_max": 5, "U_max": 2, "loss_error": 0, "grad_error": 0, "grad_tolerance": 1}


def work(scope, kind="exact", share=0.5, **settings):
    return times.least_work(scope, kind, schema.Batch(**BATCH), {**SETTINGS, **settings}, share)


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("exact", {}, 4 * 10 * (2 * 8.5 + 17)),
        ("exact", {"dtype": "bfloat16"}, 2 * 10 * (2 * 8.5 + 17)),
        ("modified", {}, 4 * 10 * (2 * 8.5 + 17)),
        ("pruned", {}, 4 * 10 * (2 * 6 + 6)),
        ("tdt", {"durations": "0,1,2,4,8"}, 4 * 15 * (2 * 8.5 + 17)),
    ],
)
def test_a_loss_reads_the_needed_logits_twice_and_writes_all_gradients(kind, settings, expected):
    assert work("loss", kind, **settings) == (expected, 0)


@pytest.mark.parametrize(
    "kind, recipe, expected",
    [
        ("exact", "icefall", (8 * (16 * 3 + 3 * 10), 180 * 8.5)),
        ("pruned", "icefall", (8 * (16 * 3 + 3 * 3 * 10), 180 * 6 + 180 * 16 + 2 * 17 * 10)),
        ("pruned", "benchmark-2022", (8 * (16 * 3 + 3 * 10), 180 * 6 + 2 * 17 * 10)),
    ],
)
def test_a_step_multiplies_three_times_where_needed_and_stores_no_logits(kind, recipe, expected):
    assert work("step", kind, pruned_recipe=recipe) == expected


def test_the_oracle_counts_the_cells_that_float32_can_tell_from_zero():
    of_cells = torch.tensor([[1.0, 7e-8, 4e-8], [0.25, 1e-17, 0.0]], dtype=torch.float64)
    counted = [oracle.needed_cells(of_cells, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert counted == [3, 3] and oracle.needed_cells(of_cells, torch.float64) == 4


def limits(stream_seconds=1.0, product_seconds=2.0, **fields):
    """Best rates of 1000 bytes (of the larger buffer) and 1000 operations a second, by default."""
    stream = {"kernel": "update", "moved_bytes": 1000, "ns": [2 * stream_seconds * 1e9, stream_seconds * 1e9]}
    streams = [{**stream, "buffer_bytes": 666}, {**stream, "buffer_bytes": 66, "ns": [1.0]}]
    return {
        "record": "limits",
        "streams": streams,
        "products": [{"n": 10, "ns": [9 * product_seconds * 1e9, product_seconds * 1e9]}],
        **fields,
    }


def write_limited(folder, *lines, **checked):
    """One batch, of which all cells are needed; a step takes 10, 20 and 30 s, a loss 5 s."""
    checked = {"at_size": {**AT_SIZE, "useful_cells": 17, "needed_cells": 17}, **checked}
    samples = [sample("timing-1", "step", 7, seconds * 1e3) for seconds in (10, 20, 30)]
    samples += [sample("timing-1", "loss", 7, 5e3), sample("timing-1", "loss", 7, 1, warmup=True)]
    timed = [environment("timing-1", batches=[BATCH]), *samples, status("timing-1")]
    write_run(folder, jobs=[correctness(**checked), timed], passes=["correctness", "timing"], rounds=1, **SETTINGS)
    records = records_of(folder)
    for line in records:
        if line["record"] == "environment":
            line["batches"] = [BATCH]
    write_records(folder, [records[0], *lines, *records[1:]])
    return folder


def test_a_row_has_its_share_of_the_limit(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(2, 4, flags=["busy"]), limits()))
    assert row["bytes_per_second"] == 1000  # the best of all, of the largest buffer
    assert row["limit_percent"] == pytest.approx({"step": 3.06 / 20 * 100, "loss": 2.04 / 5 * 100})
    assert " 15 / 41 " in summarize(tmp_path) and not any("beside other load" in note for note in row["notes"])
    half = one_row(write_limited(tmp_path / "b", limits(), at_size={**AT_SIZE, "useful_cells": 40, "needed_cells": 20}))
    assert half["limit_percent"]["step"] == pytest.approx(1.53 / 20 * 100)
    for name, lines, checked in (("c", [limits()], {"at_size": None}), ("d", [limits(streams=[])], {}), ("e", [], {})):
        assert one_row(write_limited(tmp_path / name, *lines, **checked))["limit_percent"] == {}


@pytest.mark.parametrize("flags, why", [([], "please report it"), (["busy", "loaded"], "beside other load")])
def test_a_row_over_the_limit_says_that_the_limit_is_wrong(tmp_path, flags, why):
    """No share above 100% is printed as if it were one."""
    text = summarize(write_limited(tmp_path / "a", limits(1000, 1000, flags=flags)))
    assert "the limit is wrong" in text and why in text and " >100 " in text


def test_no_exact_row_of_the_recorded_results_is_over_its_limit():
    log = logs.read([ROOT / "results"], all_runs=True)
    rows = [row for row in [*log.rows, *log.swept] if row.kind == "exact"]
    shares = [(row.log_dir, share) for row in rows for share in row.limit_percent.values()]
    assert len(shares) >= 10 and [entry for entry in shares if not 0 < entry[1] <= 100] == []
