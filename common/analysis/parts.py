"""Define the parts of a row that are more than a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, NamedTuple, Optional, Tuple


class Sample(NamedTuple):
    """Hold a timed sample; warm-up has none.

    Attributes:
        at_s: seconds of timed work of this implementation up to its end, warm-up included.
        foreign_cpu: the share of the CPUs that other processes took.
        flagged: it ran beside other load.
        beside_load: beside so much load that its time cannot be compared.
    """

    scope: str
    round: str
    batch: str
    at_s: float
    ms: float
    flagged: bool
    foreign_cpu: Optional[float]
    beside_load: bool = False


@dataclass(frozen=True)
class Largest:
    """Hold the result of --find-largest.

    Attributes:
        of: "batch-size" or "max-frames", the unit of `size`.
        scope: "step" or "loss", which had to fit.
        size: the largest that fits; None where none does, or it is not known.
        too_large: the smallest that does not fit.
        at_least: the search did not end, so a larger size may fit.
        limited_by: "memory", "time", "error", "all" (there are no more utterances), "cap" (--largest-cap) or None.
        limit_bytes, limit_kind, limit_source: the memory limit, how it is enforced, and where it is from.
        probes: how many sizes were tried.
        peak_mb: of the step at `size`.
        N, T_max, U_max, frames, padded_cells, useful_cells: the heaviest batch of that size.
        utterances_per_second, frames_per_second: the median over rounds at `size`; *_interval: its 95% interval.
        utterances_per_second_rounds: the rate of each round.
        timed_over: {utterances, frames} of all timed batches; None where none was timed.
    """

    of: str
    scope: str
    size: Optional[int] = None
    too_large: Optional[int] = None
    at_least: bool = False
    limited_by: Optional[str] = None
    limit_bytes: Optional[int] = None
    limit_kind: Optional[str] = None
    limit_source: Optional[str] = None
    probes: int = 0
    peak_mb: Optional[float] = None
    N: Optional[int] = None
    T_max: Optional[int] = None
    U_max: Optional[int] = None
    frames: Optional[int] = None
    padded_cells: Optional[int] = None
    useful_cells: Optional[int] = None
    utterances_per_second: Optional[float] = None
    frames_per_second: Optional[float] = None
    utterances_per_second_interval: Optional[Tuple[float, float]] = None
    frames_per_second_interval: Optional[Tuple[float, float]] = None
    utterances_per_second_rounds: Dict[str, float] = field(default_factory=dict)
    timed_over: Optional[Dict[str, int]] = None
