"""Ask an adapter about a small batch: make the inputs, call the loss, and compute the right answer.

The numbers are 3 sin(0.7 k), k = 0, 1, 2, ...: the same on every machine.  The right answer is that of the float64
oracle for exactly the numbers that the loss was given.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from rnnt_bench.conformance.cases import DIFFERS, NAN_GRADIENT, PASS, Outcome
from rnnt_bench.core import text
from rnnt_bench.losses import inputs, layouts, oracle, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.system.memory import is_out_of_memory


class Refused(Exception):
    """The loss raised an error and gave no answer; `stage` is "" or "in backward"."""

    def __init__(self, error: BaseException, stage: str = ""):
        self.reason = message(error)
        super().__init__(f"{stage}: {self.reason}" if stage else self.reason)


class NotAsked(Exception):
    """The case does not apply to this adapter here; the message says why."""


class ContextLost(Exception):
    """An error of the loss left the CUDA context unusable; the message is that of the error."""


def context_lost(device: torch.device) -> bool:
    """Return whether every operation on `device` fails, as after an illegal access or a device-side assert; a launch
    error is cleared once it was read, so a second try works."""
    for _ in range(2 if device.type == "cuda" else 0):
        try:
            torch.zeros(1, device=device).add_(1).item()
            return False
        except Exception as error:
            if is_out_of_memory(error):
                return False
    return device.type == "cuda"


def message(error: BaseException) -> str:
    """Return the first line of an error, without folders; of an assertion its line of source."""
    line = text.reason_of(error)
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"AssertionError: {frame.line or line} ({Path(frame.filename).name}:{frame.lineno})"
    return text.clipped(text.without_folders(line))


@dataclass
class Question:
    """The inputs of one call of a loss, and what its right answer is computed from."""

    layout: layouts.Layout
    batch: inputs.Batch
    prepared: Any  # what the adapter's `prepare` returned
    leaf: torch.Tensor  # the tensor that the loss differentiates
    truth: torch.Tensor  # the leaf as float64 on the CPU, with zeros in the padding
    padding: Optional[torch.Tensor]  # bool, whether each row of the leaf is padding; None for a layout without padding

    @property
    def adapter(self) -> Adapter:
        return self.layout.adapter

    def loss(self, leaf: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the adapter's loss of the leaf, or of another; raise as `attempt` does."""
        given = self.leaf if leaf is None else leaf
        return attempt(lambda: self.layout.loss(given, self.batch, self.prepared), given.device)

    def backward(self, total: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the gradient of the leaf from this backward only; `options` go to Tensor.backward."""
        self.leaf.grad = None
        attempt(lambda: total.backward(**options), self.leaf.device, "in backward")
        if self.leaf.grad is None:
            raise Refused(RuntimeError("backward left the logits without a gradient"), "in backward")
        return self.leaf.grad

    @property
    def score(self) -> float:
        """Return the largest magnitude of the leaf, of what is finite."""
        return self.truth[self.truth.isfinite()].abs().max().item()

    def answer(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return (loss, gradient of its sum)."""
        loss = self.loss()
        return loss, self.backward(loss.sum())

    def expected(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the right losses (N,), float64, and the leaf that they can be differentiated for."""
        truth = self.truth.clone().requires_grad_()
        return self.layout.expected(truth, self.batch), truth


def attempt(action: Callable[[], Any], device: torch.device, stage: str = "") -> Any:
    """Return what `action` returns, after waiting for the device, so that late errors of CUDA count.  Raises NotAsked
    if memory runs out, ContextLost if the error left the device unusable, else Refused."""
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


@dataclass
class Examination:
    """An adapter that is asked on a device."""

    adapter: Adapter
    device: torch.device

    @property
    def interpreted(self) -> bool:
        """Return whether Python runs its kernels, thread by thread, which takes minutes for a small batch."""
        return self.adapter.simulated and not self.adapter.simulator_compiled

    def ask(
        self,
        shapes: layouts.Shapes,
        *,
        V: int = 7,
        blank: int = 0,
        reduction: Optional[str] = None,
        repaired: bool = True,
        dtype: torch.dtype = torch.float32,
        scale: float = 3.0,
        slack: Tuple[int, int] = (0, 0),
        fill: Optional[float] = None,
        minus_inf: Optional[int] = None,
        alter: Optional[Callable[[inputs.Batch], inputs.Batch]] = None,
        convert: Optional[torch.dtype] = None,
    ) -> Question:
        """Return a question about a batch.  Raises NotAsked for an option or padding that the adapter does not have.

        shapes: (T, U) of each utterance; reduction: that of the package, None: the sum; repaired: whether the adapter's
        corrections apply; dtype: of the leaf; scale: largest magnitude of the numbers; slack: frames and targets by
        which the tensors are longer than the longest utterance; fill: value of padded cells; minus_inf: a symbol whose
        logit is -inf in every cell; alter: changes the batch before the adapter prepares it; convert: integer dtype of
        all that the adapter prepared.
        """
        N, T, U = inputs.padded_sizes(shapes)
        T, U = T + slack[0], U + slack[1]
        adapter = self.adapter.but(prune_range=U + 1, repairs=repaired and self.adapter.repairs)
        if reduction not in (None, *adapter.reductions):
            raise NotAsked(f"it has no reduction {reduction!r}, only {', '.join(adapter.reductions)}")
        before = adapter.options()
        adapter.blank, adapter.reduction = blank, reduction or "sum"
        if blank and adapter.options() == before:
            raise NotAsked("it has no option for the blank: it is symbol 0")
        kind: Any = {"vocab_size": V, "encoder_dim": 1, "device": self.device, "dtype": torch.float32}
        batch = inputs.make_batch(shapes, **kind, key=(5, *inputs.padded_sizes(shapes)))
        # targets are never the blank; without any target, they have no column
        targets = torch.where(batch.targets == blank, torch.zeros_like(batch.targets), batch.targets)
        batch = replace(batch, targets=torch.nn.functional.pad(targets, (0, slack[1]), value=0 if blank else 1))
        batch = alter(batch) if alter else batch
        layout = layouts.of(adapter)
        regions = layout.padding(shapes, T, U)
        if regions is None and (fill is not None or slack != (0, 0)):
            raise NotAsked("its layout has no padding")
        shape = layout.size(N, T, U, adapter.outputs(V))
        numbers = scale * torch.sin(0.7 * torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)
        if minus_inf is not None:
            numbers[layout.of_symbol(minus_inf)] = -math.inf
        numbers = numbers.to(dtype)
        true_numbers, padding = numbers.double().clone(), torch.zeros(*shape[:-1], dtype=torch.bool)
        for region in regions or ():
            padding[region] = True
            if fill is not None:
                numbers[region], true_numbers[region] = fill, 0.0
        prepared = layout.prepare(batch)
        for name, value in vars(prepared).items() if convert else ():
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                setattr(prepared, name, value.to(convert))
        truth = layout.take(true_numbers, batch, prepared).detach().clone()
        leaf = layout.take(numbers.to(self.device), batch, prepared).detach().clone().requires_grad_()
        return Question(layout, batch, prepared, leaf, truth, None if regions is None else padding)


#: From (N,) losses to a right answer.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def size(value: float) -> str:
    """Return an error as text ("1.2e-03", "nan")."""
    return "nan" if value != value else f"{value:.1e}"


def right_of(question: Question, reduce: Reduce = torch.sum) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return (expected value, expected gradient of the leaf), float64, for the losses (N,) reduced by `reduce`."""
    losses, truth = question.expected()
    value = reduce(losses)
    (gradient,) = torch.autograd.grad(value.sum(), truth)
    return value.detach(), gradient


def compare(
    question: Question,
    loss: torch.Tensor,
    gradient: Optional[torch.Tensor],
    right: torch.Tensor,
    expected: torch.Tensor,
) -> Outcome:
    """Return the outcome of comparing loss, a scalar or (N,), and gradient of the question's leaf with the expected
    ones, `right` and `expected`, float64; without a gradient the loss only."""
    loss, right = loss.detach().cpu().double(), right.detach()
    if loss.numel() != right.numel():
        return Outcome(DIFFERS, f"a loss of shape {tuple(loss.shape)} instead of {tuple(right.shape)}")
    loss = loss.reshape(right.shape)
    if not torch.isfinite(right).all():
        return _without_path(loss, right, gradient)
    limits = rounding.allowed(
        str(question.leaf.dtype).partition(".")[2],
        question.batch.shapes,
        question.score,
        right.abs().max().item(),
        negligible=question.adapter.negligible,
    )
    wrong, loss_error, grad_error = [], oracle.relative_error(loss, right), None
    if not loss_error <= limits.loss:
        wrong.append(f"loss {listed(loss)} instead of {listed(right)} (off by {size(loss_error)})")
    if gradient is not None:
        gradient = gradient.detach().cpu().double()
        valid = torch.ones(gradient.shape[:-1], dtype=torch.bool) if question.padding is None else ~question.padding
        grad_error = oracle.relative_error(gradient[valid], expected[valid])
        if not grad_error <= limits.gradient:
            is_nan = gradient[valid].isnan().any()
            wrong.append(NAN_GRADIENT if is_nan else f"gradient off by {size(grad_error)}")
        if (gradient[~valid] != 0).any():
            worst = gradient[~valid].abs().max().item()
            wrong.append(f"gradient in the padding {size(worst)} instead of 0")
            grad_error = max(grad_error, math.inf if worst != worst else oracle.relative_error(gradient, expected))
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def _without_path(loss: torch.Tensor, right: torch.Tensor, gradient: Optional[torch.Tensor]) -> Outcome:
    """Return the outcome where an utterance has no path: its loss must be infinite; the message tells the gradient."""
    if not torch.isinf(loss[~torch.isfinite(right)]).all():
        return Outcome(DIFFERS, f"loss {listed(loss)} where its lattice has no path: must be infinite or refused")
    message = "no path through its lattice: an infinite loss"
    if gradient is None:
        return Outcome(PASS, message)
    kinds: Dict[str, torch.Tensor] = {
        NAN_GRADIENT: gradient.isnan(),
        "gradient infinite": gradient.isinf(),
        "gradient not 0": gradient != 0,
    }
    return Outcome(PASS, f"{message}, {next((name for name, of in kinds.items() if of.any()), 'gradient all 0')}")


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
