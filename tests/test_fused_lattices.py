"""fused_transducer on each lattice of the family, against the float64 oracle."""

from __future__ import annotations

import inspect

import pytest
import torch
from fused_helpers import NAMES, computed, error, errors, lattice_problem, logits_of, problem, right, topology_of, use
from sanitize import LATTICES

from common.losses import oracle, topologies
from fused_transducer import TDTLoss, TransducerLoss, align, lattices, transducer_loss

RAGGED = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]  # T < U, T = 1 and U = 0 among them
ROOMY = [(12, 4), (9, 3), (8, 1), (7, 0)]  # every lattice has a path for each


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


def on(topology, lengths=ROOMY, **options):
    return lattice_problem(topology, lengths, **options)


# -- the table -----------------------------------------------------------------------------------------------------


def test_the_package_has_the_lattices_of_the_suite():
    assert set(lattices.TOPOLOGIES) == set(topologies.TOPOLOGIES) - {"delay-penalty"}  # which is an option here
    names = inspect.signature(transducer_loss).parameters
    assert {"topology", "durations", "sigma", "skip"} <= set(names) & {"topology", *topologies.Topology().__dict__}


@pytest.mark.parametrize("topology", lattices.TOPOLOGIES)
def test_arcs_go_where_those_of_the_suite_go(topology):
    options = {"topology": topology, **LATTICES.get(topology, {})}
    theirs = topology_of(options)
    ours = lattices.lattice_of(topology, theirs.durations, theirs.sigma, theirs.skip)
    arcs = theirs.arcs(torch.zeros(3, 2, 2 + theirs.extra))
    assert sorted((arc.dt, arc.du) for arc in ours.arcs) == sorted((arc.dt, arc.du) for arc in arcs)
    assert ours.parts == 2 + theirs.extra and [arc.du for arc in ours.arcs] == sorted(arc.du for arc in ours.arcs)


# -- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", LATTICES)
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_every_lattice_is_the_oracles(topology, dtype, allowed):
    made = errors(on(topology, dtype=dtype, scale=0.5))
    assert made["loss"] < max(allowed, 1e-12) and max(made.values()) < allowed


@pytest.mark.parametrize("topology", LATTICES)
@pytest.mark.parametrize("blank", [0, 5, 10])
def test_any_column_can_be_the_blank(topology, blank):
    assert max(errors(on(topology, blank=blank)).values()) < 1e-12


@pytest.mark.parametrize("topology", LATTICES)
@pytest.mark.parametrize("V", [1, 2, 1023, 1500])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_few_and_many_symbols(topology, V, dtype, allowed, thorough):
    if not thorough and (dtype == torch.float64) != (V in (1, 1500)):
        pytest.skip("with --thorough")
    lengths = ROOMY if V > 1 else [(6, 0), (3, 0)]
    case = on(topology, lengths, V=max(V, 2), H=33, dtype=dtype, scale=0.5, blank=V - 1, tile_cells=40)
    if V == 1:
        case.tensors[2:] = [tensor[1:] for tensor in case.tensors[2:]]
        case.options["blank"] = 0
    assert max(errors(case).values()) < allowed


@pytest.mark.parametrize("topology", LATTICES)
def test_utterances_without_a_path_cost_inf_and_leave_no_gradient(topology):
    case = on(topology, RAGGED)
    losses, gradients = computed(case)
    expected, of_finite = right(case)
    assert torch.equal(losses.isinf(), expected.isinf()) and not losses.isnan().any()
    finite = expected.isfinite()
    assert error(losses[finite], expected[finite]) < 1e-12
    assert all(error(gradients[name], of_finite[name]) < 1e-12 for name in NAMES)
    assert not gradients["encoder_out"][~finite].any()


@pytest.mark.parametrize(
    "durations", [[1, 2, 30_000], [1, 2, 3, 4], [0, 2, 4], [1], [3], [0, 7], [4, 0, 1], [2, 2]], ids=str
)
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_durations_without_0_with_gaps_and_one_alone(durations, dtype, allowed):
    """Some utterances are shorter than any path of such durations."""
    case = on("tdt", [(9, 2), (8, 4), (2, 1), (6, 0), (21, 3)], durations=durations, dtype=dtype)
    losses, gradients = computed(case)
    expected, of_finite = right(case)
    assert torch.equal(losses.isinf(), expected.isinf())
    assert error(losses[losses.isfinite()], expected[losses.isfinite()]) < allowed
    assert all(error(gradients[name], of_finite[name]) < allowed for name in NAMES)


@pytest.mark.parametrize("topology", LATTICES)
def test_fastemit_and_the_delay_penalty_count_on_the_arcs_of_labels(topology):
    case = on(topology, fastemit_lambda=0.3, delay_penalty=0.1)
    made = errors(case)
    assert max(made.values()) < 1e-12
    _, without = right(case.with_options(fastemit_lambda=0.0))
    assert error(computed(case)[1]["weight"], without["weight"]) > 1e-3


@pytest.mark.parametrize("topology", LATTICES)
def test_dropout_and_activations(topology):
    case = on(topology, H=33, activation="gelu", dropout=0.3, dropout_seed=5, tile_cells=7, scale=0.5)
    assert max(errors(case).values()) < 1e-11


@pytest.mark.parametrize("topology", ["modified", "modified-last-blank", "constrained", "star"])
def test_label_smoothing_where_there_is_one_softmax(topology):
    """The mean log-probability of the symbols is mixed into each part."""
    case = on(topology, label_smoothing=0.1)
    leaves = case.leaves()
    log_probabilities = logits_of(leaves).log_softmax(-1)
    smoothed = torch.lerp(log_probabilities, log_probabilities.mean(-1, keepdim=True), 0.1)
    expected = oracle.arc_losses(smoothed, case.targets, case.lengths, 0, topology_of(case.options))
    expected.sum().backward()
    losses, gradients = computed(case)
    assert error(losses, expected.detach()) < 1e-12
    assert all(error(gradients[name], leaf.grad) < 1e-12 for name, leaf in zip(NAMES, leaves))


@pytest.mark.parametrize("topology", LATTICES)
def test_upstream_gradients_of_either_sign(topology):
    case = on(topology)
    scales = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    leaves = case.leaves()
    (case.loss(leaves) * scales).sum().backward()
    _, gradients = right(case)
    assert error(leaves[0].grad, gradients["encoder_out"] * scales.view(-1, 1, 1)) < 1e-12
    for reduction in ("sum", "mean"):
        leaves = case.leaves()
        loss = case.loss(leaves, reduction=reduction)
        loss.backward()
        share = 4 if reduction == "mean" else 1
        assert error(leaves[2].grad * share, gradients["weight"]) < 1e-12


@pytest.mark.parametrize("topology", ["tdt", "multi-blank", "hat", "star"])
def test_a_target_that_is_the_blank(topology):
    case = on(topology)
    case.targets[0, 1] = 0
    assert max(errors(case).values()) < 1e-12


@pytest.mark.parametrize("topology", ["tdt", "multi-blank", "hat", "constrained"])
def test_padding_is_never_read(topology):
    case = on(topology)
    expected = right(case)
    case.spoil_padding()
    losses, gradients = computed(case)
    assert error(losses, expected[0]) < 1e-12 and error(gradients["weight"], expected[1]["weight"]) < 1e-12


@pytest.mark.parametrize("topology", LATTICES)
def test_a_log_likelihood_of_minus_two_thousand(topology):
    """A bias against the blank and the targets makes each arc improbable."""
    case = on(topology, [(150, 60)], H=24, dtype=torch.float32, scale=0.5, seed=1)
    case.tensors[3][10] += 33 if topology in ("tdt", "multi-blank", "hat", "star") else 17
    case.targets[case.targets == 10] = 1
    expected = right(case)
    assert 1500 < expected[0].item() < 4000
    made = errors(case, expected)
    assert made["loss"] < 1e-6 and max(made.values()) < 1e-5


# -- what is dropped, posteriors, paths ----------------------------------------------------------------------------


@pytest.mark.parametrize("topology", LATTICES)
def test_what_is_dropped_is_the_share_of_the_cells_left_out(topology):
    case = on(topology, [(30, 10), (20, 6)], scale=0.5)
    _, dropped, posteriors = case.loss(case.leaves(), negligible=0.02, return_dropped=True, return_posteriors=True)
    parts = 2 if topology == "tdt" else posteriors.shape[-1]
    of_cells = posteriors[..., :parts].sum(-1)
    lost = torch.where(of_cells < 0.02, of_cells, 0).sum((1, 2)) / of_cells.sum((1, 2))
    assert (dropped > 0).all() and torch.allclose(dropped, lost)
    _, none = case.loss(case.leaves(), return_dropped=True)
    assert none.abs().max() < 1e-30


@pytest.mark.parametrize("topology", LATTICES)
def test_posteriors_are_the_derivatives_of_the_parts(topology):
    case = on(topology)
    _, posteriors = case.loss(case.leaves(), return_posteriors=True)
    logits, lattice = logits_of(case.tensors), topology_of(case.options)
    following = topologies.next_targets(case.targets, *logits.shape[1:3])
    parts = lattice.parts(logits, following, 0)
    for n, (T, U) in enumerate(case.lengths):
        _, derivatives = oracle.of_parts(parts[n, :T, : U + 1], lattice)
        assert error(posteriors[n, :T, : U + 1], derivatives) < 1e-12
        assert not posteriors[n, T:].any() and not posteriors[n, :, U + 1 :].any()


def paths_of(arcs, T, U):
    """Yield (log-weight, frames of the targets) of every path of an utterance."""

    def walk(t, u, weight, frames):
        if (t, u) == (T, U):
            yield weight, tuple(frames)
            return
        for arc in arcs:
            inside = t < T and t + arc.dt <= T and u + arc.du <= U
            if inside and arc.weight[t, u] > -torch.inf:
                added = [t] if arc.du else []
                yield from walk(t + arc.dt, u + arc.du, weight + arc.weight[t, u].item(), [*frames, *added])

    yield from walk(0, 0, 0.0, [])


@pytest.mark.parametrize("topology", lattices.TOPOLOGIES)
def test_the_best_path_is_the_best_of_all_paths(topology):
    lattice_options = LATTICES.get(topology, {})
    case = on(topology, [(5, 2), (4, 1), (4, 0)]) if topology in LATTICES else problem([(5, 2), (4, 1), (4, 0)])
    logits, lattice = logits_of(case.tensors), topology_of(case.options)
    following = topologies.next_targets(case.targets, *logits.shape[1:3])
    parts = lattice.parts(logits, following, 0)
    frames, scores = align(
        *case.tensors, case.targets, case.T_lengths, case.U_lengths, topology=topology, **lattice_options
    )
    for n, (T, U) in enumerate(case.lengths):
        best = max(paths_of(lattice.arcs(parts[n, :T, : U + 1]), T, U))
        assert scores[n].item() == pytest.approx(best[0]) and tuple(frames[n, :U].tolist()) == best[1]
        assert (frames[n, U:] == -1).all()


# -- the modules ---------------------------------------------------------------------------------------------------


def test_a_module_of_tokens_and_durations():
    case = on("tdt", durations=[0, 1, 2], sigma=0.1)
    module = TDTLoss(12, 11, durations=[0, 1, 2], sigma=0.1, reduction="none", negligible=0.0, dtype=torch.float64)
    assert module.output_linear.weight.shape == (14, 12)
    case.tensors[2:] = [module.output_linear.weight.detach(), module.output_linear.bias.detach()]
    inputs = (*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    losses, expected = right(case)
    made = module(*inputs)
    made.sum().backward()
    assert error(made.detach(), losses) < 1e-12
    assert error(module.output_linear.weight.grad, expected["weight"]) < 1e-11
    assert module.logits(case.tensors[0][:, :1], case.tensors[1][:, :1]).shape == (4, 1, 14)
    frames, _ = module.align(*inputs)
    assert frames.shape == case.targets.shape and (frames[0] >= 0).all()


def test_a_module_with_longer_blanks_and_an_existing_layer():
    layer = torch.nn.Linear(12, 14, dtype=torch.float64)
    module = TransducerLoss(output=layer, topology="multi-blank", durations=(2, 3, 5), reduction="none")
    case = on("multi-blank", durations=(2, 3, 5), sigma=0.0)
    case.tensors[2:] = [layer.weight.detach(), layer.bias.detach()]
    losses = module(*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    assert error(losses.detach(), right(case)[0]) < 1e-12


def test_a_compiled_graph_has_every_lattice(backend):
    for topology in LATTICES:
        case = on(topology)
        losses, expected = computed(case)
        compiled = torch.compile(lambda leaves, case=case: case.loss(leaves), fullgraph=True, backend="aot_eager")
        leaves = case.leaves()
        made = compiled(leaves)
        made.sum().backward()
        assert error(made.detach(), losses) < 1e-12
        assert all(error(leaf.grad, expected[name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


# -- options that make no sense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, word",
    [
        ({"topology": "rnnt"}, "topology"),
        ({"topology": "tdt"}, "durations"),
        ({"topology": "multi-blank"}, "durations"),
        ({"durations": [1, 2]}, "durations"),
        ({"topology": "tdt", "durations": [0]}, "durations"),
        ({"topology": "tdt", "durations": [1, -1]}, "durations"),
        ({"topology": "tdt", "durations": [1, 2.0]}, "durations"),
        ({"topology": "tdt", "durations": "0,1"}, "durations"),
        ({"topology": "tdt", "durations": list(range(11))}, "durations"),
        ({"topology": "multi-blank", "durations": [0, 2]}, "durations"),
        ({"topology": "hat", "sigma": 0.1}, "sigma"),
        ({"topology": "tdt", "durations": [1], "sigma": float("nan")}, "sigma"),
        ({"topology": "tdt", "durations": [1], "skip": -1.0}, "skip"),
        ({"topology": "tdt", "durations": [1], "label_smoothing": 0.1}, "label_smoothing"),
        ({"topology": "hat", "label_smoothing": 0.1}, "label_smoothing"),
        ({"topology": "tdt", "durations": [1], "blank": 10}, "blank"),
        (
            {"topology": "constrained", "fastemit_lambda": 0.1, "return_posteriors": True},
            "return_posteriors",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, word):
    case = problem(ROOMY)
    with pytest.raises(ValueError, match=word) as refused:
        case.loss(case.leaves(), **options)
    assert "\n" not in str(refused.value)


def test_a_target_in_the_columns_of_durations_is_refused():
    case = on("tdt")
    case.targets[1, 2] = 11
    with pytest.raises(ValueError, match="utterance 1: target 2 is 11; the 11 symbols"):
        case.loss(case.leaves())
