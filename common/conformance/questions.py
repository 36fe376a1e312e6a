"""Ask a package about a corner: make its inputs, call it, tell refusals from answers, and let the judge compare these.

A corner has what the questions of a run's losses have not: logits that no joiner makes, a blank, a reduction and
integers of other types, inputs that must be refused.  The numbers are 3 sin(0.7 k), k = 0, 1, 2, ...: the same on every
machine.  `losses.judge` has the right answer for exactly the numbers that the loss was given.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from rnnt_bench.conformance.cases import DIFFERS, NAN_GRADIENT, PASS, Outcome
from rnnt_bench.core import text
from rnnt_bench.losses import inputs, layouts, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.cells import Cells
from rnnt_bench.losses.judge import Errors, Right
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.questions import fill_inputs
from rnnt_bench.losses.step import LossStep
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
    """One call of a loss: the step that it is asked, and what makes the same step again for the right answer."""

    adapter: Adapter
    ready: Callable[[], Tuple[Any, LossStep]]  # makes the joiner, if any, and the step anew

    def __post_init__(self) -> None:
        self.step = self.ready()[1]
        self.leaves = self.step.leaves  # a tensor that takes the place of one is asked

    def loss(self) -> torch.Tensor:
        """Return the adapter's loss; raise as `attempt` does."""
        return attempt(self.step.forward, self.step.batch.targets.device)

    def backward(self, total: torch.Tensor, **options: Any) -> List[torch.Tensor]:
        """Return the gradients of the leaves from this backward only; `options` go to Tensor.backward."""
        for leaf in self.leaves.values():
            leaf.grad = None
        attempt(lambda: total.backward(**options), total.device, "in backward")
        gradients = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        if len(gradients) < len(self.leaves):
            raise Refused(RuntimeError("backward left the logits without a gradient"), "in backward")
        return gradients

    def answer(self) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Return (loss, gradients of its sum)."""
        loss = self.loss()
        return loss, self.backward(loss.sum())

    def right(self, weights: Optional[torch.Tensor] = None) -> Right:
        """Return what is right of the step, whose losses are multiplied by `weights`, () or (N,); None: 1."""
        model, step = self.ready()
        step.computed = {name: leaf.grad for name, leaf in self.leaves.items()}
        factors = torch.ones(()) if weights is None else weights
        return Right(self.adapter, model, layouts.of(self.adapter).scopes[0], [step], [factors.double()])

    def right_losses(self) -> torch.Tensor:
        """Return the right losses (N,), float64."""
        right = self.right()
        right.lattices()
        return right.losses[0]


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
        layout, width = layouts.of(adapter), adapter.outputs(V)
        if (fill is not None or slack != (0, 0)) and layout.padding(shapes, T, U) is None:
            raise NotAsked("its layout has no padding")
        sizes: Dict[str, Tuple[int, ...]] = {"given": (N, T, U + 1, width)}
        if "loss" not in layout.scopes:  # the dimension of such a joiner is the number of its outputs
            sizes = {"encoder_out": (N, T, width), "decoder_out": (N, U + 1, width)}
            sizes.update({"output.weight": (width, width), "output.bias": (width,)})

        def ready() -> Tuple[Any, LossStep]:
            kind: Any = {"vocab_size": V, "encoder_dim": 1, "device": self.device, "dtype": torch.float32}
            batch = inputs.make_batch(shapes, **kind, key=(5, *inputs.padded_sizes(shapes)))
            # targets are never the blank; without any target, they have no column
            targets = torch.where(batch.targets == blank, torch.zeros_like(batch.targets), batch.targets)
            batch.targets = torch.nn.functional.pad(targets, (0, slack[1]), value=0 if blank else 1)
            batch = alter(batch) if alter else batch
            counts = [math.prod(shape) for shape in sizes.values()]
            numbers = (scale * torch.sin(0.7 * torch.arange(sum(counts), dtype=torch.float64))).to(self.device, dtype)
            leaves = {name: part.view(sizes[name]).clone() for name, part in zip(sizes, numbers.split(counts))}
            if minus_inf is not None:  # of logits, or of the bias
                leaves[[*leaves][-1]][..., minus_inf] = -math.inf
            prepared, model = layout.prepare(batch), torch.nn.Module()
            for name, value in vars(prepared).items() if convert else ():
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    setattr(prepared, name, value.to(convert))
            if "given" in leaves:
                leaves["given"] = layout.take(leaves["given"], batch, prepared)
            else:
                model = inputs.Joiner(torch.nn.Linear(width, width, device=self.device, dtype=dtype), {})
                (batch.encoder_out, batch.decoder_out, model.output.weight.data, model.output.bias.data) = (
                    leaves.values()
                )
            step = LossStep(lambda: layout.of_leaves(leaves, batch, prepared), batch, prepared, leaves)
            if fill is not None:
                fill_inputs(layout, step, fill)
            for leaf in leaves.values():
                leaf.requires_grad_()
            return model, step

        return Question(adapter, ready)


def size(value: float) -> str:
    """Return an error as text ("1.2e-03", "nan")."""
    return "nan" if value != value else f"{value:.1e}"


def compare(
    question: Question,
    loss: torch.Tensor,
    weights: Optional[torch.Tensor] = None,
    has_gradient: bool = True,
    of_each: bool = False,
) -> Outcome:
    """Return the outcome of comparing a loss, and the gradients of the question's leaves, with the right ones.

    Args:
        weights: () or (N,), of the losses of utterances in `loss`; None: 1.
        of_each: whether the loss is (N,) and not a sum.
    """
    right = question.right(weights)
    known, _ = right.lattices()
    (losses,), (cells,) = right.losses, right.cells
    expected = losses * torch.tensor(cells.factors, dtype=torch.float64)
    expected = expected if of_each else expected.sum()
    loss = loss.detach().cpu().double()
    if loss.numel() != expected.numel():
        return Outcome(DIFFERS, f"a loss of shape {tuple(loss.shape)} instead of {tuple(expected.shape)}")
    loss = loss.reshape(expected.shape)
    gradients: Any = [leaf.grad for leaf in question.leaves.values()] if has_gradient else []
    if not torch.isfinite(expected).all():
        return _without_path(loss, expected, gradients)
    errors = Errors(question.adapter)
    errors.collect(right.parts(known) if has_gradient else ())
    grad_error = max((leaf.error for leaf in errors.leaves.values()), default=None)
    limits = rounding.allowed(
        str(next(iter(question.leaves.values())).dtype).partition(".")[2],
        question.step.batch.shapes,
        right.score,
        float(losses.abs().max()),
        right=float(expected.abs().max()),
        negligible=question.adapter.negligible,
    )
    wrong, loss_error = [], relative_error(loss, expected)
    if not loss_error <= limits.loss:
        wrong.append(f"loss {listed(loss)} instead of {listed(expected)} (off by {size(loss_error)})")
    if grad_error is not None and not grad_error <= limits.gradient:
        is_nan = any(gradient.isnan().any() for gradient in gradients)
        wrong.append(NAN_GRADIENT if is_nan else f"gradient off by {size(grad_error)}")
    outside = in_padding(cells) if has_gradient else losses[:0]
    if (outside != 0).any():
        wrong.append(f"gradient in the padding {size(outside.abs().max().item())} instead of 0")
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def in_padding(cells: Cells) -> torch.Tensor:
    """Return the gradient in the padding of all utterances (n,)."""
    parts = (part for n in range(len(cells.batch.shapes)) for part in cells.padding(n))
    return torch.cat([torch.zeros(0), *(part.detach().cpu().double().reshape(-1) for part in parts)])


def _without_path(loss: torch.Tensor, right: torch.Tensor, gradients: Sequence[torch.Tensor]) -> Outcome:
    """Return the outcome where an utterance has no path: its loss must be infinite; the message tells the gradient."""
    if not torch.isinf(loss[~torch.isfinite(right)]).all():
        return Outcome(DIFFERS, f"loss {listed(loss)} where its lattice has no path: must be infinite or refused")
    message = "no path through its lattice: an infinite loss"
    if not gradients:
        return Outcome(PASS, message)
    gradient = torch.cat([each.detach().reshape(-1) for each in gradients])
    if gradient.isnan().any():
        return Outcome(PASS, f"{message}, {NAN_GRADIENT}")
    if gradient.isinf().any():
        return Outcome(PASS, f"{message}, gradient infinite")
    return Outcome(PASS, f"{message}, gradient {'not' if (gradient != 0).any() else 'all'} 0")


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
