"""How commands start and end where Python, its packages or the environments of the suite are not as wanted."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from commands import ROOT, start

from common import command
from common.setup import environments

#: One script that measures, and one that reads.
SCRIPTS = ("benchmark_all.py", "summarize.py")


@pytest.fixture
def bare(tmp_path):
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


def outcome(*line, **variables):
    return subprocess.run(list(map(str, line)), env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_is_one_line(script, tmp_path):
    (tmp_path / "msgspec.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = start(script, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, f"{script}: interrupted\n")


def test_an_old_python_is_one_line():
    """Played by a new one: no older one is at hand."""
    done = outcome(
        sys.executable, "-c", "import sys; sys.version_info = (3, 8); sys.argv = ['summarize.py']; import common"
    )
    assert done.returncode == 2 and "3.9 or newer" in done.stderr and len(done.stderr.splitlines()) == 1
    for path in [*ROOT.glob("*.py"), ROOT / "common" / "__init__.py"]:  # what it reads before it says so
        ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.skipif(environments.interpreter("main") is None, reason="the main environment is not there")
def test_commands_of_the_readme_start_under_a_bare_python(bare, tmp_path):
    """They need no torch for --help: one that refuses to be imported stands in the way."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported for --help')")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\./rnnt-bench ([a-z]+)", text))
    assert named <= set(command.COMMANDS)
    for words in [[script] for script in SCRIPTS] + [["rnnt-bench", name] for name in ("report", "compare", "check")]:
        line = [bare, ROOT / words[0], *words[1:], "--help"]
        done = outcome(*line, PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and "usage:" in done.stdout, (words, done.stderr)


def test_without_any_environment_a_command_says_what_to_do(bare, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
        done = outcome(bare, tmp_path / script, "--device", "cpu")
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and "make setup" in line and script in line


def test_targets_of_make_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert {"bench", "test"} <= targets
    assert outcome("make", "-n", "-C", ROOT, *sorted(targets), "NAME=k2").returncode == 0
