"""icefall's Conformer transducer as its recipe of 2022 has it (pruned_transducer_stateless2):
`--config icefall`.

Written anew from the recipe's published definition: macaron feed-forwards, self-attention over
relative positions, a convolution module, BasicNorm, DoubleSwish, balancers of activations, a
learned scale of every weight and bias, a stateless decoder.  It does the same work and has the same
parameters, 78,648,040 by default.  Leaves out what only the first batches of a training do (the
warm-up of layers) and what only streaming does.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from rnnt_bench.data.shapes import subsampled
from rnnt_bench.flops import rules
from rnnt_bench.tools.sizes import Sizes
from rnnt_bench.tools.transducer import SUBSAMPLING, Criterion, Decoder, Transducer

#: Standard deviation of weights before they are scaled.
STD = 0.1
#: The most that a balancer changes a gradient by, as a share of it.
MOST_BALANCED = 0.01
#: How often a layer is bypassed in training, and the share of it that stays then.
BYPASSED, KEPT = 0.075, 0.1

Layer = TypeVar("Layer", bound=nn.Module)


class Scale(nn.Module):
    """Multiplies a tensor by a learned number, of which the logarithm is the parameter."""

    def __init__(self, initial: float):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(initial).log())

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.log_scale.exp()


def scaled(layer: Layer, initial: float = 1.0) -> Layer:
    """Return the linear layer or convolution, with a learned scale of its weight and of its bias.

    initial: size of its outputs at first, for inputs of size 1.
    """
    linear: Any = layer
    weight, bias = linear.weight, linear.bias
    bound = math.sqrt(3) * STD
    nn.init.uniform_(weight, -bound, bound)
    register_parametrization(layer, "weight", Scale(initial / STD / math.sqrt(weight[0].numel())))
    if bias is not None:
        nn.init.zeros_(bias)
        register_parametrization(layer, "bias", Scale(initial))
    return layer


class BasicNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension.  learned: whether eps is a parameter."""

    def __init__(self, learned: bool = True):
        super().__init__()
        log_eps = torch.tensor(0.25).log()
        if learned:
            self.log_eps = nn.Parameter(log_eps)
        else:
            self.register_buffer("log_eps", log_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * ((x**2).mean(-1, keepdim=True) + self.log_eps.exp()) ** -0.5


class _DoubleSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x - 1)
        y = x * gate
        ctx.save_for_backward(gate, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gate, y = ctx.saved_tensors
        return gradient * (y * (1 - gate) + gate)


class DoubleSwish(nn.Module):
    """x sigmoid(x - 1), about swish(swish(x)); keeps two tensors for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _DoubleSwish.apply(x)


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        channel: int,
        positive: tuple[float, float],
        magnitude: tuple[float, float],
    ) -> torch.Tensor:
        others = [dim for dim in range(x.dim()) if dim != channel % x.dim()]
        above_zero = x > 0
        share = above_zero.to(x.dtype).mean(others, keepdim=True)
        fewest, most = positive
        factor = (fewest - share).relu() * (MOST_BALANCED / fewest)
        if most < 1:
            factor = factor - (share - most).relu() * (MOST_BALANCED / (1 - most))
        size = x.abs().mean(others, keepdim=True)
        ctx.save_for_backward(factor, above_zero, size < magnitude[0], size > magnitude[1])
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        factor, above_zero, small, large = ctx.saved_tensors
        dtype = gradient.dtype
        growth = (
            (small.to(dtype) - large.to(dtype)) * (above_zero.to(dtype) - 0.5) * (2 * MOST_BALANCED)
        )
        return gradient - gradient.abs() * (factor + growth), None, None, None


for function in (_DoubleSwish, _Balance):
    rules.register(function, None)  # torch's operators alone


class Balancer(nn.Module):
    """The input itself.  The backward pushes channels towards a share of positive activations and a
    mean magnitude within these ranges, by up to MOST_BALANCED of each gradient."""

    def __init__(
        self,
        channel: int = -1,
        positive: tuple[float, float] = (0.05, 0.95),
        magnitude: tuple[float, float] = (0.2, 100.0),
    ):
        super().__init__()
        self.channel, self.positive, self.magnitude = channel, positive, magnitude

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            _Balance.apply(x, self.channel, self.positive, self.magnitude) if x.requires_grad else x
        )


class Embed(nn.Module):
    """(N, frames, features) -> (N, T, encoder_dim): three convolutions of kernel 3, two of them of
    stride 2."""

    def __init__(self, of: Sizes):
        super().__init__()
        channels = (1, *of.embed_channels)
        layers = []
        for inputs, outputs, stride, padding in zip(channels, channels[1:], (1, 2, 2), (1, 0, 0)):
            convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=padding)
            layers += [scaled(convolution), Balancer(channel=1), DoubleSwish()]
        self.convolutions = nn.Sequential(*layers)
        self.out = scaled(
            nn.Linear(channels[-1] * subsampled(of.features, SUBSAMPLING), of.encoder_dim)
        )
        self.norm = BasicNorm(learned=False)
        self.balancer = Balancer(positive=(0.45, 0.55))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        maps = self.convolutions(features.unsqueeze(1))
        return self.balancer(self.norm(self.out(maps.transpose(1, 2).flatten(2))))


class Positions(nn.Module):
    """Sinusoids of relative positions, made once for the longest input so far."""

    def __init__(self, of: Sizes):
        super().__init__()
        self.dropout = nn.Dropout(of.dropout)
        self.frequencies = 10000 ** (-torch.arange(0, of.encoder_dim, 2) / of.encoder_dim)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input (N, T, E) with dropout, and the encodings (1, 2T-1, E) of the positions
        T-1 ... 1-T."""
        T = x.shape[1]
        if self.table is None or len(self.table) < 2 * T - 1:
            angles = torch.arange(T - 1, -T, -1).unsqueeze(1) * self.frequencies
            self.table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.table = self.table.to(x)
        first = len(self.table) // 2 - T + 1
        return self.dropout(x), self.dropout(self.table[None, first : first + 2 * T - 1])


class RelativeAttention(nn.Module):
    """Self-attention whose scores are of contents and of relative positions (Transformer-XL,
    section 3.3)."""

    def __init__(self, of: Sizes):
        super().__init__()
        self.heads = of.heads
        self.in_proj = scaled(nn.Linear(of.encoder_dim, 3 * of.encoder_dim))
        self.linear_pos = scaled(nn.Linear(of.encoder_dim, of.encoder_dim, bias=False))
        self.out_proj = scaled(nn.Linear(of.encoder_dim, of.encoder_dim), 0.25)
        for name in ("content_bias", "position_bias"):
            bias = nn.Parameter(torch.randn(of.heads, of.encoder_dim // of.heads) * 0.01)
            self.register_parameter(name, bias)
            register_parametrization(self, name, Scale(1.0))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, N, E) of the input (T, N, E), encodings of positions (1, 2T-1, E), and padding
        (N, T), true where there is some."""
        T, N, E = x.shape
        H, D = self.heads, E // self.heads
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        query = (query * D**-0.5).reshape(T, N, H, D).transpose(0, 1)
        key = key.reshape(T, N, H, D).permute(1, 2, 3, 0)
        value = value.reshape(T, N * H, D).transpose(0, 1)
        at = self.linear_pos(positions).view(1, 2 * T - 1, H, D).permute(0, 2, 3, 1)
        of_contents = (query + self.content_bias).transpose(1, 2) @ key
        of_positions = (query + self.position_bias).transpose(1, 2) @ at
        scores = (of_contents + shifted(of_positions)).masked_fill(
            padding[:, None, None], -math.inf
        )
        weights = scores.softmax(-1)
        result = (weights.view(N * H, T, T) @ value).transpose(0, 1).reshape(T, N, E)
        # the recipe asks for the heads' mean weights, too, and does not use them
        weights.sum(1) / H
        return self.out_proj(result)


def shifted(scores: torch.Tensor) -> torch.Tensor:
    """Return a view (N, H, T, T) of scores (N, H, T, 2T-1) of the relative positions T-1 ... 1-T:
    of queries i and keys j, whose position is i - j."""
    N, H, T, _ = scores.shape
    batch, head, row, column = scores.stride()
    offset = scores.storage_offset() + (T - 1) * column
    return scores.as_strided((N, H, T, T), (batch, head, row - column, column), offset)


class Convolution(nn.Module):
    """(T, N, E) -> (T, N, E): pointwise with gates, depthwise, pointwise."""

    def __init__(self, of: Sizes):
        super().__init__()
        E = of.encoder_dim
        self.pointwise_conv1 = scaled(nn.Conv1d(E, 2 * E, 1))
        self.balancer1 = Balancer(channel=1, positive=(0.05, 1.0), magnitude=(0.2, 10.0))
        self.depthwise_conv = scaled(nn.Conv1d(E, E, of.kernel, padding=of.kernel // 2, groups=E))
        self.balancer2 = Balancer(channel=1, positive=(0.05, 1.0))
        self.activation = DoubleSwish()
        self.pointwise_conv2 = scaled(nn.Conv1d(E, E, 1), 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.glu(self.balancer1(self.pointwise_conv1(x.permute(1, 2, 0))), dim=1)
        activated = self.activation(self.balancer2(self.depthwise_conv(gated)))
        return self.pointwise_conv2(activated).permute(2, 0, 1)


class Bypass(nn.Dropout):
    """Replaces most of a layer's output by its input, in training, once in 1/p steps."""

    def forward(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.training and self.p and torch.rand(()).item() < self.p:
            return KEPT * output + (1 - KEPT) * given
        return output


class EncoderLayer(nn.Module):
    def __init__(self, of: Sizes):
        super().__init__()
        self.feed_forward_macaron, self.feed_forward = feed_forward(of), feed_forward(of)
        self.self_attn = RelativeAttention(of)
        self.conv_module = Convolution(of)
        self.norm = BasicNorm()
        self.balancer = Balancer(positive=(0.45, 0.55), magnitude=(0.2, 6.0))
        self.dropout = nn.Dropout(of.dropout)
        self.bypass = Bypass(BYPASSED)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        given = x
        x = x + self.dropout(self.feed_forward_macaron(x))
        x = x + self.dropout(self.self_attn(x, positions, padding))
        x = x + self.dropout(self.conv_module(x))
        x = x + self.dropout(self.feed_forward(x))
        return self.bypass(self.norm(self.balancer(x)), given)


def feed_forward(of: Sizes) -> nn.Sequential:
    return nn.Sequential(
        scaled(nn.Linear(of.encoder_dim, of.feed_forward)),
        Balancer(),
        DoubleSwish(),
        nn.Dropout(of.dropout),
        scaled(nn.Linear(of.feed_forward, of.encoder_dim), 0.25),
    )


class Encoder(nn.Module):
    def __init__(self, of: Sizes):
        super().__init__()
        self.embed, self.positions = Embed(of), Positions(of)
        self.layers = nn.ModuleList([EncoderLayer(of) for _ in range(of.layers)])

    def forward(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs (N, T, encoder_dim) and lengths (N,) of features (N, frames, features) and
        lengths (N,)."""
        x, positions = self.positions(self.embed(features))
        lengths = subsampled(lengths, SUBSAMPLING)
        padding = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, positions, padding)
        return x.transpose(0, 1), lengths


def transducer(of: Sizes, criterion: Criterion) -> Transducer:
    """Return the whole model of these sizes.  criterion: its output layer becomes icefall's."""
    decoder = Decoder(of)
    nn.init.normal_(decoder.embedding.weight, std=STD)
    register_parametrization(decoder.embedding, "weight", Scale(1 / STD))
    scaled(decoder.convolution)
    criterion.joiner.layers.output = scaled(nn.Linear(of.joiner_dim, of.vocab_size))
    return Transducer(
        of,
        criterion,
        Encoder(of),
        decoder,
        lambda inputs, outputs: scaled(nn.Linear(inputs, outputs)),
    )
