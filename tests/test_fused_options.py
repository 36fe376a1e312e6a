"""What a training recipe asks of fused_transducer: activations, dropout, penalties, weights, posteriors, alignments."""

from __future__ import annotations

import pytest
import torch
from fused_helpers import ACTIVATIONS, NAMES, error, errors, found, logits_of, mask_of, problem, right

from fused_transducer import native

RAGGED = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]
EXACT = {"negligible": 0.0}
DTYPES = [(torch.float64, 1e-12), (torch.float32, 5e-6)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request, monkeypatch):
    if request.param == "native" and native.unavailable("cpu", torch.float32):
        pytest.skip(native.unavailable("cpu", torch.float32))
    monkeypatch.setenv("FUSED_TRANSDUCER_BACKEND", request.param)
    return request.param


# -- activations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype, allowed", DTYPES)
@pytest.mark.parametrize("H, scale", [(33, 1.0), (5, 6.0)])  # whole vectors and a rest; the ends of the functions
def test_every_activation(activation, dtype, allowed, H, scale):
    one = problem(RAGGED, H=H, dtype=dtype, activation=activation, **EXACT)
    one.tensors[0] *= scale
    assert max(errors(one).values()) < allowed * scale


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 4e-15), (torch.float32, 3e-7)])
def test_activations_and_slopes_of_all_sizes(backend, activation, dtype, allowed):
    """The loss of one symbol is 0: so the value is seen in the gradient of weight, the slope in that of encoder_out."""
    x = torch.cat([torch.linspace(-12, 12, 481), torch.tensor([-60.0, -1e-4, 1e-4, 60.0])]).to(dtype)
    one = problem([(1, 0)], H=len(x), V=2, dtype=dtype, activation=activation, **EXACT)
    one.tensors = [x.view(1, 1, -1), torch.zeros(1, 1, len(x), dtype=dtype), torch.zeros(2, len(x), dtype=dtype), None]
    one.tensors[2][1] = 1e-6  # the gradient of the blank's logit is -1/2, up to 1e-4
    wide = x.double().requires_grad_()
    value = ACTIVATIONS[activation](wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    _, gradients = found(one)
    share = 1 - torch.sigmoid(-(value * one.tensors[2][1].double()).sum()).item()
    assert (gradients["weight"][1] / share - value).abs().max() < allowed * 20
    of_x = gradients["encoder_out"].flatten() / share / one.tensors[2][1, 0].double()
    assert (of_x - slope).abs().max() < allowed * 20


# -- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu", "none"])
@pytest.mark.parametrize("dtype, allowed", DTYPES)
def test_dropout_is_that_of_an_explicit_mask(activation, dtype, allowed):
    one = problem(
        RAGGED, H=33, dtype=dtype, scale=0.5, activation=activation, dropout=0.2, dropout_seed=2**45 + 3, **EXACT
    )
    assert max(errors(one).values()) < allowed


@pytest.mark.parametrize("tile_cells, V", [(None, 40), (7, 40), (40, 1300)])
def test_dropout_is_the_same_whatever_is_recomputed(tile_cells, V):
    one = problem(RAGGED, H=40, V=V, dropout=0.5, dropout_seed=11, tile_cells=tile_cells, scale=0.5, **EXACT)
    assert max(errors(one).values()) < 1e-11


def test_another_seed_is_another_mask():
    one = problem(RAGGED, H=40, dropout=0.5, dropout_seed=1, **EXACT)
    losses = [one.loss(one.leaves(), dropout_seed=seed).detach() for seed in (1, 1, 2, 1 + 2**32, -1)]
    assert torch.equal(losses[0], losses[1])
    assert all((losses[0] - other).abs().min() > 1e-6 for other in losses[2:])


def test_the_mask_looks_random():
    one = problem([(64, 31)] * 2, H=256, dropout=0.2, dropout_seed=0)
    drops = (mask_of(one) == 0).double()
    count = drops.numel()
    assert abs(drops.mean().item() - 0.2) < 5 * (0.16 / count) ** 0.5
    apart = (drops - 0.2) / 0.4
    for dimension in range(4):  # neighbours in each direction do not know each other
        for step in (1, 2):
            if drops.shape[dimension] > step:
                first, second = (
                    apart.narrow(dimension, 0, drops.shape[dimension] - step),
                    apart.narrow(dimension, step, drops.shape[dimension] - step),
                )
                assert abs((first * second).mean().item()) < 5 / first.numel() ** 0.5
    by_cell = drops.sum(-1).flatten()  # binomial
    assert by_cell.var().item() == pytest.approx(256 * 0.16, rel=0.1)


def test_seeds_come_from_torchs_generator():
    one = problem(RAGGED, H=40, dropout=0.3)
    torch.manual_seed(5)
    first, second = one.loss(one.leaves()), one.loss(one.leaves())
    torch.manual_seed(5)
    assert torch.equal(one.loss(one.leaves()), first) and not torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_mask(reentrant):
    from torch.utils.checkpoint import checkpoint

    one = problem(RAGGED, H=40, dropout=0.3, **EXACT)
    gradients = []
    for wrap in (lambda function, *given: function(*given), checkpoint):
        leaves = one.leaves()
        torch.manual_seed(3)
        options = {"use_reentrant": reentrant} if wrap is checkpoint else {}
        wrap(lambda *given: one.loss(list(given)), *leaves, **options).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_a_compiled_graph_keeps_the_mask():
    one = problem(RAGGED, H=40, dropout=0.3, dropout_seed=9, **EXACT)
    compiled = torch.compile(lambda leaves: one.loss(leaves), fullgraph=True, backend="aot_eager")
    leaves, (losses, expected) = one.leaves(), found(one)
    made = compiled(leaves)
    made.sum().backward()
    assert error(made.detach(), losses) < 1e-12
    assert all(error(leaf.grad, expected[name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


def test_a_compiled_graph_draws_a_seed_each_time_it_runs():
    one = problem(RAGGED, H=40, dropout=0.5)
    compiled = torch.compile(lambda leaves: one.loss(leaves), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(one.leaves()), compiled(one.leaves()))


# -- delay penalty -------------------------------------------------------------------------------------------------


def test_the_delay_penalty_is_added_to_the_labels_arcs():
    """penalty * ((T - 1) / 2 - t), as k2 and fast_rnnt define it."""
    from common.losses import oracle

    one = problem(RAGGED, delay_penalty=0.3, **EXACT)
    one.targets.clamp_(min=1)
    leaves = one.leaves()
    encoder_out, decoder_out, weight, bias = leaves
    logits = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1)) @ weight.t() + bias
    delay = (one.T_lengths - 1).double().view(-1, 1) / 2 - torch.arange(encoder_out.shape[1])
    labels = (torch.arange(weight.shape[0]) != 0).double()
    arcs = logits.log_softmax(-1) + 0.3 * delay[:, :, None, None] * labels
    expected = oracle.arc_losses(arcs, one.targets, one.lengths, 0)
    expected.sum().backward()
    losses, gradients = found(one)
    assert error(losses, expected.detach()) < 1e-12
    assert all(error(gradients[name], leaf.grad) < 1e-11 for name, leaf in zip(NAMES, leaves))
    assert error(right(one)[0], losses) > 1e-3


# -- the module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_module_drops_in_training_alone(activation):
    from fused_transducer import TransducerLoss

    one = problem(RAGGED, H=12, V=11)
    module = TransducerLoss(12, 11, activation=activation, dropout=0.5, dtype=torch.float64, reduction="none")
    inputs = (*one.tensors[:2], one.targets, one.T_lengths, one.U_lengths)
    one.tensors[2:] = [module.output_linear.weight.detach(), module.output_linear.bias.detach()]
    dropped, whole = module(*inputs), module.eval()(*inputs)
    assert error(whole.detach(), right(one.with_options(activation=activation))[0]) < 1e-12
    assert (dropped - whole).abs().min() > 1e-6
    logits = module.logits(one.tensors[0].unsqueeze(2), one.tensors[1].unsqueeze(1))
    assert error(logits.detach(), logits_of(one.tensors, activation)) < 1e-12
