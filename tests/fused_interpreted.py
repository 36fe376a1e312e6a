"""Run by test_fused_triton.py with TRITON_INTERPRET=1: the Triton kernels on the CPU.  Prints one line of JSON for each
case: its name, the errors of loss and gradients, and what else it computed.

--few: fewer cases, a shorter path and fewer repeats, and not each reduction with each upstream gradient.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy
import torch
from fused_helpers import ACTIVATIONS, NAMES, computed, error, errors, interpret_faster, problem, right

from fused_transducer import align, triton_backend

warnings.simplefilter("ignore")  # numpy's, of -inf minus -inf where Triton chooses another value
numpy.seterr(all="ignore")
interpret_faster()
few_repeats = "--few" in sys.argv
RAGGED = [(5, 2), (3, 3), (1, 1), (2, 0)]
EXACT = {"backend": "triton", "negligible": 0.0}
CASES = {
    "float32": problem(RAGGED, dtype=torch.float32, **EXACT),
    "relu, no bias": problem(RAGGED, dtype=torch.float32, activation="relu", bias=False, **EXACT),
    "none, blank last": problem(RAGGED, dtype=torch.float32, activation="none", blank=10, **EXACT),
    **{
        f"activation {name}": problem(RAGGED, dtype=torch.float32, activation=name, **EXACT)
        for name in ACTIVATIONS
        if name not in ("none", "tanh", "relu")
    },
    "dropout": problem(RAGGED, H=40, dtype=torch.float32, scale=0.5, dropout=0.2, dropout_seed=2**40 + 5, **EXACT),
    "dropout, gelu, bfloat16": problem(
        RAGGED, H=40, dtype=torch.bfloat16, scale=0.5, activation="gelu", dropout=0.6, dropout_seed=-7, **EXACT
    ),
    "more than a block": problem([(20, 7)], H=140, V=150, dtype=torch.float32, scale=0.4, **EXACT),
    "more than a tile": problem([(6, 3), (4, 4)], dtype=torch.float32, tile_cells=20, **EXACT),
    "bfloat16": problem(RAGGED, H=40, V=150, dtype=torch.bfloat16, scale=0.4, **EXACT),
    "float16": problem(RAGGED, H=40, V=150, dtype=torch.float16, scale=0.4, **EXACT),
    "odd H and V": problem(RAGGED, H=37, V=41, dtype=torch.float32, scale=0.4, activation="sigmoid", **EXACT),
    "odd H and V, bfloat16": problem(
        RAGGED, H=37, V=41, dtype=torch.bfloat16, scale=0.4, dropout=0.2, dropout_seed=3, **EXACT
    ),
}


#: Those whose parts other cases have too: left out with --few.
SIMILAR = ("relu, no bias", "activation sigmoid", "activation silu", "activation leaky_relu", "activation snake")
SIMILAR += ("dropout", "more than a block", "bfloat16", "odd H and V")


def report(name: str, **values) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


for name, case in CASES.items():
    if not (few_repeats and name in SIMILAR):
        report(name, errors=errors(case))

few = [(12, 6), (4, 4), (1, 0)]
half = {"dtype": torch.bfloat16, "scale": 0.4, **EXACT}
for title, case in {
    "500": problem([(14, 6), (5, 9), (1, 3), (5, 0)], H=64, V=500, blank=499, **half),
    "4096": problem(few, H=31, V=4096, dropout=0.2, dropout_seed=9, **half),
    "float16": problem(few, H=61, V=77, activation="silu", **{**half, "dtype": torch.float16}),
}.items():
    report(f"kept activations, {title}", errors=errors(case))

kept = triton_backend.KEPT[8, 0]
triton_backend.KEPT[8, 0] = triton_backend.KEPT[9, 0]
report("kept activations, parts of H", errors=errors(problem(few, H=250, V=61, bias=False, activation="relu", **half)))
triton_backend.KEPT[8, 0] = kept

smooth = problem(few, H=31, V=77, label_smoothing=0.1, delay_penalty=0.1, fastemit_lambda=0.2, blank=3, **half)
smooth.targets[:, 1] = 3
(losses, made), (expected_losses, plain) = computed(smooth), computed(smooth, backend="torch")
report(
    "kept activations, smoothing",
    errors={"loss": error(losses, expected_losses), **{name: error(made[name], plain[name]) for name in NAMES}},
)
widest, triton_backend.WIDEST = triton_backend.WIDEST, 0
others = computed(smooth)
triton_backend.WIDEST = widest
report(
    "kept activations, left to other kernels",
    errors={"loss": error(losses, others[0]), **{name: error(made[name], others[1][name]) for name in NAMES}},
)
only_bias = [tensor.detach().requires_grad_(name == "bias") for name, tensor in zip(NAMES, smooth.tensors)]
smooth.loss(only_bias).sum().backward()
report("kept activations, frozen", errors={"bias": error(only_bias[3].grad, made["bias"])})

precision = triton_backend._precision
triton_backend._precision = lambda gpu, dtype: "tf32x3"
report("the weight's halves", errors=errors(CASES["odd H and V"]))
triton_backend._precision = precision

long = problem([(48, 20) if few_repeats else (120, 50)], H=24, V=200, dtype=torch.float32, scale=0.5, seed=1, **EXACT)
report("a long path", errors=errors(long, right(long, large=True)))

peaky = problem([(20, 6)], H=40, V=40, dtype=torch.float32, activation="none", **EXACT)
codes = torch.eye(40)
peaky.targets = torch.randint(1, 40, (1, 6), generator=torch.Generator().manual_seed(2))
peaky.tensors[0], peaky.tensors[1] = torch.zeros(1, 20, 40), torch.zeros(1, 7, 40)
peaky.tensors[0][0, torch.arange(6) * 3] = codes[peaky.targets[0]]
peaky.tensors[1][0, :6] = codes[peaky.targets[0]]
peaky.tensors[2], peaky.tensors[3] = 30 * codes, 45 * codes[0]
peaky.tensors[2][0] = 0
losses, gradients = computed(peaky)
expected_losses, expected_gradients = right(peaky, large=True)
report(
    "a loss of 1e-5",
    errors={"loss": error(losses, expected_losses)},
    differences=[(gradients[name] - expected_gradients[name]).abs().max().item() for name in NAMES],
)

unknown = problem(RAGGED, dtype=torch.float32, **EXACT)
unknown.tensors[0][1, 2, 0] = float("nan")
losses, gradients = computed(unknown)
report(
    "a NaN",
    errors={},
    nan=torch.isnan(losses).tolist(),
    gradient=bool(torch.isnan(gradients["encoder_out"][1]).any()),
    others=bool(torch.isfinite(gradients["encoder_out"][0]).all()),
)

case = CASES["float32"]
expected = right(case)

case.targets[:, 1] = 0
report("a target that is the blank", errors=errors(case))

spread = problem(RAGGED, dtype=torch.float32, **EXACT)
spread.tensors[0] = torch.stack([spread.tensors[0]] * 2, 3)[..., 0]
spread.tensors[1] = spread.tensors[1].transpose(0, 1).contiguous().transpose(0, 1)
spread.tensors[2] = spread.tensors[2].t().contiguous().t()
report("strides", errors=errors(spread, expected))

padded = problem(RAGGED, dtype=torch.float32, **EXACT)
padded.spoil_padding()
losses, gradients = computed(padded)
report(
    "NaN in the padding",
    errors={"loss": error(losses, expected[0]), "weight": error(gradients["weight"], expected[1]["weight"])},
)

impossible = problem(RAGGED, dtype=torch.float32, **EXACT)
impossible.targets[:] = 1
impossible.targets[0, 1] = 5
impossible.tensors[3][5] = -float("inf")
losses, gradients = computed(impossible)
report(
    "an impossible target",
    errors={},
    inf=torch.isinf(losses).tolist(),
    finite=all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()),
)

dropping = problem([(16, 8)], H=8, V=30, dtype=torch.float32, backend="triton")
leaves = dropping.leaves()
losses, dropped = dropping.loss(leaves, negligible=1e-3, return_dropped=True)
losses.sum().backward()
_, whole = computed(dropping, negligible=0.0)
native, of_native = dropping.loss(dropping.leaves(), negligible=1e-3, return_dropped=True, backend="torch")
report(
    "what is dropped",
    errors={"loss": error(losses.detach(), native.detach()), "dropped": error(dropped, of_native)},
    L1=(leaves[3].grad - whole["bias"]).abs().sum().item(),
    bound=2 * dropped.item() * 24,
)

losses, dropped = dropping.loss(dropping.leaves(), negligible=0.05, fastemit_lambda=0.5, return_dropped=True)
_, expected_dropped = dropping.loss(
    dropping.leaves(), negligible=0.05, fastemit_lambda=0.5, return_dropped=True, backend="torch"
)
report("what is dropped with FastEmit", errors={"dropped": error(dropped, expected_dropped)}, share=dropped.item())

refused = []
small = CASES["float32"]
inputs = [*(x.detach() for x in small.tensors), small.targets, small.T_lengths, small.U_lengths]
for cells, kept in ((7, 0), (61, 0), (60, 3)):  # the batch has 60 cells with its padding
    try:
        torch.ops.fused_transducer.losses(*inputs, 0, "tanh", 0.0, 0.0, 0, "triton", True, cells, kept)
    except RuntimeError as error_of_size:
        refused.append(str(error_of_size))
report("sizes that do not fit", errors={}, refused=refused)

fast = problem(RAGGED, dtype=torch.float32, fastemit_lambda=0.3, **EXACT)
_, made = computed(fast)
_, plain = computed(fast, backend="torch")
report("FastEmit", errors={name: error(made[name], plain[name]) for name in NAMES})

late = problem(RAGGED, dtype=torch.float32, delay_penalty=0.1, **EXACT)
(losses, made), (expected_losses, plain) = computed(late), computed(late, backend="torch")
report(
    "delay penalty",
    errors={"loss": error(losses, expected_losses), **{name: error(made[name], plain[name]) for name in NAMES}},
)

smooth = problem(RAGGED, dtype=torch.float32, label_smoothing=0.1, blank=3, **EXACT)
smooth.targets[:, 1] = 3
(losses, made), (expected_losses, plain) = computed(smooth), computed(smooth, backend="torch")
report(
    "label smoothing",
    errors={"loss": error(losses, expected_losses), **{name: error(made[name], plain[name]) for name in NAMES}},
)

case = problem(RAGGED, dtype=torch.float32, fastemit_lambda=0.5, **EXACT)
posteriors, plain = (case.loss(case.leaves(), backend=name, return_posteriors=True)[1] for name in ("triton", "torch"))
report("posteriors", errors={"posteriors": error(posteriors, plain)})
given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
(frames, scores), (expected_frames, expected_scores) = (align(*given, backend=name) for name in ("triton", "torch"))
report("best paths", errors={"frames": error(frames, expected_frames), "scores": error(scores, expected_scores)})

frozen = {}
for wanted in NAMES:
    case = problem(RAGGED, dtype=torch.float32, **EXACT)
    leaves = [tensor.detach().requires_grad_(name == wanted) for name, tensor in zip(NAMES, case.tensors)]
    case.loss(leaves).sum().backward()
    assert sum(leaf.grad is not None for leaf in leaves) == 1
    frozen[wanted] = error(leaves[NAMES.index(wanted)].grad, expected[1][wanted])
report("frozen inputs", errors=frozen)

with torch.no_grad():
    case = problem(RAGGED, dtype=torch.float32, **EXACT)
    report("without gradients", errors={"loss": error(case.loss(case.leaves()), expected[0])})

again = problem([(6, 3), (4, 4)], dtype=torch.float32, tile_cells=20, **EXACT)
first, *others = (computed(again) for _ in range(2 if few_repeats else 5))
report(
    "repeats", errors={}, same=all(torch.equal(first[1][name], other[1][name]) for other in others for name in NAMES)
)

report("T < U, blank in the middle", errors=errors(problem([(2, 4), (1, 2)], dtype=torch.float32, blank=5, **EXACT)))

expanded = problem([(4, 2), (3, 2)], dtype=torch.float32, **EXACT)
expanded.tensors[0] = expanded.tensors[0][:, :1].expand(2, 4, -1)
expanded.tensors[1] = expanded.tensors[1][:1].expand(2, -1, -1)
report("expanded inputs", errors=errors(expanded))

apart = problem([(4, 2), (3, 2)], dtype=torch.float32, **EXACT)
apart.tensors[2] *= 1e4 / apart.tensors[2].abs().max()
report("logits of 10,000", errors=errors(apart))

UPSTREAM = {
    "one": lambda losses: losses.sum(),
    "-2": lambda losses: -2 * losses.sum(),
    "0": lambda losses: 0 * losses.sum(),
    "each utterance's": lambda losses: (losses * torch.tensor([0.5, -1.0, 3.0])[: losses.numel()]).sum(),
    "every second number": lambda losses: torch.stack([losses, losses], -1).mul(torch.tensor([-0.5, 1.5])).sum(),
}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    of_dtype = problem([(5, 2), (3, 2), (4, 1)], dtype=dtype, scale=0.4, negligible=0.0)
    reductions = ("none", "sum", "mean") if dtype == torch.float32 else ("none",)
    pairs = [(reduction, weigh) for reduction in reductions for weigh in UPSTREAM.values()]
    worst = 0.0
    for reduction, weigh in pairs[3:5] + pairs[6::4] if few_repeats else pairs:
        by_backend = []
        for backend in ("torch", "triton"):
            leaves = of_dtype.leaves()
            weigh(of_dtype.loss(leaves, reduction=reduction, backend=backend)).backward()
            by_backend.append([leaf.grad for leaf in leaves])
        worst = max(worst, *(error(triton, plain) for plain, triton in zip(*by_backend)))
    report(f"reductions and upstream gradients, {str(dtype)[6:]}", errors={"gradients": worst})

triton_backend.ADDERS = 2
report("more frames and states than programs", errors=errors(CASES["more than a tile"]))

long = problem([(1, 2**15)], H=1, V=2, dtype=torch.float32, **EXACT)
try:
    message = str(long.loss(long.tensors))
except ValueError as refused:
    message = str(refused)
report("too many targets", errors={}, message=message)

torch.backends.cuda.matmul.fp32_precision = "tf32"
report("TF32 by torch's new setting", errors=errors(CASES["float32"]))
