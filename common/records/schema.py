"""What a run leaves on disk: every kind of record, and every field.

A run of an implementation owns one folder, ``log/<name>-<suffix>/``, with its records
(``results.jsonl``), its traces and their key_averages, and, as long as a process measures into it,
a lock file.  The folder can be moved, copied or deleted on its own.  A record is one JSON object on
one line; its key ``record`` is its kind.

A sweep is ordinary runs whose settings differ: the first line of each has the `values` of its cell.
A tool owns one folder for each run, with ``tool.jsonl``: a header, then the records of its jobs,
whose content is the tool's own.

All these files only grow.  A job that ran again (--resume) appears again: its later records replace
the earlier ones. Fields with a default are absent in records of older versions; what a newer
version adds, kinds and fields, is ignored. The types are checked when a file is read, so no other
code does it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from rnnt_bench.core import flag_types
from rnnt_bench.core.settings import SETTINGS, Setting, Settings

SCHEMA = 1
FILE_NAME = "results.jsonl"
TOOL_FILE_NAME = "tool.jsonl"

#: A record as it is written.
Record = dict[str, Any]

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Bytes = Annotated[int, Meta(ge=0, le=2**53, extra={"unit": "bytes"})]
Nanoseconds = Annotated[float, Meta(gt=0, le=1e18, extra={"unit": "ns"})]
Duration = Annotated[float, Meta(ge=0, le=1e18, extra={"unit": "ns"})]
Share = Annotated[float, Meta(ge=-1, le=1e6)]
#: Share of the CPUs that other processes used.
ForeignCpu = Annotated[
    Share | None, Meta(description="other processes' share of the CPUs that it may use, 0 to 1")
]
Flags = Annotated[
    list[str] | None,
    Meta(
        description='"busy": it ran beside other load; "loaded" too: beside so much that losses may change places'
    ),
]
#: Value of a swept setting.
Value = int | float | bool | str | None


def _type_of(setting: Setting, hint: Any) -> Any:
    """Return the type that a setting has in a record; hint: its type in Settings."""
    if hint == Mapping[str, int]:
        return dict[str, Count]
    if hint is int or int in get_args(hint):
        bounds = (
            setting.type
            if isinstance(setting.type, flag_types.Whole)
            else flag_types.Whole(1, 2**53)
        )
        whole = Annotated[int, Meta(ge=bounds.low, le=bounds.high)]
        return whole if hint is int else whole | None
    if hint == tuple[str, ...]:
        return Annotated[list[str], Meta(min_length=1)]
    return hint


if TYPE_CHECKING:
    RecordedSettings = Settings
else:
    RecordedSettings = msgspec.defstruct(
        "RecordedSettings",
        [
            *(
                (key, _type_of(SETTINGS[key], hint), None)
                for key, hint in get_type_hints(Settings).items()
            ),
            ("find_largest", Any, None),  # of searches before they were a tool's
        ],
        namespace={
            "__doc__": "The settings of a run, as Settings has them; null where its version did not have one."
        },
        frozen=True,
        omit_defaults=True,
    )


# What records are made of.


class Machine(Struct, kw_only=True, frozen=True):
    """The computer.

    Attributes:
        cpu: model name
        family, model, stepping: of the processor, as /proc/cpuinfo has them; on Arm implementer,
          part and revision
        vectors: instructions for vectors, by the names of /proc/cpuinfo: "avx2", "avx512f", "asimd"
        caches: bytes of the first CPU's caches by level, without those of instructions: {"L2":
          1048576}
        cores: physical or logical ones, as the system counts them
        os: system, release and processor, as platform.platform() has them
        python: version of the command's Python
    """

    cpu: str | None = None
    family: Count | None = None
    model: Count | None = None
    stepping: Count | None = None
    vectors: list[str] = []
    caches: dict[str, Bytes] = {}
    cores: Positive | None = None
    memory_bytes: Bytes | None = None
    os: str | None = None
    python: str | None = None


class Gpu(Struct, kw_only=True, frozen=True):
    """The driver's account of a GPU when it was read (NVML, where nvidia-ml-py is installed).

    Attributes:
        driver: its version
        sm_most_mhz: highest clock
        throttled_by: what held the clocks back at that moment: "power cap", "idle"
        ecc: whether its memory corrects errors
    """

    uuid: str | None = None
    driver: str | None = None
    sm_mhz: Count | None = None
    sm_most_mhz: Count | None = None
    memory_mhz: Count | None = None
    power_cap_watts: float | None = None
    celsius: int | None = None
    throttled_by: list[str] | None = None
    ecc: bool | None = None


class Option(Struct, frozen=True):
    """An option of a package's function: the value that this suite gives, and the function's own
    ("-": hidden)."""

    ours: Any
    default: Any


class Batch(Struct, frozen=True):
    """A batch; cells are those of the lattice, T * (U + 1).

    Attributes:
        index: among the batches of the shape file
        N: number of utterances
        T_max, U_max: of the longest utterance and target
        useful_cells, padded_cells: without padding, and with it
        frames, tokens: sum of T, of U
        one_symbol_cells: met by paths of at most one symbol a frame
        pruned_cells: T * min(S, U + 1) for the prune range S
    """

    index: int
    N: Positive
    T_max: Positive
    U_max: Count
    useful_cells: Positive
    padded_cells: Positive
    frames: Positive | None = None
    tokens: Count | None = None
    one_symbol_cells: Count | None = None
    pruned_cells: Positive | None = None


class Totals(Struct, frozen=True):
    """Totals of all utterances of the shape file, as the run varied them.

    Attributes:
        frames: sum of T
        T_max: frames of the longest utterance
        mean_log_useful_share: mean over all batches of log(useful cells / padded cells)
    """

    utterances: Positive
    frames: Positive
    T_max: Positive
    batches: Positive | None = None
    mean_log_useful_share: float | None = None


class AtSize(Struct, kw_only=True):
    """Errors on a measured batch, of both scopes.

    Attributes:
        batch: its index
        N, T_max, U_max: of its utterances that were measured, as of ``Batch``
        loss_error: relative, against the float64 oracle
        grad_error: largest difference over largest magnitude, of the tensor where that is largest
        loss_tolerance, grad_tolerance: what was allowed of these, which grows with the length of
          the sums
        reference_error: that of a lattice whose sums are float32, 2e-5 at least; a loss in float32
            has no more than ten times as much.  Null in other dtypes
        errors: every error that was judged, by what is off, in words
        imprecise: the largest error that only the rounding of sums explains which cancel to almost
          0, or null
        useful_cells: cells of the judged utterances
        needed_cells: of these, those whose posterior a gradient's sums in the dtype can tell from 0
        differing: "loss", or tensors whose gradient has other bits in a second step
        ok: whether every error is within its tolerance
    """

    batch: int
    N: int
    T_max: int
    U_max: int
    loss_error: float
    grad_error: float
    grad_tolerance: float
    loss_tolerance: float | None = None
    reference_error: float | None = None
    errors: dict[str, float] = {}
    imprecise: float | None = None
    useful_cells: Positive | None = None
    needed_cells: Count | None = None
    differing: list[str] = []
    ok: bool | None = None


class Schedule(Struct, frozen=True):
    """Steps of the profiler: without it, thrown away, in the trace; windows, each with a trace of
    its own."""

    wait: Count
    warmup: Count
    active: Count
    repeat: Count


class Stream(Struct, frozen=True):
    """A kernel that reads and writes as fast as it can.

    Attributes:
        kernel: "update": two reads and a write over one of them; "read"; "write"
        buffer_bytes: of all buffers that it touches
        moved_bytes: read and written
        ns: duration of each repeat
    """

    kernel: str
    buffer_bytes: Annotated[int, Meta(ge=1, le=2**53, extra={"unit": "bytes"})]
    moved_bytes: Annotated[int, Meta(ge=1, le=2**53, extra={"unit": "bytes"})]
    ns: Annotated[Sequence[Nanoseconds], Meta(min_length=1, extra={"unit": "ns"})]


class Products(Struct, frozen=True):
    """Products of n x n matrices.

    Attributes:
        ns: duration of each; of the loop's, of as many at once as there are threads, over their
          number
        by: "torch" (torch.mm) or "loop" (the suite's own, with the widest vectors that the
          processor has)
    """

    n: Positive
    ns: Annotated[Sequence[Nanoseconds], Meta(min_length=1, extra={"unit": "ns"})]
    by: str = "torch"


# The kinds of records.


class Line(Struct, kw_only=True, omit_defaults=True, tag_field="record"):
    """A record."""


class JobLine(Line, kw_only=True):
    """A record of a job.

    Attributes:
        job: "correctness", "timing-1", ..., "memory", "trace"
    """

    job: str = ""


class FirstLine(Line, kw_only=True):
    """The fields of the first line of every file.

    Attributes:
        schema: version of this format
        settings: every flag as resolved
        command: the command line, a list
        started: ISO 8601, UTC
        git_revision, git_dirty: of this suite; whether there were uncommitted changes
        code: digest of this suite's files that measure
        machine: on which the command ran
    """

    schema: int = SCHEMA
    settings: RecordedSettings = RecordedSettings()
    command: Any = None
    started: str = ""
    git_revision: str | None = None
    git_dirty: bool | None = None
    code: str | None = None
    machine: Machine = Machine()


class Header(FirstLine, kw_only=True, tag="run"):
    """Always the first line of a run.

    Attributes:
        name: of the implementation: "k2", or "k2:modified" for a variant
        run_id: shared by the implementations of one run: their rounds pair
        suffix: of the folder: "30", "max-frames-10000"
        package: that holds the loss, by its import name
        kind: exact, the name of another lattice, or pruned
        exact: whether it is the transducer loss itself, not an approximation
        values: in a sweep: {setting: value} of the cell
    """

    name: str
    run_id: str = ""
    suffix: str | None = None
    package: str | None = None
    kind: str = "exact"
    exact: bool | None = None
    values: dict[str, Value] = {}


class Environment(JobLine, kw_only=True, tag="environment"):
    """Once for each job: where it ran and on what.

    Attributes:
        python, cuda, implementation_version: versions, the last of the package
        torch: version, with the local part
        options: of the package's functions, by name
        device: "cpu" or "cuda"
        device_name: name of the GPU, or model of the CPU
        threads: torch's on the CPU
        tf32: whether CUDA may round products to TF32; null on a CPU
        gpu: state of the GPU before the job; null on a CPU, or where it is not known
        l2: "cold": written over before each sample; "warm"; null on a CPU
        denormals: "flush" (subnormal numbers are zero on the CPU) or "keep"
        allocator: "reuse" or "system"; older runs: "system"
        variables: environment variables that tune threads, allocator and TF32
        mkl_as_intel: whether a preloaded library makes MKL take the path that it takes on Intel's
          processors
        transparent_huge_pages: setting of the kernel
        affinity: CPUs that the process may use: "0-3,8"
        shape_file: path, relative to the suite where it lies in there
        shape_file_sha256: hex digest of its bytes
        batches: the measured ones
        shape_file_totals: over all its utterances
        warnings: lines for the user
    """

    python: str | None = None
    torch: str | None = None
    implementation_version: str | None = None
    options: dict[str, Option] = {}
    device: str | None = None
    device_name: str | None = None
    cuda: str | None = None
    threads: Positive | None = None
    tf32: bool | None = None
    gpu: Gpu | None = None
    l2: str | None = None
    denormals: str | None = None
    allocator: str | None = None
    variables: dict[str, str] = {}
    mkl_as_intel: bool | None = None
    transparent_huge_pages: str | None = None
    affinity: str | None = None
    shape_file: str | None = None
    shape_file_sha256: str | None = None
    batches: list[Batch] | None = None
    shape_file_totals: Totals | None = None
    warnings: list[str] = []


class Correctness(JobLine, kw_only=True, tag="correctness"):
    """The largest relative errors against the float64 oracle, on small batches; of a pruned loss
    with its range widened to all of U.

    Attributes:
        loss_error: relative
        grad_error: largest error of a gradient, relative to its largest element
        slope_error: largest difference to 1 of a factor between a tensor's gradient and the right
          one
        loss_tolerance, grad_tolerance, slope_tolerance: what was allowed of these in the batch that
          has them
        tolerance: of loss and gradient where sums are short
        ok: whether everything that was judged is right
        differing: "loss", or tensors whose gradient has other bits in a second step
        reached_by_padding: "loss", or tensors whose gradient is not finite where the padding holds
          NaN
        fewest_frames, fewest_targets: shorter utterances were not judged, which it refuses or gets
          wrong
        approximation_gap: relative difference of a pruned loss to the exact one, at the configured
            range and logits: the median of single utterances; else null
        approximation_gaps: this gap by the kind of its logits; null where they could not be made
        at_size: of the measured batch with the most padded cells
            utterances; null where the small batches were wrong already, or simulated
        same_as: the row of the same code that was asked what this one was not (docs/method.md); ""
          for none
        note: what else is to be known, else ""
    """

    loss_error: float | None = None
    grad_error: float | None = None
    slope_error: float | None = None
    loss_tolerance: float | None = None
    grad_tolerance: float | None = None
    slope_tolerance: float | None = None
    tolerance: float | None = None
    ok: bool | None = None
    differing: list[str] = []
    reached_by_padding: list[str] = []
    fewest_frames: int = 1
    fewest_targets: int = 0
    approximation_gap: float | None = None
    approximation_gaps: dict[str, float | None] | None = None
    at_size: AtSize | None = None
    same_as: str = ""
    note: str = ""


class Sample(JobLine, kw_only=True, tag="sample"):
    """One timed step or loss.

    Attributes:
        scope: "loss" or "step"
        round: number of the fresh process, from 1
        batch: its index
        total_wall_ns: wall time; on CUDA synchronised at both ends
        repeat: number of the pass over the round's batches, from 0
        warmup: whether it is only warm-up, and not counted
        forward_wall_ns: null on CUDA, where the host runs ahead
        forward_event_ns, total_event_ns: time between CUDA events; null on a CPU
        stages: time of each stage, of CUDA events on CUDA
        loss: what the step returned; 1e300 where it is not finite
    """

    scope: str
    round: int
    batch: int
    total_wall_ns: Nanoseconds
    repeat: int | None = None
    warmup: bool = False
    forward_wall_ns: Duration | None = None
    forward_event_ns: Duration | None = None
    total_event_ns: Duration | None = None
    stages: dict[str, Duration] | None = None
    foreign_cpu: ForeignCpu = None
    flags: Flags = None
    loss: float | None = None

    @property
    def beside_load(self) -> bool:
        """Return whether others took so much of the CPU that its time cannot be compared."""
        return "loaded" in (self.flags or ())

    @property
    def is_flagged(self) -> bool:
        """Return whether it ran beside other load."""
        return bool(self.flags)

    @property
    def ms(self) -> float:
        return self.ranked_ns / 1e6

    @property
    def ranked_ns(self) -> float:
        """Return the time that tables and ratios are made of: on CUDA the events of a loss, which
        are steadier, and the wall time of a step, which training waits for."""
        return (
            self.total_event_ns
            if self.scope == "loss" and self.total_event_ns
            else self.total_wall_ns
        )


class Stop(JobLine, kw_only=True, tag="stop"):
    """The end of the samples of a scope in one round, and what was judged then.

    Attributes:
        scope: "loss" or "step"
        loss_error: largest relative error of the losses of the last timed step of each batch
          against float64
        grad_error: error of the gradient of the last timed step, of the leaf where that is largest,
            as a share of its length, by random sums
        seed: of the random sums and of the batch of the further question, drawn after the last
          sample
        changed: what the loss has changed of its process (threads, default dtype, ...), in words
        leaked_bytes: how much more memory was in use after each sample, from the third on; null for
          too few samples
    """

    scope: str
    round: int | None = None
    loss_error: float | None = None
    grad_error: float | None = None
    seed: int | None = None
    changed: list[str] = []
    leaked_bytes: Bytes | None = None


class Memory(JobLine, kw_only=True, tag="memory"):
    """Peaks of one step or loss above the baseline before it; null where a counter is not of this
    device.

    Attributes:
        scope: "loss" or "step"
        batch: its index
        device_allocated_bytes, device_reserved_bytes: of torch's CUDA allocator
        device_used_bytes: of the whole device by cudaMemGetInfo, once a millisecond: allocators
            beside torch's, and others, too
        torch_allocated_bytes: torch's own allocations on a CPU; null too for losses that loop in
          Python
        process_bytes: of the resident process, on a CPU (VmHWM)
    """

    scope: str
    batch: int
    device_allocated_bytes: Bytes | None = None
    device_reserved_bytes: Bytes | None = None
    device_used_bytes: Bytes | None = None
    torch_allocated_bytes: Bytes | None = None
    process_bytes: Bytes | None = None


class Trace(JobLine, kw_only=True, tag="trace"):
    """The files that the trace pass left in the folder.

    Attributes:
        files: names of traces, .json or .json.gz
        steps: of the loop, over all windows
        profiler: {record_shapes, with_stack, profile_memory}
        foreign_cpu, flags: as of ``sample``; null where the loop was too short to tell
        note: why there is no trace, else ""; schedule and profiler are null then
        warnings: lines for the user
    """

    files: list[str]
    steps: int | None = None
    schedule: Schedule | None = None
    profiler: Any = None
    foreign_cpu: Share | None = None
    flags: list[str] | None = None
    note: str | None = ""
    warnings: list[str] = []


class Limits(Line, kw_only=True, tag="limits"):
    """The best that the device does: in each run that was timed one at the begin of some rounds, on
    the device of the round; the same in all implementations of the run.

    Attributes:
        round: of the timing pass; null where it was measured once for the run
        torch, device, device_name, threads, tf32, mkl_as_intel: as in ``environment``
        dtype: of the matrices
        gpu: state of the GPU right after the measurement
        streams: reads and writes of buffers of several sizes; none where products alone were
            measured, on one thread, to tell whether torch's are slow
        products: of matrices of the dtype
        flags: as of ``sample``
        reason: why there are no products, or none by the loop, else ""
    """

    round: int | None = None
    torch: str | None = None
    device: str | None = None
    device_name: str | None = None
    threads: int | None = None
    dtype: str | None = None
    tf32: bool | None = None
    mkl_as_intel: bool | None = None
    gpu: Gpu | None = None
    streams: list[Stream] = []
    products: list[Products] = []
    foreign_cpu: ForeignCpu = None
    flags: list[str] | None = None
    reason: str | None = ""


class Status(JobLine, kw_only=True, tag="status"):
    """The last line of each job.

    Attributes:
        status: ok, oom, unsupported, missing, error, timeout or interrupted
        pass_name: "correctness", "timing", ...
        round: in the timing pass
        reason: why it did not end well, else ""
        wall_ns: duration of the whole job
        stderr_tail: where the job failed: the last lines of its stderr
        code: digest of each file of code that its process imported, but for those of packages and
          of this suite
    """

    status: str
    pass_name: str = field(name="pass", default="")
    round: int | None = None
    reason: str | None = ""
    wall_ns: Duration | None = None
    stderr_tail: list[str] | None = None
    code: dict[str, str] = {}


class ToolHeader(FirstLine, kw_only=True, tag="tool"):
    """Always the first line of a tool.jsonl: a run of a tool that measures no loss.

    Attributes:
        tool: "profile", "inference" or "pipeline"
        name: of what is measured, from its configuration
        run_id: of this run alone
        config: the configuration, as the tool reads it again
    """

    tool: str
    name: str
    run_id: str = ""
    config: Record = {}


class Measured(JobLine, kw_only=True, tag="measured"):
    """A job of a tool: its result, in fields of the tool's own type."""

    value: Any


#: The types above that no other inherits from: every kind of record, and what records are made of.
_TYPES = [
    kind
    for name, kind in list(globals().items())
    if isinstance(kind, type)
    and issubclass(kind, Struct)
    and not kind.__subclasses__()
    and not name.startswith("_")
]
KINDS: dict[str, type[Line]] = {
    str(kind.__struct_config__.tag): kind for kind in _TYPES if issubclass(kind, Line)
}
PARTS = [kind for kind in _TYPES if not issubclass(kind, Line)]
Kind: Any = Union[tuple(KINDS.values())]  # noqa: UP007
_DECODER = msgspec.json.Decoder(Kind)


class _Head(Struct):
    record: str
    schema: int = 0


def decoded(line: bytes) -> Line | None:
    """Return the record on a line of a file, None for a kind that only newer versions know.

    Raises ValueError, which says what is wrong with which field, and RecursionError.
    """
    try:
        record: Line = _DECODER.decode(line)
    except msgspec.ValidationError:
        if msgspec.json.decode(line, type=_Head).record not in KINDS:
            return None
        raise
    # json takes more: half of a surrogate pair in a path on a command line, infinity
    except msgspec.DecodeError:
        record = typed(json.loads(line))
    return record


def typed(content: Any, kind: Any = Kind) -> Any:
    """Return what JSON holds as a Struct, or a list of Structs; by default a record.  Raises
    ValueError, which says which field is wrong."""
    return msgspec.convert(content, kind)


def as_written(part: Any) -> Any:
    """Return Structs and dataclasses, and what holds them, as JSON has them; records without the
    fields that have their default."""
    return msgspec.to_builtins(part)


def recorded(settings: Settings) -> RecordedSettings:
    """Return settings as a record has them."""
    values: RecordedSettings = typed(settings.to_json(), RecordedSettings)
    return values


def version(line: bytes) -> int:
    """Return the version of the format, by the first line of a file; 0 where it does not tell."""
    try:
        return msgspec.json.decode(line, type=_Head).schema
    except (ValueError, RecursionError):
        return 0
