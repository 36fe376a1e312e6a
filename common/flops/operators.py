"""Rules of operators of torch that are no products: elementwise functions, reductions, norms,
windows, losses, Fourier transforms.

An elementwise operator that is not here counts by the general rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from rnnt_bench.flops.rules import (
    Call,
    add,
    argument,
    elements,
    is_complex,
    nothing,
    output,
    size,
)

# These fill, copy, move, cast, select, sort or compare numbers, and compute none.
add(
    """fill zero complex clone copy _copy_from _pin_memory contiguous lift cat stack _stack _chunk_cat block_diag
    repeat repeat_interleave flip roll rot90 pixel_shuffle pixel_unshuffle channel_shuffle tril triu diag_embed set
    resize resize_as _unsafe_view _conj_physical conj_physical unsafe_split unsafe_split_with_sizes im2col
    _pack_padded_sequence quantize_per_tensor dequantize _cudnn_rnn_flatten_weight _mkldnn_reshape
    _mkldnn_transpose mkldnn_reorder_conv2d_weight to_mkldnn record_stream linspace logspace index gather take
    select_backward slice_backward diagonal_backward index_select index_fill index_copy put embedding
    embedding_renorm masked_select masked_scatter_backward masked_fill where _unsafe_index _unsafe_masked_index
    scatter nonzero nonzero_static max_unpool2d max_unpool3d max min amax amin aminmax _aminmax maximum minimum
    fmax fmin clamp clamp_min clamp_max sort topk kthvalue median nanmedian mode msort argsort searchsorted
    bucketize cummax cummin _cummax_helper _cummin_helper unique_dim unique_consecutive unique_dim_consecutive
    _unique _unique2 isin all any _is_all_true _is_any_true argmax argmin count_nonzero bincount histc heaviside
    nan_to_num _functional_assert_async quantized::linear_prepack""",
    nothing,
)


def _unary(per_complex: int) -> Callable[[Call], int]:
    """Return a rule that counts `per_complex` for each complex number, 1 for each real one."""
    return lambda call: per_complex * size(call.out) if is_complex(call["self"]) else output(call)


def _binary(per_complex: int) -> Callable[[Call], int]:
    """Return a rule that counts for each output: `per_complex` for two complex numbers, 2 for a
    complex and a real one, 1 for two real ones."""

    def count(call: Call) -> int:
        both = is_complex(call["self"]) and is_complex(call["other"])
        # If both operands are real, so is the output: its elements count 1 whatever this factor.
        return elements(call.out, complex_factor=per_complex if both else 2)

    return count


def _scaled_product(call: Call) -> int:
    """Count a product or quotient and a sum for each output, and a further product for a scale
    that is not 1: the argument `value`.

    Operators on lists of tensors may have `scalars` in place of `value`, one for each tensor."""
    scale = call["scalars"] if call["value"] is None else call["value"]
    return (2 if scale in (None, 1) else 3) * output(call)


add(
    """log_sigmoid_forward rrelu_with_noise rrelu_with_noise_functional
    _amp_foreach_non_finite_check_and_unscale col2im""",
    argument("self"),
)
add("_prelu_kernel_backward logsumexp", argument("self"), 2)
add("var var_mean", argument("self"), 4)  # a sum, a difference, its square, and their sum
add("abs", _unary(4))  # two squares, their sum and a root for a complex number
add("angle", _unary(1))
add("sgn", _unary(6))  # z / |z|
add("mul", _binary(6))  # 4 products and 2 sums
add("div", _binary(11))  # 6 as a product, 3 for |w|^2, 2 quotients
# A factor `alpha` other than 1 is a product more.
add("add sub rsub", lambda call: (1 if call["alpha"] in (None, 1) else 2) * output(call))
add("addcmul addcdiv", _scaled_product)
add(
    """threshold_backward hardtanh_backward leaky_relu_backward hardsigmoid_backward hardshrink_backward
    softshrink_backward rrelu_with_noise_backward""",
    output,
)
add("glu native_dropout_backward _masked_scale", output, 2)
# The shift of a softmax by its maximum is not counted.
add(
    """linalg_cross lerp _softmax _log_softmax _safe_softmax _masked_softmax softmax log_softmax sigmoid_backward
    tanh_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward""",
    output,
    3,
)
add(
    """logaddexp logaddexp2 _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward""",
    output,
    4,
)
add("binary_cross_entropy_backward", output, 5)
add("glu_backward", argument("grad_output"), 5)
add(
    "native_dropout _fused_dropout",
    lambda call: 0 if call["train"] is False else elements(call.out[0]),
    2,
)


def _per_sum(tensor: Any) -> int:
    """Return the FLOPs of a sum of two numbers of this tensor: 2 if they are complex, 1 if they are
    real, 0 if they are integers or the tensor is empty.

    `elements` counts each number so, which makes its quotient by the size the FLOPs of one sum."""
    return elements(tensor) // max(size(tensor), 1)


def _norm(call: Call) -> int:
    """Count for each norm of n numbers n powers, n - 1 sums and a root: 2 n.

    Order 1 has no root, so one less.  An infinite order counts n absolute values alone, and order 0
    counts nothing."""
    # linalg_vector_norm has `ord`, norm has `p` (None: 2).
    order = call["p"] if call["ord"] is None else call["ord"]
    per_element = {0: 0, math.inf: 1, -math.inf: 1}.get(order, 2)
    return per_element * elements(call["self"]) - (output(call) if order == 1 else 0)


# The numbers of the modes of an embedding bag.
_BAG_SUM, _BAG_MEAN, _BAG_MAX = range(3)


def _embedding_bag(call: Call) -> int:
    """Count the sums of the rows in each bag: an addition for each number of a row but the first.

    A mean also divides each number of the output.  A maximum counts nothing.  With weights, each
    number of each row is multiplied first."""
    bags = call.out[0]
    numbers = call["indices"].numel() * bags.shape[-1]
    weighted = 0 if call["per_sample_weights"] is None else numbers
    reduced = {
        _BAG_SUM: max(numbers - bags.numel(), 0),
        _BAG_MEAN: numbers,  # those of a sum, and a division for each number of `bags`
        _BAG_MAX: 0,
    }
    return weighted + reduced[call["mode"]]


def _embedding_bag_backward(call: Call) -> int:
    """Count the additions of the gradient of each bag to the gradients of the rows in it.

    A mean also divides each number of the bags' gradients.  A maximum adds each of them to one row
    alone.  With weights, each number that is added to a row is multiplied first."""
    bags = call["grad"]
    numbers = call["indices"].numel() * bags.shape[-1]
    weighted = 0 if call["per_sample_weights"] is None else numbers
    spread = {
        _BAG_SUM: numbers,
        _BAG_MEAN: numbers + bags.numel(),
        _BAG_MAX: bags.numel(),
    }
    return weighted + spread[call["mode"]]


def _vectors(call: Call) -> int:
    """Return how many vectors the tensor `self` has along the dimension `dim`; 1 for a scalar."""
    tensor = call["self"]
    return tensor.numel() // max(tensor.shape[call["dim"]], 1) if tensor.dim() else 1


def _normalised(per_element: int) -> Callable[[Call], int]:
    """Return a rule that counts `per_element` for each number of the input, and 1 more for each if
    the norm has weights."""

    def count(call: Call) -> int:
        weighted = 0 if call["weight"] is None else 1
        return (per_element + weighted) * elements(call["input"])

    return count


def _normalised_backward(call: Call) -> int:
    """Count the gradients of a norm that are asked for.

    The counts are for each number of the input x.  It takes 2 to normalise the input again.  Let g
    be the gradient of the output, and w the weights.  The gradient of the input takes 3 for the
    sums of g and g x, 4 for itself, and 1 for g w if there are weights.  The gradient of the
    weights takes 2, that of the bias 1.  A norm without weights has no bias."""
    weighted = call["weight"] is not None
    to_input, to_weight, to_bias = call["output_mask"] or (True, True, True)
    per_element = 0
    if to_input or to_weight:
        per_element += 2
    if to_input:
        per_element += 3 + 4 + weighted
    if weighted:
        per_element += 2 * to_weight + to_bias
    return per_element * elements(call["input"])


def _weight_norm(call: Call, weight: str, per_element: int, per_row: int) -> int:
    """Count a norm of each row of the argument that is called `weight`: `per_element` for each of
    its numbers, and `per_row` for each row.  There is a row for each index of the dimension
    `dim`."""
    return per_element * elements(call[weight]) + per_row * call[weight].shape[call["dim"]]


add(
    "sum prod nansum", lambda call: _per_sum(call.out) * max(size(call["self"]) - size(call.out), 0)
)
add("trace", lambda call: _per_sum(call.out) * max(min(call["self"].shape) - 1, 0))
add("mean", lambda call: _per_sum(call.out) * size(call["self"]))
add("std", lambda call: 4 * elements(call["self"]) + output(call))
add("std_mean", lambda call: 4 * elements(call["self"]) + elements(call.out[0]))
add("linalg_vector_norm norm", _norm)
add("cumsum cumprod", lambda call: _per_sum(call.out) * max(size(call.out) - _vectors(call), 0))
add("logcumsumexp _logcumsumexp", lambda call: max(elements(call["self"]) - _vectors(call), 0), 3)
add(
    "scatter_add scatter_reduce index_add index_reduce",
    lambda call: elements(call["source"] if call["src"] is None else call["src"]),
)
add(
    "index_put _index_put_impl _unsafe_index_put",
    lambda call: elements(call["values"]) if call["accumulate"] else 0,
)
add("_embedding_bag _embedding_bag_forward_only", _embedding_bag)
add("_embedding_bag_backward _embedding_bag_dense_backward", _embedding_bag_backward)
# The gradient of each weight is a dot product of D numbers: D products, D - 1 sums.
add(
    "_embedding_bag_per_sample_weights_backward",
    lambda call: call["indices"].numel() * (2 * call["grad"].shape[-1] - 1),
)
# For each pair of vectors and each coordinate there are a difference, its power and a sum; in the
# backward as many, and a factor of each pair.
add("_cdist_forward", lambda call: output(call) * call["x1"].shape[-1], 3)
add("_pdist_forward", lambda call: output(call) * call["self"].shape[-1], 3)
add("_cdist_backward", lambda call: size(call["cdist"]) * (3 * call["x1"].shape[-1] + 1))
add("_pdist_backward", lambda call: size(call["pdist"]) * (3 * call["self"].shape[-1] + 1))
add("unfold_backward", argument("grad_in"))
add(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm""",
    _normalised(4),
)
add("_fused_rms_norm", _normalised(3))
add(
    """native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward
    cudnn_batch_norm_backward""",
    _normalised_backward,
)
add("_weight_norm_interface", lambda call: _weight_norm(call, "v", 3, 1))
add("_weight_norm_interface_backward", lambda call: _weight_norm(call, "saved_v", 5, 3))


def _dims(call: Call) -> int:
    """Return the number of dimensions in an operator's name: 2 of "aten::avg_pool2d_backward"."""
    return int(re.findall(r"(\d)d", call.name)[-1])


def _window(call: Call) -> int:
    """Return how many numbers of the input are in a window."""
    kernel = call["kernel_size"]  # a size for each dimension, or a single one for all of them
    dims = _dims(call)
    return math.prod(kernel) if len(kernel) == dims else kernel[0] ** dims


def _in_windows(call: Call, pooled: Any) -> int:
    """Return how many numbers are in all windows of an adaptive pooling that gives a tensor like
    `pooled`: window i of n begins at floor(i L / n) and ends at ceil((i + 1) L / n).

    A number that is in two windows counts twice."""
    shape = call["self"].shape
    dims = _dims(call)
    total = math.prod(shape[:-dims])
    for length, count in zip(shape[-dims:], pooled.shape[-dims:]):
        begins = [index * length // count for index in range(count)]
        # -(a // -b) is a / b, rounded up.
        ends = [-(index * length // -count) for index in range(1, count + 1)]
        total *= sum(ends) - sum(begins)
    return total


add("avg_pool1d avg_pool2d avg_pool3d", lambda call: _window(call) * output(call))
add(
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    lambda call: _in_windows(call, call.out),
)
add(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    lambda call: _in_windows(call, call["grad_output"]) + elements(call["grad_output"]),
)
add(
    "avg_pool2d_backward avg_pool3d_backward",
    lambda call: (_window(call) + 1) * elements(call["grad_output"]),
)
add(
    """embedding_dense_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward reflection_pad1d_backward reflection_pad2d_backward
    replication_pad1d_backward replication_pad2d_backward""",
    argument("grad_output"),
)
# 2, 4 or 8 neighbours are weighted and added up; their weights depend on the position alone.
add(
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    lambda call: (2 * 2 ** _dims(call) - 1) * output(call),
)
add(
    "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward",
    lambda call: 2 ** _dims(call) * elements(call["grad_output"]),
    2,
)

# -- losses and Fourier transforms -----------------------------------------------------------------


def _loss(per_element: int) -> Callable[[Call], int]:
    """Return a rule that counts `per_element` operations for each number of the input, and those of
    the reduction."""

    def count(call: Call) -> int:
        numbers = elements(call["self"])
        return per_element * numbers + _reduced(call, numbers)

    return count


def _target_loss(call: Call) -> int:
    """Count 1 for each target, 0 for an empty input; and the operations of the reduction."""
    targets = size(call["target"]) if elements(call["self"]) else 0
    return targets + _reduced(call, targets)


# The numbers of torch's reductions; that of a sum is 2.
_NO_REDUCTION, _MEAN = 0, 1


def _reduced(call: Call, count: int) -> int:
    """Count what reduces `count` numbers to one: the additions, and for a mean one division more.
    Return 0 if the call does not reduce them."""
    if call["reduction"] == _NO_REDUCTION:
        return 0
    return count if call["reduction"] == _MEAN else max(count - 1, 0)


def _ctc_lengths(call: Call) -> list[tuple[int, int]]:
    """Return T and U of each utterance."""
    return list(zip(map(int, call["input_lengths"]), map(int, call["target_lengths"])))


def _ctc_recursion(T: int, U: int) -> int:
    """Count alpha, or beta, of an utterance, which has 2 U + 1 states.

    A blank is reached from 2 states, a label from 3: a sum for each log-probability, and 4 for each
    sum of two in the log domain.  Equal neighbours and the first states count as the others do."""
    per_frame = U * (2 * 4 + 1) + (U + 1) * (4 + 1)
    return max(T - 1, 0) * per_frame


def _ctc(call: Call) -> int:
    """Count alpha of all utterances, and 5 for the sum of the last two states of each."""
    return sum(_ctc_recursion(T, U) + 5 for T, U in _ctc_lengths(call))


def _ctc_gradient(call: Call) -> int:
    """Count beta of all utterances, and in each frame 5 for each state and 6 for each symbol.

    A state takes 1 for alpha + beta, and 4 to add alpha + beta to the sum of the state's symbol in
    the log domain.  A symbol takes 2 for two exponentials, 2 for their arguments, 1 for their
    difference, and 1 for the product of the difference and the upstream gradient."""
    V = call["log_probs"].shape[-1]
    lengths = _ctc_lengths(call)
    return sum(_ctc_recursion(T, U) + T * (5 * (2 * U + 1) + 6 * V) for T, U in lengths)


def _fourier(call: Call) -> int:
    """Count 5 n log2(n) for a complex transform of n values, half of that for a real one, and 1 for
    each output that is normalised.

    The first is the usual count of the radix-2 algorithm.  Here it is used for every n."""
    # Of a real transform these are the values of the real side: the complex side has only about
    # half as many.
    values = call.out if "c2r" in call.name else call["self"]
    n = math.prod(values.shape[dim] for dim in call["dim"])
    total = (5 if "c2c" in call.name else 2.5) * values.numel() * math.log2(max(n, 1))
    return round(total) + (output(call) if call["normalization"] else 0)


add("mse_loss", _loss(2))
add("smooth_l1_loss huber_loss binary_cross_entropy_with_logits", _loss(4))
add("binary_cross_entropy", _loss(8))  # -(y log x + (1 - y) log(1 - x))
add("nll_loss_forward nll_loss2d_forward", _target_loss)
add(
    "nll_loss_backward nll_loss2d_backward",
    lambda call: size(call["target"]) if output(call) else 0,
    2,
)
add("_ctc_loss", _ctc)
add("_ctc_loss_backward", _ctc_gradient)
# The forward of cuDNN computes the gradient too.
add("_cudnn_ctc_loss", lambda call: _ctc(call) + _ctc_gradient(call))
add("_fft_c2c _fft_r2c _fft_c2r", _fourier)
