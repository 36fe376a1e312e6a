"""Bound how long a loss must take at least: bytes to move, operations and exponentials, over the device's best rates.

The bound is the longest of the three, since they may overlap (the roofline model, Williams et al., 2009).  A row over
100% shows that the bound is wrong.  docs/method.md tells what is counted.

Only needed cells count, in forward too: those whose posterior the gradient's dtype can tell from zero.  An exact loss
may leave out the others where it proves that they change nothing, as `fused` does with the logits of a trained model.

- Given logits (scope "loss"): those of needed cells are read for the normalisers and again for the gradient, and
  gradients are written for all cells: itemsize V (2 needed + cells) bytes.
- From encoder and decoder outputs (scope "step"): no logits are stored, so only inputs, weights and gradients move.
  Three products, the logits and two gradients, take 2 H V operations each for a needed cell.  Each of its logits has
  one exponential.  V includes durations and longer blanks.
- Pruned losses have S symbols a frame, two projections (6 rows H V), and normalisers of am + lm (2 cells V).  Additive
  losses multiply am and lm, three times 2 V for a needed cell.
- Left out, which keeps the bound too low rather than too high: tanh, the lattice, targets, and the gradient of a pruned
  loss's simple loss.

The oracle counts the needed cells of one measured batch (`at_size`); other batches get the same share.  Without that
there is no bound.  "packed" counts the cells of the utterances, "padded" those of the padded tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.core import statistics
from common.core.implementations import ONE_SYMBOL, durations_of
from common.core.text import gathered
from common.records.schema import AtSize, Batch, Limits, Sample

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
PRODUCTS = 3  # forward, gradient of the input, gradient of the weight
LAYOUTS = ("packed", "padded")
#: Settings that the work depends on.
NEEDED = {"dtype", "vocab_size", "encoder_dim", "pruned_recipe", "prune_range"}


class Least(NamedTuple):
    """Hold what one sample must do at least.

    Attributes:
        bytes: through memory.
        flops: in matrix products.
        exps: exponentials.
        held: the fewest bytes that it works on at a time.
    """

    bytes: float
    flops: float
    exps: float
    held: float


class Peaks(NamedTuple):
    """Hold the best rates of the device per second; None where not measured.

    Attributes:
        bytes_per_second: read and written, in the largest buffer.
        flops_per_second, exps_per_second: operations and exponentials.
        streams: (bytes of the buffer, bytes per second), the largest buffer first.
    """

    bytes_per_second: Optional[float]
    flops_per_second: Optional[float]
    exps_per_second: Optional[float]
    streams: Tuple[Tuple[int, float], ...] = ()

    def moving(self, held: float) -> Optional[float]:
        """Return bytes per second for work on `held` bytes: the best rate of all buffers at least as large as the
        largest that is no larger than `held`; of all buffers where every one is larger."""
        best = None
        for size, rate in self.streams:
            best = max(best or 0.0, rate)
            if size <= held:
                break
        return best


#: Those of `Peaks`, in their order.
RATES = ("bytes_per_second", "flops_per_second", "exps_per_second")


class Sizes(NamedTuple):
    """Hold the sizes of a batch in one layout.

    Attributes:
        cells: of its lattice.
        met: the cells that a path can meet; in the gradient the others are 0.
        pruned: the cells of these that pruning keeps.
        rows: frames and tokens (U+1) together.
        needed: the cells with a gradient, at most `met` or `pruned`.
        N: utterances.
    """

    cells: int
    met: int
    pruned: int
    rows: int
    needed: float
    N: int


def peaks(limits: Sequence[Limits]) -> Peaks:
    """Return the best of all ``limits`` records of a run, since other load can only slow a measurement."""
    moved = [(line.buffer_bytes, 1e9 * line.moved_bytes / min(line.ns)) for record in limits for line in record.streams]
    best = {size: max(rate for other, rate in moved if other == size) for size in sorted({size for size, _ in moved})}
    multiplied = [2e9 * line.n**3 / min(line.ns) for record in limits for line in record.products]
    taken = [1e9 * line.count / min(line.ns) for record in limits for line in record.exps]
    streams = tuple(reversed(list(best.items())))
    of_memory = streams[0][1] if streams else None
    return Peaks(of_memory, max(multiplied, default=None), max(taken, default=None), streams)


def ranges(limits: Sequence[Limits]) -> Dict[str, Dict[str, float]]:
    """Return {measurements, lowest, highest} for each rate of `Peaks` that was measured several times."""
    each = [peaks([line]) for line in limits]
    rates_of = {key: [rate for of_line in each if (rate := getattr(of_line, key)) is not None] for key in RATES}
    return {
        key: {"measurements": len(rates), "lowest": min(rates), "highest": max(rates)}
        for key, rates in rates_of.items()
        if len(rates) > 1
    }


def sizes(batch: Batch, layout: str, prune_range: int, share: float) -> Optional[Sizes]:
    """Return the sizes of a batch; None for a batch of older records, which hold too little.

    Args:
        batch: the measured batch.
        layout: "packed", or another for padded tensors.
        prune_range: symbols of each frame that a pruned loss keeps.
        share: the share of the cells whose gradient is needed.
    """
    if not batch.frames or batch.tokens is None or not batch.one_symbol_cells or not batch.pruned_cells:
        return None
    if layout == "packed":
        cells, met, pruned = batch.useful_cells, batch.one_symbol_cells, batch.pruned_cells
        rows = batch.frames + batch.tokens + batch.N
    else:
        frames, tokens = batch.N * batch.T_max, batch.U_max + 1
        cells = met = batch.padded_cells
        pruned, rows = frames * min(prune_range, tokens), frames + batch.N * tokens
    return Sizes(cells, met, pruned, rows, share * cells, batch.N)


def work(scope: str, kind: str, size: Sizes, settings: Mapping[str, Any]) -> Least:
    """Return the least work of one batch.

    settings: dtype, vocab_size, encoder_dim, pruned_recipe of the run, and durations where it has some.
    """
    itemsize, H = ITEMSIZE[settings["dtype"]], settings["encoder_dim"]
    V = settings["vocab_size"] + len(durations_of(kind, settings.get("durations")))
    met = dict.fromkeys(ONE_SYMBOL, size.met)
    needed = min(size.needed, {**met, "pruned": size.pruned}.get(kind, size.cells))
    inner = 2 * V * PRODUCTS * needed  # of am + lm
    read = size.rows if kind == "additive" else needed
    exps = V * read
    if scope == "loss":
        written = {"pruned": size.pruned, "additive": size.rows}.get(kind, size.cells)
        moved = itemsize * V * (2 * read + written)
        return Least(moved, inner if kind == "additive" else 0, exps, itemsize * V * written / size.N)
    layers, product = 1, 2 * H * V  # of one row
    if kind == "additive":
        layers, flops = 2, PRODUCTS * product * size.rows + inner
    else:
        normalisers = 2 * size.cells * V  # am + lm of all cells
        flops = PRODUCTS * product * needed + (normalisers if kind == "pruned" else 0)
        if kind == "pruned" and settings["pruned_recipe"] == "icefall":  # else no projections
            layers, flops = 3, flops + PRODUCTS * product * size.rows
    moved = 2 * itemsize * (size.rows * H + layers * H * V)
    return Least(moved, flops, exps, moved / 2)


def seconds(least: Least, best: Peaks) -> Optional[float]:
    """Return the seconds of the longest of moving, multiplying and exponentials; None where a rate is missing.

    Runs that did not measure exponentials leave those out.
    """
    moving = best.moving(least.held)
    if moving is None or (least.flops and best.flops_per_second is None):
        return None
    rates = (moving, best.flops_per_second, best.exps_per_second)
    return max(amount / (rate or math.inf) for amount, rate in zip(least, rates))


def limit_percent(bounds: Mapping[Any, float], measured: Mapping[Any, Sequence[float]]) -> Optional[float]:
    """Return the bound in percent of the time: the geometric mean over batches of bound / median of the samples.

    Both in seconds; a batch with more samples counts no more.  None unless every batch has a bound.
    """
    if not measured or not all(batch in bounds for batch in measured):
        return None
    return 100 * statistics.geometric_mean(
        [bounds[batch] / statistics.median(samples) for batch, samples in measured.items()]
    )


@dataclass(frozen=True)
class Floor:
    """Hold the least work of a batch, as means over the measured batches, and the geometric mean of their bounds in ms;
    None where a rate is not known."""

    bytes: float
    flops: float
    exps: float
    ms: Optional[float]


@dataclass
class Bound:
    """Hold the best rates of a run's device, and the bounds of its times.

    Attributes:
        bytes_per_second, flops_per_second, exps_per_second: None where not measured.
        ranges: of each of these three that was measured several times, see ``ranges``.
        needed_share: the share of the cells whose gradient the dtype can tell from zero; None where not counted.
        floor: scope -> layout -> the least work.
        percent: scope -> layout -> see ``limit_percent``.
    """

    bytes_per_second: Optional[float] = None
    flops_per_second: Optional[float] = None
    exps_per_second: Optional[float] = None
    ranges: Dict[str, Dict[str, float]] = field(default_factory=dict)
    needed_share: Optional[float] = None
    floor: Dict[str, Dict[str, Floor]] = field(default_factory=dict)
    percent: Dict[str, Dict[str, Optional[float]]] = field(default_factory=dict)


def of_layout(
    layout: str,
    scope: str,
    kind: str,
    batches: Sequence[Batch],
    settings: Mapping[str, Any],
    best: Peaks,
    measured: Mapping[Any, Sequence[float]],
    share: float,
) -> Optional[Tuple[Floor, Optional[float]]]:
    """Return (least work of the measured batches in a layout, bound in percent of the time).

    None where the records hold too little.

    Args:
        measured: batch -> seconds.
        share: as of `sizes`.
    """
    least: Dict[Any, Least] = {}
    for batch in batches:
        size = sizes(batch, layout, settings["prune_range"], share)
        if size is not None and batch.index in measured:
            least[batch.index] = work(scope, kind, size, settings)
    if not least:
        return None
    times = {index: seconds(each, best) for index, each in least.items()}
    bounds = {index: time for index, time in times.items() if time is not None}
    ms = 1e3 * statistics.geometric_mean(list(bounds.values())) if bounds else None
    moved, flops, exps, _ = (statistics.mean(amounts) for amounts in zip(*least.values()))
    return Floor(moved, flops, exps, ms), limit_percent(bounds, measured)


def of_run(
    limits: Sequence[Limits],
    kind: str,
    batches: Sequence[Batch],
    settings: Mapping[str, Any],
    samples: Sequence[Sample],
    at_size: Optional[AtSize] = None,
) -> Tuple[Bound, List[str]]:
    """Return the bound of a run by its ``limits`` records, and notes for the reader; nothing where there are none.

    samples: those behind the medians; at_size: of the correctness pass.
    """
    if not limits:
        return Bound(), []
    best = peaks(limits)
    share = 0.0
    if at_size and at_size.needed_cells and at_size.useful_cells:
        share = at_size.needed_cells / at_size.useful_cells
    bound = Bound(best.bytes_per_second, best.flops_per_second, best.exps_per_second, ranges(limits), share or None)
    known = settings.keys() >= NEEDED and settings["dtype"] in ITEMSIZE and not settings.get("amp")
    for scope in ("step", "loss") if known and share else ():
        measured = gathered((sample.batch, sample.ranked_ns / 1e9) for sample in samples if sample.scope == scope)
        for layout in LAYOUTS:
            least = of_layout(layout, scope, kind, batches, settings, best, measured, share)
            if least:
                bound.floor.setdefault(scope, {})[layout], bound.percent.setdefault(scope, {})[layout] = least
    return bound, _notes(limits, best, bound)


def _notes(limits: Sequence[Limits], best: Peaks, bound: Bound) -> List[str]:
    reasons = [line.reason for line in limits if line.reason]
    crowded = all(line.flags for line in limits)
    if None in best and reasons:
        return [f"the device's limits were not measured: {reasons[-1]}"]
    if any((shares.get("packed") or 0) > 100 for shares in bound.percent.values()):
        why = "it was measured beside other load" if crowded else "please report it"
        return [f"above 100% of the limit, so the limit is wrong there ({why})"]
    if crowded:
        return ["the device's limits were measured beside other load: % of limit may be too high"]
    return []
