"""What a loss must do at least, in numbers computed by hand, and how much of a run's time that is."""

from __future__ import annotations

import math

import pytest
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

from common.analysis import logs, roofline
from common.analysis.roofline import Peaks, Sizes, Work
from common.records import schema
from common.report import facts
from common.tables import results

#: Utterances (T, U) = (4, 1), (9, 0) and one symbol a frame kept; older runs have the first six fields alone.
BATCH = {
    "index": 7,
    "N": 2,
    "T_max": 9,
    "U_max": 1,
    "useful_cells": 4 * 2 + 9,
    "padded_cells": 2 * 9 * 2,
    "frames": 13,
    "tokens": 1,
    "one_symbol_cells": 4 * 2 - 1 + 9,
    "pruned_cells": 13,
}
OLD = {key: BATCH[key] for key in list(BATCH)[:6]}
SETTINGS = {"dtype": "float32", "vocab_size": 10, "encoder_dim": 3, "pruned_recipe": "icefall", "prune_range": 1}
PACKED, PADDED = Sizes(17, 16, 13, 13 + 1 + 2), Sizes(36, 36, 18, 18 + 4)


def limits(seconds_per_500_bytes=1, seconds_per_product=2, **more):
    """500 bytes read and written: 1000 per second; 2 x 10^3 operations in two seconds."""
    return {
        "record": "limits",
        "copies": [{"buffer_bytes": 500, "ns": [9e9, seconds_per_500_bytes * 1e9]}],
        "products": [{"n": 10, "ns": [seconds_per_product * 1e9, 9e9]}],
        "flags": [],
        "reason": "",
        **more,
    }


def test_sizes_of_both_layouts():
    batch = schema.Batch(**BATCH)
    assert roofline.sizes(batch, "packed", 1) == PACKED
    assert roofline.sizes(batch, "padded", 1) == PADDED
    assert roofline.sizes(batch, "padded", 5).pruned == 2 * 9 * 2
    assert roofline.sizes(schema.Batch(**OLD), "packed", 1) is None


@pytest.mark.parametrize(
    "kind, size, expected",
    [
        ("exact", PACKED, Work(12 * 17 * 10, 0)),
        ("exact", PADDED, Work(12 * 36 * 10, 0)),
        ("topology", PACKED, Work(4 * (2 * 16 + 17) * 10, 0)),
        ("pruned", PACKED, Work(12 * 13 * 10, 0)),
        ("additive", PACKED, Work(12 * 16 * 10, 6 * 17 * 10)),
    ],
)
def test_given_logits_each_is_read_twice_and_its_gradient_written_once(kind, size, expected):
    assert roofline.work("loss", kind, size, SETTINGS) == expected
    half = roofline.work("loss", kind, size, {**SETTINGS, "dtype": "bfloat16"})
    assert half == Work(expected.bytes / 2, expected.flops)


@pytest.mark.parametrize(
    "kind, recipe, expected",
    [
        ("exact", "icefall", Work(8 * (16 * 3 + 3 * 10), 6 * 17 * 3 * 10)),
        ("topology", "icefall", Work(8 * (16 * 3 + 3 * 10), 6 * 16 * 3 * 10)),
        ("pruned", "icefall", Work(8 * (16 * 3 + 3 * 3 * 10), 6 * (13 + 16) * 3 * 10 + 6 * 17 * 10)),
        ("pruned", "benchmark-2022", Work(8 * (16 * 3 + 3 * 10), 6 * 13 * 3 * 10 + 2 * 17 * 10)),
        ("additive", "icefall", Work(8 * (16 * 3 + 2 * 3 * 10), 6 * 16 * 3 * 10 + 6 * 17 * 10)),
    ],
)
def test_a_step_multiplies_three_times_and_stores_no_logits(kind, recipe, expected):
    assert roofline.work("step", kind, PACKED, {**SETTINGS, "pruned_recipe": recipe}) == expected


def test_the_longer_of_moving_and_multiplying_is_the_floor():
    assert roofline.seconds(Work(3000, 4000), Peaks(1000, 2000)) == 3
    assert roofline.seconds(Work(3000, 8000), Peaks(1000, 2000)) == 4
    assert roofline.seconds(Work(3000, 0), Peaks(1000, None)) == 3
    assert roofline.seconds(Work(3000, 8000), Peaks(1000, None)) is None
    assert roofline.seconds(Work(3000, 8000), Peaks(None, 2000)) is None


def test_the_better_of_two_measurements_counts():
    assert roofline.peaks(list(map(schema.typed, [limits(1, 4), limits(2, 2)]))) == Peaks(1000, 1000)
    assert roofline.peaks([schema.typed(limits(copies=[], products=[]))]) == Peaks(None, None)


def test_a_batch_with_more_samples_counts_no_more():
    assert roofline.limit_percent({1: 1.0, 2: 1.0}, {1: [2.0], 2: [7.0, 8.0, 9.0]}) == pytest.approx(
        100 / math.sqrt(16)
    )
    assert roofline.limit_percent({1: 1.0}, {1: [2.0], 2: [8.0]}) is None  # not the batches of the median
    assert roofline.limit_percent({1: 1.0}, {}) is None


def write_limited(folder, *lines, exact=True, batch=BATCH):
    """One batch; a step takes 10, 20 and 30 s, a loss 5 s."""
    about = environment("timing-1", batches=[batch])
    samples = [sample("timing-1", "step", batch["index"], seconds * 1e3) for seconds in (10, 20, 30)]
    samples += [sample("timing-1", "loss", batch["index"], 5e3), sample("timing-1", "loss", 7, 1, warmup=True)]
    write_run(
        folder,
        exact=exact,
        jobs=[correctness(), [about, *samples, status("timing-1")]],
        passes=["correctness", "timing"],
        rounds=1,
        **SETTINGS,
    )
    found = records_of(folder)
    write_records(folder, [found[0], *lines, *found[1:]])
    return folder


def test_a_row_has_its_floor_and_its_share_of_the_limit(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(flags=["busy"]), limits(2, 4)))
    assert (row["copy_bytes_per_second"], row["flops_per_second"]) == (1000, 1000)
    assert row["floor"]["step"]["packed"] == pytest.approx({"bytes": 624, "flops": 3060, "ms": 3060})
    assert row["floor"]["loss"]["padded"] == pytest.approx({"bytes": 4320, "flops": 0, "ms": 4320})
    assert row["limit_percent"]["step"] == pytest.approx({"packed": 15.3, "padded": 6 * 36 * 30 / 200})
    assert row["limit_percent"]["loss"] == pytest.approx({"packed": 2.04 / 5 * 100, "padded": 4.32 / 5 * 100})
    assert not any("beside other load" in note for note in row["notes"])
    assert row["round_medians_ms"] == {"step": {"1": {"7": 20e3}}, "loss": {"1": {"7": 5e3}}}


def test_pruned_rows_have_a_floor_of_their_own(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(), exact=False))
    assert row["floor"]["loss"]["packed"]["bytes"] == 1560
    assert row["floor"]["step"]["padded"]["flops"] == 6 * (18 + 22) * 30 + 6 * 36 * 10


def test_what_was_not_measured_is_not_shown(tmp_path):
    failed = {"record": "limits", "copies": [], "products": [], "reason": "timeout: limits took more than 1 s"}
    row = one_row(write_limited(tmp_path / "failed", failed))
    assert row["limit_percent"]["step"] == {"packed": None, "padded": None}
    assert "the device's limits were not measured: timeout: limits took more than 1 s" in summarize(tmp_path / "failed")
    row = one_row(write_limited(tmp_path / "without"))
    assert row["limit_percent"] == row["floor"] == {} and row["flops_per_second"] is None
    row = one_row(write_limited(tmp_path / "old", limits(), batch=OLD))
    assert row["limit_percent"] == row["floor"] == {} and row["flops_per_second"] == 1000


def test_limits_measured_beside_other_load_are_said_to_be(tmp_path):
    write_limited(tmp_path / "a", limits(flags=["busy"]))
    assert "torchaudio: the device's limits were measured beside other load" in summarize(tmp_path / "a")


def test_table_and_report_show_the_share_and_the_limits(tmp_path):
    write_limited(tmp_path / "a", limits(1e-6, 1e-7))  # 1 GB/s, 20 GFLOP/s
    line = next(line for line in summarize(tmp_path).splitlines() if line.startswith("torchaudio "))
    assert " 0.000003 / 0.000041 " in line
    below = next(line for line in summarize(tmp_path).splitlines() if line.startswith("this device's limits"))
    assert "copies 1.00 GB/s, products 20.0 GFLOP/s" in below and "padding counted as work: torchaudio 0.0000" in below
    (group,) = logs.read([tmp_path]).groups
    told = dict(facts.machine(group.rows))
    assert told["Copies, at best"] == "1.00 GB/s read and written"
    assert told["Matrix products, at best"] == "20.0 GFLOP/s in float32"
    table = results.table("page", "Results", group.rows)
    cells = dict(zip([column.title for column in table.columns], table.rows[0]))
    assert cells["% of limit, loss"].value == pytest.approx(2.04e-6 / 5 * 100)
    assert cells["over the fastest"].shown == "1.00"
