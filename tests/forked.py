"""Commands as forks of a process that has imported what they import: real processes, which start in no time.

``run`` here is as subprocess.run of the script.  common.system.forkserver calls ``main`` in each fork, one server for
each set of imports.  The servers that a command starts for its own jobs are forks of the command, with its imports.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from ctypes import CDLL
from functools import partial
from pathlib import Path

from common.system import forkserver
from common.system.processes import Server

ROOT = Path(__file__).resolve().parents[1]
READERS = (
    "jinja2",
    "common.cli.benchmark",
    "common.analysis.comparison",
    "common.tables.comparison",
    "common.tables.models",
)
MEASURES = (
    *READERS,
    "torch",
    "numpy",
    "torch.optim",
    "torchaudio",
    "matplotlib.figure",
    "common.cli.profile",
    "common.cli.flops",
    "common.cli.inference",
    "common.cli.pipeline",
    "common.conformance.isolated",
    "common.conformance.worker",
    "common.jobs.worker",
    "common.losses.subject",
    "common.models.inference",
    "common.models.pipeline",
    "lhotse",
)
#: Each script that is forked -> what its server imports; those of the benchmarks are MEASURES.
IMPORTS = {
    **dict.fromkeys(("summarize.py", "report.py", "compare.py"), READERS),
    **dict.fromkeys(("conformance.py", "profile_model.py", "profile_inference.py", "pipeline_metrics.py"), MEASURES),
    **dict.fromkeys(("train_tiny.py", "count_flops.py", "generate_shape_info.py"), MEASURES),
}
#: Environment variables that glibc reads as a process starts -> what mallopt(3) calls them.
MALLOPT = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
    "MALLOC_ARENA_MAX": -8,
}
LIBRARY = CDLL(None)
#: sys.path without what a process is started with.
INSTALLED = [path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests"))]
#: The variable with which a script elsewhere finds the suite.
WHERE = ("PYTHONPATH", str(ROOT))
SERVERS = {}


def variables(environment):
    """Of the environment of a command, those that a server has to be started with."""
    free = {"PYTEST_CURRENT_TEST", "PATH", "TMPDIR"}
    return {key: value for key, value in environment.items() if key not in free and (key, value) != WHERE}


def server_of(modules, environment):
    """Started with the variables of the tests; None where a command is to have others."""
    if modules not in SERVERS:
        command = [sys.executable, "-m", "common.system.forkserver", "forked", *modules]
        path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        errors = Path(os.devnull)
        SERVERS[modules] = variables(os.environ), Server(command, ROOT, {**os.environ, "PYTHONPATH": path}, errors)
    before, server = SERVERS[modules]
    return server if before == variables(environment) else None


@atexit.register
def close():
    """They end with their input; waited for, so that what they used and ran is counted."""
    for _, server in SERVERS.values():
        server.process.communicate()


def run(command, cwd, timeout=600, env=None):
    """As subprocess.run of [sys.executable, script, ...]; None where no server has what the script imports."""
    path, environment = Path(command[1]), dict(os.environ) if env is None else env
    modules = MEASURES if path.name.startswith("benchmark_") else IMPORTS.get(path.name)
    if modules is None or not (path.is_relative_to(ROOT) or WHERE in environment.items()):
        return None
    server = server_of(modules, environment)
    return run_in(server, command, cwd, timeout, environment) if server else None


def run_in(server, command, cwd, timeout, environment):
    with tempfile.TemporaryDirectory() as scratch:
        streams = [Path(scratch) / name for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        asked = {"command": command, "cwd": str(cwd), "stdout": str(streams[0]), "environment": environment}
        server.ask(argument=json.dumps(asked), output=str(streams[1]))
        number = server.answer(timeout)["pid"]
        ended = server.answer(timeout)
        if not ended:
            os.killpg(number, signal.SIGKILL)
            server.answer(timeout)
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, ended["returncode"], *(stream.read_text() for stream in streams))


# In a fork of a server.


def main(argument):
    asked = json.loads(argument)
    os.dup2(os.open(asked["stdout"], os.O_WRONLY | os.O_APPEND), 1)
    sys.argv = asked["command"][1:]
    enter(asked["cwd"], asked["environment"], os.path.dirname(sys.argv[0]))
    subprocess.Popen = partial(popen, subprocess.Popen)
    runpy.run_path(sys.argv[0], run_name="__main__")


def enter(cwd, environment, *path):
    """As a process that was started there."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*path, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    tempfile.tempdir = None


def popen(plain, command, *more, **options):
    """As subprocess.Popen, `plain`; but a server of jobs in this Python and environment is a Fork."""
    if command[:3] == [sys.executable, "-m", "common.system.forkserver"]:
        changed = {key for key, _ in os.environ.items() ^ options["env"].items()}
        if changed <= {"PYTHONPATH", *MALLOPT}:
            return Fork(command[3:], **options)
    return plain(command, *more, **options)


class Fork:
    """A server of jobs: what common.system.processes.Server needs of subprocess.Popen."""

    def __init__(self, arguments, cwd, env, stderr, preexec_fn, **_):
        (theirs, requests), (answers, said) = os.pipe(), os.pipe()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            try:
                preexec_fn()
                os.setsid()
                for one, standard in ((theirs, 0), (said, 1), (stderr.fileno(), 2)):
                    os.dup2(one, standard)
                for one in (theirs, requests, answers, said):
                    os.close(one)
                sys.stdin = open(0)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                enter(cwd, env, str(cwd))
                for key in env.keys() & MALLOPT:
                    LIBRARY.mallopt(MALLOPT[key], min(int(env[key]), 2**31 - 1))
                forkserver.main(*arguments)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(said)
        self.stdin, self.stdout = os.fdopen(requests, "wb", 0), os.fdopen(answers, "rb", 0)

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            number, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if number else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdin.close()
        self.stdout.close()
        self.wait()
