"""Show a count of operations: by module, by class of module or by operator, as text, rows and a section of the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Dict, List, Optional, Sequence

from common.analysis.folders import files_named
from common.records import documents

# isort: split
import msgspec
from msgspec import Meta, Struct

from common.analysis import metrics
from common.analysis.metrics import Metric, metric
from common.core.errors import UserError
from common.core.text import percent
from common.core.units import quantity
from common.present.export import csv_text, json_text
from common.present.section import Failure, Section
from common.present.slices import Slice
from common.present.table import Cell, Column, Link, Table, Values, tabulated
from common.present.text import aligned, listed, markdown
from common.records.schema import Count as Whole
from common.records.schema import Positive, Record

FILE_NAME = "flops.json"
TITLE = "Operations of a model"
#: What the rows can be.
BREAKDOWNS = ("module", "class", "operator")
#: Characters of a cell in the terminal: a module's path is cut rather late.
LONGEST = 60
#: Classes of layers that one operator runs on a CPU, and one operator a step on the meta device.
RECURRENT = {"LSTM", "GRU", "RNN"}


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

    device: str = ""
    modules: List[Module]
    counts: List[Operator]
    not_counted: List[Missing]


class Bucket(Struct, kw_only=True):
    """Utterances of similar length: samples and MACs of each, FLOPs of all."""

    name: str
    samples: Annotated[List[Positive], Meta(min_length=1)]
    macs: List[Whole]
    flops: Whole
    sample_rate: Positive

    def row(self) -> Values:
        """Return the bucket as CSV and JSON have it; rates in MACs per second of audio."""
        seconds = [samples / self.sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        return {
            "bucket": self.name,
            "utterances": len(seconds),
            "shortest_s": min(seconds),
            "longest_s": max(seconds),
            "macs": sum(self.macs),
            "flops": self.flops,
            "macs_per_s": sum(self.macs) / sum(seconds),
            "macs_per_s_min": min(rates),
            "macs_per_s_max": max(rates),
        }


class Counted(Struct, kw_only=True):
    """A count as flops.json holds it.  identity: the flags that two counts of the same share."""

    started: str
    model: str
    identity: Record
    by: str
    depth: Optional[Whole]
    document: Document
    buckets: List[Bucket] = []


@dataclass
class Part:
    """A module with all below it, the modules of a class without what is below them, an operator, or everything.

    name: path, class or operator; kind: the class of a module, else ""; own: without the modules below.
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
    own_macs: int = 0
    own_flops: int = 0

    def add(self, counted: Operator, own: bool) -> None:
        """Add operations.  own: they are of the part itself, not of a module below."""
        for name, amount in (("macs", counted.macs), ("flops", counted.flops)):
            kinds = [name, *([f"backward_{name}"] if counted.phase == "backward" else []), *([f"own_{name}"] * own)]
            for key in kinds:
                setattr(self, key, getattr(self, key) + amount)

    def row(self, total: Part) -> Values:
        """Return the part as CSV and JSON have it, with its shares, None where the total is nothing."""
        shares = {"macs_share": (self.macs, total.macs), "flops_share": (self.flops, total.flops)}
        return {**asdict(self), **{key: part / whole if whole else None for key, (part, whole) in shares.items()}}


def parts_of(document: Document, by: str = "module", depth: Optional[int] = None) -> List[Part]:
    """Return the parts by one of BREAKDOWNS, and the total at the end; modules down to `depth` names below the model.

    Modules are in the order of the model, each before those below it, then paths that are no module; others begin with
    the largest.
    """
    parts: Dict[str, Part] = {}
    total, kinds = Part("total"), {module.path: module.kind for module in document.modules}
    if by == "module":
        shown = [each for each in document.modules if depth is None or len(_names(each.path)) <= depth]
        parts = {module.path: Part(module.path, module.kind, module.calls) for module in shown}

    def above(path: str) -> List[Part]:
        """Return the parts that a module or an operator within `path` belongs to."""
        if by == "class":
            return [parts.setdefault(kinds.get(path, path), Part(kinds.get(path, path)))]
        names = _names(path)
        prefixes = [".".join(names[:count]) for count in range(len(names) + 1)]
        # a path in parentheses is outside of the model
        found = [parts[each] for each in prefixes if each in parts and (each or not path.startswith("("))]
        return found or [parts.setdefault(path, Part(path))]

    for module in document.modules:
        for part in [total, *(above(module.path) if by != "operator" else [])]:
            part.trainable += module.trainable
            part.frozen += module.frozen
        if by == "class":
            parts[module.kind].calls += module.calls
    for counted in document.counts:
        total.calls += counted.calls
        total.add(counted, own=True)
        if by == "operator":
            part = parts.setdefault(counted.operator, Part(counted.operator))
            part.calls += counted.calls
            part.add(counted, own=True)
        else:
            for part in above(counted.path):
                part.add(counted, own=by == "class" or part.name == counted.path)
    if by == "module":
        return [*parts.values(), total]
    return [*sorted(parts.values(), key=lambda part: (-part.flops, -part.macs, part.name)), total]


def _names(path: str) -> List[str]:
    return path.split(".") if path else []


def merged(documents: Sequence[Document]) -> Document:
    """Merge the documents of several runs of one model: parameters once, all else added up."""
    modules = {module.path: module for document in reversed(documents) for module in document.modules}
    for path, module in modules.items():
        calls = [each.calls for document in documents for each in document.modules if each.path == path]
        modules[path] = msgspec.structs.replace(module, calls=sum(calls))
    return Document(
        device=documents[0].device,
        modules=list(modules.values()),
        counts=[counted for document in documents for counted in document.counts],
        not_counted=[missing for document in documents for missing in document.not_counted],
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def _amount(key: str, title: str = "", unit: str = "") -> Metric:
    return metric(key, title, lambda value: quantity(value, unit), value=itemgetter(key), unit=unit)


def _share(key: str) -> Metric:
    return metric(key, "share", percent, value=itemgetter(key))


def _seconds(key: str, title: str) -> Metric:
    return metric(key, title, "{:.2f}".format, value=itemgetter(key), unit="s")


#: Of a part, in the order of the table's columns.
NUMBERS = (
    _amount("calls", "calls"),
    _amount("trainable", "trainable"),
    _amount("frozen", "frozen"),
    _amount("macs", "MACs", "MACs"),
    _share("macs_share"),
    _amount("flops", "FLOPs", "FLOPs"),
    _share("flops_share"),
    _amount("backward_macs", "backward MACs", "MACs"),
    _amount("backward_flops", "backward FLOPs", "FLOPs"),
)
#: Those that have a column only where the total has some.
OPTIONAL = ("frozen", "backward_macs", "backward_flops")
#: Of a bucket.
BUCKETS = (
    metric("utterances", "utterances", value=itemgetter("utterances")),
    _seconds("shortest_s", "shortest s"),
    _seconds("longest_s", "longest s"),
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


def buckets_table(buckets: Sequence[Bucket]) -> Table:
    rows = [{"bucket": Cell(bucket.name), **metrics.cells(BUCKETS, bucket.row())} for bucket in buckets]
    return tabulated("buckets", "utterances by length", rows)


def _totals(total: Part) -> List[str]:
    """Return the lines above the tables."""
    parameters = total.trainable + total.frozen
    return [
        f"total: {quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})",
        f"parameters: {quantity(parameters)} ({parameters}; trainable {total.trainable}, frozen {total.frozen})",
    ]


def not_counted(document: Document) -> List[str]:
    """Return what was not counted, each once: "aten::x in encoder (no rule)"."""
    lines = (f"{each.operator} in {each.path or 'the model'} ({each.reason})" for each in document.not_counted)
    return list(dict.fromkeys(lines))


def _remarks(document: Document) -> List[str]:
    """Return the lines below the tables."""
    lines = [f"not counted: {line}" for line in not_counted(document)]
    backward = {count.path for count in document.counts if count.phase == "backward"}
    recurrent = sorted({each.kind for each in document.modules if each.path in backward} & RECURRENT)
    if document.device == "meta" and recurrent:
        more = "backward FLOPs are of single steps on the meta device, more than on a CPU; MACs are the same"
        lines.insert(0, f"{', '.join(recurrent)}: {more}")
    return lines


def rendered(counted: Counted, format: str) -> str:
    """Return a count as text.  format: "table", "markdown", "json", or "csv" (of the buckets, without any of the
    parts)."""
    parts, buckets = parts_of(counted.document, counted.by, counted.depth), [each.row() for each in counted.buckets]
    rows = [part.row(parts[-1]) for part in parts[:-1]]
    if format == "csv":
        return csv_text(buckets or rows)
    if format == "json":
        missing = not_counted(counted.document)
        document = {"total": vars(parts[-1]), "rows": rows, "not_counted": missing}
        return json_text([{**document, **({"buckets": buckets} if buckets else {})}])
    blocks = [listed(_totals(parts[-1]), format)]
    for table in _tables(counted, parts):
        blocks.append(markdown(table) if format == "markdown" else f"{table.title}\n{aligned(table, LONGEST)}")
    below = _remarks(counted.document)
    return "\n\n".join([*blocks, *([listed(below, format)] if below else [])]) + "\n"


def _tables(counted: Counted, parts: Sequence[Part]) -> List[Table]:
    return [*([buckets_table(counted.buckets)] if counted.buckets else []), parts_table(parts, counted.by)]


# -- the log ---------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """A count that was read back; reason says why it could not be, else "", and then there is no content."""

    path: Path
    content: Optional[Counted] = None
    reason: str = ""


def read(path: Path) -> Count:
    """Return what is in a file; never raises for what is in it."""
    try:
        return Count(path, documents.read(path, Counted))
    except (FileNotFoundError, UserError) as error:
        return Count(path, reason=f"{path.name} cannot be read ({error}): count again, or delete it")


def find(paths: Sequence[Any]) -> List[Count]:
    """Return the counts in, at or under `paths`, by their files; of several of the same the newest."""
    newest: Dict[str, Count] = {}
    counts = map(read, dict.fromkeys(file for path in paths for file in files_named(FILE_NAME, Path(path))))
    for count in sorted(counts, key=lambda count: count.content.started if count.content else ""):
        newest[repr(sorted(count.content.identity.items())) if count.content else str(count.path)] = count
    return sorted(newest.values(), key=lambda count: str(count.path))


def sections(paths: Sequence[Any]) -> List[Section]:
    """Return a section of the page for every count in the logs."""
    return [_section(count, f"flops-{number}") for number, count in enumerate(find(paths))]


def _section(count: Count, name: str) -> Section:
    counted = count.content
    if counted is None:
        return Section(name, TITLE, failures=[Failure("error", "", [Link(count.reason, count.path)])])
    parts = parts_of(counted.document, counted.by, counted.depth)
    notes = [("", [line]) for line in [*_totals(parts[-1]), *_remarks(counted.document)]]
    tables = _tables(counted, parts)
    return Section(name, TITLE, heading=counted.model, notes=notes, tables=tables)


def _rows(paths: Sequence[Any]) -> List[Values]:
    rows = []
    for counted in (count.content for count in find(paths) if count.content):
        parts = parts_of(counted.document, counted.by, counted.depth)
        rows += [{"model": counted.model, **part.row(parts[-1])} for part in parts[:-1]]
    return rows


def _text(count: Count, format: str) -> str:
    return f"{count.content.model}\n{rendered(count.content, format)}" if count.content else f"{count.reason}\n"


FLOPS = Slice(
    lambda base, paths: sections(paths),
    holds=lambda path: bool(files_named(FILE_NAME, path)),
    rows=_rows,
    text=lambda paths, format: [_text(count, format) for count in find(paths)],
)
