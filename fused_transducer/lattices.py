"""The lattices of the transducer family: the arcs that leave a cell (t, u), and the outputs that
they take.

A *part* of a cell is the log-probability of one output. Part 0 is of the blank, part 1 of the next
target. The others are of the further columns of the output layer (durations, or longer blanks), in
their order. The log-weight of an arc is a sum of parts and a constant. The backends store the
parts, walk along the arcs, and replace each part by its posterior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple, Tuple

#: The names that the option `topology` takes; the number of each is its place.
TOPOLOGIES = (
    "regular",
    "modified",
    "modified-last-blank",
    "constrained",
    "tdt",
    "multi-blank",
    "hat",
)
#: Topologies whose output layer has further columns, one for each of `durations`.
WITH_DURATIONS = ("tdt", "multi-blank")
#: Topologies with the usual arcs: to (t+1, u) by the blank and to (t, u+1) by the label.
REGULAR_ARCS = ("regular", "hat")
#: Topologies with one softmax over the symbols, whose labels can be smoothed.
SMOOTHABLE = ("regular", "modified", "modified-last-blank", "constrained")
#: Topologies in which an arc of a blank and an arc of a label share a part.
MIXED = ("tdt", "constrained")
#: Topology whose outputs are not all in one softmax -> the number of its kind in csrc/problem.h and
#: kernels.py.
NORMALISERS = {"tdt": 1, "hat": 2}
#: Most frames that an arc may go ahead.
LONGEST = 2**15


class Arc(NamedTuple):
    """Describe an arc that leaves every cell.

    Attributes:
        dt, du: frames and targets that it goes ahead
        parts: parts of the cell that are in its log-weight
        weight: a constant in its log-weight
        then_blank: whether the blank of the cell (t, u+1) is in its log-weight too
    """

    dt: int
    du: int
    parts: Tuple[int, ...]
    weight: float = 0.0
    then_blank: bool = False


@dataclass(frozen=True)
class Lattice:
    """Describe the lattice of a call.

    Attributes:
        arcs: those without a label (du = 0) come first
        extra: number of columns of the output layer behind those of the symbols
        label_ends: whether a path may end with a label
    """

    topology: str
    arcs: Tuple[Arc, ...]
    extra: int = 0
    label_ends: bool = True

    @property
    def parts(self) -> int:
        """Return the number of parts of a cell."""
        return 2 + self.extra

    @property
    def label_step(self) -> int:
        """Return the least number of frames that an arc of a label goes ahead."""
        return min(arc.dt for arc in self.arcs if arc.du)

    @property
    def of_symbols(self) -> int:
        """Return how many parts are of symbols: all, or with tdt the first two, since the others
        are of durations. A path takes one part of a symbol in each cell, so the posteriors of these
        parts add up to that of the cell."""
        return 2 if self.topology == "tdt" else self.parts


@lru_cache(maxsize=256)
def lattice_of(topology: str, durations: Tuple[int, ...] = (), sigma: float = 0.0) -> Lattice:
    """Return the lattice for options that `check_topology` has accepted.

    tdt: the blank and the label take any of the durations, each of which is a part of its own. A
    blank of duration 0 would stay in its cell, so it has no arc. multi-blank: the part of a
    duration is a blank of that length. In both the weight of each arc is -sigma."""
    blank, label = Arc(1, 0, (0,)), Arc(0, 1, (1,))
    arcs = (blank, label)
    label_ends = True
    # (part, duration) of each duration: the parts 0 and 1 are of the blank and the label.
    columns = list(enumerate(durations, 2))
    if topology in ("modified", "modified-last-blank", "constrained"):
        arcs = (blank, Arc(1, 1, (1,), then_blank=topology == "constrained"))
        label_ends = topology != "modified-last-blank"
    elif topology == "tdt":
        blanks = [Arc(duration, 0, (0, part), -sigma) for part, duration in columns if duration > 0]
        arcs = (*blanks, *(Arc(duration, 1, (1, part), -sigma) for part, duration in columns))
        label_ends = False
    elif topology == "multi-blank":
        longer = [Arc(duration, 0, (part,), -sigma) for part, duration in columns]
        arcs = (Arc(1, 0, (0,), -sigma), *longer, Arc(0, 1, (1,), -sigma))
    return Lattice(topology, arcs, len(durations), label_ends)


def check_number(
    name: str, value: Any, kind: type = Real, least: float = -math.inf, below: float = math.inf
) -> None:
    """Raise ValueError unless the value is a finite number of type `kind` (no bool), at least
    `least` and less than `below`.

    kind: numbers.Real or Integral
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(
            f"{name} must be {'an integer' if kind is Integral else 'a number'}; it is {value!r}"
        )
    # NaN and inf fail the comparisons; -inf passes them where `least` is -inf, the default.
    if not least <= value < below or value == -math.inf:
        wanted = "finite" if least == -math.inf else f"{least} or more, and below {below}"
        raise ValueError(f"{name} must be {wanted}; it is {value}")


def check_topology(topology: Any, durations: Any, sigma: Any, label_smoothing: Any = 0.0) -> None:
    """Raise ValueError for an unknown topology, and for durations that it cannot have.

    So do a sigma and a label_smoothing that are no finite number, or not 0 where the topology has
    none."""
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        raise ValueError(f"topology: there are {', '.join(TOPOLOGIES)}, not {topology!r}")
    if not isinstance(durations, (list, tuple)):
        raise ValueError(f"durations must be a list or tuple of integers; it is {durations!r}")
    # A blank goes ahead by 1 frame at least. In multi-blank each duration is of a blank; in tdt a
    # blank takes only those above 0.
    least = 1 if topology == "multi-blank" else 0
    for duration in durations:
        check_number("durations: each", duration, Integral, least, LONGEST + 1)
    fits = bool(durations) == (topology in WITH_DURATIONS)
    if not fits or (topology == "tdt" and not any(durations)):
        raise ValueError(
            "durations: topology 'tdt' needs some, of which one is above 0, such as [0, 1, 2, 3, 4]; 'multi-blank' "
            f"needs some, such as [2, 4, 8]; the others take none; this is {topology!r} with {durations!r}"
        )
    for name, value, takes in (
        ("sigma", sigma, WITH_DURATIONS),
        ("label_smoothing", label_smoothing, SMOOTHABLE),
    ):
        check_number(name, value)
        if value and topology not in takes:
            raise ValueError(
                f"{name} is of the topologies {', '.join(takes)}; this is {topology!r}"
            )
