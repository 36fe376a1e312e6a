"""Tells from the records of an inference profile whether the model is faster than real time: grids, cells, lines."""

from __future__ import annotations

import itertools
import math
from functools import partial
from statistics import median
from typing import Annotated, Any, Callable, Dict, List, Optional, Sequence

from msgspec import Meta, Struct, field

from rnnt_bench.analysis.metrics import cells, values
from rnnt_bench.core import statistics, text
from rnnt_bench.present import parts as show
from rnnt_bench.records import schema
from rnnt_bench.tools.configuration import Positive, Seconds, Text, check_list
from rnnt_bench.tools.kept import Answer, Job, Kept, of_row, slice_of

TOOL, TITLE = "inference", "Inference: is it faster than real time?"
SKIPPED = "skipped"
#: The further axes, each with the value of the plain model.
PLAIN = {"threads": None, "dtype": "float32"}
#: Timed calls and profiled ones contradict each other where the first take this many times the self time of the others.
CONTRADICTION = 5


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a configuration, as recognisers.load takes it.  python: its interpreter; None for the command's."""

    source: Text
    type: Text = "factory"
    arguments: Dict[str, Any] = {}
    sample_rate: Optional[Positive] = None
    python: Optional[Text] = None


class Dimensions(Struct, forbid_unknown_fields=True, kw_only=True):
    """The grid of a configuration."""

    audio_mockup_secs: Annotated[List[Seconds], Meta(min_length=1)] = field(default_factory=lambda: [1, 2, 5, 8, 32])
    batch_sizes: Annotated[List[Positive], Meta(min_length=1)] = field(default_factory=lambda: [1, 4, 8])
    example_audio: Optional[Text] = None
    triangle_only: bool = True
    export_logs: bool = False

    def __post_init__(self) -> None:
        check_list(self.audio_mockup_secs, "audio_mockup_secs")
        check_list(self.batch_sizes, "batch_sizes")


class Profile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A configuration.  variants: values of the further axes; the grid is repeated for each combination."""

    pretrained_model: Model
    profiling_dimensions: Dimensions = field(default_factory=Dimensions)
    variants: Dict[str, List[Any]] = field(default_factory=lambda: {key: [value] for key, value in PLAIN.items()})


class Position(Struct, frozen=True):
    """A cell of the grid: a way to run the model, seconds of each utterance, utterances in the batch."""

    threads: Optional[int]
    dtype: str
    seconds: float
    size: int

    @property
    def variant(self) -> str:
        """Return "threads 2, bfloat16"; "" for the plain one."""
        words = [f"threads {self.threads}" if self.threads else "", self.dtype if self.dtype != "float32" else ""]
        return ", ".join(filter(None, words))

    @property
    def job(self) -> str:
        """Return the name of its job: "32s-x8", "0.5s-x1-threads-2-bfloat16"."""
        words = self.variant.replace(",", "").replace(" ", "-")
        return "-".join(filter(None, (f"{self.seconds:g}s-x{self.size}", words)))


def positions(config: Profile) -> List[Position]:
    """Return all positions of the grid, the batch sizes varying fastest."""
    grid = config.profiling_dimensions
    parts = (config.variants[key] for key in PLAIN)
    return [Position(*values) for values in itertools.product(*parts, grid.audio_mockup_secs, grid.batch_sizes)]


def is_skipped(position: Position, grid: Dimensions) -> bool:
    """Tell whether a position is in the corner of long audio and large batches, which a triangle leaves out."""
    d, b = grid.audio_mockup_secs.index(position.seconds), grid.batch_sizes.index(position.size)
    return grid.triangle_only and d > 0 and b > 0 and d + b >= (len(grid.audio_mockup_secs) + len(grid.batch_sizes)) / 2


class Cell(Struct, kw_only=True):
    """The measurements of a cell of the grid.

    wall_ns, first_ns: time of each timed call, and to its first token; busy: calls that ran beside other load;
    output_error: how far the outputs are from those in float32, None in float32;
    process_bytes: resident peak of a call above the level before it, as those of the device; process_peak_bytes: of the
    whole process; profiled: batches under torch.profiler; cpu_us, cuda_us: their self time together; cpu_peak_bytes,
    cuda_peak_bytes: highest running sum of allocations within one of these."""

    wall_ns: Annotated[List[int], Meta(min_length=1)]
    first_ns: List[Optional[int]]
    busy: int
    output_error: Optional[float] = None
    process_bytes: Optional[int] = None
    process_peak_bytes: Optional[int] = None
    device_allocated_bytes: Optional[int] = None
    device_used_bytes: Optional[int] = None
    profiled: int = 1
    cpu_us: float = 0.0
    cuda_us: float = 0.0
    cpu_peak_bytes: Optional[int] = None
    cuda_peak_bytes: Optional[int] = None


#: A cell of the grid: its `position`, `status` and `reason`, and those of NUMBERS that are known.
Row = Dict[str, Any]


def factor(value: Optional[float]) -> str:
    """Return a real-time factor as "4.31E-03"."""
    return "-" if value is None else f"{value:.2E}"


_ms = partial(of_row, scale=1e3, unit="s", better="lower")
_mb = partial(of_row, scale=1 / text.MB, unit="bytes", better="lower")
#: The numbers of a cell: keys in CSV and JSON, and columns of its table where they have a title, in this order.
NUMBERS = (
    of_row("n"),
    of_row("rtf", "RTF", factor, better="lower"),
    of_row("rtf_p20", "p20", factor),
    of_row("rtf_p80", "p80", factor),
    of_row("profiled_cpu_rtf", better="lower", profiled=True),
    of_row("profiled_cuda_rtf", better="lower", profiled=True),
    *(_ms(f"p{part}_s", f"p{part} ms") for part in (50, 90, 99)),
    _ms("first_token_s", "first token ms"),
    of_row("utterances_per_second", "utterances /s", better="higher"),
    of_row("streams", "streams", better="higher"),
    of_row("cpu_peak_bytes", unit="bytes", better="lower", profiled=True),
    of_row("cuda_peak_bytes", unit="bytes", better="lower", profiled=True),
    _mb("process_bytes", "process MB"),
    _mb("process_peak_bytes", "whole process MB"),
    _mb("device_allocated_bytes", "device MB"),
    _mb("device_used_bytes", "device used MB"),
    of_row("output_error", "output error", text.error, better="lower"),
    of_row("busy"),
)


def row(position: Position, job: Job) -> Row:
    """Return the numbers of a cell.  Raises ValueError for a record that is wrong.

    rtf: seconds of computing for a second of audio, the median of calls; profiled_*_rtf: of self time under the
    profiler; streams: speakers that the device keeps up with, at the speed that 90% of calls have."""
    row = {"position": position, "status": job.status, "reason": job.reason}
    if job.status != "ok":
        return row
    (cell,), audio = job.of(Cell), position.size * position.seconds
    parts = {part: statistics.quantile([ns / 1e9 for ns in cell.wall_ns], part / 100) for part in (20, 50, 80, 90, 99)}
    first = [ns / 1e9 for ns in cell.first_ns if ns is not None]
    return {
        **row,
        **{name: getattr(cell, name) for name in Cell.__struct_fields__},
        **{f"p{part}_s": parts[part] for part in (50, 90, 99)},
        **{f"rtf_p{part}": parts[part] / audio for part in (20, 80)},
        "n": len(cell.wall_ns),
        "rtf": parts[50] / audio,
        "utterances_per_second": position.size / parts[50],
        "first_token_s": median(first) if first else None,
        "streams": position.size * math.floor(position.seconds / parts[90]),
        "profiled_cpu_rtf": cell.cpu_us / (1e6 * cell.profiled * audio),
        "profiled_cuda_rtf": cell.cuda_us / (1e6 * cell.profiled * audio) or None,
    }


def contradiction(row: Row) -> float:
    """Return how many times as long the median timed call was as the self time of a profiled one."""
    profiled = row["profiled_cpu_rtf"] + (row["profiled_cuda_rtf"] or 0)
    return row["rtf"] / profiled if profiled else 0.0


def _both(words: Callable[[float], str], row: Row, key: str, unit: str = "") -> str:
    """Return "5.15E-02 + 3.62E-02" or "0.00 + 1.47 GiB": CPU, and CUDA where it was used."""
    cpu, cuda = (row.get(key.format(kind)) for kind in ("cpu", "cuda"))
    known = [cpu or 0, *([cuda] if cuda else [])] if (cpu, cuda) != (None, None) else []
    return " + ".join(map(words, known)) + unit if known else "-"


#: Each grid by name: its title, and the function that words a cell.
GRIDS: Dict[str, Any] = {
    "real_time_factors": (
        "Real-time factor: seconds of computing for a second of audio",
        lambda row: factor(row["rtf"]) + (" busy" if row["busy"] else ""),
    ),
    "profiled_real_time_factors": (
        "Real-time factor from self time, profiled (the last two of six batches)",
        lambda row: _both(factor, row, "profiled_{}_rtf"),
    ),
    "memory_peaks": (
        "Memory peak: highest running sum of allocations in a batch, profiled",
        lambda row: _both(
            lambda of: f"{of / text.GIB:.{4 if 0 < of < text.GIB / 100 else 2}f}", row, "{}_peak_bytes", " GiB"
        ),
    ),
}


def grid_of(name: str, rows: Sequence[Row], variant: str) -> show.Table:
    """Return a grid: durations below each other, batch sizes side by side; a cell that is not ok shows its status."""
    title, words = GRIDS[name]
    lines: Dict[float, Dict[str, show.Cell]] = {}
    for each in rows:
        seconds, size = each["position"].seconds, each["position"].size
        line = lines.setdefault(seconds, {"audio": show.Cell(f"{seconds:g}s")})
        line[f"{size}"] = show.Cell(words(each) if each["status"] == "ok" else each["status"])
    columns = [show.Column(head, head != "audio") for head in next(iter(lines.values()))]
    heading = f"{title}{variant and ', '}{variant}; columns: batch sizes"
    return show.Table(name, heading, columns, [list(line.values()) for line in lines.values()])


def total(rows: Sequence[Row]) -> List[str]:
    """Return the answer in a line: how fast at best, and how many live streams."""
    known = [each for each in rows if "rtf" in each]
    if not known:
        return []
    fastest, best = min(known, key=lambda each: each["rtf"]), max(known, key=lambda each: each["streams"])
    at = [f"{each['position'].seconds:g}s x {each['position'].size}" for each in (fastest, best)]
    word = "faster" if fastest["rtf"] < 1 else "slower"
    load = ", beside other load" if fastest["busy"] else ""
    words = f"{word} than real time: at best a factor of {factor(fastest['rtf'])} ({at[0]}{load})"
    if not best["streams"]:
        return [f"{words}; no real-time stream: no batch ends before its audio does"]
    load = ", beside other load" if best["busy"] else ""
    return [f"{words}; most concurrent real-time streams: {best['streams']} ({at[1]}, 90% of calls in time{load})"]


def answer(kept: Kept) -> Answer:
    """Return what a run found out.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Profile)
    dimensions = config.profiling_dimensions
    rows = [
        row(position, Job(SKIPPED) if is_skipped(position, dimensions) else kept.job(position.job))
        for position in positions(config)
    ]
    parts = text.gathered((each["position"].variant, each) for each in rows)
    grids = [grid_of(name, part, how if len(parts) > 1 else "") for name in GRIDS for how, part in parts.items()]
    listed = [
        {
            "audio": show.Cell(f"{each['position'].seconds:g}s", each["position"].seconds),
            "batch": show.measured(each["position"].size),
            "how": show.Cell(each["position"].variant),
            **cells(NUMBERS, each),
            "calls": show.measured(each.get("n")),
            "status": show.Cell(each["status"]),
        }
        for each in rows
        if each["status"] != SKIPPED
    ]
    example, known = dimensions.example_audio, [each for each in rows if "rtf" in each]
    busy, fewest = sum(bool(each["busy"]) for each in known), min((each["n"] for each in known), default=0)
    ratio, worst = max(((contradiction(each), each["position"].job) for each in known), default=(0.0, ""))
    told = {
        **dict.fromkeys(kept.machine, True),
        f"{worst}: RTF is {ratio:.0f} times the profiled one and contradicts it: calls were timed before the model was "
        "warm (give a larger --max-seconds), beside load, or outside of operators": ratio > CONTRADICTION,
        f"audio: {example}, cut or looped": example,
        "audio: noise; for a model whose path depends on what is said (a beam search), give example_audio": not example,
        f"{text.count(busy, 'cell')} ran beside other load: times are too long": busy,
        f"p99 of fewer than 100 calls is close to the slowest of them; here there are {fewest} or more": 0
        < fewest
        < 100,
    }
    names = {"threads": "threads", "dtype": "dtype", "audio_mockup_secs": "seconds", "batch_sizes": "size"}
    return Answer(
        kept.header.name,
        total(rows),
        [*grids, show.tabulated("cells", "Each cell", show.filled(listed))],
        [words for words, holds in told.items() if holds],
        [f"{each['position'].job}: {each['status']}: {each['reason']}" for each in rows if each["reason"]],
        [
            {
                **{key: getattr(each["position"], name) for key, name in names.items()},
                **{"status": each["status"], "reason": each["reason"], **values(NUMBERS, each)},
            }
            for each in rows
        ],
        [each["status"] for each in rows if each["status"] != SKIPPED],
    )


SLICE = slice_of(TOOL, TITLE, answer)
