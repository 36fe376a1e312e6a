"""Pick the best rows of one configuration, the fastest, the smallest, the fastest approximation,
and put it in words. Times as in the tables (see standing.py): a loss is surely the fastest when
every other under its torch is "slower". Memory and largest batches are measured in one process and
have no interval; there a margin decides. A sentence is a list of texts and of links to the files
that its numbers are from, without a full stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import control, doubts, groups
from rnnt_bench.analysis.ratios import Factor, Ratio
from rnnt_bench.analysis.row import Row, gaps
from rnnt_bench.analysis.standing import Standing, stand, standings
from rnnt_bench.core import implementations, text
from rnnt_bench.core.called import command
from rnnt_bench.present import parts
from rnnt_bench.setup.interpreters import version_numbers

#: Peaks that differ by less count as equal: the two ways to measure them differ as much.
MEMORY_MARGIN = 0.02
#: Kinds of exact rows; None: not known, of traces alone.
EXACT = ("exact", None)


@dataclass(frozen=True)
class Pick:
    """Hold the best of some rows, and how sure that is.

    Attributes:
        row: the best
        rivals: rows that may be as good, the nearest first
        next: the first rival, or else the first that is worse
        factor: how many times the best's time, peak or size the next has
        scope: "step" or "loss", whose times are compared
        next_ratio: the ratio of the next's time, with its interval
        next_time: the next's time over the best's, where `factor` is one of peaks
        over, memory: time and peak of an approximation over the fastest exact row's
        judged: None where no conformance matrix judged it
        withheld: why there is no answer, and no ratio: other load
    """

    row: Row
    rivals: list[Row] = field(default_factory=list)
    next: Row | None = None
    factor: float | None = None
    scope: str = "step"
    next_ratio: Ratio | None = None
    next_time: float | None = None
    over: Ratio | None = None
    memory: float | None = None
    judged: parts.Judged | None = None
    withheld: str = ""

    @property
    def sure(self) -> bool:
        return not self.rivals and not self.withheld


class LogitsPick(NamedTuple):
    """Hold the best exact loss of given logits.

    Attributes:
        loss: by the loss alone
        step: by the step of the losses that take logits, which a training pays for
        best: the answer, by the step, or by the loss alone among those that may be as fast by the
            step; None where it is unclear
    """

    loss: Pick
    step: Pick | None
    best: Pick | None


class Picks(NamedTuple):
    """Hold the picks of one group; None where there is no answer, or it was not measured."""

    fastest: Pick | None
    given_logits: LogitsPick | None
    smallest: Pick | None
    approximate: Pick | None


def picks(rows: Sequence[Row], folders: Sequence[Path] = ()) -> Picks:
    """Return the picks of rows of one group. folders: where a conformance matrix may be, besides
    docs/."""
    quick = fastest(rows)
    approximate = fastest(rows, ("pruned",))
    if approximate and quick:
        standing = stand(approximate.row, quick.row, approximate.scope)
        memory = None
        if approximate.row.peak_mb and quick.row.peak_mb:
            memory = approximate.row.peak_mb / quick.row.peak_mb
        approximate = replace(
            approximate, over=None if standing.beside_load else standing.ratio, memory=memory
        )
    return Picks(
        with_judgement(quick, folders),
        given_logits(rows),
        smallest(rows),
        with_judgement(approximate, folders),
    )


def with_judgement(pick: Pick | None, folders: Sequence[Path]) -> Pick | None:
    """Return the pick with what the conformance matrix says of its loss."""
    return pick and replace(pick, judged=parts.judged(pick.row.loss, folders))


def fastest(rows: Sequence[Row], kinds: Sequence[str | None] | None = None) -> Pick | None:
    """Return the fastest of these kinds by the step, or by the loss where no step was timed."""
    rows = _ok(rows, kinds)
    return by_time(rows, "step") or by_time(rows, "loss")


def given_logits(rows: Sequence[Row]) -> LogitsPick | None:
    """Return the pick of the exact rows that take logits; None where no loss was timed alone."""
    with_logits = [row for row in _ok(rows) if row.loss_alone.ms]
    loss = by_time(with_logits, "loss")
    step = by_time(with_logits, "step")
    if loss is None:
        return None
    if loss.withheld or (step and step.withheld):
        return LogitsPick(loss, step, best=None)
    if step and step.sure:
        return LogitsPick(loss, step, best=step)
    may_be_fastest = step is None or loss.row in [step.row, *step.rivals]
    return LogitsPick(loss, step, best=loss if loss.sure and may_be_fastest else None)


def by_time(rows: Sequence[Row], scope: str) -> Pick | None:
    ranked = standings(rows, scope)
    if not ranked:
        return None
    best, *others = ranked
    others = [standing for standing in others if standing.ratio]
    rivals = [standing for standing in others if standing.may_be_as_fast]
    if not best.beside_load and not rivals:  # none follows by a ratio that other load made
        others = [standing for standing in others if not standing.beside_load]
    following = next(iter(rivals or others), None)
    ratio = following.ratio if following and not best.beside_load else None
    return Pick(
        best.row,
        [standing.row for standing in rivals],
        following.row if following else None,
        ratio.ratio if ratio else None,
        scope,
        ratio,
        withheld=doubts.WITHHELD if best.beside_load else "",
    )


def smallest(rows: Sequence[Row]) -> Pick | None:
    """Return the exact row with the least memory, by utterance too, and how the next one's time
    stands to its."""
    peaks = [(peak, row) for row in _ok(rows, _with_pieces(rows)) if (peak := row.peak_mb)]
    if not peaks:
        return None
    (least, best), *others = sorted(peaks, key=lambda pair: pair[0])
    if not others:
        return Pick(best)
    rivals = [row for peak, row in others if peak / least <= 1 + MEMORY_MARGIN]
    peak, following = others[0]
    standing = stand(following, best, "step")
    next_time = standing.factor if standing.ratio and not standing.beside_load else None
    return Pick(best, rivals, following, peak / least, next_time=next_time)


def _with_pieces(rows: Sequence[Row]) -> Sequence[str | None]:
    """Return the ranked kinds, and that of exact losses by utterance, which differ from those in
    memory and time."""
    kinds = ranked_kinds(rows)
    return (*kinds, implementations.BY_UTTERANCE) if kinds == EXACT else kinds


def ranked_kinds(rows: Sequence[Row]) -> Sequence[str | None]:
    """Return the kinds whose fastest a verdict names: the exact losses, or those of the rows' one
    lattice."""
    kinds = {row.kind for row in rows if row.is_comparable and not row.other_torch}
    lattices = kinds.intersection(implementations.LATTICES)
    return EXACT if kinds.intersection(EXACT) or len(lattices) != 1 else tuple(lattices)


def _ok(rows: Sequence[Row], kinds: Sequence[str | None] | None = None) -> list[Row]:
    kinds = ranked_kinds(rows) if kinds is None else kinds
    return [row for row in rows if row.is_comparable and row.kind in kinds and not row.other_torch]


# In words.

Words = list[str | parts.Link]

#: Corners of a loss that a verdict names.
MOST_CAVEATS = 4
#: Made logits whose name says too little.
LOGITS = {
    "peaky": "peaky logits (made, sharper than a trained model's)",  # of earlier runs
    "early": "logits of a small model's first steps",
    "middle": "logits of a small model on the way through its training",
    "trained": "logits of a small trained model",
}


class Measure(NamedTuple):
    """Hold what rows are compared by.  shown: returns a row's value in words; noun: of what a ratio
    is."""

    shown: Callable[[Row], str]
    noun: str


def time_of(scope: str) -> Measure:
    return Measure(lambda row: f"{text.number(row.median_ms(scope))} ms a {scope}", "the time")


PEAK = Measure(lambda row: f"{text.number(row.peak_mb)} MB", "the peak")


def name_of(row: Row) -> str:
    return row.label or text.plain(row.name)


def value(row: Row, measure: Measure) -> parts.Link:
    return parts.Link(measure.shown(row), row.results)


# Picks.


def headline(pick: Pick, small: Pick | None = None) -> str:
    """Return the advice in one sentence.  small: the pick of the smallest, by whose peak the memory
    is judged."""
    if pick.withheld:
        return "No answer yet: samples ran beside other load"
    if not pick.sure:
        return f"{either([name_of(row) for row in [pick.row, *pick.rivals]])}: too close to tell"
    name = doubts.with_mark(name_of(pick.row), pick.row, "above limit")
    if pick.next is None or pick.factor is None:
        return f"Use {name}, the only exact loss that was compared"
    words = f"Use {name}: {text.number(pick.factor, 2)}x faster"
    span = _span(pick.next_ratio, 2)
    if span:
        words += f" ({span})"
    words += " than the next exact loss"
    if small and small.row is pick.row and small.sure and small.next:
        words += f" and {text.number(small.factor, 2)}x smaller than {name_of(small.next)}"
    elif (
        small
        and small.row.peak_mb
        and pick.row.peak_mb
        and pick.row not in [small.row, *small.rivals]
    ):
        words += f", with {text.number(pick.row.peak_mb / small.row.peak_mb, 2)}x the peak of {name_of(small.row)}"
    return words


def _span(ratio: Ratio | None, digits: int = 3) -> str:
    """Return the interval of a ratio in words; "" where it has none."""
    return text.interval(ratio.low, ratio.high, digits) if ratio else ""


#: Names in a headline and in the answer of a card.
NAMED = 3


def either(names: Sequence[str]) -> str:
    """Return "a, b or c"; for more than four names "a, b, c or 2 more"."""
    shown = (
        list(names) if len(names) <= NAMED + 1 else [*names[:NAMED], f"{len(names) - NAMED} more"]
    )
    return _listed(shown, " or ")


def _listed(words: Sequence[str], last: str) -> str:
    """Return words with commas between them, and `last` before the last one."""
    return last.join(filter(None, [", ".join(words[:-1]), words[-1]]))


def against_next(pick: Pick, measure: Measure) -> Words:
    """Return the value of the best row and how far the next is: "25.0 ms a step; next is b at 1.67x
    the time"."""
    best = value(pick.row, measure)
    if pick.next is None:
        return [best, "; the only one measured"]
    span = _span(pick.next_ratio)
    behind = f"{name_of(pick.next)} at {text.number(pick.factor, 3)}x {measure.noun}"
    if span:
        behind += f" (95% interval {span})"
    if pick.next_time:
        behind += f" and {text.number(pick.next_time, 2)}x the time"
    if pick.sure:
        return [best, f"; next is {behind}"]
    others = len(pick.rivals) - 1
    verb = f"and {others} more are" if others > 0 else "is"
    advice = (
        "; one round gives no interval: use --rounds 3 or more"
        if pick.next_ratio and not span
        else ""
    )
    return [best, f"; {behind} {verb} too close to tell{advice}"]


def named(pick: Pick, measure: Measure) -> Words:
    return [f"{name_of(pick.row)}, ", *against_next(pick, measure)]


def answer(pick: Pick, measure: Measure) -> Words:
    if pick.withheld:
        return [pick.withheld]
    return named(pick, measure) if pick.sure else ["unclear: ", *named(pick, measure)]


def of_products(pick: Pick, rows: Sequence[Row]) -> str:
    """Return what of the nearest loss's ratio is torch's slow products, where controls tell, else
    "":
    "optimized_transducer: 3.3x here, of which 1.9x are torch's slow products on this CPU; 1.7x
    without them (1.6 to 1.8)"."""
    controlled = [
        row
        for row in _ok(rows)
        if row.with_fast_products and row.against_fastest.baseline is pick.row
    ]
    row = min(controlled, key=lambda row: row.over_fastest or math.inf, default=None)
    if row is None or pick.withheld:
        return ""
    here, without = row.against_fastest, row.with_fast_products
    if here.beside_load or without.beside_load or not (here.factor and without.factor):
        return ""
    words = f"{name_of(row)}: {text.number(here.factor, 2)}x here"
    if here.factor > without.factor:
        words += f", of which {text.number(here.factor / without.factor, 2)}x are torch's slow products on this CPU"
    words += f"; {text.number(without.factor, 2)}x without them"
    span = _span(without.judged, 2)
    return f"{words} ({span})" if span else words


def logits_words(picks: LogitsPick) -> Words:
    loss, step, best = picks
    if step is None or loss.withheld or step.withheld:
        return answer(loss, time_of("loss")) if step is None else [doubts.WITHHELD]
    by_step, by_loss = (answer(pick, time_of(pick.scope)) for pick in (step, loss))
    if best is step and loss.sure and loss.row is step.row:
        return [*by_step, "; its loss is the fastest too"]
    if best is loss:
        return [*named(loss, time_of("loss")), "; by the step ", *by_step]
    return [*by_step, "; by the loss alone ", *by_loss]


def approximate(pick: Pick) -> Words:
    if pick.withheld:
        return [pick.withheld]
    ratios = []
    if pick.over:
        ratios.append(f"{text.number(pick.over.ratio, 2)}x the time")
    if pick.memory:
        ratios.append(f"{text.number(pick.memory, 2)}x the peak")
    words = []
    if ratios:
        words.append(f"{' and '.join(ratios)} of the fastest exact loss")
    off = accuracy(pick.row)
    if off:
        words.append(f"its loss is {off}")
    return [", ".join(filter(None, [name_of(pick.row), "; ".join(words)]))]


def accuracy(row: Row) -> str:
    """Return "off by 3% on random logits, which does not bound it in training"."""
    by_logits = gaps(row.checked)
    if by_logits:
        shares = [
            f"{_percent(gap)} on {LOGITS.get(kind, f'{kind} logits')}"
            for kind, gap in by_logits.items()
        ]
        return f"off by {_listed(shares, ' and ')}, which does not bound it in training"
    gap = row.checked.approximation_gap
    return "" if gap is None else f"off by {_percent(gap)}"


def _percent(gap: float) -> str:
    """Return a share in two digits, as "3%" or "0.15%"; "less than 0.001%" below that."""
    return f"{100 * abs(gap):.2g}%" if gap == 0 or abs(gap) >= 1e-5 else "less than 0.001%"


def memory(row: Row, smallest: Pick | None) -> Words:
    if row.peak_mb is None:
        return ["not measured"]
    least = smallest.row if smallest else row
    peak = value(row, PEAK)
    if smallest and row in [least, *smallest.rivals]:
        others = against_next(smallest, PEAK)[1:] if smallest.sure and smallest.next else []
        return [peak, ", the smallest" if smallest.sure else ", as small as any", *others]
    if least is row or not least.peak_mb:
        return [peak]
    factor = text.number(row.peak_mb / least.peak_mb, 3)
    return [peak, f", {factor}x the peak of {name_of(least)} (", value(least, PEAK), ")"]


def cautions(pick: Pick) -> tuple[str, str]:
    """Return the title "beware" or "corners", and what the conformance matrix says of the best
    row."""
    name = pick.row.name
    check = f"{command('check')} --only {name}"
    caveats = [
        doubt.words for doubt in doubts.doubts(pick.row) if doubt.kind in ("above limit", "coarse")
    ]
    judged = ""  # version of the package and day, in words
    if pick.judged:
        caveats += pick.judged.caveats
        judged = f"{pick.judged.version} on {_day(pick.judged.day)}".strip()
        here = pick.row.environment.implementation_version or ""
        if version_numbers(pick.judged.version) < version_numbers(here):
            judged += f", which is older than this package ({here.partition('+')[0]}): {check}"
    elif not caveats:
        return "corners", f"{name} was not judged yet: {check}"
    if not caveats:
        return "corners", f"{command('check')} found nothing wrong with {name} {judged}"
    shown = caveats[:MOST_CAVEATS]
    if len(caveats) > MOST_CAVEATS:
        shown.append(f"{len(caveats) - MOST_CAVEATS} more: {check}")
    return "beware", f"{name}: {'; '.join(shown)}" + (f" (judged: {judged})" if judged else "")


def _day(moment: str) -> str:
    """Return the date of an ISO 8601 time, as "24 Nov 2026"."""
    day = datetime.fromisoformat(moment)
    return f"{day.day} {day:%b %Y}"


def since(row: Row, rows: Sequence[Row], scope: str) -> tuple[str, str] | None:
    """Return ("since 24 Nov 2026", "fused +2%, within noise"): the change of a row's time from the
    newest earlier run that measured the same on the same machine. rows: of its group, whose
    unchanged ones are the control."""
    others = [
        other for other in rows if other.header.run_id == row.header.run_id and other is not row
    ]
    for earlier in row.earlier:
        runs = [(before, other) for other in others for before in other.earlier]
        pairs = [pair for pair in runs if pair[0].header.run_id == earlier.header.run_id]
        standing = control.standings([(earlier, row), *pairs], scope)[0]
        if standing.judged and not standing.beside_load and not groups.differences(earlier, row):
            word = standing.verdict
            if "uncontrolled" in standing.kinds:
                word = "unclear: separate runs"
            elif word in ("same", "unclear"):
                word = "within noise"
            over = " over the rows that did not change" if standing.control else ""
            change = f"{name_of(row)} {standing.judged.ratio - 1:+.0%}{over}, {word}"
            return f"since {_day(earlier.header.started)}", change
    return None


# Ratios.


def over_fastest(standing: Standing) -> str:
    """Return how a row stands against the fastest: ratio, batches and rounds, interval and
    verdict."""
    ratio = standing.ratio
    begin = f"{standing.row.name} {standing.scope} over {standing.baseline.name}'s"
    if ratio is None:
        return f"{begin}: no batch or round in common"
    batches = text.count(ratio.batches, "batch")
    here = ", in this run" if standing.paired else ""
    over = f"all batches of the file{here}, from {batches}" if ratio.of_file else f"{batches}{here}"
    parts = [f"{begin}: {text.number(ratio.ratio, 3)}x over {over}"]
    if ratio.low is None:
        parts.append("one round gives no interval")
    else:
        parts.append(
            f"95% interval over {len(ratio.new)} rounds {_span(ratio)}: {standing.verdict}"
        )
        if ratio.of_file:
            parts.append(
                f"{text.number(ratio.least, 3)} to {text.number(ratio.most, 3)} from batch to batch"
            )
        if standing.by_round:
            parts.append(
                f"round by round {', '.join(text.number(factor, 3) for factor in standing.by_round)}"
            )
    if not standing.paired:
        parts.append("rounds of different runs: measure both in one to be sure")
    return "; ".join(parts)


def drifting(standing: Standing, drift: Factor) -> str:
    return (
        f"{standing.row.name} {standing.scope}: its ratio changes by a factor of {text.number(drift.factor, 3)} "
        f"({text.interval(drift.low, drift.high)}) from the first round to the last: what holds "
        "in this run may not in another"
    )
