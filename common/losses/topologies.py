"""Define the lattices of the transducer family, the arcs that leave a cell, and compute their loss
in plain PyTorch.

A lattice has cells (t, u): t frames are read and u targets are written.  A path starts at (0, 0)
and ends at (T, U).  A topology is its arcs, each with the frames `dt` and targets `du` that it goes
ahead, and a log-weight at each cell.  The weights are made in two steps, so that a large batch can
be judged some frames at a time:

1. `Topology.parts`: log-probabilities of one cell from its own outputs; the first is of blank, the
   second of the next target, the others are what the topology adds (durations, longer blanks).
2. `Topology.arcs`: arcs of a whole utterance from the parts of its cells.

The float64 oracle, `transducer_loss` and the conformance cases read this table.  A new topology is
one entry with its arcs; see CONTRIBUTING.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid, pad

from rnnt_bench.core.implementations import DURATIONS, durations_of

#: Frames and targets of utterances.
Lengths = tuple[torch.Tensor, torch.Tensor]
#: Used for log 0 in sums that must stay finite, so that no gradient is inf - inf.
LOG_ZERO = -1e30


class Arc(NamedTuple):
    """An arc from every cell, `dt` frames and `du` targets (0 or 1) ahead."""

    dt: int
    du: int
    # (..., T, U+1) log-weights from (t, u), -inf where not allowed; beyond the lattice anything
    weight: torch.Tensor


@dataclass(frozen=True)
class Topology:
    """The lattice of Graves (2012), and the base of the others."""

    name: str = "regular"  # as --topology takes it
    source: str = "arXiv 1211.3711"  # paper or package that defines it
    # tdt: frames of each column of durations; multi-blank: of each longer blank
    durations: tuple[int, ...] = ()
    # is subtracted from the log-probability of each token (logit under-normalisation)
    sigma: float = 0.0
    penalty: float = 0.0  # delay-penalty: the bonus of a target a frame earlier
    window: int = 0  # windowed: frames at which a target may be emitted

    @property
    def extra(self) -> int:
        """Return the number of columns that the joiner has after the V symbols."""
        return 0

    def log_probs(self, logits: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the log-probabilities (..., V) of all symbols, of a lattice without further
        outputs."""
        return logits.log_softmax(-1)

    def parts(self, logits: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the log-probabilities (..., P) of cells: of blank, of the next target, then what
        the topology adds.

        logits: (..., V + extra), unnormalised; target: (...) int64, the next target of each cell,
        or any symbol.
        """
        return chosen(self.log_probs(logits, blank), target, blank)

    def columns(self, target: torch.Tensor, blank: int, width: int) -> torch.Tensor:
        """Return the column (..., P) of each part of `parts`.  width: V + extra."""
        symbols = torch.stack([torch.full_like(target, blank), target], -1)
        added = torch.arange(width - self.extra, width, device=target.device).expand(
            *target.shape, self.extra
        )
        return torch.cat([symbols, added], -1)

    def posterior(self, derivatives: torch.Tensor) -> torch.Tensor:
        """Return the posterior probability (...) of cells from the derivatives (..., P) of their
        parts."""
        return derivatives[..., :2].sum(-1)

    def arcs(self, parts: torch.Tensor, lengths: Lengths | None = None) -> list[Arc]:
        """Return the arcs of utterances from the parts (..., T, U+1, P) of their cells.

        lengths: (...) the numbers of frames and of targets of each utterance of a padded batch;
        None: T and U.
        """
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(0, 1, label)]


def chosen(log_probs: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
    """Return the log-probabilities (..., 2) of blank and of the target of each cell."""
    return torch.stack(
        [log_probs[..., blank], log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)], -1
    )


def next_targets(targets: torch.Tensor, T: int, U1: int) -> torch.Tensor:
    """Return the next target (N, T, U+1) int64 of each cell, 0 after the last; targets (N, at least
    U)."""
    return pad(targets[:, : U1 - 1].long(), (0, 1)).unsqueeze(1).expand(len(targets), T, U1)


def times(weight: torch.Tensor, lengths: Lengths | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frame (T, 1) of each cell of (..., T, U+1) weights, and the number of frames (...,
    1, 1)."""
    T = weight.size(-2)
    t = torch.arange(T, device=weight.device).unsqueeze(-1)
    return t, torch.tensor(T, device=weight.device) if lengths is None else lengths[0].view(
        *lengths[0].shape, 1, 1
    )


class Modified(Topology):
    """A target leads to the next frame, as blank does, so a frame has at most one symbol."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(1, 1, label)]


class ModifiedLastBlank(Modified):
    """The modified lattice, with paths that end with a blank."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, lengths)
        return [Arc(1, 0, blank), Arc(1, 1, label.masked_fill(t >= T - 1, -math.inf))]


class Constrained(Topology):
    """A target leads to the next frame together with the blank that follows it on its own frame."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(1, 1, label + pad(blank[..., 1:], (0, 1), value=-math.inf))]


class TokenAndDuration(Topology):
    """Every token goes a predicted number of frames ahead; a blank goes at least one, and the last
    one ends on T."""

    @property
    def extra(self):
        return len(self.durations)

    def parts(self, logits, target, blank):
        tokens, durations = logits.split([logits.size(-1) - self.extra, self.extra], -1)
        return torch.cat(
            [chosen(tokens.log_softmax(-1) - self.sigma, target, blank), durations.log_softmax(-1)],
            -1,
        )

    def arcs(self, parts, lengths=None):
        blank, label, *lasting = parts.unbind(-1)
        t, T = times(label, lengths)
        result = []
        for duration, weight in zip(self.durations, lasting):
            if duration > 0:
                result.append(Arc(duration, 0, blank + weight))
            # the last symbol of a path is a blank, so a target stays before frame T
            result.append(
                Arc(duration, 1, (label + weight).masked_fill(t + duration >= T, -math.inf))
            )
        return result


class MultiBlank(Topology):
    """Further blanks, in the same softmax, go several frames ahead."""

    @property
    def extra(self):
        return len(self.durations)

    def parts(self, logits, target, blank):
        log_probs = logits.log_softmax(-1) - self.sigma
        return torch.cat(
            [chosen(log_probs, target, blank), log_probs[..., log_probs.size(-1) - self.extra :]],
            -1,
        )

    def posterior(self, derivatives):
        return derivatives.sum(-1)

    def arcs(self, parts, lengths=None):
        blank, label, *longer = parts.unbind(-1)
        several = [Arc(duration, 0, weight) for duration, weight in zip(self.durations, longer)]
        return [Arc(1, 0, blank), Arc(0, 1, label), *several]


class HybridAutoregressive(Topology):
    """Blank has a sigmoid of its own, and the labels share the rest by a softmax without blank's
    column."""

    def log_probs(self, logits, blank):
        of_blank = logits[..., blank : blank + 1]
        column = torch.arange(logits.size(-1), device=logits.device) == blank
        labels = logits.masked_fill(column, -math.inf).log_softmax(-1) + logsigmoid(-of_blank)
        return torch.where(column, logsigmoid(of_blank), labels)


class DelayPenalty(Topology):
    """A target at frame t gets penalty * ((T - 1) / 2 - t), so that early ones are preferred."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, lengths)
        return [
            Arc(1, 0, blank),
            Arc(0, 1, label + self.penalty * ((T.to(label.dtype) - 1) / 2 - t)),
        ]


class Windowed(Topology):
    """A target is emitted within a window of frames around its place in an even alignment."""

    def windows(self, T_lengths: torch.Tensor, U_lengths: torch.Tensor, U: int) -> torch.Tensor:
        """Return the first and last frame (..., U, 2) of each target of utterances (...)."""
        T_lengths, U_lengths = (
            T_lengths.long().unsqueeze(-1),
            U_lengths.long().clamp(min=1).unsqueeze(-1),
        )
        u = torch.arange(U, device=T_lengths.device)
        first = (2 * u + 1) * T_lengths // (2 * U_lengths) - self.window // 2
        return torch.stack(
            [first.clamp(min=0), (first + self.window - 1).minimum(T_lengths - 1)], -1
        )

    def outside(
        self, T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return whether each cell (..., T, U+1) has a target and is outside its window."""
        first, last = self.windows(T_lengths, U_lengths, U1).unsqueeze(-3).unbind(-1)
        t, u = (torch.arange(size, device=first.device) for size in (T, U1))
        return ((t.unsqueeze(-1) < first) | (t.unsqueeze(-1) > last)) & (
            u < U_lengths.view(*U_lengths.shape, 1, 1)
        )

    def masked(self, log_probs, targets, T_lengths, U_lengths):
        """Return the log-probabilities (N, T, U+1, V) with log 0 for each cell's target outside its
        window."""
        _, T, U1, _ = log_probs.shape
        column = next_targets(targets, T, U1).unsqueeze(-1)
        outside = self.outside(T, U1, T_lengths, U_lengths).unsqueeze(-1)
        log_zero = max(LOG_ZERO, torch.finfo(log_probs.dtype).min / 2)
        return log_probs.scatter(
            -1, column, log_probs.gather(-1, column).masked_fill(outside, log_zero)
        )

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        T, U1 = label.shape[-2:]
        T_lengths, U_lengths = lengths or (
            torch.tensor(size, device=label.device) for size in (T, U1 - 1)
        )
        return [
            Arc(1, 0, blank),
            Arc(0, 1, label.masked_fill(self.outside(T, U1, T_lengths, U_lengths), -math.inf)),
        ]


#: By name, with the parameters that papers and recipes use.
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology(),
        Modified("modified", "k2 and fast_rnnt, rnnt_type"),
        ModifiedLastBlank("modified-last-blank", "optimized_transducer, one_sym_per_frame"),
        Constrained("constrained", "k2 and fast_rnnt, rnnt_type"),
        TokenAndDuration("tdt", "arXiv 2304.06795", durations=DURATIONS["tdt"], sigma=0.05),
        MultiBlank(
            "multi-blank", "arXiv 2211.03541", durations=DURATIONS["multi-blank"], sigma=0.05
        ),
        HybridAutoregressive("hat", "arXiv 2003.07705"),
        DelayPenalty("delay-penalty", "arXiv 2211.00490", penalty=0.01),
        Windowed("windowed", "arXiv 2011.03072", window=25),
    )
}
REGULAR = TOPOLOGIES["regular"]


def of(
    name: str, durations: str | None = None, sigma: float | None = None, window: int = 25
) -> Topology:
    """Return a lattice with the durations ("0,1,2"), sigma and window of a run, where it has any;
    None: its own."""
    topology = TOPOLOGIES[name]
    if topology.window:
        return replace(topology, window=window)
    if not topology.durations:
        return topology
    return replace(
        topology,
        durations=durations_of(name, durations),
        sigma=topology.sigma if sigma is None else sigma,
    )


def transducer_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return -log Pr(y | x) of each utterance, (N,), or their "mean" or "sum", on any lattice;
    twice differentiable.

    Graves 2012, section 2.4, forward variables only; autograd makes the gradient.  The cells of an
    anti-diagonal t + u = d depend only on those before, so one step computes a diagonal of every
    utterance, in T + U steps.  It is readable, not fast: it keeps several copies of the logits.
    float16 and bfloat16 are summed in float32.

    Cells outside an utterance's T_i x (U_i+1) may hold anything and get zero gradient.  If no path
    is possible the loss is infinite, with zero gradient.  Raises ValueError for lengths over the
    tensor, for targets that are no symbol, and for another reduction.

    Args:
        logits: (N, T, U+1, V + topology.extra) of any float dtype, unnormalised.
        targets: (N, U) integers in [0, V) without `blank`.
        logit_lengths, target_lengths: (N,) integers, T_i >= 1 and U_i >= 0.
        reduction: "none", "mean" or "sum".
    """
    N, T, U1, _ = logits.shape
    T_lengths, U_lengths = logit_lengths.long(), target_lengths.long()
    if N and not (
        1 <= T_lengths.min()
        and T_lengths.max() <= T
        and 0 <= U_lengths.min()
        and U_lengths.max() < U1
    ):
        raise ValueError(
            f"lengths must be within the logits: 1 to {T} frames and 0 to {U1 - 1} targets"
        )
    V = logits.size(-1) - topology.extra
    # gather would take a column that is no symbol
    if topology.extra and targets.numel() and targets.max() >= V:
        raise ValueError(f"targets must be below V = {V}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")
    outside = _outside(T, U1, T_lengths, U_lengths)
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    inside = logits.masked_fill(outside.unsqueeze(-1), 0).to(dtype)
    arcs = topology.arcs(
        topology.parts(inside, next_targets(targets, T, U1), blank), (T_lengths, U_lengths)
    )
    losses = _losses(arcs, outside, T_lengths, U_lengths)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def arc_losses(
    blank_arc: torch.Tensor,
    label_arc: torch.Tensor,
    T_lengths: torch.Tensor,
    U_lengths: torch.Tensor,
) -> torch.Tensor:
    """Return the losses (N,) of the log-probabilities (N, T, U+1) of blank and of the next target
    at each cell.

    Cells outside an utterance may hold anything.  The gradients are contiguous, which kernels of
    packages expect.
    """
    T_lengths, U_lengths = T_lengths.long(), U_lengths.long()
    _, T, U1 = blank_arc.shape
    outside = _outside(T, U1, T_lengths, U_lengths)
    return _losses([Arc(1, 0, blank_arc), Arc(0, 1, label_arc)], outside, T_lengths, U_lengths)


def _outside(T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each cell (N, T, U+1) is outside its utterance's T_i x (U_i+1)."""
    t, u = (
        torch.arange(T, device=T_lengths.device).view(T, 1),
        torch.arange(U1, device=T_lengths.device),
    )
    return (t >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))


def _losses(
    arcs: Sequence[Arc], outside: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor
):
    """Return the losses (N,) of utterances from their arcs."""
    N, T, U1 = outside.shape
    # by diagonal: element (d, u) of (N, T+U, U+1) is that of cell (d - u, u), LOG_ZERO outside
    t = torch.arange(T + U1 - 1, device=outside.device).view(-1, 1) - torch.arange(
        U1, device=outside.device
    )
    inside = (arc.weight.clamp(min=LOG_ZERO).masked_fill(outside, LOG_ZERO) for arc in arcs)
    skewed = (weight.gather(1, t.clamp(0, T - 1).expand(N, -1, -1)) for weight in inside)
    # unbind: the backward of indexing one diagonal would write zeros for all the others, each time
    weights = [weight.masked_fill((t < 0) | (t >= T), LOG_ZERO).unbind(1) for weight in skewed]
    alpha = arcs[0].weight.new_full((N, U1), LOG_ZERO)
    alpha[:, 0] = 0
    alphas: list[torch.Tensor] = [alpha]
    for d in range(1, T + U1):
        reached = []
        for (dt, du, _), weight in zip(arcs, weights):
            before = d - dt - du
            if before >= 0:
                moved = alphas[before] + weight[before]
                reached.append(pad(moved[:, : U1 - du], (du, 0), value=LOG_ZERO))
        alphas.append(
            torch.stack(reached).logsumexp(0) if reached else torch.full_like(alpha, LOG_ZERO)
        )
    # logsumexp: the second derivative of logaddexp would be inf / inf for two numbers that are log
    # 0
    losses = -torch.stack(alphas, 1)[
        torch.arange(N, device=alpha.device), T_lengths + U_lengths, U_lengths
    ]
    return losses.masked_fill(losses > -LOG_ZERO / 2, math.inf)  # no path
