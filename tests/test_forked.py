"""A command that is forked ends as one that is started does: the tests would say nothing about it otherwise."""

from __future__ import annotations

import os
import subprocess

import forked
import pytest
from commands import ROOT, command


@pytest.mark.parametrize(
    "arguments", [["summarize.py", "--help"], ["report.py", "nothing.here"], ["summarize.py", "results"]]
)
def test_code_and_streams_are_those_of_a_process(arguments, tmp_path):
    cwd = ROOT if "results" in arguments else tmp_path
    started = subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True)
    found = forked.run(command(*arguments), cwd)
    assert (found.returncode, found.stdout, found.stderr) == (started.returncode, started.stdout, started.stderr)


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    server = forked.server_of((), os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run_in(server, command(tmp_path / "slow.py"), tmp_path, 0.2, dict(os.environ))


def test_another_environment_is_no_fork(monkeypatch, tmp_path):
    assert forked.run(command("summarize.py", "--help"), tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert forked.run(command("summarize.py", "--help"), tmp_path) is None
