"""The lattices of the transducer family: the arcs that leave a cell (t, u), and the outputs that they take.

A *part* of a cell is one log-probability of its outputs: part 0 of the blank, part 1 of the next target, the others of
the further columns of the output layer (durations, or longer blanks), in their order.  An arc's log-weight is a sum of
parts, and a constant.  The backends store the parts, walk the arcs, and leave the posterior of each part.
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
    "star",
)
#: Those whose output layer has further columns, one for each of `durations`.
WITH_DURATIONS = ("tdt", "multi-blank")
#: Those whose arcs are those of "regular": to (t+1, u) by blank and to (t, u+1) by the label.
REGULAR_ARCS = ("regular", "hat")
#: Those of one softmax over the symbols, whose labels can be smoothed.
SMOOTHABLE = ("regular", "modified", "modified-last-blank", "constrained", "star")
#: Those where an arc of a blank and one of a label share a part.
MIXED = ("tdt", "constrained")
#: Those whose outputs are not all in one softmax -> the number of their kind in csrc/problem.h and kernels.py.
NORMALISERS = {"tdt": 1, "hat": 2}
#: Most frames that an arc goes ahead.
LONGEST = 2**15


class Arc(NamedTuple):
    """An arc from every cell.

    Attributes:
        dt, du: frames and targets that it goes ahead.
        parts: the parts of the cell in its log-weight.
        weight: a constant in its log-weight.
        then_blank: whether the blank of cell (t, u+1) is in its log-weight too.
    """

    dt: int
    du: int
    parts: Tuple[int, ...]
    weight: float = 0.0
    then_blank: bool = False


@dataclass(frozen=True)
class Lattice:
    """The arcs of a call and how its outputs are normalised.

    Attributes:
        topology: one of TOPOLOGIES.
        arcs: those of du = 0 first.
        extra: columns behind those of the symbols.
        label_ends: whether a path may end with a label.
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
    def of_symbols(self) -> int:
        """Return how many parts are of symbols, so that their posteriors sum to that of the cell."""
        return 2 if self.topology == "tdt" else self.parts


@lru_cache(maxsize=256)
def lattice_of(topology: str, durations: Tuple[int, ...] = (), sigma: float = 0.0, skip: float = 0.0) -> Lattice:
    """Return the lattice of a call's options, which are valid (`check_topology`)."""
    forward, upward = Arc(1, 0, (0,)), Arc(0, 1, (1,))
    if topology == "modified":
        return Lattice(topology, (forward, Arc(1, 1, (1,))))
    if topology == "modified-last-blank":
        return Lattice(topology, (forward, Arc(1, 1, (1,))), label_ends=False)
    if topology == "constrained":
        return Lattice(topology, (forward, Arc(1, 1, (1,), then_blank=True)))
    if topology == "tdt":
        columns = list(enumerate(durations, 2))
        blanks = [Arc(duration, 0, (0, part), -sigma) for part, duration in columns if duration > 0]
        labels = [Arc(duration, 1, (1, part), -sigma) for part, duration in columns]
        return Lattice(topology, (*blanks, *labels), len(durations), label_ends=False)
    if topology == "multi-blank":
        longer = [Arc(duration, 0, (part,), -sigma) for part, duration in enumerate(durations, 2)]
        return Lattice(topology, (Arc(1, 0, (0,), -sigma), *longer, Arc(0, 1, (1,), -sigma)), len(durations))
    if topology == "star":
        return Lattice(topology, (forward, Arc(1, 0, (), skip), upward))
    return Lattice(topology, (forward, upward))


def check_topology(topology: Any, durations: Any, sigma: Any, skip: Any, label_smoothing: Any = 0.0) -> None:
    """Raise ValueError for a lattice that there is none of, and for options that it does not have."""
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        raise ValueError(f"topology: there are {', '.join(TOPOLOGIES)}, not {topology!r}")
    if not isinstance(durations, (list, tuple)):
        raise ValueError(f"durations must be a list or tuple of integers; it is {durations!r}")
    for duration in durations:
        if isinstance(duration, bool) or not isinstance(duration, Integral) or not 0 <= duration <= LONGEST:
            raise ValueError(f"durations must be integers of 0 to {LONGEST} frames; one is {duration!r}")
    if topology in WITH_DURATIONS and not durations:
        raise ValueError(f"durations: topology {topology!r} needs one at least, as {_example(topology)}")
    if topology not in WITH_DURATIONS and durations:
        raise ValueError(f"durations are of the topologies {' and '.join(WITH_DURATIONS)}; this is {topology!r}")
    if topology == "tdt" and not any(durations):
        raise ValueError("durations: topology 'tdt' needs one above 0, since a blank goes a frame ahead at least")
    if topology == "multi-blank" and not all(durations):
        raise ValueError("durations: a longer blank of topology 'multi-blank' goes 1 frame ahead at least")
    for name, value in (("sigma", sigma), ("skip", skip)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number; it is {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; it is {value}")
    if sigma and topology not in WITH_DURATIONS:
        raise ValueError(f"sigma is of the topologies {' and '.join(WITH_DURATIONS)}; this is {topology!r}")
    if skip and topology != "star":
        raise ValueError(f"skip is of the topology star; this is {topology!r}")
    if label_smoothing and topology not in SMOOTHABLE:
        raise ValueError(f"label_smoothing is of the topologies {', '.join(SMOOTHABLE)}; this is {topology!r}")


def _example(topology: str) -> str:
    return "[0, 1, 2, 3, 4]" if topology == "tdt" else "[2, 4, 8]"
