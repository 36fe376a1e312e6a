"""`transducer_loss`: joiner and transducer loss in one function."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from fused_transducer import operators
from fused_transducer.backends import PACKED, backend_of, module_of
from fused_transducer.call import accumulated, check_options, check_shapes


def transducer_loss(
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    T_lengths: Tensor,
    U_lengths: Tensor,
    blank: int = 0,
    activation: str = "tanh",
    reduction: str = "mean",
    fastemit_lambda: float = 0.0,
    negligible: float = 1e-8,
    tile_cells: Optional[int] = None,
    *,
    backend: Optional[str] = None,
    return_dropped: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """-log Pr(targets | encoder_out) (Graves 2012) of the logits weight @ activation(encoder_out + decoder_out) + bias.

    encoder_out (N, T, H), decoder_out (N, U+1, H), weight (V, H), bias (V) or None: one dtype of float32, float64,
    bfloat16 and float16, any strides.  Sums are in float32 (float64 for float64), the lattice is in float64.  Under
    autocast the four are cast to its dtype.  targets (N, U), T_lengths and U_lengths (N,): integers; the lengths may be
    on the CPU.  What is beyond an utterance's lengths is never read.

    activation: "tanh", "relu" or "none"; reduction: "none" for the (N,) losses, "sum", or "mean" over the utterances
    (default, as of torch's own losses and of torchaudio's rnnt_loss: one number, from which backward can begin).
    fastemit_lambda: the gradient of the label arcs is multiplied by 1 + fastemit_lambda (FastEmit, Yu et al. 2021); the
    value of the loss stays.  negligible: cells that a path meets with less probability than this get no gradient; 0
    leaves out exact zeros only.  tile_cells: cells whose logits are in memory at once; a batch of no more cells keeps
    them for backward.  None: as many as fit the caches, and a small batch keeps its logits.  backend: see `backend_of`.

    Returns a float32 (float64) tensor, differentiable once.  With return_dropped also, for each utterance, the
    posterior probability of all dropped cells over that of all cells (float64): the gradient of a cell's logits has an
    L1 norm of at most twice its posterior.

    A target that the logits make impossible has a loss of inf and a gradient of 0.  Raises ValueError, with the
    utterance, for bad arguments (values under torch.compile only when it runs, and never under CUDA graph capture).
    """
    floats = (encoder_out, decoder_out, weight, bias)
    device = encoder_out.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        floats = tuple(one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in floats)
    encoder_out, decoder_out, weight, bias = floats
    check_shapes(encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths)
    check_options(blank, weight.shape[0], activation, reduction, [fastemit_lambda, negligible, tile_cells or 0])
    backend = backend_of(device, encoder_out.dtype, backend)
    gradient = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in floats)
    cells, kept_cells = _storage(encoder_out, decoder_out, weight, T_lengths, U_lengths, backend, tile_cells, gradient)
    losses, dropped, _, _ = operators.losses(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, blank, activation,
        float(fastemit_lambda), float(negligible), tile_cells or 0, backend, gradient, cells, kept_cells,
    )  # fmt: skip
    loss = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
    loss = loss.to(accumulated(encoder_out.dtype))
    return (loss, dropped) if return_dropped else loss


def _storage(encoder_out, decoder_out, weight, T_lengths, U_lengths, backend, tile_cells, gradient) -> Tuple[int, int]:
    """(cells to have room for, cells whose logits are kept for backward).  Sizes that follow from values are known to
    eager mode alone: a compiled graph has room for the padding too, and keeps no logits."""
    N, T, _ = encoder_out.shape
    U1, V = decoder_out.shape[1], weight.shape[0]
    if not PACKED[backend] or torch.compiler.is_compiling():
        return N * T * U1, 0
    cells = int((T_lengths.long().clamp(0, T) * (U_lengths.long().clamp(0, U1 - 1) + 1)).sum())
    most = tile_cells or module_of(backend).most_kept(V, accumulated(encoder_out.dtype))
    return cells, cells if gradient and cells <= most else 0
