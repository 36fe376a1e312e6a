"""A part of the faults of `make faults`, in every test run; and that the harness finds what is broken."""

from __future__ import annotations

import subprocess

import pytest
from faults import Broken, check, files, processes
from faults.__main__ import KINDS, broken_by

pytest.importorskip("torch")

#: Faults of each kind that are real processes: one in each run of the tests, and that of each loss which is quick.
REAL = {"signals": 2, "disks": 1, "limits": 1, "adapters": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_breaks(kind, thorough):
    usual = REAL.get(kind, files.KINDS.get(kind, (None, 0))[1] // 20)
    broken = {seed: broken_by(kind, seed) for seed in range(KINDS[kind][1] if thorough else usual)}
    assert not {seed: words for seed, words in broken.items() if words is not None}


@pytest.mark.parametrize(
    "code, out, err",
    [
        (3, "", ""),
        (1, "", "Traceback (most recent call last):\n"),
        (2, "", "tool.py: error: one\ntool.py: error: two\n"),
        (0, "\x1b[2J", ""),
    ],
)
def test_a_broken_promise_is_found(code, out, err):
    with pytest.raises(Broken):
        check(subprocess.CompletedProcess([], code, out, err))


def test_a_process_that_is_left_is_found(tmp_path):
    place = processes.Place(tmp_path)
    with subprocess.Popen(["sleep", "60"], env=dict([place.mark.split("=")])) as sleeper:
        with pytest.raises(Broken, match="sleep"):
            place.nothing_is_left(seconds=0.1)
        sleeper.kill()
