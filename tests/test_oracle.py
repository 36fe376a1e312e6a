"""The float64 oracle against answers by hand, all paths enumerated, and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from common.losses import oracle


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


def paths(T, U, topology):
    """Every path as its arcs ("blank" or "label", t, u), by brute force."""
    ahead = 0 if topology == "regular" else 1

    def go(t, u, taken):
        if (t, u) == (T, U):
            yield taken
        if t < T:
            yield from go(t + 1, u, [*taken, ("blank", t, u)])
            if u < U and not (topology == "modified-last-blank" and t == T - 1):
                forced = [("blank", t, u + 1)] if topology == "constrained" else []
                yield from go(t + ahead, u + 1, [*taken, ("label", t, u), *forced])

    return list(go(0, 0, []))


@pytest.mark.parametrize("topology", oracle.TOPOLOGIES)
@pytest.mark.parametrize("T, U", [(1, 0), (3, 2), (4, 3), (2, 1), (1, 1)])
def test_every_topology_is_the_sum_over_its_paths(topology, T, U):
    log_probs = torch.randn(T, U + 1, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    targets = [1 + u % 3 for u in range(U)]
    scores = [
        sum(float(log_probs[t, u, 0 if arc == "blank" else targets[u]]) for arc, t, u in path)
        for path in paths(T, U, topology)
    ]
    wanted = -torch.logsumexp(torch.tensor(scores, dtype=torch.float64), 0).item() if scores else math.inf
    found = oracle.arc_losses(
        log_probs.unsqueeze(0), torch.tensor([targets], dtype=torch.long), [(T, U)], topology=topology
    )
    assert found.item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("topology", oracle.TOPOLOGIES)
def test_gradients_of_every_topology(topology):
    logits = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    targets = torch.tensor([[1, 4], [2, 2]])

    def loss(x):
        return oracle.losses(x, targets, [(4, 2), (3, 1)], 0, topology)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())
