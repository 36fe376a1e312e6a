"""How long a loss must take at least: the bytes it must move and the operations it must do, over what the device does.

Given logits (scope "loss"): a loss reads every logit twice, since no gradient is known before the normaliser of its
cell and the lattice are, and writes every gradient once: 3 x itemsize x cells x V bytes, 12 for each float32 logit.
From encoder and decoder outputs (scope "step") a perfect kernel never stores logits, so only inputs, weights and their
gradients must move; but it must multiply: forward, gradient of the input and gradient of the weight are 2 M H V
operations each for M cells, 6 M H V together.  Traffic and arithmetic may overlap, so the floor is the longer of the
two, as in the roofline model (Williams et al., 2009).

Packed counts the cells of the utterances, padded those of the padded tensor.  Losses of one symbol per frame cannot
meet every cell: they need not read the others, but write their zeros.  Pruned losses have S symbols a frame and two
projections (6 rows H V); the simple loss of these and of additive ones multiplies am and lm once for every cell (2
cells V, thrice with its gradients).  Left out: exp, log, tanh, the lattice, targets, and the second multiplication of a
kernel that does not store logits; with them the floor would be higher.  Logits that fit the caches can be read faster
than memory is: then 100% can be passed.  Pure arithmetic; no torch.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from common.core import statistics
from common.records.schema import Batch, Limits, Sample

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
READS, WRITES = 2, 1  # of each logit by a loss that is given them
PRODUCTS = 3  # forward, gradient of the input, gradient of the weight
LAYOUTS = ("packed", "padded")
#: Settings that the work depends on.
NEEDED = {"dtype", "vocab_size", "encoder_dim", "pruned_recipe", "prune_range"}


class Work(NamedTuple):
    """What one sample must do at least: bytes through memory, floating point operations in matrix products."""

    bytes: float
    flops: float


class Peaks(NamedTuple):
    """What the device does at best, in bytes (read + written) and operations per second; None where not measured."""

    copy_bytes_per_second: Optional[float]
    flops_per_second: Optional[float]


class Sizes(NamedTuple):
    """Rows of a batch in one layout.  cells: of its lattice; met: of these, what a path can meet; pruned: what is left
    of them per frame; rows: frames and tokens (U+1) together."""

    cells: int
    met: int
    pruned: int
    rows: int


def peaks(limits: Sequence[Limits]) -> Peaks:
    """The best of all ``limits`` records of a run: what stood beside a measurement can only have slowed it."""
    copied = [2e9 * line.buffer_bytes / min(line.ns) for record in limits for line in record.copies]
    multiplied = [2e9 * line.n**3 / min(line.ns) for record in limits for line in record.products]
    return Peaks(max(copied, default=None), max(multiplied, default=None))


def sizes(batch: Batch, layout: str, prune_range: int) -> Optional[Sizes]:
    """None for the batches of older records, which tell too little."""
    if not batch.frames or batch.tokens is None or not batch.one_symbol_cells or not batch.pruned_cells:
        return None
    if layout == "packed":
        rows = batch.frames + batch.tokens + batch.N
        return Sizes(batch.useful_cells, batch.one_symbol_cells, batch.pruned_cells, rows)
    frames, tokens = batch.N * batch.T_max, batch.U_max + 1
    pruned = frames * min(prune_range, tokens)
    return Sizes(batch.padded_cells, batch.padded_cells, pruned, frames + batch.N * tokens)


def work(scope: str, kind: str, size: Sizes, settings: Mapping[str, Any]) -> Work:
    """Of one batch.  settings: dtype, vocab_size, encoder_dim, pruned_recipe of the run."""
    itemsize, V, H = ITEMSIZE[settings["dtype"]], settings["vocab_size"], settings["encoder_dim"]
    inner = 2 * size.cells * V  # the normalisers of am + lm in all cells
    if scope == "loss":
        if kind == "additive":
            return Work((READS + WRITES) * itemsize * size.rows * V, PRODUCTS * inner)
        written = size.pruned if kind == "pruned" else size.cells
        read = size.met if kind == "topology" else written
        return Work(itemsize * V * (READS * read + WRITES * written), 0)
    layers, product = 1, PRODUCTS * 2 * H * V  # of one row
    if kind == "additive":
        layers, flops = 2, product * size.rows + PRODUCTS * inner
    elif kind == "pruned" and settings["pruned_recipe"] == "icefall":
        layers, flops = 3, product * (size.pruned + size.rows) + PRODUCTS * inner
    elif kind == "pruned":  # no projections, and no gradient of the simple loss
        flops = product * size.pruned + inner
    else:
        flops = product * (size.met if kind == "topology" else size.cells)
    return Work(2 * itemsize * (size.rows * H + layers * H * V), flops)


def seconds(least: Work, best: Peaks) -> Optional[float]:
    """The longer of moving and multiplying; None where a rate that it needs was not measured."""
    if best.copy_bytes_per_second is None or (least.flops and best.flops_per_second is None):
        return None
    return max(least.bytes / best.copy_bytes_per_second, least.flops / (best.flops_per_second or math.inf))


def limit_percent(floors: Mapping[Any, float], measured: Mapping[Any, Sequence[float]]) -> Optional[float]:
    """How much of the time is the floor, in percent: the geometric mean over batches of floor / median of the samples,
    both in seconds, so that a batch with more samples counts no more.  None unless every batch has a floor."""
    if not measured or not all(batch in floors for batch in measured):
        return None
    return 100 * statistics.geometric_mean(
        [floors[batch] / statistics.median(samples) for batch, samples in measured.items()]
    )


def of_layout(
    layout: str,
    scope: str,
    kind: str,
    batches: Sequence[Batch],
    settings: Mapping[str, Any],
    best: Peaks,
    measured: Mapping[Any, Sequence[float]],
) -> Optional[Dict[str, Optional[float]]]:
    """{bytes, flops, ms, percent}, of the measured batches: bytes and operations are their means, ms the geometric mean
    of their floors.  measured: batch -> seconds.  None where the records tell too little."""
    least: Dict[Any, Work] = {}
    for batch in batches:
        size = sizes(batch, layout, settings["prune_range"])
        if size is not None and batch.index in measured:
            least[batch.index] = work(scope, kind, size, settings)
    if not least:
        return None
    times = {index: seconds(one, best) for index, one in least.items()}
    floors = {index: time for index, time in times.items() if time is not None}
    return {
        "bytes": statistics.mean([one.bytes for one in least.values()]),
        "flops": statistics.mean([one.flops for one in least.values()]),
        "ms": 1e3 * statistics.geometric_mean(list(floors.values())) if floors else None,
        "percent": limit_percent(floors, measured),
    }


class Least(NamedTuple):
    """What a row tells of it: fields of the row, and lines for the reader."""

    numbers: Dict[str, Any]
    notes: List[str]


def of_run(
    limits: Sequence[Limits],
    kind: str,
    batches: Sequence[Batch],
    settings: Mapping[str, Any],
    samples: Sequence[Sample],
) -> Least:
    """By the ``limits`` records of a run; nothing where there are none.  samples: those of the medians."""
    if not limits:
        return Least({}, [])
    best = peaks(limits)
    found: Dict[str, Any] = {**best._asdict(), "floor": {}, "limit_percent": {}}
    known = settings.keys() >= NEEDED and settings["dtype"] in ITEMSIZE
    for scope in ("step", "loss") if known else ():
        measured: Dict[int, List[float]] = {}
        for sample in samples:
            if sample.scope == scope:
                measured.setdefault(sample.batch, []).append(sample.total_wall_ns / 1e9)
        for layout in LAYOUTS:
            least = of_layout(layout, scope, kind, batches, settings, best, measured)
            if least:
                found["limit_percent"].setdefault(scope, {})[layout] = least.pop("percent")
                found["floor"].setdefault(scope, {})[layout] = least
    reasons = [line.reason for line in limits if line.reason]
    if None in best and reasons:
        return Least(found, [f"the device's limits were not measured: {reasons[-1]}"])
    if all(line.flags for line in limits):
        return Least(found, ["the device's limits were measured beside other load: % of limit may be too high"])
    return Least(found, [])
