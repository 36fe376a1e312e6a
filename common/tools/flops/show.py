"""Answer from the records of a count how many operations a model takes: by module, by class of
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
#: The name of a run's only job.
JOB = "count"
BREAKDOWNS = ("module", "class", "operator")


class Config(msgspec.Struct, kw_only=True):
    """Hold the flags that say what is counted, and those of the table.

    Attributes:
        by: one of BREAKDOWNS
        depth: names of a module's path that the table shows; None for all
        sample_rate: samples a second of the input
    """

    flags: schema.Record
    by: str
    depth: schema.Count | None
    sample_rate: schema.Positive


class Module(msgspec.Struct, kw_only=True):
    """Hold a module of a counted model: its path ("" of the model), class, calls, and numbers of
    its own parameters."""

    path: str
    kind: str = msgspec.field(name="class")
    calls: schema.Count
    trainable: schema.Count
    frozen: schema.Count


class Operator(msgspec.Struct, kw_only=True):
    """Hold the operations of one operator within one module, in the forward or backward of all
    runs."""

    path: str
    operator: str
    phase: str
    calls: schema.Count
    macs: schema.Count
    flops: schema.Count


class BucketRow(msgspec.Struct, kw_only=True):
    """Hold a row of the table of buckets: the sums of a bucket, and the MACs for a second of audio,
    with the least and the most of an utterance."""

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

    def row(self, sample_rate: int) -> BucketRow:
        """Return the row of the table; sample_rate: samples per second of audio."""
        seconds = [samples / sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        return BucketRow(
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
    """Hold a count: buckets of utterances ([] where the input is no audio), modules, operators, and
    a sentence for each thing that was not counted."""

    buckets: list[Bucket]
    modules: list[Module]
    counts: list[Operator]
    not_counted: list[str]


class Part(msgspec.Struct, kw_only=True):
    """Hold a row of the table: a part of a model, or the total.

    Attributes:
        name: path of a module, or name of a class or operator
        kind: class of a module
        trainable, frozen: numbers of parameters
        macs, flops: operations of forward and backward, in all runs
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
        """Add the parameters of a module, or the operations of an operator."""
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
    """Return a row for each module, class or operator, as `by` says, and the total last.

    By module: a module also counts what the modules in it do.  Modules come in the order of the
    model, at most `depth` names deep.  Then comes a row for each place outside of the model, such
    as "(loss)".  By class or operator: each operation counts once, and the largest row is first.
    The calls of a row are those of the module, of the modules of the class, or of the operator.
    Those of the total are of all operators."""
    kinds = {module.path: module.kind for module in counted.modules}
    parts: dict[str, Part] = {}
    if by == "module":
        for module in counted.modules:
            if depth is None or len(_names(module.path)) <= depth:
                parts[module.path] = Part(name=module.path, kind=module.kind, calls=module.calls)
    total = Part(name="total", calls=sum(operator.calls for operator in counted.counts))
    entries: list[Module | Operator] = [*counted.modules, *counted.counts]
    for entry in entries:
        # `add` takes the parameters of a Module and the operations of an Operator, so nothing is
        # added twice.
        total.add(entry)
        # The names of the rows to which the entry is added.
        if by == "class":
            names = [kinds.get(entry.path, entry.path)]
        elif by == "operator":
            names = [entry.operator] if isinstance(entry, Operator) else []
        else:
            # The rows of its module and of the modules around that.  No module has the path of a
            # place outside of the model: it gets a row of its own.
            names = [path for path in _above(entry.path) if path in parts] or [entry.path]
        for name in names:
            parts.setdefault(name, Part(name=name)).add(entry)
    if by == "class":
        for module in counted.modules:
            parts[module.kind].calls += module.calls
    elif by == "operator":
        for operator in counted.counts:
            parts[operator.operator].calls += operator.calls
    rows = [*parts.values()]
    if by != "module":
        rows.sort(key=lambda part: (-part.flops, -part.macs, part.name))
    rows.append(total)
    for part in rows:
        part.macs_share = part.macs / total.macs if total.macs else None
        part.flops_share = part.flops / total.flops if total.flops else None
    return rows


def _above(path: str) -> list[str]:
    """Return the paths of the modules around a module, the outermost first, and then its own path:
    ["", "encoder", "encoder.embed"].

    The path of the model is "".  It is left out for a path in parentheses, such as "(loss)", which
    is a place outside of the model."""
    names = _names(path)
    paths = [".".join(names[:count]) for count in range(1, len(names) + 1)]
    return paths if path.startswith("(") else ["", *paths]


def _names(path: str) -> list[str]:
    """Return the names in the path of a module; [] for the model itself."""
    return path.split(".") if path else []


def _amount(key: str, title: str, unit: str = "") -> Metric:
    """Return a metric that is shown with a prefix: "94.7 M"."""
    return metric(key, title, lambda value: quantity(value, unit), unit=unit)


#: Columns of the table of parts.
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
#: Columns of the table of buckets.
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
    """Return the table of the parts, the last of which is the total.  It has no columns of the
    backward if no backward was counted, and none of frozen parameters if none are frozen.

    by: what each part is, one of BREAKDOWNS."""
    total = parts[-1]
    absent = {
        key for key in ("frozen", "backward_macs", "backward_flops") if not getattr(total, key)
    }
    if by == "operator":
        absent |= {"trainable", "frozen"}
    shown = [number for number in NUMBERS if number.key not in absent]
    rows = []
    for part in parts:
        kind = {"class": Cell(part.kind, part.kind)} if by == "module" else {}
        rows.append({by: Cell(part.name or "(model)", part.name), **kind, **cells(shown, part)})
    title = "by module, each with all below it" if by == "module" else f"by {by}"
    return tabulated(by, title, rows)


def bucket_rows(buckets: Sequence[Bucket], sample_rate: int) -> list[BucketRow]:
    """Return a row for each bucket, and if there are several, one for all utterances."""
    rows = [bucket.row(sample_rate) for bucket in buckets]
    if len(buckets) > 1:
        every = Bucket(
            name="all",
            samples=[samples for bucket in buckets for samples in bucket.samples],
            macs=[macs for bucket in buckets for macs in bucket.macs],
            flops=sum(bucket.flops for bucket in buckets),
        )
        rows.append(every.row(sample_rate))
    return rows


def answer(run: kept.Kept) -> kept.Answer:
    """Return what a count found out: lines with the total, then the table of buckets if the input
    is audio, then the table of parts.  The rows for CSV and JSON are those of the two tables, in
    this order; the last part is the total.

    If the count failed, the answer has only the reason."""
    config = schema.typed(run.header.config, Config)
    job = run.job(JOB)
    if not job.values:
        return kept.Answer(
            run.header.name, failures=[f"{job.status}: {job.reason}"], statuses=[job.status]
        )
    (counted,) = job.of(Counted)
    parts = parts_of(counted, config.by, config.depth)
    tables = [parts_table(parts, config.by)]
    buckets = bucket_rows(counted.buckets, config.sample_rate)
    if buckets:
        by_length = [{"bucket": Cell(row.bucket), **cells(BUCKETS, row)} for row in buckets]
        tables.insert(0, tabulated("buckets", "utterances by length", by_length))
    total = parts[-1]
    sums = f"{quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})"
    parameters = total.trainable + total.frozen
    split = f"trainable {total.trainable}, frozen {total.frozen}"
    return kept.Answer(
        run.header.name,
        total=[f"total: {sums}", f"parameters: {quantity(parameters)} ({parameters}; {split})"],
        tables=tables,
        lines=[f"not counted: {line}" for line in counted.not_counted],
        rows=schema.as_written([*buckets, *parts]),
        statuses=[job.status],
    )


SLICE = kept.slice_of(TOOL, TITLE, answer)
