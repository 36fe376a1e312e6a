"""Pick the best rows of one configuration (the fastest, the smallest, the fastest approximation),
and put the picks in sentences.

Times are judged as in tables (see standing.py): a loss is surely the fastest when every other under
its torch is "slower". Memory is measured in one process and has no interval, so a margin
decides."""

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

#: Peaks that differ by less than this share count as equal, since the two ways to measure them
#: differ as much.
MEMORY_MARGIN = 0.02
#: Kinds of exact rows; None is that of traces without records.
EXACT = ("exact", None)


@dataclass(frozen=True)
class Pick:
    """Hold the best of some rows, and how sure that is.

    Attributes:
        row: the best
        rivals: rows that may be as good, the nearest first
        next: the first rival, or where there is none the best of the other rows
        factor: the time of `next` over that of `row`; where `row` is the smallest, the peak of
            `next` over that of `row`; None where nothing can be compared
        scope: "step" or "loss", whose times are compared
        next_ratio: the ratio of these times with its interval; None where peaks are compared
        next_time: where peaks are compared, the time of a step of `next` over that of `row`; else
            None
        time_over_exact: ratio of an approximation's time to that of the fastest exact row
        peak_over_exact: ratio of an approximation's peak to that of the fastest exact row
        judged: what the conformance matrix says of its loss; None where it says nothing
        withheld: why there is no answer, which is other load; else ""
    """

    row: Row
    rivals: list[Row] = field(default_factory=list)
    next: Row | None = None
    factor: float | None = None
    scope: str = "step"
    next_ratio: Ratio | None = None
    next_time: float | None = None
    time_over_exact: Ratio | None = None
    peak_over_exact: float | None = None
    judged: parts.Judged | None = None
    withheld: str = ""

    @property
    def sure(self) -> bool:
        """Tell whether no other row may be as good, and the answer is not withheld."""
        return not self.rivals and not self.withheld


class LogitsPick(NamedTuple):
    """Hold the best of the exact losses that take logits.

    Attributes:
        loss: the best by the loss alone
        step: the best by the step, which a training pays for
        best: the answer: `step`, or `loss` where the step leaves open which is the fastest; None
            where that is unclear too
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
    """Return the picks of rows of one group. The fastest approximation also has `time_over_exact`,
    unless other load distorts it, and `peak_over_exact` if both peaks are known.

    folders: where a conformance matrix may be, besides docs/
    """
    exact = fastest(rows)
    approximate = fastest(rows, ("pruned",))
    if approximate and exact:
        standing = stand(approximate.row, exact.row, approximate.scope)
        if not standing.beside_load:
            approximate = replace(approximate, time_over_exact=standing.ratio)
        if approximate.row.peak_mb and exact.row.peak_mb:
            peak_over_exact = approximate.row.peak_mb / exact.row.peak_mb
            approximate = replace(approximate, peak_over_exact=peak_over_exact)
    return Picks(
        with_judgement(exact, folders),
        given_logits(rows),
        smallest(rows),
        with_judgement(approximate, folders),
    )


def with_judgement(pick: Pick | None, folders: Sequence[Path]) -> Pick | None:
    """Return the pick with what the conformance matrix says of its loss."""
    return pick and replace(pick, judged=parts.judged(pick.row.loss, folders))


def fastest(rows: Sequence[Row], kinds: Sequence[str | None] | None = None) -> Pick | None:
    """Return the fastest row by the step, or by the loss where no step was timed; None without
    times.

    kinds: those to choose from; None means those of `ranked_kinds`
    """
    rows = _ok(rows, kinds)
    return by_time(rows, "step") or by_time(rows, "loss")


def given_logits(rows: Sequence[Row]) -> LogitsPick | None:
    """Return the best of the exact rows whose loss was timed alone, those that take logits.

    None where no loss was timed alone.  The answer is the fastest by the step, if that is sure;
    else the fastest by the loss alone, if that is sure and may also be the fastest by the step."""
    with_logits = [row for row in _ok(rows) if row.loss_alone.ms]
    loss = by_time(with_logits, "loss")
    step = by_time(with_logits, "step")
    if loss is None:
        return None
    if loss.withheld or (step and step.withheld):
        best = None
    elif step and step.sure:
        best = step
    elif loss.sure and (step is None or loss.row in [step.row, *step.rivals]):
        best = loss
    else:
        best = None
    return LogitsPick(loss, step, best)


def by_time(rows: Sequence[Row], scope: str) -> Pick | None:
    """Return the fastest row by a scope, with its rivals; None without times of this scope.

    The pick is withheld where other load may have changed which row is the fastest."""
    ranked = standings(rows, scope)
    if not ranked:
        return None
    best = ranked[0]
    others = [standing for standing in ranked[1:] if standing.ratio]
    rivals = [standing for standing in others if standing.may_be_as_fast]
    # A row beside other load comes next only where the pick is withheld: then `factor` is None.
    following = rivals or [other for other in others if best.beside_load or not other.beside_load]
    second = following[0] if following else None
    ratio = second.ratio if second and not best.beside_load else None
    return Pick(
        best.row,
        rivals=[standing.row for standing in rivals],
        next=second.row if second else None,
        factor=ratio.ratio if ratio else None,
        scope=scope,
        next_ratio=ratio,
        withheld=doubts.WITHHELD if best.beside_load else "",
    )


def smallest(rows: Sequence[Row]) -> Pick | None:
    """Return the row with the smallest peak, of the kinds of `ranked_kinds`; None where no peak was
    measured.

    Where these kinds are the exact ones, losses that work on one utterance at a time count too:
    they are exact, but slower."""
    kinds = ranked_kinds(rows)
    if kinds == EXACT:
        kinds = (*kinds, implementations.BY_UTTERANCE)
    peaks = {row: row.peak_mb for row in _ok(rows, kinds) if row.peak_mb}
    if not peaks:
        return None
    best, *others = sorted(peaks, key=peaks.__getitem__)
    if not others:
        return Pick(best)
    factors = {row: peaks[row] / peaks[best] for row in others}
    rivals = [row for row, factor in factors.items() if factor <= 1 + MEMORY_MARGIN]
    second = others[0]
    standing = stand(second, best, "step")  # its factor is the time of `second` over that of `best`
    next_time = None if standing.beside_load else standing.factor
    return Pick(best, rivals, next=second, factor=factors[second], next_time=next_time)


def ranked_kinds(rows: Sequence[Row]) -> Sequence[str | None]:
    """Return the kinds that a verdict chooses from: EXACT.

    If no comparable row is of these kinds, and the rows have only one kind of LATTICES, return that
    kind alone."""
    kinds = {row.kind for row in rows if row.is_comparable and not row.other_torch}
    lattices = kinds.intersection(implementations.LATTICES)
    if not kinds.intersection(EXACT) and len(lattices) == 1:
        return tuple(lattices)
    return EXACT


def _ok(rows: Sequence[Row], kinds: Sequence[str | None] | None = None) -> list[Row]:
    """Return the comparable rows of some kinds, without rows under another torch than most have.

    kinds: None means those of `ranked_kinds`
    """
    kinds = ranked_kinds(rows) if kinds is None else kinds
    return [row for row in rows if row.is_comparable and row.kind in kinds and not row.other_torch]


# In sentences.

#: A sentence without its full stop: texts, and links to the files that its numbers are from.
Sentence = list[str | parts.Link]

#: A verdict names so many caveats of a loss, and counts the others.
MOST_CAVEATS = 4
#: Kind of logits -> a description, for those whose name says too little.
LOGITS = {
    "peaky": "peaky logits (made, sharper than a trained model's)",  # of earlier runs
    "early": "logits of a small model's first steps",
    "middle": "logits of a small model on the way through its training",
    "trained": "logits of a small trained model",
}


class Measure(NamedTuple):
    """Hold what rows are compared by.  shown: returns a row's value as text; noun: names the value,
    as "the time"."""

    shown: Callable[[Row], str]
    noun: str


def time_of(scope: str) -> Measure:
    """Return the measure of the time of "step" or "loss"."""
    return Measure(lambda row: f"{text.number(row.median_ms(scope))} ms a {scope}", "the time")


PEAK = Measure(lambda row: f"{text.number(row.peak_mb)} MB", "the peak")


def name_of(row: Row) -> str:
    """Return how sentences name a row: its label, or its name before it got one."""
    return row.label or text.plain(row.name)


def linked(row: Row, measure: Measure) -> parts.Link:
    """Return a row's value as a link to its records."""
    return parts.Link(measure.shown(row), row.results)


# Picks.


def headline(pick: Pick, small: Pick | None = None) -> str:
    """Return the advice in one sentence, "Use k2: 2.1x faster (2.0 to 2.2) than the next exact
    loss". If there is no advice, the sentence says why.

    Args:
        pick: of the fastest row
        small: of the row with the smallest peak; if given, the sentence also compares the peaks
    """
    if pick.withheld:
        return "No answer yet: samples ran beside other load"
    if not pick.sure:
        return f"{either([name_of(row) for row in [pick.row, *pick.rivals]])}: too close to tell"
    name = doubts.with_mark(name_of(pick.row), pick.row, "above limit")
    if pick.next is None or pick.factor is None:
        return f"Use {name}, the only exact loss that was compared"
    span = _span(pick.next_ratio, digits=2)
    faster = f"{text.number(pick.factor, 2)}x faster" + (f" ({span})" if span else "")
    memory = _headline_memory(pick, small) if small else ""
    return f"Use {name}: {faster} than the next exact loss{memory}"


def _headline_memory(pick: Pick, small: Pick) -> str:
    """Return how the peak of the fastest row compares with that of the smallest, as the end of a
    sentence. If the fastest row is itself the smallest, its peak is compared with the next one.

    Returns "" where the two may be equally small, or a peak is not known."""
    row = pick.row
    if row is small.row:
        if not small.sure or small.next is None:
            return ""
        return f" and {text.number(small.factor, 2)}x smaller than {name_of(small.next)}"
    if row in small.rivals or not (row.peak_mb and small.row.peak_mb):
        return ""
    factor = row.peak_mb / small.row.peak_mb
    return f", with {text.number(factor, 2)}x the peak of {name_of(small.row)}"


def _span(ratio: Ratio | None, digits: int = 3) -> str:
    """Return the interval of a ratio as text; "" where it has none."""
    return text.interval(ratio.low, ratio.high, digits) if ratio else ""


#: A headline or the answer of a card names so many rows, and counts the others. If only one is left
#: over, it is named too.
NAMED = 3


def either(names: Sequence[str]) -> str:
    """Return "a, b or c"; for more than four names "a, b, c or 2 more"."""
    shown = list(names)
    if len(names) > NAMED + 1:
        shown = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return _listed(shown, " or ")


def _listed(items: Sequence[str], last: str) -> str:
    """Return the items with commas between them, and `last` before the last one."""
    return last.join(filter(None, [", ".join(items[:-1]), items[-1]]))


def against_next(pick: Pick, measure: Measure) -> Sentence:
    """Return the value of the best row, and by which factor the next row is behind: "25.0 ms a
    step; next is b at 1.67x the time". If the best row has rivals, the sentence says that the next
    is too close to tell.

    measure: what is compared, such as PEAK
    """
    best = linked(pick.row, measure)
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
    further = pick.rivals[1:]  # the first rival is `next`
    verb = f"and {len(further)} more are" if further else "is"
    advice = ""
    if pick.next_ratio and not span:
        advice = "; one round gives no interval: use --rounds 3 or more"
    return [best, f"; {behind} {verb} too close to tell{advice}"]


def named(pick: Pick, measure: Measure) -> Sentence:
    """Return the best row's name, its value and how far the next is."""
    return [f"{name_of(pick.row)}, ", *against_next(pick, measure)]


def answer(pick: Pick, measure: Measure) -> Sentence:
    """Return the pick as a sentence, which says where it is unclear or withheld."""
    if pick.withheld:
        return [pick.withheld]
    return named(pick, measure) if pick.sure else ["unclear: ", *named(pick, measure)]


def products_answer(pick: Pick, rows: Sequence[Row]) -> str:
    """Return a sentence on the loss next to the fastest: the ratio of their times, how much of it
    comes from torch's slow products, and the ratio without these. Return "" where that is not
    known: without rows under FAST_MKL, or beside other load.

    "optimized_transducer: 3.3x here, of which 1.9x are torch's slow products on this CPU; 1.7x
    without them (1.6 to 1.8)"

    The next loss is the fastest of those that were also timed with fast products. The part of the
    slow products is the ratio here over the ratio without them, so that the factors multiply.

    pick: the fastest of `rows`
    """
    # Rows of another kind or torch are ranked against a fastest row of their own, not against
    # `pick.row`.
    controlled = [
        row
        for row in _ok(rows)
        if row.with_fast_products and row.against_fastest.baseline is pick.row
    ]
    if pick.withheld or not controlled:
        return ""
    row = min(controlled, key=lambda row: row.over_fastest or math.inf)
    here: Standing = row.against_fastest
    without: Standing = row.with_fast_products
    if here.beside_load or without.beside_load or not (here.factor and without.factor):
        return ""
    slowed = ""
    if here.factor > without.factor:
        share = text.number(here.factor / without.factor, 2)
        slowed = f", of which {share}x are torch's slow products on this CPU"
    # `judged` is the plain ratio here, as `factor` is: no unchanged rows correct this standing.
    span = _span(without.judged, digits=2)
    return (
        f"{name_of(row)}: {text.number(here.factor, 2)}x here{slowed}; "
        f"{text.number(without.factor, 2)}x without them" + (f" ({span})" if span else "")
    )


def logits_answer(picks: LogitsPick) -> Sentence:
    """Return a sentence on the best of the losses that take logits: by the step, and by the loss
    alone.  Without times of steps, it is by the loss alone.

    The step comes first, unless `best` is by the loss, as the step leaves the fastest open."""
    loss, step, best = picks
    by_loss = answer(loss, time_of("loss"))
    if step is None:
        return by_loss
    if loss.withheld or step.withheld:
        return [doubts.WITHHELD]
    by_step = answer(step, time_of("step"))
    if best is loss:
        return [*by_loss, "; by the step ", *by_step]
    if best is step and loss.sure and loss.row is step.row:
        return [*by_step, "; its loss is the fastest too"]
    return [*by_step, "; by the loss alone ", *by_loss]


def approximate_answer(pick: Pick) -> Sentence:
    """Return "k2-pruned, 0.5x the time and 0.1x the peak of the fastest exact loss; its loss is off
    by 3%", as far as that is known."""
    if pick.withheld:
        return [pick.withheld]
    ratios = []
    if pick.time_over_exact:
        ratios.append(f"{text.number(pick.time_over_exact.ratio, 2)}x the time")
    if pick.peak_over_exact:
        ratios.append(f"{text.number(pick.peak_over_exact, 2)}x the peak")
    facts = []
    if ratios:
        facts.append(f"{' and '.join(ratios)} of the fastest exact loss")
    off = accuracy(pick.row)
    if off:
        facts.append(f"its loss is {off}")
    name = name_of(pick.row)
    return [f"{name}, {'; '.join(facts)}" if facts else name]


def accuracy(row: Row) -> str:
    """Return how far an approximate loss is from the exact one, by kind of logits: "off by 3% on
    random logits, which does not bound it in training".

    Return "off by 3%" if no kind of logits is recorded, and "" if this was not measured.
    """
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


def memory_answer(row: Row, smallest: Pick | None) -> Sentence:
    """Return the peak memory of a row, and how it compares with the smallest peak.

    For the smallest: "5 MB, the smallest; next is b at 2x the peak". For it and its rivals: "5 MB,
    as small as any". For the other rows: "9 MB, 1.8x the peak of a (5 MB)".

    smallest: the row with the smallest peak, and its rivals; None: only the peak is returned."""
    if row.peak_mb is None:
        return ["not measured"]
    peak = linked(row, PEAK)
    if smallest is None:
        return [peak]
    least = smallest.row
    if row not in [least, *smallest.rivals]:
        if not least.peak_mb:
            return [peak]
        factor = text.number(row.peak_mb / least.peak_mb, 3)
        return [peak, f", {factor}x the peak of {name_of(least)} (", linked(least, PEAK), ")"]
    if not smallest.sure:
        return [peak, ", as small as any"]
    # `against_next` begins with the smallest peak.  It is left out: `peak` stands before it.
    following = against_next(smallest, PEAK)[1:] if smallest.next else []
    return [peak, ", the smallest", *following]


def cautions(pick: Pick) -> tuple[str, str]:
    """Return (title, sentence) on what may go wrong with the best row: doubts about its numbers,
    and what the conformance matrix found. The title is "beware" if there is any, else "corners"."""
    name = pick.row.name
    check = f"{command('check')} --only {name}"
    caveats = [
        doubt.words for doubt in doubts.doubts(pick.row) if doubt.kind in ("above limit", "coarse")
    ]
    if not (pick.judged or caveats):
        return "corners", f"{name} was not judged yet: {check}"
    judged = ""  # "1.2 on 24 Nov 2026", or "" if it was not judged
    if pick.judged:
        caveats += pick.judged.caveats
        judged = f"{pick.judged.version} on {_day(pick.judged.day)}".strip()
        version = pick.row.environment.implementation_version or ""
        if version_numbers(pick.judged.version) < version_numbers(version):
            judged += f", which is older than this package ({version.partition('+')[0]}): {check}"
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


def change_since(row: Row, rows: Sequence[Row], scope: str) -> tuple[str, str] | None:
    """Return ("since 24 Nov 2026", "fused +2%, within noise"): how a row's time changed from the
    newest earlier run that measured the same on the same machine; None without such a run.

    Earlier runs that have no ratio to this one, or too few rounds without other load, are skipped.

    rows: all rows of this row's group; those whose code did not change are the control
    """
    of_run = [other for other in rows if other.header.run_id == row.header.run_id]
    for earlier in row.earlier:
        # The other rows that both runs measured: their standings make the control of the first.
        pairs = [
            (before, other)
            for other in of_run
            for before in other.earlier
            if other is not row and before.header.run_id == earlier.header.run_id
        ]
        standing, *_ = control.standings([(earlier, row), *pairs], scope)
        if not standing.judged or standing.beside_load or groups.differences(earlier, row):
            continue
        word = standing.verdict
        if "uncontrolled" in standing.kinds:  # the machine's day may explain all of the change
            word = "unclear: separate runs"
        elif word in ("same", "unclear"):
            word = "within noise"
        over = " over the rows that did not change" if standing.control else ""
        change = f"{name_of(row)} {standing.judged.ratio - 1:+.0%}{over}, {word}"
        return f"since {_day(earlier.header.started)}", change
    return None


# Ratios.


def ratio_remark(standing: Standing) -> str:
    """Return how a row stands against the fastest: ratio, batches, rounds, interval and verdict."""
    ratio = standing.ratio
    begin = f"{standing.row.name} {standing.scope} over {standing.baseline.name}'s"
    if ratio is None:
        return f"{begin}: no batch or round in common"
    batches = text.count(ratio.batches, "batch")
    here = ", in this run" if standing.paired else ""
    # A ratio `of_file` is extrapolated to all batches of the shape file from those measured.
    over = f"all batches of the file{here}, from {batches}" if ratio.of_file else f"{batches}{here}"
    facts = [f"{begin}: {text.number(ratio.ratio, 3)}x over {over}"]
    if ratio.low is None:  # a standard error needs two rounds
        facts.append("one round gives no interval")
    else:
        rounds = len(ratio.new)
        facts.append(f"95% interval over {rounds} rounds {_span(ratio)}: {standing.verdict}")
        if ratio.of_file:
            least, most = text.number(ratio.least, 3), text.number(ratio.most, 3)
            facts.append(f"{least} to {most} from batch to batch")
        if standing.by_round:
            factors = ", ".join(text.number(factor, 3) for factor in standing.by_round)
            facts.append(f"round by round {factors}")
    if not standing.paired:
        facts.append("rounds of different runs: measure both in one to be sure")
    return "; ".join(facts)


def drift_remark(standing: Standing, drift: Factor) -> str:
    """Return a sentence on a ratio that changes from the first round to the last.

    drift: the factor of that change, with its interval
    """
    return (
        f"{standing.row.name} {standing.scope}: its ratio changes by a factor of {text.number(drift.factor, 3)} "
        f"({text.interval(drift.low, drift.high)}) from the first round to the last: what holds "
        "in this run may not in another"
    )
