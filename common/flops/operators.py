"""Rules of what is no product of torch: elementwise, reductions, norms, windows, losses, Fourier transforms, and the
kernels of transducer losses.

What computes each element by itself and is not here counts by the general rules.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Callable, List, Sequence, Tuple

from rnnt_bench.flops.rules import (
    Call,
    Count,
    add,
    add_rows,
    elements,
    given,
    is_complex,
    nothing,
    output,
    products,
    size,
)

# Fills, copies, moves, casts, selects, sorts or compares: values are chosen, none is computed.
add(
    "fill zero complex clone copy _copy_from _pin_memory contiguous lift cat stack _stack _chunk_cat block_diag "
    "repeat repeat_interleave flip roll rot90 pixel_shuffle pixel_unshuffle channel_shuffle tril triu diag_embed set "
    "resize resize_as _unsafe_view _conj_physical conj_physical unsafe_split unsafe_split_with_sizes im2col "
    "_pack_padded_sequence quantize_per_tensor dequantize _cudnn_rnn_flatten_weight _mkldnn_reshape _mkldnn_transpose "
    "mkldnn_reorder_conv2d_weight to_mkldnn record_stream linspace logspace index gather take select_backward "
    "slice_backward diagonal_backward index_select index_fill index_copy put embedding embedding_renorm masked_select "
    "masked_scatter_backward masked_fill where _unsafe_index _unsafe_masked_index scatter nonzero nonzero_static "
    "max_unpool2d max_unpool3d max min amax amin aminmax _aminmax maximum minimum fmax fmin clamp clamp_min clamp_max "
    "sort topk kthvalue median nanmedian mode msort argsort searchsorted bucketize cummax cummin _cummax_helper "
    "_cummin_helper unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 isin all any _is_all_true "
    "_is_any_true argmax argmin count_nonzero bincount histc heaviside nan_to_num _functional_assert_async "
    "quantized::linear_prepack",
    nothing,
)


def _magnitude(whole: int) -> Callable[[Call], int]:
    return lambda call: whole * size(call.out) if is_complex(call["self"]) else output(call)


def _multiplied(whole: int) -> Callable[[Call], int]:
    """Count `whole` for each product of complex numbers, 2 where one of both is real."""
    return lambda call: elements(call.out, whole if is_complex(call["self"]) and is_complex(call["other"]) else 2)


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
    ("_softmax _log_softmax _safe_softmax _masked_softmax softmax log_softmax", output, 3),
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
)


def _number(tensor: Any) -> int:
    """Return 2 where a number is complex, 0 where it is an integer, else 1."""
    return elements(tensor) // max(size(tensor), 1)


def _norm(call: Call) -> int:
    """Power, sum and root; of order 1 no root, of infinite order the absolute values."""
    order = call["ord"] if call["ord"] is not None else call["p"]
    each = {0: 0, math.inf: 1, -math.inf: 1}.get(order, 2)
    return each * elements(call["self"]) - (output(call) if order == 1 else 0)


def _bags(call: Call, summed: int, highest: int) -> int:
    """Count the rows that are looked up: added up, weighted, and divided where the mode (sum, mean, max) is the mean.
    summed: operations of a bag's sum beside 1 for each row; highest: of a maximum."""
    bags = call["grad"] if call["grad"] is not None else call.out[0]
    values = call["indices"].numel() * bags.shape[-1]
    weighted = values if call["per_sample_weights"] is not None else 0
    by_mode = (max(values + summed * bags.numel(), 0), values + (1 + summed) * bags.numel(), highest * bags.numel())
    return weighted + by_mode[call["mode"]]


def _along(call: Call) -> int:
    """Count the groups of an operation along one dimension."""
    tensor = call["self"]
    return tensor.numel() // max(tensor.shape[call["dim"]], 1) if tensor.dim() else 1


def _normalised_backward(call: Call) -> int:
    """The input normalised anew 2, sums of g and g x 3, the input's gradient 4; with weights g w 1, their gradient 2,
    the bias's 1.  Gradients that are not asked for are left out."""
    weighted = call["weight"] is not None
    wanted = call["output_mask"] or (True, True, True)
    each = (2 if wanted[0] or wanted[1] else 0) + (7 + weighted) * wanted[0]
    return (each + weighted * (2 * wanted[1] + wanted[2])) * elements(call["input"])


add_rows(
    ("sum prod nansum", lambda call: _number(call.out) * max(size(call["self"]) - size(call.out), 0), 1),
    ("trace", lambda call: _number(call.out) * max(min(call["self"].shape) - 1, 0), 1),
    ("mean", lambda call: _number(call.out) * size(call["self"]), 1),
    ("var var_mean", given("self"), 4),
    ("std", lambda call: 4 * elements(call["self"]) + output(call), 1),
    ("std_mean", lambda call: 4 * elements(call["self"]) + elements(call.out[0]), 1),
    ("linalg_vector_norm norm", _norm, 1),
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
    ("_embedding_bag _embedding_bag_forward_only", lambda call: _bags(call, -1, 0), 1),
    ("_embedding_bag_backward _embedding_bag_dense_backward", lambda call: _bags(call, 0, 1), 1),
    (
        "_embedding_bag_per_sample_weights_backward",
        lambda call: call["indices"].numel() * (2 * call["grad"].shape[-1] - 1),
        1,
    ),
    # of each pair and coordinate a difference, its power and a sum; backward times the upstream gradient over the power
    ("_cdist_forward", lambda call: output(call) * call["x1"].shape[-1], 3),
    ("_pdist_forward", lambda call: output(call) * call["self"].shape[-1], 3),
    ("_cdist_backward", lambda call: size(call["cdist"]) * (3 * call["x1"].shape[-1] + 1), 1),
    ("_pdist_backward", lambda call: size(call["pdist"]) * (3 * call["self"].shape[-1] + 1), 1),
    ("unfold_backward", given("grad_in"), 1),
    ("col2im", given("self"), 1),
    (
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update "
        "_batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm",
        lambda call: (5 - (call["weight"] is None)) * elements(call["input"]),
        1,
    ),
    ("_fused_rms_norm", lambda call: (4 - (call["weight"] is None)) * elements(call["input"]), 1),
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


def _dims(call: Call) -> int:
    """Return 2 of "aten::avg_pool2d_backward"."""
    return int(re.findall(r"(\d)d", call.name)[-1])


def _window(call: Call) -> int:
    kernel, dims = call["kernel_size"], _dims(call)
    return math.prod(kernel) if len(kernel) == dims else kernel[0] ** dims


def _adaptive(call: Call, narrow: Any) -> int:
    """Return how many numbers are in all windows of the input that give a tensor like `narrow`."""
    wide, dims = call["self"].shape, _dims(call)
    total = math.prod(wide[:-dims])
    for length, count in zip(wide[-dims:], narrow.shape[-dims:]):
        total *= sum(-((index + 1) * length // -count) - index * length // count for index in range(count))
    return total


add_rows(
    ("avg_pool1d avg_pool2d avg_pool3d", lambda call: _window(call) * output(call), 1),
    ("adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d", lambda call: _adaptive(call, call.out), 1),
    (
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
        lambda call: _adaptive(call, call["grad_output"]) + elements(call["grad_output"]),
        1,
    ),
    ("avg_pool2d_backward avg_pool3d_backward", lambda call: (_window(call) + 1) * elements(call["grad_output"]), 1),
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


def _ctc(last: int, state: int, symbol: int) -> Callable[[Call], int]:
    """Count alpha or beta: blanks have 2 states before them, labels 3; a sum of two in the log domain is 4; equal
    neighbours and corners count as the others do.  And `last`, and for each frame so many per state and per symbol."""

    def count(call: Call) -> int:
        V, shapes = call["log_probs"].shape[-1], zip(map(int, call["input_lengths"]), map(int, call["target_lengths"]))
        recursions = ((max(T - 1, 0) * (U * (2 * 4 + 1) + (U + 1) * (4 + 1)), T, U) for T, U in shapes)
        return sum(beta + last + T * (state * (2 * U + 1) + symbol * V) for beta, T, U in recursions)

    return count


#: Alpha, and the sum of its last two states.  Beta; alpha + beta added to its symbol, 5 per state; 6 per symbol: two
#: exponentials, their arguments 2, their difference, times the upstream gradient.
_CTC, _CTC_GRADIENT = _ctc(5, 0, 0), _ctc(0, 5, 6)


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
    (
        "nll_loss_forward nll_loss2d_forward",
        lambda call: size(call["target"]) + _reduced(call, size(call["target"])) if elements(call["self"]) else 0,
        1,
    ),
    ("nll_loss_backward nll_loss2d_backward", lambda call: size(call["target"]) if output(call) else 0, 2),
    ("_ctc_loss", _CTC, 1),
    ("_ctc_loss_backward", _CTC_GRADIENT, 1),
    ("_cudnn_ctc_loss", lambda call: _CTC(call) + _CTC_GRADIENT(call), 1),  # its forward computes the gradient
    ("_fft_c2c _fft_r2c _fft_c2r", _fourier, 1),
)

# -- transducer losses: kernels that are no operators of torch --------------------------------------------------------
# Logits are (N, T, U + 1, V).  Each utterance's own lattice is counted; none of these losses runs on the meta device,
# which has no lengths to read.  The counts follow the packages' CPU sources; the sum of two probabilities in the log
# domain is 4 (subtract, exp, log1p, add).

Shapes = Sequence[Tuple[int, int]]


def _shapes(T_lengths: Any, U_lengths: Any) -> List[Tuple[int, int]]:
    return list(zip(T_lengths.tolist(), U_lengths.tolist()))


def _lattice(T: int, U: int) -> int:
    """Count forward (or backward) variables: two sums and their sum in the log domain within, one sum on both edges."""
    return 6 * (T - 1) * U + (T - 1) + U


def _marked(T: int, U: int) -> int:
    """Count the elements of blanks and targets, but for the last blank."""
    return (T - 1) * (U + 1) + T * U


def _both(shapes: Shapes) -> int:
    """Count forward and backward variables, and the last blank."""
    return sum(2 * _lattice(T, U) + 1 for T, U in shapes)


def _log_probs(shapes: Shapes) -> int:
    return sum(T * (U + 1) + T * U for T, U in shapes)


def _merged_gradient(shapes: Shapes, V: int) -> int:
    """Count the gradient through the softmax: 2 per cell; 3 per element (add, add, exp) and per blank or target."""
    return sum((2 + 3 * V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in shapes)


def _torchaudio(call: Call) -> int:
    """Its forward computes the gradient, asked or not; without fused_log_softmax there are no denominators."""
    logits = call["logits"]
    V = logits.shape[-1]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    if call["fused_log_softmax"]:
        return 2 * logits.numel() + _log_probs(shapes) + _both(shapes) + _merged_gradient(shapes, V)
    return _both(shapes) + sum(4 * V * T * (U + 1) + _marked(T, U) for T, U in shapes)


def _optimized_transducer(call: Call) -> int:
    """Its denominators are torch's logsumexp, which is counted as such; one symbol a frame has T - U frames."""
    V, from_log_probs = call["logits"].shape[-1], call["from_log_softmax"]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    walked = [(T - U, U) for T, U in shapes] if call["one_sym_per_frame"] else shapes
    total = (0 if from_log_probs else _log_probs(shapes)) + _both(walked)
    if not call["logits"].requires_grad:
        return total
    if from_log_probs:
        return total + sum((1 + V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in walked)
    return total + _merged_gradient(walked, V)


def _mutual_information(call: Call) -> int:
    """The recursion and its derivative, within the boundary; all else is torch's operators."""
    px, py, boundary = call["px"], call["py"], call["boundary"]
    regular = px.shape[2] == py.shape[2] + 1
    bounds = [(0, 0, px.shape[1], py.shape[2])] * px.shape[0] if boundary is None else boundary.tolist()
    sides = [(u_end - u, t_end - t) for u, t, u_end, t_end in bounds]
    gradient = call["return_grad"] or px.requires_grad or py.requires_grad
    edges = sum(frames + (U if regular else 0) for U, frames in sides)
    inner = sum(U * frames for U, frames in sides)
    return 6 * inner + edges + (7 * inner + edges if gradient else 0)


def _fused(call: Call) -> Any:
    """Return the call as the package knows it, whose options are a list of numbers."""
    package = sys.modules["fused_transducer.call"]
    return package.Call.of([call[name] for name in package.TENSORS], call["options"])


def _arcs_of_rows(fused: Any) -> List[Tuple[int, int, int]]:
    """Return (cells, arcs between them, those of labels) of each row of the call; of a window, within it."""
    if fused.window is None:
        shapes = _shapes(fused.frames, fused.U_lengths)
        return [(T * (U + 1), _marked(T, U), T * U) for T, U in shapes]
    begin, end = fused.band.unbind(-1)
    labels = (end[:, :-1] - begin[:, 1:] + 1).clamp(min=0).sum(1)
    arcs = (end - begin).clamp(min=0).sum(1) + labels
    return list(zip(fused.cells().tolist(), arcs.tolist(), labels.tolist()))


def _fused_losses(call: Call) -> Count:
    """Joiner and loss in one, of the cells of the utterances alone; of peaky logits the C++ code computes fewer.  Per
    cell 2 H (sum and activation) and 2 V (denominator); of a lattice with other arcs 5 and 2 for each arc of a cell."""
    fused = _fused(call)
    V, H, rows = fused.V, fused.H, _arcs_of_rows(fused)
    cells, labels = sum(cells for cells, _, _ in rows), sum(labels for _, _, labels in rows)
    if fused.topology in ("regular", "hat"):  # a sum an arc, and theirs in the log domain where two lead to a cell
        for_gradient = 2 if call["gradient"] else 0
        walked = sum((5 + for_gradient) * arcs - 4 * (cells - 1) for cells, arcs, _ in rows if cells)
    else:
        durations = len(fused.durations)  # durations of 0 count as others
        of_cell = {"tdt": 2 * durations, "multi-blank": 2 + durations}.get(fused.topology, 2)
        walked = cells * of_cell * (7 if call["gradient"] else 5)
    return products(H * V * cells, cells * (2 * H + 2 * V) + cells + labels + walked)


def _fused_gradients(call: Call) -> Count:
    """Cells whose posterior is negligible are left out, and the logits of the others are computed again where forward
    did not keep them.  Per cell 2 H (sum and activation), 4 V (softmax and gradient), V for the bias, 4 H to the
    outputs."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    further = len(fused.durations) if fused.topology == "multi-blank" else 0  # other durations are no symbols
    posterior = call["arcs"][: 2 + further].sum(0)
    cells = int((~(posterior < fused.negligible) & (posterior != 0)).sum())
    encoder_out, decoder_out, weight, bias = call["wanted"]
    outputs = encoder_out or decoder_out
    times = (len(call["kept"]) == 0) + weight + outputs
    return products(times * H * V * cells, cells * (2 * H + 4 * V + bias * V + outputs * 4 * H))


_MUTUAL = "mutual_information.MutualInformationRecursionFunction"
add("torchaudio::rnnt_loss_forward", _torchaudio)
add("optimized_transducer.transducer_loss.TransducerLossFunction", _optimized_transducer)
add(f"fast_rnnt.{_MUTUAL} k2.{_MUTUAL}", _mutual_information)
add("fused_transducer::losses", _fused_losses)
add("fused_transducer::gradients", _fused_gradients)
# custom autograd functions without kernels of their own, or of operators that have a rule
add(
    "fused_transducer.operators.Losses fused_transducer.operators.Gradients "
    "torchaudio.functional.functional.RnntLoss torchaudio.functional.filtering.DifferentiableFIR "
    "torchaudio.functional.filtering.DifferentiableIIR torchaudio.models.wav2vec2.components.GradMultiply",
    None,
)
