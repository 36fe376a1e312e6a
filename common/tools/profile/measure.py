"""Where a training step goes: time, memory and operations of each label.

Timed steps with labels alternate with bare ones, so that the hooks' own cost is known.  Memory is from a trace of a few
more steps, FLOPs from one counted step of each batch: no pass is part of another."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Tuple

import msgspec
import torch

from rnnt_bench.core import files, implementations, text
from rnnt_bench.core.errors import NotRunnable, OutOfMemory, UserError, WrongResult
from rnnt_bench.core.settings import Settings
from rnnt_bench.data import batching, shapes
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.instruments import profiler
from rnnt_bench.instruments.clock import Clock
from rnnt_bench.instruments.device import environment, set_up_torch
from rnnt_bench.losses.inputs import Batch, padded_sizes
from rnnt_bench.records.schema import Measured
from rnnt_bench.system import machine, memory
from rnnt_bench.tools import loading
from rnnt_bench.tools.profile import labels, rows, transducer
from rnnt_bench.traces import reader, windows

#: The file of a model, and paths of a layer and of its parts, by configuration; "" is of torchaudio's Conformer.
ICEFALL = f"{files.ROOT / 'examples' / 'icefall.py'}:transducer"
LAYERS = {
    "": ("encoder.conformer.conformer_layers.*", ".ffn1", ".self_attn", ".conv_module", ".ffn2"),
    "icefall": ("encoder.layers.*", ".feed_forward_macaron", ".self_attn", ".conv_module", ".feed_forward"),
}
#: Ends of the labels of a layer and its parts.
IN_LAYER = ("", "_feed_forward_macaron", "_self_attn", "_conv", "_feed_forward")


def unseen(position: labels.Place, again: bool) -> ContextManager[None]:
    """Return a span that records nothing."""
    return nullcontext()


def run(job: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the records of a batch size.  Raises UserError, OutOfMemory."""
    settings = Settings.from_json(job["settings"])
    folder = Path(job["folder"]) / job["job"].replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    profiling = Profiling(msgspec.convert(job["given"]["choice"], rows.Choice), settings)
    path, here = Path(settings.shape_file), environment(settings, profiling.device)
    yield msgspec.structs.replace(here, shape_file=settings.shape_file, shape_file_sha256=shapes.sha256(path))
    yield Measured(value=profiling.measured(folder))


class Inputs:
    """A batch: features (N, frames, F), lengths, symbols (N, U+1) with a blank first, and inputs of the loss."""

    def __init__(self, utterances: Any, sizes: rows.Sizes, adapter: Any, device: torch.device, *key: int):
        N, frames, U = padded_sizes(utterances)
        drawn = 2 * shapes.uniform(N * frames * sizes.features, shapes.ENCODER, *key) - 1
        self.features = torch.from_numpy(drawn).view(N, frames, sizes.features).to(device)
        self.lengths = torch.tensor(utterances[:, 0].tolist(), device=device)
        targets = torch.from_numpy(shapes.symbols((N, U), sizes.vocab_size, shapes.TARGETS, *key)).to(device)
        self.symbols = torch.nn.functional.pad(targets.long(), (1, 0))
        pairs = [(int(shapes.subsampled(length, transducer.SUBSAMPLING)), int(U)) for length, U in utterances]
        T, U_lengths = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*pairs))
        none = torch.empty(0, device=device)  # the model makes them
        self.batch, self.adapter = Batch(targets, T, U_lengths, pairs, none, none), adapter
        total, tokens = map(int, utterances.sum(0))
        T_max = max(T for T, _ in pairs)
        self.described = rows.Batch(N=N, frames=total, frames_max=frames, T_max=T_max, U_max=U, tokens=tokens)

    def given(self) -> Tuple[Any, ...]:
        """Return the arguments of the model's forward for one step."""
        return self.features, self.lengths, self.symbols, self.batch, self.adapter.prepare(self.batch)


class Profiling:
    """A model that is ready to step, and its measurements.  Raises UserError for what cannot be made or run."""

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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5) if choice.optimizer else None

    def _inputs(self, adapter: Any) -> List[Inputs]:
        """Return the measured batches of feature frames and U, without utterances that are too short."""
        path = Path(self.settings.shape_file)
        utterances, factor = shapes.load(path), shapes.subsampling(path) or transducer.SUBSAMPLING
        utterances[:, 0] = shapes.feature_frames(utterances[:, 0], factor)
        encoded = shapes.subsampled(utterances[:, 0], transducer.SUBSAMPLING)
        utterances = utterances[(encoded >= adapter.fewest_frames) & (utterances[:, 1] >= adapter.fewest_targets)]
        if not len(utterances):
            raise UserError(f"{path}: no utterance is long enough for a frame after subsampling, with a target")
        batches = batching.in_batches(utterances, self.settings)
        chosen = batching.selected(batches, self.settings)
        longest, most = max(int(batches[index][:, 0].sum()) for index in chosen), self.settings.max_frames
        if self.settings.sort_utterance and longest > most:
            raise UserError(f"--max-frames {most}: a measured batch is one utterance of {longest}; give at least that")
        seed, sizes = self.settings.seed, self.choice.sizes
        return [Inputs(batches[index], sizes, adapter, self.device, seed, index) for index in chosen]

    def _model(self, adapter: Any) -> torch.nn.Module:
        choice, criterion = self.choice, transducer.Criterion(adapter, self.device)
        if choice.model:
            model = loading.load(choice.model, choice.arguments, str(self.device))
            if criterion.layout.approximate or criterion.layout.tensors != ("logits",):
                words = "takes no logits, which a model by import path gives; give one that does: --loss torchaudio"
                raise UserError(f"--loss {adapter.name}: {words}")
            made: torch.nn.Module = transducer.Imported(model, criterion)
        else:
            make = loading.imported(ICEFALL) if choice.config else transducer.Transducer
            made = make(choice.sizes, criterion)
        for module in made.modules() if not choice.dropout else ():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
        return made

    def _labels(self) -> Dict[str, str]:
        choice, model = self.choice, self.model
        owner, prefix = (model.get_submodule("model"), "model.") if choice.model else (model, "")
        if choice.labels or choice.depth is not None or choice.model:
            patterns, depth = choice.labels, choice.depth or 1
            paths = labels.by_patterns(owner, patterns) if patterns else labels.by_depth(owner, depth)
            own = {path: label for path, label in paths.items() if patterns or not path.startswith("criterion")}
            result = {prefix + path: label for path, label in own.items()}
        else:
            layer, *parts = LAYERS[choice.config]  # those that icefall's profile began with
            of_layer = {f"rnnt_encoder_layer{name}": [layer + part] for name, part in zip(IN_LAYER, ["", *parts])}
            around = {f"rnnt_{name.replace('.', '_')}": [name] for name in ("encoder", "encoder.embed", "decoder")}
            result = labels.by_patterns(model, {**around, **of_layer})
        of_loss = model.get_submodule("criterion").named_children()  # which are always labelled
        return {**result, **{f"criterion.{name}": name for name, part in of_loss if isinstance(part, transducer.Part)}}

    def parts(self) -> Dict[str, torch.nn.Module]:
        """Return the model and its parts by name: its children, or those of a transducer and a layer of its encoder."""
        model: Any = self.model
        if self.choice.model:
            return {"model": model, **dict(model.model.named_children())}
        layer = model.get_submodule(LAYERS[self.choice.config][0].replace("*", "0"))
        return {"model": model, "encoder": model.encoder, "embed": model.encoder.embed, "layer": layer, **model.parts()}

    def labelled(self, given: Tuple[Any, ...], span: Optional[labels.Span] = unseen) -> None:
        """Run forward, backward and the optimizer's step; the gradients stay.  span: None for a step without labels."""
        hooks = labels.Labels(self.model, self.labels if span else {}, span or unseen)
        try:
            with hooks:
                with torch.autocast(self.device.type, torch.bfloat16) if self.choice.amp else nullcontext():
                    loss = self.model(*given)
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
                raise OutOfMemory(f"out of memory in {hooks.where}: take a smaller batch ({line})") from error
            if labels.is_overwritten(error):
                paths = [path for path, part in self.model.named_modules() if getattr(part, "inplace", False)]
                what = f"inplace=True in {', '.join(paths)}" if paths else "such as +="
                words = f"writes over what goes into or out of a labelled module ({what}), which a label cannot follow"
                advice = "write to a new tensor there, or choose other labels (--label, --depth)"
                raise UserError(f"{hooks.where}: {words}; {advice}") from error
            raise UserError(f"the step fails in {hooks.where}: {type(error).__name__}: {line}") from error

    def timed(self, run: Callable[[], None]) -> Tuple[int, Optional[int]]:
        """Return the nanoseconds that a run takes of the host, and on CUDA of the device, else None."""
        self.clock.synchronize()
        host, device = time.perf_counter_ns(), self.clock.mark()
        run()
        end = self.clock.mark()
        self.clock.synchronize()
        host = time.perf_counter_ns() - host
        self.model.zero_grad(set_to_none=True)
        return host, self.clock.between(device, end) if self.clock.cuda else None

    def measured(self, folder: Path) -> rows.Measured:
        """Return all that is measured; traces go to `folder`."""
        counter, counts = FlopCounter(self.model), labels.Spans(lambda: counter.total())
        for inputs in self.inputs:
            with counter:
                self.timed(partial(self.labelled, inputs.given(), counts))
            if not self.loss.isfinite():
                raise WrongResult(f"the loss of a step is {float(self.loss)}, before anything is timed")
        total = counter.total()
        for number in range(self.choice.warmup):
            self.timed(partial(self.labelled, self.inputs[number % len(self.inputs)].given()))
        times = self.times()
        for span in times["spans"]:
            for _, begin, end in counts.calls.get((tuple(span.chain), span.phase), ()):
                span.macs += (end.macs - begin.macs) / len(self.inputs)
                span.flops += (end.flops - begin.flops) / len(self.inputs)
        return rows.Measured(
            parameters={name: sum(each.numel() for each in part.parameters()) for name, part in self.parts().items()},
            batches=[inputs.described for inputs in self.inputs],
            macs=total.macs / len(self.inputs),
            flops=total.flops / len(self.inputs),
            not_counted=counter.not_counted(),
            memory=self.memory(folder),
            **times,
        )

    def times(self) -> Dict[str, Any]:
        """Return the times of bare and labelled steps in turn, those of each label in each step, and the load."""
        host, clock, load = Clock(torch.device("cpu")), self.clock, machine.ForeignLoad()
        places: Dict[labels.Place, rows.Place] = {}
        bare: List[Any] = []
        labelled: List[Any] = []
        for number in range(self.choice.steps):
            inputs = self.inputs[number % len(self.inputs)]
            taken = labels.Spans(lambda: (host.mark(), clock.mark() if clock.cuda else None))
            runs = [(bare, None), (labelled, taken)]
            for kept, span in runs if number % 2 else reversed(runs):
                kept.append(self.timed(partial(self.labelled, inputs.given(), span)))
            for (chain, phase), calls in taken.calls.items():
                new = rows.Place(chain=list(chain), phase=phase, calls=0, host_ns=[], device_ns=[])
                spent = places.setdefault((chain, phase), new)
                spent.calls += sum(first for first, _, _ in calls)
                spent.host_ns.append(sum(end[0] - begin[0] for _, begin, end in calls))
                device = sum(clock.between(begin[1], end[1]) for _, begin, end in calls) if clock.cuda else None
                spent.device_ns.append(device)
        foreign = load.share() if load.ready() else None
        known = {"spans": [*places.values()], "foreign_cpu": foreign, "bare_ns": [ns for ns, _ in bare]}
        times = dict(zip(("host_ns", "device_ns"), map(list, zip(*labelled))))
        return {**known, **times, "flags": machine.busy_flags(foreign, torch.get_num_threads())}

    def memory(self, folder: Path) -> List[rows.Memory]:
        """Return the memory of each span, by name, from a trace in `folder`."""
        reader.remove(folder)
        active = self.choice.trace_steps
        schedule = {"wait": 0, "warmup": 1, "active": active, "repeat": 1}
        settings = replace(self.settings, schedule=schedule, record_shapes=False, with_stack=False)
        recorded = partial(
            self.labelled, span=lambda place, _: torch.profiler.record_function(rows.named(place[0][-1], place[1]))
        )
        given = [self.inputs[number % len(self.inputs)].given() for number in range(1 + active)]
        steps = [SimpleNamespace(run=partial(self.timed, partial(recorded, each))) for each in given]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the profiler's: only the last cycle is kept, which is all there is
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
