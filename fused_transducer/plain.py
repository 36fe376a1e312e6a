"""The backend that needs PyTorch alone: any device, slower than the others, the same numbers.

Tiles of cells go through activation, addmm and softmax. The lattice is walked by anti-diagonals
over all utterances at once. Every lattice of lattices.py is described by its arcs.

A backend is a module with these functions:
    unavailable(device, dtype) tells why it cannot be used.
    forward writes the losses, and `arcs` (rows, cells) for backward. Its first rows are one number
    for each part of each cell (see `lattices`): the posterior, or the log-probability.
    backward adds to the gradients of encoder_out, decoder_out, weight and bias.
    rows, room and fits tell the shape that `arcs` needs.
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

#: Bytes of the activations and logits of a tile.
TILE_BYTES = 2**23


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used, or ""."""
    return ""


def rows(call: Call) -> int:
    """Return the number of rows of `arcs`: one for each part of a cell."""
    return 2 + len(call.durations)


def room(call: Call) -> int:
    """Return the number of columns of `arcs`: one for each cell of the padded batch."""
    return call.M * call.T * call.U1


def fits(call: Call, cells: int) -> bool:
    """Return whether `arcs` may have this number of columns."""
    return cells == room(call)


#: selu(x) is this times x for x > 0; below it is SELU_ALPHA * (exp(x) - 1).
SELU_SCALE = 1.0507009873554805
SELU_ALPHA = 1.7580993408473769


class Activation(NamedTuple):
    """An activation: value(x), and its derivative slope(x, value)."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def _silu_slope(x: Tensor, y: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor, y: Tensor) -> Tensor:
    normal_distribution = (1 + torch.erf(x * 0.5**0.5)) / 2
    normal_density = torch.exp(-0.5 * x * x) * (0.5 / torch.pi) ** 0.5
    return normal_distribution + x * normal_density


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
    "selu": Activation(torch.selu, lambda x, y: torch.where(y > 0, SELU_SCALE, y + SELU_ALPHA)),
    "hardtanh": Activation(functional.hardtanh, lambda x, y: (y.abs() < 1).to(y.dtype)),
}
#: Factors of the hash by which dropout drops, and the mask of its 32 bits; csrc/activations.h has
#: the same. The hash is of the family of "lowbias32" (Chris Wellons, hash-prospector).
FACTORS, BITS = (0x21F0AAAD, 0xD35A2D97), 2**32 - 1


def _mixed(x: Tensor) -> Tensor:
    """Return the 32-bit hash of 32-bit integers; both are held in int64."""
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = (x ^ (x >> 15)) * FACTORS[1] & BITS
    return x ^ (x >> 15)


def dropout_factors(call: Call, n: Tensor, t: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dropout's factors (cells, H) of the activations of cells: 0, or 1 / (1 - dropout).

    The factor of column h is a hash of the seed and of (n, t, u, h), so that each backend drops the
    same activations. n, t, u (cells,): row, frame and state of each cell.
    """
    seed = call.seed.reshape(())
    first = _mixed(_mixed(_mixed((seed & BITS) ^ n) ^ t) ^ u)
    second = _mixed((_mixed((_mixed(((seed >> 32) & BITS) ^ n) + t) & BITS) + u) & BITS)
    x = torch.arange(call.H, device=n.device) ^ first.unsqueeze(1)
    # The steps of `_mixed`, with a second hash of the cell between them.
    x = (x ^ (x >> 16)) * FACTORS[0] & BITS
    x = (((x ^ (x >> 15)) + second.unsqueeze(1)) & BITS) * FACTORS[1] & BITS
    x = x ^ (x >> 15)
    return (x >= call.drop_below).to(dtype) * call.keep_scale


class _Tile(NamedTuple):
    """Hold some cells, each field (cells,).

    Attributes:
        n, t, u: row, frame, and number of targets before the cell
        target: the target that follows; the blank where none does
        has_target: whether one follows
    """

    n: Tensor
    t: Tensor
    u: Tensor
    target: Tensor
    has_target: Tensor


class _Joiner:
    """Holds the inputs of a call in the dtype of sums, and computes the activations of cells."""

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
        if call.utterance_of is None:
            self.utterance_of = torch.arange(call.M, device=call.device)
        else:
            self.utterance_of = call.utterance_of.to(call.device).long()

    def tiles(self, cells: Tensor) -> Iterator[Tuple[Tensor, _Tile]]:
        """Yield (numbers of its cells, tile) for each tile of `cells`.

        cells: numbers (n * T + t) * (U+1) + u, int64.
        """
        call = self.call
        bytes_of_cell = (call.H + call.V) * self.dtype.itemsize
        size = call.tile_cells or max(64, TILE_BYTES // bytes_of_cell)
        for numbers in cells.split(size):
            u = numbers % call.U1
            t = numbers // call.U1 % call.T
            n = numbers // (call.U1 * call.T)
            has_target = u < self.U_lengths[n]
            target = torch.full_like(u, call.blank)
            if call.U1 > 1:  # else `targets` has no column
                # The cells of the last u have no target: clamped, they read one that is not used.
                target = torch.where(
                    has_target, call.targets.long()[n, u.clamp(max=call.U1 - 2)], target
                )
            yield numbers, _Tile(n, t, u, target, has_target)

    def activations(self, tile: _Tile) -> Tuple[Tensor, Tensor, Union[Tensor, float]]:
        """Return (x, activation(x), dropout's factors) of the cells, each (cells, H).

        x is the sum of the outputs of encoder and decoder; without dropout the factors are 1.0.
        """
        x = self.encoder[self.utterance_of[tile.n], tile.t].add_(self.decoder[tile.n, tile.u])
        factors: Union[Tensor, float] = 1.0
        if self.call.drop_below:
            factors = dropout_factors(self.call, tile.n, tile.t, tile.u, self.dtype)
        return x, self.activation.value(x), factors


def inside(call: Call) -> Tensor:
    """Return for each cell (M, T, U+1) whether it is within the lengths of its row, and within the
    row's window if the call has windows."""
    t = torch.arange(call.T, device=call.device).unsqueeze(1)
    if call.window is not None:
        # The band is within the lengths too: a state in the padding has begin > end.
        begin, end = call.band.unsqueeze(1).unbind(-1)  # (M, 1, U+1)
        return (t >= begin) & (t <= end)
    u = torch.arange(call.U1, device=call.device)
    T_lengths, U_lengths = (x.to(call.device).view(-1, 1, 1) for x in (call.frames, call.U_lengths))
    return (t < T_lengths) & (u <= U_lengths)


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Write losses (M,) float64 and arcs (parts, M * T * (U+1)).

    gradient: whether arcs gets the posterior of each part, in which arcs of labels count 1 +
        fastemit_lambda times. If False, it gets the log-probabilities of the parts, and may be
        empty.
    kept: not used; other backends keep logits in it
    """
    joiner, lattice = _Joiner(call), call.lattice
    T, U1 = call.T, call.U1
    is_cell = inside(call)
    logs = torch.full(
        (lattice.parts, T + U1 - 1, call.M, U1), -torch.inf, dtype=torch.float64, device=call.device
    )
    for _, tile in joiner.tiles(is_cell.flatten().nonzero().squeeze(1)):
        _, values, factors = joiner.activations(tile)
        logits = torch.addmm(joiner.bias, values * factors, joiner.weight.t())
        parts = _log_probabilities(call, logits, tile)
        # Part 1 is the label. The penalty raises it before the middle frame, and lowers it after.
        penalty = call.delay_penalty * ((joiner.T_lengths[tile.n] - 1).double() / 2 - tile.t)
        parts[:, 1] = torch.where(tile.has_target, parts[:, 1] + penalty, -torch.inf)
        logs[:, tile.t + tile.u, tile.n, tile.u] = parts.t()
    if not gradient and arcs.numel():
        arcs.copy_(_by_frames(logs, T).flatten(1))
    band = None if call.window is None else call.band
    walk = Walk(lattice, logs, joiner.T_lengths, joiner.U_lengths, band)
    del logs  # the walk has weights of its own
    alphas = walk.alphas()
    losses.copy_(-walk.ends(alphas))
    if gradient:
        posteriors = walk.posteriors(alphas, call.fastemit_lambda)
        arcs.copy_(_by_frames(posteriors, T).flatten(1))


def _columns(call: Call, target: Tensor) -> Tensor:
    """Return for each part of a cell the column of the logits that belongs to it, (cells, parts):
    those of the blank, of the target, and of the outputs behind the symbols.

    target: (cells,), the next target of each cell
    """
    further = torch.arange(call.symbols, call.V, device=target.device).expand(len(target), -1)
    blank = torch.full_like(target, call.blank)
    return torch.cat([blank.unsqueeze(1), target.unsqueeze(1), further], 1)


def _log_probabilities(call: Call, logits: Tensor, tile: _Tile) -> Tensor:
    """Return the log-probabilities (cells, parts) float64 of the parts of a tile's cells. Overwrite
    their logits (cells, V).

    "tdt" has a softmax of the symbols and another of the durations. In "hat" the probability of the
    blank is sigmoid(its logit), and the labels share the rest, sigmoid(-its logit), by a softmax.
    """
    columns = _columns(call, tile.target)
    if call.topology == "tdt":
        symbols, durations = logits.split([call.symbols, call.V - call.symbols], 1)
        of_symbols = _log_softmax(symbols, columns[:, :2], 0.0)
        of_durations = _log_softmax(durations, columns[:, 2:] - call.symbols, 0.0)
        return torch.cat([of_symbols, of_durations], 1)
    if call.topology != "hat":
        return _log_softmax(logits, columns, call.label_smoothing)
    blank_logit = logits[:, call.blank].to(torch.float64, copy=True)
    logits[:, call.blank] = -torch.inf  # the softmax is of the labels alone
    label = _log_softmax(logits, columns[:, 1:], 0.0).squeeze(1) + logsigmoid(-blank_logit)
    blank = logsigmoid(blank_logit)
    # A target that is the blank, as where no target follows, has the blank's probability.
    return torch.stack([blank, torch.where(tile.target == call.blank, blank, label)], 1)


def _log_softmax(logits: Tensor, columns: Tensor, smoothing: float) -> Tensor:
    """Return the log-probabilities (cells, J) float64 of the columns (cells, J), with label
    smoothing. Overwrite the logits (cells, C)."""
    logits -= logits.amax(1, keepdim=True)
    values = logits.gather(1, columns).double()
    if smoothing:
        mean = logits.mean(1, keepdim=True, dtype=torch.float64)
        values = (1 - smoothing) * values + smoothing * mean
    return values - logits.exp_().sum(1, keepdim=True, dtype=torch.float64).log_()


def has_gradient(call: Call, arcs: Tensor) -> Tensor:
    """Return whether the gradient of each cell (cells,) is computed: whether its posterior is NaN,
    or above 0 and not negligible."""
    posterior = arcs[: call.lattice.of_symbols].sum(0)
    # not `>=`, which is false for NaN
    return ~(posterior < call.negligible) & (posterior != 0)


def _by_frames(diagonals: Tensor, T: int) -> Tensor:
    """Return (..., N, T, U+1) from numbers by anti-diagonals t + u: (..., T+U, N, U+1)."""
    U1 = diagonals.shape[-1]
    t, u = (torch.arange(size, device=diagonals.device) for size in (T, U1))
    return diagonals.movedim(-2, 0)[..., t[:, None] + u, u].movedim(0, -3)


class Walk:
    """The forward and backward walks through the lattices of all utterances at once.

    Numbers of cells are (T+U, N, U+1): by anti-diagonal d = t + u, utterance and state u. Each arc
    leads from a cell to one on a later anti-diagonal. A path of an utterance ends in the cell (T,
    U) behind its last frame, which no arc leaves.
    """

    def __init__(
        self, lattice: Lattice, parts: Sequence[Tensor], T_lengths: Tensor, U_lengths: Tensor,
        band: Optional[Tensor] = None,
    ):  # fmt: skip
        """Compute the log-weights of all arcs.

        Args
            lattice: has the arcs, which are the same for all cells
            parts: for each part the log-probabilities (T+U, N, U+1), -inf where there is no cell
            T_lengths, U_lengths (N,): int64
            band (N, U+1, 2): first and last frame of each state under a window, see `windows`; None
                without a window
        """
        self.lattice = lattice
        self.diagonals, N, U1 = parts[0].shape
        device = parts[0].device
        self.n = torch.arange(N, device=device)
        self.last_d = T_lengths + U_lengths
        self.last_u = U_lengths
        self.arc = torch.arange(len(lattice.arcs), device=device)
        # By how many diagonals each arc goes ahead. An arc that is longer than the lattice leads
        # out of it from every cell; it is cut, so that the margins take less memory.
        steps = [min(arc.dt + arc.du, self.diagonals + 1) for arc in lattice.arcs]
        self.steps = torch.tensor(steps, device=device)
        self.margin = max(steps)  # number of diagonals of each margin, see `_with_margins`
        self.blanks = sum(arc.du == 0 for arc in lattice.arcs)  # these arcs come first
        u = torch.arange(U1, device=device)
        t = torch.arange(self.diagonals, device=device).view(-1, 1, 1) - u
        inside = (t >= 0) & (t < T_lengths.view(-1, 1)) & (u <= U_lengths.view(-1, 1))
        emits = inside  # whether a label may leave the cell
        if band is not None:
            inside = (t >= band[..., 0]) & (t <= band[..., 1])
            # State u + 1, to which the label leads, must have begun; the last state has none.
            emits = inside & pad(t[..., :-1] >= band[:, 1:, 0], (0, 1))
        #: Log-weights (arcs, T+U, N, U+1) of the arcs that leave each cell.
        self.weights = parts[0].new_empty(len(lattice.arcs), *parts[0].shape)
        for arc, weight in zip(lattice.arcs, self.weights):
            weight.fill_(arc.weight).masked_fill_(~(emits if arc.du else inside), -torch.inf)
            for part in arc.parts:
                weight += parts[part]
            if arc.then_blank:  # the blank of the cell (t, u+1), on the next anti-diagonal
                weight += pad(parts[0][1:, :, 1:], (0, 1, 0, 0, 0, 1), value=-torch.inf)
            if arc.du and not lattice.label_ends:  # then no label leads behind the last frame
                weight.masked_fill_(t + arc.dt >= T_lengths.view(-1, 1), -torch.inf)

    def _with_margins(self, value: float) -> Tensor:
        """Return a tensor full of `value`, (margin + T+U+1 + margin, N, U+1).

        It has a number for each cell, and for the cell (T, U) where the paths of an utterance end,
        by diagonals. An arc at either border may come from a margin, or lead to one."""
        return self.weights.new_full(
            (self.diagonals + 1 + 2 * self.margin, *self.weights.shape[2:]), value
        )

    def _arriving(self, scores: Tensor, d: int) -> Tensor:
        """Return the scores (arcs, N, U+1) with which each arc arrives at the cells of diagonal d.

        scores: those of all cells, as in `_with_margins`
        """
        # The diagonal from which each arc comes. Below 0, in the margin, all scores are -inf.
        origins = d - self.steps
        scores = scores[self.margin + origins] + self.weights[self.arc, origins.clamp(min=0)]
        # An arc with a label comes from state u - 1: its scores move by one state.
        return torch.cat(
            [scores[: self.blanks], pad(scores[self.blanks :, :, :-1], (1, 0), value=-torch.inf)]
        )

    def _ahead(self, values: Tensor, d: int) -> Tensor:
        """Return the values (arcs, N, U+1) of the cells to which the arcs from diagonal d lead.

        values: those of all cells, as in `_with_margins`
        """
        values = values[self.margin + d + self.steps]
        # An arc with a label leads to state u + 1.
        return torch.cat([values[: self.blanks], pad(values[self.blanks :, :, 1:], (0, 1))])

    def ends(self, scores: Tensor) -> Tensor:
        """Return the score (N,) of the cell where the paths of each utterance end."""
        return scores[self.margin + self.last_d, self.n, self.last_u]

    def alphas(self, chosen: Optional[Tensor] = None) -> Tensor:
        """Return the log-sum of all paths to each cell, with margins as in `_with_margins`.

        With `chosen` (T+U+1, N, U+1) int64, return the score of the best path to each cell, and
        write into `chosen` the number of the arc by which it arrives.
        """
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
        """Return the posterior (parts, T+U, N, U+1) of each part of each cell: the sum of the
        posteriors of the arcs that have the part in their weight. Arcs of labels count 1 +
        fastemit_lambda times in it. The log-weights are overwritten.

        It goes back from the last anti-diagonal. The posterior of an arc is that of the cell ahead
        times the share of the paths to that cell that come by the arc:
        exp(alpha + weight of the arc - alpha of the cell ahead). The posterior of a cell is the sum
        of those of its arcs, so no scores of the backward direction are needed.

        alphas: what `alphas` returned without `chosen`.
        """
        # The posterior of each cell: at the end of an utterance 1, or 0 if no path leads there.
        of_cells = self._with_margins(0.0)
        has_path = self.ends(alphas) != -torch.inf
        of_cells[self.margin + self.last_d, self.n, self.last_u] = has_path.double()
        for d in range(self.diagonals - 1, -1, -1):
            after = self._ahead(of_cells, d)
            # NaN where no path leads to the cell ahead.
            shares = (alphas[self.margin + d] + self.weights[:, d] - self._ahead(alphas, d)).exp_()
            taken = (shares * after).masked_fill_(after == 0, 0)
            of_cells[self.margin + d] += taken.sum(0)
            self.weights[:, d] = taken
        parts = self.weights.new_zeros(self.lattice.parts, *self.weights.shape[1:])
        for arc, taken in zip(self.lattice.arcs, self.weights):
            scaled = taken * (1 + fastemit_lambda) if arc.du else taken
            for part in arc.parts:
                parts[part] += scaled
            if arc.then_blank:  # the blank of the cell (t, u+1), on the next anti-diagonal
                parts[0, 1:, :, 1:] += scaled[:-1, :, :-1]
        return parts


def backward(
    call: Call,
    grad_losses: Tensor,
    arcs: Tensor,
    kept: Tensor,
    gradients: Sequence[Optional[Tensor]],
) -> None:
    """Add the gradients of encoder_out, decoder_out, weight and bias to `gradients`.

    For some cells at a time, compute the logits again, turn them into their gradient, and take that
    back through the output layer, dropout and the activation. Cells that add nothing are left out.

    Args
        grad_losses (M,): the gradients of the losses. A row whose gradient is 0 adds nothing, even
            if its posteriors or its inputs are NaN.
        arcs: the posteriors that forward wrote
        kept: not used; other backends keep logits in it
        gradients: one for each of the four: a contiguous tensor in the dtype of sums, or None if
            that gradient is not wanted
    """
    d_encoder, d_decoder, d_weight, d_bias = gradients
    joiner = _Joiner(call)
    counted = has_gradient(call, arcs).view(call.M, -1) & (grad_losses != 0).unsqueeze(1)
    for cells, tile in joiner.tiles(counted.flatten().nonzero().squeeze(1)):
        x, values, factors = joiner.activations(tile)
        activations = values * factors
        posteriors = arcs[: call.lattice.parts, cells].double() * grad_losses[tile.n].double()
        logits = torch.addmm(joiner.bias, activations, joiner.weight.t())
        gradient = _logit_gradients(call, logits, tile, posteriors.t())
        if call.clamp:
            bound = (call.clamp * grad_losses[tile.n].abs()).to(gradient.dtype).unsqueeze(1)
            # The durations of "tdt", which come last, are not clamped.
            columns = call.symbols if call.topology == "tdt" else call.V
            gradient[:, :columns].clamp_(-bound, bound)
        if d_bias is not None:
            d_bias += gradient.sum(0)
        if d_weight is not None:
            d_weight.addmm_(gradient.t(), activations)
        if d_encoder is None and d_decoder is None:
            continue
        # The gradient of x. x is a sum, so each of its two outputs adds this up over its cells.
        d_x = (gradient @ joiner.weight).mul_(joiner.activation.slope(x, values)).mul_(factors)
        if d_encoder is not None:
            frame = joiner.utterance_of[tile.n] * call.T + tile.t
            d_encoder.view(-1, call.H).index_add_(0, frame, d_x)
        if d_decoder is not None:
            d_decoder.view(-1, call.H).index_add_(0, tile.n * call.U1 + tile.u, d_x)


def _logit_gradients(call: Call, logits: Tensor, tile: _Tile, posteriors: Tensor) -> Tensor:
    """Overwrite the logits (cells, V) of some cells with their gradient, and return them.

    posteriors (cells, parts) float64: the posterior of each part times the gradient of its row's
        loss.
    """
    columns = _columns(call, tile.target)
    if call.topology == "tdt":  # a softmax of the symbols, and another of the durations
        symbols, durations = logits.split([call.symbols, call.V - call.symbols], 1)
        _softmax_gradient(symbols, columns[:, :2], posteriors[:, :2], 0.0)
        _softmax_gradient(durations, columns[:, 2:] - call.symbols, posteriors[:, 2:], 0.0)
    elif call.topology == "hat":
        # As in `_log_probabilities`: of a blank logit b, the blank has the probability sigmoid(b),
        # and a label sigmoid(-b) times its softmax among the labels. A target that is the blank
        # counts as the blank.
        blank_logit = logits[:, call.blank].to(torch.float64, copy=True)
        label = posteriors[:, 1].masked_fill(tile.target == call.blank, 0)
        blank = torch.where(tile.target == call.blank, posteriors.sum(1), posteriors[:, 0])
        logits[:, call.blank] = -torch.inf
        _softmax_gradient(logits, columns[:, 1:], label.unsqueeze(1), 0.0)
        d_blank = label * blank_logit.sigmoid() - blank * (-blank_logit).sigmoid()
        logits[:, call.blank] = d_blank.to(logits.dtype)
    else:
        _softmax_gradient(logits, columns, posteriors, call.label_smoothing)
    return logits


def _softmax_gradient(
    logits: Tensor, columns: Tensor, posteriors: Tensor, smoothing: float
) -> None:
    """Replace the logits (cells, C) of one softmax by their gradient.

    The gradient of a column with probability p is of_cell * p - of_column: the sum of all
    posteriors of the cell times p, less that of the parts at this column. With smoothing s,
    of_column becomes (1 - s) * of_column + s * of_cell / C.

    columns (cells, J): the columns of the logits that the J parts of each cell take
    posteriors (cells, J) float64: the posterior of each part times the gradient of its row's loss
    smoothing: label_smoothing of `transducer_loss`
    """
    exps = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    total = exps.sum(1, keepdim=True, dtype=torch.float64)
    # Parts may share a column: a target may be the blank.
    same = (columns.unsqueeze(2) == columns.unsqueeze(1)).double()
    of_column = (same * posteriors.unsqueeze(1)).sum(2)
    of_cell = posteriors.sum(1, keepdim=True)
    # At the columns of the parts of_cell * p - of_column is computed as
    # (of_cell - of_column) * p - of_column * (1 - p), where a small 1 - p keeps its digits.
    at_columns = exps.gather(1, columns).double()
    at_columns = ((of_cell - of_column) * at_columns - of_column * (total - at_columns)) / total
    # At all other columns of_column is 0.
    exps *= (of_cell / total).to(exps.dtype)
    if smoothing:
        shift = smoothing * of_cell / logits.shape[1]
        exps -= shift.to(exps.dtype)
        at_columns += smoothing * of_column - shift
    exps.scatter_(1, columns, at_columns.to(exps.dtype))


# What is read from the arcs of any backend: posteriors as a tensor, delays, the best path.


def _numbers(call: Call) -> Tensor:
    """Return the number of each cell, (M, T, U+1), in the order of the C++ code (csrc/cells.h): by
    row, then by anti-diagonal t + u, then by u. It is meaningless where there is no cell."""
    cells = call.cells()
    first = (cells.cumsum(0) - cells).view(-1, 1, 1)  # number of the first cell of a row
    t, u = (torch.arange(size, device=call.device) for size in (call.T, call.U1))
    t = t.view(-1, 1)
    diagonal = t + u
    if call.window is not None:
        before, first_u = windows.diagonals_of(call.band, call.T)[:, diagonal].unbind(-1)
        return first + before + u - first_u
    T_lengths, states = call.frames.view(-1, 1, 1).long(), call.U_lengths.view(-1, 1, 1).long() + 1
    # `before`: how many cells are on earlier diagonals. The diagonals of a T x (U+1) rectangle grow
    # until they have as many cells as its shorter side, then keep this length, then shrink.
    shorter, longer = torch.minimum(T_lengths, states), torch.maximum(T_lengths, states)
    while_growing = diagonal * (diagonal + 1) // 2
    while_equal = shorter * (shorter + 1) // 2 + (diagonal - shorter) * shorter
    # The diagonals from this one on have left, left - 1, ..., 1 cells.
    left = T_lengths + states - 1 - diagonal
    while_shrinking = T_lengths * states - left * (left + 1) // 2
    before = torch.where(diagonal <= longer, while_equal, while_shrinking)
    before = torch.where(diagonal <= shorter, while_growing, before)
    first_u = (diagonal - T_lengths + 1).clamp(min=0)  # a diagonal begins at u = 0 or at t = T - 1
    return first + before + u - first_u


def parts_of_cells(call: Call, arcs: Tensor, backend: str, padding: float) -> Tensor:
    """Return what forward of a backend wrote into arcs for each part of each cell, as a tensor
    (M, T, U+1, parts). It has `padding` where there is no cell.

    All cells of a part follow one another in arcs. Each backend has its own order of them:
    `numbers` has the place of each cell within a part."""
    is_cell = inside(call)
    parts = call.lattice.parts
    if not arcs.numel():  # there is no cell, since no window has a path
        return arcs.new_full((*is_cell.shape, parts), padding)
    if backend == "native":
        numbers = _numbers(call)
        part_size = call.cells().sum()  # arcs of a compiled graph has room for more
    elif backend == "triton" and call.window is not None:
        # Each frame has room for the same number of cells, the first state of its window first.
        part_size = arcs.shape[1]
        frame = torch.arange(call.M * call.T, device=call.device).view(call.M, call.T, 1)
        first, _ = windows.states_of_frames(call.band, call.T).split(1, -1)
        room = part_size // frame.numel()
        numbers = frame * room + torch.arange(call.U1, device=call.device) - first
    else:  # a row of arcs is a tensor (M, T, U+1)
        values = arcs[:parts].view(parts, *is_cell.shape).permute(1, 2, 3, 0)
        return values.masked_fill(~is_cell.unsqueeze(-1), padding)
    numbers = numbers.masked_fill(~is_cell, 0)
    values = torch.stack([arcs.view(-1)[numbers + part * part_size] for part in range(parts)], -1)
    return values.masked_fill(~is_cell.unsqueeze(-1), padding)


def mean_delay(posteriors: Tensor, reference: Optional[Tensor]) -> Tensor:
    """Return the mean frame (M,) at which the targets of each row are emitted, as `transducer_loss`
    returns it for return_delay. NaN for a row of which no target counts.

    posteriors (M, T, U): the probability that each target is emitted at each frame. A target with
        0 at all frames does not count.
    reference (M, U): frames that are subtracted. A target with a negative one does not count.
    """
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
    """Return the walk through lattices, whose parts it moves from frames to anti-diagonals.

    log_probabilities (N, T, U+1, parts): of the parts of each cell; -inf where there is no cell.
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

    log_probabilities (N, T, U+1, parts): of the parts of each cell; -inf where there is no cell.
    """
    N, T, U1, _ = log_probabilities.shape
    U_lengths, device = U_lengths.long(), log_probabilities.device
    walk = _walk_of(log_probabilities, T_lengths, U_lengths, lattice)
    chosen = U_lengths.new_zeros(T + U1, N, U1)  # the arc into each cell, which alphas writes
    total = walk.ends(walk.alphas(chosen))
    dts = torch.tensor([arc.dt for arc in lattice.arcs], device=device)
    dus = torch.tensor([arc.du for arc in lattice.arcs], device=device)
    # Each path is followed back from its end, by one arc at a time, to the cell (0, 0).
    n = torch.arange(N, device=device)
    u = U_lengths.clone()
    d = T_lengths.long() + U_lengths  # t + u
    frames = torch.full((N, U1), -1, dtype=torch.int64, device=device)  # of the label into u
    for _ in range(len(chosen) - 1):
        arc = chosen[d, n, u]
        # At (0, 0), and where no path leads to the end, there is no arc to follow: nothing changes.
        moves = (d > 0) & (total != -torch.inf)
        dt = torch.where(moves, dts[arc], 0)
        du = torch.where(moves, dus[arc], 0)
        # A label is of the frame from which its arc starts.
        frames[n, u] = torch.where(du == 1, d - u - dt, frames[n, u])
        d = d - dt - du
        u = u - du
    return frames[:, 1:], total


def confidences(
    log_probabilities: Tensor,
    T_lengths: Tensor,
    U_lengths: Tensor,
    lattice: Lattice,
    frames: Tensor,
    span: int,
) -> Tensor:
    """Return the probability (N, U) over all paths that each target is emitted at most `span`
    frames from its frame in `frames` (N, U); 0 where that frame is negative.

    It is the sum of the posteriors of the target's arcs from the frames within the span.
    """
    T = log_probabilities.shape[1]
    walk = _walk_of(log_probabilities, T_lengths, U_lengths, lattice)
    posteriors = walk.posteriors(walk.alphas(), fastemit_lambda=0.0)
    # Part 1 is that of the label; none follows the last state: (N, T, U).
    labels = _by_frames(posteriors[1], T)[:, :, :-1]
    t = torch.arange(T, device=frames.device).view(-1, 1)
    frames = frames.unsqueeze(1)
    return labels.masked_fill((frames < 0) | ((t - frames).abs() > span), 0).sum(1)
