"""Reads where a step went from the document of a profile: each label with and without what lies in it, in each phase.

Times are means over the labelled steps, so that they add up: the children of a label to no more than the label, all
labels and `other` to the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.analysis import metrics, roofline
from common.analysis.metrics import metric
from common.core.errors import UserError
from common.core.statistics import mean, median
from common.core.text import percent
from common.core.units import quantity
from common.present.table import Values
from common.records import documents, schema
from common.tools import files
from common.tools.profile import documents as types
from common.tools.profile import records

Chain = Tuple[str, ...]
FORWARD, BACKWARD = "forward", "backward"
PHASES = (FORWARD, BACKWARD, "update")
STEP, OTHER = "step", "other"
#: What a transducer adds to its encoder: the part in words, and its labels.
OWN_PARTS = {
    "decoder": ("rnnt_decoder",),
    "joiner": ("joiner",),
    "loss": ("rnnt_loss", "rnnt_loss_simple", "rnnt_loss_pruned"),
}


@dataclass
class Node:
    """A position in the step.

    Attributes:
        chain: labels, the outermost first.
        phase: one of PHASES.
        calls: number of calls in all steps.
        ms: milliseconds of a step, with all that lies in it: `device_ms` on CUDA, else `host_ms`.
        own_ms: the same without what lies in it.
        children: the positions in it.
    """

    chain: Chain
    phase: str
    calls: int
    ms: float
    own_ms: float
    host_ms: float
    device_ms: Optional[float]
    children: List[Node] = field(default_factory=list)


@dataclass
class Part:
    """A row: a label in one phase, wherever it lies; `other`, which no label has; or the step.

    Attributes:
        depth: how many labels it lies in.
        calls: number of calls in all steps.
        ms, host_ms, device_ms, own_ms: of a step, as in Node.
        share: its part of the step.
        peak_mb: most memory while inside, above the level at the beginning of the step.
        rise_mb: the same above the level at its own beginning.
        left_mb: memory that its calls in a step leave allocated.
        macs, flops: operations of a step, with all that lies in it.
        of_limit: its flops_per_second over the device's measured rate.
    """

    label: str
    phase: str
    depth: int
    calls: int
    ms: float
    ms_per_call: Optional[float]
    own_ms: float
    share: float
    host_ms: float
    device_ms: Optional[float]
    peak_mb: Optional[float] = None
    rise_mb: Optional[float] = None
    left_mb: Optional[float] = None
    macs: Optional[float] = None
    flops: Optional[float] = None
    flops_per_second: Optional[float] = None
    of_limit: Optional[float] = None

    @property
    def name(self) -> str:
        """Return the label as "self_attn" or "self_attn.backward"."""
        return f"{self.label}.{BACKWARD}" if self.phase == BACKWARD else self.label


def share_of_limit(share: Optional[float]) -> str:
    """Return the share in words; one above 1 shows that the limit or the time is wrong, so its number is not told."""
    return ">100%" if share is not None and share > 1 else percent(share)


_ms = partial(metric, unit="ms", better="lower")
_mb = partial(metric, unit="MB", better="lower", profiled=True)
#: The numbers of a row: its keys in CSV and JSON, in this order.
NUMBERS = (
    metric("calls", "calls"),
    _ms("ms", "ms"),
    _ms("ms_per_call", "ms /call"),
    _ms("own_ms", "own ms"),
    metric("share", "share", percent),
    _ms("host_ms", "host ms"),
    _ms("device_ms"),
    _mb("peak_mb", "peak MB"),
    _mb("rise_mb", "rise MB"),
    _mb("left_mb", "leaves MB"),
    metric("macs", "MACs", quantity),
    metric("flops", "FLOPs", quantity),
    metric("flops_per_second", "FLOPs /s", quantity, better="higher"),
    metric("of_limit", "of limit", share_of_limit, better="higher"),
)


@dataclass
class Profile:
    """One document.

    Attributes:
        roots: of the tree of positions, those of the forward first.
        step_ms, bare_ms: a step with and without labels.
        hooks_ms: what the labels cost a step, the median over pairs of steps.
    """

    document: types.Profile
    parts: List[Part]
    roots: List[Node]
    step_ms: float
    bare_ms: float
    hooks_ms: float

    @property
    def busy(self) -> bool:
        """Tell whether other processes ran beside the timed steps."""
        return bool(self.document.steps and self.document.steps.flags)

    @property
    def limit_was_busy(self) -> bool:
        """Tell whether other processes ran beside the measurement of the limit."""
        return bool((self.document.limits or {}).get("flags"))

    def outermost(self) -> Dict[str, float]:
        """Return the share of the step of each label that lies in no other, forward and backward together."""
        shares: Dict[str, float] = {}
        for part in self.parts:
            if part.depth == 0 and part.phase:
                shares[part.label] = shares.get(part.label, 0.0) + part.share
        return shares

    def rows(self) -> List[Values]:
        """Return the parts as CSV and JSON have them."""
        identity = ("name", "label", "phase", "depth")
        return [
            {**{key: getattr(part, key) for key in identity}, **metrics.values(NUMBERS, part)} for part in self.parts
        ]


def profile(document: types.Profile) -> Profile:
    """Return the profile in the document of a size that was measured."""
    steps, cuda = document.steps, document.device == "cuda"
    assert steps is not None
    taken = [ns for ns in (steps.device_ns if cuda else steps.host_ns) if ns is not None]
    step_ms, host_ms = mean(taken) / 1e6, mean(steps.host_ns) / 1e6
    roots = _tree(document.spans, cuda)
    count = len(taken)
    parts = _parts(roots, step_ms, count)
    labelled = {"ms": sum(node.ms for node in roots), "host": sum(node.host_ms for node in roots)}
    for label, ms, host in ((OTHER, step_ms - labelled["ms"], host_ms - labelled["host"]), (STEP, step_ms, host_ms)):
        parts.append(
            Part(label, "", 0, count, ms, ms, ms if label == OTHER else 0.0, ms / step_ms, host, ms if cuda else None)
        )
    _add_memory(parts, {memory.name: memory for memory in document.memory})
    _add_flops(parts, document)
    pairs = zip(steps.host_ns, steps.bare_ns)
    hooks_ms = median([(labelled - bare) / 1e6 for labelled, bare in pairs])
    return Profile(document, parts, roots, step_ms, median(steps.bare_ns) / 1e6, hooks_ms)


def _tree(listed: List[types.Place], cuda: bool) -> List[Node]:
    """Return the roots of the tree of positions."""
    nodes: Dict[Tuple[Chain, str], Node] = {}
    for span in listed:
        host = mean(span.host_ns) / 1e6
        device = mean([ns for ns in span.device_ns if ns is not None]) / 1e6 if cuda else None
        ms = host if device is None else device
        chain = tuple(span.chain)
        nodes[chain, span.phase] = Node(chain, span.phase, span.calls, ms, ms, host, device)
    roots = []
    for (chain, phase), node in nodes.items():
        above = nodes.get((chain[:-1], phase))
        if above is None:
            roots.append(node)
        else:
            above.children.append(node)
            above.own_ms -= node.ms
    return sorted(roots, key=lambda node: PHASES.index(node.phase))


def _parts(roots: List[Node], step_ms: float, steps: int) -> List[Part]:
    """Return the rows in the order of the tree, each label's backward after its forward."""
    parts_of: Dict[str, Dict[str, Part]] = {}

    def add(node: Node) -> None:
        label = node.chain[-1]
        part = parts_of.setdefault(label, {}).setdefault(
            node.phase,
            Part(label, node.phase, len(node.chain) - 1, 0, 0.0, None, 0.0, 0.0, 0.0, None),
        )
        part.own_ms += node.own_ms
        part.calls += node.calls
        if label not in node.chain[:-1]:  # else it is counted with the outer one
            part.ms += node.ms
            part.host_ms += node.host_ms
            if node.device_ms is not None:
                part.device_ms = (part.device_ms or 0.0) + node.device_ms
        for child in node.children:
            add(child)

    for node in roots:
        add(node)
    parts = [part for of_label in parts_of.values() for part in of_label.values()]
    for part in parts:
        part.share = part.ms / step_ms
        part.ms_per_call = part.ms * steps / part.calls if part.calls else None
    return parts


def _add_memory(parts: List[Part], known: Mapping[str, types.PlaceMemory]) -> None:
    """Set the memory of each part from that of the labels, by name."""
    for part in parts:
        memory = known.get("" if part.label == STEP and not part.phase else part.name)
        if memory is not None:
            part.peak_mb, part.rise_mb = memory.peak_bytes / 2**20, memory.rise_bytes / 2**20
            part.left_mb = memory.left_bytes / 2**20


def _add_flops(parts: List[Part], document: types.Profile) -> None:
    """Set the operations of each part, and their rate."""
    limit = limit_of(document)
    for part in parts:
        counted = [
            entry
            for entry in document.flops
            if (part.label == STEP and not part.phase)
            or (part.label == OTHER and not entry.chain)
            or (part.label in entry.chain and part.phase == entry.phase)
        ]
        part.macs, part.flops = sum(entry.macs for entry in counted), sum(entry.flops for entry in counted)
        if part.ms > 0:
            part.flops_per_second = part.flops / part.ms * 1e3
            part.of_limit = part.flops_per_second / limit if limit else None


def limit_of(document: types.Profile) -> Optional[float]:
    """Return the FLOPs per second of the device's best measured matrix product."""
    limits = schema.typed(document.limits) if document.limits else None
    return roofline.peaks([limits]).flops_per_second if isinstance(limits, schema.Limits) else None


#: A size in words ("batch-size 4"), its profile, or None and the reason.
Size = Tuple[str, Optional[Profile], str]


class Kept(NamedTuple):
    """Holds the profiles of a file; reason says why it could not be read, else ""."""

    path: Path
    sizes: List[Size]
    reason: str = ""


def find(paths: Sequence[Any]) -> List[Kept]:
    """Return the profiles in, at or under `paths`, by their files."""
    return [read(path) for path in sorted(files.files(paths, records.FILE_NAME))]


def read(path: Path) -> Kept:
    """Return what is in a file; never raises for what is in it."""
    try:
        sizes = documents.read(path, List[types.Profile])
    except (FileNotFoundError, UserError) as error:
        return Kept(path, [], str(error))
    return Kept(path, [(size.size, profile(size) if size.is_measured else None, size.reason) for size in sizes])
