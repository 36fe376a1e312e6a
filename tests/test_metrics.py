"""A metric is one entry: tables, CSV, JSON, TensorBoard, and the page have it then."""

from __future__ import annotations

import csv
import io
import json

import pytest
from fixtures_model_runs import write_inference
from fixtures_runs import correctness, summarize, three, timing, write_run, write_sweep

from common.analysis import comparison, logs, metrics
from common.analysis.comparison import two_sides
from common.analysis.metrics import Metric
from common.show import comparison as comparison_table
from common.show import results
from common.tools.inference import rows as inference
from common.tools.kept import read
from common.tools.pipelines import rows as pipelines
from common.tools.profile import rows as profile


@pytest.fixture
def made(monkeypatch):
    """Seconds of compute for a second of speech, made up: ten times the step's seconds."""
    metric = Metric("rtf", "RTF", lambda row: row.step.ms and row.step.ms.median / 100, better="lower")
    monkeypatch.setitem(metrics.METRICS, "rtf", metric)


def test_a_metric_in_one_line_is_everywhere(made, tmp_path):
    write_run(tmp_path / "a")  # a step takes 25 ms
    write_sweep(tmp_path / "s", {"vocab_size": [500, 4000]}, ["k2"], lambda name, values: three(50))
    log = logs.read([tmp_path])
    table = results.render(log.rows)
    line = next(line for line in table.splitlines() if line.startswith("torchaudio"))
    assert line.endswith(" 0.2500") and "RTF" in table and " RTF |" in results.render(log.rows, "markdown")
    (row,) = json.loads(results.render(log.rows, "json"))
    assert row["rtf"] == 0.25
    (row,) = csv.DictReader(io.StringIO(results.render(log.rows, "csv")))
    assert row["rtf"] == "0.25"
    assert metrics.scalars(log.rows[0])["metrics/rtf"] == 0.25
    for closed in ("page", "answer", "readme"):
        assert "RTF" not in [column.title for column in results.table(closed, "", log.rows).columns]
    assert "0.5000" in results.of_log(log)


def test_compare_shows_metrics_with_their_units(monkeypatch, tmp_path):
    """compare takes a list of keys, like every table."""
    sides = [write_run(tmp_path / name) and tmp_path / name for name in ("a", "b")]
    for key, unit in (("step_median", "MS"), ("peak_mb", "Mb")):
        monkeypatch.setitem(metrics.METRICS, key, metrics.METRICS[key]._replace(unit=unit))
    text = comparison_table.render(comparison.compare(two_sides(*sides).pairs), [])
    assert text.count(" MS") == 2 and text.count(" Mb") == 2 and "e-0" in text
    monkeypatch.setitem(metrics.COLUMNS, "comparison", ("step_median", "peak_mb"))
    assert "e-0" not in comparison_table.render(comparison.compare(two_sides(*sides).pairs), [])


def test_one_that_no_row_knows_has_no_column(made, tmp_path):
    write_run(tmp_path / "a", jobs=[])
    text = results.render(logs.rows([tmp_path]))
    assert "RTF" not in text and "frames" in text


def test_every_list_names_metrics_that_are_there_and_their_keys_are_one_each():
    assert all(key in metrics.METRICS for keys in metrics.COLUMNS.values() for key in keys)
    assert len(metrics.ALL) == len(metrics.METRICS)
    assert {metric.better for metric in metrics.METRICS.values()} == {"", "lower", "higher"}


MADE = Metric("made", "made", lambda row: 2.5)


def test_a_number_of_other_kinds_is_one_entry_too(monkeypatch, tmp_path):
    """A key of CSV and JSON, and a column."""
    for kind in (inference, pipelines, profile):
        assert len({number.key for number in kind.NUMBERS}) == len(kind.NUMBERS)
        monkeypatch.setattr(kind, "NUMBERS", (*kind.NUMBERS, MADE))
    answer = inference.answer(read(write_inference(tmp_path)))
    assert answer.rows[0]["made"] == 2.5
    for table in answer.tables[-1:]:
        assert table.values()[0]["made"] == 2.5


def test_the_spread_is_that_of_the_batches_whether_they_were_repeated_or_not(tmp_path):
    """One definition in one column; what repeats of a batch differ by is a line of its own."""
    once = [timing("timing-1", [10, 20], [])]
    often = [timing("timing-1", [9, 18, 10, 20, 11, 22], [])]
    for name, rounds in (("once", once), ("often", often)):
        write_run(tmp_path / name, name=name, jobs=[correctness(), *rounds], rounds=1, passes=["correctness", "timing"])
    rows = {row.name: row for row in logs.rows([tmp_path])}
    spreads = {name: metrics.METRICS["half"].value(row) for name, row in rows.items()}
    assert spreads["once"] == spreads["often"] == pytest.approx(20)  # medians 10 and 20: 12 and 18 around 15
    assert metrics.of_repeats(rows["once"], "step") is None and metrics.of_repeats(rows["often"], "step") > 0
    text = summarize(tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("repeats of one batch")]
    assert "often step" in line and "once" not in line
