"""The runner, tried with real commands: what a run leaves, and what a crash, a hang, an OOM or Ctrl-C costs."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest
from commands import ROOT, assert_user_error, rows_of, run, start, wait_for, wait_for_worker
from fixtures_runs import records_of

pytest.importorskip("torchaudio", reason="these tests measure torchaudio for real")

QUICK = ["--in-place", "--preset", "quick", "--max-seconds", "0.05", "--limits", "false"]
PAIR = ["--only", "torchaudio,optimized_transducer"]


@pytest.fixture
def flags(tmp_path, tiny_shapes):
    return [*QUICK, "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log"]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_a_run_from_start_to_end(flags, log):
    flags_of_run = ["--rounds", "2", "--schedule", "wait=1,warmup=1,active=3,repeat=2", "--limits", "true"]
    done = run("benchmark_all.py", *PAIR, *flags, *flags_of_run)
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
        assert len(row["windows"]) == 2 and row["average_step_time_us"] > 0 and row["profiled_peak_mb"] > 0
        folder = log / f"{name}-2"
        assert len(list(folder.glob("*.pt.trace.json*"))) == 2
        kept = records_of(folder)
        samples = [r for r in kept if r["record"] == "sample"]
        assert {(s["scope"], s["round"]) for s in samples} >= {("loss", 1), ("step", 1), ("step", 2)}
        assert all(0 < s["forward_wall_ns"] <= s["total_wall_ns"] for s in samples) and any(
            s["warmup"] for s in samples
        )
        (limits,) = (r for r in kept if r["record"] == "limits")  # of every third round
        assert limits["round"] == 1 and not limits.get("reason") and limits["streams"] and limits["products"]
    against = [row["against_fastest"] for row in rows.values()]
    assert sorted(standing["is_fastest"] for standing in against) == [False, True]
    assert all(standing["paired"] and standing["ratio"] >= 1 for standing in against)
    first, other = (records_of(log / f"{name}-2")[0] for name in rows)
    assert first["run_id"] == other["run_id"] and first["machine"]["cores"] >= 1


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_what_is_measured_outlives_an_interruption_and_resume_goes_on(number, code, flags, log, tmp_path):
    """Two signals at once, as `timeout` sends them."""
    long = ["--max-seconds", "1", "--spread", "0.0001%", "--scope", "step"]
    arguments = ["benchmark_torchaudio.py", *flags, "--rounds", "2", "--passes", "correctness,timing", *long]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = start(*arguments, env={**os.environ, "TMPDIR": str(scratch)})
    worker = wait_for_worker(process, "timing-1")
    wait_for(lambda: any('"sample"' in path.read_text() for path in scratch.glob("*/records.jsonl")), "a sample")
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"what was measured is in {log}" in errors and "--resume" in errors and "Traceback" not in errors
    assert "torchaudio" in output and "interrupted" in output
    assert not os.path.exists(f"/proc/{worker}") and not list(scratch.iterdir())
    before = records_of(log / "torchaudio-2")
    assert [r["status"] for r in before if r["record"] == "status"] == ["ok", "interrupted"]
    assert any(r["record"] == "sample" for r in before)

    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    after = records_of(log / "torchaudio-2")
    assert after[: len(before)] == before
    assert [r["job"] for r in after[len(before) :] if r["record"] == "status"] == ["timing-1", "timing-2"]
    assert sorted(path.name for path in log.iterdir()) == ["details.txt", "report.html", "torchaudio-2"]
    assert rows_of(log)["torchaudio"]["status"] == "ok"


def test_a_run_that_goes_on_is_not_resumed_until_it_is_killed(flags, log):
    """Two processes would measure the same jobs into the same folders."""
    long = ["--max-seconds", "1", "--spread", "0.0001%", "--scope", "loss"]
    arguments = ["benchmark_torchaudio.py", *flags, *long, "--passes", "timing"]
    process = start(*arguments)
    worker = wait_for_worker(process, "timing-1")
    os.kill(worker, signal.SIGSTOP)
    (folder,) = log.iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert_user_error(run(*arguments, "--resume"), f"{folder} is being measured by process {process.pid} ", "wait")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    rows_of(log)  # reading needs no lock
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{worker}"), "end of the stopped worker")
    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["results.jsonl"]


def test_out_of_memory_is_a_row(flags, log, tmp_path):
    """A limit on address space that torch fits in and a batch of 8 GiB of logits does not."""
    import torch

    shapes = tmp_path / "long.pt"
    torch.save(torch.full((4, 2), 2000, dtype=torch.int32), shapes)
    limit = 24 * 2**30
    done = run(
        "benchmark_torchaudio.py",
        *flags,
        "--shape-file",
        shapes,
        "--batch-size",
        "4",
        "--vocab-size",
        "500",
        "--passes",
        "timing",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert rows_of(log)["torchaudio"]["status"] == "oom"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(flags, log, tmp_path):
    """The list and the comparison are one line; a run keeps its results and writes its report all the same."""
    with open("/dev/full", "wb") as full:
        done = run("benchmark_torchaudio.py", *flags, "--passes", "correctness", stdout=full)
        assert done.returncode == 1 and "warning: no table: No space left" in done.stderr
        assert "Traceback" not in done.stderr and (log / "report.html").exists()
        assert_user_error(run("benchmark_all.py", "--list", stdout=full), "No space left")
        assert_user_error(run("rnnt-bench", "compare", log, log, stdout=full), "No space left")
    assert rows_of(log)["torchaudio"]["loss_error"] < 1e-4


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is an NVIDIA GPU here")
def test_cuda_that_is_not_there(flags):
    assert_user_error(run("benchmark_torchaudio.py", *flags, "--device", "cuda"), "--device cuda", "no CUDA device")


class RunsCode:
    def __reduce__(self):
        return (os.system, ("touch PICKLE_WAS_RUN",))


@pytest.mark.parametrize(
    "content, words", [(RunsCode(), []), ([[5, 1], [0, 3]], ["row 1", "0"])], ids=["code", "zero T"]
)
def test_bad_shape_file(content, words, flags, tmp_path):
    import torch

    path = tmp_path / "bad.pt"
    torch.save(torch.tensor(content, dtype=torch.int32) if isinstance(content, list) else content, path)
    done = run("benchmark_torchaudio.py", *flags, "--shape-file", path, "--quiet", cwd=tmp_path)
    assert_user_error(done, path, *words)
    assert not list(tmp_path.rglob("PICKLE_WAS_RUN")) and not (ROOT / "PICKLE_WAS_RUN").exists()
    assert not list((tmp_path / "log").glob("*"))
