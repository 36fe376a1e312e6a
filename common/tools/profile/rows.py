"""Tells from the records of a profile where a step went: each label with and without what lies in
it, in each phase.

Times are means over the labelled steps, so that they add up: all labels and `other` to the step."""

from __future__ import annotations

from functools import partial
from statistics import fmean, median
from typing import Annotated, Any

from msgspec import Meta, Struct

from rnnt_bench.analysis.metrics import cells, metric, values
from rnnt_bench.core import text
from rnnt_bench.present.parts import Cell, Figure, tabulated
from rnnt_bench.present.style import PALETTE, axis, bars, layout
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import Answer, Kept, slice_of
from rnnt_bench.tools.sizes import Sizes

TOOL, TITLE = "profile", "Where the training step goes"
STEP, OTHER, BACKWARD = "step", "other", "backward"
#: Parts that a transducer adds to its encoder: words -> labels.
OWN_PARTS = {
    "decoder": ("rnnt_decoder",),
    "joiner": ("joiner",),
    "loss": ("rnnt_loss", "rnnt_loss_simple", "rnnt_loss_pruned"),
}


class Choice(Struct, kw_only=True, frozen=True):
    """The model to profile, and how, as the flags of these names.

    sizes: of the Conformer transducer; model: import path, or ""; config: "icefall", or "" for
      torchaudio's Conformer;
    labels: patterns by label, {} for the default; depth: in their place, of the modules that get a
      label."""

    sizes: Sizes = Sizes()
    loss: str = "fast_rnnt-pruned"
    model: str = ""
    config: str = ""
    arguments: dict[str, Any] = {}
    labels: dict[str, list[str]] = {}
    depth: int | None = None
    steps: int = 20
    warmup: int = 2
    trace_steps: int = 2
    dropout: bool = False
    amp: bool = False
    optimizer: bool = False


class Profile(Struct, kw_only=True):
    """A run.  sizes: settings of each batch size, by its name "batch-size 4"."""

    choice: Choice
    sizes: dict[str, dict[str, int | bool]]


class Batch(Struct, kw_only=True):
    """A batch: its utterances, all their feature frames and tokens, and those of the longest."""

    N: int
    frames: int
    frames_max: int
    T_max: int = 0
    U_max: int = 0
    tokens: int


class Taken(Struct, kw_only=True):
    """Times of each step on the host and the device (null on a CPU), and operations of a step, the
    mean of batches."""

    host_ns: Annotated[list[float], Meta(min_length=1)]
    device_ns: list[float | None]
    macs: float = 0.0
    flops: float = 0.0


class Place(Taken, kw_only=True):
    """A label within a step, with all that lies in it.  chain: labels, the outermost first; calls:
    of all steps."""

    chain: list[str]
    phase: str
    calls: int


class Memory(Struct, kw_only=True):
    """Memory of a label ("label.backward"; "" of the step) in bytes: the peak above the level at
    the begin of the step and at its own, and what its calls in a step leave allocated."""

    name: str
    peak: int
    rise: int
    left: int


class Measured(Taken, kw_only=True):
    """A batch size that was profiled.  parameters: numbers of those of the "model" and of its
    parts; bare_ns: steps without labels; foreign_cpu, flags: the load beside the steps;
    not_counted: operators without a rule."""

    parameters: dict[str, int]
    batches: Annotated[list[Batch], Meta(min_length=1)]
    bare_ns: Annotated[list[float], Meta(min_length=1)]
    foreign_cpu: float | None = None
    flags: list[str] = []
    spans: Annotated[list[Place], Meta(min_length=1)]
    memory: list[Memory] = []
    not_counted: list[str] = []


class Amounts(Struct, kw_only=True):
    """Time and operations of a mean step.  ms: of the device on CUDA, else of the host."""

    ms: float = 0.0
    host_ms: float = 0.0
    macs: float = 0.0
    flops: float = 0.0

    def add(self, other: Amounts, sign: int = 1) -> None:
        self.ms += sign * other.ms
        self.host_ms += sign * other.host_ms
        self.macs += sign * other.macs
        self.flops += sign * other.flops


class Part(Amounts, kw_only=True):
    """A row: a label in a phase with all that lies in it, `other`, which no label has, or the step.

    Attributes:
        name: "self_attn" or "self_attn.backward"
        depth: how many labels it lies in
        calls: of all steps
        own_ms: without what lies in it
        share: of the step's ms
        device_ms: null on a CPU
        peak_mb, rise_mb, left_mb: see Memory
    """

    name: str
    label: str
    phase: str = ""
    depth: int = 0
    calls: int = 0
    own_ms: float = 0.0
    share: float = 0.0
    ms_per_call: float | None = None
    device_ms: float | None = None
    flops_per_second: float | None = None
    peak_mb: float | None = None
    rise_mb: float | None = None
    left_mb: float | None = None


def named(label: str, phase: str) -> str:
    """Return "self_attn" or "self_attn.backward"."""
    return f"{label}.{BACKWARD}" if phase == BACKWARD else label


_ms = partial(metric, unit="ms", better="lower")
_mb = partial(metric, unit="MB", better="lower", profiled=True)
#: The numbers of a row: its keys in CSV and JSON, and the columns of the table, in this order.
NUMBERS = (
    metric("calls", "calls"),
    _ms("ms", "ms"),
    _ms("ms_per_call", "ms /call"),
    _ms("own_ms", "own ms"),
    _ms("host_ms", "host ms"),
    _ms("device_ms"),
    metric("share", "share", text.percent),
    _mb("peak_mb", "peak MB"),
    _mb("rise_mb", "rise MB"),
    _mb("left_mb", "leaves MB"),
    metric("macs", "MACs", text.quantity),
    metric("flops", "FLOPs", text.quantity),
    metric("flops_per_second", "FLOPs /s", text.quantity, better="higher"),
)


def parts_of(measured: Measured) -> list[Part]:
    """Return the labels as they begin, each backward after its forward, then `other` and the
    step."""

    def amounts(taken: Taken) -> Amounts:
        host = fmean(taken.host_ns) / 1e6
        device = fmean([ns or 0.0 for ns in taken.device_ns]) / 1e6
        return Amounts(
            ms=device if cuda else host, host_ms=host, macs=taken.macs, flops=taken.flops
        )

    cuda = None not in measured.device_ns
    steps = len(measured.host_ns)
    step = Part(name=STEP, label=STEP, calls=steps)
    other = Part(name=OTHER, label=OTHER, calls=steps)
    for part in (step, other):
        part.add(amounts(measured))
    labels: dict[str, dict[str, Part]] = {}
    spans = {(tuple(span.chain), span.phase): amounts(span) for span in measured.spans}
    own_ms = {key: amount.ms for key, amount in spans.items()}
    for span, (key, amount) in zip(measured.spans, spans.items()):
        (*above, label), phase = key
        empty = Part(name=named(label, phase), label=label, phase=phase, depth=len(above))
        part = labels.setdefault(label, {}).setdefault(phase, empty)
        part.calls += span.calls
        if label not in above:  # one within its own label is counted with the outer one
            part.add(amount)
        outer = tuple(above), phase
        if outer in spans:
            own_ms[outer] -= amount.ms
        else:
            other.add(amount, -1)
    for (chain, phase), ms in own_ms.items():
        labels[chain[-1]][phase].own_ms += ms
    other.own_ms = other.ms
    parts = [*(part for phases in labels.values() for part in phases.values()), other, step]
    memory_of = {memory.name: memory for memory in measured.memory}
    for part in parts:
        part.share = part.ms / step.ms
        part.ms_per_call = part.ms * steps / part.calls if part.calls else None
        part.device_ms = part.ms if cuda else None
        part.flops_per_second = part.flops / part.ms * 1e3 if part.ms > 0 else None
        held = memory_of.get("" if part is step else part.name)
        if held:
            part.peak_mb = held.peak / text.MB
            part.rise_mb = held.rise / text.MB
            part.left_mb = held.left / text.MB
    return parts


def lines(choice: Choice, measured: Measured, parts: list[Part]) -> list[str]:
    """Return the lines below a table: the model, the batch, the labels' cost, and reasons not to
    trust the numbers."""
    batches = measured.batches
    frames = [batch.frames for batch in batches]
    size = f"batches: {len(batches)}, of {min(frames)} to {max(frames)} frames"
    if len(batches) == 1:
        (batch,) = batches
        lengths = f"{batch.frames} frames (longest {batch.frames_max}), {batch.tokens} tokens"
        size = f"batch: {batch.N} utterances, {lengths}"
    options = (
        ", ".join(name for name in ("dropout", "amp", "optimizer") if getattr(choice, name))
        or "no dropout"
    )
    bare = median(measured.bare_ns) / 1e6
    count = len(measured.host_ns)
    hooks = median(
        [(labelled - alone) / 1e6 for labelled, alone in zip(measured.host_ns, measured.bare_ns)]
    )
    cost = (
        f"{text.number(hooks)} ms ({text.percent(hooks / bare)})"
        if hooks > 0
        else "less than steps differ by"
    )
    model = choice.model or (
        "icefall's Conformer transducer" if choice.config else "Conformer transducer"
    )
    numbers = measured.parameters.items()
    by_part = [f"{name} {number:,}" for name, number in numbers if name != "model"]
    result = [f"{choice.loss}, {model}, {measured.parameters['model']} parameters"]
    if by_part:
        result.append(f"parameters by part: {', '.join(by_part)}")
    result.append(f"{size}; {count} steps with labels and {count} without, in turn; {options}")
    result.append(f"step without labels: {text.number(bare)} ms; the labels' own cost: {cost}")
    if measured.not_counted:
        result.append(f"not counted in FLOPs: {', '.join(measured.not_counted)}")
    if measured.flags:
        load = text.percent(measured.foreign_cpu)
        result.append(
            f"the steps ran beside other load, which took {load} of the CPUs: their times are too long; profile again "
            "when the machine is quiet"
        )
    return [*result, verdict(parts, bool(measured.flags))]


def verdict(parts: list[Part], busy: bool) -> str:
    """Return what share of a step the transducer's own parts take, and the largest label beside
    them."""
    outer = text.gathered((part.label, part.ms) for part in parts if part.depth == 0 and part.phase)
    shares = {label: sum(times) / parts[-1].ms for label, times in outer.items()}
    share_of = {
        name: [shares.pop(label) for label in labels if label in shares]
        for name, labels in OWN_PARTS.items()
    }
    *names, last = [name for name, own_shares in share_of.items() if own_shares] or [""]
    words = " and ".join(filter(None, [", ".join(names), last]))
    answers = []
    if words:
        answers.append(f"{words}: {text.percent(sum(map(sum, share_of.values())))} of a step")
    if shares:
        largest = max(shares, key=lambda label: shares[label])
        answers.append(f"{largest}: {text.percent(shares[largest])}")
    if busy:
        answers.append("measured beside other load")
    return f"VERDICT: {'; '.join(answers)}"


def answer(kept: Kept) -> Answer:
    """Return what a run found out.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Profile)
    result = Answer(kept.header.name, lines=kept.machine)
    for size in config.sizes:
        job = kept.job(size)
        result.statuses.append(job.status)
        result.failures += [f"{size}: {job.status}: {job.reason}"] if job.reason else []
        if job.status != "ok":
            continue
        (measured,) = job.of(Measured)
        parts = parts_of(measured)
        step = parts[-1]
        peak = f", peak {text.number(step.peak_mb)} MB" if step.peak_mb else ""
        operations = f"{text.quantity(step.macs, 'MACs')}, {text.quantity(step.flops, 'FLOPs')}"
        result.total.append(f"{size}: a step: {text.number(step.ms)} ms, {operations}{peak}")
        on_cpu = step.device_ms is None  # the host's times are its times
        shown = [number for number in NUMBERS if not (on_cpu and number.key == "host_ms")]
        table = []
        for part in parts:
            table.append(
                {"label": Cell("· " * part.depth + part.name, part.name), **cells(shown, part)}
            )
            names = {key: getattr(part, key) for key in ("name", "label", "phase", "depth")}
            result.rows.append({"size": size, **names, **values(NUMBERS, part)})
        result.tables.append(
            tabulated("labels", f"{size}: each label with all that lies in it; own: without", table)
        )
        result.lines += lines(config.choice, measured, parts)
        result.figures.append(figure(size, parts))
    return result


def figure(size: str, parts: list[Part]) -> Figure:
    """Return a bar for each label: its own milliseconds, forward and backward."""
    *inner, _ = parts
    labels = list(dict.fromkeys(part.label for part in inner))
    data = []
    for phase, color in zip(dict.fromkeys(part.phase for part in inner), PALETTE):
        times = [part.own_ms for part in inner if part.phase == phase]
        names = [part.label for part in inner if part.phase == phase]
        data.append(
            bars(
                phase or OTHER, times, names, {"color": color}, "%{y}: %{x:.4g} ms", orientation="h"
            )
        )
    largest = sorted(inner, key=lambda part: -part.own_ms)[:5]
    vertical = {"categoryorder": "array", "categoryarray": labels[::-1]}
    return Figure(
        f"profile-time-{size.replace(' ', '-')}",
        f"Time of the step, {size}",
        "Milliseconds of a label in a mean step, without those of the labels that lie in it; all add up to the step.",
        "Time of the step: "
        + ", ".join(f"{part.name} {text.number(part.own_ms)} ms" for part in largest),
        data,
        layout(24 * len(labels) + 90, 150, xaxis=axis("own ms"), yaxis=vertical, barmode="stack"),
    )


SLICE = slice_of(TOOL, TITLE, answer)
