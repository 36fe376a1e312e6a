"""Run each of several commands as a Ray task on one device: ``python -m
rnnt_bench.cli.ray_driver``, in Ray's Python.

It reads {"address", "device", "commands"} from stdin, and writes a line of JSON for each command as
it ends: its place, exit code, last words, node, and its packed log folder.  A task whose node dies
runs again on another.  Imports Ray and the standard library alone.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile

#: The variable that names a node's checkout, where it is not the one whose .venv holds the Python
#: that started Ray.
CHECKOUT = "RNNT_BENCH_CHECKOUT"
RETRIES = 3  # of a task whose node has died
REACH_SECONDS = 10.0  # which the cluster's head may take to answer


def run(words: list[str]) -> tuple[int, str, str, bytes]:  # Ray sends it by value
    """Run benchmark_all.py in the node's checkout; return its exit code, last words, node, and
    packed folder."""

    def ready() -> None:
        # Ray's threads block some, which processes inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # told when Ray ends this task: what is measured is kept
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)

    root = os.environ.get(CHECKOUT) or os.path.dirname(os.path.dirname(sys.prefix))
    python = os.path.join(root, ".venv", "main", "bin", "python")
    node = socket.gethostname()
    if not os.path.exists(python):
        return (
            2,
            f"no environments of the suite in {root}: make setup, or name the checkout in {CHECKOUT}",
            node,
            b"",
        )
    # Ray sets OMP_NUM_THREADS, by which torch would take one thread.
    variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory(prefix="cell-") as log:
        command = [python, os.path.join(root, "benchmark_all.py"), *words, "--log-dir", log]
        done = subprocess.run(
            command, cwd=root, env=variables, preexec_fn=ready, capture_output=True
        )
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(log, "")
    message = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    return done.returncode, message, node, packed.getvalue()


def main() -> int:
    import ray

    request = json.load(sys.stdin)
    address = request["address"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        print(f"{address}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if request["device"] == "cuda" and not gpus:
        print(f"{address}: no node of the cluster has a GPU", file=sys.stderr)
        return 2
    device = {"num_gpus": 1} if gpus and request["device"] != "cpu" else {"num_cpus": 1}
    task = ray.remote(run).options(max_retries=RETRIES, **device)
    waiting = {task.remote(words): number for number, words in enumerate(request["commands"])}
    while waiting:
        (ended,), _ = ray.wait(list(waiting), num_returns=1)
        try:
            code, message, node, packed = ray.get(ended)
        except ray.exceptions.RayError as error:
            code, message, node, packed = 2, str(error).splitlines()[0], "a lost node", b""
        folder = base64.b64encode(packed).decode()
        answer = {
            "cell": waiting.pop(ended),
            "code": code,
            "message": message,
            "node": node,
            "folder": folder,
        }
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
