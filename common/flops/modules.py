"""Which module is at work: in the forward by hooks, in the backward by the node of the graph that is executed.

Each node of autograd's graph has a sequence number, which grows with every node that is made.  What is running is noted
with the number at which it began, so a node's number tells which module made it.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from contextlib import contextmanager
from typing import Any, Collection, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
