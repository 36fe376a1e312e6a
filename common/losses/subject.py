"""Prepare what a pass of a loss needs (the adapter, its model, the batches), and run the pass that
a job asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from rnnt_bench.core import implementations
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import Settings
from rnnt_bench.instruments import device
from rnnt_bench.records.schema import Environment, JobLine


@dataclass
class Context:
    """The adapter, its model, the batches and the settings of one job."""

    settings: Settings  # of the run, with only the scopes that the loss has
    adapter: Any
    device: Any  # torch.device
    dtype: Any  # torch.dtype of the inputs and weights
    model: Any  # rnnt_bench.losses.inputs.Joiner
    all_batches: Any  # all batches of the shape file
    batches: list[int]  # the measured ones, as indices into all_batches
    round: int | None = 1
    forward_only: bool = False  # --mode forward; the correctness pass judges gradients in any case
    folder: Path | None = None  # where traces go
    # folder where the jobs of the run leave right answers, see step.remembered
    shared: Path | None = None
    same_as: str = ""  # the row of the same code that is asked the questions that this one is not
    seed: int | None = None  # of what is asked after timing, see passes.after_timing
    # of device.state, before the script of the loss was loaded
    state: dict[str, object] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)  # inputs that were made ahead, by batch

    def make_batch(self, batch: int, repeat: int = 0, utterances: int | None = None):
        """Return fresh inputs of a batch, or its first `utterances`: the same numbers for every
        implementation."""
        if utterances is None and batch in self.held:
            return self.held[batch].fresh()
        return self.new_batch(batch, repeat, utterances)

    def new_batch(
        self, batch: int, repeat: int = 0, utterances: int | None = None, reverse: bool = False
    ):
        """Return inputs as `make_batch` does, but always in new tensors, even if those of the batch
        are held.

        reverse: whether the lengths of the utterances are in reverse order."""
        from rnnt_bench.losses import inputs

        shapes = self.all_batches[batch][:utterances]
        return inputs.make_batch(
            shapes[::-1] if reverse else shapes,
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

    def step(self, scope: str, batch: int, repeat: int = 0, utterances: int | None = None):
        """Return a rnnt_bench.losses.step.LossStep on fresh inputs."""
        from rnnt_bench.losses import step

        result = step.prepare(
            self.adapter, self.model, self.make_batch(batch, repeat, utterances), scope
        )
        result.forward_only = self.forward_only
        return result

    @property
    def loops_in_python(self) -> bool:
        """Return whether the loss loops over its cells in Python on this device."""
        return self.device.type in self.adapter.python_loops


def prepare(job: JobSpec) -> Context:
    """Return the context of a job; raise NotRunnable if the loss cannot run here, UserError for bad
    settings."""
    settings = job.settings
    checks = job.pass_name == "correctness"  # in float32 as it is: TF32 has three digits
    where = device.set_up_torch(replace(settings, tf32=settings.tf32 and not checks))
    import torch

    # which keeps the clock as it is before the script
    importlib.import_module("rnnt_bench.instruments.clock")
    dtype, state = getattr(torch, settings.dtype), device.state()
    adapter = implementations.load(job.script)(settings, job.variant)
    adapter.load(where.type)
    from rnnt_bench.data import batching
    from rnnt_bench.losses import layouts

    layout = layouts.of(adapter)
    scopes = tuple(scope for scope in settings.scopes if scope in layout.scopes)
    if not scopes:
        raise NotRunnable(
            "unsupported",
            f"{adapter.name} takes {', '.join(layout.tensors)}, and no logits: it has no scope {settings.scopes[0]!r}; "
            f"use --scope {' or '.join(layout.scopes)}",
        )
    batches, selected = batching.load(settings, job.round)
    check_shortest(adapter, batches, selected)
    return Context(
        settings=replace(settings, scopes=scopes),
        adapter=adapter,
        device=where,
        dtype=dtype,
        model=layout.model(where, dtype),
        all_batches=batches,
        batches=selected,
        round=job.round,
        same_as=job.same_as,
        forward_only=settings.mode == "forward" and not checks,
        state=state,
        folder=Path(job.folder) if job.folder else None,
        shared=Path(job.shared) if job.shared else None,
    )


def check_shortest(adapter: Any, batches: Any, chosen: Iterable[int]) -> None:
    """Raise NotRunnable for batches with utterances that are too short for the loss."""
    short = [index for index in chosen if not adapter.takes(batches[index])]
    if short:
        T, U = min(batches[short[0]].tolist(), key=lambda shape: adapter.takes([shape]))
        which = (
            "without tokens"
            if U < adapter.fewest_targets
            else f"of fewer than {adapter.fewest_frames} frames"
        )
        does = "refuses" if adapter.fewest_frames == 1 else "is wrong, without an error, for"
        words = f"{adapter.implementation.name} {does} utterances {which}; batch {short[0]} has one (T {T}, U {U})"
        raise NotRunnable(
            "unsupported", f"{words}: leave them out of the shape file, or the loss with --skip"
        )


def run(job: JobSpec) -> Iterator[JobLine]:
    """Yield the ``environment`` record of a job, then the records of its pass."""
    context = prepare(job)

    def run_pass(context: Context) -> Iterator[JobLine]:
        if context.adapter.simulated and job.pass_name != "correctness":
            variables = context.adapter.simulator_variables
            reason = f"under {variables} its kernels run in a simulator, whose times say nothing"
            raise NotRunnable("unsupported", f"{reason}: use --passes correctness")
        module = importlib.import_module(f"rnnt_bench.losses.passes.{job.pass_name}")
        yield from module.run(context)

    return carried_out(context, run_pass)


def carried_out(
    context: Context, run_pass: Callable[[Context], Iterator[JobLine]]
) -> Iterator[JobLine]:
    """Yield the ``environment`` record, then the records of a pass.

    Raises NotRunnable, UserError, WrongResult, and whatever the loss raises.
    """
    try:
        yield environment(context)
        yield from run_pass(context)
    # within the loss: this suite's modules and the package itself are imported
    except ModuleNotFoundError as error:
        needed = f"{context.adapter.name} needs {error.name}: {context.adapter.hint}"
        raise NotRunnable("missing", needed) from error


def environment(context: Context) -> Environment:
    from rnnt_bench.data import batching, shapes

    settings, every, chosen = context.settings, context.all_batches, context.batches
    here = device.environment(settings, context.device)
    here.warnings[:0] = batching.warnings(every, chosen, settings)
    return structs.replace(
        here,
        implementation_version=context.adapter.version(),
        options=context.adapter.described_options(),
        l2=settings.l2 if context.device.type == "cuda" else None,
        shape_file=settings.shape_file,
        shape_file_sha256=shapes.sha256(Path(settings.shape_file)),
        shape_file_totals=every.totals(),
        batches=[every.describe(index, settings.prune_range) for index in chosen],
    )
