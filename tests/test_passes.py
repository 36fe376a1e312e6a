"""The passes on a CPU: the scopes and batches of each round, what a trace leaves, and memory past torch's allocator."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rnnt_bench.core import settings
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.instruments import memory, profiler
from rnnt_bench.losses import subject
from rnnt_bench.losses.passes import timing

from commands import rows_of, run
from fixtures_runs import MIB, records_of

ROUNDS = 3


@pytest.fixture
def ready(tiny_shapes):
    def ready(number, of="timing", **given):
        flags = {"preset": "quick", "shape_file": str(tiny_shapes), "max_samples": 4, "max_seconds": 0.05, **given}
        job = JobSpec(settings.resolve(flags, "cpu"), script="losses.benchmark_reference", pass_name=of, round=number)
        return subject.prepare(job)

    return ready


@pytest.fixture
def measured(ready):
    """The batches and the samples of a round of the reference, warm-up left out, as (scope, batch)."""

    def measured(number, **given):
        context = ready(number, rounds=ROUNDS, batches="random", threads=1, batch_size=2, **given)
        samples = [line for line in timing.run(context) if isinstance(line, timing.Sample)]
        return context.batches, [(line.scope, line.batch) for line in samples if not line.warmup]

    return measured


def of_scope(samples, scope):
    return {batch for name, batch in samples if name == scope}


def test_a_batch_with_an_utterance_that_the_loss_refuses_is_unsupported(tmp_path):
    path = tmp_path / "empty.pt"
    torch.save(torch.tensor([[12, 3], [9, 0], [15, 0], [8, 2]], dtype=torch.int32), path)
    flags = {"preset": "quick", "shape_file": str(path), "batches": "first"}
    job = JobSpec(settings.resolve(flags, "cpu"), script="losses.benchmark_fast_rnnt", pass_name="correctness")
    with pytest.raises(NotRunnable, match=r"fast_rnnt refuses utterances without tokens; batch 0 .*U 0") as raised:
        subject.prepare(job)
    assert raised.value.status == "unsupported"
    assert subject.prepare(replace(job, script="benchmark_torchaudio")).batches
    torch.save(torch.tensor([[12, 3], [9, 1]], dtype=torch.int32), path)
    assert subject.prepare(job).batches


@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_each_round_times_the_loss_alone_after_the_step_on_one_of_its_two_batches(number, measured):
    batches, samples = measured(number)
    scopes = [scope for scope, _ in samples]
    assert scopes == sorted(scopes, reverse=True)
    assert of_scope(samples, "step") == set(batches)
    assert of_scope(samples, "loss") == {batches[number % 2]}
    batches, samples = measured(number, scopes=("loss",))  # on all batches where no step is timed
    assert of_scope(samples, "loss") == set(batches)


def test_of_many_batches_a_third_give_the_loss_alone_another_third_in_each_round(measured):
    rounds = [measured(number, num_batches=6) for number in (1, 2, 3)]
    places = [{batches.index(batch) for batch in of_scope(samples, "loss")} for batches, samples in rounds]
    assert places == [{2, 3}, {4, 5}, {0, 1}]


def test_forward_alone_makes_no_gradient_and_its_loss_is_judged(ready):
    context = ready(1, mode="forward")
    for scope in settings.SCOPES:
        taken = context.step(scope, context.batches[0])
        assert math.isfinite(taken.run()) and set(taken.gradients().values()) == {None}
    ends = [line for line in timing.run(context) if isinstance(line, timing.Stop)]
    assert len(ends) == 2 and all(end.loss_error < 1e-4 for end in ends)
    assert not ready(1, "correctness", mode="forward").forward_only


# Traces.


def test_large_traces_are_packed_and_a_disk_that_fills_up_costs_none(tmp_path, monkeypatch):
    def full(source, target, length):
        target.write(b"x")
        raise OSError(28, "No space left on device")

    for name, text in (("small", "s" * 10), ("large", "l" * 1000)):
        (tmp_path / f"{name}.1.pt.trace.json").write_text(text)
    monkeypatch.setattr(profiler, "LARGE", 500)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(profiler.shutil, "copyfileobj", full)
        profiler.pack(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"small.1.pt.trace.json", "large.1.pt.trace.json"}
    profiler.pack(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"small.1.pt.trace.json", "large.1.pt.trace.json.gz"}
    assert gzip.decompress((tmp_path / "large.1.pt.trace.json.gz").read_bytes()).decode()[0] == "l"


def test_all_labels_are_in_the_table_of_operators_and_it_says_what_is_not(monkeypatch):
    monkeypatch.setattr(profiler, "TABLE_ROWS", 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for number in range(20):
            with torch.profiler.record_function(f"rnnt_{number}"):
                torch.randn(9, 9) @ torch.randn(9, 9)
    averages = profiled.key_averages()
    text = profiler.table(averages, "self_cpu_time_total")
    rows = [row.key for row in averages]
    assert all(f" rnnt_{number} " in text for number in range(20))
    shown = [key for key in rows if f" {key} " in text]
    assert f"\n{len(rows) - len(shown)} rows" in text and len(shown) < len(rows)
    assert text.splitlines()[-2] == averages.table(row_limit=2).splitlines()[-1]  # sums are of all rows
    monkeypatch.setattr(profiler, "TABLE_ROWS", 200)
    assert "left out" not in profiler.table(averages, "self_cpu_time_total")


@pytest.fixture
def flags(tmp_path, tiny_shapes):
    where = ["--shape-file", tiny_shapes, "--log-dir", tmp_path]
    return ["--in-place", "--preset", "quick", *where, "--max-seconds", "0.05", "--limits", "false"]


@pytest.mark.thorough
def test_loops_in_python_are_not_profiled_and_not_warmed_up(tmp_path, flags):
    """A thousand profiler events for each cell: a real batch's would not fit the machine."""
    pytest.importorskip("warprnnt_numba", reason="this test measures warprnnt_numba for real")
    done = run("losses/benchmark_warprnnt_numba.py", *flags, "--passes", "all", "--device", "cpu", "--scope", "step")
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path)["warprnnt_numba"]
    samples = [line for line in records_of(tmp_path / "warprnnt_numba-2") if line["record"] == "sample"]
    assert samples and not any(sample.get("warmup") for sample in samples)
    assert row["status"] == "ok" and row["average_step_time_us"] is None
    assert row["memory"]["step"]["process_mb"] > 0 and row["memory"]["step"]["torch_allocated_mb"] is None
    assert "warprnnt_numba: no trace, and memory is the process's" in (tmp_path / "details.txt").read_text()
    assert not list((tmp_path / "warprnnt_numba-2").glob("*.pt.trace.json*"))


# Memory.


def test_what_a_loss_takes_past_torch_is_in_the_peak_of_the_process():
    def run(after_forward=lambda: None):
        torch.empty(8 * MIB, dtype=torch.uint8).fill_(1)
        return b"x" * (100 * MIB)

    peaks = memory.peaks(lambda: SimpleNamespace(run=run), torch.device("cpu"))
    assert 8 * MIB <= peaks["torch_allocated_bytes"] < 9 * MIB
    assert 90 * MIB < peaks["process_bytes"] - peaks["torch_allocated_bytes"] < 120 * MIB
