"""`rnnt-bench compare`: what it prints, refuses and exits with, on runs of made-up numbers."""

from __future__ import annotations

import json
import re

import pytest
from commands import assert_user_error, has_words, run
from fixtures_runs import (
    correctness,
    environment,
    memory,
    records_of,
    sample,
    status,
    timing,
    write_records,
    write_run,
)

ROUNDS = [0.98, 1.0, 1.02, 1.01, 0.99]


def measured(folder, factor=1.0, rounds=ROUNDS, flags=(), jobs=(), name="torchaudio", run_id=None, **settings):
    """A run of steps of 100 ms and losses of 10 ms times `factor`, with the spread of ROUNDS."""
    results = [correctness(), memory(8, 32)]
    for number, luck in enumerate(rounds, start=1):
        step, loss = 100 * factor * luck, 10 * factor * luck
        results.append(timing(f"timing-{number}", [step, step], [loss, loss], flags=flags))
    write_run(folder, name, [*results, *jobs], rounds=len(rounds), **settings)
    head, *lines = records_of(folder)
    write_records(folder, [{**head, "run_id": run_id or str(folder)}, *lines])
    return folder


def compare(*arguments, code=0):
    done = run("rnnt-bench", "compare", "--details", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def rows(*arguments, code=0):
    return json.loads(compare(*arguments, "--format", "json", code=code).stdout)


def test_two_run_folders(tmp_path):
    before, after = measured(tmp_path / "a"), measured(tmp_path / "b", 1.5)
    (row,) = rows(before, after)
    step = row["time"]["step"]
    assert step["verdict"] == "slower" and step["ratio"] == pytest.approx(1.5) and step["low"] > 1.4
    assert (step["baseline_rounds"], step["new_rounds"], step["batches"], step["paired"]) == (5, 5, 2, False)
    assert row["memory"]["step"]["verdict"] == "same" and row["errors"]["verdict"] == "same"
    assert row["confidence"] == pytest.approx(0.975)  # two intervals, 95% together
    assert rows(after, before)[0]["time"]["loss"]["verdict"] == "faster"
    assert rows(before, before / "results.jsonl")[0]["time"]["step"]["verdict"] == "same"


def test_the_exit_code_for_ci(tmp_path):
    before, slow, broken = measured(tmp_path / "a"), measured(tmp_path / "b", 1.5), tmp_path / "c"
    compare(before, slow)
    compare(before, slow, "--fail-on-slower", "60%")
    compare(slow, before, "--fail-on-slower", "2%")
    done = compare(before, slow, "--fail-on-slower", "2%", code=1)
    assert "torchaudio step: slower by at least" in done.stderr
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
        measured(side / "torchaudio-30")
        measured(side / "ot-30", name="optimized_transducer")
    for name in ("k2", "warp-rnnt"):
        measured(sides[0] / f"{name}-30", name=name)
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
        measured(tmp_path / side / "torchaudio-30")
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
        measured(tmp_path / side / "torchaudio-30", factor)
        measured(tmp_path / side / "torchaudio-max-frames-10000", 1 / factor, sort_utterance=True)
        measured(tmp_path / side / "k2-30", name="k2")
    measured(tmp_path / "b" / "ot-30", name="optimized_transducer")
    compared = rows(tmp_path / "a", tmp_path / "b")
    verdicts = sorted((row["name"], row["time"]["step"]["verdict"]) for row in compared)
    assert verdicts == [("k2", "unclear"), ("torchaudio", "faster"), ("torchaudio", "slower")]
    assert "optimized_transducer: on the new side only" in compare(tmp_path / "a", tmp_path / "b").stdout


def test_two_implementations_of_one_run_are_paired_by_round(tmp_path):
    drifting = [1, 2, 4, 8]
    measured(tmp_path / "torchaudio-30", 1, drifting, run_id="x")
    measured(tmp_path / "k2-30", 1.1, drifting, run_id="x", name="k2")
    (row,) = rows("--in", tmp_path, "torchaudio", "k2")
    step = row["time"]["step"]
    assert row["name"] == "k2 against torchaudio" and step["paired"] and step["verdict"] == "slower"
    assert (step["ratio"], step["low"], step["high"]) == pytest.approx((1.1, 1.1, 1.1))
    assert "rounds paired" in compare("--in", tmp_path, "torchaudio", "k2").stdout
    assert_user_error(run("rnnt-bench", "compare", "--in", tmp_path, "torchaudio", "warp"), "warp", "k2, torchaudio")


def test_the_run_that_has_both_is_preferred_to_the_newest_of_each(tmp_path):
    measured(tmp_path / "torchaudio-30", run_id="x")
    measured(tmp_path / "k2-30", 2, run_id="x", name="k2")
    measured(tmp_path / "k2-30.2", 7, name="k2", started="2027-01-01T00:00:00+00:00")
    assert rows("--in", tmp_path, "torchaudio", "k2")[0]["time"]["step"]["ratio"] == pytest.approx(2)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"dtype": "bfloat16"}, "dtype float32 / bfloat16"),
        ({"vocab_size": 50}, "vocabulary 500 / 50"),
        ({"encoder_dim": 32}, "joiner dimension 512 / 32"),
        ({"batch_size": 2}, "batch size 30 / 2"),
        ({"sort_utterance": True}, "sorted False / True"),
        ({"num_batches": 3}, "number of batches 2 / 3"),
        ({"batches": "longest"}, "choice of batches first / longest"),
        ({"seed": 2}, "seed 1 / 2"),
    ],
)
def test_other_settings_are_refused(settings, words, tmp_path):
    done = run("rnnt-bench", "compare", measured(tmp_path / "a"), measured(tmp_path / "b", **settings))
    assert_user_error(done, "not comparable", words, tmp_path / "a", tmp_path / "b")
    assert done.stdout == ""


@pytest.mark.parametrize(
    "change, words",
    [
        ({"shape_file_sha256": "fed"}, "shape file sha256 abc / sha256 fed"),
        ({"device": "cuda", "device_name": "H200"}, "device cpu / cuda"),
        ({"threads": 8}, "threads 2 / 8"),
        ({"denormals": "keep"}, "denormals flush / keep"),
        (
            {"batches": [{"index": 4, "N": 1, "T_max": 1, "U_max": 0, "useful_cells": 1, "padded_cells": 1}]},
            "batches 2 from 4",
        ),
    ],
)
def test_other_environments_are_refused(change, words, tmp_path):
    before, after = measured(tmp_path / "a"), measured(tmp_path / "b")
    changed = [{**line, **change} if line["record"] == "environment" else line for line in records_of(after)]
    write_records(after, changed)
    assert_user_error(run("rnnt-bench", "compare", before, after), "not comparable", words)


def test_memory_is_the_highest_peak_of_the_batches_that_both_sides_have(tmp_path):
    """Batches 0 and 1 on both sides; the peak of the third is not compared."""
    sides = []
    for side, peaks in (("a", (8, 32, 999)), ("b", (20, 16))):
        sides.append(write_run(tmp_path / side, jobs=[correctness(), memory(*peaks)], passes=["correctness", "memory"]))
    (row,) = rows(*sides)
    step = row["memory"]["step"]
    assert (step["verdict"], step["ratio"], step["baseline_mb"], step["new_mb"]) == ("less", 0.625, 32, 20)
    assert (step["counter"], step["batches"]) == ("torch_allocated_bytes", 2)
    assert row["time"]["step"]["verdict"] == row["memory"]["loss"]["verdict"] == "unclear"
    assert has_words(row["memory"]["loss"]["reason"], "no peaks", "memory")


def test_rounds_that_did_not_end_well_do_not_count(tmp_path):
    died = [sample("timing-6", "step", 4, 9999), status("timing-6", "error", "killed by SIGKILL")]
    (row,) = rows(measured(tmp_path / "a"), measured(tmp_path / "b", jobs=[died]))
    assert row["time"]["step"]["new_rounds"] == 5 and row["time"]["step"]["ratio"] == pytest.approx(1)
    assert (row["new"]["status"], row["new"]["reason"]) == ("error", "timing-6: killed by SIGKILL")


def test_scope_and_tolerance(tmp_path):
    before, after = measured(tmp_path / "a"), measured(tmp_path / "b", 1.1)
    (row,) = rows(before, after, "--scope", "loss", "--tolerance", "30%")
    assert list(row["time"]) == list(row["memory"]) == ["loss"]
    assert row["time"]["loss"]["verdict"] == "same" and row["confidence"] == pytest.approx(0.95)


def test_markdown_for_a_pull_request(tmp_path):
    hostile = measured(tmp_path / "b", 1.5, name="a|<script>alert(1)</script>\x1b[31m")
    text = compare(measured(tmp_path / "a"), hostile, "--format", "markdown").stdout
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1 and len(table) == 2 + 4
    assert "<script>" not in text and "\x1b" not in text
    sentences = [line for line in text.splitlines() if line.startswith("- ")]
    assert any("step time: slower: 50.0% more time" in line for line in sentences)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["BASELINE and NEW"]),
        (["a"], ["BASELINE and NEW"]),
        (["nowhere", "nowhere"], ["nowhere", "no such file or folder"]),
        (["--rev", "HEAD"], ["--rev twice"]),
        (["--rev", "HEAD", "--rev", "HEAD", "a", "b"], ["--rev twice"]),
        (["--rev", "no-such-revision", "--rev", "HEAD"], ["no-such-revision", "no such revision"]),
        (["--rev", "HEAD", "--rev", "HEAD", "--", "--rounds", "0"], ["--rounds"]),
        (["--rev", "HEAD", "--rev", "HEAD", "--", "--resume"], ["--resume"]),
        (["a", "b", "--", "--rounds", "3"], ["--rounds", "--rev"]),
        (["a", "b", "--tolerance", "much"], ["--tolerance"]),
        (["a", "b", "--fail-on-slower", "-1%"], ["--fail-on-slower"]),
        (["a", "b", "--fail-on-slower", "0.02"], ["--fail-on-slower", "such as 2%"]),
        (["a", "b", "--only", ","], ["--only", "names"]),
        (["--in", "a", "b", "c", "--only", "b"], ["--only", "--in names two"]),
        (["--rev", "HEAD", "--rev", "HEAD", "--only", "b"], ["--only", "after --"]),
    ],
)
def test_bad_usage(arguments, words):
    assert_user_error(run("rnnt-bench", "compare", *arguments), *words)


def test_files_that_are_no_results(tmp_path):
    good, bad = measured(tmp_path / "good"), tmp_path / "results.jsonl"
    (tmp_path / "empty").mkdir()
    assert_user_error(run("rnnt-bench", "compare", good, tmp_path / "empty"), "no results.jsonl in it")
    bad.write_text('{"record":"status","job":"x"}\n')
    assert_user_error(run("rnnt-bench", "compare", good, bad), bad)
    write_records(tmp_path / "zero", [{**line, "total_wall_ns": 0} for line in records_of(good)])
    (row,) = rows(good, tmp_path / "zero")
    assert row["time"]["step"]["ratio"] is None


def test_a_screen_tells_the_verdict(tmp_path):
    """Ten losses, one of which became slower, in 100 columns and 40 lines."""
    for at in range(10):
        for side, factor in (("a", 1.0), ("b", 1.5 if at == 3 else 1.0)):
            measured(tmp_path / side / f"l{at}", factor, name=f"loss{at}", run_id=side)
    text = run("rnnt-bench", "compare", tmp_path / "a", tmp_path / "b").stdout
    lines = text.splitlines()
    assert len(lines) <= 44 and max(map(len, lines)) <= 100 and "\x1b" not in text
    verdict = " ".join(text.partition("VERDICT")[2].split())
    assert (
        re.search(r"times: +0 faster, 2 slower, \d+ (same|unclear)", verdict) and "detectable at 80% power" in verdict
    )
    assert "slower: " in verdict and "loss3 step, loss3 loss" in verdict


def test_two_losses_of_two_torches_are_not_comparable(tmp_path):
    for folder, torch, name in (("torchaudio", "2.11.0", "torchaudio"), ("k2", "1.13.1", "k2")):
        measured(tmp_path / folder, run_id="x", name=name)
        head, *lines = records_of(tmp_path / folder)
        lines = [{**line, "torch": torch} if "torch" in line else line for line in lines]
        write_records(tmp_path / folder, [head, *lines])
    done = run("rnnt-bench", "compare", "--in", tmp_path, "torchaudio", "k2")
    assert_user_error(done, "torch 2.11.0 / 1.13.1", "compare k2 with fast_rnnt@k2", "--only k2,fast_rnnt@k2")


def test_the_verdict_of_two_noisy_runs_begins_with_what_they_cannot_tell(tmp_path):
    for side, rounds in (("a", [1.0, 1.3, 0.8, 1.2]), ("b", [1.1, 0.8, 1.2, 1.0])):
        measured(tmp_path / side, 1.0, rounds, run_id=side)
    text = " ".join(run("rnnt-bench", "compare", tmp_path / "a", tmp_path / "b").stdout.partition("VERDICT")[2].split())
    assert (
        re.match(r"times: too noisy; detectable at 80% power: \d+%", text) and "0 faster, 0 slower, 2 unclear" in text
    )
