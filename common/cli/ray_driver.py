"""Run each of several commands as a Ray task on one device: ``python -m
rnnt_bench.cli.ray_driver``, in a Python that has Ray.

It reads {"address", "device", "commands"} from stdin.  When a command has ended, it writes a line
of JSON with the fields of rnnt_bench.cli.cluster.Answer.  A task whose node dies runs again on
another node.  The module imports Ray and the standard library alone.
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

#: The environment variable that names the checkout of a node.  Without it, that is the checkout
#: whose .venv holds the Python that started Ray.
CHECKOUT = "RNNT_BENCH_CHECKOUT"
RETRIES = 3  # of a task whose node has died
REACH_SECONDS = 10.0  # the cluster's head has so long to answer
EXIT_USAGE = 2  # as in rnnt_bench.core.errors, which this Python may be unable to import
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


# Ray sends the function to the nodes by value, so its result has types of Python alone.
def run(words: list[str]) -> dict[str, object]:
    """Run benchmark_all.py with these words in the node's checkout; return the fields of Answer, but
    for its cell."""

    def prepare() -> None:
        # Ray's threads block signals, and processes inherit that.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # When Ray ends this task, the command keeps what it has measured.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    root = os.environ.get(CHECKOUT) or os.path.dirname(os.path.dirname(sys.prefix))
    python = os.path.join(root, ".venv", "main", "bin", "python")
    node = socket.gethostname()
    if not os.path.exists(python):
        message = f"no environments of the suite in {root}: make setup, or name the checkout in {CHECKOUT}"
        return {"code": EXIT_USAGE, "message": message, "node": node, "folder": ""}
    # Ray sets OMP_NUM_THREADS to 1, which torch would obey.
    variables = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory(prefix="cell-") as log:
        command = [python, os.path.join(root, "benchmark_all.py"), *words, "--log-dir", log]
        done = subprocess.run(
            command, cwd=root, env=variables, preexec_fn=prepare, capture_output=True
        )
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(log, "")
    message = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    folder = base64.b64encode(packed.getvalue()).decode()
    return {"code": done.returncode, "message": message, "node": node, "folder": folder}


def main() -> int:
    """Run the commands of the request on stdin, and write their answers; return the exit code.

    The number of a cell is the index of its command."""
    import ray

    request = json.load(sys.stdin)
    address = request["address"]
    # What Ray prints on stdout goes to stderr: only answers go to the real stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        print(f"{address}: {str(error).splitlines()[0]}", file=sys.stderr)
        return EXIT_USAGE
    gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if request["device"] == "cuda" and not gpus:
        print(f"{address}: no node of the cluster has a GPU", file=sys.stderr)
        return EXIT_USAGE
    device = {"num_gpus": 1} if gpus and request["device"] != "cpu" else {"num_cpus": 1}
    task = ray.remote(run).options(max_retries=RETRIES, **device)
    cell_of = {task.remote(words): cell for cell, words in enumerate(request["commands"])}
    while cell_of:
        (ended,), _ = ray.wait(list(cell_of), num_returns=1)
        cell = cell_of.pop(ended)
        try:
            answer = ray.get(ended)
        except ray.exceptions.RayError as error:
            message = str(error).splitlines()[0]
            answer = {"code": EXIT_USAGE, "message": message, "node": "a lost node", "folder": ""}
        print(json.dumps({"cell": cell, **answer}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
