"""Judge a measured change: a verdict in one word and its reason in one sentence.  Takes numbers, returns text.

Verdicts on time: "faster", "slower", "same", "unclear", "other torch" or "beside load"; on memory: "less", "more",
"same" or "unclear"; on errors: "better", "worse", "same", "wrong" or "unclear".
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence, Tuple

from common.analysis import ratios
from common.analysis.ratios import Ratio
from common.core import statistics
from common.core.text import count
from common.records.schema import Correctness

MINIMUM_ROUNDS = 3
#: Share of samples beside other load from which on two separate runs cannot be compared.
BUSY_LIMIT = 0.1
#: The process's peak (VmHWM) differs by some percent between two runs of the same code.
PROCESS_TOLERANCE = 0.1
#: Rounding differs with the order of a sum: a change is another order of magnitude, well above float32's rounding.
ERROR_FACTOR, ERROR_FLOOR = 10.0, 1e-6
#: Of two losses, each under a torch of its own.
OTHER_TORCH = "other torch"
#: Of rounds beside so much other load that their times cannot be compared.
BESIDE_LOAD = "beside load"
#: In the place of a verdict, each with the reason why there is none.
WITHHELD = (OTHER_TORCH, BESIDE_LOAD)
CALM = "end what else runs and repeat"
_TRIED_ROUNDS = (3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100)

Judgement = Tuple[str, str]


class Margins(NamedTuple):
    """Hold how large a change must be to count.

    Attributes:
        tolerance: the largest change that does not matter, 0.02 for 2%.
        same: an interval wholly within this is "same"; at least the tolerance.
        confidence: of each interval, 0.95 for 95%.
    """

    tolerance: float
    same: float
    confidence: float


def time_doubt(ratio: Ratio, paired: bool, busy: Sequence[float]) -> str:
    """Return why a difference cannot be believed, whatever its interval is; "" where it can.

    busy: the shares of the samples of the baseline and of the new side that ran beside other load.
    """
    fewest = min(len(ratio.baseline), len(ratio.new))
    if fewest < MINIMUM_ROUNDS:
        return (
            f"{count(fewest, 'round')} on a side cannot tell a change from chance: take at least "
            f"{MINIMUM_ROUNDS}, better --rounds 10"
        )
    if paired:  # what disturbed a round met both sides, and what did not is in the interval
        return ""
    if max(busy) > BUSY_LIMIT:
        return f"{load(busy)}: {CALM}, or measure both in alternation (--rev)"
    if ratio.least is None:
        drift = max(_drift(ratio.baseline), _drift(ratio.new))
    else:  # rounds with batches of their own differ in length, so only their ratio can be seen to drift
        drift = _drift([after / before for before, after in zip(ratio.baseline, ratio.new)])
    if drift >= abs(math.log(ratio.ratio)):
        return (
            f"from its first to its last half one of the runs drifts by {math.expm1(drift):.1%}, as much as the two "
            "differ: repeat with more rounds, or measure both in alternation (--rev)"
        )
    return ""


def detectable(
    ratio: Ratio, paired: bool, tolerance: float, confidence: float, busy: Sequence[float]
) -> Optional[float]:
    """Return the slowdown that would have been detected (see ratios.detectable); None where none would."""
    if min(len(ratio.baseline), len(ratio.new)) < MINIMUM_ROUNDS or (not paired and max(busy) > BUSY_LIMIT):
        return None
    return ratios.detectable(ratio, tolerance, confidence)


def load(busy: Sequence[float]) -> str:
    return f"{busy[0]:.0%} of the baseline's samples and {busy[1]:.0%} of the new ones ran beside other load"


def _drift(rounds: Sequence[float]) -> float:
    """Return by how much the mean logarithm of a run's times differs between its first half and its last."""
    half = len(rounds) // 2
    logarithms = [math.log(time) for time in rounds]
    return abs(statistics.mean(logarithms[-half:]) - statistics.mean(logarithms[:half]))


def time(ratio: Ratio, paired: bool, margins: Margins, doubt: str, busy: Sequence[float] = (0.0, 0.0)) -> Judgement:
    """Return the verdict on a ratio of times, and its reason.

    "faster" or "slower": the whole interval is beyond the tolerance, and nothing raises a doubt.  "same": the whole
    interval is within ``margins.same``.  Else "unclear".  busy: as for ``time_doubt``, which decides whether it raises
    a doubt; the reason names it in any case.
    """
    verdict, reason = _verdict(ratio, paired, margins, doubt, busy)
    if paired and max(busy) > BUSY_LIMIT and load(busy) not in reason:
        reason += f"; {load(busy)}"
    return verdict, reason


def _verdict(ratio: Ratio, paired: bool, margins: Margins, doubt: str, busy: Sequence[float]) -> Judgement:
    tolerance = margins.tolerance
    difference = f"{abs(ratio.ratio - 1):.1%} {'more' if ratio.ratio > 1 else 'less'} time"
    if ratio.low is None or ratio.high is None or min(len(ratio.baseline), len(ratio.new)) < MINIMUM_ROUNDS:
        return "unclear", f"{difference}, but {doubt}"
    verdict = statistics.verdict(ratio.low, ratio.high, tolerance)
    if verdict == "unclear":
        verdict = statistics.verdict(ratio.low, ratio.high, margins.same)
    span = f"the interval, {_span(ratio.low, ratio.high)},"
    if verdict == "same" and doubt and not paired and max(busy) > BUSY_LIMIT:
        return "unclear", f"{difference}, but {doubt}"
    if verdict == "same":
        return verdict, f"{span} is within the {percent(margins.same)} that count as the same"
    if verdict == "unclear":
        advice = _advice(ratio, paired, margins)
        if max(busy) > BUSY_LIMIT:  # more rounds beside the same load are the second thing to try
            advice = f"{load(busy)}: {CALM}; with the spread as it is, {advice}"
        return verdict, f"{difference}, but {span} reaches over the tolerance of {percent(tolerance)}; {advice}"
    if doubt:
        return "unclear", f"{difference}, but {doubt}"
    return verdict, f"{difference}; {span} is beyond the tolerance of {percent(tolerance)}"


def _span(low: float, high: float) -> str:
    """Return an interval in percent, or in times the baseline where the percentages would have four digits or more."""
    return f"{low - 1:+.1%} to {high - 1:+.1%}" if high < 10 else f"{low:.3g} to {high:.4g} times the baseline"


def percent(fraction: float, digits: int = 3) -> str:
    """Return a share as "12.3%", rounded to `digits` digits; a larger number keeps all digits before the point."""
    value = 100 * fraction
    return f"{value:.0f}%" if abs(value) >= 10**digits else f"{value:.{digits}g}%"


def _advice(ratio: Ratio, paired: bool, margins: Margins) -> str:
    """Return how many rounds would give a clear verdict if the ratio and its spread stayed as they are."""
    rounds = min(len(ratio.baseline), len(ratio.new))
    spread = (ratio.error or 0.0) * math.sqrt(rounds)
    change = abs(math.log(ratio.ratio))
    away = max(change - math.log1p(margins.tolerance), math.log1p(margins.same) - change)

    def reach(tried: int) -> float:
        """Return half of the interval after that many rounds, in logarithms."""
        freedom = tried - 1 if paired else 2 * tried - 2
        return statistics.student_t(margins.confidence, freedom) * spread / math.sqrt(tried)

    for tried in _TRIED_ROUNDS:
        if tried > rounds and reach(tried) < away:
            return f"about {tried} rounds would tell"
    most = max(_TRIED_ROUNDS[-1], rounds)
    wide = reach(most) > math.log1p(margins.same)  # wider than what does not matter, wherever the ratio were
    why = "the spread between rounds is too large" if wide else "it is too close to the tolerance"
    return f"not even {most} rounds would tell: {why}"


def memory(ratio: float, counter: str, tolerance: float) -> Judgement:
    """Judge the peaks of one process on each side: allocators count exactly, the process's resident peak does not."""
    difference = f"{abs(ratio - 1):.1%} {'more' if ratio > 1 else 'less'} memory"
    if counter == "process":
        tolerance = max(tolerance, PROCESS_TOLERANCE)
        source = "the resident peak of one process each"
    else:
        source = "the allocator's own count"
    word = {"faster": "less", "slower": "more"}.get(statistics.verdict(ratio, ratio, tolerance), "same")
    if word == "same":
        return word, f"the ratio, {ratio:.3f}, is within {percent(tolerance)} ({source})"
    return word, f"{difference} ({source})"


def errors(baseline: Optional[Correctness], new: Optional[Correctness]) -> Judgement:
    """Judge two ``correctness`` records: errors against the float64 oracle."""
    for record, side in ((baseline, "the baseline"), (new, "the new side")):
        if record is None:
            return "unclear", f"{side} was not checked against the oracle (the correctness pass)"
    assert baseline is not None and new is not None
    if not new.ok:
        return "wrong", f"the new side is further from the oracle than {new.tolerance}"
    if not baseline.ok:
        return "better", f"the baseline is further from the oracle than {baseline.tolerance}, the new is not"
    words = []
    for key, name in (("loss_error", "loss"), ("grad_error", "gradient")):
        before, after = getattr(baseline, key), getattr(new, key)
        if before is None or after is None:
            continue
        if max(before, after) > ERROR_FLOOR and max(before, after) > ERROR_FACTOR * min(before, after):
            words.append(("worse" if after > before else "better", f"{name} error {before:.1e}, now {after:.1e}"))
    if not words:
        return "same", "both are right, with errors of the same order"
    kinds = {word for word, _ in words}
    return (kinds.pop() if len(kinds) == 1 else "unclear"), "; ".join(text for _, text in words) + " (both are right)"
