from __future__ import annotations

import math

import pytest
from commands import has_words
from fixtures_runs import (
    correctness,
    environment,
    one_row,
    read_rows,
    sample,
    status,
    summarize,
    timing,
    traced_run,
    write_run,
)
from fixtures_traces import MIB, REAL, kineto, span, steps, write
from fixtures_traces import memory as allocation

# One run.


def test_timing_memory_errors_and_cells_of_a_run(tmp_path):
    row = one_row(write_run(tmp_path / "torchaudio-30"))
    assert (row["name"], row["status"], row["reason"], row["exact"]) == ("torchaudio", "ok", "", True)
    assert row["step_ms"] == pytest.approx({"median": 25, "p20": 15, "p80": 35, "n": 4})
    assert row["loss_ms"] == pytest.approx({"median": 2.5, "p20": 1.5, "p80": 3.5, "n": 4})
    assert row["step_forward_ms"]["median"] == pytest.approx(10)
    assert row["stages"]["step"] == pytest.approx({"joiner": 2.5, "backward": 15})
    low, high = row["step_ms_interval"]  # of the rounds' medians 15 and 35: two logs, t(1) = 12.7062
    assert math.log(high / low) == pytest.approx(12.7062 * math.log(35 / 15))
    assert math.sqrt(low * high) == pytest.approx(math.sqrt(15 * 35))
    assert row["memory"]["step"] == {
        "device_allocated_mb": None,
        "device_reserved_mb": None,
        "device_used_mb": None,
        "torch_allocated_mb": 32,
        "process_mb": 64,
    }
    assert (row["padded_cells"], row["useful_cells"], row["useful_fraction"]) == (300, 150, 0.5)
    assert (row["loss_error"], row["grad_error"], row["rounds"], row["flagged_samples"]) == (1e-7, 2e-6, 2, 0)
    assert (row["device"], row["torch_version"], row["implementation_version"]) == ("cpu", "2.11.0+cpu", "1.4")
    assert row["configuration"]["batch_size"] == 30 and row["configuration"]["max_frames"] is None
    assert row["configuration"]["threads"] == 2 and row["configuration"]["shape_file_sha256"] == "abc"


def test_headline_of_a_light_and_a_heavy_batch(tmp_path):
    """The mean of what each batch takes, whatever the number of its samples; utterances and frames over their sum."""
    job = timing("timing-1", [10, 90, 11, 100, 12], [1])
    batches = [{**batch, "frames": 15} for batch in environment("timing-1")["batches"]]
    job[0] = environment("timing-1", batches=batches)
    row = one_row(write_run(tmp_path / "a", jobs=[job], passes=["timing"], rounds=1))
    assert row["step_ms"]["median"] == pytest.approx((11 + 95) / 2) and row["step_ms"]["p80"] < 1.1 * 53
    assert row["utterances_per_second"] == pytest.approx(4 / 0.106)
    assert row["frames_per_second"] == pytest.approx(30 / 0.106)
    assert row["stages"]["step"]["joiner"] == pytest.approx(5.3)


def test_cuda_step_is_wall_time_and_events_stand_beside_it(tmp_path):
    lines = [
        environment("timing-1", device="cuda", device_name="NVIDIA H200"),
        sample("timing-1", "step", 4, 10, forward_wall_ns=None, forward_event_ns=3_000_000, total_event_ns=9_000_000),
        status("timing-1"),
    ]
    peaks = [
        environment("memory"),
        {
            "record": "memory",
            "job": "memory",
            "scope": "step",
            "batch": 4,
            "device_allocated_bytes": 3 * MIB,
            "device_reserved_bytes": 6 * MIB,
            "torch_allocated_bytes": None,
            "process_bytes": None,
        },
        status("memory"),
    ]
    write_run(tmp_path / "a", jobs=[lines, peaks], passes=["timing", "memory"], rounds=1, device="cuda")
    row = one_row(tmp_path / "a")
    assert (row["step_ms"]["median"], row["step_event_ms"]["median"], row["step_forward_ms"]["median"]) == (10, 9, 3)
    assert row["step_ms_interval"] is None
    assert row["memory"]["step"]["device_allocated_mb"] == 3 and row["memory"]["step"]["process_mb"] is None


def test_only_jobs_that_ended_well_are_timed(tmp_path):
    lost = [environment("timing-2"), sample("timing-2", "step", 4, 500)]
    jobs = [
        correctness(),
        timing("timing-1", [10, 20], [1, 2]),
        [*lost, status("timing-2", "oom", "out of memory: 3 GB")],
    ]
    row = one_row(write_run(tmp_path / "a", jobs=jobs))
    assert row["step_ms"]["n"] == 2 and row["rounds"] == 1
    assert (row["status"], row["reason"]) == ("oom", "timing-2: out of memory: 3 GB")


@pytest.mark.parametrize(
    "jobs, expected, reason",
    [
        ([[status("correctness", "missing", "pip install k2")]], "missing", "pip install k2"),
        (
            [[status("correctness", "unsupported", "no CUDA")], [status("memory", "missing", "x")]],
            "unsupported",
            "no CUDA",
        ),
        (
            [correctness(), [status("timing-1", "timeout", "600 s")], [status("memory", "oom", "x")]],
            "timeout",
            "timing-1: 600 s",
        ),
        ([correctness(), [status("timing-1", "interrupted", "Ctrl-C")]], "interrupted", "timing-1: Ctrl-C"),
        (
            [correctness(), timing("timing-1", [1], [1])],
            "interrupted",
            "stopped before: 1 of 2 timing rounds, memory, trace",
        ),
        ([correctness(), timing("timing-1", [1], [1])[:-1]], "interrupted", "timing-1: stopped before its end"),
        ([], "interrupted", "stopped before: correctness, 2 of 2 timing rounds, memory, trace"),
        ([correctness(ok=False)], "interrupted", None),
        ([[status("correctness", "some new word", "x")]], "error", "correctness: x"),
    ],
)
def test_the_worst_job_is_the_status(tmp_path, jobs, expected, reason):
    row = one_row(write_run(tmp_path / "a", jobs=jobs))
    assert row["status"] == expected
    assert reason is None or row["reason"] == reason
    assert expected in summarize(tmp_path / "a")


def test_a_wrong_loss_is_an_error_even_when_its_job_ended(tmp_path):
    row = one_row(write_run(tmp_path / "a", jobs=[correctness(ok=False, grad_error=1e300)], passes=["correctness"]))
    assert row["status"] == "error" and "oracle" in row["reason"]
    assert " inf" in summarize(tmp_path / "a")


def test_an_imprecise_row_is_called_so_and_is_no_error(tmp_path):
    sizes = {"batch": 0, "N": 2, "T_max": 9, "U_max": 4}
    judged = {"loss_error": 5e-4, "grad_error": 1e-6, "grad_tolerance": 1e-4, "imprecise": 5e-4, "ok": True}
    folder = write_run(tmp_path / "a", jobs=[correctness(at_size={**sizes, **judged})], passes=["correctness"])
    row = one_row(folder)
    assert row["imprecise"] == 5e-4 and row["status"] == "ok"
    text = summarize(folder)
    assert " imprecise " in text and has_words(text, "imprecise", "5.0e-04")
    assert ",0.0005," in summarize(folder, "--format", "csv", "--all-columns")


# Profiled numbers.


def test_windows_average_first_peak_and_inflation(tmp_path):
    first = kineto(
        steps([100, 200], first=1)
        + [allocation(1, 4 * MIB, 4), allocation(2, 16 * MIB, 12), allocation(3, 4 * MIB, -12)]
    )
    second = kineto(steps([300, 400], first=4) + [allocation(1, 32 * MIB)])
    row = one_row(traced_run(tmp_path / "a", first, second))
    assert row["status"] == "ok"
    assert [
        (window["average_step_time_us"], window["steps"], window["peak_memory_mb"]) for window in row["windows"]
    ] == [(150, 2, 16.0), (350, 2, 32.0)]
    assert (row["average_step_time_us"], row["peak_memory_mb"]) == (250, 16.0)
    assert any("first window only" in note for note in row["notes"])
    # Warm-up 1, active 2, two batches: steps 1, 2, 4, 5 run batches 9, 4, 4, 9 of 200, 100, 100, 200 us unprofiled.
    assert row["profiler_inflation"] == pytest.approx(250 / 150)


def test_cuda_peak_is_the_highest_of_all_windows(tmp_path):
    texts = [
        kineto(steps([100]) + [allocation(1, peak * MIB, device_type=1, device_id=0), allocation(2, 99 * MIB)])
        for peak in (2, 5, 3)
    ]
    row = one_row(traced_run(tmp_path / "a", *texts))
    assert row["peak_memory_mb"] == 5 and not any("first window" in note for note in row["notes"])


@pytest.mark.parametrize("damage", ["cut", "gone", "no steps"])
def test_a_broken_trace_costs_only_the_profiled_numbers_of_its_row(tmp_path, damage):
    good = kineto(steps([100, 200]))
    traced_run(tmp_path / "broken", good, good, name="k2")
    traced_run(tmp_path / "whole", good, good)
    bad = tmp_path / "broken" / "w.10.pt.trace.json"
    {
        "cut": lambda: bad.write_text(good[: len(good) // 2]),
        "gone": bad.unlink,
        "no steps": lambda: bad.write_text(kineto([allocation(1, 1)])),
    }[damage]()
    broken, whole = read_rows(tmp_path)
    assert broken["status"] == "error" and "w.10.pt.trace.json" in broken["reason"]
    assert (
        broken["average_step_time_us"] is None
        and broken["peak_memory_mb"] is None
        and broken["profiler_inflation"] is None
    )
    assert broken["windows"][0]["average_step_time_us"] == 150 and broken["windows"][1]["average_step_time_us"] is None
    assert broken["step_ms"]["n"] == 4 and broken["memory"]["step"]["torch_allocated_mb"] == 8
    assert whole["status"] == "ok" and whole["average_step_time_us"] == 150
    assert "w.10.pt.trace.json" in summarize(tmp_path)


@pytest.mark.parametrize("version", ["1.13.1", "2.11.0"])
def test_real_traces_of_someone_else(version):
    folder = REAL / f"torch-{version}"
    row = one_row(folder)
    assert (row["name"], row["status"], row["device"], row["step_ms"]) == (f"torch-{version}", "ok", "cpu", None)
    assert len(row["windows"]) == 2 and all(window["steps"] == 2 for window in row["windows"])
    means = [window["average_step_time_us"] for window in row["windows"]]
    assert row["average_step_time_us"] == pytest.approx(sum(means) / 2)
    assert row["peak_memory_mb"] == 648 / MIB
    assert set(row["profiled_stages_us"]) == {"joiner", "loss", "backward"}
    assert row == one_row(sorted(folder.iterdir())[0], sorted(folder.iterdir())[1])


def test_a_stub_alone_in_the_last_window_is_left_out(tmp_path):
    for number, (durations, operators) in enumerate((([100, 200], 40), ([4], 2))):
        write(tmp_path / "a" / f"w.{number}.pt.trace.json", kineto(steps(durations, number * 2 + 1, operators)))
    row = one_row(tmp_path / "a")
    assert row["average_step_time_us"] == 150 and row["windows"][1]["steps"] == 0
    assert "stub step: ProfilerStep#3" in row["notes"][0]


def like_a_stub(first, step=100):
    """A window whose last step looks cut off: a tenth as long as the other, with none of its operators."""
    return kineto([*steps([step], first=first), span(f"ProfilerStep#{first + 1}", 2 * step + 2000, step / 10)])


def test_a_window_after_which_the_loop_went_on_has_no_stub(tmp_path):
    for number, first in enumerate([1, 4, 1]):  # the last is of another loop, which was started anew
        write(tmp_path / "a" / f"w.{number}.pt.trace.json", like_a_stub(first))
    row = one_row(tmp_path / "a")
    assert [window["steps"] for window in row["windows"]] == [2, 1, 1]
    assert "cut off" not in str(row["windows"][0]) and "cut off" in str(row["windows"][1])


def test_a_run_of_this_suite_has_no_stub(tmp_path):
    """Its loop runs all its steps, or there is no record of the traces."""
    row = one_row(traced_run(tmp_path / "a", like_a_stub(1), like_a_stub(4)))
    assert [window["steps"] for window in row["windows"]] == [2, 2]
    (row,) = read_rows(traced_run(tmp_path / "b", kineto(steps([100])), kineto(steps([4], operators=0))))
    assert row["average_step_time_us"] == 52 and "stub" not in str(row["notes"])


def test_workers_are_rows_of_their_own(tmp_path):
    write(tmp_path / "a" / "host_1.5.pt.trace.json", kineto(steps([100])))
    write(tmp_path / "a" / "host_2.5.pt.trace.json", kineto(steps([300])))
    write(tmp_path / "a" / "host_2.6.pt.trace.json", kineto(steps([500])))
    times = {row["name"]: row["average_step_time_us"] for row in read_rows(tmp_path)}
    assert times == {"a host_1": 100, "a host_2": 400}
