"""Rules of what multiplies and accumulates: matrix products, convolutions, factorisations, attention, recurrent layers.

They count the algorithm, whatever kernel runs it: a fused attention counts as its mathematical form, with all scores
under a causal mask too; that a kernel computes scores anew to save memory is not counted, and neither are gradients
that nobody asks for.  A convolution computes with its padding.  Of complex numbers a product is four.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import torch

from common.flops.rules import (
    Call,
    Count,
    add,
    add_rows,
    elements,
    is_complex,
    is_sparse,
    nothing,
    output,
    products,
    size,
)

Number = Callable[[Call], int]


def _add_products(*rows: Tuple[str, Number, Number]) -> None:
    """Add rows of (operators, multiply-accumulates, other operations); a product of complex numbers is four."""
    for operators, macs, others in rows:

        def count(call: Call, macs: Number = macs, others: Number = others) -> Count:
            outputs = call.out if isinstance(call.out, (list, tuple)) else [call.out]
            return products((4 if any(map(is_complex, outputs)) else 1) * macs(call), others(call))

        add(operators, count)


# -- matrices --------------------------------------------------------------------------------------------------------


def _matrices(first: str, second: str, call: Call) -> int:
    """Count (..., M, K) by (..., K, N) or by (K); a sparse matrix counts for the numbers it stores."""
    one, other = call[first], call[second]
    if is_sparse(other):
        return size(other) * (one.numel() // one.shape[-1])
    return size(one) * (other.shape[-1] if other.dim() > 1 else 1)


def _scaled_bias(call: Call) -> int:
    """beta * self: 1 per output, none where beta is 0, 1 more for each factor other than 1."""
    beta, alpha = call["beta"], call["alpha"]
    return ((beta != 0) + (beta not in (0, 1, None)) + (alpha not in (1, None))) * output(call)


def _bias(call: Call) -> int:
    return 0 if call["bias"] is None else output(call)


def _trilinear(call: Call) -> int:
    """Count a bilinear form.

    i1, i2 and i3, unsqueezed at the dimensions of their expand1, expand2 and expand3, are multiplied and summed over
    sumdim; those that i3 lacks are summed first.
    """
    expanded = [call[f"expand{number}"] for number in (1, 2, 3)]
    shapes = [list(call[f"i{number}"].shape) for number in (1, 2, 3)]
    for shape, dims in zip(shapes, expanded):
        for dim in sorted(dims):
            shape.insert(dim, 1)
    whole = [max(sizes) for sizes in zip(*shapes)]
    first = [dim for dim in call["sumdim"] if dim in expanded[2]]
    return math.prod(whole) + math.prod(size for dim, size in enumerate(whole) if dim not in first)


def _quantized_others(call: Call) -> int:
    """A number is scaled and rounded or shifted where it is quantized: the output, and an input of floating point."""
    bias = torch.ops.quantized.linear_unpack(call["W_prepack"])[1]
    inputs = 2 * call["X"].numel() if "dynamic" in call.name else 0
    return call.out.numel() * (2 + (bias is not None)) + inputs


def _euclidean_others(call: Call) -> int:
    """(-2 x, |x|^2, 1) times (y, 1, |y|^2), and a root: the shortcut of many pairs."""
    coordinates = call["x1"].shape[-1]
    first, second = (elements(call[name]) // coordinates for name in ("x1", "x2"))
    return output(call) + (2 * coordinates - 1) * (first + second) + first * coordinates


def _convolved(call: Call, source: Any, out: Any) -> int:
    """Each output sums over the kernel and the group's channels; transposed, each input is spread so."""
    weight = call["weight"]
    return (source if call["transposed"] else out).numel() * (weight.numel() // weight.shape[0])


_add_products(
    ("mm bmm _int_mm", partial(_matrices, "self", "mat2"), nothing),
    ("mv dot vdot", lambda call: size(call["self"]), nothing),
    ("addmm _sparse_addmm", partial(_matrices, "mat1", "mat2"), _scaled_bias),
    ("addmv", partial(_matrices, "mat", "vec"), _scaled_bias),
    ("baddbmm addbmm", partial(_matrices, "batch1", "batch2"), _scaled_bias),
    ("addr", lambda call: call.out.numel(), _scaled_bias),
    ("sparse_sampled_addmm", lambda call: size(call.out) * call["mat1"].shape[-1], _scaled_bias),
    ("_addmm_activation", partial(_matrices, "mat1", "mat2"), lambda call: 2 * call.out.numel()),
    ("linear", lambda call: call.out.numel() * call["input"].shape[-1], _bias),  # elsewhere it is an addmm
    ("mkldnn_linear", lambda call: call.out.numel() * call["self"].shape[-1], _bias),
    ("_trilinear", _trilinear, nothing),
    (
        "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic",
        lambda call: call.out.numel() * call["X"].shape[-1],
        _quantized_others,
    ),
    ("_euclidean_dist", lambda call: output(call) * (call["x1"].shape[-1] + 2), _euclidean_others),
    (
        "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution",
        lambda call: _convolved(call, call["self"] if call["input"] is None else call["input"], call.out),
        _bias,
    ),
    (
        "convolution_backward convolution_backward_overrideable",
        lambda call: sum(call["output_mask"][:2]) * _convolved(call, call["input"], call["grad_output"]),
        lambda call: call["output_mask"][2] * (elements(call["grad_output"]) - call["grad_output"].shape[1]),
    ),
    # a recursive filter: each output is a sum over those before it, and the first coefficient is 1
    (
        "torchaudio::_lfilter_core_loop",
        lambda call: call["input_signal_windows"].numel() * (call["a_coeff_flipped"].shape[-1] - 1),
        nothing,
    ),
)

# -- factorisations --------------------------------------------------------------------------------------------------


def _factored(name: str, macs: Callable[[int, int], int], others: Callable[[int, int], int], call: Call) -> Count:
    """Count square matrices, the argument `name`, from (rows, right-hand sides) of one of them."""
    n = call[name].shape[-1]
    matrices = size(call[name]) // max(n * n, 1)
    result = call.out[0] if isinstance(call.out, (list, tuple)) else call.out
    sides = size(result) // max(matrices * n, 1)
    divisions = 0 if call["unitriangular"] else others(n, sides)
    return products(matrices * macs(n, sides), matrices * divisions)


# Gaussian elimination: n (n - 1) (2 n - 1) / 6 MACs and n (n - 1) / 2 divisions; a substitution n (n - 1) / 2 MACs and,
# unless the diagonal is 1, n divisions for each side; an inverse has n sides.
for _names, _argument, _products, _others in (
    ("linalg_cholesky_ex cholesky", "self", lambda n, k: (n**3 - n) // 6, lambda n, k: n * (n - 1) // 2 + n),
    ("linalg_lu linalg_lu_factor_ex", "A", lambda n, k: _eliminated(n), lambda n, k: n * (n - 1) // 2),
    ("_linalg_det", "A", lambda n, k: _eliminated(n), lambda n, k: n * (n - 1) // 2 + n - 1),
    ("_linalg_slogdet", "A", lambda n, k: _eliminated(n), lambda n, k: n * (n - 1) // 2 + 2 * n - 1),
    ("linalg_solve_triangular", "self", lambda n, k: k * n * (n - 1) // 2, lambda n, k: k * n),
    (
        "_linalg_solve_ex linalg_inv_ex",
        "A",
        lambda n, k: _eliminated(n) + k * n * (n - 1),
        lambda n, k: n * (n - 1) // 2 + k * n,
    ),
    ("linalg_lu_solve", "LU", lambda n, k: k * n * (n - 1), lambda n, k: k * n),
    ("cholesky_solve", "input2", lambda n, k: k * n * (n - 1), lambda n, k: 2 * k * n),
):
    add(_names, partial(_factored, _argument, _products, _others))


def _eliminated(n: int) -> int:
    return n * (n - 1) * (2 * n - 1) // 6


# -- attention -------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Hold the sizes of an attention.

    scores, queries: elements; keys, values: elements, those of a group of heads repeated for each of its heads; given:
    elements of keys and values as they are given; features: of a key and of a value.
    """

    scores: int
    queries: int
    keys: int
    values: int
    given: int
    features: int


def _sizes(query: Any, key: Any, value: Any) -> _Sizes:
    """Return the sizes of an attention.  query: (..., T, D); key, value: (..., S, D)."""
    rows, S = query.numel() // query.shape[-1], key.shape[-2]
    repeated, features = rows // query.shape[-2] * S, (key.shape[-1], value.shape[-1])
    keys, values = (repeated * each for each in features)
    return _Sizes(rows * S, query.numel(), keys, values, key.numel() + value.numel(), sum(features))


def _attention(call: Call) -> Count:
    """Q and K scaled, Q K^T, a mask, softmax 3, dropout 2, times V."""
    of = _sizes(call["query"], call["key"], call["value"])
    masked = call["attn_mask"] is not None or call["attn_bias"] is not None or bool(call["is_causal"])
    per_score = 3 + masked + 2 * bool(call["dropout_p"])
    return products(of.scores * of.features, of.queries + of.keys + of.scores * per_score)


def _attention_backward(call: Call) -> Count:
    """dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q, softmax 4, dropout 2, dQ and dK scaled; where groups of heads
    share keys and values, their gradients added up."""
    of = _sizes(call["query"], call["key"], call["value"])
    per_score = 4 + 2 * bool(call["dropout_p"])
    others = of.queries + of.keys + of.scores * per_score + of.keys + of.values - of.given
    return products(2 * of.scores * of.features, others)


def _flex(backward: bool, call: Call) -> Count:
    """Q K^T, scale, softmax 3, times V: a block mask is not looked at, what score_mod does is not counted."""
    of = _sizes(*call.args[:3])  # of a higher-order operator, whose arguments have no names
    others = 5 * of.scores + of.keys + of.values - of.given if backward else 4 * of.scores
    return products((1 + backward) * of.scores * of.features, others)


def _self_attention(source: Any, heads: int, mask: Any, scaled: int = 2) -> Count:
    """Count projections and attention of (N, T, E) or nested (T, E).

    scaled: 2 where queries and keys are, 1 where queries alone are.
    """
    scores, features = heads * _squares(source), _features(source)
    macs = 4 * source.numel() * features + 2 * scores * (features // heads)
    return products(macs, (4 + scaled) * source.numel() + (3 if mask is None else 4) * scores)


def _squares(source: Any) -> int:
    """Return T^2 of all utterances."""
    if source.is_nested:
        return sum(int(frames) ** 2 for frames, _ in source._nested_tensor_size())
    return source.shape[0] * source.shape[1] ** 2


def _features(source: Any) -> int:
    return int(source._nested_tensor_size()[0, -1]) if source.is_nested else source.shape[-1]


def _multi_head_attention(call: Call) -> Count:
    """The fast path of torch.nn.MultiheadAttention; weights that are asked for are a mean over the heads."""
    averaged = call["need_weights"] and call["average_attn_weights"]
    count = _self_attention(call["query"], call["num_head"], call["mask"], 1 if call["need_weights"] else 2)
    return Count(count.macs, count.flops + (_squares(call["query"]) * call["num_head"] if averaged else 0))


def _encoder_layer(call: Call) -> Count:
    """The fast path of torch.nn.TransformerEncoderLayer: biases and activation 2 T F + T E, two norms 10, two sums."""
    source = call["src"]
    attention = _self_attention(source, call["num_heads"], call["mask"])
    hidden = source.numel() // _features(source) * call["ffn_weight_1"].shape[0]
    forward = products(2 * hidden * _features(source), 2 * hidden + (1 + 10 + 2) * source.numel())
    return Count(attention.macs + forward.macs, attention.flops + forward.flops)


_FUSED = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
for _names, _count in (
    (" ".join(f"_scaled_dot_product_{kind}" for kind in _FUSED.split()), _attention),
    (" ".join(f"_scaled_dot_product_{kind}_backward" for kind in _FUSED.split()), _attention_backward),
    ("higher_order::flex_attention", partial(_flex, False)),
    ("higher_order::flex_attention_backward", partial(_flex, True)),
    ("_native_multi_head_attention", _multi_head_attention),
    ("_transformer_encoder_layer_fwd", _encoder_layer),
):
    add(_names, _count)

# -- recurrent layers ------------------------------------------------------------------------------------------------

#: Operations per hidden unit and step beside products and biases, and of their gradient.  A gate is the sum of both
#: products and its function: LSTM f c + i g, tanh(c), times o; GRU n = tanh(x + r h), h = (h - n) z + n.  Backward of
#: an LSTM: dc 5, gates 3, dc of the step before 1, sigmoid 9, tanh 3, the sum with the next step's gradients 2.
_CELLS = {"rnn": (2, 4), "lstm": (4 * 2 + 5, 23), "gru": (2 * 2 + 3 + 3, 18)}
_MODES = ("rnn", "rnn", "lstm", "gru")  # cuDNN's and oneDNN's numbers


def _steps(call: Call) -> int:
    """Return the steps of all utterances; a packed input has no padding."""
    return call["input"].numel() // call["input"].shape[-1]


def _elements_of(weights: Sequence[Any], dims: int) -> int:
    return sum(weight.numel() for weight in weights if weight.dim() == dims)


def _mkldnn_layer(call: Call) -> Count:
    weights = [call[f"weight{number}"] for number in range(4 if call["has_biases"] else 2)]
    per_step = _elements_of(weights, 1) + _CELLS[_MODES[call["mode"]]][0] * call["hidden_size"]
    return products(_steps(call) * _elements_of(weights, 2), _steps(call) * per_step)


def _wanted(call: Call, *names: str) -> List[bool]:
    """Return whether the gradient of each of these arguments is asked for; of all, where no argument tells."""
    wanted = [getattr(call[name], "requires_grad", False) for name in names]
    told = any(wanted) or any(getattr(argument, "requires_grad", False) for argument in call.args)
    return wanted if told else [True] * len(names)


def _mkldnn_layer_backward(call: Call) -> Count:
    """Twice the forward's products, without the gradients that are not asked for, of the input and the first state."""
    steps, first = _steps(call), call["hx_"].numel() // call["hx_"].shape[-1]
    of_input, of_state, weights, recurrent = _wanted(call, "input", "hx_", "weight1", "weight2")
    macs = steps * size(call["weight1"]) * (of_input + weights)
    macs += size(call["weight2"]) * (steps - (0 if of_state else first) + steps * recurrent)
    return products(macs, steps * call["hidden_size"] * (23 + (8 if call["has_biases"] else 0)))


def _cudnn_layers(backward: bool, call: Call) -> Count:
    units = call["hidden_size"] * call["num_layers"] * (2 if call["bidirectional"] else 1)
    others = _elements_of(call["weight"], 1) + _CELLS[_MODES[call["mode"]]][backward] * units
    return products((1 + backward) * _steps(call) * _elements_of(call["weight"], 2), _steps(call) * others)


def _cell(kind: str, gates: int) -> Callable[[Call], int]:
    """Count a cell alone, whose products are operators of their own."""
    plain = _CELLS[kind][0]
    return lambda call: (plain + 2 * gates * (call["input_bias"] is not None)) * (size(call["input_gates"]) // gates)


for _names, _rule in (
    ("mkldnn_rnn_layer", _mkldnn_layer),
    ("mkldnn_rnn_layer_backward", _mkldnn_layer_backward),
    ("_cudnn_rnn", partial(_cudnn_layers, False)),
    ("_cudnn_rnn_backward", partial(_cudnn_layers, True)),
):
    add(_names, _rule)
add_rows(
    ("_thnn_fused_lstm_cell", _cell("lstm", 4), 1),
    ("_thnn_fused_gru_cell", _cell("gru", 3), 1),
    # without the sum with the next step's gradients
    (
        "_thnn_fused_lstm_cell_backward_impl",
        lambda call: size(call["workspace"]) // 4 * (22 + 4 * bool(call["has_bias"])),
        1,
    ),
    ("_thnn_fused_gru_cell_backward", lambda call: size(call["workspace"]) // 5 * (24 if call["has_bias"] else 18), 1),
    ("torchaudio::_overdrive_core_loop", lambda call: call["temp"].numel(), 6),
)
