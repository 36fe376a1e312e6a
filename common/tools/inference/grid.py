"""Makes the grid of an inference profile: its axes, its cells in order, and those that are skipped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, List, Mapping, Optional, Sequence, Union

Grid = Mapping[str, Sequence[Any]]

SECONDS, BATCH = "audio_mockup_secs", "batch_sizes"


@dataclass(frozen=True)
class Variant:
    """A way to run the model; the defaults are those of the plain one, which the others are checked against."""

    threads: Optional[int] = None
    compile: bool = False
    dtype: str = "float32"
    quantize: str = "none"

    def in_words(self) -> str:
        """Return "threads 2, compiled, bfloat16, quantize dynamic"; "" for the plain one."""
        words = [f"threads {self.threads}"] if self.threads else []
        words += ["compiled"] if self.compile else []
        words += [self.dtype] if self.dtype != Variant.dtype else []
        words += [f"quantize {self.quantize}"] if self.quantize != Variant.quantize else []
        return ", ".join(words)

    @property
    def is_plain(self) -> bool:
        """Tell whether the model runs as it was made, whatever the threads."""
        return replace(self, threads=None) == Variant()


@dataclass(frozen=True)
class Position:
    """A position in the grid."""

    variant: Variant
    seconds: float  # of each utterance
    size: int  # of the batch

    @property
    def job(self) -> str:
        """Return the name of the job that measures it: "32s-x8", "0.5s-x1-threads-2-bfloat16"."""
        words = self.variant.in_words().replace(",", "").replace(" ", "-")
        return "-".join(filter(None, (f"{self.seconds:g}s-x{self.size}", words)))

    def to_json(self) -> Mapping[str, Value]:
        """Return the value on each axis."""
        return {**vars(self.variant), SECONDS: self.seconds, BATCH: self.size}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Position:
        """Return the inverse of `to_json`."""
        return cls(Variant(**{axis: values[axis] for axis in VARIANTS}), values[SECONDS], values[BATCH])


Value = Union[int, float, bool, str, None]
#: The axes beside seconds and batch size, each with the value of the plain model.
VARIANTS: Mapping[str, Value] = vars(Variant())
AXES = (*VARIANTS, SECONDS, BATCH)


def positions(grid: Grid) -> List[Position]:
    """Return all positions of the grid, the batch sizes varying fastest."""
    products = itertools.product(*(grid[axis] for axis in AXES))
    return [Position.from_json(dict(zip(AXES, values))) for values in products]


def is_skipped(position: Position, grid: Grid) -> bool:
    """Tell whether a position is in the corner of long audio and large batches, which a triangle leaves out."""
    d, b = grid[SECONDS].index(position.seconds), grid[BATCH].index(position.size)
    return d > 0 and b > 0 and b + d >= (len(grid[SECONDS]) + len(grid[BATCH])) / 2
