"""Sweeps read back: rows, scaling exponents by hand, tables in every format, and the report's curves and bars."""

from __future__ import annotations

import csv
import io
import json

import pytest
from commands import run
from fixtures_runs import correctness, memory, one_row, records_of, status, summarize, timing, write_run
from fixtures_sweeps import measured, write_sweep

from common.analysis import logs
from common.analysis.sweep import exponents, find, read
from common.records import store
from common.show.page import page
from common.show.sweep import figures
from common.tables.sweep import render
from common.tables.sweep import table as sweep_table

LIBRARY = "/* plotly */"
GRID = {"vocab_size": [500, 1000, 4000], "dtype": ["float32", "bfloat16"]}


def jobs_of(name, values):
    """linear grows as V, square as V^2 and dies at the last one, neither half precision."""
    V, half = values["vocab_size"], values["dtype"] == "bfloat16"
    if name == "square" and half:
        return [[status("correctness", "unsupported", "takes float32 only")]]
    if name == "square" and V == 4000:
        return [correctness(), [status("timing-1", "oom", "no memory")]]
    return measured((V / 100) ** (2 if name == "square" else 1) / (2 if half else 1), peak_mb=V / 50)


@pytest.fixture
def sweep(tmp_path):
    return read(write_sweep(tmp_path / "log" / "sweep-V", GRID, ["square", "linear"], jobs_of))


# Rows and exponents.


def test_rows_are_by_cell_then_by_time(sweep):
    assert not sweep.reason and sweep.absent == 0
    shown = [(run.cell, run.row.name, run.row.status, run.row.step_ms and run.row.step_ms.median) for run in sweep.runs]
    assert shown[:4] == [
        (0, "linear", "ok", 5),
        (0, "square", "ok", 25),
        (1, "linear", "ok", 2.5),
        (1, "square", "unsupported", None),
    ]
    assert shown[8:10] == [(4, "linear", "ok", 40), (4, "square", "oom", None)]
    assert sweep.runs[-1].values == {"vocab_size": 4000, "dtype": "bfloat16"}
    assert sweep.rows[0].sweep == {"id": "sweep-V", "cell": 0, "vocab_size": 500, "dtype": "float32"}


def test_exponents_are_of_three_points_or_more(sweep, tmp_path):
    first, other = exponents(sweep)  # square has two points, dtype no order
    assert other[:4] == ("linear", "vocab_size", "loss", first.slope)
    assert first[:3] == ("linear", "vocab_size", "step") and first.slope == pytest.approx(1)
    assert (first.low, first.high, first.points) == (500, 4000, 3)
    grid = {"encoder_dim": [2, 4, 8, 16]}
    times = {2: 1, 4: 4, 8: 16, 16: 64}
    path = write_sweep(tmp_path / "other", grid, ["a"], lambda _, values: measured(times[values["encoder_dim"]]))
    assert exponents(read(path))[0].slope == pytest.approx(2)
    times[2] = 2
    path = write_sweep(tmp_path / "flat", grid, ["a"], lambda _, values: measured(times[values["encoder_dim"]]))
    # log2: x = 1, 2, 3, 4, about 2.5, and y = 1, 2, 4, 6: (-1.5 * 1 - 0.5 * 2 + 0.5 * 4 + 1.5 * 6) / 5 = 1.7
    assert exponents(read(path))[0].slope == pytest.approx(1.7)


def test_no_exponent_across_the_border_of_the_allocator(tmp_path):
    """From 8000 on each step maps its memory anew, and takes half as much time more."""
    grid = {"vocab_size": [500, 1000, 2000, 4000, 8000, 16000]}

    def jobs(name, values, faults=lambda size: 3 if size < 8000 else size):
        size = values["vocab_size"]
        samples = [size * (1.5 if size >= 8000 else 1)] * 2
        return [correctness(), timing("timing-1", samples, samples, minor_faults=faults(size)), memory(8)]

    path = write_sweep(tmp_path / "s", grid, ["a"], jobs)
    step, loss = exponents(read(path))
    assert step.slope == pytest.approx(1) and (step.low, step.high, step.points) == (500, 4000, 4)
    text = render([read(path)], "table")
    assert "a step: no scaling exponent between vocab-size 4000 and 8000" in text and "(500.0 to 4000)" in text
    for regime, faults in (("mapped", lambda size: 9 * size), ("kept", lambda size: size % 3)):
        path = write_sweep(tmp_path / regime, grid, ["a"], lambda name, values, of=faults: jobs(name, values, of))
        assert [exponent.points for exponent in exponents(read(path))] == [6, 6]
        assert "no scaling exponent" not in render([read(path)], "table")


def test_one_that_was_stopped_says_what_is_left(tmp_path):
    def until_1000(name, values):
        return measured(10) if values["vocab_size"] < 1000 else [correctness()] if values["vocab_size"] == 1000 else []

    sweep = read(write_sweep(tmp_path / "s", {"vocab_size": [500, 1000, 4000]}, jobs_of=until_1000))
    assert [row.status for row in sweep.rows] == ["ok", "interrupted"] and sweep.absent == 1
    assert "1 of 3 rows are not measured yet" in render([sweep], "table")


def test_the_newest_of_the_same_is_shown(tmp_path):
    for day in (1, 2):
        write_sweep(tmp_path / f"s.{day}", {"vocab_size": [500]}, started=f"2026-01-0{day}T00:00:00+00:00")
    write_sweep(tmp_path / "other", {"vocab_size": [500]}, ["k2"])
    assert [(sweep.name, sweep.earlier) for sweep in logs.read([tmp_path]).sweeps] == [("other", 0), ("s.2", 1)]
    assert len(logs.read([tmp_path], all_runs=True).sweeps) == 3


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "does not begin with a sweep record"),
        ('{"record":"run","name":"k2"}\n', "does not begin with a sweep record"),
        ("not json\nat all\n", "line 1: not a record"),
        ('{"record":"sweep","schema":99}\n', "newer version"),
        ('{"record":"sweep","schema":1}\n', "line 1: not a record"),
        ('{"record":"sweep","grid":{"threads":[]},"sweep_id":"x","settings":{}}\n', "line 1: not a record"),
    ],
)
def test_a_broken_file_is_a_reason(tmp_path, text, words):
    (tmp_path / "sweep.jsonl").write_text(text)
    (sweep,) = find([tmp_path])
    assert words in sweep.reason and "sweep.jsonl" in sweep.reason
    assert words in summarize(tmp_path, code=1)
    html = page([], tmp_path, LIBRARY, [sweep])
    assert "A sweep that cannot be read" in html and words in html


@pytest.mark.parametrize("line", ['{"record":"run","cell":0,"implementation":"k2"}', '{"record":"run","name":"k2"}'])
def test_a_record_that_belongs_nowhere_is_left_out_and_named(tmp_path, capsys, line):
    path = write_sweep(tmp_path / "s", {"vocab_size": [500]})
    path.write_text(path.read_text() + line + "\n")
    assert [row.status for row in read(path).rows] == ["ok"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and str(path) in warning


# Text.


def test_ordinary_rows_do_not_know_of_sweeps(sweep, tmp_path):
    assert logs.rows([tmp_path]) == [] and logs.rows([sweep.path]) == []
    write_run(tmp_path / "log" / "t-30")
    assert [row.name for row in logs.rows([tmp_path])] == ["torchaudio"]
    text = summarize(tmp_path / "log")
    assert text.index("batch size 30") < text.index("sweep-V: vocab-size 500, 1000, 4000 x dtype float32, bfloat16; ")


def test_the_table_of_a_sweep(sweep):
    text = render([sweep], "table")
    title, *lines = text.splitlines()
    assert " V " not in title and "joiner 512" in title  # what varies is told once
    (row,) = [line for line in lines if line.split()[:3] == ["4000", "float32", "linear"]]
    assert "40.00 +-0% 3" in row and " 80.00 " in row and " ok " in row
    assert "square at dtype bfloat16: unsupported: takes float32 only" in lines
    assert "square at vocab-size 4000 and dtype float32: oom: timing-1: no memory" in lines
    assert "step time grows as vocab-size to the power of (at dtype float32): linear 1.00" in lines


def test_markdown_csv_and_json_have_the_swept_keys(sweep):
    markdown = summarize(sweep.path, "--format", "markdown")
    assert "| vocab-size | dtype | implementation |" in markdown and "- square at dtype bfloat16" in markdown
    rows = list(csv.DictReader(io.StringIO(summarize(sweep.path, "--format", "csv", "--all-columns"))))
    assert len(rows) == 12 and rows[-2]["sweep_vocab_size"] == "4000" and rows[-2]["sweep_dtype"] == "bfloat16"
    rows = json.loads(summarize(sweep.path, "--format", "json"))
    assert rows[0]["sweep"]["vocab_size"] == 500 and rows[0]["step_ms"]["median"] == 5


def test_one_cell_is_one_row(tmp_path):
    path = write_sweep(tmp_path / "s", {"threads": [2]})
    assert one_row(path)["sweep"] == {"id": "s", "cell": 0, "threads": 2}


# The report.


def figures_of(sweep):
    drawn = figures(sweep)
    return {figure.key: figure for figure in drawn}


def test_curves_over_numbers_and_bars_over_words(sweep):
    drawn = figures_of(sweep)
    assert drawn.keys() >= {
        f"sweep-{flag}-{quantity}" for flag in ("vocab-size", "dtype") for quantity in ("time", "memory")
    }
    curve = drawn["sweep-vocab-size-time"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in curve.data] == [
        ("linear", [500, 1000, 4000], [5, 10, 40]),
        ("square", [500, 1000], [25, 100]),
    ]
    assert curve.data[0]["error_y"]["array"][0] == pytest.approx(0.3)  # p80 of 4.5, 5, 5.5
    assert curve.layout["xaxis"]["type"] == curve.layout["yaxis"]["type"] == "log"
    styles = {(trace["marker"]["color"], trace["marker"]["symbol"], trace["line"]["dash"]) for trace in curve.data}
    assert len(styles) == 2
    assert "At dtype float32." in curve.caption and "Not drawn: square at 4000 (oom)." in curve.caption
    assert "linear 5.000 ms at 500, 10.00 ms at 1000" in curve.summary
    assert drawn["sweep-vocab-size-memory"].data[0]["y"] == [10, 20, 80]
    bars = drawn["sweep-dtype-time"]
    assert [(trace["type"], trace["x"], trace["y"]) for trace in bars.data] == [
        ("bar", ["float32", "bfloat16"], [5, 2.5]),
        ("bar", ["float32"], [25]),
    ]
    assert len({(bar["marker"]["color"], bar["marker"]["pattern"]["shape"]) for bar in bars.data}) == 2
    assert bars.layout["barmode"] == "group" and "type" not in bars.layout["yaxis"]


def test_a_short_range_is_drawn_linearly(tmp_path):
    drawn = figures_of(read(write_sweep(tmp_path / "s", {"threads": [1, 2, 3]})))
    axes = drawn["sweep-threads-time"].layout
    assert "type" not in axes["xaxis"] and "type" not in axes["yaxis"] and "range" not in axes["yaxis"]
    assert axes["template"]["layout"]["yaxis"]["rangemode"] == "tozero"


def test_a_logarithmic_axis_has_plain_numbers(sweep):
    for key, low, high in (("time", 5, 100), ("memory", 10, 80)):
        axis = figures_of(sweep)[f"sweep-vocab-size-{key}"].layout["yaxis"]
        assert axis["tickvals"] == [float(words) for words in axis["ticktext"]] and "20" in axis["ticktext"]
        assert 10 ** axis["range"][0] < low and high < 10 ** axis["range"][1]


def test_the_page_has_a_section_for_each_sweep(sweep, tmp_path):
    write_sweep(tmp_path / "log" / "sweep-threads", {"threads": [1, 2]})
    write_run(tmp_path / "log" / "t-30")
    log = logs.read([tmp_path / "log"])
    html = page(log.groups, tmp_path / "log", LIBRARY, log.sweeps)
    assert "<h2>Sweep over threads</h2>" in html
    assert "<h2>Sweep over vocab-size and dtype</h2>" in html
    assert 'href="#group-0"' in html and 'href="#sweep-1"' in html
    assert 'href="sweep-V/sweep.jsonl"' in html and "Download as CSV" in html
    assert html.count('role="img" aria-label="Step time over ') == 3
    table = sweep_table("page sweep", "", sweep)
    assert [column.title for column in table.columns][:4] == ["vocab-size", "dtype", "implementation", "status"]
    assert len(table.rows) == 12 and table.rows[9][-1].shown == "timing-1: no memory"


def test_a_report_of_sweeps_alone_and_of_hostile_names(tmp_path):
    name = "<script>alert(1)</script>"
    path = write_sweep(tmp_path / "s", {"vocab_size": [500, 4000]}, [name])
    lines = [{**line, "name": name} if line["record"] == "run" else line for line in records_of(path)]
    path.unlink()
    store.append(path, lines)
    done = run("rnnt-bench", "report", tmp_path, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
