"""The Triton kernels: log-probabilities of the arcs, lattice, gradients.

A cell is numbered (n * T + t) * (U+1) + u, padding included; blocks of padding end before they do any work.  No kernel
adds with atomics, and none waits for the host: each sum has one owner that adds in one order, and counts stay on the
device.  `triton_backend` launches them.  OPERAND: the dtype in which numbers are multiplied.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

#: Numbers that differ from batch to batch: a kernel is not compiled anew for those that are 1 or multiples of 16.
OF_A_BATCH = ("T", "U1", "cells", "tile", "rows", "blocks")


def _kernel(function):
    """Return `function` as a kernel that is compiled once for all batches."""
    names = [name for name in OF_A_BATCH if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=names)


@triton.jit
def _tanh(x):
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -large, large))


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """The activation of float32; KIND: its number in ACTIVATIONS of call.py."""
    if KIND == 1:
        x = _tanh(x)
    if KIND == 2:
        x = tl.where(x < 0, 0.0, x)
    if KIND == 3:
        x = _sigmoid(x)
    if KIND == 4:
        x = x * _sigmoid(x)
    if KIND == 5:
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 6:
        x = tl.where(x < 0, 0.01 * x, x)
    if KIND == 7:
        x = x + tl.sin(x) * tl.sin(x)
    return x


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """The derivative of `_activate`."""
    if KIND == 1:
        a = _tanh(x)
        x = 1.0 - a * a
    if KIND == 2:
        x = tl.where(x > 0, 1.0, 0.0)
    if KIND == 3:
        s = _sigmoid(x)
        x = s * (1.0 - s)
    if KIND == 4:
        s = _sigmoid(x)
        x = s * (1.0 + x * (1.0 - s))
    if KIND == 5:
        x = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if KIND == 6:
        x = tl.where(x > 0, 1.0, 0.01)
    if KIND == 7:
        x = 1.0 + tl.sin(2.0 * x)
    return x


@triton.jit
def _mixed(x):
    """A hash of uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _dropout(x, seed, n, t, u, h, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr):
    """x (cells, columns) times 0 or KEEP_SCALE.  The hash is that of csrc/activations.h."""
    number = tl.load(seed)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    n, t, u = n.to(tl.uint32), t.to(tl.uint32), u.to(tl.uint32)
    first = _mixed(_mixed(_mixed(low ^ n) ^ t) ^ u)
    second = _mixed(_mixed(_mixed(high ^ n) + t) + u)
    bits = h.to(tl.uint32)[None, :] ^ first[:, None]
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = ((bits ^ (bits >> 15)) + second[:, None]) * 0xD35A2D97
    bits = bits ^ (bits >> 15)
    return tl.where(bits.to(tl.int64) < DROP_BELOW, 0.0, x * KEEP_SCALE)


@triton.jit
def _sums(encoder, decoder, n, t, u, valid, h, H, encoder_n, encoder_t, decoder_n, decoder_u):
    """encoder_out + decoder_out of some cells: (cells, columns) float32; 0 beyond H and where not valid."""
    inside = valid[:, None] & (h < H)[None, :]
    x = tl.load(encoder + (n * encoder_n + t * encoder_t)[:, None] + h[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(decoder + (n * decoder_n + u * decoder_u)[:, None] + h[None, :], mask=inside, other=0.0).to(tl.float32)
    return x + y


@triton.jit
def _block_of_cells(block, blocks, T_lengths, U_lengths, BM: tl.constexpr):
    """Block number `block` of all, each utterance having `blocks`: which of its rows are cells, and where these are."""
    n = (block // blocks).to(tl.int64)
    states = tl.load(U_lengths + n) + 1
    within = (block % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    valid = within < tl.load(T_lengths + n) * states
    return valid, n + tl.zeros_like(within), within // states, within % states


@triton.jit
def _listed_cells(numbers, positions, cells, tile, first, rows, T, U1, BM: tl.constexpr):
    """Rows `first` to `first` + BM of the tile that begins with cell number `tile` of those that count: which of them
    are cells, and where these are."""
    row = first + tl.arange(0, BM)
    valid = (tile + row < tl.load(positions + cells - 1)) & (row < rows)
    cell = tl.load(numbers + tile + row, mask=valid, other=0)
    return valid, cell // (T * U1), cell // U1 % T, cell % U1


@_kernel
def activate(
    encoder, decoder, T_lengths, U_lengths, numbers, positions, activations, cells, tile, rows, blocks,
    T, U1, encoder_n, encoder_t, decoder_n, decoder_u, seed,
    H: tl.constexpr, KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LISTED: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """activations (rows, H) of a tile: of the cells from number `tile` of those that count on (LISTED), or of blocks of
    cells from block `tile` on."""
    first = tl.program_id(0).to(tl.int64) * BM
    if LISTED:
        valid, n, t, u = _listed_cells(numbers, positions, cells, tile, first, rows, T, U1, BM)
    else:
        valid, n, t, u = _block_of_cells(tile + tl.program_id(0), blocks, T_lengths, U_lengths, BM)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    x = _activate(_sums(encoder, decoder, n, t, u, valid, h, H, encoder_n, encoder_t, decoder_n, decoder_u), KIND)
    if DROP_BELOW != 0:
        x = _dropout(x, seed, n, t, u, h, DROP_BELOW, KEEP_SCALE)
    to = activations + (first + tl.arange(0, BM))[:, None] * H + h[None, :]
    tl.store(to, x.to(activations.dtype.element_ty), mask=valid[:, None] & (h < H)[None, :])


@triton.jit
def _logits(
    activations, weight, bias, row, valid, v,
    H: tl.constexpr, V: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """(BM, BV) float32 for the symbols v; -inf beyond V."""
    sums = tl.zeros((BM, BV), dtype=tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        a = tl.load(activations + row[:, None] * H + h[None, :], mask=valid[:, None] & (h < H)[None, :], other=0.0)
        w = tl.load(weight + v[None, :] * H + h[:, None], mask=(v < V)[None, :] & (h < H)[:, None], other=0.0)
        sums = tl.dot(a.to(w.dtype).to(OPERAND), w.to(OPERAND), sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    return tl.where((v < V)[None, :], sums, -float("inf"))


@_kernel
def log_probabilities(
    activations, weight, bias, targets, T_lengths, U_lengths, arcs, cells, tile, blocks, T, U1, BLANK,
    delay_penalty, label_smoothing,
    H: tl.constexpr, V: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    SMOOTHS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """arcs (4, cells) float32 of each cell: log-probability of the blank and of the label, the largest logit, and the
    log of the sum of exp(logit - largest).

    That sum is 1 for the largest and `rest` for the others, which float32 would lose beside the 1.
    """
    valid, n, t, u = _block_of_cells(tile + tl.program_id(0), blocks, T_lengths, U_lengths, BM)
    if tl.sum(valid.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    target = tl.load(targets + n * (U1 - 1) + u, mask=valid & (u < tl.load(U_lengths + n)), other=-1)

    high = tl.full((BM,), -float("inf"), dtype=tl.float32)
    rest = tl.zeros((BM,), dtype=tl.float32)
    at_blank = tl.zeros((BM,), dtype=tl.float32)
    at_label = tl.zeros((BM,), dtype=tl.float32)
    mean = tl.zeros((BM,), dtype=tl.float32)  # of the logits, where label smoothing needs it
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV).to(tl.int64)
        x = _logits(activations, weight, bias, row, valid, v, H, V, HAS_BIAS, PRECISION, OPERAND, BM, BV, BH)
        higher = tl.maximum(high, tl.max(x, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        is_high = (x == higher[:, None]) & (higher != -float("inf"))[:, None]
        ties = tl.sum(is_high.to(tl.float32), 1)
        scale = tl.exp(high - shift)
        others = tl.sum(tl.where(is_high, 0.0, tl.exp(x - shift[:, None])), 1)
        rest = rest * scale + others + tl.where(higher > high, scale + ties - 1.0, ties)
        high = higher
        at_blank += tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)
        at_label += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        if SMOOTHS:
            mean += tl.sum(tl.where((v < V)[None, :], x, 0.0), 1) / V

    if SMOOTHS:
        at_blank += label_smoothing * (mean - at_blank)
        at_label += label_smoothing * (mean - at_label)
    normaliser = tl.log(1.0 + rest.to(tl.float64))
    blank = ((at_blank - high).to(tl.float64) - normaliser).to(tl.float32)
    penalty = delay_penalty * ((tl.load(T_lengths + n) - 1).to(tl.float64) / 2 - t.to(tl.float64))
    label = ((at_label - high).to(tl.float64) - normaliser + penalty).to(tl.float32)
    label = tl.where(target < 0, -float("inf"), label)
    to = arcs + (n * T + t) * U1 + u
    tl.store(to, blank, mask=valid)
    tl.store(to + cells, label, mask=valid)
    tl.store(to + 2 * cells, high, mask=valid)
    tl.store(to + 3 * cells, normaliser.to(tl.float32), mask=valid)


@_kernel
def lattice(
    arcs, cells, T_lengths, U_lengths, losses, dropped, scratch, T, U1, negligible, label_factor,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One utterance: its loss, and posteriors in place of its log-probabilities.  csrc/lattice.h explains how.

    scratch (N, 2, BLOCK) float64 hands a diagonal from lane to lane.
    """
    n = tl.program_id(0).to(tl.int64)
    frames = tl.load(T_lengths + n)
    last = tl.load(U_lengths + n)
    u = tl.arange(0, BLOCK).to(tl.int64)
    blank = arcs + n * T * U1 + u  # of (t, u), once t * U1 is added
    label = blank + cells
    row = scratch + n * 2 * BLOCK + u

    alpha = tl.where(u == 0, 0.0, -float("inf")).to(tl.float64)
    tl.store(row, alpha)
    diagonals = frames + last
    d = tl.zeros_like(diagonals) + 1
    while d < diagonals:
        tl.debug_barrier()
        t = d - u
        inside = (t >= 0) & (t < frames) & (u <= last)
        has_blank = inside & (t > 0)
        has_label = inside & (u > 0)
        left = tl.load(row + ((d - 1) % 2) * BLOCK - 1, mask=has_label, other=-float("inf"))
        by_blank = tl.load(blank + (t - 1) * U1, mask=has_blank, other=-float("inf")).to(tl.float64)
        by_label = tl.load(label + t * U1 - 1, mask=has_label, other=-float("inf")).to(tl.float64)
        x = tl.where(has_blank, alpha + by_blank, -float("inf"))
        y = tl.where(has_label, left + by_label, -float("inf"))
        high = tl.where(x > y, x, y)
        low = tl.where(x > y, y, x)
        impossible = (high == -float("inf")) & (low == -float("inf"))
        share = tl.where(impossible, 0.0, tl.exp(low - high))
        alpha = high + tl.log(1.0 + share)
        tl.store(row + (d % 2) * BLOCK, alpha)
        if GRADIENT:
            larger = 1.0 / (1.0 + share)
            smaller = share * larger
            tl.store(blank + (t - 1) * U1, tl.where(x > y, larger, smaller).to(tl.float32), mask=has_blank)
            tl.store(label + t * U1 - 1, tl.where(x > y, smaller, larger).to(tl.float32), mask=has_label)
        d += 1
    ends = u == last
    final = tl.load(blank + (frames - 1) * U1, mask=ends, other=0.0).to(tl.float64)
    likelihood = tl.sum(tl.where(ends, alpha + final, 0.0), 0)
    tl.store(losses + n, -likelihood)

    if GRADIENT:
        possible = tl.where(likelihood == -float("inf"), 0.0, 1.0)
        after = tl.zeros((BLOCK,), dtype=tl.float64)
        lost = tl.zeros((BLOCK,), dtype=tl.float64)
        tl.debug_barrier()
        tl.store(row + (diagonals % 2) * BLOCK, after)
        d = diagonals - 1
        while d >= 0:
            tl.debug_barrier()
            t = d - u
            inside = (t >= 0) & (t < frames) & (u <= last)
            has_label = inside & (u < last)
            right = tl.load(row + ((d + 1) % 2) * BLOCK + 1, mask=has_label, other=0.0)
            of_blank = after * tl.load(blank + t * U1, mask=inside, other=0.0).to(tl.float64)
            of_blank = tl.where(t == frames - 1, tl.where(ends, possible, 0.0), of_blank)
            of_label = right * tl.load(label + t * U1, mask=has_label, other=0.0).to(tl.float64)
            of_label = tl.where(has_label, of_label, 0.0)
            after = tl.where(inside, of_blank + of_label, 0.0)
            tl.store(row + (d % 2) * BLOCK, after)
            to_blank = of_blank.to(tl.float32)
            to_label = (of_label * label_factor).to(tl.float32)
            tl.store(blank + t * U1, to_blank, mask=inside)
            tl.store(label + t * U1, to_label, mask=inside)
            lost += tl.where(inside & (to_blank + to_label < negligible), after, 0.0)
            d -= 1
        tl.store(dropped + n, tl.sum(lost, 0) / diagonals.to(tl.float64))


@_kernel
def list_cells(numbers, positions, cells, BLOCK: tl.constexpr):
    """numbers[i]: the cell that is number i of those that count; positions (cells,): how many count up to each."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    here = tl.load(positions + cell, mask=inside, other=0)
    before = tl.load(positions + cell - 1, mask=inside & (cell > 0), other=0)
    tl.store(numbers + before, cell, mask=inside & (here > before))


@_kernel
def logit_gradients(
    activations, weight, bias, targets, U_lengths, arcs, grad_losses, numbers, positions, gradients,
    cells, tile, rows, T, U1, BLANK, label_smoothing,
    H: tl.constexpr, V: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    SMOOTHS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """gradients (rows, V) of the logits of a tile's cells."""
    begin = tl.program_id(0).to(tl.int64) * BM
    if tile + begin >= tl.load(positions + cells - 1):
        return
    valid, n, t, u = _listed_cells(numbers, positions, cells, tile, begin, rows, T, U1, BM)
    row = begin + tl.arange(0, BM)
    has_target = valid & (u < tl.load(U_lengths + n))
    target = tl.load(targets + n * (U1 - 1) + u, mask=has_target, other=-1)
    cell = (n * T + t) * U1 + u
    scale = tl.load(grad_losses + n).to(tl.float32)
    of_blank = tl.load(arcs + cell, mask=valid, other=0.0) * scale
    of_label = tl.load(arcs + cells + cell, mask=valid, other=0.0) * scale
    high = tl.load(arcs + 2 * cells + cell, mask=valid, other=0.0)
    normaliser = tl.load(arcs + 3 * cells + cell, mask=valid, other=0.0)
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV).to(tl.int64)
        x = _logits(activations, weight, bias, row, valid, v, H, V, HAS_BIAS, PRECISION, OPERAND, BM, BV, BH)
        x = (x - high[:, None]) - normaliser[:, None]
        is_blank = (v == BLANK)[None, :]
        is_label = v[None, :] == target[:, None]
        p_blank = tl.exp(tl.sum(tl.where(is_blank, x, 0.0), 1).to(tl.float64))
        p_label = tl.exp(tl.sum(tl.where(is_label, x, 0.0), 1).to(tl.float64))
        # (arc + other) p - arc = other p - arc (1 - p), where float64 keeps the digits of 1 - p
        at_blank = tl.where(
            target == BLANK, -(of_blank + of_label) * (1.0 - p_blank), of_label * p_blank - of_blank * (1.0 - p_blank)
        ).to(tl.float32)
        at_label = (of_blank * p_label - of_label * (1.0 - p_label)).to(tl.float32)
        if SMOOTHS:
            less = label_smoothing / V
            g = (of_blank + of_label)[:, None] * (tl.exp(x) - less)
            at_label += label_smoothing * of_label - (of_blank + of_label) * less
            at_blank += label_smoothing * tl.where(target == BLANK, of_blank + of_label, of_blank)
            at_blank -= (of_blank + of_label) * less
        else:
            g = (of_blank + of_label)[:, None] * tl.exp(x)
        g = tl.where(is_label, at_label[:, None], g)
        g = tl.where(is_blank, at_blank[:, None], g)
        inside = valid[:, None] & (v < V)[None, :]
        tl.store(gradients + row[:, None] * V + v[None, :], g.to(gradients.dtype.element_ty), mask=inside)


@_kernel
def input_gradients(
    encoder, decoder, weight, numbers, positions, gradients, sums, cells, tile, rows, T, U1,
    encoder_n, encoder_t, decoder_n, decoder_u, seed,
    H: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """sums (rows, H) float32: the gradient of encoder plus decoder of each cell of a tile."""
    begin = tl.program_id(0).to(tl.int64) * BM
    if tile + begin >= tl.load(positions + cells - 1):
        return
    valid, n, t, u = _listed_cells(numbers, positions, cells, tile, begin, rows, T, U1, BM)
    row = begin + tl.arange(0, BM)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    of_sums = tl.zeros((BM, BH), dtype=tl.float32)
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV).to(tl.int64)
        g = tl.load(gradients + row[:, None] * V + v[None, :], mask=valid[:, None] & (v < V)[None, :], other=0.0)
        w = tl.load(weight + v[:, None] * H + h[None, :], mask=(v < V)[:, None] & (h < H)[None, :], other=0.0)
        of_sums = tl.dot(g.to(OPERAND), w.to(OPERAND), of_sums, input_precision=PRECISION)
    if KIND != 0:
        x = _sums(encoder, decoder, n, t, u, valid, h, H, encoder_n, encoder_t, decoder_n, decoder_u)
        of_sums = of_sums * _slope(x, KIND)
    if DROP_BELOW != 0:
        of_sums = _dropout(of_sums, seed, n, t, u, h, DROP_BELOW, KEEP_SCALE)
    tl.store(sums + row[:, None] * H + h[None, :], of_sums, mask=valid[:, None] & (h < H)[None, :])


@_kernel
def weight_gradients(
    activations, gradients, positions, d_weight, d_bias, cells, tile, rows,
    H: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Adds a tile to d_weight (splits, V, H) and d_bias (splits, V), float32: each split has SHARE of the rows."""
    begin = tl.program_id(2).to(tl.int64) * SHARE
    end = tl.minimum(tl.minimum(begin + SHARE, rows), tl.load(positions + cells - 1) - tile)
    if begin >= end:
        return
    v = tl.program_id(0).to(tl.int64) * BV + tl.arange(0, BV)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    of_weight = tl.zeros((BV, BH), dtype=tl.float32)
    of_bias = tl.zeros((BV,), dtype=tl.float32)
    for first in range(0, SHARE, BM):
        row = begin + first + tl.arange(0, BM)
        g = tl.load(gradients + row[None, :] * V + v[:, None], mask=(v < V)[:, None] & (row < end)[None, :], other=0.0)
        if WEIGHT:
            a = tl.load(
                activations + row[:, None] * H + h[None, :], mask=(row < end)[:, None] & (h < H)[None, :], other=0.0
            )
            of_weight = tl.dot(g.to(OPERAND), a.to(OPERAND), of_weight, input_precision=PRECISION)
        if BIAS:
            of_bias += tl.sum(g.to(tl.float32), 1)
    split = tl.program_id(2).to(tl.int64) * V
    if WEIGHT:
        inside = (v < V)[:, None] & (h < H)[None, :]
        to = d_weight + (split + v)[:, None] * H + h[None, :]
        tl.store(to, tl.load(to, mask=inside, other=0.0) + of_weight, mask=inside)
    if BIAS:
        if tl.program_id(1) == 0:
            at = d_bias + split + v
            tl.store(at, tl.load(at, mask=v < V, other=0.0) + of_bias, mask=v < V)


@_kernel
def add_to_encoder(sums, numbers, positions, d_encoder, cells, tile, rows, U1, H, BM: tl.constexpr, BH: tl.constexpr):
    """Adds the cells of a tile to their frames; program i has every frame i + k * programs from the tile's first on.

    The cells of a frame follow each other."""
    count = tl.load(positions + cells - 1)
    if tile >= count:
        return
    first = tl.load(numbers + tile) // U1  # frames, counted over all utterances
    last = tl.load(numbers + tl.minimum(tile + rows, count) - 1) // U1
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    frame = first + tl.program_id(0)
    while frame <= last:
        start = tl.load(positions + frame * U1 - 1, mask=frame > 0, other=0)
        begin = tl.maximum(start - tile, 0)
        end = tl.minimum(tl.load(positions + frame * U1 + U1 - 1) - tile, rows)
        if begin < end:
            total = tl.zeros((BH,), dtype=tl.float32)
            while begin < end:
                row = begin + tl.arange(0, BM)
                inside = (row < end)[:, None] & (h < H)[None, :]
                total += tl.sum(tl.load(sums + row.to(tl.int64)[:, None] * H + h[None, :], mask=inside, other=0.0), 0)
                begin += BM
            to = d_encoder + frame * H + h
            tl.store(to, tl.load(to, mask=h < H, other=0.0) + total, mask=h < H)
        frame += tl.num_programs(0)


@_kernel
def add_to_decoder(
    sums, numbers, positions, d_decoder, cells, tile, rows, T, U1, H, BM: tl.constexpr, BH: tl.constexpr
):
    """Adds the cells of a tile to their states (n, u): one cell of each frame that the tile meets.  Program i has every
    state i + k * programs of the utterances from the tile's first on."""
    count = tl.load(positions + cells - 1)
    if tile >= count:
        return
    first = tl.load(numbers + tile) // U1  # frames, counted over all utterances
    behind = tl.load(numbers + tl.minimum(tile + rows, count) - 1) // U1 + 1
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    state = first // T * U1 + tl.program_id(0)
    while state < ((behind - 1) // T + 1) * U1:
        n, u = state // U1, state % U1
        begin = tl.maximum(first, n * T)
        end = tl.minimum(behind, (n + 1) * T)
        total = tl.zeros((BH,), dtype=tl.float32)
        while begin < end:
            frame = begin + tl.arange(0, BM)
            cell = frame * U1 + u
            here = tl.load(positions + cell, mask=frame < end, other=0)
            before = tl.load(positions + cell - 1, mask=(frame < end) & (cell > 0), other=0)
            row = (before - tile).to(tl.int64)
            mine = (here > before) & (row >= 0) & (row < rows)
            inside = mine[:, None] & (h < H)[None, :]
            total += tl.sum(tl.load(sums + row[:, None] * H + h[None, :], mask=inside, other=0.0), 0)
            begin += BM
        to = d_decoder + state * H + h
        tl.store(to, tl.load(to, mask=h < H, other=0.0) + total, mask=h < H)
        state += tl.num_programs(0)
