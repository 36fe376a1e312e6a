"""--budget: which rounds are measured, and that the intervals of ratios still hold the truth."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from commands import ROOT, assert_user_error, rows_of, run
from fixtures_runs import correctness, one_row, status, timing, write_run

from common.cli import benchmark
from common.core import flag_types, settings
from common.jobs import budget
from common.jobs.budget import Budget
from common.jobs.executor import Executor
from common.jobs.plan import plan
from common.jobs.progress import Progress, Standing
from common.jobs.session import Session
from common.records.run import open_runs
from common.setup import interpreters


def standing(**rounds):
    """Times by loss, one batch in each round."""
    result = Standing(dict.fromkeys(rounds, "exact"))
    result.ms = {name: {(at, 7): ms for at, ms in enumerate(times, 1)} for name, times in rounds.items()}
    return result


def test_three_rounds_come_in_any_case_and_others_where_there_is_room():
    now = [0.0]
    spent = Budget(100.0, clock=lambda: now[0])
    assert spent.left() == 100 and spent.has_room(4, 60.0) and not spent.has_room(4, 101.0)
    now[0] = 130.0
    assert spent.left() == 0 and spent.has_room(3, 60.0) and not spent.has_room(4, 0.1)


def test_only_a_loss_far_behind_in_each_of_three_rounds_gets_fewer():
    times = standing(fast=[1.0, 2.0, 1.0, 1.0], slow=[3.1, 6.5, 3.2, 1.0], near=[4.0, 5.0, 2.9, 9.0])
    assert budget.ratios_by_round("near", times) == pytest.approx([4.0, 2.5, 2.9, 9.0])
    assert [name for name in ("fast", "slow", "near", "unknown") if budget.has_enough(name, 4, times)] == ["slow"]
    assert not budget.has_enough("slow", 5, times)


def test_losses_of_another_kind_are_no_rivals():
    times = standing(fast=[1.0] * 3, slow=[9.0] * 3)
    times.kind_of = {"fast": "pruned", "slow": "exact"}
    assert not budget.has_enough("slow", 3, times)


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("5m", 300), ("0.5h", 1800), ("20", 20)])
def test_a_time_is_in_seconds_minutes_or_hours(text, seconds):
    assert flag_types.duration(text) == seconds


@pytest.mark.parametrize("world", ["as measured", "noisy processes"])
def test_intervals_hold_the_truth_though_rounds_end_by_what_they_show(world):
    pytest.importorskip("torch")  # shape_info.pt
    simulation = importlib.import_module("benchmarks.interval_coverage")
    x = simulation.padding(2, ROOT / "shape_info.pt")
    for level in (1.2, budget.FAR_BEHIND):
        held, _ = simulation.stopped_coverage(simulation.WORLDS[world], level, x, runs=400, seed=3)
        assert 0.92 <= held <= 0.98, level


def test_a_row_with_the_rounds_of_a_budget_is_whole(tmp_path):
    jobs = [[status("correctness")], *([status(f"timing-{number}")] for number in (1, 2, 3))]
    settings = {"rounds": 10, "passes": ["correctness", "timing"]}
    write_run(tmp_path / "a", jobs=jobs, **settings)
    write_run(tmp_path / "b", jobs=jobs, **settings, budget=60.0)
    assert tuple(one_row(tmp_path / name)["status"] for name in "ab") == ("interrupted", "ok")


def test_a_run_ends_after_three_rounds_when_its_time_is_spent(tmp_path, tiny_shapes):
    flags = ["--only", "reference", "--preset", "quick", "--rounds", "6", "--max-seconds", "0.02", "--device", "cpu"]
    done = run("benchmark_all.py", *flags, "--shape-file", tiny_shapes, "--budget", "1s", "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after 3 rounds" in done.stderr and "VERDICT" in done.stderr and "round 4/6" not in done.stderr
    row = rows_of(tmp_path)["reference"]
    assert (row["status"], row["rounds"]) == ("ok", 3) and row["memory"]


class Timed(Executor):
    """Its steps take 100 ms, those of fused 10."""

    def __init__(self):
        self.rounds = {}

    def execute(self, job, python, folder, chosen, timeout, note):
        if job.implementation == "apex":
            return [job.status("missing", "not installed")]
        if job.pass_name == "limits":
            self.rounds.setdefault("limits", []).append(job.round)
            return [{"record": "limits", "job": job.name}, job.status("ok", "")]
        if job.pass_name == "correctness":
            return correctness()
        self.rounds.setdefault(job.implementation, []).append(job.round)
        lines = timing(job.name, [10 if job.implementation == "fused" else 100], [])
        return [{**line, "round": job.round} for line in lines]


def rounds_of(folder, names, most=8, resume=False, passes=("timing",), with_limits=False):
    """Measure the first `most` of eight rounds; return the rounds that each loss, or the device, was timed in."""
    chosen = settings.resolve({"rounds": 8, "slow_rounds": 4, "passes": passes}, "cpu")
    executor, choices = Timed(), dict.fromkeys(names, interpreters.Choice(Path(sys.executable)))
    with open_runs(names, chosen, folder, resume) as run_of, Progress(quiet=True) as progress:
        session = Session(run_of, choices, chosen, 60, progress, executor, resumed=resume)
        session.run([job for job in plan(names, chosen) if (job.round or 0) <= most], with_limits)
    return executor.rounds


def test_a_slow_loss_has_fewer_rounds_and_is_whole(tmp_path):
    assert rounds_of(tmp_path, ["fused", "reference"]) == {"fused": [*range(1, 9)], "reference": [1, 2, 3, 4]}
    rows = rows_of(tmp_path)
    assert {name: (row["status"], row["rounds"]) for name, row in rows.items()} == {
        "fused": ("ok", 8),
        "reference": ("ok", 4),
    }
    assert "timed in 4 rounds: reference" in run("summarize.py", tmp_path, "--details").stdout
    assert rounds_of(tmp_path, ["fused", "reference"], resume=True) == {}


def test_a_run_that_goes_on_knows_who_was_slow(tmp_path):
    assert rounds_of(tmp_path, ["fused", "reference"], most=3)["reference"] == [1, 2, 3]
    joined = rounds_of(tmp_path, ["fused", "reference", "torchaudio"], resume=True)
    assert joined == {"fused": [4, 5, 6, 7, 8], "reference": [4], "torchaudio": [4, 5, 6, 7]}
    assert all(row["status"] == "ok" for row in rows_of(tmp_path).values())


def test_rounds_that_others_have_ended_are_not_begun_for_a_row_that_cannot_run(tmp_path, capsys):
    assert rounds_of(tmp_path, ["fused", "reference"], most=5)["fused"] == [1, 2, 3, 4, 5]
    names, passes = ["fused", "reference", "apex"], ("correctness", "timing")
    joined = rounds_of(tmp_path, names, resume=True, passes=passes, with_limits=True)
    assert joined == {"fused": [6, 7, 8], "limits": [7]}


def test_a_budget_is_for_an_ordinary_run():
    flags = ("--only", "reference", "--budget", "1m", "--device", "cpu")
    assert_user_error(run("benchmark_all.py", *flags, "--find-largest", "batch-size"), "--budget", "--find-largest")
    assert_user_error(run("benchmark_all.py", "--budget", "soon"), "--budget", "soon")
    assert_user_error(run("benchmark_all.py", "--first-verdict", "--sweep", "vocab-size=9,10"), "--first-verdict")


def test_rows_that_join_after_the_first_verdict_measure_the_rounds_that_are_left(tmp_path, tiny_shapes):
    flags = ["--preset", "quick", "--rounds", "9", "--max-seconds", "0.02", "--device", "cpu", "--limits", "false"]
    flags += ["--passes", "correctness,timing", "--scope", "step", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    done = run("benchmark_all.py", "--only", "reference", "--first-verdict", *flags)
    assert done.returncode == 0, done.stderr
    assert "VERDICT" in done.stdout and "interrupted" not in done.stdout
    row = rows_of(tmp_path)["reference"]
    assert (row["status"], row["rounds"]) == ("interrupted", 4)
    done = run("benchmark_all.py", "--only", "reference,torchaudio", "--resume", *flags)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert {name: (row["status"], row["rounds"]) for name, row in rows.items()} == {
        "reference": ("ok", 9),
        "torchaudio": ("ok", 5),
    }
    again = run("benchmark_all.py", "--only", "reference,torchaudio", "--resume", *flags)
    assert "/9: " not in again.stderr and rows_of(tmp_path)["torchaudio"]["rounds"] == 5


def test_rows_that_a_first_verdict_lacks_are_those_of_resume(capsys):
    benchmark._say_what_is_left_out(["fused", "k2", "nemo-tdt"], ["fused"], ["fused", "k2"])
    assert capsys.readouterr().err.splitlines() == [
        "after the first verdict, with --resume: k2",
        "left out unless --only or --topology names them: nemo-tdt",
    ]


def test_rows_by_default_have_no_loop_in_python_on_a_cpu():
    names = ["fused", "warprnnt_numba", "k2", "fast_rnnt-pruned"]
    assert benchmark._default_rows(names, "cpu", False, None) == ["fused", "k2", "fast_rnnt-pruned"]
    assert "warprnnt_numba" in benchmark._default_rows(names, "cuda:0", False, None)
    assert benchmark._default_rows(names, "cpu", True, None) == ["fused", "fast_rnnt-pruned"]
    assert benchmark._default_rows(["fused", "reference"], "cpu", True, None) == ["fused"]
    assert benchmark._default_rows(["fused", "reference"], "cpu", False, None) == ["fused", "reference"]
    assert benchmark._default_rows(["fused", "reference"], "cuda:0", True, None) == ["fused", "reference"]
    assert benchmark._default_rows(["reference:tdt"], "cpu", True, "tdt") == ["reference:tdt"]
    assert benchmark._default_rows(["fused", "nemo-tdt"], "cpu", False, None) == ["fused"]
    assert benchmark._default_rows(["fused:tdt", "nemo-tdt"], "cpu", False, "tdt") == ["fused:tdt", "nemo-tdt"]
