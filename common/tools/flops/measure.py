"""Counting a model's operations on given inputs, or on utterances of given lengths."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from common.core.errors import UserError
from common.core.text import first_line
from common.flops.counter import FlopCounter
from common.records.schema import JobLine, Record
from common.tools import inputs, loading
from common.tools.loading import Loaded


class Counted(JobLine, kw_only=True, tag="count"):
    """The operations of a model in one run, or in those of a bucket of audio."""

    bucket: str  # "" where the input is no audio
    samples: List[int]  # of each utterance
    macs: List[int]  # of each utterance
    document: Record  # of the counter


def run(job: Mapping[str, Any]) -> Iterator[Counted]:
    """Yield the ``count`` records of count_flops.py: one, or one for each bucket of audio, with the samples and MACs of
    each utterance.

    job: ``given`` has its `flags`, and `current`, the folder that their paths are relative to.  Raises UserError.
    """
    flags = job["given"]["flags"]
    os.chdir(job["given"]["current"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is named below the table
        counting, lengths = _counting(flags), _lengths(flags)
        if not lengths:
            yield Counted(bucket="", samples=[], macs=[], document=counting.once())
        for name, samples in lengths.items():
            document, macs = counting.utterances(samples, flags["batch_size"])
            of_each = [count for count in samples for _ in range(flags["batch_size"])]
            yield Counted(bucket=name, samples=of_each, macs=macs, document=document)


def _counting(flags: Mapping[str, Any]) -> Counting:
    given = [inputs.parse(text) for text in flags["input_shape"]]
    made_with = loading.read_arguments(Path(flags["args"])) if flags["args"] else {}
    made_with.update((key, loading.parse_value(value, f"--arg {key}")) for key, value in flags["arg"])
    device = _device(flags["device"])
    if flags["register"]:
        loading.run_file(Path(flags["register"]))
    loaded = loading.load(flags["model"], made_with, device)
    loaded.model.train(flags["train"])
    same = {key: flags[key] for key in ("method", "backward", "strict", "convention", "hop")}
    return Counting(loaded, given, device, timed=device != "meta", **same)


def _lengths(flags: Mapping[str, Any]) -> Dict[str, List[int]]:
    if flags["audio"]:
        return inputs.bucketed(inputs.lengths(Path(flags["audio"]), flags["sample_rate"]))
    return {"pseudo": [flags["pseudo_input"]]} if flags["pseudo_input"] else {}


def _device(name: str) -> str:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {first_line(error)}") from error
    return str(device)


@dataclass(frozen=True)
class Counting:
    """A model, and the way it is counted.

    Attributes:
        loaded: the model.
        given: shapes of its inputs.
        device: where it runs.
        method: what is called, with dots for methods of its parts.
        backward: also count the backward, from ones for every output.
        strict, timed, convention: see FlopCounter.
        hop: samples of a frame.
    """

    loaded: Loaded
    given: Sequence[inputs.Given]
    device: str = "cpu"
    method: str = "forward"
    backward: bool = False
    strict: bool = False
    timed: bool = False
    convention: str = "exact"
    hop: int = 160

    def counter(self) -> FlopCounter:
        return FlopCounter(self.loaded.model, strict=self.strict, timed=self.timed, convention=self.convention)

    def once(self) -> Record:
        """Return the document of one run on the inputs as they are given."""
        counter = self.counter()
        self._run(counter, inputs.made(self.given, self.device))
        return self._document(counter)

    def _document(self, counter: FlopCounter) -> Record:
        return {**counter.document(), "device": self.device}

    def utterances(self, lengths: Sequence[int], batch: int = 1) -> Tuple[Record, List[int]]:
        """Return (document, MACs of each) of utterances of so many samples; `batch` equal ones at a time."""
        counter = self.counter()
        macs: List[int] = []
        for samples in lengths:
            before = counter.total().macs
            self._run(counter, self._utterance(samples, batch))
            each, rest = divmod(counter.total().macs - before, batch)
            macs += [each + (number < rest) for number in range(batch)]
        return self._document(counter), macs

    def _utterance(self, samples: int, batch: int) -> inputs.Inputs:
        if self.loaded.listed and not self.given:
            return inputs.Inputs([[torch.randn(samples, device=self.device) for _ in range(batch)]])
        given = self.given or [inputs.parse(f"{batch}x{inputs.SAMPLES}")]
        return inputs.made(given, self.device, {inputs.SAMPLES: samples, inputs.FRAMES: samples // self.hop})

    def _run(self, counter: FlopCounter, given: inputs.Inputs) -> None:
        """Call the model on the inputs, and with `backward` its backward; raise UserError for whatever it raises."""
        owner, function = self._function()
        with torch.set_grad_enabled(self.backward), counter:
            try:
                with counter.modules.call(owner) if owner is not None else nullcontext():
                    outputs = function(*given.positional, **given.keywords)
                if self.backward:
                    _backward(outputs)
            except UserError:
                raise
            except (Exception, SystemExit) as error:  # whatever a model that is given something else raises
                where = counter.modules.current()[0] or "the model"
                why = f"{type(error).__name__} in {where}: {first_line(error)}"
                raise UserError(f"the model does not take {given.shapes()} ({why}){self._hint()}") from error

    def _hint(self) -> str:
        return (
            "; if it looks at values, which the meta device has not, try --device cpu" if self.device == "meta" else ""
        )

    def _function(self) -> Tuple[Optional[torch.nn.Module], Callable[..., Any]]:
        """Return (the module whose method is called beside its `forward`, the function)"""
        if self.method == "forward":
            return None, self.loaded.model
        owner: Any = None
        method: Any = self.loaded.model
        for name in self.method.split("."):
            owner, method = method, getattr(method, name, None)
        if not callable(method):
            raise UserError(f"--method {self.method}: {type(self.loaded.model).__name__} has no such method")
        return owner if isinstance(owner, torch.nn.Module) else None, method


def _backward(outputs: Any) -> None:
    leaves = torch.utils._pytree.tree_flatten(outputs)[0]
    wanted = [output for output in leaves if isinstance(output, torch.Tensor) and output.requires_grad]
    if not wanted:
        raise UserError("--backward: no output of the model has a gradient")
    torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
