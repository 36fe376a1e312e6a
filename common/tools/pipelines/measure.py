"""One stage of a speech system on one example: its time, then its peaks, then its operations.

A stage's inputs are made before it is timed, from what the stage before it left in a file of the run."""

from __future__ import annotations

import math
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping

import msgspec
import torch
from torch.utils._pytree import tree_map

from rnnt_bench.core.errors import NotRunnable, UserError
from rnnt_bench.core.settings import Settings
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.instruments import sampling
from rnnt_bench.instruments.clock import Clock
from rnnt_bench.instruments.device import environment, host_threads, set_up_torch
from rnnt_bench.records.schema import Measured
from rnnt_bench.tools import loading
from rnnt_bench.tools.inference import measure, recognisers
from rnnt_bench.tools.inference.outputs import check_numbers
from rnnt_bench.tools.pipelines.datasets import Tokens, examples
from rnnt_bench.tools.pipelines.rows import Costs, Pipeline, Stage


def run(job: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the records of a stage.  Raises UserError, NotRunnable, and whatever the stage raises."""
    settings, given = Settings.from_json(job["settings"]), job["given"]
    config, number = msgspec.convert(given["config"], Pipeline), given["stage"]
    stage, device = config.stages[number], set_up_torch(settings)
    folder, seconds = Path(job["folder"]), None
    if number:
        before = folder / job["takes"]
        if not before.exists():
            raise NotRunnable("unsupported", "the stage before gave nothing")
        source = torch.load(before, map_location="cpu", weights_only=True)
    else:
        name, rate = config.examples[given["example"]], config.general.target_sr
        of = examples(config.general)[name]
        if isinstance(of, Tokens):
            source = tokens_of(name, of)
        else:
            seed = settings.seed + given["example"]
            wave = recognisers.read(of, rate) if isinstance(of, Path) else recognisers.noise(of, rate, seed)
            source = {"id": name, "src_tokens": wave[None], "src_lengths": torch.tensor([len(wave)])}
            seconds = len(wave) / rate
    yield environment(settings, device)
    torch.manual_seed(settings.seed)
    if stage.builder:
        source = loading.imported(stage.builder)(source)
    elif not number:
        source = source["src_tokens"], source["src_lengths"]
    with torch.no_grad():
        model = loading.made(stage.factory, loading.imported(stage.factory), stage.arguments)
        if not callable(model):
            raise UserError(f"{stage.name}: {stage.factory} makes {type(model).__name__}, which cannot be called")
        inputs = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, source)
        call = Call(model.to(device).eval() if isinstance(model, torch.nn.Module) else model, inputs)
        costs, outputs = measured(call, stage, device), call.outputs()
        check_numbers(outputs, stage.name)
        if job["leaves"]:
            converted = loading.imported(stage.converter)(outputs) if stage.converter else outputs
            _send(converted, folder / job["leaves"])
    yield Measured(value=msgspec.structs.replace(costs, seconds=seconds))


def tokens_of(name: str, example: Tokens) -> Dict[str, Any]:
    """Return the source that a text gives: tokens (1, length), or features (1, length, F), and their length (1,)."""
    tokens, lengths = torch.as_tensor(example.src_tokens), torch.as_tensor(example.src_lengths).reshape(-1)
    return {"id": name, "src_tokens": tokens if tokens.dim() > 1 else tokens[None], "src_lengths": lengths}


def _send(outputs: Any, path: Path) -> None:
    """Write what goes to the next stage: tensors, numbers, texts, and nests of these.  Raises UserError for others."""
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
    """A call of a stage's model.  inputs: a mapping of keywords, a tuple of positional arguments, or a single one."""

    model: Callable[..., Any]
    inputs: Any

    def outputs(self) -> Any:
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        return self.model(*self.inputs) if isinstance(self.inputs, tuple) else self.model(self.inputs)

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        self.outputs()
        after_forward()


def measured(call: Call, stage: Stage, device: torch.device) -> Costs:
    """Return what calls of a stage cost."""
    clock = Clock(device)
    for _ in range(stage.warmup):
        measure.time_call(call, clock)
    caps = {"spread": -1.0, "max_samples": stage.repeats, "max_seconds": math.inf}
    samples = list(sampling.sweep(lambda *_: measure.time_call(call, clock), [0], threads=host_threads(device), **caps))
    highest = measure.peaks(call, device)
    allocated, resident = highest["device_allocated_bytes"], highest["process_bytes"]
    counter = FlopCounter(call.model if isinstance(call.model, torch.nn.Module) else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is in the record
        with counter:  # last, since it imports what would be in the peak of the process
            call.outputs()
    return Costs(
        wall_ns=[sample.total_wall_ns for sample in samples],
        busy=sum(bool(sample.flags) for sample in samples),
        memory_bytes=resident if allocated is None else allocated,
        process_bytes=highest["process_peak_bytes"],
        macs=counter.total().macs,
        flops=counter.total().flops,
        not_counted=counter.not_counted(),
    )
