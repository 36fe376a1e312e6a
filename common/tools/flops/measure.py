"""Counting a model's operations on given inputs, or on utterances of given lengths."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import torch

from common.core.errors import UserError
from common.core.text import first_line
from common.flops.counter import FlopCounter
from common.records.schema import Measured
from common.tools import configuration, loading
from common.tools.flops import inputs
from common.tools.loading import Loaded


def run(job: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the records of a count: one, or one for each bucket of audio.

    job: ``given`` has its `flags`, and `current`, the folder that their paths are relative to.  Raises UserError.
    """
    flags = job["given"]["flags"]
    os.chdir(job["given"]["current"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is named below the table
        given = [inputs.parse(text) for text in flags["input_shape"]]
        made_with = configuration.read(Path(flags["args"])) if flags["args"] else {}
        made_with.update((key, configuration.parsed(value, f"--arg {key}")) for key, value in flags["arg"])
        device = _device(flags["device"])
        if flags["register"]:
            loading.module(str(Path(flags["register"]).with_suffix(".py")))
        loaded = loading.load(flags["model"], made_with, device)
        loaded.model.train(flags["train"])
        for bucket, lengths in _lengths(flags).items():
            counter, batch = FlopCounter(loaded.model, strict=flags["strict"]), flags["batch_size"]
            macs: List[int] = []
            for samples in lengths:
                before = counter.total().macs
                _count(counter, loaded.model, _inputs(loaded, given, device, samples, flags), flags)
                each, rest = divmod(counter.total().macs - before, batch)
                macs += [each + (number < rest) for number in range(batch)]
            of_each = [samples for samples in lengths for _ in range(batch)]
            spoken = {"samples": of_each, "macs": macs} if bucket else {}
            yield Measured(value={"name": bucket, "document": counter.document(), **spoken})


def _lengths(flags: Mapping[str, Any]) -> Dict[str, List[int]]:
    """Return the samples of each utterance by bucket; one run of no length where the input is no audio."""
    if flags["audio"]:
        return inputs.bucketed(inputs.lengths(Path(flags["audio"]), flags["sample_rate"]))
    return {"pseudo": [flags["pseudo_input"]]} if flags["pseudo_input"] else {"": [0]}


def _device(name: str) -> str:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {first_line(error)}") from error
    return str(device)


def _inputs(
    loaded: Loaded, given: Sequence[inputs.Given], device: str, samples: int, flags: Mapping[str, Any]
) -> inputs.Inputs:
    """Return the input of one run: as given, or an utterance of so many samples, `batch_size` equal ones."""
    if not samples:
        return inputs.made(given, device, {})
    if loaded.listed and not given:
        return inputs.Inputs([[torch.randn(samples, device=device) for _ in range(flags["batch_size"])]])
    letters = {inputs.SAMPLES: samples, inputs.FRAMES: samples // flags["hop"]}
    return inputs.made(given or [inputs.parse(f"{flags['batch_size']}x{inputs.SAMPLES}")], device, letters)


def _count(counter: FlopCounter, model: torch.nn.Module, given: inputs.Inputs, flags: Mapping[str, Any]) -> None:
    """Call --method of the model on the inputs, and with --backward its backward; raise UserError for whatever that
    raises."""
    owner: Any = None
    function: Any = model
    for name in [] if flags["method"] == "forward" else flags["method"].split("."):
        owner, function = function, getattr(function, name, None)
    if not callable(function):
        raise UserError(f"--method {flags['method']}: {type(model).__name__} has no such method")
    with torch.set_grad_enabled(flags["backward"]), counter:
        try:
            # hooks do not see a call that is not of a module's `forward`
            with counter.modules.call(owner) if isinstance(owner, torch.nn.Module) else nullcontext():
                outputs = function(*given.positional, **given.keywords)
            if flags["backward"]:
                _backward(outputs)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # whatever a model that is given something else raises
            where = counter.modules.current()[0] or "the model"
            why = f"{type(error).__name__} in {where}: {first_line(error)}"
            hint = "; if it looks at values, which the meta device has not, try --device cpu"
            hint = hint if flags["device"] == "meta" else ""
            raise UserError(f"the model does not take {given.shapes()} ({why}){hint}") from error


def _backward(outputs: Any) -> None:
    """Run the backward from ones for every output that has a gradient."""
    leaves = torch.utils._pytree.tree_flatten(outputs)[0]
    wanted = [output for output in leaves if isinstance(output, torch.Tensor) and output.requires_grad]
    if not wanted:
        raise UserError("--backward: no output of the model has a gradient")
    torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
