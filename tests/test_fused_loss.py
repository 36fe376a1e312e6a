"""fused_transducer's loss and gradients on the CPU, on each lattice, with each option, against the float64 oracle."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from random import Random

import pytest
import torch
from fused_transducer import align, compiling, lattices, native, operators, seconds
from fused_transducer.call import Call
from fused_transducer.sequence import mwer_loss
from rnnt_bench.losses import oracle, topologies

from commands import ROOT
from fused_helpers import (
    ACTIVATIONS,
    LATTICES,
    NAMES,
    Problem,
    arcs_of,
    by_all_paths,
    certain,
    computed,
    drawn,
    error,
    errors,
    lattice_problem,
    logits_of,
    mask_of,
    paths_of,
    problem,
    right,
    speech,
    topology_of,
    use,
)

RAGGED = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]  # T < U, T = 1 and U = 0 among them
ROOMY = [(12, 4), (9, 3), (8, 1), (7, 0)]  # every lattice has a path for each
EXACT = {"negligible": 0.0}
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ALLOWED = {F64: 1e-12, F32: 5e-6, BF16: 2e-2, F16: 2e-3}
EVERY = ["regular", *LATTICES]
OF_NATIVE = pytest.mark.parametrize("backend", ["native"], indirect=True)


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


def on(topology, lengths=ROOMY, **options):
    return lattice_problem(topology, lengths, **options)


def same(first, second):
    return torch.equal(first[0], second[0]) and all(torch.equal(first[1][name], second[1][name]) for name in NAMES)


CASES = [
    *({"dtype": dtype, "activation": name, "H": 33, "V": 70} for name in ACTIVATIONS for dtype in (F64, F32)),
    *({"lengths": lengths, "activation": "relu"} for lengths in ([(1, 0)], [(1, 1)], [(2, 9)], [(30, 1), (3, 20)])),
    *({"H": H, "V": V, "dtype": dtype} for H, V, dtype in [(1, 1, F32), (1, 2, F64), (31, 32, F32), (16, 1500, F64)]),
    # backward holds the logits of 512 symbols of a tile at once, and takes the normalisers from forward
    *({"V": 1600, "blank": blank, "tile_cells": 40, "dtype": F32} for blank in (0, 511, 512, 1599)),
    *({"dtype": dtype, "H": 40, "V": V} for dtype in (BF16, F16) for V in (50, 1600)),
    *({"tile_cells": tile, "keep_bytes": 0, "bias": tile == 7, "blank": 10} for tile in (1, 7, 64, 1000)),
    {"dropout": 0.2, "dropout_seed": 2**45 + 3, "H": 33, "activation": "none"},
    {"dropout": 0.5, "dropout_seed": 11, "H": 40, "V": 1300, "tile_cells": 40},
    {"dropout": 0.5, "dropout_seed": -7, "H": 40, "V": 40, "tile_cells": 7, "dtype": F32},
    {"delay_penalty": 0.3, "fastemit_lambda": 0.5},
    {"label_smoothing": 0.1, "tile_cells": 16, "blank": 2, "dtype": F32, "V": 70},
    {"label_smoothing": 0.2, "V": 1100},
    *({"clamp": 0.05, "V": V, "dtype": dtype} for V in (70, 1600) for dtype in (F64, F32)),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_it_is_the_oracles(options):
    """A target of each case is the blank."""
    case = problem(**{"lengths": RAGGED, "scale": 0.5, **EXACT, **options})
    if case.targets.numel() and case.targets.shape[1] > 1:
        case.targets[:, 1] = case.options.get("blank", 0)
    assert max(errors(case).values()) < ALLOWED[case.tensors[0].dtype] * (1 if case.tensors[0].dtype != F64 else 5)


OF_LATTICES = [
    *({"dtype": dtype, "scale": 0.5} for dtype in (F32, BF16)),
    {"blank": 10, "fastemit_lambda": 0.3, "delay_penalty": 0.1},
    *({"clamp": 0.1, "V": V, "blank": V - 1, "tile_cells": 40, "scale": 0.5} for V in (11, 1500)),
    {"H": 33, "activation": "sigmoid", "dropout": 0.3, "dropout_seed": 5, "tile_cells": 7, "scale": 0.5, "blank": 5},
    *({"V": V, "blank": V - 1, "H": 33, "scale": 0.5, "tile_cells": 40, "dtype": F32} for V in (2, 1023, 1500)),
]


@pytest.mark.parametrize("topology", EVERY)
def test_every_lattice_is_the_oracles(topology):
    for options in [*OF_LATTICES, *([{"label_smoothing": 0.1}] if topology in lattices.SMOOTHABLE else [])]:
        case = on(topology, **options)
        if topology in ("tdt", "multi-blank", "hat"):
            case.targets[0, 1] = case.options.get("blank", 0)
        dtype = case.tensors[0].dtype
        assert max(errors(case).values()) < (1e-11 if dtype == F64 else ALLOWED[dtype]), options


#: Durations without 0, with gaps, one alone, and in any order.
DURATIONS = [[1, 2, 30_000], [1, 2, 3, 4], [0, 2, 4], [3], [0, 7], [4, 0, 1], [2, 2]]


WITHOUT_PATH = [*((name, {}) for name in EVERY), *(("tdt", {"durations": durations}) for durations in DURATIONS)]


@pytest.mark.parametrize("topology, options", WITHOUT_PATH, ids=str)
def test_utterances_without_a_path_cost_inf_and_leave_no_gradient(topology, options):
    case = on(topology, RAGGED, **options)
    expected, of_finite = right(case)
    case.spoil_padding()
    scales = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0], dtype=F64)
    leaves = case.leaves()
    losses = case.loss(leaves)
    losses.backward(scales)
    assert torch.equal(losses.isinf(), expected.isinf()) and not losses.isnan().any()
    finite = expected.isfinite()
    assert error(losses[finite].detach(), expected[finite]) < 1e-12
    of_encoder = torch.where(finite.view(-1, 1, 1), of_finite["encoder_out"] * scales.view(-1, 1, 1), 0)
    assert error(leaves[0].grad, of_encoder) < 1e-12 and all(leaf.grad.isfinite().all() for leaf in leaves)
    for n, (T, U) in enumerate(RAGGED):
        assert not leaves[0].grad[n, T:].any() and not leaves[1].grad[n, U + 1 :].any()


@pytest.mark.parametrize("dtype, allowed", [(F64, 1e-12), (F32, 2e-6), (BF16, 2e-2)])
@pytest.mark.parametrize("topology", ["regular", "tdt", "hat"])
def test_few_cells_of_many_symbols_go_through_the_weight_in_pieces(topology, dtype, allowed):
    """They are at most twice H, and the symbols more than are taken at once; a weight of bfloat16 is read as such."""
    lengths, options = [(7, 3), (9, 5), (4, 2)], {"dropout": 0.2, "dropout_seed": 5, "backend": "native"}
    options["label_smoothing"] = 0.1 if topology == "regular" else 0.0
    for keep_bytes in (0, 90_000):
        case = lattice_problem(
            topology, lengths, V=2200, H=80, dtype=dtype, scale=0.3, keep_bytes=keep_bytes, **options
        )
        assert max(errors(case).values()) < allowed


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype, allowed", [(F64, 8e-14), (F32, 8e-6)])
def test_activations_and_slopes_of_all_sizes(activation, dtype, allowed):
    """The loss of one symbol is 0: so the value is seen in the gradient of weight, the slope in that of encoder_out."""
    x = torch.cat([torch.linspace(-12, 12, 481), torch.tensor([-60.0, -1e-4, 1e-4, 60.0])]).to(dtype)
    case = problem([(1, 0)], H=len(x), V=2, dtype=dtype, activation=activation, **EXACT)
    case.tensors = [x.view(1, 1, -1), torch.zeros(1, 1, len(x), dtype=dtype), torch.zeros(2, len(x), dtype=dtype), None]
    case.tensors[2][1] = 1e-6  # the gradient of the blank's logit is -1/2, up to 1e-4
    wide = x.double().requires_grad_()
    value = ACTIVATIONS[activation](wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    _, gradients = computed(case)
    share = 1 - torch.sigmoid(-(value * case.tensors[2][1].double()).sum()).item()
    assert (gradients["weight"][1] / share - value).abs().max() < allowed
    assert (gradients["encoder_out"].flatten() / share / case.tensors[2][1, 0].double() - slope).abs().max() < allowed


OF_DRAWN = {F64: 1e-11, F32: 2e-5, BF16: 3e-2, F16: 6e-3}


@pytest.mark.parametrize("seed", range(4))
def test_random_problems_on_every_lattice_are_the_oracles(seed):
    random = Random(seed)
    for _ in range(15):
        case = drawn(random, T=12, U=9, V=70, H=50).with_options(negligible=0.0)
        symbols, blank = len(case.tensors[2]) - len(case.options.get("durations", ())), case.options["blank"]
        if symbols > 1:
            case.targets = case.targets % (symbols - 1)
            case.targets += case.targets >= blank
        expected, of_finite = right(case)
        leaves = [None if x is None else x.detach().requires_grad_(random.random() < 0.7) for x in case.tensors]
        leaves[2].requires_grad_()
        losses = case.loss(leaves)
        losses.sum().backward()
        losses = losses.detach()
        assert torch.equal(losses.isinf(), expected.isinf()), case.options
        finite, allowed = losses.isfinite(), OF_DRAWN[case.tensors[0].dtype]
        of_loss = {BF16: 3e-3, F16: 1e-5}.get(case.tensors[0].dtype, allowed)  # activations may be rounded
        losses, expected = losses[finite], expected[finite]
        assert error(losses, expected) < of_loss or expected.abs().max() < 1e-5, case.options
        scale = max([1e-2, *(gradient.abs().max().item() for gradient in of_finite.values())])
        for name, leaf in zip(NAMES, leaves):
            if leaf is not None and leaf.requires_grad:
                assert (leaf.grad.double() - of_finite[name]).abs().max() < allowed * scale, (name, case.options)


@pytest.mark.parametrize("topology", EVERY)
def test_a_log_likelihood_of_minus_two_thousand(topology):
    case = on(topology, [(150, 60)], H=24, dtype=F32, scale=0.5, seed=1)
    case.tensors[3][10] += 17 if topology in ("modified", "modified-last-blank", "constrained") else 33
    case.targets[case.targets == 10] = 1
    expected = right(case)
    assert 1500 < expected[0].item() < 7000
    made = errors(case, expected)
    assert made["loss"] < 1e-6 and max(made.values()) < 1e-5


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_impossible_target_costs_inf_and_a_nan_shows(dtype):
    case = problem([(5, 2), (4, 2)], V=6, dtype=dtype, **EXACT)
    case.targets[:], case.tensors[3][3] = torch.tensor([[1, 2], [3, 4]]), -float("inf")
    losses, gradients = computed(case)
    assert losses.isinf().tolist() == [False, True] and all(x.isfinite().all() for x in gradients.values())
    assert computed(case, label_smoothing=0.1)[0].isinf().all()  # each arc has a part of each symbol
    for options in ({"zero_infinity": True}, {"utterance_weights": torch.tensor([1.0, 0.0])}):
        leaves = case.leaves()
        made = case.loss(leaves, **options)
        made.sum().backward()
        assert made[0] == losses[0] and made[1] == 0 and not leaves[0].grad[1].any()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)
    case.tensors[0][1, 2, 0] = float("nan")
    leaves = case.leaves()
    case.loss(leaves, utterance_weights=torch.tensor([1.0, 0.0]), reduction="mean").backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in leaves)
    assert case.loss(leaves, utterance_weights=torch.zeros(2), reduction="mean").item() == 0
    losses, gradients = computed(case)
    of_encoder = gradients["encoder_out"].isnan().any(2).any(1)
    assert losses.isnan().tolist() == of_encoder.tolist() == [False, True]


NAN, INF = float("nan"), float("inf")
#: A number of a tensor -> what is told of it, and the utterances whose loss it makes inf or NaN.
CULPRITS = [
    (0, (1, 2, 3), NAN, "utterance 1 (T 4, U 2) has a loss of nan: encoder_out at frame 2 is nan", [1]),
    (0, (1, 3, 0), INF, "encoder_out at frame 3 is inf", [1]),
    (1, (1, 2, 3), -INF, "decoder_out at position 2 is -inf", [1]),
    (3, (3,), -INF, "utterance 1 (T 4, U 2) has a loss of inf: bias of output 3 is -inf", [1]),
    (3, (9,), -INF, "", []),
    (3, (9,), NAN, "utterance 0 (T 5, U 2) has a loss of nan: bias of output 9 is nan", [0, 1, 2]),
    (2, (7, 1), NAN, "weight of output 7 is nan", [0, 1, 2]),
]


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("tensor, place, number, words, wrong", CULPRITS, ids=str)
def test_an_utterance_that_is_not_finite_is_named_or_left_out(tensor, place, number, words, wrong, dtype):
    case = problem([(5, 2), (4, 2), (6, 1)], V=11, dtype=dtype, activation="none", negligible=1e-8)
    case.targets = torch.tensor([[1, 2], [3, 4], [5, 6]])
    case.spoil_padding()
    case.targets[2, 1] = 3  # of no target
    case.tensors[tensor][place] = number
    kept = torch.tensor([float(n not in wrong) for n in range(3)])
    for reduction in ("none", "sum", "mean"):
        (skipping, weighed), results = (case.leaves(), case.leaves()), []
        options = {"nonfinite": "skip", "return_skipped": True, "reduction": reduction}
        loss, skipped = case.loss(skipping, **options)
        assert skipped.tolist() == [n in wrong for n in range(3)]
        results = [loss, case.loss(weighed, utterance_weights=kept, reduction=reduction)]
        assert torch.equal(*results) and loss.isfinite().all()
        for result in results:
            result.sum().backward()
        assert all(torch.equal(x.grad, y.grad) and x.grad.isfinite().all() for x, y in zip(skipping, weighed))
    assert case.loss(case.leaves()).isfinite().tolist() == [n not in wrong for n in range(3)]
    assert case.loss(case.leaves(), nonfinite="raise", utterance_weights=kept).isfinite().all()
    if not words:
        assert case.loss(case.leaves(), nonfinite="raise").isfinite().all()
        return
    with pytest.raises(ValueError) as refused:
        case.loss(case.leaves(), nonfinite="raise")
    assert words in str(refused.value)


def test_a_row_that_is_not_finite_is_named_with_its_utterance():
    case = problem([(5, 2), (4, 2), (6, 1)], dtype=F32).sharing([2, 0, 2])
    case.tensors[0][2, 5, 0] = NAN
    with pytest.raises(ValueError, match=r"row 0, of utterance 2 \(T 6, U 2\).*encoder_out at frame 5"):
        case.loss(case.leaves(), nonfinite="raise")
    leaves = case.leaves()
    losses, skipped = case.loss(leaves, nonfinite="skip", return_skipped=True)
    losses.sum().backward()
    assert skipped.tolist() == [True, False, True] and all(leaf.grad.isfinite().all() for leaf in leaves)


def test_a_sum_without_end_and_a_missing_path_have_finite_inputs():
    case = problem([(3, 2), (5, 1)], dtype=F32, activation="none")
    for tensor in case.tensors[:3]:
        tensor *= 3e38 / tensor.abs().max()
    with pytest.raises(ValueError, match=r"utterance 0 \(T 3, U 2\).*inputs are finite.*float32"):
        case.loss(case.leaves(), nonfinite="raise")
    case = on("modified", [(9, 4), (3, 4)])
    for options, expected in ({}, [False, True]), ({"zero_infinity": True}, [False, False]):
        losses, skipped = case.loss(case.leaves(), nonfinite="skip", return_skipped=True, **options)
        assert skipped.tolist() == expected and losses[1] == 0
    assert case.loss(case.leaves(), nonfinite="raise", zero_infinity=True)[1] == 0
    with pytest.raises(ValueError, match=r"utterance 1 \(T 3, U 4\) has a loss of inf.*no path"):
        case.loss(case.leaves(), nonfinite="raise")


def test_under_autocast_what_leaves_the_range_of_16_bits_is_named():
    case = problem([(5, 2), (4, 2)], dtype=F32, activation="relu")
    case.tensors[0][1, 3] = 1e5
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="encoder_out at frame 3 is inf"):
        case.loss(case.leaves(), nonfinite="raise")
    with torch.autocast("cpu", torch.bfloat16):
        assert case.loss(case.leaves(), nonfinite="raise").isfinite().all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_logits_of_ten_thousand(scale):
    case = problem([(6, 3), (5, 2)], dtype=F32, **EXACT)
    expected = right(case)
    shifted = Problem([*case.tensors[:3], case.tensors[3] + scale], case.targets, case.T_lengths, case.U_lengths, EXACT)
    made = errors(shifted, expected)
    assert made["loss"] < 2e-3 and made["weight"] < 2e-2  # of 1e4 + x
    case.tensors[2] *= scale / case.tensors[2].abs().max()
    assert max(errors(case).values()) < 1e-3


@pytest.mark.parametrize("V", [40, 1100])
def test_certain_logits_keep_the_digits_of_a_small_loss(V):
    """The loss is what the other symbols have: 3e-7 of each cell."""
    case = certain(60, 20, V, tile_cells=500)
    (losses, gradients), expected = computed(case), right(case, large=True)
    assert 1e-6 < expected[0].item() < 1e-4 and error(losses, expected[0]) < 1e-6
    assert all((gradients[name] - expected[1][name]).abs().max() < 1e-9 for name in NAMES)  # of posteriors of 1


@pytest.mark.parametrize("H, V", [(1, 1), (31, 40), (130, 1600)])
def test_bfloat16_loses_nothing_where_the_activations_need_eight_bits(H, V):
    case = problem(RAGGED, H=H, V=V, dtype=BF16, activation="none", **EXACT)
    for i in (0, 1):
        case.tensors[i] = (case.tensors[i] * 8).round().clamp(-64, 64) / 8
    assert error(computed(case)[0], right(case)[0]) < 2e-6


@pytest.mark.parametrize("V", [30, 1600])  # of 1,600 symbols, backward has some at a time
@pytest.mark.parametrize("cells", [1, 29, 10**6])
def test_kept_logits_give_the_same_bits(cells, V):
    case = problem(RAGGED, V=V, dtype=F32, **EXACT)
    assert same(computed(case, keep_bytes=0), computed(case, keep_bytes=4 * V * cells))


def test_how_many_logits_are_kept_has_no_cliff():
    V, kept = 2**14, []
    for frames in (255, 256, 257, 300, 511, 600):
        case = problem([(frames, 0)], H=4, V=V, dtype=F32)
        losses = case.loss(case.leaves(), backend="native")
        node = losses.grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        kept += [len(tensor) for tensor in node.saved_tensors if tensor is not None and tensor.shape[1:] == (V,)]
    assert kept == [255, 256, 255, 212, 1, 0]


@pytest.mark.parametrize("V, dtype", [(60, F32), (1300, F32), (60, F64)])
def test_repeats_and_any_number_of_threads_give_the_same_bits(backend, V, dtype):
    case = problem([(60, 20), (40, 25), (50, 9)], H=40, V=V, dtype=dtype, scale=0.3).sharing([1, 0, 1])
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 3, 5) if backend == "native" else (1, 1):
            torch.set_num_threads(threads)
            made.append(computed(case))
    finally:
        torch.set_num_threads(before)
    assert all(same(made[0], other) for other in made[1:])


def test_another_seed_is_another_mask_and_torchs_generator_draws_it():
    case = problem(RAGGED, H=40, dropout=0.5, dropout_seed=1, **EXACT)
    losses = [case.loss(case.leaves(), dropout_seed=seed).detach() for seed in (1, 1, 2, 1 + 2**32, -1)]
    assert torch.equal(losses[0], losses[1])
    assert all((losses[0] - other).abs().min() > 1e-6 for other in losses[2:])
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn += [case.loss(case.leaves(), dropout_seed=None) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_the_mask_looks_random():
    apart = ((mask_of(problem([(64, 31)] * 3, H=128, dropout=0.2, dropout_seed=0)) == 0).double() - 0.2) / 0.4
    assert abs(apart.mean().item()) < 5 / apart.numel() ** 0.5
    for dimension, step in itertools.product(range(4), (1, 2)):  # neighbours in each direction do not know each other
        first, second = (apart.narrow(dimension, begin, apart.shape[dimension] - step) for begin in (0, step))
        assert abs((first * second).mean().item()) < 5 / first.numel() ** 0.5
    assert apart.sum(-1).flatten().var().item() == pytest.approx(128, rel=0.1)  # binomial


def test_reductions_and_weights_of_utterances():
    case = problem(RAGGED, **EXACT)
    losses, gradients = right(case)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=F64)
    assert case.loss(case.leaves(), reduction="sum").item() == pytest.approx(losses.sum().item())
    leaves = case.leaves()
    case.loss(leaves, reduction="mean").backward()
    assert error(leaves[2].grad * 5, gradients["weight"]) < 1e-11
    assert error(case.loss(case.leaves(), utterance_weights=weights).detach(), losses * weights) < 1e-12
    mean = case.loss(case.leaves(), utterance_weights=weights, reduction="mean")
    assert mean.item() == pytest.approx(((losses * weights).sum() / weights.sum()).item())
    for wrong in (torch.ones(4), [1.0] * 5):
        with pytest.raises(ValueError, match="utterance_weights"):
            case.loss(case.leaves(), utterance_weights=wrong)
    with torch.no_grad():
        assert not case.loss(case.leaves()).requires_grad
    clamping = case.with_options(clamp=0.1)
    leaves = clamping.leaves()
    (clamping.loss(leaves) * -2).sum().backward()  # what multiplies the loss multiplies the limit too
    assert error(leaves[2].grad, -2 * right(clamping)[1]["weight"]) < 1e-11


@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.5])
def test_posteriors_of_the_cells_left_out_bound_the_error(fastemit_lambda):
    case = problem([(370, 96)], H=24, V=200, dtype=F32, scale=0.3, seed=1, fastemit_lambda=fastemit_lambda)
    _, whole = computed(case, negligible=0.0)
    blank, label = case.loss(case.leaves(), negligible=1e-3, return_posteriors=True)[1].unbind(-1)
    lost = (blank + label)[blank + (1 + fastemit_lambda) * label < 1e-3].sum().item()
    L1 = (computed(case, negligible=1e-3)[1]["bias"] - whole["bias"]).abs().sum().item()
    assert 0 < lost < 0.2 * (370 + 96) and 0 < L1 <= 2 * (1 + fastemit_lambda) * lost * 1.001


@pytest.mark.parametrize("topology", EVERY)
def test_posteriors_are_the_derivatives_of_the_parts(topology):
    case = on(topology)
    _, posteriors = case.loss(case.leaves(), return_posteriors=True)
    logits, lattice = logits_of(case.tensors), topology_of(case.options)
    parts = lattice.parts(logits, topologies.next_targets(case.targets, *logits.shape[1:3]), 0)
    for n, (T, U) in enumerate(case.lengths):
        _, derivatives = oracle.of_parts(parts[n, :T, : U + 1], lattice)
        assert error(posteriors[n, :T, : U + 1], derivatives) < 1e-12
        assert not posteriors[n, T:].any() and not posteriors[n, :, U + 1 :].any()


SHARED = [(5, 4), (4, 2), (5, 1), (3, 0), (4, 3)]  # of the frames, those of the first rows count


@pytest.mark.parametrize("topology", EVERY)
def test_rows_that_share_an_encoder_are_the_sum_over_all_paths(topology):
    """An utterance without a row, the third, gets no gradient."""
    case = on(topology, SHARED).sharing([0, 1, 0, 3, 1], torch.int32)
    made = errors(case, by_all_paths(case))
    assert max(made.values()) < 1e-11, made
    assert not computed(case)[1]["encoder_out"][2].any()


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_rows_that_share_an_encoder_have_the_bits_of_copies(dtype):
    options = {"dropout": 0.2, "dropout_seed": 3, "fastemit_lambda": 0.1, "tile_cells": 16, "dtype": dtype}
    case = problem(RAGGED, H=33, V=70, scale=0.5, **options).sharing([1, 0, 1, 1, 0])
    (losses, gradients), (of_copies, expected) = computed(case), computed(case.copied())
    assert torch.equal(losses, of_copies)
    assert all(torch.equal(gradients[name], expected[name]) for name in NAMES[1:])
    sums = torch.zeros_like(case.tensors[0]).index_add_(0, case.options["utterance_of"], expected["encoder_out"])
    assert error(gradients["encoder_out"], sums) < ALLOWED[dtype]
    posteriors = [x.loss(x.tensors, return_posteriors=True)[1] for x in (case, case.copied())]
    assert torch.equal(*posteriors)


@pytest.mark.parametrize("dtype, allowed", [(F64, 1e-12), (F32, 1e-6)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_expected_errors_are_those_of_single_losses(dtype, allowed, reduction):
    case = problem(RAGGED, dtype=dtype, scale=0.3, **EXACT).sharing([1, 0, 1, 1, 0], torch.int32)
    rows, made = case.options["utterance_of"], torch.tensor([2, 0, 5, 1, 1])
    leaves, alone = case.leaves(), case.leaves(F64)
    loss = mwer_loss(case.loss(leaves), made, rows, reduction)
    loss.backward()
    logits, of_utterances = logits_of([alone[0][rows], *alone[1:]]), []
    for n in (0, 1):
        row = [m for m in range(len(rows)) if rows[m] == n]
        single = [oracle.losses(logits[m : m + 1], case.targets[m : m + 1], case.lengths[m : m + 1], 0) for m in row]
        errors_of = made[row].double()
        of_utterances.append(((-torch.cat(single)).softmax(0) * (errors_of - errors_of.mean())).sum())
    expected = torch.stack(of_utterances).mean() if reduction == "mean" else sum(of_utterances)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=max(allowed, 1e-12))
    assert max(error(leaf.grad, right.grad) for leaf, right in zip(leaves, alone)) < 5 * allowed
    parts = mwer_loss(case.loss(leaves), made, rows, "none")
    assert parts.shape == (5,) and parts.dtype == dtype
    assert parts.sum().item() == pytest.approx(sum(of_utterances).item())


def test_expected_errors_beside_hypotheses_without_a_path():
    losses = torch.tensor([1.0, torch.inf, 2.0, torch.inf, torch.inf, torch.nan, 1.0], requires_grad=True)
    rows, made = torch.tensor([0, 0, 0, 1, 1, 4, 4]), torch.tensor([1.0, 9, 3, 0, 2, 1, 2])
    parts = mwer_loss(losses, made, rows, "none")
    share = torch.tensor([-1.0, -2.0]).softmax(0)
    expected = torch.tensor([share[0] * (1 - 13 / 3), 0, share[1] * (3 - 13 / 3), -0.5, 0.5])
    assert torch.allclose(parts[:5], expected) and parts[5:].isnan().all()
    parts[:5].sum().backward()
    slope = 2 * share.prod().item()  # by the difference of the two errors
    assert losses.grad[:5].tolist() == pytest.approx([slope, 0, -slope, 0, 0])


@pytest.mark.parametrize(
    "changed, word",
    [
        ({"losses": torch.ones(())}, "reduction='none'"),
        ({"errors": [1, 2, 3]}, "errors"),
        ({"errors": torch.ones(2)}, "errors"),
        ({"utterance_of": torch.zeros(3, 1)}, "utterance_of"),
        ({"reduction": "average"}, "reduction"),
    ],
)
def test_expected_errors_refuse_other_shapes(changed, word):
    given = {"losses": torch.ones(3), "errors": torch.ones(3), "utterance_of": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=word):
        mwer_loss(**{**given, **changed})


@OF_NATIVE
@pytest.mark.parametrize("stage", ["early", "trained"])
def test_rows_that_share_an_encoder_leave_out_cells_too(stage):
    case = speech(stage).sharing([2, 0, 2, 2])
    expected = computed(case.copied())
    made = computed(case)
    assert torch.equal(made[0], expected[0]) and torch.equal(made[1]["weight"], expected[1]["weight"])


def shares_of(case):
    """Return the probability (N, T, U) with which each target is emitted at each frame, by the sum over all paths."""
    shares = torch.zeros(*case.tensors[0].shape[:2], case.targets.shape[1], dtype=F64)
    for n, (arcs, (T, U)) in enumerate(zip(arcs_of(case, case.tensors), case.lengths)):
        weights, frames = zip(*paths_of(arcs, T, U))
        for share, path in zip(torch.stack(weights).softmax(0), frames):
            shares[n, list(path), list(range(U))] += share
    return shares


@pytest.mark.parametrize("topology", EVERY)
def test_the_delay_is_the_mean_frame_over_all_paths(topology):
    case = on(topology, [(5, 3), (5, 2), (4, 1), (4, 0)])
    frames = (shares_of(case) * torch.arange(5.0).view(-1, 1)).sum(1)
    reference = torch.tensor([[0, 1, -1], [2, 2, 0], [1, 0, 0], [-1, -1, -1]])
    labels = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    losses, delays = case.loss(case.leaves(), return_delay=True, reference_frames=reference)
    expected = ((frames - reference) * labels).sum(1) / labels.sum(1)
    assert torch.allclose(delays, expected, rtol=0, atol=1e-12, equal_nan=True) and delays[3].isnan()
    with torch.no_grad():
        made = case.loss(case.tensors, return_delay=True, fastemit_lambda=0.5)[1]
    expected = frames.sum(1) / case.U_lengths
    assert torch.allclose(made, expected, rtol=0, atol=1e-12, equal_nan=True) and not delays.requires_grad


@pytest.mark.parametrize("V", [11, 1100])
@pytest.mark.parametrize("topology", lattices.TOPOLOGIES)
def test_the_best_path_is_the_best_of_all_paths(topology, V):
    case = on(topology, [(5, 2), (4, 1), (4, 0)], V=V)
    given, shares = (*case.tensors, case.targets, case.T_lengths, case.U_lengths), shares_of(case)
    how = {"topology": topology, **LATTICES.get(topology, {})}
    frames, scores = align(*given, **how)
    for span in (0, 1, 5):
        near = (torch.arange(5).view(-1, 1) - frames.unsqueeze(1)).abs() <= span
        expected = (shares * (near & (frames >= 0).unsqueeze(1))).sum(1)
        assert error(align(*given, **how, confidence_span=span)[2], expected) < (1e-11 if V == 11 else 1e-10)
    assert error(expected.sum(1), case.U_lengths) < 1e-12  # each target is emitted somewhere
    for n, (arcs, (T, U)) in enumerate(zip(arcs_of(case, case.tensors), case.lengths)):
        best = max(paths_of(arcs, T, U))
        assert scores[n].item() == pytest.approx(best[0]) and tuple(frames[n, :U].tolist()) == best[1]
        assert (frames[n, U:] == -1).all()


def test_the_best_path_obeys_the_delay_penalty_and_has_none_where_no_path_is():
    case = problem([(20, 4), (9, 2)])
    case.targets[0], case.targets[1], case.tensors[3][3] = 1, 3, -float("inf")
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    frames, scores = align(*given, delay_penalty=100.0)
    assert frames[0].tolist() == [0, 0, 0, 0] and torch.isfinite(scores[0])
    assert scores[1] == -torch.inf and (frames[1] == -1).all()
    confidences = align(*given, delay_penalty=100.0, confidence_span=2)[2]
    assert confidences[0].min() > 0.99 and not confidences[1].any()
    times = seconds(frames, 0.01, 4)
    assert times[0].tolist() == [0, 0, 0, 0] and times[1].isnan().all() and seconds(frames + 6, 0.01, 4)[1, 0] == 0.2
    for wrong in (
        *({"frames": value} for value in (frames.float(), [0])),
        *({"subsampling": value} for value in (0, 1.5)),
        {"frame_shift": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            seconds(**{"frames": frames, "frame_shift": 0.01, "subsampling": 4, **wrong})
    for span in (-1, 0.5, True):
        with pytest.raises(ValueError, match="confidence_span"):
            align(*given, confidence_span=span)


@OF_NATIVE
@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(instruction_set, monkeypatch, tmp_path):
    copied = tmp_path / "copied.so"  # each library chooses once
    with compiling.located() as path:
        copied.write_bytes(path.read_bytes())
    monkeypatch.setenv("FUSED_TRANSDUCER_ISA", instruction_set)
    compiled = native.loaded(copied)
    monkeypatch.setattr(native, "_library", lambda: (compiled, ""))
    if native.instruction_set() != instruction_set:
        pytest.skip(f"this processor has {native.instruction_set()} at best")
    for dtype in (F32, F64):
        case = problem([(9, 4), (6, 5), (30, 20)], H=33, V=70, dtype=dtype, scale=0.5, **EXACT)
        assert max(errors(case).values()) < ALLOWED[dtype]
        trained = speech("trained", dtype=dtype)
        assert error(computed(trained)[0], computed(trained, **EXACT)[0]) < 1e-7


LARGE = [
    ("[(100, 50)], H=32, V=4000", ""),  # the logits of 100 x 51 cells take 78 MiB, and so does their gradient
    ("[(300, 0)] * 100, H=1000, V=4", ".sharing([0] * 100)"),  # copies of 300 frames take 114 MiB, and so does theirs
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("shapes, shared", LARGE)
def test_it_never_holds_the_logits_nor_copies(backend, shapes, shared):
    script = f"""
import torch, fused_helpers as helpers
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
case = helpers.problem({shapes}, dtype=torch.float32){shared}
if case.options:
    case.tensors[0], case.T_lengths = case.tensors[0][:1].clone(), case.T_lengths[:1]
helpers.computed(helpers.problem([(9, 4)], H=32, V=40, dtype=torch.float32))
before = peak()
helpers.computed(case)
print(peak() - before)
"""
    # with this threshold malloc gives back at once what is freed
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command, pipes = [sys.executable, "-c", script], {"capture_output": True, "text": True}
    done = subprocess.run(command, env={**os.environ, **variables}, **pipes)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < {"native": 25, "torch": 50}[backend]


SHAPES = [(90, 18), (60, 14), (120, 25), (40, 6)]  # as speech() has them
#: What may be missing of a loss, by the certificate of csrc/follow.h.
MISSING = {F32: 1e-9, F64: 1e-16, BF16: 1e-9}


def forward(case: Problem, negligible: float = 1e-8):
    """Return (losses, arcs, for each cell whether forward computed it), of all utterances."""
    options = {name: value for name, value in case.options.items() if name != "fastemit_lambda"}
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    call = Call(*given, **{**options, "negligible": negligible})
    cells = int((case.T_lengths * (case.U_lengths + 1)).sum())
    saved = operators._saved(call, "native", True, cells, cells)
    saved[2].fill_(float("nan"))
    native.forward(call, True, *saved)
    return *saved[:2], ~saved[2].isnan().all(1)


@OF_NATIVE
@pytest.mark.parametrize("dtype", list(MISSING), ids=str)
@pytest.mark.parametrize("stage", ["early", "middle", "trained"])
def test_the_loss_is_that_of_all_cells(stage, dtype):
    """A cell that was left has a posterior below what the loss may miss, and so have all of a path together."""
    case = speech(stage, dtype=dtype)
    losses, _, asked = forward(case)
    exact, arcs, all_asked = forward(case, negligible=0.0)
    assert all_asked.all()
    assert ((losses - exact).abs() <= 1e-14 * exact + MISSING[dtype] * exact.clamp(max=1)).all()
    assert (losses >= exact * (1 - 1e-14)).all()  # paths were left, and none added
    cells = (case.T_lengths * (case.U_lengths + 1)).tolist()
    for n, (mask, posterior) in enumerate(zip(asked.split(cells), arcs[:2].double().sum(0).split(cells))):
        left, most = posterior[~mask], MISSING[dtype] * min(1.0, exact[n].item())
        assert (left <= most).all() and left.sum() <= most * (case.T_lengths[n] + case.U_lengths[n])
    if stage == "trained":
        assert asked.double().mean() < 0.7 and forward(speech("trained", [(300, 60)]))[2].double().mean() < 0.25


@OF_NATIVE
def test_a_nan_shows_in_its_utterance_alone_and_random_logits_need_every_cell():
    case = speech("trained")
    case.tensors[0][1, 30, 3] = float("nan")
    assert forward(case)[0].isnan().tolist() == [False, True, False, False]
    case = problem(SHAPES, H=128, V=128, dtype=torch.float32)
    losses, _, asked = forward(case)
    assert asked.all() and torch.equal(losses, forward(case, negligible=0.0)[0])


OPTIONS = [
    *(
        {"dropout": 0.1, "dropout_seed": 5},
        {"fastemit_lambda": 0.5},
        {"delay_penalty": 0.01},
        {"label_smoothing": 0.01},
    ),
    *({"keep_bytes": 4 * 128 * 1000}, {"label_smoothing": 0.01}, {"topology": "modified"}, {"V": 1100}, {"blank": 127}),
]


@OF_NATIVE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_has_the_gradients_of_all_cells(options):
    case = speech("trained", **options)
    if "blank" in options:  # the last symbol changes places with the blank
        for i in (2, 3):
            case.tensors[i] = case.tensors[i][[127, *range(1, 127), 0]]
    losses, gradients = computed(case)
    exact, expected = computed(case, negligible=0.0)
    assert error(losses, exact) < 1e-7
    assert max(error(gradients[name], expected[name]) for name in NAMES) < 1e-5


def garden(early: float, late: float, turn: int = 20) -> Problem:
    """Return an utterance whose one label costs so many nats before frame `turn`, and so many from it on."""
    T, V, H = 40, 128, 64
    case = problem([(T, 1)], H=H, V=V, dtype=torch.float32, activation="none")
    for tensor in case.tensors:
        tensor.zero_()
    case.targets[:] = 1
    case.tensors[0][0, :turn, 0], case.tensors[0][0, turn:, 0] = -early, -late
    case.tensors[2][1, 0] = 1
    case.tensors[3][2:] = -30
    case.tensors[1][0, 1, 1], case.tensors[2][1, 1] = -500, 1  # no second label
    return case


GARDENS = [(30, 45), (40, 30), (45, 34), (60, 200), (60, 61), (200, 60), (33, 36), (2, 90)]


@OF_NATIVE
@pytest.mark.parametrize("early, late", GARDENS)
def test_a_path_that_is_cheap_only_at_first_or_at_last(early, late):
    case = garden(early, late)
    losses, exact = forward(case)[0], forward(case, negligible=0.0)[0]
    assert ((losses - exact).abs() <= 1e-8 * exact).all()
    assert error(losses, right(case)[0]) < 2e-6


@OF_NATIVE
@pytest.mark.parametrize("target", ["blank", "impossible"])
def test_cells_whose_arcs_add_up_to_more_than_1_or_to_nothing(target):
    case = speech("trained")
    if target == "blank":
        case.targets[:, 3] = 0
    else:
        case.tensors[3][case.targets[1, 2]] = -float("inf")
    losses, exact = forward(case)[0], forward(case, negligible=0.0)[0]
    assert torch.equal(losses.isinf(), exact.isinf())
    finite = exact.isfinite()
    assert ((losses - exact).abs()[finite] <= 1e-9 * exact[finite].abs()).all()


@OF_NATIVE
def test_posteriors_and_the_best_path_are_those_of_all_cells():
    case = speech("trained")
    posteriors, exact = (case.loss(case.tensors, return_posteriors=True, negligible=x)[1] for x in (1e-8, 0.0))
    assert (posteriors - exact).abs().max() < 1e-6
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    assert torch.equal(align(*given)[0], align(*given, backend="torch")[0])
