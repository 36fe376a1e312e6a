from __future__ import annotations

import gzip
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_traces import MIB, REAL, REAL_FILES, kineto, memory, span, steps, write

from common.traces import events as trace_events
from common.traces import kineto as trace_kineto
from common.traces import reader
from common.traces.reader import CPU, CUDA, read

BOTH_WAYS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "any layout"])
needs_msgspec = pytest.mark.skipif(trace_kineto.msgspec is None, reason="msgspec is not installed")


class Kept(trace_events.Collector):
    wants_operators = True

    def __init__(self):
        self.kept = []

    def event(self, event):
        counters = event.args and (event.args.total, event.args.device_type, event.args.device_id)
        self.kept.append((event.ph, event.cat, event.name, event.ts, event.dur, counters))

    def operator(self, ts):
        self.kept.append(ts)


@BOTH_WAYS
def test_average_step_is_the_mean_of_the_step_spans(tmp_path, fast):
    summary = read(write(tmp_path / "t.json", kineto(steps([100, 200, 300], first=7))), fast)
    assert summary.steps == ((7, 100.0), (8, 200.0), (9, 300.0))
    assert summary.average_step_us == 200.0
    assert summary.flags == []


@BOTH_WAYS
def test_peak_is_the_highest_total_allocated_of_each_device(tmp_path, fast):
    events = steps([100]) + [
        memory(1, 4 * MIB, 4 * MIB),
        memory(2, 16 * MIB, 12 * MIB),
        memory(3, 4 * MIB, -12 * MIB),
        memory(4, 7 * MIB, device_type=CUDA, device_id=0),
        memory(5, 9 * MIB, device_type=CUDA, device_id=1),
    ]
    summary = read(write(tmp_path / "t.json.gz", kineto(events)), fast)
    assert summary.peak_bytes == {(CPU, -1): 16 * MIB, (CUDA, 0): 7 * MIB, (CUDA, 1): 9 * MIB}
    assert summary.memory_events == 5 and summary.on_cuda


def test_a_counter_below_zero_is_a_peak_too(tmp_path):
    assert read(write(tmp_path / "t.json", kineto(steps([100]) + [memory(1, -5), memory(2, -9)]))).peak_bytes == {
        (CPU, -1): -5
    }


@BOTH_WAYS
def test_gpu_copies_of_steps_and_labels_are_not_counted(tmp_path, fast):
    events = steps([4000, 5000]) + [
        span("ProfilerStep#1", 1000, 2000, "gpu_user_annotation"),
        span("loss", 1001, 40),
        span("loss", 5100, 50),
        span("loss", 1001, 900, "gpu_user_annotation"),
        {**span("ProfilerStep#9", 1, 1), "ph": "i"},
    ]
    summary = read(write(tmp_path / "t.json", kineto(events)), fast)
    assert summary.average_step_us == 4500
    assert summary.label_us == {"loss": 90.0}


@BOTH_WAYS
def test_missing_and_repeated_steps_are_flagged(tmp_path, fast):
    events = steps([100, 100], first=3) + steps([100], first=7) + steps([100], first=3)
    summary = read(write(tmp_path / "t.json", kineto(events)), fast)
    assert summary.missing == (5, 6) and summary.repeated
    assert any("missing steps: 5, 6" in flag for flag in summary.flags)


def test_rank_and_device_name_come_from_the_header_wherever_it_is(tmp_path):
    info = {
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "deviceProperties": [{"id": 0, "name": "NVIDIA X"}],
    }
    before = kineto(steps([100]), **info)
    after = json.dumps({"traceEvents": steps([100]), **info})
    for text in (before, after):
        summary = read(write(tmp_path / "t.json", text))
        assert (summary.rank, summary.device_name) == (3, "NVIDIA X")


# The stub a loop leaves that ends early.


@BOTH_WAYS
@pytest.mark.parametrize("version, stub", [("1.13.1", 6), ("2.11.0", 7)])
def test_real_stub_is_found_and_left_out_of_the_average(version, stub, fast):
    first, second = (read(path, fast) for path in sorted((REAL / f"torch-{version}-stub").iterdir()))
    assert first.stub is None and len(first.whole_steps) == 2
    assert second.stub == stub and len(second.steps) == 2
    assert second.average_step_us == second.steps[0][1]
    assert "stub step" in second.flags[0]


def test_a_short_last_step_with_operators_is_no_stub(tmp_path):
    assert read(write(tmp_path / "t.json", kineto(steps([300, 300, 10])))).stub is None


@pytest.mark.parametrize("operators, fast", [(1000, True), (1000, False), (50_000, True)])
def test_a_short_last_step_with_as_many_operators_as_the_others_is_no_stub(tmp_path, operators, fast):
    """A batch of short utterances after one of long ones: 5 times shorter, with the same operators."""
    path = write(tmp_path / "t.json", kineto(steps([500_000, 500_000, 100_000], operators=operators)))
    summary = read(path, fast)
    assert summary.stub is None and summary.flags == []
    assert reader.count_operators(path, fast=fast) == (3 * operators, 3 * operators)


@BOTH_WAYS
@pytest.mark.parametrize("order", ["as they began", "backwards", "shuffled"])
def test_a_stub_is_found_wherever_its_operators_stand(tmp_path, order, fast):
    def shuffled(events):
        by_time = sorted(events, key=lambda event: event["ts"])
        if order == "shuffled":
            random.Random(1).shuffle(by_time)
        return by_time[::-1] if order == "backwards" else by_time

    whole, stub = steps([500_000, 500_000], operators=1000), steps([20_000], first=3, operators=240)
    late = [{**event, "ts": event["ts"] + 1_000_020} for event in stub]
    summary = read(write(tmp_path / "t.json", kineto(shuffled(whole + late))), fast)
    assert summary.stub == 3 and summary.average_step_us == 500_000
    late += [span("aten::add", late[0]["ts"], 1, "cpu_op")] * 10  # a quarter of the others' 1,000
    assert read(write(tmp_path / "t.json", kineto(shuffled(whole + late))), fast).stub is None


def test_a_long_last_step_without_operators_is_no_stub(tmp_path):
    events = steps([300, 300]) + [span("ProfilerStep#3", 2000, 290)]
    assert read(write(tmp_path / "t.json", kineto(events))).stub is None


def test_steps_without_any_operators_are_whole(tmp_path):
    assert read(write(tmp_path / "t.json", kineto(steps([300, 200, 10], operators=0)))).average_step_us == 170


# Real traces, other layouts, the same answer from both ways.


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: f"{path.parent.name}/{path.name[:8]}{path.name[-30:-18]}")
def test_real_traces_give_what_json_says(path):
    summary = read(path)
    assert summary == read(path, fast=False)
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except ValueError:
        assert "names" in path.parent.name
        return
    spans = [
        event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    ]
    assert summary.steps == tuple((int(event["name"][13:]), float(event["dur"])) for event in spans)
    totals = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    assert summary.peak_bytes == {(CPU, -1): max(totals)} and summary.memory_events == len(totals)
    assert set(summary.label_us) == {"joiner", "loss", "backward"}


@BOTH_WAYS
def test_real_trace_of_torch_1_13_with_invalid_json_is_read_field_by_field(fast):
    (path,) = (REAL / "torch-1.13.1-names").iterdir()
    with pytest.raises(ValueError):
        json.loads(gzip.decompress(path.read_bytes()))
    summary = read(path, fast)
    assert summary.salvaged == 2 and len(summary.steps) == 2 and summary.memory_events == 60
    assert '<script>alert("1")</script> C:\\dir\\\x1b[31m\n=1+1' in summary.label_us


LAYOUTS = {
    "compact": lambda data: json.dumps(data, separators=(",", ":")),
    "one line": json.dumps,
    "indent 0": lambda data: json.dumps(data, indent=0),
    "indent 1": lambda data: json.dumps(data, indent=1),
    "indent 2": lambda data: json.dumps(data, indent=2),
    "sorted": lambda data: json.dumps(data, indent=4, sort_keys=True),
    "events last": lambda data: json.dumps(
        {
            **{key: value for key, value in data.items() if key != "traceEvents"},
            "nested": {"traceEvents": [{"x": ["}", "\\", '"']}]},
            "traceEvents": data["traceEvents"],
        }
    ),
    "events first": lambda data: json.dumps({"traceEvents": data["traceEvents"], **data}),
    "bare list": lambda data: json.dumps(data["traceEvents"]),
    "lists of the same look": lambda data: json.dumps(
        {"a": [{"b": 1}, {"b": 2}], **data, "z": [{"b": 1}, {"b": 2}]}, indent=1
    ),
    "byte order mark": lambda data: "\ufeff" + json.dumps(data),
}


@BOTH_WAYS
@pytest.mark.parametrize("chunk", [1 << 12, 53])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_answer(tmp_path, monkeypatch, layout, chunk, fast):
    original = REAL_FILES[-1]
    expected = read(original)
    data = json.loads(gzip.decompress(original.read_bytes()))
    monkeypatch.setattr(trace_events, "CHUNK", chunk)
    summary = read(write(tmp_path / "t.json", LAYOUTS[layout](data)), fast)
    assert (summary.steps, summary.peak_bytes, summary.label_us, summary.memory_events) == (
        expected.steps,
        expected.peak_bytes,
        expected.label_us,
        expected.memory_events,
    )


@needs_msgspec
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.parent.name)
def test_most_events_of_kineto_are_decoded_many_at_once(path, monkeypatch):
    decoded, events, decode = [], Kept(), trace_kineto.decode
    monkeypatch.setattr(trace_events, "CHUNK", 1 << 12)  # a piece with an event that is not JSON is read one by one
    monkeypatch.setattr(trace_kineto, "decode", lambda text: decoded.append(decode(text)) or decoded[-1])
    reader.collect(path, events, fast=False)
    assert not decoded and events.kept
    expected, events.kept = events.kept, []
    reader.collect(path, events)
    assert events.kept == expected
    assert sum(map(len, filter(None, decoded))) > 0.6 * gzip.decompress(path.read_bytes()).count(b'"ph": ')


@needs_msgspec
def test_fast_way_over_many_small_chunks(tmp_path, monkeypatch):
    names = ["plain", 'quo"te", "pid": 3', "back\\slash\\", "\\ud800", "tab\t", "</script>", "\x7f"]
    events = []
    for number, name in enumerate(names):
        events.append(steps([100 + number], first=number)[0])
        raw = kineto([span("NAME", 5, number + 1)]).split('"traceEvents": [\n')[1].split("\n  ],")[0]
        events += [raw.replace("NAME", name), memory(number, number * MIB)]
    path = write(tmp_path / "t.json", kineto(events))
    slow = read(path, fast=False)
    assert slow.salvaged == 2 and len(slow.steps) == len(names) and len(slow.label_us) == len(names)
    monkeypatch.setattr(trace_events, "CHUNK", 700)
    assert read(path) == slow


@needs_msgspec
@pytest.mark.parametrize("piece", [1 << 16, 300])
def test_both_ways_deliver_the_same_events_of_known_and_unknown_categories(monkeypatch, piece):
    def raw(cat, rest='"ts": 3, "dur": 1'):
        return f'  {{\n    "ph": "X", {cat}"name": "a", "pid": 1, "tid": 1,\n    {rest}\n  }}'

    known = [span("a", 1, 2, cat) for cat in ("cpu_op", "python_function", "kernel", "user_annotation", "ac2g")]
    others = [raw('"cat": "of torch 3", '), raw(""), raw('"cat": null, '), raw('"cat": "cpu\\u005fop", ')]
    twice = [raw('"cat": "cpu_op", "cat": "kernel", '), raw('"cat": "cpu_op", ', '"ts": 3, "ts": 4')]
    odd = [raw('"cat": "cpu_op", ', '"ts": "3", "dur": []'), raw('"cat": "python_function", ', '"ts": {}, "dur": []')]
    text = kineto([*known, *others, *known, *twice, *known, *odd, memory(1, 2), *known]).encode()
    monkeypatch.setattr(trace_events, "CHUNK", piece)
    delivered = []
    for fast in (True, False):
        events, others = Kept(), trace_events.Collector()
        assert trace_events.read_events(io.BytesIO(text), events, fast) == 0
        assert trace_events.read_events(io.BytesIO(text), others, fast) == 0  # it wants no operators
        delivered.append(events.kept)
    fast, slow = delivered
    assert fast == slow and len(fast) == 4 * 4 + 4 + 2 + 1 + 1


@needs_msgspec
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.parent.name)
def test_categories_of_real_traces_are_known(path):
    """An event of another one is decoded twice."""
    categories = set(re.findall(r'"cat": "([^"]*)"', gzip.decompress(path.read_bytes()).decode(errors="replace")))
    assert categories <= {trace_kineto.STACKS, trace_kineto.OPERATORS, *trace_kineto.OTHERS}


@BOTH_WAYS
def test_a_long_label_is_cut(tmp_path, fast):
    events = [*steps([100]), span("x" * 3_000_000, 1001, 40), span("x" * 2_000_000, 1050, 2)]
    summary = read(write(tmp_path / "t.json", kineto(events)), fast)
    assert summary.label_us == {"x" * reader.LONGEST_LABEL: 42.0}


def test_memory_stays_bounded(tmp_path, thorough):
    """Events of 30 MB or 60 MB, decompressed, whose objects would be many times as large, are read in less than 100 MB
    by either way."""
    pieces = 100 if thorough else 50
    many = ",\n".join([kineto(steps([100], first=1)).split('"traceEvents": [\n')[1].split("\n  ],")[0]] * 500)
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as stream:
        stream.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        for _ in range(pieces):
            stream.write(many + ",\n")
        stream.write(many + '\n  ],\n  "traceName": "x"\n}')
    longer = tmp_path / "steps.json.gz"  # 1.3 million of them
    step = '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 2},'
    longer.write_bytes(gzip.compress(b"[" + 1_300_000 * step.encode(), 1))
    code = (
        "import re, sys; from common.traces.reader import read;"
        "found = read(sys.argv[1], sys.argv[2] == 'fast');"
        # not ru_maxrss, which a child takes over from the process that started it
        "print(len(found.steps), re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    events = 500 * (pieces + 1)
    for trace, way, count in ((path, "fast", events), (path, "any", events), (longer, "fast", reader.MOST_STEPS)):
        out = subprocess.run(
            [sys.executable, "-c", code, str(trace), way],
            cwd=Path(__file__).parents[1],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        assert int(out[0]) == count
        assert int(out[1]) < 100 * 1024


@needs_msgspec
def test_an_event_longer_than_many_pieces(tmp_path, monkeypatch):
    """Stacks may be long: 3 MB here, read in pieces of 64 kB."""
    long = {**span("loss", 1001, 40), "args": {"Call stack": "frame;" * 500_000}}
    path = write(tmp_path / "t.json", kineto([*steps([100]), long, memory(1, MIB), *steps([300], first=2)]))
    expected = read(path, fast=False)
    monkeypatch.setattr(trace_events, "CHUNK", 1 << 12)
    summary = read(path)
    assert summary == expected and summary.average_step_us == 200 and summary.label_us == {"loss": 40.0}


def test_memory_rise_needs_no_steps_and_starts_at_the_lowest_count(tmp_path):
    trace = write(tmp_path / "t.json", kineto([memory(1, 30), memory(2, 28), memory(3, 80), memory(4, 50)]))
    assert reader.memory_rise(trace) == {(CPU, -1): 52}
