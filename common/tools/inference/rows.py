"""Read the records of an inference profile: is the model faster than real time?

A profile is a grid: durations of audio by batch sizes, repeated for each combination of a number of
threads and a dtype.  Each cell of the grid is measured by a job of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, field

from rnnt_bench.analysis.metrics import Metric, cells, metric, values
from rnnt_bench.core import statistics, text
from rnnt_bench.present import parts as show
from rnnt_bench.records import schema
from rnnt_bench.tools.configuration import Positive, Seconds, Text, check_list
from rnnt_bench.tools.kept import Answer, Job, Kept, slice_of

TOOL, TITLE = "inference", "Inference: is it faster than real time?"
#: Status of a cell that a triangle leaves out.
SKIPPED = "skipped"
#: A timed call contradicts a profiled one if it takes more than this many times its self time.
CONTRADICTION = 5
#: With fewer timed calls than this the 99th percentile is close to the slowest of them.
CALLS_OF_P99 = 100


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a configuration.

    Attributes:
        source: a factory, a folder, or a name on a hub, as `type` says
        type: "factory", "torchaudio", "transformers", or a class of SpeechBrain
        arguments: of the factory, or of the function that loads it
        sample_rate: Hz; None for the model's own
        python: path of the Python in which it runs; None for the command's
    """

    source: Text
    type: Text = "factory"
    arguments: dict[str, Any] = {}
    sample_rate: Positive | None = None
    python: Text | None = None


class Dimensions(Struct, forbid_unknown_fields=True, kw_only=True):
    """The grid of a configuration.

    Attributes:
        audio_mockup_secs: durations of an utterance, seconds
        batch_sizes: utterances of a batch
        example_audio: path of an audio file; None for noise
        triangle_only: leave out the corner of long audio and large batches, see is_skipped
        export_logs: keep the profiler's traces
    """

    audio_mockup_secs: Annotated[list[Seconds], Meta(min_length=1)] = field(
        default_factory=lambda: [1, 2, 5, 8, 32]
    )
    batch_sizes: Annotated[list[Positive], Meta(min_length=1)] = field(
        default_factory=lambda: [1, 4, 8]
    )
    example_audio: Text | None = None
    triangle_only: bool = True
    export_logs: bool = False

    def __post_init__(self) -> None:
        check_list(self.audio_mockup_secs, "audio_mockup_secs")
        check_list(self.batch_sizes, "batch_sizes")


class Profile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A configuration.

    Attributes:
        variants: "threads" and "dtype", each with a list of values; the grid is repeated for each
            combination
    """

    pretrained_model: Model
    profiling_dimensions: Dimensions = field(default_factory=Dimensions)
    variants: dict[str, list[Any]] = field(
        default_factory=lambda: {"threads": [None], "dtype": ["float32"]}
    )


class Position(Struct, frozen=True):
    """The place of a cell in the grid.

    Attributes:
        threads: of torch on the CPU; None for all
        seconds: duration of each utterance
        size: utterances in the batch
    """

    threads: int | None
    dtype: str
    seconds: float
    size: int

    @property
    def shape(self) -> str:
        """Return the duration and the batch size: "32s x 8"."""
        return f"{self.seconds:g}s x {self.size}"

    @property
    def variant(self) -> str:
        """Return how the model runs, "threads 2, bfloat16"; "" for all threads and float32."""
        words = []
        if self.threads:
            words.append(f"threads {self.threads}")
        if self.dtype != "float32":
            words.append(self.dtype)
        return ", ".join(words)

    @property
    def job(self) -> str:
        """Return the name of the cell's job: "32s-x8", "0.5s-x1-threads-2-bfloat16"."""
        words = f"{self.seconds:g}s-x{self.size} {self.variant}"
        return words.strip().replace(",", "").replace(" ", "-")


def positions(config: Profile) -> list[Position]:
    """Return all positions of the grid, the batch sizes varying fastest."""
    grid = config.profiling_dimensions
    return [
        Position(threads, dtype, seconds, size)
        for threads in config.variants["threads"]
        for dtype in config.variants["dtype"]
        for seconds in grid.audio_mockup_secs
        for size in grid.batch_sizes
    ]


def is_skipped(position: Position, grid: Dimensions) -> bool:
    """Tell whether a position of long audio in large batches is left out; False without
    `triangle_only`.

    Rows are the durations and columns the batch sizes, in the order of the configuration.  The
    first row and the first column stay.  Numbers count from 0.  Any other position is left out if
    its row's number plus its column's is at least half of all rows and columns together."""
    row = grid.audio_mockup_secs.index(position.seconds)
    column = grid.batch_sizes.index(position.size)
    half = (len(grid.audio_mockup_secs) + len(grid.batch_sizes)) / 2
    return grid.triangle_only and min(row, column) > 0 and row + column >= half


class Request(Struct):
    """Ask a job to measure a cell of a configuration."""

    config: Profile
    cell: Position


class Cell(Struct, kw_only=True):
    """The measurements of a cell of the grid.

    Attributes:
        wall_ns: time of each timed call
        first_ns: time of each timed call to its first symbol; None where none came before its end
        busy: how many timed calls ran beside other load
        output_error: distance of the outputs from those in float32, see outputs.difference; None in
            float32
        process_bytes, device_allocated_bytes, device_used_bytes: peak of a call above the level
            before it: resident memory, torch's allocator on CUDA, all that the device has in use
        process_peak_bytes: resident peak of the process
        profiled: number of calls under torch.profiler
        cpu_us, cuda_us: self time of all operators in these calls together
        cpu_peak_bytes, cuda_peak_bytes: highest running sum of allocations within one such call;
            None where nothing was allocated on that device
    """

    wall_ns: Annotated[list[int], Meta(min_length=1)]
    first_ns: list[int | None]
    busy: int
    output_error: float | None = None
    process_bytes: int | None = None
    process_peak_bytes: int | None = None
    device_allocated_bytes: int | None = None
    device_used_bytes: int | None = None
    profiled: int = 1
    cpu_us: float = 0.0
    cuda_us: float = 0.0
    cpu_peak_bytes: int | None = None
    cuda_peak_bytes: int | None = None


class Row(Struct):
    """A cell of the grid, and how its job ended.

    Attributes:
        status: of the job; SKIPPED for a cell that a triangle leaves out
        reason: why the job has this status; "" where none is recorded
    """

    position: Position
    status: str
    reason: str


class Measured(Row):
    """A cell that was measured.

    Attributes:
        n: number of timed calls
        rtf: real-time factor, seconds of computing for a second of audio; the median of calls
        rtf_p20, rtf_p80: quantiles of the real-time factor
        profiled_cpu_rtf, profiled_cuda_rtf: real-time factor by self time under torch.profiler;
            None where CUDA was not used
        p50_s, p90_s, p99_s: quantiles of the time of a call
        first_token_s: time to the first symbol, the median of calls that gave one before their end
        streams: how many live streams the device keeps up with, in nine calls of ten
    """

    cell: Cell
    n: int
    rtf: float
    rtf_p20: float
    rtf_p80: float
    profiled_cpu_rtf: float
    profiled_cuda_rtf: float | None
    p50_s: float
    p90_s: float
    p99_s: float
    first_token_s: float | None
    utterances_per_second: float
    streams: int


def factor(value: float | None) -> str:
    """Return the text of a real-time factor, "4.31E-03"; "-" for None."""
    return "-" if value is None else f"{value:.2E}"


def _recorded(
    key: str, title: str = "", shown: Callable[[Any], str] | None = None, **fields: Any
) -> Metric:
    """Return the metric of a number that the record of a cell has under `key`."""
    return metric(key, title, shown, f"cell.{key}", **fields)


#: Make metrics of seconds that are shown in ms, and of recorded bytes that are shown in MB.
_ms = partial(metric, scale=1e3, unit="s", better="lower")
_mb = partial(_recorded, scale=1 / text.MB, unit="bytes", better="lower")
#: The numbers of a cell, in order: keys in CSV and JSON; columns of a table where they have a title.
NUMBERS = (
    metric("rtf", "RTF", factor, better="lower"),
    metric("rtf_p20", "p20", factor),
    metric("rtf_p80", "p80", factor),
    metric("profiled_cpu_rtf", better="lower", profiled=True),
    metric("profiled_cuda_rtf", better="lower", profiled=True),
    _ms("p50_s", "p50 ms"),
    _ms("p90_s", "p90 ms"),
    _ms("p99_s", "p99 ms"),
    _ms("first_token_s", "first token ms"),
    metric("utterances_per_second", "utterances /s", better="higher"),
    metric("streams", "streams", better="higher"),
    _recorded("cpu_peak_bytes", unit="bytes", better="lower", profiled=True),
    _recorded("cuda_peak_bytes", unit="bytes", better="lower", profiled=True),
    _mb("process_bytes", "process MB"),
    _mb("process_peak_bytes", "whole process MB"),
    _mb("device_allocated_bytes", "device MB"),
    _mb("device_used_bytes", "device used MB"),
    _recorded("output_error", "output error", text.error, better="lower"),
    _recorded("busy"),
    metric("n", "calls"),
)


def row_of(position: Position, job: Job) -> Row:
    """Return the row of the cell at `position`; a Measured where its job ended well.

    Raises ValueError for a record that is wrong."""
    if job.status != "ok":
        return Row(position, job.status, job.reason)
    (cell,) = job.of(Cell)
    times = [ns / 1e9 for ns in cell.wall_ns]
    p20, p50, p80, p90, p99 = (
        statistics.quantile(times, part) for part in (0.2, 0.5, 0.8, 0.9, 0.99)
    )
    first_symbols = [ns / 1e9 for ns in cell.first_ns if ns is not None]
    audio = position.size * position.seconds  # seconds of audio in a call
    profiled_audio_us = 1e6 * cell.profiled * audio  # of all calls under torch.profiler together
    return Measured(
        position,
        job.status,
        job.reason,
        cell,
        n=len(times),
        rtf=p50 / audio,
        rtf_p20=p20 / audio,
        rtf_p80=p80 / audio,
        profiled_cpu_rtf=cell.cpu_us / profiled_audio_us,
        profiled_cuda_rtf=cell.cuda_us / profiled_audio_us or None,  # 0: CUDA was not used
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        first_token_s=median(first_symbols) if first_symbols else None,
        utterances_per_second=position.size / p50,
        # A live stream brings `seconds` of audio in as many seconds.  In that time the device
        # computes floor(seconds / p90) batches one after the other, of `size` streams each.
        streams=position.size * math.floor(position.seconds / p90),
    )


def contradiction(row: Measured) -> float:
    """Return the median time of a timed call over the self time of a profiled call.

    Return 0 where the profile has no self time."""
    profiled = row.profiled_cpu_rtf + (row.profiled_cuda_rtf or 0)
    return row.rtf / profiled if profiled else 0.0


def _cpu_and_cuda(
    words: Callable[[float], str], cpu: float | None, cuda: float | None, unit: str = ""
) -> str:
    """Return the text of the CPU's number and of CUDA's: "0.00 + 1.47 GiB".

    CUDA's number is left out if it is 0 or None.  A CPU's number that is None counts as 0.  Return
    "-" where both are None.

    words: returns the text of one number; unit: stands at the end"""
    if cpu is None and cuda is None:
        return "-"
    shown = words(cpu or 0)
    if cuda:
        shown += f" + {words(cuda)}"
    return shown + unit


def _gib(size: float) -> str:
    """Return bytes in GiB with two decimals; with four below 0.01 GiB."""
    decimals = 4 if 0 < size < text.GIB / 100 else 2
    return f"{size / text.GIB:.{decimals}f}"


class Grid(NamedTuple):
    """A table of durations by batch sizes.  words: returns the text of a cell."""

    title: str
    words: Callable[[Measured], str]


#: The tables of a profile, by name.
GRIDS = {
    "real_time_factors": Grid(
        "Real-time factor: seconds of computing for a second of audio",
        lambda row: factor(row.rtf) + (" busy" if row.cell.busy else ""),
    ),
    "profiled_real_time_factors": Grid(
        "Real-time factor from self time, profiled (the last two of six batches)",
        lambda row: _cpu_and_cuda(factor, row.profiled_cpu_rtf, row.profiled_cuda_rtf),
    ),
    "memory_peaks": Grid(
        "Memory peak: highest running sum of allocations in a batch, profiled",
        lambda row: _cpu_and_cuda(_gib, row.cell.cpu_peak_bytes, row.cell.cuda_peak_bytes, " GiB"),
    ),
}


def grid_table(name: str, rows: Sequence[Row], variant: str) -> show.Table:
    """Return a table of GRIDS: a row for each duration, a column for each batch size.

    A cell that was not measured shows its status.  variant: stands in the title."""
    grid = GRIDS[name]
    table = []
    for seconds, of_duration in text.gathered((row.position.seconds, row) for row in rows).items():
        line = {"audio": show.Cell(f"{seconds:g}s")}
        for row in of_duration:
            words = grid.words(row) if isinstance(row, Measured) else row.status
            line[str(row.position.size)] = show.Cell(words)
        table.append(line)
    # All lines have the keys of the first: `answer` gives skipped cells a row too.
    columns = [show.Column(head, numeric=head != "audio") for head in table[0]]
    title = f"{grid.title}, {variant}" if variant else grid.title
    return show.Table(
        name, f"{title}; columns: batch sizes", columns, [list(line.values()) for line in table]
    )


def total(rows: Sequence[Measured]) -> list[str]:
    """Return the answer in a line: the best real-time factor, and the most live streams; [] without
    rows."""
    if not rows:
        return []
    fastest = min(rows, key=lambda row: row.rtf)
    most = max(rows, key=lambda row: row.streams)
    word = "faster" if fastest.rtf < 1 else "slower"
    load = ", beside other load" if fastest.cell.busy else ""
    speed = (
        f"{word} than real time: at best a factor of {factor(fastest.rtf)} "
        f"({fastest.position.shape}{load})"
    )
    if not most.streams:
        return [f"{speed}; no real-time stream: no batch ends before its audio does"]
    load = ", beside other load" if most.cell.busy else ""
    return [
        f"{speed}; most concurrent real-time streams: {most.streams} "
        f"({most.position.shape}, 90% of calls in time{load})"
    ]


def answer(kept: Kept) -> Answer:
    """Return the answer of a run.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Profile)
    dimensions = config.profiling_dimensions
    rows = []
    for position in positions(config):
        is_left_out = is_skipped(position, dimensions)
        rows.append(row_of(position, Job(SKIPPED) if is_left_out else kept.job(position.job)))
    asked = [row for row in rows if row.status != SKIPPED]
    measured = [row for row in rows if isinstance(row, Measured)]
    variants = text.gathered((row.position.variant, row) for row in rows)
    grids = [
        grid_table(name, of_variant, variant if len(variants) > 1 else "")
        for name in GRIDS
        for variant, of_variant in variants.items()
    ]
    return Answer(
        kept.header.name,
        total=total(measured),
        tables=[*grids, _table_of_cells(asked)],
        lines=[*kept.machine, *notes(measured, dimensions)],
        failures=[f"{row.position.job}: {row.status}: {row.reason}" for row in rows if row.reason],
        rows=[
            {
                "threads": row.position.threads,
                "dtype": row.position.dtype,
                "audio_mockup_secs": row.position.seconds,
                "batch_sizes": row.position.size,
                "status": row.status,
                "reason": row.reason,
                **values(NUMBERS, row),
            }
            for row in rows
        ],
        statuses=[row.status for row in asked],
    )


def _table_of_cells(rows: Sequence[Row]) -> show.Table:
    """Return a table with a row for each cell of the grid, and the metrics NUMBERS as columns."""
    table = [
        {
            "audio": show.Cell(f"{row.position.seconds:g}s", row.position.seconds),
            "batch": show.measured(row.position.size),
            "how": show.Cell(row.position.variant),
            **cells(NUMBERS, row),
            "status": show.Cell(row.status),
        }
        for row in rows
    ]
    return show.tabulated("cells", "Each cell", show.filled(table))


def notes(measured: Sequence[Measured], dimensions: Dimensions) -> Iterator[str]:
    """Yield lines below the tables: why numbers may be off, and which audio was used."""
    worst = max(measured, key=contradiction, default=None)
    if worst and contradiction(worst) > CONTRADICTION:
        yield (
            f"{worst.position.job}: RTF is {contradiction(worst):.0f} times the profiled one and contradicts it: calls "
            "were timed before the model was warm (give a larger --max-seconds), beside load, or outside of operators"
        )
    if dimensions.example_audio:
        yield f"audio: {dimensions.example_audio}, cut or looped"
    else:
        yield "audio: noise; for a model whose path depends on what is said (a beam search), give example_audio"
    busy = sum(bool(row.cell.busy) for row in measured)
    if busy:
        yield f"{text.count(busy, 'cell')} ran beside other load: times are too long"
    fewest = min((row.n for row in measured), default=CALLS_OF_P99)
    if fewest < CALLS_OF_P99:
        yield (
            f"p99 of fewer than {CALLS_OF_P99} calls is close to the slowest of them; "
            f"here there are {fewest} or more"
        )


SLICE = slice_of(TOOL, TITLE, answer)
