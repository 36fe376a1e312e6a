"""What a run leaves on disk: every kind of record, and every field.

A run of an implementation owns one folder, ``log/<name>-<suffix>/``, with its records (``results.jsonl``), its traces
and their key_averages, and, as long as a process measures into it, a lock file.  The folder can be moved, copied or
deleted on its own.  A record is one JSON object on one line; its key ``record`` is its kind.

A sweep owns one folder too, ``log/sweep-<keys>/``, with one file, ``sweep.jsonl``: its ``sweep`` record, then the runs
of all cells of the grid, one behind the other.  Every line after the first has ``cell`` and ``implementation``; the
lines of one cell and implementation are one run.

A profile of inference and a pipeline own one folder each, with ``inference.jsonl`` or ``pipeline.jsonl``: a header of
their own, then the records of their jobs, one for each cell or example.

All these files only grow.  A job that ran again (--resume) appears again: its later records replace the earlier ones
(see ``store.latest_jobs``).  Fields with a default are absent in records of older versions; what a newer version adds,
kinds and fields, is ignored.  The types are checked when a file is read, so no other code does it.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Dict, List, Mapping, Optional, Tuple, Type, Union, get_args, get_type_hints

from common.core import flag_types
from common.core.guard import require
from common.core.setting import Setting
from common.core.settings import SETTINGS, Settings

require("msgspec")

import msgspec  # noqa: E402
from msgspec import Meta, Struct, field  # noqa: E402

SCHEMA = 1
DEEPEST = 32  # lists and objects in each other, of a record: what reads and writes them recurs
FILE_NAME = "results.jsonl"
SWEEP_FILE_NAME = "sweep.jsonl"
INFERENCE_FILE_NAME = "inference.jsonl"
PIPELINE_FILE_NAME = "pipeline.jsonl"

#: A record as it is written.
Record = Dict[str, Any]

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Bytes = Annotated[int, Meta(ge=0, le=2**53, extra={"unit": "bytes"})]
Nanoseconds = Annotated[float, Meta(gt=0, le=1e18, extra={"unit": "ns"})]
Duration = Annotated[float, Meta(ge=0, le=1e18, extra={"unit": "ns"})]
Share = Annotated[float, Meta(ge=-1, le=1e6)]
Length = Annotated[float, Meta(ge=0, lt=1e15)]
#: Of what is timed beside other processes.
ForeignCpu = Annotated[Optional[Share], Meta(description="other processes' share of the CPUs that it may use, 0 to 1")]
Flags = Annotated[
    Optional[List[str]],
    Meta(description='"busy": it ran beside other load; "loaded" too: beside so much that losses may change places'),
]
#: Of a setting that a sweep varies.
Value = Union[int, float, bool, str, None]


def of(description: str) -> Meta:
    return Meta(description=description)


def _type_of(setting: Setting, hint: Any) -> Any:
    """Return the type that a setting has in a record; hint: its type in Settings."""
    if hint == Mapping[str, int]:
        return Dict[str, Count]
    if hint is int or int in get_args(hint):
        bounds = setting.type if isinstance(setting.type, flag_types.Whole) else flag_types.Whole(1, 2**53)
        whole = Annotated[int, Meta(ge=bounds.low, le=bounds.high)]
        return whole if hint is int else Optional[whole]
    if hint == Tuple[str, ...]:
        return Annotated[List[str], Meta(min_length=1)]
    return hint


#: The types of the settings that a record has.
_Settings = msgspec.defstruct(
    "_Settings", [(key, _type_of(SETTINGS[key], hint), None) for key, hint in get_type_hints(Settings).items()]
)


#: What readers use of a profile of inference: its grid, and of its configuration.
_Grid = msgspec.defstruct(
    "_Grid",
    [
        *(("threads", List[Optional[Positive]]), ("compile", List[bool]), ("dtype", List[str])),
        *(("quantize", List[str]), ("audio_mockup_secs", List[Length]), ("batch_sizes", List[Positive])),
    ],
)
_Dimensions = msgspec.defstruct("_Dimensions", [("triangle_only", bool), ("example_audio", Optional[str])])
_Config = msgspec.defstruct("_Config", [("profiling_dimensions", _Dimensions)])


# What records are made of.


class Machine(Struct, kw_only=True, frozen=True):
    """The computer."""

    cpu: Annotated[Optional[str], of("model name")] = None
    cores: Annotated[Optional[Positive], of("physical or logical ones, as the system counts them")] = None
    memory_bytes: Annotated[Optional[Bytes], of("memory of the whole machine")] = None
    os: Annotated[Optional[str], of("system, release and processor, as platform.platform() has them")] = None
    python: Annotated[Optional[str], of("version of the command's Python")] = None
    gpu: Annotated[Optional[str], of("model of the GPUs that were used, with --executor ray")] = None


class Gpu(Struct, kw_only=True, frozen=True):
    """The driver's account of a GPU (NVML, where nvidia-ml-py is installed)."""

    uuid: Annotated[Optional[str], of("id of the GPU, from the driver")] = None
    driver: Annotated[Optional[str], of("version of the driver")] = None
    sm_mhz: Annotated[Optional[Count], of("clock when it was read")] = None
    sm_most_mhz: Annotated[Optional[Count], of("highest clock")] = None
    memory_mhz: Annotated[Optional[Count], of("clock when it was read")] = None
    power_cap_watts: Annotated[Optional[float], of("power limit when it was read")] = None
    celsius: Annotated[Optional[int], of("temperature of the GPU when it was read")] = None
    throttled_by: Annotated[
        Optional[List[str]], of('what held the clocks back at that moment: "power cap", "idle"')
    ] = None
    ecc: Annotated[Optional[bool], of("whether its memory corrects errors")] = None


class MemoryLimit(Struct, kw_only=True, frozen=True):
    """The memory that --find-largest may use."""

    bytes: Annotated[Optional[Bytes], of("above the loaded process; null on CUDA, where the probe records tell")] = None
    source: Annotated[Optional[str], of("where the limit is from, in words")] = None


class Option(Struct, kw_only=True, frozen=True):
    """An option of a package's function."""

    ours: Annotated[Any, of("the value that this suite gives")]
    default: Annotated[Any, of('the function\'s own default, "-" where it hides it')]


class Batch(Struct, kw_only=True, frozen=True):
    """A batch; cells are those of the lattice, T * (U + 1)."""

    index: Annotated[int, of("index among the batches of the shape file")]
    N: Annotated[Positive, of("number of utterances")]
    T_max: Annotated[Positive, of("frames of the longest utterance")]
    U_max: Annotated[Count, of("tokens of the longest target")]
    useful_cells: Annotated[Positive, of("cells of the utterances, without padding")]
    padded_cells: Annotated[Positive, of("cells of the padded tensor")]
    frames: Annotated[Optional[Positive], of("sum of T")] = None
    tokens: Annotated[Optional[Count], of("sum of U")] = None
    one_symbol_cells: Annotated[Optional[Positive], of("met by paths of at most one symbol a frame")] = None
    pruned_cells: Annotated[Optional[Positive], of("T * min(S, U + 1) for the prune range S")] = None


class Totals(Struct, kw_only=True, frozen=True):
    """Totals of all utterances of the shape file, as the run varied them."""

    utterances: Annotated[Positive, of("number of utterances")]
    frames: Annotated[Positive, of("sum of T")]
    T_max: Annotated[Positive, of("frames of the longest utterance")]
    batches: Annotated[Optional[Positive], of("number of batches")] = None
    mean_log_useful_share: Annotated[
        Optional[float], of("mean over all batches of log(useful cells / padded cells)")
    ] = None


class Histogram(Struct, kw_only=True, frozen=True):
    """Bin i is from begin + i * width on; of frames, tokens or percent."""

    begin: Annotated[Length, of("beginning of the first bin")]
    width: Annotated[float, Meta(gt=0, lt=1e15, description="width of each bin")]
    all: Annotated[List[Count], of("number in each bin")]
    measured: Annotated[List[Count], of("number in each bin, of those in the measured batches")]
    lowest: Annotated[Length, of("of all")]
    median: Annotated[Length, of("of all")]
    highest: Annotated[Length, of("of all")]

    def __post_init__(self) -> None:
        if len(self.all) != len(self.measured) or not sum(self.all) or not sum(self.measured):
            raise ValueError("bins do not fit each other")


class Distribution(Struct, kw_only=True, frozen=True):
    """The lengths of the utterances."""

    T: Annotated[Histogram, of("frames")]
    U: Annotated[Histogram, of("tokens")]
    padding_percent: Annotated[Histogram, of("padding of all batches")]


class AtSize(Struct, kw_only=True, frozen=True):
    """Errors on a measured batch, of both scopes."""

    batch: Annotated[int, of("index of the batch")]
    N: Annotated[int, of("number of its utterances that were measured")]
    T_max: Annotated[int, of("frames of the longest of them")]
    U_max: Annotated[int, of("tokens of the longest target of them")]
    loss_error: Annotated[float, of("relative, against the float64 oracle")]
    loss_tolerance: Annotated[Optional[float], of("more than `tolerance` by the rounding of what is summed")] = None
    grad_error: Annotated[float, of("the largest of `grad_errors`")]
    grad_tolerance: Annotated[float, of("grows with the length of the sums")]
    grad_errors: Annotated[
        Dict[str, float],
        of('largest difference over largest magnitude, by tensor: "given" to the loss, "encoder_out", "output.weight"'),
    ] = {}
    sum_errors: Annotated[
        Dict[str, float],
        of(
            'largest sum of |difference| over what belongs there: of one "frame", one "u", one "symbol", one row of '
            'a tensor; "cell": of the gradient\'s sum over V, which must be 0'
        ),
    ] = {}
    sum_tolerance: Annotated[Optional[float], of("tolerance of `sum_errors`; grows with the length of the sums")] = None
    row_tolerance: Annotated[
        Optional[float], of("tolerance of the rows among them; also grows where posteriors cancel")
    ] = None
    imprecise: Annotated[
        Optional[float],
        of("the largest error that only the rounding of sums explains which cancel to almost 0; null where none is"),
    ] = None
    useful_cells: Annotated[Optional[Positive], of("cells of the judged utterances")] = None
    needed_cells: Annotated[
        Optional[Count], of("of these, those whose posterior a gradient's sums in the dtype can tell from 0")
    ] = None
    slope_errors: Annotated[
        Dict[str, float],
        of("by tensor, how far the factor that fits the gradient best as a multiple of the right one is from 1"),
    ] = {}
    slope_tolerance: Annotated[
        Optional[float], of("tolerance of `slope_errors`; grows with the length of the sums")
    ] = None
    overwritten: Annotated[List[str], of("inputs that the loss wrote over, though it may only read them")] = []
    differing: Annotated[List[str], of('"loss", or tensors whose gradient has other bits in a second step')] = []
    ok: Annotated[Optional[bool], of("whether every error is within its tolerance")] = None


class GapRange(Struct, kw_only=True, frozen=True):
    """The range of the gaps of single utterances."""

    median: Annotated[float, of("relative difference to the exact loss")]
    lowest: Annotated[float, of("gap of the utterance that pruning costs least")]
    highest: Annotated[float, of("gap of the utterance that pruning costs most")]
    utterances: Annotated[Count, of("number of utterances whose gap was measured")]


class Schedule(Struct, kw_only=True, frozen=True):
    """Steps of the profiler."""

    wait: Annotated[Count, of("steps without the profiler, at the beginning of each window")]
    warmup: Annotated[Count, of("steps with the profiler that are thrown away")]
    active: Annotated[Count, of("steps in the trace")]
    repeat: Annotated[Count, of("windows, each with a trace of its own")]


class Stream(Struct, kw_only=True, frozen=True):
    """A kernel that reads and writes as fast as it can."""

    kernel: Annotated[str, of('"update": two reads and a write over one of them; "read"; "write"')]
    buffer_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=2**53, extra={"unit": "bytes"})], of("size of all buffers that it touches")
    ]
    moved_bytes: Annotated[Annotated[int, Meta(ge=1, le=2**53, extra={"unit": "bytes"})], of("read and written")]
    ns: Annotated[List[Nanoseconds], Meta(min_length=1, description="duration of each repeat", extra={"unit": "ns"})]


class Exps(Struct, kw_only=True, frozen=True):
    """Exponentials of numbers that are not fetched from memory."""

    kernel: Annotated[str, of('"exp" or "exp2"')]
    count: Annotated[Positive, of("number of exponentials in each repeat")]
    ns: Annotated[List[Nanoseconds], Meta(min_length=1, description="duration of each repeat", extra={"unit": "ns"})]


class Products(Struct, kw_only=True, frozen=True):
    """Products of n x n matrices."""

    n: Annotated[Positive, of("rows and columns of each matrix")]
    ns: Annotated[List[Nanoseconds], Meta(min_length=1, description="duration of each product", extra={"unit": "ns"})]


# The kinds of records.


class Line(Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="record"):
    """A record."""

    cell: Annotated[
        Optional[Count], of("number of the cell, from 0; the values of the grid's last key vary fastest")
    ] = None
    implementation: Annotated[Optional[str], of("the implementation that the record is about")] = None
    reused_from: Annotated[
        Optional[Count], of("the cell whose result this is (the device's limits; who is missing or unsupported)")
    ] = None


class JobLine(Line, kw_only=True, frozen=True):
    """A record of a job."""

    job: Annotated[
        str,
        of('"correctness", "timing-1", ..., "memory", "trace"; of --find-largest "probe-64", "throughput-64-of-96-1"'),
    ]


class FirstLine(Line, kw_only=True, frozen=True):
    """The fields of the first line of every file."""

    schema: Annotated[int, of("version of this format")] = SCHEMA
    settings: Annotated[Record, of("every flag as resolved")] = {}
    command: Annotated[Any, of("the command line, a list")] = None
    started: Annotated[str, of("ISO 8601, UTC")] = ""
    git_revision: Annotated[Optional[str], of("git revision of this suite")] = None
    git_dirty: Annotated[Optional[bool], of("whether there were uncommitted changes")] = None
    machine: Annotated[Machine, of("machine on which the command ran")] = Machine()


class Header(FirstLine, kw_only=True, frozen=True, tag="run"):
    """Always the first line of a run."""

    name: Annotated[str, of('of the implementation: "k2", or "k2:modified" for a variant')]
    run_id: Annotated[
        str,
        of("shared by the implementations of one run, and by the two sides of one compare.py --rev: their rounds pair"),
    ] = ""
    suffix: Annotated[Optional[str], of('of the folder: "30", "max-frames-10000", "largest-batch-size"')] = None
    package: Annotated[Optional[str], of("package that holds the loss, by its import name")] = None
    kind: Annotated[str, of("exact, the name of another lattice, pruned or additive")] = "exact"
    exact: Annotated[Optional[bool], of("whether it is the transducer loss itself, not an approximation")] = None
    memory_limit: Annotated[Optional[MemoryLimit], of("limit of --find-largest")] = None
    values: Annotated[Dict[str, Value], of("in a sweep: {setting: value} of the cell")] = {}

    def __post_init__(self) -> None:
        msgspec.convert(self.settings, _Settings)
        if self.settings.get("find_largest") and not self.settings.keys() >= {"scopes", "sort_utterance", "rounds"}:
            raise ValueError("settings of a search are missing")


class Environment(JobLine, kw_only=True, frozen=True, tag="environment"):
    """Once for each job: where it ran and on what."""

    node: Annotated[Optional[str], of("with --executor ray the device: its node, and the GPU's place")] = None
    python: Annotated[Optional[str], of("version of Python")] = None
    torch: Annotated[Optional[str], of("version, with the local part")] = None
    implementation_version: Annotated[Optional[str], of("version of the package")] = None
    options: Annotated[Dict[str, Option], of("options of the package's functions, by name")] = {}
    device: Annotated[Optional[str], of('"cpu" or "cuda"')] = None
    device_name: Annotated[Optional[str], of("name of the GPU, or model of the CPU")] = None
    cuda: Annotated[Optional[str], of("version of CUDA")] = None
    threads: Annotated[Optional[Positive], of("torch's threads on the CPU")] = None
    tf32: Annotated[Optional[bool], of("whether CUDA may round products to TF32; null on a CPU")] = None
    gpu: Annotated[Optional[Gpu], of("state of the GPU before the job; null on a CPU, or where it is not known")] = None
    l2: Annotated[Optional[str], of('"cold": written over before each sample; "warm"; null on a CPU')] = None
    denormals: Annotated[Optional[str], of('"flush" (subnormal numbers are zero on the CPU) or "keep"')] = None
    allocator: Annotated[Optional[str], of('"reuse" or "system"; older runs: "system"')] = None
    variables: Annotated[Dict[str, str], of("environment variables that tune threads, allocator and TF32")] = {}
    transparent_huge_pages: Annotated[Optional[str], of("setting of the kernel")] = None
    affinity: Annotated[Optional[str], of('CPUs that the process may use: "0-3,8"')] = None
    governor: Annotated[Optional[str], of('of the clocks of these CPUs: "performance"; null where it is not known')] = (
        None
    )
    numa_nodes: Annotated[Optional[Positive], of("nodes of memory on which these CPUs are")] = None
    shape_file: Annotated[Optional[str], of("path, relative to the suite where it lies in there")] = None
    shape_file_sha256: Annotated[Optional[str], of("hex digest of its bytes")] = None
    batches: Annotated[Optional[List[Batch]], of("the measured batches")] = None
    shape_file_totals: Annotated[Optional[Totals], of("totals over all its utterances")] = None
    shape_distribution: Annotated[
        Any, of("a Distribution; in the correctness job only, and not with a sweep or --find-largest")
    ] = None
    warnings: Annotated[List[str], of("lines for the user")] = []


class Correctness(JobLine, kw_only=True, frozen=True, tag="correctness"):
    """The largest relative errors against the float64 oracle, on small batches; of a pruned loss with its range
    widened to all of U."""

    loss_error: Annotated[Optional[float], of("relative error of the loss")] = None
    grad_error: Annotated[Optional[float], of("largest error of a gradient, relative to its largest element")] = None
    slope_error: Annotated[
        Optional[float], of("largest difference to 1 of a factor between a tensor's gradient and the right one")
    ] = None
    tolerance: Annotated[Optional[float], of("tolerance of loss and gradient")] = None
    ok: Annotated[Optional[bool], of("whether everything that was judged is right")] = None
    differing: Annotated[List[str], of('"loss", or tensors whose gradient has other bits in a second step')] = []
    reached_by_padding: Annotated[
        List[str], of('"loss", or tensors whose gradient is not finite where the padding holds NaN')
    ] = []
    largest_score: Annotated[
        Optional[float], of("logits up to which the loss is right, as its adapter says; 1e300 for all")
    ] = None
    approximation_gap: Annotated[
        Optional[float],
        of(
            "relative difference of a pruned loss to the exact one, at the configured range and logits: the median of "
            "single utterances; else null"
        ),
    ] = None
    approximation_gaps: Annotated[
        Optional[Dict[str, Optional[float]]],
        of('likewise by kind of logits, "random", "peaky" and "trained" among them; null where they cannot be made'),
    ] = None
    gap_ranges: Annotated[
        Dict[str, GapRange],
        of("how these gaps differ over the measured utterances, 40 of them at most, 8 under the other logits"),
    ] = {}
    at_size: Annotated[
        Optional[AtSize],
        of(
            "of the measured batch with the most padded cells; with --find-largest, of its first two utterances; null "
            "where the small batches were wrong already, or simulated"
        ),
    ] = None
    note: Annotated[str, of('what else is to be known, else ""')] = ""


class Sample(JobLine, kw_only=True, frozen=True, tag="sample"):
    """One timed step or loss."""

    scope: Annotated[str, of('"loss" or "step"')]
    round: Annotated[int, of("number of the fresh process, from 1")]
    batch: Annotated[int, of("index of the batch")]
    total_wall_ns: Annotated[Nanoseconds, of("wall time; on CUDA synchronised at both ends")]
    repeat: Annotated[Optional[int], of("number of the pass over the round's batches, from 0")] = None
    warmup: Annotated[bool, of("whether it is only warm-up, and not counted")] = False
    forward_wall_ns: Annotated[Optional[Duration], of("null on CUDA, where the host runs ahead")] = None
    forward_event_ns: Annotated[Optional[Duration], of("time between CUDA events; null on a CPU")] = None
    total_event_ns: Annotated[Optional[Duration], of("time between CUDA events; null on a CPU")] = None
    stages: Annotated[Optional[Dict[str, Duration]], of("wall time of each stage; of CUDA events on CUDA")] = None
    minor_faults: Annotated[Optional[int], of("pages that the system mapped during the step")] = None
    foreign_cpu: ForeignCpu = None
    flags: Flags = None
    loss: Annotated[Optional[float], of("what the step returned; 1e300 where it is not finite")] = None

    @property
    def beside_load(self) -> bool:
        """Return whether others took so much of the CPU that its time cannot be compared."""
        return "loaded" in (self.flags or ())

    @property
    def ranked_ns(self) -> float:
        """Return the time that tables and ratios are made of: on CUDA the events of a loss, which are steadier, and the
        wall time of a step, which training waits for."""
        by_events = self.scope == "loss" and self.total_event_ns
        return by_events or self.total_wall_ns


class Stop(JobLine, kw_only=True, frozen=True, tag="stop"):
    """The reason why the samples of a scope ended, in one round."""

    scope: Annotated[str, of('"loss" or "step"')]
    round: Annotated[Optional[int], of("number of the round, in the timing and throughput passes")] = None
    why: Annotated[
        str,
        of(
            '"spread": the median is known as wanted; "sample cap": --max-samples; "time cap": --max-seconds; "time '
            'share": what the loss alone has of that beside the step'
        ),
    ]
    loss_error: Annotated[
        Optional[float],
        of(
            "largest relative error of the losses of the last timed step of each batch, and of one more step, against "
            "float64; null with --find-largest"
        ),
    ] = None


class Memory(JobLine, kw_only=True, frozen=True, tag="memory"):
    """Peaks of one step or loss above the baseline before it; null where a counter is not of this device."""

    scope: Annotated[str, of('"loss" or "step"')]
    batch: Annotated[int, of("index of the batch")]
    device_allocated_bytes: Annotated[Optional[Bytes], of("peak of torch's CUDA allocator")] = None
    device_reserved_bytes: Annotated[Optional[Bytes], of("peak of torch's CUDA allocator")] = None
    device_used_bytes: Annotated[
        Optional[Bytes],
        of("of the whole device by cudaMemGetInfo, once a millisecond: allocators beside torch's, and others, too"),
    ] = None
    torch_allocated_bytes: Annotated[
        Optional[Bytes], of("torch's own allocations on a CPU; null too for losses that loop in Python")
    ] = None
    process_bytes: Annotated[Optional[Bytes], of("peak of the resident process, on a CPU (VmHWM)")] = None


class Trace(JobLine, kw_only=True, frozen=True, tag="trace"):
    """The files that the trace pass left in the folder."""

    files: Annotated[List[str], of("names of traces, .json or .json.gz")]
    steps: Annotated[Optional[int], of("number of steps of the loop, over all windows")] = None
    schedule: Annotated[Optional[Schedule], of("schedule of the profiler")] = None
    key_averages: Annotated[Optional[List[str]], of("names of tables")] = None
    profiler: Annotated[Any, of("{record_shapes, with_stack, profile_memory}")] = None
    memory_snapshot: Annotated[Optional[str], of("name of a file")] = None
    foreign_cpu: Annotated[
        Optional[Share],
        of("share of the CPUs that other processes used in the profiled loop; null where it was too short to tell"),
    ] = None
    flags: Annotated[Optional[List[str]], of('"busy" and "loaded", as of ``sample``')] = None
    note: Annotated[Optional[str], of('why there is no trace, else ""; schedule and profiler are null then')] = ""
    warnings: Annotated[List[str], of("lines for the user")] = []


class Limits(Line, kw_only=True, frozen=True, tag="limits"):
    """The best that the device does: in each run that was timed one at the begin of each round, on the device of the
    round; the same in all implementations of the run.  The best of all counts."""

    node: Annotated[Optional[str], of("as in ``environment``")] = None
    round: Annotated[Optional[int], of("round of the timing pass; null where it was measured once for the run")] = None
    torch: Annotated[Optional[str], of("version of torch")] = None
    device: Annotated[Optional[str], of('"cpu" or "cuda"')] = None
    device_name: Annotated[Optional[str], of("name of the GPU, or model of the CPU")] = None
    threads: Annotated[Optional[int], of("torch's threads on the CPU")] = None
    dtype: Annotated[Optional[str], of("data type of the matrices")] = None
    tf32: Annotated[Optional[bool], of("whether CUDA may use TF32; null on a CPU")] = None
    gpu: Annotated[Optional[Gpu], of("state of the GPU right after the measurement, as in ``environment``")] = None
    cache_bytes: Annotated[Optional[Bytes], of("size of all last-level caches")] = None
    streams: Annotated[List[Stream], of("reads and writes of buffers of several sizes")] = []
    products: Annotated[List[Products], of("products of matrices of the dtype")] = []
    exps: Annotated[List[Exps], of("exponentials in float64 for that dtype, else in float32")] = []
    foreign_cpu: ForeignCpu = None
    flags: Annotated[Optional[List[str]], of('"busy" and "loaded", as of ``sample``')] = None
    reason: Annotated[Optional[str], of('why a list is empty, else ""')] = ""


class Probe(JobLine, kw_only=True, frozen=True, tag="probe"):
    """Written with --find-largest before each step that must fit: of the batch with the most padded cells, then of that
    with the most useful ones."""

    scope: Annotated[Optional[str], of('"loss" or "step"')] = None
    index: Annotated[Optional[int], of("index of the batch")] = None
    N: Annotated[Optional[Positive], of("number of utterances")] = None
    frames: Annotated[Optional[Positive], of("sum of T")] = None
    T_max: Annotated[Optional[Positive], of("frames of the longest utterance")] = None
    U_max: Annotated[Optional[Count], of("tokens of the longest target")] = None
    useful_cells: Annotated[Optional[Positive], of("cells of the utterances, without padding")] = None
    padded_cells: Annotated[Optional[Positive], of("cells of the padded tensor")] = None
    limit_bytes: Annotated[Optional[Bytes], of("bytes above those of the loaded process")] = None
    limit_kind: Annotated[
        Optional[str], of('"address space": RLIMIT_AS; "device memory": the rest of a CUDA device is held back')
    ] = None
    warnings: Annotated[List[str], of("a line for the user if less than --memory-limit was left")] = []


class Fit(JobLine, kw_only=True, frozen=True, tag="fit"):
    """Written with --find-largest after a step that did fit."""

    scope: Annotated[Optional[str], of('"loss" or "step"')] = None
    batch: Annotated[Optional[int], of("index of the batch")] = None
    loss: Annotated[Optional[float], of("loss of the step")] = None
    peak_bytes: Annotated[
        Optional[Bytes],
        of("above the loaded process, inputs included: resident on a CPU, of torch's allocator on CUDA"),
    ] = None


class Status(JobLine, kw_only=True, frozen=True, tag="status"):
    """The last line of each job."""

    status: Annotated[str, of("ok, oom, unsupported, missing, error, timeout or interrupted")]
    pass_name: Annotated[str, of('"correctness", "timing", ...')] = field(name="pass", default="")
    round: Annotated[Optional[int], of("number of the round, in the timing and throughput passes")] = None
    size: Annotated[Optional[Positive], of("batch size that --find-largest tried or timed")] = None
    pool: Annotated[
        Optional[Positive],
        of("of the throughput pass: its utterances are those of the run's batches of this size, the largest of all"),
    ] = None
    reason: Annotated[Optional[str], of('why it did not end well, else ""')] = ""
    wall_ns: Annotated[Optional[Duration], of("duration of the whole job")] = None
    stderr_tail: Annotated[Optional[List[str]], of("where the job failed: the last lines of its stderr")] = None
    left_out: Annotated[bool, of("whether the round was left out because the loss is far behind (--slow-rounds)")] = (
        False
    )


class SweepHeader(FirstLine, kw_only=True, frozen=True, tag="sweep"):
    """Always the first line of a sweep."""

    sweep_id: Annotated[str, of("the run_id of its runs")]
    grid: Annotated[Dict[str, Annotated[List[Value], Meta(min_length=1)]], of("{setting: values}")]
    settings: Annotated[Record, of("settings that all cells share")]
    names: Annotated[List[str], of("names of the implementations")] = []


class InferenceHeader(FirstLine, kw_only=True, frozen=True, tag="inference"):
    """Always the first line of an inference.jsonl: one model on a grid of audio lengths and batch sizes."""

    name: Annotated[str, of("name of the configuration")]
    run_id: Annotated[str, of("id of this run alone")] = ""
    config: Annotated[Record, of("the configuration file with its overrides")] = {}
    grid: Annotated[
        Dict[str, List[Union[int, float, bool, str, None]]],
        of("{axis: values}: threads, compile, dtype, quantize, audio_mockup_secs (seconds), batch_sizes"),
    ]

    def __post_init__(self) -> None:
        msgspec.convert(self.grid, _Grid)
        msgspec.convert(self.config, _Config)


class PipelineHeader(FirstLine, kw_only=True, frozen=True, tag="pipeline"):
    """Always the first line of a pipeline.jsonl: the stages of a speech system on examples."""

    name: Annotated[str, of("name of the configuration")]
    run_id: Annotated[str, of("id of this run alone")] = ""
    config: Annotated[Record, of("configuration of the whole and of each stage, as resolved")] = {}
    stages: Annotated[List[str], Meta(min_length=1, description="names of the stages, in their order")]
    examples: Annotated[List[str], Meta(min_length=1, description="names of the examples; each is a job")]


class Call(JobLine, kw_only=True, frozen=True, tag="call"):
    """One call of a model on a batch, or of a stage of a pipeline on an example."""

    total_wall_ns: Annotated[Nanoseconds, of("wall time; on CUDA synchronised at both ends")]
    stage: Annotated[Optional[str], of("stage of a pipeline")] = None
    repeat: Annotated[Optional[int], of("number of the call, from 0")] = None
    warmup: Annotated[bool, of("whether it is only warm-up, and not counted")] = False
    total_event_ns: Annotated[Optional[Duration], of("time between CUDA events; null on a CPU")] = None
    first_ns: Annotated[Optional[Duration], of("time to the first token, of a model that streams")] = None
    minor_faults: Annotated[Optional[int], of("pages that the system mapped during the call")] = None
    foreign_cpu: ForeignCpu = None
    flags: Flags = None


class CallMemory(JobLine, kw_only=True, frozen=True, tag="call_memory"):
    """Peaks of one call above the level before it, without the profiler; null where a counter is not of this device."""

    stage: Annotated[Optional[str], of("stage of a pipeline")] = None
    process_bytes: Annotated[Optional[Bytes], of("resident peak above the level before the call")] = None
    process_peak_bytes: Annotated[Optional[Bytes], of("resident peak of the whole process")] = None
    device_allocated_bytes: Annotated[Optional[Bytes], of("peak of torch's CUDA allocator")] = None
    device_reserved_bytes: Annotated[Optional[Bytes], of("peak of torch's CUDA allocator")] = None
    device_used_bytes: Annotated[Optional[Bytes], of("peak of the whole device, by cudaMemGetInfo")] = None


class ProfiledCalls(JobLine, kw_only=True, frozen=True, tag="profiled_calls"):
    """Under torch.profiler: the last two of six batches."""

    batches: Annotated[Positive, of("number of recorded batches")]
    cpu_us: Annotated[float, Meta(ge=0, description="self time on the CPU of all of them", extra={"unit": "us"})]
    cuda_us: Annotated[float, Meta(ge=0, description="self time on CUDA of all of them", extra={"unit": "us"})]
    cpu_peak_bytes: Annotated[
        Optional[Bytes], of("highest running sum of allocations within a batch, from zero at its beginning")
    ] = None
    cuda_peak_bytes: Annotated[Optional[Bytes], of("the same of the fullest GPU")] = None


class Operations(JobLine, kw_only=True, frozen=True, tag="operations"):
    """The operations of one call of a stage, forward, counted as count_flops.py counts."""

    stage: Annotated[Optional[str], of("stage of a pipeline")] = None
    torch: Annotated[Optional[str], of("version, in the process of the stage")] = None
    macs: Annotated[Count, of("multiply-accumulates of products and convolutions")]
    flops: Annotated[Count, of("all floating-point operations")]
    not_counted: Annotated[List[str], of("operators without a rule")] = []
    instructions: Annotated[
        Optional[Count], of("instructions that the processor's counter saw; null where perf is not allowed")
    ] = None


class OutputCheck(JobLine, kw_only=True, frozen=True, tag="output_check"):
    """The check of a model that is compiled, quantized or in another dtype: its outputs against those of the plain
    one."""

    error: Annotated[float, of("RMS of the difference over RMS of the plain outputs; of symbols the share that differ")]
    tolerance: Annotated[float, of("above it, nothing is timed")]
    ok: Annotated[bool, of("whether the error is within the tolerance")]


#: The types above that no other inherits from: every kind of record, and what records are made of.
_TYPES = [
    kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Struct) and not kind.__subclasses__() and not name.startswith("_")
]
KINDS: Dict[str, Type[Line]] = {str(kind.__struct_config__.tag): kind for kind in _TYPES if issubclass(kind, Line)}
PARTS = [kind for kind in _TYPES if not issubclass(kind, Line)]
Kind: Any = Union[tuple(KINDS.values())]
_DECODER = msgspec.json.Decoder(Kind)
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)


class _Head(Struct):
    record: str
    schema: int = 0


def decoded(line: bytes) -> Optional[Line]:
    """Return the record on a line of a file, None for a kind that only newer versions know.

    Raises ValueError, which says what is wrong with which field.
    """
    if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(line) > DEEPEST:
        raise ValueError(f"more than {DEEPEST} lists and objects in each other")
    try:
        record: Line = _DECODER.decode(line)
        return record
    except msgspec.ValidationError:
        if msgspec.json.decode(line, type=_Head).record not in KINDS:
            return None
        raise
    except msgspec.DecodeError:  # json takes more: half of a surrogate pair in a path on a command line, infinity
        return typed(json.loads(line))


def _depth(line: bytes) -> int:
    """Return how deep the lists and objects of a JSON text are in each other."""
    deepest = depth = 0
    for match in _STRUCTURE.finditer(line):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)  # 0: a text
        deepest = max(deepest, depth)
    return deepest


def typed(record: Record) -> Line:
    """Return a record as its type.  Raises ValueError."""
    line: Line = msgspec.convert(record, Kind)
    return line


def as_written(part: Any) -> Any:
    """Return Structs and dataclasses, and what holds them, as JSON has them; records without the fields that have their
    default."""
    return msgspec.to_builtins(part)


def version(line: bytes) -> int:
    """Return the version of the format, by the first line of a file; 0 where it does not tell."""
    try:
        return msgspec.json.decode(line, type=_Head).schema
    except (ValueError, RecursionError):
        return 0


def distribution(environment: Environment) -> Optional[Distribution]:
    """Return the distribution of a run's shapes, None if it was not recorded or cannot be drawn."""
    try:
        return msgspec.convert(environment.shape_distribution, Distribution)
    except ValueError:
        return None
