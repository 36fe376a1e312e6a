"""Time against memory: whose front is whose, by hand, and what the page says of it."""

from __future__ import annotations

from commands import has_words
from fixtures_runs import timed

from common.analysis import logs
from common.present import scales
from common.show import trade_off


def entries_of(folder):
    return logs.read([folder]).groups[0].rows


def of_every_kind(folder):
    timed(folder, "quick", [10, 10], peak=400)
    timed(folder, "small", [40, 40], peak=100)
    timed(folder, "beaten", [50, 50], peak=500)
    timed(folder, "pruned", [5, 5], peak=50, kind="pruned")
    timed(folder, "simple", [1, 1], peak=1, kind="additive")
    timed(folder, "modified", [2, 2], peak=20, kind="modified")
    return entries_of(folder)


def test_losses_of_other_models_are_on_no_front(tmp_path):
    both, _, points = trade_off.known(of_every_kind(tmp_path))
    exact, together = trade_off.fronts(both, points)
    assert [both[index].label for index in exact.members] == ["quick", "small"]
    assert [both[index].label for index in together.members] == ["pruned"]
    assert exact.dash != together.dash
    assert {both[index].label for index in together.among} == {"quick", "small", "beaten", "pruned"}


def test_the_plot_says_who_is_on_which_front_and_draws_the_others_hollow(tmp_path):
    figure = trade_off.time_and_memory(of_every_kind(tmp_path))
    lines = [trace["name"] for trace in figure.data if trace["mode"] == "lines"]
    assert lines == ["Pareto front, exact losses", "Pareto front, exact and pruned losses"]
    hollow = {trace["name"] for trace in figure.data if trace.get("marker", {}).get("symbol", "").endswith("-open")}
    assert hollow == {"simple", "modified", "another model: not ranked"}  # the last is in the legend alone
    for text in (figure.caption, figure.summary):
        assert has_words(text, "exact losses (dotted line)", "quick, small")
        assert has_words(text, "exact and pruned losses (dashed line)", "pruned.")
        assert has_words(text, "other models", "not ranked", "modified (")
    shown = {row[0].shown: [cell.shown for cell in row[3:]] for row in figure.table.rows}
    assert shown["small"] == ["yes", "no"] and shown["pruned (approx.)"] == ["-", "yes"]
    assert shown["simple (additive)"] == ["-", "-"]


def test_without_pruned_losses_there_is_one_front_and_without_a_common_model_none(tmp_path):
    timed(tmp_path / "a", "one", [10, 10])
    timed(tmp_path / "a", "two", [20, 20])
    assert [trace["mode"] for trace in trade_off.time_and_memory(entries_of(tmp_path / "a")).data] == [
        "lines",
        "markers",
        "markers",
    ]
    timed(tmp_path / "b", "one", [10, 10], kind="additive")
    timed(tmp_path / "b", "two", [20, 20], kind="additive")
    figure = trade_off.time_and_memory(entries_of(tmp_path / "b"))
    assert not [trace for trace in figure.data if trace["mode"] == "lines"]


def test_each_point_has_its_name_and_the_fronts_are_lines_to_keep_off(tmp_path):
    rows = of_every_kind(tmp_path)
    names = trade_off.time_and_memory(rows).names
    both, _, points = trade_off.known(rows)
    assert names.at == [(*point, row.label) for row, point in zip(both, points)]
    fronts = [line for line in names.lines if len(line) > 2]
    top, right = scales.span([peak for _, peak in points]).high, scales.span([ms for ms, _ in points]).high
    assert [line[-1] for line in fronts] == [(right, 100), (right, 50)] and (10, top) in fronts[0]
