"""The model and the steps of a profile, as flags say them, and what is measured of a batch size.  No torch."""

from __future__ import annotations

from typing import Annotated, Any, Dict, List, Optional, Tuple

from common.tools.configuration import Positive  # first: it goes on in another Python where this one lacks msgspec

# isort: split
from msgspec import Meta, Struct


class Sizes(Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that a configuration may change.  Defaults are icefall's, but dropout, which --no-dropout sets to 0."""

    features: Positive = 80
    embed_channels: Tuple[Positive, Positive, Positive] = (8, 32, 128)
    encoder_dim: Positive = 512
    heads: Positive = 8
    feed_forward: Positive = 2048
    layers: Positive = 12
    kernel: Positive = 31
    decoder_dim: Positive = 512
    context: Positive = 2
    joiner_dim: Positive = 512
    vocab_size: Positive = 500
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        if self.encoder_dim % self.heads:
            raise ValueError(f"encoder_dim is {self.encoder_dim}; give a multiple of heads ({self.heads})")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; give an odd number")


class Choice(Struct, kw_only=True, frozen=True):
    """The model to profile, and how.

    Attributes:
        sizes: of the Conformer transducer
        loss: name of its row
        model: import path; "" for the Conformer transducer
        config: "icefall", or "" for torchaudio's Conformer
        arguments: of the model at the import path
        labels: patterns by label; empty for the default labels
        depth: in place of labels, the depth of the modules that get one
        steps, warmup, trace_steps: numbers of timed steps, of those before them, and of those under the profiler
        dropout, amp, compile, optimizer: as the flags of these names
        checkpoint: patterns of modules whose forward is computed again in the backward
    """

    sizes: Sizes = Sizes()
    loss: str = "fast_rnnt-pruned"
    model: str = ""
    config: str = ""
    arguments: Dict[str, Any] = {}
    labels: Dict[str, List[str]] = {}
    depth: Optional[int] = None
    steps: int = 20
    warmup: int = 2
    trace_steps: int = 2
    dropout: bool = False
    amp: bool = False
    compile: bool = False
    optimizer: bool = False
    checkpoint: List[str] = []

    @property
    def options(self) -> str:
        """Return the names of the flags that change the step."""
        names = [name for name in ("dropout", "amp", "compile", "optimizer", "checkpoint") if getattr(self, name)]
        return ", ".join(names) or "no dropout"


class Profile(Struct, kw_only=True):
    """A run.  sizes: settings of each batch size, by its name "batch-size 4"; limits: whether to measure the device."""

    choice: Choice
    sizes: Dict[str, Dict[str, Any]]
    limits: bool = True


class Batch(Struct, kw_only=True):
    """A batch: its utterances, all their feature frames and tokens, and those of the longest."""

    N: int
    frames: int
    frames_max: int
    T_max: int = 0
    U_max: int = 0
    tokens: int


class Place(Struct, kw_only=True):
    """A label within a step, with all that lies in it.

    Attributes:
        chain: labels, the outermost first
        calls: of all steps
        host_ns, device_ns: time in each step; on the device null on a CPU
        macs, flops: operations of a step, the mean of all batches
    """

    chain: List[str]
    phase: str
    calls: int
    host_ns: List[float]
    device_ns: List[Optional[float]]
    macs: float = 0.0
    flops: float = 0.0


class Memory(Struct, kw_only=True):
    """Memory of a label ("label.backward"; "" of the step) in bytes: the peak above the level at the begin of the step
    and at its own, and what its calls in a step leave allocated."""

    name: str
    peak: int
    rise: int
    left: int


class Compiled(Struct, kw_only=True):
    """The compilation before the steps: nanoseconds, modules and graphs; graphs_later: within the timed steps."""

    ns: int
    modules: int
    graphs: int
    graphs_later: int = 0


class Measured(Struct, kw_only=True):
    """A batch size that was profiled.

    Attributes:
        parameters: number of parameters by part of the model
        batches: taken in turn
        bare_ns, host_ns, device_ns: times of steps without labels, and with them on the host and on the device
        foreign_cpu, flags: the load beside the steps
        macs, flops: operations of the whole step
        not_counted: operators without a rule
    """

    parameters: Dict[str, int]
    batches: Annotated[List[Batch], Meta(min_length=1)]
    bare_ns: Annotated[List[float], Meta(min_length=1)]
    host_ns: Annotated[List[float], Meta(min_length=1)]
    device_ns: List[Optional[float]]
    foreign_cpu: Optional[float] = None
    flags: List[str] = []
    spans: Annotated[List[Place], Meta(min_length=1)]
    memory: List[Memory] = []
    macs: float = 0.0
    flops: float = 0.0
    not_counted: List[str] = []
    compiled: Optional[Compiled] = None


class Limit(Struct, kw_only=True):
    """The best matrix product of the device, and the load beside its measurement."""

    flops_per_second: Annotated[float, Meta(gt=0)]
    flags: List[str] = []
