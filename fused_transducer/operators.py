"""The loss as operators of PyTorch: `fused_transducer::losses` and `fused_transducer::gradients`.

torch.compile, FakeTensor, autocast and autograd know them by this registration; what they compute is in the backends.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from fused_transducer.backends import module_of
from fused_transducer.call import Call, accumulated, check_values


def _saved(
    call: Call, backend: str, gradient: bool, cells: int, kept_cells: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (losses, dropped, arcs, kept)."""
    new, dtype = call.encoder_out.new_empty, accumulated(call.encoder_out.dtype)
    losses, dropped = new((call.N,), dtype=torch.float64), new((call.N,), dtype=torch.float64)
    arcs = new((module_of(backend).rows(call.V), cells if gradient else 0), dtype=dtype)
    return losses, dropped, arcs, new((kept_cells, call.V), dtype=dtype)


@torch.library.custom_op("fused_transducer::losses", mutates_args=())
def losses(
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    T_lengths: Tensor,
    U_lengths: Tensor,
    blank: int,
    activation: str,
    fastemit_lambda: float,
    negligible: float,
    tile_cells: int,
    backend: str,
    gradient: bool,
    cells: int,
    kept_cells: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N,) losses and (N,) shares of the posterior that backward drops, float64; for backward (with `gradient`) `arcs`
    with room for `cells`, and the logits of `kept_cells` cells."""
    call = Call(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
        blank, activation, fastemit_lambda, negligible, tile_cells,
    )  # fmt: skip
    check_values(call)
    saved = _saved(call, backend, gradient, cells, kept_cells)
    module_of(backend).forward(call, gradient, *saved)
    return saved


@losses.register_fake
def _(
    encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
    blank, activation, fastemit_lambda, negligible, tile_cells, backend, gradient, cells, kept_cells,
):  # fmt: skip
    call = Call(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
        blank, activation, fastemit_lambda, negligible, tile_cells,
    )  # fmt: skip
    return _saved(call, backend, gradient, cells, kept_cells)


def _gradients(call: Call, wanted: List[bool]) -> List[Tensor]:
    """Zeros of the wanted gradients, in the dtype of sums; of the others, nothing.  wanted: of encoder_out,
    decoder_out, weight and bias."""
    shapes = ((call.N, call.T, call.H), (call.N, call.U1, call.H), (call.V, call.H), (call.V,))
    dtype = accumulated(call.encoder_out.dtype)
    return [call.encoder_out.new_zeros(shape if want else (0,), dtype=dtype) for shape, want in zip(shapes, wanted)]


@torch.library.custom_op("fused_transducer::gradients", mutates_args=())
def gradients(
    grad_losses: Tensor,
    arcs: Tensor,
    kept: Tensor,
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    T_lengths: Tensor,
    U_lengths: Tensor,
    blank: int,
    activation: str,
    negligible: float,
    tile_cells: int,
    backend: str,
    wanted: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of encoder_out, decoder_out, weight and bias; empty where not wanted."""
    call = Call(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
        blank, activation, 0.0, negligible, tile_cells,
    )  # fmt: skip
    found = _gradients(call, wanted)
    module_of(backend).backward(
        call, grad_losses, arcs, kept, [one if want else None for one, want in zip(found, wanted)]
    )
    a, b, c, d = (one.to(encoder_out.dtype) for one in found)
    return a, b, c, d


@gradients.register_fake
def _(
    grad_losses, arcs, kept, encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
    blank, activation, negligible, tile_cells, backend, wanted,
):  # fmt: skip
    call = Call(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths,
        blank, activation, 0.0, negligible, tile_cells,
    )  # fmt: skip
    a, b, c, d = (one.to(encoder_out.dtype) for one in _gradients(call, wanted))
    return a, b, c, d


def _save(ctx, inputs, output) -> None:
    tensors = inputs[:7]
    ctx.blank, ctx.activation, _, ctx.negligible, ctx.tile_cells, ctx.backend = inputs[7:13]
    _, dropped, arcs, kept = output
    ctx.mark_non_differentiable(dropped, arcs, kept)
    ctx.save_for_backward(*tensors, arcs, kept)


def _backward(ctx, grad_losses, *_):
    *tensors, arcs, kept = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    found = gradients(
        grad_losses,
        arcs,
        kept,
        *tensors,
        ctx.blank,
        ctx.activation,
        ctx.negligible,
        ctx.tile_cells,
        ctx.backend,
        wanted,
    )
    return (*(one if want else None for one, want in zip(found, wanted)), *([None] * 12))


def _no_second_derivative(ctx, *_):
    raise RuntimeError("fused_transducer has no second derivative: call backward without create_graph=True")


losses.register_autograd(_backward, setup_context=_save)
gradients.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)
