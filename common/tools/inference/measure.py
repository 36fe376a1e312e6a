"""Measures one cell of an inference profile: a model, a length of audio, a batch size, a way to run the model.

Time comes first, then the peaks of the process or the device, then six batches under torch.profiler, of which the last
two are recorded.  A model that is compiled, quantized or in another dtype is first checked against the plain one.
"""

from __future__ import annotations

import itertools
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Tuple

import msgspec
import torch
from torch import nn

from common.core.errors import NotRunnable, WrongResult
from common.core.files import scratch_folder
from common.core.settings import Settings
from common.losses.compiler import check
from common.measure import memory, profiler, sampling
from common.measure.clock import Clock, time_step
from common.measure.device import environment, host_threads, set_up_torch
from common.measure.stages import Step
from common.records.schema import Measured
from common.system.memory import process_peak_bytes
from common.tools.inference import audio, recognisers
from common.tools.inference.recognisers import Recogniser
from common.tools.inference.rows import Cell, Position, Profile
from common.traces import files
from common.traces import memory as traced
from common.traces.reader import CPU, CUDA

#: The profiler records the last two of six batches.
SCHEDULE = {"wait": 2, "warmup": 2, "active": 2, "repeat": 1}
#: Largest difference of a variant's outputs (outputs.difference): rounding, 8 bits of mantissa, weights of 8 bits.
TOLERANCES = {"compile": 1e-3, "float16": 0.02, "bfloat16": 0.05, "dynamic": 0.25}


def run(job: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the records of a cell; the job's ``given`` has the `config` and the `cell`.  Raises UserError, NotRunnable,
    WrongResult, and whatever the model raises."""
    settings, given = Settings.from_json(job["settings"]), job["given"]
    config, position = msgspec.convert(given["config"], Profile), msgspec.convert(given["cell"], Position)
    device = set_up_torch(settings)
    torch.manual_seed(settings.seed)
    model = recognisers.load(given["config"]["pretrained_model"], device)
    rate, dimensions = config.pretrained_model.sample_rate or model.sample_rate, config.profiling_dimensions
    waves = audio.batch(dimensions.example_audio, position.seconds, position.size, rate, settings.seed)
    calls = Calls(model, waves.to(device), position.dtype)
    yield environment(settings, device)
    with torch.no_grad(), scratch_folder() as scratch:
        error = None if position.is_plain else checked(calls, position)
        samples = timed(calls, device, settings)
        folder = Path(job["folder"]) / "traces" / job["job"] if dimensions.export_logs else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        cell = Cell(
            wall_ns=[sample.total_wall_ns for sample in samples],
            first_ns=[sample.first_ns for sample in samples],
            busy=sum(bool(sample.flags) for sample in samples),
            output_error=error,
            **peaks(calls, device),
            **_profiled(calls, settings, folder, job["job"]),
        )
    yield Measured(value=cell)


@dataclass
class Calls:
    """Calls of a model on a batch.  streamed: whether the last one gave a first token before its end."""

    model: Recogniser
    waves: torch.Tensor
    dtype: str = "float32"
    streamed: bool = False

    def cast(self) -> ContextManager[Any]:
        """Return autocast where the dtype is another one than float32."""
        dtype, device = getattr(torch, self.dtype), self.waves.device.type
        return nullcontext() if self.dtype == "float32" else torch.autocast(device, dtype)

    def lengths(self) -> torch.Tensor:
        """Return the samples of each utterance."""
        return torch.full((len(self.waves),), self.waves.shape[1], device=self.waves.device)

    def outputs(self) -> Any:
        """Return what the model returns.  Raises WrongResult for nothing."""
        with self.cast():
            result = self.model(self.waves, self.lengths())
        if result is None:
            raise WrongResult("the model returns None: it has to return its outputs")
        return result

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Make one call, and `after_forward` at the first token; at the end where the model does not stream."""
        self.streamed = False
        if self.model.stream is None:
            self.outputs()
        else:
            with self.cast():
                for piece in self.model.stream(self.waves, self.lengths()):
                    has_symbols = piece.numel() > 0 if isinstance(piece, torch.Tensor) else bool(piece)
                    if has_symbols and not self.streamed:
                        self.streamed = True
                        after_forward()
        if not self.streamed:
            after_forward()


def checked(calls: Calls, variant: Position) -> float:
    """Change the model as the variant says, and return how much its outputs changed.

    Raises NotRunnable, and WrongResult for outputs that are too far off.
    """
    calls.dtype = "float32"
    plain = calls.outputs()
    wanted = [TOLERANCES[word] for word in (variant.dtype, variant.quantize) if word in TOLERANCES]
    calls.dtype = variant.dtype
    if variant.quantize == "dynamic":
        if variant.dtype != "float32" or calls.waves.device.type != "cpu":
            raise NotRunnable("unsupported", "--quantize dynamic takes float32 on a CPU: give --device cpu, no --dtype")
        calls.model = quantized(calls.model)
    if variant.compile:
        check()
        wanted.append(TOLERANCES["compile"])
        for part in calls.model.parts():
            part.forward = torch.compile(part.forward)
    error, tolerance = difference(plain, calls.outputs()), max(wanted)
    if not error <= tolerance:
        raise WrongResult(f"the outputs are off by {error:.2g} of those in float32 (at most {tolerance:g})")
    return error


def quantized(model: Recogniser) -> Recogniser:
    """Return the model with int8 weights in Linear and LSTM; inputs are quantized at run time.  Raises NotRunnable."""
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will have it
        changed = quantize_dynamic(model, {nn.Linear, nn.LSTM}, dtype=torch.qint8, inplace=True)
    if not any("quantized" in type(module).__module__ for module in changed.modules()):
        raise NotRunnable("unsupported", "--quantize dynamic: the model has no Linear and no LSTM that it changes")
    return changed


def time_call(call: Step, clock: Clock) -> SimpleNamespace:
    """Return the time of one call, as common.measure.sampling takes it; on CUDA synchronised at both ends.

    first_ns: until the first token of a model that streams, else None."""
    taken = time_step(call, clock)
    first = taken["forward_event_ns" if clock.cuda else "forward_wall_ns"]
    given = first if getattr(call, "streamed", False) else None
    return SimpleNamespace(total_wall_ns=taken["total_wall_ns"], first_ns=given, foreign_cpu=None, flags=[])


def timed(call: Step, device: torch.device, settings: Settings) -> List[SimpleNamespace]:
    """Return timed calls, after two in a row that took as long, or ten, as warm-up."""
    clock, threads = Clock(device), host_threads(device)
    caps: Any = {key: getattr(settings, key) for key in ("spread", "max_samples", "max_seconds")}
    list(sampling.warm_up(lambda *_: time_call(call, clock), [0], math.inf, threads))
    return list(sampling.sweep(lambda *_: time_call(call, clock), [0], **caps, threads=threads))


def peaks(call: Step, device: torch.device) -> Dict[str, Any]:
    """Return the peaks of one call in bytes, above the level before it, and that of the whole process."""
    counters = memory.peaks(lambda: call, device, profiler=False)
    keys = ("process_bytes", "device_allocated_bytes", "device_reserved_bytes", "device_used_bytes")
    return {**{key: counters[key] for key in keys}, "process_peak_bytes": process_peak_bytes()}


def _profiled(calls: Calls, settings: Settings, folder: Path, name: str) -> Dict[str, Any]:
    """Return what six batches under torch.profiler took; their traces go to `folder`."""
    changes: Any = {"schedule": SCHEDULE, "record_shapes": False, "with_stack": False, "profile_memory": True}
    profiling = replace(settings, **changes)
    times: List[Tuple[float, float]] = []
    profiler.profile(
        itertools.repeat(calls, profiling.trace_steps),
        profiling,
        calls.waves.device,
        folder,
        name,
        on_cycle=lambda profiled: times.append(profiler.self_times(profiled)),
    )
    cpu, cuda = map(sum, zip(*times))
    highest: Dict[str, Optional[int]] = {}
    for key, kind in (("cpu_peak_bytes", CPU), ("cuda_peak_bytes", CUDA)):
        spans = [span for path in files.trace_files(folder) for span in traced.spans(path, kind)]
        highest[key] = max((span.highest for span in spans if not span.name), default=None)
    return {"profiled": SCHEDULE["active"], "cpu_us": cpu, "cuda_us": cuda, **highest}


def difference(plain: Any, other: Any) -> float:
    """Return the distance of two outputs, 0 where they are equal.

    Of floating-point outputs it is the RMS of their difference over the RMS of the plain ones.  Of a model without
    any it is the share of symbols that have to be edited: each element of an integer tensor, each character of a text.
    """
    first, second = leaves(plain), leaves(other)
    numbers = [
        (left.double().flatten(), right.double().flatten())
        for left, right in zip(first, second)
        if isinstance(left, torch.Tensor) and left.is_floating_point() and isinstance(right, torch.Tensor)
    ]
    if numbers:
        if any(left.shape != right.shape for left, right in numbers):
            return float("inf")
        left, right = (torch.cat(parts) for parts in zip(*numbers))
        error = float((left - right).norm() / left.norm().clamp_min(1e-30))
        return error if error == error else float("inf")
    symbols = [[symbol for leaf in each for symbol in _symbols(leaf)] for each in (first, second)]
    longest = max(*map(len, symbols), 1)
    if longest > 2_000:  # compared place by place, which never gives less
        return (sum(a != b for a, b in zip(*symbols)) + abs(len(symbols[0]) - len(symbols[1]))) / longest
    from torchaudio.functional import edit_distance

    return float(edit_distance(*symbols)) / longest


def _symbols(leaf: Any) -> List[Any]:
    """Return the elements of a tensor, the characters of a text; anything else is one symbol."""
    if isinstance(leaf, torch.Tensor):
        return list(leaf.flatten().tolist())
    return list(leaf) if isinstance(leaf, str) else [str(leaf)]


def leaves(outputs: Any) -> List[Any]:
    """Return the tensors, numbers and texts of any nesting, in order; arrays of numpy as tensors."""
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [leaf for part in outputs for leaf in leaves(part)]
    if hasattr(outputs, "__array__") and not isinstance(outputs, torch.Tensor):
        try:
            outputs = torch.as_tensor(outputs)
        except TypeError:  # an array of texts or objects
            return leaves(outputs.tolist())
    return [] if outputs is None else [outputs]
