"""rnnt-bench largest: the search with made oracles, limits that hold for real, and the command from start to end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest
from rnnt_bench.analysis import logs
from rnnt_bench.core.errors import UserError, guarded
from rnnt_bench.core.flag_types import bytes_of
from rnnt_bench.jobs import job
from rnnt_bench.system import memory
from rnnt_bench.tools.kept import read
from rnnt_bench.tools.largest import command, losses
from rnnt_bench.tools.largest.search import TOLERANCE, Search, Try, bounds, size_to_try

from canned import Canned
from commands import ROOT, run, start, wait_for_worker
from fixtures_model_runs import InProcess, write_tool
from fixtures_runs import MIB, correctness, summarize, write_run

SEARCH = ["--memory-limit", "1GiB"]


def called(executor, *words):
    """Run the command in this process; return its exit code."""
    arguments = command.parser().parse_args(list(map(str, words)))
    return guarded("x", lambda: command.main(arguments, executor))


def search(fits, low=1, cap=10**6, start=2, stride=1.0):
    """(largest size found, sizes that were tried) when `fits` answers."""
    answers = {}
    while (size := size_to_try(answers, low, cap, start, stride)) is not None:
        assert size not in answers and low <= size <= cap and len(answers) < 100
        answers[size] = fits(size)
    return bounds(answers)[0], answers


# The search.


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 17, 31, 100, 1000, 99_999])
@pytest.mark.parametrize("start", [1, 2, 30])
@pytest.mark.parametrize("stride", [1.0, TOLERANCE])
def test_the_largest_is_found_to_within_a_twentieth_or_one(limit, start, stride):
    largest, tried = search(lambda size: size <= limit, start=start, stride=stride)
    assert largest <= limit <= largest + TOLERANCE * limit
    assert largest == limit or limit > 20  # to the utterance where it is small
    assert len(tried) <= 2 * (limit.bit_length() + 5)


@pytest.mark.parametrize("limit", [97, 100, 104])
def test_where_the_start_is_an_estimate_few_sizes_are_tried(limit):
    assert len(search(lambda size: size <= limit, start=100, stride=TOLERANCE)[1]) <= 3
    assert len(search(lambda size: size <= limit, start=100)[1]) > 5


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


def limited(**given):
    """The words and bytes of a limit on a CPU."""
    return command.memory_limit(given.get("asked"), "cpu")


def test_the_command_searches_and_resume_asks_nothing_twice(tmp_path, capsys):
    def answer(job, chosen):
        too_large = "probe" in job.name and int(job.name.rpartition("-")[2]) > 12
        return [job.status("oom" if too_large else "ok", "no memory" if too_large else "")]

    flags = [*SEARCH, "--only", "torchaudio", "--device", "cpu", "--in-place", "--batch-size", 8, "--log-dir", tmp_path]
    executor, again = Canned(answer), Canned(answer)
    assert called(executor, *flags) == 0
    sizes = ["probe-8", "probe-16", "probe-12", "probe-14", "probe-13"]
    assert [name for _, name in executor.seen] == [f"torchaudio {job}" for job in ("correctness", *sizes, "judge-12")]
    assert "[7/7] torchaudio judge-12: ok" in capsys.readouterr().err
    assert called(again, *flags, "--resume") == 0 and not again.seen


def test_a_probe_that_fails_ends_its_search_and_is_tried_again_with_resume(tmp_path, capsys):
    statuses = {"probe-4": ("error", "killed by SIGSEGV")}

    def answer(job, chosen):
        return [job.status(*statuses.get(job.name.rpartition(" ")[2], ("ok", "")))]

    flags = [
        *SEARCH,
        "--only",
        "torchaudio,fused",
        "--device",
        "cpu",
        "--in-place",
        "--largest-cap",
        4,
        "--batch-size",
        2,
    ]
    flags += ["--quiet", "--log-dir", tmp_path]
    assert called(Canned(answer), *flags) == 1
    text = capsys.readouterr().out
    assert "SIGSEGV" in text and ">=2" in text and "withheld" in text
    statuses.clear()
    again = Canned(answer)
    assert called(again, *flags, "--resume") == 0
    assert [name.partition(" ")[2] for _, name in again.seen] == ["probe-4", "judge-4"] * 2


def test_a_loss_that_refuses_an_utterance_of_the_file_is_not_searched(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.tensor([[12, 2], [12, 3], [12, 0]], dtype=torch.int32), tmp_path / "three.pt")
    flags = ["--only", "optimized_transducer:by-utterance", "--shape-file", tmp_path / "three.pt", "--device", "cpu"]
    executor = InProcess()
    assert called(executor, *SEARCH, *flags, "--in-place", "--preset", "quick", "--log-dir", tmp_path / "log") == 1
    (row,) = losses.answer(read(next((tmp_path / "log").glob("*/tool.jsonl")))).rows
    assert row["status"] == "unsupported" and "without tokens" in row["reason"] and len(executor.names) == 1


# Sizes and flags.

SIZES = {"4GiB": 2**32, "500MB": 500_000_000, "1.5kib": 1536, "80%": 800, "2 TB": 2 * 10**12}


def test_memory_sizes():
    assert {text: bytes_of(text, 1000) for text in SIZES} == SIZES
    for text in ("4", "GiB", "4 parsecs", "-1GiB", "0%", "101%", "", "1e-9KB"):
        with pytest.raises(UserError):
            bytes_of(text, 1000)


def test_a_cap_below_the_longest_utterance_is_refused(tmp_path, capsys):
    flags = ["--only", "fused", "--device", "cpu", "--in-place", "--log-dir", tmp_path]
    assert called(Canned(), *flags, "--sort-utterance", "--largest-cap", 10) == 2
    assert "--largest-cap 10" in capsys.readouterr().err and not list(tmp_path.iterdir())


# The limit.

ENFORCED = """
import torch
from rnnt_bench.core.errors import UserError
from rnnt_bench.instruments.memory import MAKING, AddressSpace

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
from rnnt_bench.instruments.memory import AddressSpace

MIB = 2**20
base = AddressSpace(MIB).base
resource.setrlimit(resource.RLIMIT_AS, (base + 300 * MIB, base + 300 * MIB))
limit = AddressSpace(200 * MIB)
assert limit.bytes == 200 * MIB
with limit.making():  # four times as much is never more than there is
    pass
limit = AddressSpace(500 * MIB)
assert 250 * MIB < limit.bytes <= 300 * MIB
with limit.enforced():
    pass
"""

OWN_BUFFERS = """
import sys, traceback
import torch
from rnnt_bench.core import implementations, settings
from rnnt_bench.losses import inputs, step
from rnnt_bench.losses import layouts
from rnnt_bench.instruments.memory import AddressSpace
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
    variables = {**os.environ, **command.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True
    )
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
    from rnnt_bench.instruments.memory import Device

    free = {"mem_get_info": (70 * MIB, 80 * MIB), "memory_allocated": 0, "synchronize": None, "empty_cache": None}
    for name, answer in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    enough, short = Device("50%", torch.device("cuda:0")), Device("99%", torch.device("cuda:0"))
    assert enough.bytes == 40 * MIB and short.bytes == 70 * MIB
    assert Device(None, torch.device("cuda:0")).bytes == 70 * MIB
    with pytest.raises(UserError, match="--memory-limit 1GiB: .* only"):
        Device("1GiB", torch.device("cuda:0"))


def test_no_more_than_there_is_is_used_whatever_is_asked_for(capsys):
    total, available = memory.total_memory(), memory.available_memory()
    assert limited(asked="1GiB")[1] == 2**30 and limited(asked="1%")[1] == total // 100
    assert 0.5 * available < limited()[1] < total and not capsys.readouterr().err
    words, size = limited(asked="900TiB")
    assert 0.5 * available < size < total
    assert "--memory-limit 900TiB" in words and "available" in words
    warning = capsys.readouterr().err
    assert warning.startswith("warning: --memory-limit 900TiB: the limit is ") and "GiB" in warning


def test_errors_for_lack_of_memory():
    no_memory = ["CUDA out of memory. Tried ...", "[2] ... CUDA_ERROR_OUT_OF_MEMORY"]
    no_memory += [f"CUDA error: CUBLAS_STATUS_{what} when calling" for what in ("ALLOC_FAILED", "NOT_INITIALIZED")]
    assert all(job.status_of(RuntimeError(text)) == "oom" for text in no_memory)
    assert job.status_of(MemoryError()) == job.status_of(OSError(12, "Cannot allocate memory")) == "oom"
    assert job.status_of(RuntimeError("CUDA error: an illegal memory access was encountered")) == "error"
    stable = 'torch_call_dispatcher( "aten::%s", "", stack.data(), TORCH_ABI_VERSION) API call failed at ops.h'
    assert [job.status_of(RuntimeError(stable % name)) for name in ("new_empty", "sort")] == ["oom", "error"]


# Reading.


def probe(size, status="ok", reason=""):
    """(name, result) of a probe."""
    step = Try(N=size, T=10, U=9, limit_bytes=2**30, peak_bytes=size * MIB)
    return f"torchaudio probe-{size}", step if status == "ok" else (status, reason)


RIGHT = [("torchaudio correctness", {})]
JUDGED = [("torchaudio judge-4", {})]


def answer_of(folder, *jobs, capped=False, cap=100, unit="utterances"):
    config = losses.Losses(
        losses=[Search("torchaudio", 1, cap, 2), Search("k2", 1, cap, 2)],
        kinds={"torchaudio": "exact", "k2": "exact"},
        missing={"k2": "pip install k2"},
        capped=capped,
        unit=unit,
        limit="--memory-limit 1GiB",
        words=["V 500"],
    )
    return losses.answer(read(write_tool(folder, "largest", "batch-size", config, dict(jobs))))


def test_a_finished_search(tmp_path):
    jobs = [probe(4), probe(8), probe(16, "oom", "no memory"), probe(12), probe(14, "oom", "no memory"), probe(13)]
    answer = answer_of(tmp_path, *RIGHT, *jobs, ("torchaudio judge-13", {}))
    row, missing = answer.rows
    assert (row["status"], row["largest"], row["limited_by"], row["peak_mb"]) == ("ok", 13, "memory", 13)
    assert row["limit_bytes"] == 2**30 and missing["status"] == "missing"
    text = answer.render("table")
    assert "torchaudio, 13 utterances" in text and "13 x 10 x 10" in text and "1.000 GiB" in text
    assert "pip install k2" in text and answer.statuses == ["ok", "missing"]


@pytest.mark.parametrize(
    "jobs, head, wanted",
    [
        ([probe(4), probe(8), probe(16, "interrupted")], {}, ("interrupted", "", ">=8")),
        ([probe(4), probe(5, "oom")], {}, ("not run", "memory", ">=4")),
        ([probe(4), probe(8, "error", "killed by SIGSEGV")], {}, ("error", "", ">=4")),
        ([probe(4), probe(5, "timeout", "took more than 60 s"), *JUDGED], {}, ("ok", "time", "4")),
        ([probe(4), probe(5, "oom"), (JUDGED[0][0], ("error", "wrong result"))], {}, ("wrong", "memory", "4")),
        ([probe(4), *JUDGED], {"cap": 4, "capped": True}, ("ok", "largest-cap", "4")),
        ([probe(4), *JUDGED], {"cap": 4}, ("ok", "all there are", "4")),
        ([probe(1, "oom", "no memory")], {}, ("oom", "memory", "none")),
    ],
)
def test_what_ends_a_search(jobs, head, wanted, tmp_path):
    answer = answer_of(tmp_path, *RIGHT, *jobs, **head)
    (table,) = answer.tables
    (row,) = [row for row in table.rows if row[0].shown == "torchaudio"]
    shown = dict(zip((column.title for column in table.columns), (cell.shown.strip("-") for cell in row)))
    assert (shown["status"], shown["limited by"] or "", shown["largest that fits"]) == wanted
    assert answer.statuses[0] == ("error" if wanted[0] == "wrong" else wanted[0])


def test_committed_searches_are_read_and_those_of_an_earlier_version_left_out(tmp_path, capsys):
    text = summarize(max((ROOT / "results").glob("*-largest")))
    assert "approximate: fast_rnnt-pruned, 44 utterances; next is k2-pruned at 10" in text
    write_run(tmp_path / "before", "k2", [correctness()], find_largest="batch-size")
    assert logs.rows([tmp_path]) == [] and "earlier version" in capsys.readouterr().err


# The command.


def test_a_search_from_start_to_end_with_a_killed_probe(tmp_path, tiny_shapes):
    """A probe of 12 is killed, which tells nothing of its size; --resume asks again, and then nothing twice."""
    flags = ["--memory-limit", "85MB", "--batch-size", "8", "--vocab-size", "4000", "--preset", "quick", "--in-place"]
    flags += ["--quiet", "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log", "--device", "cpu"]
    arguments = ["rnnt-bench", "largest", "--only", "optimized_transducer", *flags]
    path = tmp_path / "log" / "largest-batch-size" / "tool.jsonl"
    process = start(*arguments)
    os.kill(wait_for_worker(process, "optimized_transducer probe-12"), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and ">=8" in output and "SIGKILL" in output, errors
    before = path.read_text().splitlines()

    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    after = path.read_text().splitlines()
    again = [line["job"] for line in map(json.loads, after[len(before) :]) if line["record"] == "status"]
    assert after[: len(before)] == before and again[0] == "optimized_transducer probe-12"
    assert "optimized_transducer probe-8" not in again and again[-1].startswith("optimized_transducer judge-")
    (row,) = losses.answer(read(path)).rows
    assert row["status"] == "ok" and row["limited_by"] == "memory" and 8 <= row["largest"] < 12
    assert 0 < row["peak_mb"] * MIB <= 85e6 == row["limit_bytes"]

    assert run(*arguments, "--resume").returncode == 0
    assert path.read_text().splitlines() == after
