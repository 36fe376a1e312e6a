"""Cuts a list of any length into shards, has processes work on them, and gives the results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Callable, Deque, Iterable, Iterator, List, Optional, Tuple, TypeVar

from common.core.errors import UserError
from common.system.processes import die_with_parent

#: Of a shard: about a second of work, and never much memory.
ENTRIES, CHARACTERS = 10_000, 2**25
#: Shards given out and results that wait for one before them, for each process.
AHEAD = 4

Item = TypeVar("Item")
Result = TypeVar("Result")

#: In a process of `in_order`: what it does with an item.
_work: Callable[[Any], Any]


@dataclass
class Shard:
    """(number, entry) pairs; in a loop, `error` is raised after them."""

    entries: List[Tuple[int, Any]]
    error: Optional[UserError] = None

    def __iter__(self) -> Iterator[Tuple[int, Any]]:
        yield from self.entries
        if self.error:
            raise self.error


def cut(entries: Iterable[Tuple[int, Any]]) -> Iterator[Shard]:
    """Yield shards of (number, entry) pairs.  A UserError of `entries` goes with the last shard, so that an error of an
    entry before it comes first."""
    pairs: List[Tuple[int, Any]] = []
    size, error = 0, None
    try:
        for number, entry in entries:
            pairs.append((number, entry))
            size += len(entry) if isinstance(entry, str) else 0
            if len(pairs) >= ENTRIES or size >= CHARACTERS:
                yield Shard(pairs)
                pairs, size = [], 0
    except UserError as problem:
        error = problem
    if pairs or error:
        yield Shard(pairs, error)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """Yield ``work(item)`` of each item, in their order, from `jobs` processes; 1: this process does it.

    A UserError of `work` is raised where its result would be.  Raises UserError too when a process is killed.  The
    processes end with the loop, or with this process.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    waiting: Deque[Future[Result]] = deque()
    # forked, since `work` may hold gigabytes, which the processes then share
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(work, os.getpid())) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(_serve, item))
                if len(waiting) >= AHEAD * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            reason = "a process ended before its work, perhaps for lack of memory"
            raise UserError(f"--jobs {jobs}: {reason}; start again with fewer of them") from error
        finally:
            for future in waiting:
                future.cancel()


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """Prepare a process: signals of the terminal go to the parent alone, which ends this one."""
    global _work
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    _work = work


def _serve(item: Any) -> Any:
    return _work(item)
