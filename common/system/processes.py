"""Start and watch a child process, end it with all that it started, and collect its records and
last lines.

Children are forks of a server, ``python -m rnnt_bench.system.processes MODULE [PACKAGE ...]``.  It
imports the packages that are installed and MODULE, then reads requests from stdin, a line of JSON
each: "argument" and "output".  For each it forks; the fork calls ``MODULE.main(argument)`` and
exits with what that returns; its stdout and stderr go to the file `output`.  The server answers on
stdout, a line of JSON each: {"ready": true} when all is imported, {"pid": ...} at the fork, and
{"returncode": ...} at its end, minus the signal that killed it; what it left running in its session
is killed first.  Nothing but imports is shared: no thread pool has run, no device is open, no heap
has grown.
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

STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 64 << 10  # limit of these lines: a package may print gigabytes
#: Exit code of a child that had no room for its records (EX_IOERR of sysexits.h).
EXIT_NO_ROOM = 74
#: Exit code of a child that could not write its records for another reason (EX_CANTCREAT).
EXIT_UNWRITTEN = 73
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # EFBIG is none: a loss may set a limit of its own
#: Seconds to wait for a server to import its packages before its first job is sent anyway.
START_SECONDS = 60.0
#: Seconds to wait for the end of processes that a child left behind.
LAST_SECONDS = 5.0

#: The C library with prctl, loaded here since a fork may do little before it executes another
#: program.
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with_parent(parent: int) -> None:
    """Ask Linux, in a fork, to kill this process, or the program that it executes, when `parent`
    ends; end now where it has ended already."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of prctl(2)
    if os.getppid() != parent:
        os._exit(1)


def write_record(stream: TextIO, record: Mapping[str, Any]) -> None:
    """Write a record from a child to its parent at once; exit with a code of its own if that
    fails."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        stream.write(line)
        stream.flush()
    except OSError as error:
        os._exit(EXIT_NO_ROOM if error.errno in NO_ROOM else EXIT_UNWRITTEN)


def output(command: Sequence[str], timeout: float | None = None, **options: Any) -> str:
    """Return what `command` prints on stdout; "" if it fails, is missing, or takes more than
    `timeout` seconds."""
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "timeout": timeout,
        **options,
    }
    try:
        return str(
            subprocess.run(
                command, check=True, errors="replace", stdin=subprocess.DEVNULL, **options
            ).stdout
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; "signal 99" for a number without a name."""
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


class Plan(NamedTuple):
    """Hold what a server is: its command, current folder and variables, and the generation of jobs
    that it serves; see Child.run.  Servers of one generation may differ in their variables, and
    wait side by side."""

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
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [str(python), "-m", "rnnt_bench.system.processes", module, *imports]
    return Plan(command, root, {**os.environ, "PYTHONPATH": path, **variables}, generation)


class Server:
    """A process that forks itself for each job, one at a time.  errors: file for what the server
    itself prints."""

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
        self.poll.register(self.process.stdout or -1, select.POLLIN)

    def ask(self, **request: str) -> None:
        """Send a request, see above."""
        self.busy = True
        with suppress(OSError):  # it died: `answer` says it
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self, seconds: float) -> dict[str, int]:
        """Return the next answer, {} if none comes in `seconds`; of a server that died, its own
        "returncode"."""
        deadline = time.monotonic() + seconds
        while self.poll.poll(1000 * max(deadline - time.monotonic(), 0)):
            line = self.process.stdout.readline()
            if not line:
                return {"returncode": self.process.wait()}
            if not line.startswith(b"{"):  # a site's Python prints as it starts
                continue
            answer: dict[str, int] = json.loads(line)
            self.ready = True
            if "ready" not in answer:
                self.busy = "returncode" not in answer
                return answer
            if not self.busy:
                return answer
        return {}

    def close(self) -> None:
        """End the server."""
        self.process.kill()
        with self.process:  # closes its pipes and waits
            pass


#: Servers that wait for their next job.  They end with this process.
_waiting: list[Server] = []


@contextmanager
def _server(plan: Plan, errors: Path) -> Iterator[Server]:
    """Yield the waiting server of this plan, else a new one; keep it for the next job.  Those of
    the same Python that serve another generation end."""
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
        is_new = all(other.plan != plan for other in _waiting)
        if server.process.poll() is None and not server.busy and is_new:
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
    """Start the servers of these Pythons and variables, all at once, and return when they are
    ready.  One that fails to start says so at its first job.  module, root, generation, imports: as
    in Child.run."""
    for python, variables in pythons:
        with suppress(OSError), tempfile.TemporaryDirectory() as scratch:
            plan = _plan(python, module, root, variables, generation, imports)
            with _server(plan, Path(scratch) / "stderr.txt"):
                pass
    for server in _waiting:
        if not server.ready:
            server.answer(START_SECONDS)


class Child:
    """A process that runs a Python module, which reads a job and appends JSON records to a file;
    see `run`.

    Attributes, set at the end of the ``with`` block of `run`:
        records: what it wrote
        stderr: its last lines
        returncode: its exit code, or minus the signal that killed it
        killed_for_memory: whether the kernel killed any process for lack of memory meanwhile
        wall_ns: how long it ran
    """

    def __init__(self, server: Server, output: Path, errors: Path):
        self.server = server
        self.output = output
        self.errors = errors
        self.pid: int | None = None
        self.ended: int | None = None  # the return code
        self.damaged = False  # whether a line among the records is no record
        self.begin_ns = time.monotonic_ns()
        self.oom_kills = memory.oom_kills()

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
        """Start ``module.main(JOB.json)`` in a process; kill it, with all that it started, at the
        end of the block.

        JOB.json holds `job` and "output", the file for its records.  The process is forked from a
        server that has imported `imports`, in a session of its own, so that Ctrl-C reaches only
        this one.  Raises OSError if there is no such Python, or no room for its files.

        root: current folder of the process, from which it imports; variables: added to its
        environment; generation: jobs of another one get a server of their own, and so another
        layout of addresses; imports: what the server imports before its first job, where it is
        installed."""
        plan = _plan(python, module, root, variables, generation, imports)
        with tempfile.TemporaryDirectory(prefix=f"{module}-") as scratch:
            output = Path(scratch, "records.jsonl")
            output.touch()
            description = Path(scratch, "job.json")
            description.write_text(json.dumps({**job, "output": str(output)}))
            errors = Path(scratch, "stderr.txt")
            with _server(plan, errors) as server:
                errors.touch()
                child = cls(server, output, errors)
                server.ask(argument=str(description), output=str(errors))
                try:
                    yield child
                finally:
                    child._end()

    def alive(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for its end; return whether it still runs."""
        deadline = time.monotonic() + seconds
        while self.ended is None:
            answer = self.server.answer(max(deadline - time.monotonic(), 0))
            if not answer:
                return True
            self.pid = answer.get("pid", self.pid)
            self.ended = answer.get("returncode")
        return False

    def seconds(self) -> float:
        """Return how many seconds it has run."""
        return (time.monotonic_ns() - self.begin_ns) / 1e9

    def written(self) -> list[dict[str, Any]]:
        """Return the records so far, without a last line that a killed child left unfinished.

        They end before a line that is no record: code that closed a file that is not its own may
        write there."""
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
        """Kill it, or its server if it does not exist yet, and collect what it left."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid or self.server.process.pid, signal.SIGKILL)
            if self.alive(LAST_SECONDS):
                self.server.process.kill()  # stopped, perhaps
                self.alive(LAST_SECONDS)
        self.returncode = -signal.SIGKILL if self.ended is None else self.ended
        self.wall_ns = time.monotonic_ns() - self.begin_ns
        self.killed_for_memory = memory.oom_kills() > self.oom_kills
        self.records = self.written()
        with self.errors.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
            lines = stream.read(STDERR_TAIL_BYTES).decode(errors="replace").splitlines()
        self.stderr = [line.strip() for line in lines if line.strip()][-STDERR_TAIL_LINES:]
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


def fork(main: Callable[[str], Any], request: dict[str, str], answers: TextIO) -> int:
    """Fork for a request, and return the process id; the fork, a session of its own, exits with
    what `main` returns."""
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
        # Python's own end would not come: torch 1.13 waits there for ever for the interpreter after
        # an error within backward, whose graph it still holds (seen when memory ran out).
        os._exit(code)


class Fork:
    """A fork of this process as it is now, a context manager: it calls `work` with its end of a
    pipe, and ends.  `code` is its exit code afterwards, minus the signal that killed it."""

    def __init__(self, work: Callable[[Connection], None], possible: bool = True):
        self.work = work
        self.possible = possible
        self.child = 0
        self.code = 0

    def __enter__(self) -> Fork:
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
        """Return what it sends next.  Raises EOFError where it has ended, and TimeoutError where
        nothing comes within `timeout` seconds."""
        if not self.here.poll(timeout):
            raise TimeoutError
        return self.here.recv()

    def ask(self, request: Any, timeout: float) -> Any:
        """Return what it answers; None where nothing comes within `timeout` seconds."""
        with suppress(EOFError, OSError):
            if self.child:
                self.here.send(request)
                return self.receive(timeout)
        return None

    def __exit__(self, *_: object) -> None:
        if self.child:
            self.here.close()
            os.kill(self.child, signal.SIGKILL)  # one that is ending keeps its code
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def imported(names: Sequence[str]) -> bool:
    """Import the packages that are installed; return False if one fails: it cannot be imported
    again to see why."""
    try:
        for name in names:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
    except Exception:
        return False
    return True


def main(module: str, *packages: str) -> None:
    """Run ``module.main`` in a fork for each request on stdin, until that ends; packages: imported
    before the first."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a package that prints as it is imported does not answer
    if not imported(packages):
        os.dup2(answers.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-m", "rnnt_bench.system.processes", module])
    call = importlib.import_module(module).main
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy the pages of all this
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        child = fork(call, json.loads(line), answers)
        print(json.dumps({"pid": child}), file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"returncode": code}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
