"""What a loss does beside its answer in the processes that measure it: work that no clock sees, memory, their state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.implementations import find
from rnnt_bench.instruments import device
from rnnt_bench.instruments import memory as instruments_memory
from rnnt_bench.instruments.clock import Clock, time_step
from rnnt_bench.losses import layouts
from rnnt_bench.losses.passes import memory as memory_pass
from rnnt_bench.losses.passes import timing as timing_pass
from rnnt_bench.records.schema import Stop
from rnnt_bench.system.memory import children_bytes

from commands import ROOT
from fixtures_runs import MIB
from test_contract import adapter_of, context_of

CPU = torch.device("cpu")
SHAPES = [(20, 5), (16, 3)]


def reference(**flags):
    return adapter_of(find("reference"), "cpu", **{"vocab_size": 40, "encoder_dim": 16, **flags})


# Work that no clock sees.


@pytest.mark.parametrize("name", ["reference", "reference:by-utterance"])
def test_what_is_prepared_before_the_clock_has_no_outputs(name, monkeypatch):
    adapter = adapter_of(find(name), "cpu", vocab_size=40, encoder_dim=16)
    right = adapter.prepare

    def joins(batch):
        prepared = right(batch)
        prepared.joined = batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1)
        return prepared

    monkeypatch.setattr(adapter, "prepare", joins)
    with pytest.raises(AttributeError, match="encoder_out"):
        context_of(adapter, SHAPES, 2).step("step", 0)


class Lazy(torch.Tensor):
    pass


class LazyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.as_subclass(Lazy)


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_what_may_put_off_its_work_is_refused(wrong, monkeypatch):
    adapter = reference()
    right = adapter.loss
    if wrong == "loss":
        monkeypatch.setattr(adapter, "loss", lambda logits, given: right(logits, given).as_subclass(Lazy))
    else:
        monkeypatch.setattr(adapter, "loss", lambda logits, given: right(LazyGradient.apply(logits), given))
    taken = context_of(adapter, SHAPES, 2).step("loss", 0)
    with pytest.raises(TypeError, match=f"the {wrong}.* is a Lazy"):
        taken.run()
        taken.gradients()


def test_the_answer_is_read_before_the_clock_ends():
    def read(answer):
        time.sleep(0.02)
        return answer + 1

    timed, value = time_step(SimpleNamespace(run=lambda after_forward: after_forward() or 1), Clock(CPU), read)
    assert value == 2 and timed.total_wall_ns >= 20e6 > timed.forward_wall_ns


def test_each_test_that_the_page_on_own_losses_names_is_there():
    names = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "own-loss.md").read_text())
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert len(names) > 5 and [name for name in names if f"def {name}(" not in sources] == []


# The state of a process.


def autocast_left_on():
    torch.autocast("cpu").__enter__()


CHANGES = {
    "the random seed": lambda: torch.manual_seed(7),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": autocast_left_on,
    "the precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "the priority": lambda: os.nice(1),
    "the CPUs that it may use": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_loss_changes_of_its_process_is_said(name):
    """The process is its own: its state is lost with it."""
    before = device.state()
    reading, writing = os.pipe()
    if not os.fork():
        torch.set_num_threads(1)  # no thread of torch's outlives a fork
        start = device.state()
        CHANGES[name]()
        now = device.state()
        os.write(writing, " ".join(key for key in now if now[key] != start[key]).encode())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1000).decode() == name and device.state() == before


@pytest.mark.parametrize("which", [min, max])
def test_weights_that_the_timed_process_rounds_are_found(which, monkeypatch):
    context = context_of(reference(max_samples=6, max_seconds=100.0, allocator="system"), SHAPES, 2)
    right, steps = layouts.Layout.step, []

    def step_of(layout, model, batch, prepared):
        steps.append(batch)
        weight = which(model.parameters(), key=torch.Tensor.numel)
        if len(steps) == 3:
            weight.data.copy_(weight.data.bfloat16())
        return right(layout, model, batch, prepared)

    monkeypatch.setattr(layouts.Layout, "step", step_of)
    with pytest.raises(WrongResult, match=r"it overwrites output\.(weight|bias)"):
        list(timing_pass.run(context))


@pytest.mark.parametrize("leaks, share", [(range(0), 0), (range(9, 10), 0), (range(1000), 1)])
def test_a_leak_of_every_gradient_is_measured(monkeypatch, leaks, share):
    """`leaks` are the calls whose gradient is kept; that of a single call is no leak."""
    adapter, held, calls = reference(max_samples=9, max_seconds=100.0, allocator="system"), [], count()
    right = adapter.loss

    def loss(logits, given):
        same = logits.clone()
        if same.requires_grad and next(calls) in leaks:
            same.register_hook(held.append)
        return right(same, given)

    monkeypatch.setattr(adapter, "loss", loss)
    ends = [line for line in timing_pass.run(context_of(adapter, SHAPES, 2)) if isinstance(line, Stop)]
    of_logits = 4 * 2 * 20 * 6 * 40
    assert {end.scope for end in ends} == {"loss", "step"} and bool(held) == bool(leaks)
    assert all(end.leaked_bytes == pytest.approx(share * of_logits, rel=0.5, abs=of_logits / 10) for end in ends)


# Memory.


class Keeps:
    """The reference's loss, which takes a workspace at its `first` call and keeps it."""

    def __init__(self, right, first, size):
        self.right, self.first, self.size, self.calls, self.workspace = right, first, size, 0, None

    def __call__(self, logits, given):
        self.calls += 1
        if self.calls == self.first:
            self.workspace = torch.zeros(self.size, dtype=torch.uint8)
        return self.right(logits, given)


def peaks_of_a_loss_that_keeps(first):
    """Return the peaks in MiB of a loss that takes a workspace of 40 MiB at its `first` call."""
    adapter = reference()
    adapter.loss = Keeps(adapter.loss, first, 40 * MIB)
    context = context_of(adapter, SHAPES, 2)
    context.settings = replace(context.settings, scopes=("step",))
    (record,) = memory_pass.run(context)
    return [record.process_bytes / MIB, record.torch_allocated_bytes / MIB]


@pytest.mark.parametrize("first", [1, 5, 10**9])
def test_a_workspace_that_a_loss_keeps_is_memory_that_it_takes(first):
    # a process of its own: what other tests free would count as the loss's
    program = f"import test_beside_the_clock as here; print(here.peaks_of_a_loss_that_keeps({first}))"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": paths}, text=True)
    peaks = json.loads(printed.splitlines()[-1])
    assert all((40 < peak < 60) == (first < 10) for peak in peaks), peaks


def test_the_memory_of_a_child_counts():
    def run(after_forward=lambda: None):
        command = [sys.executable, "-c", "x = b'x' * (60 << 20); print(flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(0.1)
            child.communicate(b"\n")

    peaks = instruments_memory.peaks(lambda: SimpleNamespace(run=run), CPU, profiler=False)
    assert 60 < peaks["process_bytes"] / MIB < 100


def test_a_child_that_still_has_the_memory_of_its_parent_does_not_count(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    spawn = (
        "import os, sys; x = b'x' * (60 << 20); print(flush=True)\n"
        "actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]\n"
        "os.posix_spawn('/bin/cat', ['cat'], {}, file_actions=actions)\n"
        "os.wait()"
    )
    command = [sys.executable, "-c", spawn, str(gate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        time.sleep(0.5)  # its child waits for the gate before it becomes cat
        assert children_bytes(str(parent.pid)) == 0
        with open(gate, "w"):
            time.sleep(0.2)
            assert 0 < children_bytes(str(parent.pid)) < 10 * MIB
