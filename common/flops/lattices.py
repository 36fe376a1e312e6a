"""Rules of transducer losses whose kernels are no operators of torch.

N, T, U, V as everywhere: logits are (N, T, U + 1, V).  Each utterance's own lattice is counted; none of these losses
runs on the meta device, which has no lengths to read.  The counts follow the packages' CPU sources; the sum of two
probabilities in the log domain is 4 (subtract, exp, log1p, add).
"""

from __future__ import annotations

import sys
from typing import Any, List, Sequence, Tuple

from common.flops.rules import Call, Count, add, products

Shapes = Sequence[Tuple[int, int]]


def _shapes(T_lengths: Any, U_lengths: Any) -> List[Tuple[int, int]]:
    return list(zip(T_lengths.tolist(), U_lengths.tolist()))


def _lattice(T: int, U: int) -> int:
    """Count forward (or backward) variables: two sums and their sum in the log domain within, one sum on both edges."""
    return 6 * (T - 1) * U + (T - 1) + U


def _marked(T: int, U: int) -> int:
    """Count the elements of blanks and targets, but for the last blank."""
    return (T - 1) * (U + 1) + T * U


def _both(shapes: Shapes) -> int:
    """Count forward and backward variables, and the last blank."""
    return sum(2 * _lattice(T, U) + 1 for T, U in shapes)


def _log_probs(shapes: Shapes) -> int:
    return sum(T * (U + 1) + T * U for T, U in shapes)


def _merged_gradient(shapes: Shapes, V: int) -> int:
    """Count the gradient through the softmax: 2 per cell; 3 per element (add, add, exp) and per blank or target."""
    return sum((2 + 3 * V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in shapes)


def _torchaudio(call: Call) -> int:
    """Its forward computes the gradient, asked or not; without fused_log_softmax there are no denominators."""
    logits = call["logits"]
    V = logits.shape[-1]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    if call["fused_log_softmax"]:
        return 2 * logits.numel() + _log_probs(shapes) + _both(shapes) + _merged_gradient(shapes, V)
    return _both(shapes) + sum(4 * V * T * (U + 1) + _marked(T, U) for T, U in shapes)


def _optimized_transducer(call: Call) -> int:
    """Its denominators are torch's logsumexp, which is counted as such; one symbol a frame has T - U frames."""
    logits = call["logits"]
    from_log_probs = call["from_log_softmax"]
    shapes = _shapes(call["logit_lengths"], call["target_lengths"])
    walked = [(T - U, U) for T, U in shapes] if call["one_sym_per_frame"] else shapes
    total = (0 if from_log_probs else _log_probs(shapes)) + _both(walked)
    if not logits.requires_grad:
        return total
    V = logits.shape[-1]
    if from_log_probs:
        return total + sum((1 + V) * T * (U + 1) + 3 * _marked(T, U) + 2 for T, U in walked)
    return total + _merged_gradient(walked, V)


def _mutual_information(call: Call) -> int:
    """The recursion and its derivative, within the boundary; all else is torch's operators."""
    px, py, boundary = call["px"], call["py"], call["boundary"]
    regular = px.shape[2] == py.shape[2] + 1
    if boundary is None:
        sides = [(px.shape[1], py.shape[2])] * px.shape[0]
    else:
        sides = [(u_end - u, t_end - t) for u, t, u_end, t_end in boundary.tolist()]
    gradient = call["return_grad"] or px.requires_grad or py.requires_grad
    edges = sum(frames + (U if regular else 0) for U, frames in sides)
    inner = sum(U * frames for U, frames in sides)
    return 6 * inner + edges + (7 * inner + edges if gradient else 0)


def _warp_numba(call: Call) -> int:
    """On CUDA as torchaudio's.  On the CPU it loops over torch's scalars, which are counted as such; exp and log1p are
    Python's."""
    logits, gradient = call["acts"], call["acts"].requires_grad
    shapes = _shapes(call["act_lens"], call["label_lens"])
    if not logits.is_cuda:
        return sum((4 if gradient else 2) * (T - 1) * U + (T * U if gradient else 0) for T, U in shapes)
    total = 2 * logits.numel() + _log_probs(shapes) + _both(shapes)
    return total + (_merged_gradient(shapes, logits.shape[-1]) if gradient else 0)


def _fused(call: Call) -> Any:
    """Return the call as the package knows it, whose options are a list of numbers."""
    names = ("encoder_out", "decoder_out", "weight", "bias", "targets", "T_lengths", "U_lengths", "seed")
    return sys.modules["fused_transducer.call"].Call.of([call[name] for name in names], call["options"])


def _fused_losses(call: Call) -> Count:
    """Joiner and loss in one, of the cells of the utterances alone; of peaky logits the C++ code computes fewer.  Per
    cell 2 H (sum and activation) and 2 V (denominator); of a lattice with other arcs 5 and 2 for each arc of a cell."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    shapes = _shapes(fused.T_lengths, fused.U_lengths)
    cells = sum(T * (U + 1) for T, U in shapes)
    if fused.topology in ("regular", "hat"):
        walked = sum(_lattice(T, U) + (2 * _marked(T, U) if call["gradient"] else 0) for T, U in shapes)
    else:
        durations = len(fused.durations)  # durations of 0 count as others
        arcs = {"tdt": 2 * durations, "multi-blank": 2 + durations, "star": 3}.get(fused.topology, 2)
        walked = cells * arcs * (7 if call["gradient"] else 5)
    return products(H * V * cells, cells * (2 * H + 2 * V) + _log_probs(shapes) + walked)


def _fused_gradients(call: Call) -> Count:
    """Cells whose posterior is negligible are left out, and the logits of the others are computed again where forward
    did not keep them.  Per cell 2 H (sum and activation), 4 V (softmax and gradient), V for the bias, 4 H to the
    outputs."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    further = len(fused.durations) if fused.topology == "multi-blank" else 0  # other durations are no symbols
    posterior = call["arcs"][: 2 + further].sum(0)
    cells = int((~(posterior < fused.negligible) & (posterior != 0)).sum())
    encoder_out, decoder_out, weight, bias = call["wanted"]
    outputs = encoder_out or decoder_out
    times = (len(call["kept"]) == 0) + weight + outputs
    return products(times * H * V * cells, cells * (2 * H + 4 * V + bias * V + outputs * 4 * H))


_MUTUAL = "mutual_information.MutualInformationRecursionFunction"
for _names, _count in (
    ("torchaudio::rnnt_loss_forward", _torchaudio),
    ("optimized_transducer.transducer_loss.TransducerLossFunction", _optimized_transducer),
    (f"fast_rnnt.{_MUTUAL} k2.{_MUTUAL}", _mutual_information),
    (
        "warprnnt_numba.rnnt_loss.rnnt_pytorch._RNNTNumba "
        "nemo.collections.asr.parts.numba.rnnt_loss.rnnt_pytorch._RNNTNumba",
        _warp_numba,
    ),
    ("fused_transducer::losses", _fused_losses),
    ("fused_transducer::gradients", _fused_gradients),
    # custom autograd functions without kernels of their own, or of operators that have a rule
    (
        "fused_transducer.operators.Losses fused_transducer.operators.Gradients "
        "torchaudio.functional.functional.RnntLoss torchaudio.functional.filtering.DifferentiableFIR "
        "torchaudio.functional.filtering.DifferentiableIIR torchaudio.models.wav2vec2.components.GradMultiply",
        None,
    ),
):
    add(_names, _count)
