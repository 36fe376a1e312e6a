"""A child process: started, watched, ended, and what it left."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from common.system import memory

STDERR_TAIL_LINES = 20
STDERR_TAIL_BYTES = 64 << 10  # of these lines: a package may print gigabytes
PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that a killed run leaves nothing measuring behind."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


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
        with tempfile.TemporaryDirectory(prefix=f"{module}-") as scratch:
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


def _last_lines(path: Path) -> List[str]:
    """The last STDERR_TAIL_LINES that say something."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        said = stream.read(STDERR_TAIL_BYTES).decode(errors="replace").splitlines()
    return [line.strip() for line in said if line.strip()][-STDERR_TAIL_LINES:]
