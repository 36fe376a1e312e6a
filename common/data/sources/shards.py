"""A list of any length in shards: cut at the same places on every machine, done by processes, given in order.

Shards and results go through pipes, so that a gzipped file is read once, and what does the work needs no file.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, TypeVar

from common.core.errors import UserError
from common.system.processes import die_with_parent

#: Of a shard: about a second of work, and never much memory.
ENTRIES, CHARACTERS = 10_000, 2**25
#: Results that wait for one before them, for each process.
AHEAD = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Shard:
    """(number, entry) pairs; in a loop, `error` is raised after them.  whole: the list may go on after it."""

    entries: List[Tuple[int, Any]]
    error: Optional[UserError] = None
    whole: bool = False

    def __iter__(self) -> Iterator[Tuple[int, Any]]:
        yield from self.entries
        if self.error:
            raise self.error


def cut(entries: Iterable[Tuple[int, Any]]) -> Iterator[Shard]:
    """Shards of (number, entry) pairs.  Where they end depends on the entries alone.  A UserError of `entries` goes
    with the last shard: an error of an entry before it comes first."""
    part: List[Tuple[int, Any]] = []
    size, error = 0, None
    try:
        for number, entry in entries:
            part.append((number, entry))
            size += len(entry) if isinstance(entry, str) else 0
            if len(part) >= ENTRIES or size >= CHARACTERS:
                yield Shard(part, whole=True)
                part, size = [], 0
    except UserError as problem:
        error = problem
    if part or error:
        yield Shard(part, error)


class Ended(UserError):
    """A process ended before its work."""


class Processes:
    """So many processes that do `work`, each begun when it is needed first; 1: this one does it.  They end with this
    process, if not before."""

    def __init__(self, work: Callable[[Any], Any], jobs: int):
        self.work, self.jobs = work, jobs
        self._processes: List[Any] = []
        self._idle: List[Connection] = []

    def in_order(self, items: Iterable[Any]) -> Iterator[Any]:
        """``work(item)`` of each, in their order.  A UserError of `work` is raised where its result would be."""
        if self.jobs == 1:
            yield from map(self.work, items)
            return
        at_work: Dict[Connection, int] = {}
        results: Dict[int, Tuple[str, Any]] = {}
        given = 0
        try:
            for number, item in enumerate(items):
                if not self._idle and len(self._processes) < self.jobs:
                    self._begin()
                while not self._idle or number - given >= AHEAD * self.jobs:
                    self._idle += _collect(at_work, results)
                    while given in results:
                        yield _result(results.pop(given))
                        given += 1
                at_work[self._idle[-1]] = number
                self._idle.pop().send(item)
            while at_work or results:
                self._idle += _collect(at_work, results)
                while given in results:
                    yield _result(results.pop(given))
                    given += 1
        except (EOFError, ConnectionError) as error:
            why = "a process ended before its work, perhaps for lack of memory"
            raise Ended(f"--jobs {self.jobs}: {why}; start again with fewer of them") from error
        finally:
            if at_work:  # their results are not wanted any more
                self.end()

    def end(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join()
        self._processes, self._idle = [], []

    def _begin(self) -> None:
        context = multiprocessing.get_context("fork")  # `work` may hold gigabytes, which the processes share
        ours, theirs = context.Pipe()
        self._processes.append(context.Process(target=_serve, args=(theirs, self.work, os.getpid()), daemon=True))
        self._processes[-1].start()
        theirs.close()
        self._idle.append(ours)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """As Processes.in_order.  The processes end with the loop, however it ends."""
    processes = Processes(work, jobs)
    try:
        yield from processes.in_order(items)
    finally:
        processes.end()


def _collect(at_work: Dict[Connection, int], results: Dict[int, Tuple[str, Any]]) -> List[Connection]:
    """Wait for a result, and take all that are there; returns where they are from."""
    done = [connection for connection in wait(list(at_work)) if isinstance(connection, Connection)]
    for connection in done:
        results[at_work.pop(connection)] = connection.recv()
    return done


def _result(given: Tuple[str, Any]) -> Any:
    kind, value = given
    if kind == "mistake":
        raise UserError(value)
    if kind == "failure":
        raise RuntimeError(f"in a process:\n{value}")
    return value


def _serve(connection: Connection, work: Callable[[Any], Any], parent: int) -> None:
    """In a process: work until the parent ends it.  Ctrl-C goes to both; the parent answers it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    while True:
        item = connection.recv()
        try:
            answer = "result", work(item)
        except UserError as error:
            answer = "mistake", str(error)
        except Exception:
            answer = "failure", traceback.format_exc()
        connection.send(answer)
