"""Load of other processes: how it is measured, what it may be before times cannot be compared, and what is said."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import has_words, run
from fixtures_runs import correctness, memory, read_rows, status, summarize, timing, write_run

from common.analysis import ranking, verdict
from common.analysis.row import BESIDE_LOAD, Row
from common.cli import benchmark, flags
from common.cli.parser import Parser, add_choice
from common.jobs.executor import Executor, Interrupted
from common.system import cgroup, load, machine

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
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(load.time, "perf_counter_ns", lambda: next(ticks) * 10**9)
    monkeypatch.setattr(load.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(load, "_own_seconds", lambda: 0.0)


@pytest.mark.usefixtures("clock")
def test_only_the_cpus_that_this_process_may_use_count(tmp_path):
    stat = write_stat(tmp_path / "stat", 0, 0, 0, 0)
    mine, others, everything = (load.ForeignLoad(cpus, stat) for cpus in ({0, 1}, {2, 3}, {0, 1, 2, 3}))
    write_stat(stat, 0, 0, 15, 15)  # 30 seconds pass for each
    assert [watch.share() for watch in (mine, others, everything)] == [0.0, 0.5, 0.25]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "listed, files",
    [
        ("0::/box", {"box/cpu.max": "150000 100000", "cpu.max": "max 100000", "box/cpu.stat": "throttled_usec {us}"}),
        (
            "4:cpu,cpuacct:/box",
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/box/cpu.stat": "throttled_time {us}000",
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_of_a_cgroup_bounds_the_threads_and_its_throttling_is_load(listed, files, tmp_path, monkeypatch):
    """docker --cpus 1.5 on a machine of 8 CPUs."""

    def write(us):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.format(us=us))

    (tmp_path / "listed").write_text(f"{listed}\n")
    monkeypatch.setattr(cgroup, "LISTED", tmp_path / "listed")
    monkeypatch.setattr(cgroup, "TOP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    write(0)
    assert machine.cpu_count() == 2
    watch = load.ForeignLoad({0, 1}, write_stat(tmp_path / "stat", 0, 0))
    write(8_000_000)  # of 2 CPUs for 10 s
    assert watch.share() == pytest.approx(0.4)
    (tmp_path / "listed").unlink()
    assert machine.cpu_count() == 8


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
        text = load.disturbance(load.ForeignLoad(stat=Path("/proc/stat")))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert f"on {len(load.CPUS)} core" in text and "% of the CPU" in text


class OnABusyMachine(Executor):
    """Nothing can be measured, beside load that is made up."""

    def disturbance(self, settings):
        return "load 24 on 2 cores, others use 97% of the CPU"

    def execute(self, job, *_):
        return [job.status("missing", "no package")]


def benchmark_flags(*words):
    parser = Parser()
    add_choice(parser)
    flags.add_flags(parser)
    return parser.parse_args(["--in-place", "--preset", "quick", "--device", "cpu", *words])


@pytest.mark.parametrize("passes, warnings", [("correctness,timing", 1), ("correctness,memory", 0)])
def test_a_run_that_times_warns_of_a_busy_machine(passes, warnings, tmp_path, capsys):
    given = benchmark_flags("--passes", passes, "--log-dir", str(tmp_path / "log"))
    benchmark.benchmark(["reference"], given, executor=OnABusyMachine())
    assert capsys.readouterr().err.count("warning: load 24 on 2 cores") == warnings


# What is said of samples that ran beside load.

LOADED = {"flags": ["busy", "loaded"], "foreign_cpu": 0.9}


def measured(folder, name, step_ms, loaded=(), **head):
    """A run of a round for each time of a step, those whose number is in `loaded` beside other load."""
    rounds = [
        timing(f"timing-{number}", [ms, ms], [ms, ms], **(LOADED if number in loaded else {}))
        for number, ms in enumerate(step_ms, start=1)
    ]
    jobs = [correctness(), *rounds, memory(8), [status("trace")]]
    write_run(folder / name, name=name, jobs=jobs, run_id="one run", rounds=len(step_ms), **head)


def pruned(folder, step_ms, loaded=()):
    measured(folder, "fast_rnnt-pruned", step_ms, loaded, exact=False)


@pytest.fixture
def crowded(tmp_path):
    """Load in every round turned two losses around."""
    log = tmp_path / "log"
    measured(log, "torchaudio", [3000, 3100, 3200], loaded=(1, 2, 3))
    measured(log, "k2", [1000, 1010, 1020], loaded=(1, 2, 3))
    pruned(log, [2200, 2210, 2220], loaded=(1, 2, 3))
    return log


def test_no_winner_and_no_ratio_is_in_a_verdict_of_rounds_beside_load(crowded):
    text = summarize(crowded, details=False)
    table, _, ending = text.partition("VERDICT")
    assert "36 of 36 samples ran beside other load (others used 90% of the CPU)" in " ".join(table.split())
    assert ending.count("withheld") >= 2 and "fastest exact: withheld" in " ".join(ending.split())
    assert "x the time" not in ending
    assert "smallest exact" in ending  # which load does not change
    for name in ("torchaudio", "k2", "fast_rnnt-pruned"):
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        assert "busy" in line.split() and "fastest" not in line.split() and "slower" not in line.split()


def test_files_have_fields_for_it(crowded):
    for row in read_rows(crowded):
        assert row["status"] == "ok" and row["loaded_samples"] == 12 and row["others_cpu"] == pytest.approx(0.9)
        assert row["loaded_rounds"]["step"] == ["1", "2", "3"]
        assert row["against_fastest"]["beside_load"] and row["against_fastest"]["verdict"] == BESIDE_LOAD


def test_a_quiet_run_says_nothing_of_load(tmp_path):
    measured(tmp_path, "torchaudio", [300, 301, 302])
    measured(tmp_path, "k2", [100, 101, 102])
    text = summarize(tmp_path, details=False)
    assert "other load" not in text and "busy" not in text.split() and "fastest exact: k2" in " ".join(text.split())


def test_rounds_beside_load_are_left_out_where_three_others_are_there(tmp_path):
    measured(tmp_path, "torchaudio", [100, 101, 102, 4300], loaded=(4,))
    measured(tmp_path, "k2", [200, 201, 202, 3000], loaded=(4,))
    text = " ".join(summarize(tmp_path, details=False).split())
    assert has_words(text, "8 of 32 samples", "load") and "ratios leave these rounds out" in text
    assert "fastest exact: torchaudio" in text and has_words(text, "next", "k2", "1.99x")
    (k2,) = [row for row in read_rows(tmp_path) if row["name"] == "k2"]
    assert k2["against_fastest"]["rounds"] == 3 and not k2["against_fastest"]["beside_load"]


def test_a_loss_of_one_round_is_compared_where_only_other_rounds_were_loaded():
    """A loop in Python is measured in the first round alone."""
    medians = {"step": {str(number): {"0": 10.0} for number in range(1, 6)}}
    fast = Row("a", kind="exact", run_id="one", round_medians_ms=medians, loaded_rounds={"step": ["4", "5"]})
    slow = Row("b", kind="exact", run_id="one", round_medians_ms={"step": {"1": {"0": 500.0}}})
    (_, standing) = ranking.standings([fast, slow], "step")
    assert not standing.beside_load and not fast.is_beside_load("step")
    fast.loaded_rounds = {"step": ["1", "2", "3"]}
    (_, standing) = ranking.standings([fast, slow], "step")
    assert standing.beside_load and fast.is_beside_load("step")


def simulated(chance, loaded_rounds, flagged):
    """Rows of two losses of one run of ten rounds, the second 1.3 times slower; load slows the first 43 times and the
    second 15 times, as was seen on two cores."""
    rows = []
    for name, ms, slowed in (("a", 100.0, 43.0), ("b", 130.0, 15.0)):
        medians = {}
        for number in range(1, 11):
            crowded = number in loaded_rounds
            factor = chance.lognormvariate(0, 0.05) * (slowed * chance.lognormvariate(0, 0.3) if crowded else 1)
            medians[str(number)] = {"0": ms * factor}
        loaded = {"step": [str(number) for number in sorted(loaded_rounds)]} if flagged and loaded_rounds else {}
        rows.append(Row(name, kind="exact", run_id="one", round_medians_ms={"step": medians}, loaded_rounds=loaded))
    ranking.rank_times(rows)
    return rows


def named(rows):
    """The loss that a verdict names as the fastest; None where it names none."""
    pick = verdict.fastest(rows)
    return pick.row.name if pick.sure else None


@pytest.mark.parametrize("count", range(11))
def test_load_on_some_rounds_announces_no_wrong_winner(count):
    chance = random.Random(count)
    runs = [set(chance.sample(range(1, 11), count)) for _ in range(60)]
    winners = [named(simulated(chance, rounds, flagged=True)) for rounds in runs]
    assert "b" not in winners
    assert winners.count("a") >= 50 if count <= 7 else winners.count(None) == 60
    unaware = [named(simulated(chance, rounds, flagged=False)) for rounds in runs]
    assert ("b" in unaware) == (count >= 6)  # the load is enough to turn them around


# Rounds that are measured again.


class Shared(Executor):
    """Two losses on a machine that others use too.

    load_of: round -> for each time that it is measured, whether others are busy then; quiet after these.
    disturbed: how many looks find the machine busy before it is quiet.
    seen: (implementation, job) of each process.
    """

    def __init__(self, load_of, disturbed=0, fails=None):
        self.load_of = {number: list(busy) for number, busy in load_of.items()}
        self.disturbed, self.fails, self.seen, self.looks = disturbed, fails, [], 0

    def disturbance(self, settings, seconds=0.0):
        self.looks += 1
        if self.looks > self.disturbed + 1:  # the first look is before measuring
            return ""
        time.sleep(0.01)
        return "load 24 on 2 cores"

    def execute(self, job, *_):
        self.seen.append((job.implementation, job.name))
        if self.fails:
            self.fails(self)
        if job.pass_name != "timing":
            return {"correctness": correctness(), "memory": memory(8)}[job.pass_name]
        times = [name for _, name in self.seen].count(job.name)
        plan = self.load_of.get(job.round, [])
        busy = plan[(times - 1) // 2] if (times - 1) // 2 < len(plan) else False
        ms = 10 if job.implementation == "torchaudio" else 20
        return timing(job.name, [50 * ms if busy else ms] * 2, [ms] * 2, **(LOADED if busy else {}))

    def rounds(self):
        """Count how often each round of the first loss was measured."""
        names = [name for loss, name in self.seen if loss == "torchaudio" and name.startswith("timing")]
        return {name: names.count(name) for name in dict.fromkeys(names)}


def shared(tmp_path, on, *words):
    """The exit code of a benchmark of three rounds on such a machine."""
    given = benchmark_flags("--passes", "timing,memory", "--rounds", "3", "--limits", "false", *words)
    given.log_dir = tmp_path / "log"
    return benchmark.benchmark(["torchaudio", "k2"], given, executor=on)


def test_rounds_beside_load_are_measured_again_as_a_whole_when_the_machine_is_quiet(tmp_path, capsys):
    on = Shared({2: [True], 3: [True, True]}, disturbed=3)
    assert shared(tmp_path, on, "--wait", "60") == 0
    assert on.rounds() == {"timing-1": 1, "timing-2": 2, "timing-3": 3}
    assert {name for _, name in on.seen[-2:]} == {"timing-3"} and {loss for loss, _ in on.seen[-2:]} == {
        "torchaudio",
        "k2",
    }
    assert "rounds 2, 3 ran beside other load" in capsys.readouterr().err
    for row in read_rows(tmp_path / "log"):
        assert row["status"] == "ok" and row["loaded_samples"] == 0 and row["rounds"] == 3
    assert "fastest exact: torchaudio" in " ".join(summarize(tmp_path / "log", details=False).split())
    kept = (tmp_path / "log" / "k2-2" / "results.jsonl").read_text()
    assert kept.count('"loaded"') == 3 * 4  # of the first attempts: nothing is dropped


@pytest.mark.parametrize("words, again", [(["--wait", "0"], 0), ([], 0), (["--wait", "60"], 3)])
def test_at_most_as_many_rounds_again_as_were_planned(tmp_path, words, again):
    """The quick preset takes none again by itself."""
    on = Shared({number: [True] * 9 for number in (1, 2, 3)})
    shared(tmp_path, on, *words)
    assert sum(on.rounds().values()) == 3 + again
    assert "withheld" in summarize(tmp_path / "log", details=False)


def test_resume_measures_those_rounds_again_alone(tmp_path):
    shared(tmp_path, Shared({1: [True]}), "--wait", "0")
    on = Shared({})
    assert shared(tmp_path, on, "--wait", "60", "--resume") == 0
    assert {name for _, name in on.seen} == {"timing-1"} and len(on.seen) == 2
    assert "withheld" not in summarize(tmp_path / "log", details=False)


def test_what_was_measured_stays_where_a_round_again_is_stopped_or_fails(tmp_path):
    def stop(on):
        if on.seen[-1] == ("k2", "timing-1") and on.seen.count(("k2", "timing-1")) == 2:
            raise Interrupted([status("timing-1", "interrupted", "stopped by the user")])

    assert shared(tmp_path, Shared({1: [True]}, fails=stop), "--wait", "60") == 130
    assert {row["status"] for row in read_rows(tmp_path / "log")} == {"ok"}
    assert {row["rounds"] for row in read_rows(tmp_path / "log")} == {3}


# Comparisons.


def compared(tmp_path, loaded, names=("torchaudio", "k2")):
    """The lines of a comparison of two losses of one run of six rounds, the second 2.0 times slower in quiet rounds."""
    measured(tmp_path / "log", names[0], [100 * (43 if at in loaded else 1) for at in range(1, 7)], loaded)
    measured(tmp_path / "log", names[1], [200 * (15 if at in loaded else 1) + at for at in range(1, 7)], loaded)
    done = run("compare.py", "--in", str(tmp_path / "log"), *names)
    assert done.returncode == 0, done.stderr
    table, _, ending = done.stdout.partition("VERDICT")
    (row,) = [line.split() for line in table.splitlines() if line.startswith(f"{names[1]} ") and " step " in line]
    return row, " ".join(ending.split())


def test_a_comparison_leaves_out_rounds_beside_load(tmp_path):
    row, ending = compared(tmp_path, loaded={2, 5})
    assert "slower" in row and any(word.startswith("2.0") for word in row) and "beside load" not in ending


def test_a_comparison_of_rounds_beside_load_has_no_verdict(tmp_path):
    row, ending = compared(tmp_path, loaded={1, 2, 4, 5, 6})
    assert "beside" in row and "faster" not in row and "slower" not in row
    assert "beside load:" in ending and "samples ran beside other load" in ending.replace("new ones ran", "samples ran")
    assert "faster:" not in ending and "slower:" not in ending
