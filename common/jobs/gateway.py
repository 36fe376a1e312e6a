"""``python -m common.jobs.gateway ADDRESS DEVICE SOCKET DRIVER``, in Ray's Python: between the command and Ray.

The command never imports Ray: this process holds each device of the cluster for the whole run by an actor, with the Ray
resources that keep other Ray work away: one GPU and its share of the node's CPUs, or all CPUs of a node without.  The
actor calls common.jobs.node in the node's own checkout.  Files go in through Ray's object store, once for each node,
and come back in pieces, so that neither the command nor this process holds one whole.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Dict, List, Mapping, Tuple

from common.core.errors import EXIT_USAGE
from common.core.guard import safe_streams
from common.core.text import reason_of
from common.jobs.node import Answer
from common.system.processes import die_with_parent

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    sys.exit(EXIT_USAGE)  # the command says so

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
        sys.path.insert(0, self.root)  # what requests hold is of the checkout
        os.environ["PYTHONPATH"] = self.root
        with open(f"/proc/{os.getppid()}/environ", "rb") as variables_of_node:
            if b"OMP_NUM_THREADS=" not in variables_of_node.read():  # Ray set it; one machine alone has none
                os.environ.pop("OMP_NUM_THREADS", None)

    def call(self, method: str, arguments: Tuple[Any, ...], names: List[Tuple[str, str]], *contents: bytes) -> Any:
        """Return ("result", value) of a method of the node, ("mistake", text) of the user's or ("failed", text).

        names: of the files with these contents: how the request names each, and its own name.
        """
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's threads block some, which processes inherit
        try:
            if self.node is None:
                if not os.path.isfile(os.path.join(self.root, "common", "jobs", "node.py")):
                    return "mistake", f"no checkout of the suite in {self.root}; {ADVICE}"
                os.chdir(self.root)
                from common.jobs.node import Node

                self.node = Node()
            files = {text: (name, content) for (text, name), content in zip(names, contents)}
            return "result", getattr(self.node, method)(*arguments, files)
        except Exception as error:
            is_mistake = type(error).__name__ == "UserError"
            return ("mistake", str(error)) if is_mistake else ("failed", f"{type(error).__name__}: {error}")

    def read(self, path: str, offset: int) -> bytes:
        """Return the next piece of a file."""
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(PIECE)

    def stop(self) -> None:
        """End the job that runs, and take no other."""
        if self.node is not None:
            self.node.stopped = True


class Gateway:
    """Answers the requests of the command: `devices`, `call`, `stop`.  actors: of the devices."""

    def __init__(self, address: str, wanted: str):
        self.address, self.wanted = address, wanted
        self.actors: List[Any] = []
        self.lock = Lock()
        self.references: Dict[str, Any] = {}  # of files that Ray has, by path

    def serve(self, connection: Connection) -> None:
        """Answer one request, (method, arguments), with ("result", value) or ("died", reason)."""
        with connection:
            method, arguments = connection.recv()
            try:
                answer = "result", getattr(self, method)(*arguments)
            except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
                answer = "died", reason_of(error)
            connection.send(answer)

    def devices(self) -> List[Tuple[str, str]]:
        """Hold every device of the cluster; returns the label of each, and why it is left out or ""."""
        labels, ready_of = [], []
        remote = ray.remote(Device)
        for node in sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"])):
            resources = node["Resources"]
            gpus = 0 if self.wanted == "cpu" else int(resources.get("GPU", 0))
            cpus = resources.get("CPU", 0.0)
            if not (gpus or cpus) or (self.wanted == "cuda" and not gpus):
                continue
            name = f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}"
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for gpu in range(max(gpus, 1)):
                share = {"num_gpus": 1, "num_cpus": cpus // gpus} if gpus else {"num_cpus": cpus}
                actor = remote.options(max_concurrency=2, scheduling_strategy=on_node, **share).remote()
                self.actors.append(actor)
                labels.append(f"{name}/gpu{gpu}" if gpus else name)
                ready_of.append(actor.__ray_ready__.remote())
        ready, _ = ray.wait(ready_of, num_returns=len(ready_of), timeout=BUSY_SECONDS) if ready_of else ([], [])
        busy = f"not free within {BUSY_SECONDS:g} s: other work of the cluster holds it"
        return [(label, "" if reference in ready else busy) for label, reference in zip(labels, ready_of)]

    def call(self, device: int, method: str, arguments: Tuple[Any, ...], files: Mapping[str, str], folder: str) -> Any:
        """Return what Device.call does.  files: paths, by how the request names them; folder: for files of a job."""
        actor = self.actors[device]
        names = [(text, Path(path).name) for text, path in files.items()]
        kind, value = ray.get(actor.call.remote(method, arguments, names, *map(self._reference, files.values())))
        if isinstance(value, Answer):
            self._fetch(actor, value, Path(folder))
        return kind, value

    def stop(self, device: int) -> None:
        self.actors[device].stop.remote()

    def _reference(self, path: str) -> Any:
        with self.lock:
            if path not in self.references:
                self.references[path] = ray.put(Path(path).read_bytes())
            return self.references[path]

    def _fetch(self, actor: Any, answer: Answer, folder: Path) -> None:
        """Bring the files of a job into the folder of its run; all or none."""
        written = []
        try:
            for name, size in answer.files:
                target = (folder / name).resolve()
                if folder.resolve() not in target.parents:
                    raise OSError(f"{name}: not a file of the run")
                written.append(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as stream:
                    for offset in range(0, size, PIECE):
                        stream.write(ray.get(actor.read.remote(f"{answer.folder}/{name}", offset)))
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise


def main(address: str, wanted: str, path: str, driver: str) -> None:
    """Serve the command with process number `driver` at the socket `path`, until it ends."""
    die_with_parent(int(driver))  # and the actors with this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    safe_streams()
    gateway = Gateway(address, wanted)
    with Listener(path, "AF_UNIX", backlog=1024) as listener:
        try:
            host, _, port = address.rpartition(":")
            if port.isdigit():  # Ray itself would wait for minutes
                socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
            problem = ""
        except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
            problem = reason_of(error)
        while True:
            connection = listener.accept()
            if problem:
                connection.send(("died", problem))
                connection.close()
                continue
            Thread(target=gateway.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
