"""Get the weight and bias of an output layer, since the loss computes with these and never calls
the layer.

The layer may be PEFT's: a trained copy (modules_to_save), or one with low-rank terms (LoRA), which
are added to its weight. PEFT is not imported.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

#: Advice for a layer with hooks that cannot run.
WITHOUT_HOOKS = (
    "take them away (handle.remove()), "
    "or give transducer_loss(..., weight=layer.weight, bias=layer.bias), without them"
)


def of_linear(output: nn.Module) -> Tuple[Tensor, Optional[Tensor]]:
    """Return (weight, bias) of a linear layer; for PEFT's wrappers, those of the active adapters.

    Hooks of the layer are called with zero rows, since there are no logits to show them. Global
    hooks of torch are not called. Raises ValueError for a layer that computes something else than
    weight @ input + bias.
    """
    if hasattr(output, "original_module") and hasattr(output, "modules_to_save"):
        return of_linear(_trained_copy(output))
    if hasattr(output, "lora_A") and hasattr(output, "base_layer"):
        return _with_low_rank(output)
    unchanged = isinstance(output, nn.Linear) and "forward" not in output.__dict__
    if not unchanged or type(output).forward is not nn.Linear.forward:
        raise ValueError(
            f"output must be an nn.Linear with its own forward; it is {type(output).__name__}"
        )
    if (
        output._forward_hooks
        or output._forward_pre_hooks
        or output._backward_hooks
        or output._backward_pre_hooks
    ):
        _call_hooks(output)
    return output.weight, output.bias


def is_folded(output: nn.Module, weight: Tensor) -> bool:
    """Return whether `weight`, which `of_linear` returned for `output`, includes low-rank terms.

    If no term is added, `of_linear` returns the weight of the base layer itself. The terms are
    small, so rounding a weight with them to 16 bits would lose them."""
    return hasattr(output, "lora_A") and weight is not output.base_layer.weight


def _trained_copy(wrapper: Any) -> nn.Module:
    """Return the layer that PEFT's ModulesToSaveWrapper would call."""
    active = wrapper.active_adapters
    if (
        wrapper.disable_adapters
        or not active
        or any(name not in wrapper.modules_to_save for name in active)
    ):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def _with_low_rank(layer: Any) -> Tuple[Tensor, Optional[Tensor]]:
    """Return (weight, bias) of PEFT's lora.Linear with the terms of its active adapters.

    If a term was added, both are in at least 32 bits. Like PEFT's own forward, this unmerges a
    layer whose adapters are disabled, in place.

    Raises ValueError for an adapter with dropout now, or whose term is no product of two matrices.
    """
    weight, bias = of_linear(layer.base_layer)
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if layer.disable_adapters or layer.merged:  # a merged layer has the terms in its weight
        return weight, bias
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        dropout = layer.lora_dropout[name]
        if dropout.training and getattr(dropout, "p", 0) > 0:
            raise ValueError(
                f"output: lora_dropout={dropout.p} drops inputs of the low-rank term alone, which the loss cannot: set "
                "lora_dropout=0 for the output layer, or have it in modules_to_save"
            )
        if name in getattr(layer, "lora_variant", ()):
            raise ValueError(
                f"output: the adapter {name!r} is a variant of LoRA ({type(layer.lora_variant[name]).__name__}), whose "
                "term is no product of two matrices: use plain LoRA for the output layer, or have it in modules_to_save"
            )
        A, _ = of_linear(layer.lora_A[name])
        B, B_bias = of_linear(layer.lora_B[name])
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.to(wide) + layer.scaling[name] * (B.to(wide) @ A.to(wide))
        if B_bias is not None:
            B_bias = layer.scaling[name] * B_bias.to(wide)
            bias = B_bias if bias is None else bias.to(wide) + B_bias
    if bias is not None:
        bias = bias.to(weight.dtype)
    return weight, bias


def _call_hooks(layer: nn.Linear) -> None:
    """Call the hooks of a layer with zero rows of input or output, in the order of its forward.

    The loss reads the weight and never calls the layer, but a hook before forward may compute the
    weight, as that of weight_norm does.

    Raises ValueError for a hook that changes what the layer takes or returns, and for one that
    fails with zero rows. A hook of backward would see no gradient, and is refused too.
    """
    if layer._backward_hooks or layer._backward_pre_hooks:
        raise ValueError(f"output has backward hooks, which would not run: {WITHOUT_HOOKS}")
    _warn_of_hooks(type(layer).__name__)
    rows = layer.weight.new_empty(0, layer.in_features)
    # A hook changes a value by what it returns, or in place, which changes the version.
    try:
        for number, hook in list(layer._forward_pre_hooks.items()):
            keywords = [{}] if number in layer._forward_pre_hooks_with_kwargs else []
            version = _version(rows)
            result = hook(layer, (rows,), *keywords)
            _check_unchanged(hook, result is None and _version(rows) == version)
        logits = nn.functional.linear(rows, layer.weight, layer.bias)
        for number, hook in list(layer._forward_hooks.items()):
            keywords = [{}] if number in layer._forward_hooks_with_kwargs else []
            version = _version(logits)
            result = hook(layer, (rows,), *keywords, logits)
            is_same = result is None or result is logits
            _check_unchanged(hook, is_same and _version(logits) == version)
    except (RuntimeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"output has a hook that fails on no cells ({error}): {WITHOUT_HOOKS}"
        ) from error


def _version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place; 0 for one made under inference_mode, of
    which torch counts no changes."""
    return 0 if tensor.is_inference() else tensor._version


def _check_unchanged(hook: Any, unchanged: bool) -> None:
    """Raise ValueError that names the hook if it changed a value."""
    if not unchanged:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise ValueError(
            f"output has a hook that changes values ({name}), which the loss cannot: {WITHOUT_HOOKS}"
        )


@cache
def _warn_of_hooks(kind: str) -> None:
    """Warn, once for each kind of output layer, that its hooks see no cells."""
    warnings.warn(
        f"fused_transducer: the loss never calls the output layer ({kind}), so its hooks see no cells",
        stacklevel=6,
    )
