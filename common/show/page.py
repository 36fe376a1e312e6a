"""Make one self-contained HTML page from groups of rows, and write it: no network, and only its own two scripts.

A content security policy allows these two scripts by their hash, and no address, so that nothing in a name can run.
Without scripts the page is still complete: every plot has its numbers as a table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from common.analysis import logs
from common.analysis.groups import Group, Sweep, kind_title
from common.analysis.logs import Log
from common.analysis.row import Row
from common.core.errors import NOT_RUNNABLE, UserError
from common.core.files import ROOT, another, make_folder, write_whole
from common.core.text import count, gathered, plain, reason_of
from common.present import parts
from common.present.parts import Failure, Figure, Line, Link, Section
from common.setup import interpreters
from common.show import cards, facts, html, over_time, plots, results

Paths = Sequence[Path]
FILE_NAME = "report.html"
HERE = Path(__file__).resolve().parent
TITLE = "Which transducer loss?"
OVERLINE = "Transducer (RNN-T) losses, side by side"
LIBRARY = HERE / "plotly" / "plotly-basic.min.js"


def page(
    groups: Sequence[Group], base: Path, library: Optional[str] = None, swept: Sequence[Sweep] = (), paths: Paths = ()
) -> str:
    """Return the page as text.  Raises UserError without jinja2.

    Args:
        groups: rows by configuration.
        base: the folder that the page will be in, from which its links start.
        library: JavaScript in place of plotly.js.
        swept: sweeps to show.
        paths: the logs that are shown, in which a conformance matrix may be too.
    """
    answer = cards.title(groups[0].rows) if len(groups) == 1 and not groups[0].search and not swept else ""
    title = answer or TITLE
    return assembled(sections(groups, base, swept, paths), base, title, _lead(groups, swept), library, reading=True)


def sections(groups: Sequence[Group], base: Path, swept: Sequence[Sweep], paths: Paths) -> List[Section]:
    """Return the sections of the page: configurations, sweeps, tools."""
    titles = _titles(groups)
    result = [
        *(
            _section(group, index, titles[index], [base, *paths], len(groups) == 1)
            for index, group in enumerate(groups)
        ),
        *(plots.of_sweep(each, number) for number, each in enumerate(swept)),
    ]
    for number, tool in enumerate(parts.slices()):
        try:
            result += tool.sections(base, paths)
        except Exception as error:  # a tool costs its own section, not the page
            result.append(_failed(f"tool-{number}", tool.sections.__module__, error))
    return result


def _failed(name: str, title: str, error: Exception) -> Section:
    return Section(name, title, failures=[Failure("error", "this section", [reason_of(error)])])


def assembled(
    sections: Sequence[Section],
    base: Path,
    title: str,
    lead: str,
    library: Optional[str] = None,
    reading: bool = False,
    overline: str = OVERLINE,
) -> str:
    """Return the page of these sections.  reading: whether to explain how tables of losses are read; overline: above
    the title."""
    library = _source(LIBRARY) if library is None else library
    script = _source(HERE / "page.js")
    policy = (
        f"default-src 'none'; script-src {html.script_hash(library)} {html.script_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    html.environment()  # raises UserError where it cannot be made
    shown = [_rendered(section, base) for section in sections]
    figures = {name: figure for _, _, of_section in shown for name, figure in of_section.items()}
    return html.render(
        "show/templates/page.html.jinja",
        base,
        title=title,
        lead=lead,
        sections=[(section, text) for section, text, _ in shown],
        reading=reading,
        overline=overline,
        style=_source(HERE / "page.css"),
        policy=policy,
        figures=html.packed(json.dumps(figures, allow_nan=False, separators=(",", ":"))),
        library=html.packed(library),
        script=script,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
    )


def _rendered(section: Section, base: Path) -> Tuple[Section, str, Dict[str, Any]]:
    """Return the section, its HTML and its plots; one that says what is wrong in place of a section that fails."""
    try:
        return _drawn(section, base)
    except Exception as error:
        return _drawn(_failed(section.id, section.title, error), base)


def _drawn(section: Section, base: Path) -> Tuple[Section, str, Dict[str, Any]]:
    text = html.render("show/templates/section.html.jinja", base, section=section)
    plots = [*([section.lead] if section.lead else []), *section.figures]
    figures = {f"{plot.key}-{section.id}": {"data": plot.data, "layout": plot.layout} for plot in plots}
    return section, text, html.drawn(figures)


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _lead(groups: Sequence[Group], swept: Sequence[Sweep]) -> str:
    rows = [row for group in groups for row in group.rows] + [row for each in swept for row in each.rows]
    devices = list(dict.fromkeys(row.device_name for row in rows if row.device_name))
    days = sorted({(row.started or "")[:10] for row in rows} - {""})
    parts = _counts(rows)
    parts += [f"on {', '.join(devices)}"] if devices else []
    parts += [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []
    return ", ".join(parts) + "."


def _counts(rows: Sequence[Row]) -> List[str]:
    """Return ["11 losses measured", "1 failed", "6 not available here"]; a loss under a second torch (NAME@k2) counts
    once."""
    measured: Set[str] = set()
    failed: Set[str] = set()
    absent: Set[str] = set()
    for row in rows:
        kind = measured if row.is_measured else absent if row.status in NOT_RUNNABLE else failed
        kind.add(row.loss)
    failed -= measured
    absent -= measured | failed
    others = ((failed, "failed"), (absent, "not available here"))
    losses = "1 loss" if len(measured) == 1 else f"{len(measured)} losses"
    return [f"{losses} measured", *(f"{len(names)} {what}" for names, what in others if names)]


def _titles(groups: Sequence[Group]) -> Dict[int, str]:
    """Return the title of each section, numbered where several are of one kind."""
    kinds, titles = [group.search for group in groups], {}
    for index, kind in enumerate(kinds):
        alone, one_of = ("Largest batch", "Largest batch") if kind else ("Answer", "Configuration")
        many, nth = kinds.count(kind), kinds[: index + 1].count(kind)
        titles[index] = alone if many == 1 else f"{one_of} {nth} of {many}"
    return titles


def _section(group: Group, index: int, title: str, folders: Paths, alone: bool) -> Section:
    """Return the section of a configuration.

    folders: where a conformance matrix may be; alone: its settings need not tell it from others.
    """
    rows = group.rows
    measured = [row for row in rows if row.is_measured]
    failed = [row for row in rows if row.reason]
    kinds = [kind_title(row) for row in measured]
    columns, name = ("page search", "Largest batch that fits") if group.search else ("page", "Results")
    figures: List[Optional[Figure]] = []
    if not group.search:
        figures = [plots.time_and_memory(rows), over_time.drift(rows), over_time.memory_within(rows)]
    load, known = facts.load(rows), facts.machine(rows)
    return Section(
        f"group-{index}",
        title,
        ". ".join([*([] if alone else [group.heading]), *([] if group.search else cards.measured(rows))]),
        loaded=results.beside_load(rows),
        cards=cards.of_search(rows) if group.search else cards.cards(rows, folders),
        lead=None if group.search else plots.over_fastest(rows),
        tables=[results.table(columns, name, measured)._replace(groups=kinds)] if measured else [],
        failures=[Failure(row.status, row.label, [Link(row.status, row.folder), f": {row.reason}"]) for row in failed],
        figures=[figure for figure in figures if figure],
        notes=_notes(rows),
        facts=[("Settings", group.heading), *(fact for fact in known if not group.search or fact[0] != "Batches")],
        conditions=[facts.versions(rows), *([load] if load else [])],
    )


def _notes(rows: Sequence[Row]) -> List[Line]:
    labels_of = gathered((str(note), row.label) for row in rows for note in row.notes)
    measured = sum(row.is_measured for row in rows)
    notes: List[Line] = [
        ("all" if len(labels) == measured > 1 else ", ".join(labels), [note]) for note, labels in labels_of.items()
    ]
    earlier = sum(row.earlier_runs for row in rows)
    line = f"{count(earlier, 'earlier run')} of the same configuration not shown."
    return notes + ([("", [line])] if earlier else [])


# The file.


def write(log: Log, output: Path, paths: Sequence[Path] = ()) -> Path:
    """Write the page of the logs `paths`, whole or not at all.  Raises UserError."""
    advice = another("--output")
    make_folder(output.parent, advice)
    write_whole(advice, (output, page(log.groups, output.parent, swept=log.sweeps, paths=paths)))
    return output


def after_run(log_dir: Path, quiet: bool, log: Optional[Log] = None) -> None:
    """Write ``log_dir/report.html`` and say so on stderr.  log: the content of `log_dir`, where it was read already.

    Where the running Python lacks jinja2, the main environment's makes the page.  A failure is one warning on stderr
    and not fatal.
    """
    path = log_dir / FILE_NAME
    try:
        main = interpreters.other("main") if interpreters.lacks("jinja2") else None
        if main is not None:
            command = [str(main), str(ROOT / "rnnt-bench"), "report", f"--output={path}", "--", str(log_dir)]
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            if ended.stdout != f"{path}\n":
                lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode} and no output"]
                raise UserError(f"no report: {main}: {lines[-1]}")
        else:
            write(log.newest() if log else logs.read_any([log_dir]), path, [log_dir])
    except KeyboardInterrupt:
        print("warning: the report was interrupted: `rnnt-bench report` writes it", file=sys.stderr)
    except UserError as error:
        print(f"warning: {plain(error)}", file=sys.stderr)
    except Exception as error:  # not fatal: the table is on the screen
        print(f"warning: no report: {type(error).__name__}: {plain(error)}", file=sys.stderr)
    else:
        if not quiet:
            print(f"report: {path}", file=sys.stderr)
