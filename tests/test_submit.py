"""rnnt-bench submit: a log folder becomes one of results/ with nothing of the user's; --check refuses what lacks."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import ROOT, assert_user_error, run

from common.tools import submit

RESULTS = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
#: Small, and whole.
WHOLE = next(path for path in RESULTS if path.name.endswith("-batch-30"))
SECRET = ("/home/jane/corpus", "jane", "speech-x", "ssn 123")


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


def with_secrets(line):
    """Put text of the user's into every field that takes a text, and into a new one."""
    path = "/home/jane/corpus/speech-x.pt"
    line["new"] = path
    if line["record"] == "run":
        line.update(command=["benchmark_all.py", path])
        line["settings"]["shape_file"] = path
        line["machine"]["os"] = f"Linux of jane, {path}"
    if line["record"] == "environment":
        line.update(shape_file=path, warnings=[path], variables={"LD_PRELOAD": path, "OMP_NUM_THREADS": "2", path: "1"})
    if line["record"] == "status":
        line.update(reason="ssn 123", stderr_tail=["ssn 123"])


def test_a_log_becomes_a_folder_without_a_text_of_the_user(tmp_path):
    log = tmp_path / "log"
    shutil.copytree(WHOLE, log)
    changed(log, with_secrets)
    (log / "report.html").write_text("x")
    (log / "fused-30" / "a.pt.trace.json").write_text('{"traceEvents": [], "a": "/home/jane/x.py"}')
    (log / "fast_rnnt-30").rename(tmp_path / "elsewhere")
    (log / "fast_rnnt-30").symlink_to(tmp_path / "elsewhere")
    done = run("rnnt-bench", "submit", log, "--into", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == "2026-11-22-amd-epyc-2-cores" and str(folder) in done.stdout
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"results.jsonl"} and not any(
        path.parent.name.endswith("fast_rnnt") for path in files
    )
    text = "".join(path.read_text() for path in files)
    assert not [secret for secret in SECRET if secret in text] and "OMP_NUM_THREADS" in text
    before, after = ({row.name: row for row in submit.rows_of(path)} for path in (WHOLE, folder))
    for name, row in after.items():
        assert row.status == before[name].status and row.step.ms == before[name].step.ms
        assert row.memory == before[name].memory and row.checked.grad_error == before[name].checked.grad_error
    again = run("rnnt-bench", "submit", log, "--into", tmp_path / "results")
    assert_user_error(again, "is there already", "--name")


def more_rounds(line):
    if line["record"] == "run":
        line["settings"]["rounds"] = 9


FAULTS = {
    "no revision": changes("run", git_revision=None),
    "uncommitted changes": changes("run", git_dirty=True),
    "do not say on which machine": changes("run", machine={}),
    "beside other load": changes("sample", flags=["busy", "loaded"], foreign_cpu=0.9),
    "--resume": more_rounds,
    "of 2 devices": changes("environment", device_name="another"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_is_not_whole_is_refused_in_one_line(tmp_path, words):
    shutil.copytree(WHOLE, tmp_path / "kept")
    changed(tmp_path / "kept", FAULTS[words])
    lines = list(submit.problems(tmp_path / "kept"))
    assert any(words in line for line in lines) and all("\n" not in line for line in lines)
