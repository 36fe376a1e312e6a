"""Label modules by hooks around their forward and backward, without editing the model.

The backward of a call begins when the gradient of an output arrives and ends when the gradients of all inputs are
there: an identity node of autograd's graph at each end tells.  A call none of whose inputs needs a gradient ends with
the next call that is not nested in it, or with the step.  Calls are nested as their forwards were; a forward that a
checkpoint computes again belongs to the backward.  Needs torch 2.1 or newer.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from common.core.errors import UserError
from common.flops import rules
from common.measure.clock import Clock

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
MOST_NAMED = 40  # modules, where a pattern matches none
#: Of a span: its label and those it lies in, outermost first; its phase.
Place = Tuple[Tuple[str, ...], str]
#: Of what runs in no span.
OUTSIDE: Place = ((), "")
#: Makes what a span is entered by.
Span = Callable[[Place, bool], ContextManager]


class Call(NamedTuple):
    """Hold one call of a labelled module."""

    path: str
    chain: Tuple[str, ...]
    above: Tuple[Any, ...]  # calls it lies in
    phase: str


class Labels:
    """Enter `span(place, again)` for each call and backward, inside the context.

    labels: by the path of a module; again: whether a checkpoint computes the call again.
    """

    def __init__(self, model: torch.nn.Module, labels: Mapping[str, str], span: Span):
        self._modules = {module: path for path, module in model.named_modules() if path in labels}
        self._labels, self._span = labels, span
        #: Calls with what they were entered by, in the forward and in the backward.
        self._stacks: Dict[str, List[Tuple[Call, ContextManager]]] = {FORWARD: [], BACKWARD: []}
        self._failed_in: Optional[Call] = None

    def __enter__(self) -> Labels:
        self._hooks = ExitStack()
        for module in self._modules:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        for phase, stack in self._stacks.items():
            if error[0] and stack and (phase == BACKWARD or self._failed_in is None):
                self._failed_in = stack[-1][0]._replace(phase=phase)
            self._pop(stack, 0)
        self._hooks.close()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Label a part of the step that is no module, after forward and backward."""
        with self._span(((name,), UPDATE), False):
            try:
                yield
            except BaseException:
                self._failed_in = Call(name, (name,), (), UPDATE)
                raise

    def end_backward(self) -> None:
        self._pop(self._stacks[BACKWARD], 0)

    @property
    def where(self) -> str:
        """Return where an exception was raised: "self_attn (encoder.layers.3.self_attn), backward"."""
        call = self._failed_in
        return "the step, outside of every label" if call is None else f"{call.chain[-1]} ({call.path}), {call.phase}"

    # -- forward -------------------------------------------------------------------------------------------------------

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1
        phase = BACKWARD if again else FORWARD
        stack, path = self._stacks[phase], self._modules[module]
        above = (*stack[-1][0].above, stack[-1][0]) if stack else ()
        call = Call(path, (*(above[-1].chain if above else ()), self._labels[path]), above, phase)
        if not again:
            args, kwargs = _marked((args, kwargs), lambda: self._end(call))
        self._push(phase, call, again)
        return args, kwargs

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1
        stack = self._stacks[BACKWARD if again else FORWARD]
        path = self._modules[module]
        while stack[-1][0].path != path:  # those above were left by an exception
            self._pop(stack, len(stack) - 1)
        call = stack[-1][0]
        self._pop(stack, len(stack) - 1)
        return output if again else _marked(output, lambda: self._begin(call))

    # -- backward ------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        stack = self._stacks[BACKWARD]
        family = (*call.above, call)
        shared = 0
        while shared < len(stack) and shared < len(family) and stack[shared][0] is family[shared]:
            shared += 1
        self._pop(stack, shared)
        for begun in family[shared:]:
            self._push(BACKWARD, begun)

    def _end(self, call: Call) -> None:
        stack = self._stacks[BACKWARD]
        depth = next((index for index, (running, _) in enumerate(stack) if running is call), None)
        if depth is not None:
            self._pop(stack, depth)

    # -- spans ---------------------------------------------------------------------------------------------------------

    def _push(self, phase: str, call: Call, again: bool = False) -> None:
        entered = self._span((call.chain, phase), again)
        entered.__enter__()
        self._stacks[phase].append((call, entered))

    def _pop(self, stack: List[Tuple[Call, ContextManager]], keep: int) -> None:
        while len(stack) > keep:
            stack.pop()[1].__exit__(None, None, None)


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


def _marked(values: Any, tell: Callable[[], None]) -> Any:
    """Return the values with tensors that need a gradient behind a mark; the same tensor stays the same."""
    leaves, spec = tree_flatten(values)
    wanted = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    if not wanted:
        return values
    marked = dict(zip(wanted, _Mark.apply(tell, *wanted.values())))
    return tree_unflatten([marked.get(id(leaf), leaf) for leaf in leaves], spec)


class Spans:
    """Time the spans of a step, by position: calls, nanoseconds of the host, and on CUDA nanoseconds of the device."""

    def __init__(self, clock: Clock):
        self.clock, self.host = clock, Clock(torch.device("cpu"))
        self._begun: Dict[Place, List[Tuple[int, Any, Any, Any, Any]]] = {}

    @contextmanager
    def __call__(self, position: Place, again: bool) -> Iterator[None]:
        begun = self._begun.setdefault(position, [])  # in the order in which they begin
        host, device = self.host.mark(), self.clock.mark() if self.clock.cuda else None
        yield
        begun.append((not again, host, self.host.mark(), device, self.clock.mark() if self.clock.cuda else None))

    def taken(self) -> Dict[Place, Tuple[int, int, Optional[int]]]:
        """Return (calls, host ns, device ns) of each position, after the clock was synchronised."""
        return {
            position: (
                sum(call[0] for call in calls),
                sum(call[2] - call[1] for call in calls),
                sum(self.clock.between(call[3], call[4]) for call in calls) if self.clock.cuda else None,
            )
            for position, calls in self._begun.items()
        }


class Operations:
    """Count the operations of each span, without those of spans nested in it.

    total: returns (MACs, FLOPs) of everything so far, as FlopCounter.total does.
    """

    def __init__(self, total: Callable[[], Tuple[int, int]]):
        self._total, self._before = total, total()
        self._running: List[Place] = []
        self._counts: Dict[Place, Tuple[int, int]] = {}

    @contextmanager
    def __call__(self, position: Place, again: bool) -> Iterator[None]:
        self._assign()
        self._running.append(position)
        yield
        self._assign()
        self._running.pop()

    def counts(self) -> Dict[Place, Tuple[int, int]]:
        """Return (MACs, FLOPs) by position; operations outside all spans are at OUTSIDE."""
        self._assign()
        return self._counts

    def _assign(self) -> None:
        """Add the operations since the last call to the innermost span that runs."""
        position = self._running[-1] if self._running else OUTSIDE
        macs, flops = self._counts.get(position, (0, 0))
        before, self._before = self._before, self._total()
        self._counts[position] = macs + self._before[0] - before[0], flops + self._before[1] - before[1]


def named(position: Place) -> str:
    """Return "self_attn" or "self_attn.backward"."""
    chain, phase = position
    return f"{chain[-1]}.{BACKWARD}" if phase == BACKWARD else chain[-1]


# -- which modules ---------------------------------------------------------------------------------------------------


def by_patterns(
    model: torch.nn.Module, patterns: Mapping[str, Tuple[str, ...]], flag: str = "--label {}="
) -> Dict[str, str]:
    """Return {path: label} of patterns by label: names of modules with dots, * and ? within a name.  Raises UserError
    for a pattern that matches nothing."""
    paths = [path for path, _ in model.named_modules() if path]
    label_of: Dict[str, str] = {}
    for label, listed in patterns.items():
        for pattern in listed:
            matched = [path for path in paths if _matches(path, pattern)]
            if not matched:
                known = list(dict.fromkeys(_starred(path) for path in paths if path.count(".") <= pattern.count(".")))
                raise UserError(
                    f"{flag.format(label)}{pattern}: matches no module; there are {', '.join(known[:MOST_NAMED])}"
                )
            for path in matched:
                label_of.setdefault(path, label)
    return label_of


def by_depth(model: torch.nn.Module, depth: int) -> Dict[str, str]:
    """Return {path: label} of all modules at most `depth` names below the model; those of a list share a label,
    "layers.*"."""
    called = [(path, module) for path, module in model.named_modules() if path and path.count(".") < depth]
    return {
        path: _starred(path)
        for path, module in called
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    }


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _starred(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
