"""Groups to one HTML page that needs nothing but itself: no network, and no script but its own two.

A content security policy allows these two scripts by their hash, so that nothing which slipped in with a name could
run, and no address at all.  Without scripts the page is still whole: every plot has its numbers as a table.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, List, Sequence

from common.report import (
    bars,
    conformance_section,
    courses,
    facts,
    largest,
    machines,
    shapes_section,
    sweep_section,
    trade_off,
    verdicts,
)
from common.report.collect import Entry, Group
from common.report.look import Figure
from common.report.markup import href, script_hash, script_json, sentence, table, text
from common.report.plots import plot
from common.results.sweeps import Sweep

HERE = Path(__file__).resolve().parent
TITLE = "Which transducer loss?"


def page(
    groups: Sequence[Group], base: Path, library: str, swept: Sequence[Sweep] = (), paths: Sequence[Path] = ()
) -> str:
    """The page as text.  base: the folder it will be in, which its links start from; library: plotly.js itself; paths:
    the logs it is of, in which a conformance matrix may be too."""
    figures: Dict[str, Figure] = {}
    families = machines.families(groups)
    sections = "".join(machines.section(family, place, figures, base) for place, family in enumerate(families))
    titles = {**_titles(groups), **{machine.place: machine.title for family in families for machine in family}}
    sections += "".join(_section(group, place, titles[place], figures, base) for place, group in enumerate(groups))
    sections += "".join(sweep_section.section(sweep, place, figures, base) for place, sweep in enumerate(swept))
    conformance = conformance_section.section(base, paths)
    script = _source("page.js")
    library = library.replace("\r\n", "\n")
    policy = (
        f"default-src 'none'; script-src {script_hash(library)} {script_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    drawn = {key: {"data": figure.data, "layout": figure.layout} for key, figure in figures.items()}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{text(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{TITLE}</title>
<link rel="icon" href="data:,">
<style>
{_source("page.css")}</style>
</head>
<body>
<a class="skip" href="#results">To the results</a>
<header>
<p class="overline">Transducer (RNN-T) losses, side by side</p>
<h1>{TITLE}</h1>
<p class="lead">{text(_lead(groups, swept))}</p>
{_contents(families, groups, swept, bool(conformance))}</header>
<main id="results">
{sections}{conformance}{_how_to_read()}</main>
<footer><p>Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by this suite's report.py. Every number is a link to
the samples or the trace it is from; absolute times belong to one machine on one day.</p></footer>
<script type="application/json" id="figures">{script_json(drawn)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _source(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _lead(groups: Sequence[Group], swept: Sequence[Sweep]) -> str:
    rows = [entry.row for group in groups for entry in group.entries] + [row for sweep in swept for row in sweep.rows]
    devices = list(dict.fromkeys(row["device_name"] for row in rows if row["device_name"]))
    names = len({row["name"] for row in rows})
    days = sorted({(row["started"] or "")[:10] for row in rows} - {""})
    parts = [f"{names} implementation{'s' * (names != 1)}"]
    parts += [f"on {', '.join(devices)}"] if devices else []
    parts += [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []
    return ", ".join(parts) + "."


def _contents(
    families: Sequence[Sequence[machines.Machine]], groups: Sequence[Group], swept: Sequence[Sweep], conformance: bool
) -> str:
    """Links to the sections; "" for one section alone."""
    links = [(f"machines-{at}", machines.TITLE) for at in range(len(families))]
    links += [(f"group-{at}", group.heading) for at, group in enumerate(groups)]
    links += [(f"sweep-{at}", sweep_section.title(sweep)) for at, sweep in enumerate(swept)]
    links += [(conformance_section.ID, conformance_section.TITLE)] if conformance else []
    items = "".join(f'<li><a href="#{key}">{text(title)}</a></li>' for key, title in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>\n' if len(links) > 1 else ""


def _titles(groups: Sequence[Group]) -> Dict[int, str]:
    """Of the section of each place; those of a kind are counted where there are several."""
    many = {is_search: sum(group.search is is_search for group in groups) for is_search in (False, True)}
    titles, seen = {}, {False: 0, True: 0}
    for place, group in enumerate(groups):
        seen[group.search] += 1
        alone, one_of = ("Largest batch", "Largest batch") if group.search else ("Verdict", "Configuration")
        count = many[group.search]
        titles[place] = alone if count == 1 else f"{one_of} {seen[group.search]} of {count}"
    return titles


def _section(group: Group, place: int, title: str, figures: Dict[str, Figure], base: Path) -> str:
    entries = group.entries
    body = _search(entries, base) if group.search else _timed(entries, place, figures, base)
    heading = f'<p class="configuration">{text(group.heading)}</p>'
    return (
        f'<section class="group" id="group-{place}" aria-labelledby="title-{place}">\n'
        f'<h2 id="title-{place}">{text(title)}</h2>\n{heading}\n{body}{_notes(entries)}</section>\n'
    )


def _timed(entries: Sequence[Entry], place: int, figures: Dict[str, Figure], base: Path) -> str:
    found = [*bars.step_times(entries), *bars.peak_memories(entries), trade_off.time_and_memory(entries)]
    found += [*courses.memory_within(entries), courses.drift(entries)]
    plots = "".join(plot(figure, place, figures, base) for figure in found if figure is not None)
    return (
        _cards(verdicts.verdicts(entries), base)
        + _failures(entries, base)
        + f"<h3>Results</h3>\n{table(facts.results(entries), base)}"
        + plots
        + _measured(entries, place, figures, base)
    )


def _search(entries: Sequence[Entry], base: Path) -> str:
    """What --find-largest found: verdicts, failures, one table, and where."""
    return (
        _cards(largest.verdicts(entries), base)
        + _failures(entries, base)
        + f"<h3>Results</h3>\n{table(largest.results(entries), base)}"
        + _conditions(entries, base, told=("Batches",))
    )


def _cards(found: Sequence[verdicts.Verdict], base: Path) -> str:
    if not found:
        return '<p class="nothing">Nothing was timed here, so there is nothing to decide.</p>\n'
    cards = "".join(
        f'<div class="card {"clear" if verdict.clear else "unclear"}"><dt>{text(verdict.question)}</dt>'
        f'<dd><p class="answer">{text(verdict.answer)}</p><p>{sentence(verdict.reason, base)}</p></dd></div>\n'
        for verdict in found
    )
    return f'<dl class="cards">\n{cards}</dl>\n'


def _failures(entries: Sequence[Entry], base: Path) -> str:
    failed = [entry for entry in entries if entry.row["reason"]]
    if not failed:
        return ""
    items = "".join(
        f"<li><strong>{text(entry.label)}</strong>: "
        f'<a href="{href(entry.folder, base)}">{text(entry.row["status"])}</a>: {text(entry.row["reason"])}</li>'
        for entry in failed
    )
    return f'<div class="failures"><h3>What did not run</h3><ul>{items}</ul></div>\n'


def _measured(entries: Sequence[Entry], place: int, figures: Dict[str, Figure], base: Path) -> str:
    return _conditions(entries, base) + shapes_section.section(entries, place, figures, base)


def _conditions(entries: Sequence[Entry], base: Path, told: Sequence[str] = ()) -> str:
    """told: terms that the section's own table tells, row by row."""
    terms = "".join(
        f"<div><dt>{text(term)}</dt><dd>{text(said)}</dd></div>"
        for term, said in facts.machine(entries)
        if term not in told
    )
    load = facts.load(entries)
    parts: List[str] = ["<h3>What was measured where</h3>\n"]
    if terms:
        parts.append(f'<dl class="facts">{terms}</dl>\n')
    parts.append(table(facts.versions(entries), base))
    if load is not None:
        parts.append(f"<h4>Load of the machine by others while timing</h4>\n{table(load, base)}")
    return "".join(parts)


def _notes(entries: Sequence[Entry]) -> str:
    about: Dict[str, List[str]] = {}
    for entry in entries:
        for note in entry.row["notes"]:
            about.setdefault(str(note), []).append(entry.label)
    earlier = sum(entry.row["earlier_runs"] for entry in entries)
    items = [f"<strong>{text(', '.join(labels))}</strong>: {text(note)}" for note, labels in about.items()]
    if earlier:
        items.append(f"{earlier} earlier run{'s' * (earlier != 1)} of the same configuration not shown.")
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<h3>Notes</h3>\n<ul class="notes">{listed}</ul>\n' if items else ""


def _how_to_read() -> str:
    return """<section class="reading"><h2>How to read this</h2>
<p><strong>Step</strong>: from encoder and decoder outputs through the joiner and the loss to the gradients of both and
of all weights. <strong>Loss</strong>: given logits, to the gradient of the logits. Both without the profiler.
<strong>Peak MB</strong> (2<sup>20</sup> bytes): what one step needs on top of its inputs. <strong>Profiled</strong>:
from the traces, with the profiler's own cost. <strong>Errors</strong>: the largest relative ones against a float64
reference; an approximate loss (approx.) is judged with its range widened to all of U.</p>
<p><strong>Over the fastest</strong>: how many times as long as the fastest row of its kind, with the verdict of the
interval over rounds (1.02 and less is the same). <strong>% of limit</strong>: the least time that this device could
take for the loss, by its own measured copies and matrix products, over the time taken; counted for the utterances'
own cells, without padding. How it is counted is in the README.</p>
<p><strong>Unclear</strong> is an answer: the 95% interval over rounds, each in fresh processes, does not tell the two
apart. Ratios are paired over the same batches and rounds.</p>
<p><strong>Largest that fits</strong>: the heaviest batches of that size got through a step within the limit, in a
process of their own, and those of a size at most 5% (or 1) larger did not. The throughput is over the same
utterances for all, each in batches of its own largest size.</p></section>
"""
