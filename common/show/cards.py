"""Make the parts of a page that are no plot: the cards that answer its first question, and how rows were measured.

The cases of the cards: any loss, a loss that takes logits, an approximation; and the largest batch of --find-largest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from common.analysis import verdict
from common.analysis.row import Row
from common.core import implementations, snippets, text
from common.core.settings import LENGTHS, MEASURED, described
from common.present import parts
from common.records.schema import Batch, Record
from common.show import tables

OURS = "fused_transducer"  # the package that comes with the suite


def title(rows: Sequence[Row]) -> str:
    """Return the answer as the title of the page; "" where nothing exact was timed."""
    pick = verdict.fastest(rows)
    return verdict.headline(pick) if pick else ""


def cards(rows: Sequence[Row], folders: Sequence[Path]) -> List[parts.Card]:
    """Return the cards for rows of one configuration.  folders: where a conformance matrix may be, besides docs/."""
    picks = verdict.of(rows, folders)
    result = []
    if picks.fastest:
        lines = [_speed(picks.fastest), _memory(picks.fastest.row, picks.smallest)]
        changed = verdict.since(picks.fastest.row, picks.fastest.scope)
        lines += [(changed[0].replace("since", "Since"), [f"{changed[1]}."])] if changed else []
        result.append(_card("Use", picks.fastest, [*lines, _corners(picks.fastest)]))
    best = picks.logits and picks.logits.best
    if picks.logits and (best is None or picks.fastest is None or best.row is not picks.fastest.row):
        result.append(_given_logits(picks.logits, picks.smallest, folders))
    if picks.approximate and _gains(picks.approximate):
        lines = _against(picks.approximate, picks.fastest)
        words = verdict.accuracy(picks.approximate.row)
        if words:
            lines.append(("Accuracy", [parts.Link(f"Its loss is {words}", picks.approximate.row.results), "."]))
        result.append(_card("If an approximation will do", picks.approximate, [*lines, _corners(picks.approximate)]))
    return result


def of_search(rows: Sequence[Row]) -> List[parts.Card]:
    """Return the card for rows of --find-largest, among the exact losses alone."""
    pick = verdict.largest([row for row in rows if row.is_exact])
    return [_card("Largest batch, exact losses", pick, [_value("Size", pick, verdict.SIZE)])] if pick else []


def _card(question: str, pick: verdict.Pick, lines: Sequence[parts.Line]) -> parts.Card:
    if pick.withheld:
        return parts.Card(question, "withheld", False, lines=[("Speed", [f"{pick.withheld}."])])
    answer = verdict.either([row.marked for row in [pick.row, *pick.rivals]])
    if pick.row.loss in implementations.BY_NAME and implementations.BY_NAME[pick.row.loss].package == OURS:
        lines = [*lines, ("Origin", [f"{pick.row.loss} is this repository's own."])]
    code = snippets.snippet(pick.row.name)
    if not code and pick.row.loss in implementations.BY_NAME:
        lines = [*lines, ("Code", [f"{implementations.BY_NAME[pick.row.loss].file} shows how it is called."])]
    return parts.Card(question, answer, pick.sure, lines, code)


def _given_logits(picks: verdict.LogitsPick, smallest: Optional[verdict.Pick], folders: Sequence[Path]) -> parts.Card:
    question, both = "If you need logits", [each for each in (picks.step, picks.loss) if each]
    if any(each.withheld for each in both):
        return _card(question, replace(both[0], withheld=verdict.WITHHELD), [])
    titles = {"step": "Step", "loss": "Loss alone"}
    lines: List[parts.Line] = [
        (titles[each.scope], [*verdict.named(each, verdict.time_of(each.scope)), "."]) for each in both
    ]
    if picks.best is None:
        names = dict.fromkeys(row.marked for each in both for row in [each.row, *each.rivals])
        return parts.Card(question, verdict.either(list(names)), False, lines)
    best = verdict.Pick(picks.best.row, caveats=parts.caveats(picks.best.row.loss, folders))
    return _card(question, best, [*lines, _memory(best.row, smallest), _corners(best)])


def _gains(pick: verdict.Pick) -> bool:
    """Return whether an approximation takes less time or memory than the best exact loss; true where there is none."""
    known = [pick.over and pick.over.ratio, pick.memory]
    return not any(known) or any(value < 1 for value in known if value)


def _value(title: str, pick: verdict.Pick, measure: verdict.Measure) -> parts.Line:
    return title, [*(verdict.against_next if pick.sure else verdict.named)(pick, measure), "."]


def _speed(pick: verdict.Pick) -> parts.Line:
    return _value("Speed", pick, verdict.time_of(pick.scope))


def _memory(row: Row, smallest: Optional[verdict.Pick]) -> parts.Line:
    return "Memory", [*verdict.memory(row, smallest), "."]


def _corners(pick: verdict.Pick) -> parts.Line:
    title, words = verdict.corners(pick)
    return title.capitalize(), [f"{words}."]


def _against(pick: verdict.Pick, exact: Optional[verdict.Pick]) -> List[parts.Line]:
    """Return lines on an approximation's time and memory beside those of the fastest exact loss."""
    if exact is None:
        return [_speed(pick), _memory(pick.row, None)]
    name = verdict.name_of(exact.row)
    lines: List[parts.Line] = []
    if pick.over:
        ratio = f"{text.number(pick.over.ratio, 2)}x the time of {name}{verdict.interval(pick.over)}: "
        lines.append(("Speed", [ratio, verdict.value(pick.row, verdict.time_of(pick.scope)), "."]))
    if pick.memory and pick.row.peak_mb is not None:
        ratio = f"{text.number(pick.memory, 2)}x the peak of {name}: "
        lines.append(("Memory", [ratio, verdict.value(pick.row, verdict.PEAK), "."]))
    return lines


def size_of(rows: Sequence[Row]) -> List[str]:
    """Return ["20 utterances of the 85,617 in the shape file, in 10 batches and 5 rounds"]; empty where no batches are
    known."""
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return []
    utterances = sum(batch.N for batch in row.batches)
    of = f"of the {row.totals.utterances:,} in the shape file" if row.totals else "measured"
    batches = "1 batch" if len(row.batches) == 1 else f"{len(row.batches)} batches"
    most = max(row.rounds for row in rows)
    rounds = f" and {text.count(most, 'round')}" if most else ""
    return [f"{utterances:,} utterance{'' if utterances == 1 else 's'} {of}, in {batches}{rounds}."]


def versions(entries: Sequence[Row]) -> parts.Table:
    """Return a table of the versions that each row ran under, of the rows that ran where any did."""
    columns = ("implementation", "version", "torch", "Python", "CUDA", "options", "run started (UTC)", "folder")
    rows = []
    for entry in [entry for entry in entries if entry.is_measured] or entries:
        values = (
            entry.environment.implementation_version,
            entry.environment.torch,
            entry.environment.python,
            entry.environment.cuda,
        )
        cells = [parts.Cell(text.plain(value or "-")) for value in values]
        started = text.plain(entry.header.started or "-").replace("T", " ").replace("+00:00", "")
        name = text.plain(entry.folder.resolve().name)
        folder = parts.Cell(name, name, entry.results if entry.jobs else entry.folder)
        options = parts.Cell(text.plain(tables.options_text(entry.environment.options)) or "-", mark="long")
        rows.append([parts.Cell(entry.label, mark="name"), *cells, options, parts.Cell(started, mark="whole"), folder])
    return parts.Table("versions", "Versions", [parts.Column(title, False) for title in columns], rows)


def machine(entries: Sequence[Row]) -> List[Tuple[str, str]]:
    """Return (term, description) of the machine and conditions of the rows; several values where they differ."""
    facts: Dict[str, List[str]] = {}
    named = {text.plain(entry.device) for entry in entries if entry.device_name}
    for entry in entries:
        for term, description in _facts(entry):
            values = facts.setdefault(term, [])
            is_told = term == "Device" and description in named  # a row that did not run knows no device's name
            if description not in values and not is_told:
                values.append(description)
    return [(term, "; ".join(values)) for term, values in facts.items()]


def _facts(entry: Row) -> List[Tuple[str, str]]:
    settings, machine = entry.header.settings, entry.header.machine
    memory = f", {machine.memory_bytes / text.GIB:.0f} GiB" if machine.memory_bytes is not None else ""
    cores = f", {machine.cores} cores" if machine.cores else ""
    batches, rounds = entry.batches, entry.rounds
    revision = str(entry.header.git_revision or "")[:12]
    schedule, vocabulary = settings.get("schedule"), settings.get("vocab_size")
    command, rate = entry.header.command, entry.bytes_per_second
    facts: List[Tuple[str, Any]] = [
        ("Machine", f"{machine.cpu}{cores}{memory}" if machine.cpu else None),
        ("System", machine.os),
        ("Device", " ".join(str(part) for part in (entry.device, entry.device_name) if part)),
        ("Driver", entry.environment.gpu and entry.environment.gpu.driver),
        ("Threads", entry.environment.threads),
        ("Denormals", entry.environment.denormals),
        ("Allocator", entry.environment.allocator),
        ("Memory, at best", rate and f"{text.number(rate / 1e9, 3)} GB/s read and written"),
        ("Batches", _batches(settings, batches) if batches else None),
        ("Joiner", f"{settings.get('encoder_dim')} to V = {vocabulary}" if vocabulary else None),
        ("Dtype", settings.get("dtype")),
        ("Shapes", _shapes(entry, settings)),
        ("Options", ", ".join(described(settings, (MEASURED,))) or None),
        ("Seed", settings.get("seed")),
        ("Rounds", f"{rounds} fresh process{'' if rounds == 1 else 'es'}" if rounds else None),
        ("Plotly", ", ".join(f"{k} {v}" for k, v in schedule.items()) if schedule else None),
        ("Suite", revision and revision + (" with uncommitted changes" if entry.header.git_dirty else "")),
        ("Command", " ".join(map(str, command)) if isinstance(command, list) else None),
    ]
    return [(term, text.plain(value)) for term, value in facts if value is not None and str(value)]


def _batches(settings: Record, batches: Sequence[Batch]) -> str:
    utterances = sum(batch.N for batch in batches)
    useful = sum(batch.useful_cells for batch in batches) / sum(batch.padded_cells for batch in batches)
    order = "sorted by length" if settings.get("sort_utterance") else "in file order"
    begin = f"{len(batches)} ({settings.get('batches')}) of {utterances} utterances"
    return f"{begin}, {order}; {useful:.0%} of the cells useful"


def _shapes(entry: Row, settings: Record) -> Optional[str]:
    path, digest = entry.environment.shape_file, entry.environment.shape_file_sha256
    if not path or not digest:
        return None
    return ", ".join([f"{Path(path).name} (sha256 {digest[:12]})", *described(settings, (LENGTHS,))])
