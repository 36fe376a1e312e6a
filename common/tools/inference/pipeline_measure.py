"""One example through the stages of a speech system: the time, the peaks and the operations of each stage.

A stage's inputs are made before it is timed, from what the stage before it gave.  Only one stage's model is loaded at a
time.
"""

from __future__ import annotations

import gc
import pickle
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Tuple

import torch
from msgspec.structs import replace

from common.core.errors import NotRunnable, UserError
from common.core.settings import Settings
from common.flops.counter import FlopCounter
from common.measure import sampling
from common.measure.clock import Clock
from common.measure.device import environment, host_threads, set_up_torch
from common.records.schema import Call, JobLine, Operations
from common.tools import audio, examples, loading
from common.tools.dataset import Dataset
from common.tools.inference import counters as perf
from common.tools.inference import measure as inference


def run(job: Mapping[str, Any]) -> Iterator[JobLine]:
    """Yield the records of an example through stages of one environment.

    What is given has the `dataset`, the `example`'s id, the `stages` and `dump`, where a waveform goes, or None; and
    where other stages run in other processes, `inputs` and `outputs`, the files of what comes from the stage before and
    of what goes to the stage after.  Raises UserError, NotRunnable, and whatever a stage raises.
    """
    settings, given = Settings.from_json(job["settings"]), job["given"]
    device = set_up_torch(settings)
    handed = given.get("inputs")
    inputs: Any = _received(handed) if handed else _example(given)
    yield environment(settings, device)
    with torch.no_grad():
        for number, stage in enumerate(given["stages"]):
            torch.manual_seed(settings.seed)
            build = loading.imported(stage["builder"]) if stage["builder"] else None if number or handed else of_example
            model = _model(stage, device)
            call = StageCall(model, _on(device, build(inputs) if build else inputs), stage["name"])
            clock = Clock(device)
            yield from _timed(call, clock, stage)
            yield replace(inference.peaks(partial(_itself, call), device), stage=call.stage)
            yield operations(call)
            outputs = call.outputs()
            inputs = loading.imported(stage["converter"])(outputs) if stage["converter"] else outputs
            del model, call, clock
            gc.unfreeze()  # the clock's freeze would keep the stage
            gc.collect()
    if given.get("outputs"):
        _send(inputs, Path(given["outputs"]), stage["name"])
    if given["dump"]:
        _dump(outputs, Path(given["dump"]), given["dataset"]["target_sr"])


def _example(given: Mapping[str, Any]) -> Any:
    return examples.named(examples.entries(Dataset(**given["dataset"])), given["example"]).read()


def _received(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _send(outputs: Any, path: Path, stage: str) -> None:
    """Write what goes to the next stage.  Raises UserError for what is no tensor, number, text, or nest of these."""
    try:
        torch.save(outputs, path)
        _received(str(path))
    except (AttributeError, TypeError, pickle.PickleError) as error:
        raise UserError(
            f"{stage}: the next stage is of another environment, and takes tensors, numbers and texts in lists, tuples "
            f"and dicts, not all that this {type(outputs).__name__} has; give a converter that makes such ones"
        ) from error


def of_example(example: Mapping[str, Any]) -> Tuple[Any, Any]:
    """Return the inputs of a first stage without a builder."""
    return example["src_tokens"], example["src_lengths"]


def _model(stage: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    made = loading.made(stage["factory"], stage["arguments"] or {})
    if isinstance(made, torch.nn.Module):
        return made.to(device).eval()
    if not callable(made):
        raise UserError(f"{stage['name']}: {stage['factory']} makes {type(made).__name__}, which cannot be called")
    return made


def _on(device: torch.device, inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {key: _on(device, value) for key, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        moved = [_on(device, value) for value in inputs]
        return tuple(moved) if isinstance(inputs, tuple) else moved
    return inputs


@dataclass
class StageCall:
    """A call of a stage's model.

    inputs: a mapping for keyword arguments, a tuple for positional ones, anything else for a single argument.
    """

    model: Callable[..., Any]
    inputs: Any
    stage: str

    def outputs(self) -> Any:
        try:
            if isinstance(self.inputs, Mapping):
                return self.model(**self.inputs)
            return self.model(*self.inputs) if isinstance(self.inputs, tuple) else self.model(self.inputs)
        except (MemoryError, NotRunnable, UserError):
            raise
        except Exception as error:  # whatever a stage raises, with the stage
            error.args = (f"{self.stage}: {error}", *error.args[1:])
            raise

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        self.outputs()
        after_forward()


def _itself(call: StageCall) -> StageCall:
    """Return the call, which keeps no state and so can be repeated."""
    return call


def _timed(call: StageCall, clock: Clock, stage: Mapping[str, Any]) -> Iterator[Call]:
    """Yield `warmup` calls, then `repeats`."""
    samples: sampling.WithLoad[Call] = sampling.WithLoad(host_threads(clock.device))
    for number in range(stage["warmup"] + stage["repeats"]):
        repeat = number - stage["warmup"]
        record = inference.timed(partial(_itself, call), clock, max(repeat, 0), repeat < 0)
        yield from samples.add(replace(record, stage=call.stage))
    yield from samples.flush()


def operations(call: StageCall) -> Operations:
    """Return the ``operations`` record of one call."""
    counter = FlopCounter(call.model if isinstance(call.model, torch.nn.Module) else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is in the record
        with counter:
            call.outputs()
    total = counter.total()
    return Operations(
        stage=call.stage,
        torch=str(torch.__version__),
        macs=total.macs,
        flops=total.flops,
        not_counted=counter.not_counted(),
        instructions=perf.instructions(call.outputs),
    )


def _dump(outputs: Any, path: Path, sample_rate: int) -> None:
    """Write the waveform of the last stage: {"waveform": (..., samples), "sample_rate"} or a tensor.  Raises
    UserError."""
    of = outputs if isinstance(outputs, Mapping) else {"waveform": outputs}
    wave = of.get("waveform")
    if not isinstance(wave, torch.Tensor) or not wave.is_floating_point():
        raise UserError("--dump-speech-waveforms-dir: the last stage gives no waveform; leave the flag out")
    audio.write(path, wave.reshape(-1), int(of.get("sample_rate", sample_rate)))
