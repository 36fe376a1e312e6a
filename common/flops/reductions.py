"""Rules of operators that add numbers up: reductions, scattered additions, normalisation, softmax, weights of rows."""

from __future__ import annotations

import math
from typing import Any, Tuple

from common.flops.rules import Call, Count, add, elements, per_input, products, rule, size


def _per_number(tensor: Any) -> int:
    """Return 2 where a number is complex, 0 where it is an integer."""
    return elements(tensor) // max(size(tensor), 1)


@rule("sum prod nansum trace", flops="n - 1 per group", reason="adding up n numbers takes n - 1 additions")
def _sum(call: Call) -> int:
    count = min(call["self"].shape) if call.name == "aten::trace" else size(call["self"])
    return _per_number(call.out) * max(count - size(call.out), 0)


@rule("mean", flops="n per group", reason="n - 1 additions and a division")
def _mean(call: Call) -> int:
    return _per_number(call.out) * size(call["self"])


@rule("var var_mean", flops="4 n per group", reason="mean n, subtract n, square n, add n - 1, divide 1")
def _variance(call: Call) -> int:
    return 4 * elements(call["self"])


@rule("std std_mean", flops="4 n + 1 per group", reason="the variance and a square root")
def _deviation(call: Call) -> int:
    out = call.out[0] if isinstance(call.out, (list, tuple)) else call.out
    return 4 * elements(call["self"]) + elements(out)


@rule(
    "linalg_vector_norm norm",
    flops="2 n per group",
    reason="power n, add n - 1, root 1; of order 1 no root, of infinite order the n absolute values",
)
def _norm(call: Call) -> int:
    order = call["ord"] if call["ord"] is not None else call["p"]
    if order == 0:
        return 0
    if order in (math.inf, -math.inf):
        return elements(call["self"])
    return 2 * elements(call["self"]) - (elements(call.out) if order == 1 else 0)


@rule("dist", flops="3 n", reason="a difference and its norm")
def _distance(call: Call) -> int:
    return 3 * max(elements(call["self"]), elements(call["other"]))


@rule(
    "_cdist_forward _pdist_forward",
    flops="3 m per pair",
    reason="for each of m coordinates a difference, its power, a sum",
)
def _distances(call: Call) -> int:
    vectors = call["x1"] if call["x1"] is not None else call["self"]
    return 3 * elements(call.out) * vectors.shape[-1]


@rule(
    "_euclidean_dist",
    macs="m + 2 per pair",
    flops="2 for each MAC, 1 per pair; 2 m - 1 per vector, m more for those of the first",
    reason="(-2 x, |x|^2, 1) times (y, 1, |y|^2), and a root; the shortcut of many pairs",
)
def _distances_by_product(call: Call) -> Count:
    coordinates = call["x1"].shape[-1]
    first, second = (elements(call[name]) // coordinates for name in ("x1", "x2"))
    pairs = elements(call.out)
    return products(pairs * (coordinates + 2), pairs + (2 * coordinates - 1) * (first + second) + first * coordinates)


def _along(call: Call) -> int:
    """Return the number of groups of an operation along one dimension."""
    tensor = call["self"]
    return tensor.numel() // max(tensor.shape[call["dim"]], 1) if tensor.dim() else 1


@rule("cumsum cumprod", flops="n - 1 per group", reason="each but the first is one operation on its predecessor")
def _cumulated(call: Call) -> int:
    return _per_number(call.out) * max(size(call.out) - _along(call), 0)


@rule("logsumexp", flops="2 n per group", reason="exp n, add n - 1, log 1; the shift by the maximum is not counted")
def _logsumexp(call: Call) -> int:
    return 2 * elements(call["self"])


@rule("logcumsumexp _logcumsumexp", flops="3 (n - 1) per group", reason="each but the first: exp, add, log")
def _logcumsumexp(call: Call) -> int:
    return 3 * max(elements(call["self"]) - _along(call), 0)


# -- scattered additions ---------------------------------------------------------------------------------------------


@rule(
    "scatter_add scatter_reduce index_add index_reduce",
    flops="1 per element of the source",
    reason="each is added where it belongs",
)
def _scattered(call: Call) -> int:
    return elements(call["src"] if call["src"] is not None else call["source"])


@rule(
    "index_put _index_put_impl _unsafe_index_put",
    flops="1 per value if it accumulates, else 0",
    reason="an addition each, or a copy",
)
def _put(call: Call) -> int:
    return elements(call["values"]) if call["accumulate"] else 0


add(
    "embedding_dense_backward",
    per_input(1, "grad_output"),
    flops="1 per element of the upstream gradient",
    reason="each row is added to that of its index",
)


def _bagged(call: Call) -> Tuple[int, int]:
    """Return (number of values that are looked up, number of values of all bags)."""
    bags = call["grad"] if call["grad"] is not None else call.out[0]
    return call["indices"].numel() * bags.shape[-1], bags.numel()


_SUM, _MEAN, _MAX = range(3)


@rule(
    "_embedding_bag _embedding_bag_forward_only",
    flops="n - 1 per sum, n per mean, 0 per maximum; 1 more per value with weights",
    reason="the reduction of the n rows of a bag, for each feature",
)
def _embedding_bag(call: Call) -> int:
    values, bags = _bagged(call)
    weighted = values if call["per_sample_weights"] is not None else 0
    return weighted + {_SUM: max(values - bags, 0), _MEAN: values, _MAX: 0}[call["mode"]]


@rule(
    "_embedding_bag_backward _embedding_bag_dense_backward",
    flops="1 per value that was looked up; mean: 1 more per element of the upstream gradient; 1 more per value with "
    "weights; maximum: 1 per element of the upstream gradient",
    reason="each is added to the row of its index",
)
def _embedding_bag_backward(call: Call) -> int:
    values, bags = _bagged(call)
    weighted = values if call["per_sample_weights"] is not None else 0
    return weighted + {_SUM: values, _MEAN: values + bags, _MAX: bags}[call["mode"]]


@rule(
    "_embedding_bag_per_sample_weights_backward",
    flops="2 n - 1 per sample of n features",
    reason="the upstream gradient times the row, added up",
)
def _sample_weights_backward(call: Call) -> int:
    return 2 * _bagged(call)[0] - call["indices"].numel()


@rule("_coalesce", flops="1 per element that is added to another", reason="those of one index are added up")
def _coalesced(call: Call) -> int:
    return elements(call["self"]) - elements(call.out)


add("unfold_backward", per_input(1, "grad_in"), flops="1 per element of the gradient", reason="windows overlap")
add("col2im", per_input(1), flops="1 per input", reason="windows overlap: each value is added where it belongs")
add(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward",
    per_input(1, "grad_output"),
    flops="1 per element of the upstream gradient",
    reason="each is added where its value came from",
)

# -- normalisation ---------------------------------------------------------------------------------------------------


add(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm",
    lambda call: (4 if call["weight"] is None else 5) * elements(call["input"]),
    flops="5 per element with weights, 4 without",
    reason="mean, variance, subtract, scale, weight; the same with running statistics, and with or without a bias",
)
add(
    "_fused_rms_norm",
    lambda call: (3 if call["weight"] is None else 4) * elements(call["input"]),
    flops="4 per element with weights, 3 without",
    reason="as the others, but no mean is subtracted",
)


@rule(
    "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward "
    "cudnn_batch_norm_backward",
    flops="13 per element with weights, 9 without",
    reason="the input normalised anew 2, sums of g and g x 3, the input's gradient 4; with weights g w 1, the "
    "weights' gradient 2, the bias's 1.  Gradients that are not asked for are left out",
)
def _normalised_backward(call: Call) -> int:
    weighted = call["weight"] is not None
    wanted = call["output_mask"] or (True, True, True)
    per_element = (2 if wanted[0] or wanted[1] else 0) + ((8 if weighted else 7) if wanted[0] else 0)
    per_element += ((2 if wanted[1] else 0) + (1 if wanted[2] else 0)) if weighted else 0
    return per_element * elements(call["input"])


@rule("_weight_norm_interface", flops="3 n + 1 per row", reason="the row's norm 2 n, g over it 1, times the row n")
def _weight_norm(call: Call) -> int:
    return 3 * elements(call["v"]) + call["v"].shape[call["dim"]]


@rule(
    "_weight_norm_interface_backward",
    flops="5 n + 3 per row",
    reason="sum of g v 2 n, times v and subtracted from the gradient 2 n, times a scale n; three for each row",
)
def _weight_norm_backward(call: Call) -> int:
    weights = call["saved_v"]
    return 5 * elements(weights) + 3 * weights.shape[call["dim"]]
