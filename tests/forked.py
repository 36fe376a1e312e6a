"""Commands as forks of a process that has imported what they import: real processes, which start in no time.

``run`` here is as subprocess.run of the script.  A server is this file run as a script, for each set of imports one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READERS = (
    "jinja2",
    "common.cli.benchmark",
    "common.analysis.comparison",
    "common.tables.comparison",
    "common.tables.models",
)
TORCH = (
    "torch",
    "numpy",
    "torch.optim",
    "torchaudio",
    "matplotlib.figure",
    "common.cli.profile",
    "common.cli.flops",
    "lhotse",
)
#: Each script that is forked -> what its server imports; those of the benchmarks are READERS too.
IMPORTS = {
    **dict.fromkeys(("summarize.py", "report.py", "compare.py", "conformance.py"), READERS),
    **dict.fromkeys(("train_tiny.py", "count_flops.py", "profile_model.py", "generate_shape_info.py"), TORCH),
}


class Server:
    """One process that forks, and waits for one child at a time."""

    def __init__(self, modules):
        answers, theirs = os.pipe()
        self.variables, self.lock = variables(), threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs), *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,  # Ctrl-C is for pytest
        )
        os.close(theirs)
        self.answers = os.fdopen(answers)
        atexit.register(self.process.stdin.close)

    def run(self, command, cwd, timeout):
        with self.lock, ExitStack() as files:
            out, err = (files.enter_context(tempfile.NamedTemporaryFile("r", errors="strict")) for _ in range(2))
            asked = {"command": command, "cwd": str(cwd), "files": [out.name, err.name], "PATH": os.environ["PATH"]}
            self.process.stdin.write(f"{json.dumps(asked)}\n".encode())
            self.process.stdin.flush()
            child = int(self.answers.readline())
            late = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
            late.start()
            since, status = time.monotonic(), int(self.answers.readline())
            late.cancel()
            if time.monotonic() - since >= timeout:
                raise subprocess.TimeoutExpired(command, timeout)
            return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), out.read(), err.read())


def variables():
    """Of the environment, those that a server has to be started with."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTEST_CURRENT_TEST", "PATH")}


SERVERS = {}


def run(command, cwd, timeout=600):
    """As subprocess.run of [sys.executable, script, ...]; None where no server has what the script imports."""
    name = Path(command[1]).name
    modules = READERS if name.startswith("benchmark_") else IMPORTS.get(name)
    if modules is None or not Path(command[1]).is_relative_to(ROOT):
        return None
    server = SERVERS.get(modules) or SERVERS.setdefault(modules, Server(modules))
    return server.run(command, cwd, timeout) if server.variables == variables() else None


def serve(answers):
    """Returns in each child, with the path of its script; the server itself ends with its input."""
    for line in os.fdopen(os.dup(0), "rb", buffering=0):
        asked = json.loads(line)
        child = os.fork()
        if not child:
            os.close(answers)
            os.chdir(asked["cwd"])
            os.environ["PATH"] = asked["PATH"]  # lhotse changes it
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, path in enumerate(asked["files"], start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
            sys.argv = asked["command"][1:]
            sys.path[0] = os.path.dirname(sys.argv[0])
            return sys.argv[0]
        os.write(answers, f"{child}\n".encode())
        os.write(answers, f"{os.waitpid(child, 0)[1]}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for module in sys.argv[2:]:
        with suppress(ImportError):  # not in this environment
            importlib.import_module(module)
    gc.freeze()
    runpy.run_path(serve(int(sys.argv[1])), run_name="__main__")
