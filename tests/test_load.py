"""Load of other processes: how it is measured, what it may be before times cannot be compared, and what is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT

from common.cli import benchmark, flags, inference, pipeline, profile
from common.cli.parser import Parser, add_choice
from common.core.guard import guarded
from common.jobs.executor import Executor
from common.system import load

TICKS = os.sysconf("SC_CLK_TCK")
#: What keeps one core busy, for at most 20 s.
BUSY_LOOP = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def write_stat(path, *busy_seconds):
    """A stand-in for /proc/stat: seconds that each CPU was busy."""
    ticks = [round(seconds * TICKS) for seconds in busy_seconds]
    rows = [f"cpu  {sum(ticks)} 0 0 9 0 0 0 0 0 0"]
    rows += [f"cpu{number} {count} 0 0 9 0 0 0 0 0 0" for number, count in enumerate(ticks)]
    path.write_text("\n".join([*rows, "intr 1 2 3", ""]))
    return path


@pytest.fixture
def clock(monkeypatch):
    """Ten seconds between two looks, in which this process uses no CPU; no sleep takes time."""
    looks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(load.time, "perf_counter_ns", lambda: next(looks) * 10**9)
    monkeypatch.setattr(load.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(load, "_own_seconds", lambda: 0.0)


@pytest.mark.usefixtures("clock")
def test_only_the_cpus_that_this_process_may_use_count(tmp_path):
    stat = write_stat(tmp_path / "stat", 0, 0, 0, 0)
    mine, others, everything = (load.ForeignLoad(cpus, stat) for cpus in ({0, 1}, {2, 3}, {0, 1, 2, 3}))
    write_stat(stat, 0, 0, 15, 15)  # 30 seconds pass for each
    assert [watch.share() for watch in (mine, others, everything)] == [0.0, 0.5, 0.25]


@pytest.mark.usefixtures("clock")
def test_a_system_that_tells_of_all_cpus_together_or_nothing(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 9 0 0 0 0\n")
    watch = load.ForeignLoad({0, 1}, stat)
    stat.write_text(f"cpu  {10 * TICKS} 0 0 9 0 0 0 0\n")
    assert watch.share() == pytest.approx(0.5)
    assert load.ForeignLoad({0}, tmp_path / "none").share() is None


@pytest.mark.parametrize(
    "share, threads, cpus, physical, flags",
    [
        (None, None, 2, 2, []),
        (0.04, 2, 2, 2, []),
        (0.06, 2, 2, 2, ["busy"]),
        (0.11, 2, 2, 2, ["busy", "loaded"]),  # more than 0.2 cores
        (0.11, None, 2, 2, ["busy", "loaded"]),  # nothing is free where threads are not known
        (0.005, 64, 64, 64, []),  # 0.3 cores: what a large server does beside
        (0.02, 64, 64, 64, ["busy"]),  # one busy loop: one of 64 threads waits
        (0.04, 32, 64, 32, ["busy", "loaded"]),  # hyper-threads are no cores
        (0.04, 8, 64, 32, []),  # others have 2.6 cores, 24 are free
        (0.5, 8, 64, 32, ["busy", "loaded"]),
        (0.3, 1, 64, 64, []),  # a GPU computes
        (0.4, 1, 2, 2, ["busy"]),  # one loop beside one thread on two cores
    ],
)
def test_load_is_judged_by_the_cores_that_a_step_needs(share, threads, cpus, physical, flags):
    assert load.busy_flags(share, threads, cpus, physical) == flags


def test_hyper_threads_of_one_core_count_once(tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert load.cores({0, 1, 2, 3}, tmp_path) == 2 and load.cores({0, 1}, tmp_path) == 2
    assert load.cores({0, 1, 9}, tmp_path) == 3  # where the system does not tell of one


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("busy, average, words", [(0, 0.1, ""), (0, 24.0, ""), (9, 24.0, "load 24 on 2 cores")])
def test_what_is_said_before_measuring(tmp_path, busy, average, words):
    """A load average alone may be that of the user's own set-up, which has ended."""
    (tmp_path / "loadavg").write_text(f"{average} 1.0 1.0 3/103 8865\n")
    stat = write_stat(tmp_path / "stat", 0, 0)
    watch = load.ForeignLoad({0, 1}, stat)
    write_stat(stat, 2 * busy, 2 * busy)
    assert load.disturbance(watch, threads=2).startswith(words) and bool(words) == bool(busy)


def test_a_real_busy_loop_is_seen():
    """One for each CPU that this process may use."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in load.CPUS]
    try:
        time.sleep(0.3)  # they start
        said = load.disturbance(load.ForeignLoad(stat=Path("/proc/stat")))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert f"on {len(load.CPUS)} core" in said and "% of the CPU" in said


class OnABusyMachine(Executor):
    """Nothing can be measured, beside load that is made up."""

    def disturbance(self, settings):
        return "load 24 on 2 cores, others use 97% of the CPU"

    def execute(self, job, *_):
        return [job.status("missing", "no package")]


class Elsewhere(OnABusyMachine):
    here = False
    disturbance = Executor.disturbance


def benchmark_flags(*words):
    parser = Parser()
    add_choice(parser)
    flags.add_flags(parser)
    return parser.parse_args(["--in-place", "--preset", "quick", "--device", "cpu", "--quiet", *words])


COMMANDS = {
    "benchmark": lambda log, on: benchmark.benchmark(["reference"], benchmark_flags("--log-dir", log), executor=on),
    "sweep": lambda log, on: benchmark.benchmark(
        ["reference"], benchmark_flags("--sweep", "vocab-size=8,16", "--log-dir", log), executor=on
    ),
    "profile": lambda log, on: profile.main(profile.parser().parse_args(["--device", "cpu", "--log-dir", log]), on),
    "inference": lambda log, on: inference.main(
        *inference.parsed([str(ROOT / "profile.yaml"), "--device", "cpu", "--log-dir", log]), on
    ),
    "pipeline": lambda log, on: pipeline.main(
        pipeline.parser().parse_args(["--config", str(ROOT / "pipeline.yaml"), "--device", "cpu", "--log-dir", log]), on
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_time_warn_of_a_busy_machine_before_they_measure(name, tmp_path, capsys):
    guarded(name, lambda: COMMANDS[name](str(tmp_path / "log"), OnABusyMachine()))
    said = capsys.readouterr().err
    assert said.count("warning: load 24 on 2 cores") == 1 and "quiet" in said
    assert "Traceback" not in said


def test_load_of_this_machine_says_nothing_of_a_cluster(tmp_path, capsys):
    guarded("x", lambda: COMMANDS["benchmark"](str(tmp_path / "log"), Elsewhere()))
    assert "warning: load" not in capsys.readouterr().err


def test_nothing_is_said_of_load_where_nothing_is_timed(tmp_path, capsys):
    given = benchmark_flags("--passes", "correctness,memory", "--log-dir", str(tmp_path / "log"))
    benchmark.benchmark(["reference"], given, executor=OnABusyMachine())
    assert "warning: load" not in capsys.readouterr().err
