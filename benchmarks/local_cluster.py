"""Start Ray nodes on this machine, for benchmarks/cluster_speed.py and tests.

Run as a script, under a Python that has Ray, this is the process that holds the nodes.  Importing it imports no Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

ROOT = Path(__file__).resolve().parent.parent
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


class LocalCluster:
    """Ray nodes on this machine; `address` is that of the head."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.address: str = self._answer()["address"]

    def add(self, cores: int = 0, gpus: int = 0, **variables: str) -> Dict[str, Any]:
        """Start another node, with these variables; return its `id` and the process number of its `raylet`.

        cores: how many it may use, 0 for all; gpus: how many it claims to have.
        """
        return self._ask(cores, {"num_gpus": gpus} if gpus else {}, variables)

    def kill(self, raylet: int) -> None:
        """End a node by SIGKILL."""
        os.kill(raylet, signal.SIGKILL)

    def _ask(self, *request: Any) -> Dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the local cluster did not start")
        return dict(json.loads(line))


@contextmanager
def started(python: Path, nodes: int) -> Iterator[LocalCluster]:
    """Yield a cluster of nodes of one CPU each, beside a head that runs no job."""
    process = subprocess.Popen(
        [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        cluster = LocalCluster(process)
        for _ in range(nodes):
            cluster.add()
        yield cluster
    finally:
        assert process.stdin
        process.stdin.close()
        process.wait()


def main() -> None:
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found, unused-ignore]

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    head = {**NODE, "num_cpus": 0, "include_dashboard": False}
    cluster: Optional[Any] = Cluster(initialize_head=True, head_node_args=head)
    assert cluster
    answer(address=cluster.address)
    everywhere = os.sched_getaffinity(0)
    for line in sys.stdin:
        cores, resources, variables = json.loads(line)
        os.sched_setaffinity(0, sorted(everywhere)[: cores or None])
        node = cluster.add_node(**NODE, **resources, env_vars={"TRANSDUCER_CHECKOUT": str(ROOT), **variables})
        os.sched_setaffinity(0, everywhere)
        raylet = node.all_processes["raylet"][0].process.pid
        answer(id=node.node_id, raylet=raylet)
    cluster.shutdown()


if __name__ == "__main__":
    main()
