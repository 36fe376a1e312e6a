"""Define the lattices of the transducer family: the arcs that leave a cell, and their weights.

A lattice has cells (t, u): t frames are read and u targets are written.  A path starts at (0, 0) and ends at (T, U).  A
topology is its arcs, each with the frames `dt` and targets `du` that it goes ahead, and a log-weight at each cell.  The
weights are made in two steps, so that a large batch can be judged some frames at a time:

1. `Topology.parts`: log-probabilities of one cell from its own outputs; the first is of blank, the second of the next
   target, the others are what the topology adds (durations, longer blanks).
2. `Topology.arcs`: arcs of a whole utterance from the parts of its cells.

The float64 oracle, the reference in plain PyTorch and the conformance cases read this table.  A new topology is one
entry with its arcs; see CONTRIBUTING.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch.nn.functional import logsigmoid, pad

from common.core.implementations import DURATIONS, durations_of


class Arc(NamedTuple):
    """An arc from every cell, `dt` frames and `du` targets (0 or 1) ahead."""

    dt: int
    du: int
    weight: torch.Tensor  # (..., T, U+1) log-weights from (t, u), -inf where not allowed; beyond the lattice anything


@dataclass(frozen=True)
class Topology:
    """The lattice of Graves (2012), and the base of the others."""

    name: str = "regular"  # as --topology takes it
    source: str = "arXiv 1211.3711"  # paper or package that defines it
    durations: Tuple[int, ...] = ()  # tdt: frames of each column of durations; multi-blank: of each longer blank
    sigma: float = 0.0  # is subtracted from the log-probability of each token (logit under-normalisation)
    penalty: float = 0.0  # delay-penalty: the bonus of a target a frame earlier
    skip: float = 0.0  # star: log-weight of the arc that skips a frame

    @property
    def extra(self) -> int:
        """Return the number of columns that the joiner has after the V symbols."""
        return 0

    def log_probs(self, logits: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the log-probabilities (..., V) of all symbols, of a lattice without further outputs."""
        return logits.log_softmax(-1)

    def parts(self, logits: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
        """Return the log-probabilities (..., P) of cells: of blank, of the next target, then what the topology adds.

        logits: (..., V + extra), unnormalised; target: (...) int64, the next target of each cell, or any symbol.
        """
        return chosen(self.log_probs(logits, blank), target, blank)

    def columns(self, target: torch.Tensor, blank: int, width: int) -> torch.Tensor:
        """Return the column (..., P) of each part of `parts`.  width: V + extra."""
        symbols = torch.stack([torch.full_like(target, blank), target], -1)
        added = torch.arange(width - self.extra, width, device=target.device).expand(*target.shape, self.extra)
        return torch.cat([symbols, added], -1)

    def posterior(self, derivatives: torch.Tensor) -> torch.Tensor:
        """Return the posterior probability (...) of cells from the derivatives (..., P) of their parts."""
        return derivatives[..., :2].sum(-1)

    def arcs(self, parts: torch.Tensor, frames: Optional[torch.Tensor] = None) -> List[Arc]:
        """Return the arcs of utterances from the parts (..., T, U+1, P) of their cells.

        frames: (...) the number of frames of each utterance of a padded batch; None: T.
        """
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(0, 1, label)]


def chosen(log_probs: torch.Tensor, target: torch.Tensor, blank: int) -> torch.Tensor:
    """Return the log-probabilities (..., 2) of blank and of the target of each cell."""
    return torch.stack([log_probs[..., blank], log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)], -1)


def next_targets(targets: torch.Tensor, T: int, U1: int) -> torch.Tensor:
    """Return the next target (N, T, U+1) int64 of each cell, 0 after the last; targets (N, at least U)."""
    return pad(targets[:, : U1 - 1].long(), (0, 1)).unsqueeze(1).expand(len(targets), T, U1)


def times(weight: torch.Tensor, frames: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the frame (T, 1) of each cell of (..., T, U+1) weights, and the number of frames (..., 1, 1)."""
    T = weight.size(-2)
    t = torch.arange(T, device=weight.device).unsqueeze(-1)
    return t, torch.tensor(T, device=weight.device) if frames is None else frames.view(*frames.shape, 1, 1)


class Modified(Topology):
    """A target leads to the next frame, as blank does, so a frame has at most one symbol."""

    def arcs(self, parts, frames=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(1, 1, label)]


class ModifiedLastBlank(Modified):
    """The modified lattice, with paths that end with a blank."""

    def arcs(self, parts, frames=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, frames)
        return [Arc(1, 0, blank), Arc(1, 1, label.masked_fill(t >= T - 1, -math.inf))]


class Constrained(Topology):
    """A target leads to the next frame together with the blank that follows it on its own frame."""

    def arcs(self, parts, frames=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(1, 1, label + pad(blank[..., 1:], (0, 1), value=-math.inf))]


class TokenAndDuration(Topology):
    """Every token goes a predicted number of frames ahead; a blank goes at least one, and the last one ends on T."""

    @property
    def extra(self):
        return len(self.durations)

    def parts(self, logits, target, blank):
        tokens, durations = logits.split([logits.size(-1) - self.extra, self.extra], -1)
        return torch.cat([chosen(tokens.log_softmax(-1) - self.sigma, target, blank), durations.log_softmax(-1)], -1)

    def arcs(self, parts, frames=None):
        blank, label, *lasting = parts.unbind(-1)
        t, T = times(label, frames)
        result = []
        for duration, weight in zip(self.durations, lasting):
            if duration > 0:
                result.append(Arc(duration, 0, blank + weight))
            # the last symbol of a path is a blank, so a target stays before frame T
            result.append(Arc(duration, 1, (label + weight).masked_fill(t + duration >= T, -math.inf)))
        return result


class MultiBlank(Topology):
    """Further blanks, in the same softmax, go several frames ahead."""

    @property
    def extra(self):
        return len(self.durations)

    def parts(self, logits, target, blank):
        log_probs = logits.log_softmax(-1) - self.sigma
        return torch.cat([chosen(log_probs, target, blank), log_probs[..., log_probs.size(-1) - self.extra :]], -1)

    def posterior(self, derivatives):
        return derivatives.sum(-1)

    def arcs(self, parts, frames=None):
        blank, label, *longer = parts.unbind(-1)
        several = [Arc(duration, 0, weight) for duration, weight in zip(self.durations, longer)]
        return [Arc(1, 0, blank), Arc(0, 1, label), *several]


class HybridAutoregressive(Topology):
    """Blank has a sigmoid of its own, and the labels share the rest by a softmax without blank's column."""

    def log_probs(self, logits, blank):
        of_blank = logits[..., blank : blank + 1]
        column = torch.arange(logits.size(-1), device=logits.device) == blank
        labels = logits.masked_fill(column, -math.inf).log_softmax(-1) + logsigmoid(-of_blank)
        return torch.where(column, logsigmoid(of_blank), labels)


class Star(Topology):
    """A frame may be skipped at a constant weight, beside its blank."""

    def arcs(self, parts, frames=None):
        blank, label = parts.unbind(-1)
        return [Arc(1, 0, blank), Arc(0, 1, label), Arc(1, 0, torch.full_like(blank, self.skip))]


class DelayPenalty(Topology):
    """A target at frame t gets penalty * ((T - 1) / 2 - t), so that early ones are preferred."""

    def arcs(self, parts, frames=None):
        blank, label = parts.unbind(-1)
        t, T = times(label, frames)
        return [Arc(1, 0, blank), Arc(0, 1, label + self.penalty * ((T.to(label.dtype) - 1) / 2 - t))]


#: By name, with the parameters that papers and recipes use.
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology(),
        Modified("modified", "k2 and fast_rnnt, rnnt_type"),
        ModifiedLastBlank("modified-last-blank", "optimized_transducer, one_sym_per_frame"),
        Constrained("constrained", "k2 and fast_rnnt, rnnt_type"),
        TokenAndDuration("tdt", "arXiv 2304.06795", durations=DURATIONS["tdt"], sigma=0.05),
        MultiBlank("multi-blank", "arXiv 2211.03541", durations=DURATIONS["multi-blank"], sigma=0.05),
        HybridAutoregressive("hat", "arXiv 2003.07705"),
        Star("star", "arXiv 2303.10384 and artbataev/uol_final", skip=-5.0),
        DelayPenalty("delay-penalty", "arXiv 2211.00490", penalty=0.01),
    )
}


def of(name: str, durations: Optional[str] = None, sigma: Optional[float] = None) -> Topology:
    """Return a lattice with the durations ("0,1,2") and sigma of a run; None, and where it has none: its own."""
    topology = TOPOLOGIES[name]
    if not topology.durations:
        return topology
    return replace(topology, durations=durations_of(name, durations), sigma=topology.sigma if sigma is None else sigma)
