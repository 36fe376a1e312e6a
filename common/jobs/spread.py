"""Several pieces of work on several devices at once; on this machine alone, one after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Callable, Dict, Generator, Hashable, Iterable, List, Sequence, Set, Tuple, TypeVar

from common.core.errors import UserError
from common.core.guard import say
from common.core.settings import Settings
from common.core.text import plain
from common.jobs.executor import Executor, Lost
from common.jobs.spec import Runnable
from common.records.schema import Record

Lane = TypeVar("Lane", bound=Executor)
Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(lanes: Sequence[Lane], items: Iterable[Item], serve: Callable[[Lane, Item], None]) -> None:
    """Call `serve` with each item on a lane that is free, in the order of the items.  An item whose lane is Lost is
    served again on another: `serve` then goes on where it was.  Whatever else is raised, Ctrl-C too, stops all lanes
    and is raised again once they have kept what they have.  Raises UserError when no lane is left."""
    if len(lanes) == 1 and lanes[0].here:
        for item in items:
            serve(lanes[0], item)
        return
    with closing(_ended(lanes, items, serve, "go on with --resume")) as ended:
        for _, future in ended:
            future.result()


def as_they_come(
    lanes: Sequence[Lane], items: Iterable[Item], serve: Callable[[Lane, Item], Result]
) -> Generator[Tuple[int, Result], None, None]:
    """As `spread`, with the number of each item, counted from 0, and what `serve` gave for it.  An item is taken when a
    lane is free.  After the UserError of an item no other begins, and it is raised once all before it have been told.
    A lane that is there twice serves two items at once."""
    errors: Dict[int, UserError] = {}
    done: Set[int] = set()
    first = 0  # of those that are not done
    going = takewhile(lambda _: not errors, items)
    with closing(_ended(lanes, going, serve, "give the same command, which goes on")) as ended:
        for number, future in ended:
            problem = future.exception()
            if isinstance(problem, UserError):
                errors[number] = problem
            else:
                yield number, future.result()
            done.add(number)
            while first in done:
                if first in errors:
                    raise errors[first]
                done.remove(first)
                first += 1


def _ended(
    lanes: Sequence[Lane], items: Iterable[Item], serve: Callable[[Lane, Item], Result], advice: str
) -> Generator[Tuple[int, Future[Result]], None, None]:
    """The number of each item and its future, when that has ended and its lane is not Lost.  advice: after "start nodes
    again, and"."""
    numbered, again, free = enumerate(items), deque(), deque(lanes)  # type: ignore[var-annotated]
    running: Dict[Future[Result], Tuple[Lane, Tuple[int, Item]]] = {}
    lost: Dict[Lane, str] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(lanes))) as pool:
        try:
            while True:
                while free:
                    item = again.popleft() if again else next(numbered, None)
                    if item is None:
                        break
                    lane = free.popleft()
                    running[pool.submit(serve, lane, item[1])] = lane, item
                if not running:
                    if free:
                        return
                    raise UserError(f"no device is left ({list(lost.values())[-1]}); start nodes again, and {advice}")
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    lane, item = running.pop(future)
                    problem = future.exception()
                    if not isinstance(problem, Lost):
                        free.append(lane)
                        yield item[0], future
                        continue
                    again.append(item)
                    if lane not in lost:
                        lost[lane] = str(problem)
                        say(f"warning: {plain(lost[lane])}: left out from here on")
        except BaseException:
            for lane, _ in running.values():
                lane.stop()
            wait(running)
            raise


class OnceMore:
    """A job whose device died runs once more, on another."""

    def __init__(self) -> None:
        self.lost: Set[Hashable] = set()

    def execute(
        self,
        key: Hashable,
        lane: Executor,
        job: Runnable,
        python: Path,
        folder: Path,
        settings: Settings,
        timeout: float,
        note: Callable[[str], None],
    ) -> List[Record]:
        """See Executor.execute.  key: of the job.  Raises Lost the first time alone: then the job is an error."""
        try:
            return lane.execute(job, python, folder, settings, timeout, note)
        except Lost as error:
            if not error.began or key not in self.lost:
                self.lost |= {key} if error.began else set()
                raise
            return [job.status("error", f"{error}, as did another that ran it before")]
