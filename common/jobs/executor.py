"""Where jobs run: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Callable, List

from common.core.settings import Settings
from common.jobs.spec import Runnable
from common.records.schema import Record


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came while a job ran; `records` are those of that job."""

    def __init__(self, records: List[Record]):
        super().__init__("interrupted")
        self.records = records


class Executor(ABC):
    @abstractmethod
    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        """Run a job to its end and return its records, the last of which is its status.  python: the interpreter of its
        process; folder: of the run, where traces go; timeout: seconds; note: called now and then with how far the job
        is.  Whatever ends the process becomes a status.  Raises UserError for a mistake in the user's input that the
        process found, and Interrupted."""
