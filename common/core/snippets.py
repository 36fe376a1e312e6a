"""Hold code to copy: how each loss is called, in the names that README, the report and the corner
cases use.

Shapes: encoder_out (N, T, D), decoder_out (N, U+1, D), logits (N, T, U+1, V), targets (N, U) int32;
T_lengths and U_lengths (N) int32; output_linear: the joiner's last layer, D to V.  The blank is 0.
`import torch` is left out.
"""

from __future__ import annotations

#: A joiner, from encoder and decoder outputs to logits.
JOINER = "logits = output_linear(torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1)))\n"

_BOUNDARY = """\
begin = torch.zeros_like(U_lengths)
boundary = torch.stack([begin, begin, U_lengths, T_lengths], 1).long()
"""
#: The loss of {package} on logits, and its pruned loss with the simple one that chooses the
#: symbols.
_FULL = (
    "from {package} import rnnt_loss\n\n"
    + _BOUNDARY
    + """\
loss = rnnt_loss(logits, targets.long(), termination_symbol=0,
                 boundary=boundary, reduction="mean")
"""
)
_PRUNED = (
    "import {package}  # am_linear, lm_linear: D to V\n\n"
    + _BOUNDARY
    + """\
simple_loss, gradients = {package}.rnnt_loss_smoothed(
    lm_linear(decoder_out), am_linear(encoder_out), targets.long(), 0,
    lm_only_scale=0.25, boundary=boundary, return_grad=True)
ranges = {package}.get_rnnt_prune_ranges(*gradients, boundary, s_range=5)
pruned = {package}.do_rnnt_pruning(encoder_out, decoder_out, ranges)
loss = 0.5 * simple_loss + {package}.rnnt_loss_pruned(
    output_linear(torch.tanh(sum(pruned))), targets.long(), ranges, 0,
    boundary)
"""
)

#: How a loss is called, by its name in tables without @ENVIRONMENT.
SNIPPETS = {
    "fused": """\
# pip install ./fused_transducer
from fused_transducer import transducer_loss

loss = transducer_loss(
    encoder_out, decoder_out, output_linear.weight, output_linear.bias,
    targets, T_lengths, U_lengths, blank=0, reduction="mean")
""",
    "torchaudio": """\
import torchaudio

loss = torchaudio.functional.rnnt_loss(
    logits, targets, T_lengths, U_lengths, blank=0, reduction="mean")
""",
    "optimized_transducer": """\
from optimized_transducer import transducer_loss

cells = [each[:T, : U + 1].flatten(0, 1)
         for each, T, U in zip(logits, T_lengths, U_lengths)]
loss = transducer_loss(
    torch.cat(cells), targets, T_lengths, U_lengths,
    blank=0, reduction="mean", from_log_softmax=False)
""",
    "warprnnt_numba": """\
from warprnnt_numba import RNNTLossNumba

loss = RNNTLossNumba(blank=0, reduction="mean")(
    logits, targets, T_lengths, U_lengths)
""",
    "fast_rnnt": _FULL.format(package="fast_rnnt"),
    "k2": _FULL.format(package="k2"),
    "fast_rnnt-pruned": _PRUNED.format(package="fast_rnnt"),
    "k2-pruned": _PRUNED.format(package="k2"),
}
