"""Measures one cell of an inference profile: a model, a length of audio, a batch size, a way to run
the model.

The outputs are checked first, then come time, the peaks of the process or the device, and six
batches under torch.profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.files import scratch_folder
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import Settings
from rnnt_bench.instruments import memory, profiler, sampling
from rnnt_bench.instruments.clock import Clock, Step, time_step
from rnnt_bench.instruments.device import environment, host_threads, set_up_torch
from rnnt_bench.records.schema import Measured
from rnnt_bench.system.memory import status_bytes
from rnnt_bench.tools.inference import recognisers
from rnnt_bench.tools.inference.outputs import check_numbers, difference
from rnnt_bench.tools.inference.rows import Cell, Request
from rnnt_bench.traces import reader, windows

#: The profiler records the last two of six batches.
SCHEDULE = {"wait": 2, "warmup": 2, "active": 2, "repeat": 1}
#: Dtype -> how far outputs may be from those in float32, see outputs.difference: mantissas of 11
#: and of 8 bits, over layers.
TOLERANCES = {"float16": 0.02, "bfloat16": 0.05}
#: Timed calls of a cell, however long they take: one alone may be of a model that is not warm yet.
LEAST_CALLS = 3


def run(job: JobSpec) -> Iterator[Any]:
    """Yield the records of a cell.  Raises UserError, NotRunnable, WrongResult, and whatever the
    model raises."""
    settings = job.settings
    request = msgspec.convert(job.request, Request)
    position, dimensions = request.cell, request.config.profiling_dimensions
    device = set_up_torch(settings)
    torch.manual_seed(settings.seed)
    source = request.config.pretrained_model
    model = recognisers.load(source, device)
    rate = source.sample_rate or model.sample_rate
    waves = recognisers.batch(
        dimensions.example_audio, position.seconds, position.size, rate, settings.seed
    )
    calls = Calls(model, waves.to(device))
    yield environment(settings, device)
    with torch.no_grad(), scratch_folder() as scratch:
        error = calls.take(position.dtype)
        clock = Clock(device)
        list(
            sampling.warm_up(
                lambda *_: time_call(calls, clock), [0], math.inf, host_threads(device)
            )
        )
        samples = time_calls(
            calls,
            clock,
            spread=settings.spread,
            max_samples=settings.max_samples,
            max_seconds=settings.max_seconds,
            least=LEAST_CALLS,
        )
        folder = Path(scratch)
        if dimensions.export_logs:
            folder = Path(job.folder) / "traces" / job.job
            folder.mkdir(parents=True, exist_ok=True)
        cell = Cell(
            wall_ns=[sample.total_wall_ns for sample in samples],
            first_ns=[sample.first_ns for sample in samples],
            busy=sum(bool(sample.flags) for sample in samples),
            output_error=error,
            **peaks(calls, device)._asdict(),
        )
        _add_profile(cell, calls, settings, folder, job.job)
    yield Measured(value=cell)


@dataclass
class Calls:
    """Calls of a model on a batch.  streamed: whether the last one gave a first token before its
    end."""

    model: recognisers.Recogniser
    waves: torch.Tensor
    dtype: str = "float32"
    streamed: bool = False

    def take(self, dtype: str) -> float | None:
        """Run in `dtype` from now on; return how far the outputs are then from those in float32,
        None in float32. Raises WrongResult for outputs that are wrong."""
        plain = self.outputs()
        check_numbers(plain)
        if dtype == self.dtype:
            return None
        self.dtype = dtype
        outputs = self.outputs()
        check_numbers(outputs)
        error = difference(plain, outputs)
        tolerance = TOLERANCES[dtype]
        if not error <= tolerance:
            raise WrongResult(
                f"the outputs are off by {error:.2g} of those in float32 (at most {tolerance:g})"
            )
        return error

    def outputs(self, after_forward: Callable[[], None] = lambda: None) -> Any:
        """Make one call, and `after_forward` at the first token; return the outputs, of a stream
        its pieces.  Raises WrongResult for None."""
        self.streamed = False
        N, samples = self.waves.shape
        device = self.waves.device
        lengths = torch.full((N,), samples, device=device)
        mixed = self.dtype != "float32"
        with torch.autocast(device.type, getattr(torch, self.dtype)) if mixed else nullcontext():
            if self.model.stream is None:
                outputs = self.model.call(self.waves, lengths)
                if outputs is None:
                    raise WrongResult("the model returns None: it has to return its outputs")
                return outputs
            pieces = []
            for piece in self.model.stream(self.waves, lengths):
                pieces.append(piece)
                has_symbols = piece.numel() > 0 if isinstance(piece, torch.Tensor) else bool(piece)
                if has_symbols and not self.streamed:
                    self.streamed = True
                    after_forward()
            return pieces

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Make one call, and `after_forward` at the first token, else at the end.  Raises
        WrongResult for None."""
        self.outputs(after_forward)
        if not self.streamed:
            after_forward()


def time_call(call: Step, clock: Clock) -> SimpleNamespace:
    """Return the time of one call, on CUDA synchronised at both ends.  first_ns: to a stream's
    first token, or None."""
    times, _ = time_step(call, clock)
    first = times.forward_ns if getattr(call, "streamed", False) else None
    return SimpleNamespace(
        total_wall_ns=times.total_wall_ns, first_ns=first, foreign_cpu=None, flags=[]
    )


def time_calls(call: Step, clock: Clock, **caps: Any) -> list[SimpleNamespace]:
    """Return the times of calls, with flags of the load beside them; caps: see sampling.enough."""
    threads = host_threads(clock.device)
    return list(sampling.sweep(lambda *_: time_call(call, clock), [0], threads=threads, **caps))


class Peaks(NamedTuple):
    """Hold the peaks of one call above the level before it, and that of the whole process; None of
    a counter that this device has not."""

    process_bytes: int | None
    device_allocated_bytes: int | None
    device_used_bytes: int | None
    process_peak_bytes: int | None


def peaks(call: Step, device: torch.device) -> Peaks:
    """Return the peaks of one call."""
    counters = memory.peaks(lambda: call, device, profiler=False)
    return Peaks(
        counters.get("process_bytes"),
        counters.get("device_allocated_bytes"),
        counters.get("device_used_bytes"),
        status_bytes("VmHWM"),
    )


def _add_profile(cell: Cell, calls: Calls, settings: Settings, folder: Path, name: str) -> None:
    """Add to a cell what six batches under torch.profiler took; their traces go to `folder`."""
    profiling = replace(
        settings,
        schedule=SCHEDULE,
        record_shapes=False,
        with_stack=False,
        profile_memory=True,
    )
    times: list[tuple[float, float]] = []
    profiler.profile(
        itertools.repeat(calls, profiling.trace_steps),
        profiling,
        calls.waves.device,
        folder,
        name,
        on_cycle=lambda profiled: times.append(profiler.self_times(profiled)),
    )
    cell.profiled = SCHEDULE["active"]
    cell.cpu_us = sum(cpu_us for cpu_us, _ in times)
    cell.cuda_us = sum(cuda_us for _, cuda_us in times)
    cell.cpu_peak_bytes = _highest(folder, reader.CPU)
    cell.cuda_peak_bytes = _highest(folder, reader.CUDA)


def _highest(folder: Path, kind: int) -> int | None:
    """Return the highest running sum of allocations in the traces of a folder; kind: of device."""
    spans = [span for path in reader.trace_files(folder) for span in windows.spans(path, kind)]
    return max((span.highest for span in spans if not span.name), default=None)
