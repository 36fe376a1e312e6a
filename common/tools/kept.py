"""Reads the runs of tools that measure no loss: as text, rows, and a section of the page; a tool
makes an `Answer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import count, plain
from rnnt_bench.present import parts, text
from rnnt_bench.records import schema, store

Kind = TypeVar("Kind")
#: The status of a job that a run was stopped before.
NOT_RUN = "not run"


@dataclass
class Job:
    """Hold how a job ended, where it ran, and what it measured."""

    status: str = NOT_RUN
    reason: str = ""
    environment: schema.Environment | None = None
    values: list[schema.Record] = field(default_factory=list)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return what was measured as the tool's own type.  Raises ValueError."""
        return [schema.typed(value, kind) for value in self.values]


@dataclass
class Kept:
    """A run that was read of its file."""

    path: Path
    header: schema.ToolHeader
    jobs: dict[str, Job]

    def job(self, name: str) -> Job:
        return self.jobs.get(name, Job())

    @property
    def machine(self) -> list[str]:
        """Return ["AMD EPYC, 2 threads, torch 2.11.0"] by the last job; [] where none ran."""
        lines = [job.environment for job in self.jobs.values() if job.environment]
        if not lines:
            return []
        torches = " and ".join(sorted({line.torch for line in lines if line.torch}))
        threads = count(lines[-1].threads or 0, "thread")
        return [f"{lines[-1].device_name}, {threads}, torch {torches}"]


@dataclass
class Answer:
    """The answer of a run.  total: in a line; lines: below the tables; rows: for CSV and JSON;
    statuses: of its jobs;
    folded: whether the page shows it once its title is opened; forms: texts of further formats."""

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
        """Return it as "table", "markdown", "csv" or "json"."""
        if format in self.forms:
            return self.forms[format]
        if format in ("csv", "json"):
            return text.csv_text(self.rows) if format == "csv" else text.json_text(self.rows)
        below = text.listed([*self.lines, *self.failures], format)
        tables = [
            text.block(table, format)
            if format == "markdown"
            else f"{plain(table.title)}\n{text.aligned(table, 60)}"
            for table in self.tables
        ]
        return "\n\n".join(filter(None, [text.listed(self.total, format), *tables, below])) + "\n"


def read(path: Path) -> Kept:
    """Return the run in a file.  Raises UserError."""
    records = store.read(path)
    if not records or not isinstance(records[0], schema.ToolHeader):
        raise UserError(f"{path}: does not begin with a tool's record; {store.ANEW}")
    jobs = {}
    for name, lines in store.latest_jobs(records).items():
        end = store.status_of(lines)
        job = jobs[name] = Job(end.status, end.reason or "") if end else Job()
        job.environment = next(
            (line for line in lines if isinstance(line, schema.Environment)), None
        )
        job.values = [line.value for line in lines if isinstance(line, schema.Measured)]
    return Kept(path, records[0], jobs)


def answers(
    paths: Sequence[Any], tool: str, answer: Callable[[Kept], Kind]
) -> Iterator[Kind | Answer]:
    """Yield the answers of a tool's runs in, at or under `paths`: of equal ones on one machine the
    newest that measured something, or else the newest; one that cannot be read says so."""
    files = dict.fromkeys(
        file for path in map(Path, paths) for file in store.files_named(schema.TOOL_FILE_NAME, path)
    )
    equal: dict[str, list[tuple[str, Path]]] = {}
    for file in files:
        head = store.first(file)
        if isinstance(head, schema.ToolHeader) and head.tool == tool:
            key = repr((head.name, head.config, head.settings, head.machine))
            equal.setdefault(key, []).append((head.started, file))
        elif head is None and file.parent.name.startswith(f"{tool}-"):
            equal[str(file)] = [("", file)]
    for runs in equal.values():
        newest_first = [
            file for _, file in sorted(reversed(runs), key=lambda run: run[0], reverse=True)
        ]
        file, stopped = newest_first[0], []
        if len(newest_first) > 1:
            stopped = list(takewhile(_is_empty, newest_first))
            file = newest_first[len(stopped)] if len(stopped) < len(newest_first) else file
        if len(runs) > 1:
            store.warn_of_clock(file.parent, max(started for started, _ in runs))
        others = {path.parent for path in newest_first if path not in (file, *stopped)}
        for path in paths if len(paths) > 1 else ():
            store.warn_of_hidden(Path(path), others)
        try:
            result = answer(read(file))
        except (UserError, ValueError, LookupError) as error:
            reason = str(error) if isinstance(error, UserError) else f"{file}: {error}"
            yield Answer(file.parent.name, failures=[reason], statuses=["error"])
            continue
        if stopped and isinstance(result, Answer) and file not in stopped:
            result.lines.append(text.stopped_later([path.parent.name for path in stopped]))
        yield result


def _is_empty(file: Path) -> bool:
    """Return whether a run was stopped before it measured anything; one that cannot be read was
    not."""
    try:
        jobs = read(file).jobs.values()
    except UserError:
        return False
    return all(job.status in (NOT_RUN, "interrupted") and not job.values for job in jobs)


def slice_of(tool: str, title: str, answer: Callable[[Kept], Answer]) -> parts.Slice:
    """Return how the page and the summary show the runs of a tool."""

    def sections(base: Path, paths: Sequence[Path]) -> list[parts.Section]:
        return [
            parts.Section(
                f"{tool}-{number}",
                title,
                "" if shown.name == title else shown.name,
                tables=shown.tables,
                failures=[parts.Failure("error", "", [line]) for line in shown.failures],
                figures=shown.figures,
                notes=[("", [line]) for line in [*shown.total, *shown.lines]],
                folded=shown.folded,
            )
            for number, shown in enumerate(answers(paths, tool, answer))
        ]

    def rows(paths: Sequence[Path]) -> list[parts.Values]:
        result = []
        for shown in answers(paths, tool, answer):
            failed = {
                "status": next(iter(shown.statuses), "error"),
                "reason": "; ".join(shown.failures),
            }
            lines = shown.rows or ([failed] if shown.failures else [])
            result += [{"tool": tool, "name": shown.name, **row} for row in lines]
        return result

    return parts.Slice(
        sections,
        holds=lambda path: any(answers([path], tool, answer)),
        rows=rows,
        text=lambda paths, format: [shown.render(format) for shown in answers(paths, tool, answer)],
    )
