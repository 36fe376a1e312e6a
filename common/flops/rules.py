"""The rule table: for each operator of torch's dispatcher its MACs and FLOPs, with the reason.

One multiply-accumulate is one MAC and two FLOPs.  MACs are those of matrix products, convolutions and recursive
filters; every other arithmetic is FLOPs alone.  Operators are keyed by their qualified names ("aten::addmm"), which is
what an OpOverloadPacket stands for, so that a rule can exist before the library that defines the operator is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch


class Count(NamedTuple):
    """Hold the multiply-accumulates and floating-point operations of one call."""

    macs: int = 0
    flops: int = 0


def products(macs: int, others: int = 0) -> Count:
    """Return the count of `macs` multiply-accumulates and `others` operations beside them."""
    return Count(macs, 2 * macs + others)


class Call:
    """Hold one call of an operator.

    `call["weight"]` is the argument of that name in the operator's schema, given or default (None where the schema has
    no such argument); `out` is what the call returned.
    """

    def __init__(self, operator: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any], out: Any):
        self.args, self.kwargs, self.out = args, kwargs, out
        self.name = name_of(operator)
        self._positions, self._defaults = _schema(operator)

    def __getitem__(self, name: str) -> Any:
        index = self._positions.get(name)
        if index is not None and index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, self._defaults.get(name))


class FunctionCall:
    """Hold one call of a custom autograd function: `call["x"]` is the argument of that name of its `forward`, else
    None."""

    def __init__(self, name: str, arguments: Mapping[str, Any]):
        self.name, self.arguments = name, arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)


@cache
def _schema(operator: Any) -> Tuple[Dict[str, int], Dict[str, Any]]:
    schema = getattr(operator, "_schema", None)  # a higher-order operator has none
    arguments = schema.arguments if schema is not None else ()
    positions = {argument.name: index for index, argument in enumerate(arguments) if not argument.kwarg_only}
    return positions, {argument.name: argument.default_value for argument in arguments}


#: What a rule returns; a bare int is FLOPs.
Counted = Union[Count, int]


def as_count(counted: Counted) -> Count:
    return counted if isinstance(counted, Count) else Count(0, counted)


@dataclass(frozen=True)
class Rule:
    """Hold one row of the table.

    Attributes:
        operators: that share the rule.
        count: returns the count of a Call; None where there is nothing to count.
        macs, flops: the count in words.
        reason: for the count.
    """

    operators: Tuple[str, ...]
    count: Optional[Callable[[Any], Counted]]
    flops: str
    macs: str
    reason: str


#: Every rule, in the order of the documentation.
RULES: List[Rule] = []
_Applies = Callable[[Any, str], bool]
#: Rules of operators without one of their own, see `general`; the first that applies counts.
GENERAL: List[Tuple[_Applies, Rule]] = []
_BY_NAME: Dict[str, Rule] = {}
_REGISTERED: Dict[str, Rule] = {}  # these come first


def add(operators: str, count: Optional[Callable[[Any], Counted]], *, flops: str, macs: str = "", reason: str) -> None:
    """Add a row of the table, for names parted by spaces: a bare one is aten's, one with dots a custom function's."""
    names = tuple(name if "::" in name or "." in name else f"aten::{name}" for name in operators.split())
    rule = Rule(names, count, flops, macs, reason)
    twice = [name for name in names if name in _BY_NAME]
    if twice:
        raise ValueError(f"{twice[0]} has a rule already")
    RULES.append(rule)
    _BY_NAME.update(dict.fromkeys(names, rule))


def rule(operators: str, *, flops: str, macs: str = "", reason: str) -> Callable[[Any], Any]:
    """Return a decorator by which a function counts these operators, see `add`."""

    def decorate(count: Callable[[Call], Counted]) -> Callable[[Call], Counted]:
        add(operators, count, flops=flops, macs=macs, reason=reason)
        return count

    return decorate


def general(
    operators: str, count: Callable[[Call], Counted], *, flops: str, reason: str
) -> Callable[[_Applies], _Applies]:
    """Return a decorator for a function that says which operators without a rule of their own `count` counts.

    It takes an OpOverload that has a schema, and its name without the underscore of an in-place form.  `operators` says
    in words which these are.
    """

    def decorate(applies: _Applies) -> _Applies:
        GENERAL.append((applies, Rule((operators,), count, flops, "", reason)))
        return applies

    return decorate


def register(operator: Any, count: Optional[Callable[[Any], Counted]], reason: str = "registered") -> None:
    """Count `operator` with `count`, in the place of any rule that is there.

    operator: an OpOverloadPacket, an OpOverload or a name such as "mylib::op"; or a torch.autograd.Function or its name
    such as "mylib.loss.LossFunction", whose kernels torch's dispatcher does not see; count: takes a Call or a
    FunctionCall and returns a Count, or FLOPs as an int; None: a function all of whose work is torch's operators.

        register(torch.ops.mylib.scale, lambda call: call.out.numel())
    """
    if isinstance(operator, type):
        name = f"{operator.__module__}.{operator.__qualname__}"
    else:
        packet = getattr(operator, "overloadpacket", operator)
        name = packet if isinstance(packet, str) else str(packet._qualified_op_name)
    _REGISTERED[name] = Rule((name,), count, "", "", reason)


def named(name: str) -> Optional[Rule]:
    """Return the rule of this name, or None."""
    return _REGISTERED.get(name) or _BY_NAME.get(name)


def find(operator: Any) -> Optional[Rule]:
    """Return the rule of an OpOverload: its own, that of the operator it is a form of (`add_` of `add`), a general one
    or None."""
    name = name_of(operator)
    out_of_place = name[:-1] if name.endswith("_") else name
    return named(name) or named(out_of_place) or _general(operator, out_of_place)


@cache
def _general(operator: Any, name: str) -> Optional[Rule]:
    if getattr(operator, "_schema", None) is None:  # a higher-order operator
        return None
    return next((rule for applies, rule in GENERAL if applies(operator, name)), None)


def name_of(operator: Any) -> str:
    """Return the name of an operator: "aten::addmm" of aten.addmm.default."""
    schema = getattr(operator, "_schema", None)
    return schema.name if schema is not None else f"higher_order::{operator.name()}"


def composite(operator: Any) -> bool:
    """Return whether the operator is defined by others, which are counted instead of it."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    except (AttributeError, RuntimeError):
        return False


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED


def size(tensor: Any) -> int:
    """Return the number of elements of a tensor (those that a sparse one stores), or of a list of tensors; 0 for
    None."""
    if isinstance(tensor, torch.Tensor):
        if tensor.layout is torch.sparse_coo:
            return tensor._values().numel()
        return (tensor.values() if tensor.layout in _COMPRESSED else tensor).numel()
    return sum(map(size, tensor)) if isinstance(tensor, (list, tuple)) else 0


def elements(tensor: Any, complex_factor: int = 2) -> int:
    """Return the number of floating-point elements, complex ones times `complex_factor`; integers and booleans count
    0."""
    if isinstance(tensor, (list, tuple)):
        return sum(elements(each, complex_factor) for each in tensor)
    if not isinstance(tensor, torch.Tensor):
        return 0
    if tensor.is_complex():
        return complex_factor * size(tensor)
    return size(tensor) if tensor.is_floating_point() else 0


def per_output(factor: int) -> Callable[[Call], int]:
    """Return a rule of `factor` FLOPs for each element that is returned."""
    return lambda call: factor * elements(call.out)


def per_input(factor: int, name: str = "self") -> Callable[[Call], int]:
    """Return a rule of `factor` FLOPs for each element of the argument `name`."""
    return lambda call: factor * elements(call[name])
