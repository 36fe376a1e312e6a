"""Make the parts of a page that are no plot: the cards that answer its first question, and how rows
were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rnnt_bench.analysis import machines, times, verdict
from rnnt_bench.analysis.groups import Group
from rnnt_bench.analysis.row import Row, Rows
from rnnt_bench.core import implementations, settings, snippets, text
from rnnt_bench.present import parts
from rnnt_bench.records import schema


def title(rows: Rows) -> str:
    pick = verdict.fastest(rows)
    return verdict.headline(pick, verdict.smallest(rows)) if pick else ""


def cards(rows: Rows, folders: Sequence[Path]) -> list[parts.Card]:
    """Return the cards for rows of one configuration. folders: where a conformance matrix may be,
    besides docs/."""
    fastest, logits, smallest, approximate = verdict.picks(rows, folders)
    result = []
    if fastest:
        lines = [_line("Speed", _value(fastest, verdict.time_of(fastest.scope)))]
        products = verdict.of_products(fastest, rows)
        if products:
            lines.append(_line("torch's products", [products]))
        lines.append(_line("Memory", verdict.memory(fastest.row, smallest)))
        since = verdict.since(fastest.row, rows, fastest.scope)
        if since:
            lines.append(_line(since[0], [since[1]]))
        result.append(_card("Use", fastest, [*lines, _corners(fastest)]))
    best = logits and logits.best
    if logits and (best is None or fastest is None or best.row is not fastest.row):
        pick = best or logits.step or logits.loss
        lines = [_line("Speed", verdict.logits_words(logits))]
        if best:
            pick = replace(best, judged=parts.judged(best.row.loss, folders))
            lines += [_line("Memory", verdict.memory(pick.row, smallest)), _corners(pick)]
        result.append(_card("If you need logits", pick, lines))
    if approximate:
        gains = [
            ratio
            for ratio in (approximate.over and approximate.over.ratio, approximate.memory)
            if ratio
        ]
        if not gains or min(gains) < 1:  # it saves time or memory
            lines = [_line("Gain", verdict.approximate(approximate)), _corners(approximate)]
            result.append(_card("If an approximation will do", approximate, lines))
    return result


def _card(question: str, pick: verdict.Pick, lines: Sequence[parts.Line]) -> parts.Card:
    if pick.withheld:
        return parts.Card(question, "withheld", False, lines=[_line("Speed", [pick.withheld])])
    answer = verdict.either([row.marked for row in [pick.row, *pick.rivals]])
    code = snippets.SNIPPETS.get(pick.row.loss, "")
    implementation = implementations.BY_NAME.get(pick.row.loss)
    if implementation and implementation.package == "fused_transducer":
        lines = [*lines, ("Origin", [f"{pick.row.loss} is this repository's own."])]
    if implementation and not code:
        lines = [*lines, ("Code", [f"{implementation.file} shows how it is called."])]
    return parts.Card(question, answer, pick.sure, lines, code)


def _line(title: str, words: verdict.Words) -> parts.Line:
    return title[:1].upper() + title[1:], [*words, "."]


def _value(pick: verdict.Pick, measure: verdict.Measure) -> verdict.Words:
    return (verdict.against_next if pick.sure else verdict.named)(pick, measure)


def _corners(pick: verdict.Pick) -> parts.Line:
    title, words = verdict.cautions(pick)
    return _line(title, [words])


def failures(rows: Sequence[Row]) -> list[parts.Failure]:
    """Return what did not run, with the reason; in a sweep also at which values."""
    result = []
    for row in rows:
        if row.reason:
            where = f" at {settings.words(row.header.values)}" if row.header.values else ""
            link = parts.Link(row.status, row.folder)
            result.append(
                parts.Failure(row.status, f"{row.label}{where}", [link, f": {row.reason}"])
            )
    return result


def configuration(group: Group) -> str:
    """Return the heading of a group, and of which kind its logits are."""
    kinds = {row.configuration.get("logits") for row in group.rows} - {None}
    logits = [f"{kind} logits" for kind in kinds if f"{kind} logits" not in group.heading]
    return ", ".join([group.heading, *logits])


def size_of(rows: Rows) -> list[str]:
    """Return a sentence on how many utterances, batches and rounds were measured; none where that
    is not known."""
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return []
    utterances = text.count(sum(batch.N for batch in row.batches), "utterance")
    source = f"of the {row.totals.utterances:,} in the shape file" if row.totals else "measured"
    batches = text.count(len(row.batches), "batch")
    rounds = text.count(max(row.rounds for row in rows), "round")
    return [f"{utterances} {source}, in {batches} and {rounds}."]


def versions(entries: Rows) -> parts.Table:
    """Return the table of versions and folders of the rows that were measured; of all where none
    was."""
    columns = (
        "implementation",
        "version",
        "torch",
        "Python",
        "CUDA",
        "run started (UTC)",
        "folder",
    )
    rows = []
    for entry in [entry for entry in entries if entry.is_measured] or entries:
        environment = entry.environment
        packages = (
            environment.implementation_version,
            environment.torch,
            environment.python,
            environment.cuda,
        )
        started = text.plain(entry.header.started or "-").replace("T", " ").replace("+00:00", "")
        folder = text.plain(entry.folder.resolve().name)
        rows.append(
            [
                parts.Cell(entry.label, mark="name"),
                *(parts.Cell(text.plain(version or "-")) for version in packages),
                parts.Cell(started, mark="whole"),
                parts.Cell(folder, folder, entry.results if entry.jobs else entry.folder),
            ]
        )
    return parts.Table(
        "versions", "Versions", [parts.Column(title, False) for title in columns], rows
    )


def _giga(rate: float | None) -> str:
    return text.number(None if rate is None else rate / 1e9, 3)


def _range(rates: times.DeviceRates) -> str:
    return f"the median of processes ({_giga(rates.memory_low)} to {_giga(rates.memory_high)})"


def _products(rates: times.DeviceRates) -> str:
    """Return "torch 88 GFLOP/s, the suite's own loop 520 GFLOP/s", as far as they were measured."""
    measured = (("torch", rates.torch), ("the suite's own loop", rates.loop))
    return ", ".join(f"{name} {_giga(rate)} GFLOP/s" for name, rate in measured if rate)


def _shapes(entry: Row, written: schema.Record) -> str:
    """Return the name and digest of the shape file, and what was changed in its lengths; "" where
    it is not known."""
    path, digest = entry.environment.shape_file, entry.environment.shape_file_sha256
    if not (path and digest):
        return ""
    return ", ".join(
        [
            f"{Path(path).name} (sha256 {digest[:12]})",
            *settings.described(written, (settings.LENGTHS,)),
        ]
    )


def machine(entries: Rows) -> list[tuple[str, str]]:
    """Return how and on what the first measured row was measured, as terms and their values."""
    entry = next(
        (entry for entry in entries if entry.is_measured), entries[0] if entries else Row()
    )
    environment = entry.environment
    header = entry.header
    rates = entry.rates
    machine = header.machine
    chosen = header.settings
    written = schema.as_written(chosen)
    memory = (
        f", {machine.memory_bytes / text.GIB:.0f} GiB" if machine.memory_bytes is not None else ""
    )
    order = "sorted by length" if chosen.sort_utterance else "in file order"
    revision = str(header.git_revision or "")[:12]
    facts: list[tuple[str, Any]] = [
        ("Machine", machine.cpu and f"{machines.named(machine)}{memory}"),
        ("System", machine.os),
        ("Device", " ".join(str(part) for part in (entry.device, entry.device_name) if part)),
        ("Driver", environment.gpu and environment.gpu.driver),
        ("Threads", environment.threads),
        ("Denormals", environment.denormals),
        ("Allocator", environment.allocator),
        (
            "Memory's rate",
            rates.memory and f"{_giga(rates.memory)} GB/s read and written, {_range(rates)}",
        ),
        ("Products' rate", _products(rates)),
        ("Batches", entry.batches and f"{len(entry.batches)} ({chosen.batches}), {order}"),
        ("Joiner", chosen.vocab_size and f"{chosen.encoder_dim} to V = {chosen.vocab_size}"),
        ("Dtype", chosen.dtype),
        ("Shapes", _shapes(entry, written)),
        ("Options", ", ".join(settings.described(written, (settings.MEASURED,)))),
        ("Seed", chosen.seed),
        ("Rounds", entry.rounds and f"{entry.rounds} of fresh processes"),
        (
            "Trace",
            ", ".join(f"{stage} {steps}" for stage, steps in (chosen.schedule or {}).items()),
        ),
        (
            "Suite",
            revision and revision + (" with uncommitted changes" if header.git_dirty else ""),
        ),
        (
            "Command",
            " ".join(map(str, header.command)) if isinstance(header.command, list) else None,
        ),
    ]
    return [(term, text.plain(value)) for term, value in facts if value not in (None, "", [])]
