"""generate_shape_info.py on long inputs: the same files for any number of processes and shards, in bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
from commands import ROOT, wait_for

import generate_shape_info
from common.core.errors import UserError
from common.data import shapes
from common.data.sources import generation, shards
from common.data.sources.spans import Named, Span, Spans

pytest.importorskip("torch")
for package in ("lhotse", "sentencepiece"):
    pytest.importorskip(package)

TEXTS = ["A MAN SAID TO THE UNIVERSE", "SIR I EXIST", "", "HOWEVER REPLIED THE UNIVERSE"]


def recording(number):
    seconds = 1 + number % 17
    return {
        **{"id": f"r{number}", "sources": [{"type": "file", "channels": [0], "source": "none.flac"}]},
        **{"sampling_rate": 16000, "num_samples": 16000 * seconds, "duration": float(seconds)},
    }


def supervision(number):
    of = recording(number)
    fields = {"id": f"s{number}", "recording_id": of["id"], "start": 0.0, "duration": of["duration"], "channel": 0}
    return {**fields, "text": TEXTS[number % len(TEXTS)]}


def a_cut(number):
    of = recording(number)
    fields = {"id": f"c{number}", "start": 0.0, "duration": of["duration"], "channel": 0, "type": "MonoCut"}
    return {**fields, "supervisions": [supervision(number)], "recording": of}


def write(path, entries):
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from common.data.sources import bpe

    path = tmp_path_factory.mktemp("model") / "bpe.model"
    path.write_bytes(bpe.train([text for text in TEXTS if text], 40))
    return path


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs ``main`` with shards of so many entries; gives exit code, stdout, stderr, {name: bytes} of the outputs."""

    def call(*arguments, entries=3):
        monkeypatch.setattr(shards, "ENTRIES", entries)
        code = generate_shape_info.main([*map(str, arguments), "--output", str(tmp_path / "out.pt")])
        captured = capsys.readouterr()
        return (
            code,
            captured.out,
            captured.err,
            {path.name: path.read_bytes() for path in tmp_path.glob("out.*") if path.is_file()},
        )

    def outputs(*arguments, entries=3):
        code, _, err, files = call(*arguments, entries=entries)
        assert (code, err) == (0, "")
        return files

    call.outputs = outputs
    return call


@pytest.mark.parametrize(
    "flags",
    [
        ("cuts.jsonl", "--speed-perturbation", 0.9, 1, 1.1, "--min-duration", 2, "--max-duration", 14, "--features"),
        ("cuts.jsonl.gz", "--limit", 7, "--keep-empty"),
        ("cuts.json", "--bpe-vocab-size", 40),
        ("x_supervisions.jsonl",),
    ],
)
def test_shards_and_processes_leave_no_trace(run, tmp_path, model, flags):
    write(tmp_path / "cuts.jsonl", map(a_cut, range(20)))
    write(tmp_path / "cuts.jsonl.gz", map(a_cut, range(20)))
    (tmp_path / "cuts.json").write_text(json.dumps(list(map(a_cut, range(20)))))
    write(tmp_path / "x_supervisions.jsonl", [supervision(number) for number in range(20) if number % 5])
    write(tmp_path / "x_recordings.jsonl", map(recording, range(20)))
    flags = ("--manifest", tmp_path / flags[0], *flags[1:])
    flags = flags if "--bpe-vocab-size" in flags else (*flags, "--bpe-model", model)
    whole = run.outputs(*flags, entries=1000)
    assert len(shapes.load(tmp_path / "out.pt")) > 3
    for entries, jobs in ((1, 1), (3, 2), (4, 3), (1, 2)):
        assert run.outputs(*flags, "--jobs", jobs, entries=entries) == whole
    if "x_supervisions" in str(flags[1]):
        assert json.loads(whole["out.json"])["counts"]["recordings_without_supervision"] == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_first_error_of_the_file_is_told(run, tmp_path, model, jobs):
    entries = list(map(a_cut, range(20)))
    broken = [*entries[:7], {**entries[7], "duration": "long"}, *entries[8:13], {"about": "nothing"}, *entries[14:]]
    path = write(tmp_path / "cuts.jsonl", broken)
    path.write_bytes(path.read_bytes() + b"\xff")  # damaged at its end, too
    code, _, err, files = run("--manifest", path, "--bpe-model", model, "--jobs", jobs)
    assert code == 2 and not files
    (error,) = err.splitlines()
    assert "cuts.jsonl: entry 8 (c7)" in error


def processes_of(word):
    """Numbers of the processes in whose command `word` is."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                processes.append(int(path.parent.name))
        except OSError:
            continue
    return processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_in_the_middle_it_leaves_no_process_and_no_file(tmp_path, model, number):
    line = json.dumps(a_cut(1)).replace('"c1"', '"c%d"')
    path = tmp_path / "cuts.jsonl"
    path.write_text("".join(line % at + "\n" for at in range(100_000)))
    output = tmp_path / "out.pt"
    flags = ("--manifest", path, "--bpe-model", model)
    command = [sys.executable, ROOT / "generate_shape_info.py", *flags, "--output", output, "--jobs", "2"]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: len(processes_of(str(output))) == 3 or started.poll() is not None, "two processes")
        os.killpg(started.pid, number) if number == signal.SIGINT else started.kill()
        started.wait(timeout=60)
    finally:
        started.kill()
    assert started.returncode == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: not processes_of(str(output)), "end of the processes", 10)
    assert not list(tmp_path.glob("*out.*"))


def slow_first(item):
    if item == 0:
        time.sleep(0.2)
    if item == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 6:
        raise UserError("item 6")
    return item * 10


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_come_in_order_and_an_error_in_its_place(jobs):
    results = []
    with pytest.raises(UserError, match="item 6"):
        results.extend(shards.in_order(slow_first, range(8), jobs))
    assert results == [] or results == [0, 10, 20, 30, 40, 50]
    assert list(shards.in_order(slow_first, range(6), jobs)) == [0, 10, 20, 30, 40, 50]


def test_a_process_that_is_killed_is_told():
    with pytest.raises(UserError, match="--jobs 2.*memory"):
        list(shards.in_order(slow_first, [1, 8, 3, 4], 2))


def test_a_shard_is_no_larger_than_its_entries_allow(monkeypatch):
    monkeypatch.setattr(shards, "CHARACTERS", 10)
    cut = list(shards.cut(enumerate(["12345", "12345", "1", "1234567890", "1"])))
    assert [len(shard.entries) for shard in cut] == [2, 2, 1]


def test_spans_by_id():
    first, second = Named(), Named()
    first.add("a", Span(0.0, 1.5, 16000))
    first.add("b", Span(0.0, 2.5, 8000, 250, 0.01))
    second.add("a", Span(3.0, 4.5, 16000, 30))
    second.add(7, Span(0.0, 1.0, 44100.5))
    spans = Spans([first, second])
    assert (len(spans), spans.rows) == (3, 4)
    assert spans.named("a")[1] == [Span(0.0, 1.5, 16000), Span(3.0, 4.5, 16000, 30)]
    assert spans.named("b")[1] == [Span(0.0, 2.5, 8000, 250, 0.01)]
    assert spans.named(7)[1] == [Span(0.0, 1.0, 44100.5)] and spans.named("7")[1] == [] == Spans().named("a")[1]
    with pytest.raises(TypeError):
        first.add("c", Span(0.0, "long", 16000))


def test_of_a_long_file_a_sample_is_told(tmp_path, monkeypatch):
    rows = shapes.load(ROOT / "shape_info.pt")
    whole = generation.summary(rows, tmp_path)
    monkeypatch.setattr(generation, "SAMPLE", 10_000)
    told = generation.summary(rows, tmp_path)
    assert "one in 8 batches" in told[0] and len(told) == len(whole) + 1
    padding = [int(lines[-2].partition(": ")[2].partition("%")[0]) for lines in (whole, told)]
    assert abs(padding[0] - padding[1]) <= 2


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_manifest(tmp_path, model, thorough):
    """Thousands of cuts, whose parsed objects alone would be some kB each; 8 bytes of each are kept."""
    from benchmarks import shape_speed

    counts = (2_000, 20_000) if thorough else (1_000, 10_000)
    few, many = (write(tmp_path / f"{count}.jsonl", map(a_cut, range(count))) for count in counts)
    peaks = [shape_speed.measure(path, model, jobs=1).peak_bytes for path in (few, many)]
    assert many.stat().st_size > 350 * counts[1] and peaks[1] < 1.1 * peaks[0]


@pytest.mark.thorough
def test_the_table_of_the_benchmark():
    done = commands.run("benchmarks/shape_speed.py", "--utterances", 60, "--jobs", 2, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    (row,) = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| 60")]
    assert row[2].strip() == "2" and float(row[5]) == 1 and int(row[6]) > 50
