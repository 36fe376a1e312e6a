"""rnnt-bench submit: a log folder becomes one of results/, without the user's paths; --check refuses what lacks."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import pytest
from commands import ROOT, assert_user_error, run
from fixtures_runs import write_run

from common.tools import submit

RESULTS = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
#: Small, and whole.
WHOLE = next(path for path in RESULTS if path.name.endswith("-batch-30"))


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_every_folder_of_results_is_complete_and_consistent(folder):
    assert not list(submit.problems(folder))


def changed(folder, change, name="fused-30"):
    """Change each record of a row by a function."""
    path = folder / name / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def changes(kind, **values):
    """Return a function that gives records of a kind these values."""
    return lambda line: line.update(values) if line["record"] == kind else None


def test_a_log_becomes_a_folder_without_paths_of_the_machine(tmp_path):
    log = tmp_path / "log"
    shutil.copytree(WHOLE, log)
    (log / "report.html").write_text("x")
    (log / "fused-30" / "a.pt.trace.json").write_text(f'{{"traceEvents": [], "a": "{ROOT}/common/x.py"}}')
    changed(log, changes("run", command=["x", "/home/jane/corpus/shapes.pt", f"{ROOT}/x"]))
    done = run("rnnt-bench", "submit", log, "--into", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == "2026-11-22-amd-epyc-2-cores" and str(folder) in done.stdout
    assert not (folder / "report.html").exists() and len(list(folder.rglob("results.jsonl"))) == 5
    with (folder / "fused-30" / "results.jsonl").open() as lines:
        assert json.loads(next(lines))["command"] == ["x", "shapes.pt", "x"]
    trace = gzip.decompress((folder / "fused-30" / "a.pt.trace.json.gz").read_bytes())
    assert json.loads(trace)["a"] == "common/x.py"
    again = run("rnnt-bench", "submit", log, "--into", tmp_path / "results")
    assert_user_error(again, "is there already", "--name")


def test_files_that_cannot_be_read_are_named_in_one_line(tmp_path):
    write_run(tmp_path / "log" / "fused-30")
    trace = tmp_path / "log" / "fused-30" / "a.pt.trace.json.gz"
    trace.write_bytes(gzip.compress(b"{}" * 1000)[:-12])
    assert any(f"cannot read {trace}" in line for line in submit.problems(tmp_path / "log"))
    assert_user_error(run("rnnt-bench", "submit", tmp_path / "log", "--into", tmp_path), f"cannot read {trace}")
    trace.unlink()
    os.mkfifo(trace.with_suffix(""))
    assert_user_error(run("rnnt-bench", "submit", tmp_path / "log", "--into", tmp_path), "cannot read", "a pipe")


def test_traces_may_be_left_out(tmp_path):
    traced = next(path for path in RESULTS if path.name.endswith("-cores"))
    folder = tmp_path / traced.name
    shutil.copytree(traced, folder)
    assert any(folder.rglob("*.gz"))
    for trace in folder.rglob("*.gz"):
        trace.unlink()
    assert not list(submit.problems(folder))
    rows = {row.name: row for row in submit.rows_of(folder)}
    assert any("left out" in note for note in rows["fused"].notes) and rows["fused"].status == "ok"


def more_rounds(line):
    if line["record"] == "run":
        line["settings"]["rounds"] = 9


FAULTS = {
    "no revision": changes("run", git_revision=None),
    "uncommitted changes": changes("run", git_dirty=True),
    "do not say on which machine": changes("run", machine={}),
    "path of the machine": changes("run", command=["/home/jane/x"]),
    "were not given the same": changes("sample", loss=1010.0),
    "beside other load": changes("sample", flags=["busy", "loaded"], foreign_cpu=0.9),
    "--resume": more_rounds,
    "of 2 devices": changes("environment", device_name="another"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_is_not_whole_is_refused_in_one_line(tmp_path, words):
    shutil.copytree(WHOLE, tmp_path / "kept")
    changed(tmp_path / "kept", changes("sample", loss=1000.0), "torchaudio-30")
    changed(tmp_path / "kept", FAULTS[words])
    lines = list(submit.problems(tmp_path / "kept"))
    assert any(words in line for line in lines) and all("\n" not in line for line in lines)


def test_made_up_and_foreign_files_are_refused(tmp_path, capsys):
    write_run(tmp_path / "fused-30")
    (tmp_path / "weights.pt").write_text("x")
    assert submit.check([tmp_path]) == 1
    error = capsys.readouterr().err
    assert "weights.pt: is neither" in error and "no revision" in error and error.count(str(tmp_path)) >= 3
    assert_user_error(run("rnnt-bench", "submit", "--check", tmp_path / "none"), "none", "no such")
