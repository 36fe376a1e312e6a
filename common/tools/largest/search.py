"""Search the largest size that fits, from the records of the sizes that were tried.

A size is a number of utterances or of frames.  A probe is a job that tries a size.  Sizes grow or
shrink until one fits and a larger one does not; then the gap between these two is halved."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rnnt_bench.core import text
from rnnt_bench.records.schema import Bytes, Count, Duration, Positive
from rnnt_bench.tools.kept import Kept

#: A search ends when the smallest size that does not fit is above the largest that fits by at most
#: this fraction.
TOLERANCE = 0.05
#: Status of a probe whose size does not fit -> what limits the search.  A probe of any other status
#: but "ok" tells nothing of its size.
LIMITS = {"oom": "memory", "timeout": "time"}


class Try(Struct, kw_only=True, omit_defaults=True):
    """A step that a probe tries.  It is recorded before the step, and after it with its costs.

    Attributes:
        N, T, U: of the padded batch: utterances, frames, tokens
        limit_bytes: memory that the step may take on top of the loaded process
        bucket: number of the bucket in a training, counted from 1
        peak_bytes: memory that the step took, inputs included; resident memory on a CPU, torch's
            allocator on CUDA
        ns: duration of the step
    """

    N: Positive
    T: Positive
    U: Count
    limit_bytes: Bytes | None = None
    bucket: Positive | None = None
    peak_bytes: Bytes | None = None
    ns: Duration | None = None


class Request(Struct, kw_only=True):
    """Ask for a job under the memory limit of a run.

    Attributes:
        memory_limit: text of the flag --memory-limit
        limit_bytes: the limit on a CPU, the same for all jobs of a run; None on CUDA
    """

    memory_limit: str | None = None
    limit_bytes: Bytes | None = None


def size_to_try(
    answers: Mapping[int, bool], low: int, cap: int, start: int, stride: float = 1.0
) -> int | None:
    """Return the size to try next, from `low` to `cap`; None at the end of the search.

    The size grows as long as every size fits, and shrinks as long as none does.  Then it is the
    middle between the largest that fits and the smallest that does not.

    Args:
        answers: size -> whether it fits, of the sizes that were tried
        start: the first size to try
        stride: fraction of a size by which the second one differs from it; it doubles with every
            further size, up to 1
    """
    if not answers:
        return min(max(start, low), cap)
    change = min(1.0, stride * 2 ** (len(answers) - 1))  # as a fraction of the last size
    fitting, failing = bounds(answers)
    if failing is None:  # every size fits
        largest = max(answers)
        if largest >= cap:
            return None
        return min(max(int((1 + change) * largest), largest + 1), cap)
    if fitting is None:  # no size fits
        if failing <= low:
            return None
        # At most half of the way down to low - 1, which stands for a size that fits.
        return max((low - 1 + failing) // 2, int((1 - change) * failing))
    gap = failing - fitting
    if gap <= max(1, int(TOLERANCE * fitting)):
        return None
    return fitting + gap // 2


def bounds(answers: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """Return (largest size that fits, smallest size that does not fit), each None if there is none.

    A size that fits is ignored if a smaller size does not fit.

    answers: size -> whether it fits, of the sizes that were tried"""
    failing = min((size for size, fits in answers.items() if not fits), default=None)
    fitting = max(
        (size for size, fits in answers.items() if fits and (failing is None or size < failing)),
        default=None,
    )
    return fitting, failing


class Outcome(Struct):
    """The result of a search, or its progress so far.

    Attributes:
        name: of the search
        size: the largest that fits so far; None where none does, or none is known yet
        tries: the records of steps at `size`; where no size fits, those at the smallest size
        next_size: the size of the next job; None at the end
        pass_name: what the next job is to do at `next_size`: "probe", "correctness" or "judge"
        status: "ok" at the end of a search that found a size.  Before the end it is the status of
            the next job, which may have been tried in vain.  Where no size fits it is that of the
            probe of the smallest size.  Of a loss it may also be "missing", or "wrong" where the
            size found was judged so.
        reason: why, of the same job; "" where it has none
        limited_by: "memory", "time" or "cap" (the largest size that is allowed); "" before the end
    """

    name: str
    size: int | None = None
    tries: list[Try] = []
    next_size: int | None = None
    pass_name: str = "probe"
    status: str = "ok"
    reason: str = ""
    limited_by: str = ""

    @property
    def shown(self) -> str:
        """Return the size as a table shows it.

        It is ">=24" where the search did not end, "none" where not even the smallest size fits, and
        "-" where no size is known."""
        if self.size is None:
            # A search has `limited_by` once it has ended, here with no size that fits.
            return "none" if self.limited_by else "-"
        # Any other status is that of a job that the search still needs.
        has_ended = self.status in ("ok", "wrong")
        return f"{self.size}" if has_ended else f">={self.size}"

    @property
    def peak_mb(self) -> float | None:
        """Return the highest peak of all `tries`; None where none has a peak."""
        peaks = [step.peak_bytes / text.MB for step in self.tries if step.peak_bytes]
        return max(peaks, default=None)


class Search(Struct, frozen=True):
    """The search of one loss, or of one bucket.

    Attributes:
        name: its probes are called "NAME probe-SIZE"
        low, cap, start, stride: see size_to_try
    """

    name: str
    low: Positive
    cap: Positive
    start: Positive
    stride: float = 1.0

    def outcome(self, kept: Kept) -> Outcome:
        """Return how far the search is, or how it ended, from the probes in a run."""
        head = f"{self.name} probe-"
        probes = {
            int(name.removeprefix(head)): job
            for name, job in kept.jobs.items()
            if name.startswith(head)
        }
        answers = {
            size: job.status == "ok"
            for size, job in probes.items()
            if job.status in ("ok", *LIMITS)
        }
        size, too_large = bounds(answers)
        result = Outcome(self.name, size, probes[size].of(Try) if size else [])
        result.next_size = size_to_try(answers, self.low, self.cap, self.start, self.stride)
        if result.next_size is not None:
            # This size may have been tried in vain, by a job whose status is not in `answers`.
            job = kept.job(f"{head}{result.next_size}")
            result.status = job.status
            result.reason = job.reason and f"size {result.next_size}: {job.reason}"
        elif too_large is None:  # even the cap fits
            result.limited_by = "cap"
        else:  # the search has ended, and the job that failed tells why
            job = probes[too_large]
            result.limited_by = LIMITS[job.status]
            if size is None:  # `too_large` is the smallest size
                result.status = job.status
                result.reason = f"not even {too_large} fits: {job.reason}"
                result.tries = job.of(Try)
        return result


def first_limit(kept: Kept) -> int | None:
    """Return the limit in bytes that is recorded first in a run; None where there is none."""
    steps = (step for job in kept.jobs.values() for step in job.of(Try))
    return next((step.limit_bytes for step in steps if step.limit_bytes), None)
