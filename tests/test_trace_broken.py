from __future__ import annotations

import csv
import gzip
import io
import json
import random
import unicodedata

import pytest
from fixtures_traces import REAL_FILES, kineto, memory, span, steps, write

from common.analysis.logs import rows
from common.core.errors import UserError
from common.tables.results import FORMATS, render
from common.traces.kineto import msgspec
from common.traces.reader import TraceError, read

SMALLEST = min(REAL_FILES, key=lambda path: path.stat().st_size)
BOTH_WAYS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "any layout"])
needs_msgspec = pytest.mark.skipif(msgspec is None, reason="msgspec is not installed")


@BOTH_WAYS
def test_every_cut_of_a_trace_is_an_error_with_file_and_place(tmp_path, fast):
    whole = gzip.decompress(SMALLEST.read_bytes()).rstrip()
    for length in [*range(0, len(whole), 499), len(whole) - 1]:
        path = tmp_path / "cut.pt.trace.json"
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"cut\.pt\.trace\.json: not a whole trace: .*(character|empty)"):
            read(path, fast)


@BOTH_WAYS
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: data[:900] + bytes(50) + data[950:],
    ],
    ids=["no end", "half", "head", "garbled"],
)
def test_damaged_archives_are_errors(tmp_path, damage, fast):
    path = tmp_path / "t.pt.trace.json.gz"
    path.write_bytes(damage(SMALLEST.read_bytes()))
    with pytest.raises(TraceError, match="t.pt.trace.json.gz: not a whole trace"):
        read(path, fast)


@BOTH_WAYS
@pytest.mark.parametrize(
    "text, words",
    [
        ("", "empty"),
        ("not json", "expected"),
        ("{}", "traceEvents"),
        ('{"traceEvents": 3}', "expected"),
        ('{"a": 1', "cut short"),
        ("[" * 100_000, "nested"),
        ('{"traceEvents": [}', "not JSON"),
        ('{"traceEvents": [{"a": 1} {"a": 2}]}', "expected"),
        (kineto([memory(1, 2)]), "no ProfilerStep"),
        ("[]", "no ProfilerStep"),
        ('{"traceEvents": []}', "no ProfilerStep"),
        ("\x00" * 500, "expected"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path, text, words, fast):
    path = write(tmp_path / "t.json", text)
    with pytest.raises(UserError, match=words) as error:
        read(path, fast)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_file_is_an_error(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read(path)


def test_fields_of_odd_types_are_passed_over(tmp_path):
    odd = [
        None,
        5,
        [],
        {"ph": "X", "cat": ["user_annotation"], "name": {}},
        {"name": "[memory]", "args": 7},
        {"name": "[memory]", "args": {"Total Allocated": "9", "Device Type": 0, "Device Id": 0}},
        {**span("ProfilerStep#1", 5, 5), "dur": "5"},
        {**span("ProfilerStep#1", 5, 5), "ts": None},
        {**span("ProfilerStep#1", 5, 5), "dur": 10**400},
        {**span("ProfilerStep#1", 5, 5), "dur": float("nan")},
        {**span("ProfilerStep#1", 5, 5), "dur": True},
        span("ProfilerStep#x", 5, 5),
    ]
    for text in (
        json.dumps({"traceEvents": odd + steps([100])}),
        json.dumps({"traceEvents": odd + steps([100])}, indent=1),
    ):
        summary = read(write(tmp_path / "t.json", text))
        assert summary == read(tmp_path / "t.json", fast=False)
        assert summary.steps == ((1, 100.0),) and summary.memory_events == 0


def agreed(path, seed):
    """Return what both ways to read a file agree on: a summary, or the text of an error."""
    answers = []
    for fast in (True, False):
        try:
            answers.append(read(path, fast))
        except TraceError as error:
            answers.append(str(error))
    assert answers[0] == answers[1], f"seed {seed}"
    return answers[0]


def test_garbled_traces_never_crash_and_both_ways_agree(tmp_path, thorough):
    whole = gzip.decompress(SMALLEST.read_bytes())
    path = tmp_path / "t.json"
    for seed in range(150 if thorough else 50):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3, 20])):
            start, length = chance.randrange(len(data)), chance.randrange(1, 60)
            data[start : start + length] = chance.choice(
                [b"", b'"', b"\\", b"\x00", b"}", b"]", b"\n  },\n  {", b"\xff\xfe", b"<script>"]
            )
        path.write_bytes(bytes(data))
        agreed(path, seed)


def test_garbled_archives_never_crash_and_both_ways_agree(tmp_path):
    """Bytes changed inside the gzip stream: told by its checksum, or not even decompressed."""
    whole = SMALLEST.read_bytes()
    path = tmp_path / "t.json.gz"
    expected = read(SMALLEST).steps
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3])):
            data[chance.randrange(2, len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data[: chance.choice([len(data), chance.randrange(3, len(data))])]))
        answer = agreed(path, seed)
        if isinstance(answer, str):
            assert "\n" not in answer
        else:
            assert answer.steps == expected  # never a number that the damage made


HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[2J\x1b]0;x\x07",
    "=cmd|' /C calc'!A0",
    "\u202e",
    "|`x`|",
    "](javascript:a)",
]


def test_hostile_names_and_files_are_rows_of_harmless_text(tmp_path):
    """Names of labels, devices and files that a terminal, a page or a spreadsheet would obey; some traces are cut."""
    for seed in range(12):
        chance = random.Random(seed)
        names = chance.sample(HOSTILE, 4)
        events = steps([100, 200]) + [span(name, 1001, 5) for name in names]
        text = kineto(events, deviceProperties=[{"id": 0, "name": names[0]}], distributedInfo={"rank": names[1]})
        cut = chance.choice([len(text), chance.randrange(len(text))])
        write(tmp_path / f"{seed} <b>=1\x1b" / f"{names[2].replace('/', '')}.{seed}.pt.trace.json", text[:cut])
    listed = rows([tmp_path])
    assert len(listed) == 12 and {row.status for row in listed} == {"ok", "error"}
    for row in listed:  # a cut trace is an error of its own row
        assert row.status == "error" or row.average_step_time_us == 150
    for format in FORMATS:
        shown = render(listed, format)
        assert not [character for character in shown if unicodedata.category(character)[0] == "C" and character != "\n"]
        assert format in ("table", "json", "csv") or ("<script" not in shown and "<b>" not in shown)
        if format == "csv":
            cells = [cell for line in csv.reader(io.StringIO(shown)) for cell in line]
            assert not [cell for cell in cells if cell.startswith("=")]
