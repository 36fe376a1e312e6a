"""Run by test_fused_triton.py with TRITON_INTERPRET=1: the Triton kernels on the CPU.  Prints one line of JSON for each
case: its name, the errors of loss and gradients, the largest that is allowed, and whether the rest is right.

--few: fewer cases, and smaller.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy
import torch
from fused_helpers import (
    LATTICES,
    NAMES,
    certain,
    computed,
    error,
    errors,
    interpret_faster,
    lattice_problem,
    problem,
    right,
)

from fused_transducer import align, triton_backend
from fused_transducer.call import packed

warnings.simplefilter("ignore")  # numpy's, of -inf minus -inf where Triton chooses another value
numpy.seterr(all="ignore")
interpret_faster()
FEW = "--few" in sys.argv
RAGGED = [(5, 2), (3, 3), (1, 1), (2, 0)]
EXACT = {"dtype": torch.float32, "backend": "triton", "negligible": 0.0}
HALF = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def report(name, errors, allowed=5e-6, right=True):
    print(json.dumps({"name": name, "errors": errors, "allowed": allowed, "right": bool(right)}), flush=True)


def made(lengths=RAGGED, **options):
    return problem(lengths, **{**EXACT, **options})


def beside(case, backend="torch"):
    """Return the errors of loss and gradients beside another backend's."""
    (losses, gradients), (expected_losses, expected) = computed(case), computed(case, backend=backend)
    return {"loss": error(losses, expected_losses), **{name: error(gradients[name], expected[name]) for name in NAMES}}


def paths_of(case, backend, **options):
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    paths, expected = (align(*given, backend=name, **options) for name in ("triton", backend))
    return dict(zip(("frames", "scores"), map(error, paths, expected)))


def of_options():
    """Pairs of options that share no kernel's branch come once; every activation and dtype, odd sizes, a last blank."""
    cases = {
        "float32": made(),
        "relu, no bias": made(activation="relu", bias=False),
        "none, blank last": made(activation="none", blank=10),
        "leaky_relu, more than a tile": made([(6, 3), (4, 4)], activation="leaky_relu", tile_cells=20),
        "dropout, more than a block": made([(20, 7)], H=140, V=150, scale=0.4, dropout=0.2, dropout_seed=2**40 + 5),
        "dropout, bfloat16": made(H=40, dtype=torch.bfloat16, scale=0.5, dropout=0.6, dropout_seed=-7),
        "float16": made(H=40, V=150, dtype=torch.float16, scale=0.4),
        "odd H and V, sigmoid": made(H=37, V=41, scale=0.4, activation="sigmoid"),
        "odd H and V, bfloat16": made(H=31, V=77, dtype=torch.bfloat16, scale=0.4, activation="relu"),
        "T < U, blank in the middle": made([(2, 4), (1, 2)], blank=5),
    }
    for name, case in cases.items():
        report(name, errors(case), HALF[case.tensors[0].dtype])
    for name, options in {
        "FastEmit": {"fastemit_lambda": 0.3},
        "delay penalty": {"delay_penalty": 0.1},
        "label smoothing": {"label_smoothing": 0.1, "blank": 3},
        "clamp": {"clamp": 0.05},
    }.items():
        report(name, beside(made(**options)))
    precision = triton_backend._precision
    triton_backend._precision = lambda gpu, dtype: "tf32x3"
    report("the weight's halves", errors(cases["odd H and V, sigmoid"]))
    triton_backend._precision, adders, triton_backend.ADDERS = precision, triton_backend.ADDERS, 2
    report("more frames and states than programs", errors(cases["leaky_relu, more than a tile"]))
    triton_backend.ADDERS = adders


def of_numbers():
    """Numbers that are large, small, not finite, or of no utterance."""
    long = made([(48, 20) if FEW else (120, 50)], H=24, V=200, scale=0.5, seed=1)
    report("a long path", errors(long, right(long, large=True)))
    apart = made([(4, 2), (3, 2)])
    apart.tensors[2] *= 1e4 / apart.tensors[2].abs().max()
    report("logits of 10,000", errors(apart), 1e-3)

    sure = certain(20, 6, 40, backend="triton")
    (losses, gradients), (expected_losses, expected) = computed(sure), right(sure, large=True)
    differences = [(gradients[name] - expected[name]).abs().max().item() for name in NAMES]
    report("a loss of 1e-5", {"loss": error(losses, expected_losses)}, 1e-6, max(differences) < 1e-9)

    case = made()
    case.tensors[0][1, 2, 0] = float("nan")
    losses, gradients = computed(case)
    nan = [bool(gradients["encoder_out"][n].isnan().any()) for n in range(4)]
    leaves = case.leaves()
    case.loss(leaves, utterance_weights=torch.tensor([1.0, 0.0, 1.0, 1.0])).sum().backward()
    left_out = all(leaf.grad.isfinite().all() for leaf in leaves)
    report("a NaN", {}, right=left_out and losses.isnan().tolist() == nan == [False, True, False, False])

    expected = right(made())
    case = made()
    case.spoil_padding()
    case.tensors[2] = case.tensors[2].t().contiguous().t()
    losses, gradients = computed(case)
    of_weight = error(gradients["weight"], expected[1]["weight"])
    report("NaN in the padding, strides", {"loss": error(losses, expected[0]), "weight": of_weight})

    case = made()
    case.targets[:], case.targets[0, 1], case.tensors[3][5] = 1, 5, -float("inf")
    losses, gradients = computed(case)
    finite = all(gradient.isfinite().all() for gradient in gradients.values())
    report("an impossible target", {}, right=finite and losses.isinf().tolist() == [True, False, False, False])

    case = made()
    case.targets[:, 1] = 0
    report("a target that is the blank", errors(case))

    dropping = made([(16, 8)], H=8, V=30, negligible=1e-3)
    dropped, plain = (dropping.loss(dropping.leaves(), backend=name, return_dropped=True)[1] for name in BOTH)
    _, whole = computed(dropping, negligible=0.0)
    L1 = (computed(dropping)[1]["bias"] - whole["bias"]).abs().sum().item()
    report("what is dropped", {"dropped": error(dropped, plain)}, right=0 < L1 <= 2 * dropped.item() * 24 * 1.001)


BOTH = ("triton", "torch")
UPSTREAM = {
    "one": lambda losses: losses.sum(),
    "-2": lambda losses: -2 * losses.sum(),
    "0": lambda losses: 0 * losses.sum(),
    "each utterance's": lambda losses: (losses * torch.tensor([0.5, -1.0, 3.0])[: losses.numel()]).sum(),
    "every second number": lambda losses: torch.stack([losses, losses], -1).mul(torch.tensor([-0.5, 1.5])).sum(),
}


def of_calls():
    """What is asked for beside the loss, and how it is called."""
    case = made(fastemit_lambda=0.5)
    posteriors, plain = (case.loss(case.leaves(), backend=name, return_posteriors=True)[1] for name in BOTH)
    report("posteriors", {"posteriors": error(posteriors, plain)})
    report("best paths", paths_of(made(), "torch"))
    _, expected = right(made())
    frozen = {}
    for wanted in NAMES:
        leaves = [tensor.detach().requires_grad_(name == wanted) for name, tensor in zip(NAMES, made().tensors)]
        made().loss(leaves).sum().backward()
        frozen[wanted] = error(leaves[NAMES.index(wanted)].grad, expected[wanted])
    report("frozen inputs", frozen)
    again = made([(6, 3), (4, 4)], tile_cells=20)
    first, *others = (computed(again)[1] for _ in range(2 if FEW else 5))
    report("repeats", {}, right=all(torch.equal(first[name], other[name]) for other in others for name in NAMES))
    expanded = made([(4, 2), (3, 2)])
    expanded.tensors[0] = expanded.tensors[0][:, :1].expand(2, 4, -1)
    report("expanded inputs", errors(expanded))

    for dtype, allowed in HALF.items():
        of_dtype = made([(5, 2), (3, 2), (4, 1)], dtype=dtype, scale=0.4)
        reductions = ("none", "sum", "mean") if dtype == torch.float32 else ("none",)
        for number, (name, weigh) in enumerate(UPSTREAM.items()):
            by_backend = []
            for backend in BOTH:
                leaves = of_dtype.leaves()
                reduction = reductions[number % len(reductions)]
                weigh(of_dtype.loss(leaves, reduction=reduction, backend=backend)).backward()
                by_backend.append([leaf.grad for leaf in leaves])
            report(f"upstream {name}, {dtype}", dict(zip(NAMES, map(error, *by_backend))), allowed)

    small, refused = made(), []
    inputs = [*(x.detach() for x in small.tensors), small.targets, small.T_lengths, small.U_lengths, None]
    for cells, kept in ((7, 0), (61, 0), (60, 3)):  # the batch has 60 cells with its padding
        try:
            torch.ops.fused_transducer.losses(*inputs, packed(), "triton", True, cells, kept)
        except RuntimeError as error_of_size:
            refused.append(error_of_size)
    long = made([(1, 2**15)], H=1, V=2)
    try:
        long.loss(long.tensors)
    except ValueError as too_long:
        refused.append(too_long)
    report("sizes that do not fit", {}, right=len(refused) == 4 and "32769 states" in str(refused[-1]))


def of_lattice(topology):
    def on(lengths=((5, 2), (4, 1), (3, 0)), **options):
        return lattice_problem(topology, lengths, **{**EXACT, "scale": 0.5, **options})

    case = on([(5, 2), (3, 4), (1, 2), (4, 0)])  # T < U and T = 1 among them: some have no path
    expected, of_finite = right(case)
    case.spoil_padding()
    losses, gradients = computed(case)
    finite = expected.isfinite()
    of_case = {"loss": error(losses[finite], expected[finite])}
    of_case.update({name: error(gradients[name], of_finite[name]) for name in NAMES})
    nothing = gradients["encoder_out"][~finite].abs().sum() == 0
    report(f"{topology}: no path", of_case, right=nothing and torch.equal(losses.isinf(), ~finite))

    case, by_backend = on(negligible=0.3), []
    for backend in ("triton", "native"):
        leaves = case.leaves()
        losses, dropped, posteriors = case.loss(leaves, backend=backend, return_dropped=True, return_posteriors=True)
        (losses * torch.tensor([1.0, -2.0, 0.0])).sum().backward()
        by_backend.append([dropped, posteriors, *(leaf.grad for leaf in leaves)])
    of_each = dict(zip(("dropped", "posteriors", *NAMES), map(error, *by_backend)))
    report(f"{topology}: what is dropped", of_each, right=by_backend[0][0].max() > 0)

    many = {"V": 259, "H": 37, "blank": 130, "tile_cells": 9, "fastemit_lambda": 0.3, "delay_penalty": 0.1}
    many.update(activation="sigmoid", dropout=0.3, dropout_seed=5, clamp=0.1)
    if topology in ("modified", "modified-last-blank", "constrained", "star"):
        many["label_smoothing"] = 0.1
    report(f"{topology}: every option", beside(on(**many), "native"))
    if FEW:
        return
    report(f"{topology}: FastEmit", errors(on(fastemit_lambda=0.3, delay_penalty=0.1, blank=10)))
    report(f"{topology}: bfloat16", errors(on(dtype=torch.bfloat16)), 3e-2)
    for durations in {"tdt": [[1, 2, 4], [0, 3], [2, 2]], "multi-blank": [[30_000], [3, 3]]}.get(topology, ()):
        report(f"{topology}: durations {durations}", errors(on([(6, 2), (12, 1), (6, 0)], durations=durations)))
    report(f"{topology}: best paths", paths_of(on(), "native", topology=topology, **LATTICES[topology]))
    case = on([(24, 8)], H=24, seed=1)
    case.tensors[3][10] += 150
    case.targets[case.targets == 10] = 1
    report(f"{topology}: thousands of nats", errors(case), 1e-5, right(case)[0].item() > 1000)


of_options()
of_numbers()
of_calls()
for topology in ("tdt", "modified-last-blank", "star") if FEW else LATTICES:
    of_lattice(topology)
torch.backends.cuda.matmul.fp32_precision = "tf32"
report("TF32 by torch's new setting", errors(made()))
