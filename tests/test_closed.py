"""Folders and files that are closed to a user, or lead nowhere: one clear line.  Root may read everything, so as root
the commands run as another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import ROOT, assert_user_error, command, run
from fixtures_runs import write_run

from common.records.run import claim_folder

NOBODY = 65534


def become():
    os.setgid(NOBODY)
    os.setuid(NOBODY)


OTHER = {"preexec_fn": become} if os.geteuid() == 0 else {}


@pytest.fixture(scope="module")
def place():
    """A folder that every user may enter, with a closed one in it."""
    try:
        subprocess.run([sys.executable, "-c", "import msgspec"], check=True, **OTHER)
        subprocess.run(["cat", str(ROOT / "summarize.py")], check=True, stdout=subprocess.DEVNULL, **OTHER)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"another user may not run {sys.executable} or read {ROOT}")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    write_run(folder / "log" / "open")
    for name in ("file.pt", "benchmark_closed.py", "results.jsonl"):
        (folder / "log" / name).write_text("")
        (folder / "log" / name).chmod(0)
    write_run(folder / "log" / "closed")
    write_run(folder / "log" / "shut")
    (folder / "log" / "closed").chmod(0)
    (folder / "log" / "shut" / "results.jsonl").chmod(0)
    yield folder
    (folder / "log" / "closed").chmod(0o755)
    shutil.rmtree(folder)


def as_other(script, *arguments, **options):
    return run(script, *arguments, **{**OTHER, "cwd": "/", **options})


@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize.py", "{}/log/closed"],
        ["summarize.py", "{}/log/closed/results.jsonl"],
        ["report.py", "{}/log/closed", "--output", "/tmp/never-made/report.html"],
        ["compare.py", "{}/log/closed", "{}/log/open"],
        ["compare.py", "{}/log/shut", "{}/log/open"],
        ["benchmark_reference.py", "--shape-file", "{}/log/closed/shapes.pt"],
        ["benchmark_reference.py", "--shape-file", "{}/log/file.pt"],
        ["benchmark_all.py", "--only", "{}/log/benchmark_closed.py"],
        ["benchmark_all.py", "--only", "{}/log/closed/benchmark_closed.py"],
        ["benchmark_reference.py", "--in-place", "--log-dir", "{}/log/closed"],
        ["generate_shape_info.py", "--manifest", "{}/log/closed/cuts.jsonl", "--bpe-vocab-size", "9"],
        ["generate_shape_info.py", "--from-figures", "--output", "{}/log/closed/shapes.pt"],
    ],
    ids=" ".join,
)
def test_what_is_closed_is_one_line(arguments, place):
    done = as_other(*(word.format(place) for word in arguments))
    words = ["ermission denied"] if "cannot be written" not in done.stderr else []
    assert_user_error(done, place, *words)


def test_a_closed_run_is_a_row_beside_the_others(place):
    done = as_other("summarize.py", place / "log")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count("Permission denied") == 2 and "torchaudio" in done.stdout


def test_an_environment_of_another_user_is_missing(place):
    code = (
        "import sys; from pathlib import Path; from common.setup import environments as e\n"
        "e.FOLDER = Path(sys.argv[1]); print(e.interpreter('main'), e.reason('main'))"
    )
    options = {**OTHER, "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run([sys.executable, "-c", code, str(place / "log" / "closed")], text=True, **options)
    assert done.stdout.startswith("None ") and "Permission denied" in done.stdout, done.stderr


@pytest.mark.parametrize("below", ["", "/log"], ids=["itself", "below"])
@pytest.mark.parametrize("target", ["nowhere", "link"], ids=["dangling", "loop"])
@pytest.mark.parametrize("more", [[], ["--sweep", "vocab-size=8,9"]], ids=["run", "sweep"])
def test_a_log_folder_behind_a_link_that_leads_nowhere(below, target, more, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / target)
    done = run("benchmark_reference.py", "--in-place", "--log-dir", f"{tmp_path}/link{below}", *more, timeout=60)
    assert_user_error(done, "--log-dir", tmp_path / "link")


def test_a_link_that_leads_nowhere_is_a_name_that_is_taken(tmp_path):
    (tmp_path / "reference-2").symlink_to(tmp_path / "nowhere")
    claim = claim_folder(tmp_path, "reference-2")
    claim.release()
    assert claim.path.parent.name == "reference-2.2" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("flag", ["--log-dir", "--shape-file"])
def test_a_name_that_is_not_utf_8(flag, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(name)
    words = [*map(os.fsencode, command("benchmark_reference.py", "--in-place", flag)), name]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stderr = done.stderr.decode()
    assert_user_error(done, flag, "UTF-8", "xe9")
