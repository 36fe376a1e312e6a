"""Make one self-contained HTML page from groups of rows, and write it: no network, and only its own
two scripts. A content security policy allows these by their hash, and no address, so that nothing
in a name can run. Without scripts every plot has its numbers as a table. All text is escaped and,
except code, shown on one line; every address is relative to the page's folder."""

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
from typing import Any
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
    """Return the page as text, for the folder `base`. library: JavaScript in place of plotly.js;
    paths: the logs, in which a conformance matrix may be too. Raises UserError without jinja2."""
    shown = sections(groups, base, swept, paths)
    title = lead = ""
    if len(groups) == 1 and not swept:
        title = cards.title(groups[0].rows)
    if groups or swept:
        lead = _lead(groups, swept)
    elif len({section.title for section in shown}) == 1:  # of a tool
        title = shown[0].title
    return assembled(shown, base, title or "Which transducer loss?", lead, library, reading=True)


def sections(
    groups: Sequence[Group], base: Path, swept: Sequence[Sweep], paths: Paths
) -> list[parts.Section]:
    result = [_section(index, groups, paths) for index in range(len(groups))]
    result += [_sweep(sweep, number) for number, sweep in enumerate(swept)]
    for number, tool in enumerate(parts.slices()):
        try:
            result += tool.sections(base, paths)
        except Exception as error:  # a tool costs its own section, not the page
            result.append(_failed(f"tool-{number}", tool.sections.__module__, error))
    return result


def _failed(name: str, title: str, error: Exception) -> parts.Section:
    return parts.Section(
        name, title, failures=[parts.Failure("error", "this section", [reason_of(error)])]
    )


def assembled(
    sections: Sequence[parts.Section],
    base: Path,
    title: str,
    lead: str,
    library: str | None = None,
    reading: bool = False,
    overline: str = "Transducer (RNN-T) losses, side by side",
) -> str:
    """Return the page of these sections. reading: whether to explain how tables of losses are
    read."""
    library = LIBRARY.read_text(encoding="utf-8") if library is None else library
    script = (HERE / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_script_hash(library)} {_script_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment()  # raises UserError where it cannot be made
    shown = [_rendered(section, base) for section in sections]
    figures = {name: figure for _, _, of_section in shown for name, figure in of_section.items()}
    return render(
        "show/templates/page.html.jinja",
        base,
        title=title,
        lead=lead,
        sections=[(section, text) for section, text, _ in shown],
        contents=contents([section for section, _, _ in shown]),
        reading=reading,
        overline=overline,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        policy=policy,
        figures=packed(json.dumps(figures, allow_nan=False, separators=(",", ":"))),
        library=packed(library),
        script=script,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
    )


#: With more sections the contents name their parts no more.
MOST_IN_PARTS = 3


def contents(sections: Sequence[parts.Section]) -> list[tuple[str, str, str]]:
    """Return the address, title and heading of each entry of the page's contents: sections, and the
    parts of a few."""
    entries = []
    for section in sections:
        entries.append((section.id, section.title, section.heading))
        if len(sections) > MOST_IN_PARTS or section.folded:
            continue
        titles = [(table.name, table.title) for table in section.tables]
        titles += [(figure.key, figure.title) for figure in section.plots]
        if section.failures:
            titles.append(("failures", "What did not run"))
        if section.facts or section.conditions:
            titles.append(("conditions", "How measured"))
        entries += [(f"{key}-{section.id}", title, "") for key, title in titles if title]
    return entries


def _rendered(section: parts.Section, base: Path) -> tuple[parts.Section, str, parts.Plotly]:
    """Return the section, its HTML and its plots; one that says what is wrong in place of a section
    that fails."""
    try:
        return _drawn(section, base)
    except Exception as error:
        return _drawn(_failed(section.id, section.title, error), base)


def _drawn(section: parts.Section, base: Path) -> tuple[parts.Section, str, parts.Plotly]:
    text = render("show/templates/section.html.jinja", base, section=section)
    figures = {
        f"{plot.key}-{section.id}": {"data": plot.data, "layout": plot.layout}
        for plot in section.plots
    }
    return section, text, finite(figures, digits=6)  # far below a pixel


def _lead(groups: Sequence[Group], swept: Sequence[Sweep]) -> str:
    """Return "11 losses measured, on AMD EPYC (family 26, model 2, AVX-512), 2026-11-24."; a loss
    under a second torch (NAME@k2) counts once."""
    rows = [row for group in groups for row in group.rows]
    rows += [row for sweep in swept for row in sweep.rows]
    names = [
        (row.device_name, row.configuration.get("processor") or "")
        for row in rows
        if row.device_name
    ]
    devices = ", ".join(dict.fromkeys(" ".join(filter(None, words)) for words in names))
    days = sorted({row.header.started[:10] for row in rows} - {""})
    losses = len({row.loss for row in rows if row.is_measured})
    words = [f"{count(losses, 'loss')} measured", devices and f"on {devices}"]
    return (
        ", ".join(filter(None, [*words, " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))])) + "."
    )


def _section(index: int, groups: Sequence[Group], folders: Paths) -> parts.Section:
    """Return the section of the group with this index; its title is numbered where there are
    several."""
    group = groups[index]
    rows = group.rows
    measured = [row for row in rows if row.is_measured]
    kinds = [kind_title(row) for row in measured]
    figures = (plots.time_and_memory(rows), plots.drift(rows), plots.memory_within(rows))
    return parts.Section(
        f"group-{index}",
        "Answer" if len(groups) == 1 else f"Configuration, {index + 1} of {len(groups)}",
        ". ".join([cards.configuration(group), *cards.size_of(rows)]),
        loaded=doubts.beside_load(rows),
        cards=cards.cards(rows, folders),
        lead=plots.over_fastest(rows),
        tables=[tables.table("page", "Results", measured)._replace(groups=kinds)]
        if measured
        else [],
        failures=cards.failures(rows),
        figures=list(filter(None, figures)),
        notes=[("", [f"{line}."]) for line in tables.notes(rows)],
        facts=cards.machine(rows),
        conditions=[cards.versions(rows)],
    )


def _sweep(sweep: Sweep, number: int) -> parts.Section:
    """Return the section of a sweep."""
    title = f"Sweep over {' and '.join(map(flag, sweep.grid))}"
    failures = cards.failures(sweep.rows)
    return parts.Section(
        f"sweep-{number}", title, sweep.heading, figures=plots.swept(sweep), failures=failures
    )


# The file.


def write(log: logs.Log, output: Path, paths: Sequence[Path] = ()) -> Path:
    """Write the page of the logs `paths`, whole or not at all. Raises UserError."""
    return saved(page(log.groups, output.parent, swept=log.sweeps, paths=paths), output)


def saved(text: str, output: Path) -> Path:
    advice = files.another("--output")
    files.make_folder(output.parent, advice)
    files.write_whole(advice, (output, text))
    return output


def after_run(log_dir: Path, quiet: bool, log: logs.Log | None = None) -> None:
    """Write ``log_dir/report.html`` and say so on stderr. log: its content, where it was read
    already. A failure is one warning and not fatal."""
    path = log_dir / FILE_NAME
    try:
        write(log.newest() if log and log.every else logs.read_any([log_dir]), path, [log_dir])
    except KeyboardInterrupt:
        errors.say(f"warning: the report was interrupted: {command('report')} writes it")
    except errors.UserError as error:
        errors.say(f"warning: {plain(error)}")
    except Exception as error:  # not fatal: the table is on the screen
        errors.say(f"warning: no report: {type(error).__name__}: {plain(error)}")
    else:
        if not quiet:
            errors.say(f"report: {path}")


def render(template: str, base: Path, **content: Any) -> str:
    return environment().get_template(template).render(base=base, **content)


@cache
def environment() -> Any:
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
        code=lambda text: Markup(str(escape(text)).replace("\n", "&#10;")),
        wrap=lambda text: escape(plain(text)).replace("_", Markup("_<wbr>")),
    )
    return templates


def href(target: Path, base: Path) -> str:
    relative = os.path.relpath(target.resolve(), base.resolve())
    return quote(os.fsencode(relative), safe="/")


def _script_hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def packed(source: str) -> str:
    """Pack text for page.js to unpack: gzip, in base64."""
    return base64.b64encode(gzip.compress(source.encode("utf-8"), 9, mtime=0)).decode()
