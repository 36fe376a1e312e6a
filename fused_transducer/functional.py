"""`transducer_loss`: joiner and transducer loss in one function."""

from __future__ import annotations

from numbers import Integral
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from fused_transducer import operators
from fused_transducer.backends import PACKED, backend_of, module_of
from fused_transducer.call import accumulated, check_options, check_shapes, check_tensors


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
    dropout: float = 0.0,
    dropout_seed: Union[int, Tensor, None] = None,
    delay_penalty: float = 0.0,
    backend: Optional[str] = None,
    return_dropped: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """-log Pr(targets | encoder_out) (Graves 2012) of the logits weight @ activation(encoder_out + decoder_out) + bias.

    encoder_out (N, T, H), decoder_out (N, U+1, H), weight (V, H), bias (V) or None: one dtype of float32, float64,
    bfloat16 and float16, any strides.  Sums are in float32 (float64 for float64), the lattice is in float64.  Under
    autocast the four are cast to its dtype.  targets (N, U), T_lengths and U_lengths (N,): integers; the lengths may be
    on the CPU.  What is beyond an utterance's lengths is never read.

    activation: "none", "tanh", "relu", "sigmoid", "silu", "gelu" (with erf), "leaky_relu" (of slope 0.01) or "snake"
    (x + sin(x)^2); reduction: "none" for the (N,) losses, "sum", or "mean" over the utterances
    (default, as of torch's own losses and of torchaudio's rnnt_loss: one number, from which backward can begin).
    dropout: the probability with which an activation is 0, between the activation and the output layer; the others are
    multiplied with 1 / (1 - dropout).  dropout_seed: an integer, or an int64 tensor on encoder_out's device, which
    chooses the mask: the same on every backend.  None: one from torch's generator of that device.  delay_penalty:
    delay_penalty * ((T_length - 1) / 2 - t) is added to the log-probability of each label at frame t (as in k2 and
    fast_rnnt), so that paths that emit early are worth more.
    fastemit_lambda: the gradient of the label arcs is multiplied by 1 + fastemit_lambda (FastEmit, Yu et al. 2021); the
    value of the loss stays.  negligible: cells that a path meets with less probability than this get no gradient; 0
    leaves out exact zeros only.  tile_cells: cells whose logits are in memory at once; a batch of no more cells keeps
    them for backward.  None: as many as fit the caches, and a small batch keeps its logits.  backend: see `backend_of`.

    Returns a float32 (float64) tensor, differentiable once, in reverse mode (backward, torch.func.grad): forward mode
    raises RuntimeError.  With return_dropped also, for each utterance, the posterior probability of all dropped cells
    over that of all cells (float64): the gradient of a cell's logits has an L1 norm of at most 2 (1 + fastemit_lambda)
    times its posterior.

    A target that the logits make impossible has a loss of inf and a gradient of 0.  Raises ValueError, with the
    utterance, for bad arguments (values under torch.compile only when it runs, and never under CUDA graph capture).
    """
    check_tensors(
        encoder_out=encoder_out, decoder_out=decoder_out, weight=weight, bias=bias,
        targets=targets, T_lengths=T_lengths, U_lengths=U_lengths,
    )  # fmt: skip
    floats = (encoder_out, decoder_out, weight, bias)
    device = encoder_out.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        floats = tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in floats)
    encoder_out, decoder_out, weight, bias = floats
    check_shapes(encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths)
    check_options(
        weight.shape[0], blank, activation, reduction, fastemit_lambda, negligible, tile_cells, dropout, delay_penalty
    )
    seed = _seed(dropout_seed, encoder_out.device) if dropout else None
    backend = backend_of(device, encoder_out.dtype, backend)
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in floats)
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not in_graph:
        # numpy and .data can change these before backward, and autograd would not see it
        targets, T_lengths, U_lengths = targets.clone(), T_lengths.clone(), U_lengths.clone()
    cells, kept_cells = encoder_out.shape[0] * encoder_out.shape[1] * decoder_out.shape[1], 0
    if PACKED[backend] and not in_graph:
        cells, kept_cells = _storage(
            weight.shape[0], T_lengths, U_lengths, backend, encoder_out.dtype, tile_cells, gradient, cells
        )
    losses_of = operators.losses if in_graph else operators.Losses.apply
    losses, dropped, _, _ = losses_of(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, int(blank), activation,
        float(fastemit_lambda), float(negligible), int(tile_cells or 0), backend, gradient, cells, kept_cells,
        seed, float(dropout), float(delay_penalty),
    )  # fmt: skip
    loss = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
    loss = loss.to(accumulated(encoder_out.dtype))
    return (loss, dropped) if return_dropped else loss


def _seed(given: Union[int, Tensor, None], device: torch.device) -> Tensor:
    """Return the seed of dropout, an int64 number on `device`: the given one, or else one of torch's generator."""
    if given is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(given, Tensor):
        return given
    if isinstance(given, bool) or not isinstance(given, Integral) or not -(2**63) <= given < 2**63:
        raise ValueError(f"dropout_seed must be an integer of 64 bits or a tensor with one; it is {given!r}")
    return torch.full((), int(given), dtype=torch.int64, device=device)


def _storage(
    V: int,
    T_lengths: Tensor,
    U_lengths: Tensor,
    backend: str,
    dtype: torch.dtype,
    tile_cells: Optional[int],
    gradient: bool,
    most: int,
) -> Tuple[int, int]:
    """Return (cells to have room for, cells whose logits are kept for backward); most: the cells with padding."""
    try:
        cells = int((T_lengths.long() * (U_lengths.long() + 1)).sum())
    except RuntimeError:  # meta and fake tensors, vmap: the lengths have no values
        return most, 0
    cells = min(max(cells, 0), most)  # lengths that are wrong are refused where the values are checked
    most_kept = tile_cells or module_of(backend).most_kept(V, accumulated(dtype))
    return cells, cells if gradient and cells <= most_kept else 0
