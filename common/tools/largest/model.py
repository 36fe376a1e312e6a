"""A training step of a user's model: its loss, backward and optimizer.

Its module may make the batches, batch(N, T, U), and return the loss, step(model, batch)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from rnnt_bench.core.errors import UserError
from rnnt_bench.tools import loading
from rnnt_bench.tools.largest.buckets import Steps


class Training:
    """A model with its loss and optimizer.  Raises UserError for what cannot be made."""

    def __init__(self, request: Steps, device: torch.device, optimizer: Any):
        self.request = request
        self.device = device
        names = vars(loading.module(request.model.rpartition(":")[0]))
        functions = {key: names[key] for key in ("batch", "step") if callable(names.get(key))}
        self.make_batch = functions.get("batch", self.batch)
        self.loss_of = functions.get("step", loss_of)
        self.model = made(request, device).train()
        if request.gradient_checkpointing:
            checkpoint(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-5)

    def step(self, N: int, T: int, U: int) -> None:
        """Run forward, backward and the optimizer's step on a new batch."""
        batch = tree_map(
            lambda part: part.to(self.device) if hasattr(part, "to") else part,
            self.make_batch(N, T, U),
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.request.amp):
            loss = self.loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, N: int, T: int, U: int) -> Any:
        """Return a batch of N utterances as the model's forward takes it."""
        model: Any = self.model
        config = getattr(model, "config", None)  # of a model of transformers
        name = getattr(model, "main_input_name", "")
        is_audio = name == "input_values"
        size = (N, T * self.request.hop) if is_audio else (N, T, self.request.features)
        V = getattr(config, "vocab_size", self.request.vocab_size)
        with self.device:
            inputs = torch.randn(size)
            symbols = torch.randint(1, V, (N, U))
            started = pad(symbols, (1, 0), value=getattr(config, "blank_token_id", 0))
            if not name:
                return inputs, torch.full((N,), T), started, torch.full((N,), U + 1)
            mask = torch.ones(size[:2], dtype=torch.bool)
        others = {"attention_mask": mask, "decoder_input_ids": started}
        taken = inspect.signature(model.forward).parameters
        others = {key: value for key, value in others.items() if key in taken}
        return {name: inputs, "labels": symbols, **others}


def made(request: Steps, device: torch.device) -> torch.nn.Module:
    """Return the model with its loss."""
    name = request.model
    loss = request.loss
    arguments = dict(request.arguments)
    maker = loading.imported(name)
    if loss and "loss" in inspect.signature(maker).parameters:
        arguments["loss"] = loss
        loss = ""
    if hasattr(maker, "config_class"):  # a model of transformers, of random weights
        model = loading.made(name, lambda: maker(maker.config_class(**arguments)), {}).to(device)
    else:
        model = loading.load(name, arguments, str(device))
    if loss == "fused" and hasattr(model, "joint"):
        model = importlib.import_module("fused_transducer.recipes").patch(model)
    elif loss:
        words = f"{name} takes no argument `loss`; give its factory one"
        raise UserError(f"--losses {loss}: {words}")
    return model


def checkpoint(model: Any) -> None:
    """Switch on the gradient checkpointing of a model of transformers.  Raises UserError where it
    has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        words = f"{type(model).__name__} has no gradient checkpointing of transformers"
        raise UserError(f"--gradient-checkpointing: {words}; let its factory do it, by an --arg")
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in transformers 6
    (enable or model.gradient_checkpointing_enable)()


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of the model's own forward, or of its logits (N, T, U+1, V)."""
    outputs = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    is_mapping = isinstance(outputs, Mapping)
    result = outputs.get("loss") if is_mapping else getattr(outputs, "loss", None)
    if result is None:
        result = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if result.dim() < 3:
        return result.sum()
    if result.dim() != 4:
        words = "the model returns no loss and no logits (N, T, U+1, V)"
        raise TypeError(f"{words}: define step(model, batch)")
    from torchaudio.functional import rnnt_loss

    N, T, U, _ = result.shape  # all utterances are of equal length
    frames = torch.full((N,), T, dtype=torch.int32, device=result.device)
    targets = batch[2][:, 1:].int().contiguous()
    return rnnt_loss(result.float(), targets, frames, torch.full_like(frames, U - 1), blank=0)
