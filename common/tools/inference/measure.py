"""Measures one cell of an inference profile: a model, a length of audio, a batch size, a way to run the model.

Time comes first, then the peaks of the process or the device, then six batches under torch.profiler, of which the last
two are recorded.  A model that is compiled, quantized or in another dtype is first checked against the plain one.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from common.core.errors import NotRunnable, WrongResult
from common.core.files import scratch_folder
from common.core.settings import Settings
from common.core.text import finite
from common.losses.compiler import check
from common.measure import memory, profiler, sampling
from common.measure.clock import Clock, time_step
from common.measure.device import environment, host_threads, set_up_torch
from common.records.schema import Call, CallMemory, JobLine, OutputCheck, ProfiledCalls
from common.system.memory import process_peak_bytes
from common.tools import audio
from common.tools.inference import grid, recognisers
from common.tools.inference.recognisers import Recogniser
from common.tools.outputs import difference
from common.traces import files, spans
from common.traces.reader import CPU, CUDA

#: The profiler records the last two of six batches.
SCHEDULE = {"wait": 2, "warmup": 2, "active": 2, "repeat": 1}
#: How far the outputs of a variant may be off, see outputs.difference: rounding, 8 bits of mantissa, weights of 8 bits.
TOLERANCES = {"compile": 1e-3, "float16": 0.02, "bfloat16": 0.05, "dynamic": 0.25}


def run(job: Mapping[str, Any]) -> Iterator[JobLine]:
    """Yield the records of a cell; the job's ``given`` has the `config` and the `cell`.  Raises UserError, NotRunnable,
    WrongResult, and whatever the model raises."""
    settings, given = Settings.from_json(job["settings"]), job["given"]
    config, position = given["config"], grid.Position.from_json(given["cell"])
    device = set_up_torch(settings)
    torch.manual_seed(settings.seed)
    model = recognisers.load(config["pretrained_model"], device)
    dimensions = config["profiling_dimensions"]
    rate, variant = config["pretrained_model"].get("sample_rate") or model.sample_rate, position.variant
    made = audio.batch(dimensions["example_audio"], position.seconds, position.size, rate, settings.seed)
    calls = Calls(model, made.to(device), device, variant.dtype)
    yield environment(settings, device)
    with torch.no_grad():
        if not variant.is_plain:
            yield from _checked(calls, variant)
        yield from _timed(calls, settings)
        yield peaks(calls.step, calls.device)
        name = job["job"]
        with scratch_folder() as scratch:
            folder = Path(job["folder"]) / "traces" / name if dimensions["export_logs"] else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            yield _profiled(calls, settings, folder, name)


@dataclass
class Calls:
    """A model with its batch; `step` makes one call, ready to be timed."""

    model: Recogniser
    waves: torch.Tensor
    device: torch.device
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.lengths = torch.full((len(self.waves),), self.waves.shape[1], device=self.device)

    def cast(self) -> ContextManager[Any]:
        return (
            nullcontext() if self.dtype == "float32" else torch.autocast(self.device.type, getattr(torch, self.dtype))
        )

    def outputs(self) -> Any:
        with self.cast():
            return self.model(self.waves, self.lengths)

    def step(self) -> ModelCall:
        return ModelCall(self)


@dataclass
class ModelCall:
    """One call of a model.  streamed: whether it gave a first token before its end."""

    calls: Calls
    streamed: bool = False

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Run the call, and `after_forward` at the first token; at the end where the model does not stream."""
        calls = self.calls
        if calls.model.stream is None:
            calls.outputs()
        else:
            with calls.cast():
                for piece in calls.model.stream(calls.waves, calls.lengths):
                    if not self.streamed and _has_symbols(piece):
                        self.streamed = True
                        after_forward()
        if not self.streamed:
            after_forward()


def _has_symbols(piece: Any) -> bool:
    return piece.numel() > 0 if isinstance(piece, torch.Tensor) else bool(piece)


# -- variants --------------------------------------------------------------------------------------------------------


def _checked(calls: Calls, variant: grid.Variant) -> Iterator[OutputCheck]:
    """Change the model as the variant says, and yield the record of how much its outputs changed.

    Raises NotRunnable, and WrongResult after the record of outputs that are too far off.
    """
    calls.dtype = "float32"
    plain = calls.outputs()
    wanted = [TOLERANCES[word] for word in (variant.dtype, variant.quantize) if word in TOLERANCES]
    calls.dtype = variant.dtype
    if variant.quantize == "dynamic":
        if variant.dtype != "float32":
            raise NotRunnable("unsupported", f"--quantize dynamic takes float32, not {variant.dtype}")
        calls.model = quantized(calls.model, calls.device)
    if variant.compile:
        check()
        wanted.append(TOLERANCES["compile"])
        for part in calls.model.parts():
            part.forward = torch.compile(part.forward)
    error, tolerance = difference(plain, calls.outputs()), max(wanted)
    yield OutputCheck(error=finite(error), tolerance=tolerance, ok=error <= tolerance)
    if not error <= tolerance:
        raise WrongResult(f"the outputs are off by {error:.2g} of those in float32 (at most {tolerance:g})")


def quantized(model: Recogniser, device: torch.device) -> Recogniser:
    """Return the model with int8 weights in Linear and LSTM; inputs are quantized at run time.  Raises NotRunnable."""
    if device.type != "cpu":
        raise NotRunnable("unsupported", "--quantize dynamic runs on a CPU alone: give --device cpu")
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will have it
        changed = quantize_dynamic(model, {nn.Linear, nn.LSTM}, dtype=torch.qint8, inplace=True)
    if not any("quantized" in type(module).__module__ for module in changed.modules()):
        raise NotRunnable("unsupported", "--quantize dynamic: the model has no Linear and no LSTM that it changes")
    return changed


# -- measurements ----------------------------------------------------------------------------------------------------


def timed(step: Callable[[], Any], clock: Clock, repeat: int, warmup: bool) -> Call:
    """Return the ``call`` record of one call.  step: makes a Step, whose `streamed`, if it has one, is as of Call."""
    call = step()
    taken = time_step(call, clock)
    streamed = getattr(call, "streamed", False)
    first = (taken.forward_event_ns if clock.cuda else taken.forward_wall_ns) if streamed else None
    return Call(
        repeat=repeat,
        warmup=warmup,
        first_ns=first,
        total_wall_ns=taken.total_wall_ns,
        total_event_ns=taken.total_event_ns,
        minor_faults=taken.minor_faults,
    )


def _timed(calls: Calls, settings: Settings) -> Iterator[Call]:
    clock = Clock(calls.device)

    def sample(_: int, repeat: int, warmup: bool) -> Call:
        return timed(calls.step, clock, repeat, warmup)

    threads = host_threads(calls.device)
    yield from sampling.warm_up(sample, [0], settings.max_seconds, threads)
    yield from sampling.sweep(
        sample,
        [0],
        spread=settings.spread,
        max_samples=settings.max_samples,
        max_seconds=settings.max_seconds,
        threads=threads,
    )


def peaks(step: Callable[[], Any], device: torch.device) -> CallMemory:
    """Return the ``call_memory`` record of one call."""
    counters = memory.peaks(step, device, profiler=False)
    return CallMemory(
        device_allocated_bytes=counters["device_allocated_bytes"],
        device_reserved_bytes=counters["device_reserved_bytes"],
        device_used_bytes=counters["device_used_bytes"],
        process_bytes=counters["process_bytes"],
        process_peak_bytes=process_peak_bytes(),
    )


def _profiled(calls: Calls, settings: Settings, folder: Path, name: str) -> ProfiledCalls:
    """Return the ``profiled_calls`` record of six batches; their traces go to `folder`."""
    changes: Any = {"schedule": SCHEDULE, "record_shapes": False, "with_stack": False, "profile_memory": True}
    profiling = replace(settings, **changes)
    times: List[Tuple[float, float]] = []
    profiler.profile(
        (calls.step() for _ in range(profiling.trace_steps)),
        profiling,
        calls.device,
        folder,
        name,
        on_cycle=lambda profiled: times.append(profiler.self_times(profiled)),
    )
    cpu, cuda = map(sum, zip(*times))
    highest: Dict[int, Optional[int]] = {}
    for kind in (CPU, CUDA):
        steps = [span.highest for path in files.trace_files(folder) for span in spans.read(path, kind) if not span.name]
        highest[kind] = max(steps, default=None)
    return ProfiledCalls(
        batches=SCHEDULE["active"],
        cpu_us=cpu,
        cuda_us=cuda,
        cpu_peak_bytes=highest[CPU],
        cuda_peak_bytes=highest[CUDA],
    )
