"""Count the operations of every operator that torch's dispatcher runs, forward and backward, by
module and operator.

    with FlopCounter(model) as counter:
        model(x).sum().backward()
    print(counter.total())

Nothing is patched: a TorchDispatchMode sees the operators, however they were called and on whatever
device, the meta device included, and hooks tell the modules.  A composite operator, which torch
defines by others, is counted as those.  torch's fast path of attention is off meanwhile.

The kernels of a custom autograd function do not pass through the dispatcher.  The function is found
in the Python stack of the operators that allocate its outputs, and a rule of its own counts it.
Kernels that are called outside of any custom function cannot be found.
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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rnnt_bench.core import errors, text
from rnnt_bench.flops import (  # noqa: F401  (those but the rules fill the table)
    matrices,
    operators,
    rules,
    transducer_losses,
)
from rnnt_bench.flops.rules import Call, Count

FORWARD, BACKWARD = "forward", "backward"
#: The path of operators that no module called.
OUTSIDE = "(outside)"

# Returns the number of the backward that runs in this thread; _NO_TASK in forward.  Before torch
# 2.1 there is no such number, and a backward counts as forward.
_NO_TASK = -1
_current_task = getattr(torch._C, "_current_graph_task_id", lambda: _NO_TASK)
# Autograd's nodes that accumulate the gradient of a parameter have sequence numbers from here on.
_ACCUMULATES = 1 << 63

# The code of Function.apply, which has a Python frame from torch 2.0 on; else None.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


class _Running(NamedTuple):
    """The path of a module whose forward runs, and the `_current_task` at its call."""

    path: str
    task: int


class Modules:
    """Give a path to each module of the model and to all others that run.  Tell which of them calls
    an operator.

    A module with several names has the path of the first.  A parameter that several modules share
    belongs to the first of them."""

    def __init__(self, roots: dict[str, torch.nn.Module]):
        #: The modules, and how often each was called, by path.
        self.modules: dict[str, torch.nn.Module] = {}
        self.calls: Counter[str] = Counter()
        #: By the id of a module its path, and by the id of a parameter the path of its module.
        self._paths: dict[int, str] = {}
        #: The modules that run, the innermost last.
        self._stack: list[_Running] = []
        #: In the forward, autograd numbers the nodes of its graph in sequence.  The module with the
        #: path _owners[i] makes the nodes from number _starts[i] on, below _starts[i + 1].
        self._starts: list[int] = []
        self._owners: list[str] = []
        for path, module in roots.items():
            self._add(path, module)

    def __enter__(self) -> Modules:
        """Hook the forward of every module in this process, with any arguments and any result."""
        self._handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(
                lambda module, _args: self._push(module)
            ),
            torch.nn.modules.module.register_module_forward_hook(
                lambda module, _args, _output: self._leave(module)
            ),
        ]
        self._thread = threading.get_ident()
        self._note_owner()
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    @contextmanager
    def call(self, module: torch.nn.Module) -> Iterator[None]:
        """Count the block as a call of a module.

        It is for calls of other methods than `forward`: no hook sees these."""
        self._push(module)
        try:
            yield
        finally:
            self._leave(module)

    def current(self) -> tuple[str, str]:
        """Return the path of the module that calls an operator now, and the phase of this call.

        The path is OUTSIDE where no module does.  In the backward it is that of the module whose
        forward made the node of autograd's graph, see `_owner`."""
        task = _current_task()
        phase = FORWARD if task == _NO_TASK else BACKWARD
        # A backward calls modules too: checkpointing computes their forward again.  But a module
        # that itself started this backward was called in another task, and does not count.
        if self._stack and self._stack[-1].task == task:
            return self._stack[-1].path, phase
        if phase == FORWARD:
            return OUTSIDE, phase
        return self._owner(torch._C._current_autograd_node()), phase

    def _owner(self, node: Any) -> str:
        """Return the path of the module whose forward made a node of autograd's graph.  A node that
        accumulates the gradient of a parameter belongs to the module of the parameter.

        Returns OUTSIDE where there is no such module, or no node (None)."""
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _ACCUMULATES:
            return self._paths.get(id(getattr(node, "variable", None)), OUTSIDE)
        index = bisect_right(self._starts, number) - 1
        return self._owners[index] if index >= 0 else OUTSIDE

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each module: path, class, calls, and how many numbers its own parameters
        hold, trainable and frozen.

        A parameter that several modules share is counted in the first of them.  One that a module
        gets later than `_add` has seen the module is counted in every module that has it."""
        rows = []
        for path, module in self.modules.items():
            own_weights = {
                weight for weight in _weights(module) if self._paths.get(id(weight), path) == path
            }
            rows.append(
                {
                    "path": path,
                    "class": type(module).__name__,
                    "calls": self.calls[path],
                    "trainable": sum(
                        weight.numel() for weight in own_weights if weight.requires_grad
                    ),
                    "frozen": sum(
                        weight.numel() for weight in own_weights if not weight.requires_grad
                    ),
                }
            )
        return rows

    def _push(self, module: torch.nn.Module) -> None:
        """Begin a call of a module, and count the call.

        A module without a path is no part of the model, and gets a path here."""
        if id(module) not in self._paths:
            path = type(module).__name__
            if self._stack:
                path = _joined(self._stack[-1].path, path)
            elif "" in self.modules:  # "" is the model; "(Linear)" is not its part "Linear"
                path = f"({path})"
            self._add(path, module)
        path = self._paths[id(module)]
        self.calls[path] += 1
        self._stack.append(_Running(path, _current_task()))
        self._note_owner()

    def _leave(self, module: torch.nn.Module) -> None:
        """End the call of a module.  Calls within it that an exception ended are still on the
        stack: end these too."""
        path = self._paths[id(module)]
        while self._stack:
            if self._stack.pop().path == path:
                break
        self._note_owner()

    def _add(self, root: str, module: torch.nn.Module) -> None:
        """Give a path to a module, to all modules below it, and to their parameters.

        A module that has a path, such as a model in a wrapper, keeps it."""
        for name, part in module.named_modules():
            if id(part) not in self._paths:
                path = _joined(root, name)
                self._paths[id(part)] = path
                self.modules[path] = part
                for parameter in part._parameters.values():
                    self._paths.setdefault(id(parameter), path)

    def _note_owner(self) -> None:
        """Note which module makes the next nodes of autograd's graph: the innermost that runs.

        Each thread numbers its nodes in a sequence of its own.  So a call in another thread than
        that of `__enter__` does nothing."""
        if threading.get_ident() == self._thread:
            # Before torch 2.1 nothing tells the next number.  The 0 in its place has no effect, since
            # all counts as forward there, and `_owner` is not called.
            next_number = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
            self._starts.append(next_number())
            self._owners.append(self._stack[-1].path if self._stack else OUTSIDE)


def _joined(path: str, name: str) -> str:
    """Return the path of a module within another; "" is the path of the model."""
    return ".".join(filter(None, [path, name]))


def _weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module, without those of the modules in it."""
    return [weight for weight in module._parameters.values() if weight is not None]


class NotCounted(UserWarning):
    """Warns of an operator or custom function without a rule, of a rule that fails, or of a module
    whose operators were not seen."""


class _Key(NamedTuple):
    """Name an operator within a module, in the forward or backward."""

    path: str
    operator: str
    phase: str


@dataclass
class _Tally:
    """Hold how often an operator was called, and its operations."""

    calls: int = 0
    macs: int = 0
    flops: int = 0


class _Missing(NamedTuple):
    """An operator or module that was not counted."""

    name: str
    path: str
    reason: str


class FlopCounter:
    """Counts the operations that run inside the context; entered again, it adds to its counts.

    Args:
        model: a module, whose path is "", or modules by name; others are named by their class
        strict: raise UserError for the first operator or module that cannot be counted; otherwise
            NotCounted warns, once for each name
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
        #: The frames of the custom functions that were running when the last operator was called.
        self._running: list[Any] = []
        self._counts: dict[_Key, _Tally] = defaultdict(_Tally)
        self._not_counted: list[_Missing] = []
        #: The ids of all tensors that operators took.  They tell which weights were used.
        self._taken: set[int] = set()
        #: At the end of the context it undoes what `__enter__` did.
        self._inside = ExitStack()

    def __enter__(self) -> FlopCounter:
        # At the exit, `_inside` undoes all of this in reverse.
        # The fast path of attention runs a layer as one operator, on nested tensors.  Switch it
        # off; an older torch has no switch.
        mha = getattr(torch.backends, "mha", None)
        if mha:
            self._inside.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        self._inside.enter_context(self.modules)
        self._inside.callback(self._running.clear)  # a frame keeps its tensors alive
        self._inside.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        """End counting, and warn of each module that ran unseen.  A strict counter raises UserError
        instead.

        If an exception ends the context, there is neither a warning nor a UserError."""
        self._inside.close()
        if any(error):
            return
        for path, module in self.modules.modules.items():
            if self._is_unseen(path, module):
                name = type(module).__name__
                self._missing(name, path, "its operators were not seen, or not its products")

    def _is_unseen(self, path: str, module: torch.nn.Module) -> bool:
        """Return whether a module ran, but its operations were not seen: no product in it, and no
        operator that took one of its matrices.

        Such a module computes in another thread, in numpy, or in a compiled form.  Returns False
        for a module that is reported already, and for one without matrices, which needs no product.
        """
        if not self.modules.calls[path] or any(path == entry.path for entry in self._not_counted):
            return False
        prefix = f"{path}." if path else ""
        for key, tally in self._counts.items():
            if tally.macs and f"{key.path}.".startswith(prefix):
                return False
        # TorchScript that is frozen for oneDNN (MKLDNN) has its matrices in the graph.
        if isinstance(module, torch.jit.ScriptModule) and "MKLDNN" in str(module.graph):
            return True
        ids = [id(weight) for weight in _weights(module) if weight.dim() > 1]
        return bool(ids) and self._taken.isdisjoint(ids)

    def total(self) -> Count:
        """Return the MACs and FLOPs of all that was counted."""
        tallies = self._counts.values()
        return Count(sum(tally.macs for tally in tallies), sum(tally.flops for tally in tallies))

    def not_counted(self) -> list[str]:
        """Return the names of the operators and modules that were not counted, sorted."""
        return sorted({entry.name for entry in self._not_counted})

    def document(self) -> dict[str, Any]:
        """Return all counts as plain data for JSON.

        Keys: "modules", a row for each (see `Modules.rows`); "counts", a row for each operator in a
        module and phase; "not_counted", a text for each operator or module that was not counted."""
        counts = [{**key._asdict(), **vars(tally)} for key, tally in self._counts.items()]
        missing = [
            f"{entry.name} in {entry.path or 'the model'} ({entry.reason})"
            for entry in self._not_counted
        ]
        return {"modules": self.modules.rows(), "counts": counts, "not_counted": missing}

    def _count(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operator that has returned `out`, and the custom functions that called it.  Note
        the tensors that the operator took.  Report an operator without a rule."""
        path, phase = self.modules.current()
        self._count_functions(path, phase)
        names, defaults = rules.schema_of(operator)
        arguments = {**defaults, **dict(zip(names, args)), **kwargs}
        call = Call(rules.name_of(operator), arguments, args, kwargs, out)
        rule = rules.find(operator)
        if rule is None:
            self._missing(call.name, path, "no rule")
            rule = rules.nothing  # so `_add` counts its calls, which it does not for the rule None
        # A module that computes in numpy only detaches its weights: that does not count as use.
        if call.name != "aten::detach":
            for value in (*args, *kwargs.values()):
                tensors = value if isinstance(value, (list, tuple)) else [value]
                self._taken.update(map(id, tensors))
        self._add(path, phase, call, rule)

    def _count_functions(self, path: str, phase: str) -> None:
        """Count the custom functions that began since the last operator, and keep the frames of all
        that run now in `_running`.

        A function is seen only through the operators that it calls.  Each of them finds it on the
        stack, so a frame that is in `_running` has been counted.

        A function without a rule is reported, unless it is one of torch: these only call operators,
        which are counted."""
        applied = list(_applied(sys._getframe(0)))
        new_calls = [call for frame, call in applied if frame not in self._running]
        self._running[:] = [frame for frame, _ in applied]
        for call in new_calls:
            if call.name in rules.RULES:
                self._add(path, phase, call, rules.RULES[call.name])
            elif not call.name.startswith("torch."):
                reason = "custom function: kernels of its own cannot be seen, torch's operators are"
                self._missing(call.name, path, reason)

    def _add(self, path: str, phase: str, call: Call, rule: rules.Rule) -> None:
        """Add a call to the counts by its rule; the rule None adds nothing.

        Where the rule fails, the call is reported, and added without operations."""
        if rule is None:
            return
        count: Count | int = 0
        try:
            count = rule(call)
        # The rule met a tensor without a shape, or is wrong.  The user's model must run on.
        except Exception as error:
            reason = f"its rule fails, {type(error).__name__}: {text.first_line(error)}"
            self._missing(call.name, path, reason)
        macs, flops = count if isinstance(count, Count) else (0, count)
        tally = self._counts[_Key(path, call.name, phase)]
        tally.calls += 1
        tally.macs += macs
        tally.flops += flops

    def _missing(self, name: str, path: str, reason: str) -> None:
        """Note an operator or module that is not counted, and warn of it once.  Raises UserError
        where the counter is strict."""
        where = path or "the model"
        if self.strict:
            raise errors.UserError(
                f"{name} in {where}: {reason}; add one with rnnt_bench.flop_rules.register"
            )
        if name not in self.not_counted():
            line = f"not counted: {name} in {where} ({reason})"
            # Python skips a warning that the registry holds.  This registry is new and empty, so
            # each counter of a process warns.
            warnings.warn_explicit(line, NotCounted, __file__, 0, registry={})
        entry = _Missing(name, path, reason)
        if entry not in self._not_counted:
            self._not_counted.append(entry)


class _Mode(TorchDispatchMode):
    """Hands each operator to a counter, after it ran."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if rules.find(func) is None and rules.is_composite(func):
            # Inference mode hands a composite operator over in one piece.  Under `with self` the
            # operators that it consists of come here, too.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self.counter._count(func, args, kwargs, out)
        return out


def _applied(frame: Any | None) -> Iterator[tuple[Any, Call]]:
    """Yield (frame, call) of each custom function that runs in `frame` or in one of its callers.

    The innermost comes first.  The local variables of the frame of `Function.apply` hold the
    function, as its `cls`, and the arguments of its `forward`."""
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            function = frame.f_locals["cls"]
            names = list(inspect.signature(function.forward).parameters)
            if function.setup_context is torch.autograd.Function.setup_context:
                # Without a `setup_context`, `forward` takes the context first.
                del names[0]
            yield frame, _call(function, dict(zip(names, frame.f_locals["args"])))
        # Before torch 2.0, `apply` has no frame, but the function's `forward` has.  The type of its
        # `ctx` names the function.
        elif _APPLY is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            function = getattr(type(frame.f_locals.get("ctx")), "_forward_cls", None)
            if function is not None:
                yield frame, _call(function, frame.f_locals)
        frame = frame.f_back


def _call(function: Any, arguments: Mapping[str, Any]) -> Call:
    """Return the call of a custom autograd function, with the default of each argument that is not
    in `arguments` (by name)."""
    parameters = inspect.signature(function.forward).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
    return Call(f"{function.__module__}.{function.__qualname__}", {**defaults, **arguments})
