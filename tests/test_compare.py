"""`rnnt-bench compare`: verdicts on real samples (tests/data/compare/README.md), output, refusals, codes, its page."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean, median

import pytest
from msgspec.structs import replace
from rnnt_bench.analysis import comparison, measured
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import statistics
from rnnt_bench.records import schema, store

from browsers import unpacked
from commands import assert_user_error, has_words, run
from fixtures_runs import (
    change,
    correctness,
    environment,
    memory,
    records_of,
    status,
    timed,
    timing,
    write_records,
    write_run,
)

DATA = Path(__file__).parent / "data" / "compare"
NAMES = ("torchaudio", "optimized_transducer")


@pytest.fixture
def seeds(thorough):
    return range(200 if thorough else 40)


@cache
def real(load, name):
    path = DATA / load / f"{name}.jsonl"
    return measured.row_of(store.read(path), path.parent, traces=False)


def timing_jobs(run):
    return [lines for job, lines in run.jobs.items() if job.startswith("timing-")]


def drawn(run, rounds, run_id, factor=1.0, calm=False):
    """A run of these rounds of `run`, counted anew, its times multiplied.  calm: without what is known of the load."""

    def copy(line, number):
        changed = {"job": f"timing-{number}"}
        if isinstance(line, schema.Sample):
            changed.update(round=number, total_wall_ns=line.total_wall_ns * factor, flags=[] if calm else line.flags)
        return replace(line, **changed)

    lines = [copy(line, number) for number, lines in enumerate(rounds, start=1) for line in lines]
    return measured.row_of([replace(run.header, run_id=run_id), *lines], run.folder, traces=False)


def separate_runs(run, seed, rounds, **options):
    """Two groups of rounds that have nothing to do with each other."""
    chosen = random.Random(seed).sample(timing_jobs(run), 2 * rounds)
    return comparison.Pair(
        drawn(run, chosen[:rounds], "one", calm=True), drawn(run, chosen[rounds:], "other", calm=True, **options)
    )


def in_alternation(run, seed, rounds, **options):
    """Neighbouring rounds as pairs, either of them the baseline's, as one run measures them."""
    luck, jobs = random.Random(seed), timing_jobs(run)
    pairs = luck.sample([jobs[start : start + 2] for start in range(0, len(jobs) - 1, 2)], rounds)
    for pair in pairs:
        luck.shuffle(pair)
    return comparison.Pair(
        drawn(run, [first for first, _ in pairs], "x"), drawn(run, [two for _, two in pairs], "x", **options)
    )


def verdicts(pairs, **options):
    """Count each verdict, over both scopes; of two separate runs, which are unclear alone, that of the interval."""
    rows = [row for pair in pairs for row in comparison.compare([pair], **options)]
    return Counter(verdict_of(time) for row in rows for time in row.time.values())


def verdict_of(time):
    return time.verdict if time.paired else statistics.verdict(time.low, time.high, time.margins.tolerance)


def changes(verdict):
    """Share of the verdicts that claim a change."""
    return (verdict["faster"] + verdict["slower"]) / sum(verdict.values())


@pytest.mark.parametrize("draw", [separate_runs, in_alternation])
@pytest.mark.parametrize("rounds", [3, 10])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("load", ["one-thread", "two-threads"])
def test_the_same_code_is_not_found_changed(load, name, rounds, draw, seeds):
    """False alarms: at most 5%, with the default tolerance and with none that would help."""
    pairs = [draw(real(load, name), seed, rounds) for seed in seeds]
    assert changes(verdicts(pairs)) <= 0.05
    assert changes(verdicts(pairs, tolerance=1e-9)) <= 0.05


def quieter(run, spread):
    """The run with all deviations from a batch's median shrunk alike, so that rounds deviate by `spread` (0.01: 1%)."""
    samples = [line for lines in timing_jobs(run) for line in lines if isinstance(line, schema.Sample)]
    centers = {key: median([line.total_wall_ns for line in mine]) for key, mine in by_batch(samples).items()}
    rounds = by_batch(samples, "round")
    deviations = []
    for (*key, _), mine in rounds.items():
        deviations.append(math.log(median([line.total_wall_ns for line in mine]) / centers[tuple(key)]))
    power = spread / math.sqrt(fmean([deviation**2 for deviation in deviations]))

    def shrunk(line):
        if not isinstance(line, schema.Sample):
            return line
        center = centers[line.scope, line.batch]
        return replace(line, total_wall_ns=center * (line.total_wall_ns / center) ** power)

    lines = [shrunk(line) for lines in run.jobs.values() for line in lines]
    return measured.row_of([run.header, *lines], run.folder, traces=False)


def by_batch(samples, *batches):
    medians = {}
    for line in samples:
        medians.setdefault(tuple(getattr(line, key) for key in ("scope", "batch", *batches)), []).append(line)
    return medians


@pytest.mark.parametrize("draw, rounds", [(separate_runs, 12), (in_alternation, 10)])
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_slowdown_of_3_percent_is_found_when_the_spread_allows_it(name, draw, rounds, seeds):
    """Rounds that deviate by 1% and a tolerance of 1%: the spread allows it where the interval is within +-1%."""
    run, counts, narrow = quieter(real("one-thread", name), 0.01), Counter(), 0
    for seed in seeds:
        (row,) = comparison.compare([draw(run, seed, rounds, factor=1.03)], tolerance=0.01)
        for time in row.time.values():
            if math.log(time.high / time.low) <= 0.02:
                narrow += 1
                counts[verdict_of(time)] += 1
    assert narrow >= len(seeds) / 4 and counts["slower"] >= 0.9 * narrow and counts["faster"] == counts["same"] == 0


def test_a_planted_slowdown_below_the_spread_is_not_guessed(seeds):
    """3% cannot be seen beside all that load; nothing is claimed, least of all that it is faster."""
    run = real("two-threads", "torchaudio")
    counts = verdicts([in_alternation(run, seed, 10, factor=1.03) for seed in seeds])
    assert changes(counts) <= 0.05 and counts["faster"] <= 0.025 * sum(counts.values())


@pytest.mark.parametrize(
    "ratio, exact, verdict",
    [(1.0, True, "same"), (1.05, True, "more"), (0.9, True, "less"), (1.05, False, "same"), (1.2, False, "more")],
)
def test_memory(ratio, exact, verdict):

    def side(peak):
        counters = {"device_allocated": {}, "torch_allocated": {"0": peak} if exact else {}, "process": {"0": peak}}
        return Row("a", peaks_mb={"step": counters})

    (change,) = comparison.compare([comparison.Pair(side(100.0), side(100 * ratio))], ["step"])
    assert change.memory["step"].verdict == verdict
    (change,) = comparison.compare([comparison.Pair(side(0.0), side(0.0))], ["step"])
    step = change.memory["step"]
    assert (step.verdict, step.counter) == ("unclear", "torch_allocated_bytes" if exact else "process_bytes")


@pytest.mark.parametrize(
    "baseline, new, expected",
    [
        ((1e-7, 2e-6), (2e-7, 3e-6), "same"),
        ((1e-9, 2e-6), (9e-7, 2e-6), "same"),  # rounding
        ((1e-7, 2e-6), (1e-7, 5e-5), "worse"),
        ((1e-7, 5e-5), (1e-7, 2e-6), "better"),
        ((2e-5, 2e-6), (1e-7, 5e-5), "unclear"),
        ((1e-7, 2e-6), (1e-7, 5e-3), "wrong"),
        ((1e-7, 5e-3), (1e-7, 2e-6), "better"),
        ((1e-7, 5e-3), (1e-7, 5e-3), "wrong"),
        (None, (1e-7, 2e-6), "unclear"),
    ],
)
def test_errors(baseline, new, expected):
    def side(errors):
        of = errors and {"loss_error": errors[0], "grad_error": errors[1], "tolerance": 1e-4, "ok": max(errors) < 1e-4}
        return Row("a", checked=schema.Correctness(**(of or {})))

    (change,) = comparison.compare([comparison.Pair(side(baseline), side(new))])
    assert change.errors.verdict == expected


ROUNDS = [0.98, 1.0, 1.02, 1.01, 0.99]
BATCH = environment("")["batches"][0]


def written(folder, factor=1.0, rounds=ROUNDS, flags=(), jobs=(), name="torchaudio", run_id=None, **settings):
    """A run of steps of 100 ms and losses of 10 ms times `factor`, with the spread of ROUNDS."""
    results = [correctness(), memory(8, 32)]
    for number, luck in enumerate(rounds, start=1):
        step, loss = 100 * factor * luck, 10 * factor * luck
        results.append(timing(f"timing-{number}", [step, step], [loss, loss], flags=flags))
    write_run(folder, name, [*results, *jobs], rounds=len(rounds), **settings)
    change(folder, "run", run_id=run_id or str(folder))
    return folder


def compare(*arguments, code=0):
    done = run("rnnt-bench", "compare", "--details", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def rows(*arguments, code=0):
    return json.loads(compare(*arguments, "--format", "json", code=code).stdout)


def test_two_run_folders(tmp_path):
    before, after = written(tmp_path / "a"), written(tmp_path / "b", 1.5)
    (row,) = rows(before, after)
    step = row["time"]["step"]
    assert step["verdict"] == "slower" and step["ratio"] == pytest.approx(1.5) and step["low"] > 1.4
    assert (step["baseline_rounds"], step["new_rounds"], step["batches"], step["paired"]) == (5, 5, 2, False)
    assert row["memory"]["step"]["verdict"] == "same" and row["errors"]["verdict"] == "same"
    assert row["confidence"] == pytest.approx(0.975)  # two intervals, 95% together
    assert rows(after, before)[0]["time"]["loss"]["verdict"] == "faster"
    assert rows(before, before / "results.jsonl")[0]["time"]["step"]["verdict"] == "same"


def test_the_exit_code_for_ci(tmp_path):
    before, slow, broken = written(tmp_path / "a"), written(tmp_path / "b", 1.5), tmp_path / "c"
    compare(before, slow)
    compare(before, slow, "--fail-on-slower", "60%")
    compare(slow, before, "--fail-on-slower", "2%")
    done = compare(before, slow, "--fail-on-slower", "2%", code=1)
    assert "torchaudio step: slower by at least" in done.stderr and "not decided" not in done.stderr
    assert compare(slow, before, "--fail-on-slower", "2%", "--strict").stderr == ""
    assert "by up to" in compare(before, slow, "--fail-on-slower", "49%", "--strict", code=3).stderr
    # the ratio is above 45%, its interval not wholly: no failure
    assert rows(before, slow, "--fail-on-slower", "49%")[0]["time"]["step"]["ratio"] > 1.49

    write_run(broken, "torchaudio", [[environment("correctness"), status("correctness", "oom", "too big")]])
    done = compare(before, broken, "--fail-on-slower", "2%", code=1)
    assert has_words(done.stderr, "baseline", "oom")
    assert has_words(done.stdout, "new", "oom", "too big")
    compare(before, broken)


def test_what_is_not_there_any_more_fails_unless_it_was_left_out_on_purpose(tmp_path):
    sides = tmp_path / "a", tmp_path / "b"
    for side in sides:
        written(side / "torchaudio-30")
        written(side / "ot-30", name="optimized_transducer")
    for name in ("k2", "warp-rnnt"):
        written(sides[0] / f"{name}-30", name=name)
    write_run(sides[0] / "apex-30", "apex", [[environment("correctness"), status("correctness", "missing", "no apex")]])
    strict = *sides, "--fail-on-slower", "50%"
    done = compare(*strict, code=1)
    assert has_words(done.stderr, "k2, warp-rnnt", "baseline") and "apex" not in done.stderr
    assert has_words(done.stdout, "apex, k2, warp-rnnt", "baseline only")
    compare(*sides)
    (advised,) = re.findall(r"compare with (--only) (\S+)", done.stderr)
    assert "k2" not in compare(*strict, *advised).stdout
    assert [row["name"] for row in rows(*strict, "--only", "torchaudio")] == ["torchaudio"]
    assert "k2: measured at the baseline" in compare(*strict, "--only", "torchaudio,k2", code=1).stderr
    assert_user_error(run("rnnt-bench", "compare", *sides, "--only", "k3"), "--only k3", "torchaudio")
    assert_user_error(
        run("rnnt-bench", "compare", *sides, "--only", "k2"), "no implementation is in both", "a has k2", "b has none"
    )


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_what_neither_side_could_measure_is_one_line(tmp_path, format):
    for side in ("a", "b"):
        written(tmp_path / side / "torchaudio-30")
        for name in ("apex", "awni"):
            failed = [environment("correctness"), status("correctness", "missing", "pip install it")]
            write_run(tmp_path / side / f"{name}-30", name, [failed])
    text = compare(tmp_path / "a", tmp_path / "b", "--format", format).stdout
    assert [line for line in text.splitlines() if "apex" in line or "awni" in line or "pip" in line] == [
        ("- " if format == "markdown" else "") + "measured on neither side: apex, awni"
    ]
    assert len(rows(tmp_path / "a", tmp_path / "b")) == 3
    # alone, it says why
    assert "pip install it" in compare(tmp_path / "a" / "apex-30", tmp_path / "b" / "apex-30").stdout


def test_log_folders_are_paired_by_implementation_and_settings(tmp_path):
    for side, factor in (("a", 1), ("b", 1.5)):
        written(tmp_path / side / "torchaudio-30", factor)
        written(tmp_path / side / "torchaudio-max-frames-10000", 1 / factor, sort_utterance=True)
        written(tmp_path / side / "k2-30", name="k2")
    written(tmp_path / "b" / "ot-30", name="optimized_transducer")
    compared = rows(tmp_path / "a", tmp_path / "b")
    verdicts = sorted((row["name"], row["time"]["step"]["verdict"]) for row in compared)
    assert verdicts == [("k2", "unclear"), ("torchaudio", "faster"), ("torchaudio", "slower")]
    assert "optimized_transducer: on the new side only" in compare(tmp_path / "a", tmp_path / "b").stdout


def test_two_implementations_of_one_run_are_paired_by_round(tmp_path):
    drifting = [1, 2, 4, 8]
    written(tmp_path / "torchaudio-30", 1, drifting, run_id="x")
    written(tmp_path / "k2-30", 1.1, drifting, run_id="x", name="k2")
    (row,) = rows("--in", tmp_path, "torchaudio", "k2")
    step = row["time"]["step"]
    assert row["name"] == "k2 against torchaudio" and step["paired"] and step["verdict"] == "slower"
    assert (step["ratio"], step["low"], step["high"]) == pytest.approx((1.1, 1.1, 1.1))
    assert "rounds paired" in compare("--in", tmp_path, "torchaudio", "k2").stdout
    assert_user_error(run("rnnt-bench", "compare", "--in", tmp_path, "torchaudio", "warp"), "warp", "k2, torchaudio")


def test_the_run_that_has_both_is_preferred_to_the_newest_of_each(tmp_path):
    written(tmp_path / "torchaudio-30", run_id="x")
    written(tmp_path / "k2-30", 2, run_id="x", name="k2")
    written(tmp_path / "k2-30.2", 7, name="k2", started="2027-01-01T00:00:00+00:00")
    assert rows("--in", tmp_path, "torchaudio", "k2")[0]["time"]["step"]["ratio"] == pytest.approx(2)


@pytest.mark.parametrize(
    "settings, other, words",
    [
        ({"dtype": "bfloat16"}, {}, "dtype float32 / bfloat16"),
        ({"vocab_size": 50}, {}, "vocabulary 500 / 50"),
        ({"batches": "longest"}, {}, "choice of batches first / longest"),
        ({}, {"shape_file_sha256": "fed"}, "shape file sha256 abc / sha256 fed"),
        ({}, {"device": "cuda", "device_name": "H200"}, "device cpu / cuda"),
        ({}, {"threads": 8}, "threads 2 / 8"),
        ({}, {"denormals": "keep"}, "denormals flush / keep"),
        ({}, {"batches": [{**BATCH, "useful_cells": 1}]}, "batches 2 from 4"),
    ],
)
def test_other_settings_and_environments_are_refused(settings, other, words, tmp_path):
    before, after = written(tmp_path / "a"), written(tmp_path / "b", **settings)
    change(after, "environment", **other)
    done = run("rnnt-bench", "compare", before, after)
    assert_user_error(done, "not comparable", words, before, after)
    assert done.stdout == ""


def test_another_gpu_and_another_cpu_are_refused(tmp_path):
    sides = [written(tmp_path / side) for side in "ab"]
    for machines, words in (
        (({"cpu": "EPYC"}, {"cpu": "Xeon"}), "machine EPYC, 2 cores / Xeon, 2 cores"),
        (({"cpu": "EPYC"}, {"cpu": "EPYC", "cores": 64}), "machine EPYC, 2 cores / EPYC, 64 cores"),
    ):
        for folder, machine in zip(sides, machines):
            change(folder, "run", machine={"cores": 2, **machine})
        assert_user_error(run("rnnt-bench", "compare", *sides), "not comparable", words)
    for folder, name in zip(sides, ("A100", "H200")):
        change(folder, "run", machine={})
        change(folder, "environment", device="cuda", device_name=name)
    assert_user_error(run("rnnt-bench", "compare", *sides), "device name A100 / H200")


def test_only_batches_that_both_sides_have(tmp_path):
    before = written(tmp_path / "a")
    kept = [line for line in records_of(before) if not (line["record"] == "sample" and line["batch"] == 9)]
    kept[0]["run_id"] = "b"
    write_records(tmp_path / "b", [{**line, "total_wall_ns": 3 * line.get("total_wall_ns", 0)} for line in kept])
    (row,) = rows(before, tmp_path / "b")
    assert row["time"]["step"]["batches"] == 1 and row["time"]["step"]["ratio"] == pytest.approx(3)


def test_load_beside_two_separate_runs_leaves_it_unclear(tmp_path):
    (row,) = rows(written(tmp_path / "a"), written(tmp_path / "b", 1.5, flags=["busy"]))
    step = row["time"]["step"]
    assert step["verdict"] == "unclear" and "100% of the new ones ran beside other load" in step["reason"]
    sides = tmp_path / "a", tmp_path / "b"
    done = compare(*sides, "--fail-on-slower", "2%")
    assert has_words(done.stderr, "warning", "not decided", "torchaudio step", "other load", "--strict")
    assert "not decided" in compare(*sides, "--fail-on-slower", "2%", "--strict", code=3).stderr
    assert_user_error(run("rnnt-bench", "compare", *sides, "--strict"), "--strict", "--fail-on-slower")


def test_what_did_not_grow_is_not_decided_either_by_too_few_rounds(tmp_path):
    for side in "ab":
        timed(tmp_path / side, "torchaudio", [10, 10.1])
    strict = [tmp_path / "a", tmp_path / "b", "--fail-on-slower", "50%", "--strict"]
    assert has_words(compare(*strict, code=3).stderr, "not decided", "2 rounds", "--rounds 10")


def test_a_run_whose_budget_ended_earlier_is_compared_over_the_rounds_that_both_have(tmp_path):
    """Each round draws a batch of its own."""
    of_round = [{**BATCH, "index": 100 + number} for number in range(5)]
    for side, count in (("a", 5), ("b", 3)):
        written(tmp_path / side, rounds=ROUNDS[:count])
        lines = []
        for line in records_of(tmp_path / side):
            number = int(line["job"].split("-")[1]) - 1 if line.get("job", "").startswith("timing") else None
            if number is not None and line["record"] == "environment":
                line["batches"] = [of_round[number]]
            if number is not None and line["record"] == "sample":
                line["batch"] = of_round[number]["index"]
            lines.append(line)
        write_records(tmp_path / side, lines)
    (row,) = rows(tmp_path / "a", tmp_path / "b")
    assert row["time"]["step"]["batches"] == 3 and row["time"]["step"]["ratio"] == pytest.approx(1)


def test_memory_is_the_highest_peak_of_the_batches_that_both_sides_have(tmp_path):
    """Batches 0 and 1 on both sides; the peak of the third is not compared."""
    sides = []
    for side, peaks in (("a", (8, 32, 999)), ("b", (20, 16))):
        sides.append(write_run(tmp_path / side, jobs=[correctness(), memory(*peaks)], passes=["correctness", "memory"]))
    (row,) = rows(*sides)
    step = row["memory"]["step"]
    assert (step["verdict"], step["ratio"], step["baseline"], step["new"]) == ("less", 0.625, 32, 20)
    assert (step["counter"], step["batches"]) == ("torch_allocated_bytes", 2)
    assert row["time"]["step"]["verdict"] == row["memory"]["loss"]["verdict"] == "unclear"
    assert has_words(row["memory"]["loss"]["reason"], "no peaks", "memory")


def test_scope_and_tolerance(tmp_path):
    before, after = written(tmp_path / "a", run_id="x"), written(tmp_path / "b", 1.1, run_id="x")
    (row,) = rows(before, after, "--scope", "loss", "--tolerance", "30%")
    assert list(row["time"]) == list(row["memory"]) == ["loss"]
    assert row["time"]["loss"]["verdict"] == "same" and row["confidence"] == pytest.approx(0.95)


def test_markdown_for_a_pull_request(tmp_path):
    hostile = written(tmp_path / "b", 1.5, name="a|<script>alert(1)</script>\x1b[31m")
    text = compare(written(tmp_path / "a"), hostile, "--format", "markdown").stdout
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1 and len(table) == 2 + 4
    assert "<script>" not in text and "\x1b" not in text
    sentences = [line for line in text.splitlines() if line.startswith("- ")]
    assert any("step time: slower: 50.0% more time" in line for line in sentences)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["BASELINE and NEW"]),
        (["nowhere", "nowhere"], ["nowhere", "no such file or folder"]),
        (["a", "b", "--tolerance", "much"], ["--tolerance"]),
        (["a", "b", "--fail-on-slower", "0.02"], ["--fail-on-slower", "such as 2%"]),
        (["a", "b", "--only", ","], ["--only", "names"]),
        (["--in", "a", "b", "c", "--only", "b"], ["--only", "--in names two"]),
    ],
)
def test_bad_usage(arguments, words):
    assert_user_error(run("rnnt-bench", "compare", *arguments), *words)


def test_a_baseline_is_compared_with_what_comes_after_and_seen_by_no_reader(tmp_path):
    log = tmp_path / "log"
    timed(log / "first", "torchaudio", [10, 11, 12, 10])
    users = log / "baselines" / "before" / "notes.txt"
    users.parent.mkdir(parents=True)
    users.write_text("mine")
    for _ in range(3):  # each takes the name of the one before, which stays
        kept = run("rnnt-bench", "compare", "--save-baseline", "before", log)
        assert kept.returncode == 0 and str(log / "baselines" / "before") in kept.stdout
    assert (log / "baselines" / "before.1" / "notes.txt").read_text() == "mine" and "before.3" in kept.stderr
    older = run("rnnt-bench", "compare", "--baseline", "before.2", log, "--format", "json")
    assert json.loads(older.stdout)[0]["time"]["step"]["ratio"] == pytest.approx(1)
    timed(log / "second", "torchaudio", [20, 22, 24, 20], started="2030-01-01T00:00:00+00:00")
    done = run("rnnt-bench", "compare", "--baseline", "before", log, "--format", "json", "--fail-on-slower", "5%")
    assert done.returncode == 1 and json.loads(done.stdout)[0]["time"]["step"]["ratio"] == pytest.approx(2)
    assert len(json.loads(run("summarize.py", log, "--all-runs", "--format", "json").stdout)) == 2
    assert_user_error(run("rnnt-bench", "compare", "--baseline", "after", log), "after", "before", "--save-baseline")
    assert_user_error(run("rnnt-bench", "compare", "--save-baseline", "../x", log), "--save-baseline", "name")
    assert_user_error(run("rnnt-bench", "compare", "--save-baseline", "x", tmp_path / "none"), "none", "no such")


def test_files_that_are_no_results(tmp_path):
    good, bad = written(tmp_path / "good"), tmp_path / "results.jsonl"
    (tmp_path / "empty").mkdir()
    assert_user_error(run("rnnt-bench", "compare", good, tmp_path / "empty"), "no results.jsonl in it")
    bad.write_text('{"record":"status","job":"x"}\n')
    assert_user_error(run("rnnt-bench", "compare", good, bad), bad)


def test_a_screen_tells_the_verdict(tmp_path):
    """Ten losses, one of which changed and became slower, in 100 columns and 44 lines."""
    for at in range(10):
        for side, factor in (("a", 1.0), ("b", 1.5 if at == 3 else 1.0)):
            folder = written(tmp_path / side / f"l{at}", factor, name=f"loss{at}", run_id=side)
            change(folder, "run", git_revision=side if at == 3 else "abc")
    text = run("rnnt-bench", "compare", tmp_path / "a", tmp_path / "b").stdout
    lines = text.splitlines()
    assert len(lines) <= 44 and max(map(len, lines)) <= 100 and "\x1b" not in text
    verdict = " ".join(text.partition("VERDICT")[2].split())
    assert re.search(r"times: +0 faster, 2 slower, 18 same", verdict)
    assert "slower: " in verdict and "loss3 step, loss3 loss" in verdict


def test_two_losses_of_two_torches_are_not_comparable(tmp_path):
    for folder, torch, name in (("torchaudio", "2.11.0", "torchaudio"), ("k2", "1.13.1", "k2")):
        written(tmp_path / folder, run_id="x", name=name)
        change(tmp_path / folder, "environment", torch=torch)
    done = run("rnnt-bench", "compare", "--in", tmp_path, "torchaudio", "k2")
    assert_user_error(done, "torch 2.11.0 / 1.13.1", "--only k2,fast_rnnt@k2")


SIDES = ("baseline", "new")


def test_the_title_counts_what_changed_and_the_notes_say_why(tmp_path):
    for side, name, ms in (("baseline", "k2", 10), ("new", "k2", 20), *((side, "torchaudio", 10) for side in SIDES)):
        timed(tmp_path / side, name, [ms, 1.01 * ms, 1.02 * ms, 1.01 * ms, ms], run_id=side)
    path = tmp_path / "page.html"
    done = run("rnnt-bench", "compare", *(tmp_path / side for side in SIDES), "--output", path)
    assert done.returncode == 0 and "VERDICT" in done.stdout and str(path) in done.stderr
    page = path.read_text(encoding="utf-8")
    assert re.search(r"<h1>Times: 2 slower, 2 unclear</h1>", page)
    assert re.search(r"k2, step time: slower: [\d.]+% more time", page) and 'class="bad">slower' in page
    drawn = unpacked(page, "figures")
    assert "k2, step" in drawn and '"type":"log"' in drawn


def test_a_baseline_keeps_a_loss_whose_other_configuration_has_too_few_rounds(tmp_path):
    written(tmp_path / "log" / "a", dtype="float32")
    written(tmp_path / "log" / "b", dtype="bfloat16", rounds=ROUNDS[:1])
    done = run("rnnt-bench", "compare", "--save-baseline", "x", tmp_path / "log")
    assert done.returncode == 0 and "torchaudio is left out: it has 1 round" in done.stderr
    assert [path.name for path in (tmp_path / "log" / "baselines" / "x").iterdir()] == ["a"]
