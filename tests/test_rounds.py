"""What a run measures, in which order and how often: rounds, --budget, limits, resuming, progress."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from rnnt_bench.analysis.measured import _status_of_jobs
from rnnt_bench.cli.benchmark import benchmark, default_rows
from rnnt_bench.cli.parser import standard
from rnnt_bench.core import implementations, settings
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from rnnt_bench.jobs import rounds, session
from rnnt_bench.jobs.job import RowPass
from rnnt_bench.jobs.session import Executor, Progress
from rnnt_bench.records import schema
from rnnt_bench.setup import interpreters

from canned import LIMITS, QUICK, Canned, measured, parsed, statuses, stop
from commands import ROOT, rows_of
from fixtures_runs import one_row, records_of, status, timing, write_run


def test_correctness_comes_first_then_rounds_in_drawn_order_then_the_other_passes(tmp_path, capsys):
    executor = Canned()
    assert measured(tmp_path, executor, "--rounds", "3") == EXIT_OK
    names = [job for _, job in executor.seen]
    rounds_of = [f"timing-{number}" for number in (1, 2, 3) for _ in range(2)]
    assert names == ["correctness"] * 2 + rounds_of + ["memory"] * 2 + ["trace"] * 2
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"} and "VERDICT" in capsys.readouterr().out
    again = Canned()
    assert measured(tmp_path, again, "--rounds", "3", "--resume") == EXIT_OK and not again.seen


def test_ctrl_c_keeps_what_is_measured_and_resume_goes_on(tmp_path, capsys):
    executor = Canned(lambda job, _: stop(job) if job.name == "timing-2" else None)
    assert measured(tmp_path, executor, "--rounds", "3") == EXIT_INTERRUPTED
    assert "--resume" in capsys.readouterr().err and (tmp_path / "report.html").exists()
    again = Canned()
    assert measured(tmp_path, again, "--rounds", "3", "--resume") == EXIT_OK
    assert again.seen[0][1] == "timing-2" and len(again.seen) == 4 + 2 + 2
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_ctrl_c_at_the_traces_leaves_rows_that_are_whole(tmp_path):
    assert measured(tmp_path, Canned(lambda job, _: stop(job) if job.name == "trace" else None)) == EXIT_INTERRUPTED
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    recorded = schema.RecordedSettings(passes=["timing", "memory"], rounds=1)
    jobs = {"timing-1": [schema.typed(status("timing-1"))]}
    heads = [schema.Header(name=name, settings=recorded) for name in ("torchaudio@k2", "torchaudio")]
    assert [_status_of_jobs(jobs, head)[0] for head in heads] == ["ok", "interrupted"]


def test_a_job_that_fails_costs_its_row_alone(tmp_path):
    full = "reference", "timing-1"
    executor = Canned(lambda job, _: [job.status("error", "no room")] if (job.row_pass.row, job.name) == full else None)
    assert measured(tmp_path, executor) == EXIT_FAILED
    statuses_of = {name: row["status"] for name, row in rows_of(tmp_path).items()}
    assert statuses_of == {"torchaudio": "ok", "reference": "error"}
    assert "no room" in (tmp_path / "details.txt").read_text()
    assert statuses(tmp_path)["reference-2"] == ["ok", "error"]


def test_a_users_mistake_leaves_no_folder(tmp_path):
    def answer(job, chosen):
        raise UserError("a broken shape file")

    with pytest.raises(UserError, match="broken"):
        measured(tmp_path, Canned(answer))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands: [seconds]."""
    now = [0.0]
    for module in (rounds, session):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("budget, last", [("145s", 6), ("1s", 5)])  # five in any case
def test_no_round_begins_when_the_budget_is_spent(tmp_path, clock, budget, last):
    def answer(job, chosen):
        clock[0] += 10

    executor = Canned(answer)
    assert measured(tmp_path, executor, "--budget", budget, "--rounds", "9") == EXIT_OK
    assert executor.rounds("reference") == list(range(1, last + 1))
    jobs = [job for _, job in executor.seen]
    assert jobs.index("memory") == 2 + 2 * 5  # no failure of another pass costs the first five rounds
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


@pytest.mark.parametrize("budget, again", [("1000s", [2]), ("100s", [])])
def test_rounds_are_measured_again_within_the_budget(tmp_path, clock, capsys, monkeypatch, budget, again):
    def answer(job, chosen):
        clock[0] += 10
        if job.name == "timing-2" and executor.seen.count((job.row_pass.row, job.name)) == 1:
            return timing(job.name, [10, 20], [1, 2], flags=["busy", "loaded"])

    executor = Canned(answer)
    monkeypatch.setattr("canned.QUICK", [word for word in QUICK if word != "--quiet"])
    measured(tmp_path, executor, "--budget", budget, "--rounds", "5", "--passes", "timing", "--wait", "60")
    lines = capsys.readouterr().err.splitlines()
    assert "as many as begin" not in str(lines), "five rounds come in any case"
    assert executor.rounds("reference") == [1, 2, 3, 4, 5, *again]
    assert any(line.startswith("round 2/5, measured again: ") for line in lines) == bool(again)
    assert any("--resume" in line and "--budget" in line for line in lines) != bool(again)


def test_a_run_on_a_cpu_has_a_budget_unless_its_rounds_are_given():
    def budget(**given):
        return settings.resolve(given, given.pop("device", "cpu")).budget

    assert 300 <= budget() <= 540 and budget() == budget(preset="cpu,chars") == budget(vocab_size=4096)
    assert budget(budget=60.0, rounds=7) == 60.0
    assert [settings.resolve({"preset": size}, "cpu").schedule["repeat"] for size in ("cpu", "quick", "full")] == [
        1,
        1,
        2,
    ]
    others = {"rounds": 10}, {"preset": "quick"}, {"device": "cuda"}
    assert [budget(**given) for given in others] == [None] * 3


def test_a_row_with_the_rounds_of_a_budget_is_whole(tmp_path):
    jobs = [[status("correctness")], *([status(f"timing-{number}")] for number in range(1, 6))]
    given = {"rounds": 10, "passes": ["correctness", "timing"]}
    write_run(tmp_path / "a", jobs=jobs, **given)
    write_run(tmp_path / "b", jobs=jobs, **given, budget=60.0)
    assert tuple(one_row(tmp_path / name)["status"] for name in "ab") == ("interrupted", "ok")


@pytest.mark.parametrize("world", ["as measured", "noisy processes"])
def test_intervals_hold_the_truth_though_rounds_end_by_what_they_show(world):
    pytest.importorskip("torch")  # shape_info.pt
    simulation = importlib.import_module("docs._interval_coverage")
    x = simulation.padding(2, ROOT / "shape_info.pt")
    for level in (1.2, 3.0):
        held, _ = simulation.stopped_coverage(simulation.WORLDS[world], level, x, runs=400, seed=3)
        assert 0.92 <= held <= 0.98, level


def test_rows_by_default_have_no_loop_in_python_on_a_cpu():
    names = ["fused", "warprnnt_numba", "k2", "reference", "fast_rnnt-pruned", "nemo-tdt"]
    assert default_rows(names, "cpu", False, None) == ["fused", "k2", "reference", "fast_rnnt-pruned"]
    assert default_rows(names, "cpu", True, None) == ["fused", "fast_rnnt-pruned"]
    assert "warprnnt_numba" in default_rows(names, "cuda:0", False, None)
    assert default_rows(["fused:tdt", "reference:tdt"], "cpu", True, "tdt") == ["fused:tdt", "reference:tdt"]


def test_rows_by_utterance_are_measured_in_few_rounds_and_in_no_sweep(tmp_path):
    names = ["torchaudio:by-utterance", "torchaudio"]
    assert set(names) < set(standard()) and default_rows(names, "cpu", False, None) == names
    assert default_rows(names, "cpu", False, None, is_sweep=True) == ["torchaudio"]
    executor = Canned()
    assert measured(tmp_path, executor, "--rounds", "5", names=names) == EXIT_OK
    assert executor.rounds("torchaudio") == [1, 2, 3, 4, 5] and executor.rounds(names[0]) == [1, 2, 3]
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"])
def test_limits_hold_both_rates_of_products_or_why_not(tmp_path, monkeypatch, compiler):
    if compiler:
        monkeypatch.setenv("CC", compiler)
    flags = ["--rounds", "1", "--passes", "timing", "--limits", "true", "--max-seconds", "0.05"]
    assert measured(tmp_path, Executor(), *flags, names=["torchaudio"]) == 0
    (limits,) = [record for record in records_of(tmp_path / "torchaudio-2") if record["record"] == "limits"]
    assert {each.get("by", "torch") for each in limits["products"]} == {"torch"} if compiler else {"torch", "loop"}
    assert compiler in limits.get("reason", "") and limits["mkl_as_intel"] is False


def rates(torch, loop=None, **fields):
    """A ``limits`` record of products that take so many ns."""
    products = [{"n": 10, "ns": [torch]}, *([{"n": 10, "ns": [loop], "by": "loop"}] if loop else [])]
    return {"record": "limits", "job": "limits", "products": products, **fields}


@pytest.mark.parametrize(
    "here, preloaded, flags, controls",
    [
        (30, 15, [], True),
        (12, 10, [], False),  # torch has 0.83 of the rate
        (30, 28, [], False),  # the library makes no difference
        (30, 15, ["--limits", "false"], False),
        (30, 15, ["--scope", "loss"], False),  # which has no product of the joiner
        (30, 15, ["--only", "fused,optimized_transducer"], False),
    ],
)
def test_where_torch_multiplies_slowly_the_nearest_losses_have_controls(tmp_path, here, preloaded, flags, controls):
    overridden = {}

    def answer(job, chosen):
        overridden[job.title] = dict(job.overrides)
        if job.row_pass.pass_name == "limits" and job.round is None:
            is_preloaded = "LD_PRELOAD" in job.variables(chosen)
            line = rates(preloaded) if is_preloaded else rates(here, 10)
            return [{**line, "mkl_as_intel": is_preloaded}, status("limits")]

    executor, names = Canned(answer), ["torchaudio", "fused", "optimized_transducer"]
    usual = [*QUICK, "--limits", "true", "--rounds", "2", "--log-dir", tmp_path]
    assert benchmark(names, parsed(*usual, *flags), executor=executor) == EXIT_OK
    seen = {}
    for name, job in executor.seen:
        if job != "limits":
            seen.setdefault(name, []).append(job)
    called = ["fused@fast-mkl", "optimized_transducer@fast-mkl"] if controls else []
    assert [name for name in seen if "@" in name] == called
    for name in called:  # for their times alone, of the step
        assert seen[name] == ["correctness", "timing-1", "timing-2"]
        assert overridden[f"{name} timing-1"] == {"scopes": ("step",)} and not overridden["fused timing-1"]
    kept = [line for line in records_of(tmp_path / "fused-2") if line["record"] == "limits" and line.get("products")]
    assert len(kept) == (2 if "--only" not in flags and not {"false", "loss"} & {*flags} else 0)


def test_a_control_needs_a_compiler(monkeypatch):
    row = implementations.find("fused@fast-mkl")
    monkeypatch.setenv("CC", "no-such-compiler")
    choice = interpreters.choose(row, in_place=True, prefer_here=False)
    assert choice.python is None and "no-such-compiler" in choice.reason
    assert row.environment == "main" and not row.in_other_environment and row.folder == "fused-at-fast-mkl"


@pytest.mark.parametrize("well", [True, False])
def test_limits_are_measured_in_every_third_round_until_that_fails(tmp_path, well):
    def answer(job, chosen):
        if job.pass_name == "limits":
            end = status(job.name, "ok" if well else "timeout", "" if well else "too slow")
            return [*([LIMITS] if well else []), end]

    executor = Canned(answer)
    measured(tmp_path, executor, "--rounds", "4", "--passes", "timing", "--limits", "true", names=["torchaudio"])
    assert [job for _, job in executor.seen if job.startswith("limits")] == ["limits-1", "limits-4"][: 2 if well else 1]
    kept = [record for record in records_of(tmp_path / "torchaudio-2") if record["record"] == "limits"]
    assert [record["round"] for record in kept] == [1, 4][: 2 if well else 1]
    assert all("job" not in record and bool(record.get("reason")) is not well for record in kept)
    assert rows_of(tmp_path)["torchaudio"]["status"] == "ok"


def test_the_newest_torch_is_found_without_importing_it(tmp_path):
    pythons = {}
    for name, version in (("k2", "1.13.1+cu117"), ("a", "2.11.0"), ("b", "2.9.1"), ("none", "")):
        pythons[name] = tmp_path / name
        pythons[name].write_text(f"#!/bin/sh\necho {version}\n")
        pythons[name].chmod(0o755)
    assert max(pythons, key=lambda name: interpreters.torch_version(pythons[name])) == "a"
    assert interpreters.torch_version(tmp_path / "gone") == ()


def test_the_time_left_is_of_jobs_like_those_to_come():
    progress = Progress(quiet=True)
    progress.expect(
        [
            RowPass("a", "correctness"),
            RowPass("b", "correctness"),
            RowPass("a", "timing"),
            RowPass("b", "timing"),
            RowPass("a", "timing"),
        ]
    )
    assert progress.left() == ""
    progress.done("a correctness", "ok", None, RowPass("a", "correctness"))
    progress.took = {RowPass("a", "correctness"): [10.0]}
    assert progress.left() == "about 22 s left"  # 10 + 3 * 0.4 * 10: a round takes less than the first pass
    progress.took = {RowPass("a", "correctness"): [10.0], RowPass("a", "timing"): [100.0, 140.0]}
    assert progress.left() == "about 6 min left"  # 10 + 120 + 120 + 120
    progress.done("b correctness", "missing", "no b", RowPass("b", "correctness"))
    assert progress.left() == "about 4 min left" and progress.finished == 2


def test_the_time_left_ends_with_the_budget(clock):
    """A pass of 10 s, one round of 40 s that comes in any case, nine that come until second 170."""
    progress = Progress(quiet=True)
    progress.deadline = 170.0
    progress.expect([RowPass("a", "memory"), RowPass("a", "timing")], [RowPass("a", "timing")] * 9)
    progress.took = {RowPass("a", "memory"): [10.0], RowPass("a", "timing"): [40.0]}
    assert progress.left() == "about 3 min left"
    clock[0] = 130.0
    assert progress.left() == "about 50 s left"
    progress.optional = progress.optional[:1]
    clock[0] = 0.0
    assert progress.left() == "about 2 min left"  # 10 + 40 + 40
    progress.coming, clock[0] = [], 200.0
    assert progress.left() == ""


def test_a_pipe_gets_a_line_a_round_and_of_what_fails(tmp_path, capsys):
    failing = "reference", 2
    executor = Canned(
        lambda job, _: [job.status("error", "no b")] if (job.row_pass.row, job.round) == failing else None
    )
    arguments = ["--rounds", "2", "--passes", "timing"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canned.QUICK", ["--device", "cpu", "--in-place", "--preset", "quick", "--limits", "false"])
        measured(tmp_path, executor, *arguments)
    lines = capsys.readouterr().err.splitlines()
    of_rounds = [line for line in lines if line.startswith("round ")]
    assert [line.partition(":")[0] for line in of_rounds] == ["round 1/2", "round 2/2"]
    assert "reference 15" in of_rounds[0] and sum(" timing-" in line for line in lines) == 1


def test_a_loss_of_ones_own_on_another_lattice_is_measured_by_default(tmp_path):
    script = tmp_path / "benchmark_own_hat.py"
    text = (ROOT / "benchmark_mine.py").read_text().replace("    hint = ", "    note = ")
    script.write_text(text.replace('    name = "mine"\n', '    topology = "hat"\n'))
    executor, name = Canned(), implementations.of_file(str(script)).name
    arguments = parsed(*QUICK, "--log-dir", tmp_path / "log", "--passes", "correctness")
    assert benchmark([name, "torchaudio", "torchaudio:hat"], arguments, [name], executor) == EXIT_OK
    assert {row for row, _ in executor.seen} == {"own_hat", "torchaudio"}


def test_a_loss_that_was_named_and_cannot_run_fails_the_command_and_says_why(tmp_path, capsys):
    executor = Canned(lambda job, _: [job.status("missing", "x.py: no f")] if job.row_pass.row == "reference" else None)
    arguments = parsed(*QUICK, "--log-dir", tmp_path, "--only", "torchaudio,reference", "--passes", "correctness")
    codes = [benchmark(list(arguments.only), arguments, own, executor) for own in ([], ["reference"])]
    assert codes == [EXIT_OK, EXIT_FAILED] and "reference (x.py: no f)" in capsys.readouterr().out


def test_without_torch_a_run_is_one_line(tmp_path, monkeypatch):
    executor = Canned()
    monkeypatch.setattr(interpreters, "lacks", lambda *packages: "torch" in packages)
    with pytest.raises(UserError, match="torch is not installed in .*python"):
        measured(tmp_path, executor)
    assert not executor.seen and not list(tmp_path.iterdir())
