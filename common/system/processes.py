"""Run a function in a child process, end it with all that it started, and collect its records.

To import torch in each child would take seconds.  So children are forks of a server process,
``python -m rnnt_bench.system.processes MODULE [PACKAGE ...]``, which imports MODULE and the
packages that are installed.  A fork shares nothing else with another one: in the server no thread
pool has run, no device is open and no heap has grown.

The server reads requests from stdin, a line of JSON each: {"argument": ..., "output": ...}.  For
each it forks.  The fork calls ``MODULE.main(argument)`` and exits with what that returns; its
stdout and stderr go to the file `output`.

The server answers on stdout, a line of JSON each: {"ready": true} when all is imported, {"pid":
...} at a fork, and {"returncode": ...} when the fork has ended: its exit code, or minus the number
of the signal that killed it.  Before that last answer, what the fork left running in its session is
killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rnnt_bench.system import memory

#: Last lines of stderr that are kept, and their limit in bytes: a package may print gigabytes.
STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 64 << 10
#: Exit code of a child that had no room for its records (EX_IOERR of sysexits.h).
EXIT_NO_ROOM = 74
#: Exit code of a child that could not write its records for another reason (EX_CANTCREAT).
EXIT_UNWRITTEN = 73
#: Errors of a full disk.  EFBIG is not among them: a loss may set a limit on files of its own.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: Seconds to wait for a server to import its packages before its first job is sent anyway.
START_SECONDS = 60.0
#: Seconds to wait for the end of processes that a child left behind.
LAST_SECONDS = 5.0

#: The C library, for prctl.  It is loaded here since a fork of a process with threads must not do
#: much before it runs another program.
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process, which is a fork, when its parent ends.

    Linux does so too after this process becomes another program (exec).  If the parent has ended
    already, this process exits now.

    parent: process id of the parent."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of prctl(2)
    if os.getppid() != parent:
        os._exit(1)


def write_record(stream: TextIO, record: Mapping[str, Any]) -> None:
    """Write a record as a line of JSON at once, in a child for its parent.

    If that fails, exits with EXIT_NO_ROOM or EXIT_UNWRITTEN."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        stream.write(line)
        stream.flush()
    except OSError as error:
        os._exit(EXIT_NO_ROOM if error.errno in NO_ROOM else EXIT_UNWRITTEN)


def output(command: Sequence[str], timeout: float | None = None, **options: Any) -> str:
    """Run a command, and return what it prints on stdout; "" if it fails or is missing.

    timeout: seconds after which the command fails; options: further ones of subprocess.run."""
    options = {"stderr": subprocess.DEVNULL, **options}
    try:
        done = subprocess.run(
            command,
            check=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=timeout,
            **options,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout)


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; "signal 99" for a number without a name."""
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


class Plan(NamedTuple):
    """Hold how a server is started.

    Attributes:
        command: starts with the path of its Python
        root: current folder
        variables: all its environment variables
        generation: of the jobs that it serves, see Child.run
    """

    command: list[str]
    root: Path
    variables: dict[str, str]
    generation: Hashable


def _plan(
    python: Path,
    module: str,
    root: Path,
    variables: Mapping[str, str],
    generation: Hashable,
    imports: Sequence[str],
) -> Plan:
    """Return the plan of a server.  The arguments are those of Child.run."""
    path = str(root)
    if inherited := os.environ.get("PYTHONPATH"):
        path += f"{os.pathsep}{inherited}"
    command = [str(python), "-m", "rnnt_bench.system.processes", module, *imports]
    return Plan(command, root, {**os.environ, "PYTHONPATH": path, **variables}, generation)


class Server:
    """Start a server, which forks itself for each job, one at a time.

    errors: file for what the server itself prints.

    Attributes:
        busy: whether a job was sent and has not ended
        ready: whether the server has answered, so that all is imported
    """

    def __init__(self, plan: Plan, errors: Path):
        self.plan = plan
        self.busy = False
        self.ready = False
        with errors.open("ab") as stream:
            self.process: Any = subprocess.Popen(
                plan.command,
                cwd=plan.root,
                env=plan.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                bufsize=0,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self.poll = select.poll()
        # mypy takes `process` for a Popen here, whose stdout may be None; this one is a pipe.
        self.poll.register(self.process.stdout or -1, select.POLLIN)

    def ask(self, **request: str) -> None:
        """Send a request and set `busy`.  request: "argument" and "output", see the module."""
        self.busy = True
        with suppress(OSError):  # if the server has died, `answer` returns its exit code
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self, seconds: float) -> dict[str, int]:
        """Return the next answer of those that the module describes; {} if none comes in this time.

        Any answer sets `ready`, and "returncode" ends `busy`.  If the server has died, return its
        own "returncode"."""
        deadline = time.monotonic() + seconds
        while self.poll.poll(1000 * max(deadline - time.monotonic(), 0)):
            line = self.process.stdout.readline()
            if not line:
                return {"returncode": self.process.wait()}
            if not line.startswith(b"{"):  # printed by a Python's own start-up files
                continue
            answer: dict[str, int] = json.loads(line)
            self.ready = True
            if "returncode" in answer:
                self.busy = False
            return answer
        return {}

    def close(self) -> None:
        """Kill the server, close its pipes, and wait for its end."""
        self.process.kill()
        with self.process:
            pass  # the end of this block closes the pipes and waits


#: Servers that wait for their next job, of different plans.  They end with this process.
_waiting: list[Server] = []


@contextmanager
def _server(plan: Plan, errors: Path) -> Iterator[Server]:
    """Yield a server of this plan for one job: one that waits, or a new one.

    First, close the waiting servers that died, and those of the same Python that wait for jobs of
    another generation.  Afterwards the server waits for its next job.  It is closed instead if it
    died, if its job has not ended, or if another server with its plan waits.

    errors: file for what a new server prints."""
    for server in _waiting[:]:
        same_python = server.plan.command[0] == plan.command[0]
        is_past = same_python and server.plan.generation != plan.generation
        if is_past or server.process.poll() is not None:
            _waiting.remove(server)
            server.close()
    plans = [server.plan for server in _waiting]
    server = _waiting.pop(plans.index(plan)) if plan in plans else Server(plan, errors)
    try:
        yield server
    finally:
        is_only_one = all(other.plan != plan for other in _waiting)
        if server.process.poll() is None and not server.busy and is_only_one:
            _waiting.append(server)
        else:
            server.close()


def start_servers(
    pythons: Sequence[tuple[Path, Mapping[str, str]]],
    module: str,
    root: Path,
    generation: Hashable,
    imports: Sequence[str],
) -> None:
    """Start servers at the same time, and return when all have imported their packages.

    A server that takes longer than START_SECONDS is not waited for.  One that fails to start raises
    its error at its first job, not here.

    pythons: (Python, environment variables) of each server; the other arguments are those of
    Child.run."""
    for python, variables in pythons:
        with suppress(OSError), tempfile.TemporaryDirectory() as scratch:
            plan = _plan(python, module, root, variables, generation, imports)
            with _server(plan, Path(scratch) / "stderr.txt"):
                pass  # This only starts the server, which then waits in `_waiting`.
    for server in _waiting:
        if not server.ready:
            server.answer(START_SECONDS)


class Child:
    """Watch a child process, which appends JSON records to a file; `run` starts it.

    server: forks it; output: the file of records; errors: the file of what it prints.

    Attributes that the end of the ``with`` block of `run` sets:
        records: what it wrote
        stderr: its last lines
        returncode: its exit code, or minus the signal that killed it
        killed_for_memory: whether the kernel killed any process for lack of memory as the child ran
        wall_ns: how long it ran, in nanoseconds
    """

    def __init__(self, server: Server, output: Path, errors: Path):
        self.server = server
        self.output = output
        self.errors = errors
        self.pid: int | None = None
        self.ended: int | None = None  # the return code, once the child has ended
        self.damaged = False  # whether the file of records has a line that is no record
        self.begin_ns = time.monotonic_ns()
        self.oom_kills = memory.oom_kills()  # before it ran

    @classmethod
    @contextmanager
    def run(
        cls,
        python: Path,
        module: str,
        job: Mapping[str, Any],
        root: Path,
        variables: Mapping[str, str],
        generation: Hashable = None,
        imports: Sequence[str] = ("torch",),
    ) -> Iterator[Child]:
        """Yield a child process that calls ``module.main(path)``; kill it at the end of the block.

        All that the child started is killed too.  The child is in a session of its own, so that
        Ctrl-C reaches only the calling process.  Raises OSError if there is no such Python, or no
        room for files.

        Args:
            python: path of the Python that runs the child.
            job: what is written as JSON into the file `path`, with an entry "output" in addition:
                the file to which the child appends its records.
            root: current folder of the child, from which it imports.
            variables: environment variables to add.
            generation: only jobs of the same generation share a server, and with it the layout of
                addresses in memory.
            imports: packages that the server imports before it forks, if they are installed."""
        plan = _plan(python, module, root, variables, generation, imports)
        with tempfile.TemporaryDirectory(prefix=f"{module}-") as scratch:
            output = Path(scratch, "records.jsonl")
            output.touch()
            description = Path(scratch, "job.json")
            description.write_text(json.dumps({**job, "output": str(output)}))
            errors = Path(scratch, "stderr.txt")
            with _server(plan, errors) as server:
                errors.touch()  # only a new server has made it; the fork only opens it
                child = cls(server, output, errors)
                server.ask(argument=str(description), output=str(errors))
                try:
                    yield child
                finally:
                    child._end()

    def alive(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for the child's end, and return whether the child still runs.

        The server's answers meanwhile set `pid` and `ended`."""
        deadline = time.monotonic() + seconds
        while self.ended is None:
            answer = self.server.answer(max(deadline - time.monotonic(), 0))
            if not answer:  # none came in time
                return True
            # One answer has the pid, and a later one the return code.
            self.pid = answer.get("pid", self.pid)
            self.ended = answer.get("returncode")
        return False

    def seconds(self) -> float:
        """Return the seconds since it was started."""
        return (time.monotonic_ns() - self.begin_ns) / 1e9

    def written(self) -> list[dict[str, Any]]:
        """Return the records that the child has written so far.

        A last line without a line end is left out.  Reading stops at a line that is no record, and
        sets `damaged`: code of a loss may write there by mistake, if it closed a file that is not
        its own."""
        records = []
        for line in self.output.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                self.damaged = True
                break
            records.append(record)
        return records

    def _end(self) -> None:
        """Kill the process, and set the attributes from `records` to `wall_ns` (see the class).

        Lines on why its records are lost are added to `stderr`."""
        self._kill()
        self.returncode = -signal.SIGKILL if self.ended is None else self.ended
        self.wall_ns = time.monotonic_ns() - self.begin_ns
        self.killed_for_memory = memory.oom_kills() > self.oom_kills
        self.records = self.written()
        self.stderr = self._last_lines()
        if self.returncode == EXIT_NO_ROOM:
            self.stderr.append(
                f"no room for its records in {self.output.parent.parent}; free some space or name another folder "
                "in TMPDIR"
            )
        if self.returncode == EXIT_UNWRITTEN or self.damaged:
            self.stderr.append(
                "its records are lost: code in it closed, or wrote to, a file that is not its own, or a limit "
                "on files holds (ulimit -f)"
            )

    def _kill(self) -> None:
        """Kill the child with all processes of its session, and wait for its end.  Kill the server
        if the child is not forked yet, or if the server does not tell of its end in time."""
        if self.alive():
            with suppress(ProcessLookupError):
                # The server leads a session of its own too.
                os.killpg(self.pid or self.server.process.pid, signal.SIGKILL)
            # `alive` waits so many seconds for the end.  A server that was stopped (SIGSTOP) cannot
            # tell that the child has ended.
            if self.alive(LAST_SECONDS):
                self.server.process.kill()
                self.alive(LAST_SECONDS)  # sets `ended` to the server's own return code

    def _last_lines(self) -> list[str]:
        """Return the last lines that the process printed on stderr, without empty ones."""
        with self.errors.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - STDERR_TAIL_BYTES))
            lines = stream.read(STDERR_TAIL_BYTES).decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-STDERR_TAIL_LINES:]


def fork(main: Callable[[str], Any], request: dict[str, str], answers: TextIO) -> int:
    """Fork the server for a request, and return the process id of the fork.

    Only the server returns from here.  The fork has a session of its own, calls
    ``main(request["argument"])``, and exits with the code of `main`, 1 after an error.
    Its stdout and stderr go to the file ``request["output"]``.

    answers: the stream on which the server answers its parent.  The fork closes its copy."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        printed = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(answers.fileno())
        code = main(request["argument"]) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # sys.exit might never end: after an error within backward, such as a lack of memory, torch
        # 1.13 still holds autograd's graph, and waits for the interpreter for ever.
        os._exit(code)


class Fork:
    """Fork this process for a ``with`` block; the fork calls `work` with its end of a pipe.

    The end of the block kills the fork.  Then `code` is the exit code of the fork, or minus the
    number of the signal that killed it.

    possible: False makes no fork; then `ask` returns None."""

    def __init__(self, work: Callable[[Connection], None], possible: bool = True):
        self.work = work
        self.possible = possible
        self.child = 0  # its process id; 0 for no fork
        self.code = 0

    def __enter__(self) -> Fork:
        """Fork, unless `possible` is False.  Only the parent returns from here; the fork calls
        `work` and exits, with code 1 after an error."""
        if not self.possible:
            return self
        self.here, childs_end = Pipe()
        parent = os.getpid()
        self.child = os.fork()
        if not self.child:
            code = 1
            try:
                die_with_parent(parent)
                self.here.close()
                self.work(childs_end)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        childs_end.close()
        return self

    def receive(self, timeout: float) -> Any:
        """Return the next object that the fork sends.

        Raises EOFError if the fork has ended, TimeoutError if nothing comes within `timeout`
        seconds."""
        if not self.here.poll(timeout):
            raise TimeoutError
        return self.here.recv()

    def ask(self, request: Any, timeout: float) -> Any:
        """Send an object to the fork, and return the object that the fork answers.

        Returns None if there is no fork, if it has ended, or if nothing comes within `timeout`
        seconds."""
        with suppress(EOFError, OSError):  # a TimeoutError is an OSError
            if self.child:
                self.here.send(request)
                return self.receive(timeout)
        return None

    def __exit__(self, *_: object) -> None:
        """Kill the fork, wait for its end, and set `code`."""
        if self.child:
            self.here.close()
            os.kill(self.child, signal.SIGKILL)  # if it has ended, its code stays
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def imported(names: Sequence[str]) -> bool:
    """Import packages, but for those that are not installed; return False if an import fails."""
    try:
        for name in names:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
    except Exception:
        return False
    return True


def main(module: str, *packages: str) -> None:
    """Be a server, as the module describes it, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print when they are imported is no answer
    if not imported(packages):
        # Start again without them: the job imports them, and its error says why that fails.
        os.dup2(answers.fileno(), 1)  # the new start takes its pipe for answers from there
        os.execv(sys.executable, [sys.executable, "-m", "rnnt_bench.system.processes", module])
    call = importlib.import_module(module).main
    gc.collect()
    gc.freeze()  # else a collection in a fork would write to, and so copy, the pages of all objects
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        child = fork(call, json.loads(line), answers)
        print(json.dumps({"pid": child}), file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        with suppress(OSError):  # none of its processes is left
            os.killpg(child, signal.SIGKILL)  # what the fork started and has left running
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"returncode": code}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
