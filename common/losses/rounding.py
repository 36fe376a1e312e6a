"""Say how far a right loss may be off: what rounding explains of a difference to the float64
oracle.

Every judge of a loss asks `allowed`: the small batches, the measured batch, the losses after
timing, the conformance cases.  The oracle is given the same numbers as the loss.  So what a right
one is off by is rounding (Higham 2002, Accuracy and Stability of Numerical Algorithms, 2.2, 3.1,
4.2):

- A step of a path adds a log-probability, a score less its normaliser.  Each of the two is off by
  half a unit in the last place, eps / 2 of the largest score: a product of matrices rounds the
  first, and which way depends on the library and the processor.  Alike frames are rounded alike, so
  the errors of the T + U steps add up.
- The addition rounds the running sum, which grows to the loss.  T + U of these are a random walk of
  sqrt(T + U) / 2 units in the last place.  Kernels that add up in another order lose some at any
  length: `PLACES`.
- A posterior is the exponential of such a sum, so what the sum is off by, the posterior is off by
  relatively.
- An entry of a gradient is a difference of posteriors of up to 1.  Where they cancel, the largest
  entry is small, and what they are off by is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Units in the last place that sums as large as the loss may lose at least: float32 kernels lose 3
#: at T 400, 10 at 700.
PLACES = 4
#: Frames of a long batch for each unit in the last place that its sums may lose: right float32
#: kernels lose one in 60 at V 500, in 13 at V 4,096, where like numbers are rounded alike.
FRAMES_A_PLACE = 5
#: An error in float32 of so many times what is allowed is imprecise, where the loss is right in
#: float64.
IMPRECISE = 10.0
#: Magnitudes below this count as 0: float32 does not hold them, or not their products.
TINY = 1e-30
#: A right sum counts as at least this share of the mean one, since rounding may exceed a smaller
#: sum.
FLOOR = 0.1


class Precision(NamedTuple):
    """Hold what a right loss keeps of its numbers where sums are short.

    Attributes:
        eps: of the sums: those of float16 and bfloat16 must be in float32
        error: largest of the loss and of a gradient, relative to the largest entry
        slope: largest difference to 1 of the factor that fits a gradient best: errors of its
          entries average out
        sums: largest sum of differences over a frame, a symbol, ... as a share of the right sum
        length: largest error of the gradient of a leaf as a whole, as a share of its length
    """

    eps: float
    error: float
    slope: float
    sums: float
    length: float


#: By dtype.  float16, TF32 and bfloat16 carry 3, 3 and 2 digits through joiner and loss; the
#: gradient of a bias has few entries that average out.
PRECISIONS: Mapping[str, Precision] = {
    "float64": Precision(eps=2**-52, error=1e-9, slope=1e-9, sums=1e-7, length=1e-2),
    "float32": Precision(eps=2**-23, error=1e-4, slope=2e-5, sums=1e-2, length=1e-2),
    "tf32": Precision(eps=2**-23, error=2e-2, slope=2e-3, sums=1e-1, length=1e-1),
    "float16": Precision(eps=2**-23, error=2e-2, slope=2e-3, sums=1e-1, length=1e-1),
    "bfloat16": Precision(eps=2**-23, error=1e-1, slope=1e-2, sums=1e-1, length=1e-1),
}


class Allowed(NamedTuple):
    """The largest errors of a right loss; `precise_...`: beyond these it is imprecise, though
    right."""

    loss: float  # relative
    gradient: float  # largest error over largest magnitude
    slope: float  # difference to 1 of the factor that fits a gradient best
    sums: float  # of differences over a frame, a u, a symbol, the V of a cell; over the right sum
    rows: float  # of differences over a row of another tensor, which adds up several
    length: float  # of the gradient of a leaf as a whole, over its length
    precise_loss: float
    precise_gradient: float

    def imprecise(self) -> Allowed:
        """Return what is allowed of a loss in float32 that is right in float64."""
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
        right: the right loss that the error of the loss is relative to, `loss` by default.
        largest: magnitude of the largest entry of the right gradient, of posteriors that may
          cancel.
        places: units in the last place that sums as large as the loss may lose at least.
        negligible: posterior below which the loss leaves cells out of the gradient, by design.
    """
    precision, steps = PRECISIONS[dtype], [T + U for T, U in shapes]
    of_scores = precision.eps * score
    places = max(places, math.sqrt(max(steps)) / 2)
    of_a_posterior = of_scores * max(steps) + precision.eps * places * abs(loss)
    largest = min(max(largest, TINY), 1.0)
    of_an_entry = precision.eps * places / largest
    neglected = negligible * max(T * (U + 1) for T, U in shapes)
    of_a_gradient = of_a_posterior / largest + of_an_entry + neglected
    of_the_loss = of_scores * sum(steps) / max(abs(loss if right is None else right), TINY)
    sums = precision.sums + 2 * of_a_posterior + neglected
    return Allowed(
        loss=precision.error + of_the_loss,
        gradient=precision.error + of_a_gradient,
        slope=precision.slope + of_a_gradient,
        sums=sums,
        rows=sums + 10 * of_an_entry / FLOOR,
        length=precision.length + of_a_gradient,
        precise_loss=precision.error,
        precise_gradient=precision.error + of_a_posterior + neglected,
    )
