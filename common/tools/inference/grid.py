"""The grid of an inference profile: its configuration, its cells in order, and what is measured of one.  No torch."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Dict, List, Optional

from common.tools import configuration  # first: it goes on in another Python where this one lacks msgspec

# isort: split
from msgspec import Meta, Struct, field

from common.tools.configuration import Positive, Seconds, Text

#: The further axes, each with the value of the plain model.
PLAIN = {"threads": None, "compile": False, "dtype": "float32", "quantize": "none"}


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a configuration, as common.tools.inference.recognisers loads it.

    python: the interpreter of its process; None for the command's."""

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
        configuration.check_list(self.audio_mockup_secs, "audio_mockup_secs")
        configuration.check_list(self.batch_sizes, "batch_sizes")


class Profile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A configuration.  variants: values of the further axes, of the command line; the grid is repeated for each
    combination."""

    pretrained_model: Model
    profiling_dimensions: Dimensions = field(default_factory=Dimensions)
    variants: Dict[str, List[Any]] = field(default_factory=lambda: {key: [value] for key, value in PLAIN.items()})


class Position(Struct, frozen=True):
    """A cell of the grid: a way to run the model, of which the defaults are the plain one, seconds of each utterance,
    and utterances in the batch."""

    threads: Optional[int]
    compile: bool
    dtype: str
    quantize: str
    seconds: float
    size: int

    @property
    def variant(self) -> str:
        """Return "threads 2, compiled, bfloat16, quantize dynamic"; "" for the plain one."""
        words = [f"threads {self.threads}"] if self.threads else []
        words += ["compiled"] if self.compile else []
        words += [self.dtype] if self.dtype != "float32" else []
        words += [f"quantize {self.quantize}"] if self.quantize != "none" else []
        return ", ".join(words)

    @property
    def is_plain(self) -> bool:
        """Tell whether the model runs as it was made, whatever the threads."""
        return (self.compile, self.dtype, self.quantize) == (False, "float32", "none")

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
    corner = d + b >= (len(grid.audio_mockup_secs) + len(grid.batch_sizes)) / 2
    return grid.triangle_only and d > 0 and b > 0 and corner


class Cell(Struct, kw_only=True):
    """What was measured of a cell.

    Attributes:
        wall_ns: time of each timed call; on CUDA synchronised at both ends.
        first_ns: time to the first token of each call, of a model that streams.
        busy: calls that ran beside other load.
        process_bytes: resident peak of a call above the level before it; process_peak_bytes: of the whole process.
        device_allocated_bytes, device_reserved_bytes, device_used_bytes: on CUDA the peaks above the level before.
        profiled: batches under torch.profiler; cpu_us, cuda_us: their self time together.
        cpu_peak_bytes, cuda_peak_bytes: highest running sum of allocations within one of these.
        output_error: of a variant, see measure.difference.
    """

    wall_ns: Annotated[List[int], Meta(min_length=1)]
    first_ns: List[Optional[int]]
    busy: int
    process_bytes: Optional[int] = None
    process_peak_bytes: Optional[int] = None
    device_allocated_bytes: Optional[int] = None
    device_reserved_bytes: Optional[int] = None
    device_used_bytes: Optional[int] = None
    profiled: int = 1
    cpu_us: float = 0.0
    cuda_us: float = 0.0
    cpu_peak_bytes: Optional[int] = None
    cuda_peak_bytes: Optional[int] = None
    output_error: Optional[float] = None
