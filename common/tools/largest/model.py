"""Run training steps of a user's model: loss, backward and optimizer.

The module of the model may have a function batch(N, T, U), which makes a batch, and a function
step(model, batch), which returns the loss."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from rnnt_bench.core.errors import UserError
from rnnt_bench.tools import loading
from rnnt_bench.tools.largest.buckets import Steps


class Training:
    """A model with its optimizer.  Raises UserError for a model that cannot be made.

    make_batch and loss_of are `batch` and `step` of the model's module; where it has none, they are
    the method `batch` and the function `loss_of` of this module.

    optimizer: a class of torch.optim"""

    def __init__(self, request: Steps, device: torch.device, optimizer: Any):
        self.request = request
        self.device = device
        # The model is MODULE:NAME; `batch` and `step` are looked up in MODULE.
        names = vars(loading.module(request.model.rpartition(":")[0]))
        self.make_batch = names["batch"] if callable(names.get("batch")) else self.batch
        self.loss_of = names["step"] if callable(names.get("step")) else loss_of
        self.model = made(request, device).train()
        if request.gradient_checkpointing:
            checkpoint(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-5)

    def step(self, N: int, T: int, U: int) -> None:
        """Run forward, backward and the optimizer's step on a new batch."""
        batch = loading.on_device(self.make_batch(N, T, U), self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.request.amp):
            loss = self.loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, N: int, T: int, U: int) -> Any:
        """Return N random utterances of T frames and U symbols, as the model's forward takes them.

        A model of transformers gets a dict of keywords.  Another model gets a tuple: features
        (N, T, F), their lengths, symbols (N, U+1) with a blank first, and their lengths."""
        model: Any = self.model
        input_name = getattr(model, "main_input_name", "")  # models of transformers have one
        config = getattr(model, "config", None)
        V = getattr(config, "vocab_size", self.request.vocab_size)
        blank = getattr(config, "blank_token_id", 0)
        is_audio = input_name == "input_values"
        size = (N, T * self.request.hop) if is_audio else (N, T, self.request.features)
        with self.device:
            inputs = torch.randn(size)
            symbols = torch.randint(1, V, (N, U))
            started = pad(symbols, (1, 0), value=blank)  # (N, U+1), with a blank first
            if not input_name:
                return inputs, torch.full((N,), T), started, torch.full((N,), U + 1)
            mask = torch.ones(size[:2], dtype=torch.bool)
        batch = {input_name: inputs, "labels": symbols}
        accepted = inspect.signature(model.forward).parameters
        for name, value in (("attention_mask", mask), ("decoder_input_ids", started)):
            if name in accepted:
                batch[name] = value
        return batch


def made(request: Steps, device: torch.device) -> torch.nn.Module:
    """Return the model with the loss that is asked for.

    A factory with an argument `loss` gets the loss by this argument.  Else fused_transducer patches
    the loss "fused" into a model with a joint.  Raises UserError for a model that cannot have the
    loss in either way."""
    name = request.model
    loss = request.loss
    arguments = dict(request.arguments)
    maker = loading.imported(name)
    takes_loss = bool(loss) and "loss" in inspect.signature(maker).parameters
    if takes_loss:
        arguments["loss"] = loss
    if hasattr(maker, "config_class"):  # a class of transformers: the model has random weights
        model = loading.made(name, lambda: maker(maker.config_class(**arguments)), {}).to(device)
    else:
        model = loading.load(name, arguments, str(device))
    if takes_loss or not loss:
        return model
    if loss == "fused" and hasattr(model, "joint"):
        return importlib.import_module("fused_transducer.recipes").patch(model)
    raise UserError(f"--losses {loss}: {name} takes no argument `loss`; give its factory one")


def checkpoint(model: Any) -> None:
    """Switch on the gradient checkpointing of a model of transformers.

    Raises UserError for a model without gradient checkpointing of transformers."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"--gradient-checkpointing: {type(model).__name__} has no gradient checkpointing of transformers; "
            "if it has its own, let its factory switch that on, by an --arg"
        )
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in transformers 6
    (enable or model.gradient_checkpointing_enable)()


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that the model's forward returns, or torchaudio's loss of its logits.

    The forward returns this tensor as the entry or attribute "loss", as the first of a tuple or
    list, or by itself.  One with less than three dimensions is losses, which are summed.  Logits
    are (N, T, U+1, V).  Their symbols are the third element of the batch, (N, U+1): a blank and U
    targets of each utterance.  Raises TypeError where the result is neither losses nor logits."""
    outputs = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    if isinstance(outputs, Mapping):
        result = outputs.get("loss")
    elif getattr(outputs, "loss", None) is not None:
        result = outputs.loss
    else:
        result = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if not isinstance(result, torch.Tensor) or result.dim() not in (0, 1, 2, 4):
        raise TypeError(
            "the model returns no loss and no logits (N, T, U+1, V): define step(model, batch)"
        )
    if result.dim() != 4:
        return result.sum()
    from torchaudio.functional import rnnt_loss

    N, T, rows, _ = result.shape  # rows is U+1; all utterances are of equal length
    frames = torch.full((N,), T, dtype=torch.int32, device=result.device)
    targets = batch[2][:, 1:].int().contiguous()
    return rnnt_loss(result.float(), targets, frames, torch.full_like(frames, rows - 1), blank=0)
