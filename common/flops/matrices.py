"""Rules of what multiplies and accumulates: matrix products, convolutions, attention, recurrent layers.

They count the algorithm, whatever kernel runs it: a fused attention counts as its mathematical form, with all scores
under a causal mask too; that a kernel computes scores anew to save memory is not counted, and neither are gradients
that nobody asks for.  A convolution computes with its padding.  A product of complex matrices is four real ones; a
convolution of complex numbers three, since torch defines it by three real convolutions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Callable, List, Sequence, Tuple

import torch

from rnnt_bench.flops.rules import Call, Count, add, elements, is_complex, nothing, output, products, size

Number = Callable[[Call], int]


def _add_products(*rows: Tuple[str, Number, Number]) -> None:
    """Add rows of (operators, multiply-accumulates, other operations); a product of complex numbers is four."""
    for operators, macs, others in rows:

        def count(call: Call, macs: Number = macs, others: Number = others) -> Count:
            outputs = call.out if isinstance(call.out, (list, tuple)) else [call.out]
            return products((4 if any(map(is_complex, outputs)) else 1) * macs(call), others(call))

        add(operators, count)


def _matrices(first: str, second: str, call: Call) -> int:
    """Count (..., M, K) by (..., K, N) or by (K)."""
    factor = call[second]
    columns = factor.shape[-1] if factor.dim() > 1 else 1
    return size(call[first]) * columns if size(factor) else 0


def _scaled_bias(call: Call) -> int:
    """beta * self: 1 per output, none where beta is 0, 1 more for each factor other than 1."""
    beta, alpha = call["beta"], call["alpha"]
    return ((beta != 0) + (beta not in (0, 1, None)) + (alpha not in (1, None))) * output(call)


def _bias(call: Call) -> int:
    return 0 if call["bias"] is None else output(call)


def _convolved(call: Call, source: Any, out: Any) -> int:
    """Each output sums over the kernel and the group's channels; transposed, each input is spread so."""
    weight = call["weight"]
    return (source if call["transposed"] else out).numel() * (weight.numel() // weight.shape[0])


def _bilinear(call: Call) -> int:
    """Count torch.nn.Bilinear, (N, I) times (O, I, J) over I, then times (N, J) over J, and its gradients.

    i1, i2 and i3, unsqueezed at the dimensions of their expand1, expand2 and expand3, are multiplied and summed over
    sumdim; those that i3 lacks are summed first."""
    shapes = [list(call[f"i{number}"].shape) for number in (1, 2, 3)]
    for number, shape in enumerate(shapes, 1):
        for dim in sorted(call[f"expand{number}"]):
            shape.insert(dim, 1)
    whole = [max(sizes) for sizes in zip(*shapes)]
    first = [dim for dim in call["sumdim"] if dim in call["expand3"]]
    return math.prod(whole) + math.prod(size for dim, size in enumerate(whole) if dim not in first)


_add_products(
    ("mm bmm _int_mm", partial(_matrices, "self", "mat2"), nothing),
    ("mv dot vdot", lambda call: size(call["self"]), nothing),
    ("addmm", partial(_matrices, "mat1", "mat2"), _scaled_bias),
    ("addmv", partial(_matrices, "mat", "vec"), _scaled_bias),
    ("baddbmm addbmm", partial(_matrices, "batch1", "batch2"), _scaled_bias),
    ("addr", lambda call: call.out.numel(), _scaled_bias),
    ("_addmm_activation", partial(_matrices, "mat1", "mat2"), lambda call: 2 * call.out.numel()),
    ("linear", lambda call: call.out.numel() * call["input"].shape[-1], _bias),  # elsewhere it is an addmm
    ("mkldnn_linear", lambda call: call.out.numel() * call["self"].shape[-1], _bias),
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
    # of two sets of many vectors: (-2 x, |x|^2, 1) times (y, 1, |y|^2), and a root
    (
        "_euclidean_dist",
        lambda call: elements(call.out) * (call["x1"].shape[-1] + 2),
        lambda call: (
            elements(call.out)
            + (2 * call["x1"].shape[-1] - 1)
            * sum(elements(call[name]) // call[name].shape[-1] for name in ("x1", "x2"))
            + elements(call["x1"])
        ),
    ),
    # int8: a number is scaled and rounded where it is quantized, the output, and the input where it is none yet
    (
        "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic",
        lambda call: call.out.numel() * call["X"].shape[-1],
        lambda call: (
            call.out.numel() * (2 + (torch.ops.quantized.linear_unpack(call["W_prepack"])[1] is not None))
            + 2 * call["X"].numel() * ("dynamic" in call.name)
        ),
    ),
    ("_trilinear", lambda call: _bilinear(call), nothing),
    # a recursive filter: each output is a sum over those before it, and the first coefficient is 1
    (
        "torchaudio::_lfilter_core_loop",
        lambda call: call["input_signal_windows"].numel() * (call["a_coeff_flipped"].shape[-1] - 1),
        nothing,
    ),
)


def _attention(backward: bool, call: Call) -> Count:
    """Q and K scaled, Q K^T, a mask, softmax 3, dropout 2, times V.  Backward dP = dO V^T, dV = P^T dO, dQ = dS K, dK =
    dS^T Q, softmax 4, dropout 2, dQ and dK scaled; where groups of heads share keys and values, their gradients added
    up.  query: (..., T, D); key, value: (..., S, D)."""
    query, key, value = call["query"], call["key"], call["value"]
    rows, S = size(query) // query.shape[-1], key.shape[-2]
    features = key.shape[-1] + value.shape[-1]
    keys = rows // query.shape[-2] * S  # of all heads
    others = size(query) + keys * key.shape[-1] + rows * S * 2 * bool(call["dropout_p"])
    if backward:
        return products(2 * rows * S * features, others + rows * S * 4 + keys * features - size(key) - size(value))
    masked = call["attn_mask"] is not None or call["attn_bias"] is not None or bool(call["is_causal"])
    return products(rows * S * features, others + rows * S * (3 + masked))


_FUSED = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
for _kind in _FUSED.split():
    add(f"_scaled_dot_product_{_kind}", partial(_attention, False))
    add(f"_scaled_dot_product_{_kind}_backward", partial(_attention, True))


def _flexible(backward: bool, call: Call) -> Count:
    """Count flex_attention, whose arguments have no names: all scores, whatever its mask, and no score_mod."""
    return _attention(backward, replace(call, arguments=dict(zip(("query", "key", "value"), call.args))))


add("higher_order::flex_attention", partial(_flexible, False))
add("higher_order::flex_attention_backward", partial(_flexible, True))

#: Operations per hidden unit and step beside products and biases, and of their gradient.  A gate is the sum of both
#: products and its function: LSTM f c + i g, tanh(c), times o; GRU n = tanh(x + r h), h = (h - n) z + n.  Backward of
#: an LSTM: dc 5, gates 3, dc of the step before 1, sigmoid 9, tanh 3, the sum with the next step's gradients 2.
#: By cuDNN's and oneDNN's numbers: two RNNs, LSTM, GRU.
_CELLS = ((2, 4), (2, 4), (4 * 2 + 5, 23), (2 * 2 + 3 + 3, 18))


def _steps(call: Call) -> int:
    """Count the steps of all utterances; a packed input has no padding."""
    return call["input"].numel() // call["input"].shape[-1]


def _elements_of(weights: Sequence[Any], dims: int) -> int:
    return sum(size(weight) for weight in weights if weight.dim() == dims)


def _mkldnn_layer(call: Call) -> Count:
    weights = [call[f"weight{number}"] for number in range(4 if call["has_biases"] else 2)]
    per_step = _elements_of(weights, 1) + _CELLS[call["mode"]][0] * call["hidden_size"]
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
    others = _elements_of(call["weight"], 1) + _CELLS[call["mode"]][backward] * units
    return products((1 + backward) * _steps(call) * _elements_of(call["weight"], 2), _steps(call) * others)


add("mkldnn_rnn_layer", _mkldnn_layer)
add("mkldnn_rnn_layer_backward", _mkldnn_layer_backward)
add("_cudnn_rnn", partial(_cudnn_layers, False))
add("_cudnn_rnn_backward", partial(_cudnn_layers, True))
