"""The functions of the package: `transducer_loss` computes joiner and loss at once, `align` finds
the best path, and `seconds` turns its frames into times."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from fused_transducer import finite, operators, plain
from fused_transducer.call import (
    KEPT_BYTES,
    Call,
    accumulated,
    backend_of,
    check_options,
    check_shapes,
    check_tensors,
    module_of,
    packed,
)
from fused_transducer.lattices import MIXED, check_number
from fused_transducer.layers import is_folded, of_linear


def transducer_loss(
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    targets: Optional[Tensor] = None,
    T_lengths: Optional[Tensor] = None,
    U_lengths: Optional[Tensor] = None,
    blank: int = 0,
    activation: str = "tanh",
    reduction: str = "mean",
    fastemit_lambda: float = 0.0,
    negligible: float = 1e-8,
    tile_cells: Optional[int] = None,
    *,
    keep_bytes: Optional[int] = None,
    output: Optional[nn.Linear] = None,
    dropout: float = 0.0,
    dropout_seed: Union[int, Tensor, None] = None,
    delay_penalty: float = 0.0,
    label_smoothing: float = 0.0,
    clamp: float = 0.0,
    utterance_of: Optional[Tensor] = None,
    utterance_weights: Optional[Tensor] = None,
    zero_infinity: bool = False,
    nonfinite: str = "keep",
    window: Optional[Tensor] = None,
    topology: str = "regular",
    durations: Sequence[int] = (),
    sigma: float = 0.0,
    backend: Optional[str] = None,
    return_posteriors: bool = False,
    return_delay: bool = False,
    reference_frames: Optional[Tensor] = None,
    return_skipped: bool = False,
) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Return -log Pr(targets | encoder_out) (Graves 2012) of the logits
    weight @ activation(encoder_out + decoder_out) + bias.

    Inputs
        encoder_out (N, T, H), decoder_out (N, U+1, H), weight (V, H), bias (V) or None: of one
        dtype of float32, float64, bfloat16 and float16, with any strides.  Sums are in float32
        (float64 for float64), the lattice is in float64.  Activations of bfloat16 inputs are
        rounded to bfloat16 where the processor can multiply it.  Under autocast the four are cast
        to the dtype of autocast.
        output: an nn.Linear in place of weight and bias.  Its weight may be tied to another
        layer's.
        targets (N, U), T_lengths and U_lengths (N,): integers; the lengths may be on the CPU.  What
        is beyond an utterance's lengths is never read.
        utterance_of (M,): where utterances have several target sequences, such as the hypotheses of
        a search, the utterance of each sequence: an integer from 0 to N - 1, in any order.
        decoder_out, targets, U_lengths, utterance_weights and what is returned then have M rows in
        place of N; encoder_out is not copied.  None: each utterance has one sequence.
    The joiner
        activation: "none", "tanh", "relu", "sigmoid", "leaky_relu" (of slope 0.01), "silu" (swish),
        "gelu" (by the error function), "selu" or "hardtanh" (between -1 and 1).
        dropout: the probability with which an activation is 0; the others are multiplied with 1 /
        (1 - dropout).
        dropout_seed: an integer, or an int64 tensor on encoder_out's device, which chooses the
        mask: the same on every backend.  None: drawn from torch's generator of that device.
    The loss
        reduction: "none" for the (N,) losses, "sum", or "mean" over the utterances (default, as of
        torch's own losses and of torchaudio's rnnt_loss: one number, from which backward can
        begin).
        utterance_weights (N,): each loss is multiplied with its weight; "mean" then divides by
        their sum (by 1 where that is 0).  An utterance of weight 0 is left out, even if its loss is
        inf or NaN.
        zero_infinity: an utterance whose targets are impossible has a loss of 0 in place of inf.
        nonfinite: what becomes of an utterance whose loss is inf or NaN (after zero_infinity).
        "keep": its loss stays inf or NaN.  "skip": it counts as one of weight 0, so its loss and
        its gradient are 0.  "raise": a ValueError names the first such utterance, its T and U, and
        the first frame of encoder_out, position of decoder_out or output of weight and bias that is
        not finite.  To raise it, the call waits for a GPU.
        fastemit_lambda: the gradient of the label arcs is multiplied by 1 + fastemit_lambda
        (FastEmit, Yu et al. 2021); the value of the loss stays.
        delay_penalty: makes paths that emit early worth more, as in k2 and fast_rnnt: the
        log-probability of each label at frame t gets delay_penalty * ((T_length - 1) / 2 - t) more.
        label_smoothing: the log-probability of each arc becomes 1 - label_smoothing times itself,
        plus label_smoothing times the mean of the cell's log-probabilities, as if each arc's target
        were smoothed in a cross-entropy.  Not for tdt, multi-blank and hat.
        clamp: the gradient of each logit is held between -clamp and clamp, as NeMo's is on CUDA,
        before the gradient of the loss multiplies it.  The logits of tdt's durations are left out.
        0 or less: no limit.
    The lattice
        topology: "regular" (Graves 2012); "modified" and "modified-last-blank" (a label goes to the
        next frame; paths end with any symbol, or with a blank); "constrained" (a label goes to the
        next frame with the blank behind it); "tdt" (tokens and durations, arXiv 2304.06795);
        "multi-blank" (arXiv 2211.03541); "hat" (the blank by a sigmoid, the labels by a softmax of
        the others, arXiv 2003.07705).
        durations: for tdt, the numbers of frames that a token may go ahead; a blank goes ahead by
        those above 0.  For multi-blank, the number of frames of each longer blank.  weight and bias
        have a row more for each duration, behind the rows of the symbols.  In tdt the durations
        have a softmax of their own.
        sigma: for tdt and multi-blank, a number that is subtracted from the log-probability of each
        symbol.
        window (N, U, 2): integers, the first and the last frame, both inclusive, at which each
        label may be emitted (alignment-restricted RNN-T, Mahadeokar et al. 2021): see `window_of`.
        Cells that no path can pass are not computed.  An utterance without a path has a loss of inf
        and a gradient of 0, and a warning names the label.
    How it is computed
        negligible: a cell gets no gradient if a path passes it with less probability than this.
        Forward of the C++ code leaves such cells out, if it can prove that together they change the
        loss by at most 1e-9, and by at most 1e-9 of its value. In float64 both bounds are 1e-16.
        With 0 every cell is computed, and only a cell of probability 0 gets no gradient.
        tile_cells: number of cells whose logits are in memory at once in backward.  None: as many
        as fit the caches.
        keep_bytes: memory for logits that forward keeps, so that backward need not compute them
        again: those of as many cells as fit.  Only the C++ code keeps any.  None: the logits of all
        cells if all take at most 16 MiB; of fewer cells if all take less than 32 MiB; else none.
        In a graph of torch.compile None keeps none.
        backend: see `backend_of`.  None: the fastest.

    Returns the loss, a tensor of float32 (float64 for float64).  It is differentiable once, in
    reverse mode (backward, torch.func.grad): forward mode raises RuntimeError.  If any of these
    flags is True, returns a tuple of the loss and, in this order:
        return_posteriors: (N, T, U+1, 2), the probability that a path given the targets takes the
        blank and the label of each cell.  With durations (N, T, U+1, 2 + durations), each of those
        too.  0 in the padding; not differentiable.
        return_delay: (N,), the mean over an utterance's targets of the frame at which each is
        emitted, by the posteriors.  With reference_frames (N, U), such as the frames of `align`,
        the frame of each target there is subtracted; a target whose frame there is negative does
        not count.  NaN where no target counts, or no path is possible; not differentiable.
        return_skipped: (N,) bool, the utterances that nonfinite="skip" left out.

    A target that the logits make impossible has a loss of inf and a gradient of 0.  Raises
    ValueError, with the utterance, for bad arguments (values under torch.compile only when it runs,
    and never under CUDA graph capture).
    """
    tensors = _inputs(
        encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, output, utterance_of
    )
    encoder_out, decoder_out, weight = tensors[:3]
    M, U1 = decoder_out.shape[:2]
    device, dtype = encoder_out.device, encoder_out.dtype
    options = {
        "blank": blank, "activation": activation, "fastemit_lambda": fastemit_lambda, "negligible": negligible,
        "tile_cells": tile_cells, "dropout": dropout, "delay_penalty": delay_penalty,
        "label_smoothing": label_smoothing, "clamp": clamp,
        "topology": topology, "durations": durations, "sigma": sigma,
    }  # fmt: skip
    check_options(
        weight.shape[0], reduction=reduction, keep_bytes=keep_bytes, nonfinite=nonfinite, **options
    )
    if return_skipped and nonfinite != "skip":
        raise ValueError(
            f"return_skipped: only nonfinite='skip' leaves utterances out; it is {nonfinite!r}"
        )
    if reference_frames is not None and not return_delay:
        raise ValueError("reference_frames: only return_delay=True compares with them")
    if return_posteriors and fastemit_lambda and topology in MIXED:
        raise ValueError(
            f"return_posteriors: with fastemit_lambda those of topology {topology!r} are no probabilities; give one of "
            "the two"
        )
    if window is not None:
        check_tensors(window=window)
        check_shapes(*tensors, window)
    if utterance_weights is not None:
        _check_shape("utterance_weights", utterance_weights, (M,), device)
    if reference_frames is not None:
        _check_shape("reference_frames", reference_frames, (M, U1 - 1), device)
    backend = backend_of(device, dtype, backend)
    gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors[:4]
    )
    # Both come from the posteriors, which are in arcs; without `gradient` arcs is empty.
    gradient = gradient or return_posteriors or return_delay
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    seed = _seed(dropout_seed, device) if dropout else None
    tensors = (*tensors, seed, window)
    if not in_graph:
        # autograd does not notice if numpy or .data changes integers before backward
        tensors = (*tensors[:4], *(x if x is None else x.clone() for x in tensors[4:]))
    numbers = packed(**options)
    call = Call.of(tensors, numbers)
    cells = _room(call, backend, in_graph)
    kept_cells = _kept_cells(call, backend, cells, keep_bytes, in_graph) if gradient else 0
    losses_of = operators.losses if in_graph else operators.Losses.apply  # why: see Losses
    losses, arcs, _ = losses_of(*tensors, numbers, backend, gradient, cells, kept_cells)
    if zero_infinity:
        losses = losses.masked_fill(losses == float("inf"), 0)
    if nonfinite != "keep":
        wrong = finite.not_finite(losses, utterance_weights)
    if nonfinite == "raise":
        finite.check_finite(losses, wrong, tensors[:8], blank)
    if nonfinite == "skip":
        weights = torch.ones_like(losses) if utterance_weights is None else utterance_weights
        utterance_weights = weights.masked_fill(wrong, 0)
    loss = _reduced(losses, reduction, utterance_weights).to(accumulated(dtype))
    results = [loss]
    if return_posteriors or return_delay:
        posteriors = plain.parts_of_cells(call, arcs, backend, padding=0.0)
        if fastemit_lambda:
            posteriors[..., 1] /= 1 + fastemit_lambda  # arcs, made for gradients, has this factor
        if return_posteriors:
            results.append(posteriors)
        if return_delay:
            results.append(plain.mean_delay(posteriors[:, :, :-1, 1], reference_frames))
    if return_skipped:
        results.append(wrong)
    return tuple(results) if len(results) > 1 else loss


def align(
    encoder_out: Tensor, decoder_out: Tensor,
    weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, targets: Optional[Tensor] = None,
    T_lengths: Optional[Tensor] = None, U_lengths: Optional[Tensor] = None, blank: int = 0, activation: str = "tanh",
    *, output: Optional[nn.Linear] = None, delay_penalty: float = 0.0, topology: str = "regular",
    durations: Sequence[int] = (), sigma: float = 0.0, tile_cells: Optional[int] = None,
    backend: Optional[str] = None, confidence_span: Optional[int] = None,
) -> Tuple[Tensor, ...]:  # fmt: skip
    """Return (frames, log_probabilities) of the most probable path of each utterance through its
    targets, or (frames, log_probabilities, confidences) if confidence_span is not None.

    frames (N, U), int64: the frame at which each target is emitted; -1 beyond the utterance's
    targets, and where no path is possible.  log_probabilities (N,), float64.  confidences (N, U),
    float64: the probability, over all paths through the targets, that a target is emitted at most
    confidence_span frames before or after the frame in `frames`.  A confidence is 0 where `frames`
    is -1.  The other arguments are those of `transducer_loss`.
    """
    tensors = _inputs(encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, output)
    options = {
        "blank": blank, "activation": activation, "tile_cells": tile_cells, "delay_penalty": delay_penalty,
        "topology": topology, "durations": durations, "sigma": sigma,
    }  # fmt: skip
    check_options(tensors[2].shape[0], **options)
    if confidence_span is not None:
        check_number("confidence_span", confidence_span, Integral, 0)
    backend = backend_of(encoder_out.device, tensors[0].dtype, backend)
    call = Call.of((*tensors, None, None), packed(**options))
    with torch.no_grad():
        lengths = [x.to(call.device) for x in tensors[5:7]]
        arcs = operators.log_probabilities(call, backend)
        parts = plain.parts_of_cells(call, arcs, backend, padding=-torch.inf).double()
        frames, scores = plain.best(parts, *lengths, call.lattice)
        if confidence_span is None:
            return frames, scores
        span = int(confidence_span)
        confidences = plain.confidences(parts, *lengths, call.lattice, frames, span)
        return frames, scores, confidences


def seconds(frames: Tensor, frame_shift: float, subsampling: int) -> Tensor:
    """Return the time at which each frame begins, in seconds, float64; NaN for a negative frame,
    by which `align` says that there is no frame.

    Args
        frames: integers, numbers of frames of encoder_out, of any shape
        frame_shift: seconds from one frame of the features to the next, such as 0.01; at least 0
        subsampling: frames of the features for each frame of encoder_out, such as 4 or 8

    Raises ValueError for frames that are no integers, and for a frame_shift or subsampling that is
    no such number.
    """
    check_tensors(frames=frames)
    if frames.is_floating_point():
        raise ValueError(f"frames must be integers, as align returns them; they are {frames.dtype}")
    check_number("frame_shift", frame_shift, Real, 0)
    check_number("subsampling", subsampling, Integral, 1)
    return torch.where(frames < 0, torch.nan, frames.double() * (frame_shift * subsampling))


def _inputs(
    encoder_out: Tensor, decoder_out: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
    targets: Optional[Tensor], T_lengths: Optional[Tensor], U_lengths: Optional[Tensor], output: Optional[nn.Linear],
    utterance_of: Optional[Tensor] = None,
) -> Tuple[Any, ...]:  # fmt: skip
    """Return (encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, utterance_of)
    of a call. Raises ValueError where they do not fit together.

    The layer `output`, if it is not None, gives weight and bias. Under autocast the first four get
    its dtype, but float64 stays. If the weight includes low-rank terms (`is_folded`), the first
    four get the dtype of sums instead, with or without autocast."""
    if output is not None:
        if weight is not None or bias is not None:
            raise ValueError("output: give either the layer, or weight and bias")
        weight, bias = of_linear(output)
    check_tensors(
        encoder_out=encoder_out, decoder_out=decoder_out, weight=weight, bias=bias,
        targets=targets, T_lengths=T_lengths, U_lengths=U_lengths, utterance_of=utterance_of,
    )  # fmt: skip
    floats = (encoder_out, decoder_out, weight, bias)
    device = encoder_out.device.type
    if output is not None and is_folded(output, weight):
        floats = tuple(x if x is None else x.to(accumulated(weight.dtype)) for x in floats)
    elif device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        floats = tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in floats)
    tensors = (*floats, targets, T_lengths, U_lengths, utterance_of)
    check_shapes(*tensors)
    return tensors


def _room(call: Call, backend: str, in_graph: bool) -> int:
    """Return the number of cells for which forward leaves numbers to backward.

    The backend tells this number. Where the lengths have no values, it is the number of all cells
    of the padded batch.

    in_graph: whether the call is compiled or traced, so that tensors have no values
    """
    every_cell = call.M * call.T * call.U1
    if in_graph:
        return every_cell
    try:
        room = module_of(backend).room(call)
    except (RuntimeError, IndexError):  # meta and fake tensors, vmap
        return every_cell
    return min(max(room, 0), every_cell)  # wrong lengths are refused where values are checked


def _kept_cells(
    call: Call, backend: str, cells: int, keep_bytes: Optional[int], in_graph: bool
) -> int:
    """Return the number of cells whose logits forward keeps for backward.

    cells: number of all cells, as `_room` returns it
    keep_bytes: memory for these logits; None for the default of `transducer_loss`
    in_graph: as in `_room`; if True, the answer may exceed `cells`
    """
    if backend not in KEPT_BYTES:
        return 0
    cell_bytes = call.V * accumulated(call.encoder_out.dtype).itemsize
    if in_graph:
        return 0 if keep_bytes is None else keep_bytes // cell_bytes
    if keep_bytes is not None:
        fitting = keep_bytes // cell_bytes
    else:
        fitting = KEPT_BYTES[backend] // cell_bytes
        # For each cell that does not fit, one cell fewer is kept: so the time of a batch grows with
        # its size and does not jump.
        fitting -= max(0, cells - fitting)
    return max(0, min(fitting, cells))


def _check_shape(name: str, tensor: Any, shape: Tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError if an argument is no tensor of this shape on this device."""
    check_tensors(**{name: tensor})
    if tuple(tensor.shape) != shape or tensor.device != device:
        raise ValueError(
            f"{name} must have the shape {shape} and be on {device}; it has {tuple(tensor.shape)} and is on "
            f"{tensor.device}"
        )


def _reduced(losses: Tensor, reduction: str, weights: Optional[Tensor]) -> Tensor:
    """Return the losses (M,) times their weights (M,), reduced: "none" returns all of them, "sum"
    their sum, and "mean" their sum divided by that of the weights, or by 1 if that is 0.

    A loss whose weight is 0 counts as 0, even if it is infinite. Weights of None count as 1."""
    if weights is not None:
        losses = losses.masked_fill(weights == 0, 0) * weights
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    if weights is None:
        return losses.mean()
    total = weights.sum()
    return losses.sum() / torch.where(total == 0, 1, total)


def _seed(seed: Union[int, Tensor, None], device: torch.device) -> Tensor:
    """Return the seed of dropout as an int64 tensor () on `device`, and a tensor as it is.

    For None draw a seed from torch's generator. Raises ValueError for anything that is neither a
    tensor nor an integer of 64 bits.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= seed < 2**63:
        raise ValueError(
            f"dropout_seed must be an integer of 64 bits or a tensor with one; it is {seed!r}"
        )
    return torch.full((), int(seed), dtype=torch.int64, device=device)
