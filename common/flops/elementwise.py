"""Rules of elementwise operators that count otherwise than `general` has it, of dropout and of optimizers.

Integers and booleans are no floating-point numbers: their arithmetic counts nothing.
"""

from __future__ import annotations

from typing import Any

from common.flops.rules import Call, add, elements, per_input, per_output, rule, size


@rule(
    "abs angle sgn",
    flops="1 per output; of complex numbers |z| 4, its angle 1, z / |z| 6",
    reason="|z| is two squares, their sum and a root; the angle one function of two numbers",
)
def _magnitude(call: Call) -> int:
    if isinstance(call["self"], (list, tuple)) or not call["self"].is_complex():
        return elements(call.out)
    return {"abs": 4, "angle": 1, "sgn": 6}[call.name.rpartition("::")[2].rstrip("_")] * size(call.out)


add(
    "log_sigmoid_forward rrelu_with_noise rrelu_with_noise_functional",
    per_input(1),
    flops="1 per input",
    reason="activation functions that return or write what their gradient needs, too",
)


def _operand_is_real(operand: Any) -> bool:
    return not (operand.is_complex() if hasattr(operand, "is_complex") else isinstance(operand, complex))


@rule("mul div", flops="1 per output", reason="arithmetic; of complex numbers 6 and 11, 2 where one of both is real")
def _multiplied(call: Call) -> int:
    whole = 11 if "div" in call.name else 6
    real = any(_operand_is_real(call[name]) for name in ("self", "other"))
    return elements(call.out, 2 if real else whole)


@rule("add sub rsub", flops="1 per output", reason="arithmetic; one more where alpha is not 1; complex numbers 2")
def _added(call: Call) -> int:
    return (1 if call["alpha"] in (None, 1) else 2) * elements(call.out)


#: FLOPs per output, operators, reason.
PER_OUTPUT = (
    (2, "glu", "a sigmoid and a multiplication"),
    (3, "linalg_cross", "two products and their difference"),
    (3, "lerp", "subtract, multiply, add"),
    (4, "logaddexp logaddexp2", "two exponentials, their sum, a logarithm"),
    (
        3,
        "_softmax _log_softmax _safe_softmax _masked_softmax softmax log_softmax _nested_tensor_softmax_with_shape",
        "exp, add, divide (or subtract the logarithm); the shift by the maximum is not counted",
    ),
    (
        4,
        "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward",
        "softmax: g y, its sum, subtract, times y; log_softmax: the sum of g, exp, multiply, subtract",
    ),
    (
        1,
        "threshold_backward hardtanh_backward leaky_relu_backward hardsigmoid_backward hardshrink_backward "
        "softshrink_backward rrelu_with_noise_backward",
        "piecewise linear: the gradient times a constant",
    ),
    (3, "sigmoid_backward tanh_backward", "g y (1 - y) and g (1 - y^2): two multiplications, a subtraction"),
    (2, "native_dropout_backward _masked_scale", "times the mask, times the scale"),
    (3, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward", "subtract, scale, times the gradient"),
    (5, "binary_cross_entropy_backward", "(x - y) / (x (1 - x)), times the upstream gradient"),
)
for _factor, _operators, _reason in PER_OUTPUT:
    add(_operators, per_output(_factor), flops=f"{_factor} per output", reason=_reason)


@rule("addcmul addcdiv", flops="2 per output", reason="multiply or divide, add; one more where value is not 1")
def _added_product(call: Call) -> int:
    factors = call["scalars"] if call["value"] is None else call["value"]  # lists of tensors may have one for each
    return (2 if factors in (None, 1) else 3) * elements(call.out)


add(
    "_amp_foreach_non_finite_check_and_unscale",
    lambda call: elements(call["self"]),
    flops="1 per element",
    reason="one multiplication",
)


@rule(
    "_fused_adam _fused_adamw _fused_adagrad _fused_sgd",
    flops="13 per parameter (Adam), 7 (Adagrad), 2 (SGD; with momentum 4, 1 more with dampening, with Nesterov's 2 "
    "more); 2 more with weight decay (AdamW 1), 1 more to maximize",
    reason="as the operators of one tensor, of which these optimizers are made",
)
def _fused_step(call: Call) -> int:
    name = call.name.replace("aten::_fused_", "").rstrip("_")
    each = {"adam": 13, "adamw": 13, "adagrad": 7, "sgd": 2}[name] + bool(call["maximize"])
    each += (1 if name == "adamw" else 2) * bool(call["weight_decay"])
    if call["momentum"]:
        each += (0 if call["is_first_step"] else 2 + bool(call["dampening"])) + 2 * bool(call["nesterov"])
    return each * elements(call["self"])


# -- gradients of these ----------------------------------------------------------------------------------------------

add("_prelu_kernel_backward", per_input(2), flops="2 per element", reason="one product for each of both gradients")
add(
    "glu_backward",
    per_input(5, "grad_output"),
    flops="5 per element of the upstream gradient",
    reason="s = sigmoid(b); g s; g s a (1 - s)",
)

# -- dropout ---------------------------------------------------------------------------------------------------------


@rule(
    "native_dropout _fused_dropout",
    flops="2 per output in training, 0 in evaluation",
    reason="times the mask, times the scale",
)
def _dropout(call: Call) -> int:
    return 0 if call["train"] is False else 2 * elements(call.out[0])
