"""The float64 oracle against answers by hand and every path, and the loss in plain PyTorch against the oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from rnnt_bench.core.implementations import LATTICES
from rnnt_bench.losses import oracle
from rnnt_bench.losses.topologies import TOPOLOGIES, arc_losses, transducer_loss


def loss_of(logits, targets, shapes):
    return oracle.losses(logits, torch.tensor(targets), shapes)


def test_answers_by_hand():
    """One arc of 1/2; two alignments of three arcs, each arc 1/2: 2/8."""
    assert loss_of(torch.zeros(1, 1, 1, 2), [[]], [(1, 0)]).item() == pytest.approx(math.log(2), abs=1e-15)
    assert loss_of(torch.zeros(1, 2, 2, 2), [[1]], [(2, 1)]).item() == pytest.approx(math.log(4), abs=1e-15)


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


def steps(name, z, t, u, T, U, target):
    """The ways on from cell (t, u) of outputs z (T, U+1, C), durations last, as (t, u, log-weight)."""
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
        if u < U and name == "regular":
            yield t, u + 1, tokens[target]
        if u < U and name == "windowed" and 0 <= t - (2 * u + 1) * T // (2 * U) + 1 < 3:
            yield t, u + 1, tokens[target]
        if u < U and name == "delay-penalty":
            yield t, u + 1, tokens[target] + 0.3 * ((T - 1) / 2 - t)
        if u < U and (name == "modified" or name == "modified-last-blank" and t < T - 1):
            yield t + 1, u + 1, tokens[target]
        if u < U and name == "constrained":
            yield t + 1, u + 1, tokens[target] + z[t, u + 1].log_softmax(-1)[0]


def summed_over_paths(name, z, targets, T, U, window=None):
    """-log of the sum over every path from (0, 0) to (T, U), whose labels are emitted within their windows."""
    totals = []

    def go(t, u, score):
        if (t, u) == (T, U):
            totals.append(score)
        if t < T:
            for next_t, next_u, weight in steps(name, z, t, u, T, U, targets[u] if u < U else 0):
                is_within = next_u == u or window is None or window[u][0] <= t <= window[u][1]
                if next_t <= T and is_within:
                    go(next_t, next_u, score + weight)

    go(0, 0, torch.zeros((), dtype=torch.float64))
    return -torch.stack(totals).logsumexp(0) if totals else torch.tensor(math.inf, dtype=torch.float64)


#: Small parameters, so that every arc is taken in a few frames.
PARAMETERS = {
    "tdt": {"durations": (0, 2, 3), "sigma": 0.1},
    "multi-blank": {"durations": (2, 3), "sigma": 0.1},
    "delay-penalty": {"penalty": 0.3},
    "windowed": {"window": 3},
}


assert set(TOPOLOGIES) == {"regular", *LATTICES}


def small(name):
    return dataclasses.replace(TOPOLOGIES[name], **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("T, U", [(1, 0), (3, 2), (4, 3), (3, 5), (1, 1)])
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


def test_a_masked_symbol_leaves_gradients_finite():
    logits = torch.randn(1, 4, 3, 8, dtype=torch.float64)
    logits[..., 3] = -math.inf
    for name in TOPOLOGIES:
        leaf = logits.clone().requires_grad_()
        oracle.losses(leaf, torch.tensor([[1, 2]]), [(4, 2)], topology=small(name)).sum().backward()
        assert leaf.grad.isfinite().all(), name


# The suite's own PyTorch loss against the oracle: corners, dtypes, double backward.


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_derivatives_of_every_topology(name):
    topology = TOPOLOGIES[name]
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 4, 3, 4 + topology.extra, generator=draw, dtype=torch.float64, requires_grad=True)
    targets, T_lengths, U_lengths = torch.tensor([[1, 2], [3, 1]]), torch.tensor([4, 3]), torch.tensor([2, 1])

    def loss(x):
        return transducer_loss(x, targets, T_lengths, U_lengths, reduction="none", topology=topology)

    fast = name != "regular"
    assert torch.autograd.gradcheck(loss, logits, fast_mode=fast)
    assert torch.autograd.gradgradcheck(loss, logits, fast_mode=fast)


def test_gradients_of_given_log_probabilities_are_contiguous():
    """NeMo's Triton kernel reads them as if they were."""
    arcs = [(-torch.rand(2, 5, 4)).requires_grad_() for _ in range(2)]
    strides = []
    for arc in arcs:
        arc.register_hook(lambda gradient: strides.append(gradient.stride()))
    arc_losses(*arcs, torch.tensor([5, 3]), torch.tensor([3, 2])).sum().backward()
    assert strides == [(20, 4, 1), (20, 4, 1)]


def test_reductions_and_what_is_refused():
    draw, lengths = torch.Generator().manual_seed(1), torch.tensor([(6, 3), (4, 0), (1, 2), (5, 4)])
    logits = 2 * torch.randn(4, 6, 5, 7, generator=draw, dtype=torch.float64)
    targets, T_lengths, U_lengths = torch.randint(1, 7, (4, 4), generator=draw), lengths[:, 0], lengths[:, 1]
    each = transducer_loss(logits, targets, T_lengths, U_lengths, reduction="none")
    torch.testing.assert_close(each, oracle.losses(logits, targets, lengths.tolist()))
    for reduction, value in (("sum", each.sum()), ("mean", each.mean())):
        assert transducer_loss(logits, targets, T_lengths, U_lengths, 0, reduction).item() == pytest.approx(
            value.item()
        )
    for bad in ((T_lengths + 1, U_lengths), (T_lengths, U_lengths + 1), (T_lengths * 0, U_lengths)):
        with pytest.raises(ValueError, match="lengths"):
            transducer_loss(logits, targets, *bad)
    with pytest.raises(ValueError, match="reduction"):
        transducer_loss(logits, targets, T_lengths, U_lengths, reduction="median")
