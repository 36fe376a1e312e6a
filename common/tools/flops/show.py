"""Tells from the records of a count how many operations a model takes, by module, by class of module or by operator."""

from __future__ import annotations

from operator import itemgetter
from types import SimpleNamespace
from typing import List, Optional, Sequence, Union

from common.records import schema

# isort: split
import msgspec
from msgspec import Struct

from common.analysis import metrics
from common.analysis.metrics import Metric, metric
from common.core.text import percent, quantity
from common.present.parts import Cell, Column, Table, Values, tabulated
from common.records.schema import Count as Whole
from common.records.schema import Positive, Record
from common.tools.kept import Answer, Kept

TOOL, TITLE = "flops", "Operations of a model"
#: The name of a count's one job.
JOB = "count"
#: Kinds of rows.
BREAKDOWNS = ("module", "class", "operator")
#: Of a part; own: without the modules below.
AMOUNTS = ("calls", "trainable", "frozen", "macs", "flops", "backward_macs", "backward_flops", "own_macs", "own_flops")
#: Classes of layers that one operator runs on a CPU, and one operator a step on the meta device.
RECURRENT = {"LSTM", "GRU", "RNN"}


class Config(Struct, kw_only=True):
    """Hold what a count was asked: the flags that say what is counted, those of a table, and the input's rate."""

    flags: Record
    by: str
    depth: Optional[Whole]
    sample_rate: Positive


class Module(Struct, kw_only=True):
    """A module of a counted model: its path ("" of the model), and its own parameters."""

    path: str
    kind: str = msgspec.field(name="class")
    calls: Whole
    trainable: Whole
    frozen: Whole


class Operator(Struct, kw_only=True):
    """Operations of one operator within one module, forward or backward, in all runs."""

    path: str
    operator: str
    phase: str
    calls: Whole
    macs: Whole
    flops: Whole


class Missing(Struct, kw_only=True):
    """An operator that was not counted."""

    operator: str
    path: str
    reason: str


class Document(Struct, kw_only=True):
    """Modules, operators and what was not counted, as the counter saw them."""

    modules: List[Module]
    counts: List[Operator]
    not_counted: List[Missing]


class Bucket(Struct, kw_only=True):
    """Hold what a job counts: utterances of similar length, with samples and MACs of each, or a run without a name."""

    name: str
    samples: List[Positive] = []
    macs: List[Whole] = []
    document: Document

    def row(self, sample_rate: int) -> Values:
        """Return the bucket as CSV and JSON have it; rates in MACs per second of audio."""
        seconds = [samples / sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        return {
            "bucket": self.name,
            "utterances": len(seconds),
            "shortest_s": min(seconds),
            "longest_s": max(seconds),
            "macs": sum(self.macs),
            "flops": sum(counted.flops for counted in self.document.counts),
            "macs_per_s": sum(self.macs) / sum(seconds),
            "macs_per_s_min": min(rates),
            "macs_per_s_max": max(rates),
        }


class Part(SimpleNamespace):
    """A module with all below it, the modules of a class without what is below them, an operator, or everything.

    name: path, class or operator; kind: the class of a module, else ""; and its AMOUNTS.
    """

    def __init__(self, name: str, kind: str = "", calls: int = 0):
        super().__init__(**{"name": name, "kind": kind, **dict.fromkeys(AMOUNTS, 0), "calls": calls})

    def add(self, counted: Union[Module, Operator], own: bool = False) -> None:
        """Add a module's parameters, or operations.  own: they are of the part itself, not of a module below."""
        keys = ("trainable", "frozen") if isinstance(counted, Module) else ("macs", "flops")
        backward = isinstance(counted, Operator) and counted.phase == "backward"
        prefixes = ["", *(["backward_"] if backward else []), *(["own_"] if own else [])]
        for key in keys:
            for prefix in prefixes if isinstance(counted, Operator) else [""]:
                vars(self)[prefix + key] += getattr(counted, key)

    def row(self, total: Part) -> Values:
        """Return the part as CSV and JSON have it, with its shares, None where the total is nothing."""
        shares = {"macs_share": (self.macs, total.macs), "flops_share": (self.flops, total.flops)}
        return {**vars(self), **{key: part / whole if whole else None for key, (part, whole) in shares.items()}}


def parts_of(document: Document, by: str = "module", depth: Optional[int] = None) -> List[Part]:
    """Return the parts by one of BREAKDOWNS, and the total at the end; modules down to `depth` names below the model.

    Modules are in the order of the model, each before those below it, then paths that are no module; others begin with
    the largest.
    """
    kinds = {module.path: module.kind for module in document.modules}
    shown = [each for each in document.modules if depth is None or len(_names(each.path)) <= depth]
    parts = {each.path: Part(each.path, each.kind, each.calls) for each in shown} if by == "module" else {}
    total = Part("total", calls=sum(counted.calls for counted in document.counts))

    def keys(counted: Union[Module, Operator]) -> List[str]:
        """Return the keys of the parts that a module or an operator belongs to."""
        if by == "operator":
            return [counted.operator] if isinstance(counted, Operator) else []
        if by == "class":
            return [kinds.get(counted.path, counted.path)]
        names = _names(counted.path)
        above = [".".join(names[:count]) for count in range(len(names) + 1)]
        # a path in parentheses is outside of the model
        inside = [key for key in above if key in parts and (key or not counted.path.startswith("("))]
        return inside or [counted.path]

    entries: List[Union[Module, Operator]] = [*document.modules, *document.counts]
    for each in entries:
        total.add(each, own=True)
        for key in keys(each):
            part = parts.setdefault(key, Part(key))
            part.add(each, own=by != "module" or key == each.path)
            part.calls += each.calls if isinstance(each, {"class": Module, "operator": Operator}.get(by, ())) else 0
    if by == "module":
        return [*parts.values(), total]
    return [*sorted(parts.values(), key=lambda part: (-part.flops, -part.macs, part.name)), total]


def _names(path: str) -> List[str]:
    return path.split(".") if path else []


def merged(buckets: Sequence[Bucket]) -> Bucket:
    """Merge the runs of one model: parameters once, all else added up."""
    counted = [bucket.document for bucket in buckets]
    modules = {module.path: module for document in reversed(counted) for module in document.modules}
    for path, module in modules.items():
        calls = [each.calls for document in counted for each in document.modules if each.path == path]
        modules[path] = msgspec.structs.replace(module, calls=sum(calls))
    document = Document(
        modules=list(modules.values()),
        counts=[each for document in counted for each in document.counts],
        not_counted=[missing for document in counted for missing in document.not_counted],
    )
    samples = [count for bucket in buckets for count in bucket.samples]
    macs = [count for bucket in buckets for count in bucket.macs]
    return Bucket(name="all", samples=samples, macs=macs, document=document)


# -- tables ----------------------------------------------------------------------------------------------------------


def _amount(key: str, title: str = "", unit: str = "") -> Metric:
    return metric(key, title, lambda value: quantity(value, unit), value=itemgetter(key), unit=unit)


#: Numbers of a part, in the order of the table's columns.
NUMBERS = (
    _amount("calls", "calls"),
    _amount("trainable", "trainable"),
    _amount("frozen", "frozen"),
    _amount("macs", "MACs", "MACs"),
    metric("macs_share", "share", percent, value=itemgetter("macs_share")),
    _amount("flops", "FLOPs", "FLOPs"),
    metric("flops_share", "share", percent, value=itemgetter("flops_share")),
    _amount("backward_macs", "backward MACs", "MACs"),
    _amount("backward_flops", "backward FLOPs", "FLOPs"),
)
#: Those that have a column only where the total has some.
OPTIONAL = ("frozen", "backward_macs", "backward_flops")
#: Numbers of a bucket.
BUCKETS = (
    metric("utterances", "utterances", value=itemgetter("utterances")),
    metric("shortest_s", "shortest s", "{:.2f}".format, value=itemgetter("shortest_s"), unit="s"),
    metric("longest_s", "longest s", "{:.2f}".format, value=itemgetter("longest_s"), unit="s"),
    _amount("macs", "MACs", "MACs"),
    _amount("flops", "FLOPs", "FLOPs"),
    _amount("macs_per_s", "MACs per s of audio", "MACs"),
    _amount("macs_per_s_min", "least", "MACs"),
    _amount("macs_per_s_max", "most", "MACs"),
)


def parts_table(parts: Sequence[Part], by: str) -> Table:
    """Return a row for each part, the total last; a column for what is there: the backward, frozen parameters."""
    total = parts[-1]
    absent = {key for key in OPTIONAL if not getattr(total, key)}
    absent |= {"trainable", "frozen"} if by == "operator" else set()
    shown = [number for number in NUMBERS if number.key not in absent]
    names = {by: "name", **({"class": "kind"} if by == "module" else {})}
    rows = []
    for part in parts:
        row = part.row(total)
        texts = [Cell(row[key] or ("(model)" if key == "name" else ""), row[key]) for key in names.values()]
        rows.append([*texts, *(number.cell(row) for number in shown)])
    title = f"by {by}" + (", each with all below it" if by == "module" else "")
    return Table(by, title, [*(Column(name, False) for name in names), *(Column(each.title) for each in shown)], rows)


def answer(kept: Kept) -> Answer:
    """Return what a count found out: the total, utterances by length where the input is audio, and the parts.

    Rows for CSV and JSON are those of the utterances, without any of the parts and the total.
    """
    config, job = schema.typed(kept.header.config, Config), kept.job(JOB)
    buckets = job.of(Bucket)
    if not buckets:
        return Answer(kept.header.name, failures=[f"{job.status}: {job.reason}"], statuses=[job.status])
    whole = merged(buckets)
    parts = parts_of(whole.document, config.by, config.depth)
    total = parts[-1]
    parameters = total.trainable + total.frozen
    missing = (f"{each.operator} in {each.path or 'the model'} ({each.reason})" for each in whole.document.not_counted)
    lines = [f"not counted: {line}" for line in dict.fromkeys(missing)]
    backward = {count.path for count in whole.document.counts if count.phase == "backward"}
    recurrent = sorted({each.kind for each in whole.document.modules if each.path in backward} & RECURRENT)
    if config.flags["device"] == "meta" and recurrent:
        more = "backward FLOPs are of single steps on the meta device, more than on a CPU; MACs are the same"
        lines.insert(0, f"{', '.join(recurrent)}: {more}")
    spoken = [
        bucket.row(config.sample_rate)
        for bucket in [*buckets, *([whole] if len(buckets) > 1 else [])]
        if bucket.samples
    ]
    lengths = [{"bucket": Cell(row["bucket"]), **metrics.cells(BUCKETS, row)} for row in spoken]
    tables = [tabulated("buckets", "utterances by length", lengths)] if spoken else []
    return Answer(
        kept.header.name,
        total=[
            f"total: {quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})",
            f"parameters: {quantity(parameters)} ({parameters}; trainable {total.trainable}, frozen {total.frozen})",
        ],
        tables=[*tables, parts_table(parts, config.by)],
        lines=lines,
        rows=spoken or [part.row(total) for part in parts],
        statuses=[job.status],
    )
