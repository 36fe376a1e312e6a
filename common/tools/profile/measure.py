"""Measure where a training step goes: the time, memory and operations of each label.

Timed steps with labels alternate with bare ones, so that the hooks' own cost is known.  Operations
are counted in a step of each batch before, memory is traced in a few steps after; neither is
timed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from rnnt_bench.records.schema import Measured
from rnnt_bench.system import machine, memory
from rnnt_bench.tools import loading, transducer
from rnnt_bench.tools.profile import labels, rows
from rnnt_bench.tools.sizes import Sizes
from rnnt_bench.traces import reader, windows

#: Paths of the layers of each encoder: --config, or "" for torchaudio's Conformer.
LAYERS = {"": "encoder.conformer.conformer_layers.*", "icefall": "encoder.layers.*"}
#: Paths of the parts of a layer of each encoder, by the end of their labels.
PARTS = {
    "": {
        "_feed_forward_macaron": "ffn1",
        "_self_attn": "self_attn",
        "_conv": "conv_module",
        "_feed_forward": "ffn2",
    },
    "icefall": {
        "_feed_forward_macaron": "feed_forward_macaron",
        "_self_attn": "self_attn",
        "_conv": "conv_module",
        "_feed_forward": "feed_forward",
    },
}


def unseen(key: labels.SpanKey, is_recomputed: bool) -> AbstractContextManager[None]:
    """Open a span that records nothing, whatever its key."""
    return nullcontext()


def run(job: JobSpec) -> Iterator[Any]:
    """Measure the batch size of a job; yield its records: the environment, then what was measured.
    Make a folder for the traces of memory.  Raises UserError, OutOfMemory and WrongResult."""
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
    """Hold the time of a step on the host, and on the device; None on a CPU."""

    host_ns: int
    device_ns: int | None


class Steps(NamedTuple):
    """Hold the times of steps without and with labels, the times of each span in each step with
    labels, and the share of the CPUs that other programs used."""

    bare: list[Times]
    labelled: list[Times]
    spans: list[rows.Span]
    foreign_cpu: float | None


class Marks(NamedTuple):
    """Hold a mark on the clock of the host, in ns, and one on that of the device; None on a CPU."""

    host: Any
    device: Any


class Inputs:
    """Hold the inputs of a step for one batch.

    Attributes:
        features: (N, frames, F), random
        lengths: (N,), in frames
        symbols: (N, U+1), a blank before random targets
        batch: targets and lengths for the loss
        description: the batch as records have it
    """

    def __init__(self, utterances: Any, sizes: Sizes, device: torch.device, *key: int):
        """Make the inputs of utterances (N, 2), each with its feature frames and its U.

        key: seeds the random numbers."""
        frames, tokens = utterances.T.tolist()
        N = len(frames)
        shape = (N, max(frames), sizes.features)
        numbers = shapes.uniform(math.prod(shape), shapes.ENCODER, *key).reshape(shape)
        drawn = shapes.symbols((N, max(tokens)), sizes.vocab_size, shapes.TARGETS, *key)
        targets = torch.from_numpy(drawn).to(device)
        # In [-1, 1), of numbers in [0, 1).
        self.features = 2 * torch.from_numpy(numbers).to(device, torch.float32) - 1
        self.lengths = torch.tensor(frames, device=device)
        self.symbols = torch.nn.functional.pad(targets.long(), (1, 0))  # a blank (0) before them
        self.batch = transducer.batch_of(targets, utterances)
        self.description = rows.Batch(
            N=N,
            frames=sum(frames),
            frames_max=max(frames),
            T_max=max(T for T, _ in self.batch.shapes),
            U_max=max(tokens),
            tokens=sum(tokens),
        )


class Profiling:
    """Make a model with a loss that is ready to step, and measure its steps.  Raises UserError for
    one that cannot be made or run."""

    def __init__(self, choice: rows.Choice, settings: Settings):
        self.choice = choice
        self.settings = settings
        row = implementations.find(choice.loss)
        try:
            self.device = set_up_torch(settings)
            self.adapter = implementations.load(row.script)(settings, row.variant)
            self.adapter.load(self.device.type)
        except NotRunnable as error:
            raise UserError(f"--loss {choice.loss}: {error}") from error
        torch.manual_seed(settings.seed)
        self.clock = Clock(self.device)
        self.inputs = self._inputs()
        self.model = self._model().to(self.device).train()
        self.labels = self._labels()
        self.optimizer = None
        if choice.optimizer:
            # The rate is small, so that the weights hardly change; it has no effect on the times.
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def _inputs(self) -> list[Inputs]:
        """Return the batches to measure, without utterances that are too short for the model or the
        loss.  Raises UserError where no utterance is long enough, or where the batch of a single
        utterance has more frames than --max-frames."""
        path = Path(self.settings.shape_file)
        utterances = shapes.load(path)
        factor = shapes.subsampling(path) or transducer.SUBSAMPLING
        # From here on the first column has feature frames in place of T.
        utterances[:, 0] = shapes.feature_frames(utterances[:, 0], factor)
        T = shapes.subsampled(utterances[:, 0], transducer.SUBSAMPLING)
        enough_frames = T >= self.adapter.fewest_frames
        enough_targets = utterances[:, 1] >= self.adapter.fewest_targets
        utterances = utterances[enough_frames & enough_targets]
        if not len(utterances):
            raise UserError(
                f"{path}: no utterance is long enough for a frame after subsampling, with a target"
            )
        batches = batching.in_batches(utterances, self.settings)
        chosen = batching.selected(batches, self.settings)
        most_frames = max(int(batches[index][:, 0].sum()) for index in chosen)
        limit = self.settings.max_frames
        # A sorted batch of several utterances keeps to the limit.
        if self.settings.sort_utterance and most_frames > limit:
            raise UserError(
                f"--max-frames {limit}: a measured batch is one utterance of {most_frames}; give at least that"
            )
        return [
            Inputs(batches[index], self.choice.sizes, self.device, self.settings.seed, index)
            for index in chosen
        ]

    def _model(self) -> torch.nn.Module:
        """Return the model with its loss, without dropout unless that is asked for.  Raises
        UserError."""
        choice = self.choice
        criterion = transducer.Criterion(self.adapter, self.device)
        model: torch.nn.Module
        if choice.model:
            model = loading.load(choice.model, choice.arguments, str(self.device))
            if criterion.layout.approximate or criterion.layout.tensors != ("logits",):
                raise UserError(
                    f"--loss {self.adapter.name}: takes no logits, which a model by import path gives; "
                    "give one that does: --loss torchaudio"
                )
            model = transducer.Imported(model, criterion)
        else:
            model = transducer.made(choice.sizes, criterion, choice.config)
        if choice.dropout:
            return model
        for module in model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
        return model

    def _labels(self) -> dict[str, str]:
        """Return the label of each labelled module, by its path in the whole model."""
        choice = self.choice
        model = self._chosen()
        if choice.labels:
            paths = labels.by_patterns(model, choice.labels)
        elif choice.depth is not None or choice.model:
            # The default patterns, below, fit the suite's own models only.
            paths = {
                path: label
                for path, label in labels.by_depth(model, choice.depth or 1).items()
                if not path.startswith("criterion")  # its parts get their labels below
            }
        else:
            paths = labels.by_patterns(model, self._default_patterns())
        prefix = "model." if choice.model else ""
        result = {prefix + path: label for path, label in paths.items()}
        for name, module in self.model.get_submodule("criterion").named_children():
            if isinstance(module, transducer.Part):  # the joiner and each loss: always labelled
                result[f"criterion.{name}"] = name
        return result

    def _default_patterns(self) -> dict[str, list[str]]:
        """Return {label: patterns of module paths} for the Conformer transducer.  The labels
        are those of icefall's profile."""
        layer = LAYERS[self.choice.config]
        patterns = {
            "rnnt_encoder": ["encoder"],
            "rnnt_encoder_embed": ["encoder.embed"],
            "rnnt_decoder": ["decoder"],
            "rnnt_encoder_layer": [layer],
        }
        for end, part in PARTS[self.choice.config].items():
            patterns[f"rnnt_encoder_layer{end}"] = [f"{layer}.{part}"]
        return patterns

    def _chosen(self) -> torch.nn.Module:
        """Return the model of --model, or the Conformer transducer."""
        return self.model.get_submodule("model") if self.choice.model else self.model

    def parts(self) -> dict[str, torch.nn.Module]:
        """Return the modules whose parameters are counted, by name: "model" and its parts.

        The parts of a model of --model are its children.  The others have the encoder, what is in
        it, "layer" (the first: all are alike), and the rest, `model.parts()`."""
        model: Any = self.model
        if self.choice.model:
            return {"model": model, **dict(model.model.named_children())}
        layer = model.get_submodule(LAYERS[self.choice.config].replace("*", "0"))
        return {
            "model": model,
            "encoder": model.encoder,
            "embed": model.encoder.embed,
            "layer": layer,
            **model.parts(),
        }

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Return the arguments of the model's forward in step `number`: the batches take turns."""
        inputs = self.inputs[number % len(self.inputs)]
        prepared = self.adapter.prepare(inputs.batch)
        return inputs.features, inputs.lengths, inputs.symbols, inputs.batch, prepared

    def step(self, arguments: tuple[Any, ...], open_span: labels.OpenSpan | None = unseen) -> None:
        """Run forward, backward and the optimizer's step; keep the loss in `self.loss`, and the
        gradients in the parameters.

        open_span: opens the span of each label; None for a step without labels.  By default the
        modules have their labels, so that an error can name the one that failed, but nothing is
        recorded.  Raises UserError and OutOfMemory."""
        label_of = self.labels if open_span else {}
        # Without labels too, `hooks.part` opens a span: that of the optimizer.
        hooks = labels.Labels(self.model, label_of, open_span or unseen)
        try:
            with hooks:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.choice.amp):
                    loss = self.model(*arguments)
                self.loss = loss.detach()
                loss.backward()
                hooks.end_backward()
                if self.optimizer:
                    with hooks.part("optimizer"):
                        self.optimizer.step()
        except UserError:
            raise
        except Exception as error:  # a model or a loss may raise anything
            raise self._explained(error, hooks.where) from error

    def _explained(self, error: Exception, where: str) -> Exception:
        """Return the exception that tells a user why a step failed with `error`.

        where: the part of the step that failed, in words (see `labels.Labels.where`)."""
        line = text.first_line(error)
        if memory.is_out_of_memory(error):
            return OutOfMemory(f"out of memory in {where}: take a smaller batch ({line})")
        if labels.is_overwritten(error):
            modules = self.model.named_modules()
            paths = [path for path, module in modules if getattr(module, "inplace", False)]
            cause = f"inplace=True in {', '.join(paths)}" if paths else "such as +="
            return UserError(
                f"{where}: writes over what goes into or out of a labelled module ({cause}), which a label "
                "cannot follow; write to a new tensor there, or choose other labels (--label, --depth)"
            )
        return UserError(f"the step fails in {where}: {type(error).__name__}: {line}")

    def timed(self, run: Callable[[], None]) -> Times:
        """Call `run`, which runs a step; drop the gradients; return the times of the call."""
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
        """Count, warm up, time and trace steps; return what they measured.

        folder: for the traces.  Raises WrongResult where a loss is not finite."""
        batch_count = len(self.inputs)
        counter = FlopCounter(self.model)
        counts = labels.Spans(counter.total)  # reads the total so far at both ends of each span
        for number in range(batch_count):
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
        # Give each timed span what was counted under the same key: the mean of a step.
        for span in steps.spans:
            key = labels.SpanKey(tuple(span.chain), span.phase)
            for reading in counts.calls.get(key, ()):
                span.macs += (reading.end.macs - reading.begin.macs) / batch_count
                span.flops += (reading.end.flops - reading.begin.flops) / batch_count
        return rows.Measured(
            parameters={
                name: sum(parameter.numel() for parameter in module.parameters())
                for name, module in self.parts().items()
            },
            batches=[inputs.description for inputs in self.inputs],
            macs=total.macs / batch_count,
            flops=total.flops / batch_count,
            not_counted=counter.not_counted(),
            memory=self.trace_memory(folder),
            spans=steps.spans,
            bare_ns=[times.host_ns for times in steps.bare],
            host_ns=[times.host_ns for times in steps.labelled],
            device_ns=[times.device_ns for times in steps.labelled],
            foreign_cpu=steps.foreign_cpu,
            flags=machine.busy_flags(steps.foreign_cpu, torch.get_num_threads()),
        )

    def time_steps(self) -> Steps:
        """Time each step twice, without and with labels; return the times.

        The span of a key gets one time for each step that has the key: the sum over its calls.  In
        steps 0, 2, 4, ... the run with labels comes first, in the others the run without."""
        load = machine.ForeignLoad()
        spans: dict[labels.SpanKey, rows.Span] = {}
        bare: list[Times] = []
        labelled: list[Times] = []
        for number in range(self.choice.steps):
            step_spans = labels.Spans(self._read)
            runs = [(step_spans, labelled), (None, bare)]
            if number % 2:
                runs.reverse()
            for spans_or_none, taken in runs:
                times = self.timed(partial(self.step, self.arguments(number), spans_or_none))
                taken.append(times)
            for key, readings in step_spans.calls.items():
                chain, phase = key
                new = rows.Span(chain=list(chain), phase=phase, calls=0, host_ns=[], device_ns=[])
                span = spans.setdefault(key, new)  # `new` in the first step that has this key
                # A forward that a checkpoint computes again takes time, but is no further call.
                span.calls += sum(not reading.is_recomputed for reading in readings)
                summed = self._summed(readings)
                span.host_ns.append(summed.host_ns)
                span.device_ns.append(summed.device_ns)
        foreign_cpu = load.share() if load.ready() else None
        return Steps(bare, labelled, list(spans.values()), foreign_cpu)

    def _read(self) -> Marks:
        """Return marks on the clocks of host and device, set now."""
        return Marks(time.perf_counter_ns(), self.clock.mark() if self.clock.cuda else None)

    def _summed(self, readings: Sequence[labels.Reading]) -> Times:
        """Return the times from begin to end of these readings, summed, on host and device."""
        host_ns = sum(end.host - begin.host for _, begin, end in readings)
        device_ns = None
        if self.clock.cuda:
            device_ns = sum(
                self.clock.between(begin.device, end.device) for _, begin, end in readings
            )
        return Times(host_ns, device_ns)

    def trace_memory(self, folder: Path) -> list[rows.Memory]:
        """Trace steps; return the memory of each label in each phase, and of the step.

        The traces go to `folder`, in place of earlier ones."""
        reader.remove(folder)
        active = self.choice.trace_steps
        schedule = {"wait": 0, "warmup": 1, "active": active, "repeat": 1}
        settings = replace(self.settings, schedule=schedule, record_shapes=False, with_stack=False)

        def open_span(key: labels.SpanKey, is_recomputed: bool) -> AbstractContextManager:
            """Name the span in the trace; a recomputed forward has the phase of the backward."""
            return torch.profiler.record_function(rows.named(key.chain[-1], key.phase))

        steps = []
        for number in range(1 + active):  # the first is the profiler's warm-up
            step = partial(self.step, self.arguments(number), open_span)
            steps.append(SimpleNamespace(run=partial(self.timed, step)))  # `profile` calls run()
        with warnings.catch_warnings():
            # The profiler warns that it keeps only the last cycle, but there is only one.
            warnings.simplefilter("ignore")
            profiler.profile(iter(steps), settings, self.device, folder, "profile")
        spans = (span for path in reader.trace_files(folder) for span in windows.spans(path))
        return [
            rows.Memory(
                name=name,
                peak=max(span.highest for span in of_name),
                rise=max(span.highest - span.begin for span in of_name),
                left=round(sum(span.end - span.begin for span in of_name) / active),
            )
            for name, of_name in text.gathered((span.name, span) for span in spans).items()
        ]
