"""Define the lattices of the transducer family, and compute their loss in plain PyTorch.

A lattice has cells (t, u): t frames are read and u targets are written.  A path starts at (0, 0)
and ends at (T, U).  A topology is the list of arcs that leave a cell.  An arc goes `dt` frames and
`du` targets ahead, and has a log-weight at each cell.  The weights are made in two steps, so that a
large batch can be judged some frames at a time:

1. `Topology.parts` makes P log-probabilities of each cell from the outputs of this cell alone.  Part
   0 is of blank and part 1 of the next target.  The others are what the topology adds (durations,
   longer blanks).
2. `Topology.arcs` makes the arcs of a whole utterance from the parts of its cells.

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

#: (numbers of frames, numbers of targets) of utterances: two integer tensors of one shape (...).
Lengths = tuple[torch.Tensor, torch.Tensor]
#: Stands for log 0 in sums that must stay finite, so that no gradient is inf - inf.
LOG_ZERO = -1e30


class Arc(NamedTuple):
    """Describe an arc that leaves every cell, `dt` frames and `du` targets (0 or 1) ahead.

    Its weight is a log-weight (..., T, U+1) at each cell, -inf where the arc is not allowed.  Where
    the arc leads out of the lattice its weight may be anything.
    """

    dt: int
    du: int
    weight: torch.Tensor


@dataclass(frozen=True)
class Topology:
    """The lattice of Graves (2012), and the base of the others."""

    name: str = "regular"  # as --topology takes it
    source: str = "arXiv 1211.3711"  # paper or package that defines it
    # tdt: the frames that each duration goes ahead; multi-blank: those of each longer blank
    durations: tuple[int, ...] = ()
    # subtracted from the log-probability of each token (logit under-normalisation)
    sigma: float = 0.0
    penalty: float = 0.0  # delay-penalty: what a target gains for each frame that it is earlier
    window: int = 0  # windowed: the number of frames at which a target may be emitted

    @property
    def extra(self) -> int:
        """Return the number of outputs that the joiner has after the V symbols."""
        return len(self.durations)

    def split(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns (..., V) of the symbols and those (..., extra) after them."""
        symbols, added = outputs.split([outputs.size(-1) - self.extra, self.extra], -1)
        return symbols, added

    def log_probs(self, logits: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the log-probabilities (..., V) of all symbols.

        Only for a topology without outputs after the symbols."""
        return logits.log_softmax(-1)

    def parts(self, logits: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the P log-probabilities (..., P) of each cell from its logits.

        Args:
            logits: (..., V + extra), unnormalised.
            target: (...) int64, the next target of each cell; any symbol in cells without one.
        """
        return chosen(self.log_probs(logits, blank), target, blank)

    def columns(self, target: torch.Tensor, blank: int, width: int) -> torch.Tensor:
        """Return (..., P): for each of the P parts of a cell the column of the logits from which
        `parts` takes the log-probability.

        Args:
            target: (...) int64, the next target of each cell.
            width: V + extra.
        """
        symbols = torch.stack([torch.full_like(target, blank), target], -1)
        added = torch.arange(width - self.extra, width, device=target.device)
        return torch.cat([symbols, added.expand(*target.shape, self.extra)], -1)

    def posterior(self, derivatives: torch.Tensor) -> torch.Tensor:
        """Return the posterior probability (...) of each cell from the derivatives (..., P) of its
        parts.

        It is the sum over the parts of blank and target, since every arc has one of the two.  The
        parts of durations are left out: they would count the same arcs again.  An arc of
        `Constrained` that takes a target has both, and counts at the cells of both."""
        return derivatives[..., :2].sum(-1)

    def arcs(self, parts: torch.Tensor, lengths: Lengths | None = None) -> list[Arc]:
        """Return the arcs of utterances from the parts (..., T, U+1, P) of their cells.

        lengths: of the utterances of a padded batch; None if there is no padding.
        """
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(0, 1, label)]


def chosen(log_probs: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
    """Return the log-probabilities (..., 2) of blank and of the target of each cell.

    log_probs: (..., V); target: (...), a symbol for each cell; blank: the blank's number."""
    return torch.stack(
        [log_probs[..., blank], log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)], -1
    )


def next_targets(targets: torch.Tensor, T: int, U1: int) -> torch.Tensor:
    """Return the next target (N, T, U+1) int64 of each cell, 0 where all targets are written.

    targets: (N, U) integers, or more columns, which are cut."""
    return pad(targets[:, : U1 - 1].long(), (0, 1)).unsqueeze(1).expand(len(targets), T, U1)


def full_lengths(weight: torch.Tensor) -> Lengths:
    """Return the lengths of utterances without padding: the tensors T and U, each of shape ().

    weight: (..., T, U+1), a number for each cell."""
    T, U1 = (torch.tensor(size, device=weight.device) for size in weight.shape[-2:])
    return T, U1 - 1


def times(weight: torch.Tensor, lengths: Lengths | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frame (T, 1) of each cell of weights (..., T, U+1), and the number of frames (...,
    1, 1) of each utterance."""
    t = torch.arange(weight.size(-2), device=weight.device).unsqueeze(-1)
    T_lengths, _ = lengths or full_lengths(weight)
    return t, T_lengths[..., None, None]


class Modified(Topology):
    """The lattice in which a target leads to the next frame, as blank does.

    So a frame has at most one symbol."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(1, 1, label)]


class ModifiedLastBlank(Modified):
    """The modified lattice whose paths end with a blank: the last frame emits no target."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, lengths)
        return [Arc(1, 0, blank), Arc(1, 1, label.masked_fill(t >= T - 1, -math.inf))]


class Constrained(Topology):
    """The lattice in which a target is followed by a blank on its own frame.

    One arc takes target and blank, and leads to the next frame."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        # The blank after the target is that of cell (t, u+1).  The last u has no target, so -inf.
        next_blank = pad(blank[..., 1:], (0, 1), value=-math.inf)
        return [Arc(1, 0, blank), Arc(1, 1, label + next_blank)]


class TokenAndDuration(Topology):
    """The lattice of tokens and durations: a token goes the predicted number of frames ahead.

    A blank goes at least one frame ahead, and the last symbol of a path is a blank that ends on T.
    """

    def parts(self, logits, target, blank):
        tokens, durations = self.split(logits)
        log_probs = tokens.log_softmax(-1) - self.sigma
        return torch.cat([chosen(log_probs, target, blank), durations.log_softmax(-1)], -1)

    def arcs(self, parts, lengths=None):
        blank, label, *durations = parts.unbind(-1)
        t, T = times(label, lengths)
        result = []
        for dt, weight in zip(self.durations, durations):
            if dt > 0:  # a blank of duration 0 would lead back to its own cell
                result.append(Arc(dt, 0, blank + weight))
            # A path ends with a blank, so a target must lead to a frame before T.
            result.append(Arc(dt, 1, (label + weight).masked_fill(t + dt >= T, -math.inf)))
        return result


class MultiBlank(Topology):
    """The lattice with longer blanks, which go several frames ahead; all symbols share one
    softmax."""

    def parts(self, logits, target, blank):
        log_probs = logits.log_softmax(-1) - self.sigma
        _, longer_blanks = self.split(log_probs)
        return torch.cat([chosen(log_probs, target, blank), longer_blanks], -1)

    def posterior(self, derivatives):
        return derivatives.sum(-1)  # each part is of arcs of its own

    def arcs(self, parts, lengths=None):
        blank, label, *longer_blanks = parts.unbind(-1)
        longer = [Arc(dt, 0, weight) for dt, weight in zip(self.durations, longer_blanks)]
        return [Arc(1, 0, blank), Arc(0, 1, label), *longer]


class HybridAutoregressive(Topology):
    """The lattice of a hybrid autoregressive transducer (HAT): blank has a sigmoid of its own.

    The labels share the rest of the probability by a softmax without blank's logit."""

    def log_probs(self, logits, blank):
        blank_logit = logits[..., blank : blank + 1]
        is_blank = torch.arange(logits.size(-1), device=logits.device) == blank
        labels = logits.masked_fill(is_blank, -math.inf).log_softmax(-1) + logsigmoid(-blank_logit)
        return torch.where(is_blank, logsigmoid(blank_logit), labels)


class DelayPenalty(Topology):
    """The lattice that prefers early targets: one at frame t gains penalty * ((T - 1) / 2 - t)."""

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, lengths)
        middle = (T.to(label.dtype) - 1) / 2
        return [Arc(1, 0, blank), Arc(0, 1, label + self.penalty * (middle - t))]


class Windowed(Topology):
    """The lattice in which each target has a window of frames around its place in an even
    alignment, and is emitted within it."""

    def windows(self, T_lengths: torch.Tensor, U_lengths: torch.Tensor, U: int) -> torch.Tensor:
        """Return the first and the last frame (..., U, 2) of the windows of U targets.

        T_lengths, U_lengths: (...) integers of each utterance."""
        T_lengths = T_lengths.long().unsqueeze(-1)
        U_lengths = U_lengths.long().clamp(min=1).unsqueeze(-1)  # not 0: it divides
        u = torch.arange(U, device=T_lengths.device)
        # The middle of target u's share of T / U frames, less half a window.
        first = (2 * u + 1) * T_lengths // (2 * U_lengths) - self.window // 2
        last = (first + self.window - 1).minimum(T_lengths - 1)
        return torch.stack([first.clamp(min=0), last], -1)

    def outside_window(
        self, T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return whether each cell (..., T, U+1) has a next target that may not be emitted there."""
        # (..., 1, U+1) each, beside the frames t (T, 1).
        first, last = self.windows(T_lengths, U_lengths, U1).unsqueeze(-3).unbind(-1)
        t = torch.arange(T, device=first.device).unsqueeze(-1)
        has_target = torch.arange(U1, device=first.device) < U_lengths[..., None, None]
        return has_target & ((t < first) | (t > last))

    def masked(self, log_probs, targets, T_lengths, U_lengths):
        """Return log-probabilities (N, T, U+1, V); that of a target outside its window is LOG_ZERO.

        It is for a loss that has no windows.  In a dtype that cannot hold LOG_ZERO it is half of the
        lowest number.
        """
        _, T, U1, _ = log_probs.shape
        column = next_targets(targets, T, U1).unsqueeze(-1)
        outside_window = self.outside_window(T, U1, T_lengths, U_lengths).unsqueeze(-1)
        log_zero = max(LOG_ZERO, torch.finfo(log_probs.dtype).min / 2)
        labels = log_probs.gather(-1, column).masked_fill(outside_window, log_zero)
        return log_probs.scatter(-1, column, labels)

    def arcs(self, parts, lengths=None):
        blank, label = parts.unbind(-1)
        T, U1 = label.shape[-2:]
        outside_window = self.outside_window(T, U1, *(lengths or full_lengths(label)))
        return [Arc(1, 0, blank), Arc(0, 1, label.masked_fill(outside_window, -math.inf))]


#: The topologies by name, with the parameters that papers and recipes use.
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
    """Return the topology of this name in TOPOLOGIES, with the parameters of a run.

    A parameter that the topology does not have is ignored.

    Args:
        durations: as the flag --durations takes them ("0,1,2"); None for those of TOPOLOGIES.
        sigma: None for that of TOPOLOGIES.
        window: number of frames at which a target may be emitted.
    """
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
    """Return -log Pr(y | x) of each utterance, (N,), or their "mean" or "sum", on any lattice.

    It computes the forward variables of Graves 2012, section 2.4, and autograd makes the gradient,
    which is differentiable too.  The cells of an anti-diagonal t + u = d depend only on earlier
    diagonals.  So one step computes a diagonal of every utterance, and T + U steps compute all.
    The code is readable, not fast: it keeps several copies of the logits.  float16 and bfloat16 are
    summed in float32.

    Cells outside an utterance's T_i x (U_i+1) may hold anything and get zero gradient.  If no path
    is possible the loss is infinite, with zero gradient.  Raises ValueError for lengths that are
    not within the logits, for another reduction, and for targets of V or more on a topology with
    `extra` outputs.  Other targets that are no symbol raise what torch.gather raises.

    Args:
        logits: (N, T, U+1, V + topology.extra) of any float dtype, unnormalised.
        targets: (N, U) integers in [0, V) without `blank`.
        logit_lengths, target_lengths: (N,) integers, T_i >= 1 and U_i >= 0.
        blank: the symbol of the blank.
        reduction: "none", "mean" or "sum".
    """
    N, T, U1, _ = logits.shape
    T_lengths = logit_lengths.long()
    U_lengths = target_lengths.long()
    has_wrong_T = (T_lengths < 1) | (T_lengths > T)
    has_wrong_U = (U_lengths < 0) | (U_lengths >= U1)
    if (has_wrong_T | has_wrong_U).any():
        raise ValueError(
            f"lengths must be within the logits: 1 to {T} frames and 0 to {U1 - 1} targets"
        )
    V = logits.size(-1) - topology.extra
    # `gather` would accept such a target and take a column of durations.
    if topology.extra and (targets >= V).any():
        raise ValueError(f"targets must be below V = {V}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")
    outside = _outside(T, U1, T_lengths, U_lengths)
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    inside = logits.masked_fill(outside.unsqueeze(-1), 0).to(dtype)
    parts = topology.parts(inside, next_targets(targets, T, U1), blank)
    losses = _losses(topology.arcs(parts, (T_lengths, U_lengths)), outside, T_lengths, U_lengths)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def arc_losses(
    blank_arc: torch.Tensor,
    label_arc: torch.Tensor,
    T_lengths: torch.Tensor,
    U_lengths: torch.Tensor,
) -> torch.Tensor:
    """Return the losses (N,) on the regular lattice from log-probabilities (N, T, U+1).

    Args:
        blank_arc, label_arc: log-probabilities of blank and of the next target at each cell; cells
          outside an utterance may hold anything.  Their gradients are contiguous, which kernels of
          packages expect.
        T_lengths, U_lengths: (N,) integers.
    """
    T_lengths = T_lengths.long()
    U_lengths = U_lengths.long()
    _, T, U1 = blank_arc.shape
    outside = _outside(T, U1, T_lengths, U_lengths)
    return _losses([Arc(1, 0, blank_arc), Arc(0, 1, label_arc)], outside, T_lengths, U_lengths)


def _outside(T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each cell (N, T, U+1) is outside its utterance's T_i x (U_i+1)."""
    t = torch.arange(T, device=T_lengths.device).unsqueeze(-1)
    u = torch.arange(U1, device=T_lengths.device)
    return (t >= T_lengths[:, None, None]) | (u > U_lengths[:, None, None])


def _diagonals(weight: torch.Tensor, outside: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the anti-diagonals d = 0 ... T+U-1 of an arc's weight (N, T, U+1), each (N, U+1).

    Element u of diagonal d is the weight of cell (d - u, u), LOG_ZERO where there is no such cell
    or the utterance does not have it.

    outside: (N, T, U+1) bool, the cells of the padding."""
    N, T, U1 = weight.shape
    u = torch.arange(U1, device=weight.device)
    t = torch.arange(T + U1 - 1, device=weight.device).unsqueeze(-1) - u
    inside = weight.clamp(min=LOG_ZERO).masked_fill(outside, LOG_ZERO)
    skewed = inside.gather(1, t.clamp(0, T - 1).expand(N, -1, -1))
    # The backward of indexing one diagonal would write zeros for all others; that of unbind does
    # not.
    return skewed.masked_fill((t < 0) | (t >= T), LOG_ZERO).unbind(1)


def _losses(
    arcs: Sequence[Arc], outside: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor
):
    """Return the losses (N,) of utterances from their arcs; infinite where there is no path.

    With alpha(0, 0) = 0, alpha(t, u) is the logsumexp, over the arcs that end there, of
    alpha(t - dt, u - du) + weight(t - dt, u - du).  This computes a diagonal t + u = d at a time,
    from those at d - dt - du.  The loss is -alpha(T_i, U_i), at the cell behind the last frame.

    outside: (N, T, U+1) bool, the cells of the padding."""
    N, T, U1 = outside.shape
    weights = [_diagonals(arc.weight, outside) for arc in arcs]
    start = arcs[0].weight.new_full((N, U1), LOG_ZERO)
    start[:, 0] = 0
    alphas = [start]  # by diagonal: the log-probability of reaching each of its cells
    for d in range(1, T + U1):
        reached = []
        for arc, weight in zip(arcs, weights):
            before = d - arc.dt - arc.du
            if before >= 0:
                ahead = alphas[before] + weight[before]  # by the u where the arc begins
                reached.append(pad(ahead[:, : U1 - arc.du], (arc.du, 0), value=LOG_ZERO))
        if reached:
            # The second derivative of logaddexp would be inf / inf where both numbers are log 0.
            alphas.append(torch.stack(reached).logsumexp(0))
        else:
            alphas.append(torch.full_like(start, LOG_ZERO))
    n = torch.arange(N, device=start.device)
    losses = -torch.stack(alphas, 1)[n, T_lengths + U_lengths, U_lengths]
    # Without a path the loss is about -LOG_ZERO.
    return losses.masked_fill(losses > -LOG_ZERO / 2, math.inf)
