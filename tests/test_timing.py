"""The timing pass on a CPU: which scopes and batches each round measures."""

from __future__ import annotations

from functools import partial

import pytest

from common.core import settings
from common.losses import subject
from common.losses.passes import timing

ROUNDS = 3


@pytest.fixture
def measured(tiny_shapes):
    return partial(measured_on, str(tiny_shapes))


def measured_on(shape_file, number, **given):
    """The samples of round `number` of the reference, warm-up left out, as (scope, batch)."""
    flags = {"preset": "quick", "rounds": ROUNDS, "batches": "random", "threads": 1, "max_seconds": 0.05}
    flags.update(shape_file=shape_file, batch_size=2)
    job = {"script": "losses.benchmark_reference", "variant": "", "pass": "timing", "round": number}
    ready = subject.prepare(job, settings.resolve({**flags, "max_samples": 4, **given}, "cpu"))
    samples = [line for line in timing.run(ready) if isinstance(line, timing.Sample)]
    return ready.batches, [(line.scope, line.batch) for line in samples if not line.warmup]


def of_scope(samples, scope):
    return {batch for name, batch in samples if name == scope}


@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_each_round_times_the_loss_alone_after_the_step_on_one_of_its_two_batches(number, measured):
    batches, samples = measured(number)
    scopes = [scope for scope, _ in samples]
    assert scopes == sorted(scopes, reverse=True)
    assert of_scope(samples, "step") == set(batches)
    assert of_scope(samples, "loss") == {batches[number % 2]}


def test_of_many_batches_a_third_give_the_loss_alone_another_third_in_each_round(measured):
    rounds = [measured(number, num_batches=6) for number in (1, 2, 3)]
    places = [{batches.index(batch) for batch in of_scope(samples, "loss")} for batches, samples in rounds]
    assert places == [{2, 3}, {4, 5}, {0, 1}]


def test_the_loss_alone_on_all_batches_where_no_step_is_timed(measured):
    batches, samples = measured(3, scopes=("loss",))
    assert of_scope(samples, "loss") == set(batches)
