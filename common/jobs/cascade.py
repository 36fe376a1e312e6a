"""One example through stages that need several Pythons: consecutive stages of one environment share a process.

Outputs go from one process to the next as a file of tensors, numbers and texts.  Leaves out the measuring itself, which
each process does as for a pipeline of one environment.
"""

from __future__ import annotations

import time
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Mapping

from common.core.settings import Settings
from common.jobs.local import Local
from common.jobs.spec import Task
from common.setup import environments

if TYPE_CHECKING:
    from common.records.schema import Record


def run(job: Mapping[str, Any], python: Path, timeout: float, note: Callable[[str], None]) -> Iterator[Record]:
    """Yield the records of an example, up to the ``status`` of the first process that did not end well.

    Args:
        job: as Task.to_json makes it; what is given is as for tools/inference/pipeline_measure, each stage with
            `environment`.
        python: of the stages without an environment.
        timeout: seconds for all processes together.
        note: called with how far it is.

    Raises UserError for a mistake that a process found.
    """
    settings, folder, begin = Settings.from_json(job["settings"]), Path(job["folder"]), time.monotonic()
    with TemporaryDirectory(prefix="cascade-") as scratch:
        groups = [(name, [*stages]) for name, stages in groupby(job["given"]["stages"], itemgetter("environment"))]
        inputs = None
        for number, (environment, stages) in enumerate(groups):
            is_last = number == len(groups) - 1
            outputs = None if is_last else str(Path(scratch) / f"{number}.pt")
            given = {**job["given"], "stages": stages, "inputs": inputs, "outputs": outputs}
            task = Task(job["job"], "pipeline", given if is_last else {**given, "dump": None})
            *records, end = _executed(task, environment, python, folder, settings, timeout + begin, note)
            # one environment record begins the records of a job; each stage's operations say their own torch
            yield from (record for record in records if inputs is None or record["record"] != "environment")
            if end["status"] != "ok":
                yield end
                return
            inputs = outputs


def _executed(
    task: Task,
    environment: Any,
    python: Path,
    folder: Path,
    settings: Settings,
    deadline: float,
    note: Callable[[str], None],
) -> List[Record]:
    """Return the records of one process, the last of which is its status.  deadline: on time.monotonic."""
    interpreter = environments.interpreter(environment) if environment else python
    if interpreter is None:
        return [task.status("missing", environments.reason(environment))]
    return Local().execute(task, interpreter, folder, settings, max(deadline - time.monotonic(), 0), note)
