"""Rules of operators that multiply no matrices: elementwise, reductions, norms, windows, losses, Fourier transforms.

What computes each element by itself and is not here counts by the general rules.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, Callable, List, Tuple

from common.flops.rules import Call, add, add_rows, elements, given, is_complex, nothing, output, size

# Fills, copies, moves, casts, selects, sorts or compares: values are chosen, none is computed.
add(
    "fill zero complex clone copy _copy_from _pin_memory contiguous lift cat stack _stack _chunk_cat block_diag "
    "repeat repeat_interleave flip roll rot90 pixel_shuffle pixel_unshuffle channel_shuffle tril triu diag_embed set "
    "resize resize_as _unsafe_view _conj_physical conj_physical unsafe_split unsafe_split_with_sizes im2col "
    "_pack_padded_sequence to_padded_tensor _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward "
    "quantize_per_tensor dequantize _cudnn_rnn_flatten_weight _mkldnn_reshape _mkldnn_transpose "
    "mkldnn_reorder_conv2d_weight to_mkldnn record_stream linspace logspace index gather take select_backward "
    "slice_backward diagonal_backward index_select index_fill index_copy put embedding embedding_renorm masked_select "
    "masked_scatter_backward masked_fill where _unsafe_index _unsafe_masked_index scatter nonzero nonzero_static "
    "max_unpool2d max_unpool3d max min amax amin aminmax _aminmax maximum minimum fmax fmin clamp clamp_min clamp_max "
    "sort topk kthvalue median nanmedian mode msort argsort searchsorted bucketize cummax cummin _cummax_helper "
    "_cummin_helper unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 isin all any _is_all_true "
    "_is_any_true argmax argmin count_nonzero bincount histc heaviside nan_to_num _functional_assert_async "
    "quantized::linear_prepack quantized::linear_unpack",
    nothing,
)


def _magnitude(whole: int) -> Callable[[Call], int]:
    return lambda call: whole * size(call.out) if is_complex(call["self"]) else output(call)


def _multiplied(whole: int) -> Callable[[Call], int]:
    """Count `whole` for each product of complex numbers, 2 where one of both is real."""
    return lambda call: elements(call.out, whole if is_complex(call["self"]) and is_complex(call["other"]) else 2)


def _fused_step(call: Call) -> int:
    """Count the step of an optimizer as the operators of one tensor, of which it is made."""
    name = call.name.replace("aten::_fused_", "").rstrip("_")
    each = {"adam": 13, "adamw": 13, "adagrad": 7, "sgd": 2}[name] + bool(call["maximize"])
    each += (1 if name == "adamw" else 2) * bool(call["weight_decay"])
    if call["momentum"]:
        each += (0 if call["is_first_step"] else 2 + bool(call["dampening"])) + 2 * bool(call["nesterov"])
    return each * elements(call["self"])


# The shift of a softmax by its maximum is not counted.
add_rows(
    ("log_sigmoid_forward rrelu_with_noise rrelu_with_noise_functional", given("self"), 1),
    ("abs", _magnitude(4), 1),  # of a complex number two squares, their sum and a root
    ("angle", _magnitude(1), 1),
    ("sgn", _magnitude(6), 1),  # z / |z|
    ("mul", _multiplied(6), 1),
    ("div", _multiplied(11), 1),
    ("add sub rsub", lambda call: (1 if call["alpha"] in (None, 1) else 2) * output(call), 1),
    # lists of tensors may have a factor for each
    (
        "addcmul addcdiv",
        lambda call: (
            (2 if (call["scalars"] if call["value"] is None else call["value"]) in (None, 1) else 3) * output(call)
        ),
        1,
    ),
    ("glu", output, 2),
    ("linalg_cross lerp", output, 3),
    ("logaddexp logaddexp2", output, 4),
    (
        "_softmax _log_softmax _safe_softmax _masked_softmax softmax log_softmax _nested_tensor_softmax_with_shape",
        output,
        3,
    ),
    ("_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward", output, 4),
    (
        "threshold_backward hardtanh_backward leaky_relu_backward hardsigmoid_backward hardshrink_backward "
        "softshrink_backward rrelu_with_noise_backward",
        output,
        1,
    ),
    ("sigmoid_backward tanh_backward", output, 3),
    ("_prelu_kernel_backward", given("self"), 2),
    ("glu_backward", given("grad_output"), 5),
    ("native_dropout _fused_dropout", lambda call: 0 if call["train"] is False else elements(call.out[0]), 2),
    ("native_dropout_backward _masked_scale", output, 2),
    ("_amp_foreach_non_finite_check_and_unscale", given("self"), 1),
    ("_fused_adam _fused_adamw _fused_adagrad _fused_sgd", _fused_step, 1),
)

# -- reductions ------------------------------------------------------------------------------------------------------


def _number(tensor: Any) -> int:
    """Return 2 where a number is complex, 0 where it is an integer, else 1."""
    return elements(tensor) // max(size(tensor), 1)


def _norm(call: Call) -> int:
    """Power, sum and root; of order 1 no root, of infinite order the absolute values."""
    order = call["ord"] if call["ord"] is not None else call["p"]
    if order in (0, math.inf, -math.inf):
        return elements(call["self"]) if order else 0
    return 2 * elements(call["self"]) - (output(call) if order == 1 else 0)


def _along(call: Call) -> int:
    """Return the number of groups of an operation along one dimension."""
    tensor = call["self"]
    return tensor.numel() // max(tensor.shape[call["dim"]], 1) if tensor.dim() else 1


def _normalised(weighted: int, plain: int) -> Callable[[Call], int]:
    return lambda call: (plain if call["weight"] is None else weighted) * elements(call["input"])


def _normalised_backward(call: Call) -> int:
    """The input normalised anew 2, sums of g and g x 3, the input's gradient 4; with weights g w 1, their gradient 2,
    the bias's 1.  Gradients that are not asked for are left out."""
    weighted = call["weight"] is not None
    wanted = call["output_mask"] or (True, True, True)
    each = (2 if wanted[0] or wanted[1] else 0) + (7 + weighted) * wanted[0]
    return (each + weighted * (2 * wanted[1] + wanted[2])) * elements(call["input"])


def _bag(modes: Tuple[Tuple[int, int], ...], call: Call) -> int:
    """Count (per value that is looked up, per value of a bag) by the mode: sum, mean, largest; 1 more per value with
    weights."""
    bags = call["grad"] if call["grad"] is not None else call.out[0]
    values = call["indices"].numel() * bags.shape[-1]
    per_value, per_bag = modes[call["mode"]]
    weights = values if call["per_sample_weights"] is not None else 0
    return weights + max(per_value * values + per_bag * bags.numel(), 0)


add_rows(
    ("sum prod nansum", lambda call: _number(call.out) * max(size(call["self"]) - size(call.out), 0), 1),
    ("trace", lambda call: _number(call.out) * max(min(call["self"].shape) - 1, 0), 1),
    ("mean", lambda call: _number(call.out) * size(call["self"]), 1),
    ("var var_mean", given("self"), 4),
    ("std", lambda call: 4 * elements(call["self"]) + output(call), 1),
    ("std_mean", lambda call: 4 * elements(call["self"]) + elements(call.out[0]), 1),
    ("linalg_vector_norm norm", _norm, 1),
    ("dist", lambda call: max(elements(call["self"]), elements(call["other"])), 3),
    # a difference, its power and a sum for each coordinate of each pair
    (
        "_cdist_forward _pdist_forward",
        lambda call: output(call) * (call["self"] if call["x1"] is None else call["x1"]).shape[-1],
        3,
    ),
    ("cumsum cumprod", lambda call: _number(call.out) * max(size(call.out) - _along(call), 0), 1),
    ("logsumexp", given("self"), 2),
    ("logcumsumexp _logcumsumexp", lambda call: max(elements(call["self"]) - _along(call), 0), 3),
    (
        "scatter_add scatter_reduce index_add index_reduce",
        lambda call: elements(call["src"] if call["src"] is not None else call["source"]),
        1,
    ),
    (
        "index_put _index_put_impl _unsafe_index_put",
        lambda call: elements(call["values"]) if call["accumulate"] else 0,
        1,
    ),
    ("embedding_dense_backward", given("grad_output"), 1),
    ("_embedding_bag _embedding_bag_forward_only", partial(_bag, ((1, -1), (1, 0), (0, 0))), 1),
    ("_embedding_bag_backward _embedding_bag_dense_backward", partial(_bag, ((1, 0), (1, 1), (0, 1))), 1),
    (
        "_embedding_bag_per_sample_weights_backward",
        lambda call: call["indices"].numel() * (2 * call["grad"].shape[-1] - 1),
        1,
    ),
    ("_coalesce", lambda call: elements(call["self"]) - output(call), 1),
    ("unfold_backward", given("grad_in"), 1),
    ("col2im", given("self"), 1),
    (
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update "
        "_batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm",
        _normalised(5, 4),
        1,
    ),
    ("_fused_rms_norm", _normalised(4, 3), 1),
    (
        "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward "
        "cudnn_batch_norm_backward",
        _normalised_backward,
        1,
    ),
    ("_weight_norm_interface", lambda call: 3 * elements(call["v"]) + call["v"].shape[call["dim"]], 1),
    (
        "_weight_norm_interface_backward",
        lambda call: 5 * elements(call["saved_v"]) + 3 * call["saved_v"].shape[call["dim"]],
        1,
    ),
)

# -- windows ---------------------------------------------------------------------------------------------------------


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


add_rows(
    ("avg_pool1d avg_pool2d avg_pool3d", lambda call: _window(call) * output(call), 1),
    (
        "avg_pool2d_backward avg_pool3d_backward",
        lambda call: (_window(call) + 1) * elements(call["grad_output"]),
        1,
    ),
    (
        "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d",
        lambda call: _adaptive_windows(call, call.out),
        1,
    ),
    (
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
        lambda call: _adaptive_windows(call, call["grad_output"]) + elements(call["grad_output"]),
        1,
    ),
    (
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward upsample_nearest1d_backward upsample_nearest2d_backward "
        "upsample_nearest3d_backward reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward "
        "replication_pad2d_backward",
        given("grad_output"),
        1,
    ),
    # 2, 4 or 8 neighbours weighted and added up; the weights depend on the place alone
    (
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
        lambda call: (2 * 2 ** _dims(call) - 1) * output(call),
        1,
    ),
    (
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward",
        lambda call: 2 ** _dims(call) * elements(call["grad_output"]),
        2,
    ),
)

# -- losses and Fourier transforms -----------------------------------------------------------------------------------


def _loss(per_element: int) -> Callable[[Call], int]:
    return lambda call: per_element * elements(call["self"]) + _reduced(call, elements(call["self"]))


def _reduced(call: Call, count: int) -> int:
    """Count the operations that reduce `count` numbers as the argument `reduction` says: none, mean or sum."""
    return (0, count, max(count - 1, 0))[call["reduction"]]


def _nll(call: Call) -> int:
    targets = size(call["target"])
    return (targets + _reduced(call, targets)) if elements(call["self"]) else 0


def _ctc_lengths(call: Call) -> List[Tuple[int, int]]:
    """Return (frames, labels) of each utterance."""
    return [(int(T), int(U)) for T, U in zip(call["input_lengths"], call["target_lengths"])]


def _ctc_recursion(T: int, U: int) -> int:
    """Count alpha or beta: blanks have 2 states before them, labels 3; a sum of two in the log domain is 4."""
    return max(T - 1, 0) * (U * (2 * 4 + 1) + (U + 1) * (4 + 1))


def _ctc(call: Call) -> int:
    """Alpha, and the sum of its last two states; equal neighbours and corners count as the others do."""
    return sum(_ctc_recursion(T, U) + 5 for T, U in _ctc_lengths(call))


def _ctc_gradient(call: Call) -> int:
    """Beta; alpha + beta added to its symbol, 5 per state; 6 per symbol: two exponentials, their arguments 2, their
    difference, times the upstream gradient."""
    V = call["log_probs"].shape[-1]
    return sum(_ctc_recursion(T, U) + T * (5 * (2 * U + 1) + 6 * V) for T, U in _ctc_lengths(call))


def _fourier(call: Call) -> int:
    """The usual count of the radix-2 algorithm, for every n; an output more where it is normalised."""
    source = call.out if "c2r" in call.name else call["self"]
    lengths = math.prod(source.shape[dim] for dim in call["dim"])
    total = (5 if "c2c" in call.name else 2.5) * source.numel() * math.log2(max(lengths, 1))
    return round(total) + (output(call) if call["normalization"] else 0)


add_rows(
    ("mse_loss", _loss(2), 1),
    ("smooth_l1_loss huber_loss binary_cross_entropy_with_logits", _loss(4), 1),
    ("binary_cross_entropy", _loss(8), 1),  # -(y log x + (1 - y) log(1 - x))
    ("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", output, 3),
    ("binary_cross_entropy_backward", output, 5),
    ("nll_loss_forward nll_loss2d_forward", _nll, 1),
    ("nll_loss_backward nll_loss2d_backward", lambda call: size(call["target"]) if output(call) else 0, 2),
    ("_ctc_loss", _ctc, 1),
    ("_ctc_loss_backward", _ctc_gradient, 1),
    ("_cudnn_ctc_loss", lambda call: _ctc(call) + _ctc_gradient(call), 1),  # its forward computes the gradient
    ("_fft_c2c _fft_r2c _fft_c2r", _fourier, 1),
)
