"""Summarize the samples of one run: times, stages, rates, medians of rounds, other load."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.analysis import parts
from common.core import statistics
from common.core.statistics import Summary
from common.core.text import gathered, gathered_twice
from common.records import schema, store
from common.records.schema import Batch, Limits, Sample

NodeOf = Mapping[str, Optional[str]]  # job -> device, of a cluster; else None


class Times(NamedTuple):
    """Hold the times of one scope in ms.

    Attributes:
        ms: the times that rows are ranked by.
        interval: the 95% interval of their median over rounds.
        event, wall: the times by the two clocks of CUDA.
    """

    ms: Optional[Summary]
    interval: Optional[List[float]]
    event: Optional[Summary]
    wall: Optional[Summary]
    forward: Optional[Summary]


def times(samples: Sequence[Sample], scope: str) -> Times:
    """Return the times of a scope; None where it was not timed."""
    of_scope = [sample for sample in samples if sample.scope == scope]
    triples = ((sample.round, sample.batch, sample.ranked_ns / 1e6) for sample in of_scope)
    interval = statistics.interval_of_rounds(gathered_twice(triples))

    def described(key: str) -> Optional[Summary]:
        durations = ((sample.batch, getattr(sample, key)) for sample in of_scope)
        return statistics.describe(gathered((batch, ns / 1e6) for batch, ns in durations if ns is not None))

    events = described("total_event_ns")
    return Times(
        described("ranked_ns"),
        list(interval) if interval else None,
        events,
        described("total_wall_ns") if events else None,
        # On CUDA the host runs ahead of forward, so only the events know when it ended.
        described("forward_wall_ns") or described("forward_event_ns"),
    )


def stages(samples: Sequence[Sample], scope: str) -> Dict[str, float]:
    """Return the milliseconds of each stage: the mean over batches of their medians."""
    durations = gathered_twice(
        (stage, sample.batch, duration / 1e6)
        for sample in samples
        if sample.scope == scope
        for stage, duration in (sample.stages or {}).items()
    )
    summaries = {stage: statistics.describe(batches) for stage, batches in durations.items()}
    return {stage: summary.median for stage, summary in summaries.items() if summary}


def rates(samples: Sequence[Sample], batches: Sequence[Batch]) -> Tuple[Optional[float], Optional[float]]:
    """Return (utterances per second, frames per second) of the measured batches, over the sum of the medians of their
    steps; None where that is not known."""
    seconds_of = gathered((sample.batch, sample.ranked_ns / 1e9) for sample in samples if sample.scope == "step")
    known = [batch for batch in batches if batch.index in seconds_of]
    if not known:
        return None, None
    seconds = sum(statistics.median(seconds_of[batch.index]) for batch in known)
    frames = [batch.frames for batch in known if batch.frames is not None]
    return sum(batch.N for batch in known) / seconds, sum(frames) / seconds if len(frames) == len(known) else None


def in_order(timed: Sequence[Sample]) -> Iterator[parts.Sample]:
    """Yield the samples in the order taken, without warm-up."""
    elapsed = 0.0
    for line in timed:
        elapsed += line.ranked_ns / 1e9
        if not line.warmup:
            yield parts.Sample(
                line.scope,
                str(line.round),
                str(line.batch),
                elapsed,
                line.ranked_ns / 1e6,
                bool(line.flags),
                line.foreign_cpu,
                line.beside_load,
            )


def stopped(ends: Sequence[schema.Stop]) -> Dict[str, Dict[str, int]]:
    """Return scope -> why sampling ended -> number of rounds."""
    reasons = gathered((end.scope, end.why) for end in ends)
    return {scope: dict(Counter(of_scope)) for scope, of_scope in reasons.items()}


def of_one_device(
    samples: Sequence[Sample], limits: Sequence[Limits], node_of: NodeOf
) -> Tuple[List[Sample], List[Limits]]:
    """Return the samples and limits of the device with the most samples, since one device's limits do not apply to
    another."""
    count = Counter(node_of.get(sample.job) for sample in samples)
    if len(count) < 2 and not any(count):
        return list(samples), list(limits)
    node = max(count, key=lambda each: count[each])
    alike = [sample for sample in samples if node_of.get(sample.job) == node]
    return alike, [line for line in limits if line.node == node]


def _round_name(sample: Sample, node_of: NodeOf) -> str:
    """Return the round as text, since keys of JSON are text; with its device where there are several, so that rounds of
    two devices are never paired."""
    return " on ".join(filter(None, [str(sample.round), node_of.get(sample.job)]))


def round_medians(samples: Sequence[Sample], scope: str, node_of: NodeOf) -> Dict[str, Dict[str, float]]:
    """Return round -> batch -> median ms."""
    of_scope = [sample for sample in samples if sample.scope == scope]
    triples = ((_round_name(sample, node_of), str(sample.batch), sample.ranked_ns / 1e6) for sample in of_scope)
    return {
        name: {batch: statistics.median(values) for batch, values in batches.items()}
        for name, batches in gathered_twice(triples).items()
    }


# Load.


def loaded_rounds(samples: Sequence[Sample], scope: str, node_of: NodeOf) -> List[str]:
    """Return the names of the rounds of a scope that ran beside other load for more than half of their time."""
    rounds = gathered((_round_name(sample, node_of), sample) for sample in samples if sample.scope == scope)
    return [name for name, of_round in rounds.items() if store.is_loaded(of_round)]


def others_cpu(samples: Sequence[Sample]) -> Optional[float]:
    """Return the share of the CPUs that other processes took, averaged over the time of the samples that know it."""
    known = [(sample.total_wall_ns, sample.foreign_cpu) for sample in samples if sample.foreign_cpu is not None]
    total = sum(time for time, _ in known)
    return sum(time * share for time, share in known) / total if total else None
