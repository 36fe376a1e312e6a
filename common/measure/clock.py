"""The timing pass: forward and forward+backward of both scopes, profiler off, in a process of its own per round.

Inputs and leaves are made anew for every sample outside the timed region.  CPU: perf_counter_ns at both ends.  CUDA:
events and wall time, the device synchronised at both ends.  Every sample is kept and carries the load of other
processes beside it; the warm-up samples too, marked.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import torch

from common.losses import work
from common.losses.stages import observed_by
from common.passes import stopping
from common.running.machine import ForeignLoad, busy_flags


class Clock:
    """Marks in time, read after the work is done: perf_counter_ns on the CPU, events on CUDA."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.device = device

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> int:
        """Nanoseconds from mark to mark; on CUDA only after `synchronize`."""
        return round(begin.elapsed_time(end) * 1e6) if self.cuda else end - begin


def time_work(prepared: work.Work, clock: Clock) -> Dict[str, Any]:
    """The timed fields of a ``sample`` record, in nanoseconds.

    On CUDA the host runs ahead, so forward's wall time would tell nothing and is null; its event time tells.
    """
    spans: List[Any] = []

    @contextmanager
    def observer(name: str) -> Iterator[None]:
        begin = clock.mark()
        yield
        spans.append((name, begin, clock.mark()))

    with observed_by(observer):
        clock.synchronize()
        wall_begin, begin = time.perf_counter_ns(), clock.mark()
        marks: Dict[str, Any] = {}
        prepared.run(after_forward=lambda: marks.update(forward=clock.mark()))
        end = clock.mark()
        clock.synchronize()
        wall = time.perf_counter_ns() - wall_begin
    forward, total = clock.between(begin, marks["forward"]), clock.between(begin, end)
    stages: Dict[str, int] = {}
    for name, stage_begin, stage_end in spans:
        stages[name] = stages.get(name, 0) + clock.between(stage_begin, stage_end)
    return {
        "forward_wall_ns": None if clock.cuda else forward,
        "total_wall_ns": wall if clock.cuda else total,
        "forward_event_ns": forward if clock.cuda else None,
        "total_event_ns": total if clock.cuda else None,
        "stages": stages,
    }


class LoadedSamples:
    """Holds samples until the load beside them is known: its counter ticks too coarsely for a short sample alone."""

    def __init__(self) -> None:
        self.load = ForeignLoad()
        self.waiting: List[Dict[str, Any]] = []

    def add(self, sample: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
        self.waiting.append(sample)
        if self.load.ready():
            yield from self.flush()

    def flush(self) -> Iterator[Dict[str, Any]]:
        share = self.load.share()
        for sample in self.waiting:
            yield {**sample, "foreign_cpu": share, "flags": busy_flags(share)}
        self.waiting = []


def measure_scope(context, scope: str, clock: Clock) -> Iterator[Dict[str, Any]]:
    """Warm-up samples of the first batch, then sweeps over all batches until `stopping.enough`.

    Loops in Python compile nothing and take seconds: they are not warmed up.
    """
    settings = context.settings
    interpreted = context.device.type in context.adapter.python_loops
    loaded = LoadedSamples()

    def sample(batch: int, repeat: int, warmup: bool) -> Dict[str, Any]:
        prepared = work.prepare(context.adapter, context.model, context.make_batch(batch, repeat), scope)
        timed = time_work(prepared, clock)
        return {"record": "sample", "scope": scope, "batch": batch, "repeat": repeat, "warmup": warmup, **timed}

    durations: List[int] = []
    while not interpreted and not stopping.warmed_up(durations, settings.max_seconds)[0]:
        warm = sample(context.batches[0], len(durations), warmup=True)
        durations.append(warm["total_wall_ns"])
        yield from loaded.add(warm)
    yield from loaded.flush()

    measured: Dict[int, List[int]] = {batch: [] for batch in context.batches}
    repeat = 0
    while True:
        for batch in context.batches:
            done, _ = stopping.enough(
                measured, len(context.batches), settings.spread, settings.max_samples, settings.max_seconds
            )
            if done:
                yield from loaded.flush()
                return
            taken = sample(batch, repeat, warmup=False)
            measured[batch].append(taken["total_wall_ns"])
            yield from loaded.add(taken)
        repeat += 1


def run(context, round_number: Optional[int] = 1) -> Iterator[Dict[str, Any]]:
    """``sample`` records of every scope; the scopes change order from round to round.  `context`:
    common.running.worker.Context."""
    clock = Clock(context.device)
    scopes = list(context.settings.scopes)
    if round_number and round_number % 2 == 0:
        scopes.reverse()
    for scope in scopes:
        for record in measure_scope(context, scope, clock):
            yield {**record, "round": round_number}
