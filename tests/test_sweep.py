"""Sweeps: flags, the grid, the growing file, what is measured once and what in each cell, resuming, and a real one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import has_words, run
from fixtures_runs import correctness, memory, records_of, status, timing

from common.analysis.sweep import find, read
from common.cli import flags
from common.cli.benchmark import benchmark as run_benchmark
from common.cli.parser import Parser
from common.core import grid, settings
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.jobs.executor import Executor, Interrupted
from common.records import store
from common.records.sweep import resume, start
from common.setup import interpreters

LIMITS = {"record": "limits", "job": "limits", "products": [], "reason": "made up"}


def parser():
    made = Parser(prog="x.py")
    flags.add_flags(made)
    return made


def parsed(*arguments):
    return parser().parse_args([str(argument) for argument in arguments])


# Flags and grid.


def test_values_are_taken_as_the_flags_take_them():
    text = ["vocab_size=500, 1000", "dtype=float32,bfloat16", "sort-utterance=yes,no", "token-scale=0.5,2"]
    axes = parsed(*(word for axis in text for word in ("--sweep", axis))).sweep
    assert axes == [
        ("vocab_size", (500, 1000)),
        ("dtype", ("float32", "bfloat16")),
        ("sort_utterance", (True, False)),
        ("token_scale", (0.5, 2.0)),
    ]
    assert parsed().sweep == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("vocab=1,2", ["'vocab=1,2'", "KEY=VALUE", "vocab-size", "threads", "dtype"]),
        ("rounds=1,2", ["'rounds=1,2'", "vocab-size"]),
        ("vocab-size", ["at least one value", "vocab-size=A,B"]),
        ("vocab-size=,", ["at least one value"]),
        ("vocab-size=500,1", ["vocab-size: must be at least 2, not 1"]),
        ("vocab-size=500,many", ["vocab-size", "whole number", "many"]),
        ("dtype=float32,int8", ["dtype", "'int8'", "float32, float64, float16, bfloat16"]),
        ("threads=2,1,2", ["threads: 2 is given twice"]),
    ],
)
def test_bad_sweeps_are_one_line(text, words, capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--sweep", text)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "argument --sweep: " in line
    for word in words:
        assert word in line


def test_the_last_key_varies_fastest():
    axes = [grid.Axis("vocab_size", (8, 9)), grid.Axis("dtype", ("float32", "float64"))]
    cells = [grid.words(cell) for cell in grid.cells(axes)]
    assert cells == [f"vocab-size {V}, dtype {dtype}" for V in (8, 9) for dtype in ("float32", "float64")]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--sweep", "vocab-size=8,9", "--vocab-size", 8], "--vocab-size is given too"),
        (["--sweep", "vocab-size=8", "--sweep", "vocab-size=9"], "is given twice"),
        (["--sweep", "max-frames=80,90"], "give --sort-utterance true"),
        (["--sweep", "batch-size=1,2", "--sort-utterance", "true"], "give --sort-utterance false"),
        (["--sweep", "vocab-size=8,9", "--passes", "all"], "no traces"),
        (["--sweep", "vocab-size=8,9", "--resume"], "no sweep of this grid"),
    ],
)
def test_sweeps_that_make_no_sense(tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        benchmark(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


# The file.


def started(folder, dtype="float32"):
    axes = [grid.Axis("vocab_size", (8, 9))]
    chosen = settings.resolve({"preset": "quick", "vocab_size": 8, "dtype": dtype}, "cpu")
    shared = grid.shared([chosen], axes)
    return axes, chosen, shared, start(axes, shared, ["torchaudio"], folder)


def test_what_is_added_is_on_disk_and_comes_back(tmp_path):
    axes, chosen, shared, sweep = started(tmp_path)
    run_of_cell = sweep.open_run(0, {"vocab_size": 8}, "torchaudio", chosen)
    run_of_cell.add(correctness())
    run_of_cell.add(timing("timing-1", [1, 2], [1, 2]))
    assert sweep.path == tmp_path / "sweep-vocab-size" / "sweep.jsonl"
    lines = records_of(sweep.path)
    assert lines[0]["record"] == "sweep" and lines[0]["grid"] == {"vocab_size": [8, 9]}
    assert lines[1]["record"] == "run" and lines[1]["values"] == {"vocab_size": 8}
    assert all(line["cell"] == 0 and line["implementation"] == "torchaudio" for line in lines[1:])
    sweep.close()
    again = resume(axes, shared, tmp_path)
    assert again.runs[0, "torchaudio"].is_done("timing-1") and not again.runs[0, "torchaudio"].is_done("memory")
    assert again.open_run(0, {"vocab_size": 8}, "torchaudio", chosen) is again.runs[0, "torchaudio"]
    assert records_of(sweep.path) == lines


def test_a_second_sweep_has_a_folder_of_its_own(tmp_path):
    first, second = started(tmp_path)[3], started(tmp_path, "float64")[3]
    assert (first.folder.name, second.folder.name) == ("sweep-vocab-size", "sweep-vocab-size.2")


def test_resume_takes_the_sweep_with_the_same_settings(tmp_path):
    axes, _, shared, sweep = started(tmp_path)
    started(tmp_path, "float64")
    with pytest.raises(UserError, match=f"is being measured by process {os.getpid()} on "):
        resume(axes, shared, tmp_path)
    sweep.close()
    assert resume(axes, shared, tmp_path).path == sweep.path
    with pytest.raises(UserError, match="--resume"):
        resume([grid.Axis("vocab_size", (9, 8))], shared, tmp_path)


def test_a_sweep_that_cannot_be_read_does_not_stop_the_resume_of_another(tmp_path, capsys):
    axes, _, shared, sweep = started(tmp_path)
    sweep.close()
    for name, text in (("cut", '{"record":'), ("other", '{"record":"sweep","schema":1,"grid":[],"settings":{}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.jsonl").write_text(text)
    assert resume(axes, shared, tmp_path).path == sweep.path
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "cut, other in" in warning


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_killed_writer_costs_only_its_job(tmp_path, cut):
    axes, chosen, shared, sweep = started(tmp_path)
    run_of_cell = sweep.open_run(0, {"vocab_size": 8}, "torchaudio", chosen)
    run_of_cell.add(correctness())
    whole = sweep.path.read_bytes()
    run_of_cell.add(timing("timing-1", [1, 2], [1, 2]))
    sweep.path.write_bytes(sweep.path.read_bytes()[:-cut])  # within the last line, and a few lines before it
    assert read(sweep.path).rows[0].status == "interrupted"
    sweep.close()
    again = resume(axes, shared, tmp_path)
    assert sweep.path.read_bytes() == whole
    again.runs[0, "torchaudio"].add(timing("timing-1", [5, 5], [5, 5]))
    assert read(sweep.path).rows[0].step_ms.median == 5


def test_a_full_disk_is_a_users_error():
    with pytest.raises(UserError, match="cannot write /dev/full: No space left"):
        store.append(Path("/dev/full"), [{"record": "status"}])


# What is run: the processes are made up, everything around them is real.


class MadeUp(Executor):
    """seen: (implementation, vocab size, dtype, job) of each process that would have been started; fails: raises what
    ends a job otherwise."""

    def __init__(self, fails=lambda job, chosen: None):
        self.seen, self.fails = [], fails

    def execute(self, job, python, folder, chosen, timeout, note):
        self.fails(job, chosen)
        self.seen.append((job.implementation, chosen.vocab_size, chosen.dtype, job.name))
        if chosen.dtype == "bfloat16" and job.implementation == "k2":
            return [status(job.name, "unsupported", "k2 does not take bfloat16")]
        if chosen.vocab_size == 64 and job.pass_name == "memory" and job.implementation == "k2":
            return [status(job.name, "oom", "no memory")]
        if job.pass_name == "timing":
            return timing(job.name, [chosen.vocab_size] * 2, [chosen.vocab_size / 2] * 2)
        return {"correctness": correctness(), "memory": memory(8), "limits": [LIMITS, status("limits")]}[job.pass_name]


@pytest.fixture
def executor():
    return MadeUp()


def benchmark(folder, *arguments, executor=None):
    flags = ["--device", "cpu", "--in-place", "--preset", "quick", "--quiet", "--log-dir", folder, *arguments]
    return run_benchmark(["torchaudio", "k2"], parsed(*flags), executor=executor)


def only(executor, job):
    return [step[:3] for step in executor.seen if step[3] == job]


def test_each_cell_is_measured_but_limits_and_who_cannot_run_once(tmp_path, executor, capsys):
    grid_flags = ["--sweep", "vocab-size=16,64", "--sweep", "dtype=float32,bfloat16", "--limits", "true"]
    assert benchmark(tmp_path, *grid_flags, executor=executor) == EXIT_FAILED  # one is out of memory
    assert only(executor, "correctness") == [
        ("torchaudio", 16, "float32"),
        ("k2", 16, "float32"),
        ("torchaudio", 16, "bfloat16"),
        ("k2", 16, "bfloat16"),
        ("torchaudio", 64, "float32"),
        ("k2", 64, "float32"),
        ("torchaudio", 64, "bfloat16"),
    ]
    assert [job[1:] for job in only(executor, "limits-1")] == [(16, "float32"), (16, "bfloat16")]
    assert sorted(only(executor, "timing-1")) == [
        ("k2", 16, "float32"),
        ("k2", 64, "float32"),
        *(("torchaudio", V, dtype) for V in (16, 64) for dtype in ("bfloat16", "float32")),
    ]
    (sweep,) = find([tmp_path])
    rows = {(run.row.name, *run.values.values()): run.row for run in sweep.runs}
    assert len(rows) == 8 and sweep.absent == 0
    assert {key: row.status for key, row in rows.items() if row.status != "ok"} == {
        ("k2", 16, "bfloat16"): "unsupported",
        ("k2", 64, "bfloat16"): "unsupported",
        ("k2", 64, "float32"): "oom",
    }
    assert rows["torchaudio", 64, "float32"].step_ms.median == 64
    table = capsys.readouterr().out
    assert has_words(table, "k2", "dtype bfloat16", "unsupported")
    assert has_words(table, "k2", "vocab-size 64", "float32", "oom")
    rows = [line for line in records_of(sweep.path) if line["record"] == "status" and line["implementation"] == "k2"]
    refused = [(line["cell"], line.get("reused_from")) for line in rows if line["status"] == "unsupported"]
    assert refused == [(1, None), (3, 1)]


def test_resume_goes_on_where_it_stopped(tmp_path, capsys):
    flags = ["--sweep", "vocab-size=16,32,48"]

    def interrupt(job, chosen):
        if chosen.vocab_size == 32 and job.name == "memory":
            raise Interrupted([status(job.name, "interrupted", "stopped by the user")])

    assert benchmark(tmp_path, *flags, executor=MadeUp(interrupt)) == EXIT_INTERRUPTED
    (sweep,) = find([tmp_path])
    assert [(run.values["vocab_size"], run.row.status) for run in sweep.runs if run.row.name == "k2"] == [
        (16, "ok"),
        (32, "interrupted"),
    ]
    assert has_words(capsys.readouterr().out, "2 of 6", "--resume")
    second = MadeUp()
    assert benchmark(tmp_path, *flags, "--resume", executor=second) == EXIT_OK
    assert sorted(step[1] for step in second.seen) == [32] * 2 + [48] * 6  # memory of both, then the last cell
    (sweep,) = find([tmp_path])
    assert [run.row.status for run in sweep.runs] == ["ok"] * 6
    before, third = sweep.path.read_bytes(), MadeUp()
    assert benchmark(tmp_path, *flags, "--resume", executor=third) == EXIT_OK
    assert not third.seen and sweep.path.read_bytes() == before


def test_a_users_mistake_leaves_no_folder(tmp_path):
    def mistake(job, chosen):
        raise UserError("a broken shape file")

    with pytest.raises(UserError, match="broken"):
        benchmark(tmp_path, "--sweep", "vocab-size=16,32", executor=MadeUp(mistake))
    assert not list(tmp_path.iterdir())


def test_missing_needs_no_process(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(interpreters, "choose", lambda *_, **__: interpreters.Choice(None, "run `make setup`"))
    assert benchmark(tmp_path, "--sweep", "vocab-size=16,32", executor=executor) == EXIT_FAILED
    (sweep,) = find([tmp_path])
    assert [row.status for row in sweep.rows] == ["missing"] * 4 and not executor.seen


def test_resume_tries_again_what_failed(tmp_path, executor, monkeypatch):
    flags = ["--sweep", "vocab-size=16,32", "--limits", "false"]
    here = interpreters.choose
    monkeypatch.setattr(interpreters, "choose", lambda *_, **__: interpreters.Choice(None, "run `make setup`"))
    assert benchmark(tmp_path, *flags, executor=executor) == EXIT_FAILED
    monkeypatch.setattr(interpreters, "choose", here)  # as after `make setup`
    assert benchmark(tmp_path, *flags, "--resume", executor=executor) == EXIT_OK
    assert len(only(executor, "correctness")) == len(only(executor, "memory")) == 4
    assert {row.status for row in find([tmp_path])[0].rows} == {"ok"}


# For real.


def test_a_real_sweep_and_its_resumption(tmp_path, tiny_shapes):
    pytest.importorskip("torchaudio")
    flags = ["--in-place", "--preset", "quick", "--max-seconds", 0.05, "--shape-file", tiny_shapes, "--limits", "false"]
    flags += ["--log-dir", tmp_path / "log", "--passes", "timing", "--scope", "loss", "--sweep", "vocab-size=8,16"]
    done = run("benchmark_torchaudio.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "cell 2 of 2: vocab-size 16" in done.stderr
    assert done.stderr.count("correctness: ok") == done.stderr.count("round 1/1: ") == 2
    path = tmp_path / "log" / "sweep-vocab-size" / "sweep.jsonl"
    lines = records_of(path)
    samples = {line["cell"]: line for line in lines if line["record"] == "sample"}
    assert set(samples) == {0, 1} and all(line["total_wall_ns"] > 0 for line in samples.values())
    assert [line["settings"]["vocab_size"] for line in lines if line["record"] == "run"] == [8, 16]
    before = path.read_bytes()
    again = run("benchmark_torchaudio.py", *flags, "--resume")
    assert again.returncode == 0 and "cell" not in again.stderr.replace("cells", ""), again.stderr
    assert path.read_bytes() == before and again.stdout == done.stdout
    rows = json.loads(run("summarize.py", tmp_path / "log", "--format", "json").stdout)
    assert [row["sweep"]["vocab_size"] for row in rows] == [8, 16] and all(row["loss_ms"]["n"] for row in rows)
    assert "Sweep over vocab-size" in (tmp_path / "log" / "report.html").read_text(encoding="utf-8")
