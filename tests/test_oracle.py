"""The float64 oracle against answers by hand, all paths enumerated, and finite differences."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from common.core.implementations import LATTICES
from common.losses import oracle
from common.losses.topologies import TOPOLOGIES


def loss_of(logits, targets, shapes):
    return oracle.losses(logits, torch.tensor(targets), shapes)


def by_enumeration(log_probs, targets, T, U):
    """-log of the sum over all alignments: U labels among T - 1 + U moves, then the last blank."""
    total = []
    for label_moves in itertools.combinations(range(T - 1 + U), U):
        t = u = 0
        score = 0.0
        for move in range(T - 1 + U):
            if move in label_moves:
                score += float(log_probs[t, u, targets[u]])
                u += 1
            else:
                score += float(log_probs[t, u, 0])
                t += 1
        total.append(score + float(log_probs[t, u, 0]))
    return -torch.logsumexp(torch.tensor(total, dtype=torch.float64), 0).item()


def test_one_frame_no_target_two_symbols_is_ln_2():
    assert loss_of(torch.zeros(1, 1, 1, 2), [[]], [(1, 0)]).item() == pytest.approx(math.log(2), abs=1e-15)


def test_two_frames_one_target_two_symbols_is_ln_4():
    """Two alignments of three arcs, each arc 1/2: 2/8."""
    assert loss_of(torch.zeros(1, 2, 2, 2), [[1]], [(2, 1)]).item() == pytest.approx(math.log(4), abs=1e-15)


@pytest.mark.parametrize("T, U", [(1, 0), (1, 3), (4, 0), (5, 3), (3, 5)])
def test_equals_the_sum_over_all_alignments(T, U):
    generator = torch.Generator().manual_seed(T * 10 + U)
    logits = 3 * torch.randn(1, T, U + 1, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(1, 6, (1, U), generator=generator)
    expected = by_enumeration(logits[0].log_softmax(-1), targets[0].tolist(), T, U)
    assert oracle.losses(logits, targets, [(T, U)]).item() == pytest.approx(expected, rel=1e-13)


def test_gradient_agrees_with_finite_differences():
    logits = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.tensor([[1, 4], [3, 0]])
    assert torch.autograd.gradcheck(lambda x: oracle.losses(x, targets, [(4, 2), (3, 1)]), (logits,))


def test_padding_changes_nothing_and_gets_no_gradient():
    generator = torch.Generator().manual_seed(2)
    alone = torch.randn(1, 3, 2, 5, generator=generator, dtype=torch.float64)
    padded = torch.randn(1, 6, 4, 5, generator=generator, dtype=torch.float64)
    padded[:, :3, :2] = alone
    padded.requires_grad_()
    loss = loss_of(padded, [[2, 1, 1]], [(3, 1)])
    assert loss.item() == loss_of(alone, [[2]], [(3, 1)]).item()
    loss.sum().backward()
    assert padded.grad[:, 3:].abs().max() == 0 and padded.grad[:, :, 2:].abs().max() == 0
    assert padded.grad[:, :3, :2].abs().max() > 0


def test_gradient_scales_with_what_comes_from_above():
    logits = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    losses = loss_of(logits, [[1], [2]], [(3, 1), (2, 1)])
    (once,) = torch.autograd.grad(losses.sum(), logits, retain_graph=True)
    (weighted,) = torch.autograd.grad((losses * torch.tensor([1.0, -2.5])).sum(), logits)
    assert torch.allclose(weighted, once * torch.tensor([1.0, -2.5]).view(2, 1, 1, 1), atol=1e-15)


def steps(name, z, t, u, T, U, target):
    """The ways on from cell (t, u) of outputs z as (t, u, log-weight), by the definition of each paper.

    z: (T, U+1, C) float64; blank is 0; the last columns are of durations.
    """
    tokens = z[t, u].log_softmax(-1)
    if name == "tdt":
        D = (0, 2, 3)
        tokens, lasting = z[t, u, :-3].log_softmax(-1) - 0.1, z[t, u, -3:].log_softmax(-1)
        for d, of_duration in zip(D, lasting):
            if d > 0:
                yield t + d, u, tokens[0] + of_duration
            if u < U and t + d < T:
                yield t + d, u + 1, tokens[target] + of_duration
    elif name == "multi-blank":
        tokens = tokens - 0.1
        yield t + 1, u, tokens[0]
        yield t + 2, u, tokens[-2]
        yield t + 3, u, tokens[-1]
        if u < U:
            yield t, u + 1, tokens[target]
    elif name == "hat":
        blank = torch.sigmoid(z[t, u, 0])
        yield t + 1, u, blank.log()
        if u < U:
            yield t, u + 1, (1 - blank).log() + z[t, u, 1:].log_softmax(-1)[target - 1]
    else:
        yield t + 1, u, tokens[0]
        if name == "star":
            yield t + 1, u, torch.tensor(-1.5, dtype=torch.float64)
        if u < U and name in ("regular", "star"):
            yield t, u + 1, tokens[target]
        if u < U and name == "delay-penalty":
            yield t, u + 1, tokens[target] + 0.3 * ((T - 1) / 2 - t)
        if u < U and (name == "modified" or name == "modified-last-blank" and t < T - 1):
            yield t + 1, u + 1, tokens[target]
        if u < U and name == "constrained":
            yield t + 1, u + 1, tokens[target] + z[t, u + 1].log_softmax(-1)[0]


def summed_over_paths(name, z, targets, T, U):
    """-log of the sum over every path from (0, 0) to (T, U)."""
    totals = []

    def go(t, u, score):
        if (t, u) == (T, U):
            totals.append(score)
        if t < T:
            for next_t, next_u, weight in steps(name, z, t, u, T, U, targets[u] if u < U else 0):
                if next_t <= T:
                    go(next_t, next_u, score + weight)

    go(0, 0, torch.zeros((), dtype=torch.float64))
    return -torch.stack(totals).logsumexp(0) if totals else torch.tensor(math.inf, dtype=torch.float64)


#: Small parameters, so that every arc is taken in a few frames.
PARAMETERS = {
    "tdt": {"durations": (0, 2, 3), "sigma": 0.1},
    "multi-blank": {"durations": (2, 3), "sigma": 0.1},
    "star": {"skip": -1.5},
    "delay-penalty": {"penalty": 0.3},
}


def small(name):
    return dataclasses.replace(TOPOLOGIES[name], **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("T, U", [(1, 0), (3, 2), (4, 3), (2, 1), (1, 1)])
def test_every_topology_is_the_sum_over_its_paths(name, T, U):
    topology = small(name)
    columns = 4 + topology.extra
    logits = 2 * torch.randn(T, U + 1, columns, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    targets = [1 + u % 3 for u in range(U)]
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    wanted = summed_over_paths(name, theirs, targets, T, U)
    loss = oracle.losses(ours.unsqueeze(0), torch.tensor([targets], dtype=torch.long), [(T, U)], topology=topology)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    loss.sum().backward()
    if math.isinf(wanted.item()):
        assert not ours.grad.any()
    else:
        wanted.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_every_lattice_of_the_table_of_implementations_has_its_arcs():
    assert set(TOPOLOGIES) == {"regular", *LATTICES}


def test_every_topology_has_paths_and_none_is_another():
    logits = torch.randn(1, 4, 3, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    targets = torch.tensor([[1, 2]])
    losses = [oracle.losses(logits, targets, [(4, 2)], topology=small(name)).item() for name in TOPOLOGIES]
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == len(losses)


def test_a_target_that_no_duration_reaches_has_an_infinite_loss_and_no_gradient():
    topology = dataclasses.replace(TOPOLOGIES["tdt"], durations=(4,), sigma=0.0)
    logits = torch.randn(1, 3, 2, 6, dtype=torch.float64).requires_grad_()
    loss = oracle.losses(logits, torch.tensor([[1]]), [(3, 1)], topology=topology)
    assert math.isinf(loss.item())
    loss.sum().backward()
    assert not logits.grad.any()


def test_a_masked_symbol_leaves_gradients_finite():
    logits = torch.randn(1, 4, 3, 8, dtype=torch.float64)
    logits[..., 3] = -math.inf
    for name in TOPOLOGIES:
        leaf = logits.clone().requires_grad_()
        oracle.losses(leaf, torch.tensor([[1, 2]]), [(4, 2)], topology=small(name)).sum().backward()
        assert leaf.grad.isfinite().all(), name
