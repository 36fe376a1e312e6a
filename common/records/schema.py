"""Define what a run leaves on disk: every kind of record, and every field.

A run of an implementation owns one folder, ``log/<name>-<suffix>/``.  It holds the records
(``results.jsonl``), the traces with their key_averages, and a lock file as long as a process
measures into it.  The folder can be moved, copied or deleted on its own.  A record is one JSON
object on one line; its key ``record`` is its kind.

A sweep is several ordinary runs.  Each combination of the values that it varies is called a cell.
The first line of a run has the `values` of its cell.  A tool that measures no loss (the profile of
a model, say) has a folder for each run, with ``tool.jsonl``: a header, then the records of its
jobs.  What is in these records is defined by the tool.

All these files only grow.  A job that ran again (--resume) appears again: its later records replace
the earlier ones.  Fields with a default may be absent in records of older versions.  Kinds and
fields that a newer version adds are ignored.  The types are checked when a file is read, so no
other code does it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Union, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from rnnt_bench.core import flag_types
from rnnt_bench.core.settings import SETTINGS, Setting, Settings

SCHEMA = 1
FILE_NAME = "results.jsonl"
TOOL_FILE_NAME = "tool.jsonl"

#: A record as it is written.
Record = dict[str, Any]

#: The largest whole number of a record: readers of JSON that keep numbers as float64 round larger
#: ones.
MOST = 2**53
#: The longest time of a record, 30 years: sums and squares of times stay finite.
LONGEST_NS = 1e18

Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Bytes = Annotated[int, Meta(ge=0, le=MOST, extra={"unit": "bytes"})]
PositiveBytes = Annotated[int, Meta(ge=1, le=MOST, extra={"unit": "bytes"})]
Nanoseconds = Annotated[float, Meta(gt=0, le=LONGEST_NS, extra={"unit": "ns"})]
#: The times of repeats, at least one.
Repeats = Annotated[Sequence[Nanoseconds], Meta(min_length=1, extra={"unit": "ns"})]
#: A time that may be 0: of a part that is shorter than the clock can tell.
Duration = Annotated[float, Meta(ge=0, le=LONGEST_NS, extra={"unit": "ns"})]
#: A share from 0 to 1.  Older versions did not clip it, and coarse clocks gave any number.
Share = Annotated[float, Meta(ge=-1, le=1e6)]
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
    """Return the type that a setting has in a record.

    Whole numbers have the bounds of the setting's flag, or begin at 1.  A mapping becomes a dict of
    counts, a tuple a list that is not empty.  Other types stay as they are.

    hint: the type of the setting in Settings."""
    if hint == Mapping[str, int]:
        return dict[str, Count]
    if hint == tuple[str, ...]:
        return Annotated[list[str], Meta(min_length=1)]
    if hint not in (int, int | None):
        return hint
    whole: Any = Positive
    if isinstance(setting.type, flag_types.Whole):
        whole = Annotated[int, Meta(ge=setting.type.low, le=setting.type.high)]
    return whole if hint is int else whole | None


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
            ("find_largest", Any, None),  # a setting of older versions, now `rnnt-bench largest`
        ],
        namespace={
            "__doc__": "The settings of a run, as Settings has them; null for one that its version lacked."
        },
        frozen=True,
        omit_defaults=True,
    )


# What records are made of.


class Machine(Struct, kw_only=True, frozen=True):
    """The computer.

    Attributes:
        cpu: model name
        family, model, stepping: numbers of the processor in /proc/cpuinfo; on Arm implementer, part
          and revision
        vectors: instructions for vectors, by the names of /proc/cpuinfo: "avx2", "avx512f", "asimd"
        caches: bytes of the first CPU's caches by level, without those of instructions: {"L2":
          1048576}
        cores: number of cores that the system counts, physical or logical
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
    """The state of a GPU at one moment, as its driver tells it (NVML, where nvidia-ml-py is
    installed).

    Attributes:
        driver: version of the driver
        sm_mhz, sm_most_mhz: clock of the multiprocessors, and the highest that they can have
        throttled_by: what held the clocks back: "power cap", "idle"
        ecc: whether the memory corrects errors
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
    """An option of a package's function.

    Attributes:
        ours: value that this suite gives
        default: the function's own; "-" where it does not show one
    """

    ours: Any
    default: Any


class Batch(Struct, frozen=True):
    """A batch.  Its cells are those of the lattices: T * (U + 1) for each utterance.

    Attributes:
        index: its place among the batches of the shape file, from 0
        N: number of utterances
        T_max, U_max: frames of the longest utterance, tokens of the longest target
        useful_cells, padded_cells: number of cells without padding, and with it
        frames, tokens: sums of T and of U
        one_symbol_cells: number of cells on paths that emit at most one symbol a frame
        pruned_cells: sum of T * min(S, U + 1) for the prune range S
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
    """Totals over the utterances of the shape file that the run draws from.

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
    """The errors of a loss on a measured batch.  Each error is measured in the scopes loss and
    step, and the larger one is kept.

    Attributes:
        batch: index of the batch
        N, T_max, U_max: number, most frames and most tokens of the utterances that were judged
        loss_error: relative error of the loss, against the float64 oracle
        grad_error: largest error of an element of a tensor's gradient, over the largest magnitude
          in the right gradient; the tensor is the one where this ratio is largest
        loss_tolerance, grad_tolerance: largest error that is allowed; it grows with the length of
          the sums
        reference_error: error of the derivatives of the suite's own lattice with sums in float32,
          at least 2e-5; a loss in float32 may have ten times as much.  Null in other dtypes
        errors: every error that was judged, by what is off, in words
        imprecise: largest error that comes from rounding alone, in sums that cancel to almost 0;
          null for none
        useful_cells: number of lattice cells of the judged utterances
        needed_cells: number of useful cells whose posterior is large enough to change a sum of the
          gradient in the dtype
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
    """The schedule of torch.profiler.

    Attributes:
        wait: steps without the profiler
        warmup: steps with the profiler that are thrown away
        active: steps in the trace
        repeat: number of windows: each has these three phases, and a trace of its own
    """

    wait: Count
    warmup: Count
    active: Count
    repeat: Count


class Stream(Struct, frozen=True):
    """A kernel that reads and writes as fast as it can.

    Attributes:
        kernel: "read"; "write"; "update", which reads two buffers and writes over one of them
        buffer_bytes: size of all buffers that it touches
        moved_bytes: bytes read and written
        ns: duration of each repeat
    """

    kernel: str
    buffer_bytes: PositiveBytes
    moved_bytes: PositiveBytes
    ns: Repeats


class Products(Struct, frozen=True):
    """Products of n x n matrices.

    Attributes:
        ns: duration of each product.  The threads of "loop" make several products at once: then
          the duration of all of them, over their number
        by: "torch" (torch.mm) or "loop" (the suite's own code, with the widest vectors that the
          processor has)
    """

    n: Positive
    ns: Repeats
    by: str = "torch"


# The kinds of records.


class Line(Struct, kw_only=True, omit_defaults=True, tag_field="record"):
    """A record, one line of a file."""


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
        settings: the value of every setting, given or by default
        command: the command line, a list
        started: when the run began, ISO 8601, UTC
        git_revision: revision of this suite
        git_dirty: whether there were uncommitted changes
        code: digest of this suite's files that measure
        machine: the computer on which the command ran
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
    """The first line of a results.jsonl: a run of one implementation.

    Attributes:
        name: the implementation: "k2", or "k2:modified" for a variant
        run_id: the same for the implementations of one run, whose rounds alternate
        suffix: end of the folder's name: "30", "max-frames-10000"
        package: import name of the package that holds the loss
        kind: "exact", "pruned", "by-utterance", or the name of another lattice
        exact: whether it is the transducer loss itself, not an approximation
        values: {setting: value} of the cell, in a sweep
    """

    name: str
    run_id: str = ""
    suffix: str | None = None
    package: str | None = None
    kind: str = "exact"
    exact: bool | None = None
    values: dict[str, Value] = {}


class Environment(JobLine, kw_only=True, tag="environment"):
    """The place, the versions and the batches of a job, one for each job.

    Attributes:
        python, cuda, implementation_version: versions of Python, CUDA and the loss's package
        torch: its version, with the local part: "2.11.0+cpu"
        options: options of the package's functions, by name
        device: "cpu" or "cuda"
        device_name: name of the GPU, or model of the CPU
        threads: number of torch's threads on the CPU
        tf32: whether CUDA may round products to TF32; null on a CPU
        gpu: state of the GPU before the job; null on a CPU, or where it is not known
        l2: "cold" if the L2 cache is written over before each sample, or "warm"; null on a CPU
        denormals: "flush" (subnormal numbers are zero on the CPU) or "keep"
        allocator: "reuse" or "system"; older runs: "system"
        variables: environment variables that tune threads, allocator and TF32
        mkl_as_intel: whether a preloaded library makes MKL take the path that it takes on Intel's
          processors
        transparent_huge_pages: this setting of the kernel
        affinity: CPUs that the process may use: "0-3,8"
        shape_file: its path, relative to the suite if it lies in there
        shape_file_sha256: hex digest of its bytes
        batches: the batches that are measured
        shape_file_totals: totals over all utterances of the shape file
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
    """The largest errors against the float64 oracle, on small batches.  The range of a pruned loss
    is widened to all of U for them.

    Attributes:
        loss_error: relative error of the loss
        grad_error: largest error of a gradient, relative to its largest element
        slope_error: largest distance from 1 of the factor between a tensor's gradient and the
          right one
        loss_tolerance, grad_tolerance, slope_tolerance: what was allowed in the batch with the
          largest error
        tolerance: what is allowed of loss and gradient where sums are short
        ok: whether everything that was judged is right
        differing: "loss", or tensors whose gradient has other bits in a second step
        reached_by_padding: "loss", or tensors whose gradient is not finite where the padding holds
          NaN
        fewest_frames, fewest_targets: shortest utterance that was judged; the loss refuses shorter
          ones, or gets them wrong
        approximation_gap: relative difference of a pruned loss to the exact one, at the configured
          range and logits: the median over single utterances; null for other losses
        approximation_gaps: this gap by the kind of the logits; null where they could not be made
        at_size: errors on the measured batch with the most padded cells; of a loss that loops in
          Python, on that with the fewest.  Null where the small batches were wrong already, or on
          a simulated device
        same_as: the row that runs the same code.  That row was judged on all inputs, this one on
          some of them (docs/method.md); "" for none
        note: a remark for the user, or ""
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
        forward_wall_ns: wall time of forward; null on CUDA, where the host runs ahead
        forward_event_ns, total_event_ns: time between CUDA events; null on a CPU
        stages: time of each stage; between CUDA events on CUDA
        loss: value that the step returned; 1e300 where it is not finite
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
        """Return whether other processes took so much of the CPUs that the time of the step or
        loss cannot be compared."""
        return "loaded" in (self.flags or ())

    @property
    def is_flagged(self) -> bool:
        """Return whether the step or loss ran beside other load, even if it can be compared."""
        return bool(self.flags)

    @property
    def ms(self) -> float:
        """Return `ranked_ns` in milliseconds."""
        return self.ranked_ns / 1e6

    @property
    def ranked_ns(self) -> float:
        """Return the time that tables and ratios are made of.

        It is the wall time of a step, for which training waits.  Of a loss it is the time between
        CUDA events, which is steadier, where there are any."""
        event_ns = self.total_event_ns if self.scope == "loss" else None
        return event_ns or self.total_wall_ns


class Stop(JobLine, kw_only=True, tag="stop"):
    """The end of the samples of a scope in one round, and what was judged then.

    Attributes:
        scope: "loss" or "step"
        loss_error: largest relative error, against float64, of the losses of the last timed step of
          each batch
        grad_error: error of a tensor's gradient in the last timed step, as a share of the
          gradient's 2-norm, estimated by random sums; the largest of all tensors
        seed: seed of the random sums, and of one more batch that is judged; drawn after the last
          sample
        changed: what the loss has changed in its process (threads, default dtype, ...), in words
        leaked_bytes: by how many bytes the memory in use grows with each further sample, once all
          batches were measured; null where there were too few samples, or the system does not tell
    """

    scope: str
    round: int | None = None
    loss_error: float | None = None
    grad_error: float | None = None
    seed: int | None = None
    changed: list[str] = []
    leaked_bytes: Bytes | None = None


class Memory(JobLine, kw_only=True, tag="memory"):
    """The peaks of memory in one step or loss, above what was in use before it; null for counters
    of another device.

    Attributes:
        scope: "loss" or "step"
        batch: index of the batch
        device_allocated_bytes, device_reserved_bytes: by torch's CUDA allocator
        device_used_bytes: by cudaMemGetInfo, once a millisecond: on the whole device, with what
          other allocators and other processes take
        torch_allocated_bytes: by torch's allocator on a CPU; null too for losses that loop in
          Python
        process_bytes: resident memory of the process, on a CPU (VmHWM)
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
        steps: number of steps of the loop, over all windows
        profiler: {record_shapes, with_stack, profile_memory}
        foreign_cpu: other processes' share of the CPUs; null where the loop was too short to tell
        flags: "busy", "loaded": what the load was, see ``sample``; null where it is not known
        note: why there is no trace, or ""; schedule and profiler are null then
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
    """The limits of the device: how fast it reads, writes and multiplies at best.

    They are measured at the begin of some timing rounds.  All implementations of a run have the
    same record.

    Attributes:
        round: number of the timing round; null where they were measured once for the run
        torch, device, device_name, threads, tf32, mkl_as_intel: of the process that measured them,
          see ``environment``
        dtype: dtype of the matrices
        gpu: state of the GPU right after the measurement
        streams: reads and writes of buffers of several sizes; empty where products alone were
          measured, on one thread, to tell whether torch's are slow
        products: products of matrices of the dtype
        flags: "busy", "loaded": what the load was, see ``sample``
        reason: why there are no products, or none by the loop; else ""
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
        round: number of the round, in the timing pass
        reason: why the job did not end well, or ""
        wall_ns: duration of the whole job
        stderr_tail: the last lines of its stderr, where the job failed
        code: digest of each file of the user's own code that the job imported, which is none of a
          package or of this suite
    """

    status: str
    pass_name: str = field(name="pass", default="")
    round: int | None = None
    reason: str | None = ""
    wall_ns: Duration | None = None
    stderr_tail: list[str] | None = None
    code: dict[str, str] = {}


class ToolHeader(FirstLine, kw_only=True, tag="tool"):
    """The first line of a tool.jsonl: a run of a tool that measures no loss.

    Attributes:
        tool: "profile", "inference", "pipeline", ...
        name: name of what is measured, from the configuration
        run_id: of this run alone
        config: the configuration, as the tool reads it again
    """

    tool: str
    name: str
    run_id: str = ""
    config: Record = {}


class Measured(JobLine, kw_only=True, tag="measured"):
    """The result of a job of a tool.

    Attributes:
        value: fields that the tool defines
    """

    value: Any


#: The types above that have no subclass: the kinds of records, and the parts of records.
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
    """The fields that tell whether this version can read a line at all."""

    record: str
    schema: int = 0


def decoded(line: bytes) -> Line | None:
    """Return the record on a line of a file; None for a kind that only newer versions know.

    Raises ValueError for a line that is not JSON, or that has a wrong field, which the message
    names.  Raises RecursionError for a line that is nested too deeply.
    """
    try:
        record: Line = _DECODER.decode(line)
    except msgspec.ValidationError:
        if msgspec.json.decode(line, type=_Head).record not in KINDS:
            return None
        raise
    # msgspec refuses two things that Python's json writes and reads: infinity, and half of a
    # surrogate pair, which a path on a command line may hold.
    except msgspec.DecodeError:
        record = typed(json.loads(line))
    return record


def typed(content: Any, kind: Any = Kind) -> Any:
    """Return the content of a JSON document as a value of the type `kind`, by default a record.
    Raises ValueError, whose message names the wrong field."""
    return msgspec.convert(content, kind)


def as_written(part: Any) -> Any:
    """Return a record, or any value of Structs and dataclasses, in types of JSON: dicts, lists,
    numbers, text.  Records are without the fields that have their default."""
    return msgspec.to_builtins(part)


def recorded(settings: Settings) -> RecordedSettings:
    """Return settings as a record has them."""
    values: RecordedSettings = typed(settings.to_json(), RecordedSettings)
    return values


def version(line: bytes) -> int:
    """Return the version of the format, from the first line of a file; 0 if the line does not
    tell."""
    try:
        return msgspec.json.decode(line, type=_Head).schema
    except (ValueError, RecursionError):
        return 0
