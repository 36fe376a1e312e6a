"""Names for the parts of a step (joiner, loss, backward, ...), seen differently by each pass.

An adapter says ``with stage("joiner"):``.  Nothing happens unless a pass has installed an observer: timing takes the
time between its ends, trace puts a record_function label there.  No torch at import.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Callable, ContextManager, Iterator, Optional

Observer = Callable[[str], ContextManager]

_observer: Optional[Observer] = None


def stage(name: str) -> ContextManager:
    """A part of the step under `name`, for whoever observes."""
    return nullcontext() if _observer is None else _observer(name)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Install `observer` for the stages entered inside."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before
