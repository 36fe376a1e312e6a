"""What a device does at best: how it is measured, with a fake clock."""

from __future__ import annotations

import pytest
import torch

from common.core import settings
from common.measure import peaks
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
    many = peaks.MOST
    fast_then_slow = FakeClock(*[MS] * 3 * many, 60 * MS)
    products = list(peaks.products(CPU, torch.float32, fast_then_slow, 0.4))
    assert [line.n for line in products] == [2, 4, 8, 16]  # the next: 8 x 60 ms
    assert products[0].ns == [MS] * many and products[3].ns == [60 * MS] * 7


def test_products_beside_load_are_of_several_sizes_and_enough_samples(small_products):
    """Another process takes so long that not even the smallest size ends in time."""
    products = list(peaks.products(CPU, torch.float32, FakeClock(150 * MS), 0.4))
    assert [line.n for line in products] == [2, 4, 8] and min(len(line.ns) for line in products) >= 10


def test_the_buffer_is_far_above_caches_and_leaves_memory_to_others():
    lines = list(peaks.streams(CPU, FakeClock(MS), 0.001))
    (size,) = {line.buffer_bytes for line in lines}
    assert 2 * size <= memory.available_memory()
    assert size >= 8 * (machine.cache_bytes() or 0) or 8 * size >= 0.8 * memory.available_memory()
    moved = {line.kernel: line.moved_bytes / line.buffer_bytes for line in lines}
    assert moved == {"update": 1.5, "read": 1, "write": 1}


def test_what_torch_cannot_do_here_is_said_and_costs_nothing_else(monkeypatch):
    monkeypatch.setattr(peaks, "SIZES", (-1,))
    chosen = settings.resolve({"preset": "quick", "max_seconds": 0.001}, "cpu")
    record = peaks.measure(chosen, CPU)
    assert record.products == [] and record.reason.startswith("products: ")
    assert len(record.streams) == 3 and record.threads == torch.get_num_threads()
