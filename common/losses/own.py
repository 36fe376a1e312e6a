"""Adapt a loss that the user names as a function: --loss mypackage.rnnt:loss, or assert_is_transducer_loss(loss).

It is called as ``loss(logits, targets, T_lengths, U_lengths)``: padded logits (N, T, U+1, V), targets (N, U) int32 and
lengths (N,) int32.  It returns the summed loss or the losses (N,).  If it has parameters `blank` and `reduction` it
gets blank=0 and reduction="sum", so that functions with torchaudio's signature work unchanged.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, Mapping, Tuple

from common.core import implementations, settings
from common.core.errors import NotRunnable
from common.core.implementations import BY_NAME, Implementation
from common.losses.adapter import Adapter, import_package


class OfFunction(Adapter):
    """The adapter of a function of the user."""

    target = ""  # MODULE:FUNCTION, or FILE.py:FUNCTION
    folders: Tuple[str, ...] = ()  # where the module may be, beside Python's own path
    hint = "install the package of your loss into the Python that measures it"
    dtypes = ("float32", "float64", "float16", "bfloat16")
    reductions = ("sum",)

    def import_module(self, device: str) -> ModuleType:
        module, _, name = self.target.rpartition(":")
        sys.path += [folder for folder in self.folders if folder not in sys.path]
        loaded = implementations.imported(Path(module)) if module.endswith(".py") else import_package(module, self.hint)
        if not callable(_attribute(loaded, name)):
            raise NotRunnable("missing", f"{module} has no function {name}")
        return loaded

    def prepare(self, batch: Any) -> SimpleNamespace:
        return SimpleNamespace(targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths)

    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = _attribute(self.module, self.target.rpartition(":")[2])
        return function

    def options(self) -> Dict[str, Any]:
        try:
            parameters: Mapping[str, Any] = inspect.signature(self.function()).parameters
        except (TypeError, ValueError):  # a function in C may not say
            return {}
        ours = {"blank": self.blank, "reduction": self.reduction}
        return {name: value for name, value in ours.items() if name in parameters}

    def call(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        function: Any = self.function()
        options = self.options()
        if inspect.isclass(function):  # a module: its constructor takes the options
            function, options = function(**options), {}
        return function(*tensors.values(), *vars(prepared).values(), **options)

    def loss_of(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        losses = self.call(tensors, prepared)
        return losses.sum() if getattr(losses, "ndim", 0) else losses


def _attribute(module: Any, name: str) -> Any:
    """Return module.a.b for the name "a.b", None if it does not exist."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def wrong_of(loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32") -> str:
    """Compare a function with the float64 oracle on small batches; return what is wrong in words, "" if it is right.

    The function is called in this process; raises whatever it raises.
    """
    import torch

    from common.losses.passes import small_batches

    class Given(OfFunction):
        name = getattr(loss, "__name__", "") or "loss"

        def function(self) -> Callable[..., Any]:
            return loss

    BY_NAME.setdefault(Given.name, Implementation(Given.name, "", "main", "torch", template=True))
    resolved = settings.resolve({"preset": "quick", "dtype": dtype}, device)
    adapter = Given(resolved)
    return small_batches.check(adapter, torch.device(device), getattr(torch, dtype)).wrong
