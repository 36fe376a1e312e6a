"""The counter: every operator that torch's dispatcher runs, forward and backward, by module and
operator.

    with FlopCounter(model) as counter:
        model(x).sum().backward()
    print(counter.total())

Nothing is patched: a TorchDispatchMode sees the operators, however they were called and on whatever
device, the meta device included, and hooks tell the modules.  Operators that torch defines by
others are counted by those; torch's fast path of attention is off meanwhile.

A custom autograd function's kernels do not pass through the dispatcher; it is found by who calls
the operators that allocate what it returns.  Kernels that are called outside of any custom function
cannot be found.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rnnt_bench.core import errors, text
from rnnt_bench.flops import matrices, operators, rules  # noqa: F401  (the first two fill the table)
from rnnt_bench.flops.rules import Call, Count

FORWARD, BACKWARD = "forward", "backward"
#: Where no module is at work.
OUTSIDE = "(outside)"

# The id of the backward that runs in this thread, _NO_TASK in forward. Before torch 2.1 none tells,
# and a backward counts as forward.
_NO_TASK = -1
_task = getattr(torch._C, "_current_graph_task_id", lambda: _NO_TASK)
_ACCUMULATES = 1 << 63  # such nodes have the largest sequence number there is

#: Function.apply is a frame of Python's from torch 2.0 on; before, the function's own `forward` is
#: the first.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


class Modules:
    """Paths of the modules that ran, and where the next operator belongs.  A module with several
    names has the first; a parameter that several modules share is the first one's."""

    def __init__(self, roots: dict[str, torch.nn.Module]):
        #: Path -> the module, and how often it was called.
        self.modules: dict[str, torch.nn.Module] = {}
        self.calls: Counter[str] = Counter()
        #: The id of a module, or of a parameter -> the path of the module.
        self._paths: dict[int, str] = {}
        #: The modules at work, the innermost last: path, and the `_task` that called the module.
        self._stack: list[tuple[str, int]] = []
        #: Autograd numbers the nodes of its graph in the order in which forward makes them.
        #: _starts[i]: number of the first node that is made by the module whose path is _owners[i];
        #: it makes all nodes below _starts[i + 1].
        self._starts: list[int] = []
        self._owners: list[str] = []
        for path, module in roots.items():
            self._add(path, module)

    def __enter__(self) -> Modules:
        self._handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(
                lambda module, _: self._push(module)
            ),
            torch.nn.modules.module.register_module_forward_hook(
                lambda module, *_: self._leave(module)
            ),
        ]
        self._thread = threading.get_ident()
        self._note()
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    @contextmanager
    def call(self, module: torch.nn.Module) -> Iterator[None]:
        """Mark a call of a module that hooks do not see, since it is not of its `forward`."""
        self._push(module)
        try:
            yield
        finally:
            self._leave(module)

    def current(self) -> tuple[str, str]:
        """Return (path, phase) of the operator that is called now."""
        task = _task()
        phase = FORWARD if task == _NO_TASK else BACKWARD
        # In a backward too the stack tells of a module that this backward called, as checkpointing
        # does, which computes its forward again.
        if self._stack and self._stack[-1][1] == task:
            return self._stack[-1][0], phase
        if phase == FORWARD:
            return OUTSIDE, phase
        return self._owner(torch._C._current_autograd_node()), phase

    def _owner(self, node: Any) -> str:
        """Return the path of the module whose forward made a node of autograd."""
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _ACCUMULATES:
            return self._paths.get(id(getattr(node, "variable", None)), OUTSIDE)
        index = bisect_right(self._starts, number) - 1
        return self._owners[index] if index >= 0 else OUTSIDE

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each module, with its own parameters."""
        rows = []
        for path, module in self.modules.items():
            sizes = {True: 0, False: 0}
            for key, parameter in {id(weight): weight for weight in _weights(module)}.items():
                if self._paths.get(key, path) == path:
                    sizes[parameter.requires_grad] += parameter.numel()
            rows.append(
                {
                    "path": path,
                    "class": type(module).__name__,
                    "calls": self.calls[path],
                    "trainable": sizes[True],
                    "frozen": sizes[False],
                }
            )
        return rows

    def _push(self, module: torch.nn.Module) -> None:
        """Begin the call of a module."""
        if id(module) not in self._paths:  # it is no part of the model
            path = type(module).__name__
            if self._stack and self._stack[-1][0]:
                path = f"{self._stack[-1][0]}.{path}"
            # Parentheses tell it from a path within the model.
            elif not self._stack and "" in self.modules:
                path = f"({path})"
            self._add(path, module)
        path = self._paths[id(module)]
        self.calls[path] += 1
        self._stack.append((path, _task()))
        self._note()

    def _leave(self, module: torch.nn.Module) -> None:
        """End the call of a module, and those above it that an exception left."""
        while self._stack and self._stack.pop()[0] != self._paths[id(module)]:
            pass
        self._note()

    def _add(self, root: str, module: torch.nn.Module) -> None:
        """Give a module and all below it their paths; those that have one keep it, as a model in a
        wrapper does."""
        for name, part in module.named_modules():
            if id(part) not in self._paths:
                path = self._paths[id(part)] = ".".join(filter(None, (root, name)))
                self.modules[path] = part
                for parameter in part._parameters.values():
                    self._paths.setdefault(id(parameter), path)

    def _note(self) -> None:
        """Note that the innermost module makes the nodes of this thread from the next one on."""
        if threading.get_ident() == self._thread:
            self._starts.append(getattr(torch.autograd, "_get_sequence_nr", lambda: 0)())
            self._owners.append(self._stack[-1][0] if self._stack else OUTSIDE)


def _weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module itself."""
    return [weight for weight in module._parameters.values() if weight is not None]


class NotCounted(UserWarning):
    """An operator without a rule."""


class FlopCounter:
    """Counts what runs inside; entered again, it goes on.

    model: a module, whose path is "", or modules by name; others are named by their class; strict:
    an operator without a rule raises UserError, else it is warned about once, with the module that
    ran it.
    """

    def __init__(
        self,
        model: None | torch.nn.Module | dict[str, torch.nn.Module] = None,
        *,
        strict: bool = False,
    ):
        self.strict = strict
        self.modules = Modules(
            {"": model} if isinstance(model, torch.nn.Module) else dict(model or {})
        )
        self._running: list[Any] = []  # the frames of custom functions
        #: [calls, MACs, FLOPs] by (path, operator, phase), and (operator, path, reason) of what was
        #: not counted.
        self._counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self._not_counted: list[tuple[str, str, str]] = []
        # ids of parameters that an operator took, be it to look rows up
        self._taken: set[int] = set()
        self._inside = ExitStack()

    def __enter__(self) -> FlopCounter:
        mha = getattr(torch.backends, "mha", None)
        if mha:  # one operator for a layer, and nested tensors, where it is on
            self._inside.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        self._inside.enter_context(self.modules)
        self._inside.callback(self._running.clear)  # and with the frames all that they hold
        self._inside.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()
        if any(error):
            return
        for path, module in self.modules.modules.items():
            if self._is_unseen(path, module):
                name = type(module).__name__
                self._missing(name, path, "its operators were not seen, or not its products")

    def _is_unseen(self, path: str, module: torch.nn.Module) -> bool:
        """Return whether a module ran, and gave no product and no operator that takes its matrices:
        it computes in another thread, in numpy, or in a compiled form."""
        if not self.modules.calls[path] or any(path == other for _, other, _ in self._not_counted):
            return False
        prefix = f"{path}." if path else ""
        if any(
            macs
            for (other, *_), (_, macs, _) in self._counts.items()
            if f"{other}.".startswith(prefix)
        ):
            return False
        if isinstance(module, torch.jit.ScriptModule) and "MKLDNN" in str(module.graph):
            return True
        keys = [id(weight) for weight in _weights(module) if weight.dim() > 1]
        return bool(keys) and self._taken.isdisjoint(keys)

    def total(self) -> Count:
        """Return the MACs and FLOPs of all that was counted."""
        macs = sum(macs for _, macs, _ in self._counts.values())
        flops = sum(flops for _, _, flops in self._counts.values())
        return Count(macs, flops)

    def not_counted(self) -> list[str]:
        """Return the names of the operators and modules that were not counted."""
        return sorted({operator for operator, _, _ in self._not_counted})

    def document(self) -> dict[str, Any]:
        """Return all as JSON takes it: modules, counts by module, operator and phase, and sentences
        on what is not."""
        names = ("path", "operator", "phase", "calls", "macs", "flops")
        counts = [dict(zip(names, (*key, *numbers))) for key, numbers in self._counts.items()]
        missing = [
            f"{name} in {path or 'the model'} ({reason})"
            for name, path, reason in self._not_counted
        ]
        return {"modules": self.modules.rows(), "counts": counts, "not_counted": missing}

    def _count(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        path, phase = self.modules.current()
        self._count_functions(path, phase)
        names, defaults = rules.schema_of(operator)
        arguments = {**defaults, **dict(zip(names, args)), **kwargs}
        call = Call(rules.name_of(operator), arguments, args, kwargs, out)
        rule = rules.find(operator)
        if rule is None:
            self._missing(call.name, path, "no rule")
        if call.name != "aten::detach":  # the way to numpy
            for value in (*args, *kwargs.values()):
                self._taken.update(map(id, value if isinstance(value, (list, tuple)) else [value]))
        self._add(path, phase, call, rule or rules.nothing)  # its calls are counted

    def _count_functions(self, path: str, phase: str) -> None:
        """Count the custom functions that began since the last operator."""
        before = self._running[:]
        self._running.clear()
        for frame, call in _applied(sys._getframe(0)):
            self._running.append(frame)
            if frame in before:
                continue
            if call.name in rules.RULES:
                self._add(path, phase, call, rules.RULES[call.name])
            elif not call.name.startswith("torch."):
                reason = "custom function: kernels of its own cannot be seen, torch's operators are"
                self._missing(call.name, path, reason)

    def _add(self, path: str, phase: str, call: Call, rule: rules.Rule) -> None:
        """Add a call to the counts by its rule; by None nothing is added."""
        if rule is None:
            return
        count: Count | int = 0
        try:
            count = rule(call)
        # A tensor has no shape, or a registered rule is wrong: the model runs on.
        except Exception as error:
            reason = f"its rule fails, {type(error).__name__}: {text.first_line(error)}"
            self._missing(call.name, path, reason)
        macs, flops = count if isinstance(count, Count) else (0, count)
        entry = self._counts[path, call.name, phase]
        entry[:] = [entry[0] + 1, entry[1] + macs, entry[2] + flops]

    def _missing(self, name: str, path: str, reason: str) -> None:
        """Note what is not counted, and warn of its name once.  Raises UserError where the counter
        is strict."""
        where = path or "the model"
        if self.strict:
            raise errors.UserError(
                f"{name} in {where}: {reason}; add one with rnnt_bench.flop_rules.register"
            )
        if name not in self.not_counted():
            line = f"not counted: {name} in {where} ({reason})"
            # explicitly, so that a second counter of this process warns as the first
            warnings.warn_explicit(line, NotCounted, __file__, 0, registry={})
        if (name, path, reason) not in self._not_counted:
            self._not_counted.append((name, path, reason))


class _Mode(TorchDispatchMode):
    """Runs each operator, and has the counter count it."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if rules.find(func) is None and rules.composite(
            func
        ):  # inference mode leaves it in one piece
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self.counter._count(func, args, kwargs, out)
        return out


def _applied(frame: Any | None) -> Iterator[tuple[Any, Call]]:
    """Yield the custom functions that run in this frame or below it, each with its outermost
    frame."""
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            function = frame.f_locals["cls"]
            names = list(inspect.signature(function.forward).parameters)
            if function.setup_context is torch.autograd.Function.setup_context:
                del names[0]  # the context
            yield frame, _call(function, dict(zip(names, frame.f_locals["args"])))
        elif _APPLY is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            function = getattr(type(frame.f_locals.get("ctx")), "_forward_cls", None)
            if function is not None:
                yield frame, _call(function, frame.f_locals)
        frame = frame.f_back


def _call(function: Any, arguments: Mapping[str, Any]) -> Call:
    """Return the call of a custom autograd function with these arguments and the defaults of
    others."""
    parameters = inspect.signature(function.forward).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
    return Call(f"{function.__module__}.{function.__qualname__}", {**defaults, **arguments})
