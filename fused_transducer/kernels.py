"""The Triton kernels: log-probabilities of the arcs, lattice, gradients. `triton_backend` launches
them.

The number of a cell is (n * T + t) * S + u, padding included, where S is U+1. Blocks of padding end
before they do any work. Under a window, `band` (N, T, 2) int32 has the range of states of each
frame: the first, and the one behind the last. Then S is the most states of a frame, and the number
of a cell is (n * T + t) * S + u - first. Without a window, `band` is None.

No kernel adds with atomics: each sum has one owner, which adds in one order. None waits for the
host, since counts stay on the device. OPERAND is the dtype in which numbers are multiplied.

In backward, the cells that have a gradient are *listed*: `numbers` has their numbers in order, and
`positions` (cells,) how many there are up to each cell.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

#: Arguments that differ from batch to batch. Triton would compile a kernel anew when one becomes 1
#: or a multiple of 16.
OF_A_BATCH = ("N", "T", "U1", "S", "cells", "tile", "rows", "blocks")
#: Exponent of a probability of 0 in the lattice: below every sum of exponents of a path.
IMPOSSIBLE = tl.constexpr(-(2**56))
#: How outputs become log-probabilities (NORMALISER). TOGETHER: by one softmax. APART: the further
#: outputs have a softmax of their own. SIGMOID: the blank by a sigmoid, the others by a softmax.
TOGETHER, APART, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def _kernel(function):
    """Return `function` as a kernel that is compiled once for all batches: Triton must not make
    special versions for values of OF_A_BATCH."""
    names = [name for name in OF_A_BATCH if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=names)


@triton.jit
def _tanh(x):
    """Return tanh(x) of float32 x: by a polynomial near 0, where 1 - exp(-2|x|) loses digits."""
    z = x * x
    p = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -large, large))


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _normal(x):
    """Return the probability that a standard normal number is below x."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """Return the activation of float32 x; KIND: its number in ACTIVATIONS of call.py."""
    if KIND == 1:  # tanh
        x = _tanh(x)
    if KIND == 2:  # relu
        x = tl.where(x < 0, 0.0, x)
    if KIND == 3:  # sigmoid
        x = _sigmoid(x)
    if KIND == 4:  # leaky_relu
        x = tl.where(x < 0, 0.01 * x, x)
    if KIND == 5:  # silu
        x = x * _sigmoid(x)
    if KIND == 6:  # gelu
        x = x * _normal(x)
    if KIND == 7:  # selu
        x = tl.where(
            x > 0, 1.0507009873554805 * x, 1.7580993408473769 * _expm1(tl.where(x > 0, 0.0, x))
        )
    if KIND == 8:  # hardtanh
        x = tl.where(x < -1, -1.0, tl.where(x > 1, 1.0, x))
    return x


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """Return the derivative of an activation at x; KIND: the activation's number in ACTIVATIONS of
    call.py."""
    if KIND == 1:  # tanh
        a = _tanh(x)
        x = 1.0 - a * a
    if KIND == 2:  # relu
        x = tl.where(x > 0, 1.0, 0.0)
    if KIND == 3:  # sigmoid
        s = _sigmoid(x)
        x = s * (1.0 - s)
    if KIND == 4:  # leaky_relu
        x = tl.where(x > 0, 1.0, 0.01)
    if KIND == 5:  # silu
        s = _sigmoid(x)
        x = s * (1.0 + x * (1.0 - s))
    if KIND == 6:  # gelu
        x = _normal(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if KIND == 7:  # selu
        x = tl.where(
            x > 0, 1.0507009873554805, 1.7580993408473769 * tl.exp(tl.where(x > 0, 0.0, x))
        )
    if KIND == 8:  # hardtanh
        x = tl.where((x > -1) & (x < 1), 1.0, 0.0)
    return x


@triton.jit
def _log1p(x):
    """Return log(1 + x) of float32 x >= 0, with all digits of float32 for a small x too.

    With 1 + x = 2**k m, m = 1 + y and s = y / (2 + y), it is k log(2) + 2 (s + s**3 / 3 + s**5 / 5
    + ...). If k is 0, y is x itself: 1 + x has lost digits of a small x.
    """
    bits = (1.0 + x).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # 1 + x is 2**exponent times a number from 0.707 to 1.414
    near_one = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    y = tl.where(exponent == 0, x, near_one - 1.0)
    s = y / (2.0 + y)
    z = s * s
    log = 2.0 * s * (1.0 + z * (0.33333334 + z * (0.2 + z * (0.14285715 + z * 0.11111111))))
    k = exponent.to(tl.float32)
    # log(2) is in two parts, the first with so few bits that k times it is exact. The bits of a NaN
    # are no exponent.
    return tl.where(x == x, k * 0.693359375 + (log - k * 2.12194440e-4), x)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 of float32 x, with all digits of float32 for a small x too.

    For a small x it is the sum of x**n / n! for n from 1 to 8."""
    p = 1.3888889e-3 + x * (1.9841270e-4 + x * 2.4801587e-5)
    p = 1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (8.3333338e-3 + x * p))))
    return tl.where(tl.abs(x) < 0.5, x * p, tl.exp(x) - 1.0)


@triton.jit
def _two_to(exponent):
    """Return 2**exponent as float64, for int64 exponents up to 1023; 0 for those below -1022."""
    return ((tl.maximum(exponent, -1023) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _power(x):
    """Return exp(x) of float32 x as (mantissa float64 near 1, exponent int64): exp(x) is
    mantissa * 2**exponent, and this pair cannot underflow.

    The mantissa is 1 plus a float32, so that the digits of a small x are kept. Any x below -1e8
    counts as -1e8, but -inf gives (0, IMPOSSIBLE).
    """
    zero = x == -float("inf")
    x = tl.where(zero, 0.0, tl.where(x < -1e8, -1e8, x))
    # k is x / ln 2, rounded. ln 2 is in two parts (Cody and Waite): one float32 is too coarse.
    k = tl.floor(x * 1.44269504 + 0.5)
    mantissa = 1.0 + _expm1((x - k * 0.693359375) + k * 2.12194440e-4).to(tl.float64)
    return tl.where(zero, 0.0, mantissa), tl.where(zero, IMPOSSIBLE, k.to(tl.int64))


@triton.jit
def _log_sigmoid(x):
    """Return log(sigmoid(x)) of float32 x, without overflow."""
    return tl.where(x < 0, x, 0.0) - _log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _clamped(x, most):
    """Return x, held within -most and most; a NaN stays."""
    return tl.where(x > most, most, tl.where(x < -most, -most, x))


@triton.jit
def _exact_sum(x, y):
    """Return x + y of float32 as (sum, rest): the rounded sum, and what the rounding leaves out
    (Knuth's 2Sum, right whichever of x and y is larger)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


@triton.jit
def _product(a, weight, inside, low, sums, PRECISION: tl.constexpr, OPERAND: tl.constexpr):
    """Return sums + a @ w. w are the weights at the addresses `weight`, 0 where `inside` is false.

    With PRECISION "halves" the product is a @ (w + w_low) in float32, as three products in TF32.
    Then w has no more bits than TF32, and w_low lies `low` numbers behind it.
    """
    w = tl.load(weight, mask=inside, other=0.0)
    a = a.to(w.dtype)
    if PRECISION == "halves":
        # tl.dot would round a to the 11 bits of TF32: what that leaves out is multiplied too, but
        # only by w. The smaller products are added first.
        a_high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        sums = tl.dot(a - a_high, w, sums, input_precision="tf32")
        sums = tl.dot(
            a_high, tl.load(weight + low, mask=inside, other=0.0), sums, input_precision="tf32"
        )
        sums = tl.dot(a_high, w, sums, input_precision="tf32")
    else:
        sums = tl.dot(a.to(OPERAND), w.to(OPERAND), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _mixed(x):
    """Return a hash of uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _dropout(x, seed, n, t, u, h, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr):
    """Return x (cells, columns) after dropout: 0 where a hash of (seed, n, t, u, h) is below
    DROP_BELOW, else x * KEEP_SCALE. csrc/activations.h computes the same hash.

    seed: pointer to an int64; n, t, u: of each cell; h: number of each column
    """
    number = tl.load(seed)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    n, t, u = n.to(tl.uint32), t.to(tl.uint32), u.to(tl.uint32)
    first = _mixed(_mixed(_mixed(low ^ n) ^ t) ^ u)
    second = _mixed(_mixed(_mixed(high ^ n) + t) + u)
    bits = h.to(tl.uint32)[None, :] ^ first[:, None]
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = ((bits ^ (bits >> 15)) + second[:, None]) * 0xD35A2D97
    return tl.where((bits ^ (bits >> 15)).to(tl.int64) < DROP_BELOW, 0.0, x * KEEP_SCALE)


@triton.jit
def _sums(
    encoder,
    decoder,
    utterance_of,
    n,
    t,
    u,
    valid,
    h,
    HP,
    encoder_n,
    encoder_t,
    decoder_n,
    decoder_u,
):
    """Return encoder_out + decoder_out (cells, columns) float32, for the cells (n, t, u) and the
    columns h; 0 in cells that are not valid, and in columns from HP on.

    utterance_of: the utterance of each row n; None where that is n.
    encoder_n, encoder_t, decoder_n, decoder_u: strides of utterances and frames, of rows and states
    """
    inside = valid[:, None] & (h < HP)[None, :]
    n, t, u = n.to(tl.int64), t.to(tl.int64), u.to(tl.int64)
    y = tl.load(
        decoder + (n * decoder_n + u * decoder_u)[:, None] + h[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    if utterance_of is not None:  # from here on `n` is the utterance, since x is by utterance
        n = tl.load(utterance_of + n, mask=valid, other=0).to(tl.int64)
    x = tl.load(
        encoder + (n * encoder_n + t * encoder_t)[:, None] + h[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    return x + y


@triton.jit
def _block_of_cells(block, blocks, T_lengths, U_lengths, band, T, S, BM: tl.constexpr):
    """Return (valid, n, t, u, number) of the BM rows of a block: whether a row is a cell, then
    utterance, frame, state and number of the cell, see the head of this file.

    Each utterance has `blocks` blocks, and `block` counts them over all utterances.
    """
    n = block // blocks
    states = S if band is not None else tl.load(U_lengths + n) + 1
    within = (block % blocks) * BM + tl.arange(0, BM)
    valid = within < tl.load(T_lengths + n) * states
    n, t, u = n + tl.zeros_like(within), within // states, within % states
    cell = (n.to(tl.int64) * T + t) * S + u
    if band is not None:  # so far `u` counts from the frame's first state
        frame = band + (n.to(tl.int64) * T + t) * 2
        u += tl.load(frame, mask=valid, other=0)
        valid = valid & (u < tl.load(frame + 1, mask=valid, other=0))
    return valid, n, t, u, cell


@triton.jit
def _listed_cells(numbers, positions, cells, tile, first, rows, band, T, S, BM: tl.constexpr):
    """Return (valid, n, t, u, number) of BM rows of a tile, from row `first` on: whether a row is a
    listed cell, then utterance, frame, state and number of the cell.

    numbers, positions: of the listed cells, see the head of this file
    cells: length of `positions`, whose last entry is the number of listed cells
    tile, rows: the entry of `numbers` with which the tile begins, and the number of its rows
    """
    row = first + tl.arange(0, BM)
    valid = (tile + row < tl.load(positions + cells - 1)) & (row < rows)
    cell = tl.load(numbers + tile + row, mask=valid, other=0)
    n, t, u = cell // (T * S), cell // S % T, cell % S
    if band is not None:
        u += tl.load(band + (n.to(tl.int64) * T + t) * 2, mask=valid, other=0)
    return valid, n, t, u, cell.to(tl.int64)


@triton.jit
def _within(band, t, u, frames):
    """Return whether (t, u) is within the frames and the window of an utterance, and the first
    state in the window of frame t: 0 without a window. band: the window of this utterance, or
    None."""
    exists = (t >= 0) & (t < frames)
    first = tl.zeros_like(t)
    if band is not None:
        first = tl.load(band + t * 2, mask=exists, other=0)
        exists = exists & (u >= first) & (u < tl.load(band + t * 2 + 1, mask=exists, other=0))
    return exists, first


@_kernel
def activate(
    encoder, decoder, utterance_of, T_lengths, U_lengths, band, numbers, positions, activations, cells, tile, rows,
    blocks, T, S, encoder_n, encoder_t, decoder_n, decoder_u, seed,
    HP: tl.constexpr, KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LISTED: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the activations (rows, HP) of a tile of cells. If LISTED, the tile begins with
    entry `tile` of the listed cells, else with block `tile` of all blocks of cells."""
    first = tl.program_id(0).to(tl.int64) * BM
    if LISTED:
        valid, n, t, u, _ = _listed_cells(
            numbers, positions, cells, tile, first, rows, band, T, S, BM
        )
    else:
        valid, n, t, u, _ = _block_of_cells(
            tile + tl.program_id(0), blocks, T_lengths, U_lengths, band, T, S, BM
        )
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    x = _sums(
        encoder,
        decoder,
        utterance_of,
        n,
        t,
        u,
        valid,
        h,
        HP,
        encoder_n,
        encoder_t,
        decoder_n,
        decoder_u,
    )
    x = _activate(x, KIND)
    if DROP_BELOW != 0:
        x = _dropout(x, seed, n, t, u, h, DROP_BELOW, KEEP_SCALE)
    to = activations + (first + tl.arange(0, BM))[:, None] * HP + h[None, :]
    tl.store(to, x.to(activations.dtype.element_ty), mask=valid[:, None] & (h < HP)[None, :])


@triton.jit
def _logits(
    activations, weight, bias, row, valid, v,
    V: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr, WV: tl.constexpr, WH: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Return the logits (BM, BV) float32 of the outputs v; -inf beyond V."""
    sums = tl.zeros((BM, BV), dtype=tl.float32)
    for first in range(0, HP, BH):
        h = first + tl.arange(0, BH)
        a = tl.load(
            activations + row[:, None] * HP + h[None, :],
            mask=valid[:, None] & (h < HP)[None, :],
            other=0.0,
        )
        at = weight + v[None, :] * WV + h[:, None] * WH
        inside = (v < VP)[None, :] & (h < HP)[:, None]
        sums = _product(a, at, inside, VP * HP, sums, PRECISION, OPERAND)
    if HAS_BIAS:
        sums += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if V % BV != 0:
        sums = tl.where((v < V)[None, :], sums, -float("inf"))
    return sums


@_kernel
def log_probabilities(
    activations, weight, bias, targets, T_lengths, U_lengths, band, arcs, cells, tile, blocks, T, U1, S, BLANK,
    delay_penalty, label_smoothing,
    EXTRA: tl.constexpr, NORMALISER: tl.constexpr,
    V: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr, WV: tl.constexpr, WH: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    SMOOTHS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write arcs (rows, cells) float32.

    The rows of arcs are the log-probabilities of the blank, of the label and of EXTRA further
    columns; then the largest logit, and the log of the sum of exp(logit - largest). If the further
    columns are APART, two last rows have the same two numbers of these columns alone.

    The sum is computed as 1, for the largest logit, and `rest`, for the others: float32 would lose
    a small rest beside the 1.
    """
    cells = cells.to(tl.int64)
    valid, n, t, u, cell = _block_of_cells(
        tile + tl.program_id(0), blocks, T_lengths, U_lengths, band, T, S, BM
    )
    if tl.sum(valid.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    target = tl.load(
        targets + n * (U1 - 1) + u, mask=valid & (u < tl.load(U_lengths + n)), other=-1
    )

    high = tl.full((BM,), -float("inf"), dtype=tl.float32)
    rest = tl.zeros((BM,), dtype=tl.float32)
    at_blank = tl.zeros((BM,), dtype=tl.float32)
    at_label = tl.zeros((BM,), dtype=tl.float32)
    mean = tl.zeros((BM,), dtype=tl.float32)  # of the logits, where label smoothing needs it
    if EXTRA != 0:
        to = arcs + cell
        high_apart = tl.full((BM,), -float("inf"), dtype=tl.float32)
        rest_apart = tl.full((BM,), -1.0, dtype=tl.float32)  # the sum, 1 + rest, is 0 so far
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV)
        x = _logits(
            activations,
            weight,
            bias,
            row,
            valid,
            v,
            V,
            HP,
            VP,
            WV,
            WH,
            HAS_BIAS,
            PRECISION,
            OPERAND,
            BM,
            BV,
            BH,
        )
        if EXTRA != 0:
            for number in range(EXTRA):
                column = V - EXTRA + number
                if (first <= column) & (column < first + BV):
                    y = tl.sum(tl.where((v == column)[None, :], x, 0.0), 1)
                    tl.store(to + (2 + number) * cells, y, mask=valid)
                    if NORMALISER == APART:
                        shift = tl.where(high_apart == -float("inf"), 0.0, high_apart)
                        below = (1.0 + rest_apart) * tl.exp(high_apart - y)
                        rest_apart = tl.where(y > high_apart, below, rest_apart + tl.exp(y - shift))
                        high_apart = tl.maximum(high_apart, y)
            if NORMALISER == APART:
                x = tl.where((v < V - EXTRA)[None, :], x, -float("inf"))
        if NORMALISER == SIGMOID:
            if (first <= BLANK) & (BLANK < first + BV):
                at_blank = tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)
                x = tl.where((v == BLANK)[None, :], -float("inf"), x)
        higher = tl.maximum(high, tl.max(x, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        is_high = x == higher[:, None]
        ties = tl.where(higher == -float("inf"), 0.0, tl.sum(is_high.to(tl.float32), 1))
        scale = tl.exp(high - shift)
        others = tl.sum(tl.where(is_high, 0.0, tl.exp(x - shift[:, None])), 1)
        # The sum, 1 + rest, counts all before v times `scale`, the lower logits of v as `others`,
        # and the ties as 1 each. If `higher` is new, the 1 is of a tie, else of a logit before v.
        rest = rest * scale + others + tl.where(higher > high, scale + ties - 1.0, ties)
        high = higher
        if NORMALISER != SIGMOID:
            if (first <= BLANK) & (BLANK < first + BV):
                at_blank = tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)
        at_label += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        if SMOOTHS:
            mean += tl.sum(tl.where((v < V)[None, :], x, 0.0), 1) / V

    if SMOOTHS:
        at_blank = (1 - label_smoothing) * at_blank + label_smoothing * mean
        at_label = (1 - label_smoothing) * at_label + label_smoothing * mean
    normaliser = _log1p(rest)
    if NORMALISER == SIGMOID:
        high = tl.where(high == -float("inf"), 0.0, high)  # where the blank is the only symbol
    log_blank = (at_blank - high) - normaliser
    log_label = (at_label - high) - normaliser
    if NORMALISER == SIGMOID:
        log_blank = _log_sigmoid(at_blank)
        log_label = tl.where(target == BLANK, log_blank, log_label + _log_sigmoid(-at_blank))
    penalty = delay_penalty * ((tl.load(T_lengths + n) - 1).to(tl.float32) / 2 - t.to(tl.float32))
    to = arcs + cell
    tl.store(to, log_blank, mask=valid)
    tl.store(to + cells, tl.where(target < 0, -float("inf"), log_label + penalty), mask=valid)
    tl.store(to + (2 + EXTRA) * cells, high, mask=valid)
    tl.store(to + (3 + EXTRA) * cells, normaliser, mask=valid)
    if EXTRA != 0:
        if NORMALISER == APART:
            high, normaliser = high_apart, _log1p(rest_apart)
            tl.store(to + (4 + EXTRA) * cells, high, mask=valid)
            tl.store(to + (5 + EXTRA) * cells, normaliser, mask=valid)
        tl.debug_barrier()  # waits for the logits that other lanes stored
        for number in range(EXTRA):
            at = to + (2 + number) * cells
            tl.store(at, (tl.load(at, mask=valid, other=0.0) - high) - normaliser, mask=valid)


@triton.jit
def _arcs_into(blank, label, d, u, frames, last, band, S):
    """Return the blank's and the label's arc into each cell (d - u, u) of diagonal d: both
    addresses, whether each exists, and both log-probabilities. An arc that does not exist has -inf.

    blank, label: the addresses of the arcs out of the cells (0, u) of the utterance, without a
        window; those out of (t, u) are t * S further on. A window's first state in a frame is
        subtracted here.
    frames, last: T and U of the utterance. band: its window, or None.
    """
    t = d - u
    inside, first = _within(band, t, u, frames)
    inside = inside & (u <= last)
    has_blank, has_label = inside & (t > 0), inside & (u > first)
    # The blank's arc is that out of (t - 1, u), the label's that out of (t, u - 1).
    at_blank, at_label = blank + (t - 1) * S, label + t * S - 1 - first
    if band is not None:
        before, first = _within(band, t - 1, u, frames)  # the blank is from the frame before
        has_blank = has_blank & before
        at_blank -= first
    by_blank = tl.load(at_blank, mask=has_blank, other=-float("inf"))
    by_label = tl.load(at_label, mask=has_label, other=-float("inf"))
    return at_blank, at_label, has_blank, has_label, by_blank, by_label


@triton.jit
def _shares_from(blank, label, d, u, frames, last, band, S):
    """Return five blocks on the arcs from each cell (d - u, u) of diagonal d: whether the cell
    exists, whether its label exists, the share of the blank, the share of the label, and the offset
    of both shares from the addresses `blank` and `label`.

    Within a window an arc exists only if the cell that it leads to does. The blanks of the last
    frame lead to no cell, and exist all the same. Arguments as in `_arcs_into`."""
    t = d - u
    inside, first = _within(band, t, u, frames)
    inside = inside & (u <= last)
    has_blank, has_label = inside, inside & (u < last)
    at = t * S - first
    if band is not None:
        has_blank = has_blank & (_within(band, t + 1, u, frames)[0] | (t == frames - 1))
        has_label = has_label & _within(band, t, u + 1, frames)[0]
    of_blank = tl.load(blank + at, mask=has_blank, other=0.0)
    of_label = tl.load(label + at, mask=has_label, other=0.0)
    return inside, has_label, of_blank, of_label, at


@_kernel
def lattice(
    arcs, cells, T_lengths, U_lengths, band, losses, T, S, label_factor,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of utterance n, where n is the number of the program. With GRADIENT replace
    the log-probabilities of its arcs by posteriors; csrc/lattice.h explains how. In between, each
    arc holds its share: of the paths through the cell that it leads to, the part that came by it.

    arcs: (rows, cells); row 0 has the blanks, row 1 the labels. cells: columns of arcs.
    label_factor: what the posteriors of labels are multiplied by.

    alpha is mantissa (float64) * 2**exponent (int64), so that no diagonal waits for an exp or a log
    of the diagonal before. A diagonal stays in registers. What the next diagonal needs from memory
    is loaded one diagonal ahead.
    """
    n = tl.program_id(0).to(tl.int64)
    frames, last = tl.load(T_lengths + n), tl.load(U_lengths + n)
    u = tl.arange(0, BLOCK)
    if band is not None:
        band += n * T * 2
    blank = arcs + n * T * S + u  # of (t, u), once t * S is added
    label = blank + cells.to(tl.int64)

    left, right = tl.maximum(u - 1, 0), tl.minimum(u + 1, BLOCK - 1)
    mantissa = tl.where(u == 0, 1.0, 0.0).to(tl.float64)
    exponent = tl.where(u == 0, 0, IMPOSSIBLE)
    diagonals = frames + last
    d = tl.zeros_like(diagonals) + 1
    at_blank, at_label, has_blank, has_label, by_blank, by_label = _arcs_into(
        blank, label, d, u, frames, last, band, S
    )
    while d < diagonals:
        ahead = _arcs_into(blank, label, d + 1, u, frames, last, band, S)
        x, x_exponent = _power(by_blank)
        y, y_exponent = _power(by_label)
        x, x_exponent = x * mantissa, x_exponent + exponent
        y, y_exponent = y * tl.gather(mantissa, left, 0), y_exponent + tl.gather(exponent, left, 0)
        high = tl.maximum(x_exponent, y_exponent)
        x *= _two_to(x_exponent - high)
        y *= _two_to(y_exponent - high)
        total = x + y
        if GRADIENT:
            divisor = tl.where(total == 0, 1.0, total).to(tl.float32)
            tl.store(at_blank, x.to(tl.float32) / divisor, mask=has_blank)
            tl.store(at_label, y.to(tl.float32) / divisor, mask=has_label)
        # The exponent bits of total give the shift by which the new mantissa is in [1, 2), or 0.
        shift = (total.to(tl.int64, bitcast=True) >> 52) - 1023
        mantissa = total * _two_to(-shift)
        exponent = tl.where(total == 0, IMPOSSIBLE, high + shift)
        at_blank, at_label, has_blank, has_label, by_blank, by_label = ahead
        d += 1
    ends = u == last
    has_path, first = _within(band, frames - 1 + tl.zeros_like(u), u, frames)
    final = tl.load(blank + (frames - 1) * S - first, mask=ends & has_path, other=0.0)
    final = tl.sum(tl.where(ends, final, 0.0), 0).to(tl.float64)
    scale = tl.sum(tl.where(ends, exponent, 0), 0).to(tl.float64) * 0.6931471805599453
    likelihood = tl.log(tl.sum(tl.where(ends, mantissa, 0.0), 0)) + scale + final
    tl.store(losses + n, -likelihood)

    if GRADIENT:
        possible = tl.where(likelihood == -float("inf"), 0.0, 1.0)
        after = tl.zeros((BLOCK,), dtype=tl.float64)
        tl.debug_barrier()  # waits for the shares that other lanes stored
        d = diagonals - 1
        inside, has_label, by_blank, by_label, at = _shares_from(
            blank, label, d, u, frames, last, band, S
        )
        while d >= 0:
            ahead = _shares_from(blank, label, d - 1, u, frames, last, band, S)
            t = d - u
            of_blank = tl.where(
                t == frames - 1, tl.where(ends, possible, 0.0), after * by_blank.to(tl.float64)
            )
            of_label = tl.where(
                has_label, tl.gather(after, right, 0) * by_label.to(tl.float64), 0.0
            )
            after = tl.where(inside, of_blank + of_label, 0.0)
            tl.store(blank + at, of_blank.to(tl.float32), mask=inside)
            tl.store(label + at, (of_label * label_factor).to(tl.float32), mask=inside)
            inside, has_label, by_blank, by_label, at = ahead
            d -= 1


@triton.jit
def _first_of(d, frames, states):
    """Return what must be added to u to give the number of cell (d - u, u). The cells of an
    utterance are numbered one diagonal d = t + u after the other, on each diagonal in the order
    of u."""
    shorter, longer = tl.minimum(frames, states), tl.maximum(frames, states)
    # The diagonals have 1, 2, ... cells, then `shorter` cells, and at the end ..., 2, 1 again.
    # `before` counts the cells of those before d; `left` diagonals, from d on, remain.
    left = frames + states - 1 - d
    before = shorter * (shorter + 1) // 2 + (d - shorter) * shorter
    before = tl.where(d <= longer, before, frames * states - left * (left + 1) // 2)
    before = tl.where(d <= shorter, d * (d + 1) // 2, before)
    return before - tl.maximum(d - frames + 1, 0)  # less the first u of diagonal d


@triton.jit
def _place(d, u, frames, states, band, S):
    """Return the number of each cell (d - u, u) within its utterance: t * S + u - first under a
    window, and by diagonals without one."""
    if band is not None:
        t = d - u
        _, first_state = _within(band, t, u, frames)
        place = t * S + u - first_state
    else:
        place = _first_of(d, frames, states) + u
    return place


@triton.jit
def _arc(
    parts, cells, d, u, frames, states, band, S,
    ARCS: tl.constexpr, K: tl.constexpr, LABEL_ENDS: tl.constexpr,
):  # fmt: skip
    """Return arc K from each cell (d - u, u): whether it exists, whether a path ends with it, and
    its weight as mantissa float64 and exponent int64.

    It exists if it leads from a cell to a cell, or to the end (frames, states - 1). With a band
    these cells must be within it, and for a label (t, u + 1) too: the label is emitted at frame t.
    The weight is exp(x + rest), where x is the float32 sum of the parts and the constant, and rest
    is what its rounding left out.

    ARCS: (dt, du, part or -1, part or -1, then_blank, constant) of each arc, see lattices.Arc.
    """
    ARC: tl.constexpr = ARCS[K]
    t = d - u
    ends = (t + ARC[0] == frames) & (u + ARC[1] == states - 1)
    exists = (
        (t >= 0) & (t < frames) & (u >= 0) & (u + ARC[1] < states) & ((t + ARC[0] < frames) | ends)
    )
    if (ARC[1] == 1) and (not LABEL_ENDS):
        exists = exists & (t + ARC[0] < frames)
    if band is not None:
        leads = _within(band, t + ARC[0], u + ARC[1], frames)[0] | ends
        exists = exists & leads & _within(band, t, u, frames)[0]
        if ARC[1] == 1:
            exists = exists & _within(band, t, u + 1, frames)[0]
    at = parts + _place(d, u, frames, states, band, S)
    x = tl.zeros_like(u).to(tl.float32)
    rest = tl.zeros_like(x)
    if ARC[2] >= 0:
        x = tl.load(at + ARC[2] * cells, mask=exists, other=0.0)
    if ARC[3] >= 0:
        x, rest = _exact_sum(x, tl.load(at + ARC[3] * cells, mask=exists, other=0.0))
    if ARC[4]:
        blank = parts + _place(d + 1, u + 1, frames, states, band, S)  # of the cell (t, u + 1)
        # x is one part, without a rest: no arc with then_blank has a second part.
        x, rest = _exact_sum(x, tl.load(blank, mask=exists, other=0.0))
    if ARC[5] != 0:
        x, left_out = _exact_sum(x, ARC[5])
        rest += left_out
    mantissa, exponent = _power(x)
    # times exp(rest), which is 1 + rest since rest is small; with x = -inf rest may be NaN
    mantissa *= 1.0 + tl.where(x == -float("inf"), 0.0, rest).to(tl.float64)
    return exists, ends, mantissa, exponent


@_kernel
def by_diagonals(
    arcs, parts, T_lengths, U_lengths, band, cells, blocks, T, S,
    PARTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Copy the first PARTS rows of arcs into parts (PARTS, cells), with the cells of each utterance
    in the order of `_place`, so that `walk` reads contiguous numbers.

    Without a band this is by diagonals: the cells of utterance n then fill the columns from
    n * T * S on, without gaps. With a band arcs has the order already, and `to` is `cell`."""
    cells = cells.to(tl.int64)
    valid, n, t, u, cell = _block_of_cells(
        tl.program_id(0), blocks, T_lengths, U_lengths, band, T, S, BM
    )
    to = cell
    if band is None:
        first = n.to(tl.int64) * T * S
        to = first + _first_of(t + u, tl.load(T_lengths + n), tl.load(U_lengths + n) + 1) + u
    for part in range(PARTS):
        x = tl.load(arcs + part * cells + cell, mask=valid, other=0.0)
        tl.store(parts + part * cells + to, x, mask=valid)


@_kernel
def walk(
    parts, mantissas, exponents, losses, T_lengths, U_lengths, band, cells, T, S,
    ARCS: tl.constexpr, COUNT: tl.constexpr, LABEL_ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write alpha and the loss of an utterance (program 0 of axis 1), or its beta (program 1).

    Alpha of a cell is the sum over all paths from the first cell to this cell, beta the sum over
    all paths from this cell to the end. The end is (frames, states - 1), behind the last frame:
    arcs lead to it, and none leaves it. Alpha is row 0 and beta row 1 of mantissas float64 and of
    exponents int64, both (2, cells). Their cells are in the order of parts, see `by_diagonals`.

    One diagonal d = t + u comes after the other, with a lane for each state u: d rises for alpha,
    and falls for beta. A score is the sum over the arcs into the cell (alpha) or out of it (beta)
    of the arc's weight times the score at its other end.
    """
    cells = cells.to(tl.int64)
    ahead = 1 - tl.program_id(1)  # 1 for alpha, 0 for beta
    frames, states = (
        tl.load(T_lengths + tl.program_id(0)),
        tl.load(U_lengths + tl.program_id(0)) + 1,
    )
    u = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * T * S
    if band is not None:
        band += tl.program_id(0).to(tl.int64) * T * 2
    parts += first
    mantissas += (1 - ahead) * cells + first
    exponents += (1 - ahead) * cells + first
    mantissa = tl.full((BLOCK,), 1.0, dtype=tl.float64)
    exponent = tl.zeros((BLOCK,), dtype=tl.int64)
    begins = (u == 0) & (ahead == 1)  # alpha of the first cell is 1; beta begins at arcs to the end
    tl.store(mantissas + u, mantissa, mask=begins)
    tl.store(exponents + u, exponent, mask=begins)
    diagonals = frames + states - 1
    done = tl.zeros_like(diagonals)
    while done < diagonals:
        d = tl.where(ahead == 1, done + 1, diagonals - 1 - done)
        tl.debug_barrier()  # waits for the scores that other lanes stored
        mantissa = tl.zeros((BLOCK,), dtype=tl.float64)
        exponent = tl.full((BLOCK,), IMPOSSIBLE, dtype=tl.int64)
        for k in tl.static_range(COUNT):
            step = ARCS[k][0] + ARCS[k][1]
            exists, ends, x, x_exponent = _arc(
                parts, cells, d - ahead * step, u - ahead * ARCS[k][1], frames, states, band, S, ARCS, k,
                LABEL_ENDS,
            )  # fmt: skip
            sign = 1 - 2 * ahead
            other = _place(d + sign * step, u + sign * ARCS[k][1], frames, states, band, S)
            # For beta, the other end of an arc that ends the path is no cell: its score is 1.
            is_cell = exists & ((ahead == 1) | (ends == 0))
            x *= tl.load(mantissas + other, mask=is_cell, other=1.0)
            x_exponent += tl.load(exponents + other, mask=is_cell, other=0)
            x = tl.where(exists, x, 0.0)
            x_exponent = tl.where(exists, x_exponent, IMPOSSIBLE)
            high = tl.maximum(exponent, x_exponent)
            mantissa = mantissa * _two_to(exponent - high) + x * _two_to(x_exponent - high)
            exponent = high
        # Bring the mantissa back to 1 <= mantissa < 2, by the exponent that its own bits hold.
        shift = (mantissa.to(tl.int64, bitcast=True) >> 52) - 1023
        exponent = tl.where(mantissa == 0, IMPOSSIBLE, exponent + shift)
        mantissa *= _two_to(-shift)
        inside = _within(band, d - u, u, frames)[0] & (u < states)
        at = _place(d, u, frames, states, band, S)
        tl.store(mantissas + at, mantissa, mask=inside)
        tl.store(exponents + at, exponent, mask=inside)
        done += 1
    if ahead == 1:
        is_end = u == states - 1
        scale = tl.sum(tl.where(is_end, exponent, 0), 0).to(tl.float64) * 0.6931471805599453
        tl.store(
            losses + tl.program_id(0), -tl.log(tl.sum(tl.where(is_end, mantissa, 0.0), 0)) - scale
        )


@triton.jit
def _posterior(
    parts, mantissas, exponents, cells, d, u, frames, states, band, S,
    ARCS: tl.constexpr, K: tl.constexpr, LABEL_ENDS: tl.constexpr,
):  # fmt: skip
    """Return the probability float64 that a path takes arc K from each cell (d - u, u).

    It is alpha of the cell, times the arc's weight, times beta where the arc leads to, over beta of
    the first cell. Beta lies `cells` behind alpha in mantissas and exponents.
    """
    ARC: tl.constexpr = ARCS[K]
    exists, ends, x, x_exponent = _arc(
        parts, cells, d, u, frames, states, band, S, ARCS, K, LABEL_ENDS
    )
    here = _place(d, u, frames, states, band, S)
    ahead = cells + _place(d + ARC[0] + ARC[1], u + ARC[1], frames, states, band, S)
    x *= tl.load(mantissas + here, mask=exists, other=0.0)
    x_exponent += tl.load(exponents + here, mask=exists, other=0)
    is_cell = exists & (ends == 0)  # where a path ends, beta is 1
    x *= tl.load(mantissas + ahead, mask=is_cell, other=1.0)
    x_exponent += tl.load(exponents + ahead, mask=is_cell, other=0)
    is_possible = x != 0  # the exponent of a probability of 0 says nothing
    x = x / tl.load(mantissas + cells) * _two_to(x_exponent - tl.load(exponents + cells))
    return tl.where(exists & is_possible, x, 0.0)


@_kernel
def posteriors(
    arcs, parts, mantissas, exponents, T_lengths, U_lengths, band, cells, blocks, T, S, label_factor,
    ARCS: tl.constexpr, COUNT: tl.constexpr, LABEL_ENDS: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Write the posterior of each part of a block's cells into the first PARTS rows of arcs. It is
    a sum over the arcs that contain the part; arcs of labels count label_factor times.

    ARCS: as in `_arc`. An arc contains one or two parts of the cell where it begins. One with
    then_blank also contains the blank (part 0) of the cell (t, u+1)."""
    valid, n, t, u, cell = _block_of_cells(
        tl.program_id(0), blocks, T_lengths, U_lengths, band, T, S, BM
    )
    if tl.sum(valid.to(tl.int32), 0) == 0:
        return
    cells = cells.to(tl.int64)
    frames, states = tl.load(T_lengths + n), tl.load(U_lengths + n) + 1
    d = tl.where(valid, t + u, -1)
    first = (tl.program_id(0) // blocks).to(tl.int64) * T * S
    if band is not None:
        band += (tl.program_id(0) // blocks).to(tl.int64) * T * 2
    parts += first
    mantissas += first
    exponents += first
    to = arcs + cell
    for part in tl.static_range(PARTS):
        total = tl.zeros((BM,), dtype=tl.float64)
        for k in tl.static_range(COUNT):
            factor = label_factor if ARCS[k][1] else 1.0
            if (ARCS[k][2] == part) or (ARCS[k][3] == part):
                taken = _posterior(
                    parts,
                    mantissas,
                    exponents,
                    cells,
                    d,
                    u,
                    frames,
                    states,
                    band,
                    S,
                    ARCS,
                    k,
                    LABEL_ENDS,
                )
                total += taken * factor
            if (part == 0) and ARCS[k][4]:  # the arc from (t, u - 1) ends with this cell's blank
                taken = _posterior(
                    parts, mantissas, exponents, cells, d - 1, u - 1, frames, states, band, S, ARCS, k,
                    LABEL_ENDS,
                )  # fmt: skip
                total += taken * factor
        tl.store(to + part * cells, total.to(tl.float32), mask=valid)


@_kernel
def list_cells(numbers, positions, cells, BLOCK: tl.constexpr):
    """Write to `numbers` the numbers of the listed cells, in order.

    positions (cells,): for each cell the number of listed cells up to this one, itself included.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    here = tl.load(positions + cell, mask=inside, other=0)
    before = tl.load(positions + cell - 1, mask=inside & (cell > 0), other=0)
    tl.store(numbers + before, cell, mask=inside & (here > before))


@_kernel
def logit_gradients(
    activations, weight, bias, targets, U_lengths, band, arcs, grad_losses, numbers, positions, gradients,
    cells, tile, rows, T, U1, S, BLANK, label_smoothing, clamp,
    EXTRA: tl.constexpr, NORMALISER: tl.constexpr,
    V: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr, WV: tl.constexpr, WH: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    SMOOTHS: tl.constexpr, CLAMPS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the gradients (rows, VP) of the logits of a tile's listed cells; 0 beyond V. The tile
    has `rows` rows, and begins with the listed cell `tile`.

    Without smoothing, the gradient of a logit in a softmax is `every` p - arc: p its probability,
    `every` the posteriors of all arcs in the softmax, arc those of its own arcs. The loop writes
    `every` p to all columns of symbols; the lines after it replace those of blank and label.
    """
    cells = cells.to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * BM
    if tile + begin >= tl.load(positions + cells - 1):  # behind the last listed cell
        return
    valid, n, t, u, cell = _listed_cells(
        numbers, positions, cells, tile, begin, rows, band, T, S, BM
    )
    row = begin + tl.arange(0, BM)
    target = tl.load(
        targets + n * (U1 - 1) + u, mask=valid & (u < tl.load(U_lengths + n)), other=-1
    )
    scale = tl.load(grad_losses + n).to(tl.float32)
    most = clamp * tl.abs(scale)
    of_blank = tl.load(arcs + cell, mask=valid, other=0.0) * scale
    of_label = tl.load(arcs + cells + cell, mask=valid, other=0.0) * scale
    high = tl.load(arcs + (2 + EXTRA) * cells + cell, mask=valid, other=0.0)
    normaliser = tl.load(arcs + (3 + EXTRA) * cells + cell, mask=valid, other=0.0)
    if NORMALISER == SIGMOID:
        of_blank += tl.where(target == BLANK, of_label, 0.0)
        of_label = tl.where(target == BLANK, 0.0, of_label)
    both = of_blank + of_label
    # `every` adds up the posteriors of all arcs in the softmax of the symbols, ...
    every = both
    further = tl.zeros((BM,), dtype=tl.float32)
    high_further, normaliser_further = high, normaliser
    if EXTRA != 0:
        for number in range(EXTRA):
            further += tl.load(arcs + (2 + number) * cells + cell, mask=valid, other=0.0) * scale
        if NORMALISER == APART:
            high_further = tl.load(arcs + (4 + EXTRA) * cells + cell, mask=valid, other=0.0)
            normaliser_further = tl.load(arcs + (5 + EXTRA) * cells + cell, mask=valid, other=0.0)
        else:
            every += further
            further = every  # ... and `further` those in the softmax of the further columns
    if NORMALISER == SIGMOID:
        every = of_label
    to = gradients + row * VP
    log_blank = tl.zeros((BM,), dtype=tl.float32)
    log_label = tl.zeros((BM,), dtype=tl.float32)
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV)
        x = _logits(
            activations,
            weight,
            bias,
            row,
            valid,
            v,
            V,
            HP,
            VP,
            WV,
            WH,
            HAS_BIAS,
            PRECISION,
            OPERAND,
            BM,
            BV,
            BH,
        )
        if EXTRA != 0:
            for number in range(EXTRA):
                column = V - EXTRA + number
                if (first <= column) & (column < first + BV):
                    y = tl.sum(tl.where((v == column)[None, :], x, 0.0), 1)
                    y = (y - high_further) - normaliser_further
                    posterior = (
                        tl.load(arcs + (2 + number) * cells + cell, mask=valid, other=0.0) * scale
                    )
                    of_column = (further - posterior) * tl.exp(y) + posterior * _expm1(y)
                    if CLAMPS and NORMALISER != APART:
                        of_column = _clamped(of_column, most)
                    tl.store(to + column, of_column.to(gradients.dtype.element_ty), mask=valid)
        if NORMALISER == SIGMOID:
            if (first <= BLANK) & (BLANK < first + BV):
                log_blank = tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)  # its logit
                x = tl.where((v == BLANK)[None, :], -float("inf"), x)
        x = (x - high[:, None]) - normaliser[:, None]
        if NORMALISER != SIGMOID:
            if (first <= BLANK) & (BLANK < first + BV):
                log_blank = tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)
        log_label += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        g = tl.exp(x)
        if SMOOTHS:
            g = tl.where((v < V)[None, :], g - label_smoothing / V, 0.0)
        g = every[:, None] * g
        if CLAMPS:
            g = _clamped(g, most[:, None])
        stored = valid[:, None] & (v < VP)[None, :]
        if EXTRA != 0:
            stored = stored & ((v < V - EXTRA) | (v >= V))[None, :]
        tl.store(to[:, None] + v[None, :], g.to(gradients.dtype.element_ty), mask=stored)

    # (arc + other) p - arc is other p + arc (p - 1), where expm1 keeps the digits of p - 1
    is_blank = target == BLANK  # then both arcs have the column of the blank
    at_blank = tl.where(is_blank, both, of_blank) * _expm1(log_blank)
    at_blank += tl.where(is_blank, 0.0, of_label * tl.exp(log_blank))
    at_label = of_blank * tl.exp(log_label) + of_label * _expm1(log_label)
    if NORMALISER == SIGMOID:
        at_blank = of_label * _sigmoid(log_blank) - of_blank * _sigmoid(-log_blank)
        at_label = of_label * _expm1(log_label)
    if NORMALISER == TOGETHER:
        if EXTRA != 0:
            at_blank += (every - both) * tl.exp(log_blank)
            at_label += (every - both) * tl.exp(log_label)
    if SMOOTHS:
        at_blank += label_smoothing * (tl.where(is_blank, both, of_blank) - both / V)
        at_label += label_smoothing * (of_label - both / V)
    if CLAMPS:
        at_blank = _clamped(at_blank, most)
        at_label = _clamped(at_label, most)
    tl.debug_barrier()  # other lanes have stored these columns in the loop
    tl.store(to + BLANK, at_blank.to(gradients.dtype.element_ty), mask=valid)
    is_label = valid & (target >= 0) & (target < V) & (target != BLANK)
    tl.store(to + target, at_label.to(gradients.dtype.element_ty), mask=is_label)


@_kernel
def input_gradients(
    encoder, decoder, utterance_of, weight, band, numbers, positions, gradients, sums, cells, tile, rows, T, S,
    encoder_n, encoder_t, decoder_n, decoder_u, seed,
    HP: tl.constexpr, VP: tl.constexpr, WV: tl.constexpr, WH: tl.constexpr,
    KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write sums (rows, HP): the gradient of encoder_out + decoder_out at each listed cell of a
    tile. The tile has `rows` rows, and begins with the listed cell `tile`.

    gradients (rows, VP): those of the logits of these cells.
    """
    begin = tl.program_id(0).to(tl.int64) * BM
    if tile + begin >= tl.load(positions + cells - 1):  # behind the last listed cell
        return
    valid, n, t, u, _ = _listed_cells(numbers, positions, cells, tile, begin, rows, band, T, S, BM)
    row = begin + tl.arange(0, BM)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    of_sums = tl.zeros((BM, BH), dtype=tl.float32)
    for first in range(0, VP, BV):
        v = first + tl.arange(0, BV)
        g = tl.load(
            gradients + row[:, None] * VP + v[None, :],
            mask=valid[:, None] & (v < VP)[None, :],
            other=0.0,
        )
        at = weight + v[:, None] * WV + h[None, :] * WH
        inside = (v < VP)[:, None] & (h < HP)[None, :]
        of_sums = _product(g, at, inside, VP * HP, of_sums, PRECISION, OPERAND)
    if KIND != 0:
        x = _sums(
            encoder,
            decoder,
            utterance_of,
            n,
            t,
            u,
            valid,
            h,
            HP,
            encoder_n,
            encoder_t,
            decoder_n,
            decoder_u,
        )
        of_sums = of_sums * _slope(x, KIND)
    if DROP_BELOW != 0:
        of_sums = _dropout(of_sums, seed, n, t, u, h, DROP_BELOW, KEEP_SCALE)
    to = sums + row[:, None] * HP + h[None, :]
    tl.store(to, of_sums.to(sums.dtype.element_ty), mask=valid[:, None] & (h < HP)[None, :])


@_kernel
def weight_gradients(
    activations, gradients, positions, d_weight, d_bias, cells, tile, rows,
    V: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, COMPILED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile's cells to d_weight (splits, V, HP) and d_bias (splits, V), both
    float32. The tile's rows are split: each split sums SHARE of them."""
    begin = tl.program_id(2).to(tl.int64) * SHARE
    end = tl.minimum(tl.minimum(begin + SHARE, rows), tl.load(positions + cells - 1) - tile)
    if begin >= end:
        return
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    of_weight = tl.zeros((BV, BH), dtype=tl.float32)
    of_bias = tl.zeros((BV,), dtype=tl.float32)
    # In Triton's interpreter the end of a range cannot be a tensor. Masks leave out further rows.
    for first in range(0, end - begin if COMPILED else SHARE, BM):
        row = begin + first + tl.arange(0, BM)
        at = gradients + row[None, :] * VP + v[:, None]
        g = tl.load(at, mask=(v < VP)[:, None] & (row < end)[None, :], other=0.0)
        if WEIGHT:
            at = activations + row[:, None] * HP + h[None, :]
            a = tl.load(at, mask=(row < end)[:, None] & (h < HP)[None, :], other=0.0)
            of_weight = tl.dot(g.to(OPERAND), a.to(OPERAND), of_weight, input_precision=PRECISION)
        if BIAS:
            of_bias += tl.sum(g.to(tl.float32), 1)
    split = tl.program_id(2).to(tl.int64) * V
    if WEIGHT:
        inside = (v < V)[:, None] & (h < HP)[None, :]
        to = d_weight + (split + v)[:, None] * HP + h[None, :]
        tl.store(to, tl.load(to, mask=inside, other=0.0) + of_weight, mask=inside)
    if BIAS:
        if tl.program_id(1) == 0:  # the programs along h have the same sum: one adds it
            at = d_bias + split + v
            tl.store(at, tl.load(at, mask=v < V, other=0.0) + of_bias, mask=v < V)


@_kernel
def add_to_encoder(
    sums, numbers, positions, d_encoder, utterance_of, cells, tile, rows, T, S, H, HP,
    BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile's cells to their frames in d_encoder.

    Of P programs, program i adds to the frames i, i + P, i + 2 P and so on, counted from the first
    frame of the tile. The listed cells of a frame are contiguous. With utterance_of there are T
    programs: each has the same frame of every row, so that no two add to one frame of an utterance.
    """
    count = tl.load(positions + cells - 1)
    if tile >= count:
        return
    tile = tile.to(tl.int64)
    first = tl.load(numbers + tile) // S  # frames, counted over all rows
    last = tl.load(numbers + tl.minimum(tile + rows, count) - 1) // S
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    frame = first + tl.program_id(0)
    while frame <= last:
        # `start` listed cells come before the frame; rows begin..end - 1 of the tile are its own
        start = tl.load(positions + frame * S - 1, mask=frame > 0, other=0)
        begin = tl.maximum(start - tile, 0)
        end = tl.minimum(tl.load(positions + frame * S + S - 1) - tile, rows)
        if begin < end:
            total = tl.zeros((BH,), dtype=tl.float32)
            while begin < end:
                row = begin + tl.arange(0, BM)
                inside = (row < end)[:, None] & (h < H)[None, :]
                x = tl.load(
                    sums + row.to(tl.int64)[:, None] * HP + h[None, :], mask=inside, other=0.0
                )
                total += tl.sum(x.to(tl.float32), 0)
                begin += BM
            of_encoder = frame.to(tl.int64)
            if utterance_of is not None:
                of_encoder = tl.load(utterance_of + frame // T).to(tl.int64) * T + frame % T
            to = d_encoder + of_encoder * H + h
            tl.store(to, tl.load(to, mask=h < H, other=0.0) + total, mask=h < H)
        frame += tl.num_programs(0)


@_kernel
def add_to_decoder(
    sums, numbers, positions, d_decoder, band, cells, tile, rows, T, U1, S, H, HP,
    BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile's cells to their states (n, u) in d_decoder. A state has at most
    one cell in each frame.

    Of P programs, program i adds to the states i, i + P, i + 2 P and so on, counted from the first
    state of the tile's first utterance.
    """
    count = tl.load(positions + cells - 1)
    if tile >= count:
        return
    tile = tile.to(tl.int64)
    # The tile's first frame, and the frame behind its last, counted over all utterances.
    first = tl.load(numbers + tile) // S
    behind = tl.load(numbers + tl.minimum(tile + rows, count) - 1) // S + 1
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    state = first // T * U1 + tl.program_id(0)
    while state < ((behind - 1) // T + 1) * U1:
        n, u = state // U1, state % U1
        begin = tl.maximum(first, n * T)
        end = tl.minimum(behind, (n + 1) * T)
        total = tl.zeros((BH,), dtype=tl.float32)
        while begin < end:
            frame = begin + tl.arange(0, BM)
            has_cell = frame < end
            cell = frame * S + u
            if band is not None:
                low = tl.load(band + frame.to(tl.int64) * 2, mask=has_cell, other=0)
                has_cell = has_cell & (u >= low) & (u < low + S)
                cell -= low
            # How many cells are listed up to this one, and before it: it is listed if they differ.
            here = tl.load(positions + cell, mask=has_cell, other=0)
            before = tl.load(positions + cell - 1, mask=has_cell & (cell > 0), other=0)
            # The rows of `sums` are the tile's cells, in the order of the list.
            row = (before - tile).to(tl.int64)
            mine = (here > before) & (row >= 0) & (row < rows)
            inside = mine[:, None] & (h < H)[None, :]
            x = tl.load(sums + row[:, None] * HP + h[None, :], mask=inside, other=0.0)
            total += tl.sum(x.to(tl.float32), 0)
            begin += BM
        to = d_decoder + state.to(tl.int64) * H + h
        tl.store(to, tl.load(to, mask=h < H, other=0.0) + total, mask=h < H)
        state += tl.num_programs(0)
