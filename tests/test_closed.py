"""Folders and files that are closed to a user, or lead nowhere: one clear line.  Root may read everything, so as root
the commands run without that power."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, command, run
from fixtures_runs import write_run

from common.records.run import claim_folder

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
LIBRARY = ctypes.CDLL(None)


def like_others():
    """Give up the power of root to read what is closed."""
    for power in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        LIBRARY.prctl(PR_CAPBSET_DROP, power, 0, 0, 0)


OTHER = {"preexec_fn": like_others} if os.geteuid() == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log folder with an open run, a closed one, and files that are closed."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("open", "closed", "shut"):
        write_run(folder / "log" / name)
    for name in ("file.pt", "benchmark_closed.py"):
        (folder / "log" / name).write_text("")
        (folder / "log" / name).chmod(0)
    (folder / "log" / "closed").chmod(0)
    (folder / "log" / "shut" / "results.jsonl").chmod(0)
    if subprocess.run(["cat", str(folder / "log" / "file.pt")], capture_output=True, **OTHER).returncode == 0:
        pytest.skip("root cannot give up that power here")
    yield folder
    (folder / "log" / "closed").chmod(0o755)


def as_other(script, *arguments, **options):
    return run(script, *arguments, **{**OTHER, **options})


@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize.py", "{}/log/closed"],
        ["summarize.py", "{}/log/closed/results.jsonl"],
        ["report.py", "{}/log/closed", "--output", "/tmp/never-made/report.html"],
        ["compare.py", "{}/log/closed", "{}/log/open"],
        ["compare.py", "{}/log/shut", "{}/log/open"],
        ["losses/benchmark_reference.py", "--shape-file", "{}/log/closed/shapes.pt"],
        ["losses/benchmark_reference.py", "--shape-file", "{}/log/file.pt"],
        ["benchmark_all.py", "--only", "{}/log/benchmark_closed.py"],
        ["benchmark_all.py", "--only", "{}/log/closed/benchmark_closed.py"],
        ["losses/benchmark_reference.py", "--in-place", "--log-dir", "{}/log/closed"],
        ["generate_shape_info.py", "--manifest", "{}/log/closed/cuts.jsonl", "--bpe-vocab-size", "9"],
        ["generate_shape_info.py", "--from-figures", "--output", "{}/log/closed/shapes.pt"],
    ],
    ids=" ".join,
)
def test_what_is_closed_is_one_line(arguments, folder):
    done = as_other(*(word.format(folder) for word in arguments))
    words = ["ermission denied"] if "cannot be written" not in done.stderr else []
    assert_user_error(done, folder, *words)


def test_a_closed_run_is_a_row_beside_the_others(folder):
    done = as_other("summarize.py", folder / "log")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert " ".join(done.stdout.split()).count("Permission denied") == 2 and "torchaudio" in done.stdout


def test_an_environment_of_another_user_is_missing(folder, tmp_path):
    for part in ("common", "losses"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("benchmark_*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / ".venv" / "k2").mkdir(parents=True)
    (tmp_path / ".venv" / "k2").chmod(0)
    words = [sys.executable, str(tmp_path / "benchmark_all.py"), "--list", "--device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, **OTHER)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("k2 ")]
    assert done.returncode == 0 and "missing: " in row and "Permission denied" in row, done.stderr


def test_a_matrix_that_cannot_be_written_is_printed(folder, tmp_path):
    (tmp_path / "conformance.json").write_text('{"old": "one"}')
    tmp_path.chmod(0o555)
    done = as_other("conformance.py", "--only", "reference", "--cases", "ragged", "--in-place", "--output", tmp_path)
    tmp_path.chmod(0o755)
    assert done.returncode == 2 and "--output" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "reference" in done.stdout and " pass" in done.stdout
    assert (tmp_path / "conformance.json").read_text() == '{"old": "one"}'


@pytest.mark.parametrize(
    "below, target, flags",
    [
        ("", "nowhere", []),
        ("/log", "link", []),
        ("", "link", ["--sweep", "vocab-size=8,9"]),
        ("/log", "nowhere", ["--sweep", "vocab-size=8,9"]),
    ],
    ids=["run, dangling", "run, below a loop", "sweep, a loop", "sweep, below one that dangles"],
)
def test_a_log_folder_behind_a_link_that_leads_nowhere(below, target, flags, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / target)
    done = run(
        "losses/benchmark_reference.py", "--in-place", "--log-dir", f"{tmp_path}/link{below}", *flags, timeout=60
    )
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
    words = [*map(os.fsencode, command("losses/benchmark_reference.py", "--in-place", flag)), name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True)
    done.stderr = done.stderr.decode()
    assert_user_error(done, flag, "UTF-8", "xe9")
