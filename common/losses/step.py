"""Prepare one step of a loss on one batch (inputs and leaves, untimed), and run it (forward and
backward, measured).

In scope "loss" a step goes from what the loss is given (logits) to its gradient.  It calls
torch.autograd.grad, since `.backward()` would copy a gradient that a loss wrote over its logits,
which no training step does (docs/method.md).  In scope "step" it goes from encoder and decoder
outputs through the joiner (packing or pruning included) and the loss to the gradients of
encoder_out, decoder_out and all weights.

A fingerprint tells whether a tensor still has the same bits, without a copy of it.  All losses of a
timing round are given the same numbers, and the oracle takes longer than a step.  So the jobs of a
run leave right answers in a folder, each under a digest of every bit that it depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import write_whole
from rnnt_bench.instruments.clock import stage
from rnnt_bench.losses import layouts
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.inputs import Batch, Joiner

NO_GRADIENT = "the loss has no gradient, by which it is judged, with --mode forward too: return a differentiable tensor"


@dataclass
class LossStep:
    """Hold a step that is ready to run once."""

    forward: Callable[[], torch.Tensor]  # returns the loss to differentiate
    batch: Batch
    prepared: Any  # what the adapter's `prepare` returned
    # tensors that get a gradient; in scope "loss" only "given", the input of the loss
    leaves: dict[str, torch.Tensor]
    overwrites: bool = False  # whether the loss may overwrite "given"
    forward_only: bool = False  # whether `run` makes no gradient
    # the gradient of "given", after `run`
    computed: dict[str, torch.Tensor | None] = field(default_factory=dict)
    answer: torch.Tensor | None = None  # the detached loss, after `run`

    @property
    def given(self) -> torch.Tensor:
        """Return the input of the loss: the only leaf of a step of scope "loss".  Steps of scope
        "step" have no such leaf (KeyError)."""
        return self.leaves["given"]

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the loss reads and must leave as they are, by name.

        In scope "loss" the leaf "given" is "logits" here.  It is missing if the loss may overwrite
        it."""
        result = {
            name: value
            for name, value in vars(self.prepared).items()
            if isinstance(value, torch.Tensor)
        }
        for name in ("targets", "T_lengths", "U_lengths"):
            result[name] = getattr(self.batch, name)
        for name, leaf in self.leaves.items():
            if name != "given":
                result[name] = leaf
            elif not self.overwrites:
                result["logits"] = leaf
        return result

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradient of each leaf by name, after `run`; None where the loss made none.

        Raises TypeError for a gradient of a subclass of torch.Tensor, which may put off its work
        until it is read.
        """
        # `differentiate` fills `computed` in scope "loss", and the leaves' `grad` in scope "step".
        gradients = self.computed or {name: leaf.grad for name, leaf in self.leaves.items()}
        for name, gradient in gradients.items():
            if gradient is not None and type(gradient) is not torch.Tensor:
                raise TypeError(
                    f"the gradient of {name} is a {type(gradient).__name__}: return a torch.Tensor"
                )
        return gradients

    def run(self, after_forward: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run forward, call `after_forward`, and run backward; return the detached loss.

        Raises TypeError or ValueError if the loss is no torch.Tensor of one element, or has no
        gradient.
        """
        with torch.set_grad_enabled(not self.forward_only):
            loss = self.forward()
        after_forward()
        self.answer = checked_sum(loss).detach()
        if not self.forward_only:
            with stage("backward"):
                differentiate(loss, [self])
        return self.answer


def checked_sum(loss: Any) -> torch.Tensor:
    """Return a loss as it is, after a check that it is a sum.

    Raises TypeError if it is no torch.Tensor, and ValueError if it has not one element."""
    if type(loss) is not torch.Tensor:
        what = f"a {type(loss).__name__}"
        if isinstance(loss, (tuple, list)):
            what += f" of {len(loss)}"
        raise TypeError(f"the loss is {what}, not a torch.Tensor: return the sum over the batch")
    if loss.numel() != 1:  # some packages sum to (1,)
        raise ValueError(
            f"the loss has the shape {tuple(loss.shape)}: return the sum over the batch"
        )
    return loss


def run_together(steps: Sequence[LossStep], factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run forward of all steps, then one backward of the sum of all their losses times `factors`.

    Returns what the forward of each step returned, detached; `LossStep.answer` has the same.
    Raises TypeError or ValueError for a loss of another type or shape than its factor asks for.

    factors: one tensor for each step: () if its forward returns the summed loss, or (N,) if it
      returns the losses of the N utterances."""
    losses = []
    products = []
    for step, factor in zip(steps, factors):
        loss = step.forward()
        if factor.numel() == 1:
            checked_sum(loss)  # for its errors, which tell what to return
        step.answer = loss.detach()
        losses.append(step.answer)
        products.append(weighted(loss, factor))
    differentiate(torch.stack(products).sum(), steps)
    return losses


def differentiate(total: torch.Tensor, steps: Sequence[LossStep], again: bool = False) -> None:
    """Make the gradients of the leaves of all steps from the sum of their losses.

    They are added to the leaves' `grad`; in scope "loss" they are put into `step.computed` instead.

    Raises ValueError where the loss has no backward.

    again: whether the graph is to be differentiated once more later."""
    if not total.requires_grad:
        raise ValueError(NO_GRADIENT)
    try:
        if "given" not in steps[0].leaves:  # scope "step"
            total.backward(retain_graph=again)
            return
        gradients = torch.autograd.grad(
            total, [step.given for step in steps], retain_graph=again, allow_unused=True
        )
    except NotImplementedError as error:
        # torch names autograd.Function where a custom function has no backward.
        if "autograd.Function" not in str(error):
            raise
        raise ValueError(NO_GRADIENT) from error
    for step, gradient in zip(steps, gradients):
        step.computed["given"] = gradient


class NotOfEach(ValueError):
    """Tells that a package was asked for the losses of N utterances, and did not return N."""


def weighted(losses: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of losses times factors, a tensor ().

    Both tensors have one element, or both have N.  Raises NotOfEach if they have different numbers
    of elements."""
    if losses.numel() != factors.numel():
        raise NotOfEach(
            f"the losses have the shape {tuple(losses.shape)}, not ({factors.numel()},)"
        )
    return (losses.reshape(-1) * factors.to(losses)).sum()


def leaves_of(model: Joiner, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors that get a gradient in scope "step", by name."""
    outputs = {"encoder_out": batch.encoder_out, "decoder_out": batch.decoder_out}
    return {**outputs, **dict(model.named_parameters())}


def prepare(
    adapter: Adapter, model: Joiner, batch: Batch, scope: str, logits: torch.Tensor | None = None
) -> LossStep:
    """Return a step on a batch that is ready to run; nothing here is timed.

    Gradients of the weights that an earlier step left are dropped.  The encoder_out and decoder_out
    of the batch must have no gradient yet.

    logits: (N, T, U+1, V), used in place of the joiner's logits in scope "loss"; scope "step"
        ignores them."""
    model.zero_grad(set_to_none=True)
    layout = layouts.of(adapter)
    prepared = layout.prepare(batch)
    if scope == "step":
        return LossStep(
            lambda: layout.step(model, batch, prepared), batch, prepared, leaves_of(model, batch)
        )
    with torch.no_grad():
        if logits is None:
            given = layout.given(model, batch, prepared)
        else:
            given = layout.take(logits, batch, prepared)
    given.requires_grad_()

    def forward() -> torch.Tensor:
        with stage("loss"):
            return layout.loss(given, batch, prepared)

    overwrites = adapter.overwrites_logits
    return LossStep(forward, batch, prepared, {"given": given}, overwrites=overwrites)


#: Elements that are brought to the host at a time.
CHUNK = 1 << 24
Tensors = Mapping[str, torch.Tensor | None]


def fingerprint(tensor: torch.Tensor | None) -> bytes:
    """Return a digest of the bits of `tensor`; for None that of a tensor without elements.

    Equal bits have the same digest in all processes, but another digest on CUDA than on the CPU."""
    digest = hashlib.blake2b(digest_size=16)
    if tensor is not None:
        for chunk in tensor.detach().reshape(-1).split(CHUNK):
            if chunk.is_cuda:
                chunk = weighted_bits(chunk)
            host = chunk.cpu().clone(memory_format=torch.contiguous_format)
            digest.update(host.view(torch.uint8).numpy())
    return digest.digest()


def weighted_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the sum (1,) int64 of all 64-bit words of `values` (n,), each times a random odd
    number, modulo 2^64. Since the number is odd, any change of a single word changes the sum.

    The device computes the sum.  So a GPU checks gigabytes of logits in less time than the host
    needs for a digest of them."""
    # The view needs stride 1; `contiguous` would keep any stride of a single element.
    bits = values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    generator = torch.Generator(values.device).manual_seed(0)
    factors = torch.randint(2**63 - 1, words.shape, generator=generator, device=values.device) | 1
    return (words * factors).sum(0, keepdim=True)


def fingerprints(tensors: Tensors) -> dict[str, bytes]:
    """Return the digest of the bits of each tensor by its name."""
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def changed(before: Mapping[str, bytes], tensors: Tensors) -> list[str]:
    """Return the names of `before` whose tensors now have other bits."""
    return [name for name, digest in before.items() if fingerprint(tensors[name]) != digest]


def remembered(
    folder: Path | None,
    question: object,
    tensors: Tensors,
    compute: Callable[[], dict[str, list[float]]],
) -> dict[str, list[float]]:
    """Return the numbers that `compute` makes.  If another job has written them to a file in
    `folder`, read them from this file.  Else compute them, and write the file.

    Args:
        folder: has the files that jobs of a run share; None: compute, and write no file.
        question: what is computed, in any type: questions differ if their repr differs.
        tensors: by name, the tensors that the numbers are computed from.  A file is only for
            tensors with the same bits, dtypes and shapes.
    """
    if folder is None:
        return compute()
    shapes = {
        name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items() if tensor is not None
    }
    key = repr((question, sorted(fingerprints(tensors).items()), sorted(shapes.items(), key=str)))
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    numbers = compute()
    # If the disk is full, each job computes the numbers.  Nobody sees the error: no advice.
    with suppress(UserError):
        write_whole((path, json.dumps(numbers)), advice="")
    return numbers
