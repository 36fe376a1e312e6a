"""The counter: every operator that torch's dispatcher runs, forward and backward, by module and operator.

    with FlopCounter(model) as counter:
        model(x).sum().backward()
    print(counter.total())

Nothing is patched: a TorchDispatchMode sees the operators, however they were called and on whatever device, the meta
device included, and hooks tell the modules.  Operators that torch defines by others are counted by those.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.core.errors import UserError
from common.core.text import first_line
from common.flops import elementwise, general, lattices, layers, products, reductions, rules, superb, windows  # noqa: F401, E501  (they fill the table)
from common.flops.functions import Functions
from common.flops.modules import Modules, roots_of
from common.flops.rules import Call, Count

#: How operations are counted: as the table says, or with the multiply-accumulates of SUPERB's profiler.
CONVENTIONS = ("exact", "superb")
FORMAT = 1


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
    timed: measure each operator too, on CUDA between two synchronisations; without autograd's and Python's own cost.
    convention: one of CONVENTIONS.
    """

    def __init__(
        self,
        model: Union[None, torch.nn.Module, Dict[str, torch.nn.Module]] = None,
        *,
        strict: bool = False,
        timed: bool = False,
        convention: str = "exact",
    ):
        if convention not in CONVENTIONS:
            raise UserError(f"convention: give one of {', '.join(CONVENTIONS)}, not {convention!r}")
        self.strict, self.timed, self.convention = strict, timed, convention
        self.modules = Modules(roots_of(model))
        self._functions = Functions()
        #: [calls, MACs, FLOPs, nanoseconds] of what was counted; calls of what was not, with the reason.
        self._counts: Dict[_Key, List[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._not_counted: Dict[Tuple[str, str, str], int] = {}
        self._inside: Optional[ExitStack] = None

    def __enter__(self) -> FlopCounter:
        if self._inside is not None:
            raise RuntimeError("this counter is counting already")
        self._inside = ExitStack()
        self._inside.enter_context(self.modules)
        self._inside.callback(self._functions.forget)
        if self.convention == "superb":
            self._inside.enter_context(superb.Attention(self._extra))
        self._inside.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(*error)

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
            "format": FORMAT,
            "convention": self.convention,
            "torch": str(torch.__version__),
            "modules": self._module_rows(),
            "counts": [
                {**key._asdict(), "calls": calls, "macs": macs, "flops": flops, "ns": spent if self.timed else None}
                for key, (calls, macs, flops, spent) in self._counts.items()
            ],
            "not_counted": [
                {"operator": operator, "path": path, "reason": reason, "calls": calls}
                for (operator, path, reason), calls in self._not_counted.items()
            ],
        }

    def _module_rows(self) -> List[Dict[str, Union[str, int]]]:
        """Return a row for each module; a parameter that several modules share is the first one's."""
        seen: set = set()
        rows: List[Dict[str, Union[str, int]]] = []
        for path, name in self.modules.classes.items():
            counted = {True: 0, False: 0}
            module = self.modules.modules.get(path)
            for parameter in module._parameters.values() if module is not None else ():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    counted[parameter.requires_grad] += parameter.numel()
            calls = self.modules.calls.get(path, 0)
            rows.append(
                {"path": path, "class": name, "calls": calls, "trainable": counted[True], "frozen": counted[False]}
            )
        return rows

    # -- one operator --------------------------------------------------------------------------------------------------

    def _count(self, operator: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, spent: int) -> None:
        path, phase = self.modules.current()
        self._count_functions(path, phase)
        name = rules.name_of(operator)
        rule = rules.find(operator)
        counted: rules.Counted = 0
        if rule is None or rule.count is None:
            self._missing(name, path, "no rule")
        else:
            try:
                counted = rule.count(Call(operator, args, kwargs, out))
            except Exception as error:  # of tensors without a shape, or of a registered rule: the model runs on
                self._missing(name, path, f"its rule fails, {type(error).__name__}: {first_line(error)}")
        self._add(_Key(path, name, phase), counted, spent)

    def _count_functions(self, path: str, phase: str) -> None:
        for _, name, call in self._functions.begun():
            rule = rules.named(name)
            if rule is not None:
                if rule.count is not None:
                    self._add(_Key(path, name, phase), rule.count(call))
            elif not name.startswith("torch."):
                self._missing(
                    name, path, "custom function: kernels of its own cannot be seen, torch's operators are counted"
                )

    def _extra(self, name: str, macs: int) -> None:
        """Add multiply-accumulates that only another convention counts."""
        path, phase = self.modules.current()
        self._add(_Key(path, name, phase), Count(macs, 0))

    def _add(self, key: _Key, counted: rules.Counted, spent: int = 0) -> None:
        entry = self._counts[key]
        for index, amount in enumerate((1, *rules.as_count(counted), spent)):
            entry[index] += amount

    def _missing(self, name: str, path: str, reason: str) -> None:
        where = path or "the model"
        if self.strict:
            raise UserError(f"{name} in {where}: {reason}; add one with common.flops.rules.register")
        first = all(operator != name for operator, _, _ in self._not_counted)
        key = name, path, reason
        self._not_counted[key] = self._not_counted.get(key, 0) + 1
        if first:  # explicitly, so that a second counter of this process warns as the first one did
            warnings.warn_explicit(f"not counted: {name} in {where} ({reason})", NotCounted, __file__, 0, registry={})


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
        if not self.counter.timed:
            out, spent = func(*args, **kwargs), 0
        else:
            out, spent = _timed(func, args, kwargs)
        self.counter._count(func, args, kwargs, out, spent)
        return out


def _timed(func: Any, args: Any, kwargs: Any) -> Tuple[Any, int]:
    """Run the operator; return its result and its nanoseconds."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    out = func(*args, **kwargs)
    if cuda:
        torch.cuda.synchronize()
    return out, time.perf_counter_ns() - begin
