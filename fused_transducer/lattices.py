"""The lattices of the transducer family: the arcs that leave a cell (t, u), and the outputs that
they take.

A *part* of a cell is one log-probability of its outputs: part 0 of the blank, part 1 of the next
target, the others of the further columns of the output layer (durations, or longer blanks), in
their order.  An arc's log-weight is a sum of parts, and a constant.  The backends store the parts,
walk the arcs, and leave the posterior of each part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple, Tuple

#: Names as `topology` takes them; the number of one is its place (csrc/problem.h).
TOPOLOGIES = (
    "regular",
    "modified",
    "modified-last-blank",
    "constrained",
    "tdt",
    "multi-blank",
    "hat",
)
#: Those whose output layer has further columns, one for each of `durations`.
WITH_DURATIONS = ("tdt", "multi-blank")
#: Those whose arcs are those of "regular": to (t+1, u) by blank and to (t, u+1) by the label.
REGULAR_ARCS = ("regular", "hat")
#: Those of one softmax over the symbols, whose labels can be smoothed.
SMOOTHABLE = ("regular", "modified", "modified-last-blank", "constrained")
#: Those where an arc of a blank and one of a label share a part.
MIXED = ("tdt", "constrained")
#: Those whose outputs are not all in one softmax -> the number of their kind in csrc/problem.h and
#: kernels.py.
NORMALISERS = {"tdt": 1, "hat": 2}
#: Most frames that an arc goes ahead.
LONGEST = 2**15


class Arc(NamedTuple):
    """An arc from every cell: dt frames and du targets ahead.  In its log-weight are these parts of
    the cell, the constant `weight`, and with then_blank also the blank of cell (t, u+1)."""

    dt: int
    du: int
    parts: Tuple[int, ...]
    weight: float = 0.0
    then_blank: bool = False


@dataclass(frozen=True)
class Lattice:
    """The arcs of a call, those of du = 0 first, and how its outputs are normalised; extra: the
    columns behind those of the symbols; label_ends: whether a path may end with a label."""

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
        """Return the frames that a label goes ahead at least."""
        return min(arc.dt for arc in self.arcs if arc.du)

    @property
    def of_symbols(self) -> int:
        """Return how many parts are of symbols, so that their posteriors sum to that of the
        cell."""
        return 2 if self.topology == "tdt" else self.parts


@lru_cache(maxsize=256)
def lattice_of(topology: str, durations: Tuple[int, ...] = (), sigma: float = 0.0) -> Lattice:
    """Return the lattice of a call's options, which are valid (`check_topology`)."""
    forward = Arc(1, 0, (0,))
    arcs = (forward, Arc(0, 1, (1,)))
    label_ends = True
    columns = list(enumerate(durations, 2))
    if topology in ("modified", "modified-last-blank", "constrained"):
        arcs = (forward, Arc(1, 1, (1,), then_blank=topology == "constrained"))
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
    """Raise ValueError for a value that is not of a kind of number, or not finite, or not from
    `least` to `below`."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(
            f"{name} must be {'an integer' if kind is Integral else 'a number'}; it is {value!r}"
        )
    if not least <= value < below or value == -math.inf:
        wanted = "finite" if least == -math.inf else f"{least} or more, and below {below}"
        raise ValueError(f"{name} must be {wanted}; it is {value}")


def check_topology(topology: Any, durations: Any, sigma: Any, label_smoothing: Any = 0.0) -> None:
    """Raise ValueError for a lattice that there is none of, and for options that it does not
    have."""
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        raise ValueError(f"topology: there are {', '.join(TOPOLOGIES)}, not {topology!r}")
    if not isinstance(durations, (list, tuple)):
        raise ValueError(f"durations must be a list or tuple of integers; it is {durations!r}")
    # a blank goes 1 frame ahead at least: of tdt with one of the durations, of multi-blank with
    # each
    for duration in durations:
        check_number(
            "durations: each", duration, Integral, int(topology == "multi-blank"), LONGEST + 1
        )
    if (topology in WITH_DURATIONS) != bool(durations) or (
        topology == "tdt" and not any(durations)
    ):
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
