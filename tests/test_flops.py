"""The counter's numbers: what the issue names, what follows by hand, and what is told of what has no rule."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rnnt_bench.core.errors import UserError
from rnnt_bench.flops import rules
from rnnt_bench.flops.counter import OUTSIDE, FlopCounter, NotCounted
from rnnt_bench.flops.rules import Count
from torch import nn

pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{words}") for words in ("torch.jit", "deprecated", "prototype")]


def counted(work, *inputs, **options):
    """(FLOPs, MACs) of a forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCounted)
        with FlopCounter(work if isinstance(work, nn.Module) else None, **options) as counter:
            work(*inputs)
    return counter.total().flops, counter.total().macs


def both(work, *inputs):
    """(FLOPs, MACs) of the forward and of the backward, from ones (made outside)."""
    with FlopCounter() as counter:
        out = work(*inputs)
        forward = counter.total()
    ones = torch.ones_like(out)
    with counter:
        out.backward(ones)
    total = counter.total()
    return (forward.flops, forward.macs), (total.flops - forward.flops, total.macs - forward.macs)


def tensor(*shape, device="cpu", grad=False):
    return torch.randn(*shape, device=device).requires_grad_(grad)


MLP = lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))  # noqa: E731
FORWARD = {
    "linear": (lambda: nn.Linear(3, 5), [(2, 3)], 70, 30),
    "linear without bias": (lambda: nn.Linear(3, 5, bias=False), [(2, 3)], 60, 30),
    "mlp": (MLP, [(4, 3)], 248, 100),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1), [(1, 2, 10)], 520, 240),
    "depthwise conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1, groups=4), [(1, 4, 10)], 280, 120),
    "conv2d": (lambda: nn.Conv2d(1, 8, 3, stride=2), [(1, 1, 9, 9)], 2432, 1152),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 4), [(1, 2, 5)], 264, 120),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(2, 3, 3), [(1, 2, 4, 4)], 1836, 864),
    "matrix by matrix": (lambda: torch.matmul, [(2, 3), (3, 4)], 48, 24),
    "matrix by vector": (lambda: torch.matmul, [(3, 4), (4,)], 24, 12),
    "matrix by batch": (lambda: torch.matmul, [(3, 4), (5, 4, 6)], 720, 360),
    "bmm": (lambda: torch.bmm, [(5, 2, 3), (5, 3, 4)], 240, 120),
    "addmm": (lambda: torch.addmm, [(2, 4), (2, 3), (3, 4)], 56, 24),
    "einsum": (lambda: lambda a, b: torch.einsum("ij,jk", a, b), [(2, 3), (3, 4)], 48, 24),
    "softmax": (lambda: nn.Softmax(-1), [(2, 5)], 30, 0),
    "layer norm": (lambda: nn.LayerNorm(5), [(2, 5)], 50, 0),
    "layer norm without weights": (lambda: nn.LayerNorm(5, elementwise_affine=False), [(2, 5)], 40, 0),
    "broadcast sum": (lambda: torch.add, [(2, 3), (3,)], 6, 0),
    "sum over a dimension": (lambda: lambda x: x.sum(-1), [(2, 3)], 4, 0),
    "mean over a dimension": (lambda: lambda x: x.mean(-1), [(2, 3)], 6, 0),
    "dropout in evaluation": (lambda: nn.Dropout(0.5).eval(), [(2, 3)], 0, 0),
    "cat": (lambda: lambda a, b: torch.cat([a, b]), [(2, 3), (2, 3)], 0, 0),
    "transpose": (lambda: lambda x: x.transpose(0, 1).contiguous(), [(2, 3)], 0, 0),
    "gt": (lambda: lambda x: x > 0, [(2, 3)], 0, 0),
    # beyond the issue's
    "group norm": (lambda: nn.GroupNorm(2, 4), [(3, 4, 5)], 300, 0),
    "log_softmax": (lambda: nn.LogSoftmax(-1), [(2, 5)], 30, 0),
    "logsumexp": (lambda: lambda x: x.logsumexp(-1), [(2, 5)], 20, 0),
    "cumsum": (lambda: lambda x: x.cumsum(-1), [(2, 5)], 8, 0),
    "logcumsumexp": (lambda: lambda x: x.logcumsumexp(-1), [(2, 5)], 24, 0),
    "variance": (lambda: lambda x: x.var(-1), [(2, 5)], 40, 0),
    "standard deviation": (lambda: lambda x: x.std(-1), [(2, 5)], 42, 0),
    "norm": (lambda: lambda x: x.norm(dim=-1), [(2, 5)], 20, 0),
    "average pooling": (lambda: nn.AvgPool2d(2), [(1, 1, 4, 4)], 16, 0),
    "interpolation": (lambda: nn.Upsample(scale_factor=2, mode="linear"), [(1, 2, 5)], 60, 0),
    "glu": (lambda: nn.GLU(-1), [(2, 6)], 12, 0),
    "add with a factor": (lambda: lambda a, b: torch.add(a, b, alpha=2), [(2, 3), (2, 3)], 12, 0),
    "in place": (lambda: lambda x: x.mul_(2).add_(1), [(2, 3)], 12, 0),
    "complex product": (lambda: lambda a, b: torch.complex(a, b) * torch.complex(b, a), [(2, 3), (2, 3)], 36, 0),
    "complex matrices": (lambda: lambda a, b: torch.complex(a, a) @ torch.complex(b, b), [(2, 3), (3, 4)], 192, 96),
    "fft of 8": (lambda: lambda a, b: torch.fft.fft(torch.complex(a, b)), [(8,), (8,)], 120, 0),
    "rfft of 8": (lambda: torch.fft.rfft, [(8,)], 60, 0),
    # 10 steps, 3 inputs, 4 hidden units: gates of 8 biases, and 13 or 2 for each unit
    "lstm": (lambda: nn.LSTM(3, 4), [(2, 5, 3)], 2 * 1120 + 10 * (32 + 52), 10 * 16 * (3 + 4)),
    "rnn": (lambda: nn.RNN(3, 4), [(2, 5, 3)], 2 * 280 + 10 * (8 + 8), 10 * 4 * (3 + 4)),
    "mse": (lambda: nn.MSELoss(), [(2, 3), (2, 3)], 18, 0),
}


#: By name: what returns a function and its inputs, FLOPs and MACs, of what torch has on a CPU alone.
ON_CPU = {
    "a special function": (lambda: (lambda x: torch.special.i1(x).add_(torch.special.zeta(x, x)), tensor(2, 3)), 18, 0),
    "lists": (lambda: (lambda x: torch._foreach_add([x, x], [x, x], alpha=2), tensor(2, 3)), 24, 0),
    "what makes": (lambda: (lambda x: (torch.rand(3), torch.arange(3), torch.zeros_like(x), x.new_zeros(3)), X), 0, 0),
    "what chooses": (lambda: (lambda x: (x.eq(x), x.clamp(0, 1), F.pad(x, (1, 1)), x.max(-1), x.double()), X), 0, 0),
    "what moves": (lambda: (lambda x: (F.max_pool1d(x, 2), x.select_scatter(x[0], 0, 1), x.clone()), X), 0, 0),
    "what draws": (lambda: (lambda x: x.clone().bernoulli_(), X), 0, 0),
    "lists that choose": (lambda: (lambda x: torch._foreach_clamp_min([x], 0), X), 0, 0),
    "integers": (lambda: (lambda i: (i + 1, i.sum(), i * 2 > 1), torch.tensor([[1, 2]])), 0, 0),
    "embedding": (lambda: (nn.Embedding(5, 3), torch.tensor([[1, 2]])), 0, 0),
    "magnitude": (lambda: (torch.abs, torch.ones(4, dtype=torch.complex64)), 16, 0),
    "angle": (lambda: (torch.angle, torch.ones(4, dtype=torch.complex64)), 4, 0),
    "sgn": (lambda: (torch.sgn, torch.ones(4, dtype=torch.complex64)), 24, 0),
    # T = 5, E = 8, two heads, N = 2: biases 4 T E, scaling T E, softmax 3, mean of heads 1
    "multi-head attention": (lambda: (SELF, tensor(5, 2, 8)), 2 * 3360 + 5 * 80 + 4 * 100, 3360),
    "a mask": (lambda: (partial(SELF, attn_mask=torch.zeros(5, 5)), tensor(5, 2, 8)), 2 * 3360 + 5 * 80 + 500, 3360),
    # 5 n log2 n, for both dimensions 5 x 32 x 5; an inverse divides 8 complex numbers
    "fft2": (lambda: (torch.fft.fft2, torch.ones(4, 8, dtype=torch.complex64)), 800, 0),
    "ifft": (lambda: (torch.fft.ifft, torch.ones(8, dtype=torch.complex64)), 120 + 16, 0),
    "irfft": (lambda: (torch.fft.irfft, torch.ones(5, dtype=torch.complex64)), 60 + 8, 0),
    "mean of integers": (lambda: (lambda x: x.mean(dtype=torch.float32), torch.arange(4)), 4, 0),
    "cumulated complex": (lambda: (lambda x: x.cumsum(0), torch.ones(4, dtype=torch.complex64)), 6, 0),
    # as torch's own counter has products without a rule
    "float8": (
        lambda: (partial(torch._scaled_mm, scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16), EIGHT, EIGHT.t()),
        2 * 16**3,
        16**3,
    ),
    # 3 real convolutions of 24 outputs x 6; sums of their inputs, 3 differences, and an imaginary part added, 2 and 2
    "complex convolution": (
        lambda: (nn.Conv1d(2, 4, 3, bias=False, dtype=torch.complex64), tensor(1, 2, 8).to(torch.complex64)),
        2 * 432 + 16 + 24 + (3 + 2 + 2) * 24,
        432,
    ),
    "complex linear": (
        lambda: (nn.Linear(3, 5, bias=False, dtype=torch.complex64), tensor(2, 3).to(torch.complex64)),
        240,
        120,
    ),
    # 30 x 30 pairs in 3 dimensions by one product of 5 columns; 6 pairs, and 3 x 3, by differences
    "cdist": (lambda: (torch.cdist, tensor(30, 3), tensor(30, 3)), 2 * 4500 + 900 + 60 * 5 + 30 * 3, 4500),
    "cdist of order 1": (lambda: (partial(torch.cdist, p=1), tensor(3, 4), tensor(3, 4)), 9 * 3 * 4, 0),
    "pdist": (lambda: (F.pdist, tensor(4, 3)), 3 * 3 * 6, 0),
    "int8 linear": (lambda: (int8(), tensor(2, 3)), 60 + 3 * 10 + 2 * 6, 30),
    "cross": (lambda: (partial(torch.cross, dim=1), tensor(2, 3), tensor(2, 3)), 18, 0),
    # T = 5, N = 2, 3 inputs, 4 hidden units: 20 steps; packed, 8
    "bidirectional gru": (lambda: (nn.GRU(3, 4, bidirectional=True), tensor(5, 2, 3)), 2 * 1680 + 20 * (24 + 40), 1680),
    "packed lstm": (lambda: (nn.LSTM(3, 4), PACKED), 2 * 896 + 8 * (32 + 52), 8 * 16 * (3 + 4)),
    # 10 queries of 8; 14 keys of 6 and values of 4; 2 x 2 x 5 x 7 scores of 4 features
    "other widths": (
        lambda: (nn.MultiheadAttention(8, 2, kdim=6, vdim=4), tensor(5, 2, 8), tensor(7, 2, 6), tensor(7, 2, 4)),
        2 * 3520 + 2 * 80 + 2 * 112 + 80 + 4 * 140,
        2 * 10 * 64 + 14 * 48 + 14 * 32 + 2 * 140 * 4,
    ),
    # functions of functions: 3 squares, their sum; two products with the upstream gradient, added up
    "vmap": (lambda: (torch.func.vmap(nn.Linear(3, 5)), tensor(2, 3)), 70, 30),
    "vmap of a product": (lambda: (torch.func.vmap(torch.mv), tensor(4, 5, 3), tensor(4, 3)), 120, 60),
    "grad": (lambda: (torch.func.grad(lambda x: (x * x).sum()), tensor(3)), 3 + 2 + 6 + 3, 0),
}


def int8():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will have it
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 5)), {nn.Linear})


def bags(mode, **options):
    bag = nn.EmbeddingBag(6, 4, mode=mode)
    return lambda: (partial(bag, torch.tensor([[0, 1, 2], [1, 2, 3]]), **options),)


X, ONE = tensor(2, 4), torch.tensor(1.0)
EIGHT = torch.ones(16, 16).to(getattr(torch, "float8_e4m3fn", torch.float16))  # which torch 1.13 lacks
SELF = lambda x, **options: nn.MultiheadAttention(8, 2).eval()(x, x, x, **options)  # noqa: E731


PACKED = nn.utils.rnn.pack_padded_sequence(tensor(5, 2, 3), torch.tensor([5, 3]))


@pytest.mark.parametrize("name", ON_CPU)
def test_on_a_cpu(name):
    make, flops, macs = ON_CPU[name]
    assert counted(*make()) == (flops, macs)


@pytest.mark.environment_contract
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, device):
    make, shapes, flops, macs = FORWARD[name]
    work = make()
    work = work.to(device) if isinstance(work, nn.Module) else work
    inputs = [tensor(*shape, device=device) for shape in shapes]
    with torch.no_grad():
        try:
            assert counted(work, *(leaf.clone() for leaf in inputs)) == (flops, macs)
        except NotImplementedError:
            pytest.skip(f"torch {torch.__version__} has no such operator on {device}")


@pytest.mark.parametrize("name", ["clip", "selu", "float_power", *list(FORWARD)[:2], "conv1d", "layer norm", "softmax"])
def test_inference_mode_leaves_operators_whole_and_counts_the_same(name):
    others = {"clip": lambda x: x.clip(0, 1), "selu": F.selu, "float_power": lambda x: torch.float_power(x, 2)}
    make, shapes, *_ = FORWARD.get(name, (lambda: others[name], [(2, 3)]))
    work, inputs = make(), [tensor(*shape) for shape in shapes]
    eager = counted(work, *inputs)
    with torch.inference_mode():
        assert counted(work, *inputs) == eager


#: name: (module, shape of the input, whether that wants a gradient, FLOPs and MACs of the backward)
BACKWARD = {
    # 2 x 2 x 3 x 5 for the input, as much for the weights, 5 sums of two numbers for the bias
    "linear": (lambda: nn.Linear(3, 5), (2, 3), True, 60 + 60 + 5, 60),
    "linear, input without gradient": (lambda: nn.Linear(3, 5), (2, 3), False, 60 + 5, 30),
    # second layer: weights 80, bias 2 x 3, input 80; ReLU 20; first layer: weights 120, bias 5 x 3
    "mlp": (MLP, (4, 3), False, 80 + 6 + 80 + 20 + 120 + 15, 140),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1), (1, 2, 10), True, 2 * 480 + 4 * 9, 480),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 4), (1, 2, 5), True, 2 * 240 + 3 * 7, 240),
    "layer norm": (lambda: nn.LayerNorm(5), (2, 5), True, 130, 0),
    "layer norm, input without gradient": (lambda: nn.LayerNorm(5), (2, 5), False, 50, 0),
    "softmax": (lambda: nn.Softmax(-1), (2, 5), True, 40, 0),
    "log_softmax": (lambda: nn.LogSoftmax(-1), (2, 5), True, 40, 0),
    "tanh": (lambda: nn.Tanh(), (2, 5), True, 30, 0),
    "gelu": (lambda: nn.GELU(), (2, 5), True, 20, 0),
    "sum": (lambda: lambda x: x.sum(), (2, 5), True, 0, 0),
    "mean": (lambda: lambda x: x.mean(), (2, 5), True, 10, 0),
    "average pooling": (lambda: nn.AvgPool2d(2), (1, 1, 4, 4), True, 4 * (1 + 4), 0),
    "interpolation": (lambda: nn.Upsample(scale_factor=2, mode="linear"), (1, 2, 5), True, 20 * 4, 0),
    "square": (lambda: lambda x: x * x, (2, 5), True, 30, 0),  # two products and their sum
}


WALKED = 6 * (14 * 3 + 5) + 5 * (14 * 2 + 5)
#: By name: what returns a function and its inputs; (FLOPs, MACs) of the forward and of the backward.
BOTH_WAYS = {
    "embedding": (lambda: (nn.Embedding(5, 3), torch.tensor([1, 2, 2])), (0, 0), (9, 0)),
    "gather": (lambda: (lambda x: x.gather(1, torch.tensor([[0, 1, 1]])), tensor(1, 4, grad=True)), (0, 0), (3, 0)),
    # 50 scores, 4 features: Q and K scaled, softmax 3, Q K^T and P V; backward four products, softmax 4, scales
    "attention": (
        lambda: (F.scaled_dot_product_attention, *(tensor(1, 2, 5, 4, grad=True) for _ in range(3))),
        (2 * 400 + 3 * 50 + 2 * 40, 400),
        (2 * 800 + 4 * 50 + 2 * 40, 800),
    ),
    # 7 frames and 3 labels, 6 and 2: 14 U + 5 for each frame but the first; 7 and 5 states, 5 symbols
    "ctc": (
        lambda: (
            lambda x: F.ctc_loss(x, torch.tensor([[1, 2, 3], [1, 1, 0]]), (7, 6), (3, 2), reduction="none"),
            tensor(7, 2, 5, grad=True),
        ),
        (WALKED + 2 * 5, 0),
        (WALKED + 7 * (5 * 7 + 6 * 5) + 6 * (5 * 5 + 6 * 5), 0),
    ),
    # 2 bags of 3 rows of 4
    "bags that are added up": (bags("sum"), (16, 0), (24, 0)),
    "means of bags": (bags("mean"), (24, 0), (32, 0)),
    "maxima of bags": (bags("max"), (0, 0), (8, 0)),
    "weighted bags": (
        bags("sum", per_sample_weights=tensor(2, 3, grad=True)),
        (16 + 24, 0),
        (24 + 24 + 6 * 7, 0),
    ),
    # x1 W over I, 120, times x2 over J, 40; biases 10; backward the same three ways
    "bilinear": (
        lambda: (nn.Bilinear(3, 4, 5), tensor(2, 3, grad=True), tensor(2, 4, grad=True)),
        (320 + 10, 160),
        (2 * (144 + 240 + 160) + 5, 144 + 240 + 160),
    ),
    # windows of 3 of 5 numbers, and of 9 of 25
    "adaptive average pooling": (lambda: (nn.AdaptiveAvgPool1d(2), tensor(1, 2, 5, grad=True)), (12, 0), (16, 0)),
    "in two dimensions": (lambda: (nn.AdaptiveAvgPool2d(2), tensor(1, 2, 5, 5, grad=True)), (72, 0), (80, 0)),
    "distances": (
        lambda: (partial(torch.cdist, p=1), tensor(3, 4, grad=True), tensor(3, 4)),
        (9 * 3 * 4, 0),
        (9 * (3 * 4 + 1), 0),
    ),
    # 20 inputs, each spread over 3 x 6 / 2 weights; 6 x 9 biases; backward twice that, and 6 sums of 9
    "grouped dilated transposed convolution": (
        lambda: (nn.ConvTranspose1d(4, 6, 3, groups=2, dilation=2), tensor(1, 4, 5, grad=True)),
        (360 + 54, 180),
        (720 + 6 * 8, 360),
    ),
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.environment_contract) for name in BACKWARD), *BOTH_WAYS]
)
def test_backward(name):
    make, *expected = BOTH_WAYS.get(name) or BACKWARD[name]
    if name in BACKWARD:
        shape, grad, flops, macs = expected
        assert both(make(), tensor(*shape, grad=grad))[1] == (flops, macs)
    else:
        assert both(*make()) == tuple(expected)


QKV = [(2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)]
STEPS = [(2, 5, 3)]
ATTENTION = {
    "plain": (lambda: F.scaled_dot_product_attention, QKV),
    "causal": (lambda: partial(F.scaled_dot_product_attention, is_causal=True), QKV),
    "dropout": (lambda: partial(F.scaled_dot_product_attention, dropout_p=0.1), QKV),
    "shared": (lambda: partial(F.scaled_dot_product_attention, enable_gqa=True), [QKV[0], (2, 2, 6, 8), (2, 2, 6, 8)]),
    "other width": (lambda: F.scaled_dot_product_attention, [*QKV[:2], (2, 4, 6, 3)]),
    "layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(2, 5, 8)]),
    "evaluated layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), [(2, 5, 8)]),
    "heads": (lambda: nn.MultiheadAttention(8, 2), [(5, 2, 8)] * 3),
}
#: Of these, products alone: the meta device adds up otherwise.
RECURRENT = {
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), STEPS),
    "lstms": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, bias=False), STEPS),
    "projected lstm": (lambda: nn.LSTM(3, 4, proj_size=2), STEPS),
    "gru": (lambda: nn.GRU(3, 4, 2, bidirectional=True), STEPS),
    "rnn": (lambda: nn.RNN(3, 4), STEPS),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_it_is_the_same_on_the_meta_device(name, grad):
    (make, shapes), backward, counts = (ATTENTION | RECURRENT)[name], grad or name in RECURRENT, []
    for device in ("cpu", "meta"):
        work, inputs = make(), [tensor(*shape, grad=grad, device=device) for shape in shapes]
        work = work.to(device) if isinstance(work, nn.Module) else work
        with torch.set_grad_enabled(backward), FlopCounter() as counter:
            outputs = work(*inputs)
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            if backward:
                first.backward(torch.ones_like(first))
        counts.append(counter.total().macs if name in RECURRENT else counter.total())
    assert counts[0] == counts[1]


def test_gradients_of_an_lstm_that_are_not_asked_for_are_left_out():
    """10 steps, matrices of 48 and 64: the input's gradient is not needed, nor that of the state of the first 2."""
    layer, state = nn.LSTM(3, 4, batch_first=True), tuple(tensor(1, 2, 4, grad=True) for _ in range(2))
    assert both(lambda x: layer(x)[0], tensor(2, 5, 3))[1][1] == 10 * (48 + 64) + (10 - 2) * 64
    assert both(lambda x: layer(x, state)[0], tensor(2, 5, 3, grad=True))[1][1] == 2 * 10 * (48 + 64)


def test_flexible_attention_counts_as_attention():
    """2 x 16 x 16 scores of 8 features; its backward, which a CPU has not, as that of the fused one."""
    flexible = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    qkv = [tensor(1, 2, 16, 8) for _ in range(3)]
    with torch.no_grad():
        assert counted(flexible, *qkv) == (2 * 8192 + 3 * 512 + 2 * 256, 8192)
    call = rules.Call("higher_order::flex_attention_backward", {}, qkv)
    assert rules.RULES[call.name](call) == Count(2 * 8192, 4 * 8192 + 4 * 512 + 2 * 256)


def test_layers_of_attention_are_counted_without_torch_s_fast_path_which_is_on_again_later():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), tensor(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        macs = [counted(work)[1] for work in (lambda: layer(x), lambda: encoder(x, src_key_padding_mask=padding))]
    assert macs == [count * 2 * (4 * 5 * 64 + 2 * 25 * 8 + 2 * 5 * 8 * 16) for count in (1, 2)]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("name", "options", "flops"),
    [
        # momentum times its buffer, plus the gradient; then the parameters plus a multiple of it
        ("SGD", {"momentum": 0.9}, 20 * (1 + 1 + 2)),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}, 20 * (2 + 2 + 2 + 2 + 1)),
        # both averages 3 and 4, root, two corrections, the parameters 3; its two counters of steps
        ("Adam", {}, 20 * 13 + 2),
        ("AdamW", {}, 20 * 14 + 2),
        ("Adagrad", {}, 20 * 7 + 2),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_s_step_counts_the_same_by_tensor_and_by_lists(name, options, flops, foreach):
    model = nn.Linear(3, 5)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach, **options)
    for _ in range(2):
        model(tensor(2, 3)).sum().backward()
        with FlopCounter(strict=True) as counter:
            optimizer.step()
    assert counter.total().flops == flops


FORMS = {
    "scripted": lambda model, x: torch.jit.script(model),
    "traced": torch.jit.trace,
    "frozen": lambda model, x: torch.jit.freeze(torch.jit.script(model.eval())),
    "compiled": lambda model, x: torch.compile(model, backend="aot_eager"),
    "wrapped": lambda model, x: nn.DataParallel(model),
}


@pytest.mark.parametrize("how", FORMS)
def test_a_model_in_another_form_is_the_same_work(how):
    x = tensor(4, 3)
    model = FORMS[how](MLP(), x)
    for _ in range(3):  # a first call makes what the next ones run
        assert counted(lambda: model(x)) == (248, 100)
        model(x)


LIBRARY = torch.library.Library("flopstest", "DEF")
for _name in ("half", "third", "fourth", "odd", "even"):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")


class Custom(nn.Module):
    """Calls an operator that no rule knows, twice."""

    def __init__(self, name):
        super().__init__()
        operator = getattr(torch.ops.flopstest, name)
        self.forward = lambda x: operator(operator(x))


def test_an_unknown_operator_is_named_once_in_every_run_and_an_error_where_strict():
    model = nn.Sequential(nn.Linear(3, 3), Custom("half"))
    for _ in range(2):
        with pytest.warns(NotCounted, match="flopstest::half in 1 ") as caught, torch.no_grad():
            with FlopCounter(model) as counter:
                model(tensor(2, 3))
        assert len(caught) == 1 and counter.document()["not_counted"] == ["flopstest::half in 1 (no rule)"]
        assert counter.total() == Count(18, 2 * 18 + 6)
    with torch.no_grad(), FlopCounter(strict=True), pytest.raises(UserError, match="flopstest::half.*Custom"):
        Custom("half")(tensor(2))
    # those of the list in docs/flops.md have no rules
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), tensor(3), (2, 3))
    nested = torch.nested.nested_tensor([tensor(2, 3), tensor(1, 3)])
    eye, works = torch.eye(3), {"sparse": lambda: coo @ tensor(3, 4), "nested": lambda: nested * 2}
    weight = tensor(3, grad=True)
    weight.grad = tensor(3)
    works.update(
        lstsq=lambda: torch.linalg.lstsq(eye, tensor(3, 2)),
        linalg_solve=lambda: torch.linalg.solve(eye, eye),
        bicubic=lambda: F.interpolate(tensor(1, 1, 4, 4), scale_factor=2, mode="bicubic"),
        grid_sampler=lambda: F.grid_sample(tensor(1, 1, 4, 4), tensor(1, 4, 4, 2), align_corners=False),
        fused_adam=lambda: torch.optim.Adam([weight], fused=True).step(),
    )
    for name, work in works.items():
        with FlopCounter(strict=True), pytest.raises(UserError, match=name):
            work()


class InNumpy(nn.Module):
    """Multiplies in numpy, before and after what torch does."""

    def __init__(self, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(tensor(5, 3)), bias

    def forward(self, x):
        product = torch.from_numpy(x.numpy() @ self.weight.detach().numpy().T)
        return product.clone() if self.bias is None else product + self.bias


class Looked(nn.Module):
    """Takes rows of its matrices, and multiplies nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bag, self.norm = nn.Embedding(5, 3), nn.EmbeddingBag(5, 3), nn.LayerNorm((2, 3))
        self.positions = nn.Parameter(tensor(9, 3))

    def forward(self, index):
        return self.norm(self.embedding(index) + self.positions[:2]) + self.bag(index[None])


class Threaded(nn.Sequential):
    """Runs its layer in another thread, as DataParallel does, which a mode of torch does not see."""

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self[0], x)
        return x * 1


def test_a_module_whose_products_were_not_seen_is_named():
    convolutions = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval())
    for model, shape, name in (
        (Threaded(nn.Linear(3, 5)), (2, 3), "Linear"),
        (nn.Sequential(InNumpy(None)), (2, 3), "InNumpy"),
        (nn.Sequential(InNumpy(1.0)), (2, 3), "InNumpy"),
        (torch.jit.optimize_for_inference(convolutions), (1, 3, 16, 16), "RecursiveScriptModule"),
    ):
        for _ in range(2):  # a first call makes what the next ones run
            model(tensor(*shape))
        with pytest.warns(NotCounted, match=name), torch.no_grad(), FlopCounter(model) as counter:
            model(tensor(*shape))
        assert counter.total().macs == 0 and counter.not_counted() == [name]
        with torch.no_grad(), pytest.raises(UserError, match=name), FlopCounter(model, strict=True):
            model(tensor(*shape))
    for model in (Looked(), nn.Sequential(Looked())):
        assert counted(model, torch.tensor([1, 2]), strict=True)[1] == 0


def test_a_rule_in_one_line_and_one_that_fails_which_is_named():
    rules.register(torch.ops.flopstest.third, lambda call: call.out.numel())
    rules.register("flopstest::fourth", lambda call: Count(macs=1, flops=call["x"].numel()))
    with torch.no_grad():
        assert counted(Custom("third"), tensor(2, 3)) == (12, 0)
        assert counted(Custom("fourth"), tensor(2, 3)) == (12, 2)
        rules.register("flopstest::fourth", lambda call: call["nothing"].numel())
        with pytest.warns(NotCounted, match="flopstest::fourth.*AttributeError"), FlopCounter() as counter:
            Custom("fourth")(tensor(2, 3))
    assert counter.not_counted() == ["flopstest::fourth"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=2):
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.environment_contract
def test_a_custom_function_is_named_until_it_has_a_rule():
    name = f"{Doubled.__module__}.Doubled"
    with pytest.warns(NotCounted), FlopCounter() as counter:
        Doubled.apply(tensor(3, grad=True))
    assert counter.not_counted() == [name] and counter.total() == Count(0, 3)
    rules.register(Doubled, lambda call: 100 * call["factor"] + call["x"].numel())
    assert counted(lambda: (Doubled.apply(tensor(3)), Doubled.apply(tensor(3), 1))) == (203 + 103 + 6, 0)
    rules.register(name, None)
    assert counted(lambda: Doubled.apply(tensor(3))) == (3, 0)


def test_nothing_stays_behind():
    model = nn.Linear(3, 5)
    with pytest.raises(RuntimeError), FlopCounter(model) as counter:
        model(tensor(2, 4))
    model(tensor(2, 3))
    with counter:
        model(tensor(2, 3))
    assert counter.total() == Count(30, 70)


class Residual(nn.Module):
    """x + inner(x), then a ReLU of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = MLP(), nn.Linear(2, 3)

    def forward(self, x):
        return F.relu(x + self.out(self.inner(x)))


def by_path(counter, phase):
    counts = [entry for entry in counter.document()["counts"] if entry["phase"] == phase and entry["flops"]]
    paths = {entry["path"]: 0 for entry in counts}
    return {path: sum(entry["flops"] for entry in counts if entry["path"] == path) for path in paths}


def test_forward_and_backward_by_module():
    """Each operator belongs to the module whose forward made its node, gradients of parameters to the owner."""
    model = Residual()
    with FlopCounter(model) as counter:
        out = model(tensor(4, 3))
        forward = {"inner.0": 140, "inner.1": 20, "inner.2": 88, "out": 60, "": 24}
        assert by_path(counter, "forward") == forward and sum(forward.values()) == counter.total().flops
        out.backward(torch.ones_like(out))
        model.out(tensor(4, 2)).sum().backward()
    linear = {"inner.0": 120 + 15, "inner.1": 20, "inner.2": 80 + 80 + 6, "": 12}
    out_twice = (48 + 48 + 9) + (48 + 9) + 9  # input, weights, bias; weights, bias; both added to the first ones
    assert by_path(counter, "backward") == {**linear, "out": out_twice}
    assert by_path(counter, "forward")[OUTSIDE] == 11  # the sum


def test_a_checkpoint_computes_its_forward_again():
    model, x = MLP(), tensor(4, 3, grad=True)
    with FlopCounter(model) as counter:
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        out.backward(torch.ones_like(out))
    assert sum(by_path(counter, "forward").values()) == 248 and set(by_path(counter, "backward")) == {"0", "1", "2"}
    # the last layer's output is not needed again, but torch computes it, or stops before
    assert sum(by_path(counter, "backward").values()) - (321 + 120) in (248, 248 - 88)


def test_names_of_shared_modules_and_of_models_that_were_not_named():
    shared = nn.Linear(3, 3)
    shared.weight.requires_grad_(False)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with FlopCounter(model) as counter:
        model(tensor(2, 3))
    assert by_path(counter, "forward") == {"0": 84, "1": 6}
    modules = {module["path"]: module for module in counter.document()["modules"]}
    assert {path: module["calls"] for path, module in modules.items()} == {"": 1, "0": 2, "1": 1}
    assert [sum(module[key] for module in modules.values()) for key in ("trainable", "frozen")] == [3, 9]
    model = MLP()
    with FlopCounter() as counter:
        model(tensor(4, 3)).sum()
    assert by_path(counter, "forward") == {"Sequential.0": 140, "Sequential.1": 20, "Sequential.2": 88, OUTSIDE: 7}
    with FlopCounter({"encoder": model, "decoder": model[2]}) as counter:
        model(tensor(4, 3))
    assert set(by_path(counter, "forward")) == {"encoder.0", "encoder.1", "encoder.2"}
