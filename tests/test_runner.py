"""Planning, folders and exit codes of a run; the commands themselves are tried in test_commands.py."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, assert_user_error
from commands import run as run_command
from fixtures_runs import correctness, records_of, timing

from common.cli import ending
from common.core import settings
from common.core.errors import EXIT_FAILED, EXIT_OK, UserError
from common.core.implementations import BY_NAME, IMPLEMENTATIONS
from common.jobs import local, spec
from common.records import run
from common.setup import interpreters

NAMES = [implementation.name for implementation in IMPLEMENTATIONS]


def chosen(**flags):
    return settings.resolve({"preset": "quick", "rounds": 4, **flags}, "cpu")


def test_correctness_comes_first_and_traces_last():
    jobs = spec.plan(NAMES, chosen())
    count = len(NAMES)
    assert [job.pass_name for job in jobs] == (
        ["correctness"] * count + ["timing"] * 4 * count + ["memory"] * count + ["trace"] * count
    )
    assert len(set(jobs)) == len(jobs)
    assert {job.name for job in jobs} >= {"correctness", "timing-1", "timing-4", "memory", "trace"}


def test_every_round_has_everyone_once_in_an_order_of_its_own():
    jobs = [job for job in spec.plan(NAMES, chosen(passes=("timing",), rounds=12))]
    orders = [tuple(job.implementation for job in jobs if job.round == number) for number in range(1, 13)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert len(set(orders)) > 3
    assert jobs == spec.plan(NAMES, chosen(passes=("timing",), rounds=12))
    assert jobs != spec.plan(NAMES, chosen(passes=("timing",), rounds=12, seed=1))


@pytest.mark.parametrize(
    "statuses, code",
    [
        (["ok", "ok"], EXIT_OK),
        (["ok", "missing", "unsupported"], EXIT_OK),
        (["ok", "oom"], EXIT_FAILED),
        (["error"], EXIT_FAILED),
        (["ok", "timeout"], EXIT_FAILED),
        (["missing"], EXIT_FAILED),  # nothing was measured
    ],
)
def test_exit_codes(statuses, code):
    assert ending.exit_code(statuses) == code


def test_folders_are_claimed_once(tmp_path):
    def claim():
        return run.claim_folder(tmp_path / "log", "k2-30")

    first = claim()
    folder = first.path.parent
    first.release()
    first = claim()
    assert first.path.parent == folder  # still empty: nothing to mix with
    assert claim().path.parent.name == "k2-30.2"  # while the first is at work
    (folder / "results.jsonl").write_text("")
    first.release()
    assert [path.name for path in folder.iterdir()] == ["results.jsonl"]
    third = claim()
    (third.path.parent / "x.pt.trace.json").write_text("")
    third.release()
    assert third.path.parent.name == "k2-30.3" and claim().path.parent.name == "k2-30.4"


def test_a_folder_that_cannot_be_read_does_not_stop_the_resume_of_another(tmp_path, capsys):
    wanted = chosen()
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=False) as run_of:
        folder = run_of["torchaudio"].folder
    for name, text in (("cut", '{"record":"ru'), ("binary", "\udcff"), ("other", '{"record":"run"}\nnonsense\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=True) as run_of:
        assert run_of["torchaudio"].folder == folder
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and warnings[0].startswith("warning: ") and "binary, cut, other in" in warnings[0]


def test_a_job_that_cannot_be_started_is_a_row(tmp_path):
    job = spec.Job("torchaudio", "correctness")
    (status,) = local.Local().execute(job, tmp_path / "python", tmp_path, chosen(), 60, lambda _: None)
    assert status["status"] == "error" and str(tmp_path / "python") in status["reason"]
    assert "TMPDIR" in status["reason"]


NO_ROOM = """
import pathlib, sys
from common.records import store
from common.records.run import Run
run = Run(pathlib.Path(sys.argv[1]) / "results.jsonl")
run.add({"record": "run", "name": "k2"})
status = {"record": "status", "job": "timing-1", "status": "ok", "reason": ""}
run.add([{"record": "fit", "job": "timing-1", "filler": "x" * int(sys.argv[2])}, status])
print(run.status, run.failed, run.last_status.reason)
try:
    run.add({"record": "limits", "filler": "x" * 10000})
except store.NotWritten:
    print("not written")
"""


@pytest.mark.parametrize("limit, kept", [(4096, ["run", "status"]), (100, ["run"])])
def test_a_job_that_the_disk_has_no_room_for_is_one_that_failed(limit, kept, tmp_path):
    """A limit on file size stands in for a full disk."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path), "10000"],
        cwd=ROOT,
        preexec_fn=limited,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.startswith("error True cannot write ") and done.stdout.endswith("not written\n")
    records = records_of(tmp_path)
    assert [record["record"] for record in records] == kept
    assert records[-1].get("status") in (None, "error")


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_killed_writer_costs_only_its_job(cut, tmp_path):
    """Cut within the last line, and a few lines before it: what is left of the job is not mixed with its next try."""
    wanted = chosen()
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=False) as run_of:
        run_of["torchaudio"].add(correctness())
        path = run_of["torchaudio"].path
        whole = path.read_bytes()
        run_of["torchaudio"].add(timing("timing-1", [1, 2], [1, 2]))
    path.write_bytes(path.read_bytes()[:-cut])
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=True) as run_of:
        assert path.read_bytes() == whole
        assert run_of["torchaudio"].is_done("correctness") and not run_of["torchaudio"].is_done("timing-1")
        run_of["torchaudio"].add(timing("timing-1", [5], [5]))
    assert records_of(path)[len(whole.splitlines()) :] == timing("timing-1", [5], [5])


def test_a_run_without_room_for_its_first_line_leaves_no_folder(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    flags = ["--in-place", "--quiet", "--log-dir", tmp_path / "log"]
    for swept in ([], ["--sweep", "vocab-size=8,9"]):
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # Python would keep what it wrote half
        done = run_command("losses/benchmark_reference.py", *flags, *swept, preexec_fn=limited, env=environment)
        assert_user_error(done, "cannot write", tmp_path / "log")
        assert not list((tmp_path / "log").iterdir())


def test_in_place_is_this_python():
    for implementation in IMPLEMENTATIONS:
        assert interpreters.choose(implementation, in_place=True, prefer_here=False).python == Path(sys.executable)


def test_a_python_that_has_the_package_is_preferred_by_its_script():
    choice = interpreters.choose(BY_NAME["torchaudio"], in_place=False, prefer_here=True)
    pytest.importorskip("torchaudio")
    assert choice.python == Path(sys.executable)


def test_devices():
    assert interpreters.resolve_device("cpu", [Path(sys.executable)]) == "cpu"
    with pytest.raises(UserError, match="cuda:99"):
        interpreters.resolve_device("cuda:99", [Path(sys.executable)])
