"""Label modules by hooks around their forward and backward, without editing the model.

A span is one forward, or one backward, of a call of a labelled module.  The backward lasts from the
gradient of an output to those of all inputs; an identity node in autograd's graph at each end tells
when.  A backward whose inputs need no gradient ends with the next call not nested in it, or with
the step.  A forward that a checkpoint computes again belongs to the backward.  Needs torch 2.1 or
newer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rnnt_bench.core.errors import UserError
from rnnt_bench.flops import rules

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: The most names of modules in a message.
MOST_CHOICES = 40


class SpanKey(NamedTuple):
    """Tell the spans of a step apart: by the labels around a span and its own, outermost first, and
    by the phase."""

    chain: tuple[str, ...]
    phase: str


#: Returns the context of a span, from its key and whether a checkpoint computes it again.
OpenSpan = Callable[[SpanKey, bool], AbstractContextManager]


class Call:
    """Hold one call of a labelled module.

    above: the family of the labelled call around it; empty if there is none

    Attributes:
        path: of the module
        family: the labelled calls around it, outermost first, and itself
        chain: the labels of the calls in the family
    """

    def __init__(self, path: str, label: str, above: Sequence[Call]):
        self.path = path
        self.family = (*above, self)
        self.chain: tuple[str, ...] = (*above[-1].chain, label) if above else (label,)


class Running(NamedTuple):
    """A call whose forward or backward runs, and the context of that span."""

    call: Call
    context: AbstractContextManager


class Labels:
    """Open a span for each forward and backward of a labelled module, while the context lasts.

    labels: by the path of a module; where: after an exception, names in words the label in which it
    was raised, or says that it was raised outside of every label."""

    def __init__(self, model: torch.nn.Module, labels: Mapping[str, str], open_span: OpenSpan):
        self._modules = {module: path for path, module in model.named_modules() if path in labels}
        self._labels = labels
        self._open_span = open_span
        self._hooks = ExitStack()
        #: What runs in the forward and in the backward, the innermost last.
        self._stacks: dict[str, list[Running]] = {FORWARD: [], BACKWARD: []}
        self.where = "the step, outside of every label"

    def __enter__(self) -> Labels:
        for module in self._modules:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        """End all spans, and remove the hooks.  After an exception, let `where` name the innermost
        call that ran, if one did."""
        error_type, *_ = error
        for phase, stack in self._stacks.items():
            if error_type and stack:
                call = stack[-1].call
                self.where = f"{call.chain[-1]} ({call.path}), {phase}"
            self._pop(stack, keep=0)
        self._hooks.close()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Label a part of the step that is no module and comes after the backward; set `where`."""
        self.where = f"{name}, {UPDATE}"
        with self._open_span(SpanKey((name,), UPDATE), False):  # False: not recomputed
            yield

    def end_backward(self) -> None:
        """End the backwards that still run: those of calls whose inputs need no gradient."""
        self._pop(self._stacks[BACKWARD], keep=0)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin the forward of a call; return its arguments, marked so that the gradients that
        reach them end the call's backward.

        If a checkpoint computes the forward again, return the arguments as they are."""
        path = self._modules[module]
        phase = _phase()
        stack = self._stacks[phase]
        call = Call(path, self._labels[path], stack[-1].call.family if stack else ())
        if phase == FORWARD:
            args, kwargs = _marked((args, kwargs), lambda: self._end(call))
        self._push(phase, call, is_recomputed=phase == BACKWARD)
        return args, kwargs

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End the forward of a call; return its output, marked so that the gradient that reaches it
        begins the call's backward.

        If a checkpoint computes the forward again, return the output as it is."""
        phase = _phase()
        stack = self._stacks[phase]
        while stack[-1].call.path != self._modules[module]:  # calls that an exception left open
            self._pop(stack, keep=len(stack) - 1)
        call = stack[-1].call
        self._pop(stack, keep=len(stack) - 1)
        # A forward in the phase BACKWARD is one that a checkpoint computes again.
        return output if phase == BACKWARD else _marked(output, lambda: self._begin(call))

    def _begin(self, call: Call) -> None:
        """Begin the backward of a call and of the calls around it; end all others that run."""
        stack = self._stacks[BACKWARD]
        shared_count = 0  # how many of call.family run already, from the outermost on
        for running, member in zip(stack, call.family):
            if running.call is not member:
                break
            shared_count += 1
        self._pop(stack, shared_count)
        for member in call.family[shared_count:]:
            self._push(BACKWARD, member)

    def _end(self, call: Call) -> None:
        """End the backward of a call, and of the calls within it; do nothing if it does not run."""
        stack = self._stacks[BACKWARD]
        calls = [running.call for running in stack]
        if call in calls:
            self._pop(stack, calls.index(call))

    def _push(self, phase: str, call: Call, is_recomputed: bool = False) -> None:
        """Enter a new span of a call, and put the call on the stack of the phase."""
        context = self._open_span(SpanKey(call.chain, phase), is_recomputed)
        context.__enter__()  # no `with`: another hook ends the span, by `_pop`
        self._stacks[phase].append(Running(call, context))

    def _pop(self, stack: list[Running], keep: int) -> None:
        """Take all calls but the outermost `keep` off a stack, and exit their spans."""
        while len(stack) > keep:
            stack.pop().context.__exit__(None, None, None)


def _phase() -> str:
    """Return the phase that runs now.  It is BACKWARD, too, for a forward that a checkpoint
    computes again in the backward."""
    # -1 stands for no backward in this thread.
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


class _Mark(torch.autograd.Function):
    """Pass tensors through unchanged; call `tell` when the backward of this node runs."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.tell = tell
        ctx.set_materialize_grads(False)  # a gradient that is None passes unchanged, too
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.tell()
        return (None, *gradients)  # `tell` has no gradient


rules.register(_Mark, None)  # it computes nothing, so FlopCounter need not warn of it


def is_overwritten(error: BaseException) -> bool:
    """Return whether an error says that an operator in place wrote over a tensor behind a mark."""
    return "modified inplace" in str(error) and "inside a custom Function" in str(error)


def _marked(values: Any, tell: Callable[[], None]) -> Any:
    """Return `values` with each tensor that requires a gradient passed through one _Mark, whose
    backward calls `tell`.

    A tensor that stands in two places passes once; the result stands in both."""
    leaves, spec = tree_flatten(values)
    tensors = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    if not tensors:
        return values
    marked = dict(zip(tensors, _Mark.apply(tell, *tensors.values())))
    return tree_unflatten([marked.get(id(leaf), leaf) for leaf in leaves], spec)


class Reading(NamedTuple):
    """Hold what a counter read at both ends of a span, and whether the span is a forward that a
    checkpoint computes again."""

    is_recomputed: bool
    begin: Any
    end: Any


class Spans:
    """Read a counter, by `read`, at both ends of each span of a step.

    calls: the readings by key, in the order in which the keys begin."""

    def __init__(self, read: Callable[[], Any]):
        self.read = read
        self.calls: dict[SpanKey, list[Reading]] = {}

    @contextmanager
    def __call__(self, key: SpanKey, is_recomputed: bool) -> Iterator[None]:
        """Open a span, as an OpenSpan; keep its Reading unless it ends by an exception."""
        readings = self.calls.setdefault(key, [])
        begin = self.read()
        yield
        readings.append(Reading(is_recomputed, begin, self.read()))


def by_patterns(model: torch.nn.Module, patterns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return {path: label} of the modules whose path matches a pattern of a label.

    * and ? match within a name of the path.  A module that several labels match has the first of
    them.  Raises UserError for a pattern that matches no module.

    patterns: the patterns of each label."""
    paths = [path for path, _ in model.named_modules() if path]
    label_of: dict[str, str] = {}
    for label, of_label in patterns.items():
        for pattern in of_label:
            matches = [path for path in paths if _matches(path.split("."), pattern.split("."))]
            if not matches:
                # Paths with as many names as the pattern, or fewer.
                near = [_starred(path) for path in paths if path.count(".") <= pattern.count(".")]
                choices = list(dict.fromkeys(near))[:MOST_CHOICES]
                raise UserError(
                    f"--label {label}={pattern}: matches no module; there are {', '.join(choices)}"
                )
            for path in matches:
                label_of.setdefault(path, label)
    return label_of


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether each name of a path matches its pattern."""
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def by_depth(model: torch.nn.Module, depth: int) -> dict[str, str]:
    """Return {path: label} of the modules whose path has at most `depth` names.

    The modules of a list share a label, "layers.*"; the list itself gets none."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return {
        path: _starred(path)
        for path, module in model.named_modules()
        if path and path.count(".") < depth and not isinstance(module, lists)
    }


def _starred(path: str) -> str:
    """Return a path with * in place of numbers: "layers.*.attention" of "layers.0.attention"."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
