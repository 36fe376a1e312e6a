"""Rules of transducer losses, whose kernels are no operators of torch.

The lattice of an utterance of T frames and U targets has T (U+1) cells.  From a cell a blank leads
to the next frame, a target to the next label; these arcs, and the last blank, have the
log-probabilities that the loss needs.  Logits are (N, T, U+1, V).

Only the cells of each utterance are counted, without the padding.  None of these losses runs on the
meta device, which has no lengths to read.  The counts are FLOPs and follow the packages' CPU
sources.  A sum of two probabilities in the log domain is 4: subtract, exp, log1p, add.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rnnt_bench.flops.rules import Call, Count, add, products

#: T and U of each utterance.
Lengths = Sequence[tuple[int, int]]


def _lengths(T_lengths: Any, U_lengths: Any) -> Lengths:
    """Return T and U of each utterance, from a tensor of each."""
    return list(zip(T_lengths.tolist(), U_lengths.tolist()))


def _arcs(T: int, U: int) -> int:
    """Return the number of arcs between cells.  The last blank is none of them."""
    return (T - 1) * (U + 1) + T * U


def _recursion(T: int, U: int) -> int:
    """Count the forward, or the backward, variables of an utterance.

    A cell that two arcs reach takes 6: a sum for each arc, and a sum of two probabilities in the
    log domain, which is 4.  A cell on an edge, which one arc reaches, takes 1."""
    return 6 * (T - 1) * U + (T - 1) + U


def _recursions(lengths: Lengths) -> int:
    """Count forward and backward variables of all utterances, and 1 for each last blank."""
    return sum(2 * _recursion(T, U) + 1 for T, U in lengths)


def _log_probabilities(lengths: Lengths) -> int:
    """Count 1 for each log-probability.  A blank has one in each cell, a target in each cell but
    the last of a frame."""
    return sum(T * (U + 1) + T * U for T, U in lengths)


def _merged_gradient(lengths: Lengths, V: int) -> int:
    """Count the gradients of the logits, with the backward of the softmax in them.

    A cell takes 2 for c = alpha + cost - denominator.  A logit takes 3 for exp(logit + c + beta).
    An arc takes 3 more, to subtract exp(logit + c + the beta that it leads to).  The last blank
    leads to no beta, so it takes 2 more."""
    return sum((2 + 3 * V) * T * (U + 1) + 3 * _arcs(T, U) + 2 for T, U in lengths)


def _torchaudio(call: Call) -> int:
    """Count a forward, which always computes the gradient.

    With fused_log_softmax the denominators take 2 for each logit, also for those of padding.
    Without it there are no denominators, and the gradient takes 4 for each logit and 1 for each
    arc."""
    logits = call["logits"]
    V = logits.shape[-1]
    lengths = _lengths(call["logit_lengths"], call["target_lengths"])
    total = _recursions(lengths)
    if not call["fused_log_softmax"]:
        return total + sum(4 * V * T * (U + 1) + _arcs(T, U) for T, U in lengths)
    total += 2 * logits.numel() + _log_probabilities(lengths)
    return total + _merged_gradient(lengths, V)


def _optimized_transducer(call: Call) -> int:
    """Count all but the denominators, which torch's logsumexp computes.

    With one_sym_per_frame a target takes a frame, as a blank does, so the lattice is as large as a
    regular one of T - U frames.  All but the log-probabilities are counted in this lattice.

    With from_log_softmax the arguments are log-probabilities; their gradient takes 1 for each cell,
    1 for each logit, 3 for each arc, and 2 for the last blank."""
    V = call["logits"].shape[-1]
    from_log_probs = call["from_log_softmax"]
    lengths = _lengths(call["logit_lengths"], call["target_lengths"])
    total = 0 if from_log_probs else _log_probabilities(lengths)
    if call["one_sym_per_frame"]:
        lengths = [(T - U, U) for T, U in lengths]  # of the regular lattice of that size
    total += _recursions(lengths)
    if not call["logits"].requires_grad:
        return total
    if from_log_probs:
        return total + sum((1 + V) * T * (U + 1) + 3 * _arcs(T, U) + 2 for T, U in lengths)
    return total + _merged_gradient(lengths, V)


def _mutual_information(call: Call) -> int:
    """Count the recursion of k2 and fast_rnnt within `boundary`, and its derivative.  All other
    operations of these losses are operators of torch, which are counted elsewhere.

    px (N, U, T+1) and py (N, U+1, T) are log-probabilities of targets and blanks.  On a lattice
    where a target takes a frame, as a blank does, px is (N, U, T).

    A cell that two arcs reach takes 6 operations, see `_recursion`.  Its derivative takes 7: add,
    subtract and exp for the share of one arc, subtract for that of the other, two products with the
    gradient, and a sum of gradients (mutual_information_cpu.cu).  A cell on an edge, which one arc
    reaches, takes 1 operation, and its derivative 1."""
    px, py = call["px"], call["py"]
    N, U, _ = px.shape
    T = py.shape[2]
    lengths = [(T, U)] * N
    if call["boundary"] is not None:
        bounds = call["boundary"].tolist()
        lengths = [(t_end - t, u_end - u) for u, t, u_end, t_end in bounds]
    # The edges are the T cells before any target and, on a regular lattice, the U cells of frame 0.
    # Where a target takes a frame, no arc reaches the latter.
    is_regular = px.shape[2] == T + 1
    edges = sum(T + U if is_regular else T for T, U in lengths)
    inner = sum(T * U for T, U in lengths)
    total = 6 * inner + edges
    if call["return_grad"] or px.requires_grad or py.requires_grad:
        total += 7 * inner + edges
    return total


def _fused(call: Call) -> Any:
    """Return a fused_transducer.call.Call, that package's own form of its operators' arguments: the
    tensors, and the numbers of its options.

    The package may not be installed.  Where its operators are counted, it is imported already."""
    package = sys.modules["fused_transducer.call"]
    return package.Call.of([call[name] for name in package.TENSORS], call["options"])


class _Size(NamedTuple):
    """The size of the lattice of one row of a fused call, within its window if it has one."""

    cells: int
    arcs: int  # between cells, as the topology "regular" has them
    targets: int  # cells that a target leaves


def _sizes(fused: Any) -> list[_Size]:
    """Return the size of the lattice of each row of a fused call."""
    if fused.window is None:
        lengths = _lengths(fused.frames, fused.U_lengths)
        return [_Size(T * (U + 1), _arcs(T, U), T * U) for T, U in lengths]
    begin, end = fused.band.unbind(-1)  # the first and last frame of each state, 0 to U
    # A target leads to the next state in the same frame: the windows of both states must have it.
    targets = (end[:, :-1] - begin[:, 1:] + 1).clamp(min=0).sum(1)
    # Blanks lead from frame to frame within a state: they are one fewer than its frames.
    arcs = (end - begin).clamp(min=0).sum(1) + targets
    return list(map(_Size, fused.cells().tolist(), arcs.tolist(), targets.tolist()))


def _fused_arcs(fused: Any, sizes: Sequence[_Size], per_arc: int) -> int:
    """Count the operations of the recursion over the arcs in lattices of these sizes.

    per_arc: operations of an arc, 4 of them for a sum in the log domain."""
    if fused.topology in ("regular", "hat"):
        # The first arc into each cell, which (0, 0) lacks, needs no sum in the log domain.
        return sum(per_arc * size.arcs - 4 * (size.cells - 1) for size in sizes if size.cells)
    # Every cell counts as if all arcs left it, also those of duration 0.
    arcs_of_cell = 2  # a blank and a target
    if fused.topology == "tdt":
        arcs_of_cell *= len(fused.durations)  # one of each duration
    if fused.topology == "multi-blank":
        arcs_of_cell += len(fused.durations)  # a longer blank of each duration
    return sum(size.cells for size in sizes) * arcs_of_cell * per_arc


def _fused_losses(call: Call) -> Count:
    """Count joiner and loss in one kernel, over all cells.

    With the logits of a trained model the C++ code leaves out cells that change nothing.  So the
    count is too high for that code and such logits.

    Beside the products a cell takes 2 H for the sum and the activation, 2 V for the denominator,
    and 1 for each log-probability.  An arc takes 1 for a sum, 4 for a sum in the log domain, and 2
    more if there is a gradient."""
    fused = _fused(call)
    sizes = _sizes(fused)
    cells = sum(size.cells for size in sizes)
    log_probabilities = cells + sum(size.targets for size in sizes)
    arcs = _fused_arcs(fused, sizes, 7 if call["gradient"] else 5)
    others = cells * (2 * fused.H + 2 * fused.V) + log_probabilities + arcs
    return products(fused.H * fused.V * cells, others)


def _fused_gradients(call: Call) -> Count:
    """Count the gradients of joiner and loss, at the cells whose posterior is not negligible.

    Each such cell has up to three products of H and V numbers: for the gradient of the weight, for
    that of the outputs, and for its logits where the forward kept none.  Beside them it takes 2 H
    for the sum and the activation, and 4 V for the softmax and the gradient.  The gradient of the
    bias takes V, that of the outputs 4 H."""
    fused = _fused(call)
    V, H = fused.V, fused.H
    # `arcs` has a row for each part of a cell: first the blanks and the target, whose posteriors
    # add up to that of the cell; then with tdt the durations.
    posterior = call["arcs"][: fused.lattice.of_symbols].sum(0)
    is_negligible = (posterior < fused.negligible) | (posterior == 0)  # NaN is not
    cells = int((~is_negligible).sum())
    wants_encoder, wants_decoder, wants_weight, wants_bias = call["wanted"]
    wants_outputs = wants_encoder or wants_decoder
    lacks_logits = len(call["kept"]) == 0
    products_of_cell = sum([lacks_logits, wants_weight, wants_outputs])
    others = 2 * H + 4 * V
    if wants_bias:
        others += V
    if wants_outputs:
        others += 4 * H
    return products(products_of_cell * H * V * cells, others * cells)


_MUTUAL = "mutual_information.MutualInformationRecursionFunction"
add("torchaudio::rnnt_loss_forward", _torchaudio)
add("optimized_transducer.transducer_loss.TransducerLossFunction", _optimized_transducer)
add(f"fast_rnnt.{_MUTUAL} k2.{_MUTUAL}", _mutual_information)
add("fused_transducer::losses", _fused_losses)
add("fused_transducer::gradients", _fused_gradients)
# These custom autograd functions have no kernels of their own, or call operators that have a rule.
add(
    """fused_transducer.operators.Losses fused_transducer.operators.Gradients
    torchaudio.functional.functional.RnntLoss torchaudio.functional.filtering.DifferentiableFIR
    torchaudio.functional.filtering.DifferentiableIIR torchaudio.models.wav2vec2.components.GradMultiply""",
    None,
)
