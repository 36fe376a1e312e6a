"""Label modules by hooks around their forward and backward, without editing the model.

The backward of a call lasts from the gradient of an output to those of all inputs: an identity node
of autograd's graph at each end tells.  A call whose inputs need no gradient ends with the next call
not nested in it, or with the step. What a checkpoint computes again is of the backward.  Needs
torch 2.1 or newer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rnnt_bench.core.errors import UserError
from rnnt_bench.flops import rules

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: The place of a span: the labels around it and its own, outermost first, and its phase.
Place = tuple[tuple[str, ...], str]
#: Makes the context of a span from its place, and from whether a checkpoint computes it again.
Span = Callable[[Place, bool], AbstractContextManager]


class Call:
    """One call of a labelled module.  family: the calls that it lies in, outermost first, and
    itself."""

    def __init__(self, path: str, label: str, above: Sequence[Call]):
        self.path = path
        self.family = (*above, self)
        self.chain: tuple[str, ...] = (*above[-1].chain, label) if above else (label,)


class Labels:
    """Enter `span(place, again)` for each call and backward, inside the context.  labels: by the
    path of a module;
    where: the place of what was raised inside."""

    def __init__(self, model: torch.nn.Module, labels: Mapping[str, str], span: Span):
        self._modules = {module: path for path, module in model.named_modules() if path in labels}
        self._labels = labels
        self._span = span
        self._hooks = ExitStack()
        #: Running calls with the contexts of their spans, in the forward and in the backward.
        self._stacks: dict[str, list[tuple[Call, AbstractContextManager]]] = {
            FORWARD: [],
            BACKWARD: [],
        }
        self.where = "the step, outside of every label"

    def __enter__(self) -> Labels:
        for module in self._modules:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        for phase, stack in self._stacks.items():
            if error[0] and stack:
                call = stack[-1][0]
                self.where = f"{call.chain[-1]} ({call.path}), {phase}"
            self._pop(stack, 0)
        self._hooks.close()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Label a part of the step that is no module, after forward and backward."""
        self.where = f"{name}, {UPDATE}"
        with self._span(((name,), UPDATE), False):
            yield

    def end_backward(self) -> None:
        """End the calls whose inputs need no gradient."""
        self._pop(self._stacks[BACKWARD], 0)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._modules[module]
        phase = _phase()
        stack = self._stacks[phase]
        call = Call(path, self._labels[path], stack[-1][0].family if stack else ())
        if phase == FORWARD:
            args, kwargs = _marked((args, kwargs), lambda: self._end(call))
        self._push(phase, call, phase == BACKWARD)
        return args, kwargs

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        phase = _phase()
        stack = self._stacks[phase]
        while stack[-1][0].path != self._modules[module]:  # those above were left by an exception
            self._pop(stack, len(stack) - 1)
        call = stack[-1][0]
        self._pop(stack, len(stack) - 1)
        return output if phase == BACKWARD else _marked(output, lambda: self._begin(call))

    def _begin(self, call: Call) -> None:
        """Begin the backward of a call, and of those that it lies in; end those that it does not
        lie in."""
        stack = self._stacks[BACKWARD]
        shared = 0
        for (running, _), member in zip(stack, call.family):
            if running is not member:
                break
            shared += 1
        self._pop(stack, shared)
        for member in call.family[shared:]:
            self._push(BACKWARD, member)

    def _end(self, call: Call) -> None:
        """End the backward of a call, and of those within it."""
        stack = self._stacks[BACKWARD]
        running = [member for member, _ in stack]
        if call in running:
            self._pop(stack, running.index(call))

    def _push(self, phase: str, call: Call, again: bool = False) -> None:
        """Enter the span of a call."""
        context = self._span((call.chain, phase), again)
        context.__enter__()
        self._stacks[phase].append((call, context))

    def _pop(self, stack: list[tuple[Call, AbstractContextManager]], count: int) -> None:
        """Leave the spans of all calls but the outermost `count`."""
        while len(stack) > count:
            _, context = stack.pop()
            context.__exit__(None, None, None)


def _phase() -> str:
    """Return the phase that runs: what a checkpoint computes again is in the backward."""
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


class _Mark(torch.autograd.Function):
    """Pass tensors through unchanged, and tell when the backward of this node runs."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tell()
        return (None, *gradients)


rules.register(_Mark, None)  # an identity


def is_overwritten(error: BaseException) -> bool:
    """Tell whether a tensor behind a mark was written over, by the module's own forward or after
    it."""
    return "modified inplace" in str(error) and "inside a custom Function" in str(error)


def _marked(values: Any, tell: Callable[[], None]) -> Any:
    """Return the values with tensors that need a gradient behind a mark; the same tensor stays the
    same."""
    leaves, spec = tree_flatten(values)
    wanted = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    if not wanted:
        return values
    marked = dict(zip(wanted, _Mark.apply(tell, *wanted.values())))
    return tree_unflatten([marked.get(id(leaf), leaf) for leaf in leaves], spec)


class Spans:
    """Read a counter, by `mark`, at both ends of each span of a step.  calls: (whether it is the
    first time that this is computed, begin, end) of each call, by place."""

    def __init__(self, mark: Callable[[], Any]):
        self.mark = mark
        self.calls: dict[Place, list[tuple[bool, Any, Any]]] = {}

    @contextmanager
    def __call__(self, place: Place, again: bool) -> Iterator[None]:
        calls = self.calls.setdefault(place, [])  # places are in the order in which they begin
        begin = self.mark()
        yield
        calls.append((not again, begin, self.mark()))


def by_patterns(model: torch.nn.Module, patterns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return {path: label} of patterns by label, * and ? within a name.  Raises UserError for one
    that matches nothing."""
    paths = [path for path, _ in model.named_modules() if path]
    label_of: dict[str, str] = {}
    for label in patterns:
        for pattern in patterns[label]:
            matches = [path for path in paths if _matches(path.split("."), pattern.split("."))]
            if not matches:
                near = [_starred(path) for path in paths if path.count(".") <= pattern.count(".")]
                choices = ", ".join(list(dict.fromkeys(near))[:40])
                raise UserError(
                    f"--label {label}={pattern}: matches no module; there are {choices}"
                )
            for path in matches:
                label_of.setdefault(path, label)
    return label_of


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def by_depth(model: torch.nn.Module, depth: int) -> dict[str, str]:
    """Return {path: label} of all modules at most `depth` names below; those of a list share a
    label, "layers.*"."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return {
        path: _starred(path)
        for path, module in model.named_modules()
        if path and path.count(".") < depth and not isinstance(module, lists)
    }


def _starred(path: str) -> str:
    """Return "layers.*" of "layers.0"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
