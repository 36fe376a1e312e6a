"""Pick the best rows of one configuration: the fastest loss, the smallest, the fastest approximation.

Times as in the tables (see standing.py): a loss is surely the fastest when every other under its torch is "slower".
Rows under another torch than most are ranked apart, and never picked.
Memory and largest batches are measured in one process and have no interval; there a margin decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from common.analysis.ratios import Ratio
from common.analysis.row import Row, search_of
from common.analysis.standing import stand, standings
from common.core.implementations import LATTICES
from common.present import slices

#: Peaks that differ by less count as equal: the two ways to measure them differ as much.
MEMORY_MARGIN = 0.02
#: Largest batches likewise: the search stops when it knows them to 5%.
SIZE_MARGIN = 0.05
#: Kinds of exact rows; None: not known, of traces alone.
EXACT = ("exact", None)
Kinds = Tuple[Optional[str], ...]


@dataclass(frozen=True)
class Pick:
    """Hold the best of some rows, and how sure that is.

    Attributes:
        row: the best.
        rivals: rows whose difference from it is not certain, the nearest first.
        next: the first rival, or else the first row that is worse.
        times: the ratio of `next` to the best, in time, peak or batch size.
        scope: whose times are compared.
        next_ratio: of times: the ratio of `next`, with its interval.
        over, memory: of an approximation: its time and its peak over those of the fastest exact row; None where the two
            have nothing in common.
        caveats: what to beware of in the best; None where no conformance matrix judged it.
        withheld: rounds of the best or of a rival ran beside so much other load that none is surely the fastest;
            `times` and the ratio are then None.
    """

    row: Row
    rivals: List[Row] = field(default_factory=list)
    next: Optional[Row] = None
    times: Optional[float] = None
    scope: str = "step"
    next_ratio: Optional[Ratio] = None
    over: Optional[Ratio] = None
    memory: Optional[float] = None
    caveats: Optional[List[str]] = None
    withheld: bool = False

    @property
    def sure(self) -> bool:
        return not self.rivals and not self.withheld


@dataclass(frozen=True)
class LogitsPick:
    """Hold the best exact loss of given logits: by the loss alone, and by the step of the losses that take logits (None
    where it was not measured)."""

    loss: Pick
    step: Optional[Pick]

    @property
    def withheld(self) -> bool:
        return self.loss.withheld or bool(self.step and self.step.withheld)

    @property
    def basis(self) -> str:
        """Return what decides: "both", or the scope in which one loss is surely the fastest that none surely beats in
        the other; "" where it is unclear."""
        if self.step is None:
            return "loss" if self.loss.sure else ""
        if self.loss.sure and self.step.sure:
            return "both" if self.loss.row is self.step.row else ""
        if self.step.sure and self.step.row in [self.loss.row, *self.loss.rivals]:
            return "step"
        if self.loss.sure and self.loss.row in [self.step.row, *self.step.rivals]:
            return "loss"
        return ""

    @property
    def row(self) -> Optional[Row]:
        """Return the loss to use; None where it is unclear."""
        if not self.basis:
            return None
        return self.step.row if self.basis == "step" and self.step else self.loss.row


class Verdict(NamedTuple):
    """Hold the pick for each question; None where there is no answer, or it was not measured."""

    fastest: Optional[Pick]
    logits: Optional[LogitsPick]
    smallest: Optional[Pick]
    approximate: Optional[Pick]


def of(rows: Sequence[Row], folders: Sequence[Path] = ()) -> Verdict:
    """Return the picks of rows of one group (see groups.py).  folders: where a conformance matrix may be, besides
    docs/."""
    quick, small, approximate = fastest(rows), smallest(rows), fastest(rows, ("pruned",))
    if approximate:
        approximate = replace(approximate, caveats=slices.caveats(approximate.row.loss, folders))
    if approximate and quick:
        over = over_other(approximate.row, quick.row, approximate.scope)
        peaks = approximate.row.peak_mb, quick.row.peak_mb
        approximate = replace(approximate, over=over, memory=peaks[0] / peaks[1] if peaks[0] and peaks[1] else None)
    if quick:
        quick = replace(quick, caveats=slices.caveats(quick.row.loss, folders))
    return Verdict(quick, given_logits(rows), small, approximate)


def fastest(rows: Sequence[Row], kinds: Optional[Kinds] = None) -> Optional[Pick]:
    """Return the fastest of the rows of these kinds by the step, or by the loss where no step was timed; None where
    nothing was."""
    rows = _ok(rows, kinds)
    return by_time(rows, "step") or by_time(rows, "loss")


def given_logits(rows: Sequence[Row]) -> Optional[LogitsPick]:
    """Return the pick of the exact rows that take logits; None where no loss was timed alone."""
    taking = [row for row in _ok(rows) if row.loss_alone.ms]
    loss = by_time(taking, "loss")
    return LogitsPick(loss, by_time(taking, "step")) if loss else None


def over_other(row: Row, other: Row, scope: str) -> Optional[Ratio]:
    """Return a row's time over that of a row of another kind; None where the two have none in common, or ran beside
    other load."""
    standing = stand(row, other, scope)
    return None if standing.beside_load else standing.ratio


def by_time(rows: Sequence[Row], scope: str) -> Optional[Pick]:
    """Return the fastest of these rows in a scope; None where none was timed."""
    every = standings([row for row in rows if not row.under], scope)
    if not every:
        return None
    best, known = every[0], [standing for standing in every[1:] if standing.ratio]
    rivals = [standing for standing in known if standing.may_be_as_fast]
    if not best.beside_load and not rivals:  # none follows by a ratio that other load made
        known = [standing for standing in known if not standing.beside_load]
    following = next(iter(rivals or known), None)
    ratio = following.ratio if following and not best.beside_load else None
    return Pick(
        best.row,
        [standing.row for standing in rivals],
        following.row if following else None,
        ratio.ratio if ratio else None,
        scope,
        ratio,
        withheld=best.beside_load,
    )


def smallest(rows: Sequence[Row], kinds: Optional[Kinds] = None) -> Optional[Pick]:
    """Return the pick of the loss with the lowest peak, each by its highest over the batches."""
    return _by_size([(row, peak) for row in _ok(rows, kinds) if (peak := row.peak_mb)], MEMORY_MARGIN)


def largest(rows: Sequence[Row], kinds: Optional[Kinds] = None) -> Optional[Pick]:
    """Return the row of --find-largest with the largest batch; None where none was found."""
    sizes = [(row, search_of(row).size) for row in _ok(rows, kinds)]
    return _by_size([(row, size) for row, size in sizes if size], SIZE_MARGIN, most=True)


def ranked_kinds(rows: Sequence[Row]) -> Kinds:
    """Return the kinds whose fastest a verdict names: the exact losses, or the losses of the rows' one lattice where
    none is on the transducer's."""
    kinds = {row.kind for row in rows if row.is_comparable and not row.under}
    lattices = kinds.intersection(LATTICES)
    return EXACT if kinds.intersection(EXACT) or len(lattices) != 1 else tuple(lattices)


def _ok(rows: Sequence[Row], kinds: Optional[Kinds] = None) -> List[Row]:
    """Return the comparable rows of these kinds under the torch of most; None: those of `ranked_kinds`."""
    kinds = ranked_kinds(rows) if kinds is None else kinds
    return [row for row in rows if row.is_comparable and row.kind in kinds and not row.under]


def _by_size(sizes: List[Tuple[Row, float]], margin: float, most: bool = False) -> Optional[Pick]:
    """Return the pick of the smallest value, or with `most` of the largest."""
    if not sizes:
        return None
    (best, size), *others = sorted(sizes, key=lambda each: -each[1] if most else each[1])
    rivals = [row for row, other in others if max(size, other) / min(size, other) <= 1 + margin]
    return Pick(best, rivals, *((others[0][0], others[0][1] / size) if others else ()))
