"""Rules of operators without one of their own, from what torch tells of each: its schema, its tags and its name.

What moves numbers or chooses among them computes nothing, what computes each element by itself counts one per output.
An operator of which nothing is told here is not counted, and named: silence would take a product for nothing.
"""

from __future__ import annotations

import re
from typing import Any, Optional

import torch

from common.flops.rules import Call, Counted, Rule, add, composite, elements, find, general, per_output


def _nothing(_: Call) -> int:
    return 0


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
    "_is_any_true argmax argmin count_nonzero bincount histc heaviside nan_to_num _functional_assert_async",
    _nothing,
    flops="0",
    reason="fills, copies, moves, casts, selects, sorts or compares: values are chosen, none is computed",
)
#: Names of families that make, copy or choose.
_MOVES = re.compile(
    r"aten::(new_\w+|\w+_like|_new_zeros\w*|\w+_scatter|\w+_pad(\dd|_nd)|_?to_(copy|dense|sparse)\w*"
    r"|_nested_(tensor|from)_\w+|_?sparse_(resize|mask)\w*|_sparse_(coo|compressed|csr)_tensor\w*"
    r"|_?upsample_nearest(_exact)?\dd|\w*max_pool\dd(_with_indices)?)"
)
#: Elementwise operators that some supported torch does not tag `pointwise`: none does before 2.1.
_POINTWISE = (
    "neg reciprocal remainder fmod floor_divide pow sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin "
    "acos atan atan2 sinh cosh tanh copysign sigmoid erf erfc lgamma digamma sign floor ceil round trunc frac polar "
    "xlogy logit relu gelu silu mish elu celu leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink "
    "softplus threshold _prelu_kernel eq ne lt le gt ge isnan isinf isposinf isneginf logical_and logical_or "
    "logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not signbit gelu_backward silu_backward "
    "mish_backward elu_backward hardswish_backward softplus_backward log_sigmoid_backward logit_backward"
).split()
_FOREACH = "aten::_foreach_"


def _tensors(values: Any) -> int:
    """Count the tensors, and lists of them, among the arguments or the returns of a schema."""
    return sum("Tensor" in str(value.type) for value in values)


def _tagged(operator: Any, *tags: str) -> bool:
    """Return whether torch gives the operator one of these tags, of which an older torch has fewer."""
    return any(getattr(torch.Tag, tag, None) in operator.tags for tag in tags)


@general("views", _nothing, flops="0", reason="the schema returns a view or the copy of one")
def _is_view(operator: Any, name: str) -> bool:
    returned = [value.alias_info for value in operator._schema.returns]
    aliased = any(alias is not None and not alias.is_write for alias in returned)
    copied = name.startswith("aten::") and name.endswith("_copy")
    return aliased or copied or _tagged(operator, "inplace_view", "view_copy")


def _of_one(name: str) -> Optional[Rule]:
    """Return the rule of the operator of one tensor that `name` applies to lists, or None."""
    packet = getattr(torch.ops.aten, name[len(_FOREACH) :], None) if name.startswith(_FOREACH) else None
    return find(getattr(packet, packet.overloads()[0])) if packet is not None else None


def _foreach(call: Call) -> Counted:
    rule = _of_one(call.name[:-1] if call.name.endswith("_") else call.name)
    assert rule is not None and rule.count is not None, "the general rule applies to operators that have one"
    call.out = call["self"] if call.out is None else call.out  # in place, nothing is returned
    return rule.count(call)


@general("_foreach_add and others", _foreach, flops="as the operator of one tensor", reason="lists, as optimizers have")
def _is_of_lists(_: Any, name: str) -> bool:
    return _of_one(name) is not None


@general(
    "arange, size and others",
    _nothing,
    flops="0",
    reason="makes a tensor from no other, or tells something of one: the schema takes or returns none",
)
def _has_no_tensors(operator: Any, name: str) -> bool:
    schema = operator._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    tells = not writes and not _tensors(schema.returns)
    return name.startswith(("aten::", "prim::", "profiler::")) and (tells or not _tensors(schema.arguments))


@general(
    "rand, bernoulli and others that torch tags nondeterministic_seeded",
    _nothing,
    flops="0",
    reason="random numbers: the generator's work is no arithmetic on data",
)
def _is_random(operator: Any, name: str) -> bool:
    """Return whether it is a generator: attention with dropout has the tag, too, and more than two tensors."""
    few = _tensors(operator._schema.arguments) <= 2
    seeded = few and _tagged(operator, "nondeterministic_seeded")
    return name.startswith("aten::") and seeded and not composite(operator)


@general(
    "zeros_like, new_empty, slice_scatter, constant_pad_nd, _to_copy, to_sparse, max_pool2d_with_indices, "
    "upsample_nearest2d and others of such names",
    _nothing,
    flops="0",
    reason="makes, copies, casts or chooses",
)
def _is_moving(_: Any, name: str) -> bool:
    return _MOVES.fullmatch(name) is not None


def _is_pointwise(operator: Any, name: str) -> bool:
    namespace, _, bare = name.partition("::")
    elementwise = bare in _POINTWISE or _tagged(operator, "pointwise")
    return namespace == "aten" and elementwise and not composite(operator)


@general(
    "gelu_backward and others that torch tags pointwise",
    per_output(2),
    flops="2 per output",
    reason="gradients of what computes each element by itself: the derivative, one, times the gradient",
)
def _is_pointwise_backward(operator: Any, name: str) -> bool:
    return name.endswith("_backward") and _is_pointwise(operator, name)


general(
    "exp, relu, eq and others that torch tags pointwise",
    per_output(1),
    flops="1 per output",
    reason="arithmetic, mathematical and activation functions, one each whatever they cost; complex numbers 2; "
    "comparisons return no floating-point number and count nothing",
)(_is_pointwise)


@general(
    "others that torch tags reduction",
    lambda call: max(elements(call["self"]) - elements(call.out), 0),
    flops="n - 1 per group",
    reason="adding up n numbers takes n - 1 additions",
)
def _is_reduction(operator: Any, name: str) -> bool:
    return name.startswith("aten::") and _tagged(operator, "reduction") and not composite(operator)
