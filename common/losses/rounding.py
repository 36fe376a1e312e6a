"""Compute how far a right loss may be off: the error that rounding explains.

Every judge of a loss calls `allowed`: for the small batches, the measured batch, the losses after
timing and the conformance cases.  The float64 oracle gets the same numbers as the loss, so a right
loss differs from it by rounding alone.  By Higham 2002, Accuracy and Stability of Numerical
Algorithms, 2.2, 3.1 and 4.2:

- A step of a path adds a log-probability, which is a score (a logit) less its normaliser.  Each of
  the two has an error of half a unit in the last place: eps / 2 of the largest score.  A product of
  matrices rounds the score, up or down depending on the library and the processor.  Like frames are
  rounded alike, so the errors of the T + U steps add up.
- Each addition rounds the running sum, which grows to the loss.  These T + U errors are a random
  walk of sqrt(T + U) / 2 units in the last place.  Kernels that add up in another order lose a few
  units at any length: `PLACES`.
- A posterior is the exponential of such a sum, so its relative error is the sum's absolute error.
- An entry of a gradient is a difference of posteriors of up to 1.  Where they cancel, all entries
  are small, but their errors are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Units in the last place that a sum as large as the loss may always lose: right float32 kernels
#: lose 3 at T = 400 and 10 at T = 700.
PLACES = 4
#: In a long batch the sums may lose another unit in the last place for each 5 frames.  Right
#: float32 kernels lose one in 60 frames at V = 500, and one in 13 at V = 4,096, where like numbers
#: are rounded alike.
FRAMES_A_PLACE = 5
#: A loss that is right in float64 is imprecise in float32, and not wrong, while its error is at
#: most this many times what is allowed.
IMPRECISE = 10.0
#: Magnitudes below this count as 0: float32 does not hold them, or not their products.
TINY = 1e-30
#: An error of a sum is divided by the right sum, or by this share of the mean right sum if that is
#: larger: rounding may exceed a small sum.
FLOOR = 0.1
#: In the sum of a row of a gradient so many errors as large as that of the largest entry may add
#: up.
ENTRIES_A_ROW = 10


class Precision(NamedTuple):
    """Hold the largest errors of a right loss in one dtype, where sums are short.

    Attributes:
        eps: epsilon of the dtype of the sums; float16 and bfloat16 must be summed in float32
        error: of the loss, relative to it, and of an entry of a gradient, relative to the largest
        slope: of the factor by which the right gradient fits best, its difference to 1; errors of
          entries average out in it
        sums: of the differences summed over a frame, a symbol, ..., as a share of the right sum
        length: Euclidean length of the error of a whole gradient, as a share of its own length
    """

    eps: float
    error: float
    slope: float
    sums: float
    length: float


#: The precision by dtype.  float16 and TF32 carry 3 digits through joiner and loss, bfloat16 2.  A
#: bias has few entries, so the errors of its gradient hardly average out.
PRECISIONS: Mapping[str, Precision] = {
    "float64": Precision(eps=2**-52, error=1e-9, slope=1e-9, sums=1e-7, length=1e-2),
    "float32": Precision(eps=2**-23, error=1e-4, slope=2e-5, sums=1e-2, length=1e-2),
    "tf32": Precision(eps=2**-23, error=2e-2, slope=2e-3, sums=1e-1, length=1e-1),
    "float16": Precision(eps=2**-23, error=2e-2, slope=2e-3, sums=1e-1, length=1e-1),
    "bfloat16": Precision(eps=2**-23, error=1e-1, slope=1e-2, sums=1e-1, length=1e-1),
}


class Allowed(NamedTuple):
    """Hold the largest errors of a right loss on some utterances.

    Attributes:
        loss: relative error of the loss
        gradient: largest error of an entry, over the largest magnitude
        slope: difference to 1 of the factor by which the right gradient fits best
        sums: of the differences summed over a frame, a u, a symbol or the V of a cell, as a share
          of the right sum
        rows: of the differences summed over a row of another tensor, in which several cells add up
        length: length of the error of a whole gradient, as a share of its own length
        precise_loss, precise_gradient: above these the loss is right, but imprecise
    """

    loss: float
    gradient: float
    slope: float
    sums: float
    rows: float
    length: float
    precise_loss: float
    precise_gradient: float

    def imprecise(self) -> Allowed:
        """Return the limits of a loss in float32 that is right in float64."""
        return Allowed(*(IMPRECISE * limit for limit in self))


def allowed(
    dtype: str,
    shapes: Sequence[tuple[int, int]],
    score: float,
    loss: float,
    *,
    right: float | None = None,
    largest: float = 1.0,
    places: float = PLACES,
    negligible: float = 0.0,
) -> Allowed:
    """Return the largest errors that rounding explains of a loss on utterances of `shapes`.

    Args:
        dtype: a key of PRECISIONS.
        shapes: (T, U) of each utterance.
        score: largest magnitude of the logits.
        loss: largest right loss of an utterance, in nats.
        right: the right loss that the error of the loss is relative to; None for `loss`.
        largest: magnitude of the largest entry of the right gradient.  It is small if posteriors
            cancel; then the errors relative to it are large.
        places: units in the last place that a sum as large as the loss may lose in any batch; in a
            batch of long utterances the sum may lose more.
        negligible: posterior below which the loss leaves cells out of the gradient, by design.
    """
    precision = PRECISIONS[dtype]
    steps = [T + U for T, U in shapes]
    # Independent rounding errors, each up to half a unit, add up like a random walk: with the root
    # of the steps.
    places = max(places, math.sqrt(max(steps)) / 2)
    largest = min(max(largest, TINY), 1.0)
    right = loss if right is None else right
    # What rounding adds to each error.  That of the loss is relative to the loss, those of an entry
    # and of the gradient to the largest entry.  Those of a score and of a posterior are absolute.
    score_error = precision.eps * score
    loss_error = score_error * sum(steps) / max(abs(right), TINY)
    posterior_error = score_error * max(steps) + precision.eps * places * abs(loss)
    entry_error = precision.eps * places / largest
    # Each cell of an utterance may be left out, and with it a posterior up to `negligible`.
    neglected = negligible * max(T * (U + 1) for T, U in shapes)
    gradient_error = posterior_error / largest + entry_error + neglected
    # 2: an entry is the posterior of a cell times a probability, less the derivative of an arc.
    # Both terms have the error of a posterior, and over a cell's V each adds up to its posterior.
    sums = precision.sums + 2 * posterior_error + neglected
    return Allowed(
        loss=precision.error + loss_error,
        gradient=precision.error + gradient_error,
        slope=precision.slope + gradient_error,
        sums=sums,
        # The sum that a row is compared with may be as small as FLOOR of the mean.
        rows=sums + ENTRIES_A_ROW * entry_error / FLOOR,
        length=precision.length + gradient_error,
        precise_loss=precision.error,
        precise_gradient=precision.error + posterior_error + neglected,
    )
