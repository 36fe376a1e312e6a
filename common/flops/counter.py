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
import threading
import warnings
from bisect import bisect_right
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import Any, Collection, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from common.core.errors import UserError
from common.core.text import first_line
from common.flops import lattices, matrices, operators, rules  # noqa: F401  (they fill the table)
from common.flops.rules import Call, Count

FORWARD, BACKWARD = "forward", "backward"
#: Where no module is at work.
OUTSIDE = "(outside)"

#: Torch tells which node is executed from 2.1 on; before, a backward belongs to no module.
_TELLS = hasattr(torch._C, "_current_autograd_node") and hasattr(torch._C, "_current_graph_task_id")
_NO_TASK = -1
_ACCUMULATES = 1 << 63  # such nodes have the largest sequence number there is
_ENGINE = {function.__code__ for function in (torch.autograd.backward, torch.autograd.grad)}


class _Running(NamedTuple):
    """One module's call, or a label's, made in the backward `task` or in none; `calls` of its children so far, by id:
    they tell the names of a shared one apart."""

    path: str
    of: Any
    task: int
    calls: Dict[int, int]


class Modules:
    """Paths and classes of the modules that ran, and where the next operator belongs.  Re-entered, it goes on."""

    def __init__(self, roots: Dict[str, torch.nn.Module]):
        #: By path: the class, how often it was called, and the module.
        self.classes: Dict[str, str] = {}
        self.calls: Dict[str, int] = {}
        self.modules: Dict[str, torch.nn.Module] = {}
        self._names: Dict[int, List[str]] = {}  # by id of the module: all its paths
        self._owners: Dict[int, str] = {}  # by id of a parameter: the path of the first module that has it
        self._stack: List[_Running] = []
        self._began: Tuple[List[int], List[str]] = ([], [])  # sequence numbers, and who ran from there on
        for path, module in roots.items():
            self._add(path, module)

    def __enter__(self) -> Modules:
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._push(self._path_of(module), module)),
            register_module_forward_hook(lambda module, *_: self._leave(module)),
        ]
        self._thread = threading.get_ident()
        self._note()
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def current(self) -> Tuple[str, str]:
        """Return (path, phase) of the operator that is called now."""
        task = self._task()
        phase = FORWARD if task == _NO_TASK else BACKWARD
        if self._stack and self._stack[-1].task == task:  # also a forward that a backward computes again
            return self._stack[-1].path, phase
        if phase == FORWARD or not _TELLS:
            return OUTSIDE, phase
        return self._made_by(torch._C._current_autograd_node()), phase

    def label(self, name: str) -> ContextManager[None]:
        """Name what runs inside, which is no module, `name`; its backward belongs to it too."""
        path = self._below(name)
        self.classes.setdefault(path, "(label)")
        return self._running(path, object())

    def call(self, module: torch.nn.Module) -> ContextManager[None]:
        """Mark a call of a module that hooks do not see, since it is not of its `forward`."""
        return self._running(self._path_of(module), module)

    @contextmanager
    def _running(self, path: str, of: Any) -> Iterator[None]:
        self._push(path, of)
        try:
            yield
        finally:
            self._leave(of)

    def rows(self) -> List[Dict[str, Any]]:
        """Return a row for each module; a parameter that several modules share is the first one's."""
        rows = []
        for path, kind in self.classes.items():
            counted = {True: 0, False: 0}
            parameters = getattr(self.modules.get(path), "_parameters", {}).values()
            for parameter in {id(each): each for each in parameters if each is not None}.values():
                if self._owners.get(id(parameter), path) == path:
                    counted[parameter.requires_grad] += parameter.numel()
            calls = self.calls.get(path, 0)
            rows.append(
                {"path": path, "class": kind, "calls": calls, "trainable": counted[True], "frozen": counted[False]}
            )
        return rows

    # -- forward -------------------------------------------------------------------------------------------------------

    def _push(self, path: str, of: Any) -> None:
        self.calls[path] = self.calls.get(path, 0) + 1
        self._stack.append(_Running(path, of, self._task(), {}))
        self._note()

    def _leave(self, of: Any) -> None:
        """End the call of a module or label, and those above it that an exception left."""
        while self._stack and self._stack.pop().of is not of:
            pass
        self._note()

    def _path_of(self, module: torch.nn.Module) -> str:
        """Return the path of a module.  One with several names has that below the caller, in the order of the calls, or
        else the first."""
        if id(module) not in self._names:
            self._add(self._below(type(module).__name__), module, set(self._names))
        names = self._names[id(module)]
        if len(names) == 1 or not self._stack:
            return names[0]
        caller = self._stack[-1]
        below = [name for name in names if not caller.path or name.startswith(f"{caller.path}.")] or names
        number = caller.calls.get(id(module), 0)
        caller.calls[id(module)] = number + 1
        return below[number % len(below)]

    def _below(self, name: str) -> str:
        """Return the path of `name`, which is no part of the model: in parentheses where the model is the path ""."""
        caller = self._stack[-1].path if self._stack else ""
        if caller:
            return f"{caller}.{name}"
        return f"({name})" if "" in self.modules and not self._stack else name

    def _add(self, root: str, module: torch.nn.Module, known: Collection[int] = ()) -> None:
        """Give a module and all below it their paths.  known: ids of modules that keep theirs, as of a model in a
        wrapper."""
        for name, part in module.named_modules(remove_duplicate=False):
            if id(part) in known:
                continue
            path = ".".join(filter(None, (root, name)))
            self.modules[path], self.classes[path] = part, type(part).__name__
            self._names.setdefault(id(part), []).append(path)
            for parameter in part._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), path)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """Note that the module on top of the stack is at work from the next node on."""
        if not _TELLS or threading.get_ident() != self._thread:
            return
        path = self._stack[-1].path if self._stack else OUTSIDE
        numbers, paths = self._began
        number = torch.autograd._get_sequence_nr()
        if numbers and numbers[-1] == number:
            paths[-1] = path
        else:
            numbers.append(number)
            paths.append(path)

    def _made_by(self, node: Any) -> str:
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _ACCUMULATES:
            return self._owners.get(id(getattr(node, "variable", None)), OUTSIDE)
        numbers, paths = self._began
        index = bisect_right(numbers, number) - 1
        return paths[index] if index >= 0 else OUTSIDE

    def _task(self) -> int:
        """Return the backward that is running, or _NO_TASK."""
        if _TELLS:
            return torch._C._current_graph_task_id()
        if threading.get_ident() != self._thread:
            return 0
        frame: Optional[Any] = sys._getframe(1)
        while frame is not None and frame.f_code not in _ENGINE:
            frame = frame.f_back
        return _NO_TASK if frame is None else 0


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
            # modules that ran, have matrices for weights, and gave no operator that is counted: in another thread, or
            # in a compiled form
            for path, module in self.modules.modules.items() if not any(error) else ():
                counted = [
                    entry for key, entry in self._counts.items() if not path or f"{key.path}.".startswith(f"{path}.")
                ]
                weights = any(weight is not None and weight.dim() > 1 for weight in module._parameters.values())
                fused = isinstance(module, torch.jit.ScriptModule) and "MKLDNN" in str(module.graph)
                unseen = (weights and not counted) or (fused and not any(macs for _, macs, _ in counted))
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
        running = list(_applied(sys._getframe(0)))
        begun = [call for frame, call in running if not any(frame is other for other in self._running)]
        self._running[:] = [frame for frame, _ in running]
        for call in begun:
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
