"""Measure one cell of an inference profile: a model on batches of one size and one duration.

The outputs are checked first.  Then come the times of calls, the peaks of memory, and calls under
torch.profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
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

#: Of torch.profiler: it records the last two of six calls.
SCHEDULE = {"wait": 2, "warmup": 2, "active": 2, "repeat": 1}
#: Dtype -> how far outputs may be from those in float32, see outputs.difference.  The mantissa of
#: float16 has 11 bits and that of bfloat16 has 8; their rounding adds up over layers.
TOLERANCES = {"float16": 0.02, "bfloat16": 0.05}
#: At least so many calls of a cell are timed, however long they take: the model may not be warm yet
#: in the first.
LEAST_CALLS = 3


def run(job: JobSpec) -> Iterator[Any]:
    """Yield the records of a cell: its environment, then its measurements.

    With `export_logs` leave the profiler's traces in the run's folder.  Raises UserError,
    NotRunnable, WrongResult, and whatever the model raises."""
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
        # Until here calls are in float32; the error is that of the dtype's outputs against these.
        output_error = calls.switch_to(position.dtype)
        times = _timed(calls, settings, device)
        folder = Path(scratch)
        if dimensions.export_logs:
            folder = Path(job.folder) / "traces" / job.job
            folder.mkdir(parents=True, exist_ok=True)
        cell = Cell(
            wall_ns=[time.total_wall_ns for time in times],
            first_ns=[time.first_ns for time in times],
            busy=sum(bool(time.flags) for time in times),
            output_error=output_error,
            **peaks(calls, device)._asdict(),
        )
        _add_profile(cell, calls, settings, folder, job.job)
    yield Measured(value=cell)


def _timed(calls: Calls, settings: Settings, device: torch.device) -> list[CallTime]:
    """Return the times of a cell's calls, after calls that warm the model up."""
    clock = Clock(device)
    warm_up = sampling.warm_up(
        _sampler(calls, clock), batches=[0], max_seconds=math.inf, threads=host_threads(device)
    )
    list(warm_up)  # The generator makes the calls; their times are not wanted.
    return time_calls(
        calls,
        clock,
        spread=settings.spread,
        max_samples=settings.max_samples,
        max_seconds=settings.max_seconds,
        least=LEAST_CALLS,
    )


@dataclass
class Calls:
    """Calls of a model on a batch, as a step that instruments.clock times.

    Attributes:
        waves: (N, samples), float32
        dtype: "float32", or the one of autocast
        streamed: whether the last call gave a symbol before its end
    """

    model: recognisers.Recogniser
    waves: torch.Tensor
    dtype: str = "float32"
    streamed: bool = False

    def switch_to(self, dtype: str) -> float | None:
        """Make all further calls in `dtype`; return the error of the outputs in it, None for
        float32.

        The calls so far must be in float32.  The error is the difference from their outputs, see
        outputs.difference.  Raises WrongResult where the error is above TOLERANCES, or where
        outputs hold NaN."""
        plain = self.outputs()  # in float32
        check_numbers(plain)
        self.dtype = dtype
        if dtype == "float32":
            return None
        outputs = self.outputs()
        check_numbers(outputs)
        error = difference(plain, outputs)
        tolerance = TOLERANCES[dtype]
        if error > tolerance:
            raise WrongResult(
                f"the outputs are off by {error:.2g} of those in float32 (at most {tolerance:g})"
            )
        return error

    def outputs(self, at_first_symbol: Callable[[], None] = lambda: None) -> Any:
        """Make one call; return its outputs, a list of pieces if the model streams.

        At the first symbol of a stream, set `streamed` to True and call `at_first_symbol`.  Without
        a stream, or if no symbol comes, `streamed` becomes False.  Raises WrongResult if a model
        that does not stream returns None."""
        self.streamed = False
        N, samples = self.waves.shape
        device = self.waves.device
        lengths = torch.full((N,), samples, device=device)
        context: AbstractContextManager = nullcontext()
        if self.dtype != "float32":
            context = torch.autocast(device.type, getattr(torch, self.dtype))
        with context:
            if self.model.stream is not None:
                return self._pieces(self.model.stream(self.waves, lengths), at_first_symbol)
            outputs = self.model.call(self.waves, lengths)
        if outputs is None:
            raise WrongResult("the model returns None: it has to return its outputs")
        return outputs

    def _pieces(self, stream: Iterable[Any], at_first_symbol: Callable[[], None]) -> list[Any]:
        """Return all pieces of a stream; at the first that is not empty set `streamed`, and call
        `at_first_symbol`."""
        pieces = []
        for piece in stream:
            pieces.append(piece)
            has_symbols = piece.numel() > 0 if isinstance(piece, torch.Tensor) else bool(piece)
            if has_symbols and not self.streamed:
                self.streamed = True
                at_first_symbol()
        return pieces

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Make one call of the model. Call `after_forward` once: at the first symbol of a stream,
        or at the end of the call if there is no stream or no symbol."""
        self.outputs(after_forward)
        if not self.streamed:  # then no symbol came at which `outputs` would have called it
            after_forward()


@dataclass
class CallTime:
    """The time of one call, as instruments.sampling takes a sample.

    Attributes:
        total_wall_ns: of the whole call, on CUDA synchronised at both ends
        first_ns: to the first symbol of a stream; None where none came before the end
        foreign_cpu, flags: the load beside the call, which sampling fills in
    """

    total_wall_ns: int
    first_ns: int | None
    foreign_cpu: float | None = None
    flags: list[str] = field(default_factory=list)


def time_call(call: Step, clock: Clock) -> CallTime:
    """Make one call; return its time.

    The CallTime has a time to the first symbol only if `call` is a Calls that streamed a symbol."""
    times, _ = time_step(call, clock)
    streamed = isinstance(call, Calls) and call.streamed
    # `forward` ended at the first symbol, where Calls.run called `after_forward`.
    return CallTime(times.total_wall_ns, times.forward_ns if streamed else None)


def time_calls(call: Step, clock: Clock, **caps: Any) -> list[CallTime]:
    """Make calls, at least one, until sampling.enough says that they suffice; return their times,
    each with the load beside the call.

    caps: arguments of sampling.enough, see sampling.sweep."""
    threads = host_threads(clock.device)
    # The number 0 of the only batch stands for the batch that `call` holds already.
    return list(sampling.sweep(_sampler(call, clock), batches=[0], threads=threads, **caps))


def _sampler(call: Step, clock: Clock) -> sampling.Sampler:
    """Return the function with which instruments.sampling takes a sample: it times one call.

    The function ignores its arguments: there is only one batch, and a warm-up is a call like any
    other."""
    return lambda batch, repeat, is_warm_up: time_call(call, clock)


class Peaks(NamedTuple):
    """The peaks of one call above the level before it, and the peak of the whole process.

    A counter that the device does not have is None."""

    process_bytes: int | None
    device_allocated_bytes: int | None
    device_used_bytes: int | None
    process_peak_bytes: int | None


def peaks(call: Step, device: torch.device) -> Peaks:
    """Make one call; return its peaks."""
    # Without the profiler there is only one run, so `fresh` need not make a new step for each.
    counters = memory.peaks(fresh=lambda: call, device=device, profiler=False)
    return Peaks(
        process_bytes=counters.get("process_bytes"),
        device_allocated_bytes=counters.get("device_allocated_bytes"),
        device_used_bytes=counters.get("device_used_bytes"),
        process_peak_bytes=status_bytes("VmHWM"),
    )


def _add_profile(cell: Cell, calls: Calls, settings: Settings, folder: Path, name: str) -> None:
    """Make calls under torch.profiler, and set their number, their self times and their peaks of
    memory in a cell.

    The traces, called `name`, go to `folder`."""
    profiling = replace(
        settings,
        schedule=SCHEDULE,
        record_shapes=False,
        with_stack=False,
        profile_memory=True,
    )
    times: list[tuple[float, float]] = []  # self time on the CPU and on CUDA, microseconds
    profiler.profile(
        itertools.repeat(calls, profiling.trace_steps),
        profiling,
        calls.waves.device,
        folder,
        name,
        on_cycle=lambda cycle: times.append(profiler.self_times(cycle)),
    )
    cell.profiled = SCHEDULE["active"]
    cell.cpu_us = sum(cpu_us for cpu_us, _ in times)
    cell.cuda_us = sum(cuda_us for _, cuda_us in times)
    cell.cpu_peak_bytes = _highest(folder, reader.CPU)
    cell.cuda_peak_bytes = _highest(folder, reader.CUDA)


def _highest(folder: Path, kind: int) -> int | None:
    """Return the highest running sum of allocations within a call, in bytes, from the traces of a
    folder.

    Return None where the traces have no allocation on this kind of device, reader.CPU or CUDA."""
    spans = [span for path in reader.trace_files(folder) for span in windows.spans(path, kind)]
    whole_calls = [span for span in spans if not span.name]  # the others are parts of a call
    return max((span.highest for span in whole_calls), default=None)
