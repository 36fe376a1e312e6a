"""What a fault costs, with the real commands: full disks, broken records, streams that are closed, links, floods."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, command, own_loss, run, start, wait_for
from fixtures_runs import header, memory, read_rows, records_of, write_run
from fixtures_sweeps import write_sweep
from viewer_servers import VIEWER, needs_viewer

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
QUICK = ["--in-place", "--preset", "quick", "--max-seconds", "0.05", "--limits", "false", "--scope", "loss"]
DEEP = '{"record":"run","name":' + "[" * 10**5 + "]" * 10**5 + "}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A log folder that benchmark_reference.py has left, and its flags."""
    import torch

    folder = tmp_path_factory.mktemp("measured")
    torch.save(torch.tensor([[6, 2], [5, 1]], dtype=torch.int32), folder / "shapes.pt")
    flags = [*QUICK, "--passes", "correctness", "--shape-file", folder / "shapes.pt"]
    assert run("losses/benchmark_reference.py", *flags, "--log-dir", folder / "log").returncode == 0
    return folder / "log", flags


def insert(path, index, *lines):
    """Put lines into a file before the line of this index."""
    old = path.read_text().splitlines()
    path.write_text("\n".join([*old[:index], *lines, *old[index:]]) + "\n")


# A full disk.


def test_a_sweep_on_a_full_disk_is_read_and_resumed(disk, tmp_path, tiny_shapes):
    log = disk(12)
    flags = [*QUICK, "--quiet", "--shape-file", tiny_shapes, "--passes", "correctness", "--log-dir", log]
    flags += ["--sweep", "vocab-size=20,30"]
    full = run("losses/benchmark_reference.py", *flags)
    assert full.returncode == 1 and "No space left" in full.stdout + full.stderr and "Traceback" not in full.stderr
    path = log / "sweep-vocab-size" / "sweep.jsonl"
    kept = path.read_bytes()
    assert kept.endswith(b"\n") and all(json.loads(line) for line in kept.splitlines())
    disk(4096)
    rows = read_rows(log)
    assert rows and rows[0]["sweep"]["vocab_size"] == 20 and not any(row["unreadable"] for row in rows)
    done = run("losses/benchmark_reference.py", *flags, "--resume")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(kept)
    assert [(row["status"], row["sweep"]["vocab_size"]) for row in read_rows(log)] == [("ok", 20), ("ok", 30)]


def test_an_addition_after_one_that_could_not_be_undone_costs_no_line_but_its_own(measured, tmp_path):
    """Its writer was killed between the two."""
    log, flags = measured
    shutil.copytree(log, tmp_path / "log")
    path = tmp_path / "log" / "reference-2" / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"record":"environment","job":"mem')
    code = "import sys, pathlib; from common.records import store; store.append(pathlib.Path(sys.argv[1]), [{}])"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=True)
    assert path.read_text() == whole + '{"record":"environment","job":"mem\n{}\n'
    done = run("summarize.py", tmp_path / "log", "--format", "json")
    assert json.loads(done.stdout)[0]["loss_error"] < 1e-4 and done.stderr.count("\n") == 1


def test_conformance_on_a_full_disk_prints_what_it_knows_and_leaves_the_old_file(disk):
    folder = disk(16)
    (folder / "conformance.json").write_text('{"old": "one"}')
    with pytest.raises(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    done = run("conformance.py", "--only", "reference", "--cases", "ragged", "--in-place", "--output", folder)
    assert done.returncode == 2 and "reference" in done.stdout and " pass" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert [line.partition(": ")[0] for line in lines] == ["warning", "conformance.py"] and "--output" in lines[1]
    assert (folder / "conformance.json").read_text() == '{"old": "one"}'
    assert sorted(os.listdir(folder)) == ["conformance.json", "filler"]


def test_ctrl_c_in_conformance_keeps_every_judged_column(tmp_path):
    slow = own_loss(tmp_path, in_loss="import time, torch; time.sleep(600)")
    process = start(
        "conformance.py", "--only", f"reference,{slow}", "--cases", "ragged", "--in-place", "--output", tmp_path / "out"
    )
    wait_for((tmp_path / "out" / "conformance.json").exists, "a first column")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "1 of 2" in errors and "Traceback" not in errors, errors
    assert "reference" in output and " pass" in output
    (row,) = json.loads((tmp_path / "out" / "conformance.json").read_text())["implementations"]
    assert (row["name"], row["cells"]["ragged"]["result"]) == ("reference", "pass")
    assert "## Matrix" in (tmp_path / "out" / "conformance.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize.py", "log", "--output", "out"],
        ["report.py", "log", "--output", "out"],
        ["report.py", "log", "--output", "page.html", "--png", "out"],
    ],
)
def test_what_cannot_be_written_says_the_flag_that_names_another(arguments, tmp_path):
    """A folder stands where the file should be, or a file where the folder should."""
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "log" / "a")
    (tmp_path / "out").write_text("") if "--png" in arguments else (tmp_path / "out").mkdir()
    assert_user_error(run(*arguments, cwd=tmp_path), "cannot write out", f"with {arguments[-2]}")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


# Broken records.


BROKEN = {
    "nonsense": "no record",
    "nesting": DEEP,
    "half deep": '{"record":"trace","job":"trace","files":[],"profiler":' + "[" * 90 + "]" * 90 + "}",
    "a list for a text": '{"record":"status","job":["memory"],"status":"ok"}',
    "a number for a text": '{"record":"status","job":"memory","status":3}',
    "no time": '{"record":"sample","job":"timing-1","scope":"step","round":1,"batch":4,"total_wall_ns":-1}',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_costs_itself_and_is_named(line, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "log" / name, name=name)
    before = read_rows(tmp_path / "log")
    insert(tmp_path / "log" / "a" / "results.jsonl", 5, line)
    position = f"{tmp_path / 'log' / 'a' / 'results.jsonl'}, line 6"
    for script, *arguments in (
        ("summarize.py", tmp_path / "log", "--format", "json"),
        ("report.py", tmp_path / "log", "--output", tmp_path / "page.html"),
        ("compare.py", "--in", tmp_path / "log", "a", "b"),
    ):
        done = run(script, *arguments)
        (warning,) = done.stderr.splitlines()
        assert done.returncode == 0 and warning.startswith("warning: ") and position in warning, done.stderr
        assert script != "summarize.py" or json.loads(done.stdout) == before


@needs_viewer
def test_tensorboard_names_broken_records(tmp_path):
    write_run(tmp_path / "log" / "a")
    for number, line in enumerate(BROKEN.values(), start=3):
        insert(tmp_path / "log" / "a" / "results.jsonl", number, line)
    scalars = [str(VIEWER), "-m", "common.cli.tensorboard", str(tmp_path / "log")]
    done = subprocess.run(scalars, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "scalars of 1 written anew" in done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "results.jsonl, line 4: " in warning and f"{len(BROKEN) - 1} more: 5, 6" in warning


@pytest.mark.parametrize("field, value", [("started", 5), ("name", ["x"]), ("settings", {"l2": ["x"], "scopes": []})])
def test_a_run_without_its_first_record_costs_only_that_run(field, value, tmp_path):
    for name in ("a", "b", "c"):
        write_run(tmp_path / "log" / name, name=name)
    path = tmp_path / "log" / "c" / "results.jsonl"
    path.write_text(
        path.read_text().replace(json.dumps(header("c")[field], separators=(",", ":")), json.dumps(value), 1)
    )
    rows = {row["name"]: row["status"] for row in read_rows(tmp_path / "log")}
    assert rows == {"a": "ok", "b": "ok", "c": "error"}
    assert run("report.py", tmp_path / "log", "--output", tmp_path / "page.html").returncode == 0
    done = run("compare.py", "--in", tmp_path / "log", "a", "b")
    assert done.returncode == 0 and f"{path}, line 1" in done.stderr, done.stderr


def test_a_broken_run_record_in_a_sweep_costs_that_run(tmp_path):
    path = write_sweep(tmp_path / "log" / "sweep-V", {"vocab_size": [20, 30]}, ["a", "b"])
    lines = path.read_text().splitlines()
    (number,) = [
        at
        for at, line in enumerate(map(json.loads, lines))
        if (line["record"], line.get("cell")) == ("run", 1) and line["implementation"] == "a"
    ]
    lines[number] = lines[number].replace('"started":"2026-01-01T00:00:00+00:00"', '"started":5')
    path.write_text("\n".join(lines) + "\n")
    done = run("summarize.py", tmp_path / "log", "--format", "json")
    assert done.returncode == 0 and f"{path}, line {number + 1}: " in done.stderr
    rows = [(row["name"], row["sweep"]["vocab_size"], row["status"]) for row in json.loads(done.stdout)]
    assert sorted(rows) == [("a", 20, "ok"), ("b", 20, "ok"), ("b", 30, "ok")]


def test_resume_goes_on_behind_a_broken_record(measured, tmp_path):
    log, flags = measured
    shutil.copytree(log, tmp_path / "log")
    path = tmp_path / "log" / "reference-2" / "results.jsonl"
    insert(path, 1, DEEP)
    before = path.read_bytes()
    done = run("losses/benchmark_reference.py", *flags, "--quiet", "--log-dir", tmp_path / "log", "--resume")
    assert done.returncode == 0 and path.read_bytes() == before, done.stderr  # what is done is not measured again
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: ") and f"{path}, line 2: " in warning


def test_an_attempt_that_lost_its_status_is_not_mixed_with_the_next(tmp_path):
    write_run(tmp_path / "a")
    path = tmp_path / "a" / "results.jsonl"
    lines = records_of(path)
    peaks = memory(1000)
    peaks[-1]["status"] = 5
    insert(path, 1, *(json.dumps(line) for line in peaks))
    assert records_of(path)[0] == lines[0]
    (row,) = read_rows(tmp_path)
    assert row["memory"]["step"]["torch_allocated_mb"] == 32


# Streams that are closed, or take no more.


def made(folder):
    """Two runs, one with a broken record, so that every command has a warning to print."""
    for name in ("a", "b"):
        write_run(folder / "log" / name, name=name)
    insert(folder / "log" / "a" / "results.jsonl", 5, "no record")
    return folder / "log"


READERS = [["summarize.py", "log"], ["compare.py", "--in", "log", "a", "b"], ["report.py", "log", "--output", "page"]]


@needs_full
@pytest.mark.parametrize(
    "arguments, streams",
    [
        *((READERS[0], streams) for streams in ("2>/dev/full", "2>&-", ">&-", "<&- >&- 2>&-")),
        (READERS[1], "2>/dev/full"),
        (READERS[2], ">&-"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_stream_that_takes_nothing_ends_no_reader(arguments, streams, tmp_path):
    made(tmp_path)
    line = " ".join([*command(arguments[0], *arguments[1:]), streams])
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("\n") == (streams == ">&-"), done.stderr
    assert bool(done.stdout) == (streams in ("2>/dev/full", "2>&-"))


def test_a_closed_pipe_behind_stderr_ends_no_reader(tmp_path):
    made(tmp_path)
    line = command(*READERS[2])
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.close()
        assert process.stdout.read() and process.wait(60) == 0


@pytest.mark.parametrize("streams", [">&-", "2>&1 >/dev/null | true"])
def test_a_stream_that_takes_nothing_ends_no_run(streams, measured, tmp_path):
    _, flags = measured
    line = " ".join([*command("losses/benchmark_reference.py", *flags, "--log-dir", tmp_path / "log"), streams])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and bool(done.stderr) == (streams == ">&-"), done.stderr
    assert read_rows(tmp_path / "log")[0]["loss_error"] < 1e-4 and (tmp_path / "log" / "report.html").exists()


def test_streams_that_are_closed_end_no_judging(tmp_path):
    flags = ["--only", "reference", "--cases", "ragged", "--in-place", "--output", tmp_path]
    line = " ".join([*command("conformance.py", *flags), ">&- 2>&-"])
    done = subprocess.run(line, shell=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    (row,) = json.loads((tmp_path / "conformance.json").read_text())["implementations"]
    assert row["cells"]["ragged"]["result"] == "pass"


@needs_full
@pytest.mark.parametrize("arguments", ["--help", "--nonsense"])
def test_help_and_mistakes_need_no_stream(arguments):
    line = " ".join(command("benchmark_all.py", arguments))
    for streams in (">/dev/full 2>/dev/full", ">&- 2>&-"):
        done = subprocess.run(f"{line} {streams}", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0 if arguments == "--help" else 2, "")


# Links.


def test_links_in_a_log_folder_are_not_written_through(measured, tmp_path):
    log, flags = measured
    victim = tmp_path / "victim"
    arguments = [*flags, "--log-dir", tmp_path / "log", "--resume"]
    for name in (".measuring.lock", "results.jsonl"):
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        shutil.copytree(log, tmp_path / "log")
        link = tmp_path / "log" / "reference-2" / name
        victim.write_bytes(link.read_bytes() if link.exists() else b"mine")
        before = victim.read_bytes()
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        assert_user_error(run("losses/benchmark_reference.py", *arguments), link, "is a link")
        assert victim.read_bytes() == before


def replace_by_links(victim, *paths):
    victim.write_text("mine")
    for path in paths:
        path.unlink()
        path.symlink_to(victim)


@pytest.mark.parametrize(
    "script, flags_of_script, file, again",
    [
        ("losses/benchmark_reference.py", ["--sweep", "vocab-size=20"], "sweep-vocab-size/sweep.jsonl", []),
        (
            "profile_inference.py",
            ["--audio_mockup_secs=[0.1]", "--batch_sizes=[1]", "--arguments={layers: 1, dim: 16}"]
            + ["--export_logs=true", "--max-seconds", "0.05"],
            "inference-*/inference.jsonl",
            ["inference.html", "cells.csv", "traces/*/*.txt"],
        ),
    ],
    ids=["sweep", "inference"],
)
def test_links_in_the_folder_of_a_sweep_or_a_model(script, flags_of_script, file, again, measured, tmp_path):
    """again: what is written again where a job is repeated."""
    flags = [*(measured[1] if "reference" in script else ["--device", "cpu"]), *flags_of_script, "--log-dir", tmp_path]
    assert run(script, *flags).returncode == 0
    (path,) = tmp_path.glob(file)
    whole = path.read_text()
    path.write_text(whole[: whole.index("\n") + 1])
    links = [match for name in again for match in path.parent.glob(name)]
    replace_by_links(tmp_path / "victim", *links)
    assert len(links) == len(again) and run(script, *flags, "--resume").returncode == 0
    assert (tmp_path / "victim").read_text() == "mine" and not any(link.is_symlink() for link in links)
    replace_by_links(tmp_path / "victim", path)
    (tmp_path / "victim").write_text(whole)
    assert_user_error(run(script, *flags, "--resume"), path, "is a link")
    assert (tmp_path / "victim").read_text() == whole


def test_a_link_in_the_place_of_the_page_is_replaced(tmp_path):
    pytest.importorskip("jinja2")
    write_run(tmp_path / "log" / "a")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "log" / "report.html").symlink_to(tmp_path / "victim")
    assert run("report.py", tmp_path / "log", "--output", tmp_path / "log" / "report.html").returncode == 0
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "log" / "report.html").is_symlink()


# Floods.


#: Runs a script, then prints the highest kilobytes of its process; not ru_maxrss, which a child takes over.
PEAK = """
import re, runpy, sys
sys.argv[:] = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_a_package_that_prints_and_says_too_much_leaves_small_records(measured, tmp_path):
    _, flags = measured
    loud = """import os, sys
    for _ in range(400):
        os.write(2, b"\\x1b[31m" + b"x" * 10**6 + b"\\n" * (_ % 2))
    raise RuntimeError("\\x1b]0;title\\x07red \\x1b[31mwords " + "y" * 10**7)
"""
    path = own_loss(tmp_path, in_loss=loud)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PEAK,
            str(ROOT / "benchmark_all.py"),
            "--only",
            path,
            *flags,
            "--log-dir",
            tmp_path / "log",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and len(done.stdout) + len(done.stderr) < 10_000, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 200 * 1024  # of 400 MB that are printed
    (results,) = (tmp_path / "log").rglob("results.jsonl")
    assert results.stat().st_size < 100_000
    (row,) = read_rows(tmp_path / "log")
    assert "RuntimeError: red words yyy" in row["reason"] and len(row["reason"]) < 1100
    assert "\\u001b" not in results.read_text() and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("apart", [1, 1000])
def test_a_trace_of_too_many_steps_is_read_up_to_a_bound(apart, tmp_path):
    step = '{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{}","ts":{},"dur":2}}'
    text = "[" + ",".join(step.format(apart * number, 4 * number) for number in range(120_000))
    path = tmp_path / "log" / "w.1.pt.trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(text.encode(), 1))  # it does not even end
    (row,) = read_rows(tmp_path / "log")
    (window,) = row["windows"]
    assert (row["status"], window["steps"], row["average_step_time_us"]) == ("ok", 100_000, 2)
    assert [flag for flag in window["flags"] if "100,000 steps" in flag]
    assert any("100,000 steps" in note for note in row["notes"])
