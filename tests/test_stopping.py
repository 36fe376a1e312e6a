"""Stopping rules on made-up durations, with answers by hand; the heap that samples find."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import List, Optional

import pytest
from commands import ROOT

from common.core.settings import REUSE_VARIABLES
from common.measure import sampling

MS = 1_000_000


@pytest.mark.parametrize(
    "milliseconds, expected",
    [
        ([], False),
        ([900], False),
        ([900, 100], False),
        ([900, 100, 105], True),
        ([100, 111], False),
        ([100, 110], True),
        ([100, 200] * 5, True),  # ten samples
        ([2500], True),  # a quarter of 10 s
    ],
)
def test_warm_up(milliseconds, expected):
    assert sampling.warmed_up([value * MS for value in milliseconds], max_seconds=10) == expected


def test_spread_is_taken_within_each_batch():
    """Two batches of very different size, each without spread: nothing left to measure."""
    assert sampling.relative_half_width({0: [10, 10, 10], 1: [1000, 1000]}) == 0
    assert sampling.relative_half_width({0: [10], 1: [1000]}) == math.inf


def test_half_width_by_hand():
    """0.9, 1.0, 1.1 of the median: standard deviation 0.1; 1.96 * 1.253 * 0.1 / sqrt(3)."""
    expected = 1.96 * 1.253 * 0.1 / math.sqrt(3)
    assert sampling.relative_half_width({0: [90, 100, 110]}) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "samples, limits, why",
    [
        # every batch is measured before any cap
        ({0: [60_000 * MS], 1: []}, {"max_samples": 1, "max_seconds": 1}, ""),
        ({0: [60_000 * MS], 1: [1 * MS]}, {"max_seconds": 1}, "time cap"),
        ({0: [1 * MS], 1: [1 * MS]}, {"max_samples": 2}, "sample cap"),
        # a sweep is finished before a cap ends sampling
        ({0: [MS, 60_000 * MS], 1: [MS]}, {"max_samples": 1, "max_seconds": 1}, ""),
        ({0: [], 1: []}, {"max_samples": 1}, ""),
        # spread needs five whole sweeps
        ({0: [MS] * 4, 1: [MS] * 4}, {}, ""),
        ({0: [MS] * 5, 1: [MS] * 4}, {}, ""),
        ({0: [MS] * 5, 1: [MS] * 5}, {}, "spread"),
        ({0: [MS, 2 * MS, 3 * MS, MS, MS], 1: [MS] * 5}, {}, ""),
    ],
)
def test_when_it_is_enough(samples, limits, why):
    usual = {"batches": 2, "spread": 0.02, "max_samples": 100, "max_seconds": 10}
    assert sampling.enough(samples, **{**usual, **limits}) == why


@dataclass
class Taken:
    total_wall_ns: int
    foreign_cpu: Optional[float] = None
    flags: Optional[List[str]] = None


def taken(durations, warm_up=(7,), **limits):
    """(batch, repeat, warmup) of the samples of a warm-up and of a sweep over two batches, whose sample k takes
    durations[k]."""
    left = list(durations)
    asked = []

    def sample(batch, repeat, warmup):
        asked.append((batch, repeat, warmup))
        return Taken(left.pop(0))

    how = {"spread": 0.02, "max_samples": 4, "max_seconds": 10, **limits}
    records = [*sampling.warm_up(sample, warm_up, how["max_seconds"]), *sampling.sweep(sample, [7, 3], **how)]
    assert len(records) == len(asked) and all(record.flags is not None for record in records)
    return asked


def test_after_the_warm_up_a_sweep_takes_all_in_turn():
    warm = [(7, 0, True), (7, 1, True)]
    measured = [(7, 0, False), (3, 0, False), (7, 1, False), (3, 1, False)]
    assert taken([MS] * 6) == warm + measured
    assert taken([MS] * 4, warm_up=()) == measured
    sweeps = [(batch, repeat, False) for repeat in range(5) for batch in (7, 3)]
    assert taken([MS] * 12, max_samples=100)[2:] == sweeps


def test_the_first_batch_of_a_warm_up_decides_how_long_it_lasts():
    assert taken([MS] * 7, warm_up=[7, 3])[:4] == [(7, 0, True), (7, 1, True), (3, 0, True), (7, 0, False)]
    assert taken([MS] * 6, warm_up=[3])[:3] == [(3, 0, True), (3, 1, True), (7, 0, False)]


@pytest.mark.parametrize(
    "limits, why",
    [({"max_samples": 2}, "sample cap"), ({"max_seconds": 0.001}, "time cap"), ({"max_samples": 99}, "spread")],
)
def test_a_sweep_says_why_it_ended(limits, why):
    how = {"spread": 0.02, "max_samples": 99, "max_seconds": 10, **limits}
    ended = []

    def whole():
        ended.append((yield from sampling.sweep(lambda *_: Taken(MS), [7, 3], **how)))

    assert len(list(whole())) == (10 if why == "spread" else 2) and ended == [why]


USE = """
import ctypes
from common.system import memory
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
if keep:
    memory.keep_freed_memory()
memory.widen_heap(96 << 20)
before = memory.minor_faults()
block = ctypes.c_void_p(library.malloc(64 << 20))
ctypes.memset(block, 1, 64 << 20)
print(memory.minor_faults() - before)
"""


def test_a_widened_heap_serves_large_blocks_without_new_pages():
    def faults(variables, keep=False):
        command = [sys.executable, "-c", f"keep = {keep}\n{USE}"]
        return int(subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True, stdout=-1).stdout)

    assert faults(REUSE_VARIABLES) < 1000 and faults({}, keep=True) < 1000
    if faults({}) < 1000:
        pytest.skip("this system needs few pages for 64 MB (huge pages), or its C library is not glibc")
