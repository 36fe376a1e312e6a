"""``python -m common.jobs.gateway ADDRESS DEVICE``, in the ray environment's Python: between the driver and Ray.

The driver never imports Ray: it speaks with this process in JSON lines, requests on stdin, answers on stdout.  Each
device of the cluster is held by an actor for the whole run, with the Ray resources that keep other Ray work away: one
GPU and its share of the node's CPUs, or all CPUs of a node without.  The actor starts the node's own
``common.jobs.node`` in the node's own checkout and hands lines on; files go in through Ray's object store, once for
each node, and come back in pieces, so that neither the driver nor this process holds one whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Dict, List, Tuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from common.core.guard import safe_streams
from common.core.text import reason_of

#: Where a node's checkout is, if it is not the one whose .venv holds Ray's Python.
CHECKOUT = "TRANSDUCER_CHECKOUT"
PIECE = 4 << 20  # bytes
#: How long the cluster's head may take to answer.
REACH_SECONDS = 10.0
#: How long other work of the cluster may keep a device.
BUSY_SECONDS = 60.0
ADVICE = f"start Ray with the Python of .venv/ray of its checkout, or name the checkout in {CHECKOUT}"


class Device:
    """The actor of one device.  It is sent to the nodes by value: standard library only."""

    def __init__(self) -> None:
        self.root = os.environ.get(CHECKOUT) or os.path.dirname(os.path.dirname(sys.prefix))
        self.node: Any = None
        self.stopped = False
        self.asking = Lock()

    def prepare(self, environments: List[str]) -> str:
        """Set the node up; returns why that cannot be, or ""."""
        if not os.path.isfile(os.path.join(self.root, "common", "jobs", "node.py")):
            return f"no checkout of the suite in {self.root}; {ADVICE}"
        environment = {**os.environ, "PYTHONPATH": self.root}
        with open(f"/proc/{os.getppid()}/environ", "rb") as of_node:
            if b"OMP_NUM_THREADS=" not in of_node.read():  # Ray set it for this actor; one machine alone has none
                environment.pop("OMP_NUM_THREADS", None)
        about: Dict[str, Any] = {"cwd": self.root, "env": environment, "text": True}
        command = [sys.executable, "-m", "common.setup.node", *environments]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, **about)
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or [f"set-up ended with exit code {done.returncode}"])[-1]
        self.node = subprocess.Popen(
            [done.stdout.strip().splitlines()[-1], "-m", "common.jobs.node", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **about,
        )
        return ""

    def ask(self, request: str, *contents: bytes) -> str:
        """Hand a request on; contents: of its files, in their order."""
        if self.stopped:
            return json.dumps({"records": [], "interrupted": True, "left": []})
        wire = json.loads(request)
        for one, content in zip(wire["files"].values(), contents):
            one["path"] = self._stored(one["name"], content)
        with self.asking:  # while one request is answered, the next may be on its way here
            self.node.stdin.write(json.dumps(wire) + "\n")
            self.node.stdin.flush()
            answer = self.node.stdout.readline()
        return answer or json.dumps({"failed": f"its process ended with exit code {self.node.wait()}"})

    def _stored(self, name: str, content: bytes) -> str:
        folder = os.path.join(self.root, ".build", "carried", hashlib.sha256(content).hexdigest()[:32])
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            part = f"{path}.{os.getpid()}"
            with open(part, "wb") as stream:
                stream.write(content)
            os.replace(part, path)
        return path

    def read(self, path: str, offset: int, size: int) -> bytes:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def stop(self) -> None:
        """End the job that runs, and take no other."""
        self.stopped = True
        if self.node is not None:
            self.node.send_signal(signal.SIGINT)


class Gateway:
    """devices: the actors, by number; put: files that Ray has, by path."""

    def __init__(self, answers: Any) -> None:
        self.answers, self.lock = answers, Lock()
        self.devices: List[Any] = []
        self.put: Dict[str, Any] = {}

    def write(self, answer: Dict[str, Any]) -> None:
        with self.lock:
            self.answers.write(json.dumps(answer) + "\n")
            self.answers.flush()

    def take(self, wanted: str) -> List[Dict[str, str]]:
        """Hold every device of the cluster; returns the label of each, and why it is left out or ""."""
        actors: List[Tuple[str, Any]] = []
        remote = ray.remote(Device)
        for node in sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: str(one["NodeID"])):
            has = node["Resources"]
            gpus = 0 if wanted == "cpu" else int(has.get("GPU", 0))
            cpus = has.get("CPU", 0.0)
            if not (gpus or cpus) or (wanted == "cuda" and not gpus):
                continue
            name = f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}"
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for gpu in range(max(gpus, 1)):
                share = {"num_gpus": 1, "num_cpus": cpus // gpus} if gpus else {"num_cpus": cpus}
                actor = remote.options(max_concurrency=3, scheduling_strategy=place, **share).remote()
                actors.append((f"{name}/gpu{gpu}" if gpus else name, actor))
        begun = [actor.__ray_ready__.remote() for _, actor in actors]
        ready, _ = ray.wait(begun, num_returns=len(begun), timeout=BUSY_SECONDS) if begun else ([], [])
        self.devices = [actor for _, actor in actors]
        busy = f"not free within {BUSY_SECONDS:g} s: other work of the cluster holds it"
        return [{"label": label, "reason": "" if one in ready else busy} for (label, _), one in zip(actors, begun)]

    def answer(self, message: Dict[str, Any]) -> None:
        try:
            found = self._answer(self.devices[message["lane"]], message)
        except (RayError, OSError) as error:
            found = {"died": reason_of(error)}
        self.write({"id": message["id"], **found})

    def _answer(self, device: Any, message: Dict[str, Any]) -> Dict[str, Any]:
        if "prepare" in message:
            return {"reason": ray.get(device.prepare.remote(message["prepare"]))}
        request, origins = message["request"], message["files"]
        request["files"] = {key: {"name": Path(path).name, "origin": path} for key, path in origins.items()}
        contents = [self._held(path) for path in origins.values()]
        answer = json.loads(ray.get(device.ask.remote(json.dumps(request), *contents)))
        self._fetch(device, answer, message["folder"])
        return {"answer": answer}

    def _held(self, path: str) -> Any:
        with self.lock:
            if path not in self.put:
                self.put[path] = ray.put(Path(path).read_bytes())
            return self.put[path]

    def _fetch(self, device: Any, answer: Dict[str, Any], folder: str) -> None:
        """Bring the files of a job into the folder of its run; all or none."""
        written = []
        try:
            for name, size in answer.get("left", []):
                target = (Path(folder) / name).resolve()
                if Path(folder).resolve() not in target.parents:
                    raise OSError(f"{name}: not a file of the run")
                written.append(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as stream:
                    for offset in range(0, size, PIECE):
                        stream.write(ray.get(device.read.remote(f"{answer['at']}/{name}", offset, PIECE)))
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise


def main(address: str, wanted: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends this process by closing stdin
    safe_streams()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gateway = Gateway(answers)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
        gateway.write({"id": 0, "devices": gateway.take(wanted)})
    except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
        gateway.write({"id": 0, "failed": reason_of(error)})
        return 1
    with ThreadPoolExecutor(max_workers=max(1, 2 * len(gateway.devices))) as pool:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("stop"):
                gateway.devices[message["lane"]].stop.remote()
            else:
                pool.submit(gateway.answer, message)
        os._exit(0)  # the actors end with this process; nothing waits for their answers
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
