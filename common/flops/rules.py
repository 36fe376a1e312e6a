"""Find the rule that counts a call of an operator, or of a custom autograd function: one by its
name, else a general one.

One multiply-accumulate is one MAC and two FLOPs.  Only matrix products, convolutions and recursive
filters have MACs.  All other arithmetic is FLOPs alone: one for each function of a number, whatever
it costs.  Integers and booleans count nothing outside of matrix products.

Rules have qualified names ("aten::addmm"), so that one can exist before the library that defines
the operator is imported.  `add_` counts as `add`.  The modules beside this one fill the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch


class Count(NamedTuple):
    """Hold multiply-accumulates, and FLOPs, which contain two for each of these."""

    macs: int = 0
    flops: int = 0


def products(macs: int, others: int = 0) -> Count:
    """Return the count of `macs` multiply-accumulates and `others` operations beside them."""
    return Count(macs, 2 * macs + others)


@dataclass
class Call:
    """Hold one call of an operator, or of the `forward` of a custom autograd function.

    `call["weight"]` is the argument of that name or its default; None where there is none.

    Attributes:
        arguments: all arguments by name, with defaults
        args, kwargs: the arguments as they were given to an operator
        out: what an operator returned
    """

    name: str
    arguments: Mapping[str, Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    out: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)


#: Counts a call; an int is FLOPs.  None stands for a function that only calls operators of torch,
#: which are counted.
Rule = Callable[[Call], Count | int] | None
#: The formulas of torch's own counter, by operator.
try:
    from torch.utils.flop_counter import flop_registry as _FORMULAS
except ImportError:  # before torch 2.1
    _FORMULAS = {}
#: Each rule by the name of its operator.
RULES: dict[str, Rule] = {}


def add(operators: str, rule: Rule, factor: int = 1) -> None:
    """Add a rule to the table.  Raises ValueError for an operator that has a rule already.

    operators: names, separated by spaces: "mm" of aten, "quantized::linear" of another library,
    "package.module.Loss" of a custom autograd function; factor: multiplies what the rule returns,
    which must be an int unless the factor is 1."""

    def scaled(call: Call) -> int:
        return factor * rule(call)  # type: ignore[misc,return-value]

    for name in operators.split():
        full = name if "::" in name or "." in name else f"aten::{name}"
        if full in RULES:
            raise ValueError(f"{full} has a rule already")
        RULES[full] = rule if factor == 1 else scaled


def register(operator: Any, count: Rule) -> None:
    """Count an operator by a rule of the user's, which replaces an earlier one.

    operator: torch.ops.mylib.scale or "mylib::scale"; for kernels that the dispatcher does not see,
    a torch.autograd.Function or its name, "mylib.loss.Loss"; count: takes a Call and returns a
    Count, or FLOPs as an int; None for a function that only calls operators of torch.
    """
    if isinstance(operator, str):
        name = operator
    elif isinstance(operator, type):
        name = f"{operator.__module__}.{operator.__qualname__}"
    else:  # all overloads of an operator, also where one is given, such as scale.default
        name = str(getattr(operator, "overloadpacket", operator)._qualified_op_name)
    RULES[name] = count


@cache
def schema_of(operator: Any) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the names of the positional arguments of an operator, and all defaults by name."""
    schema = getattr(operator, "_schema", None)
    arguments = schema.arguments if schema else ()  # a higher-order operator has no schema
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    return positional, {argument.name: argument.default_value for argument in arguments}


def name_of(operator: Any) -> str:
    """Return the qualified name of an operator, such as "aten::addmm" for aten.addmm.default."""
    schema = getattr(operator, "_schema", None)
    return schema.name if schema is not None else f"higher_order::{operator.name()}"


def find(operator: Any) -> Rule:
    """Return the rule of an operator; None if it has no rule.

    The first of these is taken: the rule in RULES; for `add_` the rule of `add`; a rule that follows
    from the schema, tags and name (`_general`); a formula of torch's own counter, which counts
    products alone."""
    name = name_of(operator)
    out_of_place = name.removesuffix("_")
    rule = RULES.get(name) or RULES.get(out_of_place) or _general(operator, out_of_place)
    formula = _FORMULAS.get(getattr(operator, "overloadpacket", None))
    if rule or not formula:
        return rule
    # torch's formulas return FLOPs, two for each MAC
    return lambda call: products(formula(*call.args, **call.kwargs, out_val=call.out) // 2)


def is_composite(operator: Any) -> bool:
    """Return whether torch defines the operator by others, which are counted instead of it.

    Returns False for an operator that the dispatcher does not know, such as a higher-order one."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(
            operator.name(), "CompositeImplicitAutograd"
        )
    except (AttributeError, RuntimeError):
        return False


# -- operators without a rule of their own: by their schema, tags and name in torch ----------------

#: Matches operators that make, copy, pad or choose numbers: "aten::new_zeros", "aten::ones_like",
#: "aten::constant_pad_nd", "aten::to_dense", "aten::max_pool2d_with_indices", "aten::view_copy".
_MOVES = re.compile(
    r"aten::(new_\w+|\w+_like|_new_zeros\w*|\w+_scatter|\w+_pad(\dd|_nd)|_?to_(copy|dense)\w*"
    r"|_?upsample_nearest(_exact)?\dd|\w*max_pool\dd(_with_indices)?|\w+_copy)"
)
#: Elementwise operators that some supported torch does not tag `pointwise`; before 2.1 none is.
_POINTWISE = frozenset(
    """neg reciprocal remainder fmod floor_divide pow sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan
    asin acos atan atan2 sinh cosh tanh copysign sigmoid erf erfc lgamma digamma sign floor ceil round trunc frac
    polar xlogy logit relu gelu silu mish elu celu leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink
    softplus threshold _prelu_kernel eq ne lt le gt ge isnan isinf isposinf isneginf logical_and logical_or
    logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not signbit gelu_backward silu_backward
    mish_backward elu_backward hardswish_backward softplus_backward log_sigmoid_backward logit_backward""".split()
)
_FOREACH = "aten::_foreach_"


def nothing(_: Call) -> int:
    """Count no operation, as the rule of operators that only move numbers."""
    return 0


def _tensors(values: Any) -> int:
    """Return how many of these arguments or results of a schema are tensors, or lists of them."""
    return sum("Tensor" in str(value.type) for value in values)


def _aliases(values: Any) -> list[Any]:
    """Return the alias_info of those arguments or results of a schema that have one.

    torch's alias_info tells which memory is shared, and whether the operator writes to it."""
    return [value.alias_info for value in values if value.alias_info is not None]


@cache
def _general(operator: Any, name: str) -> Rule:
    """Return the rule that follows from the schema, tags and name of an operator; None where no rule
    follows.

    After None `find` asks for torch's own formula.  An operator without that is reported, since it
    may be a product.  None also for a composite operator, whose parts are counted.

    The tests go from operators that compute nothing to those of aten that do: elementwise ones,
    with an operation for each element of the result, and reductions, with one for each element that
    the result has less.

    name: the operator's qualified name without "_" at its end: "aten::add" for aten.add_ too"""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        return None
    # A result that shares memory, but is not written to, is a view.
    is_view = any(not alias.is_write for alias in _aliases(schema.returns))
    if is_view or _tagged(operator, "inplace_view", "view_copy"):
        return nothing
    if name.startswith(_FOREACH):  # optimizers call these
        by_lists = _of_lists(name.removeprefix(_FOREACH))
        if by_lists is not None:
            return by_lists
    tensors_taken = _tensors(schema.arguments)  # 0 for arange
    writes = any(alias.is_write for alias in _aliases(schema.arguments))
    gives_tensors = writes or _tensors(schema.returns)  # size does not
    is_of_torch = name.startswith(("aten::", "prim::", "profiler::"))
    if is_of_torch and not (tensors_taken and gives_tensors):
        return nothing
    if _MOVES.fullmatch(name):
        return nothing
    if not name.startswith("aten::") or is_composite(operator):
        return None
    # Attention with dropout has this tag too, and takes more tensors.
    if tensors_taken <= 2 and _tagged(operator, "nondeterministic_seeded"):
        return nothing  # a generator of random numbers
    if name.removeprefix("aten::") in _POINTWISE or _tagged(operator, "pointwise"):
        factor = 2 if name.endswith("_backward") else 1  # the derivative, times the gradient
        return lambda call: factor * elements(call.out)
    if _tagged(operator, "reduction"):
        return lambda call: max(elements(call["self"]) - elements(call.out), 0)
    return None


def _tagged(operator: Any, *tags: str) -> bool:
    """Return whether torch gives the operator one of these tags.  An older torch lacks some."""
    return any(getattr(torch.Tag, tag, None) in operator.tags for tag in tags)


def _of_lists(name: str) -> Rule:
    """Return the rule of the operator aten::_foreach_<name>, which applies aten::<name> to each
    tensor of a list; None if aten::<name> does not exist or has no rule.

    It is the rule of aten::<name>: `size` and `elements` add up over a list."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    rule = find(getattr(packet, packet.overloads()[0]))
    if rule is None:
        return None

    def of_lists(call: Call) -> Count | int:
        if call.out is None:  # an operator in place returns nothing: its output is the list it took
            call.out = call["self"]
        return rule(call)

    return of_lists


def size(tensor: Any) -> int:
    """Return the number of elements of a tensor or of a list of tensors; 0 for None.

    Raises TypeError for a sparse or nested tensor: the operator that takes it is not counted."""
    if isinstance(tensor, torch.Tensor):
        if tensor.layout not in (torch.strided, torch._mkldnn) or tensor.is_nested:  # type: ignore[attr-defined]
            raise TypeError("a sparse or nested tensor")
        return tensor.numel()
    return sum(map(size, tensor)) if isinstance(tensor, (list, tuple)) else 0


def elements(tensor: Any, complex_factor: int = 2) -> int:
    """Return the number of floating-point elements of a tensor or of a list of tensors.

    An integer or boolean counts 0, a complex number `complex_factor`."""
    if isinstance(tensor, (list, tuple)):
        return sum(elements(part, complex_factor) for part in tensor)
    if is_complex(tensor):
        return complex_factor * size(tensor)
    return size(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else 0


def is_complex(operand: Any) -> bool:
    """Return whether a tensor or a number is complex."""
    if isinstance(operand, torch.Tensor):
        return operand.is_complex()
    return isinstance(operand, complex)


def output(call: Call) -> int:
    """Return the number of floating-point elements that an operator returned."""
    return elements(call.out)


def argument(name: str) -> Callable[[Call], int]:
    """Return a rule that counts the floating-point elements of an argument."""
    return lambda call: elements(call[name])
