"""How commands and processes of jobs start and end, whatever the environment says, and a part of `make faults`."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rnnt_bench import command
from rnnt_bench.core.errors import UserError, guarded
from rnnt_bench.setup import environments
from rnnt_bench.system import machine, processes
from rnnt_bench.system.processes import Child, start_servers

from commands import ROOT, has_words
from faults import files
from faults.__main__ import KINDS, broken_by
from fixtures_runs import write_run


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("bad\n\x1b[2Jname; give another"), 2, "error: bad name; give another"),
        (MemoryError(), 2, "error: not enough memory here; free some, or ask for less at once"),
        (PermissionError(13, "Permission denied", "x.pt"), 2, "error: x.pt: Permission denied; change its mode"),
        (KeyboardInterrupt(), 130, "nothing was written"),
    ],
)
def test_an_end_is_one_harmless_line(error, code, line, capsys):
    assert guarded("tool.py", raising(error), interrupted="nothing was written") == code
    err = capsys.readouterr().err
    assert err.startswith(f"tool.py: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "none", "/nowhere"), BrokenPipeError(32, "x")], ids=repr)
def test_another_error_keeps_its_traceback(error, capsys):
    with pytest.raises(type(error)):
        guarded("tool.py", raising(error))
    assert capsys.readouterr().err == ""


CODE = """
import sys; from rnnt_bench.core.errors import guarded; assert 'torch' not in sys.modules
sys.exit(guarded('tool.py', lambda: [print('x' * 99) for _ in range(10**4)] and 0))
"""


def test_a_closed_pipe_is_silent():
    line = [sys.executable, "-c", CODE]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"x" * 99 + b"\n"
        writer.stdout.close()
        assert (writer.stderr.read(), writer.wait(60)) == (b"", 1)


#: One script that measures, and one that reads.
SCRIPTS = ("benchmark_all.py", "summarize.py")


@pytest.fixture
def bare(tmp_path):
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


def outcome(*line, **variables):
    return subprocess.run(list(map(str, line)), env={**os.environ, **variables}, capture_output=True, text=True)


def test_an_old_python_is_one_line():
    code = "import sys; sys.version_info = (3, 8); sys.argv = ['summarize.py']; import rnnt_bench"
    done = outcome(sys.executable, "-c", code)
    assert done.returncode == 2 and "3.10 or newer" in done.stderr and len(done.stderr.splitlines()) == 1
    for path in [*ROOT.glob("*.py"), ROOT / "common" / "__init__.py"]:  # what it reads before it says so
        ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.skipif(environments.interpreter("main") is None, reason="the main environment is not there")
def test_commands_of_the_readme_start_under_a_bare_python(bare, tmp_path):
    """They need no torch for --help: one that refuses to be imported stands in the way."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported for --help')")
    for words in [[script] for script in SCRIPTS] + [["rnnt-bench", name] for name in ("report", "compare", "check")]:
        line = [bare, ROOT / words[0], *words[1:], "--help"]
        done = outcome(*line, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and "usage:" in done.stdout, (words, done.stderr)
    write_run(tmp_path / "log")
    done = outcome(bare, ROOT / "rnnt-bench", "report", tmp_path / "log", "--output", tmp_path / "log" / "report.html")
    assert done.returncode == 0 and (tmp_path / "log" / "report.html").stat().st_size > 5e5, done.stderr
    done = outcome(bare, ROOT / "losses/benchmark_reference.py", "--in-place")  # in this Python, or not at all
    assert done.returncode == 2 and not done.stdout and has_words(done.stderr, "msgspec", "pip install")


def test_without_any_environment_a_command_says_what_to_do(bare, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rnnt_bench").symlink_to("common")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
        done = outcome(bare, tmp_path / script, "--device", "cpu")
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and "make setup" in line and script in line


def test_targets_of_make_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\./rnnt-bench ([a-z]+)", text)) <= set(command.COMMANDS)
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert {"bench", "test"} <= targets
    assert outcome("make", "-n", "-C", ROOT, *sorted(targets), "NAME=k2").returncode == 0


#: Writes what it is asked for, and ends as it is asked to.
MODULE = """
import json, os, subprocess, sys, time

LOADED = []

def main(path):
    job = json.load(open(path))
    LOADED.append(1)
    about = {"parent": os.getppid(), "variable": os.environ.get("OF_THE_JOB"), "loaded": len(LOADED)}
    about["torch"] = sys.modules.get("torch") is not None
    with open(job["output"], "a") as output:
        output.write(json.dumps(about) + "\\n")
    return eval(job["do"])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(MODULE)
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nobody_waits()  # of the tests before
    yield tmp_path
    nobody_waits()


def nobody_waits():
    while processes._waiting:
        processes._waiting.pop().close()


def child(folder, do="0", generation=None, **variables):
    with Child.run(Path(sys.executable), "answering", {"do": do}, folder, variables, generation) as running:
        while running.alive(10):
            pass
    return running


def test_jobs_of_a_round_share_their_imports_and_nothing_else(folder):
    first, second = (child(folder, generation=1).records[0] for _ in range(2))
    assert first == second == {"parent": first["parent"], "variable": None, "loaded": 1, "torch": True}
    assert child(folder, generation=2).records[0]["parent"] != first["parent"]
    (record,) = child(folder, generation=2, OF_THE_JOB="5").records
    assert record["variable"] == "5" and record["parent"] != first["parent"]


def test_servers_of_a_round_with_other_variables_wait_side_by_side(folder):
    """Rows of a round take turns with and without a preloaded library: each would import torch anew."""
    variables = ({}, {"OF_THE_JOB": "5"}) * 2
    records = [child(folder, generation=1, **each).records[0] for each in variables]
    assert records[0] == records[2] and records[1] == records[3] and len(processes._waiting) == 2
    child(folder, generation=2)
    assert len(processes._waiting) == 1  # those of the round before ended


def test_servers_of_a_round_are_ready_before_its_first_job(folder):
    other = folder / "other"
    other.symlink_to(sys.executable)
    pythons = [Path(sys.executable), other]
    start_servers([(python, {}) for python in pythons], "answering", folder, 1, ("torch",))
    servers = list(processes._waiting)
    assert all(server.ready for server in servers)
    assert child(folder, generation=1).records[0]["parent"] == servers[0].process.pid


@pytest.mark.parametrize(
    "do, code, words",
    [
        ("3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.abort()", -signal.SIGABRT, ""),
        ("print('to stdout')", 0, "to stdout"),
    ],
)
def test_how_a_job_ends(folder, do, code, words):
    ended = child(folder, do)
    assert ended.returncode == code and (ended.stderr or [""])[-1] == words and len(ended.records) == 1


def test_a_server_that_is_killed_costs_its_job_alone(folder):
    assert child(folder, "os.kill(os.getppid(), 9)").returncode == -9
    assert child(folder).returncode == 0


def test_a_broken_package_is_told_by_the_job(folder):
    """Imported twice in one process, it would say something else."""
    (folder / "torch.py").write_text("import broken_part\nbroken_part.count()\n")
    text = "LEFT = [1]\ndef count():\n    LEFT.pop()\n    raise OSError('no such library')\n"
    (folder / "broken_part.py").write_text(text)
    assert child(folder, "__import__('torch')").stderr[-1] == "OSError: no such library"


def test_the_state_is_that_of_the_folder_whatever_a_git_hook_names(tmp_path, monkeypatch):
    author = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    for folder in (mine := tmp_path / "mine", foreign := tmp_path / "foreign"):
        for words in (("init", "--quiet", folder), ("-C", folder, *author, "commit", "-qm", "one", "--allow-empty")):
            subprocess.run(["git", *words], check=True)
    monkeypatch.setenv("GIT_DIR", str(foreign / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(foreign))
    commit = (mine / ".git" / "refs" / "heads").glob("*").__next__().read_text().strip()
    assert machine.git_state(mine) == (commit, False)
    (mine / "new.txt").touch()
    assert machine.git_state(mine) == (commit, True)
    assert machine.git_state(tmp_path) == (None, None)


#: Faults of each kind that are real processes: one in each run of the tests, and that of each loss which is quick.
REAL = {"signals": 2, "disks": 1, "limits": 1, "adapters": 7}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_breaks(kind, thorough):
    usual = REAL.get(kind, files.KINDS.get(kind, (None, 0))[1] // 20)
    broken = {seed: broken_by(kind, seed) for seed in range(KINDS[kind][1] if thorough else usual)}
    assert not {seed: words for seed, words in broken.items() if words is not None}
