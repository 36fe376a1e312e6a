"""Quantiles, intervals, ratios and verdicts, against answers by hand and from printed tables."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from common.analysis.ratios import independent_ratio, paired_ratio
from common.core import statistics
from common.core.statistics import describe, geometric_mean, interval, median, quantile, student_t, verdict


@pytest.mark.parametrize(
    "values, fraction, expected",
    [
        ([40, 10, 20, 30], 0.5, 25),
        ([40, 10, 20, 30], 0.2, 16),  # place 0.6: 10 + 0.6 * 10
        ([10, 20, 30, 40], 0.8, 34),  # place 2.4: 30 + 0.4 * 10
        ([5], 0.2, 5),
        ([5, 7], 0, 5),
        ([5, 7], 1, 7),
    ],
)
def test_quantile_is_linear_between_samples(values, fraction, expected):
    assert quantile(values, fraction) == expected


@pytest.mark.parametrize(
    "ask",
    [
        lambda: quantile([], 0.5),
        lambda: quantile([1], 1.5),
        lambda: geometric_mean([]),
        lambda: geometric_mean([1, -2]),
        lambda: student_t(0, 3),
        lambda: student_t(1, 3),
        lambda: student_t(0.95, 0.5),
        lambda: verdict(1, 1, -0.1),
    ],
)
def test_what_has_no_answer_is_refused(ask):
    with pytest.raises(ValueError):
        ask()


def test_describe():
    """A batch ten times as long is no spread, and one with a single sample tells of none."""
    samples = {0: [1, 2, 3, 4, 5, 6], 1: [10, 20, 30, 40, 50, 60]}
    assert astuple(describe(samples)) == pytest.approx((19.25, 11, 27.5, 12))
    assert astuple(describe({0: [1, 2, 3], 1: [16]})) == pytest.approx((9, 6.3, 11.7, 4))
    assert astuple(describe({0: [2], 1: [4]})) == (3, None, None, 2) and describe({}) is None


@pytest.mark.parametrize(
    "confidence, freedom, expected",  # from printed tables; 1 and 2 degrees also by tan and by algebra
    [
        (0.95, 1, 12.706),
        (0.95, 9, 2.262),
        (0.99, 5, 4.032),
        (0.90, 12, 1.782),
        (0.95, 1e6, 1.960),
        (0.9, 1, math.tan(0.9 * math.pi / 2)),
        (0.9875, 2, 0.9875 * math.sqrt(2 / (1 - 0.9875**2))),
        (1 - 5.325332608e-7, 50342, 5.0149),  # far out, close to the normal distribution's 5.0143
    ],
)
def test_student_t(confidence, freedom, expected):
    assert student_t(confidence, freedom) == pytest.approx(expected, abs=1e-3)
    assert student_t(confidence, freedom) > student_t(confidence, freedom + 0.5)


@pytest.mark.parametrize(
    "logs, confidence, center, half",
    [
        ([0, 2], 0.95, 1, 12.706),  # deviation sqrt(2), standard error 1, t(1) = 12.706
        ([-1, 0, 1], 0.95, 0, 4.303 / math.sqrt(3)),  # variance 1, t(2) = 4.303
        ([-1, 0, 1], 0.99, 0, 9.925 / math.sqrt(3)),
        ([-1, 1] * 20, 0.95, 0, 2.0227 * math.sqrt(40 / 39 / 40)),  # 39 degrees of freedom
        ([3, 3, 3], 0.95, 3, 0),
    ],
)
def test_interval_by_hand(logs, confidence, center, half):
    low, high = interval(list(map(math.exp, logs)), confidence)
    assert (math.log(low), math.log(high)) == pytest.approx((center - half, center + half), abs=1e-3)


def test_interval_is_over_rounds_not_over_samples_and_needs_two():
    assert interval([]) is None and interval([5.0]) is None
    rounds = {1: {0: [1.0] * 1000}, 2: {0: [math.e**2 - 1] * 1000, 1: [math.e**2 + 1]}}
    assert statistics.interval_of_rounds(rounds) == pytest.approx(interval([1.0, math.e**2]))
    assert median([3, 1, 2]) == 2 and geometric_mean([2, 8]) == pytest.approx(4)


def test_paired_ratio_by_hand():
    baseline = {1: {0: [10, 10, 90], 1: [100]}, 2: {0: [20], 1: [100]}}
    new = {1: {0: [20], 1: [200]}, 2: {0: [40, 40], 1: [200]}}
    estimate = paired_ratio(baseline, new)
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((2, 2, 2))
    assert estimate.batches == 2 and estimate.error == pytest.approx(0, abs=1e-9)
    assert estimate.baseline == pytest.approx((math.sqrt(1000), math.sqrt(2000)))
    assert estimate.new == pytest.approx((math.sqrt(4000), math.sqrt(8000)))


def test_paired_ratio_has_the_interval_of_the_rounds_ratios():
    baseline = {round: {0: [time]} for round, time in enumerate([1, 10, 100])}  # a drift that both sides share
    new = {round: {0: [time]} for round, time in enumerate([math.exp(-1), 10, 100 * math.e])}
    estimate = paired_ratio(baseline, new)
    assert (estimate.low, estimate.high) == pytest.approx(interval([math.exp(-1), 1, math.e]))
    assert estimate.error == pytest.approx(1 / math.sqrt(3))


def test_paired_ratio_uses_only_what_both_have():
    baseline = {1: {0: [10], 1: [1]}, 2: {0: [10], 1: [1]}, 3: {0: [1]}}
    new = {1: {0: [10]}, 2: {0: [10], 1: [1000]}}  # died on batch 1 in round 1
    estimate = paired_ratio(baseline, new)
    assert (estimate.ratio, len(estimate.baseline), estimate.batches) == (pytest.approx(1), 2, 1)
    assert paired_ratio({1: {0: [1]}}, {2: {0: [1]}}) is None and paired_ratio({1: {0: [1]}}, {1: {1: [1]}}) is None
    assert paired_ratio({1: {0: [1]}}, {1: {0: [3]}}).low is None


def test_independent_ratio_by_hand():
    # logs -1, 0, 1 (variance 1) and 2, 2 + 3 / 2, 2 + 3 (variance 9/4): difference 3.5, parts 1/3 and 3/4;
    # Welch: (13/12)^2 / ((1/9 + 9/16) / 2) = 3.485 degrees of freedom.
    baseline = {round: {0: [math.exp(log)]} for round, log in enumerate([-1, 0, 1])}
    new = {round: {0: [math.exp(log)]} for round, log in enumerate([2, 3.5, 5])}
    estimate = independent_ratio(baseline, new)
    assert math.log(estimate.ratio) == pytest.approx(3.5) and estimate.error == pytest.approx(math.sqrt(13 / 12))
    half = student_t(0.95, (13 / 12) ** 2 / ((1 / 9 + 9 / 16) / 2)) * estimate.error
    assert (math.log(estimate.low), math.log(estimate.high)) == pytest.approx((3.5 - half, 3.5 + half))


def test_independent_ratio_of_different_rounds_and_of_too_few():
    estimate = independent_ratio({1: {0: [2.0]}, 2: {0: [2.0], 1: [9]}}, {7: {0: [4.0]}, 8: {0: [4.0]}, 9: {0: [4.0]}})
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((2, 2, 2))
    assert (len(estimate.baseline), len(estimate.new), estimate.batches) == (2, 3, 1)
    assert independent_ratio({1: {0: [1]}}, {1: {0: [3]}, 2: {0: [3]}}).low is None
    assert independent_ratio({}, {1: {0: [3]}}) is None


@pytest.mark.parametrize(
    "low, high, tolerance, expected",
    [
        (0.90, 0.95, 0.02, "faster"),
        (1.05, 1.10, 0.02, "slower"),
        (0.99, 1.01, 0.02, "same"),
        (0.97, 1.01, 0.02, "unclear"),
        (1.01, 1.05, 0.02, "unclear"),
        (0.5, 2.0, 0.02, "unclear"),
        (0.98, 0.999, 0.0, "faster"),
        (0.98, 1.0, 0.0, "unclear"),
        (1.0, 1.0, 0.0, "same"),
        (None, None, 0.02, "unclear"),
    ],
)
def test_verdict(low, high, tolerance, expected):
    assert verdict(low, high, tolerance) == expected
