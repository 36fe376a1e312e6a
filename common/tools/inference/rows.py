"""Tells from the records of an inference profile whether the model is faster than real time: grids,
cells, lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rnnt_bench.analysis.metrics import Metric, cells, metric, values
from rnnt_bench.core import statistics, text
from rnnt_bench.present import parts as show
from rnnt_bench.records import schema
from rnnt_bench.tools.configuration import Positive, Seconds, Text, check_list
from rnnt_bench.tools.kept import Answer, Job, Kept, slice_of

TOOL, TITLE = "inference", "Inference: is it faster than real time?"
SKIPPED = "skipped"
#: The further axes, each with the value of the plain model.
PLAIN = {"threads": None, "dtype": "float32"}
#: Timed calls and profiled ones contradict each other where the first take this many times the self
#: time of the others.
CONTRADICTION = 5


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a configuration, as recognisers.load takes it.  python: its interpreter; None
    for the command's."""

    source: Text
    type: Text = "factory"
    arguments: dict[str, Any] = {}
    sample_rate: Positive | None = None
    python: Text | None = None


class Dimensions(Struct, forbid_unknown_fields=True, kw_only=True):
    """The grid of a configuration."""

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
    """A configuration.  variants: values of the further axes; the grid is repeated for each
    combination."""

    pretrained_model: Model
    profiling_dimensions: Dimensions = field(default_factory=Dimensions)
    variants: dict[str, list[Any]] = field(
        default_factory=lambda: {key: [value] for key, value in PLAIN.items()}
    )


class Position(Struct, frozen=True):
    """A cell of the grid: a way to run the model, seconds of each utterance, utterances in the
    batch."""

    threads: int | None
    dtype: str
    seconds: float
    size: int

    @property
    def variant(self) -> str:
        """Return "threads 2, bfloat16"; "" for the plain one."""
        words = [
            f"threads {self.threads}" if self.threads else "",
            self.dtype if self.dtype != "float32" else "",
        ]
        return ", ".join(filter(None, words))

    @property
    def job(self) -> str:
        """Return the name of its job: "32s-x8", "0.5s-x1-threads-2-bfloat16"."""
        words = self.variant.replace(",", "").replace(" ", "-")
        return "-".join(filter(None, (f"{self.seconds:g}s-x{self.size}", words)))


def positions(config: Profile) -> list[Position]:
    """Return all positions of the grid, the batch sizes varying fastest."""
    grid = config.profiling_dimensions
    parts = (config.variants[key] for key in PLAIN)
    return [
        Position(*values)
        for values in itertools.product(*parts, grid.audio_mockup_secs, grid.batch_sizes)
    ]


def is_skipped(position: Position, grid: Dimensions) -> bool:
    """Tell whether a position is in the corner of long audio and large batches, which a triangle
    leaves out."""
    d, b = grid.audio_mockup_secs.index(position.seconds), grid.batch_sizes.index(position.size)
    return (
        grid.triangle_only
        and d > 0
        and b > 0
        and d + b >= (len(grid.audio_mockup_secs) + len(grid.batch_sizes)) / 2
    )


class Request(Struct):
    """Hold a configuration and the cell of it that a job measures."""

    config: Profile
    cell: Position


class Cell(Struct, kw_only=True):
    """The measurements of a cell of the grid.

    wall_ns, first_ns: time of each timed call, and to its first token; busy: calls that ran beside
      other load;
    output_error: how far the outputs are from those in float32, None in float32;
    process_bytes: resident peak of a call above the level before it, as those of the device;
    process_peak_bytes: of the whole process; profiled: batches under torch.profiler; cpu_us,
      cuda_us: their self time together; cpu_peak_bytes,
    cuda_peak_bytes: highest running sum of allocations within one of these."""

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
    """A cell of the grid, and how its job ended."""

    position: Position
    status: str
    reason: str


class Measured(Row):
    """A cell that was measured.

    Attributes:
        n: number of timed calls
        rtf: seconds of computing for a second of audio, the median of calls
        rtf_p20, rtf_p80: its quantiles
        profiled_cpu_rtf, profiled_cuda_rtf: of self time under the profiler
        p50_s, p90_s, p99_s: quantiles of the time of a call
        first_token_s: median of calls that gave one before their end
        streams: speakers that the device keeps up with, at the speed that 90% of calls have
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
    """Return a real-time factor as "4.31E-03"."""
    return "-" if value is None else f"{value:.2E}"


def _of_cell(
    key: str, title: str = "", words: Callable[[Any], str] | None = None, **fields: Any
) -> Metric:
    """Return the metric of a number that the record of a cell has."""
    return metric(key, title, words, f"cell.{key}", **fields)


_ms = partial(metric, scale=1e3, unit="s", better="lower")
_mb = partial(_of_cell, scale=1 / text.MB, unit="bytes", better="lower")
#: The numbers of a cell: keys in CSV and JSON, and columns of its table where they have a title, in
#: this order.
NUMBERS = (
    metric("n"),
    metric("rtf", "RTF", factor, better="lower"),
    metric("rtf_p20", "p20", factor),
    metric("rtf_p80", "p80", factor),
    metric("profiled_cpu_rtf", better="lower", profiled=True),
    metric("profiled_cuda_rtf", better="lower", profiled=True),
    *(_ms(f"p{part}_s", f"p{part} ms") for part in (50, 90, 99)),
    _ms("first_token_s", "first token ms"),
    metric("utterances_per_second", "utterances /s", better="higher"),
    metric("streams", "streams", better="higher"),
    _of_cell("cpu_peak_bytes", unit="bytes", better="lower", profiled=True),
    _of_cell("cuda_peak_bytes", unit="bytes", better="lower", profiled=True),
    _mb("process_bytes", "process MB"),
    _mb("process_peak_bytes", "whole process MB"),
    _mb("device_allocated_bytes", "device MB"),
    _mb("device_used_bytes", "device used MB"),
    _of_cell("output_error", "output error", text.error, better="lower"),
    _of_cell("busy"),
)


def row(position: Position, job: Job) -> Row:
    """Return a cell, with its numbers where it was measured.  Raises ValueError for a record that
    is wrong."""
    if job.status != "ok":
        return Row(position, job.status, job.reason)
    (cell,) = job.of(Cell)
    times = [ns / 1e9 for ns in cell.wall_ns]
    p20, p50, p80, p90, p99 = (
        statistics.quantile(times, part / 100) for part in (20, 50, 80, 90, 99)
    )
    first = [ns / 1e9 for ns in cell.first_ns if ns is not None]
    audio = position.size * position.seconds
    profiled_us = 1e6 * cell.profiled * audio
    return Measured(
        position,
        job.status,
        job.reason,
        cell,
        n=len(times),
        rtf=p50 / audio,
        rtf_p20=p20 / audio,
        rtf_p80=p80 / audio,
        profiled_cpu_rtf=cell.cpu_us / profiled_us,
        profiled_cuda_rtf=cell.cuda_us / profiled_us or None,
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        first_token_s=median(first) if first else None,
        utterances_per_second=position.size / p50,
        streams=position.size * math.floor(position.seconds / p90),
    )


def contradiction(row: Measured) -> float:
    """Return how many times as long the median timed call was as the self time of a profiled
    one."""
    profiled = row.profiled_cpu_rtf + (row.profiled_cuda_rtf or 0)
    return row.rtf / profiled if profiled else 0.0


def _both(
    words: Callable[[float], str], cpu: float | None, cuda: float | None, unit: str = ""
) -> str:
    """Return "5.15E-02 + 3.62E-02" or "0.00 + 1.47 GiB": CPU, and CUDA where it was used."""
    if cpu is None and cuda is None:
        return "-"
    used = [cpu or 0, *([cuda] if cuda else [])]
    return " + ".join(map(words, used)) + unit


def _gib(size: float) -> str:
    return f"{size / text.GIB:.{4 if 0 < size < text.GIB / 100 else 2}f}"


#: Each grid by name: its title, and the function that words a cell.
GRIDS: dict[str, tuple[str, Callable[[Measured], str]]] = {
    "real_time_factors": (
        "Real-time factor: seconds of computing for a second of audio",
        lambda row: factor(row.rtf) + (" busy" if row.cell.busy else ""),
    ),
    "profiled_real_time_factors": (
        "Real-time factor from self time, profiled (the last two of six batches)",
        lambda row: _both(factor, row.profiled_cpu_rtf, row.profiled_cuda_rtf),
    ),
    "memory_peaks": (
        "Memory peak: highest running sum of allocations in a batch, profiled",
        lambda row: _both(_gib, row.cell.cpu_peak_bytes, row.cell.cuda_peak_bytes, " GiB"),
    ),
}


def grid_of(name: str, rows: Sequence[Row], variant: str) -> show.Table:
    """Return a grid: durations below each other, batch sizes side by side; a cell that is not ok
    shows its status."""
    title, words = GRIDS[name]
    lines: dict[float, dict[str, show.Cell]] = {}
    for row in rows:
        seconds = row.position.seconds
        line = lines.setdefault(seconds, {"audio": show.Cell(f"{seconds:g}s")})
        line[f"{row.position.size}"] = show.Cell(
            words(row) if isinstance(row, Measured) else row.status
        )
    columns = [show.Column(head, head != "audio") for head in next(iter(lines.values()))]
    heading = f"{title}{variant and ', '}{variant}; columns: batch sizes"
    return show.Table(name, heading, columns, [list(line.values()) for line in lines.values()])


def total(rows: Sequence[Measured]) -> list[str]:
    """Return the answer in a line: how fast at best, and how many live streams."""
    if not rows:
        return []
    fastest = min(rows, key=lambda row: row.rtf)
    best = max(rows, key=lambda row: row.streams)
    at = [f"{row.position.seconds:g}s x {row.position.size}" for row in (fastest, best)]
    word = "faster" if fastest.rtf < 1 else "slower"
    load = ", beside other load" if fastest.cell.busy else ""
    words = f"{word} than real time: at best a factor of {factor(fastest.rtf)} ({at[0]}{load})"
    if not best.streams:
        return [f"{words}; no real-time stream: no batch ends before its audio does"]
    load = ", beside other load" if best.cell.busy else ""
    return [
        f"{words}; most concurrent real-time streams: {best.streams} ({at[1]}, 90% of calls in time{load})"
    ]


def answer(kept: Kept) -> Answer:
    """Return what a run found out.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Profile)
    dimensions = config.profiling_dimensions
    rows = [
        row(position, Job(SKIPPED) if is_skipped(position, dimensions) else kept.job(position.job))
        for position in positions(config)
    ]
    parts = text.gathered((line.position.variant, line) for line in rows)
    grids = [
        grid_of(name, part, variant if len(parts) > 1 else "")
        for name in GRIDS
        for variant, part in parts.items()
    ]
    listed = [
        {
            "audio": show.Cell(f"{line.position.seconds:g}s", line.position.seconds),
            "batch": show.measured(line.position.size),
            "how": show.Cell(line.position.variant),
            **cells(NUMBERS, line),
            "calls": show.measured(line.n if isinstance(line, Measured) else None),
            "status": show.Cell(line.status),
        }
        for line in rows
        if line.status != SKIPPED
    ]
    measured = [line for line in rows if isinstance(line, Measured)]
    return Answer(
        kept.header.name,
        total=total(measured),
        tables=[*grids, show.tabulated("cells", "Each cell", show.filled(listed))],
        lines=[*kept.machine, *notes(measured, dimensions)],
        failures=[
            f"{line.position.job}: {line.status}: {line.reason}" for line in rows if line.reason
        ],
        rows=[
            {
                "threads": line.position.threads,
                "dtype": line.position.dtype,
                "audio_mockup_secs": line.position.seconds,
                "batch_sizes": line.position.size,
                "status": line.status,
                "reason": line.reason,
                **values(NUMBERS, line),
            }
            for line in rows
        ],
        statuses=[line.status for line in rows if line.status != SKIPPED],
    )


def notes(measured: Sequence[Measured], dimensions: Dimensions) -> Iterator[str]:
    """Yield what the audio was, and why numbers may be off."""
    contradictions = ((contradiction(row), row.position.job) for row in measured)
    ratio, worst = max(contradictions, default=(0.0, ""))
    if ratio > CONTRADICTION:
        yield (
            f"{worst}: RTF is {ratio:.0f} times the profiled one and contradicts it: calls were timed before the "
            "model was warm (give a larger --max-seconds), beside load, or outside of operators"
        )
    if dimensions.example_audio:
        yield f"audio: {dimensions.example_audio}, cut or looped"
    else:
        yield "audio: noise; for a model whose path depends on what is said (a beam search), give example_audio"
    busy = sum(bool(row.cell.busy) for row in measured)
    if busy:
        yield f"{text.count(busy, 'cell')} ran beside other load: times are too long"
    fewest = min((row.n for row in measured), default=0)
    if 0 < fewest < 100:
        yield f"p99 of fewer than 100 calls is close to the slowest of them; here there are {fewest} or more"


SLICE = slice_of(TOOL, TITLE, answer)
