"""Makes the grid of an inference profile: its axes, its cells in order, and those that are skipped."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Mapping, Sequence

Values = Dict[str, Any]
Grid = Mapping[str, Sequence[Any]]

SECONDS, BATCH = "audio_mockup_secs", "batch_sizes"
#: The ways to run a model, each with the value of the plain model, which the others are checked against.
VARIANTS: Dict[str, Any] = {"threads": None, "compile": False, "dtype": "float32", "quantize": "none"}
AXES = (*VARIANTS, SECONDS, BATCH)


def cells(grid: Grid) -> List[Values]:
    """Return all cells of the grid, the batch sizes varying fastest."""
    return [dict(zip(AXES, values)) for values in itertools.product(*(grid[axis] for axis in AXES))]


def is_skipped(cell: Values, grid: Grid) -> bool:
    """Tell whether a cell is in the corner of long audio and large batches, which a triangle leaves out."""
    d, b = grid[SECONDS].index(cell[SECONDS]), grid[BATCH].index(cell[BATCH])
    return d > 0 and b > 0 and b + d >= (len(grid[SECONDS]) + len(grid[BATCH])) / 2


def variant(cell: Values) -> Values:
    return {axis: cell[axis] for axis in VARIANTS}


def is_plain(cell: Values) -> bool:
    """Tell whether the model runs as it was made, whatever the threads."""
    return all(cell[axis] == value for axis, value in VARIANTS.items() if axis != "threads")


def described(cell: Values) -> str:
    """Return how a variant runs: "threads 2, compiled, bfloat16, quantize dynamic"; "" for the plain one."""
    words = [f"threads {cell['threads']}"] if cell["threads"] else []
    words += ["compiled"] if cell["compile"] else []
    words += [cell["dtype"]] if cell["dtype"] != VARIANTS["dtype"] else []
    words += [f"quantize {cell['quantize']}"] if cell["quantize"] != VARIANTS["quantize"] else []
    return ", ".join(words)


def job(cell: Values) -> str:
    """Return the name of the job that measures a cell: "32s-x8", "0.5s-x1-threads-2-bfloat16"."""
    words = described(cell).replace(",", "").replace(" ", "-")
    return "-".join(filter(None, (f"{cell[SECONDS]:g}s-x{cell[BATCH]}", words)))
