"""Rules of whole layers that torch has one operator for: attention, recurrent layers, torchaudio's filters."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence

from common.flops.rules import Call, Count, add, products, rule, size


class _Sizes(NamedTuple):
    """Holds the sizes of an attention.

    scores, queries: elements; keys, values: elements, those of a group of heads repeated for each of its heads; given:
    elements of keys and values as they are given; key_features, value_features: of one of them.
    """

    scores: int
    queries: int
    keys: int
    values: int
    key_features: int
    value_features: int
    given: int


def _sizes(query: Any, key: Any, value: Any) -> _Sizes:
    """Return the sizes of an attention.  query: (..., T, D); key, value: (..., S, D)."""
    rows = query.numel() // query.shape[-1]
    S = key.shape[-2]
    repeated = rows // query.shape[-2] * S
    keys, values = repeated * key.shape[-1], repeated * value.shape[-1]
    given = key.numel() + value.numel()
    return _Sizes(rows * S, query.numel(), keys, values, key.shape[-1], value.shape[-1], given)


def _masked(call: Call) -> bool:
    return call["attn_mask"] is not None or call["attn_bias"] is not None or bool(call["is_causal"])


_FUSED = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
]


@rule(
    " ".join(_FUSED),
    macs="scores x (features of a key + of a value)",
    flops="2 for each MAC; 1 per element of Q and of K, 3 per score, 1 more with a mask, 2 with dropout",
    reason="the mathematical form, whatever the kernel does: Q and K scaled, Q K^T, softmax 3, times V.  All scores, "
    "with a causal mask too",
)
def _attention(call: Call) -> Count:
    of = _sizes(call["query"], call["key"], call["value"])
    per_score = 3 + _masked(call) + 2 * bool(call["dropout_p"])
    return products(of.scores * (of.key_features + of.value_features), of.queries + of.keys + of.scores * per_score)


@rule(
    " ".join(f"{name}_backward" for name in _FUSED),
    macs="scores x 2 x (features of a key + of a value)",
    flops="2 for each MAC; 1 per element of Q and of K, 4 per score, 2 more with dropout; where groups of heads share "
    "keys and values, their gradients added up",
    reason="the mathematical form: dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q, softmax 4, dQ and dK scaled.  "
    "That a kernel computes Q K^T anew to save memory is not counted",
)
def _attention_backward(call: Call) -> Count:
    of = _sizes(call["query"], call["key"], call["value"])
    per_score = 4 + 2 * bool(call["dropout_p"])
    others = of.queries + of.keys + of.scores * per_score + of.keys + of.values - of.given
    return products(2 * of.scores * (of.key_features + of.value_features), others)


def _flexible(call: Call) -> _Sizes:
    """Return the sizes of a higher-order operator, whose arguments have no names: query, key and value come first."""
    return _sizes(*call.args[:3])


@rule(
    "higher_order::flex_attention",
    macs="scores x (features of a key + of a value)",
    flops="2 for each MAC; 4 per score",
    reason="Q K^T, scale, softmax 3, times V, of all scores: a block mask is not looked at, and what score_mod does is "
    "not counted",
)
def _flex_attention(call: Call) -> Count:
    of = _flexible(call)
    return products(of.scores * (of.key_features + of.value_features), 4 * of.scores)


@rule(
    "higher_order::flex_attention_backward",
    macs="scores x 2 x (features of a key + of a value)",
    flops="2 for each MAC; 5 per score; where groups of heads share keys and values, their gradients added up",
    reason="as of the fused attention, of all scores",
)
def _flex_attention_backward(call: Call) -> Count:
    of = _flexible(call)
    others = 5 * of.scores + of.keys + of.values - of.given
    return products(2 * of.scores * (of.key_features + of.value_features), others)


@rule(
    "_native_multi_head_attention",
    macs="4 T E^2 + 2 T^2 E, for each utterance",
    flops="2 for each MAC; biases 4 T E, scale 2 T E (T E where weights are asked for), softmax 3 per score, a mask 1, "
    "weights that are asked for 1",
    reason="the fast path of torch.nn.MultiheadAttention in evaluation: projections, attention, projection, as it is "
    "without that path; the weights are a mean over the heads",
)
def _multi_head_attention(call: Call) -> Count:
    averaged = call["need_weights"] and call["average_attn_weights"]
    count = _self_attention(call["query"], call["num_head"], call["mask"], 1 if call["need_weights"] else 2)
    return Count(count.macs, count.flops + (_squares(call["query"]) * call["num_head"] if averaged else 0))


def _squares(source: Any) -> int:
    """Return T^2 of all utterances, of (N, T, E) or nested (T, E)."""
    if source.is_nested:
        return sum(int(frames) ** 2 for frames, _ in source._nested_tensor_size())
    batch, frames, _ = source.shape
    return batch * frames * frames


def _features(source: Any) -> int:
    return int(source._nested_tensor_size()[0, -1]) if source.is_nested else source.shape[-1]


def _self_attention(source: Any, heads: int, mask: Any, scaled: int = 2) -> Count:
    """Count projections and attention.  scaled: 2 where queries and keys are, 1 where queries alone are."""
    scores, features = heads * _squares(source), _features(source)
    macs = 4 * source.numel() * features + 2 * scores * (features // heads)
    return products(macs, (4 + scaled) * source.numel() + (3 if mask is None else 4) * scores)


@rule(
    "_transformer_encoder_layer_fwd",
    macs="4 T E^2 + 2 T^2 E + 2 T E F, for each utterance",
    flops="2 for each MAC; attention as above; biases and activation 2 T F + T E, two norms 10 T E, two sums 2 T E",
    reason="the fast path of torch.nn.TransformerEncoderLayer in evaluation",
)
def _encoder_layer(call: Call) -> Count:
    source, inner = call["src"], call["ffn_weight_1"].shape[0]
    attention = _self_attention(source, call["num_heads"], call["mask"])
    hidden = source.numel() // _features(source) * inner
    feed_forward = products(2 * hidden * _features(source), 2 * hidden + (1 + 10 + 2) * source.numel())
    return Count(attention.macs + feed_forward.macs, attention.flops + feed_forward.flops)


# -- recurrent layers ------------------------------------------------------------------------------------------------

#: Operations per hidden unit and step beside products and biases.  A gate is the sum of both products and its function.
_CELLS = {
    "rnn": 2,
    "lstm": 4 * 2 + 5,  # f c + i g, tanh(c), times o
    "gru": 2 * 2 + 3 + 3,  # two gates; n = tanh(x + r h); h = (h - n) z + n
}
_CELL_REASON = "each gate adds two products and takes a function; LSTM 13, GRU 10, RNN 2 per hidden unit and step"
_MODES = ("rnn", "rnn", "lstm", "gru")  # cuDNN's and oneDNN's numbers


def _steps(call: Call) -> int:
    """Return the steps of all utterances; a packed input has no padding."""
    return call["input"].numel() // call["input"].shape[-1]


def _recurrent(steps: int, weights: Sequence[Any], cell: str, units: int) -> Count:
    """Count recurrent layers.  weights: matrices and biases of every layer and direction; units: hidden ones in all."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    biases = sum(weight.numel() for weight in weights if weight.dim() == 1)
    return products(steps * matrices, steps * (biases + _CELLS[cell] * units))


@rule(
    "mkldnn_rnn_layer",
    macs="steps x elements of the weight matrices",
    flops="2 for each MAC, 1 per bias and step; 13 per hidden unit and step",
    reason=_CELL_REASON,
)
def _mkldnn_layer(call: Call) -> Count:
    weights = [call[f"weight{number}"] for number in range(4 if call["has_biases"] else 2)]
    return _recurrent(_steps(call), weights, _MODES[call["mode"]], call["hidden_size"])


def _wanted(call: Call, *names: str) -> List[bool]:
    """Return whether the gradient of each of these arguments is asked for; of all, where no argument tells."""
    wanted = [getattr(call[name], "requires_grad", False) for name in names]
    told = any(wanted) or any(getattr(argument, "requires_grad", False) for argument in call.args)
    return wanted if told else [True] * len(names)


@rule(
    "mkldnn_rnn_layer_backward",
    macs="twice the forward's; without the gradients that are not asked for, of the input and of the first state",
    flops="2 for each MAC; 23 per hidden unit and step; 8 more with biases",
    reason="gradients of inputs and of weights.  The cell: dc 5, gates 3, dc of the step before 1, sigmoid 9, tanh 3, "
    "the sum with the next step's gradients 2; two biases of four gates are added up",
)
def _mkldnn_layer_backward(call: Call) -> Count:
    steps, first = _steps(call), call["hx_"].numel() // call["hx_"].shape[-1]
    of_input, of_state, weights, recurrent = _wanted(call, "input", "hx_", "weight1", "weight2")
    macs = steps * size(call["weight1"]) * (of_input + weights)
    macs += size(call["weight2"]) * (steps - (0 if of_state else first) + steps * recurrent)
    return products(macs, steps * call["hidden_size"] * (23 + (8 if call["has_biases"] else 0)))


@rule(
    "_cudnn_rnn",
    macs="steps x elements of the weight matrices",
    flops="2 for each MAC, 1 per bias and step; 13, 10 or 2 per hidden unit and step",
    reason=_CELL_REASON,
)
def _cudnn_layers(call: Call) -> Count:
    return _recurrent(_steps(call), call["weight"], _MODES[call["mode"]], _units(call))


def _units(call: Call) -> int:
    return call["hidden_size"] * call["num_layers"] * (2 if call["bidirectional"] else 1)


@rule(
    "_cudnn_rnn_backward",
    macs="twice the forward's",
    flops="2 for each MAC; 23 (LSTM), 18 (GRU), 4 (RNN) per hidden unit and step; the biases added up",
    reason="gradients of inputs and of weights, then those of the cell",
)
def _cudnn_layers_backward(call: Call) -> Count:
    cell = _MODES[call["mode"]]
    forward = _recurrent(_steps(call), call["weight"], cell, 0)
    others = forward.flops - 2 * forward.macs + _steps(call) * _units(call) * {"rnn": 4, "lstm": 23, "gru": 18}[cell]
    return products(2 * forward.macs, others)


_CELL_ALONE = "the cell alone; its products are operators of their own"


@rule("_thnn_fused_lstm_cell", flops="13 per hidden unit, 2 per gate with biases", reason=_CELL_ALONE)
def _lstm_cell(call: Call) -> int:
    gates = size(call["input_gates"])
    return _CELLS["lstm"] * (gates // 4) + (2 * gates if call["input_bias"] is not None else 0)


@rule("_thnn_fused_gru_cell", flops="10 per hidden unit, 2 per gate with biases", reason=_CELL_ALONE)
def _gru_cell(call: Call) -> int:
    gates = size(call["input_gates"])
    return _CELLS["gru"] * (gates // 3) + (2 * gates if call["input_bias"] is not None else 0)


@rule(
    "_thnn_fused_lstm_cell_backward_impl",
    flops="22 per hidden unit, 1 per gate with biases",
    reason="as for mkldnn_rnn_layer_backward, without the sum with the next step's gradients",
)
def _lstm_cell_backward(call: Call) -> int:
    gates = size(call["workspace"])
    return 22 * (gates // 4) + (gates if call["has_bias"] else 0)


@rule("_thnn_fused_gru_cell_backward", flops="18 per hidden unit, 6 more with biases", reason=_CELL_ALONE)
def _gru_cell_backward(call: Call) -> int:
    units = size(call["workspace"]) // 5
    return (24 if call["has_bias"] else 18) * units


# -- torchaudio ------------------------------------------------------------------------------------------------------

add(
    "torchaudio::_lfilter_core_loop",
    lambda call: products(call["input_signal_windows"].numel() * call["a_coeff_flipped"].shape[-1]),
    macs="samples x coefficients",
    flops="2 for each MAC",
    reason="a recursive filter: each output is a sum over those before it",
)
add(
    "torchaudio::_overdrive_core_loop",
    lambda call: 6 * call["temp"].numel(),
    flops="6 per sample",
    reason="subtract, multiply, add; two products and their sum",
)
