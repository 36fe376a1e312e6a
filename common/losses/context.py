"""Prepare the context of a pass: the adapter, its model and the batches of one job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

from common.core import scripts
from common.core.errors import NotRunnable
from common.core.settings import Settings
from common.measure.device import set_up_torch


@dataclass
class Context:
    """The adapter, its model, the batches and the settings of one job."""

    settings: Settings  # of the run, with only the scopes that the loss has
    adapter: Any
    device: Any  # torch.device
    dtype: Any  # torch.dtype of the inputs and weights
    model: Any  # common.losses.joiner.Joiner
    all_batches: Any  # all batches of the shape file
    batches: List[int]  # the measured ones, as indices into all_batches
    limit_bytes: Optional[int] = None  # memory limit of the probe and throughput passes on a CPU
    pool: Optional[int] = None  # see common.data.measured_batches
    shared: Optional[Path] = None  # folder where the jobs of the run leave right answers, see remembered.py
    held: Dict[int, Any] = field(default_factory=dict)  # inputs that were made ahead, by batch
    wrong: str = ""  # the error of the loss in words, set by the correctness pass

    def shapes(self, batch: int):
        """Return (N, 2) integers: T and U of each utterance of a batch."""
        return self.all_batches[batch]

    def make_batch(self, batch: int, repeat: int = 0, utterances: Optional[int] = None, first: int = 0):
        """Return fresh inputs of a batch, the same numbers for every implementation.

        With `utterances`, they are of that many utterances from number `first` on.
        """
        if utterances is None and batch in self.held:
            return self.held[batch].fresh()
        return self.new_batch(batch, repeat, utterances, first)

    def new_batch(self, batch: int, repeat: int = 0, utterances: Optional[int] = None, first: int = 0):
        """Return inputs as `make_batch` does, but always in new tensors, even if those of the batch are held."""
        from common.losses import inputs

        return inputs.make_batch(
            self.shapes(batch)[first:][:utterances],
            vocab_size=self.settings.vocab_size,
            encoder_dim=self.settings.encoder_dim,
            device=self.device,
            dtype=self.dtype,
            key=(self.settings.seed, batch, repeat),
            source=inputs.source_of(self.settings),
        )

    def hold_inputs(self, batches: Iterable[int]) -> None:
        """Make the inputs of these batches now; all repeats of a batch then use the same."""
        self.held = {batch: self.make_batch(batch) for batch in set(batches)}

    def step(self, scope: str, batch: int, repeat: int = 0, utterances: Optional[int] = None):
        """Return a common.losses.step.LossStep on fresh inputs."""
        from common.losses import step

        return step.prepare(self.adapter, self.model, self.make_batch(batch, repeat, utterances), scope)

    @property
    def loops_in_python(self) -> bool:
        """Return whether the loss loops over its cells in Python on this device."""
        return self.device.type in self.adapter.python_loops


def prepare(job: Mapping[str, Any], settings: Settings) -> Context:
    """Return the context of a job; raise NotRunnable if the loss cannot run here, UserError for bad settings."""
    checks = job.get("pass") == "correctness"  # in float32 as it is: TF32 has three digits
    device = set_up_torch(replace(settings, tf32=settings.tf32 and not checks))
    import torch

    dtype = getattr(torch, settings.dtype)
    adapter = scripts.load(job["script"])(settings, job["variant"])
    adapter.load(device.type)
    from common.data import measured_batches
    from common.losses.layouts import table

    layout = table.of(adapter)
    scopes = tuple(scope for scope in settings.scopes if scope in layout.scopes)
    if not scopes:
        raise NotRunnable(
            "unsupported",
            f"{adapter.name} takes {', '.join(layout.tensors)}, and no logits: it has no scope {settings.scopes[0]!r}; "
            f"use --scope {' or '.join(layout.scopes)}",
        )
    limit_bytes, pool = job.get("limit_bytes"), job.get("pool")
    batches, selected = measured_batches.load(settings, pool, job.get("round"))
    settings, model = replace(settings, scopes=scopes), layout.model(device, dtype)
    shared = Path(job["shared"]) if job.get("shared") else None
    return Context(settings, adapter, device, dtype, model, batches, selected, limit_bytes, pool, shared)
