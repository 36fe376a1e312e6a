"""Progress: the time left, and who is ahead."""

from __future__ import annotations

import pytest
from fixtures_runs import timing

from common.core import settings
from common.jobs import costs
from common.jobs.plan import plan
from common.jobs.progress import Progress, Standing
from common.records import schema


def test_the_time_left_is_of_jobs_like_those_to_come():
    progress = Progress(quiet=True)
    progress.expect([("a", "correctness"), ("b", "correctness"), ("a", "timing"), ("b", "timing"), ("a", "timing")])
    assert progress.left() == ""
    progress.start("a correctness")
    progress.start("b correctness")  # on another device
    progress.done("a correctness", "ok", None, ("a", "correctness"))
    progress.took = {("a", "correctness"): [10.0]}
    assert progress.left() == "about 40 s left"  # nothing better is known
    progress.took = {("a", "correctness"): [10.0], ("a", "timing"): [100.0, 140.0]}
    assert progress.left() == "about 6 min left"  # 10 + 120 + 120 + 120
    progress.done("b correctness", "missing", "no b", ("b", "correctness"))
    assert progress.left() == "about 4 min left" and progress.finished == 2


def test_known_costs_are_scaled_by_what_the_first_jobs_took():
    costs = {("a", "correctness"): 5.0, ("a", "timing"): 20.0, ("b", "timing"): 10.0}
    progress = Progress(quiet=True, costs=costs)
    progress.expect([("a", "correctness"), ("a", "timing"), ("b", "timing")])
    assert progress.left() == "about 35 s left"
    progress.start("a correctness")
    progress.done("a correctness", "ok", None, ("a", "correctness"))
    progress.took = {("a", "correctness"): [10.0]}  # this machine is half as fast
    assert progress.left() == "about 60 s left"


def test_a_pipe_gets_no_line_for_a_timing_job_that_ended_well(capsys):
    progress = Progress(quiet=False)
    for name, pass_name, status in (("a", "timing", "ok"), ("b", "timing", "error"), ("c", "correctness", "ok")):
        progress.start(name)
        progress.done(name, status, "", (name, pass_name))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["b:", "c:"]


def test_costs_of_a_run_come_with_the_suite():
    resolved = settings.resolve({}, "cpu")
    both, fused = (costs.seconds(plan(names, resolved), resolved, True) for names in (["fused", "k2"], ["fused"]))
    assert 30 < fused < both < 3600
    quick = settings.resolve({"preset": "quick"}, "cpu")
    assert costs.seconds(plan(["fused"], quick), quick, True) == 0  # not known


def samples(*job):
    """Return the samples of a timing job."""
    return [schema.typed(record) for record in timing(*job) if record["record"] == "sample"]


def test_who_is_ahead_by_the_batches_that_all_have():
    standing = Standing({"slow": "exact", "fast": "exact", "few": "exact", "approx": "pruned"})
    for number in (1, 2):
        standing.add("slow", samples(f"timing-{number}", [20, 40], [1, 2]))
        standing.add("fast", samples(f"timing-{number}", [10, 20], [9, 9]))
        standing.add("approx", samples(f"timing-{number}", [1, 3], [1, 1]))
    standing.add("few", samples("timing-1", [1], [1]))
    assert standing.words() == "exact: fast 15.00, slow 30.00 ms; pruned: approx 2.000 ms"


@pytest.mark.parametrize("step", [[], [7]])
def test_without_a_step_it_is_the_loss(step):
    standing = Standing({})
    standing.add("a", samples("timing-1", step, [3]))
    assert standing.words() == f"exact: a {'7.000' if step else '3.000'} ms"
