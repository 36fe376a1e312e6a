"""The loss as operators of PyTorch: `fused_transducer::losses` and `fused_transducer::gradients`.

torch.compile, FakeTensor, autocast and autograd know them by this registration; what they compute
is in the backends. Both take the tensors of a call (`call.TENSORS`), and its options as one list
(`call.packed`). Between them go two tensors: `arcs`, some numbers of each cell (see `plain`), and
`kept`, the logits of as many cells as there is memory for.
"""

# without "from __future__ import annotations": torch 2.4 makes the operators' schemas of the
# annotations, which may not be strings
import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from fused_transducer import plain
from fused_transducer.call import (
    PACKED,
    TENSORS,
    Call,
    accumulated,
    backend_of,
    check_lengths,
    check_options,
    check_shapes,
    check_values,
    module_of,
)

if not hasattr(torch.library, "custom_op"):
    raise ImportError(f"fused_transducer needs torch 2.4 or newer; this is {torch.__version__}")


def _check(call: Call, backend: str) -> None:
    """Raise ValueError for arguments by which a backend would read or write outside of tensors, and
    for a backend that cannot be used."""
    check_shapes(
        call.encoder_out, call.decoder_out, call.weight, call.bias, call.targets, call.T_lengths, call.U_lengths,
        call.utterance_of, call.window,
    )  # fmt: skip
    check_options(
        call.V, call.blank, call.activation, tile_cells=call.tile_cells, dropout=call.dropout,
        delay_penalty=call.delay_penalty, label_smoothing=call.label_smoothing,
        topology=call.topology, durations=call.durations, sigma=call.sigma,
    )  # fmt: skip
    seed = call.seed
    if seed is not None and (
        seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != call.device
    ):
        raise ValueError(
            f"dropout_seed must be one int64 number on {call.device}; it has the shape {tuple(seed.shape)}, is "
            f"{seed.dtype} and on {seed.device}"
        )
    # Raises ValueError if this backend cannot be used with the device and dtype.
    backend_of(call.device, call.encoder_out.dtype, backend)


def _check_room(call: Call, backend: str, arcs: Tensor, kept: Tensor) -> None:
    """Raise RuntimeError if the backend cannot use `arcs` or `kept` for this call: wrong shape,
    dtype or device, or not contiguous. Raise ValueError if the backend packs cells and the lengths
    are wrong."""
    if PACKED[backend]:
        check_lengths(call)
    rows = module_of(backend).rows(call)
    dtype = accumulated(call.encoder_out.dtype)
    if arcs.dim() != 2 or len(arcs) != rows or not module_of(backend).fits(call, arcs.shape[1]):
        raise RuntimeError(
            f"arcs has the shape {tuple(arcs.shape)}, which is no room for the cells of the utterances, with {rows} "
            "numbers each: a traced graph takes only lengths with as many cells as those it was traced with"
        )
    if kept.dim() != 2 or kept.shape[1] != call.V:
        raise RuntimeError(
            f"kept must have the shape (cells, {call.V}); it has {tuple(kept.shape)}"
        )
    for name, tensor in (("arcs", arcs), ("kept", kept)):
        if tensor.dtype != dtype or tensor.device != call.device or not tensor.is_contiguous():
            raise RuntimeError(
                f"{name} must be contiguous, {dtype} and on {call.device}; it has the strides {tensor.stride()}, is "
                f"{tensor.dtype} and on {tensor.device}"
            )


def _saved(
    call: Call, backend: str, gradient: bool, cells: int, kept_cells: int
) -> tuple[Tensor, ...]:
    """Return uninitialised tensors for what forward writes: losses (M,) float64, arcs (rows, cells)
    and kept (kept_cells, V). Without `gradient`, arcs is empty."""
    new = call.encoder_out.new_empty
    dtype = accumulated(call.encoder_out.dtype)
    arcs = new((module_of(backend).rows(call), cells if gradient else 0), dtype=dtype)
    return new((call.M,), dtype=torch.float64), arcs, new((kept_cells, call.V), dtype=dtype)


@torch.library.custom_op("fused_transducer::losses", mutates_args=())
def losses(
    encoder_out: Tensor, decoder_out: Tensor, weight: Tensor, bias: Optional[Tensor], targets: Tensor,
    T_lengths: Tensor, U_lengths: Tensor, utterance_of: Optional[Tensor], seed: Optional[Tensor],
    window: Optional[Tensor], options: List[float], backend: str, gradient: bool, cells: int, kept_cells: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip  # torch 2.6 knows no Tuple here
    """Return (losses (M,) float64, arcs, kept).

    arcs (rows, cells): with `gradient`, the numbers of each cell that `gradients` needs; else empty
    kept (kept_cells, V): the logits of the first cells, if the backend keeps logits
    cells, kept_cells: the number of columns of arcs with `gradient`, and of rows of kept
    """
    tensors = (
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, utterance_of, seed, window
    )  # fmt: skip
    call = Call.of(tensors, options)
    _check(call, backend)
    check_values(call)
    saved = _saved(call, backend, gradient, cells, kept_cells)
    if gradient or kept_cells:
        _check_room(call, backend, *saved[1:])
    module_of(backend).forward(call, gradient, *saved)
    return saved


@losses.register_fake
def _(*arguments):
    tensors = arguments[: len(TENSORS)]
    options, *others = arguments[len(TENSORS) :]  # backend, gradient, cells and kept_cells
    return _saved(Call.of(tensors, options), *others)


def log_probabilities(call: Call, backend: str) -> Tensor:
    """Return the tensor `arcs` (rows, cells) of a forward without gradient. Its first rows are the
    log-probabilities of the parts of each cell."""
    _check(call, backend)
    check_values(call)
    cells = module_of(backend).room(call)
    # gradient=True makes room in arcs; forward without gradient writes log-probabilities there.
    saved = _saved(call, backend, gradient=True, cells=cells, kept_cells=0)
    module_of(backend).forward(call, False, *saved)
    _, arcs, _ = saved
    return arcs


def _gradients(call: Call, wanted: List[bool]) -> List[Tensor]:
    """Return a tensor for each of the gradients of encoder_out, decoder_out, weight and bias, in
    the dtype of sums: zeros if the gradient is wanted, else an empty tensor."""
    shapes = (*(x.shape for x in (call.encoder_out, call.decoder_out, call.weight)), (call.V,))
    dtype = accumulated(call.encoder_out.dtype)
    return [
        call.encoder_out.new_zeros(shape if want else (0,), dtype=dtype)
        for shape, want in zip(shapes, wanted)
    ]


@torch.library.custom_op("fused_transducer::gradients", mutates_args=())
def gradients(
    grad_losses: Tensor, arcs: Tensor, kept: Tensor, encoder_out: Tensor, decoder_out: Tensor, weight: Tensor,
    bias: Optional[Tensor], targets: Tensor, T_lengths: Tensor, U_lengths: Tensor, utterance_of: Optional[Tensor],
    seed: Optional[Tensor], window: Optional[Tensor], options: List[float], backend: str, wanted: List[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of encoder_out, decoder_out, weight and bias; an empty tensor for each
    that is not wanted.

    grad_losses (M,): the gradient of each loss
    arcs, kept: what `losses` returned
    wanted: whether each of the four is wanted
    """
    tensors = (
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, utterance_of, seed, window
    )  # fmt: skip
    call = Call.of(tensors, options)
    _check(call, backend)
    _check_room(call, backend, arcs, kept)
    if grad_losses.shape != (call.M,):
        raise RuntimeError(
            f"grad_losses must have the shape ({call.M},); it has {tuple(grad_losses.shape)}"
        )
    sums = _gradients(call, wanted)
    wanted_sums = [x if want else None for x, want in zip(sums, wanted)]
    module_of(backend).backward(call, grad_losses, arcs, kept, wanted_sums)
    d_encoder, d_decoder, d_weight, d_bias = (x.to(encoder_out.dtype) for x in sums)
    return d_encoder, d_decoder, d_weight, d_bias


@gradients.register_fake
def _(*arguments):
    _grad_losses, _arcs, _kept, *tensors, options, _backend, wanted = arguments
    call = Call.of(tensors, options)
    return tuple(x.to(call.encoder_out.dtype) for x in _gradients(call, wanted))


def _save(ctx, inputs, output) -> None:
    """Keep for backward what the operator `losses` took, and the arcs and logits that it
    returned."""
    *tensors, ctx.options, ctx.backend, _gradient, _cells, _kept_cells = inputs
    _, arcs, kept = output
    ctx.mark_non_differentiable(arcs, kept)
    ctx.save_for_backward(arcs, kept, *tensors)


def _backward_of(compute: Callable[..., Tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return the function that autograd calls as the backward of `losses`.

    compute: returns the gradients: the operator `gradients`, or the Function around that operator
    """

    def backward(ctx, grad_losses, *_):
        """Return a gradient for each input of `losses`; None where autograd wants none."""
        wanted = list(ctx.needs_input_grad[:4])  # encoder_out, decoder_out, weight and bias
        computed = compute(grad_losses, *ctx.saved_tensors, ctx.options, ctx.backend, wanted)
        results = [x if want else None for x, want in zip(computed, wanted)]
        rest = len(ctx.needs_input_grad) - len(wanted)  # integers and options have no gradient
        return (*results, *[None] * rest)

    return backward


def _no_second_derivative(ctx, *_):
    """Raise RuntimeError: this is the backward of `gradients`."""
    raise RuntimeError(
        "fused_transducer has no second derivative: call backward without create_graph=True"
    )


def _no_forward_mode(ctx, *_):
    raise RuntimeError(
        "fused_transducer has no forward-mode derivative: use backward, torch.func.grad or vjp"
    )


losses.register_autograd(_backward_of(gradients), setup_context=_save)
gradients.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)


class Gradients(torch.autograd.Function):
    """The operator `gradients` as a Function, which the backward of `Losses` calls."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_mode)
    forward = staticmethod(gradients)


class Losses(torch.autograd.Function):
    """The operator `losses` as a Function, for eager mode.

    Unlike an operator, a Function works in torch.func.grad. It can also refuse forward mode, where
    the derivative of an operator counts as 0.
    """

    generate_vmap_rule = True
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward_of(Gradients.apply))
    jvp = staticmethod(_no_forward_mode)
    forward = staticmethod(losses)


# FLOPs for torch.utils.flop_counter: two for each multiply-accumulate of the matrix products.


def _flops(call: Call, cells: Callable[[], Tensor], products: int) -> int:
    """Return the FLOPs of matrix products over the cells. Where tensors have no values, all cells
    of the padded batch count.

    cells: returns a tensor whose sum is the number of cells: their number by row of the batch, or
        for each cell whether it counts
    products: how many products of size H x V each cell takes
    """
    try:
        count = int(cells().sum())
    except (RuntimeError, NotImplementedError):  # meta and fake tensors
        count = call.M * call.T * call.U1
    return 2 * products * call.H * call.V * count


def _flops_of_losses(*inputs, out_val=None, **_):
    """Return the FLOPs of a forward: those of the logits, one product for each cell."""
    call = Call.of(inputs[: len(TENSORS)], inputs[len(TENSORS)])
    return _flops(call, call.cells, products=1)


def _flops_of_gradients(grad_losses, arcs, kept, *inputs, out_val=None, **_):
    """Return the FLOPs of the wanted gradients, over the cells that have a gradient. If no logits
    were kept, they are computed again, and count too."""
    *tensors, options, _, (wants_encoder, wants_decoder, wants_weight, _) = inputs
    call = Call.of(tensors, options)
    # Each of these that is true takes one product: the logits, the gradient of the weight, and that
    # of the joiner's outputs, which encoder and decoder share.
    products = sum([len(kept) == 0, wants_weight, wants_encoder or wants_decoder])
    return _flops(call, lambda: plain.has_gradient(call, arcs), products)


FLOP_COUNTER = "torch.utils.flop_counter"


def _register_flops(flop_counter: ModuleType) -> None:
    """Register the formulas of both operators with torch's counter.

    With get_raw a formula gets an operator's arguments themselves, not their shapes."""
    operators = torch.ops.fused_transducer
    register = flop_counter.register_flop_formula
    register(operators.losses, get_raw=True)(_flops_of_losses)
    register(operators.gradients, get_raw=True)(_flops_of_gradients)


class _FlopCounterFinder(importlib.abc.MetaPathFinder):
    """Registers the formulas when someone imports torch's counter. To import the counter here would
    cost 50 MB, since it imports Triton."""

    def find_spec(self, fullname, path=None, target=None):
        """Return the spec of torch's counter, whose import then registers the formulas too; None
        for other modules."""
        if fullname != FLOP_COUNTER:
            return None
        sys.meta_path.remove(self)  # so that the next line asks the other finders alone
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            _register_flops(module)

        spec.loader.exec_module = execute_and_register
        return spec


if FLOP_COUNTER in sys.modules:
    _register_flops(sys.modules[FLOP_COUNTER])
else:
    sys.meta_path.insert(0, _FlopCounterFinder())
