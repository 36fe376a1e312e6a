#!/usr/bin/env python3
"""Benchmark a transducer loss of your own against every other: put yours into `transducer_loss` and
run this script.

The loss is checked against the float64 oracle first.  If it is right, its time and memory are
measured, like those of every other row.  The loss in this file is an example: the lattice by
anti-diagonals, T + U steps of torch.logaddexp. --only torchaudio,k2 chooses the rows beside it;
--preset quick tries it out in a minute.  A copy of this file is a row of its own, with the name in
`name`, or else that of the file: benchmark_flash.py is flash.
"""

from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import Adapter

LOG_ZERO = -1e30  # log of 0 that stays finite in sums, so that no gradient is inf - inf


def transducer_loss(logits, targets, T_lengths, U_lengths):
    """Return the summed loss of logits (N, T, U+1, V), padded; targets (N, U) and lengths (N,)
    int32; blank is 0."""
    import torch

    N, T, U1, _ = logits.shape
    n, t, u = (torch.arange(size, device=logits.device) for size in (N, T, U1))
    outside = (t[:, None] >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))
    dtype = torch.promote_types(logits.dtype, torch.float32)  # half precision is summed in float32
    # padding may be NaN
    log_probs = logits.masked_fill(outside.unsqueeze(-1), 0).log_softmax(-1, dtype)
    index = torch.nn.functional.pad(targets.long(), (0, 1)).view(N, 1, U1, 1).expand(N, T, U1, 1)
    label = log_probs.gather(3, index).squeeze(3).masked_fill(u == U1 - 1, LOG_ZERO)

    def by_diagonal(arc):
        """Return the arc's weights (N, T, U+1) as (N, T, T+U), with cell (t, u) in column t + u."""
        moved = torch.nn.functional.pad(arc.clamp(min=LOG_ZERO), (0, T), value=LOG_ZERO).flatten(1)
        return moved[:, : T * (T + U1 - 1)].view(N, T, T + U1 - 1)

    blank, label = by_diagonal(log_probs[..., 0]), by_diagonal(label)
    alphas = [torch.where(t == 0, 0.0, LOG_ZERO).to(dtype).expand(N, T)]
    for now in range(T + U1 - 2):
        waited = torch.nn.functional.pad(alphas[-1] + blank[..., now], (1, -1), value=LOG_ZERO)
        alphas.append(torch.logaddexp(waited, alphas[-1] + label[..., now]))
    last = n, T_lengths.long() - 1, T_lengths.long() - 1 + U_lengths.long()
    losses = -(torch.stack(alphas, 2)[last] + blank[last])
    # infinite where no path is possible
    return losses.masked_fill(losses > -LOG_ZERO / 2, torch.inf).sum()


class Mine(Adapter):
    name = "mine"
    hint = "pip install what your loss needs"
    dtypes = ("float32", "float64")
    devices = ("cpu", "cuda")
    reductions = ("sum",)

    def version(self):
        return "0.1"

    def prepare(self, batch):  # untimed: what the loss wants beside the logits
        return SimpleNamespace(
            targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths
        )

    def function(self):
        return transducer_loss

    def options(self):
        return {}


ADAPTER = Mine

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
