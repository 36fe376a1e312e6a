"""Rules of what is no product of torch: elementwise, reductions, norms, windows, losses, Fourier
transforms, and the kernels of transducer losses.

What computes each element by itself and is not here counts by the general rules.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rnnt_bench.flops.rules import (
    Call,
    Count,
    add,
    argument,
    elements,
    is_complex,
    nothing,
    output,
    products,
    size,
)

# These fill, copy, move, cast, select, sort or compare: values are chosen, none is computed.
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


def _magnitude(whole: int) -> Callable[[Call], int]:
    """Return a rule that counts `whole` for each complex number, 1 for each real one."""
    return lambda call: whole * size(call.out) if is_complex(call["self"]) else output(call)


def _multiplied(whole: int) -> Callable[[Call], int]:
    """Return a rule that counts `whole` for each product of complex numbers, 2 where one of both is
    real."""

    def count(call: Call) -> int:
        both = is_complex(call["self"]) and is_complex(call["other"])
        return elements(call.out, whole if both else 2)

    return count


def _scaled_product(call: Call) -> int:
    """Count 2 for each product or quotient that is added, 3 with a factor, of which lists of
    tensors may have one each."""
    factor = call["scalars"] if call["value"] is None else call["value"]
    return (2 if factor in (None, 1) else 3) * output(call)


add(
    """log_sigmoid_forward rrelu_with_noise rrelu_with_noise_functional
    _amp_foreach_non_finite_check_and_unscale col2im""",
    argument("self"),
)
add("_prelu_kernel_backward logsumexp", argument("self"), 2)
add("var var_mean", argument("self"), 4)
add("abs", _magnitude(4))  # two squares, their sum and a root for a complex number
add("angle", _magnitude(1))
add("sgn", _magnitude(6))  # z / |z|
add("mul", _multiplied(6))
add("div", _multiplied(11))
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


def _number(tensor: Any) -> int:
    """Return 2 where a number is complex, 0 where it is an integer, else 1."""
    return elements(tensor) // max(size(tensor), 1)


def _norm(call: Call) -> int:
    """Count power, sum and root; of order 1 no root, of infinite order the absolute values."""
    order = call["p"] if call["ord"] is None else call["ord"]
    per_element = {0: 0, math.inf: 1, -math.inf: 1}.get(order, 2)
    return per_element * elements(call["self"]) - (output(call) if order == 1 else 0)


def _bags(call: Call, summed: int, highest: int) -> int:
    """Count the rows that are looked up: added up, weighted, and divided where the mode (sum, mean,
    max) is the mean.
    summed: operations of a bag's sum beside 1 for each row; highest: of a maximum."""
    bags = call.out[0] if call["grad"] is None else call["grad"]
    values = call["indices"].numel() * bags.shape[-1]
    weighted = 0 if call["per_sample_weights"] is None else values
    by_mode = (
        max(values + summed * bags.numel(), 0),
        values + (1 + summed) * bags.numel(),
        highest * bags.numel(),
    )
    return weighted + by_mode[call["mode"]]


def _along(call: Call) -> int:
    """Count the groups of an operation along one dimension."""
    tensor = call["self"]
    return tensor.numel() // max(tensor.shape[call["dim"]], 1) if tensor.dim() else 1


def _normalised_backward(call: Call) -> int:
    """Count the input normalised anew 2, sums of g and g x 3, the input's gradient 4; with weights
    g w 1, their gradient 2, the bias's 1.  Gradients that are not asked for are left out."""
    weighted = call["weight"] is not None
    to_input, to_weight, to_bias = call["output_mask"] or (True, True, True)
    per_element = (2 if to_input or to_weight else 0) + (7 + weighted) * to_input
    per_element += weighted * (2 * to_weight + to_bias)
    return per_element * elements(call["input"])


def _weight_norm(call: Call, weight: str, per_element: int, per_row: int) -> int:
    """Count the norm of each row of the argument `weight` along the dimension `dim`."""
    return per_element * elements(call[weight]) + per_row * call[weight].shape[call["dim"]]


add("sum prod nansum", lambda call: _number(call.out) * max(size(call["self"]) - size(call.out), 0))
add("trace", lambda call: _number(call.out) * max(min(call["self"].shape) - 1, 0))
add("mean", lambda call: _number(call.out) * size(call["self"]))
add("std", lambda call: 4 * elements(call["self"]) + output(call))
add("std_mean", lambda call: 4 * elements(call["self"]) + elements(call.out[0]))
add("linalg_vector_norm norm", _norm)
add("cumsum cumprod", lambda call: _number(call.out) * max(size(call.out) - _along(call), 0))
add("logcumsumexp _logcumsumexp", lambda call: max(elements(call["self"]) - _along(call), 0), 3)
add(
    "scatter_add scatter_reduce index_add index_reduce",
    lambda call: elements(call["source"] if call["src"] is None else call["src"]),
)
add(
    "index_put _index_put_impl _unsafe_index_put",
    lambda call: elements(call["values"]) if call["accumulate"] else 0,
)
add("_embedding_bag _embedding_bag_forward_only", lambda call: _bags(call, -1, 0))
add("_embedding_bag_backward _embedding_bag_dense_backward", lambda call: _bags(call, 0, 1))
add(
    "_embedding_bag_per_sample_weights_backward",
    lambda call: call["indices"].numel() * (2 * call["grad"].shape[-1] - 1),
)
# A distance takes of each pair and coordinate a difference, its power and a sum; backward these
# times the upstream gradient over the power.
add("_cdist_forward", lambda call: output(call) * call["x1"].shape[-1], 3)
add("_pdist_forward", lambda call: output(call) * call["self"].shape[-1], 3)
add("_cdist_backward", lambda call: size(call["cdist"]) * (3 * call["x1"].shape[-1] + 1))
add("_pdist_backward", lambda call: size(call["pdist"]) * (3 * call["self"].shape[-1] + 1))
add("unfold_backward", argument("grad_in"))
add(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm""",
    lambda call: (5 - (call["weight"] is None)) * elements(call["input"]),
)
add("_fused_rms_norm", lambda call: (4 - (call["weight"] is None)) * elements(call["input"]))
add(
    """native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward
    cudnn_batch_norm_backward""",
    _normalised_backward,
)
add("_weight_norm_interface", lambda call: _weight_norm(call, "v", 3, 1))
add("_weight_norm_interface_backward", lambda call: _weight_norm(call, "saved_v", 5, 3))


def _dims(call: Call) -> int:
    """Return 2 of "aten::avg_pool2d_backward"."""
    return int(re.findall(r"(\d)d", call.name)[-1])


def _window(call: Call) -> int:
    """Return how many numbers are in a window of the input."""
    kernel = call["kernel_size"]
    dims = _dims(call)
    return math.prod(kernel) if len(kernel) == dims else kernel[0] ** dims


def _adaptive(call: Call, narrow: Any) -> int:
    """Return how many numbers are in all windows of the input that give a tensor like `narrow`."""
    wide = call["self"].shape
    dims = _dims(call)
    total = math.prod(wide[:-dims])
    for length, count in zip(wide[-dims:], narrow.shape[-dims:]):
        begins = [index * length // count for index in range(count)]
        ends = [-(index * length // -count) for index in range(1, count + 1)]
        total *= sum(ends) - sum(begins)
    return total


add("avg_pool1d avg_pool2d avg_pool3d", lambda call: _window(call) * output(call))
add(
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    lambda call: _adaptive(call, call.out),
)
add(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    lambda call: _adaptive(call, call["grad_output"]) + elements(call["grad_output"]),
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
# 2, 4 or 8 neighbours are weighted and added up; the weights depend on the place alone.
add(
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    lambda call: (2 * 2 ** _dims(call) - 1) * output(call),
)
add(
    "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward",
    lambda call: 2 ** _dims(call) * elements(call["grad_output"]),
    2,
)

# -- losses and Fourier transforms ------------------------------------------------------------------


def _loss(per_element: int) -> Callable[[Call], int]:
    """Return a rule that counts `per_element` for each number of the input, and their reduction."""
    return lambda call: (
        per_element * elements(call["self"]) + _reduced(call, elements(call["self"]))
    )


def _target_loss(call: Call) -> int:
    """Count one for each target, and their reduction."""
    targets = size(call["target"]) if elements(call["self"]) else 0
    return targets + _reduced(call, targets)


def _reduced(call: Call, count: int) -> int:
    """Count the operations that reduce `count` numbers as the argument `reduction` says: none, mean
    or sum."""
    return (0, count, max(count - 1, 0))[call["reduction"]]


def _ctc(last: int, state: int, symbol: int) -> Callable[[Call], int]:
    """Return a rule that counts alpha or beta: blanks have 2 states before them, labels 3; a sum of
    two in the log domain is 4; equal neighbours and corners count as the others do.  And `last`,
    and for each frame so many per state and per symbol."""

    def count(call: Call) -> int:
        V = call["log_probs"].shape[-1]
        total = 0
        for T, U in zip(map(int, call["input_lengths"]), map(int, call["target_lengths"])):
            per_frame = U * (2 * 4 + 1) + (U + 1) * (4 + 1)
            total += max(T - 1, 0) * per_frame + last + T * (state * (2 * U + 1) + symbol * V)
        return total

    return count


#: Alpha, and the sum of its last two states.
_CTC = _ctc(5, 0, 0)
#: Beta; alpha + beta added to its symbol, 5 per state; 6 per symbol: two exponentials, their
#: arguments 2, their difference, times the upstream gradient.
_CTC_GRADIENT = _ctc(0, 5, 6)


def _fourier(call: Call) -> int:
    """Count 5 n log2(n) for a complex transform of n values, and half for a real one.

    That is usual for the radix-2 algorithm, and is taken where n is no power of 2 too.  One more for
    each output if it is normalised."""
    source = call.out if "c2r" in call.name else call["self"]
    n = math.prod(source.shape[dim] for dim in call["dim"])
    total = (5 if "c2c" in call.name else 2.5) * source.numel() * math.log2(max(n, 1))
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
add("_ctc_loss", _CTC)
add("_ctc_loss_backward", _CTC_GRADIENT)
# its forward computes the gradient
add("_cudnn_ctc_loss", lambda call: _CTC(call) + _CTC_GRADIENT(call))
add("_fft_c2c _fft_r2c _fft_c2r", _fourier)

# -- transducer losses: kernels that are no operators of torch --------------------------------------
# Logits are (N, T, U + 1, V).  Each utterance's own lattice is counted; none of these losses runs
# on the meta device, which has no lengths to read.  The counts follow the packages' CPU sources;
# the sum of two probabilities in the log domain is 4 (subtract, exp, log1p, add).

Shapes = Sequence[tuple[int, int]]


def _shapes(T_lengths: Any, U_lengths: Any) -> list[tuple[int, int]]:
    return list(zip(T_lengths.tolist(), U_lengths.tolist()))


def _lattice(T: int, U: int) -> int:
    """Count forward (or backward) variables: two sums and their sum in the log domain within, one
    sum on both edges."""
    return 6 * (T - 1) * U + (T - 1) + U


def _marked(T: int, U: int) -> int:
    """Count the elements of blanks and targets, but for the last blank."""
    return (T - 1) * (U + 1) + T * U


def _both(shapes: Shapes) -> int:
    """Count forward and backward variables, and the last blank."""
    return sum(2 * _lattice(T, U) + 1 for T, U in shapes)


def _log_probs(shapes: Shapes) -> int:
    """Count the log-probabilities of blanks and targets, one each."""
    return sum(T * (U + 1) + T * U for T, U in shapes)


def _merged_gradient(shapes: Shapes, V: int) -> int:
    """Count the gradient through the softmax: 2 per cell; 3 per element (add, add, exp) and per
    blank or target."""
    return sum((2 + 3 * V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in shapes)


def _torchaudio(call: Call) -> int:
    """Count a forward, which computes the gradient, asked or not; without fused_log_softmax there
    are no denominators."""
    logits = call["logits"]
    V = logits.shape[-1]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    if call["fused_log_softmax"]:
        gradient = _merged_gradient(shapes, V)
        return 2 * logits.numel() + _log_probs(shapes) + _both(shapes) + gradient
    return _both(shapes) + sum(4 * V * T * (U + 1) + _marked(T, U) for T, U in shapes)


def _optimized_transducer(call: Call) -> int:
    """Count all but the denominators, which torch's logsumexp computes; one symbol a frame has T -
    U frames."""
    V = call["logits"].shape[-1]
    from_log_probs = call["from_log_softmax"]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    total = 0 if from_log_probs else _log_probs(shapes)
    if call["one_sym_per_frame"]:
        shapes = [(T - U, U) for T, U in shapes]
    total += _both(shapes)
    if not call["logits"].requires_grad:
        return total
    if from_log_probs:
        return total + sum((1 + V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in shapes)
    return total + _merged_gradient(shapes, V)


def _mutual_information(call: Call) -> int:
    """Count the recursion (6 within, as `_lattice` has it) and its derivative (7 within), inside
    the boundary; all else is torch's operators."""
    px, py = call["px"], call["py"]
    N, U, _ = px.shape
    T = py.shape[2]
    shapes = [(T, U)] * N
    if call["boundary"] is not None:
        bounds = call["boundary"].tolist()
        shapes = [(t_end - t, u_end - u) for u, t, u_end, t_end in bounds]
    is_regular = px.shape[2] == T + 1
    edges = sum(T + (U if is_regular else 0) for T, U in shapes)
    inner = sum(T * U for T, U in shapes)
    total = 6 * inner + edges
    if call["return_grad"] or px.requires_grad or py.requires_grad:
        total += 7 * inner + edges
    return total


def _fused(call: Call) -> Any:
    """Return the call as fused_transducer has it, whose options are a list of numbers."""
    package = sys.modules["fused_transducer.call"]
    return package.Call.of([call[name] for name in package.TENSORS], call["options"])


class _Sizes(NamedTuple):
    """Hold how large the lattice of one row of a fused call is, within its window if it has one."""

    cells: int
    arcs: int  # between cells, of the lattice "regular"
    labels: int  # cells that have a label


def _sizes_of_rows(fused: Any) -> list[_Sizes]:
    if fused.window is None:
        shapes = _shapes(fused.frames, fused.U_lengths)
        return [_Sizes(T * (U + 1), _marked(T, U), T * U) for T, U in shapes]
    begin, end = fused.band.unbind(-1)
    labels = (end[:, :-1] - begin[:, 1:] + 1).clamp(min=0).sum(1)
    arcs = (end - begin).clamp(min=0).sum(1) + labels
    return list(map(_Sizes, fused.cells().tolist(), arcs.tolist(), labels.tolist()))


def _fused_losses(call: Call) -> Count:
    """Count joiner and loss in one, of the cells of the utterances alone; of peaky logits the C++
    code computes fewer.

    A cell takes 2 H (sum and activation), 2 V (denominator), and 1 for the log-probability of its
    blank and of its label.  An arc takes 5 (a sum, and 4 for that in the log domain), and 2 more
    for the gradient."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    rows = _sizes_of_rows(fused)
    cells = sum(row.cells for row in rows)
    log_probabilities = cells + sum(row.labels for row in rows)
    per_arc = 7 if call["gradient"] else 5
    if fused.topology in ("regular", "hat"):
        # the first of the arcs into each cell but (0, 0) needs no sum in the log domain
        walked = sum(per_arc * row.arcs - 4 * (row.cells - 1) for row in rows if row.cells)
    else:
        # as if all arcs, with durations of 0 too, left every cell and were summed up
        durations = len(fused.durations)
        arcs_of_cell = 2  # blank and label
        if fused.topology == "tdt":
            arcs_of_cell = 2 * durations  # each of both with each duration
        if fused.topology == "multi-blank":
            arcs_of_cell += durations  # a longer blank of each
        walked = cells * arcs_of_cell * per_arc
    return products(H * V * cells, cells * (2 * H + 2 * V) + log_probabilities + walked)


def _fused_gradients(call: Call) -> Count:
    """Count the gradients at the cells whose posterior is not negligible: no other has any.

    Products of H and V numbers are those to the weight, to the outputs, and to the logits where
    forward did not keep them.  Beside them a cell takes 2 H (sum and activation), 4 V (softmax and
    gradient), V for the bias, 4 H to the outputs."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    # durations of multi-blank alone are symbols
    blanks = 1 + len(fused.durations) if fused.topology == "multi-blank" else 1
    posterior = call["arcs"][: blanks + 1].sum(0)  # and the label
    cells = int((~(posterior < fused.negligible) & (posterior != 0)).sum())
    wants_encoder, wants_decoder, wants_weight, wants_bias = call["wanted"]
    wants_outputs = wants_encoder or wants_decoder
    of_cell = sum([len(call["kept"]) == 0, wants_weight, wants_outputs])
    others = 2 * H + 4 * V + wants_bias * V + wants_outputs * 4 * H
    return products(of_cell * H * V * cells, others * cells)


_MUTUAL = "mutual_information.MutualInformationRecursionFunction"
add("torchaudio::rnnt_loss_forward", _torchaudio)
add("optimized_transducer.transducer_loss.TransducerLossFunction", _optimized_transducer)
add(f"fast_rnnt.{_MUTUAL} k2.{_MUTUAL}", _mutual_information)
add("fused_transducer::losses", _fused_losses)
add("fused_transducer::gradients", _fused_gradients)
# These custom autograd functions have no kernels of their own, or operators that have a rule.
add(
    """fused_transducer.operators.Losses fused_transducer.operators.Gradients
    torchaudio.functional.functional.RnntLoss torchaudio.functional.filtering.DifferentiableFIR
    torchaudio.functional.filtering.DifferentiableIIR torchaudio.models.wav2vec2.components.GradMultiply""",
    None,
)
