"""Make one self-contained HTML page from rows, and write it.

The page needs no network. Its content security policy allows only the page's own two scripts, by
their hash, and no address, so that nothing in a name can run. Without scripts every plot still has
its numbers as a table. All text is escaped and, except code, shown on one line. Every link is
relative to the page's folder.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rnnt_bench.analysis import doubts, logs
from rnnt_bench.analysis.groups import Group, Sweep, kind_title
from rnnt_bench.core import errors, files
from rnnt_bench.core.called import command
from rnnt_bench.core.settings import flag
from rnnt_bench.core.text import count, plain, reason_of
from rnnt_bench.present import parts
from rnnt_bench.present.text import finite
from rnnt_bench.show import cards, plots, tables

Paths = Sequence[Path]
FILE_NAME = "report.html"
HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "plotly" / "plotly-basic.min.js"


def page(
    groups: Sequence[Group],
    base: Path,
    library: str | None = None,
    swept: Sequence[Sweep] = (),
    paths: Paths = (),
) -> str:
    """Return the page of some logs as HTML. Raises UserError without jinja2.

    Args:
        groups: rows of the losses, one group for each configuration
        base: folder of the page, to which its links are relative
        library: JavaScript to use in place of plotly.js
        swept: sweeps over settings
        paths: the logs, in which tools look for runs and for a conformance matrix
    """
    shown = sections(groups, base, swept, paths)
    title = _title(groups, swept, shown)
    lead = _lead(groups, swept) if groups or swept else ""
    return assembled(shown, base, title, lead, library, reading=True)


def sections(
    groups: Sequence[Group], base: Path, swept: Sequence[Sweep], paths: Paths
) -> list[parts.Section]:
    """Return the sections of the configurations, then of the sweeps, then of each tool that has
    runs in the logs.  If those of a tool cannot be made, one section in their place says why.

    The arguments are those of `page`."""
    result = [_group_section(index, groups, paths) for index in range(len(groups))]
    result += [_sweep_section(index, sweep) for index, sweep in enumerate(swept)]
    for index, tool in enumerate(parts.slices()):
        try:
            result += tool.sections(base, paths)
        except Exception as error:  # the page goes on without the section of this tool
            result.append(_failed(f"tool-{index}", tool.sections.__module__, error))
    return result


def _failed(id: str, title: str, error: Exception) -> parts.Section:
    """Return a section that names the error in place of one that could not be made."""
    failure = parts.Failure("error", "this section", [reason_of(error)])
    return parts.Section(id, title, failures=[failure])


def _title(groups: Sequence[Group], swept: Sequence[Sweep], shown: Sequence[parts.Section]) -> str:
    """Return the title of the page: the answer of a single configuration, the name of a single
    tool, or the question that the page answers."""
    title = ""
    if len(groups) == 1 and not swept:
        title = cards.title(groups[0].rows)
    elif not groups and not swept and len({section.title for section in shown}) == 1:
        title = shown[0].title
    return title or "Which transducer loss?"


def _lead(groups: Sequence[Group], swept: Sequence[Sweep]) -> str:
    """Return "11 losses measured, on AMD EPYC (family 26, model 2, AVX-512), 2026-11-24."; a loss
    under a second torch (NAME@k2) counts once."""
    rows = [row for group in groups for row in group.rows]
    rows += [row for sweep in swept for row in sweep.rows]
    phrases = [f"{count(len({row.loss for row in rows if row.is_measured}), 'loss')} measured"]
    devices = dict.fromkeys(
        f"{row.device_name} {row.configuration.get('processor') or ''}".rstrip()
        for row in rows
        if row.device_name
    )
    if devices:
        phrases.append(f"on {', '.join(devices)}")
    days = sorted({row.header.started[:10] for row in rows} - {""})
    if days:
        phrases.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return ", ".join(phrases) + "."


def _group_section(index: int, groups: Sequence[Group], folders: Paths) -> parts.Section:
    """Return the section of the configuration `groups[index]`. Its title has a number if there are
    several configurations.

    folders: where a conformance matrix may be"""
    group = groups[index]
    rows = group.rows
    title = "Answer" if len(groups) == 1 else f"Configuration, {index + 1} of {len(groups)}"
    heading = [cards.configuration(group), cards.sample_size(rows)]
    figures = [plots.time_and_memory(rows), plots.drift(rows), plots.memory_within(rows)]
    results = []
    measured = [row for row in rows if row.is_measured]
    if measured:
        kinds = [kind_title(row) for row in measured]
        results.append(tables.table("page", "Results", measured)._replace(groups=kinds))
    return parts.Section(
        f"group-{index}",
        title,
        ". ".join(filter(None, heading)),
        loaded=doubts.beside_load(rows),
        cards=cards.cards(rows, folders),
        lead=plots.over_fastest(rows),
        tables=results,
        failures=cards.failures(rows),
        figures=list(filter(None, figures)),
        notes=[("", [f"{line}."]) for line in tables.notes(rows)],
        facts=cards.conditions(rows),
        conditions=[cards.versions(rows)],
    )


def _sweep_section(index: int, sweep: Sweep) -> parts.Section:
    """Return the section of a sweep: its plots, and what failed."""
    title = f"Sweep over {' and '.join(map(flag, sweep.grid))}"
    failures = cards.failures(sweep.rows)
    return parts.Section(
        f"sweep-{index}", title, sweep.heading, figures=plots.swept(sweep), failures=failures
    )


# From sections to HTML.


def assembled(
    sections: Sequence[parts.Section],
    base: Path,
    title: str,
    lead: str,
    library: str | None = None,
    reading: bool = False,
    overline: str = "Transducer (RNN-T) losses, side by side",
) -> str:
    """Return a page of these sections as HTML. Raises UserError without jinja2.

    Args:
        sections: what the page shows, in order
        base: folder of the page, to which its links are relative
        title: heading of the page
        lead: a sentence below the title, or ""
        library: JavaScript to use in place of plotly.js
        reading: whether to explain how tables of losses are read
        overline: a line above the title
    """
    library = LIBRARY.read_text(encoding="utf-8") if library is None else library
    script = (HERE / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_script_hash(library)} {_script_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment()  # without jinja2 the page fails here, not each section by itself
    rendered = [_rendered(section, base) for section in sections]
    figures: parts.Plotly = {}
    for part in rendered:
        figures.update(part.figures)
    return render(
        "show/templates/page.html.jinja",
        base,
        title=title,
        lead=lead,
        sections=rendered,
        contents=contents([part.section for part in rendered]),
        reading=reading,
        overline=overline,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        policy=policy,
        figures=packed(json.dumps(figures, allow_nan=False, separators=(",", ":"))),
        library=packed(library),
        script=script,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
    )


class Rendered(NamedTuple):
    """Hold a section, its HTML, and its plots by the id of their element, as page.js draws them."""

    section: parts.Section
    html: str
    figures: parts.Plotly


def _rendered(section: parts.Section, base: Path) -> Rendered:
    """Render a section; if that fails, render one that names the error."""
    try:
        return _drawn(section, base)
    except Exception as error:
        return _drawn(_failed(section.id, section.title, error), base)


def _drawn(section: parts.Section, base: Path) -> Rendered:
    """Render a section, with the numbers of its plots rounded.  Raises any error of rendering.

    base: folder of the page, to which its links are relative"""
    html = render("show/templates/section.html.jinja", base, section=section)
    figures = {
        f"{plot.key}-{section.id}": {"data": plot.data, "layout": plot.layout}
        for plot in section.plots
    }
    return Rendered(section, html, finite(figures, digits=6))  # the rounding is far below a pixel


#: The contents of a page with more sections than this list the sections alone, without their tables
#: and plots.
MOST_IN_PARTS = 3


class Entry(NamedTuple):
    """Hold an entry of the page's contents: the id it leads to, and its words."""

    id: str
    title: str
    heading: str = ""


def contents(sections: Sequence[parts.Section]) -> list[Entry]:
    """Return the page's contents: the sections, in order.  On a page with few sections, a section
    that is not folded is followed by its tables, plots, failures and conditions."""
    entries = []
    for section in sections:
        entries.append(Entry(section.id, section.title, section.heading))
        if len(sections) > MOST_IN_PARTS or section.folded:
            continue
        titles = {table.name: table.title for table in section.tables}
        titles.update({figure.key: figure.title for figure in section.plots})
        if section.failures:
            titles["failures"] = "What did not run"
        if section.facts or section.conditions:
            titles["conditions"] = "How measured"
        entries += [Entry(f"{key}-{section.id}", title) for key, title in titles.items() if title]
    return entries


def render(template: str, base: Path, **content: Any) -> str:
    """Return a template of common/ filled with `content`; links are relative to `base`."""
    return environment().get_template(template).render(base=base, **content)


@cache
def environment() -> Any:
    """Return the jinja2 environment of the page's templates. Raises UserError without jinja2.

    All text is escaped and put on one line. The filter `href` makes a path relative to the page,
    `code` keeps the lines of a program, `wrap` lets a long name break after each underscore.
    """
    try:
        import jinja2
        from markupsafe import Markup, escape
    except ImportError:
        advice = f"{command('report')} takes an environment that has it, or pip install jinja2"
        raise errors.UserError(
            f"no report: jinja2 is not installed in {sys.executable}; {advice}"
        ) from None

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )
    templates.filters.update(
        href=jinja2.pass_context(lambda context, target: href(target, context["base"])),
        # A browser shows "&#10;" as a line break.
        code=lambda text: Markup(str(escape(text)).replace("\n", "&#10;")),
        wrap=lambda text: escape(plain(text)).replace("_", Markup("_<wbr>")),
    )
    return templates


def href(target: Path, base: Path) -> str:
    """Return the address of a file as seen from the folder `base`."""
    relative = os.path.relpath(target.resolve(), base.resolve())
    return quote(os.fsencode(relative), safe="/")


def _script_hash(source: str) -> str:
    """Return the source expression by which a content security policy allows this script."""
    digest = base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def packed(source: str) -> str:
    """Pack text for page.js to unpack: gzip, in base64."""
    return base64.b64encode(gzip.compress(source.encode("utf-8"), 9, mtime=0)).decode()


# The file.


def write(log: logs.Log, output: Path, paths: Paths = ()) -> Path:
    """Write the page of a log that was read from `paths`, whole or not at all; return the path of
    the page. Raises UserError where it cannot be made or written.
    """
    return saved(page(log.groups, output.parent, swept=log.sweeps, paths=paths), output)


def saved(text: str, output: Path) -> Path:
    """Write the text of a page, and its folder if needed; return its path. Raises UserError."""
    advice = files.advise_another("--output")
    files.make_folder(output.parent, advice)
    files.write_whole((output, text), advice=advice)
    return output


def after_run(log_dir: Path, quiet: bool, log: logs.Log | None = None) -> None:
    """Write ``log_dir/report.html`` and say so on stderr, or warn that it could not be written.

    log: the content of `log_dir`, if it was read already.
    """
    path = log_dir / FILE_NAME
    try:
        # Without rows there must be results of a tool: read_any checks this.
        shown = log.newest() if log and log.all_rows else logs.read_any([log_dir])
        write(shown, path, [log_dir])
    except KeyboardInterrupt:
        errors.say(f"warning: the report was interrupted: {command('report')} writes it")
    except errors.UserError as error:
        errors.say(f"warning: {plain(error)}")
    except Exception as error:  # the run itself is done, and its table is on the screen
        errors.say(f"warning: no report: {type(error).__name__}: {plain(error)}")
    else:
        if not quiet:
            errors.say(f"report: {path}")
