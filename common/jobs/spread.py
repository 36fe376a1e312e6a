"""Spreads pieces of work over several devices at once; on this machine alone, one after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Callable, Deque, Dict, Hashable, Iterable, List, Sequence, Set, Tuple, TypeVar

from common.core.errors import UserError
from common.core.guard import say
from common.core.settings import Settings
from common.core.text import plain
from common.jobs.executor import Executor, Lost
from common.jobs.spec import Runnable
from common.records.schema import Record

Lane = TypeVar("Lane", bound=Executor)
Item = TypeVar("Item")


def spread(lanes: Sequence[Lane], items: Iterable[Item], serve: Callable[[Lane, Item], None]) -> None:
    """Call `serve` with each item on a lane that is free, in the order of the items.  An item whose lane is Lost is
    served again on another: `serve` then goes on where it was.  Whatever else is raised, Ctrl-C too, stops all lanes
    and is raised again once they have kept what they have.  Raises UserError when no lane is left."""
    if len(lanes) == 1 and lanes[0].here:
        for item in items:
            serve(lanes[0], item)
        return
    waiting = iter(items)
    again: Deque[Item] = deque()
    free: Deque[Lane] = deque(lanes)
    running: Dict[Future[None], Tuple[Lane, Item]] = {}
    reason = ""  # why the last device is gone
    with ThreadPoolExecutor(max_workers=max(1, len(lanes))) as pool:
        try:
            while True:
                while free:
                    upcoming = again.popleft() if again else next(waiting, None)
                    if upcoming is None:
                        break
                    lane = free.popleft()
                    running[pool.submit(serve, lane, upcoming)] = lane, upcoming
                if not running:
                    if free:
                        return
                    raise UserError(f"no device is left ({reason}); start nodes again, and go on with --resume")
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    lane, item = running.pop(future)
                    try:
                        future.result()
                        free.append(lane)
                    except Lost as error:
                        again.append(item)
                        reason = str(error)
                        say(f"warning: {plain(reason)}: left out from here on")
        except BaseException:
            for lane, _ in running.values():
                lane.stop()
            wait(running)
            raise


class OnceMore:
    """Runs a job whose device died once more, on another."""

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
