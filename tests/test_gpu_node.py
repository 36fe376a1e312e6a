"""benchmarks/gpu_node.sh: every step has its limit, and what one loses is its own alone."""

from __future__ import annotations

import os
import subprocess

import pytest
from commands import ROOT

SCRIPT = str(ROOT / "benchmarks" / "gpu_node.sh")


@pytest.fixture
def python(tmp_path):
    """Return a command in place of Python: the doctor fails, the first measurement hangs, the rest works."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\necho $@\ncase "$*" in *doctor*) exit 3;; *--passes\\ correctness\\ *) sleep 60;; esac\n'
    )
    path.chmod(0o755)
    return str(path)


def node(folder, python, *flags):
    environment = {**os.environ, "PYTHON": python}
    command = [SCRIPT, "--preset", "cpu", *flags, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_step_that_fails_or_hangs_costs_itself_alone(tmp_path, python):
    steps = ("doctor", "first", "batch-30", "report")
    done = node(tmp_path / "node", python, "--limit", "1", "--only", ",".join(steps))
    assert done.returncode == 1, done.stderr
    lines = (tmp_path / "node" / "summary.txt").read_text().splitlines()
    ended = {name: code for name, code, _ in map(str.split, lines)}
    assert ended == {"doctor": "3", "first": "124", "batch-30": "0", "report": "0"}
    assert "--device cpu" in (tmp_path / "node" / "batch-30.log").read_text()
    assert "doctor.log" in done.stderr


def test_a_second_start_repeats_what_did_not_end_well(tmp_path, python):
    for _ in range(2):
        node(tmp_path / "node", python, "--only", "doctor,report")
    lines = (tmp_path / "node" / "summary.txt").read_text().split("\n")
    assert sum(line.startswith("doctor ") for line in lines) == 2
    assert sum(line.startswith("report ") for line in lines) == 1


@pytest.mark.parametrize("flags", [("--preset", "tpu", "x"), ("--only",), ()])
def test_bad_usage(flags):
    done = subprocess.run([SCRIPT, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage" in done.stderr


def test_each_preset_lists_the_same_steps():
    listed = [
        subprocess.run([SCRIPT, "--preset", preset, "--list"], capture_output=True, text=True, timeout=60, check=True)
        for preset in ("gpu", "cpu")
    ]
    names = [[line.split()[0] for line in done.stdout.splitlines()] for done in listed]
    assert names[0] == names[1] and len(names[0]) == len(set(names[0])) > 10
