"""Show rows as text: a table for each configuration, search or sweep, with remarks below.  CSV and JSON: see
present/text.py."""

from __future__ import annotations

from typing import List, Mapping, Sequence

from common.analysis import metrics, standing, verdict
from common.analysis.groups import Sweep, heading, is_numeric
from common.analysis.groups import groups as grouped
from common.analysis.logs import Log
from common.analysis.metrics import Metric
from common.analysis.row import SCOPES, Row
from common.core.errors import NOT_RUNNABLE
from common.core.grid import flag
from common.core.settings import worded
from common.core.text import count, gathered, number, plain, short
from common.present.parts import Cell, Column, Table, Value
from common.present.text import block, csv_text, json_text, listed
from common.records.schema import Option, Record

Lines = List[str]
FORMATS = ("table", "markdown", "csv", "json")
STATUS_MARKS = {"ok": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def render(rows: Sequence[Row], format: str = "table", of: str = "results") -> str:
    """Return the rows as text that ends with a newline.  of: of metrics.COLUMNS.  Raises ValueError for a format not in
    FORMATS."""
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    groups = grouped(rows)  # which ranks them
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(list(map(metrics.exported, rows)))
    blocks = [block(table(of, heading(group), group), format) for group in groups]
    return "\n\n".join(blocks + remarks(rows, format)) + "\n"


def of_log(log: Log, format: str = "table") -> str:
    """Return runs, searches and sweeps as text in the "table" or "markdown" format, ending with a newline."""
    parts = [render(rows, format, of) for of, rows in (("results", log.rows), ("search", log.searches)) if rows]
    for sweep in log.sweeps:
        shown = block(sweep_table("sweep", sweep.heading, sweep), format)
        parts.append("\n\n".join([shown, *remarks(sweep.rows, format)]) + "\n")
    return "\n".join(parts)


def tidy(rows: Sequence[Row]) -> List[Record]:
    """Return the rows with ten columns, the same for every run, then the settings that a sweep varied and the size that
    a search found, where there are any.

    Times in ms: medians, and the 95% interval of the step's; the peak of a step in MB (2**20 bytes).
    """
    return [_tidy(row) for row in rows]


def _tidy(row: Row) -> Record:
    low, high = row.step.interval or (None, None)
    columns: Record = {"name": row.name, "kind": row.kind, "status": row.status, "device": row.device}
    columns["vocab_size"] = row.configuration.get("vocab_size")
    columns.update(step_ms=row.median_ms("step"), step_ms_low=low, step_ms_high=high, loss_ms=row.median_ms("loss"))
    columns["peak_mb"] = row.peak_mb
    return {**columns, **row.header.values, **({"largest": row.largest.size} if row.largest else {})}


def table(of: str, title: str, rows: Sequence[Row], name: str = "results") -> Table:
    """Return the table `of` metrics.COLUMNS."""
    shown = metrics.columns(of, rows)
    return Table(name, title, columns(shown, of), [cells(row, shown) for row in rows])


def sweep_table(of: str, title: str, sweep: Sweep) -> Table:
    """Return the table `of` metrics.COLUMNS of all cells of a sweep, with the swept settings in front."""
    plain_table = table(of, title, sweep.rows, sweep.name)
    lead = [Column(flag(key), is_numeric(values)) for key, values in sweep.grid.items()]
    swept = [[Cell(worded(value), value) for value in row.header.values.values()] for row in sweep.rows]
    body = [[*first, *rest] for first, rest in zip(swept, plain_table.rows)]
    return plain_table._replace(columns=[*lead, *plain_table.columns], rows=body)


def columns(shown: Sequence[Metric], of: str) -> List[Column]:
    on_page = of.startswith("page")
    return [Column((metric.on_page if on_page else "") or metric.title, metric.numeric) for metric in shown]


def cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Return the cells of a row, each number with the file that it is from."""
    return [_cell(row, metric) for metric in shown]


def _cell(row: Row, metric: Metric) -> Cell:
    words = plain(metric.shown(row))
    if metric.numeric:
        value: Value = metric.value(row)
        if value is None and words != "-":  # an interval, say: its words in the CSV too
            value = words
        return Cell(words, value, row.trace if metric.profiled else row.results)
    status = "bad" if words == "busy" else STATUS_MARKS.get(row.status, "bad")
    marks = {"label": "name", "status": status, "reason": "long"}
    return Cell(words, mark=marks.get(metric.key, ""))


# The lines below tables: reasons and load, ratios, noise, the other clock, stages, notes.


def remarks(rows: Sequence[Row], format: str) -> List[str]:
    """Return blocks of lines in the "table" or "markdown" format."""
    reasons = [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]
    load = beside_load(rows)
    parts = [[*reasons, *([load] if load else [])]]
    parts += [part(rows) for part in (_ratios, _samples, _stages, _options, _notes)]
    return [listed(lines, format) for lines in parts if lines]


def beside_load(rows: Sequence[Row]) -> str:
    """Return a line on the samples of rows whose rounds ran beside other load; "" where no round did.

    "18 of 18 samples ran beside other load (others used 90% of the CPU): a, b; their times are too long ..."
    """
    loaded = [row for row in rows if row.loaded_rounds]
    if not loaded:
        return ""
    beside = [sample for row in loaded for sample in row.timed if sample.beside_load]
    known = [sample for sample in beside if sample.foreign_cpu is not None]
    time, used = sum(sample.ms for sample in known), ""
    if time:
        share = sum(sample.ms * (sample.foreign_cpu or 0.0) for sample in known) / time
        used = f" (others used {share:.0%} of the CPU)"
    names = ", ".join(dict.fromkeys(row.name for row in loaded))
    if any(row.is_beside_load(scope) for row in loaded for scope in row.loaded_rounds):
        advice = "their times are too long; when the machine is quiet, --resume measures these rounds again"
    else:
        advice = "ratios leave these rounds out"
    every = sum(len(row.timed) for row in rows)
    return f"{len(beside)} of {every} samples ran beside other load{used}: {names}; {advice}"


def _ratios(rows: Sequence[Row]) -> Lines:
    """Return the intervals behind the column "over the fastest"."""
    compared = [row.against_fastest for row in rows if row.against_fastest]
    alone = [row.loss_against_fastest for row in rows if row.loss_against_fastest]
    alone = [each for each in alone if each not in compared]
    return [*(verdict.over_fastest(each) for each in [*compared, *alone] if not each.is_fastest), *drifts(rows)]


def drifts(rows: Sequence[Row]) -> Lines:
    """Return a line for each row whose ratio changes along the rounds."""
    return [verdict.drifting(*each) for each in standing.drifts(rows)]


def _samples(rows: Sequence[Row]) -> Lines:
    """Return what the medians do not show: the noise of samples of one batch, since the column "+-" shows how batches
    differ; the other clock of each scope, on CUDA."""
    halves = [(row.name, scope, metrics.of_repeats(row, scope)) for row in rows for scope in SCOPES]
    spreads = [f"{name} {scope} +-{number(half, 2)}%" for name, scope, half in halves if half is not None]
    lines = [f"repeats of one batch, half of 20th to 80th percentile: {', '.join(spreads)}"] if spreads else []
    both = [(row.name, row.step.event, row.loss_alone.wall) for row in rows if row.step.event or row.loss_alone.wall]
    medians = [(name, [times.median if times else None for times in each]) for name, *each in both]
    if medians:
        words = [f"{name} {' / '.join(map(number, each))}" for name, each in medians]
        lines.append(f"step by CUDA events / loss by wall time, ms: {', '.join(words)}")
    return lines


def _options(rows: Sequence[Row]) -> Lines:
    options = [(row.name, row.environment.options) for row in rows if row.environment.options]
    return [f"{name} options: {options_text(each)}" for name, each in options]


def options_text(options: Mapping[str, Option]) -> str:
    """Return "blank=0 [default -1], reduction=sum [default mean], clamp=-1", with defaults that are known and
    differ."""
    parts = []
    for name, option in options.items():
        is_other = option.default not in ("-", option.ours)
        parts.append(f"{name}={option.ours}" + (f" [default {option.default}]" if is_other else ""))
    return ", ".join(parts)


def _stages(rows: Sequence[Row]) -> Lines:
    """Return where the time goes: the stages of the timing pass, or labelled spans where there are only traces."""
    lines = []
    for row in rows:
        stages = [(scope, row.of(scope).stages, "ms") for scope in SCOPES if row.of(scope).stages]
        if not stages and row.profile.label_us:
            stages = [("profiled", row.profile.label_us, "us")]
        for scope, parts, unit in stages:
            split = ", ".join(f"{short(plain(name))} {number(value, 3)} {unit}" for name, value in parts.items())
            lines.append(f"{row.name} {scope}: {split}")
    return lines


def _notes(rows: Sequence[Row]) -> Lines:
    """Return each note once, with the rows that have it."""
    names_by_note = gathered((note, row.name) for row in rows for note in row.notes)
    lines = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in names_by_note.items()]
    inflated = [f"{row.name} {number(row.inflation, 3)}x" for row in rows if row.inflation]
    if inflated:
        lines.append(f"profiled steps over the same steps without the profiler: {', '.join(inflated)}")
    earlier = sum(row.earlier_runs for row in rows)
    if earlier:
        lines.append(f"{count(earlier, 'earlier run')} of the same configuration not shown (--all-runs shows them)")
    return lines
