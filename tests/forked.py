"""Commands as forks of a process that has imported what they import: real processes, which start in no time.

``run`` and ``start`` are as subprocess.run and subprocess.Popen of the script.  A server for each set of imports forks
a keeper for each command, which forks the command and says how it ends: nothing else of the suite is between a command
and its end.  The servers of jobs that a command starts, and other benchmarks, are forks of the command, with its
imports; a script beside another `common` imports that one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from ctypes import CDLL
from functools import partial
from pathlib import Path

from common.system import forkserver
from common.system.processes import Server, die_with_parent

ROOT = Path(__file__).resolve().parents[1]
READERS = (
    "jinja2",
    "common.cli.benchmark",
    "common.analysis.comparison",
    "common.tables.comparison",
    "common.tools.inference.tables",
)
MEASURES = (
    *READERS,
    "torch",
    "numpy",
    "torch.optim",
    "torchaudio",
    "matplotlib.figure",
    "common.tools.profile.command",
    "common.tools.flops.command",
    "common.tools.inference.command",
    "common.tools.inference.pipeline_command",
    "common.conformance.isolated",
    "common.conformance.worker",
    "common.jobs.worker",
    "common.losses.subject",
    "common.tools.inference.measure",
    "common.tools.inference.pipeline_measure",
    "lhotse",
)
#: Each script that is forked -> what its server imports; those of the benchmarks are MEASURES.
IMPORTS = {
    **dict.fromkeys(("summarize.py", "report.py", "compare.py"), READERS),
    **dict.fromkeys(("conformance.py", "profile_model.py", "profile_inference.py", "pipeline_metrics.py"), MEASURES),
    **dict.fromkeys(("train_tiny.py", "count_flops.py", "generate_shape_info.py"), MEASURES),
    **dict.fromkeys(("fused_table.py", "compare_counters.py", "load.py"), MEASURES),
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
INSTALLED = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))]
#: The variable with which a script elsewhere finds the suite.
WHERE = ("PYTHONPATH", str(ROOT))
#: What servers are started with, whatever a test changes.
ENVIRONMENT = dict(os.environ)
SERVERS = {}


def read_later(name):
    """Is this environment variable read when it is used, by us or by what we start?"""
    return name in ("PYTEST_CURRENT_TEST", "PATH", "TMPDIR", "CXX") or name.startswith(("PIP_", "GIT_", "TORCH_CUDA"))


def variables(environment):
    """Of the environment of a command, those that a server has to be started with."""
    return {key: value for key, value in environment.items() if (key, value) != WHERE and not read_later(key)}


def server_of(modules, environment):
    """None where a command is to have other variables."""
    if variables(environment) != variables(ENVIRONMENT):
        return None
    if modules not in SERVERS:
        command = [sys.executable, "-c", "import forked; forked.serve()", *modules]
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
        SERVERS[modules] = Server(command, ROOT, {**ENVIRONMENT, "PYTHONPATH": path}, Path(os.devnull))
    return SERVERS[modules]


@atexit.register
def close():
    """They end with their input; waited for, so that what they used and ran is counted."""
    for server in SERVERS.values():
        server.process.communicate()


def imports_of(path, arguments):
    if path.name.startswith("benchmark_") or "--rev" in arguments:
        return MEASURES
    return IMPORTS.get(path.name)


def start(command, cwd, env=None, limits=()):
    """As subprocess.Popen of [sys.executable, script, ...]; None where no server has what the script imports.  limits:
    pairs of setrlimit(2)."""
    path, environment = Path(cwd, command[1]), dict(os.environ) if env is None else env
    modules = imports_of(path, command)
    found = ROOT in path.parents or path.parent.joinpath("common").is_dir() or WHERE in environment.items()
    server = server_of(modules, environment) if modules is not None and found else None
    return Command(server, command, cwd, environment, limits) if server else None


def run(command, cwd, timeout=600, **more):
    """As subprocess.run; more: of `start`, and None where that is None."""
    process = start(command, cwd, **more)
    return process and process.completed(timeout)


class Command:
    """What the tests need of subprocess.Popen."""

    def __init__(self, server, command, cwd, environment, limits):
        self.args, self.scratch = command, tempfile.TemporaryDirectory(prefix="forked-")
        stdout, stderr, self.said = (Path(self.scratch.name) / name for name in ("stdout", "stderr", "said"))
        for path in (stdout, stderr, self.said):
            path.touch()
        self.stdout, self.stderr = stdout.open(), stderr.open()
        asked = {"command": command, "cwd": str(cwd), "environment": environment, "limits": limits}
        asked.update(stdout=str(stdout), stderr=str(stderr), said=str(self.said))
        server.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.pid, self.returncode = self.number(0, 600), None

    def number(self, place, seconds=0.0):
        """What its keeper said: first its process id, then its return code; None when it has not within `seconds`."""
        deadline = time.monotonic() + seconds
        while len(lines := self.said.read_text().split("\n")) < place + 2:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)
        return int(lines[place])

    def poll(self):
        if self.returncode is None:
            self.returncode = self.number(1)
        return self.returncode

    def wait(self, timeout=600):
        if self.returncode is None:
            self.returncode = self.number(1, timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=600):
        self.wait(timeout)
        with self.stdout, self.stderr, self.scratch:
            return self.stdout.read(), self.stderr.read()

    def completed(self, timeout):
        try:
            stdout, stderr = self.communicate(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self.communicate()
            raise
        return subprocess.CompletedProcess(self.args, self.returncode, stdout, stderr)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


# In a server, and in its forks.


def fork(call, *arguments):
    """Process id of a fork, which ends with what call(*arguments) returns."""
    return forkserver.in_fork(partial(call, *arguments))


def serve():
    forkserver.imported(sys.argv[1:])
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        fork(keep, os.getpid(), json.loads(line))
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with suppress(ChildProcessError):
        while os.wait():
            pass


def keep(server, asked):
    die_with_parent(server)
    number = fork(main, os.getpid(), asked)
    with open(asked["said"], "w") as said:
        print(number, file=said, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), file=said, flush=True)


def main(keeper, asked):
    die_with_parent(keeper)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_APPEND), standard)
    limit(asked["limits"])
    subprocess.Popen = partial(popen, subprocess.Popen)
    script(asked["command"], asked["cwd"], asked["environment"])


def limit(limits):
    for kind, value in limits:
        resource.setrlimit(kind, (value, value))


def script(command, cwd, environment):
    sys.argv = command[1:]
    folder = Path(cwd, sys.argv[0]).parent
    enter(cwd, environment, str(folder))
    if folder.joinpath("common").is_dir() and not folder.samefile(ROOT):
        for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
            del sys.modules[name]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:  # a fork runs nothing of atexit
        if "common.system.processes" in sys.modules:
            sys.modules["common.system.processes"].close_servers()


def enter(cwd, environment, *path):
    """As a process that was started there."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*path, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    tempfile.tempdir = None


def popen(plain, command, *more, **options):
    """As subprocess.Popen, `plain`; but a module of ours and a benchmark in this Python and environment are forks."""
    ours = command[:2] == [sys.executable, "-m"] and command[2].startswith("common.")
    if ours or (command[0] == sys.executable and Path(command[1]).name.startswith("benchmark_")):
        changed = {key for key, _ in os.environ.items() ^ (options.get("env") or os.environ).items()}
        if all(read_later(key) or key in ("PYTHONPATH", *MALLOPT) for key in changed):
            return Fork(command, *more, **options)
    return plain(command, *more, **options)


class Fork(subprocess.Popen):
    """A process that a command starts, as a fork of it."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, info, flags, shell, *more):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        pipes, new_session = more[:6], more[11]
        self.pid = fork(forked, args, cwd or os.getcwd(), dict(env or os.environ), preexec_fn, pipes, new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def forked(command, cwd, environment, preexec, pipes, new_session):
    """In such a fork.  pipes: its and our ends of stdin, our and its ends of stdout and of stderr; -1: none."""
    if preexec:
        preexec()
    if new_session:
        os.setsid()
    stdin, _, _, stdout, _, stderr = pipes
    for opened, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if opened != -1:
            os.dup2(opened, standard)
    for opened in {*pipes} - {-1, 0, 1, 2}:
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[1] != "-m":
        return script(command, cwd, environment)
    enter(cwd, environment, str(cwd))
    for key in environment.keys() & MALLOPT:
        LIBRARY.mallopt(MALLOPT[key], min(int(environment[key]), 2**31 - 1))
    if command[2] == "common.system.forkserver":
        return importlib.import_module(command[2]).main(*command[3:])
    sys.argv = command[2:]
    return runpy.run_module(command[2], run_name="__main__", alter_sys=True) and 0
