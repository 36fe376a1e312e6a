"""The backend that needs PyTorch alone: any device, slower than the others, the same numbers.

Tiles of cells go through activation, addmm and softmax; the lattice is walked by anti-diagonals over all utterances at
once.  How posteriors follow from alpha without beta is explained in csrc/lattice.h.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from fused_transducer.call import Call, accumulated

#: Activations and logits of a tile take so many bytes.
TILE_BYTES = 2**23


def unavailable(device_type: str, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used, or ""."""
    return ""


def rows(V: int) -> int:
    """Return how many numbers of each cell there are between forward and backward."""
    return 2


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 - s)


def _silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor) -> Tensor:
    return (1 + torch.erf(x * 0.5**0.5)) / 2 + x * torch.exp(-0.5 * x * x) * (0.5 / torch.pi) ** 0.5


class Activation(NamedTuple):
    """An elementwise function and its derivative, both of x."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


ACTIVATIONS = {
    "none": Activation(lambda x: x, torch.ones_like),
    "tanh": Activation(torch.tanh, lambda x: 1 - x.tanh().square()),
    "relu": Activation(torch.relu, lambda x: (x > 0).to(x.dtype)),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_slope),
    "silu": Activation(torch.nn.functional.silu, _silu_slope),
    "gelu": Activation(torch.nn.functional.gelu, _gelu_slope),
    "leaky_relu": Activation(torch.nn.functional.leaky_relu, lambda x: torch.full_like(x, 0.01).masked_fill_(x > 0, 1)),
    "snake": Activation(lambda x: x + x.sin().square(), lambda x: 1 + (2 * x).sin()),
}
#: Factors and bits of the hash of dropout's mask: csrc/activations.h has the same.
FACTORS, BITS = (0x21F0AAAD, 0xD35A2D97), 2**32 - 1


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of 32 bits of integers of 32 bits, in int64."""
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = (x ^ (x >> 15)) * FACTORS[1] & BITS
    return x ^ (x >> 15)


def dropout_factors(call: Call, n: Tensor, t: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the activations (cells, H) of some cells are multiplied with: 0, or 1 / (1 - dropout)."""
    seed = call.seed.reshape(())
    first = _mixed(_mixed(_mixed(seed & BITS ^ n) ^ t) ^ u)
    second = _mixed(_mixed(_mixed(seed >> 32 & BITS ^ n) + t & BITS) + u & BITS)
    x = torch.arange(call.H, device=n.device) ^ first.unsqueeze(1)
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = ((x ^ (x >> 15)) + second.unsqueeze(1) & BITS) * FACTORS[1] & BITS
    x = x ^ (x >> 15)
    return (x >= call.drop_below).to(dtype) * call.keep_scale


class _Tile(NamedTuple):
    """Some cells: utterance, frame, targets before; target that follows (the blank where none does)."""

    n: Tensor
    t: Tensor
    u: Tensor
    target: Tensor
    has_target: Tensor


class _Joiner:
    """The inputs in the dtype of sums, and what is computed of some cells."""

    def __init__(self, call: Call):
        self.call = call
        self.dtype = accumulated(call.encoder_out.dtype)
        self.encoder, self.decoder, self.weight = (
            x.to(self.dtype) for x in (call.encoder_out, call.decoder_out, call.weight)
        )
        self.activation = ACTIVATIONS[call.activation]
        self.bias = self.weight.new_zeros(call.V) if call.bias is None else call.bias.to(self.dtype)
        self.T_lengths, self.U_lengths = (x.to(call.device).long() for x in (call.T_lengths, call.U_lengths))

    def tiles(self, cells: Tensor) -> Iterator[Tuple[Tensor, _Tile]]:
        """The numbers of cells (n * T + t) * (U+1) + u, tile by tile, and where they are."""
        call = self.call
        size = call.tile_cells or max(64, TILE_BYTES // ((call.H + call.V) * torch.finfo(self.dtype).bits // 8))
        for some in cells.split(size):
            u, t = some % call.U1, some // call.U1 % call.T
            n = some // (call.U1 * call.T)
            has_target = u < self.U_lengths[n]
            target = torch.full_like(u, call.blank)
            if call.U1 > 1:
                target = torch.where(has_target, call.targets.long()[n, u.clamp(max=call.U1 - 2)], target)
            yield some, _Tile(n, t, u, target, has_target)

    def sums(self, tile: _Tile) -> Tensor:
        """Return encoder_out plus decoder_out (cells, H)."""
        return self.encoder[tile.n, tile.t].add_(self.decoder[tile.n, tile.u])

    def factors(self, tile: _Tile) -> Optional[Tensor]:
        """Return the mask of dropout (cells, H); None without dropout."""
        return dropout_factors(self.call, tile.n, tile.t, tile.u, self.dtype) if self.call.drop_below else None

    def activations(self, sums: Tensor, factors: Optional[Tensor]) -> Tensor:
        values = self.activation.value(sums)
        return values if factors is None else values * factors

    def slopes(self, sums: Tensor, factors: Optional[Tensor]) -> Tensor:
        """Return the derivative of `activations` (cells, H)."""
        slopes = self.activation.slope(sums)
        return slopes if factors is None else slopes * factors

    def logits(self, activations: Tensor) -> Tensor:
        return torch.addmm(self.bias, activations, self.weight.t())


def forward(call: Call, gradient: bool, losses: Tensor, dropped: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Fills losses and dropped (N,) float64 and arcs (2, N * T * (U+1)): with `gradient` the posteriors of each cell's
    blank arc and label arc (times 1 + fastemit_lambda), without, their log-probabilities, unless arcs is empty.  `kept`
    is for backends that keep logits."""
    joiner = _Joiner(call)
    shape = call.N, call.T, call.U1
    t, u = (torch.arange(size, device=call.device) for size in shape[1:])
    inside = (t[:, None] < joiner.T_lengths.view(-1, 1, 1)) & (u <= joiner.U_lengths.view(-1, 1, 1))
    logs = torch.full((2, inside.numel()), -torch.inf, dtype=torch.float64, device=call.device)
    for cells, tile in joiner.tiles(inside.flatten().nonzero().squeeze(1)):
        logits = joiner.logits(joiner.activations(joiner.sums(tile), joiner.factors(tile)))
        logits -= logits.amax(1, keepdim=True)
        blank = logits[:, call.blank].to(torch.float64, copy=True)
        label = logits.gather(1, tile.target.unsqueeze(1)).squeeze(1).double()
        if call.label_smoothing:
            mean = logits.mean(1, dtype=torch.float64)
            blank, label = (torch.lerp(x, mean, call.label_smoothing) for x in (blank, label))
        normaliser = logits.exp_().sum(1, dtype=torch.float64).log_()
        logs[0, cells] = blank - normaliser
        penalty = call.delay_penalty * ((joiner.T_lengths[tile.n] - 1).double() / 2 - tile.t)
        logs[1, cells] = torch.where(tile.has_target, label - normaliser + penalty, -torch.inf)
    if not gradient and arcs.numel():
        arcs.copy_(logs)
    blank, label = (skewed(x.view(shape)) for x in logs)
    likelihood, by_blank, by_label = _alphas(blank, label, joiner)
    losses.copy_(-likelihood)
    dropped.zero_()
    if not gradient:
        return
    of_blank, of_label = (_straight(x, call.T) for x in _posteriors(likelihood, by_blank, by_label, joiner))
    arcs.copy_(torch.stack([of_blank, of_label * (1 + call.fastemit_lambda)]).view(2, -1))
    posterior = torch.where(inside & ~_counts(call, arcs).view(shape), of_blank + of_label, 0)
    dropped.copy_(posterior.sum((1, 2)) / (joiner.T_lengths + joiner.U_lengths))


def _counts(call: Call, arcs: Tensor) -> Tensor:
    """The cells whose gradient is computed; those that are NaN too."""
    posterior = arcs[0] + arcs[1]
    return ~(posterior < call.negligible) & (posterior != 0)


def skewed(cells: Tensor) -> Tensor:
    """Return the anti-diagonals (T+U, N, U+1) of (N, T, U+1); -inf where there is no cell."""
    N, T, U1 = cells.shape
    d, u = (torch.arange(size, device=cells.device) for size in (T + U1 - 1, U1))
    t = d[:, None] - u
    diagonals = cells[:, t.clamp(0, T - 1), u].transpose(0, 1)
    return torch.where(((t >= 0) & (t < T)).unsqueeze(1), diagonals, -torch.inf)


def _straight(diagonals: Tensor, T: int) -> Tensor:
    """(T+U, N, U+1) -> (N, T, U+1)."""
    U1 = diagonals.shape[2]
    t, u = (torch.arange(size, device=diagonals.device) for size in (T, U1))
    return diagonals[t[:, None] + u, :, u].permute(2, 0, 1)


def _alphas(blank: Tensor, label: Tensor, joiner: _Joiner) -> Tuple[Tensor, Tensor, Tensor]:
    """(N,) log-likelihoods, and the probabilities (T+U, N, U+1) that a path through a cell came to it by a blank and by
    a label."""
    n = torch.arange(blank.shape[1], device=blank.device)
    last = joiner.T_lengths + joiner.U_lengths - 1
    alphas, by_blank, by_label = torch.full_like(blank, -torch.inf), torch.zeros_like(blank), torch.zeros_like(blank)
    alphas[0, :, 0] = 0
    for d in range(1, len(blank)):
        x = alphas[d - 1] + blank[d - 1]
        y = torch.full_like(x, -torch.inf)
        y[:, 1:] = (alphas[d - 1] + label[d - 1])[:, :-1]
        alphas[d] = torch.logaddexp(x, y)
        impossible = alphas[d] == -torch.inf
        by_blank[d] = (x - alphas[d]).exp_().masked_fill_(impossible, 0)
        by_label[d] = (y - alphas[d]).exp_().masked_fill_(impossible, 0)
    return alphas[last, n, joiner.U_lengths] + blank[last, n, joiner.U_lengths], by_blank, by_label


def _posteriors(likelihood: Tensor, by_blank: Tensor, by_label: Tensor, joiner: _Joiner) -> Tuple[Tensor, Tensor]:
    """(T+U, N, U+1) of the blank's arc of each cell and of the label's."""
    n = torch.arange(by_blank.shape[1], device=by_blank.device)
    last, possible = joiner.T_lengths + joiner.U_lengths - 1, (likelihood != -torch.inf).double()
    of_blank, of_label = torch.zeros_like(by_blank), torch.zeros_like(by_blank)
    of_blank[last, n, joiner.U_lengths] = possible
    for d in range(len(by_blank) - 2, -1, -1):
        after = of_blank[d + 1] + of_label[d + 1]
        of_blank[d] += after * by_blank[d + 1]
        of_label[d, :, :-1] = (after * by_label[d + 1])[:, 1:]
    return of_blank, of_label


def backward(
    call: Call, grad_losses: Tensor, arcs: Tensor, kept: Tensor, gradients: Sequence[Optional[Tensor]]
) -> None:
    """Adds to those of `gradients` (of encoder_out, decoder_out, weight, bias; None: not wanted), which are contiguous
    and of the dtype of sums."""
    d_encoder, d_decoder, d_weight, d_bias = gradients
    joiner = _Joiner(call)
    for cells, tile in joiner.tiles(_counts(call, arcs).nonzero().squeeze(1)):
        sums, factors = joiner.sums(tile), joiner.factors(tile)
        activations = joiner.activations(sums, factors)
        of_blank, of_label = (arcs[:, cells].double() * grad_losses[tile.n].double()).unsqueeze(2)
        gradient = _logit_gradients(call, joiner.logits(activations), tile, of_blank, of_label)
        if d_bias is not None:
            d_bias += gradient.sum(0)
        if d_weight is not None:
            d_weight.addmm_(gradient.t(), activations)
        if d_encoder is None and d_decoder is None:
            continue
        of_sum = (gradient @ joiner.weight).mul_(joiner.slopes(sums, factors))
        if d_encoder is not None:
            d_encoder.view(-1, call.H).index_add_(0, tile.n * call.T + tile.t, of_sum)
        if d_decoder is not None:
            d_decoder.view(-1, call.H).index_add_(0, tile.n * call.U1 + tile.u, of_sum)


def _logit_gradients(call: Call, logits: Tensor, tile: _Tile, of_blank: Tensor, of_label: Tensor) -> Tensor:
    """(cells, V); of_blank, of_label (cells, 1) float64: posteriors times the gradient of the loss."""
    e = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    total = e.sum(1, keepdim=True, dtype=torch.float64)
    blank, target = torch.full_like(tile.target, call.blank).unsqueeze(1), tile.target.unsqueeze(1)
    e_blank, e_label = e.gather(1, blank).double(), e.gather(1, target).double()
    # (arc + other) p - arc = other p - arc (1 - p), where 1 - p keeps its digits
    at_blank = (of_label * e_blank - of_blank * (total - e_blank)) / total
    at_label = (of_blank * e_label - of_label * (total - e_label)) / total
    both = -(of_blank + of_label) * (total - e_blank) / total
    is_blank = target == call.blank
    at_blank = torch.where(is_blank, torch.where(tile.has_target.unsqueeze(1), both, at_blank), at_blank)
    posterior, smoothing = of_blank + of_label, call.label_smoothing
    e *= (posterior / total).to(e.dtype)
    if smoothing:
        shift = smoothing * posterior / call.V
        e -= shift.to(e.dtype)
        at_label += smoothing * of_label - shift
        at_blank += smoothing * torch.where(is_blank, posterior, of_blank) - shift
    e.scatter_(1, target, at_label.to(e.dtype))
    return e.scatter_(1, blank, at_blank.to(e.dtype))
