"""Where a training step goes: time, memory and operations of each label, as one document that JSON takes.

Timed steps with labels alternate with bare ones, so that the hooks' own cost is known.  Memory is from a trace of a few
more steps, FLOPs from one counted step of each batch: no pass is part of another.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Collection, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from common.core import scripts
from common.core.errors import NotRunnable, OutOfMemory, UserError
from common.core.implementations import Implementation, find
from common.core.settings import Settings
from common.core.text import first_line
from common.data import measured_batches, shapes
from common.data.streams import ENCODER, TARGETS, symbols, uniform
from common.flops.counter import FlopCounter
from common.losses.compiler import check
from common.losses.inputs import Batch, padded_sizes
from common.measure import peaks, profiler
from common.measure.clock import Clock
from common.measure.device import facts, set_up_torch
from common.records.schema import Gpu, JobLine, Record
from common.system import memory
from common.system.load import ForeignLoad, busy_flags
from common.tools import loading
from common.tools.profile import documents, icefall, transducer
from common.tools.profile import labels as labelling
from common.tools.profile.labels import Labels, Operations, Place, Spans
from common.tools.profile.transducer import SUBSAMPLING, Criterion, Imported, Sizes, Transducer
from common.traces import files
from common.traces import memory as traced

#: Makes the whole model of sizes and a criterion, by configuration; "" is of torchaudio's Conformer.
MODELS: Dict[str, Callable[[Sizes, Criterion], Transducer]] = {"": Transducer, "icefall": icefall.transducer}
#: Paths of a layer and of its parts, by configuration.
LAYERS = {
    "": ("encoder.conformer.conformer_layers.*", "ffn1", "self_attn", "conv_module", "ffn2"),
    "icefall": ("encoder.layers.*", "feed_forward_macaron", "self_attn", "conv_module", "feed_forward"),
}
#: Parts of common.tools.profile.transducer.Criterion, which are always labelled.
PARTS = ("joiner", "rnnt_loss", "rnnt_loss_simple", "rnnt_loss_pruned")
OPTIMIZER = "optimizer"


def classic_labels(config: str) -> Dict[str, Tuple[str, ...]]:
    """Return patterns of modules by label, of a model of this configuration: those that icefall's profile began with;
    the losses have their own."""
    layer, *parts = LAYERS[config]
    names = ("feed_forward_macaron", "self_attn", "conv", "feed_forward")
    return {
        "rnnt_encoder": ("encoder",),
        "rnnt_encoder_embed": ("encoder.embed",),
        "rnnt_encoder_layer": (layer,),
        **{f"rnnt_encoder_layer_{name}": (f"{layer}.{part}",) for name, part in zip(names, parts)},
        "rnnt_decoder": ("decoder",),
    }


#: Rounds of steps that compile: a first shape, a second one of any size, and one that finds nothing to do.
COMPILING_ROUNDS = 4
Given = Tuple[Any, ...]


def unseen(position: Place, again: bool) -> ContextManager[None]:
    """Return a span that records nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Choice:
    """The model to profile, and how.

    Args:
        sizes: of the Conformer transducer.
        implementation: the loss.
        model: import path; "" for the Conformer transducer.
        config: one of MODELS, where there is no import path.
        arguments: of the model at the import path.
        labels: patterns by label; empty for the default labels.
        depth: in place of labels, the depth of the modules that get one.
        steps, warmup, trace_steps: numbers of timed steps, of those before them, and of those under the profiler.
        dropout, amp, compile, optimizer: as the flags of these names.
        checkpoint: patterns of modules whose forward is computed again in the backward."""

    sizes: Sizes
    implementation: Implementation
    model: str = ""
    config: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Tuple[str, ...]] = field(default_factory=dict)
    depth: Optional[int] = None
    steps: int = 20
    warmup: int = 2
    trace_steps: int = 2
    dropout: bool = False
    amp: bool = False
    compile: bool = False
    optimizer: bool = False
    checkpoint: Tuple[str, ...] = ()

    def to_json(self) -> Record:
        """Return the fields as JSON has them."""
        return {**vars(self), "sizes": vars(self.sizes), "implementation": self.implementation.name}

    @classmethod
    def from_json(cls, data: Record) -> Choice:
        """Return the inverse of `to_json`."""
        values = {**data, "sizes": transducer.sizes(data["sizes"], "sizes")}
        values["implementation"] = find(data["implementation"])
        values["labels"] = {label: tuple(patterns) for label, patterns in data["labels"].items()}
        return cls(**{**values, "checkpoint": tuple(data["checkpoint"])})


class Profiled(JobLine, kw_only=True, tag="profile"):
    """A profile; document: the fields of documents.Profile."""

    document: Record


def run(job: Mapping[str, Any]) -> Iterator[Profiled]:
    """Yield the ``profile`` record.  The job's ``given`` has the `choice`, and `limits`: true to measure those of the
    device, those that are known, or false.  Raises UserError, OutOfMemory."""
    settings, given = Settings.from_json(job["settings"]), job["given"]
    choice, known = Choice.from_json(given["choice"]), given["limits"]
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    profiling = Profiling(choice, settings)
    try:
        document = profiling.document(
            folder, lambda: measured_limits(settings, choice.amp) if known is True else known or {}
        )
    except UserError as error:
        if profiling.failed_in is None:  # a mistake, which another size has too
            raise
        raise OutOfMemory(str(error)) from error
    yield Profiled(document=document.to_json())


class Inputs:
    """Holds a batch: features (N, frames, F), lengths, symbols (N, U+1) with a blank first, and inputs of the loss."""

    def __init__(self, rows: Any, sizes: Sizes, adapter: Any, device: torch.device, key: Sequence[int]):
        N, frames, U = padded_sizes(rows)
        drawn = 2 * uniform(N * frames * sizes.features, ENCODER, *key) - 1
        self.features = torch.from_numpy(drawn).view(N, frames, sizes.features).to(device)
        self.lengths = torch.tensor(rows[:, 0].tolist(), device=device)
        targets = torch.from_numpy(symbols((N, U), sizes.vocab_size, TARGETS, *key)).to(device)
        self.symbols = nn.functional.pad(targets.long(), (1, 0))
        pairs = [(int(shapes.subsampled(length, SUBSAMPLING)), int(U)) for length, U in rows]
        T, U_lengths = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*pairs))
        none = torch.empty(0, device=device)  # the model makes them
        self.batch = Batch(none, none, targets, T, U_lengths, pairs)
        self.adapter = adapter
        self.described = documents.ProfiledBatch(
            N=N,
            frames=int(rows[:, 0].sum()),
            frames_max=frames,
            T_max=max(T for T, _ in pairs),
            U_max=U,
            tokens=int(rows[:, 1].sum()),
        )

    def given(self) -> Given:
        """Return the arguments of the model's forward for one step."""
        return self.features, self.lengths, self.symbols, self.batch, self.adapter.prepare(self.batch)


class Profiling:
    """A model that is ready to step, and its measurements.  Raises UserError for what cannot be made or run."""

    def __init__(self, choice: Choice, settings: Settings):
        self.choice, self.settings = choice, settings
        try:
            self.device = set_up_torch(settings)
            if self.device.type == "cpu" and settings.allocator == "reuse":
                memory.keep_freed_memory()  # large tensors would be mapped anew in each step
            adapter = scripts.load(choice.implementation.script)(settings, choice.implementation.variant)
            adapter.load(self.device.type)
        except NotRunnable as error:
            raise UserError(f"--loss {choice.implementation.name}: {error}") from error
        torch.manual_seed(settings.seed)
        self.clock = Clock(self.device)
        self.inputs = self._inputs(adapter)
        self.model = self._model(adapter).to(self.device).train()
        self.labels = self._labels()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5) if choice.optimizer else None
        self.failed_in: Optional[str] = None

    def _inputs(self, adapter: Any) -> List[Inputs]:
        rows = feature_rows(Path(self.settings.shape_file), adapter.fewest_targets)
        batches = measured_batches.in_batches(rows, self.settings)
        chosen = measured_batches.select(batches, self.settings)
        for index in chosen if self.settings.sort_utterance else ():
            frames, most = int(batches[index][:, 0].sum()), self.settings.max_frames
            if frames > most:
                raise UserError(
                    f"--max-frames {most}: a measured batch is one utterance of {frames}; give at least that"
                )
        key = self.settings.seed
        return [Inputs(batches[index], self.choice.sizes, adapter, self.device, (key, index)) for index in chosen]

    def _model(self, adapter: Any) -> nn.Module:
        choice = self.choice
        criterion = Criterion(adapter, self.device)
        if choice.model:
            loaded = loading.load(choice.model, choice.arguments, str(self.device))
            if criterion.layout.approximate or criterion.layout.tensors != ("logits",):
                raise UserError(
                    f"--loss {adapter.name}: takes no logits, which a model by import path gives; "
                    "give an exact one of logits, such as --loss torchaudio"
                )
            made: nn.Module = Imported(loaded.model, criterion)
        else:
            made = MODELS[choice.config](choice.sizes, criterion)
        for module in made.modules():
            if not choice.dropout and isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif not choice.dropout and isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        for path in labelling.by_patterns(made, {"": choice.checkpoint}, "--checkpoint "):
            again = made.get_submodule(path)
            again.forward = partial(checkpoint, again.forward, use_reentrant=False)
        return made

    def _labels(self) -> Dict[str, str]:
        choice = self.choice
        if choice.labels:
            labels = labelling.by_patterns(self.model, choice.labels)
        elif choice.depth is not None or choice.model:
            owner, prefix = (self.model.get_submodule("model"), "model.") if choice.model else (self.model, "")
            by_depth = labelling.by_depth(owner, 1 if choice.depth is None else choice.depth)
            labels = {prefix + path: label for path, label in by_depth.items() if not path.startswith("criterion")}
        else:
            labels = labelling.by_patterns(self.model, classic_labels(choice.config))
        parts = {f"criterion.{name}": name for name in PARTS}
        known = {path for path, _ in self.model.named_modules()}
        return {**labels, **{path: name for path, name in parts.items() if path in known}}

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, given: Given, part: Callable[[str], ContextManager], ended: Callable[[], None]) -> None:
        """Run forward, backward and the optimizer's step.  The gradients stay."""
        amp = torch.autocast(self.device.type, torch.bfloat16) if self.choice.amp else nullcontext()
        with amp:
            loss = self.model(*given)
        loss.backward()
        ended()
        if self.optimizer:
            with part(OPTIMIZER):
                self.optimizer.step()

    def bare(self, given: Given) -> None:
        with self._failures(None):
            self.step(given, lambda _: nullcontext(), lambda: None)

    def labelled(self, given: Given, span: labelling.Span) -> None:
        labels = Labels(self.model, self.labels, span)
        with self._failures(labels), labels:
            self.step(given, labels.part, labels.end_backward)

    @contextmanager
    def _failures(self, labels: Optional[Labels]) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # whatever a model or a loss raises
            where = labels.where if labels else "the step"
            line = first_line(error)
            if memory.is_out_of_memory(error):
                self.failed_in = where
                raise UserError(f"out of memory in {where}: take a smaller batch ({line})") from error
            raise UserError(f"the step fails in {where}: {type(error).__name__}: {line}") from error

    def forget(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def timed(self, run: Callable[[], None]) -> Tuple[int, Optional[int]]:
        """Return the nanoseconds that a run takes of the host, and on CUDA of the device, else None."""
        self.clock.synchronize()
        host, device = time.perf_counter_ns(), self.clock.mark()
        run()
        end = self.clock.mark()
        self.clock.synchronize()
        host = time.perf_counter_ns() - host
        self.forget()
        return host, self.clock.between(device, end) if self.clock.cuda else None

    # -- passes --------------------------------------------------------------------------------------------------------

    def document(self, folder: Path, limits: Callable[[], Optional[Record]]) -> documents.Profile:
        """Return the whole document; traces go to `folder`.  limits: returns a ``limits`` record."""
        for inputs in self.inputs:  # with labels, so that a lack of memory is reported with its place
            self.labelled(inputs.given(), unseen)
            self.forget()
        flops, not_counted = self.flops()
        compiling = self.compile() if self.choice.compile else None
        for number in range(self.choice.warmup):
            self.timed(partial(self.labelled, self.inputs[number % len(self.inputs)].given(), unseen))
        choice, known = self.choice, facts(self.device)
        steps, spans = self.times()
        if compiling:
            compiling.graphs_later = graphs() - compiling.graphs
        return documents.Profile(
            device=known.device,
            device_name=known.device_name,
            threads=known.threads,
            torch=known.torch,
            tf32=known.tf32,
            gpu=Gpu(**vars(known.gpu)) if known.gpu else None,
            implementation=choice.implementation.name,
            model=choice.model,
            config=choice.config,
            sizes=vars(choice.sizes),
            parameters=transducer.parameters(self.model),
            batches=[inputs.described for inputs in self.inputs],
            options=documents.ProfileOptions(
                dropout=choice.dropout,
                amp=choice.amp,
                compile=choice.compile,
                optimizer=choice.optimizer,
                checkpoint=list(choice.checkpoint),
            ),
            steps=steps,
            spans=spans,
            compiled=compiling,
            memory=self.memory(folder),
            flops=flops,
            not_counted=not_counted,
            limits=limits(),
        )

    def times(self) -> Tuple[documents.Steps, List[documents.Place]]:
        """Return the times of bare and labelled steps in turn, and those of each label in each step."""
        bare: List[Any] = []
        labelled: List[Any] = []
        of_place: Dict[Place, List[Any]] = {}
        load = ForeignLoad()
        for number in range(self.choice.steps):
            inputs, taken = self.inputs[number % len(self.inputs)], Spans(self.clock)
            with_labels = partial(self.labelled, inputs.given(), taken)
            runs = [(bare, partial(self.bare, inputs.given())), (labelled, with_labels)]
            for kept, run in runs if number % 2 else reversed(runs):
                kept.append(self.timed(run))
            for position, values in taken.taken().items():
                of_place.setdefault(position, []).append(values)
        foreign = load.share() if load.ready() else None
        steps = documents.Steps(
            bare_ns=[host for host, _ in bare],
            host_ns=[host for host, _ in labelled],
            device_ns=[device for _, device in labelled],
            foreign_cpu=foreign,
            flags=busy_flags(foreign, torch.get_num_threads()),
        )
        return steps, [
            documents.Place(
                chain=list(chain),
                phase=phase,  # type: ignore[arg-type]  # labels know no other
                calls=sum(calls for calls, _, _ in values),
                host_ns=[host for _, host, _ in values],
                device_ns=[device for _, _, device in values],
            )
            for (chain, phase), values in of_place.items()
        ]

    def memory(self, folder: Path) -> List[documents.PlaceMemory]:
        """Return the memory of each span, by name, from a trace in `folder`."""
        files.remove(folder)
        active = self.choice.trace_steps
        schedule = {"wait": 0, "warmup": 1, "active": active, "repeat": 1}
        settings = replace(self.settings, schedule=schedule, record_shapes=False, with_stack=False)
        steps = [_Recorded(self, self.inputs[number % len(self.inputs)].given()) for number in range(1 + active)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the profiler's: only the last cycle is kept, which is all there is
            profiler.profile(iter(steps), settings, self.device, folder, "profile")
        spans_of: Dict[str, List[traced.Span]] = {}
        for path in files.trace_files(folder):
            for span in traced.spans(path):
                spans_of.setdefault(span.name, []).append(span)
        return [
            documents.PlaceMemory(
                name=name,
                peak_bytes=max(span.highest for span in several),
                rise_bytes=max(span.highest - span.begin for span in several),
                left_bytes=round(sum(span.end - span.begin for span in several) / active),
            )
            for name, several in spans_of.items()
        ]

    def flops(self) -> Tuple[List[documents.PlaceFlops], List[str]]:
        """Return the operations of a step by place, without what lies in it, and the operators without a rule.

        Operations belong to the label that runs, as its time does: a module may be called from outside its parent.
        """
        counter = FlopCounter(self.model)
        operations = Operations(counter.total)
        for inputs in self.inputs:
            with counter:
                self.labelled(inputs.given(), operations)
            self.forget()
        count = len(self.inputs)
        counted = [
            documents.PlaceFlops(chain=list(chain), phase=phase, macs=macs / count, flops=flops / count)
            for (chain, phase), (macs, flops) in operations.counts().items()
        ]
        return counted, counter.not_counted()

    def compile(self) -> documents.Compiled:
        """Compile the forward of each labelled module that holds no other; of joiner and losses the modules alone.

        Then run steps with labels and without, until one round of them compiles nothing.  Return what that took: no
        step is timed before."""
        check()
        torch._dynamo.reset()  # else what another size compiled would decide what this one compiles
        torch._dynamo.utils.counters.clear()
        begin, modules, compiled = time.perf_counter_ns(), 0, set()
        for path, label in self.labels.items():
            module = self.model.get_submodule(path)
            if not any(other.startswith(f"{path}.") for other in self.labels):
                for part in module.children() if isinstance(module, transducer.Part) else [module]:
                    part.forward = torch.compile(part.forward)
                    modules += 1
                    compiled.add(label)
        print(f"compiling {modules} modules; on a CPU this takes minutes ...", file=sys.stderr)
        for _ in range(COMPILING_ROUNDS):
            before = graphs()
            for inputs in self.inputs:
                self.timed(partial(self.labelled, inputs.given(), partial(_reported, compiled)))
                self.timed(partial(self.bare, inputs.given()))
            if graphs() == before:
                break
        return documents.Compiled(ns=time.perf_counter_ns() - begin, modules=modules, graphs=graphs(), graphs_later=0)


def graphs() -> int:
    """Return the number of graphs that torch.compile made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def _reported(labels: Collection[str], position: Place, again: bool) -> Iterator[None]:
    """Report on stderr a span in which a module was compiled, where that took long."""
    begin = time.monotonic()
    yield
    seconds = time.monotonic() - begin
    if position[0][-1] in labels and seconds > 1:
        print(f"  {labelling.named(position)}: {seconds:.0f} s", file=sys.stderr)


@dataclass
class _Recorded:
    """Runs a step with its labels in the trace."""

    profiling: Profiling
    given: Given

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        self.profiling.labelled(self.given, lambda place, _: record_function(labelling.named(place)))
        self.profiling.forget()


def feature_rows(path: Path, fewest_targets: int) -> Any:
    """Return feature frames and U of a shape file, (utterances, 2), without utterances that are too short.

    A file of encoder frames gives the fewest feature frames that have so many.  Raises UserError.
    """
    rows, factor = shapes.load(path), shapes.known_factor(path) or SUBSAMPLING
    rows[:, 0] = shapes.feature_frames(rows[:, 0], factor)
    fit = (shapes.subsampled(rows[:, 0], SUBSAMPLING) >= 1) & (rows[:, 1] >= fewest_targets)
    if not fit.any():
        raise UserError(f"{path}: no utterance is long enough for a frame after subsampling, with a target")
    return rows[fit]


def measured_limits(settings: Settings, amp: bool) -> Record:
    """Return the ``limits`` record, in the dtype of the matrix products."""
    gc.collect()
    if amp:
        settings = replace(settings, dtype="bfloat16")
    return peaks.measure(settings, set_up_torch(settings)).to_json()
