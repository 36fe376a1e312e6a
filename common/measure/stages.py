"""What an instrument takes: a step that runs, and the names of its parts (joiner, loss, backward, ...).

A loss or a model says ``with stage("joiner"):``.  This does nothing until a pass installs an observer: the timing pass
takes the time of each part, the trace pass labels it in the trace.  No torch at import.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Optional, Protocol

Observer = Callable[[str], ContextManager]


class Step(Protocol):
    """Something that is ready to run once, with all that is untimed already done."""

    def run(self, after_forward: Callable[[], None] = ...) -> Any:
        """Forward, then `after_forward()`, then backward."""


_observer: Optional[Observer] = None


def stage(name: str) -> ContextManager:
    """Mark a part of the step with `name`."""
    return nullcontext() if _observer is None else _observer(name)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Install `observer` for the stages that are entered inside."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before
