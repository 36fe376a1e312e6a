"""A child process: started, watched, ended with all that it started, and what it left."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, TextIO

from common.system import memory

STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 64 << 10  # of these lines: a package may print gigabytes
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
    """Processes whose parent is this one; none where there is no /proc."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it ended
            parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(entry.name))
    return found


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
        return str(subprocess.run(command, check=True, text=True, stdin=subprocess.DEVNULL, **how).stdout)
    except (OSError, subprocess.SubprocessError):
        return ""


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


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

    def __init__(self, process: subprocess.Popen[bytes], output: Path, errors: Path):
        self.process, self.output, self.errors = process, output, errors
        self.since, self.oom_kills = time.monotonic_ns(), memory.oom_kills()

    @classmethod
    @contextmanager
    def run(
        cls, python: Path, module: str, job: Mapping[str, Any], root: Path, variables: Mapping[str, str]
    ) -> Iterator[Child]:
        """Start ``python -m module JOB.json``; at the end of the block it is killed if it still runs, with everything
        that it started.

        The file holds `job` and "output", where its records go.  root: the current folder, from which it imports;
        variables: more of its environment.  It has a process group of its own, so that Ctrl-C reaches only us.  Raises
        OSError when there is no such Python, or no room for its files.
        """
        with tempfile.TemporaryDirectory(prefix=f"{module}-") as scratch, adopting():
            output, errors, description = (Path(scratch) / name for name in ("records.jsonl", "stderr.txt", "job.json"))
            output.touch()
            description.write_text(json.dumps({**job, "output": str(output)}))
            path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
            with errors.open("wb") as stream:
                process = subprocess.Popen(
                    [str(python), "-m", module, str(description)],
                    cwd=root,
                    env={**os.environ, "PYTHONPATH": path, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            child = cls(process, output, errors)
            try:
                yield child
            finally:
                child._end()

    def alive(self) -> bool:
        return self.process.poll() is None

    def seconds(self) -> float:
        """How long it has been running."""
        return (time.monotonic_ns() - self.since) / 1e9

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

    def _end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.returncode = self.process.wait()
        self.wall_ns = time.monotonic_ns() - self.since
        self.killed_for_memory = memory.oom_kills() > self.oom_kills
        self.records = self.written()
        self.stderr = _last_lines(self.errors)
        if self.returncode == EXIT_UNWRITTEN:
            folder = self.output.parent.parent
            self.stderr.append(f"no room for its records in {folder}; free some space or name another folder in TMPDIR")


def _last_lines(path: Path) -> List[str]:
    """The last STDERR_TAIL_LINES that say something."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        said = stream.read(STDERR_TAIL_BYTES).decode(errors="replace").splitlines()
    return [line.strip() for line in said if line.strip()][-STDERR_TAIL_LINES:]
