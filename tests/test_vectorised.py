"""The suite's own PyTorch loss against the plain reference: corners, dtypes, double backward."""

from __future__ import annotations

import pytest
import torch

from common.losses import oracle
from common.losses.topologies import TOPOLOGIES
from common.losses.vectorised import arc_losses, transducer_loss

SHAPES = [(6, 3), (4, 0), (1, 2), (5, 4)]


def given(dtype=torch.float64, V=7, scale=2.0):
    draw = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(len(SHAPES), 6, 5, V, generator=draw, dtype=torch.float64)
    targets = torch.randint(1, V, (len(SHAPES), 4), generator=draw)
    lengths = torch.tensor(SHAPES)
    return logits.to(dtype).requires_grad_(), targets, lengths[:, 0], lengths[:, 1]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_losses_and_gradients_are_the_references(scale):
    mine, *rest = given(scale=scale)
    theirs = mine.detach().clone().requires_grad_()
    upstream = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    losses = transducer_loss(mine, *rest, reduction="none")
    wanted = oracle.losses(theirs, rest[0], SHAPES)
    (losses * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_every_topology_is_the_oracles(name, scale):
    topology = TOPOLOGIES[name]
    mine, *rest = given(V=7 + topology.extra, scale=scale)
    rest[0] = rest[0].clamp(max=6)
    theirs = mine.detach().clone().requires_grad_()
    losses = transducer_loss(mine, *rest, reduction="none", topology=topology)
    wanted = oracle.losses(theirs, rest[0], SHAPES, topology=topology)
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    losses[wanted.isfinite()].sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


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


def test_padding_may_hold_anything_and_gets_no_gradient():
    clean, *rest = given()
    padded = clean.detach().clone()
    for n, (T, U) in enumerate(SHAPES):
        padded[n, T:] = float("nan")
        padded[n, :, U + 1 :] = float("nan")
    padded.requires_grad_()
    loss = transducer_loss(padded, *rest, reduction="sum")
    loss.backward()
    assert loss.item() == transducer_loss(clean, *rest, reduction="sum").item()
    for n, (T, U) in enumerate(SHAPES):
        assert not padded.grad[n, T:].any() and not padded.grad[n, :, U + 1 :].any()
    assert padded.grad.isfinite().all()


def test_impossible_symbols_leave_finite_gradients():
    logits, *rest = given()
    with torch.no_grad():
        logits[..., 5] = -float("inf")
        rest[0][rest[0] == 5] = 6
    transducer_loss(logits, *rest, reduction="sum").backward()
    assert logits.grad.isfinite().all() and not logits.grad[..., 5].any()


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_narrow_dtypes_are_summed_in_float32(dtype, error):
    logits, *rest = given(dtype)
    loss = transducer_loss(logits, *rest, reduction="sum")
    loss.backward()
    wanted = oracle.losses(logits.detach(), rest[0], SHAPES).sum()
    assert loss.dtype == torch.float32 and logits.grad.dtype == dtype
    assert loss.item() == pytest.approx(wanted.item(), rel=error)


@pytest.mark.parametrize("blank", [0, 3, 6])
def test_any_symbol_can_be_blank(blank):
    logits, targets, T_lengths, U_lengths = given()
    targets = (targets + blank) % 7
    losses = transducer_loss(logits, targets, T_lengths, U_lengths, blank=blank, reduction="none")
    torch.testing.assert_close(losses, oracle.losses(logits, targets, SHAPES, blank))


def test_gradients_of_given_log_probabilities_are_contiguous():
    """NeMo's Triton kernel reads them as if they were."""
    arcs = [(-torch.rand(2, 5, 4)).requires_grad_() for _ in range(2)]
    strides = []
    for arc in arcs:
        arc.register_hook(lambda gradient: strides.append(gradient.stride()))
    arc_losses(*arcs, torch.tensor([5, 3]), torch.tensor([3, 2])).sum().backward()
    assert strides == [(20, 4, 1), (20, 4, 1)]


def test_lengths_over_the_tensor_and_unknown_reductions_are_refused():
    logits, targets, T_lengths, U_lengths = given()
    for bad in ((T_lengths + 1, U_lengths), (T_lengths, U_lengths + 1), (T_lengths * 0, U_lengths)):
        with pytest.raises(ValueError, match="lengths"):
            transducer_loss(logits, targets, *bad)
    with pytest.raises(ValueError, match="reduction"):
        transducer_loss(logits, targets, T_lengths, U_lengths, reduction="median")


def test_reductions():
    arguments = given()
    each = transducer_loss(*arguments, reduction="none")
    assert transducer_loss(*arguments, reduction="sum").item() == pytest.approx(each.sum().item())
    assert transducer_loss(*arguments).item() == pytest.approx(each.mean().item())
