"""Each row against the fastest of its kind: paired per batch and round, over common batches only, by hand."""

from __future__ import annotations

import math

import pytest
from commands import has_words
from fixtures_runs import (
    correctness,
    one_row,
    read_rows,
    records_of,
    status,
    summarize,
    timing,
    write_records,
    write_run,
)

from common.analysis import ranking, ratios
from common.analysis.ratios import Padding
from common.analysis.row import Row, Standing
from common.core import statistics


def test_who_may_be_as_fast_as_the_fastest():
    def is_rival(ratio, low, high):
        measured = ratios.Ratio(ratio, low, high, 1, (), (), None, 1.0)
        return Standing(Row("a"), Row("b"), "step", measured).may_be_as_fast

    assert is_rival(1.2, None, None) and is_rival(4.0, 0.9, 20.0)
    assert not is_rival(47.0, None, None) and not is_rival(1.2, 1.1, 1.3)


def row(name, *rounds, kind="exact", scope="step", run_id="one", **fields):
    """rounds: each {batch: median ms}."""
    medians = {str(number): batches for number, batches in enumerate(rounds, start=1)}
    return Row(name, kind=kind, run_id=run_id, **{"round_medians_ms": {scope: medians}, **fields})


def filled(*rows):
    ranking.rank_times(rows)
    return {each.name: each.against_fastest.as_json() if each.against_fastest else {} for each in rows}


def test_ratios_are_paired_per_batch_and_round():
    a = row("a", {"0": 10, "1": 1000}, {"0": 20, "1": 900})
    b = row("b", {"0": 20, "1": 2000}, {"0": 50, "1": 3240})  # 2 and 2; 2.5 and 3.6
    standings = filled(b, a)
    assert standings["a"]["is_fastest"] and (standings["a"]["ratio"], standings["a"]["verdict"]) == (1.0, "fastest")
    assert standings["b"]["fastest"] == "a" and not standings["b"]["is_fastest"] and standings["b"]["paired"]
    assert standings["b"]["ratio"] == pytest.approx(math.sqrt(2 * 3))
    half = statistics.student_t(0.95, 1) * math.log(3 / 2) / 2  # deviation / sqrt(2) of log 2 and log 3
    assert math.log(standings["b"]["high"] / standings["b"]["ratio"]) == pytest.approx(half)
    assert (standings["b"]["verdict"], standings["b"]["rounds"], standings["b"]["batches"]) == ("unclear", 2, 2)


@pytest.mark.parametrize(
    "factors, verdict",
    [((2, 2.1, 2.05), "slower"), ((1.001, 1.0, 1.002), "same"), ((1.0, 1.5, 1.01), "unclear"), ((5,), "unclear")],
)
def test_the_verdict_is_of_the_interval_over_rounds(factors, verdict):
    fast = row("a", *[{"0": 10 + number} for number, _ in enumerate(factors)])
    slow = row("b", *[{"0": (10 + number) * factor} for number, factor in enumerate(factors)])
    assert filled(fast, slow)["b"]["verdict"] == verdict


def test_only_batches_that_both_have_count_and_a_few_make_nobody_the_fastest():
    """c is the fastest on the one batch it was measured on, which says nothing of the other."""
    a = row("a", {"0": 10, "1": 100})
    b = row("b", {"0": 30, "1": 110})
    c = row("c", {"0": 5})
    standings = filled(c, a, b)
    expected = {"a": 1, "b": math.sqrt(3 * 1.1), "c": 0.5}
    assert {name: each["ratio"] for name, each in standings.items()} == pytest.approx(expected)
    assert (standings["b"]["batches"], standings["c"]["batches"]) == (2, 1)


def test_kinds_are_apart_and_failed_rows_are_not_compared():
    standings = filled(
        row("exact", {"0": 10}),
        row("slow", {"0": 20}),
        row("pruned", {"0": 1}, kind="pruned"),
        row("pruned2", {"0": 4}, kind="pruned"),
        row("died", {"0": 5}, status="oom"),
        row("missing", status="missing"),
    )
    ratios = {name: each["ratio"] and round(each["ratio"], 9) if each else None for name, each in standings.items()}
    assert ratios == {"exact": 1, "slow": 2, "pruned": 1, "pruned2": 4, "died": None, "missing": None}
    assert standings["pruned2"]["fastest"] == "pruned" and standings["slow"]["fastest"] == "exact"


def test_a_row_without_a_step_is_compared_by_its_loss():
    both = {**row("both", {"0": 10}).round_medians_ms, "loss": {"1": {"0": 2}}}
    standings = filled(row("both", round_medians_ms=both), row("loss", {"0": 1}, scope="loss"), row("step", {"0": 30}))
    assert standings["both"]["scope"] == "step" and standings["both"]["is_fastest"]
    assert standings["step"]["ratio"] == pytest.approx(3)
    assert (standings["loss"]["scope"], standings["loss"]["ratio"], standings["loss"]["fastest"]) == ("loss", 1, "loss")


def test_rounds_of_other_runs_are_not_paired():
    standings = filled(row("a", {"0": 10}, {"0": 20}), row("b", {"0": 11}, {"0": 22}, run_id="other"))
    assert standings["b"]["ratio"] == pytest.approx(1.1) and not standings["b"]["paired"]
    assert standings["b"]["low"] < 1  # Welch: the spread of both sides is in it


def test_nothing_in_common_is_no_ratio():
    standings = filled(row("a", {"0": 10}), row("b", {"1": 5}))
    assert [each["ratio"] for each in standings.values() if not each["is_fastest"]] == [None]


def test_an_interrupted_row_is_compared_by_the_rounds_that_it_ended(tmp_path):
    write_pair(tmp_path, [2, 2.1, 2.2, 2.1])
    (header, *lines) = records_of(tmp_path / "late")
    write_records(tmp_path / "late", [header, *(line for line in lines if line["job"] != "timing-4")])
    rows = {row["name"]: row for row in read_rows(tmp_path)}
    assert rows["late"]["status"] == "interrupted"
    against = rows["late"]["against_fastest"]
    assert (against["rounds"], against["verdict"]) == (3, "slower") and against["ratio"] == pytest.approx(2.1, rel=0.01)
    wrong = [{**line, "ok": False} if line["record"] == "correctness" else line for line in lines[:-1]]
    write_records(tmp_path / "late", [header, *wrong])
    assert not {row["name"]: row for row in read_rows(tmp_path)}["late"]["against_fastest"]


def write_pair(folder, factors):
    for name, of in (("quick", [1] * len(factors)), ("late", factors)):
        rounds = [timing(f"timing-{at}", [10 * f, 20 * f], []) for at, f in enumerate(of, start=1)]
        head = {"passes": ["correctness", "timing"], "rounds": len(of), "scopes": ["step"]}
        write_run(folder / name, name=name, jobs=[correctness(), *rounds], run_id="one run", **head)


def test_what_the_table_and_the_files_show(tmp_path):
    write_pair(tmp_path, [2, 2.1, 2.2])
    text = summarize(tmp_path)
    quick, late = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("quick", "late"))
    assert text.index(quick) < text.index(late)
    assert " 1.00 " in quick and " 2.10x slower " in late
    (line,) = [line for line in text.splitlines() if line.startswith("late step over quick's: 2.10x")]
    assert "over 2 batches, in this run" in line and "1.86 to 2.36: slower" in line
    rows = {each["name"]: each for each in read_rows(tmp_path)}
    assert rows["late"]["against_fastest"]["high"] == pytest.approx(2.3622, abs=1e-3)
    assert rows["late"]["round_medians_ms"]["step"]["3"] == pytest.approx({"4": 22, "9": 44})
    csv = summarize(tmp_path, "--format", "csv", "--all-columns")
    assert "against_fastest_verdict" in csv and "round_medians" not in csv


def torch_row(name, torch, *factors, **fields):
    """A row of 3 rounds of two batches, whose times are those of the batch and round times the factor of the round."""
    rounds = [
        {str(batch): factor * (10 + batch) * (1 + number / 9) for batch in (0, 1)}
        for number, factor in enumerate(factors)
    ]
    return row(name, *rounds, torch_version=torch, **fields)


FAST = torch_row("fast", "2.11.0+cu130", 1, 1, 1)
OURS = torch_row("ours", "2.11.0", 1.5, 1.5, 1.5)
THERE = torch_row("ours@old", "1.13.1", 3, 3.3, 3)  # torch 1.13 doubles its time, and once more
OTHER = torch_row("other", "1.13.1", 4, 4.4, 4)


def test_across_torches_the_ratio_is_as_measured_and_two_assumptions_say_what_one_torch_would_give():
    standings = filled(OTHER, THERE, FAST, OURS)
    other = standings["other"]
    assert (other["fastest"], other["verdict"], other["control"]) == ("fast", "other torch", "ours@old")
    assert other["ratio"] == pytest.approx(4 * 1.1 ** (1 / 3))  # as measured
    through = other["through_control"]
    assert through["ratio"] == pytest.approx(4 / 3 * 1.5)
    assert (through["low"], through["high"]) == pytest.approx((2, 2))  # its noise is the control's in the same round
    assert other["high"] > 4.4
    kept = other["surplus_kept"]  # 4 - 3 + 1.5, and in the round that takes 1.1 of it 4.4 - 3.3 + 1.5
    assert kept["ratio"] == pytest.approx(1.1 ** (1 / 3) + 1.5) and kept["low"] < kept["ratio"] < kept["high"]
    assert (OTHER.over_fastest, OTHER.same_torch) == (other["ratio"], [through["ratio"], kept["ratio"]])
    # Between rows of one torch nothing changes, and the control has itself no control.
    assert (standings["ours"]["ratio"], standings["ours"]["verdict"]) == (pytest.approx(1.5), "slower")
    assert standings["ours"]["control"] is None and not standings["ours"]["other_torch"]
    assert (standings["ours@old"]["verdict"], standings["ours@old"]["control"]) == ("other torch", None)


@pytest.mark.parametrize(
    "control",
    [
        None,
        torch_row("ours@old", "1.13.1", 3, 3, 3, run_id="earlier"),
        torch_row("ours@old", "1.13.1", 3, status="oom"),
    ],
)
def test_without_a_control_of_the_same_run_the_ratio_is_as_measured_and_has_no_verdict(control):
    standings = filled(*filter(None, [FAST, OURS, OTHER, control]))["other"]
    assert standings["ratio"] == pytest.approx(4 * 1.1 ** (1 / 3))
    assert (standings["verdict"], standings["control"]) == ("other torch", None)
    assert not standings["through_control"] and not standings["surplus_kept"] and not OTHER.same_torch


def test_a_surplus_that_leaves_nothing_is_none():
    """The row takes 1 of what the control takes 3; the control under the fastest's torch takes 1.5."""
    quick = torch_row("quick", "1.13.1", 1, 1, 1)
    standings = filled(FAST, OURS, THERE, quick)["quick"]
    assert (
        standings["through_control"]["ratio"] == pytest.approx(0.5 / 1.1 ** (1 / 3)) and not standings["surplus_kept"]
    )


def test_a_row_of_another_torch_is_never_the_fastest():
    quick = torch_row("quick", "1.13.1", 0.1, 0.1, 0.1)
    standings = ranking.standings([quick, THERE, OURS, FAST, torch_row("slow", "2.11.0", 9, 9, 9)], "step")
    assert standings[0].row is FAST and standings[1].row is quick
    assert standings[1].ratio.ratio == pytest.approx(0.1)
    assert standings[1].through_control.ratio == pytest.approx(0.1 / 3 / 1.1 ** (1 / 3) * 1.5)
    for each in (quick, OURS, FAST):
        each.label = each.name


def test_the_regression_on_padding_takes_the_double_difference_too():
    """Rounds with batches of their own; the torch's effect depends on the batch, and so does the control's."""

    def row_of(name, torch, time):
        rounds = {str(n): {str(4 * n + b): time(4 * n + b) for b in range(4)} for n in range(5)}
        padding = Padding({str(batch): batch % 7 / 10 for batch in range(20)}, 0.3)
        each = Row(name, kind="exact", run_id="one", round_medians_ms={"step": rounds}, torch_version=torch)
        each.padding = padding
        return each

    def torch_effect(batch):
        return 2 + batch % 3

    base = row_of("base", "2.11", lambda batch: 5 + batch)
    old = row_of("base@old", "1.13", lambda batch: (5 + batch) * torch_effect(batch))
    other = row_of("other", "1.13", lambda batch: (5 + batch) * torch_effect(batch) * math.exp(0.2 * (batch % 7 / 10)))
    through = filled(base, old, other, row_of("late", "2.11", lambda batch: 50.0))["other"]["through_control"]
    assert through["of_file"] and through["ratio"] == pytest.approx(math.exp(0.2 * 0.3))
    assert through["high"] / through["low"] == pytest.approx(1)


def test_the_table_marks_it_and_says_why(tmp_path):
    times = {"quick": ("2.11.0", 10), "late": ("1.13.1", 40), "quick@k2": ("1.13.1", 20)}
    for name, (torch, ms) in times.items():
        jobs = [timing(f"timing-{at}", [ms, 2 * ms], []) for at in (1, 2, 3)]
        for job in jobs:
            job[0]["torch"] = torch
        head = {"passes": ["timing"], "rounds": 3, "scopes": ["step"], "run_id": "one run"}
        write_run(tmp_path / name, name=name, jobs=jobs, **head)
    text = summarize(tmp_path)
    late = next(line for line in text.splitlines() if line.startswith("late "))
    assert " 4.00x other torch " in late and " 2.00-3.00 " in late
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.split()[:1] in (["quick"], ["quick@k2"], ["late"])][:3] == [
        "quick",
        "quick@k2",
        "late",
    ]
    (line,) = [line for line in lines if line.startswith("late step over quick's, under torch 1.13.1: 4.00x")]
    assert "2.00x" in line and "3.00x" in line and line.count("quick@k2") == 2
    rows = {each["name"]: each["against_fastest"] for each in read_rows(tmp_path)}
    assert (rows["late"]["ratio"], rows["late"]["through_control"]["ratio"]) == pytest.approx((4, 2))
    assert rows["late"]["surplus_kept"]["ratio"] == pytest.approx(3)
    assert "against_fastest_through_control_ratio" in summarize(tmp_path, "--format", "csv", "--all-columns")


def test_options_are_shown_with_the_default_they_replace(tmp_path):
    jobs = [correctness(), [status("timing-1")]]
    options = {
        "blank": {"ours": 0, "default": -1},
        "clamp": {"ours": -1, "default": -1},
        "reduction": {"ours": "sum", "default": "-"},
    }
    jobs[0][0]["options"] = options
    write_run(tmp_path / "a", jobs=jobs, passes=["correctness", "timing"], rounds=1)
    assert "torchaudio options: blank=0 [default -1], clamp=-1, reduction=sum\n" in summarize(tmp_path)
    assert one_row(tmp_path)["options"] == options


def test_a_drift_along_the_rounds_is_told_and_noise_is_not(tmp_path):
    """By hand: 10% from the first round to the last on a line; and rounds that go up and down."""
    steady = ratios.drift([math.exp(0.02 * at) for at in range(6)])
    assert (steady.factor, steady.low, steady.high) == pytest.approx((math.exp(0.1),) * 3) and steady.is_sure
    assert not ratios.drift([1.0, 1.1, 1.0, 1.1, 1.0, 1.1]).is_sure and ratios.drift([1, 2, 3]) is None
    write_pair(tmp_path / "steady", [2, 2.1, 2.0, 2.1, 2.0])
    write_pair(tmp_path / "drifting", [2, 2.4, 2.8, 3.4, 4.0])
    for folder, told in (("steady", False), ("drifting", True)):
        for details in (True, False):
            text = " ".join(summarize(tmp_path / folder, details=details).split())
            assert has_words(text, "late step", "from the first round to the last") == told
    assert "round by round 2.00, 2.40, 2.80, 3.40, 4.00" in summarize(tmp_path / "drifting")


def test_the_loss_alone_has_a_ratio_with_an_interval_too():
    fast, slow = (
        row(name, round_medians_ms={scope: {str(at): {"0": ms} for at in range(3)} for scope, ms in times.items()})
        for name, times in (("fast", {"step": 10, "loss": 1}), ("slow", {"step": 20, "loss": 3}))
    )
    standings = filled(fast, slow)
    assert standings["slow"]["scope"] == "step" and slow.loss_against_fastest.times == pytest.approx(3)
    assert slow.loss_against_fastest.ratio.low is not None and slow.loss_against_fastest.fastest is fast
