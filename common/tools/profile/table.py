"""Prints where a step went: the table of labels, the lines below it, and a table of batch sizes."""

from __future__ import annotations

from typing import Dict, List, Sequence

from common.analysis import metrics
from common.core.text import number, percent
from common.core.units import quantity
from common.present.export import csv_text, json_text
from common.present.table import Cell, Table, measured, tabulated
from common.present.text import aligned, listed, markdown
from common.tools.profile import rows as profile
from common.tools.profile.documents import Profile as Document
from common.tools.profile.rows import OTHER, OWN_PARTS, Part, Profile, Size, limit_of

LONGEST = 60
#: Indents what lies in the row above; spaces would be taken away.
INDENT = "· "
#: Labels that a remark names.
MOST_NAMED = 4


def labels(profiled: Profile) -> Table:
    """Return a row for each label and phase, then `other` and the step."""
    cuda = profiled.document.device == "cuda"
    return tabulated(
        "labels",
        "each label with all that lies in it; own: without",
        [_row(part, cuda) for part in profiled.parts],
    )


def _row(part: Part, cuda: bool) -> Dict[str, Cell]:
    """Return the cells of a row.  On a CPU the host's milliseconds are all; on CUDA they come before the share."""
    numbers = metrics.cells(profile.NUMBERS, part)
    host, share = ({title: numbers.pop(title)} for title in ("host ms", "share"))
    first = {title: numbers.pop(title) for title in ("calls", "ms", "ms /call", "own ms")}
    label = {"label": Cell(INDENT * part.depth + part.name, part.name)}
    return {**label, **first, **(host if cuda else {}), **share, **numbers}


def lines(profiled: Profile) -> List[str]:
    """Return the lines below the table."""
    document, batches = profiled.document, profiled.document.batches
    single = batches[0] if len(batches) == 1 else None
    limit = limit_of(document)
    size = (
        f"batch: {single.N} utterances, {single.frames} frames (longest {single.frames_max}), {single.tokens} tokens"
        if single
        else f"batches: {len(batches)}, of {min(batch.frames for batch in batches)} to "
        f"{max(batch.frames for batch in batches)} frames"
    )
    count = len(document.steps.host_ns) if document.steps else 0
    result = [
        f"{document.implementation}, {document.model or _config(document)}, {document.parameters['model']} parameters",
        f"{size}; {count} steps with labels and {count} without, in turn; "
        f"{', '.join(document.options.on()) or 'no dropout'}",
        f"step without labels: {number(profiled.bare_ms)} ms; the labels' own cost: {_hooks(profiled)}",
        f"{document.device_name}{f' of {document.node}' if document.node else ''}, "
        f"{document.threads} threads, torch {document.torch}; "
        + (f"best matrix product {quantity(limit, 'FLOPs')} /s" if limit else "no measured limit"),
    ]
    compiled = document.compiled
    if compiled:
        later = compiled.graphs_later
        result.append(
            f"compiled before the steps: {compiled.modules} modules, {compiled.graphs} graphs, in "
            f"{number(compiled.ns / 1e9)} s"
            + (f"; {later} more in the steps, whose times are too long: give more --warmup" if later else "")
        )
    if document.not_counted:
        result.append(f"not counted in FLOPs: {', '.join(document.not_counted)}")
    return [*result, *remarks(profiled), verdict(profiled)]


def _config(document: Document) -> str:
    return "icefall's Conformer transducer" if document.config == "icefall" else "Conformer transducer"


def _hooks(profiled: Profile) -> str:
    if profiled.hooks_ms <= 0:
        return "less than steps differ by"
    return f"{number(profiled.hooks_ms)} ms ({percent(profiled.hooks_ms / profiled.bare_ms)})"


def remarks(profiled: Profile) -> List[str]:
    """Return a line for each reason not to trust the times or the shares of the limit."""
    result = []
    if profiled.busy:
        foreign = percent(profiled.document.steps.foreign_cpu if profiled.document.steps else None)
        result.append(
            f"the steps ran beside other load, which took {foreign} of the CPUs: their times are too long; "
            "profile again when the machine is quiet"
        )
    over = [part.name for part in profiled.parts if part.of_limit is not None and part.of_limit > 1]
    if over:
        names = ", ".join(over[:MOST_NAMED]) + (" ..." if len(over) > MOST_NAMED else "")
        why = "it was measured beside other load" if profiled.limit_was_busy else "it was measured too low"
        result.append(f"above 100% of the limit, so the limit is wrong ({why}): {names}")
    elif profiled.limit_was_busy:
        result.append("the limit was measured beside other load: shares of it may be too high")
    return result


def verdict(profiled: Profile) -> str:
    """Return what share of a step the transducer's own parts take, and the largest label beside them."""
    shares = profiled.outermost()
    parts = {name: [shares.pop(label) for label in labels if label in shares] for name, labels in OWN_PARTS.items()}
    names = [name for name, shares_of in parts.items() if shares_of]
    told = []
    if names:
        words = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        told.append(f"{words}: {percent(sum(map(sum, parts.values())))} of a step")
    if shares:
        largest = max(shares, key=lambda label: shares[label])
        told.append(f"{largest}: {percent(shares[largest])}")
    if profiled.busy:
        told.append("measured beside other load")
    return "VERDICT: " + "; ".join(told)


def total(profiled: Profile) -> str:
    """Return the step in a line."""
    step = profiled.parts[-1]
    parts = [f"{number(step.ms)} ms", quantity(step.macs, "MACs"), quantity(step.flops, "FLOPs")]
    return f"a step: {', '.join([*parts, *([f'peak {number(step.peak_mb)} MB'] if step.peak_mb else [])])}"


def text(profiled: Profile, title: str = "", format: str = "table") -> str:
    """Return the step, the table of its labels and the lines below it, as "table" or "markdown"."""
    heading, table = f"{title}: " if title else "", labels(profiled)
    shown = markdown(table) if format == "markdown" else aligned(table, LONGEST)
    return f"{listed([heading + total(profiled)], format)}\n\n{shown}\n\n{listed(lines(profiled), format)}\n"


def render(cells: Sequence[Size], format: str) -> str:
    """Return all sizes as "table", "markdown", "csv" or "json"."""
    if format in ("csv", "json"):
        return (csv if format == "csv" else json)(cells)
    parts = [text(profiled, words, format) for words, profiled, _ in cells if profiled]
    if len(cells) > 1:
        table = sweep(cells)
        shown = markdown(table) if format == "markdown" else aligned(table, LONGEST)
        parts.append(f"{table.title}\n{shown}\n")
    return "\n".join(parts)


def sweep(cells: Sequence[Size]) -> Table:
    """Return the milliseconds of each outermost label, forward and backward together, at each size."""
    names = list(
        dict.fromkeys(
            part.label
            for _, profiled, _ in cells
            if profiled
            for part in profiled.parts
            if part.depth == 0 and part.phase
        )
    )
    rows = []
    for words, profiled, reason in cells:
        row = {"size": Cell(words)}
        frames = [batch.frames for batch in profiled.document.batches] if profiled else []
        step = profiled.parts[-1] if profiled else None
        row["frames"] = measured(round(sum(frames) / len(frames)) if frames else None)
        row["step ms"] = measured(step.ms if step else None)
        row["us /frame"] = measured(1e3 * step.ms * len(frames) / sum(frames) if step else None)
        row["peak MB"] = measured(step.peak_mb if step else None)
        for name in [*names, OTHER]:
            of_name = [part.ms for part in profiled.parts if part.label == name] if profiled else []
            row[name] = measured(sum(of_name) if of_name else None)
        row["status"] = Cell(reason or "ok")
        rows.append(row)
    return tabulated("sizes", "milliseconds of a step, forward and backward", rows)


def csv(cells: Sequence[Size]) -> str:
    """Return the rows of all sizes as CSV."""
    return csv_text([{"size": words, **row} for words, profiled, _ in cells if profiled for row in profiled.rows()])


def json(cells: Sequence[Size]) -> str:
    """Return the rows and the whole document of each size as JSON."""
    documents = []
    for words, profiled, reason in cells:
        head = {"size": words, "reason": reason}
        body = {**profiled.document.to_json(), "rows": profiled.rows()} if profiled else {}
        documents.append({**body, **head})
    return json_text(documents)
