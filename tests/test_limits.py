"""What a device does at best: how it is measured, with a fake clock, and that a run goes on without it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import torch
from fixtures_runs import correctness, records_of, status, timing

from common.core import settings
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.plan import plan
from common.jobs.progress import Progress
from common.jobs.session import Session
from common.measure import peaks
from common.records.run import open_runs
from common.setup import interpreters
from common.system import machine, memory

CPU = torch.device("cpu")
MS = 1_000_000


class FakeClock:
    """Every span it is asked for lasts as long as the next of `durations`, in ns, and the last one from then on."""

    def __init__(self, *durations):
        self.durations = list(durations)

    def synchronize(self):
        pass

    def mark(self):
        return None

    def between(self, begin, end):
        return self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]


def test_repeats_fill_their_time_and_the_first_does_not_count():
    done = []
    assert peaks.repeated(lambda: done.append(0), FakeClock(100 * MS), 0.35) == [100 * MS] * 4
    assert len(done) == 5
    assert peaks.repeated(lambda: None, FakeClock(9000 * MS), 0.35) == [9000 * MS] * peaks.FEWEST
    assert peaks.repeated(lambda: None, FakeClock(1), 0.35) == [1] * peaks.MOST


@pytest.fixture
def small_products(monkeypatch):
    """Multiply small matrices; the clock is made up anyway."""
    monkeypatch.setattr(peaks, "SIZES", tuple(2**power for power in range(1, 8)))


def test_products_grow_until_the_next_would_take_too_long(small_products):
    many = peaks.MOST_SHORT
    fast_then_slow = FakeClock(*[MS] * 3 * many, 60 * MS)
    products = list(peaks.products(CPU, torch.float32, fast_then_slow, 0.4))
    assert [line.n for line in products] == [2, 4, 8, 16]  # the next: 8 x 60 ms
    assert products[0].ns == [MS] * many and products[3].ns == [60 * MS] * 7


def test_products_beside_load_are_of_several_sizes_and_enough_samples(small_products):
    """Another process takes so long that not even the smallest size ends in time."""
    products = list(peaks.products(CPU, torch.float32, FakeClock(150 * MS), 0.4))
    assert [line.n for line in products] == [2, 4, 8] and min(len(line.ns) for line in products) >= 10


def test_buffers_are_from_an_utterance_s_size_to_far_above_caches_and_leave_memory_to_others():
    lines = list(peaks.streams(CPU, FakeClock(MS), 0.001))
    sizes = sorted({line.buffer_bytes for line in lines})
    assert len(lines) == 3 * peaks.QUARTERS and sizes[-1] >= 60 * sizes[0]
    assert 2 * sizes[-1] <= memory.available_memory()
    assert sizes[-1] >= 8 * (machine.cache_bytes() or 0) or 8 * sizes[-1] >= 0.8 * memory.available_memory()
    moved = {line.kernel: line.moved_bytes / line.buffer_bytes for line in lines}
    assert moved == {"update": 1.5, "read": 1, "write": 1}


def test_exponentials_are_of_every_thread():
    lines = list(peaks.exps(CPU, torch.bfloat16, FakeClock(MS), 0.001))
    assert {line.kernel for line in lines} == {"exp", "exp2"}
    assert all(line.count == torch.get_num_threads() * peaks.CPU_EXPS for line in lines)


def test_what_torch_cannot_do_here_is_said_and_costs_nothing_else(monkeypatch):
    monkeypatch.setattr(peaks, "SIZES", (-1,))
    chosen = settings.resolve({"preset": "quick", "max_seconds": 0.001}, "cpu")
    record = peaks.measure(chosen, CPU)
    assert record.products == [] and record.reason.startswith("products: ")
    assert len(record.streams) == 12 and record.exps and record.threads == torch.get_num_threads()


def test_the_newest_torch_is_found_without_importing_it(tmp_path):
    pythons = {}
    for name, version in (("k2", "1.13.1+cu117"), ("a", "2.11.0"), ("b", "2.9.1"), ("none", "")):
        pythons[name] = tmp_path / name
        pythons[name].write_text(f"#!/bin/sh\necho {version}\n")
        pythons[name].chmod(pythons[name].stat().st_mode | stat.S_IXUSR)
    assert interpreters.with_newest_torch(pythons) == "a"
    assert interpreters.with_newest_torch({"gone": tmp_path / "gone"}) == "gone"  # alone, it is not even asked
    assert interpreters.with_newest_torch({}) is None
    here = interpreters.with_newest_torch({"none": pythons["none"], "here": Path(sys.executable)})
    assert here == "here"


@pytest.mark.parametrize("python, reason", [(Path("/bin/false"), "error: ended with exit code 1")])
def test_a_run_goes_on_where_nothing_could_be_measured(tmp_path, python, reason):
    chosen = settings.resolve({"preset": "quick"}, "cpu")
    with open_runs(["torchaudio", "k2"], chosen, tmp_path, resume=False) as run_of:
        choices = {name: interpreters.Choice(python) for name in run_of}
        with Progress(quiet=True) as progress:
            Session(run_of, choices, chosen, 60, progress, Local()).limits(3)
    for run in run_of.values():
        (_, record) = records_of(run.folder)
        assert record["record"] == "limits" and record["reason"].startswith(reason) and record["round"] == 3
        assert not run.failed and "job" not in record


class MadeUp(Executor):
    """Its limits are measured well, or not."""

    def __init__(self, well):
        self.well, self.seen = well, []

    def execute(self, job, python, folder, chosen, timeout, note):
        self.seen.append(job.name)
        if job.pass_name == "correctness":
            return correctness()
        if job.pass_name == "timing":
            return timing(job.name, [1, 1], [1, 1])
        end = status(job.name, "ok" if self.well else "timeout", "" if self.well else "too slow")
        return [*([{"record": "limits", "job": job.name, "reason": ""}] if self.well else []), end]


@pytest.mark.parametrize("well", [True, False])
def test_limits_are_measured_in_every_third_round_until_that_fails(tmp_path, well):
    flags = {"preset": "quick", "rounds": 4, "passes": ("correctness", "timing")}
    chosen, executor = settings.resolve(flags, "cpu"), MadeUp(well)
    with open_runs(["torchaudio"], chosen, tmp_path, resume=False) as run_of, Progress(quiet=True) as progress:
        choices = {"torchaudio": interpreters.Choice(Path(sys.executable))}
        Session(run_of, choices, chosen, 60, progress, executor).run(plan(["torchaudio"], chosen), True)
    rounds = [1, 4] if well else [1]
    seen = [["limits-1"], ["timing-1", "timing-2", "timing-3"], ["limits-4"] if well else [], ["timing-4"]]
    assert executor.seen == ["correctness", *sum(seen, [])]
    kept = [record for record in records_of(run_of["torchaudio"].folder) if record["record"] == "limits"]
    assert [record["round"] for record in kept] == rounds and progress.finished == progress.total == 7
