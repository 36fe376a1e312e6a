"""Stop the workers of a command with it at Ctrl-Z, and let them go on at `fg`.

Stops are counted, since a time that was interrupted is no time.

Ctrl-Z reaches the process group of the terminal.  Workers have sessions of their own, so the command stops them.
A SIGSTOP sent to the command is not seen, and workers on other machines are not stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

#: How often this process has gone on after a stop, since `watch`.
_continued = 0
#: Nanoseconds that `with_children` has stopped this process for.
_stopped_ns = 0


def watch() -> None:
    """Count from now on how often this process is stopped; for `count`."""
    signal.signal(signal.SIGCONT, _went_on)


def _went_on(_number: int, _frame: Any) -> None:
    global _continued
    _continued += 1


def count() -> int:
    """Return how often this process was stopped and went on, since `watch`."""
    return _continued


def stopped_ns() -> int:
    """Return for how many nanoseconds Ctrl-Z has stopped this process within `with_children` so far."""
    return _stopped_ns


@contextmanager
def with_children() -> Iterator[None]:
    """Let Ctrl-Z within the block also stop all processes that this one started, and `fg` continue them.

    Leaves the signal as it is where it is ignored or handled already, and in a thread, which may not handle signals."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _stop(number: int, _frame: Any) -> None:
    """Stop all descendants, then this process as the signal does by default; let them go on when it goes on."""
    global _stopped_ns
    since = time.monotonic_ns()
    stopped: Set[int] = set()
    try:
        while running := _descendants(os.getpid()) - stopped:  # one may have started another meanwhile
            _send(signal.SIGSTOP, running)
            stopped |= running
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), number)  # returns at SIGCONT
    finally:
        _stopped_ns += time.monotonic_ns() - since
        signal.signal(number, _stop)  # before anything goes on, or the next Ctrl-Z may stop this process alone
        _send(signal.SIGCONT, stopped)


def _send(number: int, processes: Set[int]) -> None:
    for process in processes:
        with suppress(OSError):  # it ended
            os.kill(process, number)


def _descendants(process: int) -> Set[int]:
    """Return the children of a process, theirs and so on; none where there is no /proc."""
    children, generation = children_by_parent(), [process]
    descendants: Set[int] = set()
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        descendants.update(generation)
    return descendants


def children_by_parent() -> Dict[int, List[int]]:
    """Return the ids of all processes by that of their parent; none where there is no /proc."""
    children: Dict[int, List[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it ended
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    return children
