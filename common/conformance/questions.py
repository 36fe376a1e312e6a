"""One question to one adapter: small tensors that anyone can write down, the loss's answer, and the right one.

Logits are 3 sin(0.7 k), k = 0, 1, 2, ... over their elements: the same everywhere, and short enough for a reproduction
that a user can paste.  The right answer is the float64 reference's for the very numbers that the loss was given.
"""

from __future__ import annotations

import copy
import math
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

import torch

from common.conformance.outcomes import DIFFERS, PASS, Outcome
from common.losses import inputs
from common.losses.adapter import Adapter
from common.passes.correctness import TOLERANCE, relative_error
from common.running.worker import is_out_of_memory

SCALE, STEP = 3.0, 0.7
#: An assertion with fewer words than these says too little.
FEW_WORDS = 3
Shapes = List[Tuple[int, int]]


class Refused(Exception):
    """The loss raised an error instead of answering.  `stage`: "" or "in backward"."""

    def __init__(self, error: BaseException, stage: str = ""):
        self.stage, self.reason = stage, message(error)
        super().__init__(f"{stage}: {self.reason}" if stage else self.reason)


class NotAsked(Exception):
    """The case does not concern this adapter here; the message says why."""


class ContextLost(Exception):
    """The loss left a CUDA context in which nothing works any more; the message is of the error that it raised."""


def context_lost(device: torch.device) -> bool:
    """Does `device` fail whatever is asked of it?  Errors like an illegal access or a device-side assert stay until the
    process ends; one of a launch goes away once it is read, so a second try answers."""
    if device.type != "cuda":
        return False
    for _ in range(2):
        try:
            torch.zeros(1, device=device).add_(1).item()
            return False
        except Exception as error:
            if is_out_of_memory(error):
                return False
    return True


def message(error: BaseException) -> str:
    """One line: the error's first, or for an assertion without words the line of source it stands on; no folders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.line and len(re.findall("[A-Za-z]{2,}", " ".join(lines))) < FEW_WORDS:
            said = f"AssertionError: {frame.line}" + (f" -> {lines[0]}" if lines else "")
        said += f" ({Path(frame.filename).name}:{frame.lineno})"
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", said)


@dataclass
class Question:
    """`leaf`: what `adapter.loss` is given beside `prepared`; `truth`: the same as float64 on the CPU, with zeros where
    the leaf has other padding; `padding`: which elements of the leaf are, None where the layout has none; `made`: the
    code that makes the logits (padded, on the CPU), line by line; `reduce`: for a reproduction, what the right
    answer is of the (N,) losses."""

    adapter: Adapter
    batch: inputs.Batch
    prepared: Any
    leaf: torch.Tensor
    truth: torch.Tensor
    padding: Optional[torch.Tensor]
    made: List[str]
    reduce: Callable[[torch.Tensor], torch.Tensor] = torch.sum

    def forward(self) -> torch.Tensor:
        """The adapter's loss.  Raises Refused."""
        return attempt(lambda: self.adapter.loss(self.leaf, self.prepared), self.leaf.device)

    def backward(self, total: torch.Tensor, **options: Any) -> torch.Tensor:
        """The gradient of the leaf from this backward alone.  Raises Refused."""
        self.leaf.grad = None
        attempt(lambda: total.backward(**options), self.leaf.device, "in backward")
        if self.leaf.grad is None:
            raise Refused(RuntimeError("backward left the logits without a gradient"), "in backward")
        return self.leaf.grad

    def expected(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """(N,) losses, and the leaf in float64 that they can be differentiated by."""
        truth = self.truth.clone().requires_grad_()
        return self.adapter.expected(truth, self.batch), truth


def attempt(action: Callable[[], Any], device: torch.device, stage: str = "") -> Any:
    """What `action` returns.  Its error becomes Refused, CUDA's late ones too, since the device is waited for; or
    ContextLost, where the device works no more."""
    try:
        result = action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result
    except Exception as error:
        if is_out_of_memory(error):
            raise NotAsked(f"not enough memory: {message(error)}") from error
        if context_lost(device):
            raise ContextLost(message(error)) from error
        raise Refused(error, stage) from error


def formula(count: int, scale: float = SCALE) -> torch.Tensor:
    """(count,) float64."""
    return scale * torch.sin(STEP * torch.arange(count, dtype=torch.float64))


@dataclass
class Examination:
    """One case of one adapter on one device; `told` hears of each question before the loss does."""

    adapter: Adapter
    device: torch.device
    told: Callable[[Question], None] = lambda question: None

    def ask(self, shapes: Shapes, **how: Any) -> Question:
        """See `question_of`."""
        question = question_of(self.adapter, self.device, shapes, **how)
        self.told(question)
        return question


def question_of(
    adapter: Adapter,
    device: torch.device,
    shapes: Shapes,
    *,
    V: int = 7,
    blank: int = 0,
    reduction: Optional[str] = None,
    repaired: bool = True,
    dtype: torch.dtype = torch.float32,
    scale: float = SCALE,
    slack: Tuple[int, int] = (0, 0),
    fill: Optional[float] = None,
    minus_inf: Optional[int] = None,
    alter: Optional[Callable[[inputs.Batch], inputs.Batch]] = None,
    convert: Optional[torch.dtype] = None,
) -> Question:
    """A question about utterances of the given (T, U).

    reduction: the package's own; None: the sum, which the adapter makes where the package has none; repaired: with what
    the adapter makes good of the package's answer; slack: frames and targets by which the tensors are longer than the
    longest utterance; fill: what stands in padded cells, else more of
    the formula; minus_inf: a symbol whose logit is -inf in every cell; alter: changes the batch before the adapter
    prepares it; convert: the integer dtype of all that the adapter prepared, else its own.
    Raises NotAsked for an option or a layout that the adapter does not have.
    """
    adapter = adapter.widened(max(U for _, U in shapes) + slack[1])
    adapter = copy.copy(adapter) if repaired else adapter.unrepaired()
    if reduction not in (None, *adapter.reductions):
        raise NotAsked(f"it has no reduction {reduction!r}, only {', '.join(adapter.reductions)}")
    before = adapter.options()
    adapter.blank, adapter.reduction = blank, reduction or "sum"
    if blank and adapter.options() == before:
        raise NotAsked("it has no option for the blank: it is symbol 0")

    batch = _batch(shapes, V, blank, slack, device)
    batch = alter(batch) if alter else batch
    cells, made = _cells(adapter.layout, shapes, V, slack, scale, minus_inf)
    padding = _padding(adapter.layout, cells, shapes, frames=max(T for T, _ in shapes) + slack[0])
    if adapter.layout == "packed" and (fill is not None or slack != (0, 0)):
        raise NotAsked("its layout has no padding")
    given = cells.to(dtype)
    made += [f"logits = logits.to({dtype})"] if dtype != torch.float32 else []
    truth_cells = given.double()
    if fill is not None:
        truth_cells = truth_cells.masked_fill(padding.unsqueeze(-1), 0)
        given = given.masked_fill(padding.unsqueeze(-1), fill)
        made.append(_fill_line(adapter.layout, shapes, fill))

    prepared = adapter.prepare(batch)
    if convert is not None:
        for name, value in vars(prepared).items():
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                setattr(prepared, name, value.to(convert))
    take = (lambda x: x) if adapter.layout == "additive" else (lambda x: adapter.take(x, batch, prepared))
    truth = take(truth_cells).detach().clone()
    leaf = take(given.to(device)).detach().clone().requires_grad_()
    return Question(adapter, batch, prepared, leaf, truth, None if adapter.layout == "packed" else padding, made)


def _batch(shapes: Shapes, V: int, blank: int, slack: Tuple[int, int], device: torch.device) -> inputs.Batch:
    """Random targets that are never the blank; those of a batch without targets have no column."""
    N, T, U = inputs.padded_sizes(shapes)
    batch = inputs.make_batch(
        shapes, vocab_size=V, encoder_dim=1, device=torch.device("cpu"), dtype=torch.float32, key=(5, N, T, U)
    )
    targets = torch.where(batch.targets == blank, torch.zeros_like(batch.targets), batch.targets)
    targets = torch.nn.functional.pad(targets, (0, slack[1]), value=0 if blank else 1)
    return replace(
        batch, targets=targets.to(device), T_lengths=batch.T_lengths.to(device), U_lengths=batch.U_lengths.to(device)
    )


def _cells(layout, shapes, V, slack, scale, minus_inf) -> Tuple[torch.Tensor, List[str]]:
    N, T, U = inputs.padded_sizes(shapes)
    T, U = T + slack[0], U + slack[1]
    size = (N * T + N * (U + 1), V) if layout == "additive" else (N, T, U + 1, V)
    cells = formula(math.prod(size), scale).view(size)
    made = [f"logits = {scale:g} * torch.sin({STEP} * torch.arange({math.prod(size)}.0)).view{size}"]
    if minus_inf is not None:
        cells[..., minus_inf] = -math.inf
        made.append(f'logits[..., {minus_inf}] = -float("inf")')
    return cells, made


def _fill_line(layout: str, shapes: Shapes, fill: float) -> str:
    """Code that writes `fill` into the padding."""
    N, frames, targets = inputs.padded_sizes(shapes)
    parts = []
    for n, (T, U) in enumerate(shapes):
        if layout == "additive":
            first = N * frames + n * (targets + 1)
            spans = (n * frames + T, (n + 1) * frames), (first + U + 1, first + targets + 1)
            parts += [f"logits[{begin}:{end}]" for begin, end in spans if begin < end]
        else:
            parts += [f"logits[{n}, {T}:]"] if T < frames else []
            parts += [f"logits[{n}, :, {U + 1}:]"] if U < targets else []
    return "; ".join(f'{part} = float("{fill}")' for part in parts)


def _padding(layout: str, cells: torch.Tensor, shapes: Shapes, frames: int) -> torch.Tensor:
    """Which cells, (N, T, U+1), or rows of am and lm, belong to no utterance; `frames`: T of the tensor."""
    padding = torch.ones(cells.shape[:-1], dtype=torch.bool)
    if layout == "additive":
        am, lm = padding.split([len(shapes) * frames, len(padding) - len(shapes) * frames])
        am, lm = am.view(len(shapes), -1), lm.view(len(shapes), -1)
    for n, (T, U) in enumerate(shapes):
        if layout == "additive":
            am[n, :T], lm[n, : U + 1] = False, False
        else:
            padding[n, :T, : U + 1] = False
    return padding


# -- answers ---------------------------------------------------------------------------------------------------------


def tolerances(dtype: torch.dtype, losses: torch.Tensor, shapes: Shapes) -> Tuple[float, float]:
    """Largest relative errors of loss and gradient that pass.  In float32 and float64 a gradient may be off, beside
    what the correctness pass allows, by the rounding of T + U additions (a random walk) to the log-likelihood that
    every posterior is divided by: logits of 1e4 cannot do better in log space."""
    base = TOLERANCE[str(dtype).partition(".")[2]]
    if dtype in (torch.float16, torch.bfloat16):
        return base, base
    finite = losses[torch.isfinite(losses)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return base, base + math.sqrt(max(T + U for T, U in shapes)) * torch.finfo(dtype).eps * largest


def size(value: float) -> str:
    return "nan" if value != value else f"{value:.1e}"


def compare(
    question: Question, loss: torch.Tensor, gradient: Optional[torch.Tensor], right: torch.Tensor, truth: torch.Tensor
) -> Outcome:
    """Is the answer right?  `right`: the expected loss, a scalar or (N,); `truth`: holds the expected gradient."""
    loss = loss.detach().cpu().double()
    right = right.detach()
    if loss.numel() != right.numel():
        return Outcome(DIFFERS, f"a loss of shape {tuple(loss.shape)} instead of {tuple(right.shape)}")
    loss = loss.reshape(right.shape)
    if not torch.isfinite(right).all():
        return _without_path(loss, right)
    loss_tolerance, grad_tolerance = tolerances(question.leaf.dtype, right, question.batch.shapes)
    wrong, loss_error = [], relative_error(loss, right)
    if not loss_error <= loss_tolerance:
        wrong.append(f"loss {listed(loss)} instead of {listed(right)} (off by {size(loss_error)})")
    if gradient is None:
        return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error)
    gradient = gradient.detach().cpu().double()
    expected = truth.grad
    own = torch.ones(gradient.shape[:-1], dtype=torch.bool) if question.padding is None else ~question.padding
    grad_error = relative_error(gradient[own], expected[own])
    if not grad_error <= grad_tolerance:
        worst = (gradient[own] - expected[own]).abs().max().item()
        wrong.append("gradient nan" if worst != worst else f"gradient off by {size(grad_error)}")
    outside = gradient[~own]
    if outside.numel() and not (outside == 0).all():
        worst = outside.abs().max().item()
        wrong.append(f"gradient in the padding {size(worst)} instead of 0")
        grad_error = max(grad_error, math.inf if worst != worst else relative_error(gradient, expected))
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def _without_path(loss: torch.Tensor, right: torch.Tensor) -> Outcome:
    """Where an utterance has no path its loss must be infinite; of its gradient nothing is asked."""
    impossible = ~torch.isfinite(right)
    if torch.isinf(loss[impossible]).all():
        return Outcome(PASS, "no path through its lattice: an infinite loss")
    return Outcome(DIFFERS, f"loss {listed(loss)} where its lattice has no path: must be infinite or refused")


def listed(values: torch.Tensor) -> str:
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
