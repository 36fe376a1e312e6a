"""The package rnnt_bench: what ``pip install .`` brings, and its command rnnt-bench, there and in a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, run

from common.command import COMMANDS

pytest.importorskip("setuptools")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as pip installs it, beside an empty folder for caches."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", folder / "site", str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def rnnt_bench(folder, cwd, *arguments):
    """Run the installed command in `cwd`."""
    variables = {
        "PYTHONPATH": str(folder / "site"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    line = [sys.executable, str(folder / "site" / "bin" / "rnnt-bench"), *arguments]
    return subprocess.run(line, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)


def test_nothing_but_the_package_is_installed(installed):
    names = {path.name for path in (installed / "site").iterdir()}
    assert "rnnt_bench" in names
    assert not names & {"common", "fused_transducer", "requirements", "tests", "benchmark_all.py"}
    suite = installed / "site" / "rnnt_bench" / "_suite"
    for name in ("shape_info.pt", "benchmark_mine.py", "common/show/page.js", "fused_transducer/csrc/kernels.cpp"):
        assert (suite / name).is_file()


def test_the_checkout_stays_as_it_was(installed):
    assert not list(ROOT.glob("*.egg-info")) and not (ROOT / "build").exists()


def test_it_lists_the_losses_of_its_own_python(installed, tmp_path):
    done = rnnt_bench(installed, tmp_path, "list")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("reference "))
    assert sys.executable in row and ".venv/main/bin" not in row.replace(sys.executable, "")


def test_it_measures_where_it_stands(installed, tmp_path):
    files = sorted((installed / "site").rglob("*"))
    flags = ("--only", "reference,k2", "--preset", "quick", "--passes", "correctness", "--quiet")
    done = rnnt_bench(installed, tmp_path, "run", *flags)
    assert done.returncode == 0, done.stderr
    assert "k2" in done.stdout and list((tmp_path / "log").glob("reference-*/results.jsonl"))
    assert (tmp_path / "log" / "report.html").is_file()
    again = rnnt_bench(installed, tmp_path, "summarize", "--format", "json")
    assert again.returncode == 0 and '"reference"' in again.stdout
    assert sorted((installed / "site").rglob("*")) == files


def test_it_judges_where_it_stands(installed, tmp_path):
    done = rnnt_bench(installed, tmp_path, "check", "--only", "reference", "--cases", "ragged", "--quiet")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log" / "check-corners" / "tool.jsonl").is_file()


def test_a_mistake_is_said_with_the_name_of_the_command(installed, tmp_path):
    done = rnnt_bench(installed, tmp_path, "run", "--frobnicate")
    assert done.returncode == 2 and done.stderr.startswith("rnnt-bench run: error: "), done.stderr


@pytest.mark.parametrize("name", ["run", "check", "compare"])
def test_the_help_of_a_command_has_its_name(name):
    done = run("rnnt-bench", name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"rnnt-bench {name}" in done.stdout and COMMANDS[name].script not in done.stdout


def test_the_help_lists_every_command_and_a_typo_is_understood():
    text = run("rnnt-bench", "--help").stdout
    assert all(f"\n  {name} " in text for name in COMMANDS)
    wrong = run("rnnt-bench", "sumarize")
    assert wrong.returncode == 2 and "summarize" in wrong.stderr
    assert run("rnnt-bench", "--version").stdout.startswith("rnnt-bench 0.")


def test_the_command_is_the_script(tmp_path):
    flags = ("--only", "reference", "--preset", "quick", "--passes", "correctness", "--log-dir", tmp_path, "--quiet")
    done = run("rnnt-bench", "run", *flags)
    assert done.returncode == 0, done.stderr
    assert list(Path(tmp_path).glob("reference-*/results.jsonl"))


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("words, code", [(["preset=quick"], 2), (["ARGS=--sweep threads=1,2", "LOGDIR=a b"], 0)])
def test_a_variable_that_make_does_not_know_is_named(words, code):
    done = subprocess.run(["make", "-n", "-C", ROOT, "bench", *words], capture_output=True, text=True)
    assert done.returncode == code and ("preset" in done.stderr) == (code == 2), done.stderr
