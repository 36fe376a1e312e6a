"""Write a few lines of code that show a finding without this suite: the package's own call on the same numbers.

The last line ends with a comment that says what it prints ("# prints False").  The tests run every reproduction of the
committed matrix whose package is installed, and compare.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any, List, Mapping, Tuple

import torch

from common.conformance.cases import Case
from common.conformance.questions import Question, index_code
from common.losses import inputs
from common.losses.adapter import Adapter
from common.losses.layouts import table

#: A tensor of equal rows with more elements than this is written in a short form.
LONGEST = 64
NO_PATH = "print(bool(torch.isinf(loss.sum())))  # prints False"
DIES = "loss.sum().backward()  # the process does not live to see the next line"


def of(case: Case, question: Question, crashes: bool = False) -> str:
    """Return the code; "" if it would be long, or if the adapter does more than call a function.

    With `crashes` it ends with the backward that ends the process.
    """
    if case.shown in OF_GRADIENTS:  # an adapter's corrections do not change these
        question = replace(question, layout=table.of(question.adapter.unrepaired()))
    if not _is_a_plain_call(question.adapter) or not case.shown or question.leaf.numel() > 10_000:
        return ""
    tail = [DIES] if crashes else TAILS[case.shown](question)
    imported, call = _call(question)
    packed = question.layout.packed_code(question.batch)
    parts = question.layout.parts_code(question.leaf, question.batch)
    lines = ["import torch", imported, *question.made, *packed, "logits.requires_grad_()", *parts]
    return "\n".join([*lines, f"loss = {call}", *tail])


def _is_a_plain_call(adapter: Adapter) -> bool:
    """Return whether `_call` shows everything that the adapter does."""
    kind = type(adapter)
    if adapter.log_probs and adapter.topology != "regular":
        return False
    if all(getattr(kind, method) is getattr(Adapter, method) for method in ("loss", "loss_of", "call")):
        return True
    return kind.repairs and not adapter.repairs


def _call(question: Question) -> Tuple[str, str]:
    """Return (the import, the call) of the package's function as the adapter calls it."""
    adapter = question.adapter
    function = adapter.function()
    of_method = getattr(function, "__self__", None)
    owner: Any = of_method if inspect.isclass(of_method) else function
    name = owner.__name__
    package = str(owner.__module__).partition(".")[0]
    if getattr(sys.modules.get(package), name, None) is not owner:
        package = owner.__module__
    scores = [f"{name}={name}" if adapter.named else name for name in question.layout.tensors]
    scores = ["logits.log_softmax(-1)"] if adapter.log_probs else scores
    imported = f"from {package} import {name}"
    if owner is not function:
        name = f"{name}.{function.__name__}"

    def passed(values: Mapping[str, Any]) -> List[str]:
        return [written(value) if adapter.positional else f"{key}={written(value)}" for key, value in values.items()]

    tensors, options = ", ".join([*scores, *passed(vars(question.prepared))]), ", ".join(passed(adapter.options()))
    if adapter.is_module:
        return imported, f"{name}({options})({tensors})"
    return imported, f"{name}({', '.join(filter(None, [tensors, options]))})"


def written(value: Any) -> str:
    """Return a value as Python source."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.dim() > 1 and value.numel() > LONGEST and (value == value[:1, :1]).all():  # the ranges of a pruned loss
        row = value.reshape(-1, value.shape[-1])[0]
        return f"torch.tensor({row.tolist()}).expand{tuple(value.shape)}"
    kind = "" if value.dtype == torch.int64 else f", dtype={value.dtype}"
    return f"torch.tensor({value.tolist()}{kind})"


def _answer(question: Question) -> List[str]:
    return ["loss.sum().backward()", 'print("no error")  # prints no error']


def _loss_or_gradient(question: Question) -> List[str]:
    losses, truth = question.expected()
    total = question.reduce(losses).sum()
    if not torch.isfinite(total):
        return [NO_PATH]
    (gradient,) = torch.autograd.grad(total, truth)
    size = gradient.abs().sum().item()
    tolerance = 1e-9 if question.leaf.dtype == torch.float64 else 1e-3
    return [
        "loss.sum().backward()",
        "found = torch.stack([loss.sum(), logits.grad.abs().sum()]).double()",
        f"right = torch.tensor([{total.item():.15g}, {size:.15g}], dtype=torch.float64)",
        f"print(torch.allclose(found, right, rtol={tolerance:g}))  # prints False",
    ]


def _padding(question: Question) -> List[str]:
    _, T, U = inputs.padded_sizes(question.batch.shapes)
    first = index_code((question.layout.padding(question.batch.shapes, T, U) or [(...,)])[0])
    return ["loss.sum().backward()", f"print(bool((logits.grad[{first}] == 0).all()))  # prints False"]


def _upstream(question: Question) -> List[str]:
    each = question.adapter.reduction == "none"
    weights = "torch.tensor([2, -1])" if each else f"{question.factor:g}"
    losses, truth = question.expected()
    weighted = losses * torch.tensor([2.0, -1.0] if each else question.factor, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(weighted.sum(), truth)
    size = gradient.abs().sum().item()
    return [
        f"(loss * {weights}).sum().backward()",
        f"print(bool(abs(logits.grad.abs().sum() - {size:.8g}) <= {1e-3 * size:.2g}))  # prints False",
    ]


def _second_backward(question: Question) -> List[str]:
    return [
        "first, = torch.autograd.grad(2 * loss.sum(), logits, retain_graph=True)",
        "first = first.clone()",
        "second, = torch.autograd.grad(2 * loss.sum(), logits)",
        "print(torch.allclose(first, second))  # prints False",
    ]


def _unmodified(question: Question) -> List[str]:
    first = question.truth.reshape(-1)[0].item()
    return ["loss.sum().backward()", f"print(abs(logits.view(-1)[0].item() - {first:.8g}) < 1e-6)  # prints False"]


#: Functions from a question to the last lines of its reproduction, by the `shown` of a case.
TAILS = {
    "answer": _answer,
    "loss or gradient": _loss_or_gradient,
    "padding": _padding,
    "upstream": _upstream,
    "second backward": _second_backward,
    "unmodified": _unmodified,
}
#: Keys of TAILS that show a gradient, and not a value.
OF_GRADIENTS = ("padding", "second backward")
