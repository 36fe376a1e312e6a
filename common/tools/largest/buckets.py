"""The largest batches of a training, bucket by bucket: which job comes next, the table, lines to paste.

A bucket holds utterances of similar duration.  First each bucket is searched alone, by probes under
a part of the memory limit.  Then one job runs steps of all buckets in random order, under the whole
limit: the job "together"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from msgspec import Struct, structs

from rnnt_bench.core import text
from rnnt_bench.present.parts import Cell, Table, measured, tabulated
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

#: Percent of the utterances of a bucket that have no more tokens than its U.  Utterances with more
#: are to be left out of the training.
PERCENTILE = 98
#: Steps of a probe.  The optimizer makes its states at the end of the first; the second has them.
PROBE_STEPS = 2
#: The job "together" runs at least so many steps in all.
STEPS_TOGETHER = 20
#: It also runs at least so many steps of each bucket.
STEPS_OF_BUCKET = 3
#: Fields of a Row that the table shows beside N -> title.
COLUMNS = {
    "peak_mb": "peak MB",
    "frames": "frames",
    "padded_frames": "padded frames",
    "utterances_per_second": "utterances /s",
}


class Bucket(Struct, frozen=True):
    """The utterances of a bucket.

    Attributes:
        T: frames of the longest among the utterances of similar duration, before the cut by tokens
        U: tokens that PERCENTILE percent of the utterances do not exceed
        count: number of utterances
        frames: sum of the frames of all utterances
        beyond: number of utterances with more than U tokens
    """

    T: schema.Positive
    U: schema.Count
    count: schema.Positive
    frames: schema.Positive
    beyond: schema.Count


class Buckets(Struct, tag="training", kw_only=True):
    """The search of all buckets of a training.

    Attributes:
        model: import path
        losses: names of the losses to search for; "" is the model's own
        seconds: duration of a frame
        margin: share of the limit that is left free in the search
        words: lines below the table, on what is the same for all buckets and losses
        limit: memory that a step may take, in words
    """

    model: str
    losses: list[str]
    buckets: list[Bucket]
    seconds: float
    margin: float
    words: list[str]
    limit: str = ""

    def step(self, number: int, N: int) -> Try:
        """Return a step of N utterances of a bucket.  number: of the bucket, counted from 1."""
        bucket = self.buckets[number - 1]
        return Try(N=N, T=bucket.T, U=bucket.U, bucket=number)


class Steps(Request, tag="steps", kw_only=True):
    """Ask a job for steps of a training.

    Attributes:
        model, arguments: import path of what makes the model, and its arguments
        features, hop: values of a frame, and samples of a frame for a model that takes samples
        vocab_size: number of symbols, of a model that does not tell its own
        optimizer: name of a class of torch.optim
        share: part of the limit that the steps may take
        loss: its name; "" for the model's own
        tries: a step for each bucket
        rounds: how many times each of the tries is run
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
    """Return the utterances in buckets: cut by frames into `durations` groups of about equal total
    duration, and each group by tokens into `parts` buckets of about equal total duration.

    There may be fewer groups or buckets, see `_cut`.

    utterances: integers (utterances, 2), columns frames and tokens."""
    import numpy as np

    buckets = []
    for of_duration in _cut(utterances, column=0, parts=durations):
        T = int(of_duration[:, 0].max())
        for rows in _cut(of_duration, column=1, parts=parts):
            # "higher": the number of tokens of an utterance, not one between those of two
            U = int(np.percentile(rows[:, 1], PERCENTILE, method="higher"))
            beyond = int((rows[:, 1] > U).sum())
            frames = int(rows[:, 0].sum())
            buckets.append(Bucket(T, U, count=len(rows), frames=frames, beyond=beyond))
    return buckets


def _cut(utterances: Any, column: int, parts: int) -> list[Any]:
    """Return utterances, sorted by a column, cut into `parts` of about equal total frames.

    Utterances with an equal value in the column stay together, so there may be fewer parts."""
    import numpy as np

    rows = utterances[np.argsort(utterances[:, column], kind="stable")]
    running_frames = np.cumsum(rows[:, 0].astype(np.int64))
    # The running frames at the end of every part but the last, and the row that reaches them.
    ends = running_frames[-1] * np.arange(1, parts) / parts
    last_rows = np.searchsorted(running_frames, ends)
    # Each part is prolonged behind the last row with the same value: parts may end at the same row,
    # and one that ends at the last of all rows leaves an empty rest.
    edges = np.searchsorted(rows[:, column], rows[last_rows, column], side="right")
    return [part for part in np.split(rows, np.unique(edges)) if len(part)]


class Progress(Struct):
    """The progress of a training with one loss.

    Attributes:
        loss: its name; "" for the model's own
        outcomes: number of a bucket -> how its search ended; its size is what the job "together"
            is to run, which may be reduced
        reduced: number of a bucket that failed in a job "together" -> the size that ran alone
        name, job: the job "together" with the present sizes, and its name; it may not have run yet
    """

    loss: str
    outcomes: dict[int, Outcome]
    reduced: dict[int, int]
    name: str
    job: Job


def progress(config: Buckets, kept: Kept, loss: str) -> Progress:
    """Return how far a training is with a loss.

    A job "together" that did not fit ended at a step of one bucket.  Each such job reduces the size
    of that bucket by the share TOLERANCE of the size, or by 1 if that is more.  After a size of 1
    comes None.  The present job "together" has the number behind all such jobs."""
    outcomes = searched(config, kept, loss)
    reduced: dict[int, int] = {}
    head = f"{loss} together-".strip()
    # A job without values ended before its first step, so it tells of no bucket.
    unfit = [
        job
        for name, job in kept.jobs.items()
        if name.startswith(head) and job.status in LIMITS and job.values
    ]
    for job in unfit:
        number = job.of(Try)[-1].bucket or 0  # never 0: each step of a training has a bucket
        size = outcomes[number].size or 0
        reduced.setdefault(number, size)  # keeps the size before the first reduction
        outcomes[number].size = min(size - 1, int((1 - TOLERANCE) * size)) or None
    name = f"{head}{len(unfit) + 1}"
    return Progress(loss, outcomes, reduced, name, kept.job(name))


def searched(config: Buckets, kept: Kept, loss: str) -> dict[int, Outcome]:
    """Return number of a bucket -> the outcome of its search so far, the longest bucket first.

    The search begins at the size that gives about as many padded frames as the largest batch of the
    next longer bucket, and its first change of size is small.  If that batch is not known, the
    search begins at 1 and doubles the size."""
    outcomes = {}
    padded_frames = 0  # of the largest batch of the next longer bucket; 0 if none is known
    for number in range(len(config.buckets), 0, -1):
        bucket = config.buckets[number - 1]
        search = Search(
            f"{loss} bucket-{number}".strip(),
            low=1,
            cap=bucket.count,
            start=max(1, padded_frames // bucket.T),
            # The first change is small where `start` is a good guess; 1.0 doubles the size.
            stride=TOLERANCE if padded_frames else 1.0,
        )
        outcomes[number] = search.outcome(kept)
        padded_frames = bucket.T * (outcomes[number].size or 0)
    return outcomes


def next_probes(config: Buckets, kept: Kept, steps: Steps) -> list[tuple[str, Steps]]:
    """Return (name, request) of each job that is to come next; [] at the end.

    As long as the search of any bucket goes on, these jobs are probes: of each loss, one for each
    bucket whose search goes on, the longest bucket first.  After all searches they are the jobs
    "together", under the whole limit: one for each loss that has a size for any bucket, unless it
    has ended well.  The jobs "together" of all losses are returned at once, so that they run one
    after the other: their times are compared.

    steps: the request without its loss, tries and rounds."""
    states = [progress(config, kept, loss) for loss in config.losses]
    probes = []
    for state in states:
        for number, outcome in state.outcomes.items():
            if outcome.next_size is not None:
                tries = [config.step(number, outcome.next_size)]
                request = structs.replace(steps, loss=state.loss, tries=tries)
                probes.append((f"{outcome.name} probe-{outcome.next_size}", request))
    if probes:
        return probes
    together = []
    for state in states:
        sizes = [
            (number, outcome.size) for number, outcome in state.outcomes.items() if outcome.size
        ]
        if not sizes or state.job.status == "ok":
            continue
        tries = [config.step(number, N) for number, N in sizes]
        rounds = max(STEPS_OF_BUCKET, math.ceil(STEPS_TOGETHER / len(tries)))
        request = structs.replace(steps, loss=state.loss, tries=tries, rounds=rounds, share=1.0)
        together.append((state.name, request))
    return together


class Row(Struct):
    """A bucket of a training with a loss, as CSV and JSON have it.

    Attributes:
        seconds: bound between the durations of this bucket and of the next
        N: utterances of the largest batch; None where none is known
        peak_mb: highest peak of a probe of the size that ran alone
        frames: of a batch of N utterances of the bucket's mean length
        padded_frames: N times T
        utterances_per_second: N over the time of a step, the median of the bucket's steps in the
            job "together"; None where it ran none
    """

    loss: str
    bucket: int
    T: int
    U: int
    seconds: float
    N: int | None
    status: str
    reason: str
    peak_mb: float | None
    frames: int | None
    padded_frames: int | None
    utterances_per_second: float | None


def _rows(config: Buckets, state: Progress) -> list[Row]:
    """Return the rows of a loss, one for each bucket."""
    rates = text.gathered(
        (step.bucket, step.N / step.ns * 1e9)
        for step in state.job.of(Try)
        # The record before a step has no time; the one with the peak repeats the last step.
        if step.ns and not step.peak_bytes
    )
    rows = []
    for number, bucket in enumerate(config.buckets, start=1):
        outcome = state.outcomes[number]
        row = Row(
            loss=state.loss,
            bucket=number,
            T=bucket.T,
            U=bucket.U,
            # Half a frame is added: the bound is between T and T + 1 frames.
            seconds=round((bucket.T + 0.5) * config.seconds, 4),
            N=outcome.size,
            status=outcome.status,
            reason=outcome.reason,
            peak_mb=outcome.peak_mb,
            # On average: the utterances of a bucket have frames / count frames each.
            frames=round(outcome.size * bucket.frames / bucket.count) if outcome.size else None,
            padded_frames=outcome.size * bucket.T if outcome.size else None,
            utterances_per_second=median(rates[number]) if number in rates else None,
        )
        rows.append(row)
    return rows


def answer(kept: Kept) -> Answer:
    """Return the answer of a run: a table with a row for each bucket, the losses side by side.

    Lines above it tell what each further loss gains over the first.  A loss that has a size for
    every bucket also gets its max_duration and the text to paste into other tools."""
    config = schema.typed(kept.header.config, Buckets)
    result = Answer(kept.header.name)
    losses = [progress(config, kept, loss) for loss in config.losses]
    rows_of_losses = [_rows(config, state) for state in losses]
    first, *others = rows_of_losses
    result.total = [_gain(first, rows) for rows in others]
    result.tables = [_table(config, losses, rows_of_losses)]
    for state, rows in zip(losses, rows_of_losses):
        _add_ends(result, state, rows)  # rows, statuses, failures, and sizes that were reduced
    for rows in rows_of_losses:
        if all(row.N for row in rows):
            result.lines.append(_max_duration(rows, config.seconds))
            for name, lines in _forms(rows).items():
                result.forms[name] = result.forms.get(name, "") + lines
    beyond = sum(bucket.beyond for bucket in config.buckets)
    if beyond:
        utterances = sum(bucket.count for bucket in config.buckets)
        result.lines.append(
            f"leave out utterances of more tokens than their bucket's U: {beyond:,} of {utterances:,}"
        )
    margin = f"of which {config.margin:.0%} stayed free in the search"
    result.lines += [f"limit: {config.limit}, {margin}", *kept.machine, *config.words]
    return result


def _table(config: Buckets, losses: Sequence[Progress], rows: Sequence[Sequence[Row]]) -> Table:
    """Return the table of a run: a row for each bucket, and columns for each loss, whose titles end
    with its name.  The name of the model's own loss is "".

    rows: for each of `losses`, its Row in each bucket."""
    table = []
    for number, bucket in enumerate(config.buckets, start=1):
        line = {"bucket": measured(number), "T": measured(bucket.T), "U": measured(bucket.U)}
        for state, rows_of_loss in zip(losses, rows):
            row = rows_of_loss[number - 1]
            line[f"N {state.loss}".strip()] = Cell(state.outcomes[number].shown, row.N)
            for key, title in COLUMNS.items():
                line[f"{title} {state.loss}".strip()] = measured(getattr(row, key))
        table.append(line)
    return tabulated("largest", f"The largest batch of {config.model} in each bucket", table)


def _add_ends(result: Answer, state: Progress, rows: Sequence[Row]) -> None:
    """Add to an answer the rows of a loss, their statuses and failures, and a line for each bucket
    whose size was reduced.

    If any bucket has a size, and the job "together" did not end well, add the status and the
    failure of that job, too."""
    for row in rows:
        name = state.outcomes[row.bucket].name
        if row.bucket in state.reduced:
            alone = f"N {state.reduced[row.bucket]} ran alone, and not after the others"
            result.lines.append(f"{name}: {alone}: now {row.N or 0}")
        if row.reason:
            result.failures.append(f"{name} (T {row.T}, U {row.U}): {row.status}: {row.reason}")
        result.rows.append(structs.asdict(row))
        result.statuses.append(row.status)
    status = state.job.status
    if status != "ok" and any(row.N for row in rows):
        result.statuses.append(status)
        words = f"{state.loss} steps over all buckets: {status} {state.job.reason}"
        result.failures.append(words.strip())


def _gain(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return what the loss of the rows `after` gains over that of the rows `before`, such as "fused
    over torchaudio: N 4.1 to 9.8 times, utterances/s 1.1 to 1.6 times".

    The numbers are the smallest and the largest ratio over the buckets in which both have a number.

    before, after: the rows of one loss each, by bucket"""
    parts = []
    for key, title in (("N", "N"), ("utterances_per_second", "utterances/s")):
        pairs = [(getattr(new, key), getattr(old, key)) for new, old in zip(after, before)]
        ratios = [new / old for new, old in pairs if new and old]
        if ratios:
            parts.append(f"{title} {min(ratios):.1f} to {max(ratios):.1f} times")
    words = ", ".join(parts) or "no bucket has a size of both"
    return f"{after[0].loss} over {before[0].loss}: {words}"


def _max_duration(rows: Sequence[Row], seconds: float) -> str:
    """Return the line on max_duration, for a sampler that takes no other limit on a batch.

    max_duration is in seconds: the product of N and the longest utterance, in the bucket where this
    product is least.  The line also says what share of the largest batches max_duration leaves
    unused, as the mean over the buckets.

    rows: those of one loss, one for each bucket, all with an N; seconds: duration of a frame"""
    durations = [(row.padded_frames or 0) * seconds for row in rows]
    least = min(durations)
    # One max_duration holds for all buckets: each fills only the share least / duration.
    unused = 1 - sum(least / duration for duration in durations) / len(durations)
    name = f"max_duration {rows[0].loss}".strip()
    words = f"which leaves {unused:.0%} of the batches' room unused"
    return f"{name} (N x longest): {math.floor(least)} s, {words}"


def _forms(rows: Sequence[Row]) -> dict[str, str]:
    """Return the lines to paste, by format: Python for "lhotse", YAML for "nemo".

    lhotse's constraint takes one batch size for each duration.  Where several buckets have the same
    duration, since they are cut by tokens, it gets the smallest of their sizes.

    rows: those of one loss, one for each bucket, all with an N"""
    sizes = text.gathered((row.seconds, row.N or 0) for row in rows)
    durations = list(sizes)
    head = f"# {rows[0].loss}\n" if rows[0].loss else ""
    lhotse = f"""{head}from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint

duration_bins = {durations}  # seconds, the last one is the longest
batch_sizes = {list(map(min, sizes.values()))}
sampler = DynamicBucketingSampler(
    cuts,
    duration_bins=duration_bins[:-1],
    constraint=FixedBucketBatchSizeConstraint(duration_bins, batch_sizes),
    shuffle=True,
)
"""
    is_cut_by_tokens = len(durations) < len(rows)
    bins = [[row.seconds, row.U] for row in rows] if is_cut_by_tokens else durations
    nemo = f"""{head}use_bucketing: true
num_buckets: {len(rows)}
bucket_duration_bins: {bins}
bucket_batch_size: {[row.N for row in rows]}
max_duration: {durations[-1]}
"""
    return {"lhotse": lhotse, "nemo": nemo}
