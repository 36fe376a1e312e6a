"""Time as a power of the size of a batch, by hand."""

from __future__ import annotations

import math

import pytest

from common.analysis import by_size

SIZES = {str(at): 100 * 2**at for at in range(4)}


def rounds(count, noise=lambda number, at: 1.0):
    """Each measures all batches, which take 3 size^1.5 ms."""
    return {
        str(number): {batch: 3 * size**1.5 * noise(number, at) for at, (batch, size) in enumerate(SIZES.items())}
        for number in range(count)
    }


def test_a_power_is_found_and_its_interval_is_nothing_without_noise():
    line = by_size.line(rounds(3), SIZES)
    assert (line[0].size, line[-1].size) == pytest.approx((100, 800))
    for at in line:
        assert (at.ms, at.low, at.high) == pytest.approx((3 * at.size**1.5,) * 3)


def test_the_interval_is_over_rounds():
    """Three rounds, each off by its own factor at every size: Student's t with two degrees of freedom."""
    factors = (0.8, 1.0, 1.25)  # logarithms -0.223, 0, 0.223
    line = by_size.line(rounds(3, lambda number, at: factors[number]), SIZES)
    half = 4.302653 * math.log(1.25) * math.sqrt(2 / 9 * 3 / 2)  # of their mean
    middle = line[len(line) // 2]
    assert middle.ms == pytest.approx(3 * middle.size**1.5)
    assert math.log(middle.high / middle.ms) == pytest.approx(half, rel=1e-3) == math.log(middle.ms / middle.low)


def test_few_rounds_or_sizes_have_no_line():
    assert by_size.line(rounds(2), SIZES) is None
    assert by_size.line(rounds(5), {"0": 100, "1": 200}) is None
    assert by_size.line({}, SIZES) is None
