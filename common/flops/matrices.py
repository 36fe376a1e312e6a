"""Rules of what multiplies and accumulates: matrix products, convolutions, attention, recurrent
layers.

They count the algorithm, whatever kernel runs it: a fused attention counts as its mathematical
form, with all scores under a causal mask too; that a kernel computes scores anew to save memory is
not counted, and neither are gradients that nobody asks for.  A convolution computes with its
padding.  A product of complex matrices is four real ones; a convolution of complex numbers three,
since torch defines it by three real convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rnnt_bench.flops.rules import (
    Call,
    Count,
    add,
    elements,
    is_complex,
    nothing,
    output,
    products,
    size,
)

Number = Callable[[Call], int]


def _add_product(operators: str, macs: Number, others: Number = nothing) -> None:
    """Add a rule of multiply-accumulates, of which a product of complex numbers is four, and other
    operations."""

    def count(call: Call) -> Count:
        outputs = call.out if isinstance(call.out, (list, tuple)) else [call.out]
        factor = 4 if any(map(is_complex, outputs)) else 1
        return products(factor * macs(call), others(call))

    add(operators, count)


def _matrices(first: str, second: str, call: Call) -> int:
    """Count (..., M, K) by (..., K, N) or by (K)."""
    factor = call[second]
    columns = factor.shape[-1] if factor.dim() > 1 else 1
    return size(call[first]) * columns if size(factor) else 0


def _scaled_bias(call: Call) -> int:
    """Count beta * self: 1 per output, none where beta is 0, 1 more for each factor other than
    1."""
    beta = call["beta"]
    is_scaled = call["alpha"] not in (1, None)
    return ((beta != 0) + (beta not in (0, 1, None)) + is_scaled) * output(call)


def _bias(call: Call) -> int:
    return 0 if call["bias"] is None else output(call)


def _convolved(call: Call, source: Any, out: Any) -> int:
    """Count a sum over the kernel and the group's channels for each output; transposed, for each
    input."""
    weight = call["weight"]
    sums = source if call["transposed"] else out
    return sums.numel() * (weight.numel() // weight.shape[0])


def _convolution(call: Call) -> int:
    """Count a forward, whose input some operators call `self`."""
    source = call["self"] if call["input"] is None else call["input"]
    return _convolved(call, source, call.out)


def _convolution_backward(call: Call) -> int:
    """Count the gradients of the input and of the weight, where they are asked for."""
    return sum(call["output_mask"][:2]) * _convolved(call, call["input"], call["grad_output"])


def _bias_gradient(call: Call) -> int:
    """Count the gradient of the bias, where it is asked for: a sum for each channel."""
    gradient = call["grad_output"]
    return call["output_mask"][2] * (elements(gradient) - gradient.shape[1])


def _quantized(call: Call) -> int:
    """Count 2 (scaling and rounding) for each output, and 1 for its bias; 2 for each number of the
    input of a dynamic layer, which comes as float and is made int8."""
    _, bias = torch.ops.quantized.linear_unpack(call["W_prepack"])
    per_output = 2 if bias is None else 3
    per_input = 2 if "dynamic" in call.name else 0
    return per_output * call.out.numel() + per_input * call["X"].numel()


def _distances(call: Call) -> int:
    """Count |x|^2 and |y|^2, -2 x, and a root for each pair."""
    x, y = call["x1"], call["x2"]
    vectors = elements(x) // x.shape[-1] + elements(y) // y.shape[-1]
    return elements(call.out) + (2 * x.shape[-1] - 1) * vectors + elements(x)


def _bilinear(call: Call) -> int:
    """Return the MACs of aten::_trilinear, which torch.nn.Bilinear and its gradients call.

    It multiplies three tensors i1, i2 and i3, each unsqueezed at the dimensions of its expand1,
    expand2 or expand3, and sums over the dimensions `sumdim`: first i1 times i2, over those of
    these that i3 has not, then times i3, over the others."""
    shapes = [list(call[f"i{number}"].shape) for number in (1, 2, 3)]
    for number, shape in enumerate(shapes, 1):
        for dim in sorted(call[f"expand{number}"]):
            shape.insert(dim, 1)
    sizes = [max(of_dim) for of_dim in zip(*shapes)]
    summed_first = [dim for dim in call["sumdim"] if dim in call["expand3"]]
    left = [size for dim, size in enumerate(sizes) if dim not in summed_first]
    return math.prod(sizes) + math.prod(left)


_add_product("mm bmm _int_mm", partial(_matrices, "self", "mat2"))
_add_product("mv dot vdot", lambda call: size(call["self"]))
_add_product("addmm", partial(_matrices, "mat1", "mat2"), _scaled_bias)
_add_product("addmv", partial(_matrices, "mat", "vec"), _scaled_bias)
_add_product("baddbmm addbmm", partial(_matrices, "batch1", "batch2"), _scaled_bias)
_add_product("addr", lambda call: call.out.numel(), _scaled_bias)
_add_product(
    "_addmm_activation",
    partial(_matrices, "mat1", "mat2"),
    lambda call: 2 * call.out.numel(),
)
# Elsewhere a linear layer is an addmm.
_add_product("linear", lambda call: call.out.numel() * call["input"].shape[-1], _bias)
_add_product("mkldnn_linear", lambda call: call.out.numel() * call["self"].shape[-1], _bias)
_add_product(
    "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution",
    _convolution,
    _bias,
)
_add_product(
    "convolution_backward convolution_backward_overrideable",
    _convolution_backward,
    _bias_gradient,
)
# The Euclidean distance of two sets of many vectors is (-2 x, |x|^2, 1) times (y, 1, |y|^2).
_add_product(
    "_euclidean_dist",
    lambda call: elements(call.out) * (call["x1"].shape[-1] + 2),
    _distances,
)
_add_product(
    "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic",
    lambda call: call.out.numel() * call["X"].shape[-1],
    _quantized,
)
_add_product("_trilinear", _bilinear)
# A recursive filter sums over the outputs before each one, and its first coefficient is 1.
_add_product(
    "torchaudio::_lfilter_core_loop",
    lambda call: call["input_signal_windows"].numel() * (call["a_coeff_flipped"].shape[-1] - 1),
)


def _attention(backward: bool, call: Call) -> Count:
    """Count Q and K scaled, Q K^T, a mask, softmax 3, dropout 2, times V.  Backward dP = dO V^T, dV
    = P^T dO, dQ = dS K, dK = dS^T Q, softmax 4, dropout 2, dQ and dK scaled; where groups of heads
    share keys and values, their gradients added up.  query: (..., T, D); key, value: (..., S,
    D)."""
    query, key, value = call["query"], call["key"], call["value"]
    rows = size(query) // query.shape[-1]
    keys = rows // query.shape[-2] * key.shape[-2]  # of all heads
    scores = rows * key.shape[-2]
    features = key.shape[-1] + value.shape[-1]
    others = size(query) + keys * key.shape[-1]
    if call["dropout_p"]:
        others += 2 * scores
    if backward:
        others += 4 * scores + keys * features - size(key) - size(value)
        return products(2 * scores * features, others)
    is_masked = (
        call["attn_mask"] is not None or call["attn_bias"] is not None or bool(call["is_causal"])
    )
    return products(scores * features, others + scores * (3 + is_masked))


_FUSED = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
for _kind in _FUSED.split():
    add(f"_scaled_dot_product_{_kind}", partial(_attention, False))
    add(f"_scaled_dot_product_{_kind}_backward", partial(_attention, True))


def _flexible(backward: bool, call: Call) -> Count:
    """Count flex_attention, whose arguments have no names: all scores, whatever its mask, and no
    score_mod."""
    return _attention(
        backward, replace(call, arguments=dict(zip(("query", "key", "value"), call.args)))
    )


add("higher_order::flex_attention", partial(_flexible, False))
add("higher_order::flex_attention_backward", partial(_flexible, True))

#: Operations per hidden unit and step beside products and biases, and of their gradient.  A gate is
#: the sum of both products and its function: LSTM f c + i g, tanh(c), times o; GRU n = tanh(x + r
#: h), h = (h - n) z + n.  Backward of an LSTM: dc 5, gates 3, dc of the step before 1, sigmoid 9,
#: tanh 3, the sum with the next step's gradients 2. cuDNN and oneDNN number the cells in this
#: order: two RNNs, LSTM, GRU.
_CELLS = ((2, 4), (2, 4), (4 * 2 + 5, 23), (2 * 2 + 3 + 3, 18))


def _steps(call: Call) -> int:
    """Count the steps of all utterances; a packed input has no padding."""
    return call["input"].numel() // call["input"].shape[-1]


def _sizes(weights: Sequence[Any]) -> tuple[int, int]:
    """Return how many numbers are in the matrices and in the biases of recurrent layers."""
    matrices = sum(size(weight) for weight in weights if weight.dim() == 2)
    biases = sum(size(weight) for weight in weights if weight.dim() == 1)
    return matrices, biases


def _mkldnn_layer(call: Call) -> Count:
    numbers = range(4 if call["has_biases"] else 2)
    matrices, biases = _sizes([call[f"weight{number}"] for number in numbers])
    others = biases + _CELLS[call["mode"]][0] * call["hidden_size"]
    return products(_steps(call) * matrices, _steps(call) * others)


def _asked_for(call: Call, *names: str) -> list[bool]:
    """Return whether the gradient of each of these arguments is asked for; of all, where no
    argument tells."""
    asked = [getattr(call[name], "requires_grad", False) for name in names]
    any_asked = any(asked) or any(getattr(value, "requires_grad", False) for value in call.args)
    return asked if any_asked else [True] * len(names)


def _mkldnn_layer_backward(call: Call) -> Count:
    """Count twice the forward's products, without the gradients that are not asked for, of the
    input and the first state."""
    steps = _steps(call)
    sequences = call["hx_"].numel() // call["hx_"].shape[-1]
    to_input, to_state, to_weight, to_recurrent = _asked_for(
        call, "input", "hx_", "weight1", "weight2"
    )
    state_steps = steps if to_state else steps - sequences
    macs = steps * size(call["weight1"]) * (to_input + to_weight)
    macs += size(call["weight2"]) * (state_steps + steps * to_recurrent)
    per_unit = 31 if call["has_biases"] else 23
    return products(macs, steps * call["hidden_size"] * per_unit)


def _cudnn_layers(backward: bool, call: Call) -> Count:
    matrices, biases = _sizes(call["weight"])
    units = call["hidden_size"] * call["num_layers"] * (2 if call["bidirectional"] else 1)
    others = biases + _CELLS[call["mode"]][backward] * units
    return products((1 + backward) * _steps(call) * matrices, _steps(call) * others)


add("mkldnn_rnn_layer", _mkldnn_layer)
add("mkldnn_rnn_layer_backward", _mkldnn_layer_backward)
add("_cudnn_rnn", partial(_cudnn_layers, False))
add("_cudnn_rnn_backward", partial(_cudnn_layers, True))
