"""Jobs on the devices of a Ray cluster (`--executor ray`).

This side never imports Ray: a process of the ray environment does (common/jobs/gateway.py), and is spoken to in JSON
lines.  A job goes as its fields, with the files that it reads by their content; its records come back, and the files
that it wrote, into the folder of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from common.core import scripts
from common.core.errors import UserError
from common.core.implementations import find
from common.core.paths import ROOT
from common.core.settings import Settings
from common.core.text import count, plain
from common.jobs import carried
from common.jobs.executor import Executor, Interrupted, Lost
from common.jobs.spec import Job, Runnable
from common.records.schema import Record
from common.setup import environments
from common.setup.checkout import suite
from common.setup.interpreters import Choice

#: A Python that has Ray, where that is not the ray environment: that of a cluster of another version, say.
PYTHON = "RAY_PYTHON"
#: Of a device that answers nothing more once it was asked to stop.
STOP_SECONDS = 60.0

Answer = Dict[str, Any]


class Gateway:
    """The process that speaks to Ray."""

    def __init__(self, address: str, device: str):
        own = os.environ.get(PYTHON)
        python = Path(own) if own else environments.interpreter("ray")
        if python is None:
            raise UserError(f"--executor ray: {environments.reason('ray')}")
        self.lock, self.waiting, self.last = Lock(), {0: Queue(maxsize=1)}, 0  # type: ignore[var-annotated]
        try:
            self.process = subprocess.Popen(
                [str(python), "-m", "common.jobs.gateway", address, device],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        except OSError as error:
            raise UserError(f"--executor ray: {python} cannot be run: {error.strerror}") from error
        Thread(target=self._read, daemon=True).start()

    def devices(self) -> List[Dict[str, str]]:
        """Label and reason of each.  Raises UserError."""
        found = self.waiting[0].get()
        if "devices" not in found:
            reason = found.get("failed") or found["died"]
            raise UserError(f"--executor ray: no cluster can be reached ({reason}); start one with `ray start --head`")
        return list(found["devices"])

    def ask(self, lane: int, **message: Any) -> Answer:
        """Raises Lost."""
        with self.lock:
            self.last += 1
            number, answers = self.last, Queue(maxsize=1)  # type: ignore[var-annotated]
            self.waiting[number] = answers
        self._write({"id": number, "lane": lane, **message})
        try:
            answer: Answer = answers.get()
        except KeyboardInterrupt:
            self.stop(lane)
            answer = answers.get(timeout=STOP_SECONDS)
        if "died" in answer:
            raise Lost(answer["died"], began=True)
        return answer

    def stop(self, lane: int) -> None:
        self._write({"lane": lane, "stop": True})

    def close(self) -> None:
        """End it, and with it all that it started on the nodes."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _write(self, message: Mapping[str, Any]) -> None:
        with self.lock, suppress(OSError):  # it has ended: `_read` tells those who wait
            assert self.process.stdin
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            answer = json.loads(line)
            with self.lock:
                waiting = self.waiting.pop(answer["id"]) if answer["id"] else self.waiting[0]
            waiting.put(answer)
        with self.lock:
            for queue in self.waiting.values():
                if queue.empty():
                    queue.put({"died": "the process that speaks to Ray has ended"})


class Device(Executor):
    """One GPU, or one node without: it runs one job at a time."""

    here = False

    def __init__(self, gateway: Gateway, lane: int, label: str):
        self.gateway, self.lane, self.label = gateway, lane, label
        self.dead = False

    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        if self.dead:
            raise Lost(f"device {self.label} died", began=False)
        request = {
            "ask": "execute",
            "job": {"kind": "job" if isinstance(job, Job) else "task", **asdict(job)},
            "settings": settings.to_json(),
            "timeout": timeout,
            "folder": folder.name,
            "environment": python.name,
            "node": self.label,
        }
        files = {"shape_file": str(ROOT / settings.shape_file)}
        if isinstance(job, Job):
            files.update(own_scripts([job.implementation]))
        else:
            files.update({name: str(ROOT / name) for name in job.files})
        answer = self.ask(request, files, folder)
        if answer["interrupted"]:
            raise Interrupted(answer["records"] or [job.status("interrupted", "stopped by the user before it began")])
        return list(answer["records"])

    def ask(self, request: Mapping[str, Any], files: Mapping[str, str], folder: Optional[Path] = None) -> Answer:
        """Raises UserError for a mistake of the user's, and Lost."""
        try:
            found = self.gateway.ask(self.lane, request=request, files=files, folder=str(folder))
        except Lost as error:
            self.dead = True
            raise Lost(f"device {self.label} died ({error})", began=True) from None
        answer: Answer = found["answer"]
        if "mistake" in answer:
            raise UserError(answer["mistake"])
        if "failed" in answer:
            self.dead = True
            raise Lost(f"device {self.label} failed ({answer['failed']})", began=True)
        return answer

    def stop(self) -> None:
        self.gateway.stop(self.lane)


class Kind(Executor):
    """The devices of one kind: what is measured on them is in one table."""

    here = False

    def __init__(self, devices: Sequence[Device], about: Answer):
        self.devices, self.about = list(devices), about
        self.machine = about["machine"]
        self.label = self.machine.get("gpu") or f"{self.machine['cpu']}, {self.machine['cores']} cores"

    def lanes(self) -> Sequence[Device]:
        return self.devices

    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        return self.devices[0].execute(job, python, folder, settings, timeout, note)

    def choose(self, names: Sequence[str], in_place: bool, own: Sequence[str]) -> Dict[str, Choice]:
        return {name: self._choice(name) for name in names}

    def _choice(self, name: str) -> Choice:
        reason = self.about["reasons"][name]
        return Choice(None if reason else Path(find(name).environment), reason)

    def python(self, environment: Optional[str] = None) -> Path:
        """Its name: each node has its own."""
        return Path(environment or "main")

    def resolve_device(self, wanted: str, python_of: Mapping[str, Choice]) -> str:
        return str(self.about["device"])

    def memory(self) -> Tuple[Optional[int], Optional[int]]:
        total, available = self.about["memory"]
        return total, available

    def controls(self, python_of: Mapping[str, Choice], device: str) -> Dict[str, Choice]:
        return {name: self._choice(name) for name in self.about["controls"]}

    def with_newest_torch(self, pythons: Mapping[str, Path]) -> Optional[str]:
        return max(pythons, key=lambda name: list(self.about["torch"][name]), default=None)


def own_scripts(names: Sequence[str]) -> Dict[str, str]:
    """The files of losses that the table does not know, by name.  Raises UserError for one that needs others."""
    found = {name: find(name).script for name in names}
    return {name: carried.alone(script) for name, script in found.items() if script.endswith(scripts.ENDING)}


@contextmanager
def kinds(
    address: str, device: str, names: Sequence[str] = (), controls: bool = False, environment: Optional[str] = None
) -> Iterator[List[Kind]]:
    """The cluster's devices by their kind, the kind with the most devices first, each set up for the implementations
    `names`, or for the environment that tasks name.  A device that cannot be set up is named on stderr and left out.
    Raises UserError without any."""
    own = own_scripts(names)
    gateway = Gateway(address, device)
    try:
        found = gateway.devices()
        devices = [Device(gateway, lane, one["label"]) for lane, one in enumerate(found)]
        about: Dict[str, Answer] = {}
        wanted = list(dict.fromkeys(["main", environment or "main", *(find(name).environment for name in names)]))
        threads = []
        for one, said in zip(devices, found):
            if said["reason"]:
                about[one.label] = {"reason": said["reason"]}
                continue
            request = {"ask": "describe", "names": list(names), "device": device, "controls": controls}
            request["environment"] = environment
            threads.append(Thread(target=_describe, args=(one, request, wanted, own, about), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        mine = suite()
        groups: Dict[str, List[Device]] = {}
        for one in devices:
            reason = about[one.label].get("reason")
            if not reason and about[one.label]["suite"] != mine:
                reason = f"its checkout is not the same as {ROOT}: bring both to one revision"
            if reason:
                print(f"warning: {one.label} is left out: {plain(reason)}", file=sys.stderr)
                continue
            of = about[one.label]
            kind = [of["device"], *(of["machine"].get(key) for key in ("cpu", "cores", "gpu"))]
            groups.setdefault(json.dumps(kind), []).append(one)
        if not groups:
            raise UserError(f"--executor ray: none of {count(len(devices), 'device')} of the cluster can be used")
        yield sorted((Kind(of, about[of[0].label]) for of in groups.values()), key=lambda kind: -len(kind.devices))
    finally:
        gateway.close()


def together(kinds: Sequence[Kind]) -> Kind:
    """All devices as one kind, for what does not depend on which of them it runs.  Raises UserError for CPUs and
    GPUs."""
    devices = {str(kind.about["device"]).partition(":")[0] for kind in kinds}
    if len(devices) > 1:
        raise UserError(
            "--executor ray: the cluster has nodes with GPUs and without; give --device cpu or --device cuda"
        )
    return Kind([device for kind in kinds for device in kind.devices], kinds[0].about)


def _describe(
    device: Device, request: Mapping[str, Any], wanted: Sequence[str], own: Mapping[str, str], about: Dict[str, Answer]
) -> None:
    """Set a node up, and ask it what it is."""
    try:
        reason = device.gateway.ask(device.lane, prepare=list(wanted))["reason"]
        about[device.label] = {"reason": reason} if reason else device.ask(request, own)
    except (Lost, UserError) as error:
        about[device.label] = {"reason": str(error)}
