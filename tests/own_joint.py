"""A loss of one's own that takes encoder and decoder outputs and the output layer, an utterance at a time."""

from __future__ import annotations

from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import Adapter

#: By what each gradient is multiplied.
FACTORS = {"encoder_out": 1.0, "decoder_out": 1.0, "weight": 1.0, "bias": 1.0}


def joint_loss(encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, blank):
    """The summed loss of logits tanh(encoder_out[t] + decoder_out[u]) weight^T + bias."""
    import torch
    from rnnt_bench.losses.topologies import transducer_loss

    given = zip((encoder_out, decoder_out, weight, bias), FACTORS.values())
    frames, symbols, weight, bias = (each * factor + (each * (1 - factor)).detach() for each, factor in given)
    t, u = torch.arange(frames.size(1)), torch.arange(symbols.size(1))
    frames = frames.masked_fill((t >= T_lengths.view(-1, 1)).unsqueeze(2), 0)  # the padding may hold anything
    symbols = symbols.masked_fill((u > U_lengths.view(-1, 1)).unsqueeze(2), 0)
    logits = torch.nn.functional.linear(torch.tanh(frames.unsqueeze(2) + symbols.unsqueeze(1)), weight, bias)
    return transducer_loss(logits, targets, T_lengths, U_lengths, blank=blank, reduction="sum")


class Joint(Adapter):
    name = "mine"
    hint = "pip install torch"
    layout = "joint"
    dtypes = ("float32", "float64", "float16", "bfloat16")
    reductions = ("sum",)

    def version(self):
        return "0.1"

    def prepare(self, batch):
        return SimpleNamespace(targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths)

    def function(self):
        return joint_loss

    def options(self):
        return {"blank": self.blank}


ADAPTER = Joint

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
