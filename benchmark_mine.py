#!/usr/bin/env python3
"""Benchmark a transducer loss of your own against every other: put yours into `transducer_loss` and run this script.

It is checked against the float64 oracle first.  If it is right its time and memory are measured and it is traced, like
every other row.  The loss in this file is an example: the lattice row by row, with torch.logcumsumexp along u, T steps
instead of T + U.  --only torchaudio,k2 chooses the rows beside it; --preset quick tries it out in a minute.  A copy of
this file is a row of its own, with the name in `name` or else of the file: benchmark_flash.py is flash.
"""

from types import SimpleNamespace

from common.cli.script import script_main
from common.losses.adapter import Adapter


def transducer_loss(logits, targets, T_lengths, U_lengths):
    """The summed loss of logits (N, T, U+1, V), padded; targets (N, U) and lengths (N,) int32; blank is 0."""
    import torch

    N, T, U1, _ = logits.shape
    n, t, u = (torch.arange(size, device=logits.device) for size in (N, T, U1))
    outside = (t[:, None] >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))
    log_probs = logits.masked_fill(outside.unsqueeze(-1), 0).log_softmax(-1)  # padding may be anything, even NaN
    blank = log_probs[..., 0]
    index = targets.long().view(N, 1, U1 - 1, 1).expand(N, T, U1 - 1, 1)
    label = log_probs[:, :, :-1].gather(3, index).squeeze(3)
    along = torch.nn.functional.pad(label.cumsum(2), (1, 0))  # log-probability of emitting u targets on frame t
    alphas = [along[:, 0]]
    for now in range(1, T):
        alphas.append(along[:, now] + torch.logcumsumexp(alphas[-1] + blank[:, now - 1] - along[:, now], dim=1))
    last = n, T_lengths.long() - 1, U_lengths.long()
    return -(torch.stack(alphas, 1)[last] + blank[last]).sum()


class Mine(Adapter):
    name = "mine"
    hint = "pip install what your loss needs"
    dtypes = ("float32", "float64")
    devices = ("cpu", "cuda")
    reductions = ("sum",)

    def version(self):
        return "0.1"

    def prepare(self, batch):  # untimed: what the loss wants beside the logits
        return SimpleNamespace(targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths)

    def function(self):
        return transducer_loss

    def options(self):
        return {}


ADAPTER = Mine

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
