"""Try whole training steps of a user's model: its loss, backward and optimizer, under a limit on
all that they hold.

The limit counts from the process with torch and the model's module imported, so it holds the
weights, the optimizer's states and the batch too.  A probe runs two steps: the second has the
optimizer's states.
"""

from __future__ import annotations

import importlib
import inspect
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from rnnt_bench.core import text
from rnnt_bench.core.errors import OutOfMemory, UserError
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.instruments.device import environment, set_up_torch
from rnnt_bench.instruments.memory import AddressSpace, Device
from rnnt_bench.records.schema import JobLine, Measured, as_written
from rnnt_bench.system.memory import is_out_of_memory
from rnnt_bench.tools import loading
from rnnt_bench.tools.largest.search import Try


def run(job: JobSpec) -> Iterator[JobLine]:
    """Yield what is tried before each step, what it took after it, and the peak of all.

    The steps are those of all buckets of the job, in random order.  Raises OutOfMemory, and
    UserError, which names the bucket, for a model that cannot be made, or refuses a batch."""
    settings, given = job.settings, job.request
    device = set_up_torch(settings)
    yield environment(settings, device)
    own = imported(given["model"])
    optimizer = loading.imported(f"torch.optim:{given['optimizer']}")
    warm = torch.ones(64, 64, device=device, requires_grad=True)
    (warm @ warm).sum().backward()  # starts the threads and loads the library
    optimizer([warm], lr=0.0).step()  # which loads modules when it first runs
    limit = (
        Device(given["memory_limit"], device)
        if device.type == "cuda"
        else AddressSpace(given["limit_bytes"])
    )
    # number, N, T, U
    buckets: list[tuple[int, int, int, int]] = [tuple(bucket) for bucket in given["buckets"]]
    draw = random.Random(settings.seed)
    rounds = -(-given["steps"] // len(buckets))
    order = [bucket for _ in range(rounds) for bucket in draw.sample(buckets, len(buckets))]
    torch.manual_seed(settings.seed)
    with limit.within(int(limit.bytes * given["share"])):
        try:
            training = Training(given, device, own, optimizer)
        except UserError as error:
            words = f"bucket {order[0][0]}: {error}"
            lacks_memory = error.__cause__ is not None and is_out_of_memory(error.__cause__)
            raise OutOfMemory(words) if lacks_memory else UserError(words) from error
        for number, N, T, U in order:
            tried = Try(N=N, T=T, U=U, limit_bytes=limit.bytes, bucket=number)
            yield Measured(value=as_written(tried))
            begin = time.perf_counter_ns()
            training.step(N, T, U, number)
            tried.ns = time.perf_counter_ns() - begin
            yield Measured(value=as_written(tried))
        del training
    tried.peak_bytes = limit.peak_bytes  # of all steps
    yield Measured(value=as_written(tried))


def imported(name: str) -> dict[str, Any]:
    """Import the module of a model; return its functions `batch` and `step`, where it has them.
    Raises UserError."""
    module = loading.module(name.rpartition(":")[0])
    return {
        key: getattr(module, key)
        for key in ("batch", "step")
        if callable(getattr(module, key, None))
    }


def checkpoint(model: Any) -> None:
    """Switch on the gradient checkpointing of a model of transformers.  Raises UserError where it
    has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        words = f"{type(model).__name__} has no gradient checkpointing of transformers"
        raise UserError(f"--gradient-checkpointing: {words}; let its factory do it, by an --arg")
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in transformers 6
    (enable or model.gradient_checkpointing_enable)()


class Training:
    """A model with its loss and optimizer.  Raises UserError for what cannot be made."""

    def __init__(
        self, given: Mapping[str, Any], device: torch.device, own: Mapping[str, Any], optimizer: Any
    ):
        self.given, self.device, self.own = given, device, own
        self.model: Any = self._model(
            given["model"], dict(given["arguments"]), given["loss"]
        ).train()
        if given["gradient_checkpointing"]:
            checkpoint(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-5)

    def _model(self, name: str, arguments: dict[str, Any], loss: str) -> torch.nn.Module:
        maker = loading.imported(name)
        if loss and "loss" in inspect.signature(maker).parameters:
            return loading.load(name, {**arguments, "loss": loss}, str(self.device))
        if hasattr(maker, "config_class"):  # a model of transformers, of random weights
            model = loading.made(name, lambda: maker(maker.config_class(**arguments)), {}).to(
                self.device
            )
        else:
            model = loading.load(name, arguments, str(self.device))
        if loss == "fused" and hasattr(model, "joint"):
            recipes = importlib.import_module("fused_transducer.recipes")
            try:
                return recipes.patch(model)
            except ValueError as error:
                raise UserError(
                    f"--losses fused: {error}; give the factory an argument `loss`"
                ) from error
        if loss:
            raise UserError(
                f"--losses {loss}: {name} takes no argument `loss`; give its factory one"
            )
        return model

    def step(self, N: int, T: int, U: int, number: int) -> None:
        """Run forward, backward and the optimizer's step on a new batch.  Raises UserError for a
        batch that the model refuses, and what tells of lack of memory as it is."""
        try:
            batch = self.batch(N, T, U)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.given["amp"]):
                loss = (
                    self.own["step"](self.model, batch)
                    if "step" in self.own
                    else self.forward(batch)
                )
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # whatever a stranger's model raises
            if is_out_of_memory(error):
                raise
            where = f"bucket {number}, a batch of N {N}, T {T}, U {U}"
            raise UserError(
                f"{where}: the step fails: {type(error).__name__}: {text.first_line(error)}"
            ) from error

    def batch(self, N: int, T: int, U: int) -> Any:
        """Return a batch of N utterances, as the module's `batch` makes it, or as the model's
        forward takes it."""
        if "batch" in self.own:
            made = self.own["batch"](N, T, U)
            return tree_map(
                lambda part: part.to(self.device) if hasattr(part, "to") else part, made
            )
        V = self.given["vocab_size"]
        V = min(V, getattr(getattr(self.model, "config", None), "vocab_size", V))
        symbols = torch.randint(1, V, (N, U), device=self.device)
        name = getattr(self.model, "main_input_name", "")
        size = (
            (N, T * self.given["hop"]) if name == "input_values" else (N, T, self.given["features"])
        )
        inputs = torch.randn(size, device=self.device)
        if not name:
            started = torch.nn.functional.pad(symbols, (1, 0))
            lengths = torch.full((N,), T, device=self.device)
            return inputs, lengths, started, torch.full((N,), U + 1, device=self.device)
        batch = {name: inputs, "labels": symbols}
        taken = inspect.signature(self.model.forward).parameters
        if "attention_mask" in taken:
            batch["attention_mask"] = torch.ones(size[:2], dtype=torch.bool, device=self.device)
        if "decoder_input_ids" in taken:
            blank = self.model.config.blank_token_id
            batch["decoder_input_ids"] = torch.nn.functional.pad(symbols, (1, 0), value=blank)
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of the model's own forward, or of its logits (N, T, U+1, V)."""
        outputs = self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch)
        loss = (
            outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        )
        if loss is not None:
            return loss.sum()
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        if first.dim() < 3:
            return first.sum()
        if first.dim() != 4:
            raise TypeError(
                "the model returns no loss and no logits (N, T, U+1, V): define step(model, batch)"
            )
        from torchaudio.functional import rnnt_loss

        N, T, U, _ = first.shape  # all utterances are of equal length
        frames, tokens = (
            torch.full((N,), size, dtype=torch.int32, device=self.device) for size in (T, U - 1)
        )
        targets = batch[2][:, 1:].int().contiguous()
        return rnnt_loss(first.float(), targets, frames, tokens, blank=0, reduction="mean")
