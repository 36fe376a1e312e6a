"""One job, a process that measures one thing: system.processes calls ``main`` there.  Each record
is written at once, so that it outlives a crash; the last is a ``status``, or a ``user_error`` for a
mistake of the user's."""

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

#: Name of a subject -> the module whose ``run(job)`` yields its records; `job` is a JobSpec.
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

#: Environment variables of the processes of a pass; those of the others are as --allocator says.
VARIABLES = {"memory": MEMORY_VARIABLES}
#: How the reason of a job begins whose loss was found wrong.
WRONG_RESULT = "wrong result"
#: The most files of a user's code that a record has.
OWN_FILES = 100


class Like(NamedTuple):
    """Hold what jobs share that take as long.  row: an implementation, or a task; pass_name: of a
    task its subject."""

    row: str
    pass_name: str


class Runnable:
    """A job that an executor takes: a Job of a loss, or a Task of a tool."""

    name: str  # as records have it
    subject: str  # a key of SUBJECTS
    like: Like
    overrides: tuple[tuple[str, Any], ...]  # settings of this job alone
    request: Mapping[str, Any]  # what its subject reads beside them
    round: int | None = None

    @property
    def title(self) -> str:
        return self.name

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables that its process needs."""
        raise NotImplementedError

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Status:
        """Return the record of its end."""
        return Status(
            job=self.name,
            pass_name=self.like.pass_name,
            round=self.round,
            status=status,
            reason=clipped(reason),
            wall_ns=wall_ns,
        )

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        """Return the job as its process reads it.  folder: the folder of the run, for traces."""
        return JobSpec(
            job=self.name,
            subject=self.subject,
            folder=str(folder.resolve()),
            settings=replace(settings, **dict(self.overrides)),
            request=self.request,
        )


@dataclass(frozen=True)
class Job(Runnable):
    """One process to start for an implementation, in its Python.

    Attributes:
        round: from 1, in the timing and limits passes
        request: what else its subject reads
        same_as: the row of the same code that is asked for it (Implementation)
    """

    implementation: str
    pass_name: str
    round: int | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    subject: str = "loss"
    request: Mapping[str, Any] = field(default_factory=dict, hash=False)
    same_as: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return "correctness", "timing-1", "limits-1"."""
        return self.pass_name if self.round is None else f"{self.pass_name}-{self.round}"

    @property
    def like(self) -> Like:  # type: ignore[override]
        return Like(self.implementation, self.pass_name)

    @property
    def title(self) -> str:
        return f"{self.implementation} {self.name}"

    def variables(self, settings: Settings) -> Mapping[str, str]:
        usual = VARIABLES.get(
            self.pass_name, REUSE_VARIABLES if settings.allocator == "reuse" else {}
        )
        if find(self.implementation).condition != FAST_MKL:
            return usual
        preloaded = [str(libraries.mkl_as_intel()), *filter(None, [os.environ.get("LD_PRELOAD")])]
        return {**usual, "LD_PRELOAD": ":".join(preloaded)}

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        row = find(self.implementation)
        return replace(
            super().spec(settings, folder),
            pass_name=self.pass_name,
            round=self.round,
            script=row.script,
            variant=row.variant,
            same_as=self.same_as,
        )


@dataclass(frozen=True)
class Task(Runnable):
    """One process to start for a tool that measures no loss.

    Attributes:
        request: what its subject reads beside the settings
        python: its interpreter, where it is not the run's
        environment: its variables
        takes, leaves: names of files in the folder of the run, that it reads of the task before it,
            and writes for the one after it
    """

    name: str
    subject: str
    request: Mapping[str, Any]
    overrides: tuple[tuple[str, Any], ...] = ()
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    takes: str | None = None
    leaves: str | None = None

    @property
    def like(self) -> Like:  # type: ignore[override]
        return Like(self.name, self.subject)

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return its own alone: with glibc's defaults times are as a user has them, and the heap
        hides no peak."""
        return self.environment

    def spec(self, settings: Settings, folder: Path) -> JobSpec:
        return replace(super().spec(settings, folder), takes=self.takes, leaves=self.leaves)


#: What differs in the jobs of a control, by its condition: the loss alone has no product of the
#: joiner.
OF_CONTROLS: Mapping[str, tuple[tuple[str, Any], ...]] = {FAST_MKL: (("scopes", ("step",)),)}


def plan(names: Sequence[str], settings: Settings, controls: Collection[str] = ()) -> list[Job]:
    """Return the jobs of a run in their order; the seed shuffles the implementations of each round.

    controls: those of `names` that are measured for their times alone, once they are right."""
    overrides = {name: OF_CONTROLS.get(find(name).condition, ()) for name in controls}
    same_as = {name: whole for name in names if (whole := find(name).same_as) in names}

    def job(name: str, pass_name: str, number: int | None = None) -> Job:
        return Job(name, pass_name, number, overrides.get(name, ()), same_as=same_as.get(name, ""))

    jobs: list[Job] = []
    if "correctness" in settings.passes:
        # The others first: whether they are right tells what these are asked.
        jobs += [job(name, "correctness") for name in sorted(names, key=same_as.__contains__)]
    if "timing" in settings.passes:
        shuffle = random.Random(settings.seed)
        for number in range(1, settings.rounds + 1):
            order = [
                name for name in names if number <= rounds_of(find(name).kind, settings.rounds)
            ]
            shuffle.shuffle(order)
            jobs += [job(name, "timing", number) for name in order]
    others = [name for name in names if name not in controls]
    if "memory" in settings.passes:
        jobs += [job(name, "memory") for name in others]
    if "trace" in settings.passes:
        jobs += [job(name, "trace") for name in others if find(name).kind != BY_UTTERANCE]
    return jobs


def _is_own(file: Any) -> bool:
    """Return whether a file of code belongs neither to Python, nor to a package, nor to this
    suite."""
    suite = str(Path(__file__).parents[1])  # as it was imported: by the link, in a checkout
    foreign = (suite, str(files.BUILD), str(files.CACHE), sys.prefix, sys.base_prefix, "<")
    return isinstance(file, str) and not file.startswith(foreign) and "site-packages" not in file


def own_code() -> dict[str, str]:
    """Return {file: digest} of the user's own code that this process has imported, see `_is_own`;
    of the first OWN_FILES."""
    modules = [module for module in list(sys.modules.values()) if module]
    # past a __getattribute__ of a module's own, which may import or raise
    paths = [object.__getattribute__(module, "__dict__").get("__file__") for module in modules]
    digests = {}
    for file in list(filter(_is_own, paths))[:OWN_FILES]:
        with suppress(OSError):
            digests[file] = files.digest(Path(file))
    return digests


def own_line(error: BaseException) -> str:
    """Return " (flash.py, line 23, in loss)": the last line that was run of the user's own; ""
    where there is none."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def status_of(error: BaseException) -> str:
    """Return "oom", "unsupported" (a build without kernels for this GPU) or "error"."""
    if is_out_of_memory(error):
        return "oom"
    return "unsupported" if "no kernel image is available" in str(error) else "error"


def run(job: JobSpec, write: Callable[[JobLine], None]) -> tuple[str, str]:
    """Write the records of a job; return its status and the reason.  Raises UserError, but not what
    a loss or a model raises under that name."""
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
    except TraceError as error:  # a full disk cut the trace
        return "error", f"{error}; free some space there, or name another folder in TMPDIR"
    except Exception as error:
        line = own_line(error)
        if isinstance(error, UserError) and not line:
            raise
        traceback.print_exc()
        is_users = job.script.endswith(".py")  # no loss that the table knows
        return status_of(error), reason_of(error) + (line if is_users else "")


def main(path: str) -> int:
    now = time.perf_counter_ns  # the script of a loss may replace that of the module
    begin = now()
    # Triton compiles into the folder of all else that is compiled here.
    os.environ.setdefault("TRITON_CACHE_DIR", str(files.BUILD / "triton"))
    # json reads Infinity, which a --timeout among a tool's flags may be
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
        write_record(output, {**end, "code": own_code()})  # the command adds which job it is
    return EXIT_OK
