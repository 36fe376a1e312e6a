"""What a CPU can show of CUDA runs: which Python sees a device, what is set, and the order of calls."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rnnt_bench.core import settings
from rnnt_bench.core.errors import NotRunnable, UserError
from rnnt_bench.instruments import clock, device, memory
from rnnt_bench.losses import inputs, subject
from rnnt_bench.losses.passes import timing
from rnnt_bench.records import schema
from rnnt_bench.setup import interpreters
from rnnt_bench.system import machine, processes
from rnnt_bench.tools.largest import measure
from rnnt_bench.tools.largest.search import Request

from fixtures_runs import correctness, environment, one_row, sample, status, write_run

ROOT = Path(__file__).resolve().parents[1]


def test_each_python_is_asked_and_no_run_is_on_the_cpu_in_silence(capsys, monkeypatch):
    """One whose torch sees two devices, and one whose driver is too old."""
    monkeypatch.setattr(machine, "gpu_may_be_here", lambda: True)
    sees, blind = Path("sees"), Path("blind")
    answers = {sees: '[2, "2.11.0+cu130", ""]', blind: '[0, "1.13.1+cu117", "The NVIDIA driver is too old"]\n'}
    monkeypatch.setattr(processes, "output", lambda words, **_: answers[Path(words[0])])

    def resolved(wanted, *asked):
        return interpreters.resolve_device(wanted, asked), capsys.readouterr().err

    assert resolved("auto", sees) == ("cuda", "")
    for wanted, where in (("auto", "cuda"), ("cuda:1", "cuda:1")):
        told, errors = resolved(wanted, blind, sees)
        assert told == where and str(blind) in errors and "too old" in errors and "unsupported" in errors
    told, errors = resolved("auto", blind)
    assert told == "cpu" and "on the CPU" in errors and "too old" in errors
    with pytest.raises(UserError, match="too old"):
        interpreters.resolve_device("cuda", [blind])
    versions, look = {sees: "1.13.1+cu117", blind: "2.11.0+cu130"}, interpreters._look
    monkeypatch.setattr(interpreters, "_look", lambda python: look(python)._replace(torch=versions[python]))
    told, errors = resolved("auto", sees, blind)  # the newest torch decides, and the driver is too old for it
    assert told == "cpu" and str(blind) in errors and "on the CPU" in errors and "docs/gpu.md" in errors
    assert resolved("cuda", sees, blind)[0] == "cuda"


@pytest.mark.parametrize("wanted", [False, True])
def test_tf32_is_set_both_ways_whatever_the_environment_says(wanted):
    code = f"""
import torch
from dataclasses import replace
from rnnt_bench.core import settings
from rnnt_bench.instruments import device
flags = torch.backends.cuda.matmul, torch.backends.cudnn
before = flags[0].allow_tf32
device.set_up_torch(replace(settings.resolve({{}}, "cpu"), tf32={wanted}))
print(before, *(flag.allow_tf32 for flag in flags))
"""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0" if wanted else "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [str(not wanted), str(wanted), str(wanted)], done.stderr


def test_the_l2_cache_is_cold_as_in_nvbench_and_flags_of_cuda_stay_there():
    assert settings.resolve({}, "cuda").tf32 is False and settings.resolve({}, "cuda").l2 == "cold"
    assert settings.resolve({"l2": "warm"}, "cuda").l2 == "warm"
    with pytest.raises(UserError, match="--l2"):
        settings.resolve({"l2": "cold"}, "cpu")


class FakeCuda:
    """The calls that a timed step makes, in order."""

    answer, prepared = 1.0, None

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("synchronize", "set_device", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self.calls.append("default_stream"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def record(self):
        self.calls.append("event")

    def elapsed_time(self, end):
        return 2.5

    def run(self, after_forward):
        self.calls.append("forward")
        after_forward()
        self.calls.append("backward")
        return self.answer


def test_work_is_on_the_stream_that_every_package_launches_on(monkeypatch):
    fake = FakeCuda(monkeypatch)
    assert device.current(torch.device("cuda")) == torch.device("cuda:0")
    assert fake.calls == ["set_device", "default_stream", "set_stream"]
    with pytest.raises(NotRunnable, match="does not see cuda:3"):
        device.current(torch.device("cuda:3"))


def test_a_round_on_cuda_holds_its_inputs_warms_up_each_batch_and_then_sweeps(monkeypatch):
    fake, ticks = FakeCuda(monkeypatch), itertools.count(0, 1000)
    monkeypatch.setattr(timing.after_timing, "run", lambda context, ends, rounded: (end for end, *_ in ends))
    monkeypatch.setattr(timing.Taken, "keep", lambda *_: None)
    monkeypatch.setattr(clock, "now", lambda: next(ticks))
    monkeypatch.setattr(clock, "cache_bytes", lambda device: 50)
    over = SimpleNamespace(zero_=lambda: fake.calls.append("cool"))
    monkeypatch.setattr(torch, "empty", lambda size, **_: over if size == 100 else None)
    asked = SimpleNamespace(
        settings=settings.resolve({"max_samples": 4}, "cuda"),
        device=torch.device("cuda:0"),
        batches=[3, 1],
        round=1,
        state={},
        all_batches=None,
        model=torch.nn.Module(),
        loops_in_python=False,
        hold_inputs=lambda batches: fake.calls.append(("hold inputs", *batches)),
        step=lambda *position: fake.calls.append(position) or fake,
    )
    records = list(timing.run(asked))
    timed = ["cool", "synchronize", "event", "forward", "event", "backward", "event", "synchronize"]
    warm_up = [(3, 0, True), (3, 1, True), (1, 0, True)]  # two that agree, then each other batch
    sweeps = [(1, 0, False), (3, 0, False), (1, 1, False), (3, 1, False)]  # the second round begins at the second batch
    places = [(scope, *position) for scope in ("loss", "step") for position in [*warm_up, *sweeps]]
    expected = [("hold inputs", 3, 1)]
    for scope, batch, repeat, warmup in places:
        expected += [(scope, batch, 4 * repeat + 2 * warmup + (scope == "step")), *timed]
    assert fake.calls == expected
    samples = [record for record in records if isinstance(record, timing.Sample)]
    assert [(sample.scope, sample.batch, sample.repeat, sample.warmup) for sample in samples] == places
    assert {(sample.total_event_ns, sample.forward_wall_ns) for sample in samples} == {(2_500_000, None)}
    assert all(sample.total_wall_ns > 0 for sample in samples)
    assert sum(isinstance(record, timing.Stop) for record in records) == 2


def test_inputs_held_ahead_are_the_same_bits_in_leaves_of_their_own():
    chosen = settings.resolve({"preset": "quick"}, "cpu")
    shapes = [[(9, 3), (7, 2)], [(5, 1)]]
    held = subject.Context(chosen, None, torch.device("cpu"), torch.float32, None, shapes, [0, 1])
    before = held.make_batch(1)
    held.hold_inputs([1])
    first, other = held.make_batch(1, repeat=4), held.make_batch(1, repeat=5)
    assert torch.equal(before.encoder_out, first.encoder_out) and torch.equal(before.targets, first.targets)
    first.encoder_out.sum().backward()
    for name in inputs.OUTPUTS:
        leaf = getattr(other, name)
        assert leaf.is_leaf and leaf.requires_grad and leaf.grad is None
        assert leaf.data_ptr() == getattr(first, name).data_ptr()  # nothing is made or copied in between


class NvmlError(Exception):
    """The error that nvidia-ml-py raises."""


def raises(*_):
    raise NvmlError


def test_what_the_driver_says_is_recorded_and_what_it_does_not_is_null(monkeypatch):
    """A stand-in for nvidia-ml-py has one GPU, on a driver that does not know of ECC."""
    gpus = [0]
    fake = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: "GPU-0",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid if uuid == "GPU-0" else raises(),
        nvmlSystemGetDriverVersion=lambda: b"580.65",
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 345, 2: 2619}[kind],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetTemperature=lambda handle, kind: 41,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x5,
        nvmlDeviceGetEccMode=raises,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    told = machine.gpu("0")
    clocks = {"sm_mhz": 345, "sm_most_mhz": 1980, "memory_mhz": 2619, "power_cap_watts": 700.0, "celsius": 41}
    assert told == {"uuid": None, "driver": "580.65", **clocks, "throttled_by": ["idle", "power cap"], "ecc": None}
    assert machine.gpu(None) == told and machine.gpu("another") is None
    assert schema.typed({"record": "limits", "gpu": told}).gpu.power_cap_watts == 700
    gpus.append(1)
    assert machine.gpu(None) is None  # whichever it is
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.gpu("0") is None


def test_memory_that_is_taken_past_torch_is_seen(monkeypatch):
    FakeCuda(monkeypatch)
    free = [1000]
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name, value in (("", 10), ("max_", 210)):
        monkeypatch.setattr(torch.cuda, f"{name}memory_allocated", lambda device, value=value: value)
        monkeypatch.setattr(torch.cuda, f"{name}memory_reserved", lambda device, value=value: 2 * value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2000))

    class TakesAndGivesBack:
        def run(self):
            free[0] = 300
            until = time.monotonic() + 10
            while len(seen := [size for size in looked if size == 300]) < 2 and time.monotonic() < until:
                time.sleep(0.001)
            free[0] = 900
            return seen

    looked = []
    told = torch.cuda.mem_get_info
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: looked.append(free[0]) or told(device))
    peaks = memory.cuda_peaks(TakesAndGivesBack(), torch.device("cuda:0"))
    assert peaks == {"device_allocated_bytes": 200, "device_reserved_bytes": 400, "device_used_bytes": 700}


@pytest.mark.parametrize("kind, warmed", [("cpu", [4]), ("cuda", [1, 2])])
def test_kernels_of_what_is_tried_are_loaded_before_the_limit(monkeypatch, kind, warmed):
    order = []

    def step(scope, batch, utterances):
        return SimpleNamespace(run=lambda: order.append((scope, batch, utterances)))

    asked = SimpleNamespace(
        device=torch.device(kind),
        step=step,
        settings=SimpleNamespace(scopes=["step"]),
        batches=[4, 1],
        all_batches=None,
        model=SimpleNamespace(zero_grad=lambda set_to_none: None),
    )
    monkeypatch.setattr(measure, "heaviest", lambda batches: [1, 2])
    for name in ("Device", "AddressSpace"):
        monkeypatch.setattr(measure, name, lambda *limit: order.append("limit"))
    measure.limit_once_loaded(asked, Request(memory_limit="4GiB"))
    assert order == [*(("step", batch, 1) for batch in warmed), "limit"]


def test_on_cuda_a_loss_is_ranked_by_events_and_a_step_by_the_wall_clock(tmp_path):
    events = {"forward_wall_ns": None, "forward_event_ns": 1_000_000}
    lines = [
        environment("timing-1", device="cuda", device_name="NVIDIA H200"),
        *(sample("timing-1", scope, 4, 10, total_event_ns=7_000_000, **events) for scope in ("step", "loss")),
        status("timing-1"),
    ]
    row = one_row(write_run(tmp_path / "a", jobs=[correctness(), lines], passes=["correctness", "timing"], rounds=1))
    assert (row["step_ms"], row["step"]["event"]["median"]) == (10, 7)
    assert (row["loss_ms"], row["loss"]["wall"]["median"]) == (7, 10)
    assert (row["step"]["medians"], row["loss"]["medians"]) == ({"1": {"4": 10}}, {"1": {"4": 7}})
    on_cpu = one_row(write_run(tmp_path / "b"))
    assert on_cpu["loss"]["wall"] is on_cpu["step"]["wall"] is None
