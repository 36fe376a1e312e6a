"""Options beside tensors: ours, and the defaults that a function's signature tells."""

from __future__ import annotations

import math

import pytest

from common.losses.adapter import Option, described

pytestmark = pytest.mark.environment_contract


def function(logits, targets, blank=-1, reduction="mean", boundary=None, scale=math.inf):
    return logits


def test_defaults_are_told_beside_ours_and_stand_where_we_say_nothing():
    assert described(function, {"blank": 0, "extra": (1, 2)}) == {
        "blank": Option(0, -1),
        "extra": Option("(1, 2)", "-"),
        "reduction": Option("mean", "mean"),
        "scale": Option("inf", "inf"),
    }


def test_a_function_that_hides_its_signature():
    hidden = type("Loss", (), {"__signature__": 1, "__call__": lambda self: None})()
    assert described(hidden, {"blank": 0}) == {"blank": Option(0, "-")}


def test_a_constructor_and_a_prefix():
    class Loss:
        def __init__(self, blank=0, clamp=-1):
            pass

    assert described(Loss, {"clamp": -1}, "Loss.") == {
        "Loss.clamp": Option(-1, -1),
        "Loss.blank": Option(0, 0),
    }
