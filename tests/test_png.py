"""Every kind of plot as a PNG: what matplotlib draws of the data and layout that plotly takes."""

from __future__ import annotations

import re
from html import unescape

import pytest
from fixtures_machines import side_by_side
from fixtures_runs import (
    correctness,
    environment,
    memory,
    records_of,
    sample,
    status,
    timed,
    timing,
    write_records,
    write_run,
)
from fixtures_sweeps import measured, write_sweep

from common.analysis import logs, machines
from common.analysis.sweep import read
from common.present import style
from common.show import png, runs
from common.show import shapes_plot as shapes
from common.show import sweep_plot as sweep
from common.show.machines_plot import relative_times

pytest.importorskip("matplotlib")

OF_BATCHES = {"time-cells", "ratios"}


def rows_of(folder):
    return logs.read([folder]).groups[0].rows


def on_batches(folder, rounds=1, **ms_of):
    """Runs over six batches of growing size and padding, whose steps take ms_of[name](cells, useful)."""
    batches = [{"index": at, "N": 2, "T_max": 10 * (at + 1), "U_max": 9, "padded_cells": 100} for at in range(6)]
    for batch in batches:
        batch["useful_cells"] = 100 - 10 * batch["index"]
    for name, ms in ms_of.items():
        times = [(of["index"], ms(of["T_max"] * 10, of["useful_cells"])) for of in batches]
        jobs = []
        for job in (f"timing-{number + 1}" for number in range(rounds)):
            lines = [sample(job, "step", *each) for each in times]
            jobs.append([environment(job, batches=batches), *lines, status(job)])
        write_run(folder / name, name, jobs, passes=["timing"], rounds=rounds, run_id="one run")


def test_a_plot_of_the_fastest_alone_is_left_out(tmp_path):
    """Over itself it is 1.00 at every batch."""
    on_batches(tmp_path, alone=lambda cells, useful: cells)
    keys = {figure.key for figure in runs.figures(rows_of(tmp_path))}
    assert "time-cells" in keys and not keys & {"ratio-useful", "ratio-cells"}


def lanes_of(folder, **samples):
    """Return the plots of runs, each with so many samples of every batch in each of two rounds."""
    for name, count in samples.items():
        jobs = []
        for number, job in enumerate(("timing-1", "timing-2")):
            batch = number if count == 1 else 4
            lines = [sample(job, "step", batch, 10 + at + number) for at in range(count)]
            jobs.append([environment(job), *lines, status(job)])
        write_run(folder / name, name, jobs, passes=["timing"], rounds=2, run_id="one run")
    return {figure.key: figure for figure in runs.figures(rows_of(folder))}


def test_one_sample_of_each_batch_shows_no_change_with_time(tmp_path):
    figure = lanes_of(tmp_path, single=1, several=3)["samples"]
    assert [trace["name"] for trace in figure.data] == ["several"]
    assert "single" in figure.caption and "0 to 0" not in str(figure.layout)


def test_nothing_is_drawn_where_all_batches_have_one_sample(tmp_path):
    assert "samples" not in lanes_of(tmp_path, single=1, other=1)


@pytest.mark.parametrize("samples, words", [({"a": 1}, ""), ({"a": 1, "b": 3}, "1 of 2"), ({"b": 3}, "Whiskers:")])
def test_a_caption_promises_the_whiskers_that_are_drawn(samples, words, tmp_path):
    caption = lanes_of(tmp_path, **samples)["step-time"].caption
    assert words in caption and ("Whiskers" in caption) == bool(words)


def test_times_are_drawn_batch_by_batch_against_the_size(tmp_path):
    on_batches(tmp_path, packed=lambda cells, useful: cells * useful / 100, padded=lambda cells, useful: cells)
    figures = {figure.key: figure for figure in runs.figures(rows_of(tmp_path))}
    (padded,) = [trace for trace in figures["time-cells"].data if trace["name"] == "padded"]
    assert padded["y"] == padded["x"] and "lines" in padded["mode"]
    assert len(figures["time-cells"].table.rows) == 12


def test_the_time_over_the_size_has_a_line_with_its_interval_where_there_are_rounds(tmp_path):
    on_batches(tmp_path, rounds=3, a=lambda cells, useful: cells**1.5, b=lambda cells, useful: 2 * cells)
    (figure,) = [figure for figure in runs.figures(rows_of(tmp_path)) if figure.key == "time-cells"]
    band, line, marks = [trace for trace in figure.data if trace["name"] == "a"]
    assert line["y"] == pytest.approx([size**1.5 for size in line["x"]]) and line["x"][-1] == pytest.approx(600)
    assert band["fill"] == "toself" and len(band["x"]) == 2 * len(line["x"])
    assert marks["mode"] == "markers" and marks["y"] == pytest.approx([size**1.5 for size in marks["x"]])
    assert line["line"]["color"] == marks["marker"]["color"] == band["fillcolor"][:7]
    assert "95% interval over rounds" in figure.caption
    axes = png.draw(figure).axes[0]
    assert sum(patch.get_facecolor()[3] < 1 for patch in axes.patches) == 2


def test_a_row_of_another_torch_has_times_and_a_hollow_ratio(tmp_path):
    on_batches(tmp_path, a=lambda cells, useful: cells, b=lambda cells, useful: 2 * cells)
    lines = records_of(tmp_path / "b")
    write_records(tmp_path / "b", [{**line, "torch": "1.13.1"} if "torch" in line else line for line in lines])
    figures = {figure.key: figure for figure in runs.figures(rows_of(tmp_path))}
    assert "-open" in figures["ratios"].data[1]["marker"]["symbol"]
    assert [trace["name"] for trace in figures["time-cells"].data] == ["a", "b"]


def figures_of(folder):
    """One of each kind."""
    for name, ms, kind in (("a<b>$x$", [10, 11], "exact"), ("far", [900, 950], "exact"), ("p", [5, 6], "pruned")):
        timed(folder / "runs", name, ms, kind=kind)
    drawn = runs.figures(rows_of(folder / "runs"))
    on_batches(folder / "batches", a=lambda cells, useful: cells, b=lambda cells, useful: 2 * cells + useful)
    drawn += [figure for figure in runs.figures(rows_of(folder / "batches")) if figure.key in OF_BATCHES]
    drawn += shapes.distributions(next(row for row in rows_of(folder / "runs") if row.distribution))
    grid = {"vocab_size": [500, 4000], "dtype": ["float32", "bfloat16"]}
    jobs = lambda name, values: measured(values["vocab_size"], values["vocab_size"])  # noqa: E731
    drawn += sweep.figures(read(write_sweep(folder / "sweep", grid, ["a", "b"], jobs)))
    (family,) = machines.families(logs.read([side_by_side(folder / "machines")]).groups)
    return [*drawn, relative_times(family)]


def bars_of(axes):
    """Return the filled bars; each is drawn a second time as an outline."""
    return [patch for patch in axes.patches if patch.get_fill()]


def test_every_plot_can_be_drawn_with_all_that_is_in_it(tmp_path):
    kinds = set()
    for figure in figures_of(tmp_path):
        kinds.add(re.sub(r"-others$|^sweep-.*-", "", figure.key))
        drawn = png.draw(figure)
        drawn.savefig(tmp_path / f"{figure.key}.png")
        assert (tmp_path / f"{figure.key}.png").read_bytes().startswith(b"\x89PNG")
        bars = sum(len(trace["x"]) for trace in figure.data if trace["type"] == "bar")
        assert sum(len(bars_of(axes)) for axes in drawn.axes) == bars
        words = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        if figure.layout.get("showlegend", True):
            names = [trace["name"] for trace in figure.data if trace.get("showlegend", True)]
            assert words == [unescape(name) for name in dict.fromkeys(names)]
        else:
            assert words == []
        for letter in "xy":
            span = figure.layout[f"{letter}axis"].get("range")
            if span:
                ends = [10**end for end in span] if figure.layout[f"{letter}axis"].get("type") == "log" else span
                assert getattr(drawn.axes[0], f"get_{letter}lim")() == pytest.approx(ends)
    assert kinds >= {"step-time", "peak-memory", "time-memory", "samples", "time", "memory", "machines"} | {
        "shape-t",
        "shape-u",
        "shape-padding",
        *OF_BATCHES,
    }


def test_stacked_bars_follow_each_other_and_end_at_the_sum(tmp_path):
    jobs = [correctness(), timing("timing-1", [100], []), memory(8)]  # stages: 10% joiner, 60% backward
    write_run(tmp_path / "a", jobs=jobs, rounds=1)
    (figure,) = [figure for figure in runs.figures(rows_of(tmp_path)) if figure.key == "step-time"]
    joiner, _, backward, _ = bars_of(png.draw(figure).axes[0])  # each with its entry in the legend, without length
    assert (joiner.get_x(), joiner.get_width(), backward.get_x(), backward.get_width()) == pytest.approx(
        (0, 10, 10, 60)
    )
    assert joiner.get_hatch() != backward.get_hatch() and joiner.get_facecolor() == backward.get_facecolor()


def test_grouped_bars_stand_beside_each_other_above_their_word(tmp_path):
    grid = {"dtype": ["float32", "bfloat16"]}
    jobs = lambda name, values: measured(10 if name == "a" else 20)  # noqa: E731
    figure = sweep.figures(read(write_sweep(tmp_path / "s", grid, ["a", "b"], jobs)))[0]
    axes = png.draw(figure).axes[0]
    a, b = bars_of(axes)[:2], bars_of(axes)[2:]
    assert [bar.get_height() for bar in (*a, *b)] == [10, 10, 20, 20]
    for at, (first, two) in enumerate(zip(a, b)):
        assert first.get_x() + first.get_width() == pytest.approx(two.get_x()) == pytest.approx(at)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["float32", "bfloat16"]


def test_samples_beside_other_load_are_crosses(tmp_path):
    lines = [sample("timing-1", "step", 4, ms, flags=flags) for ms, flags in ((10, ()), (12, ("cpu",)), (11, ()))]
    write_run(tmp_path / "a", jobs=[correctness(), [environment("timing-1"), *lines, status("timing-1")]], rounds=1)
    (figure,) = [figure for figure in runs.figures(rows_of(tmp_path)) if figure.key == "samples"]
    drawn = {line.get_marker(): len(line.get_xdata()) for line in png.draw(figure).axes[0].lines if line.get_marker()}
    assert drawn["x"] == 1 and drawn["o"] == 2


def test_names_stand_beside_their_own_point(tmp_path):
    """Two points close to each other, whose names would hide the other where each stood above its own."""
    for name, ms, peak in (("k2", 100, 50), ("fast_rnnt", 101, 51), ("far away", 1, 1)):
        timed(tmp_path, name, [ms, ms], peak=peak)
    (figure,) = [figure for figure in runs.figures(rows_of(tmp_path)) if figure.key == "time-memory"]
    drawn = png.draw(figure)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    middles = {name: axes.transData.transform((x, y)) for x, y, name in figure.names.at}
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text()}
    assert boxes.keys() == middles.keys()
    for name, box in boxes.items():
        distances = {
            other: ((max(box.x0 - x, 0, x - box.x1)) ** 2 + max(box.y0 - y, 0, y - box.y1) ** 2) ** 0.5
            for other, (x, y) in middles.items()
        }
        (text,) = [text for text in axes.texts if text.get_text() == name]
        assert text.arrow_patch is not None or min(distances, key=distances.get) == name
        assert not any(box.overlaps(other) for of, other in boxes.items() if of != name)


def test_small_plots_are_drawn_beside_each_other():
    part = style.Figure(
        "part",
        "a",
        "",
        "",
        [
            style.points(
                "a",
                [(0, 1), (1, 2)],
                {},
                mode="lines",
                line={"color": style.color(style.Look()), "width": 2, "dash": "solid"},
            )
        ],
        style.layout(170, xaxis=style.axis("ms"), yaxis=style.axis("MB")),
        None,
    )
    figure = style.Figure("whole", "Whole", "", "", [], {}, None, parts=[part] * 4)
    axes = png.draw(figure).axes
    assert [len(axis.lines) for axis in axes] == [1, 1, 1, 1, 0, 0] and not axes[-1].get_visible()
