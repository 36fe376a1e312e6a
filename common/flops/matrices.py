"""Rules of operators that multiply and accumulate: matrix products, convolutions, attention,
recurrent layers.

They count the algorithm, whatever kernel runs it.  A fused attention counts as its mathematical
form, with all scores even under a causal mask; scores that its kernel computes again to save memory
are not counted.  Gradients that nobody asks for are not counted.  A convolution counts the products
with its padding.  A product of complex matrices is four real ones.  A convolution of complex
numbers is three real ones, by which torch defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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

#: Returns a number of MACs or FLOPs of a call.
Number = Callable[[Call], int]


def _add_product(operators: str, macs: Number, others: Number = nothing) -> None:
    """Add a rule to the table: `macs` multiply-accumulates, and `others`, FLOPs beside them.

    A multiply-accumulate of complex numbers is four real ones."""

    def count(call: Call) -> Count:
        outputs = call.out if isinstance(call.out, (list, tuple)) else [call.out]
        factor = 4 if any(map(is_complex, outputs)) else 1
        return products(factor * macs(call), others(call))

    add(operators, count)


def _matrices(first: str, second: str, call: Call) -> int:
    """Return the MACs of the product of two arguments: (..., M, K) times (..., K, N) or times (K,).

    Raises TypeError for a sparse matrix, as `size` does.

    first, second: the names of the arguments."""
    right = call[second]
    columns = right.shape[-1] if right.dim() > 1 else 1
    # Where `right` is empty the product is 0 anyway: its size is asked for the TypeError of `size`.
    return size(call[first]) * columns if size(right) else 0


def _scaled_bias(call: Call) -> int:
    """Count what is beside the product in beta * self + alpha * product: for each output the sum,
    unless beta is 0, and a product for each factor that is not 1."""
    beta, alpha = call["beta"], call["alpha"]  # None means 1
    is_counted = (
        beta != 0,  # the sum
        beta not in (0, 1, None),  # beta * self
        alpha not in (1, None),  # alpha * product
    )
    return sum(is_counted) * output(call)


def _bias(call: Call) -> int:
    """Count 1 for each output, if there is a bias."""
    return 0 if call["bias"] is None else output(call)


def _convolved(call: Call, source: Any, out: Any) -> int:
    """Return the MACs of a convolution of the tensor `source` whose result has the shape of `out`.

    Each number of `out` is a sum over the kernel and the channels of its group.  In a transposed
    convolution each number of `source` is multiplied by the kernel of each output channel of its
    group."""
    weight = call["weight"]
    numbers = source if call["transposed"] else out
    weights_of_number = weight.numel() // weight.shape[0]
    return numbers.numel() * weights_of_number


def _convolution(call: Call) -> int:
    """Return the MACs of the forward of a convolution.

    Some operators name the input `self`, others `input`."""
    source = call["self"] if call["input"] is None else call["input"]
    return _convolved(call, source, call.out)


def _convolution_backward(call: Call) -> int:
    """Return the MACs of the gradients of input and weight that are asked for."""
    return sum(call["output_mask"][:2]) * _convolved(call, call["input"], call["grad_output"])


def _bias_gradient(call: Call) -> int:
    """Return the additions of a sum for each channel, or 0 if the gradient of the bias is not asked
    for, which output_mask[2] tells.  A sum of n numbers takes n - 1, so all sums take one fewer for
    each channel than there are numbers."""
    gradient = call["grad_output"]
    return call["output_mask"][2] * (elements(gradient) - gradient.shape[1])


def _quantized(call: Call) -> int:
    """Count scaling, rounding and a bias for each output of a quantized linear layer.

    The input of a dynamic layer is float; scaling and rounding make it int8."""
    _, bias = torch.ops.quantized.linear_unpack(call["W_prepack"])
    per_output = 2 if bias is None else 3
    per_input = 2 if "dynamic" in call.name else 0
    return per_output * call.out.numel() + per_input * call["X"].numel()


def _distances(call: Call) -> int:
    """Count |x|^2 and |y|^2 for all vectors, -2 x, and a root for each pair of vectors; all but the
    product that gives the squared distances."""
    x, y = call["x1"], call["x2"]
    vectors = elements(x) // x.shape[-1] + elements(y) // y.shape[-1]
    # The roots, then D products and D - 1 sums for the square of each vector, then -2 x.
    return elements(call.out) + (2 * x.shape[-1] - 1) * vectors + elements(x)


def _bilinear(call: Call) -> int:
    """Return the MACs of aten::_trilinear, which torch.nn.Bilinear and its gradients call.

    It unsqueezes the tensors i1, i2 and i3 at the dimensions of expand1, expand2 and expand3,
    multiplies all three, and sums over the dimensions `sumdim`.  It sums the product of i1 and i2
    first, over those dimensions that i3 does not have (expand3), and then multiplies by i3."""
    shapes = []
    for number in (1, 2, 3):
        shape = list(call[f"i{number}"].shape)
        for dim in sorted(call[f"expand{number}"]):
            shape.insert(dim, 1)
        shapes.append(shape)
    sizes = [max(lengths) for lengths in zip(*shapes)]
    summed_first = [dim for dim in call["sumdim"] if dim in call["expand3"]]
    remaining = [length for dim, length in enumerate(sizes) if dim not in summed_first]
    return math.prod(sizes) + math.prod(remaining)


_add_product("mm bmm _int_mm", partial(_matrices, "self", "mat2"))
_add_product("mv dot vdot", lambda call: size(call["self"]))
_add_product("addmm", partial(_matrices, "mat1", "mat2"), _scaled_bias)
_add_product("addmv", partial(_matrices, "mat", "vec"), _scaled_bias)
_add_product("baddbmm addbmm", partial(_matrices, "batch1", "batch2"), _scaled_bias)
_add_product("addr", lambda call: call.out.numel(), _scaled_bias)
_add_product(
    "_addmm_activation",
    partial(_matrices, "mat1", "mat2"),
    lambda call: 2 * call.out.numel(),  # the sum with the bias, and the activation
)
# On some devices a linear layer is an operator of its own; elsewhere it is an addmm.
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
# The squared distances of two sets of vectors are a product: (-2 x, |x|^2, 1) times (y, 1, |y|^2).
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
# Each output of a recursive filter is a sum over outputs before it; its first coefficient is 1.
_add_product(
    "torchaudio::_lfilter_core_loop",
    lambda call: call["input_signal_windows"].numel() * (call["a_coeff_flipped"].shape[-1] - 1),
)


def _attention(call: Call, *, backward: bool) -> Count:
    """Count attention, softmax(Q K^T) V, or its backward.

    query: (..., T, D), key: (..., S, D), value: (..., S, Dv).  The forward has two products.  Its
    other FLOPs: Q and K are scaled, and each score takes 1 for a mask, 3 for softmax, 2 for
    dropout.  The backward has four products: dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q.
    Its other FLOPs: dQ and dK are scaled, and each score takes 4 for softmax and 2 for dropout.
    Where several query heads share a head of keys and values, the gradients of these are added
    up."""
    query, key, value = call["query"], call["key"], call["value"]
    query_rows = size(query) // query.shape[-1]
    key_rows = query_rows // query.shape[-2] * key.shape[-2]  # as if no heads shared keys
    scores = query_rows * key.shape[-2]
    features = key.shape[-1] + value.shape[-1]  # D + Dv: one product sums over D, one makes Dv
    others = size(query) + key_rows * key.shape[-1]
    if call["dropout_p"]:
        others += 2 * scores
    if backward:
        additions_of_shared = key_rows * features - size(key) - size(value)
        others += 4 * scores + additions_of_shared
        return products(2 * scores * features, others)
    others += 3 * scores
    if call["attn_mask"] is not None or call["attn_bias"] is not None or call["is_causal"]:
        others += scores
    return products(scores * features, others)


_KERNELS = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
for _kernel in _KERNELS.split():
    add(f"_scaled_dot_product_{_kernel}", partial(_attention, backward=False))
    add(f"_scaled_dot_product_{_kernel}_backward", partial(_attention, backward=True))


def _flexible(call: Call, *, backward: bool) -> Count:
    """Count flex_attention with all scores, whatever its mask, and without its score_mod.

    Its first arguments are query, key and value; they have no names."""
    named = dict(zip(("query", "key", "value"), call.args))
    return _attention(replace(call, arguments=named), backward=backward)


add("higher_order::flex_attention", partial(_flexible, backward=False))
add("higher_order::flex_attention_backward", partial(_flexible, backward=True))


class _Cell(NamedTuple):
    """FLOPs of a recurrent cell for a hidden unit and step, beside products and biases."""

    forward: int
    backward: int


#: The cells by their number in cuDNN and oneDNN: two simple RNNs, LSTM, GRU.  A gate is the sum of
#: two products, and a function of it.  The forward of an LSTM has 4 gates, then 5 for f c + i g,
#: tanh(c), and times o; that of a GRU 2 gates, 3 for tanh(x + r h), 3 for (h - n) z + n.  The
#: backward of an LSTM has 5 for dc, 3 for the gates, 1 for dc of the step before, 9 for sigmoids, 3
#: for tanh, 2 for the sum with the gradients of the next step.
_CELLS = (_Cell(2, 4), _Cell(2, 4), _Cell(4 * 2 + 5, 23), _Cell(2 * 2 + 3 + 3, 18))


def _steps(call: Call) -> int:
    """Return the number of steps of all utterances; a packed input has no padding."""
    return call["input"].numel() // call["input"].shape[-1]


def _sizes(weights: Sequence[Any]) -> tuple[int, int]:
    """Return how many numbers the matrices of recurrent layers have, and how many their biases."""
    matrices = sum(size(weight) for weight in weights if weight.dim() == 2)
    biases = sum(size(weight) for weight in weights if weight.dim() == 1)
    return matrices, biases


def _mkldnn_layer(call: Call) -> Count:
    """Count the forward of one layer in oneDNN.

    weight0 and weight1 are the matrices of inputs and states, weight2 and weight3 their biases."""
    numbers = range(4 if call["has_biases"] else 2)
    matrices, biases = _sizes([call[f"weight{number}"] for number in numbers])
    others_per_step = biases + _CELLS[call["mode"]].forward * call["hidden_size"]
    return products(_steps(call) * matrices, _steps(call) * others_per_step)


def _asked_for(call: Call, *names: str) -> list[bool]:
    """Return for each of these arguments whether its gradient is asked for; True for all where no
    argument of the call requires a gradient."""
    asked = [getattr(call[name], "requires_grad", False) for name in names]
    any_asked = any(asked) or any(getattr(value, "requires_grad", False) for value in call.args)
    return asked if any_asked else [True] * len(names)


def _mkldnn_layer_backward(call: Call) -> Count:
    """Count the backward of an LSTM layer in oneDNN.

    The forward multiplies one matrix with the inputs and one with the states.  For each, the
    backward has two products: for the gradient of the matrix, and for that of the inputs or states.
    A gradient that is not asked for takes no product.  Those of the states are an exception: only
    the gradient of a sequence's first state is left out if it is not asked for."""
    steps = _steps(call)  # of all sequences together
    sequences = call["hx_"].numel() // call["hx_"].shape[-1]
    of_input, of_first_state, of_weight, of_recurrent = _asked_for(
        call, "input", "hx_", "weight1", "weight2"
    )
    state_steps = steps if of_first_state else steps - sequences
    macs = steps * size(call["weight1"]) * (of_input + of_weight)
    macs += size(call["weight2"]) * (state_steps + steps * of_recurrent)
    per_unit = _CELLS[call["mode"]].backward
    if call["has_biases"]:
        per_unit += 4 * 2  # two biases for each gate
    return products(macs, steps * call["hidden_size"] * per_unit)


def _cudnn_layers(call: Call, *, backward: bool) -> Count:
    """Count a call of cuDNN, which runs all layers of a recurrent network.

    The backward has two products for each product of the forward."""
    matrices, biases = _sizes(call["weight"])
    units = call["hidden_size"] * call["num_layers"] * (2 if call["bidirectional"] else 1)
    cell = _CELLS[call["mode"]]
    others_per_step = biases + (cell.backward if backward else cell.forward) * units
    macs = (2 if backward else 1) * _steps(call) * matrices
    return products(macs, _steps(call) * others_per_step)


add("mkldnn_rnn_layer", _mkldnn_layer)
add("mkldnn_rnn_layer_backward", _mkldnn_layer_backward)
add("_cudnn_rnn", partial(_cudnn_layers, backward=False))
add("_cudnn_rnn_backward", partial(_cudnn_layers, backward=True))
