"""The Triton kernels of 16 bits, whose programs compute the activations of a block of cells once and keep them.

As many programs as the GPU runs at once take blocks of cells in turn and read the weight block by block, so activations
are written only where the gradient of the weight needs them.  `kernels` explains cells, tiles and arguments.

weight: (columns, HP), its rows padded with zeros to whole blocks; bias: (columns,) float32, -inf beyond V.  HP is a
multiple of BH.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_transducer.kernels import _activate, _dropout, _kernel, _listed_cells, _sums

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _short_tanh(x):
    """tanh of float32 x within 1e-7, which is enough for what is rounded to 16 bits."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _activations(
    encoder, decoder, n, t, u, valid, encoder_n, encoder_t, decoder_n, decoder_u, seed,
    HP: tl.constexpr, KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    OPERAND: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The activations of some cells: a tuple of (cells, BH) for each BH columns."""
    kept = ()
    for first in tl.static_range(0, HP, BH):
        h = first + tl.arange(0, BH)
        x = _sums(encoder, decoder, n, t, u, valid, h, HP, encoder_n, encoder_t, decoder_n, decoder_u)
        if KIND == 1:
            x = _short_tanh(x)
        else:
            x = _activate(x, KIND)
        if DROP_BELOW != 0:
            x = _dropout(x, seed, n, t, u, h, DROP_BELOW, KEEP_SCALE)
        kept = kept + (x.to(OPERAND),)
        if DROP_BELOW != 0 or KIND > 3:
            tl.debug_barrier()  # else the compiler computes the next ones at once, and registers spill
    return kept


@triton.jit
def _weight_block(weight, v, i: tl.constexpr, HP: tl.constexpr, BH: tl.constexpr, OPERAND: tl.constexpr):
    """The weight (BH, BV) of the symbols v and the columns number i * BH on."""
    h = i * BH + tl.arange(0, BH)
    return tl.load(weight + v[None, :] * HP + h[:, None]).to(OPERAND)


@triton.jit
def _store(to, row, columns, x, valid, WIDTH: tl.constexpr):
    """Store x (cells, columns) in rows of WIDTH numbers."""
    inside = valid[:, None] & (columns < WIDTH)[None, :]
    tl.store(to + row[:, None] * WIDTH + columns[None, :], x.to(to.dtype.element_ty), mask=inside)


@_kernel
def arcs_of_cells(
    encoder, decoder, weight, bias, targets, T_lengths, U_lengths, ends, arcs, cells, N, T, U1, BLANK,
    delay_penalty, encoder_n, encoder_t, decoder_n, decoder_u, seed, label_smoothing,
    V: tl.constexpr, HP: tl.constexpr, KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    OPERAND: tl.constexpr, SMOOTHS: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """arcs (4, cells) as `log_probabilities` makes them.

    ends (N,): how many blocks of BM cells the utterances up to each have."""
    blocks = tl.load(ends + N - 1)
    block = tl.program_id(0)
    while block < blocks:
        n = 0
        first = 0
        while first < N:
            some = first + tl.arange(0, 128)
            n += tl.sum((tl.load(ends + some, mask=some < N, other=2**30) <= block).to(tl.int32), 0)
            first += 128
        before = tl.load(ends + n - 1, mask=n > 0, other=0)
        states = tl.load(U_lengths + n) + 1
        frames = tl.load(T_lengths + n)
        within = (block - before) * BM + tl.arange(0, BM)
        valid = within < frames * states
        t, u = within // states, within % states
        of_cells = n + tl.zeros_like(within)
        a = _activations(
            encoder, decoder, of_cells, t, u, valid, encoder_n, encoder_t, decoder_n, decoder_u, seed,
            HP, KIND, DROP_BELOW, KEEP_SCALE, OPERAND, BH,
        )  # fmt: skip
        target = tl.load(targets + of_cells * (U1 - 1) + u, mask=valid & (u + 1 < states), other=-1)
        high = tl.full((BM,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BM,), dtype=tl.float32)
        at_blank = tl.zeros((BM,), dtype=tl.float32)
        at_label = tl.zeros((BM,), dtype=tl.float32)
        mean = tl.zeros((BM,), dtype=tl.float32)  # of the logits, where label smoothing needs it
        for start in tl.range(0, V, BV, num_stages=STAGES):
            v = start + tl.arange(0, BV)
            x = tl.zeros((BM, BV), dtype=tl.float32)
            for i in tl.static_range(0, HP // BH):
                x = tl.dot(a[i], _weight_block(weight, v, i, HP, BH, OPERAND), x)
            x += tl.load(bias + v)[None, :]
            higher = tl.maximum(high, tl.max(x, 1))
            shift = tl.where(higher == -float("inf"), 0.0, higher) * LOG2_E
            total = total * tl.exp2(high * LOG2_E - shift) + tl.sum(tl.exp2(x * LOG2_E - shift[:, None]), 1)
            high = higher
            if (start <= BLANK) & (BLANK < start + BV):
                at_blank = tl.sum(tl.where((v == BLANK)[None, :], x, 0.0), 1)
            at_label += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
            if SMOOTHS:
                mean += tl.sum(tl.where((v < V)[None, :], x, 0.0), 1) / V
        if SMOOTHS:
            at_blank += label_smoothing * (mean - at_blank)
            at_label += label_smoothing * (mean - at_label)
        normaliser = tl.log(total)
        penalty = delay_penalty * ((frames - 1).to(tl.float32) / 2 - t.to(tl.float32))
        label = tl.where(target < 0, -float("inf"), ((at_label - high) - normaliser) + penalty)
        to = arcs + (of_cells.to(tl.int64) * T + t) * U1 + u
        tl.store(to, (at_blank - high) - normaliser, mask=valid)
        tl.store(to + cells, label, mask=valid)
        tl.store(to + 2 * cells, high, mask=valid)
        tl.store(to + 3 * cells, normaliser, mask=valid)
        block += tl.num_programs(0)


@_kernel
def gradients_of_cells(
    encoder, decoder, weight, bias, targets, U_lengths, arcs, grad_losses, numbers, positions,
    activations, gradients, cells, tile, rows, T, U1, BLANK,
    encoder_n, encoder_t, decoder_n, decoder_u, seed, label_smoothing,
    V: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr,
    KIND: tl.constexpr, DROP_BELOW: tl.constexpr, KEEP_SCALE: tl.constexpr,
    OPERAND: tl.constexpr, SMOOTHS: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """gradients (rows, VP) of the logits of a tile's cells, 0 beyond V, and activations (rows, HP) where the gradient
    of the weight needs them (WEIGHT)."""
    count = tl.minimum(tl.load(positions + cells - 1) - tile, rows)
    begin = tl.program_id(0).to(tl.int64) * BM
    while begin < count:
        valid, n, t, u = _listed_cells(numbers, positions, cells, tile, begin, rows, T, U1, BM)
        row = begin + tl.arange(0, BM)
        a = _activations(
            encoder, decoder, n, t, u, valid, encoder_n, encoder_t, decoder_n, decoder_u, seed,
            HP, KIND, DROP_BELOW, KEEP_SCALE, OPERAND, BH,
        )  # fmt: skip
        if WEIGHT:
            for i in tl.static_range(0, HP // BH):
                _store(activations, row, i * BH + tl.arange(0, BH), a[i], valid, HP)
        target = tl.load(targets + n * (U1 - 1) + u, mask=valid & (u < tl.load(U_lengths + n)), other=-1)
        cell = (n.to(tl.int64) * T + t) * U1 + u
        scale = tl.load(grad_losses + n).to(tl.float32)
        of_blank = tl.load(arcs + cell, mask=valid, other=0.0) * scale
        of_label = tl.load(arcs + cells + cell, mask=valid, other=0.0) * scale
        high = tl.load(arcs + 2 * cells + cell, mask=valid, other=0.0)
        shift = (high + tl.load(arcs + 3 * cells + cell, mask=valid, other=0.0)) * LOG2_E
        both = of_blank + of_label
        if SMOOTHS:
            of_blank *= 1.0 - label_smoothing
            of_label *= 1.0 - label_smoothing
        for start in tl.range(0, V, BV, num_stages=STAGES):
            v = start + tl.arange(0, BV)
            x = tl.zeros((BM, BV), dtype=tl.float32)
            for i in tl.static_range(0, HP // BH):
                x = tl.dot(a[i], _weight_block(weight, v, i, HP, BH, OPERAND), x)
            x += tl.load(bias + v)[None, :]
            g = tl.exp2(x * LOG2_E - shift[:, None])
            if SMOOTHS:
                g = tl.where((v < V)[None, :], g - label_smoothing / V, 0.0)
            g = both[:, None] * g - of_blank[:, None] * (v == BLANK).to(tl.float32)[None, :]
            g -= tl.where(v[None, :] == target[:, None], of_label[:, None], 0.0)
            _store(gradients, row, v, g, valid, VP)
        begin += tl.num_programs(0) * BM
