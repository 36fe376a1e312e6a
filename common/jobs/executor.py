"""Where jobs run: the interface, which tests implement with canned records."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Sequence

from common.core.settings import Settings
from common.jobs.spec import Job, Runnable
from common.system import load

if TYPE_CHECKING:
    from common.records.schema import Record


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came while a job ran; `records` are those of that job."""

    def __init__(self, records: List[Record]):
        super().__init__("interrupted")
        self.records = records


class Executor(ABC):
    """Runs jobs, one after the other."""

    @abstractmethod
    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        """Run a job to its end and return its records, the last of which is its status.

        Args:
            python: the interpreter of its process.
            folder: the folder of the run, where traces go.
            timeout: seconds.
            note: called now and then with how far the job is.

        Whatever ends the process becomes a status.  Raises UserError for a mistake in the user's input that the process
        found, and Interrupted.
        """

    def get_ready(self, jobs: Sequence[Job], pythons: Sequence[Path], settings: Settings) -> None:
        """Start what these jobs of one round need before the first of them is timed, in as little time as it takes."""
        return

    def disturbance(self, settings: Settings, seconds: float = 0.0) -> str:
        """Return how busy others keep this machine, as load.disturbance does.  seconds: how long to look."""
        on_cpu, others = settings.device.partition(":")[0] == "cpu", load.ForeignLoad()
        time.sleep(seconds)
        return load.disturbance(others, settings.threads if on_cpu else 1)
