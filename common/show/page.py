"""Make one self-contained HTML page from groups of rows: no network, and only its own two scripts.

A content security policy allows these two scripts by their hash, and no address, so that nothing in a name can run.
Without scripts the page is still complete: every plot has its numbers as a table.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from common.analysis.groups import Group
from common.analysis.machines import families as families_of
from common.analysis.row import Row
from common.analysis.sweep import Sweep
from common.core.errors import NOT_RUNNABLE
from common.core.text import count, gathered
from common.present import html, slices
from common.present.section import Failure, Line, Section
from common.present.table import Link
from common.show import facts, headline, machines, runs, search, shapes, sweep, verdicts
from common.tables import remarks, results

Paths = Sequence[Path]
#: Pixels of a plot that its axis of y does not have: margins, ticks and title.
ABOVE_AND_BELOW = 80
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
    families = families_of(groups)
    titles = {**_titles(groups), **{machine.number: machine.title for family in families for machine in family}}
    answer = headline.title(groups[0].rows) if _is_one(groups, swept) else ""
    sections = [
        *(machines.section(family, number) for number, family in enumerate(families)),
        *(_section(group, index, titles[index], [base, *paths]) for index, group in enumerate(groups)),
        *(sweep.section(each, number) for number, each in enumerate(swept)),
        *(section for tool in slices.registered() for section in tool.sections(base, paths)),
    ]
    if answer:
        sections[0] = replace(sections[0], title="Answer", title_is_above=True)
    return assembled(sections, base, answer or TITLE, _lead(groups, swept), library, reading=True)


def _is_one(groups: Sequence[Group], swept: Sequence[Sweep]) -> bool:
    """Return whether the page shows a single configuration, whose answer then is its title."""
    return len(groups) == 1 and not groups[0].search and not swept


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
    drawn = {
        f"{part.key}-{section.suffix}": {
            "data": part.data,
            "layout": part.layout,
            "names": part.names
            and {"at": part.names.at, "places": part.names.of_a_page(part.height - ABOVE_AND_BELOW)},
        }
        for section in sections
        for figure in section.figures
        for part in figure.drawn
    }
    return html.render(
        "show/templates/page.html.jinja",
        base,
        title=title,
        lead=lead,
        sections=sections,
        entries=contents(sections),
        reading=reading,
        overline=overline,
        style=_source(HERE / "page.css"),
        policy=policy,
        figures=drawn,
        library=html.packed(library),
        script=script,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
    )


class Entry(NamedTuple):
    """Hold one entry of the contents.  parts: (id, title) of what is below it."""

    id: str
    title: str
    heading: str = ""
    parts: Sequence[Tuple[str, str]] = ()


def contents(sections: Sequence[Section]) -> List[Entry]:
    """Return the entries of the contents; a section whose title is above the page has its parts in place of itself."""
    entries: List[Entry] = []
    for section in sections:
        if section.title_is_above:
            entries += [Entry(section.id, section.title), *(Entry(*part) for part in section.contents)]
        else:
            entries.append(Entry(section.id, section.short or section.title, section.heading, section.contents))
    return entries


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
        kind.add(row.name.partition("@")[0])
    failed -= measured
    absent -= measured | failed
    others = ((failed, "failed"), (absent, "not available here"))
    losses = "1 loss" if len(measured) == 1 else f"{len(measured)} losses"
    return [f"{losses} measured", *(f"{len(names)} {what}" for names, what in others if names)]


def _titles(groups: Sequence[Group]) -> Dict[int, str]:
    """Return the title of each section, numbered where several are of one kind."""
    kinds, titles = [group.search for group in groups], {}
    for index, kind in enumerate(kinds):
        alone, one_of = ("Largest batch", "Largest batch") if kind else ("Verdict", "Configuration")
        many, nth = kinds.count(kind), kinds[: index + 1].count(kind)
        titles[index] = alone if many == 1 else f"{one_of} {nth} of {many}"
    return titles


def _section(group: Group, index: int, title: str, folders: Paths) -> Section:
    """Return the section of a configuration, without shapes for --find-largest.  folders: where a conformance matrix
    may be."""
    rows, known = group.rows, facts.machine(group.rows)
    measured = [row for row in rows if row.is_measured]
    failed = [(row.status, row.label, row.folder, row.reason) for row in rows if row.reason]
    section = Section(
        "show/templates/timed.html.jinja",
        f"group-{index}",
        title,
        str(index),
        group.heading,
        beside_load=remarks.beside_load(rows),
        failures=[Failure(status, name, [Link(status, at), f": {why}"]) for status, name, at, why in failed],
        versions=facts.versions(rows),
        load=facts.load(rows),
        notes=_notes(rows),
    )
    if group.search:
        return replace(
            section,
            facts=[fact for fact in known if fact[0] != "Batches"],  # the table tells the batches of each row
            verdicts=verdicts.of_search(rows),
            table=results.table("page search", "Largest batch that fits", measured, "largest") if measured else None,
            figures=search.figures(rows),
        )
    utterances, small = shapes.shapes(rows)
    return replace(
        section,
        headline=headline.headline(rows, folders),
        measured=headline.measured(rows),
        facts=known,
        verdicts=verdicts.verdicts(rows),
        shapes=utterances,
        table=results.table("page", "Results", measured) if measured else None,
        figures=runs.figures(rows) + small,
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
