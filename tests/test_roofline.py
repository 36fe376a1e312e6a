"""What a loss must do at least, in numbers computed by hand, and how much of a run's time that is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from commands import has_words
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

from common.analysis import logs, metrics, roofline
from common.analysis.roofline import Least, Peaks, Sizes
from common.losses import oracle
from common.records import schema
from common.show import facts
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
SETTINGS = {"dtype": "float32", "vocab_size": 10, "encoder_dim": 3, "pruned_recipe": "icefall", "prune_range": 2}
#: A gradient in every second cell.
PACKED, PADDED = Sizes(17, 16, 13, 13 + 1 + 2, 8.5, 2), Sizes(36, 36, 18, 18 + 4, 18, 2)
AT_SIZE = {"batch": 7, "N": 2, "T_max": 9, "U_max": 1, "loss_error": 0, "grad_error": 0, "grad_tolerance": 1}
RESULTS = Path(__file__).resolve().parents[1] / "results"


def limits(seconds_per_1000_bytes=1, seconds_per_product=2, **fields):
    """1000 bytes read and written per second; 2 x 10^3 operations in two seconds."""
    moved = {"kernel": "update", "buffer_bytes": 666, "moved_bytes": 1000, "ns": [9e9, seconds_per_1000_bytes * 1e9]}
    return {
        "record": "limits",
        "streams": [moved],
        "products": [{"n": 10, "ns": [seconds_per_product * 1e9, 9e9]}],
        "flags": [],
        "reason": "",
        **fields,
    }


def test_sizes_of_both_layouts():
    batch = schema.Batch(**BATCH)
    assert roofline.sizes(batch, "packed", 1, 0.5) == PACKED
    assert roofline.sizes(batch, "padded", 1, 0.5) == PADDED
    assert roofline.sizes(batch, "padded", 5, 1.0).pruned == 2 * 9 * 2
    assert roofline.sizes(schema.Batch(**OLD), "packed", 1, 1.0) is None


@pytest.mark.parametrize(
    "kind, size, expected",
    [
        ("exact", PACKED, Least(4 * (2 * 8.5 + 17) * 10, 0, 85, 340)),
        ("exact", PADDED, Least(4 * (2 * 18 + 36) * 10, 0, 180, 720)),
        ("modified", PACKED, Least(4 * (2 * 8.5 + 17) * 10, 0, 85, 340)),
        ("modified", PACKED._replace(needed=17), Least(4 * (2 * 16 + 17) * 10, 0, 160, 340)),  # a path meets 16
        ("pruned", PACKED, Least(4 * (2 * 8.5 + 13) * 10, 0, 85, 260)),
        ("additive", PACKED, Least(12 * 16 * 10, 2 * 10 * 3 * 8.5, 160, 320)),
    ],
)
def test_given_logits_the_needed_ones_are_read_twice_and_all_gradients_written(kind, size, expected):
    assert roofline.work("loss", kind, size, SETTINGS) == expected
    half = roofline.work("loss", kind, size, {**SETTINGS, "dtype": "bfloat16"})
    assert half == expected._replace(bytes=expected.bytes / 2, held=expected.held / 2)


@pytest.mark.parametrize("scope", ["loss", "step"])
def test_durations_are_outputs_as_the_symbols_are(scope):
    as_wide = roofline.work(scope, "exact", PACKED, {**SETTINGS, "vocab_size": SETTINGS["vocab_size"] + 5})
    assert roofline.work(scope, "tdt", PACKED, SETTINGS) == as_wide
    assert roofline.work(scope, "tdt", PACKED, {**SETTINGS, "durations": "0,1,2,4,8"}) == as_wide
    fewer = roofline.work(scope, "multi-blank", PACKED, {**SETTINGS, "durations": "2"})
    assert fewer == roofline.work(scope, "exact", PACKED, {**SETTINGS, "vocab_size": SETTINGS["vocab_size"] + 1})


@pytest.mark.parametrize(
    "kind, recipe, expected",
    [
        ("exact", "icefall", (8 * (16 * 3 + 3 * 10), 180 * 8.5, 85)),
        ("modified", "icefall", (8 * (16 * 3 + 3 * 10), 180 * 8.5, 85)),
        ("pruned", "icefall", (8 * (16 * 3 + 3 * 3 * 10), 180 * 8.5 + 180 * 16 + 2 * 17 * 10, 85)),
        ("pruned", "benchmark-2022", (8 * (16 * 3 + 3 * 10), 180 * 8.5 + 2 * 17 * 10, 85)),
        ("additive", "icefall", (8 * (16 * 3 + 2 * 3 * 10), 180 * 16 + 60 * 8.5, 160)),
    ],
)
def test_a_step_multiplies_three_times_where_needed_and_stores_no_logits(kind, recipe, expected):
    assert roofline.work("step", kind, PACKED, {**SETTINGS, "pruned_recipe": recipe})[:3] == expected


def test_the_oracle_counts_the_cells_that_float32_can_tell_from_zero():
    of_cells = torch.tensor([[1.0, 7e-8, 4e-8], [0.25, 1e-17, 0.0]], dtype=torch.float64)
    counted = [oracle.needed_cells(of_cells, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert counted == [3, 3] and oracle.needed_cells(of_cells, torch.float64) == 4


@pytest.mark.parametrize(
    "flops, exps, flops_per_second, exps_per_second, bound",
    [
        (4000, 0, 2000, None, 3),
        (8000, 0, 2000, None, 4),
        (8000, 50, 2000, 10, 5),
        (0, 50, None, 10, 5),
        (0, 50, None, None, 3),  # older runs did not measure exponentials
        (8000, 0, None, 10, None),
    ],
)
def test_the_longest_of_moving_multiplying_and_exponentials_is_the_bound(
    flops, exps, flops_per_second, exps_per_second, bound
):
    best = Peaks(1000, flops_per_second, exps_per_second, ((500, 1000),))
    assert roofline.seconds(Least(3000, flops, exps, 500), best) == bound
    assert roofline.seconds(Least(3000, flops, exps, 500), best._replace(streams=())) is None


def test_what_fits_the_caches_is_held_against_their_rate():
    best = Peaks(10, 1, 1, ((1000, 10), (100, 9), (10, 70)))
    assert [best.moving(held) for held in (5000, 999, 100, 99, 10, 1)] == [10, 10, 10, 70, 70, 70]


def test_the_better_of_two_measurements_counts():
    best = roofline.peaks(list(map(schema.typed, [limits(1, 4), limits(2, 2)])))
    assert best == Peaks(1000, 1000, None, ((666, 1000),))
    assert roofline.peaks([schema.typed(limits(streams=[], products=[]))]) == Peaks(None, None, None)
    exps = [{"kernel": "exp", "count": 30, "ns": [9e9, 3e9]}, {"kernel": "exp2", "count": 30, "ns": [2e9]}]
    assert roofline.peaks([schema.typed(limits(exps=exps))]).exps_per_second == 15


def test_a_batch_with_more_samples_counts_no_more():
    assert roofline.limit_percent({1: 1.0, 2: 1.0}, {1: [2.0], 2: [7.0, 8.0, 9.0]}) == pytest.approx(
        100 / math.sqrt(16)
    )
    assert roofline.limit_percent({1: 1.0}, {1: [2.0], 2: [8.0]}) is None  # not the batches of the median
    assert roofline.limit_percent({1: 1.0}, {}) is None


def write_limited(folder, *lines, exact=True, batch=BATCH, node=None, **checked):
    """One batch, of which all cells are needed; a step takes 10, 20 and 30 s, a loss 5 s."""
    checked = {"at_size": {**AT_SIZE, "useful_cells": 17, "needed_cells": 17}, **checked}
    record = environment("timing-1", batches=[batch], node=node)
    samples = [sample("timing-1", "step", batch["index"], seconds * 1e3) for seconds in (10, 20, 30)]
    samples += [sample("timing-1", "loss", batch["index"], 5e3), sample("timing-1", "loss", 7, 1, warmup=True)]
    write_run(
        folder,
        exact=exact,
        jobs=[correctness(**checked), [record, *samples, status("timing-1")]],
        passes=["correctness", "timing"],
        rounds=1,
        **SETTINGS,
    )
    records = records_of(folder)
    write_records(folder, [records[0], *lines, *records[1:]])
    return folder


def test_a_row_has_its_bound_and_its_share_of_the_limit(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(flags=["busy"]), limits(2, 4)))
    assert (row["bytes_per_second"], row["flops_per_second"], row["exps_per_second"]) == (1000, 1000, None)
    assert row["floor"]["step"]["packed"] == pytest.approx({"bytes": 624, "flops": 3060, "exps": 170, "ms": 3060})
    assert row["floor"]["loss"]["padded"] == pytest.approx({"bytes": 4320, "flops": 0, "exps": 360, "ms": 4320})
    assert row["limit_percent"]["step"] == pytest.approx({"packed": 3.06 / 20 * 100, "padded": 6.48 / 20 * 100})
    assert row["limit_percent"]["loss"] == pytest.approx({"packed": 2.04 / 5 * 100, "padded": 4.32 / 5 * 100})
    assert row["limit_ranges"]["flops_per_second"] == {"measurements": 2, "lowest": 500, "highest": 1000}
    assert not any("beside other load" in note for note in row["notes"])
    assert row["round_medians_ms"] == {"step": {"1": {"7": 20e3}}, "loss": {"1": {"7": 5e3}}}


def test_a_row_is_held_against_the_limits_of_its_own_device(tmp_path):
    of_both = limits(1, 2, node="a"), limits(2, 4, node="b")
    rows = [one_row(write_limited(tmp_path / node, *of_both, node=node)) for node in "ab"]
    assert [row["flops_per_second"] for row in rows] == [1000, 500]
    percents = [row["limit_percent"]["step"]["packed"] for row in rows]
    assert percents == pytest.approx([3.06 / 20 * 100, 6.12 / 20 * 100])


def test_cells_that_a_loss_may_leave_out_are_not_counted(tmp_path):
    result = {**AT_SIZE, "useful_cells": 40, "needed_cells": 20}
    row = one_row(write_limited(tmp_path / "a", limits(), at_size=result))
    assert row["needed_share"] == 0.5
    assert row["limit_percent"]["step"]["packed"] == pytest.approx(1.53 / 20 * 100)
    assert row["limit_percent"]["loss"]["packed"] == pytest.approx(1.36 / 5 * 100)


def test_without_a_count_of_the_needed_cells_there_is_no_bound(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(), at_size=None))
    assert row["limit_percent"] == row["floor"] == {} and row["flops_per_second"] == 1000


@pytest.mark.parametrize("flags, why", [([], "please report it"), (["busy", "loaded"], "beside other load")])
def test_a_row_over_the_limit_says_that_the_limit_is_wrong(tmp_path, flags, why):
    """No share above 100% is printed as if it were one."""
    write_limited(tmp_path / "a", limits(1000, 1000, flags=flags))
    text = summarize(tmp_path / "a")
    assert "the limit is wrong" in text and why in text
    (row,) = logs.rows([tmp_path / "a"])
    assert row.limit_percent["loss"]["packed"] > 100
    assert metrics.METRICS["limits"].shown(row).endswith(" / >100")
    assert metrics.METRICS["loss_limit"].shown(row) == ">100" and metrics.METRICS["loss_limit"].value(row) is None


def test_no_exact_row_of_the_recorded_results_is_over_its_limit():
    log = logs.read([RESULTS], all_runs=True)
    shares = [
        (row.log_dir, scope, share["packed"])
        for row in [*log.rows, *(row for swept in log.sweeps for row in swept.rows)]
        if row.exact
        for scope, share in row.limit_percent.items()
        if share["packed"] is not None
    ]
    assert len(shares) >= 10 and [entry for entry in shares if not 0 < entry[2] <= 100] == []


def test_pruned_rows_have_a_bound_of_their_own(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(), exact=False))
    assert row["floor"]["loss"]["packed"]["bytes"] == 1560
    # 36 cells in the ranges of the padded batch
    assert row["floor"]["step"]["padded"]["flops"] == 180 * 36 + 180 * 22 + 2 * 36 * 10


def test_what_was_not_measured_is_not_shown(tmp_path):
    failed = {"record": "limits", "reason": "timeout: limits took more than 1 s"}
    row = one_row(write_limited(tmp_path / "failed", failed))
    assert row["limit_percent"]["step"] == {"packed": None, "padded": None}
    assert has_words(summarize(tmp_path / "failed"), "limits", "not measured", "timeout")
    row = one_row(write_limited(tmp_path / "without"))
    assert row["limit_percent"] == row["floor"] == {} and row["flops_per_second"] is None
    row = one_row(write_limited(tmp_path / "old", limits(), batch=OLD))
    assert row["limit_percent"] == row["floor"] == {} and row["flops_per_second"] == 1000


def test_limits_measured_beside_other_load_are_said_to_be(tmp_path):
    write_limited(tmp_path / "a", limits(flags=["busy"]))
    assert has_words(summarize(tmp_path / "a"), "torchaudio", "limits", "other load")


def test_table_and_report_show_the_share_and_the_limits(tmp_path):
    write_limited(tmp_path / "a", limits(1e-6, 2e-7), limits(2e-6, 1e-7))  # 1 GB/s, 20 GFLOP/s at best
    line = next(line for line in summarize(tmp_path).splitlines() if line.startswith("torchaudio "))
    assert " 0.000003 / 0.000041 " in line
    below = next(line for line in summarize(tmp_path).splitlines() if line.startswith("this device's limits"))
    memory, products = "(0.500 to 1.00 in 2 measurements)", "(10.0 to 20.0 in 2 measurements)"
    assert (
        f"memory 1.00 GB/s {memory}, products 20.0 GFLOP/s {products}" in below
        and "padding counted as work: torchaudio 0.0000" in below
    )
    (group,) = logs.read([tmp_path]).groups
    told = dict(facts.machine(group.rows))
    assert told["Memory, at best"] == f"1.00 GB/s read and written {memory}"
    assert told["Matrix products, at best"] == f"20.0 GFLOP/s in float32 {products}"
    table = results.table("page", "Results", group.rows)
    cells = dict(zip([column.title for column in table.columns], table.rows[0]))
    assert cells["% of limit, loss"].value == pytest.approx(2.04e-6 / 5 * 100)
    assert cells["over the fastest"].shown == "1.00"
