"""Custom autograd functions: the kernels that torch's dispatcher does not see, found by who calls its operators.

A custom function allocates what it returns with an operator of torch, which is called from within the function.
Kernels that are called outside of any custom function cannot be found.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Iterator, List, Mapping, NamedTuple, Optional

import torch

from common.flops.rules import FunctionCall

_apply = getattr(torch.autograd.Function.apply, "__func__", None)
#: Function.apply is a frame of Python's from torch 2.0 on; before, the function's own `forward` is the first.
_APPLY = _apply.__code__ if _apply is not None and hasattr(_apply, "__code__") else None


class Applied(NamedTuple):
    """Hold one call of a custom function.  frame: its outermost frame."""

    frame: Any
    name: str
    call: FunctionCall


class Functions:
    """Hold the custom functions that are running, kept up to date as each one begins."""

    def __init__(self) -> None:
        self._running: List[Any] = []

    def begun(self) -> List[Applied]:
        """Return the functions that began to run since the last call.  Called by every operator."""
        running = list(_applied(sys._getframe(1)))
        new = [applied for applied in running if not any(applied.frame is frame for frame in self._running)]
        self._running = [applied.frame for applied in running]
        return new

    def forget(self) -> None:
        """Release the frames, and with them all that the functions hold."""
        self._running = []


def _applied(frame: Optional[Any]) -> Iterator[Applied]:
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            function, given = frame.f_locals["cls"], frame.f_locals["args"]
            yield Applied(frame, *_call(function, dict(zip(_parameters(function), given))))
        elif _APPLY is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            function = getattr(type(frame.f_locals.get("ctx")), "_forward_cls", None)
            if function is not None:
                yield Applied(frame, *_call(function, frame.f_locals))
        frame = frame.f_back


def _call(function: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the name of a custom autograd function, and its call with these arguments and the defaults of others."""
    name = f"{function.__module__}.{function.__qualname__}"
    parameters = inspect.signature(function.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return name, FunctionCall(name, {**defaults, **arguments})


def _parameters(function: Any) -> List[str]:
    """Return the names of the parameters of `forward`, without the context."""
    names = list(inspect.signature(function.forward).parameters)
    return names if function.setup_context is not torch.autograd.Function.setup_context else names[1:]
