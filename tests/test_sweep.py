"""--sweep: its flags and grid, what is measured in each cell, resuming, and a real one."""

from __future__ import annotations

import json
import re

import pytest
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from rnnt_bench.setup import interpreters

from canned import Canned, measured, parsed, statuses, stop
from commands import has_words, run
from fixtures_runs import records_of

GRID = ["--sweep", "vocab-size=16,64", "--sweep", "dtype=float32,bfloat16"]
THREE = ["--sweep", "vocab-size=16,32,48"]


def test_values_are_taken_as_the_flags_take_them():
    text = ["vocab_size=500, 1000", "dtype=float32,bfloat16", "sort-utterance=yes,no", "token-scale=0.5,2"]
    assert parsed(*(word for axis in text for word in ("--sweep", axis))).sweep == [
        ("vocab_size", (500, 1000)),
        ("dtype", ("float32", "bfloat16")),
        ("sort_utterance", (True, False)),
        ("token_scale", (0.5, 2.0)),
    ]
    assert parsed().sweep == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("vocab=1,2", ["'vocab=1,2'", "KEY=VALUE", "vocab-size", "threads", "dtype"]),
        ("rounds=1,2", ["'rounds=1,2'", "vocab-size"]),
        ("vocab-size=,", ["at least one value", "vocab-size=A,B"]),
        ("vocab-size=500,1", ["vocab-size: must be at least 2, not 1"]),
        ("vocab-size=500,many", ["vocab-size", "whole number", "many"]),
        ("dtype=float32,int8", ["dtype", "'int8'", "float32, float64, float16, bfloat16"]),
        ("threads=2,1,2", ["threads: 2 is given twice"]),
    ],
)
def test_bad_sweeps_are_one_line(text, words, capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--sweep", text)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "argument --sweep: " in line and all(word in line for word in words)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--sweep", "vocab-size=8,9", "--vocab-size", 8], "--vocab-size is given too"),
        (["--sweep", "vocab-size=8", "--sweep", "vocab-size=9"], "is given twice"),
        (["--sweep", "max-frames=80,90"], "--max-frames only applies with --sort-utterance true"),
        (["--sweep", "batch-size=1,2", "--sort-utterance", "true"], "--batch-size only applies with"),
        (["--sweep", "vocab-size=8,9", "--resume"], "nothing|no run with these settings"),
    ],
)
def test_sweeps_that_make_no_sense(tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        measured(tmp_path, Canned(), *arguments)
    assert not list(tmp_path.iterdir())


def values_of(log):
    """Return the values of each folder's cell."""
    heads = [records_of(path.parent)[0] for path in log.glob("*/results.jsonl")]
    return sorted((head["name"], *head["values"].values()) for head in heads)


def test_each_cell_is_an_ordinary_run_whose_settings_differ(tmp_path, capsys):
    def answer(job, chosen):
        if chosen.dtype == "bfloat16" and job.implementation == "reference":
            return [job.status("unsupported", "no bfloat16")]
        if chosen.vocab_size == 64 and job.name == "memory":
            return [job.status("oom", "no memory")]

    assert measured(tmp_path, Canned(answer), *GRID) == EXIT_FAILED
    names = ("reference", "torchaudio")
    assert values_of(tmp_path) == sorted((n, V, d) for n in names for V in (16, 64) for d in ("float32", "bfloat16"))
    kept = statuses(tmp_path)
    assert len(kept) == 8 and sorted(of[-1] for of in kept.values()) == ["ok"] * 3 + ["oom"] * 3 + ["unsupported"] * 2
    rows = json.loads(run("summarize.py", tmp_path, "--format", "json").stdout)
    assert len(rows) == 8 and {row["configuration"]["vocab_size"] for row in rows} == {16, 64}
    assert has_words(capsys.readouterr().out, "torchaudio", "oom", "no bfloat16")
    details = run("summarize.py", tmp_path, "--details").stdout
    assert re.search(r"vocab-size 64, dtype float32:\n\n\w+: oom: ", details), "a remark does not say of which cell"


def test_resume_goes_on_where_it_stopped(tmp_path):
    def interrupt(job, chosen):
        return stop(job) if (chosen.vocab_size, job.name) == (32, "memory") else None

    assert measured(tmp_path, Canned(interrupt), *THREE) == EXIT_INTERRUPTED
    assert {V for _, V in values_of(tmp_path)} == {16, 32}
    second = Canned()
    assert measured(tmp_path, second, *THREE, "--resume") == EXIT_OK
    assert len(second.seen) == 2 + 6  # memory of both, then the last cell
    assert len(values_of(tmp_path)) == 6 and {of[-1] for of in statuses(tmp_path).values()} == {"ok"}
    third = Canned()
    assert measured(tmp_path, third, *THREE, "--resume") == EXIT_OK and not third.seen


def test_a_users_mistake_leaves_no_folder_and_what_is_missing_no_process(tmp_path, monkeypatch):
    def mistake(job, chosen):
        raise UserError("a broken shape file")

    with pytest.raises(UserError, match="broken"):
        measured(tmp_path, Canned(mistake), *THREE)
    assert not list(tmp_path.iterdir())
    here, executor = interpreters.choose, Canned()
    monkeypatch.setattr(interpreters, "choose", lambda *_, **__: interpreters.Choice(None, "run `make setup`"))
    assert measured(tmp_path, executor, *THREE) == EXIT_FAILED and not executor.seen
    monkeypatch.setattr(interpreters, "choose", here)  # as after `make setup`
    assert measured(tmp_path, executor, *THREE, "--resume") == EXIT_OK and len(executor.seen) == 3 * 6


def test_a_real_sweep(tmp_path, tiny_shapes):
    pytest.importorskip("torchaudio")
    flags = ["--in-place", "--preset", "quick", "--max-seconds", 0.05, "--shape-file", tiny_shapes]
    flags += ["--log-dir", tmp_path / "log", "--passes", "timing", "--scope", "loss", "--sweep", "vocab-size=8,16"]
    done = run("benchmark_torchaudio.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "cell 2 of 2: vocab-size 16" in done.stderr
    rows = json.loads(run("summarize.py", tmp_path / "log", "--format", "json").stdout)
    assert [row["vocab_size"] for row in rows] == [8, 16] and all(row["loss_ms"] for row in rows)
