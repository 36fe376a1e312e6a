"""Time one step and its named stages (joiner, loss, backward, ...), on the CPU or with CUDA events.

The code of a step marks a stage by ``with stage("joiner"):``, which does nothing until a pass
installs an observer.  The observer of the timing pass measures the stage; that of the trace pass
labels it in the trace.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from rnnt_bench.instruments.device import cache_bytes

#: Bound before the script of a loss is loaded, since the script may replace time.perf_counter_ns.
now = time.perf_counter_ns
#: Bytes; larger than any L2 cache, for a torch that does not tell the size of the cache.
LARGE_L2 = 256 * 2**20
#: Takes the name of a stage; returns a context manager that its code runs in.
Observer = Callable[[str], AbstractContextManager]
_observer: Observer | None = None


class Step(Protocol):
    """Describes a step that is ready to run once: all that is not measured has been done."""

    def run(self, after_forward: Callable[[], None] = ...) -> Any:
        """Run forward, then call `after_forward`, then run backward."""


def stage(name: str) -> AbstractContextManager:
    """Mark the block as the stage `name` of the step."""
    return nullcontext() if _observer is None else _observer(name)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let an observer see the stages of the block."""
    global _observer
    before = _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = before


class Clock:
    """Sets marks in time, which are compared after the work is done: perf_counter_ns on the CPU,
    events on CUDA.

    When it is made, it takes all objects that are alive out of Python's garbage collection.

    Attributes:
        cuda: whether the device is a GPU.
        evicting: a tensor larger than the L2 cache of the GPU.  Writing over it before a step
            empties the cache.  None on a CPU, and where the cache is to stay warm (not `cold`).
    """

    def __init__(self, device: torch.device, cold: bool = False):
        self.cuda = device.type == "cuda"
        self.device = device
        self.evicting: torch.Tensor | None = None
        if cold and self.cuda:
            # Twice the cache: it need not drop its oldest lines first.
            self.evicting = torch.empty(
                2 * (cache_bytes(device) or LARGE_L2), dtype=torch.uint8, device=device
            )
        gc.collect()
        # loaded objects stay alive, so the collection before each sample need not scan them
        gc.freeze()

    def synchronize(self) -> None:
        """Wait until a GPU has done its work; do nothing on a CPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """Return a mark of this moment for `between`: nanoseconds on a CPU, else an event."""
        if not self.cuda:
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> int:
        """Return the nanoseconds between two marks; on CUDA only after `synchronize`."""
        return round(begin.elapsed_time(end) * 1e6) if self.cuda else end - begin


class StepTimes(NamedTuple):
    """Hold the times of a step, as the fields of a ``sample`` record.

    Times of forward are of the wall clock on a CPU, and of events on CUDA; `stages` are by name.
    """

    total_wall_ns: int
    forward_wall_ns: int | None
    forward_event_ns: int | None
    total_event_ns: int | None
    stages: dict[str, int]

    @property
    def forward_ns(self) -> int | None:
        """Return the time of forward, by events if there are any, else by the wall clock."""
        return self.forward_wall_ns if self.forward_event_ns is None else self.forward_event_ns


def time_step(
    step: Step, clock: Clock, read: Callable[[Any], Any] = lambda answer: None
) -> tuple[StepTimes, Any]:
    """Run a step; return its times, and what `read` returns for the step's answer.

    Python collects its garbage before the step, not during it.  `read` is called before the wall
    time ends, so that this has the work which is put off until the answer is read.  On CUDA the
    host runs ahead of the device, so the wall time of forward is None; use its event time.
    """
    spans: list[Any] = []  # (name, mark at the begin, mark at the end) of stages
    marks: list[Any] = []  # one, of the moment when the step calls `after_forward`

    @contextmanager
    def observer(name: str) -> Iterator[None]:
        begin = clock.mark()
        yield
        spans.append((name, begin, clock.mark()))

    gc.collect()
    gc.disable()
    with ExitStack() as stack:
        stack.callback(gc.enable)
        stack.enter_context(observed_by(observer))
        if clock.evicting is not None:
            clock.evicting.zero_()
        clock.synchronize()
        wall_begin = now()
        begin = clock.mark()
        answer = step.run(after_forward=lambda: marks.append(clock.mark()))
        end = clock.mark()
        value = read(answer)
        clock.synchronize()
        wall = now() - wall_begin
    forward = clock.between(begin, marks[-1])
    stages: dict[str, int] = {}
    for name, stage_begin, stage_end in spans:
        stages[name] = stages.get(name, 0) + clock.between(stage_begin, stage_end)
    times = StepTimes(
        total_wall_ns=wall,
        forward_wall_ns=None if clock.cuda else forward,
        forward_event_ns=forward if clock.cuda else None,
        total_event_ns=clock.between(begin, end) if clock.cuda else None,
        stages=stages,
    )
    return times, value
