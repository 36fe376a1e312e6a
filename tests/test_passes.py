"""The passes on a CPU: which scopes and batches each round times, what a trace leaves in its folder, and memory
past torch's allocator."""

from __future__ import annotations

import gzip
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from commands import rows_of, run
from fixtures_runs import MIB, records_of

from common.core import settings
from common.losses import subject
from common.losses.passes import timing
from common.measure import memory, profiler
from common.system import machine

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


def test_forward_alone_makes_no_gradient_and_its_loss_is_judged(tiny_shapes):
    job = {"script": "losses.benchmark_reference", "variant": "", "pass": "timing", "round": 1}
    flags = {
        "preset": "quick",
        "shape_file": str(tiny_shapes),
        "mode": "forward",
        "max_samples": 4,
        "max_seconds": 0.05,
    }
    ready = subject.prepare(job, settings.resolve(flags, "cpu"))
    for scope in settings.SCOPES:
        taken = ready.step(scope, ready.batches[0])
        assert math.isfinite(taken.run()) and set(taken.gradients().values()) == {None}
    ends = [line for line in timing.run(ready) if isinstance(line, timing.Stop)]
    assert len(ends) == 2 and all(end.loss_error < 1e-4 for end in ends)
    assert not subject.prepare({**job, "pass": "correctness"}, settings.resolve(flags, "cpu")).forward_only


# Traces.


def two_traces(folder):
    for name, text in (("small", "s" * 10), ("large", "l" * 1000)):
        (folder / f"{name}.1.pt.trace.json").write_text(text)
    return folder


def test_large_traces_are_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "LARGE", 500)
    profiler.pack(two_traces(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"small.1.pt.trace.json", "large.1.pt.trace.json.gz"}
    assert gzip.decompress((tmp_path / "large.1.pt.trace.json.gz").read_bytes()).decode()[0] == "l"


def test_a_disk_that_fills_up_while_packing_costs_no_trace(tmp_path, monkeypatch):
    def full(source, target, length):
        target.write(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler.shutil, "copyfileobj", full)
    monkeypatch.setattr(profiler, "LARGE", 500)
    with pytest.raises(OSError, match="No space left"):
        profiler.pack(two_traces(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.1.pt.trace.json", "small.1.pt.trace.json"]


@pytest.fixture
def flags(tmp_path, tiny_shapes):
    chosen = ["--in-place", "--preset", "quick", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    return [*chosen, "--max-seconds", "0.05", "--limits", "false"]


def test_traces_of_a_real_run_are_recorded_and_read(tmp_path, flags):
    pytest.importorskip("torchaudio", reason="this test measures torchaudio for real")
    done = run("benchmark_torchaudio.py", *flags, "--passes", "timing,trace", "--scope", "step")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "torchaudio-2"
    (kept,) = [record for record in records_of(folder) if record["record"] == "trace"]
    assert kept["files"] == sorted(path.name for path in folder.glob("*.pt.trace.json*")) and len(kept["files"]) == 2
    others = kept["foreign_cpu"]  # None where the steps are too short to tell
    assert (others is None or 0 <= others <= 1) and kept["flags"] == machine.busy_flags(others)
    row = rows_of(tmp_path)["torchaudio"]
    assert row["status"] == "ok" and row["average_step_time_us"] > 0


@pytest.mark.thorough
def test_loops_in_python_are_not_profiled_and_not_warmed_up(tmp_path, flags):
    """A thousand profiler events for each cell: a real batch's would not fit the machine."""
    pytest.importorskip("warprnnt_numba", reason="this test measures warprnnt_numba for real")
    done = run("losses/benchmark_warprnnt_numba.py", *flags, "--passes", "all", "--device", "cpu", "--scope", "step")
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path)["warprnnt_numba"]
    lines = (tmp_path / "warprnnt_numba-2" / "results.jsonl").read_text().splitlines()
    samples = [line for line in map(json.loads, lines) if line["record"] == "sample"]
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
