"""Prints a profile of inference: grids of audio by batch size, all numbers of every cell, and lines below them."""

from __future__ import annotations

from operator import itemgetter
from typing import Callable, Dict, List, Sequence, Tuple

from common.analysis import metrics
from common.core.text import count
from common.core.units import GIB
from common.present.export import csv_text, json_text
from common.present.table import Cell, Column, Table, filled, measured, tabulated
from common.present.text import aligned, block, listed
from common.tools.inference import grid
from common.tools.inference import rows as inference
from common.tools.inference.rows import SKIPPED, GridCell, Inference, factor, most_streams

Words = Callable[[GridCell], str]
LONGEST = 40


def real_time(cell: GridCell) -> str:
    return factor(cell.rtf)


def profiled(cell: GridCell) -> str:
    """Return "5.15E-02 + 3.62E-02": CPU and CUDA."""
    parts = [cell.profiled_cpu_rtf, *([cell.profiled_cuda_rtf] if cell.profiled_cuda_rtf else [])]
    return " + ".join(map(factor, parts))


def memory(cell: GridCell) -> str:
    """Return "1.47 Gb" or, with a GPU, "0.00 + 1.47 Gb", in 2^30 bytes."""
    if cell.cpu_peak_bytes is None and cell.cuda_peak_bytes is None:
        return "-"
    parts = [cell.cpu_peak_bytes or 0, *([cell.cuda_peak_bytes] if cell.cuda_peak_bytes else [])]
    return " + ".join(f"{part / GIB:.{4 if 0 < part < GIB / 100 else 2}f}" for part in parts) + " Gb"


#: Each grid by name: its title, and the function that words a cell.
GRIDS: Dict[str, Tuple[str, Callable[[GridCell], str]]] = {
    "real_time_factors": ("Real-time factor: seconds of computing for a second of audio", real_time),
    "profiled_real_time_factors": ("Real-time factor from self time, profiled (the last two of six batches)", profiled),
    "memory_peaks": ("Memory peak: highest running sum of allocations in a batch, profiled", memory),
}


def of_grid(name: str, cells: Sequence[GridCell], axes: grid.Grid, variant: str = "") -> Table:
    """Return a grid: durations below each other, batch sizes side by side; a cell that is not ok shows its status."""
    title, words = GRIDS[name]
    at = {(cell.position.seconds, cell.position.size): cell for cell in cells}
    columns = [Column("audio", False), *(Column(f"{size}") for size in axes[grid.BATCH])]
    rows = []
    for seconds in axes[grid.SECONDS]:
        shown = [at[seconds, size] for size in axes[grid.BATCH]]
        texts = [words(cell) if cell.status == "ok" else cell.status for cell in shown]
        rows.append([Cell(f"{seconds:g}s"), *map(Cell, texts)])
    return Table(name, f"{title}{', ' if variant else ''}{variant}; columns: batch sizes", columns, rows)


def grids(profile: Inference) -> List[Table]:
    """Return each grid of each variant."""
    variants = profile.variants()
    return [
        of_grid(name, cells, profile.axes, variant.in_words() if len(variants) > 1 else "")
        for name in GRIDS
        for variant, cells in variants
    ]


def cells(profile: Inference) -> Table:
    """Return every cell that was not skipped, with its numbers, without empty columns."""
    rows = [_row(cell) for cell in profile.cells if cell.status != SKIPPED]
    return tabulated("cells", "Each cell", filled(rows))


def _row(cell: GridCell) -> Dict[str, Cell]:
    return {
        "audio": Cell(f"{cell.seconds:g}s", cell.seconds),
        "batch": measured(cell.size),
        "how": Cell(cell.position.variant.in_words()),
        **metrics.cells(inference.NUMBERS, cell),
        "calls": measured(cell.n or None),
        "status": Cell(cell.status),
    }


def total(profiled: Inference) -> List[str]:
    """Return the answer in a line: how fast at best, and how many live streams."""
    factors = [(cell.rtf, cell) for cell in profiled.cells if cell.rtf is not None]
    best = most_streams(profiled.cells)
    if not factors or best is None:
        return []
    least, fastest = min(factors, key=itemgetter(0))
    where = f"{fastest.seconds:g}s x {fastest.size}"
    words = f"{'faster' if least < 1 else 'slower'} than real time: at best a factor of {factor(least)} ({where})"
    if not best.streams:
        return [f"{words}; no real-time stream: no batch ends before its audio does"]
    where = f"{best.seconds:g}s x {best.size}, 90% of calls in time"
    where += ", beside other load" if best.busy else ""
    return [f"{words}; most concurrent real-time streams: {best.streams} ({where})"]


def lines(profile: Inference) -> List[str]:
    """Return the lines below the tables."""
    environment, result = profile.environment, []
    if environment:
        threads = count(environment.threads or 0, "thread")
        result.append(f"{profile.name} on {environment.device_name}, {threads}, torch {environment.torch}")
    example = profile.header.config["profiling_dimensions"]["example_audio"] if profile.header else None
    result.append(
        f"audio: {example}, cut or looped"
        if example
        else "audio: noise; where the path of the model depends on what is said (a beam search), give example_audio"
    )
    busy = sum(bool(cell.busy) for cell in profile.cells)
    if busy:
        result.append(f"{count(busy, 'cell')} ran beside other load: times are too long")
    fewest = min((cell.n for cell in profile.cells if cell.n), default=0)
    if 0 < fewest < 100:
        result.append(f"p99 of fewer than 100 calls is close to the slowest of them; here there are {fewest} or more")
    return result + failures(profile)


def failures(profile: Inference) -> List[str]:
    """Return why the profile could not be read, or why cells failed."""
    if profile.reason:
        return [profile.reason]
    return [
        f"{cell.position.job}: {cell.status}: {cell.reason}"
        for cell in profile.cells
        if cell.reason and cell.status != SKIPPED
    ]


def render(profile: Inference, format: str) -> str:
    """Return the whole profile as "table", "markdown", "csv" or "json"."""
    rows = [cell.row() for cell in profile.cells]
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(rows)
    if profile.reason:
        return f"{listed(failures(profile), format)}\n"
    blocks = [*([listed(total(profile), format)] if total(profile) else [])]
    blocks += [block(table, format) for table in grids(profile)]
    every = cells(profile)
    blocks.append(block(every, format) if format == "markdown" else f"{every.title}\n{aligned(every, LONGEST)}")
    return "\n\n".join([*blocks, listed(lines(profile), format)]) + "\n"
