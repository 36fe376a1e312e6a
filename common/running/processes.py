"""Start one job in a process of its own, watch it, and turn however it ended into records.  No torch here.

The worker appends records to a temporary file; they are read whatever happens to it.  The process gets a group of its
own, so that Ctrl-C reaches the runner alone and a hung worker is ended with everything it started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

from common.errors import EXIT_USAGE, UserError
from common.results.records import Record
from common.running import machine
from common.settings import ROOT, Settings

if TYPE_CHECKING:
    from common.running.runner import Job

POLL_SECONDS = 0.2
STDERR_TAIL_LINES = 20

#: What allocators say, in lower case: torch's of CPU and CUDA, C++, the C library, cuBLAS, numba's CUDA, OpenMP.
NO_MEMORY = (
    "out of memory",
    "out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "alloc_failed",
    "memoryallocation",
    "memoryerror",
    "thread creation failed",
)
#: What torch's stable ABI (torchaudio's kernels use it) says of a tensor that it could not make; why, it tells stderr
#: only, and of these nothing but memory can fail.
NO_TENSOR = re.compile(r"(aten::|aoti_torch_)(new_)?(empty|zeros|ones|full)\w*\b.*api call failed", re.DOTALL)

#: glibc keeps freed blocks below its moving threshold; fixed at this many bytes, VmHWM tells of what is in use.
MEMORY_PASS_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
#: Likewise for address space, of which each further arena of glibc would reserve 64 MB.
PROBE_ENVIRONMENT = {**MEMORY_PASS_ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}
ENVIRONMENTS = {"memory": MEMORY_PASS_ENVIRONMENT, "probe": PROBE_ENVIRONMENT}


class Interrupted(Exception):
    """The user pressed Ctrl-C (or SIGTERM came); `records` are those of the job that was under way."""

    def __init__(self, records: List[Record]):
        super().__init__("interrupted")
        self.records = records


def sizes(size: Optional[int], pool: Optional[int]) -> Dict[str, int]:
    """What the status record of a job of --find-largest has more than others."""
    return {key: value for key, value in (("size", size), ("pool", pool)) if value}


def status_record(job: Job, status: str, reason: str, wall_ns: int = 0, **more: object) -> Record:
    return {
        "record": "status",
        "job": job.name,
        "pass": job.pass_name,
        "round": job.round,
        **sizes(job.size, job.pool),
        "status": status,
        "reason": reason,
        "wall_ns": wall_ns,
        **more,
    }


def _environment(job: Job) -> Dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment.update(ENVIRONMENTS.get(job.pass_name, {}))
    return environment


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and everything it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_records(path: Path) -> List[Record]:
    """The records of a worker; a last line that a killed worker left unfinished is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def tells_of_no_memory(text: str) -> bool:
    said = text.lower()
    return any(words in said for words in NO_MEMORY) or bool(NO_TENSOR.search(said))


def _how_it_died(returncode: int, oom_kills_before: int, tail: List[str]) -> tuple[str, str]:
    """(status, reason) of a worker that wrote no status."""
    last = f": {tail[-1]}" if tail else ""
    if returncode < 0:
        number = -returncode
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        if number == signal.SIGKILL and machine.oom_kills() > oom_kills_before:
            return "oom", "killed by the kernel for lack of memory; try a smaller --batch-size or --max-frames"
        aborted = "oom" if number == signal.SIGABRT and tells_of_no_memory("\n".join(tail)) else "error"
        return aborted, f"killed by {name}{last}"
    if tail and tells_of_no_memory(tail[-1]):
        return "oom", tail[-1]
    return "error", f"ended with exit code {returncode} and no status{last}"


def execute(
    job: Job, python: Path, folder: Path, chosen: Settings, timeout: float, note: Callable[[str], None]
) -> List[Record]:
    """Run the job and return its records, the last of which is its status.

    timeout: seconds; note: told now and then how many samples there are.  Raises UserError for a mistake that the
    worker found in the user's input, Interrupted on Ctrl-C.
    """
    try:
        return _execute(job, python, folder, chosen, timeout, note)
    except OSError as error:  # no room for its files, or no such Python any more
        reason = f"could not be run: {error} (its scratch files are in {tempfile.gettempdir()}; TMPDIR names another)"
        return [status_record(job, "error", reason)]


def _execute(
    job: Job, python: Path, folder: Path, chosen: Settings, timeout: float, note: Callable[[str], None]
) -> List[Record]:
    from common.implementations import find

    with tempfile.TemporaryDirectory(prefix="transducer-benchmark-") as scratch:
        output, errors, description = (Path(scratch) / name for name in ("records.jsonl", "stderr.txt", "job.json"))
        output.touch()
        description.write_text(
            json.dumps(
                {
                    "job": job.name,
                    "pass": job.pass_name,
                    "round": job.round,
                    "script": find(job.implementation).script,
                    "variant": find(job.implementation).variant,
                    "settings": {**chosen.to_json(), **dict(job.overrides)},
                    "size": job.size,
                    "pool": job.pool,
                    "limit_bytes": job.limit_bytes,
                    "folder": str(folder.resolve()),
                    "output": str(output),
                }
            )
        )
        kills, begin = machine.oom_kills(), time.monotonic()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [str(python), "-m", "common.running.worker", str(description)],
                cwd=ROOT,
                env=_environment(job),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        ending = None
        try:
            while process.poll() is None:
                if time.monotonic() - begin > timeout:
                    ending = ("timeout", f"{job.name} took more than {timeout:g} s (--timeout)")
                    break
                time.sleep(POLL_SECONDS)
                note(_sample_count(output))
        except KeyboardInterrupt:
            ending = ("interrupted", f"stopped by the user during {job.name}")
        finally:
            end(process)
        produced = read_records(output)
        tail = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()][
            -STDERR_TAIL_LINES:
        ]

    mistakes = [record["message"] for record in produced if record["record"] == "user_error"]
    if mistakes and process.returncode == EXIT_USAGE:
        raise UserError(mistakes[0])
    if not produced or produced[-1]["record"] != "status":
        status, reason = ending or _how_it_died(process.returncode, kills, tail)
        produced.append(status_record(job, status, reason, round((time.monotonic() - begin) * 1e9)))
    if produced[-1]["status"] not in ("ok", "missing", "unsupported"):
        produced[-1]["stderr_tail"] = tail
    if ending and ending[0] == "interrupted":
        raise Interrupted(produced)
    return produced


def _sample_count(output: Path) -> str:
    try:
        lines = output.read_bytes().count(b"\n")
    except OSError:
        return ""
    return f"{lines} records" if lines else ""
