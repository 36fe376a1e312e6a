"""Search the largest size that fits, from the records of the sizes that were tried: strides, then
bisection."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rnnt_bench.core import text
from rnnt_bench.records.schema import Bytes, Count, Duration, Positive
from rnnt_bench.tools.kept import Kept

#: A search ends when the largest size that fits and the smallest that does not are this close, as a
#: fraction.
TOLERANCE = 0.05
#: What limits a search, by the status of the probe of a size that does not fit.  Any other status
#: but "ok" is no answer.
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


class Request(Struct, kw_only=True):
    """Ask for a job under the limit of a run.

    Attributes:
        memory_limit: as the flag has it
        limit_bytes: on a CPU, the same for all jobs of a run
    """

    memory_limit: str | None = None
    limit_bytes: Bytes | None = None


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


class Outcome(Struct):
    """Tell how a search ended, or how far it is.

    Attributes:
        name: of the search
        size: the largest that fits, None where none does or none is known
        tries: the steps of that size; where not even the smallest fits, of that one
        coming, pass_name: the size to try next, None at the end, and what is to be done with it
        status, reason: "ok" where the largest is known, else those of the job that did not end well
        limited_by: "memory", "time", "cap" (the largest size that was allowed), or "" before its
          end
    """

    name: str
    size: int | None = None
    tries: list[Try] = []
    coming: int | None = None
    pass_name: str = "probe"
    status: str = "ok"
    reason: str = ""
    limited_by: str = ""

    @property
    def shown(self) -> str:
        """Return ">=24" where the search did not end, "none" where not even the smallest size
        fits."""
        if self.size is None:
            return "none" if self.limited_by else "-"
        return f"{'>=' if self.status not in ('ok', 'wrong') else ''}{self.size}"

    @property
    def peak_mb(self) -> float | None:
        """Return the highest peak of all steps."""
        return max(
            (step.peak_bytes / text.MB for step in self.tries if step.peak_bytes), default=None
        )


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

    def outcome(self, kept: Kept) -> Outcome:
        """Return how the search ended, by the jobs that tried a size."""
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
        end = Outcome(self.name, size)
        end.coming = next_size(answers, self.low, self.cap, self.start, self.stride)
        end.tries = probes[size].of(Try) if size else []
        if end.coming is not None:
            job = kept.job(f"{head}{end.coming}")
            end.status = job.status
            end.reason = job.reason and f"size {end.coming}: {job.reason}"
        elif too_large is None:
            end.limited_by = "cap"
        else:
            failed = probes[too_large]
            end.limited_by = LIMITS[failed.status]
            if size is None:
                end.status = failed.status
                end.reason = f"not even {too_large} fits: {failed.reason}"
                end.tries = failed.of(Try)
        return end


def first_limit(kept: Kept) -> int | None:
    """Return the bytes that the first step that was tried might take."""
    steps = (step for job in kept.jobs.values() for step in job.of(Try))
    return next((step.limit_bytes for step in steps if step.limit_bytes), None)
