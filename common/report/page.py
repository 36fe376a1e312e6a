"""Groups to one HTML page that needs nothing but itself: no network, and no script but its own two.

A content security policy allows these two scripts by their hash and no address, so that nothing in a name can run.
Without scripts the page is still whole: every plot has its numbers as a table.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

from common.analysis.groups import Group
from common.analysis.machines import families as families_of
from common.analysis.row import Row
from common.analysis.sweep import Sweep
from common.core.errors import NOT_RUNNABLE
from common.core.text import count, gathered
from common.plots import runs, search
from common.present import html, slices
from common.present.section import Failure, Line, Section
from common.present.table import Link
from common.report import facts, headline, machines, shapes, sweep, verdicts
from common.tables import remarks, results

Paths = Sequence[Path]
#: Pixels of a plot that its axis of y does not have: margins, ticks and title.
ABOVE_AND_BELOW = 80
HERE = Path(__file__).resolve().parent
TITLE = "Which transducer loss?"
LIBRARY = HERE / "plotly" / "plotly-basic.min.js"


def page(
    groups: Sequence[Group], base: Path, library: Optional[str] = None, swept: Sequence[Sweep] = (), paths: Paths = ()
) -> str:
    """The page as text.  base: the folder it will be in, which its links start from; library: JavaScript in the place
    of plotly.js; paths: the logs it is of, in which a conformance matrix may be too.  UserError without jinja2."""
    families = families_of(groups)
    titles = {**_titles(groups), **{machine.place: machine.title for family in families for machine in family}}
    sections = [
        *(machines.section(family, place) for place, family in enumerate(families)),
        *(_section(group, place, titles[place], [base, *paths]) for place, group in enumerate(groups)),
        *(sweep.section(one, place) for place, one in enumerate(swept)),
        *(section for tool in slices.registered() for section in tool.sections(base, paths)),
    ]
    return assembled(sections, base, TITLE, _lead(groups, swept), library, reading=True)


def assembled(
    sections: Sequence[Section],
    base: Path,
    title: str,
    lead: str,
    library: Optional[str] = None,
    reading: bool = False,
) -> str:
    """The page of these sections.  reading: with how to read the tables of losses."""
    library = _source(LIBRARY) if library is None else library
    script = _source(HERE / "page.js")
    content: Dict[str, Any] = {
        "title": title,
        "lead": lead,
        "sections": sections,
        "reading": reading,
        "style": _source(HERE / "page.css"),
    }
    content["policy"] = (
        f"default-src 'none'; script-src {html.script_hash(library)} {html.script_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    content["figures"] = {
        f"{one.key}-{section.suffix}": {
            "data": one.data,
            "layout": one.layout,
            "names": one.names and {"at": one.names.at, "places": one.names.of_a_page(one.height - ABOVE_AND_BELOW)},
        }
        for section in sections
        for figure in section.figures
        for one in figure.drawn
    }
    content.update(library=html.packed(library), script=script, written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}")
    return html.render("report/templates/page.html.jinja", base, **content)


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _lead(groups: Sequence[Group], swept: Sequence[Sweep]) -> str:
    rows = [row for group in groups for row in group.rows] + [row for one in swept for row in one.rows]
    devices = list(dict.fromkeys(row.device_name for row in rows if row.device_name))
    days = sorted({(row.started or "")[:10] for row in rows} - {""})
    parts = _counts(rows)
    parts += [f"on {', '.join(devices)}"] if devices else []
    parts += [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []
    return ", ".join(parts) + "."


def _counts(rows: Sequence[Row]) -> List[str]:
    """Return ["11 losses measured", "1 failed", "6 not available here"].  A loss that ran under a second torch too
    (NAME@k2) is one."""
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
    """Of the section of each place; those of a kind are counted where there are several."""
    kinds, titles = [group.search for group in groups], {}
    for place, kind in enumerate(kinds):
        alone, one_of = ("Largest batch", "Largest batch") if kind else ("Verdict", "Configuration")
        many, nth = kinds.count(kind), kinds[: place + 1].count(kind)
        titles[place] = alone if many == 1 else f"{one_of} {nth} of {many}"
    return titles


def _section(group: Group, place: int, title: str, folders: Paths) -> Section:
    """A configuration; of --find-largest without shapes.  folders: where a conformance matrix may be."""
    rows, known = group.rows, facts.machine(group.rows)
    ran = [row for row in rows if row.is_measured]
    about: Dict[str, Any] = {"versions": facts.versions(rows), "load": facts.load(rows), "notes": _notes(rows)}
    about["beside_load"] = remarks.beside_load(rows)
    failed = [(row.status, row.label, row.folder, row.reason) for row in rows if row.reason]
    about["failures"] = [Failure(status, name, [Link(status, at), f": {why}"]) for status, name, at, why in failed]
    if group.search:  # its table tells the batches of each row
        about["facts"] = [fact for fact in known if fact[0] != "Batches"]
        about["verdicts"] = verdicts.of_search(rows)
        about["table"] = results.table("page search", "Largest batch that fits", ran, "largest") if ran else None
        about["figures"] = search.figures(rows)
    else:
        utterances, small = shapes.shapes(rows)
        about["headline"], about["measured"] = headline.headline(rows, folders), headline.measured(rows)
        about.update(facts=known, verdicts=verdicts.verdicts(rows), shapes=utterances)
        about["table"] = results.table("page", "Results", ran) if ran else None
        about["figures"] = runs.figures(rows) + small
    return Section("report/templates/timed.html.jinja", f"group-{place}", title, str(place), group.heading, **about)


def _notes(rows: Sequence[Row]) -> List[Line]:
    found = gathered((str(note), row.label) for row in rows for note in row.notes)
    notes: List[Line] = [(", ".join(labels), [note]) for note, labels in found.items()]
    earlier = sum(row.earlier_runs for row in rows)
    said = f"{count(earlier, 'earlier run')} of the same configuration not shown."
    return notes + ([("", [said])] if earlier else [])
