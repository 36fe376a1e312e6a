"""summarize.py: which runs are rows, their numbers by hand, the formats, and metrics, each of which is one entry."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rnnt_bench import api
from rnnt_bench.analysis import logs, metrics
from rnnt_bench.conformance.outcomes import Outcome
from rnnt_bench.core import settings
from rnnt_bench.records import schema
from rnnt_bench.show import plots, tables

from commands import has_words
from fixtures_model_runs import costs, write_check, write_inference, write_pipeline, write_profile, write_tool
from fixtures_runs import (
    COMMAND,
    FORMATS,
    MIB,
    REAL,
    allocation,
    change,
    correctness,
    environment,
    kineto,
    memory,
    one_row,
    read_rows,
    sample,
    span,
    status,
    steps,
    summarize,
    three,
    timing,
    traced_run,
    write,
    write_run,
    write_sweep,
)

# Which runs.


def test_a_sweep_of_an_earlier_version_is_left_out_with_a_warning(tmp_path, capsys):
    write_run(tmp_path / "a", name="a")
    (tmp_path / "sweep-dtype").mkdir()
    (tmp_path / "sweep-dtype" / "sweep.jsonl").write_text("{}\n")
    assert [row.name for row in logs.rows([tmp_path])] == ["a"]
    assert "sweep.jsonl" in capsys.readouterr().err


def test_newest_of_a_configuration_and_how_many_earlier(tmp_path):
    for day in (1, 3, 2):
        write_run(tmp_path / f"t.{day}", started=f"2026-01-0{day}T00:00:00+00:00")
    write_run(tmp_path / "other-size", batch_size=8, started="2025-01-01T00:00:00+00:00")
    write_run(tmp_path / "k2", name="k2", started="2025-01-01T00:00:00+00:00")
    runs = {Path(row["log_dir"]).name: row["earlier_runs"] for row in read_rows(tmp_path)}
    assert runs == {"t.3": 2, "other-size": 0, "k2": 0}
    assert has_words(summarize(tmp_path), "2 earlier runs", "not shown")
    assert len(read_rows(tmp_path, "--all-runs")) == 5
    assert "earlier" not in summarize(tmp_path, "--all-runs")


def test_a_run_that_was_missing_gives_way_to_one_that_is_not(tmp_path):
    write_run(tmp_path / "old", name="k2", jobs=[[status("correctness", "missing", "no k2")]])
    write_run(tmp_path / "new", name="k2", started="2026-02-01T00:00:00+00:00")
    assert one_row(tmp_path)["status"] == "ok"


def test_default_is_log_here_and_nothing_there_is_one_line(tmp_path):
    error = summarize(code=2, cwd=tmp_path)
    assert has_words(error, "summarize.py: error: ", "log/", "benchmark_all.py") and error.count("\n") == 1
    write_run(tmp_path / "log" / "torchaudio-30")
    assert "torchaudio" in summarize(cwd=tmp_path)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["--format", "xml"], "xml"),
        (["."], "no runs under ."),
        (["log", "--output", "nowhere/x"], "cannot write nowhere/x"),
    ],
)
def test_bad_usage_is_one_clear_line(tmp_path, arguments, words):
    write_run(tmp_path / "log" / "a")
    (tmp_path / "empty").mkdir()
    cwd = tmp_path / "empty" if arguments == ["."] else tmp_path
    assert words in summarize(*arguments, code=2, cwd=cwd)


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"\xff\xfe\n",
        b"",
        b'{"record":"run","schema":99}\n',
        b'{"record":"status","job":"x"}\n',
        b'{"record":"run","schema":1,"name":"x","settings":[1]}\n',
        b'{"record":"run","schema":1}\n',
        b'{"record":"run","schema":1,"name":"x","settings":{"l2":["x"],"scopes":[]}}\n',
    ],
)
def test_records_that_cannot_be_read_are_an_error_row_beside_the_others(tmp_path, damage):
    write_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.jsonl").write_bytes(damage)
    bad, good = read_rows(tmp_path)
    assert good["status"] == "ok" and bad["status"] == "error" and bad["name"] == "bad"
    assert str(tmp_path / "bad") in bad["reason"]
    assert one_row(tmp_path / "bad", code=1)["reason"] == bad["reason"]


def test_runs_of_every_tool_are_rows_beside_those_of_losses(tmp_path):
    """CSV and JSON have each with its tool's name; one that cannot be read is a row too."""
    write_run(tmp_path / "torchaudio")
    write_inference(tmp_path)
    write_pipeline(tmp_path, "made", ["a"], {("one", "a"): costs([0.2])})
    write_profile(tmp_path)
    write_check(tmp_path, ragged=Outcome("pass"))
    write_tool(tmp_path, "flops", "odd", {"unknown": 1}, {})
    rows = json.loads(summarize(tmp_path, "--format", "json"))
    tools = [row.get("tool", "") for row in rows]
    assert set(tools) == {"", "inference", "pipeline", "profile", "flops", "check"} and tools[0] == ""
    assert {row["status"] for row in rows if row.get("tool") == "flops"} == {"error"}
    table = list(csv.DictReader(io.StringIO(summarize(tmp_path, "--format", "csv"))))
    assert [row["tool"] for row in table] == tools and table[0]["step_ms"]
    assert [row["rtf"] for row in table if row["tool"] == "inference"] == ["0.1", "0.025", "0.05", ""]
    assert [row["name"] for row in api.load(tmp_path)] == ["torchaudio"]
    assert len(api.load(tmp_path, tool="inference")) == 4
    shutil.rmtree(tmp_path / "torchaudio")
    assert "<td>profile</td>" in api.load(tmp_path)._repr_html_()  # rows of many tools, with other keys


def test_output_file_and_a_terminal_without_unicode(tmp_path):
    write_run(tmp_path / "a", name="mödel")
    assert summarize(tmp_path, "--output", tmp_path / "table.txt") == ""
    assert "mödel" in (tmp_path / "table.txt").read_text(encoding="utf-8")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert "m\\xf6del" in summarize(tmp_path, environment=ascii_only)


def test_help_teaches_and_nothing_imports_torch():
    assert "profiled step us" in summarize("--help")
    readers = "rnnt_bench.show.summarize, rnnt_bench.cli.compare"
    code = f"import sys, {readers}; assert not {{'torch', 'numpy', 'jinja2'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=COMMAND.parent)


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    write_run(tmp_path / "a")
    shown = subprocess.run(
        f"{sys.executable} {COMMAND} {tmp_path} | head -1", shell=True, capture_output=True, text=True
    )
    assert shown.stderr == "" and shown.stdout.startswith("batch size 30")


def test_csv_has_the_plain_values_of_json_the_same_for_every_run(tmp_path):
    write_run(tmp_path / "k2", name="k2")
    write_run(tmp_path / "b", jobs=[[status("correctness", "missing", "no b")]])
    text = summarize(tmp_path, "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(text)))
    dozen = "name,kind,status,step_ms,step_ms_low,step_ms_high,over_fastest,verdict,loss_ms,peak_memory_mb,grad_error"
    assert (
        {*dozen.split(",")} <= lines[0].keys()
        and text.startswith("name,kind,status,")
        and {(line["name"], line["preset"]) for line in lines} == {("k2", "cpu"), ("torchaudio", "cpu")}
    )
    rows = {row["name"]: row for row in read_rows(tmp_path)}
    for line in lines:  # the same names and numbers in CSV and JSON, and first of all in both
        plain = api.Row(rows[line["name"]]).plain
        assert list(plain) == list(rows[line["name"]])[: len(line)] == list(line)
        assert {key: "" if value is None else str(value) for key, value in plain.items()} == line
    shown = api.Results(map(api.Row, rows.values()))._repr_html_()
    assert "<td>step_ms</td>" in shown and "<td>25</td>" in shown


# One run.


def test_timing_memory_errors_and_cells_of_a_run(tmp_path):
    row = one_row(write_run(tmp_path / "torchaudio-30"))
    assert (row["name"], row["status"], row["reason"], row["kind"]) == ("torchaudio", "ok", "", "exact")
    assert row["step_ms"] == 25 and row["step"]["ms"] == pytest.approx({"median": 25, "p20": 15, "p80": 35, "n": 4})
    assert row["loss_ms"] == 2.5 and row["loss"]["ms"] == pytest.approx({"median": 2.5, "p20": 1.5, "p80": 3.5, "n": 4})
    assert row["forward_ms"] == pytest.approx(10)
    assert row["step"]["stages"] == pytest.approx({"joiner": 2.5, "backward": 15})
    low, high = row["step_ms_low"], row["step_ms_high"]  # of the rounds' medians 15 and 35: two logs, t(1) = 12.7062
    assert math.log(high / low) == pytest.approx(12.7062 * math.log(35 / 15))
    assert math.sqrt(low * high) == pytest.approx(math.sqrt(15 * 35))
    of_step = {name: mb for name, mb in row["memory"]["step"].items() if mb is not None}
    assert of_step == {"torch_allocated_mb": 32, "process_mb": 32}
    assert (row["padded_cells"], row["useful_cells"]) == (300, 150)
    assert (row["loss_error"], row["grad_error"], row["rounds"], row["flagged_samples"]) == (1e-7, 2e-6, 2, 0)
    assert (row["device"], row["torch"], row["version"]) == ("cpu", "2.11.0", "1.4")
    assert row["configuration"]["batch_size"] == 30 and row["configuration"]["max_frames"] is None
    assert row["configuration"]["threads"] == 2 and row["configuration"]["shape_file_sha256"] == "abc"


def test_headline_of_a_light_and_a_heavy_batch(tmp_path):
    """The mean of what each batch takes, whatever the number of its samples; utterances and frames over their sum."""
    job = timing("timing-1", [10, 90, 11, 100, 12], [1])
    batches = [{**batch, "frames": 15} for batch in environment("timing-1")["batches"]]
    job[0] = environment("timing-1", batches=batches)
    row = one_row(write_run(tmp_path / "a", jobs=[job], passes=["timing"], rounds=1))
    assert row["step_ms"] == pytest.approx((11 + 95) / 2) and row["step"]["ms"]["p80"] < 1.1 * 53
    assert row["utterances_per_second"] == pytest.approx(4 / 0.106)
    assert row["frames_per_second"] == pytest.approx(30 / 0.106)
    assert row["step"]["stages"]["joiner"] == pytest.approx(5.3)


def test_cuda_step_is_wall_time_and_events_stand_beside_it(tmp_path):
    times = {"forward_wall_ns": None, "forward_event_ns": 3_000_000, "total_event_ns": 9_000_000}
    lines = [environment("timing-1", device="cuda"), sample("timing-1", "step", 4, 10, **times), status("timing-1")]
    write_run(tmp_path / "a", jobs=[lines, memory(1)], passes=["timing", "memory"], rounds=1, device="cuda")
    change(tmp_path / "a", "memory", device_allocated_bytes=3 * MIB, torch_allocated_bytes=None, process_bytes=None)
    row = one_row(tmp_path / "a")
    assert (row["step_ms"], row["step"]["event"]["median"], row["forward_ms"], row["step_ms_low"]) == (10, 9, 3, None)
    assert row["memory"]["step"]["device_allocated_mb"] == 3 and row["memory"]["step"]["process_mb"] is None


def test_only_jobs_that_ended_well_are_timed(tmp_path):
    lost = [environment("timing-2"), sample("timing-2", "step", 4, 500)]
    died = [*lost, status("timing-2", "oom", "out of memory: 3 GB")]
    jobs = [correctness(), timing("timing-1", [10, 20], [1, 2]), died]
    row = one_row(write_run(tmp_path / "a", jobs=jobs))
    assert row["step"]["ms"]["n"] == 2 and row["rounds"] == 1
    assert (row["status"], row["reason"]) == ("oom", "timing-2: out of memory: 3 GB")


@pytest.mark.parametrize("shortest, words", [((1, 0), ""), ((1, 1), ""), ((2, 1), "fewer than 2 frames or 1 token")])
def test_a_note_says_which_utterances_a_loss_gets_wrong(tmp_path, shortest, words):
    judged = correctness(**dict(zip(("fewest_frames", "fewest_targets"), shortest)))
    notes = one_row(write_run(tmp_path / "a", jobs=[judged]))["notes"]
    assert any("wrong, without an error" in note for note in notes) == bool(words) and words in "; ".join(notes)


FIRST = timing("timing-1", [1], [1])


@pytest.mark.parametrize(
    "jobs, expected, reason",
    [
        ([[status("correctness", "missing", "pip install k2")]], "missing", "pip install k2"),
        ([[status("correctness", "unsupported", "y")], [status("memory", "missing", "x")]], "unsupported", "y"),
        ([[status("timing-1", "timeout", "600 s")], [status("memory", "oom", "x")]], "timeout", "timing-1: 600 s"),
        ([correctness(), [status("timing-1", "interrupted", "Ctrl-C")]], "interrupted", "timing-1: Ctrl-C"),
        ([correctness(), FIRST], "interrupted", "stopped before: 1 of 2 timing rounds, memory, trace"),
        ([correctness(), FIRST[:-1]], "interrupted", "timing-1: stopped before its end"),
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
    assert ",0.0005," in summarize(folder, "--format", "csv")


# Profiled numbers.


def test_windows_average_first_peak_and_inflation(tmp_path):
    allocated = [allocation(at, total * MIB) for at, total in ((1, 4), (2, 16), (3, 4))]
    first = kineto(steps([100, 200], first=1) + allocated)
    second = kineto(steps([300, 400], first=4) + [allocation(1, 32 * MIB)])
    row = one_row(traced_run(tmp_path / "a", first, second))
    keys = ("average_step_time_us", "steps", "peak_memory_mb")
    assert [tuple(window[key] for key in keys) for window in row["windows"]] == [(150, 2, 16.0), (350, 2, 32.0)]
    assert (row["average_step_time_us"], row["profiled_peak_mb"]) == (250, 16.0)
    assert any("first window only" in note for note in row["notes"])


def test_cuda_peak_is_the_highest_of_all_windows(tmp_path):
    texts = [
        kineto(steps([100]) + [allocation(1, peak * MIB, device_type=1, device_id=0), allocation(2, 99 * MIB)])
        for peak in (2, 5, 3)
    ]
    row = one_row(traced_run(tmp_path / "a", *texts))
    assert row["profiled_peak_mb"] == 5 and not any("first window" in note for note in row["notes"])


@pytest.mark.parametrize("damage", ["cut", "gone", "no steps"])
def test_a_broken_trace_costs_only_the_profiled_numbers_of_its_row(tmp_path, damage):
    good = kineto(steps([100, 200]))
    traced_run(tmp_path / "broken", good, good, name="k2")
    traced_run(tmp_path / "whole", good, good)
    bad = tmp_path / "broken" / "w.10.pt.trace.json"
    texts = {"cut": good[: len(good) // 2], "no steps": kineto([allocation(1, 1)])}
    bad.unlink() if damage == "gone" else bad.write_text(texts[damage])
    broken, whole = read_rows(tmp_path)
    assert broken["status"] == "error" and "w.10.pt.trace.json" in broken["reason"]
    assert broken["average_step_time_us"] is None and broken["profiled_peak_mb"] is None
    assert broken["windows"][0]["average_step_time_us"] == 150 and broken["windows"][1]["average_step_time_us"] is None
    assert broken["step"]["ms"]["n"] == 4 and broken["memory"]["step"]["torch_allocated_mb"] == 8
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
    assert row["profiled_peak_mb"] == 648 / MIB
    assert set(row["profiled_stages_us"]) == {"joiner", "loss", "backward"}
    assert row == one_row(sorted(folder.iterdir())[0], sorted(folder.iterdir())[1])


def test_a_run_of_this_suite_has_no_stub(tmp_path):
    """Its loop runs all its steps, though the last is a tenth as long as the other, with none of its operators."""
    texts = [kineto([*steps([100], at), span(f"ProfilerStep#{at + 1}", 2200, 10)]) for at in (1, 4)]
    row = one_row(traced_run(tmp_path / "a", *texts))
    assert [window["steps"] for window in row["windows"]] == [2, 2]


def test_workers_are_rows_of_their_own(tmp_path):
    for window, us in (("1.5", 100), ("2.5", 300), ("2.6", 500)):
        write(tmp_path / "a" / f"host_{window}.pt.trace.json", kineto(steps([us])))
    times = {row["name"]: row["average_step_time_us"] for row in read_rows(tmp_path)}
    assert times == {"a host_1": 100, "a host_2": 400}


HOSTILE = "<script>alert(1)</script>\x1b[31m\r\n\u202ered|`x`\x00\x9b"


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_names_are_harmless_text(tmp_path, format):
    jobs = [[status("correctness", "missing", "=cmd()" + HOSTILE)]], [[status(HOSTILE, "error", "-2+3 " + HOSTILE)]]
    write_run(tmp_path / "a", name=HOSTILE, jobs=jobs[0], device=HOSTILE)
    write_run(tmp_path / "b", name='=HYPERLINK("x")', jobs=jobs[1], device="\ud800")
    text = kineto([*steps([100]), span(HOSTILE, 1, 1)])
    write(tmp_path / ("@c" + HOSTILE.replace("/", "").replace("\x00", "")) / "w.1.pt.trace.json", text)
    text = summarize(tmp_path, "--format", format)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    if format == "markdown":
        assert "<script" not in text and "&lt;script&gt;" in text
        tables = [line for line in text.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables}) == 1
    elif format == "csv":
        table = list(csv.reader(io.StringIO(text)))
        assert len(table) == 4 and len({len(line) for line in table}) == 1
        assert not [cell for line in table for cell in line if re.match(r"[=+@-]", cell)]
        assert any(line[0] == '\'=HYPERLINK("x")' for line in table)
    elif format == "json":
        assert {row["name"] for row in json.loads(text)} >= {HOSTILE, '=HYPERLINK("x")'}
    else:
        assert "<script>alert(1)</script> red|`x`" in text


def test_table_is_grouped_sorted_and_fits(tmp_path):
    for name, ms in (("optimized_transducer", 1000.5), ("k2", 300.25), ("torchaudio", 12345.6)):
        jobs = [correctness(), timing("timing-1", [ms, ms * 1.3], [ms / 3]), memory(12345.6)]
        write_run(tmp_path / name, name=name, jobs=jobs, passes=["correctness", "timing", "memory"], rounds=1)
    missing = [[status("correctness", "missing", "pip install k2")]]
    write_run(tmp_path / "k2-pruned", name="k2-pruned", exact=False, jobs=missing)
    write_run(tmp_path / "sorted", name="k2", sort_utterance=True, batches="spread")
    text = summarize(tmp_path)
    lines = text.splitlines()
    assert lines[0] == (
        "batch size 30 (first 2 batches), V 500, joiner 512, float32, cpu Some CPU, 2 threads, denormals: flush, "
        "allocator: system, 1 round, 50% of the padded cells useful"
    )
    names = [line.split()[0] for line in lines if re.match(r"(k2|torchaudio|optimized)\S* .*(ok|missing) ", line)]
    assert names == ["k2", "optimized_transducer", "torchaudio", "k2-pruned", "k2"]
    assert any(line.startswith("max frames 10000 (sum of T), sorted (spread 2 batches)") for line in lines)
    assert "k2-pruned: missing: pip install k2" in lines
    assert "k2 step: joiner 34.5 ms, backward 207 ms" in lines
    assert " 345.3 +-7.8% 2 " in text  # one sample of each batch: that of 300.25 and 390.325
    assert " 3.33x one round " in text
    (ratio,) = [line for line in lines if line.startswith("optimized_transducer step over k2's: 3.33x")]
    assert "over 2 batches" in ratio and "no interval" in ratio and "rounds of different runs" in ratio
    assert text.count("profiled") >= 2 and "\x1b" not in text


def test_json_has_the_promised_keys_and_no_infinity(tmp_path):
    folder = write_run(tmp_path / "a", jobs=[correctness(loss_error=None)])
    path = folder / schema.FILE_NAME
    path.write_text(path.read_text().replace('"loss_error":null', '"loss_error":Infinity'))
    text = summarize(folder, "--format", "json")
    (row,) = json.loads(text, parse_constant=pytest.fail)
    promised = "name log_dir status reason device torch version windows average_step_time_us peak_memory_mb step_ms "
    assert set(f"{promised} loss_ms loss_error grad_error".split()) <= set(row)


@pytest.mark.parametrize(
    "device, settings_given, expected",
    [
        ("cpu", {"allocator": "system"}, ["denormals: flush", "allocator: system"]),
        ("cpu", {"allocator": "reuse", "denormals": "keep"}, ["denormals: keep", "allocator: reuse"]),
        ("cuda", {}, ["TF32: on", "L2: warm"]),
    ],
)
def test_the_head_says_what_else_changes_the_numbers(tmp_path, device, settings_given, expected):
    variables = {**settings.REUSE_VARIABLES, "LD_PRELOAD": "/opt/lib/libjemalloc.so"}
    line = environment("timing-1", device=device, variables=variables, **settings_given)
    jobs = [correctness(), [line, *timing("timing-1", [2, 2], [1, 1])[1:]]]
    write_run(tmp_path, jobs=jobs, passes=["correctness", "timing"], rounds=1, device=device, tf32=True, l2="warm")
    head = summarize(tmp_path).splitlines()[0].split(", ")
    assert head[-5:-2] == [*expected, "LD_PRELOAD=libjemalloc.so"] and not any("MALLOC_" in part for part in head)


@pytest.fixture
def with_rtf(monkeypatch):
    """Seconds of compute for a second of speech, with_rtf up: ten times the step's seconds."""
    metric = metrics.Metric("rtf", "RTF", lambda row: row.step.ms and row.step.ms.median / 100, better="lower")
    monkeypatch.setitem(metrics.METRICS, "rtf", metric)


def test_a_metric_in_one_line_is_everywhere(with_rtf, tmp_path):
    write_run(tmp_path / "a")  # a step takes 25 ms
    write_sweep(tmp_path / "s", {"vocab_size": [500, 4000]}, ["k2"], lambda name, values: three(50))
    log = logs.read([tmp_path])
    table = tables.whole(log)
    assert len(metrics.ALL) + 1 == len(metrics.METRICS)  # their keys are one each
    line = next(line for line in table.splitlines() if line.startswith("torchaudio"))
    assert line.endswith(" 0.2500") and "RTF" in table and " RTF |" in tables.whole(log, "markdown")
    row, *_ = json.loads(tables.exported(log, [], "json"))
    assert row["rtf"] == 0.25
    assert metrics.scalars(log.rows[0])["metrics/rtf"] == 0.25
    assert [row["rtf"] for row in csv.DictReader(io.StringIO(tables.exported(log, [], "csv")))][0] == "0.25"
    assert "rtf" in " ".join(figure.key for figure in plots.swept(log.sweeps[0]))
    for closed in ("page", "answer", "readme"):
        assert "RTF" not in [column.title for column in tables.table(closed, "", log.rows).columns]
    assert "0.5000" in tables.whole(log)


def test_the_spread_is_that_of_the_batches_whether_they_were_repeated_or_not(tmp_path):
    for name, ms in (("once", [10, 20]), ("often", [9, 18, 10, 20, 11, 22])):
        jobs = [correctness(), timing("timing-1", ms, [])]
        write_run(tmp_path / name, name=name, jobs=jobs, rounds=1, passes=["correctness", "timing"])
    spreads = [metrics.METRICS["half"].value(row) for row in logs.rows([tmp_path])]
    assert spreads == pytest.approx([20, 20])  # medians 10 and 20: 12 and 18 around 15
