"""Put verdicts in words, the same on the screen, on the page, in its headline and in the remarks below tables.

A sentence is a list of texts and of links to the files that its numbers are from; the screen shows its words alone (see
present.table).  Sentences have no full stop at their end.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from common.analysis import metrics
from common.analysis.ratios import Drift, Ratio
from common.analysis.row import Row, gaps, search_of
from common.analysis.standing import Standing
from common.analysis.verdict import MEMORY_MARGIN, LogitsPick, Pick
from common.core.text import number, plain
from common.present.table import Link

Words = List[Union[str, Link]]

#: In the place of a winner, where other load may have made it one.
WITHHELD = "withheld: samples ran beside other load; measure again when the machine is quiet"
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
    """Hold what rows are compared by.  shown: returns a row's value in words; noun: of what a ratio is."""

    shown: Callable[[Row], str]
    noun: str


def time_of(scope: str) -> Measure:
    """Return the measure of the times of a scope, "step" or "loss"."""
    return Measure(lambda row: f"{number(row.median_ms(scope))} ms a {scope}", "the time")


def _largest(row: Row) -> str:
    unit = "frames" if search_of(row).of == "max-frames" else "utterances"
    return plain(f"{metrics.largest(row)} {unit}")


PEAK = Measure(lambda row: f"{number(row.peak_mb)} MB", "the peak")
SIZE = Measure(_largest, "the size")


def name_of(row: Row) -> str:
    """Return the row's label, which is unique in its group, or its name where it has no label."""
    return row.label or plain(row.name)


def value(row: Row, measure: Measure) -> Link:
    """Return a row's value with a link to its records."""
    return Link(measure.shown(row), row.results)


def interval(ratio: Optional[Ratio]) -> str:
    """Return " (95% interval 1.50 to 1.80)"; empty where there is none."""
    if ratio is None or ratio.low is None:
        return ""
    return f" (95% interval {number(ratio.low, 3)} to {number(ratio.high, 3)})"


# Picks.


def headline(pick: Pick) -> str:
    """Return the answer as one line: "Use a: 1.8x faster (1.5 to 2.1) and 74x smaller than the next exact loss"."""
    if pick.withheld:
        return "No answer yet: samples ran beside other load"
    if not pick.sure:
        names = [name_of(row) for row in [pick.row, *pick.rivals]]
        return f"{either(names)}: too close to tell"
    name = name_of(pick.row)
    if pick.next is None or pick.times is None:
        return f"Use {name}, the only exact loss that was compared"
    ratio = pick.next_ratio
    span = "" if ratio is None or ratio.low is None else f" ({number(ratio.low, 2)} to {number(ratio.high, 2)})"
    faster = f"{number(pick.times, 2)}x faster{span}"
    mine, other = pick.row.peak_mb, pick.next.peak_mb
    times = other / mine if mine and other else 1.0
    if times > 1 + MEMORY_MARGIN:
        return f"Use {name}: {faster} and {number(times, 2)}x smaller than the next exact loss"
    larger = f", with {number(1 / times, 2)}x its memory" if 1 / times > 1 + MEMORY_MARGIN else ""
    return f"Use {name}: {faster} than the next exact loss{larger}"


#: Names in a headline and in the answer of a card.
NAMED = 3


def either(names: Sequence[str]) -> str:
    """Return "a, b or c"; for more than four names "a, b, c or 2 more"."""
    shown = list(names) if len(names) <= NAMED + 1 else [*names[:NAMED], f"{len(names) - NAMED} more"]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def against_next(pick: Pick, measure: Measure) -> Words:
    """Return the value of the best row and how far behind the next is: "25.0 ms a step; next is b at 1.67x the
    time"."""
    best = value(pick.row, measure)
    if pick.withheld:
        return [WITHHELD]
    if pick.next is None:
        return [best, "; the only one measured"]
    ratio, following = pick.next_ratio, name_of(pick.next)
    behind = f"{following} at {number(pick.times, 3)}x {measure.noun}{interval(ratio)}"
    if pick.sure:
        return [best, f"; next is {behind}"]
    others = len(pick.rivals) - 1
    if others > 0:
        behind += f" and {others} more are"
    else:
        behind += " is"
    advice = "; one round gives no interval: use --rounds 3 or more" if ratio and ratio.low is None else ""
    return [best, f"; {behind} too close to tell{advice}"]


def named(pick: Pick, measure: Measure) -> Words:
    """Return `against_next` with the name of the best row before it: "a, 25.0 ms a step; next is b at 1.67x the
    time"."""
    return [f"{name_of(pick.row)}, ", *against_next(pick, measure)]


def answer(pick: Pick, measure: Measure) -> Words:
    """Return `named`, with "unclear: " before it where others may be as good."""
    if pick.withheld:
        return [WITHHELD]
    return named(pick, measure) if pick.sure else ["unclear: ", *named(pick, measure)]


def given_logits(pick: LogitsPick) -> Words:
    """Return the best exact loss of given logits, the reason for it, and what the other scope shows."""
    if pick.withheld:
        return [WITHHELD]
    by_loss = answer(pick.loss, time_of("loss"))
    by_step: Words = answer(pick.step, time_of("step")) if pick.step else ["not measured"]
    if pick.basis == "both":
        return [*by_loss, "; its step is the fastest too"]
    if pick.basis == "loss":
        return [*by_loss, ". Ranked by the loss alone; by the step ", *by_step]
    if pick.basis == "step":
        return [*by_step, ". Ranked by the step; by the loss alone ", *by_loss]
    return ["unclear: by the loss alone ", *named(pick.loss, time_of("loss")), "; by the step ", *by_step]


def approximate(pick: Pick) -> Words:
    """Return the time and the peak of an approximation over those of the fastest exact loss, and its error."""
    if pick.withheld:
        return [WITHHELD]
    ratios = []
    if pick.over:
        ratios.append(f"{number(pick.over.ratio, 2)}x the time")
    if pick.memory:
        ratios.append(f"{number(pick.memory, 2)}x the peak")
    parts = [f"{' and '.join(ratios)} of the fastest exact loss"] if ratios else []
    off = accuracy(pick.row)
    parts += [f"its loss is {off}"] if off else []
    return [f"{name_of(pick.row)}, {'; '.join(parts)}" if parts else name_of(pick.row)]


def accuracy(row: Row) -> str:
    """Return "off by 3% on random logits, which does not bound it in training"; "" where it was not measured."""
    known = gaps(row.checked)
    if known:
        off = [f"{_percent(gap)} on {LOGITS.get(kind, f'{kind} logits')}" for kind, gap in known.items()]
        listed = " and ".join([", ".join(off[:-1]), off[-1]] if off[1:] else off)
        return f"off by {listed}, which does not bound it in training"
    gap = row.checked.approximation_gap
    return "" if gap is None else f"off by {_percent(gap)}"


def _percent(gap: float) -> str:
    """Return a share in two digits, as "3%" or "0.15%"; "less than 0.001%" below that."""
    return f"{100 * abs(gap):.2g}%" if gap == 0 or abs(gap) >= 1e-5 else "less than 0.001%"


def memory(row: Row, smallest: Optional[Pick]) -> Words:
    """Return the peak of a row beside the smallest peak of all rows."""
    if row.peak_mb is None:
        return ["not measured"]
    peak = value(row, PEAK)
    if smallest is None or smallest.row.peak_mb is None:
        return [peak]
    if smallest.row is row and smallest.sure:
        return [peak, ", the smallest"]
    if smallest.row is row or row in smallest.rivals:
        return [peak, ", as small as any"]
    least = smallest.row
    times = number(row.peak_mb / least.peak_mb, 3) if least.peak_mb else "-"
    return [peak, f", {times}x the peak of {name_of(least)} (", value(least, PEAK), ")"]


def corners(pick: Pick) -> Tuple[str, str]:
    """Return ("beware" or "corners", what the conformance matrix says of the best row)."""
    name = pick.row.name
    if pick.caveats is None:
        return "corners", f"{name} was not judged yet: ./rnnt-bench check --only {name}"
    if not pick.caveats:
        return "corners", f"rnnt-bench check found nothing wrong with {name}"
    others = len(pick.caveats) - MOST_CAVEATS
    shown = list(pick.caveats[:MOST_CAVEATS])
    if others > 0:
        shown.append(f"{others} more: ./rnnt-bench check --only {name}")
    return "beware", f"{name}: {'; '.join(shown)}"


# Ratios.


def over_fastest(standing: Standing) -> str:
    """Return how a row stands against the fastest: the ratio, its batches and rounds, the interval and the verdict."""
    row, ratio = standing.row, standing.ratio
    begin = f"{row.name} {standing.scope} over {standing.baseline.name}'s"
    if ratio is None:
        return f"{begin}: no batch or round in common"
    apart = "" if standing.paired else "; rounds of different runs: measure both in one to be sure"
    return f"{begin}: {_ratio(standing, ratio)}{apart}"


def _ratio(standing: Standing, ratio: Ratio) -> str:
    batches = "1 batch" if ratio.batches == 1 else f"{ratio.batches} batches"
    here = ", in this run" if standing.paired else ""
    over = f"all batches of the file{here}, from {batches}" if ratio.of_file else f"{batches}{here}"
    words = f"{number(ratio.ratio, 3)}x over {over}; "
    if ratio.low is None:
        return f"{words}one round gives no interval"
    words += f"95% interval over {len(ratio.new)} rounds {number(ratio.low, 3)} to {number(ratio.high, 3)}"
    words += f": {standing.verdict}"
    if ratio.of_file:
        words += f"; {number(ratio.least, 3)} to {number(ratio.most, 3)} from batch to batch"
    if standing.by_round:
        words += f"; round by round {', '.join(number(each, 3) for each in standing.by_round)}"
    return words


def drifting(standing: Standing, drift: Drift) -> str:
    """Return a sentence on a row whose ratio changes along the rounds, with the factor."""
    return (
        f"{standing.row.name} {standing.scope}: its ratio changes by a factor of {number(drift.factor, 3)} "
        f"({number(drift.low, 3)} to {number(drift.high, 3)}) from the first round to the last: what holds in this run "
        "may not in another"
    )
