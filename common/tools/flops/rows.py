"""What a counter counted, put together by module, by class of module and by operator.

A document is what common.flops.counter.FlopCounter.document returns, or JSON of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

# isort: split
from msgspec.structs import replace

from common.analysis import metrics
from common.analysis.metrics import Metric, metric
from common.core.errors import UserError
from common.core.text import percent
from common.core.units import quantity
from common.present.table import Values
from common.records import documents
from common.tools import files
from common.tools.flops import records
from common.tools.flops.documents import Counted, CountedDocument, CountedModule, CountedOperator

#: What the rows of a breakdown can be.
BREAKDOWNS = ("module", "class", "operator")
BACKWARD = "backward"
#: Classes of layers that one operator runs on a CPU, and one operator a step on the meta device.
RECURRENT = {"LSTM", "GRU", "RNN"}


@dataclass
class Part:
    """A module with all below it, the modules of a class without what is below them, an operator, or everything.

    name: path, class or operator; kind: the class of a module, else ""; calls: of the module (of all of its class), or
    of the operator; trainable, frozen: parameters; macs, flops: forward and backward, of which `backward_macs` and
    `backward_flops`; own_macs, own_flops: without the modules below; ns: nanoseconds in operators, None where they were
    not measured.
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
    ns: Optional[int] = None

    def add(self, counted: CountedOperator, exclusive: bool) -> None:
        """Add an entry of a document's counts.  exclusive: it is of the part itself, not of a module below."""
        macs, flops = counted.macs, counted.flops
        self.macs += macs
        self.flops += flops
        if counted.phase == BACKWARD:
            self.backward_macs += macs
            self.backward_flops += flops
        if exclusive:
            self.own_macs += macs
            self.own_flops += flops
        if counted.ns is not None:
            self.ns = (self.ns or 0) + int(counted.ns)

    def add_module(self, module: CountedModule) -> None:
        self.trainable += module.trainable
        self.frozen += module.frozen


def amount(key: str, title: str = "", unit: str = "", **options: Any) -> Metric:
    """Return the metric of a key of a row, as CSV and JSON have it."""
    return metric(key, title, lambda value: quantity(value, unit), value=itemgetter(key), unit=unit, **options)


def _shared(key: str, title: str = "", unit: str = "") -> Tuple[Metric, Metric]:
    """Return the metric of a key, and that of its share of the total."""
    share = f"{key}_share"
    return amount(key, title, unit), metric(share, "share", percent, value=itemgetter(share))


#: Of a row: its keys in CSV and JSON, and the columns of the table, those with a title, in this order.
NUMBERS = (
    amount("calls", "calls"),
    amount("trainable", "trainable"),
    amount("frozen", "frozen"),
    *_shared("macs", "MACs", "MACs"),
    *_shared("flops", "FLOPs", "FLOPs"),
    amount("backward_macs", "backward MACs", "MACs"),
    amount("backward_flops", "backward FLOPs", "FLOPs"),
    amount("own_macs", unit="MACs"),
    amount("own_flops", unit="FLOPs"),
    metric("ns", "ms", value=itemgetter("ns"), unit="ns", scale=1e-6),
    metric("ns_share", "share", percent, value=itemgetter("ns_share")),
)


@dataclass
class Breakdown:
    """A document by module, class or operator.

    total: of everything; parts: its rows; convention: the counter's; not_counted: ("aten::x in encoder", reason),
    once each; remarks: lines for the reader.
    """

    total: Part
    parts: List[Part]
    convention: str
    not_counted: List[Tuple[str, str]] = field(default_factory=list)
    remarks: List[str] = field(default_factory=list)

    def rows(self) -> List[Values]:
        """Return each part as CSV and JSON have it, with its shares of the total."""
        return list(map(self.row, self.parts))

    def row(self, part: Part) -> Values:
        """Return a part with its shares, None where the total is nothing."""
        known = {**asdict(part), **{f"{key}_share": self._share(part, key) for key in ("macs", "flops", "ns")}}
        return {**known, **metrics.values(NUMBERS, known)}

    def _share(self, part: Part, key: str) -> Optional[float]:
        of, whole = getattr(part, key), getattr(self.total, key)
        return of / whole if whole and of is not None else None


@dataclass
class Count:
    """Holds a count that was read back; reason says why it could not be, else "", and then there is no content."""

    path: Path
    content: Optional[Counted] = None
    reason: str = ""


def breakdown_of(content: Counted) -> Breakdown:
    """Return the rows that a count was asked for."""
    return breakdown(content.document, content.by, content.depth)


def find(paths: Sequence[Any]) -> List[Count]:
    """Return the counts in, at or under `paths`, by their files; of several of the same the newest."""
    newest: Dict[str, Count] = {}
    counts = map(read, files.files(paths, records.FILE_NAME))
    for count in sorted(counts, key=lambda count: count.content.started if count.content else ""):
        newest[repr(sorted(count.content.identity.items())) if count.content else str(count.path)] = count
    return sorted(newest.values(), key=lambda count: str(count.path))


def read(path: Path) -> Count:
    """Return what is in a file; never raises for what is in it."""
    try:
        return Count(path, documents.read(path, Counted))
    except (FileNotFoundError, UserError) as error:
        return Count(path, reason=f"{path.name} cannot be read ({error}): count again, or delete it")


def breakdown(document: CountedDocument, by: str = "module", depth: Optional[int] = None) -> Breakdown:
    """Return the rows of one of BREAKDOWNS; modules down to `depth` names below the model, all of them by default."""
    parts = {"module": _modules, "class": _classes, "operator": _operators}[by](document, depth)
    missing = {f"{each.operator} in {each.path or 'the model'}": each.reason for each in document.not_counted}
    return Breakdown(total(document), parts, document.convention, list(missing.items()), _remarks(document))


def _remarks(document: CountedDocument) -> List[str]:
    backward = {count.path for count in document.counts if count.phase == BACKWARD}
    classes = {module.kind for module in document.modules if module.path in backward}
    recurrent = sorted(classes & RECURRENT)
    if document.device != "meta" or not recurrent:
        return []
    names = ", ".join(recurrent)
    return [f"{names}: backward FLOPs are of single steps on the meta device, more than on a CPU; MACs are the same"]


def total(document: CountedDocument) -> Part:
    result = Part("total")
    for module in document.modules:
        result.add_module(module)
    for counted in document.counts:
        result.add(counted, exclusive=True)
        result.calls += counted.calls
    return result


def merged(documents: Sequence[CountedDocument]) -> CountedDocument:
    """Merge the documents of several runs of one model: parameters once, all else added up."""
    first = documents[0]
    calls: Dict[str, int] = {}
    for document in documents:
        for module in document.modules:
            calls[module.path] = calls.get(module.path, 0) + module.calls
    modules = {module.path: module for document in reversed(documents) for module in document.modules}
    return CountedDocument(
        convention=first.convention,
        device=first.device,
        modules=[replace(module, calls=calls[path]) for path, module in modules.items()],
        counts=[counted for document in documents for counted in document.counts],
        not_counted=[operator for document in documents for operator in document.not_counted],
    )


def _modules(document: CountedDocument, depth: Optional[int]) -> List[Part]:
    """Return the modules in the order of the model, each before those below it, then paths that are no module."""
    parts = {
        module.path: Part(module.path, module.kind, module.calls)
        for module in document.modules
        if depth is None or _depth(module.path) <= depth
    }
    for module in document.modules:
        for path in _above(module.path, parts):
            parts[path].add_module(module)
    for counted in document.counts:
        if not _above(counted.path, parts):
            parts[counted.path] = Part(counted.path)
        for path in _above(counted.path, parts):
            parts[path].add(counted, exclusive=path == counted.path)
    return list(parts.values())


def _classes(document: CountedDocument, _: Optional[int]) -> List[Part]:
    kinds = {module.path: module.kind for module in document.modules}
    parts: Dict[str, Part] = {}
    for module in document.modules:
        part = parts.setdefault(module.kind, Part(module.kind))
        part.add_module(module)
        part.calls += module.calls
    for counted in document.counts:
        kind = kinds.get(counted.path, counted.path)
        parts.setdefault(kind, Part(kind)).add(counted, exclusive=True)
    return _largest_first(parts.values())


def _operators(document: CountedDocument, _: Optional[int]) -> List[Part]:
    parts: Dict[str, Part] = {}
    for counted in document.counts:
        part = parts.setdefault(counted.operator, Part(counted.operator))
        part.add(counted, exclusive=True)
        part.calls += counted.calls
    return _largest_first(parts.values())


def _largest_first(parts: Iterable[Part]) -> List[Part]:
    return sorted(parts, key=lambda part: (-part.flops, -part.macs, part.name))


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _above(path: str, known: Mapping[str, Part]) -> List[str]:
    """Return those of the known modules that `path` is, or lies in.  A path in parentheses is outside of the model."""
    names = path.split(".") if path else []
    prefixes = (".".join(names[:count]) for count in range(len(names) + 1))
    return [prefix for prefix in prefixes if prefix in known and (prefix or not path.startswith("("))]
