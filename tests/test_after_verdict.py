"""What the table and the verdict do not wait for: traces, and a first verdict's memory.  Processes are made up."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from commands import assert_user_error, rows_of, run
from fixtures_runs import correctness, memory, status, timing, trace

from common.analysis.measured import _of_jobs
from common.cli import benchmark, flags
from common.cli.parser import Parser, standard
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from common.jobs.executor import Executor, Interrupted
from common.records import schema
from common.setup import interpreters

NAMES = ["torchaudio", "reference"]


class MadeUp(Executor):
    """seen: (implementation, job) of each process that would have been started; ends: called as a trace begins, with
    the job; output: what was on the screen as the last pass began; after_verdict: jobs of `seen` that the verdict did
    not wait for."""

    def __init__(self, capsys, ends=lambda job: trace([])):
        self.seen, self.ends, self.capsys, self.output, self.after_verdict = [], ends, capsys, "", []

    def execute(self, job, python, folder, chosen, timeout, note):
        self.seen.append((job.implementation, job.name))
        if job.pass_name == "timing":
            return [{**line, "round": job.round} for line in timing(job.name, [10, 20], [1, 2])]
        if job.pass_name in ("memory", "trace"):
            self.output += self.capsys.readouterr().out
            if "VERDICT" in self.output:
                self.after_verdict.append((job.implementation, job.name))
            return self.ends(job) if job.pass_name == "trace" else memory(8)
        return correctness()


def measured(folder, executor, *words, quiet=("--quiet",), only=()):
    made = Parser(prog="x.py")
    flags.add_flags(made)
    line = ["--device", "cpu", "--in-place", "--preset", "quick", "--limits", "false", *quiet, *words]
    arguments = made.parse_args([*line, "--log-dir", str(folder)])
    arguments.only, arguments.topology = only, None
    return benchmark.benchmark(NAMES, arguments, executor=executor)


def stop(job):
    raise Interrupted([job.status("interrupted", "stopped by the user")])


def test_the_verdict_is_on_the_screen_before_the_first_trace(tmp_path, capsys):
    executor = MadeUp(capsys)
    assert measured(tmp_path, executor) == EXIT_OK
    assert "VERDICT" in executor.output and "VERDICT" not in capsys.readouterr().out
    assert [job for _, job in executor.seen[-2:]] == ["trace", "trace"]
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    again = MadeUp(capsys)
    assert measured(tmp_path, again, "--resume") == EXIT_OK and not again.seen


def test_a_run_ends_in_its_verdict(tmp_path, capsys):
    assert measured(tmp_path, MadeUp(capsys), quiet=()) == EXIT_OK
    progress = capsys.readouterr().err
    assert "fastest exact" in progress[progress.rindex("trace") :].partition("VERDICT")[2]


def test_the_verdict_does_not_wait_for_the_memory_of_controls(tmp_path, capsys, monkeypatch):
    executor = MadeUp(capsys, stop)
    monkeypatch.setattr(interpreters, "controls", lambda python_of, device: {"reference@k2": python_of["reference"]})
    assert measured(tmp_path, executor, only=standard()) == EXIT_INTERRUPTED
    jobs = [job for job in executor.seen if job[1] in ("memory", "trace")]
    assert jobs == [
        ("torchaudio", "memory"),
        ("reference", "memory"),
        ("reference@k2", "memory"),
        ("torchaudio", "trace"),
    ]
    assert executor.after_verdict == jobs[2:]
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_a_control_is_whole_without_its_memory():
    settings = {"passes": ["timing", "memory", "trace"], "rounds": 1}
    jobs = {"timing-1": [schema.typed(status("timing-1"))]}
    assert _of_jobs(jobs, settings, is_control=True) == ("ok", "")
    assert _of_jobs(jobs, settings, is_control=False)[0] == "interrupted"


def test_ctrl_c_leaves_out_traces_alone(tmp_path, capsys):
    assert measured(tmp_path, MadeUp(capsys, stop)) == EXIT_INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(any("--resume" in note for note in row["notes"]) for row in rows.values())
    assert (tmp_path / "report.html").exists()
    again = MadeUp(capsys)
    assert measured(tmp_path, again, "--resume") == EXIT_OK
    assert sorted(again.seen) == [("reference", "trace"), ("torchaudio", "trace")]
    assert not any("--resume" in note for row in rows_of(tmp_path).values() for note in row["notes"])


def test_a_trace_that_fails_is_its_rows_error(tmp_path, capsys):
    ends = {"torchaudio": [status("trace", "error", "no room")], "reference": trace([])}
    assert measured(tmp_path, MadeUp(capsys, lambda job: ends[job.implementation])) == EXIT_FAILED
    assert {name: row["status"] for name, row in rows_of(tmp_path).items()} == {
        "torchaudio": "error",
        "reference": "ok",
    }
    assert "no room" in (tmp_path / "details.txt").read_text()


@pytest.mark.parametrize("passes", ["trace", "correctness,trace"])
def test_without_times_the_traces_are_what_was_asked_for(passes, tmp_path, capsys):
    executor = MadeUp(capsys, stop)
    assert measured(tmp_path, executor, "--passes", passes) == EXIT_INTERRUPTED
    assert "VERDICT" not in executor.output
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"interrupted"}


def test_a_first_verdicts_memory_is_measured_while_environments_are_made(tmp_path, capsys, monkeypatch):
    executor = MadeUp(capsys)

    @contextmanager
    def setting_up():
        executor.seen.append("set-up begins")
        yield
        executor.seen.append("set-up ends")

    monkeypatch.setattr(benchmark, "setting_up", setting_up)
    assert measured(tmp_path, executor, "--rounds", "9", "--first-verdict", "--then-set-up") == EXIT_OK
    begin = executor.seen.index("set-up begins")
    assert {job for _, job in executor.seen[:begin]} == {"correctness", *(f"timing-{number}" for number in range(1, 5))}
    assert {job for _, job in executor.seen[begin + 1 : -1]} == {"memory"} and executor.seen[-1] == "set-up ends"
    assert "VERDICT" in executor.output
    again = MadeUp(capsys)
    assert measured(tmp_path, again, "--rounds", "9", "--resume") == EXIT_OK
    assert {job for _, job in again.seen} == {"trace", *(f"timing-{number}" for number in range(5, 10))}


def test_environments_are_made_after_a_first_verdict_alone():
    done = run("benchmark_all.py", "--only", "reference", "--device", "cpu", "--then-set-up")
    assert_user_error(done, "--then-set-up", "--first-verdict")
