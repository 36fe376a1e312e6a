"""Types of profile.json and its run.json.  Fields that a newer version adds are ignored."""

from __future__ import annotations

from typing import Annotated, Dict, List, Literal, Optional, Union

from common.records import schema  # first: it goes on in another Python where this one lacks msgspec

# isort: split
from msgspec import Meta, Struct

from common.records.schema import Count, Duration, Nanoseconds, Positive, Share, of

FORMAT = 1
Times = Annotated[List[Nanoseconds], Meta(min_length=1)]


class ProfiledBatch(Struct, kw_only=True):
    """A batch of a profile."""

    N: Annotated[Positive, of("number of utterances")]
    frames: Annotated[Positive, of("feature frames of all utterances together")]
    frames_max: Annotated[Positive, of("feature frames of the longest utterance")]
    T_max: Annotated[Optional[Positive], of("encoder frames of the longest utterance")] = None
    U_max: Annotated[Optional[Count], of("tokens of the longest target")] = None
    tokens: Annotated[Count, of("tokens of all utterances together")]


class Steps(Struct, kw_only=True):
    """Times of steps, those with labels and those without in turn."""

    bare_ns: Annotated[Times, of("times of steps without labels, on the host")]
    host_ns: Annotated[Times, of("times of steps with labels, on the host")]
    device_ns: Annotated[
        List[Optional[Nanoseconds]], Meta(min_length=1), of("times of steps with labels, on the device; null on a CPU")
    ]
    foreign_cpu: Annotated[Optional[Share], of("other processes' share of the CPUs that it may use, 0 to 1")] = None
    flags: Annotated[List[str], of('"busy" and "loaded": other processes ran beside the steps')] = []


class Place(Struct, kw_only=True):
    """A label within a step."""

    chain: Annotated[List[str], Meta(min_length=1), of("labels, the outermost first")]
    phase: Annotated[Literal["forward", "backward", "update"], of("phase of the step")]
    calls: Annotated[Count, of("number of calls in all steps")]
    host_ns: Annotated[List[Duration], Meta(min_length=1), of("time in each step")]
    device_ns: Annotated[
        List[Optional[Duration]], Meta(min_length=1), of("time in each step, on the device; null on a CPU")
    ]


class PlaceMemory(Struct, kw_only=True):
    """Memory of a label, profiled."""

    name: Annotated[str, of('of the label, "label.backward"; "" of the step')]
    peak_bytes: Annotated[int, of("peak above the level at the beginning of the step")]
    rise_bytes: Annotated[int, of("peak above the level at its own beginning")]
    left_bytes: Annotated[int, of("bytes that its calls in a step leave allocated")]


class PlaceFlops(Struct, kw_only=True):
    """Operations of a step in one label, without what lies in it."""

    chain: Annotated[List[str], of("labels, the outermost first")]
    phase: Annotated[str, of("phase of the step")]
    macs: Annotated[float, of("multiply-accumulates, the mean of all batches")]
    flops: Annotated[float, of("floating-point operations, the mean of all batches")]


class Compiled(Struct, kw_only=True):
    """The compilation before the steps, with --compile."""

    ns: Annotated[Nanoseconds, of("time until a round of steps compiled nothing")]
    modules: Annotated[Count, of("number of compiled modules")]
    graphs: Annotated[Count, of("number of compiled graphs")]
    graphs_later: Annotated[Count, of("number of graphs compiled within the timed steps")]


class ProfileOptions(Struct, kw_only=True, frozen=True):
    """Flags that change the step."""

    dropout: Annotated[bool, of("whether --dropout was given")] = False
    amp: Annotated[bool, of("whether --amp was given")] = False
    compile: Annotated[bool, of("whether --compile was given")] = False
    optimizer: Annotated[bool, of("whether --optimizer was given")] = False
    checkpoint: Annotated[List[str], of("patterns of --checkpoint")] = []

    def on(self) -> List[str]:
        """Return the names of those that are given."""
        return [name for name in self.__struct_fields__ if getattr(self, name)]


class ProfileHead(Struct, kw_only=True):
    """run.json beside profile.json."""

    started: Annotated[str, of("ISO 8601, UTC")]
    identity: Annotated[
        schema.Record, of("what two profiles of the same step share: choice, settings, limits, machine")
    ]


class Profile(Struct, kw_only=True):
    """A size in profile.json; one that failed has its size and its reason alone."""

    size: Annotated[str, of('in words: "batch-size 4"')] = ""
    reason: Annotated[str, of('why it failed, else ""')] = ""
    format: Annotated[int, of("version of these fields")] = FORMAT
    implementation: Annotated[str, of("name of the loss")] = ""
    model: Annotated[str, of('import path, "" for the Conformer transducer')] = ""
    config: Annotated[str, of('of the Conformer transducer: "icefall", or "" for torchaudio\'s Conformer')] = ""
    parameters: Annotated[Dict[str, int], of("number of parameters by part of the model")] = {}
    device: Annotated[str, of('"cpu" or "cuda"')] = ""
    device_name: Annotated[Optional[str], of("name of the GPU, or model of the CPU")] = None
    node: Annotated[str, of("node, with --executor ray")] = ""
    threads: Annotated[Optional[int], of("torch's threads on the CPU")] = None
    torch: Annotated[str, of("version of torch")] = ""
    tf32: Annotated[Optional[bool], of("whether CUDA may round products to TF32; null on a CPU")] = None
    gpu: Annotated[
        Optional[schema.Gpu], of("state of the GPU before the steps; null on a CPU, or where it is not known")
    ] = None
    sizes: Annotated[Dict[str, Union[int, float, List[int]]], of("sizes of the Conformer transducer")] = {}
    options: Annotated[ProfileOptions, of("flags that change the step")] = ProfileOptions()
    batches: Annotated[List[ProfiledBatch], of("batches that were taken in turn")] = []
    steps: Annotated[Optional[Steps], of("times of the steps")] = None
    spans: Annotated[List[Place], of("times of labels")] = []
    memory: Annotated[List[PlaceMemory], of("memory of labels and of the step")] = []
    flops: Annotated[List[PlaceFlops], of("operations of labels and of the rest of the step")] = []
    not_counted: Annotated[List[str], of("operators without a rule")] = []
    compiled: Annotated[Optional[Compiled], of("what --compile compiled")] = None
    limits: Annotated[Optional[schema.Record], of("a record ``limits``")] = None

    def __post_init__(self) -> None:
        if not self.spans:
            return
        if self.steps is None or not self.batches or "model" not in self.parameters:
            raise ValueError("steps, batches or parameters are missing")
        on_device = [*self.steps.device_ns, *(ns for span in self.spans for ns in span.device_ns)]
        if self.device == "cuda" and None in on_device:
            raise ValueError("times of the device are missing")
        if self.limits:
            schema.typed(self.limits)

    @property
    def is_measured(self) -> bool:
        """Return whether it has times; a size that failed has none."""
        return bool(self.spans)

    def to_json(self) -> schema.Record:
        """Return the fields as the file has them: the node only where there is one."""
        content: schema.Record = schema.as_written(self)
        if not self.node:
            del content["node"]
        return content


PARTS = (ProfileHead, Profile, ProfileOptions, ProfiledBatch, Steps, Place, PlaceMemory, PlaceFlops, Compiled)
