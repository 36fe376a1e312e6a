"""Read the stored runs of tools that measure no loss.  Each tool turns its run into an `Answer`,
which is shown as text, as rows of CSV and JSON, and as a section of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import count, plain
from rnnt_bench.present import parts, text
from rnnt_bench.records import schema, store

Kind = TypeVar("Kind")
#: The status of a job that did not begin before its run was stopped.
NOT_RUN = "not run"
#: Letters of a cell of a printed table; the rest is cut off.
LONGEST_CELL = 60


@dataclass
class Job:
    """Hold how a job ended, where it ran, and what it measured."""

    status: str = NOT_RUN
    reason: str = ""
    environment: schema.Environment | None = None
    values: list[schema.Record] = field(default_factory=list)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the measured values, converted to `kind`.  Raises ValueError."""
        return [schema.typed(value, kind) for value in self.values]


@dataclass
class Kept:
    """Hold a run that was read from its file: the header, and the jobs by name."""

    path: Path
    header: schema.ToolHeader
    jobs: dict[str, Job]

    def job(self, name: str) -> Job:
        """Return the job of this name; one with the status NOT_RUN where there is none."""
        return self.jobs.get(name, Job())

    @property
    def machine(self) -> list[str]:
        """Return one line, ["AMD EPYC, 2 threads, torch 2.11.0"], or [] where no job ran.

        The device and the threads are those of the last job."""
        environments = [job.environment for job in self.jobs.values() if job.environment]
        if not environments:
            return []
        last = environments[-1]
        versions = {environment.torch for environment in environments if environment.torch}
        threads = count(last.threads or 0, "thread")
        return [f"{last.device_name}, {threads}, torch {' and '.join(sorted(versions))}"]


@dataclass
class Answer:
    """Hold what a run found out, ready to be shown.

    Attributes:
        name: the name of the run
        total: lines above the tables
        lines: lines below the tables
        failures: a line for each job that failed
        rows: the rows of CSV and JSON
        statuses: the status of each job
        folded: whether the page hides the tables until a reader opens them
        forms: the whole text in further formats, by the name of the format
    """

    name: str
    total: list[str] = field(default_factory=list)
    tables: list[parts.Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rows: list[parts.Values] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    figures: list[parts.Figure] = field(default_factory=list)
    folded: bool = False
    forms: dict[str, str] = field(default_factory=dict)

    def render(self, format: str) -> str:
        """Return the text in a format: "table", "markdown", "csv", "json" or one of `forms`."""
        if format in self.forms:
            return self.forms[format]
        if format == "csv":
            return text.csv_text(self.rows)
        if format == "json":
            return text.json_text(self.rows)
        below = text.listed([*self.lines, *self.failures], format)
        tables = [
            text.block(table, format)
            if format == "markdown"
            else f"{plain(table.title)}\n{text.aligned(table, LONGEST_CELL)}"
            for table in self.tables
        ]
        return "\n\n".join(filter(None, [text.listed(self.total, format), *tables, below])) + "\n"


def read(path: Path) -> Kept:
    """Return the run of a tool that is stored in a file.  Raises UserError if the file cannot be
    read, or holds anything else."""
    records = store.read(path)
    if not records or not isinstance(records[0], schema.ToolHeader):
        raise UserError(f"{path}: does not begin with a tool's record; {store.ANEW}")
    jobs = {}
    for name, lines in store.latest_jobs(records).items():
        end = store.status_of(lines)
        job = Job(end.status, end.reason or "") if end else Job()
        job.environment = next(
            (line for line in lines if isinstance(line, schema.Environment)), None
        )
        job.values = [line.value for line in lines if isinstance(line, schema.Measured)]
        jobs[name] = job
    return Kept(path, records[0], jobs)


class _Stored(NamedTuple):
    """Hold the file of a run and when it began, "" where its header cannot be read."""

    started: str
    file: Path


def answers(
    paths: Sequence[Any], tool: str, answer: Callable[[Kept], Kind]
) -> Iterator[Kind | Answer]:
    """Yield an answer for each group of equal runs of a tool that are stored in or below `paths`.

    The answer is that of the newest run that measured something, or of the newest run if none did.
    If newer runs were stopped before they measured anything, a line of the answer names them.  A
    run that cannot be read gives an Answer with the status "error".

    Warn if the newest run of a group began in the future.  If there are several paths, warn also
    of the older runs of a group, which are not shown, under each path that has some."""
    for runs in _equal_runs(paths, tool):
        newest_first = sorted(runs, reverse=True)
        newest = newest_first[0]
        candidates = newest_first
        if len(runs) > 1:
            store.warn_of_clock(newest.file.parent, newest.started)
            candidates = list(dropwhile(lambda run: _is_empty(run.file), newest_first)) or [newest]
        shown, *hidden = candidates
        if len(paths) > 1:
            for path in paths:
                store.warn_of_hidden(Path(path), [run.file.parent for run in hidden])
        result = _answer_of(shown.file, answer)
        stopped = newest_first[: newest_first.index(shown)]  # before they measured anything
        if stopped and isinstance(result, Answer):
            result.lines.append(text.stopped_later([run.file.parent.name for run in stopped]))
        yield result


def _equal_runs(paths: Sequence[Any], tool: str) -> list[list[_Stored]]:
    """Return the runs of a tool in groups: those with the same flags, on the same machine.

    A run of the tool whose header cannot be read is a group of its own."""
    files = [
        file for path in paths for file in store.files_named(schema.TOOL_FILE_NAME, Path(path))
    ]
    groups: dict[str, list[_Stored]] = {}
    for file in dict.fromkeys(files):  # the paths may overlap
        head = store.first(file)
        if isinstance(head, schema.ToolHeader) and head.tool == tool:
            key = repr((head.name, head.config, head.settings, head.machine))
            groups.setdefault(key, []).append(_Stored(head.started, file))
        elif head is None and file.parent.name.startswith(f"{tool}-"):
            groups[str(file)] = [_Stored("", file)]
    return list(groups.values())


def _answer_of(file: Path, answer: Callable[[Kept], Kind]) -> Kind | Answer:
    """Return the answer of the run in a file; if the run cannot be read, an Answer with the status
    "error" that says why."""
    try:
        return answer(read(file))
    except UserError as error:
        reason = str(error)
    except (ValueError, LookupError) as error:
        reason = f"{file}: {error}"
    return Answer(file.parent.name, failures=[reason], statuses=["error"])


def _is_empty(file: Path) -> bool:
    """Return whether a run was stopped before it measured anything; False for a file that cannot be
    read."""
    try:
        jobs = read(file).jobs.values()
    except UserError:
        return False
    return all(job.status in (NOT_RUN, "interrupted") and not job.values for job in jobs)


def slice_of(tool: str, title: str, answer: Callable[[Kept], Answer]) -> parts.Slice:
    """Return the functions by which the page and the summary show the runs of a tool.

    title: of the tool's sections, one for each run shown; answer: makes the answer of a run."""

    def sections(base: Path, paths: Sequence[Path]) -> list[parts.Section]:
        """Return a section for each run shown, with its name as heading unless that is `title`."""
        return [
            parts.Section(
                f"{tool}-{number}",
                title,
                heading="" if shown.name == title else shown.name,
                tables=shown.tables,
                failures=[
                    parts.Failure(status="error", name="", words=[line]) for line in shown.failures
                ],
                figures=shown.figures,
                notes=[("", [line]) for line in [*shown.total, *shown.lines]],
                folded=shown.folded,
            )
            for number, shown in enumerate(answers(paths, tool, answer))
        ]

    def rows(paths: Sequence[Path]) -> list[parts.Values]:
        """Return the rows of all answers.  An answer with failures, but without rows, gets one row
        that has all its failures as the reason."""
        result = []
        for shown in answers(paths, tool, answer):
            lines = shown.rows
            if not lines and shown.failures:
                status = shown.statuses[0] if shown.statuses else "error"
                lines = [{"status": status, "reason": "; ".join(shown.failures)}]
            result += [{"tool": tool, "name": shown.name, **row} for row in lines]
        return result

    return parts.Slice(
        sections,
        holds=lambda path: bool(_equal_runs([path], tool)),  # no group: no run of the tool
        rows=rows,
        text=lambda paths, format: [shown.render(format) for shown in answers(paths, tool, answer)],
    )
