"""Tells from the records of a count how many operations a model takes, by module, by class of
module or by operator."""

from __future__ import annotations

from collections.abc import Sequence

from rnnt_bench.records import schema

# isort: split
import msgspec

from rnnt_bench.analysis.metrics import Metric, cells, metric
from rnnt_bench.core.text import percent, quantity
from rnnt_bench.present.parts import Cell, Table, tabulated
from rnnt_bench.tools import kept

TOOL, TITLE = "flops", "Operations of a model"
JOB = "count"
BREAKDOWNS = ("module", "class", "operator")


class Config(msgspec.Struct, kw_only=True):
    """Hold what a count was asked: the flags that say what is counted, those of a table, and the
    input's rate."""

    flags: schema.Record
    by: str
    depth: schema.Count | None
    sample_rate: schema.Positive


class Module(msgspec.Struct, kw_only=True):
    """A module of a counted model: its path ("" of the model), and its own parameters."""

    path: str
    kind: str = msgspec.field(name="class")
    calls: schema.Count
    trainable: schema.Count
    frozen: schema.Count


class Operator(msgspec.Struct, kw_only=True):
    """Operations of one operator within one module, forward or backward, in all runs."""

    path: str
    operator: str
    phase: str
    calls: schema.Count
    macs: schema.Count
    flops: schema.Count


class Spoken(msgspec.Struct, kw_only=True):
    """A row of utterances of similar length: their number, seconds, operations, and MACs for a
    second of audio."""

    bucket: str
    utterances: int
    shortest_s: float
    longest_s: float
    macs: int
    flops: int
    macs_per_s: float
    macs_per_s_min: float
    macs_per_s_max: float


class Bucket(msgspec.Struct, kw_only=True):
    """Hold utterances of similar length: samples and MACs of each, FLOPs of all."""

    name: str
    samples: list[schema.Positive]
    macs: list[float]
    flops: schema.Count

    def row(self, sample_rate: int) -> Spoken:
        seconds = [samples / sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        return Spoken(
            bucket=self.name,
            utterances=len(seconds),
            shortest_s=min(seconds),
            longest_s=max(seconds),
            macs=round(sum(self.macs)),
            flops=self.flops,
            macs_per_s=sum(self.macs) / sum(seconds),
            macs_per_s_min=min(rates),
            macs_per_s_max=max(rates),
        )


class Counted(msgspec.Struct, kw_only=True):
    """Hold a count: utterances where the input is audio, modules and operators, and what was not
    counted in words."""

    buckets: list[Bucket]
    modules: list[Module]
    counts: list[Operator]
    not_counted: list[str]


class Part(msgspec.Struct, kw_only=True):
    """A row of a part of a model, or of the total.

    Attributes:
        name: of a class or operator, or the path of a module
        kind: class of a module
        trainable, frozen: numbers of parameters
        macs, flops: forward and backward, in all runs
        macs_share, flops_share: None where the total is 0
    """

    name: str
    kind: str = ""
    calls: int = 0
    trainable: int = 0
    frozen: int = 0
    macs: int = 0
    flops: int = 0
    backward_macs: int = 0
    backward_flops: int = 0
    macs_share: float | None = None
    flops_share: float | None = None

    def add(self, entry: Module | Operator) -> None:
        """Add a module's parameters, or operations, without calls."""
        if isinstance(entry, Module):
            self.trainable += entry.trainable
            self.frozen += entry.frozen
            return
        self.macs += entry.macs
        self.flops += entry.flops
        if entry.phase == "backward":
            self.backward_macs += entry.macs
            self.backward_flops += entry.flops


def parts_of(counted: Counted, by: str = "module", depth: int | None = None) -> list[Part]:
    """Return the parts by one of BREAKDOWNS, and the total at the end.  Modules, each with all
    below it, go down to `depth` names below the model, in its order, then paths that are no module;
    others begin with the largest."""
    kinds = {module.path: module.kind for module in counted.modules}
    parts: dict[str, Part] = {}
    for module in counted.modules if by == "module" else ():
        if depth is None or len(_above(module.path)) - 1 <= depth:
            parts[module.path] = Part(name=module.path, kind=module.kind, calls=module.calls)
    total = Part(name="total", calls=sum(operator.calls for operator in counted.counts))
    entries: list[Module | Operator] = [*counted.modules, *counted.counts]
    for entry in entries:
        if by == "class":
            names = [kinds.get(entry.path, entry.path)]
        elif by == "operator":
            names = [entry.operator] if isinstance(entry, Operator) else []
        else:  # a path in parentheses is outside of the model
            above = [
                path
                for path in _above(entry.path)
                if path in parts and (path or not entry.path.startswith("("))
            ]
            names = above or [entry.path]
        total.add(entry)
        for name in names:
            part = parts.setdefault(name, Part(name=name))
            part.add(entry)
            if by == ("operator" if isinstance(entry, Operator) else "class"):
                part.calls += entry.calls
    rows = [*parts.values()]
    if by != "module":
        rows.sort(key=lambda part: (-part.flops, -part.macs, part.name))
    for part in [*rows, total]:
        part.macs_share = part.macs / total.macs if total.macs else None
        part.flops_share = part.flops / total.flops if total.flops else None
    return [*rows, total]


def _above(path: str) -> list[str]:
    """Return the paths of the modules that a module lies in, the model's "" first, and its own."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names) + 1)]


def _amount(key: str, title: str = "", unit: str = "") -> Metric:
    return metric(key, title, lambda value: quantity(value, unit), unit=unit)


NUMBERS = (
    _amount("calls", "calls"),
    _amount("trainable", "trainable"),
    _amount("frozen", "frozen"),
    _amount("macs", "MACs", "MACs"),
    metric("macs_share", "of MACs", percent),
    _amount("flops", "FLOPs", "FLOPs"),
    metric("flops_share", "of FLOPs", percent),
    _amount("backward_macs", "backward MACs", "MACs"),
    _amount("backward_flops", "backward FLOPs", "FLOPs"),
)
BUCKETS = (
    metric("utterances", "utterances"),
    metric("shortest_s", "shortest s", "{:.2f}".format, unit="s"),
    metric("longest_s", "longest s", "{:.2f}".format, unit="s"),
    _amount("macs", "MACs", "MACs"),
    _amount("flops", "FLOPs", "FLOPs"),
    _amount("macs_per_s", "MACs per s of audio", "MACs"),
    _amount("macs_per_s_min", "least", "MACs"),
    _amount("macs_per_s_max", "most", "MACs"),
)


def parts_table(parts: Sequence[Part], by: str) -> Table:
    """Return a row for each part, the total last; a column for what is there: the backward, frozen
    parameters."""
    absent = {
        key for key in ("frozen", "backward_macs", "backward_flops") if not getattr(parts[-1], key)
    }
    absent |= {"trainable", "frozen"} if by == "operator" else set()
    shown = [number for number in NUMBERS if number.key not in absent]
    rows = []
    for part in parts:
        kind = {"class": Cell(part.kind, part.kind)} if by == "module" else {}
        rows.append({by: Cell(part.name or "(model)", part.name), **kind, **cells(shown, part)})
    return tabulated(by, f"by {by}" + (", each with all below it" if by == "module" else ""), rows)


def answer(run: kept.Kept) -> kept.Answer:
    """Return what a count found out: the total, utterances by length where the input is audio, and
    the parts.  Rows for CSV and JSON are those of the utterances, then of the parts and the total."""
    config = schema.typed(run.header.config, Config)
    job = run.job(JOB)
    if not job.values:
        return kept.Answer(
            run.header.name, failures=[f"{job.status}: {job.reason}"], statuses=[job.status]
        )
    counted = job.of(Counted)[0]
    parts = parts_of(counted, config.by, config.depth)
    buckets = counted.buckets
    total = parts[-1]
    parameters = total.trainable + total.frozen
    if len(buckets) > 1:
        samples = [length for bucket in buckets for length in bucket.samples]
        macs = [amount for bucket in buckets for amount in bucket.macs]
        buckets = [*buckets, Bucket(name="all", samples=samples, macs=macs, flops=total.flops)]
    spoken = [bucket.row(config.sample_rate) for bucket in buckets]
    by_length = [{"bucket": Cell(row.bucket), **cells(BUCKETS, row)} for row in spoken]
    spoken_table = [tabulated("buckets", "utterances by length", by_length)] if spoken else []
    sums = f"{quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})"
    words = f"trainable {total.trainable}, frozen {total.frozen}"
    return kept.Answer(
        run.header.name,
        total=[f"total: {sums}", f"parameters: {quantity(parameters)} ({parameters}; {words})"],
        tables=[*spoken_table, parts_table(parts, config.by)],
        lines=[f"not counted: {line}" for line in counted.not_counted],
        rows=schema.as_written([*spoken, *parts]),
        statuses=[job.status],
    )


SLICE = kept.slice_of(TOOL, TITLE, answer)
