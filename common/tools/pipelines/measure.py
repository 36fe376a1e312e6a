"""Measure one stage of a speech system on one example: time, then peaks of memory, then operations.

The inputs of a stage are made before it is timed: from the example, or from what the stage before
it left in a file of the run's folder.  Only the current stage's model is loaded."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rnnt_bench.core.errors import NotRunnable, UserError
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.instruments.clock import Clock
from rnnt_bench.instruments.device import environment, set_up_torch
from rnnt_bench.records.schema import Measured
from rnnt_bench.tools import loading
from rnnt_bench.tools.inference import measure, recognisers
from rnnt_bench.tools.inference.outputs import check_numbers
from rnnt_bench.tools.pipelines.datasets import Tokens, examples
from rnnt_bench.tools.pipelines.rows import Costs, Pipeline, Request, Stage


def run(job: JobSpec) -> Iterator[Any]:
    """Yield the records of a stage on an example: its environment, then its costs.

    If another stage follows, write what it takes to the file `job.leaves` of the run's folder.
    Raises UserError, NotRunnable, WrongResult, and whatever the stage raises."""
    settings = job.settings
    folder = Path(job.folder)
    request = msgspec.convert(job.request, Request)
    stage = request.config.stages[request.stage]
    device = set_up_torch(settings)
    seconds = None  # of the example's audio; only the first stage records them
    if job.takes:
        source = _received(folder / job.takes)
    else:
        source, seconds = _loaded(request.config, request.example, settings.seed)
    yield environment(settings, device)
    torch.manual_seed(settings.seed)
    if stage.builder:
        source = loading.imported(stage.builder)(source)
    elif not job.takes:
        # Without a builder the first stage's model takes the example's inputs and their lengths.
        source = source["src_tokens"], source["src_lengths"]
    with torch.no_grad():
        model = loading.made(stage.factory, loading.imported(stage.factory), stage.arguments)
        if not callable(model):
            kind = type(model).__name__
            raise UserError(f"{stage.name}: {stage.factory} makes {kind}, which cannot be called")
        if isinstance(model, torch.nn.Module):
            model.to(device).eval()
        call = Call(model, loading.on_device(source, device))
        costs = measured(call, stage, device)
        outputs = call.outputs()
        check_numbers(outputs, stage.name)
        if job.leaves:
            if stage.converter:
                outputs = loading.imported(stage.converter)(outputs)
            _send(outputs, folder / job.leaves)
    yield Measured(value=msgspec.structs.replace(costs, seconds=seconds))


def _received(path: Path) -> Any:
    """Return what a stage has written for the next one.  Raises NotRunnable if there is no file."""
    if not path.exists():
        raise NotRunnable("unsupported", "the stage before gave nothing")
    return torch.load(path, map_location="cpu", weights_only=True)


def _loaded(config: Pipeline, index: int, seed: int) -> tuple[dict[str, Any], float | None]:
    """Return the example of this index as a stage's builder takes it, and the seconds of its audio.

    The example is a dict: `id`, `src_tokens`, `src_lengths`.  `src_tokens` are samples (1,
    samples), tokens (1, length) or features (1, length, F); `src_lengths` is their length (1,).
    The seconds are None where the example is no audio."""
    name = config.examples[index]
    rate = config.general.target_sr
    example = examples(config.general)[name]
    if isinstance(example, Tokens):
        tokens = torch.as_tensor(example.src_tokens)
        lengths = torch.as_tensor(example.src_lengths).reshape(-1)
        seconds = None
    else:
        if isinstance(example, Path):
            tokens = recognisers.read(example, rate)
        else:
            tokens = recognisers.noise(example, rate, seed + index)
        lengths = torch.tensor([len(tokens)])
        seconds = len(tokens) / rate
    if tokens.dim() < 2:
        tokens = tokens[None]
    return {"id": name, "src_tokens": tokens, "src_lengths": lengths}, seconds


def _send(outputs: Any, path: Path) -> None:
    """Write outputs to the file from which the next stage takes them.

    They may be tensors, numbers and texts, and lists, tuples and dicts of these, nested at will.
    Removes the file and raises UserError if they hold anything else."""
    try:
        torch.save(outputs, path)
        _received(path)  # raises an error if the next stage could not read it
    except (AttributeError, TypeError, pickle.PickleError) as error:
        path.unlink(missing_ok=True)
        raise UserError(
            "between stages go tensors, numbers and texts in lists, tuples and dicts; this "
            f"{type(outputs).__name__} holds other things: give a converter that makes only these"
        ) from error


@dataclass
class Call:
    """A call of a stage's model.

    Attributes:
        inputs: a mapping of keywords, a tuple of positional arguments, or the only argument
    """

    model: Callable[..., Any]
    inputs: Any

    def outputs(self) -> Any:
        """Make one call; return its outputs."""
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        if isinstance(self.inputs, tuple):
            return self.model(*self.inputs)
        return self.model(self.inputs)

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Make one call, then call `after_forward`.  There is no backward.

        With this method a Call is a Step, which the module clock can time."""
        self.outputs()
        after_forward()


def measured(call: Call, stage: Stage, device: torch.device) -> Costs:
    """Return the costs of a call: its times, then its peaks of memory, then its operations.

    Operations come last: counting them imports modules, which would be in the process's peak.  The
    `seconds` of the costs are not set here."""
    clock = Clock(device)
    for _ in range(stage.warmup):
        measure.time_call(call, clock)
    samples = measure.time_calls(
        call,
        clock,
        spread=-1.0,  # No spread is so small: `repeats` alone ends the calls.
        max_samples=stage.repeats,
        max_seconds=math.inf,
    )
    peaks = measure.peaks(call, device)
    allocated = peaks.device_allocated_bytes
    counter = FlopCounter(call.model if isinstance(call.model, torch.nn.Module) else None)
    with warnings.catch_warnings(), counter:
        warnings.simplefilter("ignore")  # the record names the operators without a rule
        call.outputs()
    return Costs(
        wall_ns=[sample.total_wall_ns for sample in samples],
        busy=sum(bool(sample.flags) for sample in samples),
        memory_bytes=peaks.process_bytes if allocated is None else allocated,
        process_bytes=peaks.process_peak_bytes,
        macs=counter.total().macs,
        flops=counter.total().flops,
        not_counted=counter.not_counted(),
    )
