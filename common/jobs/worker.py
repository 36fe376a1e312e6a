"""The process of one job, started by an executor: common.system.forkserver calls ``main``.

Runs what the job measures and writes each record at once, so that what was measured outlives a crash.  The last record
is a ``status``, or a ``user_error`` for a mistake of the user's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Mapping, Tuple

from common.core import files
from common.core.errors import EXIT_OK, EXIT_USAGE, NotRunnable, OutOfMemory, UserError, WrongResult
from common.core.files import BUILD, ROOT
from common.core.text import clipped, reason_of
from common.jobs.spec import SUBJECTS
from common.records.schema import JobLine, as_written
from common.system.memory import is_out_of_memory
from common.system.processes import write_record


def own_line(error: BaseException, script: str) -> str:
    """Return " (flash.py, line 23, in loss)": the last line that was run of the user's own, for a script of a loss that
    the table does not know; "" where there is none."""
    foreign = (str(ROOT / "common"), str(BUILD), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__) if script.endswith(".py") else []
    mine = [frame for frame in frames if not frame.filename.startswith(foreign)]
    mine = [frame for frame in mine if "site-packages" not in frame.filename]
    return f" ({Path(mine[-1].filename).name}, line {mine[-1].lineno}, in {mine[-1].name})" if mine else ""


def status_of(error: BaseException) -> str:
    """Return "oom", "unsupported" (a build without kernels for this GPU) or "error"."""
    if is_out_of_memory(error):
        return "oom"
    return "unsupported" if "no kernel image is available" in str(error) else "error"


def run(job: Mapping[str, Any], write: Callable[[JobLine], None]) -> Tuple[str, str]:
    """Write the records of a job; return its status and the reason.  Raises UserError."""
    try:
        for record in importlib.import_module(SUBJECTS[job["subject"]]).run(job):
            write(record)
        return "ok", ""
    except NotRunnable as error:
        return error.status, str(error)
    except OutOfMemory as error:
        return "oom", str(error)
    except WrongResult as error:
        return "error", f"wrong result: {error}"
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        return status_of(error), reason_of(error) + own_line(error, job.get("script", ""))


def main(path: str) -> int:
    begin = time.perf_counter_ns()
    os.environ.setdefault("TRITON_CACHE_DIR", str(BUILD / "triton"))  # as all else that is compiled here
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    files.keep_scratch_in(Path(path).parent)
    with open(job["output"], "a", encoding="utf-8") as output:

        def write(record: JobLine) -> None:
            write_record(output, as_written(record))

        try:
            status, reason = run(job, write)
        except UserError as error:
            write_record(output, {"record": "user_error", "message": clipped(str(error))})
            return EXIT_USAGE
        wall_ns = time.perf_counter_ns() - begin
        end = {"record": "status", "status": status, "reason": clipped(reason), "wall_ns": wall_ns}
        write_record(output, end)  # the command adds which job it is
    return EXIT_OK
