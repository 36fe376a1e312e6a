"""Axes that keep the small readable beside the large, and names that do not hide each other, by hand."""

from __future__ import annotations

import pytest
from fixtures_runs import correctness, environment, sample, status, write_run

from common.analysis import logs
from common.plots import bars, labels, scales


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


def test_names_do_not_hide_each_other():
    points, names = [(300, 200), (310, 205), (690, 320), (0, 0)], ["one", "another", "at the edge", "corner"]
    places = labels.places(points, names, (700, 330))
    boxes = [labels.box(point, name, labels.PLACES[place]) for point, name, place in zip(points, names, places)]
    for at, box in enumerate(boxes):
        assert 0 <= box[0] and box[2] <= 700 and 0 <= box[1] and box[3] <= 330
        assert all(labels.shared(box, other) == 0 for other in boxes[at + 1 :])


def test_exact_losses_and_others_have_plots_of_their_own(tmp_path):
    for name, ms, more in (("a", 10, {}), ("b", 900, {}), ("c", 1, {"exact": False})):
        samples = [environment("timing-1"), sample("timing-1", "step", 4, ms), status("timing-1")]
        write_run(tmp_path / name, name, [[*correctness()], samples], **more)
    (group,) = logs.read([tmp_path]).groups
    exact, others = bars.step_times(group.rows)
    assert [exact.key, others.key] == ["step-time", "step-time-others"]
    assert exact.layout["xaxis"]["range"] == [0, pytest.approx(11.5)] and "range" not in others.layout["xaxis"]
    (arrow,) = [trace for trace in exact.data if trace["name"] == "goes on"]
    assert arrow["y"] == [-1] and "goes on beyond the right edge" in exact.caption
