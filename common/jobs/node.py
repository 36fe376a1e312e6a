"""The end of `--executor ray` on a node: what the actor of one device calls, in Ray's Python and the node's checkout.

A job runs through the local executor of this checkout, in this checkout's environments, exactly as on one machine.
Needs no package beside the standard library, since Ray's Python may have no other.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Sequence, Tuple

from common.core import scripts
from common.core.errors import UserError
from common.core.files import write_whole
from common.core.implementations import find
from common.core.paths import ROOT
from common.core.settings import Settings
from common.jobs.carried import placed
from common.jobs.executor import Interrupted
from common.jobs.local import Local
from common.jobs.spec import Job, Runnable
from common.setup import environments, interpreters
from common.setup.checkout import suite
from common.setup.interpreters import Choice
from common.system import machine, nvml

if TYPE_CHECKING:
    from common.records.schema import Record

#: Records that say which device they are of.
PLACED = ("environment", "limits", "judged", "profile")
#: Files that came with a request: name and content, by the text that names each.
Files = Mapping[str, Tuple[str, bytes]]


@dataclass(frozen=True)
class Description:
    """Describe a device.

    Attributes:
        machine: see machine.describe, with the name of the GPU.
        device: as --device.
        reasons: by implementation, why it has no Python there; "" where it has one.
        controls: those of interpreters.controls.
        memory: bytes in all and available.
        torch: version numbers, by implementation.
    """

    machine: Record
    device: str
    reasons: Dict[str, str]
    controls: List[str]
    memory: Tuple[Optional[int], Optional[int]]
    torch: Dict[str, Tuple[int, ...]]


@dataclass(frozen=True)
class Answer:
    """Hold the result of a job: its records, and its files in `folder` on the node, by name with their sizes in
    bytes."""

    records: List[Record]
    interrupted: bool
    files: List[Tuple[str, int]]
    folder: str


class Node:
    """Run jobs on a device of this node.

    Attributes:
        stopped: set from another thread; the job that runs ends, and no other begins.
        scratch: the files of the last job.
    """

    def __init__(self) -> None:
        self.executor = Local()
        self.stopped = False
        self.scratch: Optional[TemporaryDirectory[str]] = None

    def describe(
        self,
        expected: str,
        names: Sequence[str],
        device: str,
        controls: bool,
        environment: Optional[str],
        needed: Sequence[str],
        files: Files,
    ) -> Description:
        """Set the node up and return the description of its device.  Raises UserError where it cannot take part in the
        run.

        Args:
            expected: suite() of the driver.
            names: implementations, of which `files` may have scripts.
            device: as --device.
            controls: whether to look for interpreters.controls.
            environment: that of tasks.
            needed: environments to make where they are missing.
        """
        if suite() != expected:
            raise UserError(f"its checkout {ROOT} is not the same as the driver's: bring both to one revision")
        usual = [name for name in needed if not environments.ENVIRONMENTS[name].optional]
        missing = [name for name in usual if environments.interpreter(name) is None]
        if missing:
            _set_up(missing)
        if environment and environments.reason(environment):
            raise UserError(environments.reason(environment))
        _know_losses(_stored(files))
        choices = self.executor.choose(names, False, ())
        pythons = choices or {"": Choice(self.executor.python(environment))}
        chosen = self.executor.resolve_device(device, pythons)
        of_controls = self.executor.controls(choices, chosen) if controls else {}
        choices.update(of_controls)
        computer: Record = vars(machine.describe())
        if chosen != "cpu":
            gpu = nvml.from_smi()
            computer = {**computer, "gpu": gpu and gpu[0]}
        return Description(
            machine=computer,
            device=chosen,
            reasons={name: "" if choice.python else choice.reason for name, choice in choices.items()},
            controls=list(of_controls),
            memory=self.executor.memory(),
            torch={
                name: interpreters.torch_version(choice.python) for name, choice in choices.items() if choice.python
            },
        )

    def execute(
        self,
        job: Runnable,
        settings: Settings,
        environment: str,
        timeout: float,
        folder_name: str,
        label: str,
        files: Files,
    ) -> Answer:
        """Run a job to its end.  Raises UserError for a mistake of the user's that the job finds.

        Args:
            environment: of a task.
            timeout: seconds.
            folder_name: of the run's folder.
            label: of this device.
            files: those that the job and its settings name.
        """
        if self.scratch is not None:
            self.scratch.cleanup()
        self.scratch = TemporaryDirectory(prefix="job-")
        folder = Path(self.scratch.name) / folder_name
        folder.mkdir()
        paths = _stored(files)
        texts = {path: text for text, path in paths.items()}
        settings = replace(settings, shape_file=paths[settings.shape_file])
        if isinstance(job, Job):
            _know_losses(paths)
        else:
            job = replace(job, given=placed(job.given, paths))
        try:
            records, interrupted = self._run(job, folder, settings, environment, timeout), False
        except Interrupted as interruption:
            records, interrupted = interruption.records, True
        except UserError as error:
            raise UserError(_renamed(str(error), texts)) from error
        records = [json.loads(_renamed(json.dumps(record), texts)) for record in records]
        for record in records:
            if record["record"] in PLACED:
                record["node"] = label
                if record.get("device") == "cuda" and not record.get("gpu"):
                    gpu = nvml.from_smi()
                    record["gpu"] = gpu and {key: getattr(gpu[1], key) for key in nvml.TOLD_BY_SMI}
        left = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = [(str(path.relative_to(folder)), path.stat().st_size) for path in left]
        return Answer(records, interrupted, sizes, str(folder))

    def _run(self, job: Runnable, folder: Path, settings: Settings, environment: str, timeout: float) -> List[Record]:
        if isinstance(job, Job):
            choice = interpreters.choose(find(job.implementation), in_place=False, prefer_here=False)
        else:
            choice = Choice(self.executor.python(environment))
        if choice.python is None:
            return [job.status("missing", choice.reason)]
        if self.stopped:
            raise Interrupted([job.status("interrupted", f"stopped by the user before {job.name}")])
        return self.executor.execute(job, choice.python, folder, settings, timeout, self._note)

    def _note(self, _progress: str) -> None:
        """End the running job where it must stop, as Ctrl-C does on one machine."""
        if self.stopped:
            raise KeyboardInterrupt


def _set_up(names: Sequence[str]) -> None:
    """Make environments, as `make setup` does.  Raises UserError where there is none to measure in."""
    command = [sys.executable, "-m", "common.setup", *names]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if environments.interpreter("main") is None:
        raise UserError((done.stderr.strip().splitlines() or [environments.reason("main")])[-1])


def _know_losses(paths: Mapping[str, str]) -> None:
    """Add the losses of the user's own files to the table of implementations."""
    for path in paths.values():
        if path.endswith(scripts.ENDING):
            scripts.of_file(path)


def _stored(files: Files) -> Dict[str, str]:
    """Write the files that came to disk, unless they are there; return the path of each, by the text that names it."""
    paths = {}
    for text, (name, content) in files.items():
        path = ROOT / ".build" / "carried" / hashlib.sha256(content).hexdigest()[:32] / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(f"free some space in {ROOT}", (path, content))
        paths[text] = str(path)
    return paths


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return text, also JSON, with this machine's paths replaced by other names."""
    for path, name in names.items():
        text = text.replace(json.dumps(path)[1:-1], json.dumps(name)[1:-1])
    return text
