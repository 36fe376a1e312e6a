"""The backend that needs PyTorch alone: any device, slower than the others, the same numbers.

Tiles of cells go through activation, addmm and softmax; the lattice is walked by anti-diagonals
over all utterances at once.  It serves every lattice of lattices.py by its arcs.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import logsigmoid, pad

from fused_transducer import windows
from fused_transducer.call import Call, accumulated
from fused_transducer.lattices import Lattice

#: Activations and logits of a tile take so many bytes.
TILE_BYTES = 2**23


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used, or ""."""
    return ""


def rows(call: Call) -> int:
    """Return how many numbers of each cell there are between forward and backward; the first are
    those of its parts."""
    return 2 + len(call.durations)


def room(call: Call) -> int:
    """Return for how many cells there must be room between forward and backward."""
    return call.M * call.T * call.U1


def fits(call: Call, cells: int) -> bool:
    """Return whether the cells of the utterances are those for which there is room."""
    return cells == room(call)


#: Scale of selu, and that times its alpha.
SELU = 1.0507009873554805, 1.7580993408473769


class Activation(NamedTuple):
    """A function of x, and its derivative as a function of x and of its value."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def _silu_slope(x: Tensor, y: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor, y: Tensor) -> Tensor:
    return (1 + torch.erf(x * 0.5**0.5)) / 2 + x * torch.exp(-0.5 * x * x) * (0.5 / torch.pi) ** 0.5


ACTIVATIONS: Dict[str, Activation] = {
    "none": Activation(lambda x: x, lambda x, y: torch.ones_like(y)),
    "tanh": Activation(torch.tanh, lambda x, y: 1 - y.square()),
    "relu": Activation(torch.relu, lambda x, y: (y > 0).to(y.dtype)),
    "sigmoid": Activation(torch.sigmoid, lambda x, y: y * (1 - y)),
    "leaky_relu": Activation(
        functional.leaky_relu, lambda x, y: torch.full_like(y, 0.01).masked_fill_(y > 0, 1)
    ),
    "silu": Activation(functional.silu, _silu_slope),
    "gelu": Activation(functional.gelu, _gelu_slope),
    "selu": Activation(torch.selu, lambda x, y: torch.where(y > 0, SELU[0], y + SELU[1])),
    "hardtanh": Activation(functional.hardtanh, lambda x, y: (y.abs() < 1).to(y.dtype)),
}
#: Factors and bits of the hash of dropout's mask: csrc/activations.h has the same.
FACTORS, BITS = (0x21F0AAAD, 0xD35A2D97), 2**32 - 1


def _mixed(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 32-bit integers, held in int64."""
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = (x ^ (x >> 15)) * FACTORS[1] & BITS
    return x ^ (x >> 15)


def dropout_factors(call: Call, n: Tensor, t: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the activations (cells, H) of some cells are multiplied with: 0, or 1 / (1 -
    dropout)."""
    seed = call.seed.reshape(())
    first = _mixed(_mixed(_mixed(seed & BITS ^ n) ^ t) ^ u)
    second = _mixed(_mixed(_mixed(seed >> 32 & BITS ^ n) + t & BITS) + u & BITS)
    x = torch.arange(call.H, device=n.device) ^ first.unsqueeze(1)
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = ((x ^ (x >> 15)) + second.unsqueeze(1) & BITS) * FACTORS[1] & BITS
    x = x ^ (x >> 15)
    return (x >= call.drop_below).to(dtype) * call.keep_scale


class _Tile(NamedTuple):
    """Some cells: utterance, frame, targets before; target that follows (the blank where none
    does)."""

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
        self.T_lengths, self.U_lengths = (
            x.to(call.device).long() for x in (call.frames, call.U_lengths)
        )
        of_itself = call.utterance_of is None
        rows = torch.arange(call.M, device=call.device) if of_itself else call.utterance_of
        self.utterance_of = rows.to(call.device).long()

    def tiles(self, cells: Tensor) -> Iterator[Tuple[Tensor, _Tile]]:
        """The numbers of cells (n * T + t) * (U+1) + u, tile by tile, and where they are."""
        call = self.call
        size = call.tile_cells or max(
            64, TILE_BYTES // ((call.H + call.V) * torch.finfo(self.dtype).bits // 8)
        )
        for some in cells.split(size):
            u, t = some % call.U1, some // call.U1 % call.T
            n = some // (call.U1 * call.T)
            has_target = u < self.U_lengths[n]
            target = torch.full_like(u, call.blank)
            if call.U1 > 1:
                target = torch.where(
                    has_target, call.targets.long()[n, u.clamp(max=call.U1 - 2)], target
                )
            yield some, _Tile(n, t, u, target, has_target)

    def activations(self, tile: _Tile) -> Tuple[Tensor, Tensor, Union[Tensor, float]]:
        """Return what the activation is of (cells, H), its values, and what dropout multiplies each
        with."""
        x = self.encoder[self.utterance_of[tile.n], tile.t].add_(self.decoder[tile.n, tile.u])
        return (
            x,
            self.activation.value(x),
            dropout_factors(self.call, *tile[:3], self.dtype) if self.call.drop_below else 1.0,
        )


def inside(call: Call) -> Tensor:
    """Return which cells (N, T, U+1) are of their utterance, and within its window."""
    t, u = (torch.arange(size, device=call.device) for size in (call.T, call.U1))
    if call.window is not None:
        begin, end = call.band.unsqueeze(1).unbind(-1)
        return (t[:, None] >= begin) & (t[:, None] <= end)
    T_lengths, U_lengths = (x.to(call.device).view(-1, 1, 1) for x in (call.frames, call.U_lengths))
    return (t[:, None] < T_lengths) & (u <= U_lengths)


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Fill losses (M,) float64 and arcs (parts, M * T * (U+1)).

    With `gradient` arcs are the posteriors of each cell's parts, where arcs of labels count 1 +
    fastemit_lambda times; without, their log-probabilities, unless arcs is empty.  `kept` is for
    backends that keep logits.
    """
    joiner, lattice = _Joiner(call), call.lattice
    T, U1 = call.T, call.U1
    is_cell = inside(call)
    logs = torch.full(
        (lattice.parts, T + U1 - 1, call.M, U1), -torch.inf, dtype=torch.float64, device=call.device
    )
    for _, tile in joiner.tiles(is_cell.flatten().nonzero().squeeze(1)):
        _, values, factors = joiner.activations(tile)
        parts = _log_probabilities(
            call, torch.addmm(joiner.bias, values * factors, joiner.weight.t()), tile
        )
        penalty = call.delay_penalty * ((joiner.T_lengths[tile.n] - 1).double() / 2 - tile.t)
        parts[:, 1] = torch.where(tile.has_target, parts[:, 1] + penalty, -torch.inf)
        logs[:, tile.t + tile.u, tile.n, tile.u] = parts.t()
    if not gradient and arcs.numel():
        arcs.copy_(_straight(logs, T).flatten(1))
    walk = Walk(
        lattice,
        logs,
        joiner.T_lengths,
        joiner.U_lengths,
        None if call.window is None else call.band,
    )
    del logs
    alphas = walk.alphas()
    losses.copy_(-walk.ends(alphas))
    if not gradient:
        return
    arcs.copy_(_straight(walk.posteriors(alphas, call.fastemit_lambda), T).flatten(1))


def _columns(call: Call, target: Tensor) -> Tensor:
    """Return the column (cells, parts) of each part."""
    further = torch.arange(call.symbols, call.V, device=target.device).expand(len(target), -1)
    return torch.cat(
        [torch.full_like(target, call.blank).unsqueeze(1), target.unsqueeze(1), further], 1
    )


def _log_probabilities(call: Call, logits: Tensor, tile: _Tile) -> Tensor:
    """Return the parts (cells, parts) float64 of cells from their logits (cells, V), which are
    overwritten."""
    columns = _columns(call, tile.target)
    if call.topology == "tdt":
        symbols, durations = logits.split([call.symbols, call.V - call.symbols], 1)
        of_symbols = _log_softmax(symbols, columns[:, :2], 0.0)
        return torch.cat(
            [of_symbols, _log_softmax(durations, columns[:, 2:] - call.symbols, 0.0)], 1
        )
    if call.topology != "hat":
        return _log_softmax(logits, columns, call.label_smoothing)
    blank = logits[:, call.blank].to(torch.float64, copy=True)
    logits[:, call.blank] = -torch.inf
    label = _log_softmax(logits, columns[:, 1:], 0.0).squeeze(1) + logsigmoid(-blank)
    blank = logsigmoid(blank)
    return torch.stack([blank, torch.where(tile.target == call.blank, blank, label)], 1)


def _log_softmax(logits: Tensor, columns: Tensor, smoothing: float) -> Tensor:
    """Return the log-probabilities (cells, J) float64 of some columns; logits (cells, C) are
    overwritten."""
    logits -= logits.amax(1, keepdim=True)
    values = logits.gather(1, columns).double()
    if smoothing:
        values = (1 - smoothing) * values + smoothing * logits.mean(
            1, keepdim=True, dtype=torch.float64
        )
    return values - logits.exp_().sum(1, keepdim=True, dtype=torch.float64).log_()


def counts(call: Call, arcs: Tensor) -> Tensor:
    """Return whether the gradient of each cell is computed; of one that is NaN too."""
    posterior = arcs[: call.lattice.of_symbols].sum(0)
    return ~(posterior < call.negligible) & (posterior != 0)


def _straight(diagonals: Tensor, T: int) -> Tensor:
    """Return (..., N, T, U+1) from anti-diagonals (..., T+U, N, U+1)."""
    U1 = diagonals.shape[-1]
    t, u = (torch.arange(size, device=diagonals.device) for size in (T, U1))
    return diagonals.movedim(-2, 0)[..., t[:, None] + u, u].movedim(0, -3)


class Walk:
    """The arcs of all utterances, by the anti-diagonals t + u of the cells that they leave.

    A path of an utterance ends in the cell (T, U) behind its last frame, which no arc leaves.
    """

    def __init__(
        self, lattice: Lattice, parts: Sequence[Tensor], T_lengths: Tensor, U_lengths: Tensor,
        band: Optional[Tensor] = None,
    ):  # fmt: skip
        """parts: of each, the log-probabilities (T+U, N, U+1) of the cells, -inf where there is
        none; band: of a window, see `windows`."""
        self.lattice = lattice
        self.diagonals, N, U1 = parts[0].shape
        device = parts[0].device
        self.n, self.last_d, self.last_u = (
            torch.arange(N, device=device),
            T_lengths + U_lengths,
            U_lengths,
        )
        self.arc = torch.arange(len(lattice.arcs), device=device)
        # an arc that goes beyond the last diagonal from any cell is as good as a shorter one
        steps = [min(arc.dt + arc.du, self.diagonals + 1) for arc in lattice.arcs]
        self.steps, self.margin = torch.tensor(steps, device=device), max(steps)
        self.blanks = sum(arc.du == 0 for arc in lattice.arcs)
        t = torch.arange(self.diagonals, device=device).view(-1, 1, 1) - torch.arange(
            U1, device=device
        )
        inside = (
            (t >= 0)
            & (t < T_lengths.view(-1, 1))
            & (torch.arange(U1, device=device) <= U_lengths.view(-1, 1))
        )
        emits = inside
        if band is not None:
            inside = (t >= band[..., 0]) & (t <= band[..., 1])
            emits = inside & pad(t[..., :-1] >= band[:, 1:, 0], (0, 1))
        #: log-weights (arcs, T+U, N, U+1)
        self.weights = parts[0].new_empty(len(lattice.arcs), *parts[0].shape)
        for arc, weight in zip(lattice.arcs, self.weights):
            weight.fill_(arc.weight).masked_fill_(~(emits if arc.du else inside), -torch.inf)
            for part in arc.parts:
                weight += parts[part]
            if arc.then_blank:
                weight += pad(parts[0][1:, :, 1:], (0, 1, 0, 0, 0, 1), value=-torch.inf)
            if arc.du == 1 and not lattice.label_ends:
                weight.masked_fill_(t + arc.dt >= T_lengths.view(-1, 1), -torch.inf)

    def _with_margins(self, value: float) -> Tensor:
        """Return room for the cells, those of the ends too, and on both sides for what the longest
        arc reaches."""
        return self.weights.new_full(
            (self.diagonals + 1 + 2 * self.margin, *self.weights.shape[2:]), value
        )

    def _arriving(self, scores: Tensor, d: int) -> Tensor:
        """Return the scores (arcs, N, U+1) with which each arc arrives at the cells of diagonal
        d."""
        origin = d - self.steps
        scores = scores[self.margin + origin] + self.weights[self.arc, origin.clamp(min=0)]
        return torch.cat(
            [scores[: self.blanks], pad(scores[self.blanks :, :, :-1], (1, 0), value=-torch.inf)]
        )

    def _ahead(self, values: Tensor, d: int) -> Tensor:
        """Return the values (arcs, N, U+1) of the cells that the arcs of diagonal d lead to."""
        values = values[self.margin + d + self.steps]
        return torch.cat([values[: self.blanks], pad(values[self.blanks :, :, 1:], (0, 1))])

    def ends(self, scores: Tensor) -> Tensor:
        """Return the scores (N,) of the cells where paths end."""
        return scores[self.margin + self.last_d, self.n, self.last_u]

    def alphas(self, chosen: Optional[Tensor] = None) -> Tensor:
        """Return the forward scores of all cells, between margins.  With `chosen` (T+U, N, U+1)
        int64 those of the best paths to each cell, and there the number of the arc that these came
        by."""
        alphas = self._with_margins(-torch.inf)
        alphas[self.margin, :, 0] = 0
        for d in range(1, self.diagonals + 1):
            arriving = self._arriving(alphas, d)
            if chosen is None:
                alphas[self.margin + d] = arriving.logsumexp(0)
            else:
                alphas[self.margin + d], chosen[d] = arriving.max(0)
        return alphas

    def posteriors(self, alphas: Tensor, fastemit_lambda: float) -> Tensor:
        """Return the posteriors (parts, T+U, N, U+1) of each part; arcs of labels count 1 +
        fastemit_lambda times.

        The weights are overwritten.
        """
        of_cells = self._with_margins(0.0)
        of_cells[self.margin + self.last_d, self.n, self.last_u] = (
            self.ends(alphas) != -torch.inf
        ).double()
        for d in range(self.diagonals - 1, -1, -1):
            after = self._ahead(of_cells, d)
            shares = (alphas[self.margin + d] + self.weights[:, d] - self._ahead(alphas, d)).exp_()
            taken = (shares * after).masked_fill_(after == 0, 0)
            of_cells[self.margin + d] += taken.sum(0)
            self.weights[:, d] = taken
        parts = self.weights.new_zeros(self.lattice.parts, *self.weights.shape[1:])
        for arc, taken in zip(self.lattice.arcs, self.weights):
            scaled = taken * (1 + fastemit_lambda) if arc.du else taken
            for part in arc.parts:
                parts[part] += scaled
            if arc.then_blank:
                parts[0, 1:, :, 1:] += scaled[:-1, :, :-1]
        return parts


def backward(
    call: Call,
    grad_losses: Tensor,
    arcs: Tensor,
    kept: Tensor,
    gradients: Sequence[Optional[Tensor]],
) -> None:
    """Adds to those of `gradients` (of encoder_out, decoder_out, weight, bias; None: not wanted),
    which are contiguous and of the dtype of sums.  An utterance whose upstream gradient is 0 is
    left out, even if it has a NaN."""
    d_encoder, d_decoder, d_weight, d_bias = gradients
    joiner = _Joiner(call)
    counted = counts(call, arcs).view(call.M, -1) & (grad_losses != 0).unsqueeze(1)
    for cells, tile in joiner.tiles(counted.flatten().nonzero().squeeze(1)):
        x, values, factors = joiner.activations(tile)
        activations = values * factors
        posteriors = arcs[: call.lattice.parts, cells].double() * grad_losses[tile.n].double()
        gradient = _logit_gradients(
            call, torch.addmm(joiner.bias, activations, joiner.weight.t()), tile, posteriors.t()
        )
        if call.clamp:
            bound = (call.clamp * grad_losses[tile.n].abs()).to(gradient.dtype).unsqueeze(1)
            gradient[:, : call.symbols if call.topology == "tdt" else call.V].clamp_(-bound, bound)
        if d_bias is not None:
            d_bias += gradient.sum(0)
        if d_weight is not None:
            d_weight.addmm_(gradient.t(), activations)
        if d_encoder is None and d_decoder is None:
            continue
        of_sum = (gradient @ joiner.weight).mul_(joiner.activation.slope(x, values)).mul_(factors)
        frame, state = joiner.utterance_of[tile.n] * call.T + tile.t, tile.n * call.U1 + tile.u
        for d_input, row in ((d_encoder, frame), (d_decoder, state)):
            if d_input is not None:
                d_input.view(-1, call.H).index_add_(0, row, of_sum)


def _logit_gradients(call: Call, logits: Tensor, tile: _Tile, posteriors: Tensor) -> Tensor:
    """Return the gradient (cells, V) of logits, which are overwritten.

    posteriors (cells, parts) float64: of each part, times the gradient of the loss.
    """
    columns = _columns(call, tile.target)
    if call.topology == "tdt":
        symbols, durations = logits.split([call.symbols, call.V - call.symbols], 1)
        _softmax_gradient(symbols, columns[:, :2], posteriors[:, :2], 0.0)
        _softmax_gradient(durations, columns[:, 2:] - call.symbols, posteriors[:, 2:], 0.0)
    elif call.topology == "hat":
        blank = logits[:, call.blank].to(torch.float64, copy=True)
        of_label = posteriors[:, 1].masked_fill(tile.target == call.blank, 0)
        of_blank = torch.where(tile.target == call.blank, posteriors.sum(1), posteriors[:, 0])
        logits[:, call.blank] = -torch.inf
        _softmax_gradient(logits, columns[:, 1:], of_label.unsqueeze(1), 0.0)
        logits[:, call.blank] = (of_label * blank.sigmoid() - of_blank * (-blank).sigmoid()).to(
            logits.dtype
        )
    else:
        _softmax_gradient(logits, columns, posteriors, call.label_smoothing)
    return logits


def _softmax_gradient(
    logits: Tensor, columns: Tensor, posteriors: Tensor, smoothing: float
) -> None:
    """Replace logits (cells, C) by their gradient.

    columns (cells, J): of the arcs' log-probabilities; posteriors (cells, J) float64: times the
    gradient of the loss.
    """
    e = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    total = e.sum(1, keepdim=True, dtype=torch.float64)
    at_columns = e.gather(1, columns).double()
    same = (columns.unsqueeze(2) == columns.unsqueeze(1)).double()  # a target may be the blank
    at_once, posterior = (same * posteriors.unsqueeze(1)).sum(2), posteriors.sum(1, keepdim=True)
    # (arc + others) p - arc = others p - arc (1 - p), where 1 - p keeps its digits
    at_columns = ((posterior - at_once) * at_columns - at_once * (total - at_columns)) / total
    e *= (posterior / total).to(e.dtype)
    if smoothing:
        shift = smoothing * posterior / logits.shape[1]
        e -= shift.to(e.dtype)
        at_columns += smoothing * at_once - shift
    e.scatter_(1, columns, at_columns.to(e.dtype))


# Posteriors as a tensor, and the best path: what can be read from the arcs of the cells, on any
# device.


def _numbers(call: Call) -> Tensor:
    """Return the number (N, T, U+1) that each cell has in the order of csrc/cells.h: by utterances,
    in each by anti-diagonals t + u, on each by u.  Where there is no cell there are other
    numbers."""
    cells = call.cells()
    first = (cells.cumsum(0) - cells).view(-1, 1, 1)
    t, u = (torch.arange(size, device=call.device) for size in (call.T, call.U1))
    t = t.view(-1, 1)
    diagonal = t + u
    if call.window is not None:
        before, first_u = windows.diagonals_of(call.band, call.T)[:, diagonal].unbind(-1)
        return first + before + u - first_u
    T_lengths, states = call.frames.view(-1, 1, 1).long(), call.U_lengths.view(-1, 1, 1).long() + 1
    shorter, longer = torch.minimum(T_lengths, states), torch.maximum(T_lengths, states)
    left = T_lengths + states - 1 - diagonal
    before = torch.where(
        diagonal <= longer,
        shorter * (shorter + 1) // 2 + (diagonal - shorter) * shorter,
        T_lengths * states - left * (left + 1) // 2,
    )
    before = torch.where(diagonal <= shorter, diagonal * (diagonal + 1) // 2, before)
    return first + before + u - (diagonal - T_lengths + 1).clamp(min=0)


def of_cells(call: Call, arcs: Tensor, backend: str, padding: float) -> Tensor:
    """Return the numbers (N, T, U+1, parts) of the parts of each cell from `arcs` of a backend;
    `padding` where an utterance has no cell."""
    is_cell = inside(call)
    parts = call.lattice.parts
    cells = arcs.shape[1]
    if not arcs.numel():  # no window has a path
        return arcs.new_full((*is_cell.shape, parts), padding)
    if backend == "native":
        numbers = _numbers(call)
        cells = call.cells().sum()  # a compiled graph has room for more
    elif backend == "triton" and call.window is not None:
        frame = torch.arange(call.M * call.T, device=call.device).view(call.M, call.T, 1)
        first, _ = windows.states_of_frames(call.band, call.T).split(1, -1)
        numbers = (
            frame * (cells // frame.numel()) + torch.arange(call.U1, device=call.device) - first
        )
    else:
        values = arcs[:parts].view(parts, *is_cell.shape).permute(1, 2, 3, 0)
        return values.masked_fill(~is_cell.unsqueeze(-1), padding)
    numbers = numbers.masked_fill(~is_cell, 0)
    values = torch.stack([arcs.view(-1)[numbers + part * cells] for part in range(parts)], -1)
    return values.masked_fill(~is_cell.unsqueeze(-1), padding)


def mean_delay(posteriors: Tensor, reference: Optional[Tensor]) -> Tensor:
    """Return the mean frame (N,) of the targets less that of `reference` (N, U), as
    `transducer_loss` does.

    posteriors (N, T, U): with which each target is emitted at each frame."""
    t = torch.arange(posteriors.shape[1], device=posteriors.device).view(-1, 1)
    mass = posteriors.sum(1, dtype=torch.float64)
    frames = (posteriors * t).sum(1, dtype=torch.float64) / mass
    counts = mass > 0
    if reference is not None:
        counts &= reference >= 0
        frames = frames - reference
    return (torch.where(counts, frames, 0).sum(1) / counts.sum(1)).to(posteriors.dtype)


def _walk_of(
    log_probabilities: Tensor, T_lengths: Tensor, U_lengths: Tensor, lattice: Lattice
) -> Walk:
    """Return the walk over the arcs of cells.

    log_probabilities (N, T, U+1, parts): of each cell's blank, its label, and its further columns
    (such as durations); -inf where there is no cell.
    """
    _, T, U1, _ = log_probabilities.shape
    u = torch.arange(U1, device=log_probabilities.device)
    d = torch.arange(T + U1 - 1, device=u.device).unsqueeze(1)
    t = d - u  # frame of state u on anti-diagonal d: (T+U, U+1)
    by_diagonals = log_probabilities[:, t.clamp(0, T - 1), u]  # (N, T+U, U+1, parts)
    parts = by_diagonals.permute(3, 1, 0, 2)  # (parts, T+U, N, U+1)
    has_frame = (t >= 0) & (t < T)
    parts = parts.masked_fill(~has_frame.unsqueeze(1), -torch.inf)
    return Walk(lattice, parts, T_lengths.long(), U_lengths.long())


def best(
    log_probabilities: Tensor, T_lengths: Tensor, U_lengths: Tensor, lattice: Lattice
) -> Tuple[Tensor, Tensor]:
    """Return (frames (N, U) int64, log-probabilities (N,)) of the best paths, as `align` does.

    log_probabilities (N, T, U+1, parts): of the parts of each cell; -inf where there is none.
    """
    N, T, U1, _ = log_probabilities.shape
    U_lengths, device = U_lengths.long(), log_probabilities.device
    walk = _walk_of(log_probabilities, T_lengths, U_lengths, lattice)
    chosen = U_lengths.new_zeros(T + U1, N, U1)
    total = walk.ends(walk.alphas(chosen))
    n, u, d = torch.arange(N, device=device), U_lengths.clone(), T_lengths.long() + U_lengths
    dt, du = (
        torch.tensor([getattr(arc, name) for arc in lattice.arcs], device=device)
        for name in ("dt", "du")
    )
    # [:, u]: of the arc that leads to u
    frames = torch.full((N, U1), -1, dtype=torch.int64, device=device)
    for _ in range(len(chosen) - 1):
        arc = chosen[d, n, u]
        leaves = (d > 0) & (total != -torch.inf)
        dt_here, du_here = (torch.where(leaves, x[arc], 0) for x in (dt, du))
        frames[n, u] = torch.where(du_here == 1, d - u - dt_here, frames[n, u])
        d, u = d - dt_here - du_here, u - du_here
    return frames[:, 1:], total


def confidences(
    log_probabilities: Tensor,
    T_lengths: Tensor,
    U_lengths: Tensor,
    lattice: Lattice,
    frames: Tensor,
    span: int,
) -> Tensor:
    """Return the probability (N, U) with which each target is emitted within `span` frames of its
    frame in `frames` (N, U), over all paths; 0 where that is below 0."""
    T = log_probabilities.shape[1]
    walk = _walk_of(log_probabilities, T_lengths, U_lengths, lattice)
    of_labels = _straight(walk.posteriors(walk.alphas(), 0.0)[1], T)[:, :, :-1]
    t, frames = torch.arange(T, device=frames.device).view(-1, 1), frames.unsqueeze(1)
    return of_labels.masked_fill((frames < 0) | ((t - frames).abs() > span), 0).sum(1)
