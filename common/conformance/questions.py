"""Ask an adapter about a small batch: make the inputs, call the loss, and compute the right answer.

The numbers are 3 sin(0.7 k), k = 0, 1, 2, ...: the same on every machine, and short enough for code that a user can
paste.  The right answer is that of the float64 oracle for exactly the numbers that the loss was given.
"""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from common.core.text import clipped, without_folders
from common.losses import inputs
from common.losses.adapter import Adapter
from common.losses.layouts import table
from common.losses.layouts.base import Layout, Region, Shapes
from common.system.memory import is_out_of_memory

SCALE, STEP = 3.0, 0.7
#: An assertion whose message has fewer words is shown with its line of source.
FEW_WORDS = 3


class Refused(Exception):
    """The loss raised an error and gave no answer; `stage` is "" or "in backward"."""

    def __init__(self, error: BaseException, stage: str = ""):
        self.stage, self.reason = stage, message(error)
        super().__init__(f"{stage}: {self.reason}" if stage else self.reason)


class NotAsked(Exception):
    """The case does not apply to this adapter here; the message says why."""


class ContextLost(Exception):
    """An error of the loss left the CUDA context unusable; the message is that of the error."""


def context_lost(device: torch.device) -> bool:
    """Return whether every operation on `device` fails.

    Errors such as an illegal access or a device-side assert stay until the process ends; a launch error is cleared once
    it was read, so a second try works.
    """
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
    """Return the first line of an error, without folders; for an assertion without words, its line of source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.line and len(re.findall("[A-Za-z]{2,}", " ".join(lines))) < FEW_WORDS:
            text = f"AssertionError: {frame.line}" + (f" -> {lines[0]}" if lines else "")
        text += f" ({Path(frame.filename).name}:{frame.lineno})"
    return clipped(without_folders(text))


@dataclass
class Question:
    """The inputs of one call of a loss, and what its right answer is computed from."""

    layout: Layout
    batch: inputs.Batch
    prepared: Any  # what the adapter's `prepare` returned
    leaf: torch.Tensor  # the tensor that the loss differentiates
    truth: torch.Tensor  # the leaf as float64 on the CPU, with zeros in the padding
    padding: Optional[torch.Tensor]  # bool, whether each row of the leaf is padding; None for a layout without padding
    made: List[str]  # lines of Python that make the tensor `logits` of a reproduction
    reduce: Callable[[torch.Tensor], torch.Tensor] = torch.sum  # from (N,) losses to the right answer
    factor: float = 1.0  # of the loss before its backward

    @property
    def adapter(self) -> Adapter:
        """Return the adapter that is asked."""
        return self.layout.adapter

    def forward(self) -> torch.Tensor:
        """Return the adapter's loss of the leaf; raise as `attempt` does."""
        return self.loss_of(self.leaf)

    def loss_of(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the adapter's loss of another leaf; raise as `attempt` does."""
        return attempt(lambda: self.layout.loss(leaf, self.batch, self.prepared), leaf.device)

    def backward(self, total: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the gradient of the leaf from this backward only; raise as `attempt` does.

        `options` go to Tensor.backward.
        """
        self.leaf.grad = None
        attempt(lambda: total.backward(**options), self.leaf.device, "in backward")
        if self.leaf.grad is None:
            raise Refused(RuntimeError("backward left the logits without a gradient"), "in backward")
        return self.leaf.grad

    def expected(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the right losses (N,), float64, and the leaf that they can be differentiated for."""
        truth = self.truth.clone().requires_grad_()
        return self.layout.expected(truth, self.batch), truth


def attempt(action: Callable[[], Any], device: torch.device, stage: str = "") -> Any:
    """Return what `action` returns, after waiting for the device, so that late errors of CUDA count.

    Raises NotAsked if memory runs out, ContextLost if the error left the device unusable, else Refused for any error.
    """
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
    """Return the first `count` numbers of the formula, (count,) float64."""
    return scale * torch.sin(STEP * torch.arange(count, dtype=torch.float64))


@dataclass
class Examination:
    """An adapter that is asked on a device; `noted` is called with each question before the loss is."""

    adapter: Adapter
    device: torch.device
    noted: Callable[[Question], None] = lambda question: None

    def ask(
        self,
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
        """Return a question about a batch, after calling `noted` with it.

        Raises NotAsked for an option or padding that the adapter does not have.

        Args:
            shapes: (T, U) of each utterance.
            V: size of the vocabulary.
            blank: symbol of the blank.
            reduction: that of the package; None: the sum, which the adapter computes if the package does not.
            repaired: whether the adapter's corrections apply.
            dtype: of the leaf.
            scale: largest magnitude of the numbers.
            slack: frames and targets by which the tensors are longer than the longest utterance.
            fill: value of padded cells; None: further numbers of the formula.
            minus_inf: a symbol whose logit is -inf in every cell; None: no symbol.
            alter: changes the batch before the adapter prepares it.
            convert: integer dtype of all that the adapter prepared; None: the dtypes of the adapter.
        """
        adapter = self.adapter.widened(max(U for _, U in shapes) + slack[1])
        adapter = adapter if repaired else adapter.unrepaired()
        if reduction not in (None, *adapter.reductions):
            raise NotAsked(f"it has no reduction {reduction!r}, only {', '.join(adapter.reductions)}")
        before = adapter.options()
        adapter.blank, adapter.reduction = blank, reduction or "sum"
        if blank and adapter.options() == before:
            raise NotAsked("it has no option for the blank: it is symbol 0")

        batch = _batch(shapes, V, blank, slack, self.device)
        batch = alter(batch) if alter else batch
        layout = table.of(adapter)
        N, T, U = inputs.padded_sizes(shapes)
        T, U = T + slack[0], U + slack[1]
        regions = layout.padding(shapes, T, U)
        if regions is None and (fill is not None or slack != (0, 0)):
            raise NotAsked("its layout has no padding")
        size = layout.size(N, T, U, adapter.outputs(V))
        numbers = formula(math.prod(size), scale).view(size)
        made = [f"logits = {scale:g} * torch.sin({STEP} * torch.arange({math.prod(size)}.0)).view{size}"]
        if minus_inf is not None:
            made += _set(numbers, [layout.of_symbol(minus_inf)], -math.inf)
        numbers = numbers.to(dtype)
        made += [f"logits = logits.to({dtype})"] if dtype != torch.float32 else []
        truth_numbers = numbers.double().clone()
        if fill is not None and regions is not None:
            _set(truth_numbers, regions, 0.0)
            made += _set(numbers, regions, fill)

        prepared = adapter.prepare(batch)
        if convert is not None:
            for name, value in vars(prepared).items():
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    setattr(prepared, name, value.to(convert))
        truth = layout.take(truth_numbers, batch, prepared).detach().clone()
        leaf = layout.take(numbers.to(self.device), batch, prepared).detach().clone().requires_grad_()
        question = Question(layout, batch, prepared, leaf, truth, _mask(size, regions), made)
        self.noted(question)
        return question


def _batch(shapes: Shapes, V: int, blank: int, slack: Tuple[int, int], device: torch.device) -> inputs.Batch:
    """Return a batch of random targets that are never the blank; without any target, they have no column."""
    N, T, U = inputs.padded_sizes(shapes)
    batch = inputs.make_batch(shapes, vocab_size=V, encoder_dim=1, device=device, dtype=torch.float32, key=(5, N, T, U))
    targets = torch.where(batch.targets == blank, torch.zeros_like(batch.targets), batch.targets)
    return replace(batch, targets=torch.nn.functional.pad(targets, (0, slack[1]), value=0 if blank else 1))


def _set(numbers: torch.Tensor, regions: Sequence[Region], value: float) -> List[str]:
    """Set the regions to the value; return a list of the line of Python that does so."""
    for region in regions:
        numbers[region] = value
    written = '-float("inf")' if value == -math.inf else f'float("{value}")'
    return ["; ".join(f"logits[{index_code(region)}] = {written}" for region in regions)]


def index_code(region: Region) -> str:
    """Return an index as Python source."""

    def part(index: Any) -> str:
        if isinstance(index, slice):
            return ":".join("" if end is None else str(end) for end in (index.start, index.stop))
        return "..." if index is ... else str(index)

    return ", ".join(map(part, region))


def _mask(size: Sequence[int], regions: Optional[Sequence[Region]]) -> Optional[torch.Tensor]:
    """Return whether each row is padding: bool of all dimensions but the last; None if the layout has no padding."""
    if regions is None:
        return None
    padding = torch.zeros(*size[:-1], dtype=torch.bool)
    for region in regions:
        padding[region] = True
    return padding
