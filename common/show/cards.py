"""Make the parts of a page's section that are not plots: the cards that say which loss to use, what
did not run, and how the rows were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rnnt_bench.analysis import machines, times, verdict
from rnnt_bench.analysis.groups import Group
from rnnt_bench.analysis.row import Row, Rows
from rnnt_bench.core import implementations, settings, snippets, text
from rnnt_bench.present import parts
from rnnt_bench.records import schema


def title(rows: Rows) -> str:
    """Return the title of a page about these rows: which loss to use; "" if none can be ranked."""
    fastest = verdict.fastest(rows)
    return verdict.headline(fastest, verdict.smallest(rows)) if fastest else ""


def cards(rows: Rows, folders: Sequence[Path]) -> list[parts.Card]:
    """Return up to three cards: the fastest exact loss, the fastest of those that take logits if
    that is another loss, and an approximate loss that saves time or memory.

    Args:
        rows: rows of one configuration
        folders: folders in which a conformance matrix may be, besides docs/
    """
    fastest, logits, smallest, approximate = verdict.picks(rows, folders)
    result = []
    if fastest:
        result.append(_card("Use", fastest, _fastest_lines(fastest, smallest, rows)))
    if logits:
        is_fastest = logits.best and fastest and logits.best.row is fastest.row
        if not is_fastest:
            result.append(_logits_card(logits, smallest, folders))
    if approximate and _saves(approximate):
        lines = [_line("Gain", verdict.approximate_answer(approximate)), _cautions(approximate)]
        result.append(_card("If an approximation will do", approximate, lines))
    return result


def _fastest_lines(
    fastest: verdict.Pick, smallest: verdict.Pick | None, rows: Rows
) -> list[parts.Line]:
    """Return the lines of the card of the fastest exact loss: speed, memory, and what to beware of.

    If they are known, two more lines tell how much of the next loss's time torch's slow matrix
    products take, and the change since an earlier run."""
    # The title of a card that is sure names the loss already.
    speed = verdict.against_next if fastest.sure else verdict.named
    lines = [_line("Speed", speed(fastest, verdict.time_of(fastest.scope)))]
    products = verdict.products_answer(fastest, rows)
    if products:
        lines.append(_line("torch's products", [products]))
    lines.append(_line("Memory", verdict.memory_answer(fastest.row, smallest)))
    change = verdict.change_since(fastest.row, rows, fastest.scope)
    if change:
        since, words = change
        lines.append(_line(since, [words]))
    return [*lines, _cautions(fastest)]


def _logits_card(
    logits: verdict.LogitsPick, smallest: verdict.Pick | None, folders: Sequence[Path]
) -> parts.Card:
    """Return the card of the fastest loss that takes logits.

    If it is unclear which one is the fastest, the card names a row and its rivals, and says nothing
    on memory and cautions."""
    lines = [_line("Speed", verdict.logits_answer(logits))]
    best = verdict.with_judgement(logits.best, folders)
    if best:
        lines += [_line("Memory", verdict.memory_answer(best.row, smallest)), _cautions(best)]
    # Where no best is clear, the card is of the step's pick; without times of steps, of the loss's.
    return _card("If you need logits", best or logits.step or logits.loss, lines)


def _saves(approximate: verdict.Pick) -> bool:
    """Tell whether an approximate loss takes less time or memory than the fastest exact one.

    True where neither time nor memory could be compared."""
    time = approximate.time_over_exact.ratio if approximate.time_over_exact else None
    ratios = [ratio for ratio in (time, approximate.peak_over_exact) if ratio]
    return not ratios or min(ratios) < 1


def _card(question: str, pick: verdict.Pick, lines: Sequence[parts.Line]) -> parts.Card:
    """Return a card that names the picked loss and its rivals, with `lines` and the code of the
    picked loss.

    If the answer is withheld, the card names no loss, and its only line says why."""
    if pick.withheld:
        reason = _line("Speed", [pick.withheld])
        return parts.Card(question, answer="withheld", clear=False, lines=[reason])
    answer = verdict.either([row.marked_label for row in [pick.row, *pick.rivals]])
    code = snippets.SNIPPETS.get(pick.row.loss, "")
    implementation = implementations.BY_NAME.get(pick.row.loss)
    if implementation and implementation.package == "fused_transducer":
        lines = [*lines, ("Origin", [f"{pick.row.loss} is this repository's own."])]
    if implementation and not code:
        lines = [*lines, ("Code", [f"{implementation.file} shows how it is called."])]
    return parts.Card(question, answer, pick.sure, lines, code)


def _cautions(pick: verdict.Pick) -> parts.Line:
    """Return the line on what to beware of in the picked loss."""
    title, words = verdict.cautions(pick)
    return _line(title, [words])


def _line(title: str, sentence: verdict.Sentence) -> parts.Line:
    """Return a line of a card: the title with a capital, the sentence with its full stop."""
    return title[:1].upper() + title[1:], [*sentence, "."]


def failures(rows: Sequence[Row]) -> list[parts.Failure]:
    """Return an entry for each row that has a reason why it failed or did not run.  In a sweep the
    entry names the swept values of the row."""
    result = []
    for row in rows:
        if row.reason:
            name = row.label
            if row.header.values:
                name += f" at {settings.words(row.header.values)}"
            link = parts.Link(row.status, row.folder)
            result.append(parts.Failure(row.status, name, [link, f": {row.reason}"]))
    return result


def configuration(group: Group) -> str:
    """Return the heading of a group, followed by the kind of its logits if the heading lacks it."""
    kinds = {row.configuration.get("logits") for row in group.rows} - {None}
    logits = [f"{kind} logits" for kind in kinds]
    return ", ".join([group.heading, *(words for words in logits if words not in group.heading)])


def sample_size(rows: Rows) -> str:
    """Return "300 utterances of the 28,539 in the shape file, in 10 batches and 3 rounds."; "" if
    no row has its batches."""
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return ""
    utterances = text.count(sum(batch.N for batch in row.batches), "utterance")
    source = f"of the {row.totals.utterances:,} in the shape file" if row.totals else "measured"
    batches = text.count(len(row.batches), "batch")
    rounds = text.count(max(row.rounds for row in rows), "round")
    return f"{utterances} {source}, in {batches} and {rounds}."


def versions(rows: Rows) -> parts.Table:
    """Return a table of the versions and log folders of the measured rows; of all rows if none was
    measured."""
    measured = [row for row in rows if row.is_measured]
    cells = [_version_cells(row) for row in measured or rows]
    return parts.tabulated("versions", "Versions", cells)


def _version_cells(row: Row) -> dict[str, parts.Cell]:
    """Return {column: cell}: the versions of the row's packages, and when and where it was run."""
    environment = row.environment
    packages = {
        "version": environment.implementation_version,
        "torch": environment.torch,
        "Python": environment.python,
        "CUDA": environment.cuda,
    }
    started = (row.header.started or "-").replace("T", " ").replace("+00:00", "")
    folder = row.folder.resolve().name
    return {
        "implementation": parts.Cell(row.label, mark="name"),
        **{title: parts.Cell(version or "-") for title, version in packages.items()},
        "run started (UTC)": parts.Cell(started, mark="whole"),
        "folder": parts.Cell(folder, value=folder, target=row.results if row.jobs else row.folder),
    }


def conditions(rows: Rows) -> list[tuple[str, str]]:
    """Return (term, value) for all that is recorded of the machine, settings and code of the first
    measured row; of the first row if none was measured."""
    row = next((row for row in rows if row.is_measured), rows[0])
    facts = {**_machine_facts(row), **_settings_facts(row), **_code_facts(row)}
    return [(term, str(value)) for term, value in facts.items() if value not in (None, "", [])]


def _machine_facts(row: Row) -> dict[str, Any]:
    """Return {term: value} of the machine and the state it ran in; None, "" or [] where unknown."""
    environment = row.environment
    machine = row.header.machine
    name = machines.described(machine)
    if machine.memory_bytes is not None:
        name += f", {machine.memory_bytes / text.GIB:.0f} GiB"
    return {
        "Machine": machine.cpu and name,
        "System": machine.os,
        "Device": " ".join(filter(None, [row.device, row.device_name])),
        "Driver": environment.gpu and environment.gpu.driver,
        "Threads": environment.threads,
        "Denormals": environment.denormals,
        "Allocator": environment.allocator,
        "Memory's rate": _memory_rate(row.rates),
        "Products' rate": _products_rate(row.rates),
    }


def _settings_facts(row: Row) -> dict[str, Any]:
    """Return {term: value} of what the run was asked to measure; None, "" or [] where unknown."""
    chosen = row.header.settings
    written = schema.as_written(chosen)
    order = "sorted by length" if chosen.sort_utterance else "in file order"
    schedule = chosen.schedule or {}
    return {
        "Batches": row.batches and f"{len(row.batches)} ({chosen.batches}), {order}",
        "Joiner": chosen.vocab_size and f"{chosen.encoder_dim} to V = {chosen.vocab_size}",
        "Dtype": chosen.dtype,
        "Shapes": _shape_file(row, written),
        "Options": ", ".join(settings.described(written, (settings.MEASURED,))),
        "Seed": chosen.seed,
        "Rounds": row.rounds and f"{row.rounds} of fresh processes",
        "Trace": ", ".join(f"{stage} {steps}" for stage, steps in schedule.items()),
    }


def _code_facts(row: Row) -> dict[str, str]:
    """Return {term: value} of the suite's commit and the command line; "" where unknown."""
    header = row.header
    revision = str(header.git_revision or "")[:12]
    if revision and header.git_dirty:
        revision += " with uncommitted changes"
    command = header.command if isinstance(header.command, list) else []
    return {"Suite": revision, "Command": " ".join(map(str, command))}


def _shape_file(row: Row, written: schema.Record) -> str:
    """Return the name and digest of the shape file, and how the run changed its lengths; "" if the
    name or the digest is unknown. written: {setting: value} of the run, as the records have it."""
    path, digest = row.environment.shape_file, row.environment.shape_file_sha256
    if not (path and digest):
        return ""
    changes = settings.described(written, (settings.LENGTHS,))
    return ", ".join([f"{Path(path).name} (sha256 {digest[:12]})", *changes])


def _memory_rate(rates: times.DeviceRates) -> str:
    """Return the memory's rate in GB/s with its range over the processes; "" if unmeasured."""
    if not rates.memory:
        return ""
    span = f"{_giga(rates.memory_low)} to {_giga(rates.memory_high)}"
    return f"{_giga(rates.memory)} GB/s read and written, the median of processes ({span})"


def _products_rate(rates: times.DeviceRates) -> str:
    """Return "torch 88 GFLOP/s, the suite's own loop 520 GFLOP/s", without a rate that is not
    measured."""
    by_name = {"torch": rates.torch, "the suite's own loop": rates.loop}
    return ", ".join(f"{name} {_giga(rate)} GFLOP/s" for name, rate in by_name.items() if rate)


def _giga(rate: float | None) -> str:
    """Return a rate in billions, to 3 digits; "-" if it is unknown."""
    return text.number(None if rate is None else rate / machines.GIGA, 3)
