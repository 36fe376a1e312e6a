"""fused_transducer's loss and gradients, on the CPU: against the float64 oracle, finite differences, and in corners."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from commands import ROOT
from fused_helpers import NAMES, Problem, computed, error, errors, problem, right, speech, use

from fused_transducer import library, native

BACKENDS = ["native", "torch"]
RAGGED = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]  # T < U, T = 1 and U = 0 among them
EXACT = {"negligible": 0.0}


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


@pytest.mark.parametrize("activation", ["tanh", "relu", "none"])
@pytest.mark.parametrize("lengths", [RAGGED, [(1, 0)], [(1, 1)], [(2, 9)], [(30, 1), (3, 20)]], ids=str)
def test_float64_is_the_oracles(lengths, activation):
    assert max(errors(problem(lengths, activation=activation, **EXACT)).values()) < 1e-12


@pytest.mark.parametrize("H, V", [(1, 1), (1, 2), (31, 32), (33, 70), (16, 1500), (100, 129)])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_sizes_around_those_of_blocks(H, V, dtype, allowed):
    assert max(errors(problem(RAGGED, H=H, V=V, dtype=dtype, scale=0.5, **EXACT)).values()) < allowed


@pytest.mark.parametrize("blank", [0, 511, 512, 1599])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_many_symbols_some_at_a_time(dtype, allowed, blank):
    """Backward holds the logits of 512 symbols of a tile at once, and takes the normalisers from forward."""
    case = problem(RAGGED, H=33, V=1600, dtype=dtype, scale=0.5, blank=blank, tile_cells=40, **EXACT)
    case.targets[:, :3] = torch.tensor([1599, 512, blank])
    assert max(errors(case).values()) < allowed


@pytest.mark.parametrize("dtype, of_loss, of_gradients", [(torch.bfloat16, 1e-3, 1e-2), (torch.float16, 1e-6, 1e-3)])
def test_half_precision_loses_few_digits(dtype, of_loss, of_gradients):
    made = errors(problem(RAGGED, H=40, V=50, dtype=dtype, scale=0.5, **EXACT))
    assert made["loss"] < of_loss and max(made.values()) < of_gradients


def test_finite_differences():
    case = problem([(4, 2), (2, 3), (3, 0)], H=3, V=4, **EXACT)
    assert torch.autograd.gradcheck(lambda *leaves: case.loss(list(leaves)), case.leaves())


@pytest.mark.parametrize("H, V", [(1, 1), (31, 40), (64, 70), (130, 1600)])
def test_bfloat16_loses_nothing_where_the_activations_need_eight_bits(H, V):
    """The products of pairs are exact, and their sums are in float32; only what rounds activations loses digits."""
    case = problem(RAGGED, H=H, V=V, dtype=torch.bfloat16, activation="none", **EXACT)
    for i in (0, 1):
        case.tensors[i] = (case.tensors[i] * 8).round().clamp(-64, 64) / 8
    assert error(computed(case)[0], right(case)[0]) < 2e-6
    rounded = case.with_options(activation="tanh")
    assert error(computed(rounded)[0], right(rounded)[0]) < 3e-3


def test_bfloat16_keeps_nan_and_impossible_symbols():
    case = problem(RAGGED, dtype=torch.bfloat16, **EXACT)
    case.tensors[3][5] = -float("inf")
    case.targets[:] = 3
    losses, gradients = computed(case)
    assert error(losses, right(case)[0]) < 1e-2 and all(gradients[name].isfinite().all() for name in NAMES)
    case.tensors[0][1, 2, 3] = float("nan")
    assert computed(case)[0].isnan().tolist() == [False, True, False, False, False]


def test_without_bias_and_with_another_blank():
    assert max(errors(problem(RAGGED, bias=False, blank=10, **EXACT)).values()) < 1e-12


def test_a_target_that_is_the_blank():
    case = problem(RAGGED, **EXACT)
    case.targets[:, 1:3] = 0
    assert max(errors(case).values()) < 1e-12


@pytest.mark.parametrize("tile_cells", [1, 7, 64, 1000])
def test_any_tile(tile_cells):
    assert max(errors(problem(RAGGED, tile_cells=tile_cells, keep_bytes=0, **EXACT)).values()) < 1e-12


@pytest.mark.parametrize("V", [30, 1600])  # of 1,600 symbols, backward has some at a time
@pytest.mark.parametrize("cells", [1, 29, 57, 10**6])
def test_kept_logits_give_the_same_bits(cells, V):
    """Some cells keep their logits, and the last of them may be within a group of cells; or all cells do."""
    case = problem(RAGGED, V=V, dtype=torch.float32, **EXACT)
    losses, gradients = computed(case, keep_bytes=0)
    losses_of_kept, gradients_of_kept = computed(case, keep_bytes=4 * V * cells)
    assert torch.equal(losses, losses_of_kept)
    assert all(torch.equal(gradients[name], gradients_of_kept[name]) for name in NAMES)


def test_how_many_logits_are_kept_has_no_cliff():
    """All of 2 MiB, hardly fewer of a little more, none of a large batch."""
    if native.unavailable("cpu", torch.float32):
        pytest.skip("the plain code keeps none")
    V, kept = 2**14, []
    for frames in (31, 32, 33, 36, 100, 200):
        case = problem([(frames, 0)], H=4, V=V, dtype=torch.float32)
        losses = case.loss(case.leaves(), backend="native")
        node = losses.grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        kept += [len(tensor) for tensor in node.saved_tensors if tensor is not None and tensor.shape[1:] == (V,)]
    assert kept == [31, 32, 32, 31, 15, 0]


def test_threads_do_not_matter():
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert max(errors(problem([(20, 9), (11, 12)], V=60, **EXACT)).values()) < 1e-12
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("V, dtype", [(60, torch.float32), (1300, torch.float32), (60, torch.float64)])
def test_any_number_of_threads_gives_the_same_bits(backend, V, dtype):
    """The batch has several tiles, and the tile depends on the number of threads."""
    if backend != "native":
        pytest.skip("the plain code uses torch's own products")
    case = problem([(60, 20), (40, 25)], H=40, V=V, dtype=dtype, scale=0.3)
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            made.append(computed(case))
    finally:
        torch.set_num_threads(before)
    for losses, gradients in made[1:]:
        assert torch.equal(losses, made[0][0])
        assert all(torch.equal(gradients[name], made[0][1][name]) for name in NAMES)


def test_reductions():
    case = problem(RAGGED)
    losses = case.loss(case.leaves())
    assert losses.shape == (5,) and losses.dtype == torch.float64
    assert case.loss(case.leaves(), reduction="sum").item() == pytest.approx(losses.sum().item())
    leaves = case.leaves()
    mean = case.loss(leaves, reduction="mean")
    mean.backward()
    assert mean.item() == pytest.approx(losses.mean().item())
    _, gradients = right(case)
    assert error(leaves[2].grad * 5, gradients["weight"]) < 1e-7


def test_each_utterance_has_its_own_upstream_gradient():
    case = problem(RAGGED, **EXACT)
    scales = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5], dtype=torch.float64)
    leaves = case.leaves()
    (case.loss(leaves) * scales).sum().backward()
    _, gradients = right(case)
    assert error(leaves[0].grad, gradients["encoder_out"] * scales.view(-1, 1, 1)) < 1e-12


def test_strides_do_not_matter():
    case = problem([(6, 3), (6, 2)], **EXACT)
    expected = right(case)
    apart = [
        torch.stack([case.tensors[0], case.tensors[0]], 3)[..., 0],  # no column beside the next
        case.tensors[1].transpose(0, 1).contiguous().transpose(0, 1),
        case.tensors[2].t().contiguous().t(),
        torch.stack([case.tensors[3]] * 2, 1)[:, 0],
    ]
    assert not any(tensor.is_contiguous() for tensor in apart)
    spread = Problem(apart, case.targets.t().contiguous().t(), case.T_lengths, case.U_lengths, case.options)
    assert max(errors(spread, expected).values()) < 1e-12


def test_expanded_inputs():
    """One frame for all, and one utterance's decoder outputs for both."""
    case = problem([(6, 3), (6, 2)], **EXACT)
    case.tensors[0] = case.tensors[0][:, :1].expand(2, 6, -1)
    case.tensors[1] = case.tensors[1][:1].expand(2, -1, -1)
    assert max(errors(case).values()) < 1e-12


def test_padding_is_never_read():
    case = problem(RAGGED, **EXACT)
    expected = right(case)
    case.spoil_padding()
    made, gradients = computed(case)
    assert error(made, expected[0]) < 1e-12
    for n, (T, U) in enumerate(RAGGED):
        assert not gradients["encoder_out"][n, T:].any() and not gradients["decoder_out"][n, U + 1 :].any()
    assert error(gradients["weight"], expected[1]["weight"]) < 1e-12


def test_an_impossible_target_costs_inf_and_leaves_a_finite_gradient():
    case = problem([(5, 2), (4, 2)], V=6, dtype=torch.float32, **EXACT)
    case.targets[:] = torch.tensor([[1, 2], [3, 4]])
    case.tensors[3][3] = -float("inf")  # the second utterance's first target
    losses, gradients = computed(case)
    alone = problem([(5, 2), (4, 2)], V=6, dtype=torch.float32)
    alone = Problem(
        [tensor[:1] if tensor.dim() == 3 else tensor for tensor in case.tensors],
        case.targets[:1],
        case.T_lengths[:1],
        case.U_lengths[:1],
        EXACT,
    )
    assert torch.isinf(losses[1]) and losses[1] > 0
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    losses_alone, gradients_alone = computed(alone)
    assert error(losses[:1], losses_alone) == 0 and error(gradients["weight"], gradients_alone["weight"]) < 1e-6


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_logits_of_ten_thousand(scale):
    """Adding as much to every logit changes nothing; an output layer of such weights gives logits as far apart."""
    case = problem([(6, 3), (5, 2)], dtype=torch.float32, **EXACT)
    expected = right(case)
    shifted = Problem([*case.tensors[:3], case.tensors[3] + scale], case.targets, case.T_lengths, case.U_lengths, EXACT)
    made, gradients = computed(shifted)
    assert error(made, expected[0]) < 2e-3 and error(gradients["weight"], expected[1]["weight"]) < 2e-2  # of 1e4 + x
    case.tensors[2] *= scale / case.tensors[2].abs().max()
    made = errors(case)
    assert made.pop("bias") < 1e-3 and max(made.values()) < 1e-3


def test_a_nan_shows():
    case = problem([(5, 2), (4, 2)], **EXACT)
    case.tensors[0][1, 2, 0] = float("nan")
    losses, gradients = computed(case)
    assert torch.isfinite(losses[0]) and torch.isnan(losses[1]) and torch.isnan(gradients["encoder_out"][1]).any()
    assert torch.isfinite(gradients["encoder_out"][0]).all()


def test_fastemit_scales_the_label_arcs():
    """Its gradient is that of the loss with each label's log-probability counted 1 + lambda times."""
    case = problem(RAGGED, fastemit_lambda=0.3, **EXACT)
    case.targets.clamp_(min=1)  # else an entry of a cell's log-probabilities holds both arcs
    losses, expected = right(case)
    made, gradients = computed(case)
    assert error(made, losses) < 1e-12  # the value stays
    assert max(error(gradients[name], expected[name]) for name in NAMES) < 1e-12
    _, without = right(case.with_options(fastemit_lambda=0.0))
    assert error(gradients["weight"], without["weight"]) > 1e-2


# -- accuracy and what is left out ---------------------------------------------------------------------------------


def long_one(**options) -> Problem:
    return problem([(370, 96)], H=24, V=200, dtype=torch.float32, scale=0.3, seed=1, **options)


def test_a_log_likelihood_of_minus_two_thousand():
    case = long_one()
    expected = right(case, large=True)
    assert 1500 < expected[0].item() < 3000
    made = errors(case, expected)
    assert made["loss"] < 1e-6 and max(made.values()) < 1e-5


@pytest.mark.parametrize("V", [40, 1100])
def test_peaky_logits_keep_the_digits_of_a_small_loss(V):
    """One path has nearly all the probability, and the loss is what the other symbols have: 3e-7 of each cell.  The
    logits are whole numbers, so no digit is lost before they are summed."""
    T, U, H = 60, 20, 40
    case = problem([(T, U)], H=H, V=V, dtype=torch.float32, activation="none", tile_cells=500, **EXACT)
    codes = torch.eye(V)[:, :H]
    case.targets = torch.randint(1, H, (1, U), generator=torch.Generator().manual_seed(2))
    case.tensors[0], case.tensors[1] = torch.zeros(1, T, H), torch.zeros(1, U + 1, H)
    case.tensors[0][0, torch.arange(U) * 3] = codes[case.targets[0]]
    case.tensors[1][0, :U] = codes[case.targets[0]]
    case.tensors[2], case.tensors[3] = 30 * codes, 45 * torch.eye(V)[0]
    case.tensors[2][0] = 0
    expected = right(case, large=True)
    losses, gradients = computed(case)
    assert 1e-6 < expected[0].item() < 1e-4 and error(losses, expected[0]) < 1e-6
    assert all((gradients[name] - expected[1][name]).abs().max() < 1e-9 for name in NAMES)  # of posteriors of 1


def test_what_is_dropped_is_told_and_bounds_the_error():
    case = long_one()
    _, whole = computed(case, negligible=0.0)
    leaves = case.leaves()
    losses, dropped = case.loss(leaves, negligible=1e-3, return_dropped=True)
    losses.sum().backward()
    assert 0 < dropped.item() < 0.2
    L1 = (leaves[3].grad - whole["bias"]).abs().sum().item()
    assert 0 < L1 <= 2 * dropped.item() * (370 + 96) * 1.001
    none, _ = case.loss(case.leaves(), negligible=0.0, return_dropped=True)
    assert none.item() == losses.item()
    assert case.loss(case.leaves(), negligible=0.0, return_dropped=True)[1].item() == pytest.approx(0, abs=1e-30)


def test_five_repeats_have_the_same_bits():
    case = problem([(60, 20), (40, 25)], H=40, V=100, dtype=torch.float32)
    first = computed(case, tile_cells=200)
    for _ in range(4):
        losses, gradients = computed(case, tile_cells=200)
        assert torch.equal(losses, first[0])
        assert all(torch.equal(gradients[name], first[1][name]) for name in NAMES)


def test_frozen_inputs_get_no_gradient_and_the_others_the_same():
    case = problem(RAGGED, **EXACT)
    _, expected = right(case)
    for wanted in NAMES:
        leaves = [tensor.detach().requires_grad_(name == wanted) for name, tensor in zip(NAMES, case.tensors)]
        case.loss(leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [name == wanted for name in NAMES]
        assert error(leaves[NAMES.index(wanted)].grad, expected[wanted]) < 1e-12


def test_without_gradients_the_loss_is_the_same():
    case = problem(RAGGED)
    with torch.no_grad():
        losses = case.loss(case.leaves())
    assert not losses.requires_grad and torch.equal(losses, case.loss(case.leaves()).detach())


def test_backward_twice_through_a_retained_graph():
    case = problem(RAGGED, **EXACT)
    leaves = case.leaves()
    losses = case.loss(leaves)
    losses.sum().backward(retain_graph=True)
    once = leaves[2].grad.clone()
    losses.sum().backward()
    assert torch.equal(leaves[2].grad, 2 * once)


# -- of the C++ alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_every_instruction_set(backend, instruction_set, dtype, allowed, monkeypatch, tmp_path):
    """A set that this processor lacks gives way to a smaller one, with a message."""
    if backend != "native":
        pytest.skip("the C++ code has instruction sets")
    copied = tmp_path / "copied.so"  # each library chooses once
    with library.located() as path:
        copied.write_bytes(path.read_bytes())
    monkeypatch.setenv("FUSED_TRANSDUCER_ISA", instruction_set)
    compiled = native.loaded(copied)
    monkeypatch.setattr(native, "_library", lambda: (compiled, ""))
    if native.instruction_set() != instruction_set:
        pytest.skip(f"this processor has {native.instruction_set()} at best")
    case = problem([(9, 4), (6, 5), (30, 20)], H=33, V=70, dtype=dtype, scale=0.5, **EXACT)
    assert max(errors(case).values()) < allowed
    trained = speech("trained", dtype=dtype)
    assert error(computed(trained)[0], computed(trained, **EXACT)[0]) < 1e-7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_never_holds_the_logits(backend):
    """The logits of 100 x 51 cells with V = 4,000 take 78 MiB, and so does their gradient."""
    script = """
import gc, torch, fused_helpers as helpers
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
case = helpers.problem([(100, 50)], H=32, V=4000, dtype=torch.float32)
helpers.computed(helpers.problem([(9, 4)], H=32, V=40, dtype=torch.float32))
gc.collect()
before = peak()
helpers.computed(case)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        # with this threshold malloc gives back at once what is freed
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < {"native": 25, "torch": 50}[backend]
