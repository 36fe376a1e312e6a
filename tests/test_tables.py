from __future__ import annotations

import csv
import io
import json
import re

import pytest
from fixtures_runs import (
    FORMATS,
    correctness,
    environment,
    memory,
    status,
    summarize,
    timing,
    write_run,
)
from fixtures_traces import kineto, span, steps, write

from common.core import settings
from common.records import schema

HOSTILE = "<script>alert(1)</script>\x1b[31m\r\n\u202ered|`x`\x00\x9b"


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_names_are_harmless_text(tmp_path, format):
    write_run(
        tmp_path / "a", name=HOSTILE, jobs=[[status("correctness", "missing", "=cmd()" + HOSTILE)]], device=HOSTILE
    )
    write_run(
        tmp_path / "b", name='=HYPERLINK("x")', jobs=[[status(HOSTILE, "error", "-2+3 " + HOSTILE)]], device="\ud800"
    )
    text = kineto(
        [
            *steps([100]),
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": HOSTILE,
                "pid": 1,
                "tid": 1,
                "ts": 1,
                "dur": 1,
                "args": {"a": 1},
            },
        ]
    )
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


def test_the_heading_tells_the_batches_that_were_there(tmp_path):
    write_run(tmp_path / "a", num_batches=80)
    write_run(tmp_path / "b", name="k2", jobs=[[status("correctness", "missing", "no k2")]], num_batches=80)
    assert summarize(tmp_path).startswith("batch size 30 (first 2 batches), ")
    write_run(tmp_path / "b", name="k2", jobs=[[status("correctness", "missing", "no k2")]], num_batches=1)
    assert summarize(tmp_path / "b").startswith("batch size 30 (first 1 batch), ")


def test_table_is_grouped_sorted_and_fits(tmp_path):
    for name, ms in (("optimized_transducer", 1000.5), ("k2", 300.25), ("torchaudio", 12345.6)):
        jobs = [correctness(), timing("timing-1", [ms, ms * 1.3], [ms / 3]), memory(12345.6)]
        write_run(tmp_path / name, name=name, jobs=jobs, passes=["correctness", "timing", "memory"], rounds=1)
    write_run(
        tmp_path / "k2-pruned",
        name="k2-pruned",
        exact=False,
        jobs=[[status("correctness", "missing", "pip install k2")]],
    )
    write_run(tmp_path / "sorted", name="k2", sort_utterance=True, batches="spread")
    text = summarize(tmp_path)
    lines = text.splitlines()
    assert lines[0] == (
        "batch size 30 (first 2 batches), V 500, joiner 512, float32, cpu Some CPU, 2 threads, denormals: flush, "
        "allocator: system, 1 round, 50% of the padded cells useful"
    )
    names = [line.split()[0] for line in lines if re.match(r"(k2|torchaudio|optimized)\S* .*(ok|missing) ", line)]
    assert names == ["k2", "optimized_transducer", "torchaudio", "k2-pruned", "k2"]
    assert any(line.startswith("max frames 10000, sorted (spread 2 batches)") for line in lines)
    assert "k2-pruned: missing: pip install k2" in lines
    assert "k2 step: joiner 34.5 ms, backward 207 ms" in lines
    assert " 345.3 +-7.8% 2 " in text  # one sample of each batch: that of 300.25 and 390.325
    assert " 3.33x one round " in text
    (ratio,) = [line for line in lines if line.startswith("optimized_transducer step over k2's: 3.33x")]
    assert "over 2 batches" in ratio and "no interval" in ratio and "rounds of different runs" in ratio
    assert text.count("profiled") >= 2 and "\x1b" not in text


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_labels_are_cut_as_names_are(tmp_path, format):
    write(tmp_path / "a" / "w.1.pt.trace.json", kineto([*steps([100]), span("x" * 3_000_000, 1001, 40)]))
    text = summarize(tmp_path, "--format", format)
    assert "a profiled: xxx" in text and "... 40.0 us" in text and max(map(len, text.splitlines())) < 250


def test_markdown_is_one_table_per_group_with_numbers_to_the_right(tmp_path):
    write_run(tmp_path / "a")
    lines = summarize(tmp_path, "--format", "markdown").splitlines()
    assert lines[0].startswith("**batch size 30") and lines[1] == ""
    heads, rules, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5])
    assert len(heads) == len(rules) == len(cells)
    row = dict(zip(heads, zip(rules, cells)))
    assert row["implementation"] == ("---", "torchaudio") and row["status"] == ("---", "ok")
    assert row["step ms +- n"] == ("---:", "25.00 +-12% 4")


def test_json_has_the_promised_keys_and_no_infinity(tmp_path):
    jobs = [
        [
            environment("correctness"),
            {"record": "correctness", "job": "correctness", "loss_error": None},
            status("correctness"),
        ]
    ]
    folder = write_run(tmp_path / "a", jobs=jobs)
    path = folder / schema.FILE_NAME
    path.write_text(path.read_text().replace('"loss_error":null', '"loss_error":Infinity'))
    text = summarize(folder, "--format", "json")
    (row,) = json.loads(text, parse_constant=pytest.fail)
    assert {
        "name",
        "log_dir",
        "status",
        "reason",
        "device",
        "torch_version",
        "implementation_version",
        "windows",
        "average_step_time_us",
        "peak_memory_mb",
        "step_ms",
        "loss_ms",
        "loss_error",
        "grad_error",
    } <= set(row)


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
