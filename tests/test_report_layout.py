"""Axes that keep the small readable beside the large, and names that do not hide each other, by hand."""

from __future__ import annotations

import pytest
from fixtures_runs import (
    correctness,
    environment,
    records_of,
    sample,
    status,
    timed,
    traced_run,
    write_records,
    write_run,
)
from fixtures_traces import kineto, memory, steps

from common.analysis import logs
from common.present import labels, scales, style
from common.show import bars, distribution, over_time, ratios


def test_an_axis_is_cut_below_what_is_far_beyond_the_others():
    assert scales.cut([800, 1300, 3600, 21500]) == pytest.approx(1.15 * 3600)
    assert scales.cut([800, 1300, 3600]) is None and scales.cut([5]) is None and scales.cut([1, 7]) is None
    assert scales.cut([1.5**power for power in range(12)]) is None  # wide, but without a gap
    assert scales.cut([1, 2, 30, 40, 900]) == pytest.approx(1.15 * 40)
    assert scales.cut([13, 60, 65, 190]) is None  # three of four would be cut
    assert scales.cut([1, 2, 3, 4, 40, 300]) == pytest.approx(1.15 * 4)


def test_spans_from_zero_or_logarithmic():
    near, far = scales.span([10, 100]), scales.span([10, 1000])
    assert (near.low, near.logarithmic, far.logarithmic) == (0, False, True)
    assert near.share(near.high) == far.share(far.high) == pytest.approx(1) and far.share(far.low) == 0
    assert far.share((far.low * far.high) ** 0.5) == pytest.approx(0.5)
    assert far.ticks == pytest.approx([10, 20, 50, 100, 200, 500, 1000])


def test_ticks_are_plain_numbers_and_never_one_alone():
    assert scales.Span(0.8, 30, True).words == ["1", "2", "5", "10", "20"]
    assert scales.Span(38, 72, True).words == ["40", "50", "60", "70"]
    wide = scales.Span(0.0005, 3e6, True).words
    assert wide[0] == "0.0005" and wide[-1] == "2000000" and not any("e" in words for words in wide)


PLOT = (700, 330)


def placed(points, names, lines=()):
    """(place, box) of each name, of 7 pixels a letter."""
    sizes = [(7.0 * len(name), 17.0) for name in names]
    places = labels.places(points, sizes, PLOT, lines)
    return [(position, labels.box(*each, position)) for *each, position in zip(points, sizes, places)]


def near(point, box):
    """Return how far a point is from a box."""
    return labels.from_box(point, box)


@pytest.mark.parametrize(
    "points",
    [
        [(300, 200), (310, 205), (690, 320), (0, 0)],
        [(100, 100), (120, 122), (300, 30), (650, 300)],
        [(200, 100), (230, 100), (260, 100), (290, 100)],
        [(200, 100), (201, 101), (202, 102), (203, 103)],
    ],
)
def test_names_stand_beside_their_own_point_and_hide_nothing(points):
    names = ["one", "another", "at the edge", "corner"]
    boxes = placed(points, names)
    for at, (position, box) in enumerate(boxes):
        assert 0 <= box[0] and box[2] <= PLOT[0] and 0 <= box[1] and box[3] <= PLOT[1]
        assert all(labels.shared(box, other) == 0 for _, other in boxes[at + 1 :])
        others = [point for point in points if point != points[at]]
        assert all(near(point, box) > 0 for point in others)
        assert position.far or all(near(points[at], box) < near(point, box) for point in others)


def test_a_name_in_a_crowd_has_a_line_and_one_alone_has_none():
    crowd = [(200 + 9 * across, 150 + 9 * up) for across in range(3) for up in range(3)]
    boxes = placed([*crowd, (500, 150)], ["some name"] * 10)
    assert any(position.far for position, _ in boxes[:-1]) and not boxes[-1][0].far


def test_names_keep_off_lines():
    ((_, box),) = placed([(350, 150)], ["some name"], [[(350, 330), (350, 150), (700, 150)]])
    assert box[2] <= 350 or box[3] <= 150 or box[1] >= 152 and box[0] >= 352


@pytest.mark.parametrize("width", [320, 390, 650, 1100])
def test_the_places_of_a_narrower_plot_hide_nothing_in_a_wider_one(width):
    points = [(10, 20), (12, 21), (14, 19), (60, 90), (95, 95), (90, 10)]
    span = scales.Span(0, 100, False)
    names = labels.Names([(*point, f"some name {at}") for at, point in enumerate(points)], [], span, span)
    places = names.of_a_page(380)
    nearest = places[max(each for each in places if each <= width)]
    at = [(x * width / 100, y * 3.8) for x, y in points]
    boxes = [labels.box(point, (77, 17), position) for point, position in zip(at, nearest)]
    for index, box in enumerate(boxes):
        assert box[0] >= 0 and box[2] <= width
        assert all(labels.shared(box, other) == 0 for other in boxes[index + 1 :])
        assert all(near(point, box) > 0 for point in at if point != at[index])


def test_exact_losses_and_others_have_plots_of_their_own(tmp_path):
    for name, ms, fields in (("a", 10, {}), ("b", 900, {}), ("c", 1, {"exact": False})):
        samples = [environment("timing-1"), sample("timing-1", "step", 4, ms), status("timing-1")]
        write_run(tmp_path / name, name, [[*correctness()], samples], **fields)
    (group,) = logs.read([tmp_path]).groups
    exact, others = bars.step_times(group.rows)
    assert [exact.key, others.key] == ["step-time", "step-time-others"]
    assert exact.layout["xaxis"]["range"] == [0, pytest.approx(11.5)] and "range" not in others.layout["xaxis"]
    (arrow,) = [trace for trace in exact.data if trace["name"] == "goes on"]
    assert arrow["y"] == [-1] and "goes on beyond the right edge" in exact.caption


def test_samples_far_from_the_median_are_arrows_at_the_edge(tmp_path):
    samples = [sample("timing-1", "step", 4, ms) for ms in (10, 10, 10, 40, 6)]
    write_run(tmp_path / "a", "a", [correctness(), [environment("timing-1"), *samples, status("timing-1")]])
    (row,) = logs.read([tmp_path]).rows
    figure = over_time.drift([row])
    (trace,) = figure.data
    symbol = style.symbol(row.look)
    assert trace["marker"]["symbol"] == [symbol, symbol, symbol, "triangle-up", "triangle-down"]
    assert trace["y"] == pytest.approx([0, 0, 0, over_time.FARTHEST, -over_time.FARTHEST])  # of +300% and -40%
    assert trace["customdata"][3][1] == "+300.0%"
    assert figure.layout["yaxis"]["ticktext"] == ("\u221230%", "0", "+30%") and "30%" in figure.caption


def test_memory_within_a_step_is_small_plots_to_one_scale(tmp_path):
    for name, peak in (("a", 9), ("b", 40)):
        events = [*steps([100, 200]), *(memory(at, total << 20) for at, total in ((1010, 3), (1130, peak)))]
        traced_run(tmp_path / name, kineto(events), name=name)
    (group,) = logs.read([tmp_path]).groups
    (figure,) = over_time.memory_within(group.rows)
    assert [part.title for part in figure.parts] == ["a", "b"] and all(part.small for part in figure.parts)
    ranges = [part.layout["yaxis"]["range"] for part in figure.parts]
    assert ranges[0] == ranges[1] and ranges[0][0] == 0 and ranges[0][1] > max(figure.parts[1].data[0]["y"])


def test_ratios_have_a_dot_and_a_whisker_on_a_logarithmic_axis_with_a_line_at_one(tmp_path):
    timed(tmp_path, "a", [10, 11, 12])
    timed(tmp_path, "b", [20, 24, 25])
    timed(tmp_path, "approx", [1, 1.1, 1.2], kind="pruned", exact=False)
    timed(tmp_path, "other", [1, 1.1, 1.2], kind="additive", exact=False)
    (group,) = logs.read([tmp_path]).groups
    figure = ratios.over_fastest(group.rows)
    dots = {trace["name"]: trace for trace in figure.data}
    assert list(dots) == ["a", "b", "approx (approx.)"] and "other" in figure.caption
    row = next(row for row in group.rows if row.name == "b")
    ratio = row.against_fastest.ratio
    assert dots["b"]["x"] == [ratio.ratio] and dots["approx (approx.)"]["x"] == [pytest.approx(0.1)]
    whisker = dots["b"]["error_x"]
    assert ratio.ratio + whisker["array"][0] == pytest.approx(ratio.high)
    assert ratio.ratio - whisker["arrayminus"][0] == pytest.approx(ratio.low)
    assert figure.layout["xaxis"]["type"] == "log" and [line["x0"] for line in figure.layout["shapes"]] == [1]
    assert "error_x" not in dots["a"]


def test_a_ratio_of_two_torches_is_hollow(tmp_path):
    for name, ms in (("a", 10), ("b", 12)):
        timed(tmp_path, name, [ms, ms, ms])
    timed(tmp_path, "c", [20, 21, 22])
    records = records_of(tmp_path / "c")
    lines = [{**line, "torch": "1.13.1"} if line["record"] == "environment" else line for line in records]
    write_records(tmp_path / "c", lines)
    (group,) = logs.read([tmp_path]).groups
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in ratios.over_fastest(group.rows).data}
    assert symbols["c"].endswith("-open") and not symbols["b"].endswith("-open")


def test_a_distribution_is_drawn_of_enough_samples_alone(tmp_path):
    times = [10 + 0.01 * number for number in range(distribution.FEWEST)]
    for name, each in (("many", times), ("few", times[:-1])):
        samples = [sample("timing-1", "step", 4, ms) for ms in each]
        write_run(tmp_path / name, name, [correctness(), [environment("timing-1"), *samples, status("timing-1")]])
    (group,) = logs.read([tmp_path]).groups
    figure = distribution.of_samples(group.rows)
    assert {trace["name"] for trace in figure.data} == {"many"} and "few" in figure.caption
    curve = distribution.density(times, False)
    mode = max(curve, key=lambda point: point[1])[0]
    assert min(times) < mode < max(times) and curve[0][0] < min(times) < max(times) < curve[-1][0]
    assert distribution.of_samples([row for row in group.rows if row.name == "few"]) is None
