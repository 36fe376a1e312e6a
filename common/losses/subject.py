"""Prepare what a pass of a loss needs (the adapter, its model, the batches), and run the pass of a
job."""

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
    """Hold the adapter, its model, the batches and the settings of one job."""

    settings: Settings  # of the run, with only the scopes that the loss has
    adapter: Any
    device: Any  # torch.device
    dtype: Any  # torch.dtype of the inputs and weights
    model: Any  # rnnt_bench.losses.inputs.Joiner
    all_batches: Any  # all batches of the shape file
    batches: list[int]  # the measured ones, as indices into all_batches
    round: int | None = 1  # of the timing pass; None in other passes
    forward_only: bool = False  # --mode forward; the correctness pass judges gradients in any case
    folder: Path | None = None  # where traces go
    # the folder where the jobs of the run leave right answers, see step.remembered
    shared: Path | None = None
    # another row of the same code, which is asked the questions that this one is not asked
    same_as: str = ""
    # of the random sums by which gradients are judged, once after_timing.seed_of has drawn it
    seed: int | None = None
    # what device.state returned before the script of the loss was loaded
    state: dict[str, object] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)  # inputs that were made ahead, by batch

    def make_batch(self, batch: int, repeat: int = 0, utterances: int | None = None):
        """Return inputs of a batch in leaves that have no gradient yet (their `grad` is None).

        The numbers are the same for every implementation.  If the batch has held inputs, and is
        asked for whole, they share memory with these.

        Args:
            batch: its index in `all_batches`.
            repeat: each repeat has other numbers, unless the inputs are held.
            utterances: how many of the batch's utterances, from the first on; None: all.
        """
        if utterances is None and batch in self.held:
            return self.held[batch].fresh()
        return self.new_batch(batch, repeat, utterances)

    def new_batch(
        self, batch: int, repeat: int = 0, utterances: int | None = None, reverse: bool = False
    ):
        """Return inputs of a batch in new tensors, even if the batch has held inputs.

        Args:
            batch, repeat, utterances: as in `Context.make_batch`.
            reverse: whether the (T, U) of the utterances come in reverse order.
        """
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
        """Return a rnnt_bench.losses.step.LossStep; arguments as in `make_batch`."""
        from rnnt_bench.losses import step

        inputs = self.make_batch(batch, repeat, utterances)
        result = step.prepare(self.adapter, self.model, inputs, scope)
        result.forward_only = self.forward_only
        return result

    @property
    def loops_in_python(self) -> bool:
        """Return whether the loss loops over its cells in Python on this device."""
        return self.device.type in self.adapter.python_loops


def prepare(job: JobSpec) -> Context:
    """Set up torch, load the package of the loss, and return the context of a job.

    Raises NotRunnable if the loss cannot run here, and UserError for bad settings."""
    settings = job.settings
    is_correctness = job.pass_name == "correctness"
    # TF32 has three digits, so a loss is judged in full float32.
    where = device.set_up_torch(replace(settings, tf32=settings.tf32 and not is_correctness))
    import torch

    # Imported now, the clock keeps Python's own functions, which the script of the loss may change.
    importlib.import_module("rnnt_bench.instruments.clock")
    state = device.state()
    dtype = getattr(torch, settings.dtype)
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
        forward_only=settings.mode == "forward" and not is_correctness,
        state=state,
        folder=Path(job.folder) if job.folder else None,
        shared=Path(job.shared) if job.shared else None,
    )


def check_shortest(adapter: Any, batches: Any, chosen: Iterable[int]) -> None:
    """Raise NotRunnable if a chosen batch has an utterance with too few frames or tokens for the
    loss.

    batches: for each batch an array (N, 2) of T and U; chosen: indices of batches"""
    for batch in chosen:
        for T, U in batches[batch].tolist():
            if adapter.takes([(T, U)]):
                continue
            verb = "refuses" if adapter.fewest_frames == 1 else "is wrong, without an error, for"
            which = f"of fewer than {adapter.fewest_frames} frames"
            if U < adapter.fewest_targets:
                which = "without tokens"
            raise NotRunnable(
                "unsupported",
                f"{adapter.implementation.name} {verb} utterances {which}; "
                f"batch {batch} has one (T {T}, U {U}): "
                "leave them out of the shape file, or the loss with --skip",
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

    Raises NotRunnable (also if a package that the loss needs is not installed), UserError,
    WrongResult, and whatever the loss raises.
    """
    try:
        yield environment(context)
        yield from run_pass(context)
    # `prepare` has imported the loss's own package.  So another one that the loss needs is missing.
    except ModuleNotFoundError as error:
        needed = f"{context.adapter.name} needs {error.name}: {context.adapter.hint}"
        raise NotRunnable("missing", needed) from error


def environment(context: Context) -> Environment:
    """Return the ``environment`` record: the computer, the implementation and the batches."""
    from rnnt_bench.data import batching, shapes

    settings = context.settings
    all_batches = context.all_batches
    chosen = context.batches
    machine = device.environment(settings, context.device)
    # The warnings about batches come before those about the machine.
    machine.warnings[:0] = batching.warnings(all_batches, chosen, settings)
    return structs.replace(
        machine,
        implementation_version=context.adapter.version(),
        options=context.adapter.described_options(),
        l2=settings.l2 if context.device.type == "cuda" else None,
        shape_file=settings.shape_file,
        shape_file_sha256=shapes.sha256(Path(settings.shape_file)),
        shape_file_totals=all_batches.totals(),
        batches=[all_batches.describe(index, settings.prune_range) for index in chosen],
    )
