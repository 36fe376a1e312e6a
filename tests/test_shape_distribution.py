"""T, U and padding of all utterances and of the measured ones: counted by hand, recorded once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run
from fixtures_runs import DISTRIBUTION, correctness, environment, records_of, write_run

from common.analysis import logs
from common.data import batching
from common.records import schema, store
from common.records.run import claim_folder
from common.records.sweep import SweepFile, SweepRun


def test_all_and_measured_are_counted_over_the_same_bins():
    shapes = np.array([(10, 3), (20, 3), (30, 4), (40, 4), (99, 0)], dtype=np.int32)
    counts = batching.distribution(batching.fixed_size(shapes, 2), [1])
    frames = counts.T
    assert (frames.begin, frames.width, frames.lowest, frames.median, frames.highest) == ((10, 5, 10, 30, 99))
    assert len(frames.all) == len(frames.measured) == 18
    assert [at for at, count in enumerate(frames.all) if count] == [0, 2, 4, 6, 17]
    assert [at for at, count in enumerate(frames.measured) if count] == [4, 6]  # T of 30 and of 40
    assert counts.U.all == [1, 0, 0, 2, 2] and counts.U.measured == [0, 0, 0, 0, 2]
    padding = counts.padding_percent
    assert sum(padding.all) == 3 and sum(padding.measured) == 1
    assert (padding.lowest, padding.median, padding.highest) == (0, 12.5, 25)  # alone; 70 of 80; 30 of 40


@pytest.mark.parametrize("spread", [0, 1, 39, 40, 41, 79, 80, 10**6])
def test_bins_are_round_and_not_too_many(spread):
    values = np.array([7, 7 + spread])
    counts = batching.histogram(values, values[1:], 1)
    assert len(counts.all) <= batching.MOST_BINS and sum(counts.all) == 2 and sum(counts.measured) == 1
    assert counts.begin <= 7 < counts.begin + counts.width
    assert counts.all[-1] >= 1 and counts.measured[-1] == 1
    assert str(int(counts.width)).rstrip("0") in ("1", "2", "5")


def test_it_is_recorded_in_the_correctness_job_alone_and_is_small(tmp_path, tiny_shapes):
    done = run(
        "losses/benchmark_reference.py",
        *("--preset", "quick", "--passes", "correctness,memory", "--shape-file", tiny_shapes),
        *("--log-dir", tmp_path, "--quiet"),
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    told = {line["job"]: line for line in records_of(folder) if line["record"] == "environment"}
    assert "shape_distribution" in told["correctness"] and "shape_distribution" not in told["memory"]
    record = told["correctness"]["shape_distribution"]
    assert sum(record["T"]["measured"]) == sum(batch["N"] for batch in told["correctness"]["batches"])
    assert len(json.dumps(record)) < 3000


def test_a_sweep_does_not_repeat_it_in_each_cell(tmp_path):
    claim = claim_folder(tmp_path, "sweep")
    header = schema.SweepHeader(sweep_id="s", grid={}, settings={})
    sweep = SweepFile(claim.path.with_name(schema.SWEEP_FILE_NAME), header, {}, claim)
    store.append(sweep.path, [schema.as_written(header)])
    SweepRun(sweep, 0, "k2", []).add(correctness())
    sweep.close()
    kept = [json.loads(line) for line in sweep.path.read_text().splitlines()]
    assert [line["record"] for line in kept] == ["sweep", "environment", "correctness", "status"]
    assert "shape_distribution" not in kept[1] and kept[1]["batches"]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {**DISTRIBUTION, "U": None},
        {**DISTRIBUTION, "T": {**DISTRIBUTION["T"], "all": [1]}},
        {**DISTRIBUTION, "T": {**DISTRIBUTION["T"], "measured": [0, "x"]}},
        {**DISTRIBUTION, "T": {**DISTRIBUTION["T"], "measured": [0, 0]}},
        {**DISTRIBUTION, "T": {**DISTRIBUTION["T"], "width": 0}},
        {**DISTRIBUTION, "T": {**DISTRIBUTION["T"], "median": "8"}},
    ],
)
def test_a_broken_distribution_is_none(tmp_path, broken):
    write_run(tmp_path / "a", jobs=[[environment("correctness", shape_distribution=broken), *correctness()[1:]]])
    (entry,) = logs.rows([tmp_path])
    assert entry.distribution is None
