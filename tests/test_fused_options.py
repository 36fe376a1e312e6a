"""What a training recipe asks of fused_transducer: activations, dropout, penalties, weights, posteriors, alignments."""

from __future__ import annotations

import itertools

import pytest
import torch
from fused_helpers import ACTIVATIONS, NAMES, computed, error, errors, logits_of, mask_of, problem, right, use

from fused_transducer import align, transducer_loss

RAGGED = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]
EXACT = {"negligible": 0.0}
DTYPES = [(torch.float64, 1e-12), (torch.float32, 5e-6)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


# -- activations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype, allowed", DTYPES)
@pytest.mark.parametrize("H, scale", [(33, 1.0), (5, 6.0)])  # whole vectors and a rest; the ends of the functions
def test_every_activation(activation, dtype, allowed, H, scale):
    case = problem(RAGGED, H=H, dtype=dtype, activation=activation, **EXACT)
    case.tensors[0] *= scale
    assert max(errors(case).values()) < allowed * scale


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 4e-15), (torch.float32, 3e-7)])
def test_activations_and_slopes_of_all_sizes(backend, activation, dtype, allowed):
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
    assert (gradients["weight"][1] / share - value).abs().max() < allowed * 20
    of_x = gradients["encoder_out"].flatten() / share / case.tensors[2][1, 0].double()
    assert (of_x - slope).abs().max() < allowed * 20


# -- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu", "none"])
@pytest.mark.parametrize("dtype, allowed", DTYPES)
def test_dropout_is_that_of_an_explicit_mask(activation, dtype, allowed):
    case = problem(
        RAGGED, H=33, dtype=dtype, scale=0.5, activation=activation, dropout=0.2, dropout_seed=2**45 + 3, **EXACT
    )
    assert max(errors(case).values()) < allowed


@pytest.mark.parametrize("tile_cells, V", [(None, 40), (7, 40), (40, 1300)])
def test_dropout_is_the_same_whatever_is_recomputed(tile_cells, V):
    case = problem(RAGGED, H=40, V=V, dropout=0.5, dropout_seed=11, tile_cells=tile_cells, scale=0.5, **EXACT)
    assert max(errors(case).values()) < 1e-11


def test_another_seed_is_another_mask():
    case = problem(RAGGED, H=40, dropout=0.5, dropout_seed=1, **EXACT)
    losses = [case.loss(case.leaves(), dropout_seed=seed).detach() for seed in (1, 1, 2, 1 + 2**32, -1)]
    assert torch.equal(losses[0], losses[1])
    assert all((losses[0] - other).abs().min() > 1e-6 for other in losses[2:])


def test_the_mask_looks_random():
    case = problem([(64, 31)] * 2, H=256, dropout=0.2, dropout_seed=0)
    drops = (mask_of(case) == 0).double()
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
    case = problem(RAGGED, H=40, dropout=0.3)
    torch.manual_seed(5)
    first, second = case.loss(case.leaves()), case.loss(case.leaves())
    torch.manual_seed(5)
    assert torch.equal(case.loss(case.leaves()), first) and not torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_mask(reentrant):
    from torch.utils.checkpoint import checkpoint

    case = problem(RAGGED, H=40, dropout=0.3, **EXACT)
    gradients = []
    for wrap in (lambda function, *given: function(*given), checkpoint):
        leaves = case.leaves()
        torch.manual_seed(3)
        options = {"use_reentrant": reentrant} if wrap is checkpoint else {}
        wrap(lambda *given: case.loss(list(given)), *leaves, **options).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_a_compiled_graph_keeps_the_mask():
    case = problem(RAGGED, H=40, dropout=0.3, dropout_seed=9, **EXACT)
    compiled = torch.compile(lambda leaves: case.loss(leaves), fullgraph=True, backend="aot_eager")
    leaves, (losses, expected) = case.leaves(), computed(case)
    made = compiled(leaves)
    made.sum().backward()
    assert error(made.detach(), losses) < 1e-12
    assert all(error(leaf.grad, expected[name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


def test_a_compiled_graph_draws_a_seed_each_time_it_runs():
    case = problem(RAGGED, H=40, dropout=0.5)
    compiled = torch.compile(lambda leaves: case.loss(leaves), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(case.leaves()), compiled(case.leaves()))


# -- delay penalty -------------------------------------------------------------------------------------------------


def test_the_delay_penalty_is_added_to_the_labels_arcs():
    """penalty * ((T - 1) / 2 - t), as k2 and fast_rnnt define it."""
    from common.losses import oracle

    case = problem(RAGGED, delay_penalty=0.3, **EXACT)
    case.targets.clamp_(min=1)
    leaves = case.leaves()
    encoder_out, decoder_out, weight, bias = leaves
    logits = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1)) @ weight.t() + bias
    delay = (case.T_lengths - 1).double().view(-1, 1) / 2 - torch.arange(encoder_out.shape[1])
    labels = (torch.arange(weight.shape[0]) != 0).double()
    arcs = logits.log_softmax(-1) + 0.3 * delay[:, :, None, None] * labels
    expected = oracle.arc_losses(arcs, case.targets, case.lengths, 0)
    expected.sum().backward()
    losses, gradients = computed(case)
    assert error(losses, expected.detach()) < 1e-12
    assert all(error(gradients[name], leaf.grad) < 1e-11 for name, leaf in zip(NAMES, leaves))
    assert error(right(case)[0], losses) > 1e-3


# -- the module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_module_drops_in_training_alone(activation):
    from fused_transducer import TransducerLoss

    case = problem(RAGGED, H=12, V=11)
    module = TransducerLoss(12, 11, activation=activation, dropout=0.5, dtype=torch.float64, reduction="none")
    inputs = (*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    case.tensors[2:] = [module.output_linear.weight.detach(), module.output_linear.bias.detach()]
    dropped, whole = module(*inputs), module.eval()(*inputs)
    assert error(whole.detach(), right(case.with_options(activation=activation))[0]) < 1e-12
    assert (dropped - whole).abs().min() > 1e-6
    logits = module.logits(case.tensors[0].unsqueeze(2), case.tensors[1].unsqueeze(1))
    assert error(logits.detach(), logits_of(case.tensors, activation)) < 1e-12


def test_a_module_takes_an_existing_layer():
    from fused_transducer import TransducerLoss

    embedding = torch.nn.Embedding(11, 12, dtype=torch.float64)
    output = torch.nn.Linear(12, 11, bias=False, dtype=torch.float64)
    output.weight = embedding.weight  # tied
    case = problem(RAGGED, H=12, V=11, bias=False, **EXACT)
    module = TransducerLoss(output=output, reduction="sum", **EXACT)
    case.tensors[2] = output.weight.detach()
    losses, expected = right(case)
    loss = module(*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    loss.backward()
    assert error(loss.detach(), losses.sum()) < 1e-12 and error(embedding.weight.grad, expected["weight"]) < 1e-11
    with pytest.raises(ValueError, match="output"):
        TransducerLoss(12, 11, output=output)


# -- the output layer as it is -------------------------------------------------------------------------------------


def call(case, *tensors, **options):
    integers = {"targets": case.targets, "T_lengths": case.T_lengths, "U_lengths": case.U_lengths}
    return transducer_loss(*tensors, **integers, **{"reduction": "none", **EXACT, **options})


@pytest.mark.parametrize("bias", [True, False])
def test_an_existing_linear_layer(bias):
    case = problem(RAGGED, H=12, V=11, bias=bias)
    output = torch.nn.Linear(12, 11, bias=bias, dtype=torch.float64)
    case.tensors[2:] = [output.weight.detach(), output.bias.detach() if bias else None]
    losses, expected = right(case)
    made = call(case, *case.tensors[:2], output=output)
    made.sum().backward()
    assert error(made.detach(), losses) < 1e-12
    assert error(output.weight.grad, expected["weight"]) < 1e-11
    assert not bias or error(output.bias.grad, expected["bias"]) < 1e-11


def test_a_layer_that_computes_something_else_is_refused():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    case = problem(RAGGED, H=12, V=11)
    hooked = torch.nn.Linear(12, 11, dtype=torch.float64)
    hooked.register_forward_pre_hook(lambda layer, given: None)
    for output, word in ((Scaled(12, 11), "Scaled"), (torch.nn.ReLU(), "ReLU"), (hooked, "hooks")):
        with pytest.raises(ValueError, match=word):
            call(case, *case.tensors[:2], output=output)
    with pytest.raises(ValueError, match="either"):
        call(case, *case.tensors, output=torch.nn.Linear(12, 11, dtype=torch.float64))
    with pytest.raises(ValueError, match="weight"):
        call(case, *case.tensors[:2])


# -- utterances ----------------------------------------------------------------------------------------------------


def test_weights_of_utterances():
    case = problem(RAGGED, **EXACT)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    losses, _ = right(case)
    assert error(case.loss(case.leaves(), utterance_weights=weights).detach(), losses * weights) < 1e-12
    mean = case.loss(case.leaves(), utterance_weights=weights, reduction="mean")
    assert mean.item() == pytest.approx(((losses * weights).sum() / weights.sum()).item())
    leaves = case.leaves()
    case.loss(leaves, utterance_weights=weights, reduction="sum").backward()
    assert not leaves[0].grad[1].any() and leaves[0].grad[0].any()
    for wrong in (torch.ones(4), [1.0] * 5):
        with pytest.raises(ValueError, match="utterance_weights"):
            case.loss(case.leaves(), utterance_weights=wrong)


def impossible():
    case = problem([(5, 2), (4, 2)], V=6, **EXACT)
    case.targets[:] = torch.tensor([[1, 2], [3, 4]])
    case.tensors[3][3] = -float("inf")  # the second utterance's first target
    return case


def test_an_impossible_utterance_can_count_for_nothing():
    case = impossible()
    losses = case.loss(case.leaves()).detach()
    assert torch.isfinite(losses[0]) and torch.isinf(losses[1])
    for options in ({"zero_infinity": True}, {"utterance_weights": torch.tensor([1.0, 0.0])}):
        leaves = case.leaves()
        made = case.loss(leaves, **options)
        made.sum().backward()
        assert made[0] == losses[0] and made[1] == 0
        assert all(torch.isfinite(leaf.grad).all() for leaf in leaves) and not leaves[0].grad[1].any()


# -- posteriors and alignments -------------------------------------------------------------------------------------


def log_probabilities_of(case):
    """(N, T, U+1) of the blank's arcs and of the labels'."""
    logs = logits_of([x.double() for x in case.tensors]).log_softmax(-1)
    label = torch.full_like(logs[..., 0], -torch.inf)
    targets = case.targets[:, None, :, None].expand(-1, logs.shape[1], -1, 1)
    label[:, :, :-1] = logs[:, :, :-1].gather(3, targets).squeeze(3)
    return logs[..., 0], label


@pytest.mark.parametrize("V", [11, 1100])
@pytest.mark.parametrize("compiled", [False, True])
def test_posteriors_are_the_oracles(V, compiled):
    """The posterior of an arc is the derivative of the log-likelihood with respect to its log-probability."""
    from common.losses import oracle

    case = problem(RAGGED, V=V, scale=0.5, fastemit_lambda=0.5)
    case.targets.clamp_(min=1)  # else an entry of a cell's log-probabilities holds both arcs

    def run(leaves):
        return case.loss(leaves, return_posteriors=True, return_dropped=True)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with torch.no_grad():
        losses, dropped, posteriors = run(case.leaves())
    assert posteriors.shape == (5, 9, 6, 2) and dropped.shape == losses.shape == (5,)
    arcs = logits_of(case.tensors).log_softmax(-1).requires_grad_()
    oracle.arc_losses(arcs, case.targets, case.lengths, 0).sum().backward()
    of_label = arcs.grad[:, :, :-1].gather(3, case.targets[:, None, :, None].expand(-1, 9, -1, 1)).squeeze(3)
    assert error(posteriors[..., 0], -arcs.grad[..., 0]) < 1e-12
    assert error(posteriors[:, :, :-1, 1], -of_label) < 1e-12
    assert not posteriors[:, :, -1, 1].any()


def all_paths(T, U):
    """Yield the frames of the targets of every path."""
    return itertools.combinations_with_replacement(range(T), U)


@pytest.mark.parametrize("V", [11, 1100])
def test_the_best_path_is_the_best_of_all_paths(V):
    case = problem([(5, 3), (4, 2), (1, 3), (5, 0), (2, 4)], V=V)
    frames, scores = align(*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    blank, label = log_probabilities_of(case)
    for n, (T, U) in enumerate(case.lengths):

        def score(path, n=n, T=T, U=U):
            labels = sum(label[n, t, u].item() for u, t in enumerate(path))
            return labels + sum(blank[n, t, sum(frame <= t for frame in path)].item() for t in range(T))

        best = max(all_paths(T, U), key=score)
        assert tuple(frames[n, :U].tolist()) == best and (frames[n, U:] == -1).all()
        assert scores[n].item() == pytest.approx(score(best), rel=1e-12)


def test_the_best_path_obeys_the_delay_penalty_and_has_none_where_no_path_is():
    case = problem([(20, 4)])
    early, _ = align(*case.tensors, case.targets, case.T_lengths, case.U_lengths, delay_penalty=100.0)
    assert early.tolist() == [[0, 0, 0, 0]]
    case = impossible()
    frames, scores = align(*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    assert scores[1] == -torch.inf and (frames[1] == -1).all() and torch.isfinite(scores[0])


def test_a_module_aligns_as_the_function():
    from fused_transducer import TransducerLoss

    case = problem(RAGGED)
    module = TransducerLoss(12, 11, blank=3, activation="gelu", dropout=0.5, dtype=torch.float64)
    integers = (case.targets, case.T_lengths, case.U_lengths)
    made = module.align(*case.tensors[:2], *integers)
    layer = module.output_linear
    expected = align(*case.tensors[:2], layer.weight, layer.bias, *integers, blank=3, activation="gelu")
    assert all(torch.equal(a, b) for a, b in zip(made, expected))


# -- label smoothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V, dtype, allowed", [(11, torch.float64, 1e-12), (70, torch.float32, 5e-6)])
@pytest.mark.parametrize("tile_cells", [None, 16])
def test_label_smoothing_mixes_the_mean_log_probability_into_each_arc(V, dtype, allowed, tile_cells):
    smoothed = problem(
        RAGGED, V=V, dtype=dtype, scale=0.5, label_smoothing=0.1, tile_cells=tile_cells, blank=2, **EXACT
    )
    smoothed.targets[:, 1] = 2  # a target that is the blank
    assert max(errors(smoothed, smoothed_by_hand(smoothed)).values()) < allowed


def test_label_smoothing_of_many_symbols():
    smoothed = problem(RAGGED, V=1100, scale=0.5, label_smoothing=0.2, fastemit_lambda=0.0, **EXACT)
    assert max(errors(smoothed, smoothed_by_hand(smoothed)).values()) < 1e-12


def smoothed_by_hand(case):
    """Return (losses, gradients) by the oracle, of smoothed log-probabilities."""
    from common.losses import oracle

    leaves, blank = case.leaves(torch.float64), case.options.get("blank", 0)
    arcs = logits_of(leaves).log_softmax(-1)
    share = case.options["label_smoothing"]
    arcs = (1 - share) * arcs + share * arcs.mean(-1, keepdim=True)
    losses = oracle.arc_losses(arcs, case.targets, case.lengths, blank)
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in zip(NAMES, leaves)}
