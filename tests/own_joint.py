"""A loss of one's own that takes encoder and decoder outputs and the output layer: an utterance at a time, so that no
logits of the batch are ever held.  test_joint.py measures it, and copies of it that are wrong."""

from __future__ import annotations

from types import SimpleNamespace

from common.command import script_main
from common.losses.adapter import Adapter

#: By what each gradient is multiplied.
FACTORS = {"encoder_out": 1.0, "decoder_out": 1.0, "weight": 1.0, "bias": 1.0}


def joint_loss(encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, blank):
    """The summed loss of logits tanh(encoder_out[t] + decoder_out[u]) weight^T + bias."""
    import torch

    class ByUtterance(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            total, gradients = 0.0, [torch.zeros_like(tensor) for tensor in tensors]
            for n in range(len(targets)):
                leaves = [tensor.detach()[n : n + 1] for tensor in tensors[:2]] + [
                    tensor_.detach() for tensor_ in tensors[2:]
                ]
                with torch.enable_grad():
                    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
                    loss = of_one(*leaves, n)
                    grads = torch.autograd.grad(loss, leaves)
                total = total + loss.detach()
                for sum_, part in zip(gradients, (grads[0], grads[1], *grads[2:])):
                    (sum_[n : n + 1] if part.dim() == 3 else sum_).add_(part)
            ctx.save_for_backward(*(gradient * factor for gradient, factor in zip(gradients, FACTORS.values())))
            return total

        @staticmethod
        def backward(ctx, upstream):
            return tuple(upstream.to(gradient.dtype) * gradient for gradient in ctx.saved_tensors)

    def of_one(encoder_out, decoder_out, weight, bias, n):
        from common.losses.vectorised import transducer_loss

        T, U = max(int(T_lengths[n]), 1), max(int(U_lengths[n]), 0)
        joined = torch.tanh(encoder_out[:, :T].unsqueeze(2) + decoder_out[:, : U + 1].unsqueeze(1))
        logits = torch.nn.functional.linear(joined, weight, bias)
        only = slice(n, n + 1)
        return transducer_loss(
            logits, targets[only, :U], T_lengths[only], U_lengths[only], blank=blank, reduction="sum"
        )

    return ByUtterance.apply(encoder_out, decoder_out, weight, bias)


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
