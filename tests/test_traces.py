"""Traces of torch.profiler: steps, labels and memory by hand and of real files, stubs, other layouts, damage."""

from __future__ import annotations

import functools
import gzip
import json
import operator
import random
import resource
import shutil
import subprocess
import zlib

import pytest
from rnnt_bench.analysis.logs import rows
from rnnt_bench.core.errors import UserError
from rnnt_bench.traces import reader as trace_events
from rnnt_bench.traces import windows as traced
from rnnt_bench.traces.reader import CPU, CUDA, TraceError, read
from rnnt_bench.traces.windows import profiled, read_windows

from commands import command
from fixtures_runs import MIB, REAL, REAL_FILES, allocation, kineto, span, steps, write

SMALLEST = min(REAL_FILES, key=lambda path: path.stat().st_size)


def read_text(folder, events, **header):
    return read(write(folder / "t.json", kineto(events, **header)))


def durations(trace):
    return [(step.number, step.duration) for step in trace.steps]


def highest(trace):
    return {device: max(totals) for device, (_, totals) in trace.memory.items()}


def numbers_of(folder, *of_windows, to_the_end=False):
    """The numbers of windows of these events."""
    paths = [write(folder / f"w.{at}.pt.trace.json", kineto(events)) for at, events in enumerate(of_windows)]
    return profiled(read_windows(paths), to_the_end)


def test_steps_labels_and_the_peak_of_each_device(tmp_path):
    events = [
        *steps([100, 200, 300], first=7),
        span("ProfilerStep#1", 1000, 2000, "gpu_user_annotation"),  # copies of the GPU do not count
        {**span("ProfilerStep#9", 1, 1), "ph": "i"},
        span("loss", 1001, 40),
        span("loss", 1200, 50),
        *(allocation(at, total * MIB) for at, total in ((1, 4), (2, 16), (3, -4))),
        *(allocation(4, total * MIB, device_type=CUDA, device_id=id) for total, id in ((7, 0), (9, 1))),
    ]
    trace = read_text(tmp_path, events)
    assert durations(trace) == [(7, 100.0), (8, 200.0), (9, 300.0)] and trace.label_us() == {"loss": 90.0}
    assert highest(trace) == {(CPU, -1): 16 * MIB, (CUDA, 0): 7 * MIB, (CUDA, 1): 9 * MIB}
    assert trace.on_cuda and trace.fullest() == (CUDA, 1) and trace.fullest(CPU) == (CPU, -1)
    numbers = numbers_of(tmp_path, events)
    assert (numbers.average_step_time_us, numbers.peak_memory_mb) == (200, 9) and numbers.label_us == {"loss": 30.0}


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: f"{path.parent.name}/{path.name[:8]}{path.name[-30:-18]}")
def test_real_traces_give_what_json_says(path):
    trace = read(path)
    try:
        every = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except ValueError:
        assert path.parent.name == "torch-1.13.1-names" and trace.salvaged == 2 and len(trace.steps) == 2
        assert '<script>alert("1")</script> C:\\dir\\\x1b[31m\n=1+1' in trace.label_us()
        return
    labels = [event for event in every if event.get("cat") == "user_annotation"]
    of_steps = [event for event in labels if event["name"].startswith("ProfilerStep#")]
    assert durations(trace) == [(int(event["name"][13:]), float(event["dur"])) for event in of_steps]
    totals = [event["args"]["Total Allocated"] for event in every if event["name"] == "[memory]"]
    assert list(trace.memory[CPU, -1][1]) == totals and set(trace.label_us()) == {"joiner", "loss", "backward"}
    assert len(trace.operators) == sum(event.get("cat") == "cpu_op" for event in every) and trace.salvaged == 0


def jq(trace, *words):
    return subprocess.run(["jq", *words, "."], input=json.dumps(trace), capture_output=True, text=True).stdout


LAYOUTS = {
    "json.dump": json.dumps,
    "compact": lambda trace: json.dumps(trace, separators=(",", ":")),
    **{f"indent {depth}": functools.partial(json.dumps, indent=depth) for depth in (1, 2, 4)},
    "sorted": lambda trace: json.dumps(trace, sort_keys=True),
    "first": lambda trace: json.dumps({"traceEvents": trace["traceEvents"], **trace}),
    "a bare list": lambda trace: json.dumps(trace["traceEvents"]),
    "a merge": lambda trace: json.dumps({"traceEvents": [{"ph": 3, "dur": "long"}, None, *trace["traceEvents"]]}),
    "jq": jq,
    "jq -c": lambda trace: jq(trace, "-c"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_that_is_written_again_has_the_same_numbers(layout, tmp_path, monkeypatch):
    """By json.dump, jq or a merge, in chunks that cut events anywhere; each cut of the file is an error."""
    if layout.startswith("jq") and not shutil.which("jq"):
        pytest.skip("no jq")
    trace = json.loads(gzip.decompress(SMALLEST.read_bytes()))
    path = tmp_path / "again.json"
    path.write_text(LAYOUTS[layout](trace), encoding="utf-8")
    monkeypatch.setattr(trace_events, "CHUNK", 50_000)
    original, again = read(SMALLEST), read(path)
    assert trace_events.is_trace(path) and durations(again) == durations(original) and len(original.steps) > 1
    assert (again.label_us(), again.operators, again.memory) == (
        original.label_us(),
        original.operators,
        original.memory,
    )
    for row in rows([tmp_path]):
        assert row.profile.error is None and row.profile.average_step_time_us
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole + b"\n" * 120_000)
    assert durations(read(path)) == durations(original)
    for length in [*range(0, len(whole), len(whole) // 20), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match="not a whole trace"):
            read(path)


def test_a_trace_of_a_huge_event_costs_itself_alone(tmp_path):
    """300 MB that are 300 KB on disk, in each layout: refused before they are in memory, and the other row is shown."""
    for name, gap in (("kineto", "\n  "), ("json", "")):
        packed = zlib.compressobj(wbits=31)
        with (tmp_path / f"{name}.pt.trace.json.gz").open("wb") as file:
            file.write(packed.compress(f'{{"traceEvents": [{gap}{{{gap and chr(10)}    "name": "'.encode()))
            for _ in range(300):
                file.write(packed.compress(b"x" * MIB))
            file.write(packed.compress(b'"}]}') + packed.flush())
    write(tmp_path / "right.pt.trace.json", kineto(steps([100])))
    done = subprocess.run(
        command("summarize.py", tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (900 * MIB, 900 * MIB)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "100" in done.stdout, done.stderr
    assert done.stdout.count("more than 67,108,864 characters") == 2, done.stdout


def test_a_trace_of_any_name_is_told_by_its_content(tmp_path):
    for name, us in (("trace.json", 100), ("rank0_trace.json.gz", 300)):
        write(tmp_path / "theirs" / name, kineto(steps([us])))
    write(tmp_path / "theirs" / "shape_info.json", json.dumps({"rows": 3}))
    (tmp_path / "theirs" / "cut.json.gz").write_bytes(b"\x1f\x8bno")
    times = {row.name: row.profile.average_step_time_us for row in rows([tmp_path])}
    assert times == {"theirs trace.json": 100, "theirs rank0_trace.json.gz": 300}


def test_names_that_are_not_json_are_salvaged_over_many_small_chunks(tmp_path, monkeypatch):
    names = ["plain", 'quo"te", "pid": 3', "back\\slash\\", "\\ud800", "tab\t", "</script>", "\x7f"]
    events = []
    for number, name in enumerate(names):
        events.append(steps([100 + number], first=number)[0])
        raw = kineto([span("NAME", 5, number + 1)]).split('"traceEvents": [\n')[1].split("\n  ],")[0]
        events += [raw.replace("NAME", name), allocation(number, number * MIB)]
    events.append({**span("long", 1, 2), "args": {"Call stack": "frame;" * 5000}})
    monkeypatch.setattr(trace_events, "CHUNK", 700)
    trace = read_text(tmp_path, events)
    assert trace.salvaged == 4 and len(trace.steps) == len(names) == len(trace.label_us()) - 1
    assert highest(trace) == {(CPU, -1): 6 * MIB}


@pytest.mark.parametrize("version, stub", [("1.13.1", 6), ("2.11.0", 7)])
def test_a_real_stub_is_left_out_of_the_average(version, stub):
    windows = read_windows(sorted((REAL / f"torch-{version}-stub").iterdir()))
    first, second = profiled(windows).windows
    assert (first.steps, second.steps) == (2, 1) and f"stub step: ProfilerStep#{stub} " in second.flags[0]
    assert second.average_step_time_us == windows[1][1].steps[0].duration
    assert [window.steps for window in profiled(windows, to_the_end=True).windows] == [2, 2]


def loop(*of_steps, first=1):
    """Events of steps of (microseconds, operators) one after the other, in any order."""
    events = []
    for number, (us, operators) in enumerate(of_steps, start=first):
        for event in steps([us], first=number, operators=operators):
            events.append({**event, "ts": event["ts"] + 1000 * number})
    random.Random(1).shuffle(events)
    return events


WHOLE, STUB, SMALL_BATCH = (300, 6), (10, 1), (10, 6)


@pytest.mark.parametrize(
    "of_windows, whole, stubs",
    [
        ([loop(WHOLE, WHOLE, STUB)], 2, 1),
        ([loop(WHOLE, WHOLE, SMALL_BATCH)], 3, 0),  # short, with as many operators: short utterances
        ([loop(WHOLE, WHOLE, (290, 0))], 3, 0),
        ([loop((300, 0), (200, 0), (10, 0))], 3, 0),
        ([loop(WHOLE, WHOLE), loop(STUB, first=3)], 2, 1),  # alone in its window
        ([loop(WHOLE, WHOLE), loop(SMALL_BATCH, first=3)], 3, 0),
        ([loop(WHOLE, STUB), loop(WHOLE, first=3)], 3, 0),  # the loop went on
        ([loop(WHOLE, STUB), loop(WHOLE, STUB, first=3), loop(WHOLE, STUB)], 4, 2),  # the last is of another loop
    ],
)
def test_a_last_step_is_a_stub_if_it_is_short_and_has_few_operators(tmp_path, of_windows, whole, stubs):
    labels = [
        [span("loss", 5 + event["ts"], 7) for event in events if "Step" in event["name"]] for events in of_windows
    ]
    numbers = numbers_of(tmp_path, *map(operator.add, of_windows, labels))
    assert numbers.label_us == {"loss": 7}  # in a step, without those of stubs
    assert sum(window.steps for window in numbers.windows) == whole
    assert sum("stub" in note for note in numbers.notes) == stubs


def test_a_curve_is_of_the_last_step_above_its_start_and_spans_of_all(tmp_path, monkeypatch):
    events = [
        span("ProfilerStep#1", 0, 100),
        span("ProfilerStep#2", 100, 100),
        span("joiner", 110, 30),
        span("loss", 145, 50),
        *(allocation(at, total * MIB) for at, total in ((10, 90), (50, 5), (120, 12), (130, 8), (150, 25), (190, 7))),
    ]
    path = write(tmp_path / "w.1.pt.trace.json", kineto(events))
    curve = traced.curve(path)
    assert curve.step == 2 and curve.peak_mb == 20  # 25 MiB on top of the 5 MiB it began with
    assert curve.stage_mb == {"joiner": 7, "loss": 20}
    assert curve.ms == pytest.approx([0, 0.02, 0.03, 0.05, 0.09, 0.1]) and curve.mb == [0, 7, 3, 20, 2, 2]
    found = {(each.step, each.name): tuple(round(part / MIB) for part in each[2:]) for each in traced.spans(path)}
    assert found[2, "joiner"] == (0, 7, 3) and found[2, ""] == (0, 20, 2) and found[2, "loss"] == (3, 20, 2)
    assert traced.spans(path, CUDA) == [] and traced.rise(path) == {(CPU, -1): 85 * MIB}
    monkeypatch.setattr(traced, "MOST_POINTS", 2)
    assert traced.curve(path).mb == [0, 7, 20, 2]  # it begins at its start and keeps its peak
    assert traced.curve(write(tmp_path / "none.pt.trace.json", kineto(steps([100])))) is None


def test_every_cut_of_a_trace_is_an_error_with_file_and_place(tmp_path):
    whole = gzip.decompress(SMALLEST.read_bytes()).rstrip()
    path = tmp_path / "cut.pt.trace.json"
    for length in [*range(0, len(whole), 199), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"cut\.pt\.trace\.json: not a whole trace: .*char"):
            read(path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no list of events"),
        ("not json", "no list of events"),
        ('{"traceEvents": {"a": 1}}', "no list of events"),
        ('{"traceEvents": [{"a": 1}, {"a" 2}]}', "cut short"),
        ('{"traceEvents": [{"a": 1}, nonsense]}', "not JSON"),
        (kineto([*steps([100]), "  {\n    nonsense\n  }", *steps([100])]), "not JSON"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path, text, words):
    path = write(tmp_path / "t.json", text)
    with pytest.raises(UserError, match=words) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_file_and_no_steps_are_errors_of_their_window(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read(path)
    assert "no ProfilerStep" in numbers_of(tmp_path, [allocation(1, 2)]).error


def test_a_trace_named_beside_its_folder_or_records_does_not_narrow_them(tmp_path):
    traces = [write(tmp_path / f"w.{number}.pt.trace.json", kineto(steps([100], number))) for number in (1, 2)]
    for paths in ([tmp_path, traces[0]], [traces[0], tmp_path], [traces[0]]):
        (row,) = rows(paths)
        assert len(row.profile.step_us) == (2 if tmp_path in paths else 1)
