"""Search the largest size that fits, from the records of the sizes that were tried: strides, then
bisection."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rnnt_bench.records.schema import Bytes, Count, Duration, Positive
from rnnt_bench.tools.kept import NOT_RUN, Job, Kept

#: A search ends when the largest size that fits and the smallest that does not are this close, as a
#: fraction.
TOLERANCE = 0.05
#: Whether a size fits, by the status of its probe.  Any other status is no answer.
OUTCOMES = {"ok": True, "oom": False, "timeout": False}
#: What limits a search, by the status of the size that does not fit.
LIMITS = {"oom": "memory", "timeout": "time"}


class Try(Struct, kw_only=True, omit_defaults=True):
    """A step that is tried: written before it, and again, with its peak, after one that fits.

    Attributes:
        N, T, U: of the padded batch
        limit_bytes: enforced, above the loaded process
        bucket: of a training, from 1
        peak_bytes: inputs included: resident on a CPU, of torch's allocator on CUDA
        ns: duration of the step
    """

    N: Positive
    T: Positive
    U: Count
    limit_bytes: Bytes | None = None
    bucket: Positive | None = None
    peak_bytes: Bytes | None = None
    ns: Duration | None = None


def next_size(
    answers: Mapping[int, bool], low: int, cap: int, start: int, stride: float = 1.0
) -> int | None:
    """Return the size to try next, from `low` to `cap`; None once the largest is known to within
    TOLERANCE, or 1.

    From `start` on sizes change by a stride that doubles until one fits and one does not, then the
    gap is halved.
    answers: whether each size fits; stride: the first, as a fraction, at most 1."""
    fits, fails = bounds(answers)
    reach = min(1.0, stride * 2 ** (len(answers) - 1)) if answers else 0.0
    if fails is None:
        if fits is None:
            return min(max(start, low), cap)
        return None if fits >= cap else min(max(int((1 + reach) * fits), fits + 1), cap)
    below = low - 1 if fits is None else fits
    if fails - below > max(1, int(TOLERANCE * below)):
        middle = (below + fails) // 2
        return middle if fits is not None else max(middle, int((1 - reach) * fails))
    return low if fits is None and fails > low else None


def bounds(answers: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """Return (largest size that fits below all that do not, smallest that does not fit), None for
    one that is not known."""
    fails = min((size for size, fits in answers.items() if not fits), default=None)
    fits = max(
        (size for size, fits in answers.items() if fits and (fails is None or size < fails)),
        default=None,
    )
    return fits, fails


class Outcome(Struct, frozen=True):
    """Tell how a search ended, or how far it is.

    Attributes:
        size: the largest that fits, None where none does or none is known
        status, reason: "ok" where the largest is known
        limited_by: "memory", "time", "cap" (the largest size that was allowed), "error", or ""
          before its end
        heaviest: the heaviest step of that size, with the highest peak
    """

    size: int | None
    status: str
    reason: str = ""
    limited_by: str = ""
    heaviest: Try | None = None

    @property
    def shown(self) -> str:
        """Return ">=24" where the search did not end, "none" where not even the smallest size
        fits."""
        if self.size is None:
            return "none" if self.limited_by in LIMITS.values() else "-"
        return f"{'>=' if self.status not in ('ok', 'wrong') else ''}{self.size}"


class Search(Struct, frozen=True):
    """Search the sizes of one loss, or of one bucket.

    Attributes:
        low, cap: the smallest and the largest size
        start: the first to try
        stride: from it to the next one, as a fraction: small where `start` is an estimate
    """

    name: str
    low: Positive
    cap: Positive
    start: Positive
    stride: float = 1.0

    def probes(self, kept: Kept) -> dict[int, Job]:
        """Return the jobs that tried a size, by the size."""
        head = f"{self.name} probe-"
        return {
            int(name[len(head) :]): job for name, job in kept.jobs.items() if name.startswith(head)
        }

    def next(self, kept: Kept) -> int | None:
        return next_size(_answers(self.probes(kept)), self.low, self.cap, self.start, self.stride)

    def outcome(self, kept: Kept) -> Outcome:
        """Return how the search ended."""
        probes = self.probes(kept)
        size, too_large = bounds(_answers(probes))
        heaviest = _heaviest(probes[size].of(Try)) if size else None
        failed = [
            f"size {tried}: {job.reason}"
            for tried, job in probes.items()
            if job.status not in (*OUTCOMES, "interrupted", NOT_RUN)
        ]
        if failed:
            return Outcome(size, "error", failed[0], "error", heaviest)
        if self.next(kept) is not None:
            words = "stopped before the largest was found; --resume goes on"
            return Outcome(size, "interrupted", words, heaviest=heaviest)
        if too_large is None:
            return Outcome(size, "ok", limited_by="cap", heaviest=heaviest)
        end = probes[too_large]
        if size is None:
            reason = f"not even {too_large} fits: {end.reason}"
            return Outcome(None, end.status, reason, LIMITS[end.status], _heaviest(end.of(Try)))
        return Outcome(size, "ok", limited_by=LIMITS[end.status], heaviest=heaviest)


def _answers(probes: Mapping[int, Job]) -> dict[int, bool]:
    """Return whether each size fits; those without an answer are left out."""
    return {size: OUTCOMES[job.status] for size, job in probes.items() if job.status in OUTCOMES}


def limit_of(kept: Kept) -> int | None:
    """Return the bytes that the first step that was tried might take."""
    steps = (step for job in kept.jobs.values() for step in job.of(Try))
    return next((step.limit_bytes for step in steps if step.limit_bytes), None)


def _heaviest(tries: list[Try]) -> Try | None:
    """Return the step with the most padded cells, with the highest peak of all."""
    if not tries:
        return None
    cells = max(tries, key=lambda step: step.N * step.T * (step.U + 1))
    peak = max((step.peak_bytes for step in tries if step.peak_bytes is not None), default=None)
    return Try(N=cells.N, T=cells.T, U=cells.U, limit_bytes=cells.limit_bytes, peak_bytes=peak)
