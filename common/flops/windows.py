"""Rules of pooling, interpolation and loss functions."""

from __future__ import annotations

import math
import re
from typing import Any, Callable, List, Tuple

from common.flops.rules import Call, add, elements, rule, size


def _dims(call: Call) -> int:
    """Return 2 of "aten::avg_pool2d_backward"."""
    return int(re.findall(r"(\d)d", call.name)[-1])


def _window(call: Call) -> int:
    kernel, dims = call["kernel_size"], _dims(call)
    return math.prod(kernel) if len(kernel) == dims else kernel[0] ** dims


def _adaptive_windows(call: Call, narrow: Any) -> int:
    """Return how many numbers are in all windows of the input for a tensor like `narrow`."""
    wide, dims = call["self"].shape, _dims(call)
    total = math.prod(wide[:-dims])
    for size_in, size_out in zip(wide[-dims:], narrow.shape[-dims:]):
        total *= sum(-((index + 1) * size_in // -size_out) - index * size_in // size_out for index in range(size_out))
    return total


_POOLED = "k numbers in its window: k - 1 additions, a division"
_SPREAD = "a division, then an addition for each number in the window"
_UPSTREAM = "k + 1 per element of the upstream gradient"


@rule("avg_pool1d avg_pool2d avg_pool3d", flops="k per output", reason=_POOLED)
def _average(call: Call) -> int:
    return _window(call) * elements(call.out)


@rule("avg_pool2d_backward avg_pool3d_backward", flops=_UPSTREAM, reason=_SPREAD)
def _average_backward(call: Call) -> int:
    return (_window(call) + 1) * elements(call["grad_output"])


@rule("adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d", flops="k per output", reason=_POOLED)
def _adaptive(call: Call) -> int:
    return _adaptive_windows(call, call.out)


@rule("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward", flops=_UPSTREAM, reason=_SPREAD)
def _adaptive_backward(call: Call) -> int:
    return _adaptive_windows(call, call["grad_output"]) + elements(call["grad_output"])


@rule(
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    flops="3, 7 or 15 per output",
    reason="2, 4 or 8 neighbours weighted and added up; the weights depend on the place alone",
)
def _interpolated(call: Call) -> int:
    return (2 * 2 ** _dims(call) - 1) * elements(call.out)


@rule(
    "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward",
    flops="4, 8 or 16 per element of the upstream gradient",
    reason="weighted for and added to 2, 4 or 8 neighbours",
)
def _interpolated_backward(call: Call) -> int:
    return 2 * 2 ** _dims(call) * elements(call["grad_output"])


# -- loss functions --------------------------------------------------------------------------------------------------

MEAN, SUM = 1, 2  # torch's numbers of reductions


def _reduced(call: Call, count: int) -> int:
    """Count the operations that reduce `count` numbers as the argument `reduction` says."""
    return {MEAN: count, SUM: max(count - 1, 0)}.get(call["reduction"], 0)


def _loss(per_element: int) -> Callable[[Call], int]:
    def count(call: Call) -> int:
        full = elements(call["self"])
        return per_element * full + _reduced(call, full)

    return count


_REDUCED = "and the sum n - 1 or the mean n"
for _factor, _operators, _reason in (
    (2, "mse_loss", "subtract, square"),
    (4, "smooth_l1_loss huber_loss", "subtract, absolute, two more"),
    (8, "binary_cross_entropy", "-(y log x + (1 - y) log(1 - x))"),
    (4, "binary_cross_entropy_with_logits", "(1 - y) x - log_sigmoid(x)"),
):
    add(_operators, _loss(_factor), flops=f"{_factor} per element", reason=f"{_reason}; {_REDUCED}")


def _ctc_lengths(call: Call) -> List[Tuple[int, int]]:
    """Return (frames, labels) of each utterance."""
    return [(int(T), int(U)) for T, U in zip(call["input_lengths"], call["target_lengths"])]


def _ctc_recursion(T: int, U: int) -> int:
    """Count alpha or beta: blanks have 2 states before them, labels 3; a sum of two in the log domain is 4."""
    return max(T - 1, 0) * (U * (2 * 4 + 1) + (U + 1) * (4 + 1))


def _ctc_gradient(call: Call) -> int:
    V = call["log_probs"].shape[-1]
    return sum(_ctc_recursion(T, U) + T * (5 * (2 * U + 1) + 6 * V) for T, U in _ctc_lengths(call))


@rule(
    "_ctc_loss",
    flops="per utterance (T - 1) (14 U + 5) + 5",
    reason="alpha: a label adds up 3 states, a blank 2 (4 for each sum in the log domain) and its probability; the "
    "last two states are added up.  Equal neighbours and the corners of the lattice count as the others do",
)
def _ctc(call: Call) -> int:
    return sum(_ctc_recursion(T, U) + 5 for T, U in _ctc_lengths(call))


@rule(
    "_ctc_loss_backward",
    flops="per utterance (T - 1) (14 U + 5) + T (5 (2 U + 1) + 6 V)",
    reason="beta as alpha; alpha + beta added to its symbol, 5 per state; 6 per symbol: two exponentials, their "
    "arguments 2, their difference, times the upstream gradient",
)
def _ctc_backward(call: Call) -> int:
    return _ctc_gradient(call)


@rule("_cudnn_ctc_loss", flops="as _ctc_loss and its backward", reason="it computes the gradient in its forward")
def _ctc_cudnn(call: Call) -> int:
    return _ctc(call) + _ctc_gradient(call)


@rule("nll_loss_forward nll_loss2d_forward", flops="1 per target", reason=f"the sign; {_REDUCED}")
def _nll(call: Call) -> int:
    targets = size(call["target"])
    return (targets + _reduced(call, targets)) if elements(call["self"]) else 0


@rule(
    "nll_loss_backward nll_loss2d_backward",
    flops="2 per target",
    reason="sign and weight of one element for each target; the others are zero",
)
def _nll_backward(call: Call) -> int:
    return 2 * size(call["target"]) if elements(call.out) else 0
