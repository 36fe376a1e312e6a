"""``python -m common.jobs.node PARENT``: the end of `--executor ray` on a node, one process for each device.

Requests come on stdin and answers go to stdout, one JSON object on one line each.  A job runs through the local
executor of this checkout, in this checkout's environments, exactly as on one machine.  SIGINT ends the job that runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable, Dict, List, Mapping, Optional

from common.core import scripts
from common.core.errors import UserError
from common.core.implementations import find
from common.core.settings import Settings
from common.jobs.carried import placed
from common.jobs.executor import Interrupted
from common.jobs.local import Local
from common.jobs.spec import Job, Runnable, Task
from common.records.schema import Record
from common.setup import environments, interpreters
from common.setup.checkout import suite
from common.setup.interpreters import Choice
from common.system import machine, nvml
from common.system.processes import die_with_parent

#: Records that say where they are of.
PLACED = ("environment", "limits", "judged", "profile")


class Node:
    """executing: is a job running, which SIGINT is to end at once; stopped: did SIGINT come, after which no job begins;
    scratch: what the last job left."""

    def __init__(self) -> None:
        self.executor = Local()
        self.executing = self.stopped = False
        self.scratch: Optional[TemporaryDirectory[str]] = None

    def describe(self, request: Mapping[str, Any]) -> Dict[str, Any]:
        """What this device is, and which of the implementations `names` have a Python here; the reason alone where the
        environment of the tasks is not there."""
        lacking = request["environment"] and environments.reason(request["environment"])
        if lacking:
            return {"reason": lacking}
        _know(request["files"])
        names = request["names"]
        choices = self.executor.choose(names, False, ())
        of_tasks = {"": Choice(self.executor.python(request["environment"]))}
        device = self.executor.resolve_device(request["device"], choices or of_tasks)
        controls = self.executor.controls(choices, device) if request["controls"] else {}
        choices.update(controls)
        torch_of: Dict[Optional[Path], List[int]] = {None: []}
        for choice in choices.values():
            if choice.python and choice.python not in torch_of:
                torch_of[choice.python] = list(interpreters.torch_version(choice.python))
        gpu = nvml.from_smi() if device != "cpu" else None
        return {
            "suite": suite(),
            "machine": {**machine.describe(), **({"gpu": gpu and gpu["name"]} if device != "cpu" else {})},
            "device": device,
            "reasons": {name: "" if choice.python else choice.reason for name, choice in choices.items()},
            "controls": list(controls),
            "memory": self.executor.memory(),
            "torch": {name: torch_of[choice.python] for name, choice in choices.items()},
        }

    def execute(self, request: Mapping[str, Any]) -> Dict[str, Any]:
        """The records of a job, and the files that it left, by name with their sizes."""
        job, given = runnable(request["job"]), request["settings"]
        here = request["files"].get("shape_file", {}).get("path", given["shape_file"])
        if self.scratch is not None:
            self.scratch.cleanup()
        self.scratch = TemporaryDirectory(prefix="job-")
        folder = Path(self.scratch.name) / request["folder"]
        folder.mkdir()
        settings = Settings.from_json({**given, "shape_file": here})
        if isinstance(job, Job):
            _know(request["files"])
        else:
            job = replace(job, given=placed(job.given, {name: request["files"][name]["path"] for name in job.files}))
        said = {here: given["shape_file"], **{one["path"]: one["origin"] for one in request["files"].values()}}
        try:
            records = self._run(job, folder, settings, request)
            interrupted = False
        except Interrupted as interruption:
            records, interrupted = interruption.records, True
        except UserError as error:
            raise UserError(_as_named({"said": str(error)}, said)["said"]) from error
        records = [_as_named(record, said) for record in records]
        for record in records:
            if record["record"] in PLACED:
                record["node"] = request["node"]
                if record.get("device") == "cuda" and not record.get("gpu"):
                    known = nvml.from_smi() or {}
                    record["gpu"] = {key: value for key, value in known.items() if key != "name"} or None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        left = [[str(path.relative_to(folder)), path.stat().st_size] for path in files]
        return {"records": records, "interrupted": interrupted, "left": left, "at": str(folder)}

    def _run(self, job: Runnable, folder: Path, settings: Settings, request: Mapping[str, Any]) -> List[Record]:
        if isinstance(job, Job):
            choice = interpreters.choose(find(job.implementation), in_place=False, prefer_here=False)
        else:
            choice = Choice(self.executor.python(request["environment"]))
        if choice.python is None:
            return [job.status("missing", choice.reason)]
        try:
            self.executing = True
            if self.stopped:
                raise KeyboardInterrupt
            return self.executor.execute(job, choice.python, folder, settings, request["timeout"], lambda text: None)
        except KeyboardInterrupt as interruption:
            if isinstance(interruption, Interrupted):
                raise
            raise Interrupted([job.status("interrupted", f"stopped by the user during {job.name}")]) from None
        finally:
            self.executing = False

    def on_signal(self, *_: object) -> None:
        self.stopped = True
        if self.executing:
            raise KeyboardInterrupt


def _know(files: Mapping[str, Mapping[str, str]]) -> None:
    """Losses of the user's own files are known from here on."""
    for one in files.values():
        if one["path"].endswith(scripts.ENDING):
            scripts.of_file(one["path"])


def runnable(wire: Mapping[str, Any]) -> Runnable:
    """A job as it came: its fields by name, with `kind`."""
    of = {"job": Job, "task": Task}[wire["kind"]]
    values = {one.name: wire[one.name] for one in fields(of)}
    values["overrides"] = tuple((key, value) for key, value in values["overrides"])
    return of(**{**values, "files": tuple(wire["files"])} if of is Task else values)


def _as_named(record: Record, said: Mapping[str, str]) -> Record:
    """With the user's names of the files that were carried here, and no path of this machine."""
    text = json.dumps(record)
    for here, named in said.items():
        text = text.replace(json.dumps(here)[1:-1], json.dumps(named)[1:-1])
    return dict(json.loads(text))


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # threads of Ray's workers block some, which is inherited
    node = Node()
    signal.signal(signal.SIGINT, node.on_signal)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    asks: Mapping[str, Callable[[Mapping[str, Any]], Dict[str, Any]]]
    asks = {"describe": node.describe, "execute": node.execute}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = asks[request["ask"]](request)
        except UserError as error:
            answer = {"mistake": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
