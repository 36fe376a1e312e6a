"""Two separate runs: the rows that did not change are the control; memory by the peaks that tables show."""

from __future__ import annotations

import importlib
import json

import pytest
from rnnt_bench.analysis import control, ratios
from rnnt_bench.analysis.row import Row
from rnnt_bench.records.schema import Environment, typed

from commands import ROOT, has_words, run
from fixtures_runs import change, header, timed

INDEX = ("torchaudio", "optimized_transducer", "fast_rnnt", "k2")
PACKAGES = {"fused": "fused_transducer"}


def two_runs(folder, moved, unchanged=INDEX, day=1.15, revisions=("a", "b")):
    """Runs of losses of the index, which a day slowed by `day`, and of fused, changed between them, by `moved`."""
    for side, revision in zip(("before", "after"), revisions):
        for at, name in enumerate((*unchanged, "fused")):
            factor = 1.0 if side == "before" else moved if name == "fused" else day * (1 + 0.001 * at)
            ms = [10 * factor * luck for luck in (0.99, 1.0, 1.01, 1.0, 1.0)]
            head = {"run_id": side, "git_revision": revision, "package": PACKAGES.get(name, name)}
            timed(folder / side, name, ms, **head)
    return folder / "before", folder / "after"


def compared(sides, *arguments, code=0):
    done = run("rnnt-bench", "compare", *sides, "--format", "json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return {row["name"]: row["time"]["step"] for row in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "moved, verdict, over",
    [(1.15 * 1.5, "slower", 1.5), (1.15, "same", 1.0), (1.0, "faster", 1 / 1.15), (1.15 * 1.1, "slower", 1.1)],
)
def test_a_changed_row_is_judged_over_the_rows_that_did_not_change(tmp_path, moved, verdict, over):
    sides = two_runs(tmp_path, moved)
    rows = compared(sides)
    fused = rows["fused"]
    assert fused["verdict"] == verdict and fused["over_control"] == pytest.approx(over, rel=0.01)
    assert fused["ratio"] == pytest.approx(moved) and fused["low"] <= fused["over_control"] <= fused["high"]
    assert fused["control"]["rows"] == 4 and fused["control"]["ratio"] == pytest.approx(1.15, rel=0.01)
    assert {rows[name]["verdict"] for name in INDEX} <= {"same", "unclear"}
    assert {rows[name]["control"]["rows"] for name in INDEX} == {3}  # each over the others
    compared(sides, "--fail-on-slower", "5%", code=1 if verdict == "slower" else 0)
    text = " ".join(run("rnnt-bench", "compare", *sides).stdout.split())
    assert has_words(text, "4 rows that did not change took 1.15 times", "the machine was slower")


def test_rows_that_moved_apart_tell_little(tmp_path):
    """Some losses live on memory, which a day slows more than the clock."""
    sides = two_runs(tmp_path, 1.0)
    for name, factor in zip(INDEX, (0.9, 1.0, 1.2, 1.1)):
        timed(sides[1], name, [10 * factor] * 5, run_id="after", git_revision="b", package=name)
    assert compared(sides)["fused"]["verdict"] == "unclear"


@pytest.mark.parametrize("moved, verdict", [(1.25, "unclear"), (0.8, "unclear"), (1.0, "unclear"), (1.4, "slower")])
def test_without_a_control_a_small_change_of_separate_runs_is_unclear(tmp_path, moved, verdict):
    sides = two_runs(tmp_path, moved, INDEX[:2])
    fused = compared(sides)["fused"]
    assert fused["verdict"] == verdict and fused["control"] is None
    assert ("separate runs" in fused["reason"]) == (verdict == "unclear")
    compared(sides, "--fail-on-slower", "2%", code=1 if verdict == "slower" else 0)
    text = run("rnnt-bench", "compare", *sides).stdout
    assert has_words(text.partition("VERDICT")[2], "unclear", "separate runs", "torchaudio step")
    assert "over control" not in text


def row_of(name, version="1.0", torch="2.11.0", revision="a", dirty=False, package="x"):
    head = typed({**header(name), "git_revision": revision, "git_dirty": dirty, "package": package})
    return Row(name, header=head, environment=Environment(implementation_version=version, torch=torch))


def test_a_row_did_not_change_if_package_version_and_torch_are_the_same():
    same = row_of("k2")
    assert control.is_unchanged(same, row_of("k2", revision="b", dirty=True))
    for other in (row_of("k2", "1.1"), row_of("k2", torch="2.12.0"), row_of("k2", package="y"), row_of("torchaudio")):
        assert not control.is_unchanged(same, other)
    for name, package in (("fused", "fused_transducer"), ("reference", "torch"), ("my_own_loss", "x")):
        first = row_of(name, package=package)  # whose version does not tell
        assert control.is_unchanged(first, row_of(name, package=package))
        assert not control.is_unchanged(first, row_of(name, package=package, revision="b"))
        assert not control.is_unchanged(first, row_of(name, package=package, dirty=True))


def test_the_control_by_hand():
    """Ratios of 1.1 and of 10% more and less: mean 0, variance 1, in units of log 1.1."""
    unit = 0.0953101798
    made = ratios.Ratio(1.0, 0.9, 1.1, 4, (1.0,), (1.0,), 0.01, 9)
    moved = ratios.control([at_ratio(made, 1.1**power) for power in (-1, 0, 1)])
    assert (moved.log_mean, moved.log_variance, moved.noise, moved.rows) == pytest.approx((0, unit**2, 1e-4, 3))
    over = ratios.over_control(at_ratio(made, 2.0), moved, 0.95)
    assert over.ratio == pytest.approx(2) and over.error == pytest.approx(unit * (4 / 3) ** 0.5)
    assert over.freedom == pytest.approx(2)  # that of three rows
    noisy = ratios.over_control(made._replace(error=1.0), moved, 0.95)
    assert noisy.error == pytest.approx((unit**2 * 4 / 3 + 1 - 1e-4) ** 0.5) and noisy.freedom == pytest.approx(9, 0.1)
    assert ratios.control([made] * 2) is None and ratios.control([made, made, made._replace(error=None)]) is None


def at_ratio(ratio, value):
    return ratio._replace(ratio=value)


def test_a_run_effect_makes_no_false_verdict(thorough):
    """19 unchanged rows, a machine 10% slower, and 5% for each row: simulated over the real shapes."""
    coverage = importlib.import_module("docs._interval_coverage")
    x, days, runs = coverage.padding(2, ROOT / "shape_info.pt"), coverage.Days(), 300 if thorough else 60
    alone, over_control = coverage.judged(days, x, runs)
    assert alone.wrong >= 0.7 and over_control.wrong <= 0.1
    _, over_control = coverage.judged(days._replace(day=0.01, change=0.2), x, 20)
    assert over_control.slower >= 0.8 and over_control.wrong <= 0.1


@pytest.mark.parametrize(
    "before, after, verdict, shown", [(400, 900, "more", 900), (62, 900, "more", 900), (62, 65, "same", 60)]
)
def test_memory_is_compared_by_the_peaks_of_the_table(tmp_path, before, after, verdict, shown):
    """Torch's allocator counts 60 MB on both sides, the process more."""
    sides = []
    for side, process in (("before", before), ("after", after)):
        timed(tmp_path / side, "k2", [10, 10, 10], peak=60, run_id=side)
        change(tmp_path / side / "k2", "memory", process_bytes=process * 2**20)
        sides.append(tmp_path / side)
    done = run("rnnt-bench", "compare", *sides, "--format", "json")
    step = json.loads(done.stdout)[0]["memory"]["step"]
    assert (step["verdict"], step["new"]) == (verdict, shown)
    (row,) = json.loads(run("summarize.py", sides[1], "--format", "json").stdout)
    assert row["peak_memory_mb"] == step["new"]


@pytest.mark.parametrize(
    "unchanged, words",
    [
        (INDEX, "fused -4% over the rows that did not change, faster"),
        (INDEX[:2], "fused +10%, unclear: separate runs"),
    ],
)
def test_since_is_over_the_rows_that_did_not_change(tmp_path, unchanged, words):
    before, after = two_runs(tmp_path, 1.1, unchanged)
    for folder in after.iterdir():
        change(folder, "run", started="2026-03-01T00:00:00+00:00")
    text = " ".join(run("summarize.py", before, after).stdout.split())
    assert has_words(text, "since 1 Jan 2026", words)
