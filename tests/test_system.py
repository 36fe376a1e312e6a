"""Processes of jobs, forked from a server for each round and ended with all that they start; git, whatever the
environment says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, wait_for

from common.system import git, machine, processes
from common.system.processes import Child, close_servers, start_servers

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

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(MODULE)
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path
    close_servers()


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


def test_servers_of_a_round_are_ready_before_its_first_job(folder):
    other = folder / "other"
    other.symlink_to(sys.executable)
    pythons = [Path(sys.executable), other]
    start_servers(pythons, "answering", folder, {}, 1, ("torch",))
    servers = [processes._waiting[str(python)] for python in pythons]
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


def test_what_a_job_leaves_running_is_ended(folder):
    do = "print(subprocess.Popen(['setsid', 'sleep', '300'], stdin=subprocess.DEVNULL).pid)"
    number = int(child(folder, do).stderr[-1])
    assert not Path(f"/proc/{number}").exists()


def test_a_server_that_is_killed_costs_its_job_alone(folder):
    ended = child(folder, "os.kill(os.getppid(), 9)")
    assert ended.returncode == -9
    assert child(folder).returncode == 0


def test_a_job_that_runs_at_the_end_of_the_block_is_killed(folder):
    with Child.run(Path(sys.executable), "answering", {"do": "time.sleep(300)"}, folder, {}) as running:
        wait_for(running.written, "record")
    assert running.returncode == -9 and running.seconds() < 60
    assert not Path(f"/proc/{running.pid}").exists()


def test_a_stopped_server_does_not_hold_us_up(folder):
    with Child.run(Path(sys.executable), "answering", {"do": "time.sleep(300)"}, folder, {}) as running:
        wait_for(running.written, "record")
        os.kill(running.server.process.pid, signal.SIGSTOP)
    assert running.returncode == -9 and child(folder).returncode == 0


def test_a_broken_package_is_told_by_the_job(folder):
    """Imported twice in one process, it would say something else."""
    (folder / "torch.py").write_text("import broken_part\nbroken_part.count()\n")
    (folder / "broken_part.py").write_text(
        "LEFT = [1]\ndef count():\n    LEFT.pop()\n    raise OSError('no such library')\n"
    )
    assert child(folder, "__import__('torch')").stderr[-1] == "OSError: no such library"


def test_a_python_that_prints_as_it_starts(folder, monkeypatch):
    """Some sites greet, or warn, in their sitecustomize."""
    (folder / "sitecustomize.py").write_text("print('welcome')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    assert child(folder).returncode == 0


def test_a_python_that_is_not_there(folder):
    with pytest.raises(OSError):
        with Child.run(folder / "python", "answering", {}, folder, {}):
            pass


def test_what_a_job_prints_without_end_fills_no_disk(folder):
    """It prints 100 MB, waits until the file of it is smaller (or gives up), and prints on."""
    prints = "[os.write(1, b'x' * 10**6) for _ in range(100)]"
    waits = "[time.sleep(0.1) for _ in range(200) if os.fstat(1).st_size > 2**26]"
    ends = "os.write(2, b'\\nthe end\\n') and os.fstat(1).st_size > 2**26"
    with Child.run(
        Path(sys.executable), "answering", {"do": f"int(({prints}, {waits}, {ends})[-1])"}, folder, {}
    ) as job:
        while job.alive(0.2):
            pass
    assert (job.returncode, job.stderr[-1][-99:]) == (0, "the end")


# git

AUTHOR = ("-c", "user.name=Test", "-c", "user.email=test@example.org")


@pytest.fixture
def repositories(tmp_path):
    """Two of one commit each: mine, which is asked about, and foreign, which the environment names."""
    folders = tmp_path / "mine", tmp_path / "foreign"
    for folder in folders:
        folder.mkdir()
        git.run(folder, "init", "--quiet")
        git.run(folder, *AUTHOR, "commit", "--quiet", "--allow-empty", "-m", folder.name)
    return folders


def test_the_state_is_that_of_the_folder(repositories, monkeypatch):
    mine, foreign = repositories
    commit = git.run(mine, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(foreign / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(foreign))
    assert machine.git_state(mine) == (commit, False)
    (mine / "new.txt").touch()
    assert machine.git_state(mine) == (commit, True)


def test_no_repository_has_no_state(tmp_path):
    assert machine.git_state(tmp_path) == (None, None)
    with pytest.raises(git.GitError, match="not a git repository"):
        git.run(tmp_path, "status")


def test_every_variable_that_names_a_repository_is_dropped(monkeypatch):
    """The names are those of this git; settings stay, as git keeps them for the repositories of submodules."""
    listed = subprocess.run(["git", "rev-parse", "--local-env-vars"], check=True, capture_output=True, text=True)
    settings = {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"}
    assert set(listed.stdout.split()) - settings <= set(git.LOCAL_VARIABLES)
    for name in git.LOCAL_VARIABLES:
        monkeypatch.setenv(name, "x")
    assert not set(git.LOCAL_VARIABLES) & set(git.environment())


def test_a_setting_comes_after_those_of_the_user(repositories, monkeypatch):
    mine, _ = repositories
    for name, value in git.with_setting({}, "user.name", "Somebody").items():
        monkeypatch.setenv(name, value)
    for name, value in git.with_setting(git.environment(), "core.excludesFile", "/dev/null").items():
        monkeypatch.setenv(name, value)
    assert git.run(mine, "config", "user.name") == "Somebody\n"
    assert git.run(mine, "config", "core.excludesFile") == "/dev/null\n"
