"""Files that are one document: conformance.json, a matrix; profile.json, the profiles of one command, and its run.json;
flops.json, a count of operations.

``read`` checks one against the types below, so no other code does it.  What a newer version adds is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Dict, List, Literal, Optional

from common.records import schema  # first: it goes on in another Python where this one lacks msgspec

# isort: split
import msgspec
from msgspec import Meta, Struct

from common.core.errors import UserError
from common.core.files import read_bytes
from common.core.text import said
from common.records.conformance import Asked, Outcome
from common.records.schema import Count, Duration, Machine, Nanoseconds, Positive, Share, of

Times = Annotated[List[Nanoseconds], Meta(min_length=1)]


class MatrixRow(Struct, kw_only=True):
    """An implementation or variant in a conformance matrix."""

    name: Annotated[str, of("of the implementation or variant")]
    kind: Annotated[str, of("exact, topology, pruned or additive")]
    status: Annotated[str, of('"judged", or why not: missing, unsupported or error')]
    reason: Annotated[str, of('why it was not judged, else ""')]
    cells: Annotated[
        Dict[str, Outcome],
        of("by the name of the case: pass, differs, refuses, crashes, timeout, n/a or error; errors are relative"),
    ] = {}
    version: Annotated[Optional[str], of("of the package")] = None
    torch: Annotated[Optional[str], of("version")] = None
    python: Annotated[Optional[str], of("version")] = None
    device_name: Annotated[Optional[str], of("of the GPU, or the CPU's model name")] = None
    simulator: Annotated[Optional[str], of("in which kernels for CUDA ran on a CPU")] = None
    large: Annotated[bool, of("was it asked for more than 2^31 elements?")] = False
    made: Annotated[Optional[str], of("when it was judged, where not with the document")] = None
    git_revision: Annotated[Optional[str], of("of this suite, likewise")] = None
    git_dirty: Annotated[Optional[bool], of("were there uncommitted changes? likewise")] = None


class Matrix(Struct, kw_only=True):
    """conformance.json."""

    made: Annotated[str, of("ISO 8601, UTC")]
    git_revision: Annotated[Optional[str], of("of this suite")]
    git_dirty: Annotated[Optional[bool], of("were there uncommitted changes?")]
    machine: Annotated[Machine, of("where the command ran")]
    device: Annotated[str, of('"cpu" or "cuda"')]
    command: Annotated[List[str], of("the command line")]
    cases: Annotated[
        List[Asked], of("in their order; wrong, refusal: what an answer that differs and an error mean to a user")
    ]
    implementations: Annotated[List[MatrixRow], of("in their order")]

    def __post_init__(self) -> None:
        names = {case.name for case in self.cases}
        if any(row.status == "judged" and not names <= row.cells.keys() for row in self.implementations):
            raise ValueError("an implementation has no answer to a case")


class ProfiledBatch(Struct, kw_only=True):
    """A batch of a profile."""

    N: Annotated[Positive, of("utterances")]
    frames: Annotated[Positive, of("of features, all utterances together")]
    frames_max: Annotated[Positive, of("of the longest utterance")]
    tokens: Annotated[Count, of("all utterances together")]


class Steps(Struct, kw_only=True):
    """Times of steps, those with labels and those without in turn."""

    bare_ns: Annotated[Times, of("without labels, of the host")]
    host_ns: Annotated[Times, of("with labels, of the host")]
    device_ns: Annotated[List[Optional[Nanoseconds]], Meta(min_length=1), of("with labels; null on a CPU")]
    foreign_cpu: Annotated[Optional[Share], of("other processes' share of the CPUs that it may use, 0 to 1")] = None
    flags: Annotated[List[str], of('"busy" and "loaded": other processes ran beside the steps')] = []


class Place(Struct, kw_only=True):
    """A label within a step."""

    chain: Annotated[List[str], Meta(min_length=1), of("labels, the outermost first")]
    phase: Annotated[Literal["forward", "backward", "update"], of("of the step")]
    calls: Annotated[Count, of("in all steps")]
    host_ns: Annotated[List[Duration], Meta(min_length=1), of("of each step")]
    device_ns: Annotated[List[Optional[Duration]], Meta(min_length=1), of("of each step; null on a CPU")]


class PlaceMemory(Struct, kw_only=True):
    """Memory of a label, profiled."""

    name: Annotated[str, of('of the label, "label.backward"; "" of the step')]
    peak_bytes: Annotated[int, of("highest, above the level at the begin of the step")]
    rise_bytes: Annotated[int, of("highest, above the level at its own begin")]
    left_bytes: Annotated[int, of("that its calls in a step leave allocated")]


class PlaceFlops(Struct, kw_only=True):
    """Operations of a step in one label, without what lies in it."""

    chain: Annotated[List[str], of("labels, the outermost first")]
    phase: Annotated[str, of("of the step")]
    macs: Annotated[float, of("multiply-accumulates, the mean of all batches")]
    flops: Annotated[float, of("floating-point operations, the mean of all batches")]


class Compiled(Struct, kw_only=True):
    """What --compile did before the steps."""

    ns: Annotated[Nanoseconds, of("until a round of steps compiled nothing")]
    modules: Annotated[Count, of("that were compiled")]
    graphs: Annotated[Count, of("that were compiled")]
    graphs_later: Annotated[Count, of("that were compiled within the timed steps")]


class ProfileHead(Struct, kw_only=True):
    """run.json beside profile.json."""

    started: Annotated[str, of("ISO 8601, UTC")]
    identity: Annotated[Dict[str, Any], of("what makes two profiles the same: choice, settings, limits, machine")]


class Profile(Struct, kw_only=True):
    """A size in profile.json; one that failed has its size and its reason alone."""

    size: Annotated[str, of('in words: "batch-size 4"')]
    reason: Annotated[str, of('why it failed, else ""')]
    implementation: Annotated[str, of("the loss")] = ""
    model: Annotated[str, of('import path, "" for the Conformer transducer')] = ""
    config: Annotated[str, of('of the Conformer transducer: "icefall", or "" for torchaudio\'s Conformer')] = ""
    parameters: Annotated[Dict[str, int], of("how many the model has, by part")] = {}
    device: Annotated[str, of('"cpu" or "cuda"')] = ""
    device_name: Annotated[Optional[str], of("of the GPU, or the CPU's model name")] = None
    node: Annotated[str, of("with --executor ray")] = ""
    threads: Annotated[Optional[int], of("of torch on the CPU")] = None
    torch: Annotated[str, of("version")] = ""
    options: Annotated[Dict[str, Any], of("dropout, amp, compile, optimizer, checkpoint")] = {}
    batches: Annotated[List[ProfiledBatch], of("that were taken in turn")] = []
    steps: Annotated[Optional[Steps], of("times")] = None
    spans: Annotated[List[Place], of("times of labels")] = []
    memory: Annotated[List[PlaceMemory], of("of labels and the step")] = []
    flops: Annotated[List[PlaceFlops], of("of labels and the rest of the step")] = []
    not_counted: Annotated[List[str], of("operators without a rule")] = []
    compiled: Annotated[Optional[Compiled], of("with --compile")] = None
    limits: Annotated[Optional[Dict[str, Any]], of("a record ``limits``")] = None

    def __post_init__(self) -> None:
        if not self.spans:
            return
        if self.steps is None or not self.batches or "model" not in self.parameters:
            raise ValueError("steps, batches or parameters are missing")
        on_device = [*self.steps.device_ns, *(ns for one in self.spans for ns in one.device_ns)]
        if self.device == "cuda" and None in on_device:
            raise ValueError("times of the device are missing")
        if self.limits:
            schema.typed(self.limits)


class CountedModule(Struct, kw_only=True):
    """A module of a counted model."""

    path: Annotated[str, of('dotted names, "" of the model')]
    kind: Annotated[str, of("of its class")] = msgspec.field(name="class")
    calls: Annotated[Count, of("in all runs")]
    trainable: Annotated[Count, of("parameters of its own")]
    frozen: Annotated[Count, of("parameters of its own")]


class CountedOperator(Struct, kw_only=True):
    """Operations of one operator within one module."""

    path: Annotated[str, of("of the module")]
    operator: Annotated[str, of("as torch names it")]
    phase: Annotated[str, of('"forward" or "backward"')]
    calls: Annotated[Count, of("in all runs")]
    macs: Annotated[Count, of("multiply-accumulates")]
    flops: Annotated[Count, of("floating-point operations")]
    ns: Annotated[Optional[Duration], of("in the operator; null on the meta device")] = None


class NotCounted(Struct, kw_only=True):
    """An operator without a rule."""

    operator: Annotated[str, of("as torch names it")]
    path: Annotated[str, of("of the module")]
    reason: Annotated[str, of("why it was not counted")]


class CountedDocument(Struct, kw_only=True):
    """What the counter saw."""

    convention: Annotated[str, of('"exact" or "superb"')]
    device: Annotated[str, of("as it was named; empty in older counts")] = ""
    modules: Annotated[List[CountedModule], of("of the model")]
    counts: Annotated[List[CountedOperator], of("of all runs")]
    not_counted: Annotated[List[NotCounted], of("operators without a rule")]


class CountedBucket(Struct, kw_only=True):
    """Utterances of similar length."""

    name: Annotated[str, of("of the bucket")]
    samples: Annotated[List[Positive], Meta(min_length=1), of("of each utterance")]
    macs: Annotated[List[Count], of("of each utterance")]
    flops: Annotated[Count, of("of all of them")]
    sample_rate: Annotated[Positive, of("of the audio")]


class Counted(Struct, kw_only=True):
    """flops.json."""

    started: Annotated[str, of("ISO 8601, UTC")]
    command: Annotated[List[str], of("the command line")]
    git_revision: Annotated[Optional[str], of("of this suite")]
    git_dirty: Annotated[Optional[bool], of("were there uncommitted changes?")]
    machine: Annotated[Machine, of("where the command ran")]
    model: Annotated[str, of("as it was named")]
    identity: Annotated[Dict[str, Any], of("what makes two counts the same: the flags of the model and its input")]
    by: Annotated[Literal["module", "class", "operator"], of("what a row of the table is")]
    depth: Annotated[Optional[Count], of("names below the model that a row has at most; null: any")]
    document: Annotated[CountedDocument, of("what was counted")]
    buckets: Annotated[List[CountedBucket], of("of audio; empty for other inputs")] = []


PARTS = (
    *(Matrix, MatrixRow, ProfileHead, Profile, ProfiledBatch, Steps, Place, PlaceMemory, PlaceFlops, Compiled),
    *(Counted, CountedDocument, CountedModule, CountedOperator, NotCounted, CountedBucket),
)


def read(path: Path, kind: Any) -> Any:
    """The JSON of a file, checked.  kind: of its content.  Raises FileNotFoundError, and UserError with the reason for
    what cannot be read."""
    try:
        found = json.loads(read_bytes(path).decode("utf-8"))
        msgspec.convert(found, kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"{type(error).__name__}: {said(str(error))}") from error
    return found
