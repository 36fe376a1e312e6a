"""What flops.json holds: a count of operations.  What a newer version adds is ignored."""

from __future__ import annotations

from typing import Annotated, List, Literal, Optional

# isort: split
import msgspec
from msgspec import Meta, Struct

from common.records.schema import Count, Duration, Machine, Positive, Record, of


class CountedModule(Struct, kw_only=True):
    """A module of a counted model."""

    path: Annotated[str, of('dotted names, "" of the model')]
    kind: Annotated[str, of("name of its class")] = msgspec.field(name="class")
    calls: Annotated[Count, of("number of calls in all runs")]
    trainable: Annotated[Count, of("number of its own trainable parameters")]
    frozen: Annotated[Count, of("number of its own frozen parameters")]


class CountedOperator(Struct, kw_only=True):
    """Operations of one operator within one module."""

    path: Annotated[str, of("dotted path of the module")]
    operator: Annotated[str, of("name of the operator in torch")]
    phase: Annotated[str, of('"forward" or "backward"')]
    calls: Annotated[Count, of("number of calls in all runs")]
    macs: Annotated[Count, of("multiply-accumulates")]
    flops: Annotated[Count, of("floating-point operations")]
    ns: Annotated[Optional[Duration], of("time in the operator; null on the meta device")] = None


class NotCounted(Struct, kw_only=True):
    """An operator without a rule."""

    operator: Annotated[str, of("name of the operator in torch")]
    path: Annotated[str, of("dotted path of the module")]
    reason: Annotated[str, of("why it was not counted")]


class CountedDocument(Struct, kw_only=True):
    """Modules, operators and what was not counted, as the counter saw them."""

    convention: Annotated[str, of('"exact" or "superb"')]
    device: Annotated[str, of("device as the flag names it; empty in older counts")] = ""
    modules: Annotated[List[CountedModule], of("modules of the model")]
    counts: Annotated[List[CountedOperator], of("counts of all runs")]
    not_counted: Annotated[List[NotCounted], of("operators without a rule")]


class CountedBucket(Struct, kw_only=True):
    """Utterances of similar length."""

    name: Annotated[str, of("name of the bucket")]
    samples: Annotated[List[Positive], Meta(min_length=1), of("number of samples of each utterance")]
    macs: Annotated[List[Count], of("multiply-accumulates of each utterance")]
    flops: Annotated[Count, of("floating-point operations of all of them")]
    sample_rate: Annotated[Positive, of("sample rate of the audio")]


class Counted(Struct, kw_only=True):
    """flops.json."""

    started: Annotated[str, of("ISO 8601, UTC")]
    command: Annotated[List[str], of("the command line")]
    git_revision: Annotated[Optional[str], of("git revision of this suite")]
    git_dirty: Annotated[Optional[bool], of("whether there were uncommitted changes")]
    machine: Annotated[Machine, of("machine on which the command ran")]
    model: Annotated[str, of("model as the command names it")]
    identity: Annotated[Record, of("what two counts of the same model share: the flags of the model and its input")]
    by: Annotated[Literal["module", "class", "operator"], of("unit of a row of the table")]
    depth: Annotated[Optional[Count], of("depth of a row's module below the model, at most; null: any")]
    document: Annotated[CountedDocument, of("what was counted")]
    buckets: Annotated[List[CountedBucket], of("buckets of --audio; empty for other inputs")] = []


PARTS = (Counted, CountedDocument, CountedModule, CountedOperator, NotCounted, CountedBucket)
