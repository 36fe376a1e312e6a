"""One stage of a speech system on one example: its time, then its peaks, then its operations.

A stage's inputs are made before it is timed, from what the stage before it left in a file of the
run."""

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
from torch.utils._pytree import tree_map

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
    """Yield the records of a stage.  Raises UserError, NotRunnable, and whatever the stage
    raises."""
    settings = job.settings
    request = msgspec.convert(job.request, Request)
    stage = request.config.stages[request.stage]
    device = set_up_torch(settings)
    folder = Path(job.folder)
    seconds = None
    if request.stage:
        before = folder / str(job.takes)
        if not before.exists():
            raise NotRunnable("unsupported", "the stage before gave nothing")
        source = torch.load(before, map_location="cpu", weights_only=True)
    else:
        source, seconds = _loaded(request.config, request.example, settings.seed)
    yield environment(settings, device)
    torch.manual_seed(settings.seed)
    if stage.builder:
        source = loading.imported(stage.builder)(source)
    elif not request.stage:
        source = source["src_tokens"], source["src_lengths"]
    with torch.no_grad():
        model = loading.made(stage.factory, loading.imported(stage.factory), stage.arguments)
        if not callable(model):
            raise UserError(
                f"{stage.name}: {stage.factory} makes {type(model).__name__}, which cannot be called"
            )
        if isinstance(model, torch.nn.Module):
            model.to(device).eval()
        inputs = tree_map(
            lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, source
        )
        call = Call(model, inputs)
        costs = measured(call, stage, device)
        outputs = call.outputs()
        check_numbers(outputs, stage.name)
        if job.leaves:
            if stage.converter:
                outputs = loading.imported(stage.converter)(outputs)
            _send(outputs, folder / job.leaves)
    yield Measured(value=msgspec.structs.replace(costs, seconds=seconds))


def _loaded(config: Pipeline, index: int, seed: int) -> tuple[dict[str, Any], float | None]:
    """Return the source that an example gives, and the seconds of its audio, None of a text.

    ``src_tokens`` are samples (1, samples), tokens (1, length) or features (1, length, F),
    ``src_lengths`` their length (1,)."""
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
    """Write what goes to the next stage: tensors, numbers, texts, and nests of these.  Raises
    UserError for others."""
    try:
        torch.save(outputs, path)
        torch.load(path, map_location="cpu", weights_only=True)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        path.unlink(missing_ok=True)
        raise UserError(
            "between stages go tensors, numbers and texts in lists, tuples and dicts, not all that this "
            f"{type(outputs).__name__} has; give a converter that makes such ones"
        ) from error


@dataclass
class Call:
    """A call of a stage's model.  inputs: a mapping of keywords, a tuple of positional arguments,
    or a single one."""

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
        self.outputs()
        after_forward()


def measured(call: Call, stage: Stage, device: torch.device) -> Costs:
    """Return what calls of a stage cost."""
    clock = Clock(device)
    for _ in range(stage.warmup):
        measure.time_call(call, clock)
    caps = {"spread": -1.0, "max_samples": stage.repeats, "max_seconds": math.inf}
    samples = measure.time_calls(call, clock, **caps)
    peaks = measure.peaks(call, device)
    allocated = peaks.device_allocated_bytes
    counter = FlopCounter(call.model if isinstance(call.model, torch.nn.Module) else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is in the record
        with counter:  # last, since it imports what would be in the peak of the process
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
