"""Define jobs, and run one.

A job is a process that measures one thing, such as a round of one loss.  The command plans jobs and
starts them; system.processes calls `main` in the process.  It writes each record at once, so that
the record outlives a crash.  The last is a ``status``, or a ``user_error`` for a mistake of the
user.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.core import files
from rnnt_bench.core.errors import (
    EXIT_OK,
    EXIT_USAGE,
    NotRunnable,
    OutOfMemory,
    UserError,
    WrongResult,
)
from rnnt_bench.core.implementations import BY_UTTERANCE, FAST_MKL, find
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import MEMORY_VARIABLES, REUSE_VARIABLES, Settings, rounds_of
from rnnt_bench.core.text import clipped, reason_of
from rnnt_bench.records.schema import JobLine, Status, as_written, typed
from rnnt_bench.setup import libraries
from rnnt_bench.system.memory import is_out_of_memory
from rnnt_bench.system.processes import write_record
from rnnt_bench.traces.reader import TraceError

#: Name of a subject, which is what a job measures -> the module whose ``run(job)`` yields its
#: records; `job` is a JobSpec.
SUBJECTS = {
    "loss": "rnnt_bench.losses.subject",
    "device": "rnnt_bench.instruments.rates",
    "flops": "rnnt_bench.tools.flops.measure",
    "inference": "rnnt_bench.tools.inference.measure",
    "pipeline": "rnnt_bench.tools.pipelines.measure",
    "profile": "rnnt_bench.tools.profile.measure",
    "largest": "rnnt_bench.tools.largest.measure",
    "conformance": "rnnt_bench.conformance.judge",
}

#: The reason of a job whose loss was found wrong begins with it.
WRONG_RESULT = "wrong result"
#: The most files of a user's code whose digests a record holds.
OWN_FILES = 100
#: Settings that have another value in one job: (name, value) of each.
Overrides = tuple[tuple[str, Any], ...]


class RowPass(NamedTuple):
    """Name a pass of a row, whose jobs take about the same time.

    row: an implementation, or a task of a tool; pass_name: for a task its subject."""

    row: str
    pass_name: str


class Runnable:
    """A job that an executor takes: a Job of a loss, or a Task of a tool.

    Attributes:
        name: of the job, in records
        subject: a key of SUBJECTS
        row_pass: the row that it belongs to, and the pass
        overrides: settings of this job alone
        request: what its subject reads beside the settings
        round: number of the round, from 1, in passes that have rounds
    """

    name: str
    subject: str
    row_pass: RowPass
    overrides: Overrides
    request: Mapping[str, Any]
    round: int | None = None

    @property
    def title(self) -> str:
        """Return how progress names the job."""
        return self.name

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables that its process needs."""
        raise NotImplementedError

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Status:
        """Return the record of how the job ended."""
        return Status(
            job=self.name,
            pass_name=self.row_pass.pass_name,
            round=self.round,
            status=status,
            reason=clipped(reason),
            wall_ns=wall_ns,
        )

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        """Return what the process of the job reads.  folder: the folder of the run, for traces."""
        return JobSpec(
            job=self.name,
            subject=self.subject,
            folder=str(folder.resolve()),
            settings=replace(settings, **dict(self.overrides)),
            request=self.request,
        )


@dataclass(frozen=True)
class Job(Runnable):
    """A job of an implementation, in its Python.

    Attributes:
        same_as: the row that runs the same code, whose correctness is judged in its place (see
          Implementation.same_as); "" for none
    """

    implementation: str
    pass_name: str
    round: int | None = None
    overrides: Overrides = ()
    subject: str = "loss"
    request: Mapping[str, Any] = field(default_factory=dict, hash=False)
    same_as: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the pass, with the round behind it in passes that have rounds:
        "correctness", "timing-1"."""
        return self.pass_name if self.round is None else f"{self.pass_name}-{self.round}"

    @property
    def row_pass(self) -> RowPass:  # type: ignore[override]
        return RowPass(self.implementation, self.pass_name)

    @property
    def title(self) -> str:
        return f"{self.implementation} {self.name}"

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables that the process needs: those of the allocator, by the
        pass and by --allocator; under FAST_MKL also LD_PRELOAD, with the library before those that
        the user preloads.

        Raises NotRunnable if that library cannot be compiled."""
        variables: dict[str, str] = {}
        if self.pass_name == "memory":
            variables.update(MEMORY_VARIABLES)
        elif settings.allocator == "reuse":
            variables.update(REUSE_VARIABLES)
        if find(self.implementation).condition == FAST_MKL:
            library = str(libraries.mkl_as_intel())
            of_user = os.environ.get("LD_PRELOAD")
            variables["LD_PRELOAD"] = f"{library}:{of_user}" if of_user else library
        return variables

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        implementation = find(self.implementation)
        return replace(
            super().spec(settings, folder),
            pass_name=self.pass_name,
            round=self.round,
            script=implementation.script,
            variant=implementation.variant,
            same_as=self.same_as,
        )


@dataclass(frozen=True)
class Task(Runnable):
    """A job of a tool that measures no loss.

    Attributes:
        python: its interpreter, where that is not the interpreter of the run
        environment: its environment variables
        takes: name of a file in the folder of the run, which the task before it has left
        leaves: name of a file that it leaves there for the next task
    """

    name: str
    subject: str
    request: Mapping[str, Any]
    overrides: Overrides = ()
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    takes: str | None = None
    leaves: str | None = None

    @property
    def row_pass(self) -> RowPass:  # type: ignore[override]
        return RowPass(self.name, self.subject)

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables of the task itself, without any of the allocator: with
        glibc's defaults times are as a user has them, and the heap hides no peak."""
        return self.environment

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        return replace(super().spec(settings, folder), takes=self.takes, leaves=self.leaves)


#: What differs in the jobs of a control under FAST_MKL, a row that is timed again with faster
#: matrix products: only whole steps are timed, since the loss alone has no such products.
FAST_MKL_OVERRIDES: Overrides = (("scopes", ("step",)),)


def plan(names: Sequence[str], settings: Settings, controls: Collection[str] = ()) -> list[Job]:
    """Return the jobs of a run in their order; the seed shuffles the implementations of each round.

    names: the rows to measure; controls: those of them that run a loss again under another
    condition, and so are only judged and timed."""
    fast = [name for name in controls if find(name).condition == FAST_MKL]
    same_as = {name: find(name).same_as for name in names if find(name).same_as in names}

    def job(name: str, pass_name: str, number: int | None = None) -> Job:
        overrides = FAST_MKL_OVERRIDES if name in fast else ()
        return Job(name, pass_name, number, overrides, same_as=same_as.get(name, ""))

    jobs: list[Job] = []
    if "correctness" in settings.passes:
        # Of two rows that run the same code, the one with a `same_as` comes later: it has few
        # questions to answer if the other is right.
        ordered = sorted(names, key=lambda name: name in same_as)
        jobs += [job(name, "correctness") for name in ordered]
    if "timing" in settings.passes:
        generator = random.Random(settings.seed)
        for number in range(1, settings.rounds + 1):
            order = [
                name for name in names if number <= rounds_of(find(name).kind, settings.rounds)
            ]
            generator.shuffle(order)
            jobs += [job(name, "timing", number) for name in order]
    without_controls = [name for name in names if name not in controls]
    if "memory" in settings.passes:
        jobs += [job(name, "memory") for name in without_controls]
    if "trace" in settings.passes:
        # A loss by utterance is measured for its memory (see `rounds_of`), so it gets no trace.
        jobs += [job(name, "trace") for name in without_controls if find(name).kind != BY_UTTERANCE]
    return jobs


def _is_own(file: Any) -> bool:
    """Return whether a file of code is the user's own: it belongs neither to Python, nor to a
    package, nor to this suite."""
    suite = str(Path(__file__).parents[1])  # in a checkout: its link rnnt_bench
    # Code without a file has a "file" such as "<string>".
    foreign = (suite, str(files.BUILD), str(files.CACHE), sys.prefix, sys.base_prefix, "<")
    return isinstance(file, str) and not file.startswith(foreign) and "site-packages" not in file


def own_code() -> dict[str, str]:
    """Return {file: digest} of the user's own code that this process has imported, of OWN_FILES
    files at most."""
    modules = [module for module in list(sys.modules.values()) if module]
    # A module may have a __getattribute__ of its own, which imports or raises.
    paths = [object.__getattribute__(module, "__dict__").get("__file__") for module in modules]
    digests = {}
    for file in list(filter(_is_own, paths))[:OWN_FILES]:
        with suppress(OSError):
            digests[file] = files.digest(Path(file))
    return digests


def own_line(error: BaseException) -> str:
    """Return where the user's own code was when an error was raised: " (flash.py, line 23, in
    loss)"; "" if none of it was running."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def status_of(error: BaseException) -> str:
    """Return the status of a job that an error ended: "oom", "unsupported" (a build without kernels
    for this GPU) or "error"."""
    if is_out_of_memory(error):
        return "oom"
    return "unsupported" if "no kernel image is available" in str(error) else "error"


def run(job: JobSpec, write: Callable[[JobLine], None]) -> tuple[str, str]:
    """Run a job, and write its records; return its status and the reason.

    Raises UserError for a mistake in the user's input.  A UserError out of the user's own code is
    not raised: it gives the status "error"."""
    try:
        for record in importlib.import_module(SUBJECTS[job.subject]).run(job):
            write(record)
        return "ok", ""
    except NotRunnable as error:
        return error.status, str(error)
    except OutOfMemory as error:
        return "oom", str(error)
    except WrongResult as error:
        return "error", f"{WRONG_RESULT}: {error}"
    except TraceError as error:  # most likely a full disk cut the trace
        return "error", f"{error}; free some space there, or name another folder in TMPDIR"
    except Exception as error:
        line = own_line(error)
        if isinstance(error, UserError) and not line:
            raise
        traceback.print_exc()
        is_users = job.script.endswith(".py")  # losses of the suite are modules
        return status_of(error), reason_of(error) + (line if is_users else "")


def main(path: str) -> int:
    """Run a job, and append its records to the file `output` of its JobSpec.

    Return the exit code of the process: EXIT_USAGE after a UserError, whose message is then the
    last record; else EXIT_OK, even if the job failed.

    path: a JSON file that holds the JobSpec."""
    now = time.perf_counter_ns  # kept, since the script of a loss may replace time.perf_counter_ns
    begin = now()
    # Unless the user names a folder, Triton keeps its kernels where this suite compiles losses.
    os.environ.setdefault("TRITON_CACHE_DIR", str(files.BUILD / "triton"))
    # A tool's --timeout may be Infinity in the file. Python's json reads that; msgspec does not.
    job: JobSpec = typed(json.loads(Path(path).read_text(encoding="utf-8")), JobSpec)
    files.scratch = Path(path).parent
    with open(job.output, "a", encoding="utf-8") as output:
        try:
            status, reason = run(job, lambda record: write_record(output, as_written(record)))
        except UserError as error:
            write_record(output, {"record": "user_error", "message": clipped(str(error))})
            return EXIT_USAGE
        end = {
            "record": "status",
            "status": status,
            "reason": clipped(reason),
            "wall_ns": now() - begin,
        }
        # The command adds the job's name, pass and round.
        write_record(output, {**end, "code": own_code()})
    return EXIT_OK
