"""Make the parts of a page that are no plot: the cards that answer its first question, and how rows were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from rnnt_bench.analysis import machines, times, verdict
from rnnt_bench.analysis.groups import Group
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import implementations, settings, snippets, text
from rnnt_bench.present import parts
from rnnt_bench.records import schema


def title(rows: Sequence[Row]) -> str:
    pick = verdict.fastest(rows)
    return verdict.headline(pick, verdict.smallest(rows)) if pick else ""


def cards(rows: Sequence[Row], folders: Sequence[Path]) -> List[parts.Card]:
    """Return the cards for rows of one configuration. folders: where a conformance matrix may be, besides docs/."""
    quick, logits, small, approximate = verdict.picks(rows, folders)
    result = []
    if quick:
        title, words = verdict.since(quick.row, rows, quick.scope) or ("", "")
        products = verdict.of_products(quick, rows)
        lines = [_line("Speed", _value(quick, verdict.time_of(quick.scope)))]
        lines += [_line("torch's products", [products])] if products else []
        lines += [_line("Memory", verdict.memory(quick.row, small)), *([_line(title, [words])] if title else [])]
        result.append(_card("Use", quick, [*lines, _corners(quick)]))
    best = logits and logits.best
    if logits and (best is None or quick is None or best.row is not quick.row):
        question, lines = "If you need logits", [_line("Speed", verdict.logits_words(logits))]
        if best is None:
            result.append(_card(question, logits.step or logits.loss, lines))
        else:
            best = replace(best, judged=parts.judged(best.row.loss, folders))
            lines.append(_line("Memory", verdict.memory(best.row, small)))
            result.append(_card(question, best, [*lines, _corners(best)]))
    if approximate:
        known = [ratio for ratio in (approximate.over and approximate.over.ratio, approximate.memory) if ratio]
        if not known or min(known) < 1:  # else it saves nothing
            lines = [_line("Gain", verdict.approximate(approximate)), _corners(approximate)]
            result.append(_card("If an approximation will do", approximate, lines))
    return result


def _card(question: str, pick: verdict.Pick, lines: Sequence[parts.Line]) -> parts.Card:
    if pick.withheld:
        return parts.Card(question, "withheld", False, lines=[_line("Speed", [pick.withheld])])
    answer = verdict.either([row.marked for row in [pick.row, *pick.rivals]])
    known, code = implementations.BY_NAME.get(pick.row.loss), snippets.SNIPPETS.get(pick.row.name.partition("@")[0], "")
    if known and known.package == "fused_transducer":
        lines = [*lines, ("Origin", [f"{pick.row.loss} is this repository's own."])]
    if known and not code:
        lines = [*lines, ("Code", [f"{known.file} shows how it is called."])]
    return parts.Card(question, answer, pick.sure, lines, code)


def _line(title: str, words: verdict.Words) -> parts.Line:
    return title[:1].upper() + title[1:], [*words, "."]


def _value(pick: verdict.Pick, measure: verdict.Measure) -> verdict.Words:
    return (verdict.against_next if pick.sure else verdict.named)(pick, measure)


def _corners(pick: verdict.Pick) -> parts.Line:
    title, words = verdict.cautions(pick)
    return _line(title, [words])


def configuration(group: Group) -> str:
    """Return the heading of a group, and of which kind its logits are."""
    kinds = {row.configuration.get("logits") for row in group.rows} - {None}
    logits = [f"{kind} logits" for kind in kinds if f"{kind} logits" not in group.heading]
    return ", ".join([group.heading, *logits])


def size_of(rows: Sequence[Row]) -> List[str]:
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return []
    of = f"of the {row.totals.utterances:,} in the shape file" if row.totals else "measured"
    utterances, batches = (
        text.count(sum(batch.N for batch in row.batches), "utterance"),
        text.count(len(row.batches), "batch"),
    )
    rounds = text.count(max(row.rounds for row in rows), "round")
    return [f"{utterances} {of}, in {batches} and {rounds}."]


def versions(entries: Sequence[Row]) -> parts.Table:
    columns = ("implementation", "version", "torch", "Python", "CUDA", "run started (UTC)", "folder")
    rows = []
    for entry in [entry for entry in entries if entry.is_measured] or entries:
        of, name = entry.environment, text.plain(entry.folder.resolve().name)
        started = text.plain(entry.header.started or "-").replace("T", " ").replace("+00:00", "")
        rows.append(
            [
                parts.Cell(entry.label, mark="name"),
                *(
                    parts.Cell(text.plain(each or "-"))
                    for each in (of.implementation_version, of.torch, of.python, of.cuda)
                ),
                parts.Cell(started, mark="whole"),
                parts.Cell(name, name, entry.results if entry.jobs else entry.folder),
            ]
        )
    return parts.Table("versions", "Versions", [parts.Column(title, False) for title in columns], rows)


def _giga(rate: Optional[float]) -> str:
    return text.number(None if rate is None else rate / 1e9, 3)


def _range(rates: times.DeviceRates) -> str:
    return f"the median of processes ({_giga(rates.memory_low)} to {_giga(rates.memory_high)})"


def _products(rates: times.DeviceRates) -> List[str]:
    """Return "torch 88 GFLOP/s" and "the suite's own loop 520 GFLOP/s", as far as they were measured."""
    known = (("torch", rates.torch), ("the suite's own loop", rates.loop))
    return [f"{name} {_giga(rate)} GFLOP/s" for name, rate in known if rate]


def machine(entries: Sequence[Row]) -> List[Tuple[str, str]]:
    entry = next((entry for entry in entries if entry.is_measured), entries[0] if entries else Row())
    given, machine = entry.header.settings, entry.header.machine
    written = schema.as_written(given)
    memory = f", {machine.memory_bytes / text.GIB:.0f} GiB" if machine.memory_bytes is not None else ""
    order = "sorted by length" if given.sort_utterance else "in file order"
    rounds, path, digest = entry.rounds, entry.environment.shape_file, entry.environment.shape_file_sha256
    shapes = (
        [f"{Path(path).name} (sha256 {digest[:12]})", *settings.described(written, (settings.LENGTHS,))]
        if path and digest
        else []
    )
    revision = str(entry.header.git_revision or "")[:12]
    command, rates = entry.header.command, entry.rates
    facts: List[Tuple[str, Any]] = [
        ("Machine", f"{machines.named(machine)}{memory}" if machine.cpu else None),
        ("System", machine.os),
        ("Device", " ".join(str(part) for part in (entry.device, entry.device_name) if part)),
        ("Driver", entry.environment.gpu and entry.environment.gpu.driver),
        ("Threads", entry.environment.threads),
        ("Denormals", entry.environment.denormals),
        ("Allocator", entry.environment.allocator),
        ("Memory's rate", rates.memory and f"{_giga(rates.memory)} GB/s read and written, {_range(rates)}"),
        ("Products' rate", ", ".join(_products(rates))),
        ("Batches", entry.batches and f"{len(entry.batches)} ({given.batches}), {order}"),
        ("Joiner", given.vocab_size and f"{given.encoder_dim} to V = {given.vocab_size}"),
        ("Dtype", given.dtype),
        ("Shapes", ", ".join(shapes)),
        ("Options", ", ".join(settings.described(written, (settings.MEASURED,)))),
        ("Seed", given.seed),
        ("Rounds", rounds and f"{rounds} of fresh processes"),
        ("Trace", ", ".join(f"{k} {v}" for k, v in (given.schedule or {}).items())),
        ("Suite", revision and revision + (" with uncommitted changes" if entry.header.git_dirty else "")),
        ("Command", " ".join(map(str, command)) if isinstance(command, list) else None),
    ]
    return [(term, text.plain(value)) for term, value in facts if value not in (None, "", [])]
