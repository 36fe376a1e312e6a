"""The largest batches of a training, bucket by bucket: the bins, which job comes next, the table,
lines to paste."""

from __future__ import annotations

import itertools
import math
from statistics import median
from typing import Any

from msgspec import Struct

from rnnt_bench.core import text
from rnnt_bench.present.parts import Cell, measured, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import NOT_RUN, Answer, Job, Kept
from rnnt_bench.tools.largest.search import LIMITS, TOLERANCE, Search, Try

#: Part of the utterances of a bin that have no more tokens than its U; a longer text is to be left
#: out.
PERCENTILE = 98
#: Steps of a probe: the second has the optimizer's states.
PROBE_STEPS = 2
#: Steps over all buckets in random order, at the sizes found.
TOGETHER = 20
#: Steps of each bucket among them, at least: the median of their times is shown.
OF_BUCKET = 3
#: Columns of a loss, by the keys of its rows.
COLUMNS = {
    "N": "N",
    "peak_mb": "peak MB",
    "frames": "frames",
    "padded_frames": "padded frames",
    "utterances_per_second": "utterances /s",
}


class Bucket(Struct, frozen=True):
    """A bin of utterances.

    Attributes:
        T: frames of the longest
        U: tokens that PERCENTILE of them do not exceed
        count: utterances
        frames: of all of them
        beyond: utterances with more tokens
    """

    T: schema.Positive
    U: schema.Count
    count: schema.Positive
    frames: schema.Positive
    beyond: schema.Count


class Training(Struct, tag="training", kw_only=True):
    """The search of a training.

    Attributes:
        model: by import path
        losses: names; "" for the model's own
        seconds: of a frame
        margin: share of the limit that is left free in the search
    """

    model: str
    losses: list[str]
    buckets: list[Bucket]
    seconds: float
    limit: str
    margin: float
    words: list[str]


def of_utterances(utterances: Any, durations: int, parts: int) -> list[Bucket]:
    """Return bins of equal total duration, each cut into `parts` of equal duration by tokens.

    utterances: integers (utterances, 2), columns frames and tokens."""
    import numpy as np

    def cut(rows: Any, column: int, count: int) -> list[Any]:
        rows = rows[np.argsort(rows[:, column], kind="stable")]
        total = np.cumsum(rows[:, 0].astype(np.int64))
        at = np.searchsorted(total, total[-1] * np.arange(1, count) / count)
        # equal ones stay together
        edges = np.searchsorted(rows[:, column], rows[at, column], side="right")
        return [part for part in np.split(rows, np.unique(edges)) if len(part)]

    buckets = []
    for of_duration in cut(utterances, 0, durations):
        T = int(of_duration[:, 0].max())
        for rows in cut(of_duration, 1, parts):
            U = int(np.percentile(rows[:, 1], PERCENTILE, method="higher"))
            beyond = int((rows[:, 1] > U).sum())
            buckets.append(Bucket(T, U, len(rows), int(rows[:, 0].sum()), beyond))
    return buckets


def searches(config: Training, kept: Kept, loss: str) -> list[Search]:
    """Return the search of each bucket.  The first size to try follows from the bucket of longer
    utterances."""
    result: list[Search] = []
    start, stride = 1, 1.0
    for number in range(len(config.buckets), 0, -1):
        bucket = config.buckets[number - 1]
        search = Search(f"{loss} bucket-{number}".strip(), 1, bucket.count, start, stride)
        size = search.outcome(kept).size
        stride = TOLERANCE if size else 1.0
        shorter = config.buckets[number - 2]
        start = max(1, int((size or 1) * bucket.T / shorter.T))
        result.insert(0, search)
    return result


def together(config: Training, kept: Kept, loss: str) -> tuple[dict[int, int], str, Job]:
    """Return the sizes of the buckets, those that failed among the others reduced; the last job,
    after its name."""
    ends = {
        number: search.outcome(kept)
        for number, search in enumerate(searches(config, kept, loss), 1)
    }
    sizes = {number: end.size for number, end in ends.items() if end.size}
    for run in itertools.count(1):
        name = f"{loss} together-{run}".strip()
        job = kept.job(name)
        failed = job.of(Try)[-1].bucket if job.values and job.status in LIMITS else None
        if failed is None:
            break
        sizes[failed] = min(sizes[failed] - 1, int((1 - TOLERANCE) * sizes[failed]))
        if not sizes[failed]:
            del sizes[failed]
    return sizes, name, job


def coming(config: Training, kept: Kept) -> list[tuple[str, str, dict[int, int]]]:
    """Return (loss, job, {bucket: N}) of what is to be tried next: the longest bucket first, then
    all together.

    The steps of all losses together follow each other, after every search: their times are
    compared."""
    probes: list[tuple[str, str, dict[int, int]]] = [
        (loss, f"{search.name} probe-{size}", {number: size})
        for loss in config.losses
        for number, search in reversed([*enumerate(searches(config, kept, loss), 1)])
        if (size := search.next(kept)) is not None
    ]
    if probes:
        return probes
    ends = [(loss, *together(config, kept, loss)) for loss in config.losses]
    return [(loss, name, sizes) for loss, sizes, name, job in ends if sizes and job.status != "ok"]


def _seconds(config: Training, bucket: Bucket) -> float:
    """Return the duration below which all utterances of a bucket are, and none of a frame more."""
    return round((bucket.T + 0.5) * config.seconds, 4)


def answer(kept: Kept) -> Answer:
    """Return the table of a run, a bucket a row, the losses side by side."""
    config = schema.typed(kept.header.config, Training)
    result = Answer(kept.header.name)
    rows: list[dict[str, Cell]] = [
        {"bucket": measured(number), "T": measured(bucket.T), "U": measured(bucket.U)}
        for number, bucket in enumerate(config.buckets, 1)
    ]
    for loss in config.losses:
        _add(result, rows, config, kept, loss)
    beyond = sum(bucket.beyond for bucket in config.buckets)
    if beyond:
        total = sum(bucket.count for bucket in config.buckets)
        result.lines.append(
            f"leave out utterances of more tokens than their bucket's U: {beyond:,} of {total:,}"
        )
    result.lines.append(
        f"limit: {config.limit}, of which {config.margin:.0%} stayed free in the search"
    )
    result.lines += [*kept.machine, *config.words]
    unknown = "not known yet; --resume goes on" if coming(config, kept) else "no bucket fits both"
    result.total = [
        _bought(result.rows, config.losses[0], loss, unknown) for loss in config.losses[1:]
    ]
    result.tables = [
        tabulated("largest", f"The largest batch of {config.model} in each bucket", rows)
    ]
    return result


def _add(
    result: Answer, rows: list[dict[str, Cell]], config: Training, kept: Kept, loss: str
) -> None:
    """Add what is known of a loss to the answer, and its columns to the rows of the table."""
    sizes, _, job = together(config, kept, loss)
    timed = [step for step in job.of(Try) if step.ns and not step.peak_bytes]
    rates = text.gathered((step.bucket, step.N / (step.ns or 1) * 1e9) for step in timed)
    for number, (bucket, search) in enumerate(zip(config.buckets, searches(config, kept, loss)), 1):
        outcome = search.outcome(kept)
        size = sizes.get(number)
        step = outcome.heaviest
        values: dict[str, Any] = {
            "loss": loss,
            "bucket": number,
            "T": bucket.T,
            "U": bucket.U,
            "seconds": _seconds(config, bucket),
            "N": size,
            "status": outcome.status,
            "reason": outcome.reason,
            "peak_mb": step.peak_bytes / text.MB if step and step.peak_bytes else None,
            "frames": round(size * bucket.frames / bucket.count) if size else None,
            "padded_frames": size * bucket.T if size else None,
            "utterances_per_second": median(rates[number]) if number in rates else None,
        }
        result.rows.append(values)
        result.statuses.append(outcome.status)
        cells = {title: measured(values[key]) for key, title in COLUMNS.items()}
        if size == outcome.size:
            cells["N"] = Cell(outcome.shown, size)
        else:
            words = f"N {outcome.size} ran alone, and not after the others: now {size or 0}"
            result.lines.append(f"{search.name}: {words}")
        rows[number - 1].update({f"{title} {loss}".strip(): cell for title, cell in cells.items()})
        if outcome.reason:
            where = f"{search.name} (T {bucket.T}, U {bucket.U})"
            result.failures.append(f"{where}: {outcome.status}: {outcome.reason}")
    if sizes and job.status != "ok":
        result.failures.append(f"{loss} steps over all buckets: {job.status} {job.reason}".strip())
        result.statuses.append("interrupted" if job.status == NOT_RUN else job.status)
    if len(sizes) == len(config.buckets):
        in_order = [sizes[number] for number in range(1, len(sizes) + 1)]
        result.lines.append(_max_duration(config, in_order, f" {loss}".rstrip()))
        for name, lines in _forms(config, in_order).items():
            head = f"# {loss}\n" if loss else ""
            result.forms[name] = result.forms.get(name, "") + head + lines


def _bought(rows: list[dict[str, Any]], first: str, loss: str, unknown: str) -> str:
    """Return "fused over torchaudio: N 4.1 to 9.8 times, utterances/s 1.1 to 1.6 times", over the
    buckets; unknown: the words where no bucket has both."""
    parts = []
    for key, title in (("N", "N"), ("utterances_per_second", "utterances/s")):
        before = {row["bucket"]: row[key] for row in rows if row["loss"] == first}
        after = {row["bucket"]: row[key] for row in rows if row["loss"] == loss}
        ratios = [
            after[number] / value for number, value in before.items() if value and after[number]
        ]
        if ratios:
            parts.append(f"{title} {min(ratios):.1f} to {max(ratios):.1f} times")
    return f"{loss} over {first}: {', '.join(parts) or unknown}"


def _max_duration(config: Training, sizes: list[int], tail: str) -> str:
    """Return the max_duration for those who can set nothing else, and what it wastes."""
    seconds = [size * bucket.T * config.seconds for size, bucket in zip(sizes, config.buckets)]
    least = min(seconds)
    wasted = 1 - sum(least / most for most in seconds) / len(seconds)
    words = f"which leaves {wasted:.0%} of the batches' room unused"
    return f"max_duration{tail} (N x longest): {math.floor(least)} s, {words}"


def _forms(config: Training, sizes: list[int]) -> dict[str, str]:
    """Return the lines to paste by format.  lhotse's constraint knows durations alone: the smaller
    of a bin's sizes."""
    by_duration: dict[float, int] = {}
    for bucket, size in zip(config.buckets, sizes):
        bound = _seconds(config, bucket)
        by_duration[bound] = min(size, by_duration.get(bound, size))
    bins = list(by_duration)
    lhotse = f"""from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint

duration_bins = {bins}  # seconds, the last one is the longest
batch_sizes = {list(by_duration.values())}
sampler = DynamicBucketingSampler(
    cuts,
    duration_bins=duration_bins[:-1],
    constraint=FixedBucketBatchSizeConstraint(duration_bins, batch_sizes),
    shuffle=True,
)
"""
    pairs = [[_seconds(config, bucket), bucket.U] for bucket in config.buckets]
    nemo = f"""use_bucketing: true
num_buckets: {len(config.buckets)}
bucket_duration_bins: {bins if len(bins) == len(pairs) else pairs}
bucket_batch_size: {sizes}
max_duration: {bins[-1]}
"""
    return {"lhotse": lhotse, "nemo": nemo}
