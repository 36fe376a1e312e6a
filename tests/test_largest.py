"""--find-largest: the search with made oracles, limits that hold for real, and the command from start to end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, has_words, rows_of, run, start, wait_for_worker
from fixtures_runs import MIB, correctness, environment, records_of, sample, status, summarize, write_records, write_run

from common.analysis import logs, pairs
from common.analysis.metrics import largest
from common.core import flag_types, settings, units
from common.core.errors import UserError
from common.jobs import local, spec, worker
from common.jobs.search import TOLERANCE, memory_limit, next_size
from common.present import table
from common.records.search import bounds
from common.show.cards import of_search
from common.show.page import page
from common.system import memory
from common.tables.search import render


def search(fits, low=1, cap=10**6, start=2):
    """(largest size found, sizes that were tried) when `fits` answers."""
    answers = {}
    while (size := next_size(answers, low, cap, start)) is not None:
        assert size not in answers and low <= size <= cap
        answers[size] = fits(size)
        assert len(answers) < 100
    return bounds(answers)[0], answers


# The search.


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 16, 17, 19, 31, 100, 255, 1000, 99_999])
@pytest.mark.parametrize("start", [1, 2, 30])
def test_the_largest_is_found_to_within_a_twentieth_or_one(limit, start):
    largest, tried = search(lambda size: size <= limit, start=start)
    assert largest <= limit
    assert limit - largest <= max(0, TOLERANCE * limit)
    assert largest == limit or limit > 20  # to the utterance where it is small
    assert len(tried) <= 2 * (limit.bit_length() + 5)


def test_nothing_fits():
    largest, tried = search(lambda size: False, start=30)
    assert largest is None and set(tried.values()) == {False} and min(tried) == 1


def test_all_of_them_fit():
    assert search(lambda size: True, cap=12, start=5) == (12, {5: True, 10: True, 12: True})
    assert search(lambda size: True, cap=12, start=30) == (12, {12: True})


def test_below_the_lowest_size_nothing_is_tried():
    """Sorted batches hold the longest utterance, however few frames are allowed."""
    assert search(lambda size: False, low=400, start=1000)[1].keys() >= {1000, 400}
    largest, tried = search(lambda size: size <= 500, low=400, start=1000)
    assert 475 <= largest <= 500 and min(tried) >= 400


def test_a_size_that_fits_above_one_that_does_not_is_not_believed():
    assert bounds({4: True, 8: False, 16: True}) == (4, 8)
    largest, tried = search(lambda size: size <= 40 and size != 33, start=32)
    assert tried[largest] and largest <= 40
    for seed in range(50):
        chance = random.Random(seed)
        largest, tried = search(lambda size, chance=chance: chance.random() < 0.7, cap=1000, start=4)
        fails = [size for size, fits in tried.items() if not fits]
        assert largest is None or (tried[largest] and all(size > largest for size in fails))
        if largest and fails:
            assert min(fails) - largest <= max(1, TOLERANCE * largest)


def test_what_is_known_is_not_asked_again():
    _, tried = search(lambda size: size <= 77)
    order = list(tried)
    for count in range(len(order)):
        known = {size: tried[size] for size in order[:count]}
        assert next_size(known, 1, 10**6, 2) == order[count]


# Sizes.


@pytest.mark.parametrize(
    "text, size",
    [
        ("4GiB", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5kib", 1536),
        ("80%", 800),
        ("100 %", 1000),
        ("2 TB", 2 * 10**12),
    ],
)
def test_memory_sizes(text, size):
    assert units.bytes_of(text, 1000) == size
    assert flag_types.memory_size(text) == text


@pytest.mark.parametrize("text", ["4", "GiB", "4 parsecs", "-1GiB", "0%", "101%", "nanGiB", "0.1 kB 3", "", "1e-9KB"])
def test_what_is_no_memory_size(text):
    with pytest.raises(UserError):
        flag_types.memory_size(text)


# Flags.


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


def test_flags_are_refused_in_one_line(tiny_shapes, tmp_path):
    where = ["--shape-file", tiny_shapes, "--log-dir", tmp_path]
    search = ["benchmark_ot.py", "--find-largest", "batch-size", *where]
    assert_user_error(run(*search, "--memory-limit", "4 parsecs"), "--memory-limit", "4GiB, 500MB or 80%")
    assert_user_error(run(*search, "--sweep", "vocab-size=50,60"), "--sweep", "--find-largest")
    assert_user_error(run("compare.py", "--rev", "A", "--rev", "B", "--", "--find-largest", "max-frames"), "--rev")
    assert not list(tmp_path.glob("*largest*"))


def test_what_the_search_settles():
    chosen = settings.resolve({"find_largest": "max-frames"}, "cpu")
    assert chosen.sort_utterance and chosen.scopes == ("step",) and chosen.suffix == "largest-max-frames"
    assert settings.resolve({"find_largest": "batch-size", "scopes": ("loss",)}, "cpu").scopes == ("loss",)


# The limit.

ENFORCED = """
import torch
from common.core.errors import UserError
from common.measure.memory import MAKING, AddressSpace

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


def test_the_limit_is_enforced(tmp_path):
    environment = {**os.environ, **spec.PROBE_VARIABLES}
    done = subprocess.run([sys.executable, "-c", ENFORCED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SHORT = """
import resource
from common.measure.memory import AddressSpace

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


def test_less_than_the_limit_is_left_on_a_cpu():
    done = subprocess.run([sys.executable, "-c", SHORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_less_than_the_limit_is_left_on_a_gpu(monkeypatch):
    """A row whose context leaves less than the others' gets what is left; more than the device has is nobody's."""
    torch = pytest.importorskip("torch")
    from common.measure.memory import Device

    free = {"mem_get_info": (70 * MIB, 80 * MIB), "memory_allocated": 0, "synchronize": None, "empty_cache": None}
    for name, answer in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    enough, short = Device("50%", torch.device("cuda:0")), Device("99%", torch.device("cuda:0"))
    assert enough.bytes == 40 * MIB and not enough.warnings
    assert short.bytes == 70 * MIB and "cuda:0" in short.warnings[0]
    assert Device(None, torch.device("cuda:0")).bytes == 70 * MIB
    with pytest.raises(UserError, match="--memory-limit 1GiB: .* only"):
        Device("1GiB", torch.device("cuda:0"))


OWN_BUFFERS = """
import sys, traceback
import torch
from common.core import scripts, settings
from common.losses import inputs, step
from common.losses.layouts import table
from common.measure.memory import AddressSpace
from common.jobs.worker import status_of

scope, cpu = sys.argv[1], torch.device("cpu")
adapter = scripts.load("benchmark_torchaudio")(settings.resolve({"preset": "quick", "vocab_size": 200}, "cpu"))
adapter.load("cpu")
model = table.of(adapter).model(cpu, torch.float32)

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


@pytest.mark.parametrize("scope", ["loss", "step"])
def test_a_limit_that_only_torchaudios_own_buffers_exceed(scope):
    pytest.importorskip("torchaudio")
    environment = {**os.environ, **spec.PROBE_VARIABLES}
    command = [sys.executable, "-c", OWN_BUFFERS, scope]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_more_than_there_is_is_used_whatever_is_asked_for(capsys):
    def limit_of(text):
        chosen = settings.resolve({"find_largest": "batch-size", "memory_limit": text}, "cpu")
        return memory_limit(chosen, memory.total_memory(), memory.available_memory())

    available = memory.available_memory()
    assert limit_of("1GiB").bytes == 2**30
    assert 0.5 * available < limit_of(None).bytes < memory.total_memory()
    assert limit_of("1%").bytes == memory.total_memory() // 100
    assert not capsys.readouterr().err
    clamped = limit_of("900TiB")
    assert 0.5 * available < clamped.bytes < memory.total_memory()
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
    tail = [last_line] if last_line else []
    assert local.how_it_died(returncode, False, tail)[0] == status


def test_errors_for_lack_of_memory():
    no_memory = ["CUDA out of memory. Tried ...", "[2] ... CUDA_ERROR_OUT_OF_MEMORY"]
    no_memory += [f"CUDA error: CUBLAS_STATUS_{what} when calling" for what in ("ALLOC_FAILED", "NOT_INITIALIZED")]
    assert all(worker.status_of(RuntimeError(text)) == "oom" for text in no_memory)
    assert worker.status_of(MemoryError()) == worker.status_of(OSError(12, "Cannot allocate memory")) == "oom"
    assert worker.status_of(RuntimeError("CUDA error: an illegal memory access was encountered")) == "error"
    stable = (
        'torch_call_dispatcher( "aten::%s", "", stack.data(), TORCH_ABI_VERSION) API call failed at ops.h, line 933'
    )
    assert [worker.status_of(RuntimeError(stable % name)) for name in ("new_empty", "sort")] == ["oom", "error"]


# Reading.


def probe(size, value="ok", reason=""):
    job, cells = f"probe-{size}", 100 * size
    batch = {"index": 0, "N": size, "frames": 10 * size, "T_max": 10, "U_max": 9, "useful_cells": cells}
    lines = [environment(job, shape_file_totals={"utterances": 100, "frames": 1000, "T_max": 10})]
    lines.append({"record": "probe", "job": job, "scope": "step", **batch, "padded_cells": cells})
    lines[-1].update(limit_bytes=2**30, limit_kind="address space")
    if value == "ok":
        lines.append({"record": "fit", "job": job, "scope": "step", "batch": 0, "loss": 1.0, "peak_bytes": size * MIB})
    return [*lines, {**status("probe", value, reason), "job": job, "size": size}]


def throughput(size, number, ms, value="ok", pool=100, utterances=None):
    """Two batches of `size` utterances (or of so many `utterances` together) of 10 frames, each `ms` a step."""
    job = f"throughput-{size}-of-{pool}-{number}"
    size, timed_size = utterances // 2 if utterances else size, size
    batches = [{"index": index, "N": size, "frames": 10 * size, "T_max": 10, "U_max": 9} for index in (4, 9)]
    batches = [{**batch, "useful_cells": 100 * size, "padded_cells": 100 * size} for batch in batches]
    lines = [environment(job, batches=batches)]
    for batch in (4, 9):
        lines.append({**sample(f"timing-{number}", "step", batch, ms), "job": job})
    return [*lines, {**status(f"throughput-{number}", value), "job": job, "size": timed_size, "pool": pool}]


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
    assert not answer.at_least and answer.probes == 6 and answer.peak_mb == 13 and answer.padded_cells == 1300
    assert answer.limit_bytes == 2**30 and answer.limit_kind == "address space"
    assert answer.utterances_per_second_rounds == pytest.approx({"1": 1300, "2": 650})
    assert answer.utterances_per_second == pytest.approx(975) and answer.frames_per_second == pytest.approx(9750)
    low, high = answer.frames_per_second_interval  # over two rounds
    assert low * high == pytest.approx(13000 * 6500) and row.frames_per_second == answer.frames_per_second
    assert row.step_ms.median == 15 and row.rounds == 2
    text = render([row], "table")
    assert "13" in text and "memory" in text and "1.000 GiB" in text and "975.0" in text and "13 x 10 x 10" in text


def test_a_size_that_is_given_up_while_it_is_timed_does_not_count(tmp_path):
    jobs = [probe(4), probe(5), probe(6, "oom"), throughput(5, 1, 10), throughput(5, 2, 99, "oom")]
    row = row_of(tmp_path, *jobs, throughput(4, 1, 20), throughput(4, 2, 20))
    assert row.status == "ok" and row.largest.size == 4 and row.largest.limited_by == "memory"
    assert row.step_ms.median == 20 and row.largest.utterances_per_second == pytest.approx(200)


def test_times_over_utterances_that_were_given_up_do_not_count(tmp_path):
    """The largest of all became another: everyone is timed over the utterances of its batches instead."""
    jobs = [probe(4), probe(5, "oom"), throughput(4, 1, 10, pool=16), throughput(4, 2, 10, "error", pool=16)]
    row = row_of(tmp_path / "begun", *jobs, throughput(4, 1, 20, pool=12))
    assert row.status == "interrupted" and row.largest.utterances_per_second == pytest.approx(200)
    row = row_of(tmp_path / "ended", *jobs, throughput(4, 1, 20, pool=12), throughput(4, 2, 20, pool=12))
    assert row.status == "ok" and row.step_ms.n == 4 and row.rounds == 2


def test_what_stopped_early_is_at_least(tmp_path):
    row = row_of(tmp_path / "stopped", probe(4), probe(8), probe(16, "interrupted"))
    assert row.status == "interrupted" and largest(row) == ">=8"
    row = row_of(tmp_path / "untimed", probe(4), probe(5, "oom"), throughput(4, 1, 10))
    assert row.status == "interrupted" and row.largest.limited_by == "memory"
    row = row_of(tmp_path / "crashed", probe(4), probe(8, "error", "killed by SIGSEGV"), throughput(4, 1, 10))
    assert (row.status, row.largest.limited_by) == ("error", "error")
    assert "batch-size 8: killed by SIGSEGV" in row.reason and largest(row) == ">=4"


def test_limits_that_are_no_lack_of_memory(tmp_path):
    timed = [throughput(4, 1, 10), throughput(4, 2, 10)]
    row = row_of(tmp_path / "time", probe(4), probe(5, "timeout", "took more than 60 s (--timeout)"), *timed)
    assert row.status == "ok" and row.largest.limited_by == "time" and "60 s" in row.notes[-1]
    row = row_of(tmp_path / "cap", probe(4), *timed, largest_cap=4)
    assert row.status == "ok" and row.largest.limited_by == "cap"
    every = [throughput(100, 1, 10), throughput(100, 2, 10)]
    assert row_of(tmp_path / "all", probe(100), *every).largest.limited_by == "all"
    row = row_of(tmp_path / "none", probe(1, "oom", "no memory"))
    assert row.status == "oom" and largest(row) == "none" and "not even batch-size 1" in row.reason


def test_a_missing_package_stays_a_row(tmp_path):
    write_search(tmp_path, "k2")
    records = records_of(tmp_path)
    write_records(tmp_path, [records[0], status("correctness", "missing", "pip install k2")])
    (row,) = logs.read([tmp_path]).searches
    assert row.status == "missing" and row.reason == "pip install k2"
    assert "missing" in render([row], "markdown")


def test_summarize_shows_both_tables(tmp_path):
    write_run(tmp_path / "timed", "torchaudio")
    write_search(tmp_path / "searched", "torchaudio", probe(4), probe(5, "oom"))
    table = summarize(tmp_path)
    assert "batch size 30" in table and "largest batch-size that fits" in table
    ordinary, searched = json.loads(summarize(tmp_path, "--format", "json"))
    assert not ordinary["largest"] and searched["largest"]["size"] == 4
    assert "largest_size" in summarize(tmp_path, "--format", "csv", "--all-columns").splitlines()[0]
    assert "largest batch-size that fits" in summarize(tmp_path / "searched", "--format", "markdown")


def test_a_search_is_nothing_to_compare(tmp_path):
    write_search(tmp_path, "torchaudio", probe(4))
    with pytest.raises(UserError, match="--find-largest"):
        pairs.read_runs(tmp_path)


# The report.


def cards_and_page(folder):
    (group,) = logs.read([folder]).groups
    cards = {card.question: (card.answer, table.words(card.lines[0][1])) for card in of_search(group.rows)}
    return cards, page([group], folder, "/* plotly */")


def test_the_report_says_who_holds_most(tmp_path):
    def search_of(name, size, ms, **head):
        rounds = [throughput(size, number, ms[number - 1], utterances=40) for number in (1, 2, 3)]
        write_search(tmp_path / name, name, probe(size), probe(size + 1, "oom"), *rounds, rounds=3, **head)

    search_of("slim", 20, [50, 55, 60])
    search_of("quick", 10, [10, 11, 12])
    search_of("k2-pruned", 90, [1, 1, 1], exact=False)
    cards, text = cards_and_page(tmp_path)
    assert "<dt>Threads</dt>" in text and "<dt>Batches</dt>" not in text  # each has its own, in the table
    assert cards["Largest batch, exact losses"][0] == "slim"
    assert "20 utterances" in cards["Largest batch, exact losses"][1]
    assert "Largest batch that fits" in text and "k2-pruned (approx.)" in text and "90" in text
    assert has_words(text, "throughput", "40 utterances", "400 frames")


def test_sizes_and_speeds_that_are_close_are_unclear(tmp_path):
    for name, size, ms in (("a", 40, (10, 12, 11)), ("b", 41, (11, 10, 13))):
        rounds = [throughput(size, number, ms[number - 1], utterances=82) for number in (1, 2, 3)]
        write_search(tmp_path / name, name, probe(size), probe(size + 1, "oom"), *rounds, rounds=3)
    cards, _ = cards_and_page(tmp_path)
    assert [answer for answer, _ in cards.values()] == ["b or a"]


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
    largest = row["largest"]
    assert (
        row["status"] == "ok"
        and 8 <= largest["size"] < largest["too_large"] <= 12
        and largest["limited_by"] == "memory"
    )
    assert 0 < largest["peak_mb"] * MIB <= 85e6 == largest["limit_bytes"]
    assert largest["utterances_per_second"] > 0 and largest["frames_per_second"] > largest["utterances_per_second"]
    outcomes = [record["status"] for record in after if record["record"] == "status" and record["pass"] == "probe"]
    assert "oom" in outcomes

    assert run(*arguments, "--resume").returncode == 0
    assert records_of(folder) == after
