"""Where jobs run: the interface."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from common.core.implementations import find
from common.core.settings import Settings
from common.jobs.spec import Job, Runnable
from common.setup import environments, interpreters
from common.setup.interpreters import Choice
from common.system import load, memory

if TYPE_CHECKING:
    from common.records.schema import Record


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came while a job ran; `records` are those of that job."""

    def __init__(self, records: List[Record]):
        super().__init__("interrupted")
        self.records = records


class Lost(Exception):
    """Raised when a device is gone, with the job that ran there.  began: whether that job had begun."""

    def __init__(self, reason: str, began: bool):
        super().__init__(reason)
        self.began = began


class Executor(ABC):
    """Runs jobs on the devices of this machine, or of others.

    Attributes:
        machine: the record of the machine that has the devices; None for this one.
        label: the name of the device, if there are several.
        here: whether jobs run on this machine, one after the other.
    """

    machine: Optional[Record] = None
    label = ""
    here = True

    @abstractmethod
    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        """Run a job to its end and return its records, the last of which is its status.  python: the interpreter of its
        process; folder: of the run, where traces go; timeout: seconds; note: called now and then with how far the job
        is.  Whatever ends the process becomes a status.  Raises UserError for a mistake in the user's input that the
        process found, Interrupted, and Lost."""

    def get_ready(self, jobs: Sequence[Job], pythons: Sequence[Path], settings: Settings) -> None:
        """Start what these jobs of one round need before the first of them is timed, in as little time as it takes."""
        return

    def lanes(self) -> Sequence[Executor]:
        """Return an executor for each device; they run side by side, each one job at a time."""
        return [self]

    def stop(self) -> None:
        """End the job that runs, from another thread, as Interrupted.  Here Ctrl-C reaches it by itself."""
        return

    def choose(self, names: Sequence[str], in_place: bool, prefer_here: Sequence[str]) -> Dict[str, Choice]:
        """Return the Python of each implementation.  prefer_here: those for which the running Python comes first."""
        return {
            name: interpreters.choose(find(name), in_place=in_place, prefer_here=name in prefer_here) for name in names
        }

    def python(self, environment: Optional[str] = None) -> Path:
        """Return the Python of an environment where that is made, else the running one."""
        return (environments.interpreter(environment) if environment else None) or Path(sys.executable)

    def resolve_device(self, wanted: str, python_of: Mapping[str, Choice]) -> str:
        """See interpreters.resolve_device.  Raises UserError."""
        return interpreters.resolve_device(wanted, [choice.python for choice in python_of.values() if choice.python])

    def memory(self) -> Tuple[Optional[int], Optional[int]]:
        """Return the bytes of the machine's memory, and of what is free of it; None where it is not known."""
        return memory.total_memory(), memory.available_memory()

    def controls(self, python_of: Mapping[str, Choice], device: str) -> Dict[str, Choice]:
        """See interpreters.controls."""
        return interpreters.controls(python_of, device)

    def disturbance(self, settings: Settings, seconds: float = 0.0) -> str:
        """Return how busy others keep this machine, as load.disturbance does; "" where jobs run elsewhere.

        seconds: how long to look.
        """
        if not self.here:
            return ""
        on_cpu, others = settings.device.partition(":")[0] == "cpu", load.ForeignLoad()
        time.sleep(seconds)
        return load.disturbance(others, settings.threads if on_cpu else 1)

    def with_newest_torch(self, pythons: Mapping[str, Path]) -> Optional[str]:
        """See interpreters.with_newest_torch."""
        return interpreters.with_newest_torch(pythons)
