"""The largest batches of a training, bucket by bucket: the bins, which job comes next, the table,
lines to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

from msgspec import Struct, structs

from rnnt_bench.core import text
from rnnt_bench.present.parts import Cell, Values, measured, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import Answer, Job, Kept
from rnnt_bench.tools.largest.search import (
    LIMITS,
    TOLERANCE,
    Outcome,
    Request,
    Search,
    Try,
)

#: Part of the utterances of a bin that have no more tokens than its U; a longer text is to be left
#: out.
PERCENTILE = 98
#: Steps of a probe: the second has the optimizer's states.
PROBE_STEPS = 2
#: Steps over all buckets in random order, at the sizes found, at least.
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
    margin: float
    words: list[str]
    limit: str = ""

    def tries(self, sizes: Mapping[int, int]) -> list[Try]:
        """Return the steps of buckets, of their N by their numbers."""
        buckets = dict(enumerate(self.buckets, 1))
        return [
            Try(N=N, T=buckets[number].T, U=buckets[number].U, bucket=number)
            for number, N in sizes.items()
        ]


class Steps(Request, tag="steps", kw_only=True):
    """Ask for steps of a training.

    Attributes:
        model: by import path, with `arguments`
        features, hop: values of a frame, and samples
        vocab_size: of the symbols, where the model has none of its own
        optimizer: a class of torch.optim
        loss: "" for the model's own
        tries: N, T, U of each bucket
        rounds: steps of each of them
        share: of the limit that they may take
    """

    model: str
    arguments: dict[str, Any]
    features: int
    hop: int
    vocab_size: int
    optimizer: str
    amp: bool
    gradient_checkpointing: bool
    share: float
    loss: str = ""
    tries: list[Try] = []
    rounds: int = PROBE_STEPS


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


def searched(config: Training, kept: Kept, loss: str) -> dict[int, Outcome]:
    """Return how the search of each bucket ended, by its number, the longest utterances first: the
    first size to try is that of as many padded frames as fit in the bucket before."""
    outcomes = {}
    frames = 0
    for number in range(len(config.buckets), 0, -1):
        bucket = config.buckets[number - 1]
        start = max(1, frames // bucket.T)
        stride = TOLERANCE if frames else 1.0
        search = Search(f"{loss} bucket-{number}".strip(), 1, bucket.count, start, stride)
        outcomes[number] = search.outcome(kept)
        frames = bucket.T * (outcomes[number].size or 0)
    return outcomes


def together(
    kept: Kept, loss: str, outcomes: dict[int, Outcome]
) -> tuple[dict[int, int], str, Job]:
    """Return the sizes of the buckets, those that failed among the others reduced; the last job of
    steps over all of them, after its name."""
    sizes = {number: end.size or 0 for number, end in outcomes.items()}
    head = f"{loss} together-".strip()
    failed = [
        job.of(Try)[-1].bucket or 0
        for name, job in kept.jobs.items()
        if name.startswith(head) and job.status in LIMITS and job.values
    ]
    for number in failed:
        sizes[number] = min(sizes[number] - 1, int((1 - TOLERANCE) * sizes[number]))
    name = f"{head}{len(failed) + 1}"
    return {number: N for number, N in sizes.items() if N}, name, kept.job(name)


def coming(config: Training, kept: Kept, steps: Steps) -> list[tuple[str, Steps]]:
    """Return (job, what it is asked) of what is to be tried next: the longest bucket first, then
    all together.

    The steps of all losses together follow each other, after every search: their times are
    compared."""
    probes: list[tuple[str, Steps]] = []
    ends = []
    for loss in config.losses:
        asked = partial(structs.replace, steps, loss=loss)
        outcomes = searched(config, kept, loss)
        probes += [
            (f"{end.name} probe-{end.coming}", asked(tries=config.tries({number: end.coming})))
            for number, end in outcomes.items()
            if end.coming is not None
        ]
        sizes, name, job = together(kept, loss, outcomes)
        if sizes and job.status != "ok":
            rounds = max(OF_BUCKET, math.ceil(TOGETHER / len(sizes)))
            ends.append((name, asked(tries=config.tries(sizes), rounds=rounds, share=1.0)))
    return probes or ends


def answer(kept: Kept) -> Answer:
    """Return the table of a run, a bucket a row, the losses side by side."""
    config = schema.typed(kept.header.config, Training)
    result = Answer(kept.header.name)
    table: list[dict[str, Cell]] = [
        {"bucket": measured(number), "T": measured(bucket.T), "U": measured(bucket.U)}
        for number, bucket in enumerate(config.buckets, 1)
    ]
    first, *others = [_add_loss(result, table, config, kept, loss) for loss in config.losses]
    result.total = [_bought(first, rows) for rows in others]
    result.tables = [
        tabulated("largest", f"The largest batch of {config.model} in each bucket", table)
    ]
    for rows in (first, *others):
        if all(row["N"] for row in rows):
            result.lines.append(_max_duration(rows, config.seconds))
            for name, lines in _forms(rows).items():
                result.forms[name] = result.forms.get(name, "") + lines
    beyond = sum(bucket.beyond for bucket in config.buckets)
    if beyond:
        total = sum(bucket.count for bucket in config.buckets)
        words = "leave out utterances of more tokens than their bucket's U"
        result.lines.append(f"{words}: {beyond:,} of {total:,}")
    margin = f"of which {config.margin:.0%} stayed free in the search"
    result.lines += [f"limit: {config.limit}, {margin}", *kept.machine, *config.words]
    return result


def _rows_of_loss(
    config: Training, loss: str, outcomes: dict[int, Outcome], sizes: dict[int, int], job: Job
) -> list[Values]:
    """Return the rows of a loss, by bucket: the sizes that ran together, and the rates of their
    steps, which `job` took."""
    rates = text.gathered(
        (step.bucket, step.N / step.ns * 1e9)
        for step in job.of(Try)
        # a record before a step has no time, and the one with the peak repeats the last step
        if step.ns and not step.peak_bytes
    )
    rows: list[Values] = []
    for number, bucket in enumerate(config.buckets, 1):
        outcome = outcomes[number]
        N = sizes.get(number)
        row: Values = {
            "loss": loss,
            "bucket": number,
            "T": bucket.T,
            "U": bucket.U,
            # all utterances of the bucket are below, and none of a frame more
            "seconds": round((bucket.T + 0.5) * config.seconds, 4),
            "N": N,
            "status": outcome.status,
            "reason": outcome.reason,
            "peak_mb": outcome.peak_mb,
            "frames": round(N * bucket.frames / bucket.count) if N else None,
            "padded_frames": N * bucket.T if N else None,
            "utterances_per_second": median(rates[number]) if number in rates else None,
        }
        rows.append(row)
    return rows


def _add_loss(
    result: Answer, table: list[dict[str, Cell]], config: Training, kept: Kept, loss: str
) -> list[Values]:
    """Add a loss to the answer, and its columns to the table; return its rows, by bucket."""
    outcomes = searched(config, kept, loss)
    sizes, _, job = together(kept, loss, outcomes)
    rows = _rows_of_loss(config, loss, outcomes, sizes, job)
    for row, cells_of_bucket in zip(rows, table):
        outcome = outcomes[row["bucket"]]
        N = row["N"]
        if N != outcome.size:
            words = f"N {outcome.size} ran alone, and not after the others: now {N or 0}"
            result.lines.append(f"{outcome.name}: {words}")
        for key, title in COLUMNS.items():
            cells_of_bucket[f"{title} {loss}".strip()] = measured(row[key])
        shown = structs.replace(outcome, size=N).shown
        cells_of_bucket[f"N {loss}".strip()] = Cell(shown, N)
        if outcome.reason:
            where = f"{outcome.name} (T {row['T']}, U {row['U']})"
            result.failures.append(f"{where}: {outcome.status}: {outcome.reason}")
    result.rows += rows
    result.statuses += [row["status"] for row in rows]
    if sizes and job.status != "ok":
        result.statuses.append(job.status)
        result.failures.append(f"{loss} steps over all buckets: {job.status} {job.reason}".strip())
    return rows


def _bought(before: list[Values], after: list[Values]) -> str:
    """Return "fused over torchaudio: N 4.1 to 9.8 times, utterances/s 1.1 to 1.6 times", of the
    rows of both losses, over the buckets."""
    parts = []
    for key, title in (("N", "N"), ("utterances_per_second", "utterances/s")):
        ratios = [new[key] / old[key] for old, new in zip(before, after) if old[key] and new[key]]
        if ratios:
            parts.append(f"{title} {min(ratios):.1f} to {max(ratios):.1f} times")
    words = ", ".join(parts) or "no bucket has a size of both"
    return f"{after[0]['loss']} over {before[0]['loss']}: {words}"


def _max_duration(rows: list[Values], seconds: float) -> str:
    """Return the max_duration for those who can set nothing else, and what it wastes.  seconds: of
    a frame."""
    durations = [row["padded_frames"] * seconds for row in rows]
    least = min(durations)
    wasted = 1 - sum(least / most for most in durations) / len(durations)
    name = f"max_duration {rows[0]['loss']}".strip()
    words = f"which leaves {wasted:.0%} of the batches' room unused"
    return f"{name} (N x longest): {math.floor(least)} s, {words}"


def _forms(rows: list[Values]) -> dict[str, str]:
    """Return the lines to paste by format.  lhotse's constraint knows durations alone: the smaller
    of a bin's sizes."""
    by_duration: dict[float, int] = {}
    for row in rows:
        bound = row["seconds"]
        by_duration[bound] = min(row["N"], by_duration.get(bound, row["N"]))
    bins = list(by_duration)
    head = f"# {rows[0]['loss']}\n" if rows[0]["loss"] else ""
    lhotse = f"""{head}from lhotse.dataset import DynamicBucketingSampler
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
    pairs = [[row["seconds"], row["U"]] for row in rows]
    nemo = f"""{head}use_bucketing: true
num_buckets: {len(rows)}
bucket_duration_bins: {bins if len(bins) == len(pairs) else pairs}
bucket_batch_size: {[row["N"] for row in rows]}
max_duration: {bins[-1]}
"""
    return {"lhotse": lhotse, "nemo": nemo}
