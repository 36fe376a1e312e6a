"""A child process: started, watched, ended with all that it started, and what it left."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, Optional, Sequence, Set, TextIO, Tuple

from common.system import memory, stops

STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 64 << 10  # of these lines: a package may print gigabytes
#: What it may print before the file of it is cut to such a tail: a disk is not filled by a package that prints on.
MOST_PRINTED_BYTES = 64 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
#: Of a child that could not write its records (EX_IOERR of sysexits.h).
EXIT_UNWRITTEN = 74
#: How long the end of what a child left behind may take.
LAST_SECONDS = 5.0

#: Of prctl; loaded here because a fork may do few things before it executes another program.
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def _prctl(option: int, value: int) -> None:
    if _LIBRARY is not None:
        _LIBRARY.prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """In a fork of the process `parent`: ask Linux to kill this one when that ends, so that a killed run leaves nothing
    measuring behind, and end now where it has ended.  It holds for the program that this process executes, too."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def adopting() -> Iterator[None]:
    """What a child leaves behind, in a session of its own too, becomes a child of this process and is killed at the end
    of the block.  Other children must have been started before."""
    before = _children()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        deadline = time.monotonic() + LAST_SECONDS
        while (left := _children() - before) and time.monotonic() < deadline:  # the children of one that died follow
            for number in left:
                with suppress(OSError):  # gone, or another user's
                    os.kill(number, signal.SIGKILL)
                    os.waitpid(number, os.WNOHANG)
            time.sleep(0.001)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _children() -> Set[int]:
    """Return the processes whose parent is this one; none where there is no /proc."""
    return set(stops.children_by_parent().get(os.getpid(), []))


def write_record(stream: TextIO, record: Mapping[str, Any]) -> None:
    """In a child: give a record to its parent, at once.  Where it cannot be written the child ends with EXIT_UNWRITTEN,
    since nothing more could be kept."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        stream.write(line)
        stream.flush()
    except OSError:
        os._exit(EXIT_UNWRITTEN)


def output(command: Sequence[str], timeout: Optional[float] = None, **more: Any) -> str:
    """What `command` prints on stdout; "" when it fails, is not there, or takes more than `timeout` seconds.  more: of
    subprocess.run."""
    how: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "timeout": timeout, **more}
    try:
        return str(subprocess.run(command, check=True, errors="replace", stdin=subprocess.DEVNULL, **how).stdout)
    except (OSError, subprocess.SubprocessError):
        return ""


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


class Server:
    """A process of common.system.forkserver, which forks itself for one job at a time: a job starts without waiting
    for the imports.  errors: a file for what it prints itself.  Raises OSError when there is no such Python."""

    def __init__(self, command: Sequence[str], root: Path, environment: Mapping[str, str], errors: Path):
        with errors.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                bufsize=0,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self.answers, self.busy = b"", False
        self.poll = select.poll()
        self.poll.register(self.process.stdout or -1, select.POLLIN)

    def ask(self, **request: str) -> None:
        assert self.process.stdin
        self.busy = True
        with suppress(OSError):  # it died: `answer` says it
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self, seconds: float) -> Dict[str, int]:
        """Its next answer, {} when none comes in so many seconds; of a server that died, its own return code."""
        assert self.process.stdout
        deadline = time.monotonic() + seconds
        while b"\n" not in self.answers:
            if not self.poll.poll(1000 * max(deadline - time.monotonic(), 0)):
                return {}
            read = os.read(self.process.stdout.fileno(), 4096)
            if not read:
                return {"returncode": self.process.wait()}
            self.answers += read
        line, _, self.answers = self.answers.partition(b"\n")
        found: Dict[str, int] = json.loads(line)
        self.busy = "returncode" not in found
        return found

    def close(self) -> None:
        self.process.kill()
        with self.process:  # closes its pipes and waits
            pass


#: Servers that wait for their next job, by Python: (key, server).
_waiting: Dict[Path, Tuple[Hashable, Server]] = {}


@contextmanager
def _server(python: Path, key: Hashable, start: Callable[[], Server]) -> Iterator[Server]:
    """The waiting server of this Python where it has this key, else a new one; it waits on afterwards, if it lives."""
    known, server = _waiting.pop(python, (None, None))
    if server and (known != key or server.process.poll() is not None):
        server.close()
        server = None
    server = server or start()
    try:
        yield server
    finally:
        if server.process.poll() is None and not server.busy and python not in _waiting:
            _waiting[python] = key, server
        else:
            server.close()


@atexit.register
def close_servers() -> None:
    """End those that wait; they would end with this process anyway."""
    while _waiting:
        _waiting.popitem()[1][1].close()


def _running_ns() -> int:
    """Return the nanoseconds of a clock that Ctrl-Z stops."""
    return time.monotonic_ns() - stops.stopped_ns()


class Child:
    """A Python module that reads a job and appends JSON records to a file.  `run` starts one.

    After the ``with`` block of `run`: records: those that it wrote; stderr: its last lines; returncode: minus the
    signal where one killed it; killed_for_memory: the kernel killed a process for lack of memory meanwhile; wall_ns.
    """

    records: List[Dict[str, Any]]
    stderr: List[str]
    returncode: int
    killed_for_memory: bool
    wall_ns: int

    def __init__(self, server: Server, output: Path, errors: Path):
        self.server, self.output, self.errors = server, output, errors
        self.pid: Optional[int] = None
        self.ended: Optional[int] = None  # the return code
        self.since, self.oom_kills = _running_ns(), memory.oom_kills()

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
    ) -> Iterator[Child]:
        """Start ``module.main(JOB.json)`` in a process of `python`; at the end of the block it is killed if it still
        runs, with everything that it started.

        The file holds `job` and "output", where its records go.  root: the current folder, from which it imports;
        variables: more of its environment.  It is forked from a server that has imported torch; jobs of another
        `generation` get a server, and so a layout of addresses, of their own.  It has a session of its own, so that
        Ctrl-C reaches only us.  Raises OSError when there is no such Python, or no room for its files.
        """
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        command = [str(python), "-m", "common.system.forkserver", module, "torch"]
        with stops.with_children(), tempfile.TemporaryDirectory(prefix=f"{module}-") as scratch:
            output, errors, description = (Path(scratch) / name for name in ("records.jsonl", "stderr.txt", "job.json"))
            output.touch()
            description.write_text(json.dumps({**job, "output": str(output)}))
            key = (tuple(command), root, tuple(sorted(environment.items())), generation)
            with _server(python, key, lambda: Server(command, root, environment, errors)) as server, adopting():
                errors.touch()
                child = cls(server, output, errors)
                server.ask(argument=str(description), output=str(errors))
                try:
                    yield child
                finally:
                    child._end()

    def alive(self, seconds: float = 0.0) -> bool:
        """Does it still run?  Waits so long for its end, and cuts what it has printed where that is too much."""
        deadline = time.monotonic() + seconds
        while self.ended is None:
            answer = self.server.answer(max(deadline - time.monotonic(), 0))
            if not answer:
                self._cut()
                return True
            self.pid, self.ended = answer.get("pid", self.pid), answer.get("returncode")
        return False

    def seconds(self) -> float:
        """How long it has been running, without what Ctrl-Z stopped it for."""
        return (_running_ns() - self.since) / 1e9

    def count(self) -> int:
        """How many records there are so far."""
        return self.output.read_bytes().count(b"\n")

    def written(self) -> List[Dict[str, Any]]:
        """The records so far; a last line that a killed child left unfinished is dropped."""
        found = []
        for line in self.output.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def _cut(self) -> None:
        """It goes on at the new end of the file, which it appends to."""
        with suppress(OSError):
            if self.errors.stat().st_size > MOST_PRINTED_BYTES:
                tail = _tail(self.errors)
                with self.errors.open("r+b") as stream:
                    stream.write(tail)  # before it is cut, so that what is printed next comes after the tail
                    stream.truncate()

    def _end(self) -> None:
        """Kill it, or, while it does not exist yet, its server."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid or self.server.process.pid, signal.SIGKILL)
            if self.alive(LAST_SECONDS):
                self.server.process.kill()  # stopped, perhaps
                self.alive(LAST_SECONDS)
        self.returncode = -signal.SIGKILL if self.ended is None else self.ended
        self.wall_ns = _running_ns() - self.since
        self.killed_for_memory = memory.oom_kills() > self.oom_kills
        self.records = self.written()
        self.stderr = _last_lines(self.errors)
        if self.returncode == EXIT_UNWRITTEN:
            folder = self.output.parent.parent
            self.stderr.append(f"no room for its records in {folder}; free some space or name another folder in TMPDIR")


def _last_lines(path: Path) -> List[str]:
    """The last STDERR_TAIL_LINES that say something."""
    said = _tail(path).decode(errors="replace").splitlines()
    return [line.strip() for line in said if line.strip()][-STDERR_TAIL_LINES:]


def _tail(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        return stream.read(STDERR_TAIL_BYTES)
