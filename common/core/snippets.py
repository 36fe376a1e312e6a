"""Hold the code that calls each loss, for users to copy from the report, README and `check`.

Its names: encoder_out (N, T, D), decoder_out (N, U+1, D) and logits (N, T, U+1, V) are float;
targets (N, U), T_lengths (N,) and U_lengths (N,) are int32; output_linear is the joiner's last
layer, D to V.  The blank is 0.  `import torch` is left out.
"""

from __future__ import annotations

#: A joiner, which makes logits of encoder and decoder outputs.
JOINER = "logits = output_linear(torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1)))\n"

#: The argument `boundary` of k2 and fast_rnnt: begin and end of each utterance, (N, 4) int64.
_BOUNDARY = """\
begin = torch.zeros_like(U_lengths)
boundary = torch.stack([begin, begin, U_lengths, T_lengths], 1).long()
"""
#: How {package}, which is k2 or fast_rnnt, computes the loss of logits.
_FULL = (
    "from {package} import rnnt_loss\n\n"
    + _BOUNDARY
    + """\
loss = rnnt_loss(logits, targets.long(), termination_symbol=0,
                 boundary=boundary, reduction="mean")
"""
)
#: How {package} computes its pruned loss.  Its simple loss chooses the symbols for each frame.
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

#: Name of a loss in tables, without @CONDITION -> how it is called.
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

cells = [utterance[:T, : U + 1].flatten(0, 1)
         for utterance, T, U in zip(logits, T_lengths, U_lengths)]
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
