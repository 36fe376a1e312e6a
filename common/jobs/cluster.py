"""Jobs on the devices of a Ray cluster (`--executor ray`).

This side never imports Ray: a process of Ray's Python does (common/jobs/gateway.py), which may have another version.  A
job goes with the files that it reads; its records come back, and the files that it wrote, into the folder of the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from common.core import scripts
from common.core.errors import EXIT_USAGE, UserError
from common.core.implementations import find
from common.core.paths import ROOT
from common.core.settings import Settings
from common.core.text import count, plain
from common.jobs import carried
from common.jobs.executor import Executor, Interrupted, Lost
from common.jobs.node import Answer, Description
from common.jobs.spec import Job, Runnable
from common.records.schema import Record
from common.setup import environments
from common.setup.checkout import suite
from common.setup.interpreters import Choice

#: A Python that has Ray, where that is not the ray environment: that of a cluster of another version, say.
PYTHON = "RAY_PYTHON"


class Gateway:
    """The process that speaks to Ray; each request has a connection of its own."""

    def __init__(self, address: str, device: str):
        chosen = os.environ.get(PYTHON)
        python = Path(chosen) if chosen else environments.interpreter("ray")
        if python is None:
            raise UserError(f"--executor ray: {environments.reason('ray')}")
        self.python, self.folder = python, TemporaryDirectory(prefix="ray-")
        self.socket = os.path.join(self.folder.name, "socket")
        try:
            self.process = subprocess.Popen(
                [str(python), "-m", "common.jobs.gateway", address, device, self.socket, str(os.getpid())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        except OSError as error:
            raise UserError(f"--executor ray: {python} cannot be run: {error.strerror}") from error

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of gateway.Gateway does.  Raises Lost."""
        try:
            with self._connected() as connection:
                with suppress(BrokenPipeError):  # its answer may be there already
                    connection.send((method, arguments))
                kind, value = connection.recv()
        except (OSError, EOFError):
            lacks_ray = self.process.poll() == EXIT_USAGE
            reason = f"{self.python} has no Ray" if lacks_ray else "the process that speaks to Ray has ended"
            kind, value = "died", reason
        if kind == "died":
            raise Lost(value, began=True)
        return value

    def _connected(self) -> Connection:
        """Return a new connection, once the process answers.  Raises OSError where it has ended."""
        while True:
            try:
                return Client(self.socket, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """End it, and with it all that it started on the nodes."""
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


class Device(Executor):
    """One GPU, or one node without: it runs one job at a time."""

    here = False

    def __init__(self, gateway: Gateway, number: int, label: str):
        self.gateway, self.number, self.label = gateway, number, label
        self.dead = False

    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        if self.dead:
            raise Lost(f"device {self.label} died", began=False)
        files = {settings.shape_file: str(ROOT / settings.shape_file)}
        if isinstance(job, Job):
            files.update(own_scripts([job.implementation]))
        else:
            files.update({name: str(ROOT / name) for name in job.files})
        arguments = (job, settings, python.name, timeout, folder.name, self.label)
        answer: Answer = self.call("execute", arguments, files, str(folder))
        if answer.interrupted:
            raise Interrupted(answer.records)
        return answer.records

    def call(self, method: str, arguments: Tuple[Any, ...], files: Mapping[str, str], folder: str = "") -> Any:
        """Return what a method of node.Node does.  Raises UserError for a mistake of the user's, and Lost."""
        try:
            kind, value = self.gateway.call("call", self.number, method, arguments, files, folder)
        except Lost as error:
            self.dead = True
            raise Lost(f"device {self.label} died ({error})", began=True) from None
        if kind == "mistake":
            raise UserError(value)
        if kind == "failed":
            self.dead = True
            raise Lost(f"device {self.label} failed ({value})", began=True)
        return value

    def stop(self) -> None:
        with suppress(Lost):  # then nothing runs there
            self.gateway.call("stop", self.number)


class Kind(Executor):
    """The devices of one kind: what is measured on them is in one table."""

    here = False

    def __init__(self, devices: Sequence[Device], description: Description):
        self.devices, self.description = list(devices), description
        self.machine = description.machine
        self.label = self.machine.get("gpu") or f"{self.machine['cpu']}, {self.machine['cores']} cores"

    def lanes(self) -> Sequence[Device]:
        return self.devices

    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        return self.devices[0].execute(job, python, folder, settings, timeout, note)

    def choose(self, names: Sequence[str], in_place: bool, prefer_here: Sequence[str]) -> Dict[str, Choice]:
        return {name: self._choice(name) for name in names}

    def _choice(self, name: str) -> Choice:
        reason = self.description.reasons[name]
        return Choice(None if reason else Path(find(name).environment), reason)

    def python(self, environment: Optional[str] = None) -> Path:
        """Return its name: each node has its own."""
        return Path(environment or "main")

    def resolve_device(self, wanted: str, python_of: Mapping[str, Choice]) -> str:
        return self.description.device

    def memory(self) -> Tuple[Optional[int], Optional[int]]:
        return self.description.memory

    def controls(self, python_of: Mapping[str, Choice], device: str) -> Dict[str, Choice]:
        return {name: self._choice(name) for name in self.description.controls}

    def with_newest_torch(self, pythons: Mapping[str, Path]) -> Optional[str]:
        return max(pythons, key=lambda name: self.description.torch[name], default=None)


def own_scripts(names: Sequence[str]) -> Dict[str, str]:
    """Return the files of losses that the table does not know, by name.  Raises UserError for one that needs others."""
    script_of = {name: find(name).script for name in names}
    return {name: carried.alone(script) for name, script in script_of.items() if script.endswith(scripts.ENDING)}


@contextmanager
def kinds(
    address: str, device: str, names: Sequence[str] = (), controls: bool = False, environment: Optional[str] = None
) -> Iterator[List[Kind]]:
    """Yield the cluster's devices by their kind, the kind with the most devices first, each set up for the
    implementations `names`, or for the environment that tasks name.

    A device that cannot be set up is named on stderr and left out.  Raises UserError without any.
    """
    files = own_scripts(names)
    needed = list(dict.fromkeys(["main", environment or "main", *(find(name).environment for name in names)]))
    arguments = (suite(), list(names), device, controls, environment, needed)

    def described(device: Device) -> Union[Description, str]:
        """Return what a device is, or why it is left out."""
        try:
            description: Description = device.call("describe", arguments, files)
            return description
        except (Lost, UserError) as error:
            return str(error)

    gateway = Gateway(address, device)
    try:
        try:
            held = gateway.call("devices")
        except Lost as error:
            advice = "start one with `ray start --head`"
            raise UserError(f"--executor ray: no cluster can be reached ({error}); {advice}") from None
        devices = [Device(gateway, number, label) for number, (label, _) in enumerate(held)]
        reasons = [reason for _, reason in held]
        pool = ThreadPoolExecutor(max(1, len(devices)))  # no `with`: Ctrl-C does not wait for a set-up
        descriptions = pool.map(lambda device, reason: reason or described(device), devices, reasons)
        groups: Dict[Tuple[Any, ...], Kind] = {}
        for lane, description in zip(devices, descriptions):
            if isinstance(description, str):
                print(f"warning: {lane.label} is left out: {plain(description)}", file=sys.stderr)
                continue
            machine = description.machine
            key = (description.device, *(machine.get(name) for name in ("cpu", "cores", "gpu")))
            groups.setdefault(key, Kind([], description)).devices.append(lane)
        if not groups:
            raise UserError(f"--executor ray: none of {count(len(devices), 'device')} of the cluster can be used")
        yield sorted(groups.values(), key=lambda kind: -len(kind.devices))
    finally:
        gateway.close()


def together(kinds: Sequence[Kind]) -> Kind:
    """Return all devices as one kind, for what does not depend on which of them it runs.  Raises UserError for CPUs and
    GPUs."""
    devices = {kind.description.device.partition(":")[0] for kind in kinds}
    if len(devices) > 1:
        raise UserError(
            "--executor ray: the cluster has nodes with GPUs and without; give --device cpu or --device cuda"
        )
    return Kind([device for kind in kinds for device in kind.devices], kinds[0].description)
