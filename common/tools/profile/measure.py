"""Where a training step goes: time, memory and operations of each label.

Timed steps with labels alternate with bare ones, so that the hooks' own cost is known.  Memory is
from a trace of a few more steps, FLOPs from one counted step of each batch: no pass is part of
another."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch

from rnnt_bench.core import implementations, text
from rnnt_bench.core.errors import NotRunnable, OutOfMemory, UserError, WrongResult
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import Settings
from rnnt_bench.data import batching, shapes
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.instruments import profiler
from rnnt_bench.instruments.clock import Clock
from rnnt_bench.instruments.device import environment, set_up_torch
from rnnt_bench.losses.inputs import make_batch
from rnnt_bench.records.schema import Measured
from rnnt_bench.system import machine, memory
from rnnt_bench.tools import loading, transducer
from rnnt_bench.tools.profile import labels, rows
from rnnt_bench.tools.sizes import Sizes
from rnnt_bench.traces import reader, windows

#: Paths of a layer and of its parts, by configuration; "" is of torchaudio's Conformer.
LAYERS = {
    "": ("encoder.conformer.conformer_layers.*", ".ffn1", ".self_attn", ".conv_module", ".ffn2"),
    "icefall": (
        "encoder.layers.*",
        ".feed_forward_macaron",
        ".self_attn",
        ".conv_module",
        ".feed_forward",
    ),
}
#: Ends of the labels of a layer and its parts.
IN_LAYER = ("", "_feed_forward_macaron", "_self_attn", "_conv", "_feed_forward")


def unseen(position: labels.Place, again: bool) -> AbstractContextManager[None]:
    """Return a span that records nothing."""
    return nullcontext()


def run(job: JobSpec) -> Iterator[Any]:
    """Yield the records of a batch size.  Raises UserError, OutOfMemory."""
    settings = job.settings
    folder = Path(job.folder) / job.job.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    profiling = Profiling(msgspec.convert(job.request, rows.Choice), settings)
    yield msgspec.structs.replace(
        environment(settings, profiling.device),
        shape_file=settings.shape_file,
        shape_file_sha256=shapes.sha256(Path(settings.shape_file)),
    )
    yield Measured(value=profiling.measure(folder))


class Times(NamedTuple):
    """Hold the time of a step on the host, and on CUDA on the device, else None."""

    host_ns: int
    device_ns: int | None


class Steps(NamedTuple):
    """Hold the times of bare and labelled steps, those of each label in each step, and the share of
    the CPUs that others used."""

    bare: list[Times]
    labelled: list[Times]
    places: list[rows.Place]
    foreign_cpu: float | None


class Inputs:
    """A batch: features (N, frames, F), lengths, symbols (N, U+1) with a blank first, and inputs of
    the loss."""

    def __init__(
        self, utterances: Any, sizes: Sizes, adapter: Any, device: torch.device, *key: int
    ):
        batch = make_batch(
            utterances,
            vocab_size=sizes.vocab_size,
            encoder_dim=sizes.features,
            device=device,
            dtype=torch.float32,
            key=key,
        )
        self.features = 2 * batch.encoder_out.detach() - 1
        self.lengths = batch.T_lengths.long()
        self.symbols = torch.nn.functional.pad(batch.targets.long(), (1, 0))
        self.batch = transducer.batch_of(batch.targets, utterances)
        self.adapter = adapter
        frames, tokens = utterances.T.tolist()
        self.description = rows.Batch(
            N=len(frames),
            frames=sum(frames),
            frames_max=max(frames),
            T_max=max(T for T, _ in self.batch.shapes),
            U_max=max(tokens),
            tokens=sum(tokens),
        )

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the model's forward for one step."""
        return (
            self.features,
            self.lengths,
            self.symbols,
            self.batch,
            self.adapter.prepare(self.batch),
        )


class Profiling:
    """A model that is ready to step, and its measurements.  Raises UserError for what cannot be
    made or run."""

    def __init__(self, choice: rows.Choice, settings: Settings):
        self.choice, self.settings = choice, settings
        row = implementations.find(choice.loss)
        try:
            self.device = set_up_torch(settings)
            adapter = implementations.load(row.script)(settings, row.variant)
            adapter.load(self.device.type)
        except NotRunnable as error:
            raise UserError(f"--loss {choice.loss}: {error}") from error
        torch.manual_seed(settings.seed)
        self.clock = Clock(self.device)
        self.inputs = self._inputs(adapter)
        self.model = self._model(adapter).to(self.device).train()
        self.labels = self._labels()
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-5) if choice.optimizer else None
        )

    def _inputs(self, adapter: Any) -> list[Inputs]:
        """Return the measured batches of feature frames and U, without utterances that are too
        short."""
        path = Path(self.settings.shape_file)
        utterances = shapes.load(path)
        factor = shapes.subsampling(path) or transducer.SUBSAMPLING
        utterances[:, 0] = shapes.feature_frames(utterances[:, 0], factor)
        T = shapes.subsampled(utterances[:, 0], transducer.SUBSAMPLING)
        is_long = (T >= adapter.fewest_frames) & (utterances[:, 1] >= adapter.fewest_targets)
        utterances = utterances[is_long]
        if not len(utterances):
            raise UserError(
                f"{path}: no utterance is long enough for a frame after subsampling, with a target"
            )
        batches = batching.in_batches(utterances, self.settings)
        chosen = batching.selected(batches, self.settings)
        longest = max(int(batches[index][:, 0].sum()) for index in chosen)
        limit = self.settings.max_frames
        if self.settings.sort_utterance and longest > limit:
            raise UserError(
                f"--max-frames {limit}: a measured batch is one utterance of {longest}; give at least that"
            )
        sizes = self.choice.sizes
        seed = self.settings.seed
        return [
            Inputs(batches[index], sizes, adapter, self.device, seed, index) for index in chosen
        ]

    def _model(self, adapter: Any) -> torch.nn.Module:
        """Return the model with its loss, on the CPU or where its maker puts it."""
        choice = self.choice
        criterion = transducer.Criterion(adapter, self.device)
        model: torch.nn.Module
        if choice.model:
            model = loading.load(choice.model, choice.arguments, str(self.device))
            if criterion.layout.approximate or criterion.layout.tensors != ("logits",):
                raise UserError(
                    f"--loss {adapter.name}: takes no logits, which a model by import path gives; "
                    "give one that does: --loss torchaudio"
                )
            model = transducer.Imported(model, criterion)
        else:
            model = transducer.made(choice.sizes, criterion, choice.config)
        for module in model.modules() if not choice.dropout else ():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
        return model

    def _labels(self) -> dict[str, str]:
        """Return the label of each labelled module by its path."""
        choice = self.choice
        model = self.model
        if choice.labels:
            paths = labels.by_patterns(self._chosen(), choice.labels)
        elif choice.depth is not None or choice.model:
            paths = labels.by_depth(self._chosen(), choice.depth or 1)
            paths = {
                path: label for path, label in paths.items() if not path.startswith("criterion")
            }
        else:  # icefall's profile began with these
            patterns = {
                "rnnt_encoder": ["encoder"],
                "rnnt_encoder_embed": ["encoder.embed"],
                "rnnt_decoder": ["decoder"],
            }
            layer, *parts = LAYERS[choice.config]
            for name, part in zip(IN_LAYER, ["", *parts]):
                patterns[f"rnnt_encoder_layer{name}"] = [layer + part]
            paths = labels.by_patterns(model, patterns)
        prefix = "model." if choice.model else ""
        result = {prefix + path: label for path, label in paths.items()}
        for name, module in model.get_submodule("criterion").named_children():
            if isinstance(module, transducer.Part):  # these are always labelled
                result[f"criterion.{name}"] = name
        return result

    def _chosen(self) -> torch.nn.Module:
        """Return the model of --model, else the suite's own."""
        return self.model.get_submodule("model") if self.choice.model else self.model

    def parts(self) -> dict[str, torch.nn.Module]:
        """Return the model and its parts by name: its children, or those of a transducer and a
        layer of its encoder."""
        model: Any = self.model
        if self.choice.model:
            return {"model": model, **dict(model.model.named_children())}
        layer = model.get_submodule(LAYERS[self.choice.config][0].replace("*", "0"))
        return {
            "model": model,
            "encoder": model.encoder,
            "embed": model.encoder.embed,
            "layer": layer,
            **model.parts(),
        }

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Return the arguments of the model's forward in step `number`: the batches come in
        turn."""
        return self.inputs[number % len(self.inputs)].arguments()

    def step(self, arguments: tuple[Any, ...], span: labels.Span | None = unseen) -> None:
        """Run forward, backward and the optimizer's step; the gradients stay.  span: None for a
        step without labels."""
        hooks = labels.Labels(self.model, self.labels if span else {}, span or unseen)
        try:
            with hooks:
                with (
                    torch.autocast(self.device.type, torch.bfloat16)
                    if self.choice.amp
                    else nullcontext()
                ):
                    loss = self.model(*arguments)
                self.loss = loss.detach()
                loss.backward()
                hooks.end_backward()
                if self.optimizer:
                    with hooks.part("optimizer"):
                        self.optimizer.step()
        except UserError:
            raise
        except Exception as error:  # whatever a model or a loss raises
            line = text.first_line(error)
            if memory.is_out_of_memory(error):
                raise OutOfMemory(
                    f"out of memory in {hooks.where}: take a smaller batch ({line})"
                ) from error
            if labels.is_overwritten(error):
                modules = self.model.named_modules()
                paths = [path for path, module in modules if getattr(module, "inplace", False)]
                cause = f"inplace=True in {', '.join(paths)}" if paths else "such as +="
                raise UserError(
                    f"{hooks.where}: writes over what goes into or out of a labelled module ({cause}), which a label "
                    "cannot follow; write to a new tensor there, or choose other labels (--label, --depth)"
                ) from error
            raise UserError(
                f"the step fails in {hooks.where}: {type(error).__name__}: {line}"
            ) from error

    def timed(self, run: Callable[[], None]) -> Times:
        """Return the times of a run."""
        self.clock.synchronize()
        host_begin = time.perf_counter_ns()
        begin = self.clock.mark()
        run()
        end = self.clock.mark()
        self.clock.synchronize()
        host_ns = time.perf_counter_ns() - host_begin
        self.model.zero_grad(set_to_none=True)
        return Times(host_ns, self.clock.between(begin, end) if self.clock.cuda else None)

    def measure(self, folder: Path) -> rows.Measured:
        """Return all that is measured; traces go to `folder`."""
        batches = len(self.inputs)
        counter = FlopCounter(self.model)
        counts = labels.Spans(counter.total)
        for number in range(batches):
            with counter:
                self.timed(partial(self.step, self.arguments(number), counts))
            if not self.loss.isfinite():
                raise WrongResult(
                    f"the loss of a step is {float(self.loss)}, before anything is timed"
                )
        total = counter.total()
        for number in range(self.choice.warmup):
            self.timed(partial(self.step, self.arguments(number)))
        steps = self.time_steps()
        for place in steps.places:
            for _, begin, end in counts.calls.get((tuple(place.chain), place.phase), ()):
                place.macs += (end.macs - begin.macs) / batches
                place.flops += (end.flops - begin.flops) / batches
        return rows.Measured(
            parameters={
                name: sum(parameter.numel() for parameter in module.parameters())
                for name, module in self.parts().items()
            },
            batches=[inputs.description for inputs in self.inputs],
            macs=total.macs / batches,
            flops=total.flops / batches,
            not_counted=counter.not_counted(),
            memory=self.trace_memory(folder),
            spans=steps.places,
            bare_ns=[times.host_ns for times in steps.bare],
            host_ns=[times.host_ns for times in steps.labelled],
            device_ns=[times.device_ns for times in steps.labelled],
            foreign_cpu=steps.foreign_cpu,
            flags=machine.busy_flags(steps.foreign_cpu, torch.get_num_threads()),
        )

    def time_steps(self) -> Steps:
        """Return the times of bare and labelled steps in turn."""
        clock = self.clock
        host = Clock(torch.device("cpu"))
        load = machine.ForeignLoad()
        places: dict[labels.Place, rows.Place] = {}
        bare: list[Times] = []
        labelled: list[Times] = []
        for number in range(self.choice.steps):
            spans = labels.Spans(lambda: (host.mark(), clock.mark() if clock.cuda else None))
            for span in (None, spans) if number % 2 else (spans, None):
                times = self.timed(partial(self.step, self.arguments(number), span))
                (bare if span is None else labelled).append(times)
            for (chain, phase), calls in spans.calls.items():
                new = rows.Place(chain=list(chain), phase=phase, calls=0, host_ns=[], device_ns=[])
                place = places.setdefault((chain, phase), new)
                place.calls += sum(first for first, _, _ in calls)
                place.host_ns.append(sum(end[0] - begin[0] for _, begin, end in calls))
                device_ns = None
                if clock.cuda:
                    device_ns = sum(clock.between(begin[1], end[1]) for _, begin, end in calls)
                place.device_ns.append(device_ns)
        foreign_cpu = load.share() if load.ready() else None
        return Steps(bare, labelled, list(places.values()), foreign_cpu)

    def trace_memory(self, folder: Path) -> list[rows.Memory]:
        """Return the memory of each span, by name, from a trace in `folder`."""
        reader.remove(folder)
        active = self.choice.trace_steps
        schedule = {"wait": 0, "warmup": 1, "active": active, "repeat": 1}
        settings = replace(self.settings, schedule=schedule, record_shapes=False, with_stack=False)

        def span(place: labels.Place, again: bool) -> AbstractContextManager:
            (*_, label), phase = place
            return torch.profiler.record_function(rows.named(label, phase))

        steps = []
        for number in range(1 + active):
            step = partial(self.step, self.arguments(number), span)
            steps.append(SimpleNamespace(run=partial(self.timed, step)))
        with warnings.catch_warnings():
            # The profiler warns that it keeps the last cycle alone: there is no other.
            warnings.simplefilter("ignore")
            profiler.profile(iter(steps), settings, self.device, folder, "profile")
        spans = (span for path in reader.trace_files(folder) for span in windows.spans(path))
        return [
            rows.Memory(
                name=name,
                peak=max(span.highest for span in several),
                rise=max(span.highest - span.begin for span in several),
                left=round(sum(span.end - span.begin for span in several) / active),
            )
            for name, several in text.gathered((span.name, span) for span in spans).items()
        ]
