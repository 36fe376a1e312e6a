"""benchmarks/summarize_speed.py and the trace it makes, at a small size; no speed is asserted."""

from __future__ import annotations

import json
import sys

import pytest
from commands import ROOT, assert_user_error, run
from fixtures_traces import REAL

from common.traces.reader import CPU, read

sys.path.append(str(ROOT / "benchmarks"))

import made_trace  # noqa: E402


@pytest.mark.parametrize("version", ["1.13.1", "2.11.0"])
def test_a_made_trace_is_as_kineto_writes_it(tmp_path, version):
    path, source = tmp_path / "made.pt.trace.json", sorted((REAL / f"torch-{version}").iterdir())[0]
    size = made_trace.write(path, 3, source)
    assert 2 * made_trace.MB < size < 5 * made_trace.MB
    events = json.loads(path.read_text())["traceEvents"]
    copy, original = read(path), read(source)
    assert copy == read(path, fast=False) and copy.flags == []
    assert [number for number, _ in copy.steps] == list(range(1, 21))
    assert copy.peak_bytes == original.peak_bytes and set(copy.label_us) == set(original.label_us)
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    ends = [event["ts"] + event["dur"] for event in steps]
    assert all(end <= step["ts"] for end, step in zip(ends, steps[1:]))
    inside = [event for event in events if event.get("cat") == "cpu_op"]
    assert all(steps[0]["ts"] <= event["ts"] < ends[-1] for event in inside)
    assert copy.peak_bytes.keys() == {(CPU, -1)} and copy.memory_events > original.memory_events


def test_the_table_side_by_side():
    done = run(
        "benchmarks/summarize_speed.py", "--megabytes", "1", "--repeats", "1", "--compare", "any-layout,unpack,cut,json"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 * 5  # .json and .json.gz
    assert len({line[6:] for line in map(tuple, lines[2:]) if line[6].strip() != "-"}) == 1  # one answer from all
    assert "note:" not in done.stdout and "python" in done.stdout


def test_an_unknown_reader():
    done = run("benchmarks/summarize_speed.py", "--compare", "magic")
    assert_user_error(done, "--compare", "magic")
