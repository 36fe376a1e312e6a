"""--find-largest: the search with made oracles, limits that hold for real, and the command from start to end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest
from canned import QUICK, Canned, measured
from commands import ROOT, rows_of, run, start, wait_for_worker
from fixtures_runs import MIB, correctness, environment, records_of, sample, status, summarize, write_records, write_run

from rnnt_bench.analysis import logs
from rnnt_bench.analysis.comparison import read_runs
from rnnt_bench.analysis.metrics import largest
from rnnt_bench.core import settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.flag_types import bytes_of
from rnnt_bench.jobs import job, session
from rnnt_bench.jobs.rounds import TOLERANCE, memory_limit, most_tries, next_size
from rnnt_bench.records.store import bounds
from rnnt_bench.system import memory

SEARCH = ["--find-largest", "batch-size", "--memory-limit", "1GiB"]


def search(fits, low=1, cap=10**6, start=2):
    """(largest size found, sizes that were tried) when `fits` answers."""
    answers = {}
    while (size := next_size(answers, low, cap, start)) is not None:
        assert size not in answers and low <= size <= cap and len(answers) < 100
        answers[size] = fits(size)
    return bounds(answers)[0], answers


# The search.


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 17, 31, 100, 1000, 99_999])
@pytest.mark.parametrize("start", [1, 2, 30])
def test_the_largest_is_found_to_within_a_twentieth_or_one(limit, start):
    largest, tried = search(lambda size: size <= limit, start=start)
    assert largest <= limit <= largest + TOLERANCE * limit
    assert largest == limit or limit > 20  # to the utterance where it is small
    assert len(tried) <= 2 * (limit.bit_length() + 5)


def test_nothing_all_or_only_long_utterances_fit():
    largest, tried = search(lambda size: False, start=30)
    assert largest is None and set(tried.values()) == {False} and min(tried) == 1
    assert search(lambda size: True, cap=12, start=5) == (12, {5: True, 10: True, 12: True})
    assert search(lambda size: True, cap=12, start=30) == (12, {12: True})
    largest, tried = search(lambda size: size <= 500, low=400, start=1000)  # sorted batches hold the longest utterance
    assert 475 <= largest <= 500 and min(tried) >= 400


def test_a_size_that_fits_above_one_that_does_not_is_not_believed():
    assert bounds({4: True, 8: False, 16: True}) == (4, 8)
    for seed in range(50):
        chance = random.Random(seed)
        largest, tried = search(lambda size, chance=chance: chance.random() < 0.7, cap=1000, start=4)
        fails = [size for size, fits in tried.items() if not fits]
        assert largest is None or (tried[largest] and all(size > largest for size in fails))


@pytest.mark.parametrize("cap, start", [(12, 5), (48, 2), (10**6, 30)])
def test_no_search_takes_more_tries_than_foretold(cap, start):
    limits = [0, 1, 5, cap // 4, cap // 2 + 1, 3 * cap // 4, cap - 1, cap]
    longest = max(len(search(lambda size, most=most: size <= most, cap=cap, start=start)[1]) for most in limits)
    assert longest <= most_tries(None, None, 1, cap, start) <= longest + 1
    assert most_tries(12, 13, 1, cap, start) == 0


def test_the_command_searches_then_times_and_resume_asks_nothing_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("canned.QUICK", [word for word in QUICK if word != "--quiet"])
    monkeypatch.setattr("rnnt_bench.jobs.session.mean", lambda seconds: 60.0)

    def answer(job, chosen):
        if job.pass_name == "correctness":
            totals = {"utterances": 40, "frames": 400, "T_max": 10}
            return [{**line, "shape_file_totals": totals} for line in correctness()[:1]] + correctness()[1:]
        too_large = job.pass_name == "probe" and job.size > 12
        return [job.status("oom" if too_large else "ok", "no memory" if too_large else "")]

    executor, again = Canned(answer), Canned(answer)
    measured(tmp_path, executor, *SEARCH, "--batch-size", "8", "--rounds", "2", names=["torchaudio"])
    sizes = ["probe-8", "probe-16", "probe-12", "probe-14", "probe-13"]
    timed = ["throughput-12-1", "throughput-12-2"]
    assert [job for _, job in executor.seen] == ["correctness", *sizes, *timed]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "throughput-12-1" in line]
    assert line.endswith("at most 60 s left")
    measured(tmp_path, again, *SEARCH, "--batch-size", "8", "--rounds", "2", "--resume", names=["torchaudio"])
    assert not again.seen


# Sizes and flags.

SIZES = {"4GiB": 2**32, "500MB": 500_000_000, "1.5kib": 1536, "80%": 800, "2 TB": 2 * 10**12}


def test_memory_sizes():
    assert {text: bytes_of(text, 1000) for text in SIZES} == SIZES
    for text in ("4", "GiB", "4 parsecs", "-1GiB", "0%", "101%", "", "1e-9KB"):
        with pytest.raises(UserError):
            bytes_of(text, 1000)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"memory_limit": "1GiB"}, "--memory-limit.* --find-largest"),
        ({"largest_cap": 3}, "--largest-cap.* --find-largest"),
        ({"find_largest": "batch-size", "passes": ("timing",)}, "--passes"),
        ({"find_largest": "batch-size", "sort_utterance": True}, "--sort-utterance false"),
        ({"find_largest": "max-frames", "sort_utterance": False}, "--sort-utterance true"),
        ({"find_largest": "batch-size", "scopes": ("loss", "step")}, "one scope"),
    ],
)
def test_flags_that_do_not_go_together(flags, words):
    with pytest.raises(UserError, match=words):
        settings.resolve(flags, "cpu")
    chosen = settings.resolve({"find_largest": "max-frames"}, "cpu")
    assert chosen.sort_utterance and chosen.scopes == ("step",) and chosen.suffix == "largest-max-frames"


# The limit.

ENFORCED = """
import torch
from rnnt_bench.core.errors import UserError
from rnnt_bench.measure.memory import MAKING, AddressSpace

MIB = 2**20

def fits(limit, mebibytes, slack=False):
    try:
        with limit.making() if slack else limit.enforced():
            torch.empty(mebibytes * MIB, dtype=torch.uint8).fill_(1)
        return True
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
        return False

def python_fits(limit, mebibytes):
    try:
        with limit.enforced():
            bytearray(mebibytes * MIB)
        return True
    except MemoryError:
        return False

limit = AddressSpace(200 * MIB)
assert fits(limit, 150) and 145 * MIB < limit.peak_bytes < 165 * MIB, limit.peak_bytes
assert not fits(limit, 250)
assert python_fits(limit, 150) and not python_fits(limit, 250)
assert fits(limit, 250, slack=True) and not fits(limit, 200 * MAKING + 50, slack=True)
held = torch.empty(100 * MIB, dtype=torch.uint8)
assert not fits(limit, 150) and fits(limit, 50)  # what is held counts
del held
assert fits(limit, 150)
torch.empty(400 * MIB, dtype=torch.uint8).fill_(1)  # outside there is no limit
"""

SHORT = """
import resource
from rnnt_bench.measure.memory import AddressSpace

MIB = 2**20
base = AddressSpace(MIB).base
resource.setrlimit(resource.RLIMIT_AS, (base + 300 * MIB, base + 300 * MIB))
limit = AddressSpace(200 * MIB)
assert limit.bytes == 200 * MIB and not limit.warnings
with limit.making():  # four times as much is never more than there is
    pass
limit = AddressSpace(500 * MIB)
assert 250 * MIB < limit.bytes <= 300 * MIB and "ulimit" in limit.warnings[0]
with limit.enforced():
    pass
"""

OWN_BUFFERS = """
import sys, traceback
import torch
from rnnt_bench.core import implementations, settings
from rnnt_bench.losses import inputs, step
from rnnt_bench.losses import layouts
from rnnt_bench.measure.memory import AddressSpace
from rnnt_bench.jobs.job import status_of

scope, cpu = sys.argv[1], torch.device("cpu")
adapter = implementations.load("benchmark_torchaudio")(settings.resolve({"preset": "quick", "vocab_size": 200}, "cpu"))
adapter.load("cpu")
model = layouts.of(adapter).model(cpu, torch.float32)

def sample(shape):
    sizes = {"vocab_size": 200, "encoder_dim": 32, "device": cpu, "dtype": torch.float32, "key": (0, 0)}
    return step.prepare(adapter, model, inputs.make_batch([shape] * 4, **sizes), scope)

sample((9, 3)).run()  # so that everything is loaded
large = sample((250, 99))
logits, hidden = 4 * 250 * 100 * 200 * 4, 4 * 250 * 100 * 32 * 4
limit = AddressSpace({"loss": logits // 2, "step": 2 * hidden + logits + logits // 2}[scope])
try:
    with limit.enforced():
        large.run()
except RuntimeError as error:
    assert "rnnt_loss" in traceback.format_exc(), error  # not the joiner's
    assert status_of(error) == "oom", error
else:
    raise AssertionError("it fits")
"""


def ran(code, *arguments):
    variables = {**os.environ, **job.PROBE_VARIABLES}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [ENFORCED, SHORT], ids=["enforced", "less is left"])
def test_a_limit_on_a_cpu(code):
    ran(code)


@pytest.mark.parametrize("scope", ["loss", "step"])
def test_a_limit_that_only_torchaudios_own_buffers_exceed(scope):
    pytest.importorskip("torchaudio")
    ran(OWN_BUFFERS, scope)


def test_less_than_the_limit_is_left_on_a_gpu(monkeypatch):
    """A row whose context leaves less than the others' gets what is left; more than the device has is nobody's."""
    torch = pytest.importorskip("torch")
    from rnnt_bench.measure.memory import Device

    free = {"mem_get_info": (70 * MIB, 80 * MIB), "memory_allocated": 0, "synchronize": None, "empty_cache": None}
    for name, answer in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    enough, short = Device("50%", torch.device("cuda:0")), Device("99%", torch.device("cuda:0"))
    assert enough.bytes == 40 * MIB and not enough.warnings
    assert short.bytes == 70 * MIB and "cuda:0" in short.warnings[0]
    assert Device(None, torch.device("cuda:0")).bytes == 70 * MIB
    with pytest.raises(UserError, match="--memory-limit 1GiB: .* only"):
        Device("1GiB", torch.device("cuda:0"))


def test_no_more_than_there_is_is_used_whatever_is_asked_for(capsys):
    total, available = memory.total_memory(), memory.available_memory()

    def limit_of(text):
        chosen = settings.resolve({"find_largest": "batch-size", "memory_limit": text}, "cpu")
        return memory_limit(chosen, total, available)

    assert limit_of("1GiB").bytes == 2**30 and limit_of("1%").bytes == total // 100
    assert 0.5 * available < limit_of(None).bytes < total and not capsys.readouterr().err
    clamped = limit_of("900TiB")
    assert 0.5 * available < clamped.bytes < total
    assert "--memory-limit 900TiB" in clamped.source and "available" in clamped.source
    warning = capsys.readouterr().err
    assert warning.startswith("warning: --memory-limit 900TiB: the limit is ") and "GiB" in warning


@pytest.mark.parametrize(
    "returncode, last_line, status",
    [
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", "oom"),
        (-signal.SIGABRT, "Assertion failed: T > 0", "error"),
        (-signal.SIGSEGV, "bad_alloc", "error"),  # no allocator ends so
        (-signal.SIGKILL, "", "error"),
        (1, "MemoryError", "oom"),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable", "oom"),
        (1, "ValueError: no", "error"),
    ],
)
def test_deaths_for_lack_of_memory(returncode, last_line, status):
    assert session.how_it_died(returncode, False, [last_line])[0] == status


def test_errors_for_lack_of_memory():
    no_memory = ["CUDA out of memory. Tried ...", "[2] ... CUDA_ERROR_OUT_OF_MEMORY"]
    no_memory += [f"CUDA error: CUBLAS_STATUS_{what} when calling" for what in ("ALLOC_FAILED", "NOT_INITIALIZED")]
    assert all(job.status_of(RuntimeError(text)) == "oom" for text in no_memory)
    assert job.status_of(MemoryError()) == job.status_of(OSError(12, "Cannot allocate memory")) == "oom"
    assert job.status_of(RuntimeError("CUDA error: an illegal memory access was encountered")) == "error"
    stable = 'torch_call_dispatcher( "aten::%s", "", stack.data(), TORCH_ABI_VERSION) API call failed at ops.h'
    assert [job.status_of(RuntimeError(stable % name)) for name in ("new_empty", "sort")] == ["oom", "error"]


# Reading.


def probe(size, value="ok", reason=""):
    job, cells = f"probe-{size}", 100 * size
    batch = {"index": 0, "N": size, "frames": 10 * size, "T_max": 10, "U_max": 9, "useful_cells": cells}
    tried = {"record": "probe", "job": job, "scope": "step", **batch, "padded_cells": cells, "limit_bytes": 2**30}
    fit = {"record": "fit", "job": job, "scope": "step", "batch": 0, "loss": 1.0, "peak_bytes": size * MIB}
    first = environment(job, shape_file_totals={"utterances": 100, "frames": 1000, "T_max": 10})
    end = {**status("probe", value, reason), "job": job, "size": size}
    return [first, tried, *([fit] if value == "ok" else []), end]


def throughput(size, number, ms, value="ok"):
    """Two batches of `size` utterances of 10 frames, each `ms` a step."""
    job = f"throughput-{size}-{number}"
    batches = [{"index": index, "N": size, "frames": 10 * size, "T_max": 10, "U_max": 9} for index in (4, 9)]
    batches = [{**batch, "useful_cells": 100 * size, "padded_cells": 100 * size} for batch in batches]
    samples = [{**sample(f"timing-{number}", "step", batch, ms), "job": job} for batch in (4, 9)]
    end = {**status(f"throughput-{number}", value), "job": job, "size": size}
    return [environment(job, batches=batches), *samples, end]


def write_search(folder, name, *jobs, **head):
    head = {"find_largest": "batch-size", "scopes": ["step"], "passes": ["correctness"], **head}
    write_run(folder, name, [correctness(), *jobs], **head)
    records = records_of(folder)
    records[0].update(memory_limit={"bytes": 2**30, "source": "--memory-limit 1GiB"}, run_id="one run")
    write_records(folder, records)


def row_of(folder, *jobs, **head):
    write_search(folder, "torchaudio", *jobs, **head)
    (row,) = logs.read([folder]).searches
    assert logs.rows([folder]) == []
    return row


def test_a_finished_search(tmp_path):
    jobs = [probe(4), probe(8), probe(16, "oom", "no memory"), probe(12), probe(14, "oom", "no memory"), probe(13)]
    row = row_of(tmp_path, *jobs, throughput(13, 1, 10), throughput(13, 2, 20))
    answer = row.largest
    assert (row.status, answer.size, answer.too_large, answer.limited_by) == ("ok", 13, 14, "memory")
    assert not answer.at_least and answer.peak_mb == 13 and answer.heaviest.padded_cells == 1300
    assert answer.limit_bytes == 2**30
    assert row.utterances_per_second is None and row.step.ms.median == 15 and row.rounds == 2
    text = summarize(tmp_path)
    assert "memory" in text and "1.000 GiB" in text and "utterances /s" not in text
    with pytest.raises(UserError, match="--find-largest"):  # nothing to compare
        read_runs(tmp_path)


@pytest.mark.parametrize("padded, words", [(False, "frames (sum of T)"), (True, "padded frames (N x longest T)")])
def test_the_verdict_says_which_frames_a_search_answers_in(padded, words, tmp_path):
    head = {"find_largest": "max-frames", "sort_utterance": True, "max_frames_padded": padded}
    row_of(tmp_path, probe(400), probe(800, "oom"), throughput(400, 1, 10), throughput(400, 2, 10), **head)
    text = " ".join(summarize(tmp_path, details=False).split())
    assert f"400 {words}" in text and ("padding included" in text) == padded


def test_a_size_that_is_given_up_while_it_is_timed_does_not_count(tmp_path):
    jobs = [probe(4), probe(5), probe(6, "oom"), throughput(5, 1, 10), throughput(5, 2, 99, "oom")]
    row = row_of(tmp_path, *jobs, throughput(4, 1, 20), throughput(4, 2, 20))
    assert row.status == "ok" and row.largest.size == 4 and row.largest.limited_by == "memory"
    assert row.step.ms.median == 20


TIMED = [throughput(4, 1, 10), throughput(4, 2, 10)]


@pytest.mark.parametrize(
    "jobs, head, wanted",
    [
        ([probe(4), probe(8), probe(16, "interrupted")], {}, ("interrupted", None, ">=8")),
        ([probe(4), probe(5, "oom"), TIMED[0]], {}, ("interrupted", "memory", ">=4")),
        ([probe(4), probe(8, "error", "killed by SIGSEGV"), TIMED[0]], {}, ("error", "error", ">=4")),
        ([probe(4), probe(5, "timeout", "took more than 60 s"), *TIMED], {}, ("ok", "time", "4")),
        ([probe(4), *TIMED], {"largest_cap": 4}, ("ok", "cap", "4")),
        ([probe(100), throughput(100, 1, 10), throughput(100, 2, 10)], {}, ("ok", "all", "100")),
        ([probe(1, "oom", "no memory")], {}, ("oom", "memory", "none")),
    ],
)
def test_what_ends_a_search(jobs, head, wanted, tmp_path):
    row = row_of(tmp_path, *jobs, **head)
    assert (row.status, row.largest.limited_by, str(largest(row))) == wanted


def test_a_missing_package_stays_a_row_beside_an_ordinary_run(tmp_path):
    write_run(tmp_path / "timed", "torchaudio")
    write_search(tmp_path / "searched", "k2")
    records = records_of(tmp_path / "searched")
    write_records(tmp_path / "searched", [records[0], status("correctness", "missing", "pip install k2")])
    ordinary, searched = json.loads(summarize(tmp_path, "--format", "json"))
    assert not ordinary["largest"] and (searched["status"], searched["reason"]) == ("missing", "pip install k2")
    text = summarize(tmp_path)
    assert "batch size 30" in text and "largest batch-size that fits" in text


# The command.


def test_a_search_from_start_to_end_with_a_killed_probe(tmp_path, tiny_shapes):
    """A probe of 12 is killed, which tells nothing of its size; --resume asks again, and then nothing twice."""
    flags = ["--find-largest", "batch-size", "--memory-limit", "85MB", "--batch-size", "8", "--vocab-size", "4000"]
    flags += ["--preset", "quick", "--max-seconds", "0.05", "--in-place", "--quiet"]
    arguments = ["benchmark_ot.py", *flags, "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log"]
    folder = tmp_path / "log" / "optimized_transducer-largest-batch-size"
    process = start(*arguments)
    os.kill(wait_for_worker(process, "probe-12"), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and ">=8" in output and "SIGKILL" in output, errors
    before = records_of(folder)

    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    after = records_of(folder)
    again = [record["job"] for record in after[len(before) :] if record["record"] == "status"]
    assert after[: len(before)] == before and "probe-8" not in again and again[0] == "probe-12"
    row = rows_of(tmp_path / "log")["optimized_transducer"]
    largest = row["largest_search"]
    assert row["status"] == "ok" and largest["limited_by"] == "memory"
    assert 8 <= largest["size"] < largest["too_large"] <= 12
    assert 0 < largest["peak_mb"] * MIB <= 85e6 == largest["limit_bytes"]
    outcomes = [record["status"] for record in after if record["record"] == "status" and record["pass"] == "probe"]
    assert "oom" in outcomes

    assert run(*arguments, "--resume").returncode == 0
    assert records_of(folder) == after
