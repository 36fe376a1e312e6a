"""Answer from the records of a profile where a step went: each label in each phase, with and
without the labels in it.

Times are means over the labelled steps, so that all labels and `other` add up to the step."""

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
#: Bars that the text of the figure names.
LONGEST_BARS = 5
#: The labels of the parts that a transducer has beside its encoder, by their names in the verdict.
OWN_PARTS = {
    "decoder": ("rnnt_decoder",),
    "joiner": ("joiner",),
    "loss": ("rnnt_loss", "rnnt_loss_simple", "rnnt_loss_pruned"),
}


class Choice(Struct, kw_only=True, frozen=True):
    """Hold the model to profile, and how to profile it.  Most attributes are named for their flags.

    Attributes:
        sizes: of the Conformer transducer
        model: an import path, or "" for the Conformer transducer
        config: "icefall", or "" for torchaudio's Conformer
        arguments: of the model's constructor
        labels: patterns by label; {} for the default
        depth: the most names in the path of a module that gets a label, in place of `labels`; None
            where those hold
    """

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
    """Hold the configuration of a run.  sizes: settings of each batch size, by its name, such as
    "batch-size 4"."""

    choice: Choice
    sizes: dict[str, dict[str, int | bool]]


class Batch(Struct, kw_only=True):
    """Hold the size of a batch.

    Attributes:
        N: number of utterances
        frames, tokens: feature frames and tokens of all utterances together
        frames_max, T_max, U_max: the most feature frames, encoder frames and tokens of an utterance
    """

    N: int
    frames: int
    frames_max: int
    T_max: int = 0
    U_max: int = 0
    tokens: int


class Taken(Struct, kw_only=True):
    """Hold the times of each step on the host and the device (null on a CPU), and the operations of
    a step, the mean of the batches."""

    host_ns: Annotated[list[float], Meta(min_length=1)]
    device_ns: list[float | None]
    macs: float = 0.0
    flops: float = 0.0


class Span(Taken, kw_only=True):
    """Hold a label in a phase, with all that lies in it.

    chain: the labels around it and its own, outermost first; calls: in all steps, without forwards
    that a checkpoint computes again."""

    chain: list[str]
    phase: str
    calls: int


class Memory(Struct, kw_only=True):
    """Hold the memory of a label in a phase, in bytes.

    Attributes:
        name: "self_attn" or "self_attn.backward"; "" of the step
        peak: the most above what was allocated as the step began
        rise: the most above what was allocated as the label began
        left: what all its calls in a step leave allocated
    """

    name: str
    peak: int
    rise: int
    left: int


class Measured(Taken, kw_only=True):
    """Hold what was measured of a batch size.

    Attributes:
        parameters: numbers of parameters of the "model" and of its parts
        bare_ns: times of the steps without labels, on the host
        foreign_cpu, flags: the load of other programs beside the steps
        not_counted: operators without a rule
    """

    parameters: dict[str, int]
    batches: Annotated[list[Batch], Meta(min_length=1)]
    bare_ns: Annotated[list[float], Meta(min_length=1)]
    foreign_cpu: float | None = None
    flags: list[str] = []
    spans: Annotated[list[Span], Meta(min_length=1)]
    memory: list[Memory] = []
    not_counted: list[str] = []


class Amounts(Struct, kw_only=True):
    """Hold the time and operations of a mean step.  ms: of the device on CUDA, else of the host."""

    ms: float = 0.0
    host_ms: float = 0.0
    macs: float = 0.0
    flops: float = 0.0

    def add(self, other: Amounts, sign: int = 1) -> None:
        """Add other amounts, or subtract them with sign -1."""
        self.ms += sign * other.ms
        self.host_ms += sign * other.host_ms
        self.macs += sign * other.macs
        self.flops += sign * other.flops


class Part(Amounts, kw_only=True):
    """Hold a row of the table: a label in a phase with all that lies in it, `other` (what no label
    has), or the step.

    Attributes:
        name: "self_attn" or "self_attn.backward"
        depth: how many labels it lies in
        calls: in all steps
        own_ms: time without the labels in it
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
    """Return the name of a label in a phase: "self_attn" or "self_attn.backward"."""
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


def amounts_of(taken: Taken, on_cuda: bool) -> Amounts:
    """Return the mean times of a step, in ms, and its operations.

    `ms` of the result is the time on the device with `on_cuda`, else on the host."""
    host_ms = fmean(taken.host_ns) / 1e6
    device_ms = fmean([ns or 0.0 for ns in taken.device_ns]) / 1e6
    return Amounts(
        ms=device_ms if on_cuda else host_ms, host_ms=host_ms, macs=taken.macs, flops=taken.flops
    )


def parts_of(measured: Measured) -> list[Part]:
    """Return the rows of the table: the labels in the order in which they begin, each backward
    after its forward; then `other`, and last the step.

    `other` begins as the whole step, and loses each outermost label.  Likewise the own time of a
    label begins as all of its time, and loses that of each label directly in it."""
    on_cuda = None not in measured.device_ns
    steps = len(measured.host_ns)
    step = Part(name=STEP, label=STEP, calls=steps)
    other = Part(name=OTHER, label=OTHER, calls=steps)
    for part in (step, other):
        part.add(amounts_of(measured, on_cuda))
    by_label: dict[str, dict[str, Part]] = {}  # {label: {phase: its row}}

    def part_of(chain: list[str], phase: str) -> Part:
        """Return the row of the last label of a chain in a phase; make it where there is none."""
        label = chain[-1]
        new = Part(name=named(label, phase), label=label, phase=phase, depth=len(chain) - 1)
        return by_label.setdefault(label, {}).setdefault(phase, new)

    measured_labels = [(span.chain, span.phase) for span in measured.spans]
    for span in measured.spans:
        *above, label = span.chain  # the labels around it, and its own
        amounts = amounts_of(span, on_cuda)
        part = part_of(span.chain, span.phase)
        part.calls += span.calls
        part.own_ms += amounts.ms
        if label not in above:  # a label within itself is counted with the outer one
            part.add(amounts)
        if (above, span.phase) in measured_labels:
            part_of(above, span.phase).own_ms -= amounts.ms
        else:
            other.add(amounts, sign=-1)
    other.own_ms = other.ms
    parts = [part for phases in by_label.values() for part in phases.values()] + [other, step]
    memory_of = {memory.name: memory for memory in measured.memory}
    for part in parts:
        part.share = part.ms / step.ms
        # The times are of a mean step, the calls of all steps.
        part.ms_per_call = part.ms * steps / part.calls if part.calls else None
        part.device_ms = part.ms if on_cuda else None
        part.flops_per_second = part.flops / part.ms * 1e3 if part.ms > 0 else None
        memory = memory_of.get("" if part is step else part.name)
        if memory:
            part.peak_mb = memory.peak / text.MB
            part.rise_mb = memory.rise / text.MB
            part.left_mb = memory.left / text.MB
    return parts


def size_of(batches: list[Batch]) -> str:
    """Return the size of the batches in words: all sizes of a single batch, or the range of
    the frames of several."""
    if len(batches) == 1:
        (batch,) = batches
        lengths = f"{batch.frames} frames (longest {batch.frames_max}), {batch.tokens} tokens"
        return f"batch: {batch.N} utterances, {lengths}"
    frames = [batch.frames for batch in batches]
    return f"batches: {len(batches)}, of {min(frames)} to {max(frames)} frames"


def cost_of_labels(measured: Measured) -> str:
    """Return in words how long a step takes without labels, and how much longer with them.

    Both are medians of times on the host."""
    bare_ms = median(measured.bare_ns) / 1e6
    differences = [labelled - bare for labelled, bare in zip(measured.host_ns, measured.bare_ns)]
    labels_ms = median(differences) / 1e6
    cost = "less than steps differ by"
    if labels_ms > 0:
        cost = f"{text.number(labels_ms)} ms ({text.percent(labels_ms / bare_ms)})"
    return f"step without labels: {text.number(bare_ms)} ms; the labels' own cost: {cost}"


def lines(choice: Choice, measured: Measured, parts: list[Part]) -> list[str]:
    """Return the lines below a table: the model, the batch, the labels' cost, reasons not to trust
    the numbers, and the verdict."""
    transducer = "icefall's Conformer transducer" if choice.config else "Conformer transducer"
    parameters = dict(measured.parameters)
    of_model = f"{parameters.pop('model'):,} parameters"
    result = [f"{choice.loss}, {choice.model or transducer}, {of_model}"]
    if parameters:
        by_part = [f"{name} {number:,}" for name, number in parameters.items()]
        result.append(f"parameters by part: {', '.join(by_part)}")
    options = [name for name in ("dropout", "amp", "optimizer") if getattr(choice, name)]
    count = len(measured.host_ns)
    steps = f"{count} steps with labels and {count} without, in turn"
    result.append(f"{size_of(measured.batches)}; {steps}; {', '.join(options) or 'no dropout'}")
    result.append(cost_of_labels(measured))
    if measured.not_counted:
        result.append(f"not counted in FLOPs: {', '.join(measured.not_counted)}")
    is_busy = bool(measured.flags)
    if is_busy:
        load = text.percent(measured.foreign_cpu)
        result.append(
            f"the steps ran beside other load, which took {load} of the CPUs: their times are too long; profile again "
            "when the machine is quiet"
        )
    return [*result, verdict(parts, is_busy)]


def verdict(parts: list[Part], is_busy: bool) -> str:
    """Return the line of the verdict: the share of a step that the transducer's own parts take
    (OWN_PARTS), and the largest share of any other label.

    Labels that lie within another label do not count.

    parts: as `parts_of` returns them, the step last; is_busy: whether other load ran beside the
        steps"""
    step_ms = parts[-1].ms
    # Labels have a phase; `other` and the step have none.
    outer = text.gathered((part.label, part.ms) for part in parts if part.depth == 0 and part.phase)
    shares = {label: sum(times) / step_ms for label, times in outer.items()}
    names = []
    own_share = 0.0
    for name, labels in OWN_PARTS.items():  # leaves in `shares` those of other labels
        own_shares = [shares.pop(label) for label in labels if label in shares]
        own_share += sum(own_shares)
        if own_shares:
            names.append(name)
    answers = []
    if names:
        words = " and ".join(", ".join(names).rsplit(", ", 1))  # "decoder, joiner and loss"
        answers.append(f"{words}: {text.percent(own_share)} of a step")
    if shares:
        largest = max(shares, key=lambda label: shares[label])
        answers.append(f"{largest}: {text.percent(shares[largest])}")
    if is_busy:
        answers.append("measured beside other load")
    return f"VERDICT: {'; '.join(answers)}"


def answer(kept: Kept) -> Answer:
    """Return what a profile found out: a table, lines and a figure for each batch size.  Raises
    ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Profile)
    result = Answer(kept.header.name, lines=kept.machine)
    for size in config.sizes:
        job = kept.job(size)
        result.statuses.append(job.status)
        if job.reason:
            result.failures.append(f"{size}: {job.status}: {job.reason}")
        if job.status != "ok":
            continue
        (measured,) = job.of(Measured)
        parts = parts_of(measured)
        step = parts[-1]  # as `parts_of` puts it
        peak = f", peak {text.number(step.peak_mb)} MB" if step.peak_mb else ""
        operations = f"{text.quantity(step.macs, 'MACs')}, {text.quantity(step.flops, 'FLOPs')}"
        result.total.append(f"{size}: a step: {text.number(step.ms)} ms, {operations}{peak}")
        on_cpu = step.device_ms is None  # then `ms` is the host's time, and "host_ms" says the same
        shown = [number for number in NUMBERS if not (on_cpu and number.key == "host_ms")]
        table = []
        for part in parts:
            name = Cell("· " * part.depth + part.name, part.name)
            table.append({"label": name, **cells(shown, part)})
            names = {key: getattr(part, key) for key in ("name", "label", "phase", "depth")}
            result.rows.append({"size": size, **names, **values(NUMBERS, part)})
        result.tables.append(
            tabulated("labels", f"{size}: each label with all that lies in it; own: without", table)
        )
        result.lines += lines(config.choice, measured, parts)
        result.figures.append(figure(size, parts))
    return result


def figure(size: str, parts: list[Part]) -> Figure:
    """Return the figure of a bar for each label: its own milliseconds, forward and backward."""
    rows = parts[:-1]  # without the step
    labels = list(dict.fromkeys(part.label for part in rows))
    data = []
    for phase, color in zip(dict.fromkeys(part.phase for part in rows), PALETTE):
        of_phase = [part for part in rows if part.phase == phase]
        times = [part.own_ms for part in of_phase]
        names = [part.label for part in of_phase]
        hover = "%{y}: %{x:.4g} ms"
        data.append(bars(phase or OTHER, times, names, {"color": color}, hover, orientation="h"))
    largest = sorted(rows, key=lambda part: -part.own_ms)[:LONGEST_BARS]
    summary = ", ".join(f"{part.name} {text.number(part.own_ms)} ms" for part in largest)
    height = 24 * len(labels) + 90  # pixels of the bars, and of the axis and the legend
    downwards = {"categoryorder": "array", "categoryarray": labels[::-1]}
    return Figure(
        f"profile-time-{size.replace(' ', '-')}",
        f"Time of the step, {size}",
        "Milliseconds of a label in a mean step, without those of the labels that lie in it; all add up to the step.",
        f"Time of the step: {summary}",
        data,
        layout(height, legend=150, xaxis=axis("own ms"), yaxis=downwards, barmode="stack"),
    )


SLICE = slice_of(TOOL, TITLE, answer)
