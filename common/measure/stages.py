"""Define what an instrument measures: a step that runs, and its named stages (joiner, loss, backward, ...).

A loss or a model marks a stage by ``with stage("joiner"):``.  This does nothing until a pass installs an observer: the
timing pass measures the time of each stage, the trace pass labels it in the trace.  Does not import torch.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Optional, Protocol

Observer = Callable[[str], ContextManager]


class Step(Protocol):
    """A step that is ready to run once; all that is not measured is already done."""

    def run(self, after_forward: Callable[[], None] = ...) -> Any:
        """Run forward, then call `after_forward`, then run backward."""


_observer: Optional[Observer] = None


def stage(name: str) -> ContextManager:
    """Mark the block as the stage `name` of the step."""
    return nullcontext() if _observer is None else _observer(name)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Install `observer` for the stages that the block enters."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before
