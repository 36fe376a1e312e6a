"""Commands as forks of a process that has imported what they import: real processes, which start in no time.

``run`` and ``start`` are as subprocess.run and subprocess.Popen of the script.  A server, which all processes of a test
run share, forks a keeper for each command, which forks the command and says how it ends: nothing else of the suite is
between a command and its end.
The servers of jobs that a command starts are forks of the command, with its imports, and so are the scripts that
compare.py, fused_table.py and train_table.py start; a script beside another `common` imports that one.

It is there for speed alone: importing torch takes two seconds of a processor, once for each command and once for each
round of its jobs, and the tests run some hundred of them.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from common.core.errors import UserError
from common.present import html
from common.show import page
from common.system import forkserver
from common.system.processes import Server, die_with_parent

ROOT = Path(__file__).resolve().parents[1]
#: What their server imports.
MODULES = (
    "jinja2",
    "common.cli.benchmark",
    "common.analysis.comparison",
    "common.tables.comparison",
    "torch",
    "numpy",
    "torch.optim",
    "torch.fx.experimental.symbolic_shapes",  # which the first backward of a process imports, with sympy
    "torch._inductor",  # which torch.profiler imports
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
#: Scripts that are forked beside those of the benchmarks.
SCRIPTS = {
    "conformance.py",
    "count_flops.py",
    "compare.py",
    "compare_counters.py",
    "fused_table.py",
    "generate_shape_info.py",
    "load.py",
    "pipeline_metrics.py",
    "profile_inference.py",
    "profile_model.py",
    "rnnt-bench",
    "train.py",
    "train_table.py",
}
#: Those that start another script, and what these are called.
STARTERS = {"compare.py", "fused_table.py", "train_table.py"}
STARTED = {"benchmark_all.py", "train.py"}
#: Environment variables that glibc reads as a process starts -> what mallopt(3) calls them.
MALLOPT = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
    "MALLOC_ARENA_MAX": -8,
}
LIBRARY = ctypes.CDLL(None)
LIBRARY.getenv.restype = ctypes.c_void_p
#: sys.path without what a process is started with.
INSTALLED = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))]
#: The variable with which a script elsewhere finds the suite.
WHERE = ("PYTHONPATH", str(ROOT))
#: What servers are started with, whatever a test changes.
ENVIRONMENT = dict(os.environ)
#: The variable by which the processes of a command are found in /proc (faults.running.Mark), as the server has it.
MARK, UNMARKED = "MARK_OF_FAULT", 32 * "0"
#: The folder of the server: one for all workers of pytest-xdist, which gives a run a number.
FOLDER = Path(tempfile.gettempdir(), f"forked-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}")


def read_later(name):
    """Is this environment variable read when it is used, by us or by what we start?"""
    names = (MARK, "PYTEST_CURRENT_TEST", "PATH", "TMPDIR", "CXX", "TERM", "NO_COLOR")
    return name in names or name.startswith(("PIP_", "GIT_", "TORCH_CUDA"))


def variables(environment):
    """Return those variables of a command's environment that a server has to be started with."""
    return {key: value for key, value in environment.items() if (key, value) != WHERE and not read_later(key)}


@cache
def server():
    """Return the pipe to the process that forks commands, which the first who asks starts; it ends when all who have
    the pipe have closed it."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    path = FOLDER / "requests"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileExistsError):
            os.mkfifo(path)
        try:
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads
                raise
            both = os.open(path, os.O_RDWR)  # either end alone would wait for the other
            process, pipe = started(path), os.open(path, os.O_WRONLY)
            os.close(both)
            atexit.register(end, pipe, process)
    os.set_blocking(pipe, True)
    return pipe


def started(requests):
    """Start the process that forks commands for each line of the pipe `requests`."""
    line = [sys.executable, "-c", "import forked; forked.serve()", *MODULES]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    environment = {**ENVIRONMENT, "PYTHONPATH": path, MARK: UNMARKED}
    with requests.open("rb", buffering=0) as stdin:
        streams = {"stdin": stdin, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, **streams)


def end(pipe, process):
    os.close(pipe)
    process.wait()  # so that what it used is counted
    shutil.rmtree(FOLDER, ignore_errors=True)


def send(request):
    """Send a request to the server, whole: a pipe takes 4 kB at a time, and others write too."""
    pipe, line = server(), json.dumps(request).encode() + b"\n"
    fcntl.flock(pipe, fcntl.LOCK_EX)
    while line:
        line = line[os.write(pipe, line) :]
    fcntl.flock(pipe, fcntl.LOCK_UN)


def start(command, cwd, env=None, limits=(), terminal=None):
    """Start [sys.executable, script, ...] as subprocess.Popen does; None where it cannot be a fork.  limits: pairs
    of setrlimit(2); terminal: the path of one, for all its streams."""
    path, environment = Path(cwd, command[1]), dict(os.environ) if env is None else env
    suite = ROOT in path.parents or path.parent.joinpath("common").is_dir() or WHERE in environment.items()
    known = path.name.startswith("benchmark_") or path.name in SCRIPTS
    if not suite or not known or variables(environment) != variables(ENVIRONMENT):
        return None
    return Command(command, cwd, environment, limits, terminal)


def run(command, cwd, timeout=600, **options):
    """Run a command as subprocess.run does; options: of `start`, and None where that is None."""
    process = start(command, cwd, **options)
    return process and process.completed(timeout)


class Command:
    """Offer what the tests need of subprocess.Popen."""

    def __init__(self, command, cwd, environment, limits, terminal):
        self.args, self.scratch = command, tempfile.TemporaryDirectory(prefix="forked-")
        stdout, stderr, self.answers = (Path(self.scratch.name) / name for name in ("stdout", "stderr", "answers"))
        for path in (stdout, stderr, self.answers):
            path.touch()
        self.stdout, self.stderr = stdout.open(), stderr.open()
        asked = {"command": command, "cwd": str(cwd), "environment": environment, "limits": limits}
        asked.update(stdin=os.devnull, stdout=str(stdout), stderr=str(stderr), answers=str(self.answers))
        if terminal:
            asked.update(stdin=terminal, stdout=terminal, stderr=terminal)
        send(asked)
        self.pid, self.returncode = self.number(0, 600), None

    def number(self, line, seconds=0.0):
        """Return what its keeper wrote in this line, the process id in the first and the return code in the second;
        None when it has not within `seconds`."""
        deadline = time.monotonic() + seconds
        while len(lines := self.answers.read_text().split("\n")) < line + 2:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)
        return int(lines[line])

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
    with suppress(UserError):  # no jinja2
        templates = html.environment()
        for name in templates.list_templates(["jinja"]):
            templates.get_template(name)  # compiled once, for the pages of all commands
        html.packed(page.LIBRARY.read_text(encoding="utf-8"))
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
    with open(asked["answers"], "w") as answers:
        print(number, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), file=answers, flush=True)


def main(keeper, asked):
    die_with_parent(keeper)
    os.setsid()
    for standard, name in enumerate(("stdin", "stdout", "stderr")):  # a terminal becomes that of the session
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_APPEND if standard else os.O_RDONLY), standard)
    if os.isatty(1):  # Python's own streams were made for files, which have a position
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    limit(asked["limits"])
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
    with suppress(ImportError):  # another `common` than the suite's
        importlib.import_module("common.system.processes").Server = ForkedServer
    if Path(sys.argv[0]).name in STARTERS:
        subprocess.Popen = partial(popen, subprocess.Popen)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:  # a fork runs nothing of atexit
        if "common.system.processes" in sys.modules:
            sys.modules["common.system.processes"].close_servers()


def enter(cwd, environment, *path):
    """Take the folder, variables and paths of a process that was started there."""
    os.chdir(cwd)
    address = LIBRARY.getenv(MARK.encode())
    if address and MARK in environment:  # where /proc shows it
        ctypes.memmove(address, environment[MARK].encode(), len(UNMARKED))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*path, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    tempfile.tempdir = None


class ForkedServer(Server):
    """A server of jobs as a fork of the command that starts it; an ordinary one where its Python is another one, or it
    has variables that a process has to be started with."""

    def __init__(self, command, root, environment, errors):
        changed = {key for key, _ in os.environ.items() ^ environment.items()}
        if command[0] == sys.executable and all(read_later(key) or key in ("PYTHONPATH", *MALLOPT) for key in changed):
            self.listen_to(Fork(command, root, environment, errors))
        else:
            super().__init__(command, root, environment, errors)


class Fork:
    """Offer what `Server` needs of subprocess.Popen, of a fork of this process."""

    def __init__(self, command, cwd, environment, errors):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        (requests, write), (read, answers) = os.pipe(), os.pipe()
        with errors.open("ab") as stream:
            streams = requests, answers, stream.fileno()
            self.pid = fork(forked, os.getpid(), command, cwd, dict(environment), streams)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = open(write, "wb", buffering=0), open(read, "rb", buffering=0)
        self.returncode = None

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            number, status = os.waitpid(self.pid, options)
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


def popen(real, command, **options):
    """Start a script of STARTED as a fork, anything else as `real` does, which is subprocess.Popen."""
    of_suite = command[0] == sys.executable and Path(command[1]).name in STARTED
    return Script(command, **options) if of_suite else real(command, **options)


class Script(Fork):
    """Offer what is needed of subprocess.Popen, of a script that is a fork of this process."""

    def __init__(self, command, stdout=None, stderr=None, env=None, **_):
        self.args, self.returncode, self.written = command, None, []
        streams = {}
        for standard, wanted in ((1, stdout), (2, stderr)):
            self.written.append(tempfile.TemporaryFile("w+") if wanted == subprocess.PIPE else None)
            if wanted == subprocess.DEVNULL:
                wanted = open(os.devnull, "w")
            streams[standard] = self.written[-1] or wanted
        sys.stdout.flush()
        self.pid = fork(measure, os.getpid(), command, dict(os.environ if env is None else env), streams)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, *_, **__):
        self.wait()
        return tuple(self.text(stream) for stream in self.written)

    def text(self, stream):
        if stream is not None:
            stream.seek(0)
            return stream.read()

    def __exit__(self, *_):
        self.wait()


def measure(parent, command, environment, streams):
    """Be such a script."""
    die_with_parent(parent)
    for standard, stream in streams.items():
        if stream is not None:
            os.dup2(stream.fileno(), standard)
    let_go()
    script(command, os.getcwd(), environment)


def let_go():
    """Let go of the files that the parent has open, as a process that executes a program does: a lock that the parent
    holds ends with the parent.  Their numbers stay taken, for the objects that still have them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        with suppress(OSError):  # that of the folder
            if number > 2 and not os.get_inheritable(number):
                os.dup2(nothing, number, inheritable=False)


def forked(parent, command, cwd, environment, streams):
    """Be a server of jobs in such a fork.  streams: its stdin, stdout and stderr."""
    die_with_parent(parent)
    os.setsid()
    for opened, standard in zip(streams, range(3)):
        os.dup2(opened, standard)
    let_go()
    sys.stdin = open(0, closefd=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter(cwd, environment, str(cwd))
    for key in environment.keys() & MALLOPT:
        LIBRARY.mallopt(MALLOPT[key], min(int(environment[key]), 2**31 - 1))
    return importlib.import_module(command[2]).main(*command[3:])
