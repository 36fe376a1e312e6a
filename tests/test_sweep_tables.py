"""Sweeps read back: ordinary runs whose settings differ, one table by cell, curves and bars."""

from __future__ import annotations

import csv
import io

import pytest
from fixtures_runs import correctness, read_rows, status, summarize, three, write_run, write_sweep

from common.analysis import logs
from common.show.page import page
from common.show.sweep import figures

GRID = {"vocab_size": [500, 1000, 4000], "dtype": ["float32", "bfloat16"]}


def jobs_of(name, values):
    """linear grows as V, square as V^2 and dies at the last one, neither half precision."""
    V, half = values["vocab_size"], values["dtype"] == "bfloat16"
    if name == "square" and half:
        return [[status("correctness", "unsupported", "takes float32 only")]]
    if name == "square" and V == 4000:
        return [correctness(), [status("timing-1", "oom", "no memory")]]
    return three((V / 100) ** (2 if name == "square" else 1) / (2 if half else 1), peak_mb=V / 50)


@pytest.fixture
def log(tmp_path):
    return write_sweep(tmp_path / "log", GRID, ["square", "linear"], jobs_of)


def test_rows_are_by_cell_then_by_time_and_beside_ordinary_ones(log):
    write_run(log / "t-30")
    read = logs.read([log])
    (sweep,) = read.sweeps
    shown = [(*row.header.values.values(), row.name, row.status, row.median_ms("step")) for row in sweep.rows]
    assert shown[:2] == [(500, "float32", "linear", "ok", 5), (500, "float32", "square", "ok", 25)]
    assert shown[8:10] == [(4000, "float32", "linear", "ok", 40), (4000, "float32", "square", "oom", None)]
    assert sweep.grid == GRID and [row.name for row in read.rows] == ["torchaudio"]
    over = [row.over_fastest for row in sweep.rows if row.name == "square" and row.over_fastest]
    assert over == pytest.approx([5, 10])


def test_the_screen_is_grouped_by_cell_and_the_files_have_the_keys(log):
    text = summarize(log, details=False)
    lines = text.splitlines()
    assert lines[0].startswith("sweep over vocab-size 500, 1000, 4000 x dtype float32, bfloat16; ")
    at = lines.index("vocab-size 4000, dtype float32, exact:")
    assert lines[at + 1].split()[:3] == ["linear", "40.00", "1.00"] and "square: oom: timing-1: no memory" in text
    assert "vocab-size 4000, dtype float32:  linear, 40.00 ms a step" in text and max(map(len, lines)) <= 100
    assert "| vocab-size | dtype | implementation |" in summarize(log, "--format", "markdown")
    rows = list(csv.DictReader(io.StringIO(summarize(log, "--format", "csv", "--all-columns"))))
    assert len(rows) == 12 and rows[-1]["sweep_vocab_size"] == "4000" and rows[-1]["sweep_dtype"] == "bfloat16"
    assert read_rows(log)[0]["sweep"] == {"vocab_size": 500, "dtype": "float32"}


def test_the_newest_of_a_cell_is_shown(tmp_path):
    for day in (1, 2):
        write_sweep(tmp_path / f"s.{day}", {"threads": [1, 2]}, started=f"2026-01-0{day}T00:00:00+00:00")
    assert [(row.folder.parent.name, row.earlier_runs) for row in logs.read([tmp_path]).swept] == [("s.2", 1)] * 2


def test_curves_over_numbers_and_bars_over_words(log):
    drawn = {figure.key: figure for figure in figures(logs.read([log]).sweeps[0])}
    curve = drawn["sweep-vocab-size-time"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in curve.data] == [
        ("linear", [500, 1000, 4000], [5, 10, 40]),
        ("square", [500, 1000], [25, 100]),
    ]
    assert curve.layout["xaxis"]["type"] == curve.layout["yaxis"]["type"] == "log"
    assert "At dtype float32." in curve.caption and "Not drawn: square at 4000 (oom)." in curve.caption
    assert drawn["sweep-vocab-size-memory"].data[0]["y"] == [10, 20, 80]
    bars = drawn["sweep-dtype-time"]
    assert [(trace["type"], trace["x"], trace["y"]) for trace in bars.data] == [
        ("bar", ["float32", "bfloat16"], [5, 2.5]),
        ("bar", ["float32"], [25]),
    ]


def test_the_page_has_a_section_for_each_sweep(log, tmp_path):
    write_sweep(tmp_path / "log" / "other", {"threads": [1, 2]}, ["<script>alert(1)</script>"])
    read = logs.read([log])
    html = page(read.groups, log, "/* plotly */", read.sweeps)
    assert "<h2>Sweep over threads</h2>" in html and "<h2>Sweep over vocab-size and dtype</h2>" in html
    assert "timing-1: no memory" in html and "<script>alert" not in html
