from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from common.analysis.ratios import independent_ratio, paired_ratio
from common.core.statistics import (
    Summary,
    describe,
    geometric_mean,
    interval,
    interval_of_rounds,
    median,
    quantile,
    student_t,
    verdict,
)


def test_quantile_is_linear_between_samples():
    assert quantile([40, 10, 20, 30], 0.5) == 25
    assert quantile([40, 10, 20, 30], 0.2) == 16  # place 0.6: 10 + 0.6 * 10
    assert quantile([10, 20, 30, 40], 0.8) == 34  # place 2.4: 30 + 0.4 * 10
    assert (quantile([5], 0.2), quantile([5, 7], 0), quantile([5, 7], 1)) == (5, 5, 7)
    assert median([3, 1, 2]) == 2


@pytest.mark.parametrize("values, fraction", [([], 0.5), ([1], 1.5), ([1], -0.1)])
def test_quantile_refuses_what_has_no_answer(values, fraction):
    with pytest.raises(ValueError):
        quantile(values, fraction)


def test_describe():
    """A batch ten times as long is no spread, and one with a single sample tells of none."""
    samples = {0: [1, 2, 3, 4, 5, 6], 1: [10, 20, 30, 40, 50, 60]}
    assert astuple(describe(samples)) == pytest.approx((19.25, 11, 27.5, 12))
    assert astuple(describe({0: [1, 2, 3], 1: [16]})) == pytest.approx((9, 6.3, 11.7, 4))
    assert describe({0: [2], 1: [4]}) == Summary(3, None, None, 2)
    assert describe({}) is None


def test_geometric_mean():
    assert geometric_mean([2, 8]) == pytest.approx(4)
    for values in ([], [1, 0], [1, -2]):
        with pytest.raises(ValueError):
            geometric_mean(values)


def test_interval_of_two_rounds_by_hand():
    # logs are 0 and 2 (values 1 and e^2): mean 1, deviation sqrt(2), standard error 1, t(1) = 12.706.
    low, high = interval([1, math.e**2])
    assert (math.log(low), math.log(high)) == pytest.approx((1 - 12.706, 1 + 12.706), abs=1e-3)


def test_interval_of_three_rounds_by_hand():
    # logs -1, 0, 1: mean 0, variance 1, standard error 1/sqrt(3), t(2) = 4.303.
    low, high = interval([math.exp(-1), 1, math.e])
    assert math.log(high) == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert low == pytest.approx(1 / high)


@pytest.mark.parametrize(
    "confidence, freedom, expected",  # from printed tables; 1 and 2 degrees also by tan and by algebra
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 9, 2.262),
        (0.95, 30, 2.042),
        (0.99, 5, 4.032),
        (0.90, 12, 1.782),
        (0.95, 1e6, 1.960),
        (0.9, 1, math.tan(0.9 * math.pi / 2)),
        (0.9875, 2, 0.9875 * math.sqrt(2 / (1 - 0.9875**2))),
    ],
)
def test_student_t(confidence, freedom, expected):
    assert student_t(confidence, freedom) == pytest.approx(expected, abs=6e-4)


def test_student_t_far_out_of_many_degrees():
    """There it is close to the normal distribution's point, 5.0143."""
    assert student_t(1 - 5.325332608e-7, 50342) == pytest.approx(5.0149, abs=1e-3)


def test_student_t_between_whole_degrees():
    assert student_t(0.95, 2) > student_t(0.95, 2.5) > student_t(0.95, 3)
    for confidence, freedom in [(0, 3), (1, 3), (0.95, 0.5)]:
        with pytest.raises(ValueError):
            student_t(confidence, freedom)


def test_interval_needs_two_rounds():
    assert interval([]) is None and interval([5.0]) is None
    assert interval([5.0, 5.0, 5.0]) == pytest.approx((5, 5))
    many = interval([math.exp(-1), math.e] * 20)  # 40 values, variance 40/39, 39 degrees of freedom
    assert math.log(many[1]) == pytest.approx(2.0227 * math.sqrt(40 / 39 / 40), rel=1e-4)
    assert math.log(interval([math.exp(-1), 1, math.e], 0.99)[1]) == pytest.approx(9.925 / math.sqrt(3), rel=1e-4)


def test_interval_is_over_rounds_not_over_samples():
    rounds = {1: {0: [1.0] * 1000}, 2: {0: [math.e**2 - 1] * 1000, 1: [math.e**2 + 1]}}
    assert interval_of_rounds(rounds) == pytest.approx(interval([1.0, math.e**2]))


def test_paired_ratio_by_hand():
    baseline = {1: {0: [10, 10, 90], 1: [100]}, 2: {0: [20], 1: [100]}}
    new = {1: {0: [20], 1: [200]}, 2: {0: [40, 40], 1: [200]}}
    estimate = paired_ratio(baseline, new)
    assert estimate.ratio == pytest.approx(2) and (estimate.low, estimate.high) == pytest.approx((2, 2))
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
    assert paired_ratio({1: {0: [1]}}, {2: {0: [1]}}) is None
    assert paired_ratio({1: {0: [1]}}, {1: {1: [1]}}) is None
    assert paired_ratio({1: {0: [1]}}, {1: {0: [3]}}).low is None


def test_independent_ratio_by_hand():
    # logs -1, 0, 1 (variance 1) and 2, 2 + 3 / 2, 2 + 3 (variance 9/4): difference 3.5, parts 1/3 and 3/4;
    # Welch: (13/12)^2 / ((1/9 + 9/16) / 2) = 3.485 degrees of freedom.
    baseline = {round: {0: [math.exp(log)]} for round, log in enumerate([-1, 0, 1])}
    new = {round: {0: [math.exp(log)]} for round, log in enumerate([2, 3.5, 5])}
    estimate = independent_ratio(baseline, new)
    assert math.log(estimate.ratio) == pytest.approx(3.5) and estimate.error == pytest.approx(math.sqrt(13 / 12))
    freedom = (13 / 12) ** 2 / ((1 / 9 + 9 / 16) / 2)
    assert freedom == pytest.approx(3.485, abs=1e-3)
    half = student_t(0.95, freedom) * estimate.error
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


def test_verdict_refuses_a_negative_tolerance():
    with pytest.raises(ValueError):
        verdict(1, 1, -0.1)
