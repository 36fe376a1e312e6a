"""The counter: every operator that torch's dispatcher runs, forward and backward, by module and operator.

    with FlopCounter(model) as counter:
        model(x).sum().backward()
    print(counter.total())

Nothing is patched: a TorchDispatchMode sees the operators, however they were called and on whatever device, the meta
device included, and hooks tell the modules.  Operators that torch defines by others are counted by those.

A custom autograd function's kernels do not pass through the dispatcher; it is found by who calls the operators that
allocate what it returns.  Kernels that are called outside of any custom function cannot be found.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.core.errors import UserError
from common.core.text import first_line
from common.flops import lattices, matrices, operators, rules  # noqa: F401  (they fill the table)
from common.flops.modules import Modules
from common.flops.rules import Call, Count

_apply = getattr(torch.autograd.Function.apply, "__func__", None)
#: Function.apply is a frame of Python's from torch 2.0 on; before, the function's own `forward` is the first.
_APPLY = getattr(_apply, "__code__", None)


class NotCounted(UserWarning):
    """An operator without a rule."""


class _Key(NamedTuple):
    path: str
    operator: str
    phase: str


class FlopCounter:
    """Counts what runs inside; entered again, it goes on.

    model: a module, whose path is "", or modules by name; others that run are named by their class.
    strict: an operator without a rule raises UserError, else it is warned about once, with the module that ran it.
    """

    def __init__(self, model: Union[None, torch.nn.Module, Dict[str, torch.nn.Module]] = None, *, strict: bool = False):
        self.strict = strict
        self.modules = Modules({"": model} if isinstance(model, torch.nn.Module) else dict(model or {}))
        self._running: List[Any] = []  # the frames of custom functions
        #: [calls, MACs, FLOPs] of what was counted; calls of what was not by (operator, path, reason).
        self._counts: Dict[_Key, List[int]] = defaultdict(lambda: [0, 0, 0])
        self._not_counted: Dict[Tuple[str, str, str], int] = {}
        self._inside: Optional[ExitStack] = None

    def __enter__(self) -> FlopCounter:
        if self._inside is not None:
            raise RuntimeError("this counter is counting already")
        self._inside = ExitStack()
        self._inside.enter_context(self.modules)
        self._inside.callback(self._running.clear)  # and with the frames all that they hold
        self._inside.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(*error)
            if not any(error):
                self._name_unseen()

    def _name_unseen(self) -> None:
        """Name as not counted the modules that ran, have matrices for weights, and gave no operator that is counted: in
        another thread, or in a compiled form."""
        for path, module in self.modules.modules.items():
            inside = [entry for key, entry in self._counts.items() if not path or f"{key.path}.".startswith(f"{path}.")]
            weights = any(weight is not None and weight.dim() > 1 for weight in module._parameters.values())
            fused = isinstance(module, torch.jit.ScriptModule) and "MKLDNN" in str(module.graph)
            unseen = (weights and not inside) or (fused and not any(macs for _, macs, _ in inside))
            if unseen and self.modules.calls.get(path):
                self._missing(self.modules.classes[path], path, "its operators were not seen, or not its products")

    def label(self, name: str) -> ContextManager[None]:
        """Count what runs inside, which is no module, under `name`; its backward too."""
        return self.modules.label(name)

    def total(self) -> Count:
        """Return the MACs and FLOPs of everything so far."""
        return Count(sum(entry[1] for entry in self._counts.values()), sum(entry[2] for entry in self._counts.values()))

    def not_counted(self) -> List[str]:
        """Return the names of the operators without a rule."""
        return sorted({operator for operator, _, _ in self._not_counted})

    def document(self) -> Dict[str, Any]:
        """Return all as JSON takes it: `modules` with their own parameters, `counts` by module, operator and phase."""
        return {
            "torch": str(torch.__version__),
            "modules": self.modules.rows(),
            "counts": [
                {**key._asdict(), "calls": calls, "macs": macs, "flops": flops}
                for key, (calls, macs, flops) in self._counts.items()
            ],
            "not_counted": [
                {"operator": operator, "path": path, "reason": reason, "calls": calls}
                for (operator, path, reason), calls in self._not_counted.items()
            ],
        }

    def _count(self, operator: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        path, phase = self.modules.current()
        for call in self._functions_begun():
            if call.name in rules.RULES:
                self._add(path, phase, call, rules.RULES[call.name])
            elif not call.name.startswith("torch."):
                reason = "custom function: kernels of its own cannot be seen, torch's operators are counted"
                self._missing(call.name, path, reason)
        call, count = rules.call_of(operator, args, kwargs, out), rules.find(operator)
        if count is None:
            self._missing(call.name, path, "no rule")
            count = rules.nothing  # its calls are
        self._add(path, phase, call, count)

    def _add(self, path: str, phase: str, call: Call, rule: rules.Rule) -> None:
        if rule is None:  # a function of torch's operators alone
            return
        counted: Union[Count, int] = 0
        try:
            counted = rule(call)
        except Exception as error:  # of tensors without a shape, or of a registered rule: the model runs on
            self._missing(call.name, path, f"its rule fails, {type(error).__name__}: {first_line(error)}")
        macs, flops = counted if isinstance(counted, Count) else (0, counted)
        entry = self._counts[_Key(path, call.name, phase)]
        entry[:] = [entry[0] + 1, entry[1] + macs, entry[2] + flops]

    def _missing(self, name: str, path: str, reason: str) -> None:
        where = path or "the model"
        if self.strict:
            raise UserError(f"{name} in {where}: {reason}; add one with common.flops.rules.register")
        if name not in self.not_counted():  # explicitly, so that a second counter of this process warns as the first
            warnings.warn_explicit(f"not counted: {name} in {where} ({reason})", NotCounted, __file__, 0, registry={})
        key = name, path, reason
        self._not_counted[key] = self._not_counted.get(key, 0) + 1

    def _functions_begun(self) -> List[Call]:
        """Return the custom autograd functions that began to run since the last operator."""
        running = list(_applied(sys._getframe(1)))
        new = [call for frame, call in running if not any(frame is other for other in self._running)]
        self._running[:] = [frame for frame, _ in running]
        return new


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if rules.find(func) is None and rules.composite(func):  # as inference mode leaves it
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self.counter._count(func, args, kwargs, out)
        return out


def _applied(frame: Optional[Any]) -> Iterator[Tuple[Any, Call]]:
    """Yield the custom functions that run in this frame or in those that called it, each with its outermost frame."""
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            function = frame.f_locals["cls"]
            names = list(inspect.signature(function.forward).parameters)
            old = function.setup_context is torch.autograd.Function.setup_context  # its first argument is the context
            yield frame, _call(function, dict(zip(names[old:], frame.f_locals["args"])))
        elif _APPLY is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            function = getattr(type(frame.f_locals.get("ctx")), "_forward_cls", None)
            if function is not None:
                yield frame, _call(function, frame.f_locals)
        frame = frame.f_back


def _call(function: Any, arguments: Mapping[str, Any]) -> Call:
    """Return the call of a custom autograd function with these arguments and the defaults of others."""
    parameters = inspect.signature(function.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return Call(f"{function.__module__}.{function.__qualname__}", {**defaults, **arguments})
