"""Planning, folders, places and exit codes of a run, and one run for real."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rnnt_bench.analysis import logs, times
from rnnt_bench.cli.benchmark import benchmark, exit_code
from rnnt_bench.cli.parser import standard
from rnnt_bench.core import settings
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, UserError
from rnnt_bench.core.implementations import BY_NAME, IMPLEMENTATIONS, find
from rnnt_bench.jobs import job as of_job
from rnnt_bench.jobs import session
from rnnt_bench.jobs.session import Executor
from rnnt_bench.records import run, schema
from rnnt_bench.setup import environments, interpreters
from rnnt_bench.system import machine

from canned import Canned, measured, parsed
from commands import ROOT, assert_user_error, rows_of
from commands import run as run_command
from fixtures_runs import records_of

NAMES = [implementation.name for implementation in IMPLEMENTATIONS]
K2 = environments.interpreter("k2")
needs_k2 = pytest.mark.skipif(K2 is None, reason="no k2 environment")


def chosen(**flags):
    return settings.resolve({"preset": "quick", "rounds": 4, **flags}, "cpu")


def test_every_round_has_everyone_once_in_an_order_of_its_own():
    jobs = of_job.plan(NAMES, chosen(rounds=12))
    assert [job.pass_name for job in jobs[:: len(NAMES)]] == ["correctness", *["timing"] * 12, "memory", "trace"]
    assert len(set(jobs)) == len(jobs)
    orders = [tuple(job.implementation for job in jobs if job.round == number) for number in range(1, 13)]
    assert all(sorted(order) == sorted(NAMES) for order in orders) and len(set(orders)) > 3
    assert jobs == of_job.plan(NAMES, chosen(rounds=12)) != of_job.plan(NAMES, chosen(rounds=12, seed=1))


def test_what_is_measured_beside_others_has_no_trace_and_misses_none(tmp_path):
    names = ["torchaudio", "torchaudio:by-utterance", "fast_rnnt@k2"]
    jobs = of_job.plan(names, chosen(), controls=names[2:])
    others = {of: [job.implementation for job in jobs if job.pass_name == of] for of in ("memory", "trace")}
    assert others == {"memory": names[:2], "trace": names[:1]}
    measured(tmp_path, Canned(), names=names[:2])
    for row in rows_of(tmp_path).values():
        assert row["status"] == "ok" and not any("traces" in note for note in row["notes"])


def test_rows_of_the_same_code_are_asked_less_as_long_as_the_other_one_is_right(tmp_path):
    names = ["torchaudio:by-utterance", "fast_rnnt@k2", "torchaudio", "torchaudio@k2"]  # of another version, maybe
    assert {job.implementation: job.same_as for job in of_job.plan(names, chosen())} == dict.fromkeys(names, "") | {
        "torchaudio:by-utterance": "torchaudio"
    }
    for failing in ("none", "correctness", "timing-1"):
        asked = {}

        def answer(job, _, failing=failing, asked=asked):
            asked[job.title] = job.same_as
            if job.title == f"torchaudio {failing}":
                return [job.status("error", "wrong result: its gradient")]

        measured(tmp_path / failing, Canned(answer), names=["torchaudio:by-utterance", "torchaudio"])
        row = rows_of(tmp_path / failing)["torchaudio:by-utterance"]
        assert asked["torchaudio:by-utterance correctness"] == ("" if failing == "correctness" else "torchaudio")
        assert row["status"] == ("error" if failing == "timing-1" else "ok")
        assert failing != "timing-1" or "torchaudio, the same code, its gradient" in row["reason"]


def test_exit_codes():
    codes = [exit_code(statuses) for statuses in (["ok", "missing", "unsupported"], ["ok", "timeout"], ["missing"])]
    assert codes == [EXIT_OK, EXIT_FAILED, EXIT_FAILED]


def test_a_second_run_has_folders_of_its_own_and_one_that_cannot_be_made_is_said(tmp_path):
    for _ in range(2):
        measured(tmp_path, Canned(), names=["torchaudio"])
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"torchaudio-2", "torchaudio-2.2"}
    assert rows_of(tmp_path)["torchaudio"]["log_dir"].endswith("torchaudio-2.2")
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "log", Path("/proc/log")):
        with pytest.raises(UserError, match="--log-dir"):
            measured(folder, Canned())
    with pytest.raises(UserError, match="--resume: no run with these settings"):
        measured(tmp_path, Canned(), "--resume", "--rounds", "7")


def test_a_folder_that_cannot_be_read_does_not_stop_the_resume_of_another(tmp_path, capsys):
    wanted = chosen()
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=False) as run_of:
        folder = run_of["torchaudio"].folder
    for name, text in (("cut", '{"record":"ru'), ("binary", "\udcff"), ("other", '{"record":"run"}\nnonsense\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with run.open_runs(["torchaudio"], wanted, tmp_path, resume=True) as run_of:
        assert run_of["torchaudio"].folder == folder
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "binary, cut, other in" in warning


def test_a_run_that_goes_on_is_not_resumed(tmp_path):
    """Two processes would measure the same jobs into the same folders."""
    with run.open_runs(["torchaudio"], chosen(), tmp_path, resume=False) as run_of:
        with pytest.raises(UserError, match=f"is being measured by process {os.getpid()} .*wait"):
            with run.open_runs(["torchaudio"], chosen(), tmp_path, resume=True):
                pass
        assert run_of["torchaudio"].claim.path.exists()
    assert [path.name for path in run_of["torchaudio"].folder.iterdir()] == ["results.jsonl"]


def test_a_job_that_cannot_be_started_is_a_row(tmp_path):
    job = of_job.Job("torchaudio", "correctness")
    (status,) = Executor().execute(job, tmp_path / "python", tmp_path, chosen(), 60, lambda _: None)
    assert status.status == "error" and str(tmp_path / "python") in status.reason
    assert "TMPDIR" in status.reason


NO_ROOM = """
import pathlib, sys
from rnnt_bench.records import store
from rnnt_bench.records.run import Run
from rnnt_bench.records.schema import Header, Limits, Status, Stop
run = Run(pathlib.Path(sys.argv[1]) / "results.jsonl")
run.add([Header(name="k2")])
filler = "x" * int(sys.argv[2])
run.add([Stop(job="timing-1", scope="step", round=1, changed=[filler]), Status(job="timing-1", status="ok")])
print(run.records[-1].status, run.failed, run.records[-1].reason)
try:
    run.add([Limits(reason=filler)])
except store.NotWritten:
    print("not written")
"""


def limited(size):
    """Return what limits the size of files in a process: it stands in for a full disk."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    # Python would keep bytecode that it wrote half.
    return {"preexec_fn": limit, "env": {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}}


@pytest.mark.parametrize("limit, kept", [(4096, ["run", "status"]), (100, ["run"])])
def test_a_job_that_the_disk_has_no_room_for_is_one_that_failed(limit, kept, tmp_path):
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path), "10000"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **limited(limit))
    assert done.stdout.startswith("error True cannot write ") and done.stdout.endswith("not written\n")
    records = records_of(tmp_path)
    assert [record["record"] for record in records] == kept and records[-1].get("status") in (None, "error")


def test_a_run_without_room_for_its_first_line_leaves_no_folder(tmp_path):
    flags = ["--in-place", "--quiet", "--log-dir", tmp_path / "log"]
    for swept in ([], ["--sweep", "vocab-size=8,9"]):
        done = run_command("losses/benchmark_reference.py", *flags, *swept, **limited(100))
        assert_user_error(done, "cannot write", tmp_path / "log")
        assert not list((tmp_path / "log").iterdir())


def test_in_place_is_this_python_and_a_script_prefers_it():
    here = Path(sys.executable)
    assert {interpreters.choose(row, in_place=True, prefer_here=False).python for row in IMPLEMENTATIONS} == {here}
    pytest.importorskip("torchaudio")
    assert interpreters.choose(BY_NAME["torchaudio"], in_place=False, prefer_here=True).python == here


def test_names_of_rows_in_another_environment():
    row = find("fast_rnnt:modified@k2")
    assert (row.name, row.environment, row.kind) == ("fast_rnnt:modified@k2", "k2", "modified")
    assert (row.script, row.variant) == (find("fast_rnnt").script, "modified")
    assert not set(row.folder) & set(":@/") and row.folder != find("fast_rnnt:modified").folder
    assert find("k2@k2") == find("k2") and find("reference@main") == find("reference")
    for name in ("fast_rnnt@viewer", "fast_rnnt@", "nobody@k2", "fast_rnnt:packed@k2"):
        with pytest.raises(UserError):
            find(name)
    assert parsed("--only", "fast_rnnt@k2,k2@k2,k2:modified@main").only == ("k2", "fast_rnnt@k2", "k2:modified@main")
    assert_user_error(run_command("benchmark_all.py", "--only", "fast_rnnt@nowhere"), "fast_rnnt@nowhere", "main, k2")


def test_a_row_of_another_environment_runs_there_or_nowhere(monkeypatch):
    choice = interpreters.choose(find("reference@k2"), in_place=True, prefer_here=True)
    assert choice.python is None and "--in-place" in choice.reason
    monkeypatch.setattr(environments, "FOLDER", Path("/nowhere"))  # no environments at all
    choice = interpreters.choose(find("reference@k2"), in_place=False, prefer_here=True)
    assert choice.python is None and "make setup" in choice.reason
    assert interpreters.choose(find("reference"), in_place=False, prefer_here=False).python == Path(sys.executable)


@needs_k2
def test_its_row_is_of_that_torch_and_a_package_that_is_not_there_is_missing(tmp_path, tiny_shapes):
    flags = ["--preset", "quick", "--passes", "correctness", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    only = ["--only", "reference,reference@k2,torchaudio@k2", "--quiet"]
    done = run_command("benchmark_all.py", *flags, *only)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert (rows["reference@k2"]["status"], rows["torchaudio@k2"]["status"]) == ("ok", "missing")
    assert "torchaudio is not installed" in rows["torchaudio@k2"]["reason"]
    assert rows["reference@k2"]["torch"][:4] == "1.13" != rows["reference"]["torch"][:4]
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"reference-2", "reference-at-k2-2", "torchaudio-at-k2-2"}


@needs_k2
def test_the_default_run_has_a_control_for_each_environment_with_another_torch():
    def controls(*names):
        return interpreters.controls(interpreters.choose_all(names, in_place=False), "cpu")

    assert controls("torchaudio", "k2", "reference", "k2-pruned") == {"reference@k2": interpreters.Choice(K2)}
    assert controls("torchaudio", "reference") == controls("torchaudio", "k2") == {}  # one torch, or no loss under both
    kinds = {find(name).kind: name for name in controls(*standard()) if name.endswith("@k2")}
    assert kinds["exact"] in ("fast_rnnt@k2", "reference@k2")  # where gcc is, fast_rnnt's


def test_controls_of_torchs_products_run_where_they_have_cause(tmp_path, tiny_shapes, capsys):
    """The probe tells, the library is preloaded, and the losses are right under it: all for real."""
    pytest.importorskip("fused_transducer")
    flags = ["--device", "cpu", "--in-place", "--preset", "quick", "--limits", "true", "--max-seconds", "0.05"]
    flags += ["--passes", "timing", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    assert benchmark(["fused", "optimized_transducer"], parsed(*flags), executor=Executor()) == EXIT_OK
    rows = {row.name: row for row in logs.read([tmp_path]).rows}
    limits = [schema.typed(line) for line in records_of(rows["fused"].folder) if line["record"] == "limits"]
    slow, probe = times.slow_products(limits), [line for line in limits if line.round is None]
    assert len(probe) == (2 if shutil.which("cc") else 0)
    assert [line.mkl_as_intel for line in probe] == [False, True][: len(probe)]
    assert (slow is not None) == ("fused@fast-mkl" in rows) == ("fused@fast-mkl" in capsys.readouterr().err)
    for name, row in rows.items():
        assert row.status == "ok" and row.environment.mkl_as_intel is name.endswith("@fast-mkl")
        assert row.step.ms and bool(row.loss_alone.ms) is (name == "optimized_transducer")


@pytest.fixture
def flags(tmp_path, tiny_shapes):
    pytest.importorskip("torchaudio", reason="these tests measure torchaudio for real")
    flags_of_run = "--in-place --preset quick --max-seconds 0.05 --limits false --shape-file".split()
    return [*flags_of_run, tiny_shapes, "--log-dir", tmp_path / "log"]


def test_a_job_that_takes_longer_than_its_time_is_ended(flags, tmp_path):
    """It takes more than four seconds, and less than ten times its one second."""
    (tmp_path / "sleeps.py").write_text("import time\n\ntime.sleep(4)\n\n\ndef loss(*inputs):\n    raise ValueError\n")
    words = ["--loss", f"{tmp_path}/sleeps.py:loss", "--skip", "all", "--passes", "correctness", "--timeout", "1"]
    done = run_command("rnnt-bench", "run", *words, *flags)
    (row,) = rows_of(tmp_path / "log").values()
    assert (done.returncode, row["status"]) == (EXIT_FAILED, "timeout") and "1 s (--timeout)" in row["reason"]


def test_a_run_from_start_to_end(flags, tmp_path):
    log = tmp_path / "log"
    flags_of_run = ["--rounds", "2", "--limits", "true"]
    done = run_command("benchmark_all.py", "--only", "torchaudio,optimized_transducer", *flags, *flags_of_run)
    assert done.returncode == 0, done.stderr
    assert "VERDICT" in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
    details = (log / "details.txt").read_text()
    assert "torchaudio step: joiner" in details and "torchaudio step: joiner" not in done.stdout
    assert "preset quick" in done.stderr
    rows = rows_of(log)
    assert set(rows) == {"torchaudio", "optimized_transducer"}
    for name, row in rows.items():
        assert row["status"] == "ok" and row["device"] == "cpu" and row["torch"]
        assert row["loss_error"] < 1e-4 and row["grad_error"] < 1e-4 and row["step"]["ms"]["n"] >= 4
        assert all(row["limit_percent"][scope] for scope in ("step", "loss"))
        assert row["options"]["reduction"] == {"ours": "sum", "default": "mean"}
        assert len(row["windows"]) == 1 and row["average_step_time_us"] > 0 and row["profiled_peak_mb"] > 0
        records = records_of(log / f"{name}-2")
        (kept,) = (record for record in records if record["record"] == "trace")
        assert kept["files"] == sorted(path.name for path in (log / f"{name}-2").glob("*.pt.trace.json*"))
        others = kept["foreign_cpu"]  # None where the steps are too short to tell
        assert (others is None or 0 <= others <= 1) and kept["flags"] == machine.busy_flags(others)
        samples = [record for record in records if record["record"] == "sample"]
        assert {(s["scope"], s["round"]) for s in samples} >= {("loss", 1), ("step", 1), ("step", 2)}
        assert all(0 < s["forward_wall_ns"] <= s["total_wall_ns"] for s in samples)
        assert any(s["warmup"] for s in samples)
        assert row["against_fastest"]["paired"] and row["against_fastest"]["ratio"] >= 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(flags, tmp_path):
    """The list and the comparison are one line; a run keeps its results and writes its report all the same."""
    log = tmp_path / "log"
    measuring = ["benchmark_torchaudio.py", *flags, "--passes", "correctness"]
    lines = [measuring, ["benchmark_all.py", "--list"], ["rnnt-bench", "compare", log, log]]
    with open("/dev/full", "wb") as full:
        measured_run, *others = [run_command(*line, stdout=full) for line in lines]
    assert measured_run.returncode == 1 and "warning: no table: No space left" in measured_run.stderr
    assert "Traceback" not in measured_run.stderr and (log / "report.html").exists()
    for done in others:
        assert_user_error(done, "No space left")
    assert rows_of(log)["torchaudio"]["loss_error"] < 1e-4


@pytest.mark.parametrize(
    "returncode, by_kernel, last_line, status",
    [
        (-signal.SIGKILL, True, "", "oom"),
        (-signal.SIGKILL, False, "", "error"),
        (-signal.SIGABRT, True, "Assertion failed: T > 0", "error"),  # the kernel killed another process
        (-signal.SIGABRT, False, "terminate called after throwing an instance of 'std::bad_alloc'", "oom"),
        (-signal.SIGSEGV, False, "bad_alloc", "error"),  # no allocator ends so
        (1, False, "MemoryError", "oom"),
        (1, False, "libgomp: Thread creation failed: Resource temporarily unavailable", "oom"),
        (1, False, "ValueError: no", "error"),
    ],
)
def test_deaths_for_lack_of_memory(returncode, by_kernel, last_line, status):
    assert session.how_it_died(returncode, by_kernel, [last_line])[0] == status
