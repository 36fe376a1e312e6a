"""Ask a loss for its answer, and compare it with the float64 oracle.

It is done in the same way on small batches and at size.  The oracle computes some frames at a time,
so it needs no second tensor of the size of the logits.  A pruned loss is compared on the cells in
its own ranges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rnnt_bench.core.text import finite
from rnnt_bench.losses import layouts, oracle, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.cells import Cells, StepCells, largest
from rnnt_bench.losses.gradients import Errors, Part, Sketch
from rnnt_bench.losses.inputs import OUTPUTS, Joiner
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import LossStep, changed, fingerprints, leaves_of, run_together
from rnnt_bench.losses.topologies import Topology

#: What each sum over the gradient of the logits is called (see Errors.sums); other sums are over
#: the rows of a leaf.
SUMMED = {
    "frame": "the gradient of a frame",
    "u": "the gradient of a target's position (u)",
    "symbol": "the gradient of a symbol",
    "cell": "the sum over V of a cell's gradient",
}

#: What the loss of each step is multiplied by before backward: (), or (N,) for its losses.
Factors = Sequence[torch.Tensor]
#: Runs steps with their factors, and returns the loss of each, () or (N,).
Run = Callable[[list[LossStep], Factors], list[torch.Tensor]]
#: Returns the adapter, the joiner and the steps of a question.
Ready = Callable[[], tuple[Adapter, Joiner, list[LossStep]]]
ONE = torch.ones((), dtype=torch.float64)


def leaf_name(name: str, number: int) -> str:
    """Return the name of a leaf of step `number` (0 or 1), among one or two that are run together.

    The steps share the weights, but each has its own outputs of encoder and decoder."""
    return f"{name} of the other loss" if number and name in OUTPUTS else name


class Lattice(NamedTuple):
    """Hold what the oracle computes of an utterance."""

    parts: torch.Tensor  # (T, U+1, P) float64, see topologies.py; -inf outside a pruned range
    likelihood: float  # the log-likelihood
    derivatives: torch.Tensor  # (T, U+1, P) float64, of the log-likelihood by the parts


class Right:
    """Make the right losses and gradients of steps that are run together.

    Attributes:
        cells: those of each step
        lattices: by step and utterance, after `solve`
        losses: of each step, the losses (N,) of its utterances in float64, after `solve`.  In scope
          "step" of a pruned loss `compare` adds the simple losses

    Args:
        factors: what the loss of each step is multiplied by.
        dtype: of the joiner and of the gradients of logits; sums along paths are always float64.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Joiner,
        scope: str,
        steps: Sequence[LossStep],
        factors: Factors,
        dtype: torch.dtype = torch.float64,
    ):
        self.adapter = adapter
        self.layout = layouts.of(adapter)
        # the layout of a pruned loss in scope "step", which adds its simple loss; else None
        is_step = scope == "step"
        self.pruned = self.layout if is_step and isinstance(self.layout, layouts.Pruned) else None
        self.model = copy.deepcopy(model).to(dtype)
        self.cells: list[Cells] = []
        for step, factor in zip(steps, factors):
            gradients = step.gradients()
            if "given" in step.leaves:  # a loss of given logits
                kind, leaves = Cells, step.leaves
            else:
                kind, leaves = StepCells, self._own_leaves(step)
                # The gradients of the weights are sums over all steps: compare them once, as those
                # of the last step.
                if step is not steps[-1]:
                    gradients = {name: gradients[name] for name in OUTPUTS}
            utterance_factors = factor.expand(len(step.batch.shapes)).tolist()
            self.cells.append(kind(self.layout, step, leaves, gradients, utterance_factors, dtype))
        self.lattices: list[list[Lattice]] = []
        self.losses: list[torch.Tensor] = []

    def _own_leaves(self, step: LossStep) -> dict[str, torch.Tensor]:
        """Return the leaves, by name, from which the right gradients of a step of scope "step" are
        computed.

        Its encoder and decoder outputs are copied in the model's dtype, so that the `grad` of the
        copies can hold the right gradients.  The weights are those of `self.model`, which all steps
        share."""
        leaves = leaves_of(self.model, step.batch)
        for name in OUTPUTS:
            output = leaves[name].detach().to(self.model.output.weight.dtype, copy=True)
            leaves[name] = output.requires_grad_(leaves[name].requires_grad)
        return leaves

    @property
    def score(self) -> float:
        """Return the largest magnitude of the logits, by which `rounding.allowed` knows how far a
        right loss may be off.  It is 0 before `solve`, and leaves out infinite logits."""
        return max(cells.score for cells in self.cells)

    def _parts(self, cells: Cells, n: int) -> torch.Tensor:
        """Return the parts (T, U+1, P) of the cells of utterance `n`, as in Lattice, on the CPU."""
        T, U = cells.batch.shapes[n]
        topology = self.adapter.lattice
        # A pruned range may reach beyond the last target: such cells get column U + 1,
        # which is cut off at the end.
        result = torch.full((T, U + 2, 2 + topology.extra), -math.inf, dtype=torch.float64)
        for frames in cells.frames(n):
            parts = topology.parts(frames.logits, frames.target, self.adapter.blank).cpu().double()
            columns = frames.u.cpu().unsqueeze(2).expand_as(parts)
            result[frames.begin : frames.end].scatter_(1, columns, parts)
        return result[:, : U + 1]

    def solve(self) -> None:
        """Compute `lattices` and `losses`."""
        for cells in self.cells:
            lattices = []
            for n in range(len(cells.batch.shapes)):
                parts = self._parts(cells, n)
                lattices.append(Lattice(parts, *oracle.of_parts(parts, self.adapter.lattice)))
            losses = [-lattice.likelihood for lattice in lattices]
            self.lattices.append(lattices)
            self.losses.append(torch.tensor(losses, dtype=torch.float64))

    def compare(self, into: Errors | Sketch) -> None:
        """Note in `into` all gradients of the loss, part by part, each with the right gradient.

        In scope "step" `_compare_cells` and `_simple_loss` run backward, so that each leaf's `grad`
        adds up to its right gradient; the leaves are noted when all utterances are through.  Of a
        pruned loss, also add the right simple losses to `losses`."""
        for number, cells in enumerate(self.cells):  # of each step
            for n, lattice in enumerate(self.lattices[number]):
                if cells.gradients:  # none of a step without leaves: its loss alone is judged
                    self._compare_cells(cells, n, lattice, into)
                if self.pruned:
                    self.losses[number][n] += self._simple_loss(self.pruned, cells, n)
            if isinstance(cells, StepCells):
                for name, computed in cells.gradients.items():
                    right = cells.leaves[name].grad
                    if right is not None:  # a loss may not use all of the joiner
                        into.note_leaf(leaf_name(name, number), computed, right)

    def _compare_cells(self, cells: Cells, n: int, lattice: Lattice, into: Errors | Sketch) -> None:
        """Note in `into` the gradients of the logits of utterance `n`, with the right ones.

        In scope "step" note nothing: run backward from the right gradients of the logits.  This
        adds to the right gradients of the leaves."""
        device = cells.batch.targets.device
        # (T, U+2, P): the derivatives of the log-likelihood by the parts.  A column of zeros is
        # added for the cells of a pruned range beyond the last target.
        by_u = torch.nn.functional.pad(lattice.derivatives, (0, 0, 0, 1)).to(device)
        for frames in cells.frames(n):
            by_cell = by_u[frames.begin : frames.end].take_along_dim(frames.u.unsqueeze(2), 1)
            derivatives = by_cell.to(frames.logits)  # (frames, cells, P), each cell's at its u
            right = oracle.cell_gradient(
                frames.logits,
                frames.target,
                derivatives,
                self.adapter.blank,
                self.adapter.lattice,
            )
            if isinstance(cells, StepCells):
                cells.backward(frames, right)
            else:
                into.note_cells(Part(cells, frames, cells.computed(frames), right, derivatives))

    def _simple_loss(self, layout: layouts.Pruned, cells: Cells, n: int) -> float:
        """Return the right simple loss of utterance `n`, which a step adds to the pruned loss.

        Unless the loss alone is judged (`cells.gradients` is empty), add the gradient of the simple
        loss to those of the leaves."""
        T, U = cells.batch.shapes[n]
        utterance = cells.batch.utterance(n)
        # These are detached in `utterance`: take the leaves, which get the gradient.
        utterance.encoder_out = cells.leaves["encoder_out"][n : n + 1, :T]
        utterance.decoder_out = cells.leaves["decoder_out"][n : n + 1, : U + 1]
        losses = layout.simple_losses(self.model, utterance)
        if losses.requires_grad and cells.gradients:
            (losses.sum() * cells.factors[n]).backward()
        return float(losses.detach().sum())

    def sketch(self, seed: int) -> Sketch:
        """Compute the right losses, and return the sketch of the right gradients."""
        self.solve()
        result = Sketch(seed)
        self.compare(result)
        return result

    def sketch_of_loss(self, seed: int) -> Sketch:
        """Return the sketch of the gradients that the loss computed."""
        result = Sketch(seed)
        for number, cells in enumerate(self.cells):
            if isinstance(cells, StepCells):
                for name, gradient in cells.gradients.items():
                    result.note(leaf_name(name, number), gradient)
                continue
            # In the same parts as `compare` notes the right ones: the random signs depend on them.
            for n in range(len(cells.batch.shapes)):
                for frames in cells.frames(n):
                    result.note("given", cells.computed(frames), n, frames.begin)
        return result


@dataclass
class Answer:
    """Hold the answer of a loss to a question, and that of the oracle."""

    shapes: list[tuple[int, int]]  # (T, U) of every utterance
    score: float  # the largest magnitude of the logits
    losses: torch.Tensor  # float64: one of each step, or those of all utterances
    rights: torch.Tensor  # the right ones
    right_of_utterances: torch.Tensor  # the right losses of all utterances
    lattices: list[Lattice]  # of the utterances of the first step
    errors: Errors
    overwritten: list[str]  # names of the inputs that the loss wrote over
    # "loss", and the gradients of the last step by leaf; None where there is none
    computed: dict[str, Any]

    @property
    def loss_error(self) -> float:
        """Return the largest error of a loss, divided by the largest magnitude of a right loss."""
        return relative_error(self.losses, self.rights)

    @property
    def grad_error(self) -> float:
        """Return the largest error of a gradient (`Leaf.error`) among all leaves."""
        return max(leaf.error for leaf in self.errors.leaves.values())

    @property
    def slope_error(self) -> float:
        """Return the largest distance of a `Leaf.factor` from 1, among all leaves; infinite for a
        factor that is not finite.

        The factor is 1 for a right gradient, and 2 for twice the right gradient."""
        errors = [abs(leaf.factor - 1) for leaf in self.errors.leaves.values()]
        return max(error if math.isfinite(error) else math.inf for error in errors)

    def float32_error(self, topology: Topology) -> float:
        """Return the largest error of a derivative whose sums along paths are in float32, divided
        by the largest derivative."""
        error = most = 0.0
        for lattice in self.lattices:
            _, derivatives = oracle.of_parts(lattice.parts, topology, np.float32)
            error = max(error, largest(derivatives - lattice.derivatives))
            most = max(most, largest(lattice.derivatives))
        return error / max(most, rounding.TINY)

    def allowed(self, adapter: Adapter, dtype: str, places: float = rounding.PLACES) -> Allowed:
        """Return the largest errors of a right loss; `places` as in rounding.allowed."""
        return rounding.allowed(
            dtype,
            self.shapes,
            self.score,
            float(self.right_of_utterances.abs().max()),
            right=float(self.rights.abs().max()),
            largest=max(leaf.largest for leaf in self.errors.leaves.values()),
            places=places,
            negligible=adapter.negligible,
        )


def ask(
    ready: Ready, scope: str, factors: Factors | None = None, run: Run = run_together
) -> Answer:
    """Run steps, and return their losses and gradients compared with the oracle's.

    Gradients are not compared where a loss is infinite.

    Args:
        ready: returns the adapter, the joiner and the steps, with the same numbers each time; it is
            called again in scope "loss", and where the loss wrote over an input.
        scope: the scope of the steps that `ready` returns.
        factors: what the loss of each step is multiplied by before backward, as in `Factors`; None:
            1 for all steps.
        run: runs the steps, and returns their losses.
    """
    adapter, model, steps = ready()
    factors = factors or [ONE] * len(steps)
    before = [fingerprints(step.inputs()) for step in steps]
    losses = run(steps, factors)
    overwritten: set[str] = set()
    for step, digests in zip(steps, before):
        overwritten.update(changed(digests, step.inputs()))
    computed = [step.gradients() for step in steps]
    # The oracle needs the inputs as they were.  In scope "loss" some losses may write over the
    # logits, which are not among the `inputs` of these.
    if scope == "loss" or overwritten:
        steps.clear()  # they hold as much memory as the new ones will
        _, model, steps = ready()
        for step, gradients in zip(steps, computed):
            step.computed = gradients
    right = Right(adapter, model, scope, steps, factors)
    right.solve()
    errors = Errors(adapter)
    if torch.cat(right.losses).isfinite().all():
        right.compare(errors)
        for step, gradients in zip(steps, computed):
            errors.note_padding(step.batch.shapes, gradients)
    # A step returns the losses of its utterances, or their sum.
    rights = [
        expected if loss.numel() > 1 else expected.sum()
        for loss, expected in zip(losses, right.losses)
    ]
    return Answer(
        shapes=[shape for step in steps for shape in step.batch.shapes],
        score=right.score,
        losses=torch.cat([loss.cpu().double().reshape(-1) for loss in losses]),
        rights=torch.cat([loss.reshape(-1) for loss in rights]),
        right_of_utterances=torch.cat(right.losses),
        # Only checks that ask with a single step read the lattices.
        lattices=right.lattices[0],
        errors=errors,
        overwritten=sorted(overwritten),
        computed={"loss": losses[-1], **computed[-1]},
    )


class Judged(NamedTuple):
    """Hold an error, and the limits above which it is wrong, or imprecise."""

    what: str  # what is off, in words
    error: float
    limit: float  # wrong above it
    precise: float = math.inf  # imprecise above it
    leaf: str = ""  # the leaf whose gradient it is of, "" for the loss


def judge(answer: Answer, limits: Allowed) -> list[Judged]:
    """Return every error of an answer beside its limit.

    Sums over the logits' gradient (SUMMED) above `limits.sums` are wrong.  So are sums over a row
    of another leaf above `limits.rows`; above `limits.sums` these are imprecise."""
    judged = [Judged("loss", answer.loss_error, limits.loss, limits.precise_loss)]
    for name, leaf in answer.errors.leaves.items():
        what = gradient_of(name)
        by_a_factor = abs(leaf.factor - 1)
        judged += [
            Judged(what, leaf.error, limits.gradient, limits.precise_gradient, leaf=name),
            Judged(f"{what} by a factor", by_a_factor, limits.slope, leaf=name),
        ]
    for name, error in answer.errors.sums.items():
        if name in SUMMED:  # "given": the leaf of the logits
            judged.append(Judged(f"{SUMMED[name]} in sum", error, limits.sums, leaf="given"))
        else:
            what = f"a row of the {gradient_of(name)} in sum"
            judged.append(Judged(what, error, limits.rows, precise=limits.sums, leaf=name))
    return judged


def failing(answer: Answer, limits: Allowed) -> list[Judged]:
    """Return the errors above their limits: those of the loss first, then those of the leaf that is
    furthest off, and so on."""

    def order(line: Judged) -> float:
        # By how far its leaf is off, not by this error: those of a leaf stay together.
        return -finite(answer.errors.leaves[line.leaf].error) if line.leaf else -math.inf

    wrong = [line for line in judge(answer, limits) if not line.error <= line.limit]  # NaN too
    return sorted(wrong, key=order)


def gradient_of(name: str) -> str:
    """Return what the gradient of a leaf is called: "gradient" alone for that of the logits."""
    return "gradient" if name == "given" else f"gradient of {name}"
