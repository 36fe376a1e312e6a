"""fused_transducer where memory is at stake: sizes that do not fit, values that change between forward and backward,
arguments of other types; and what asks for shapes or derivatives in other ways than backward."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from fused_helpers import NAMES, computed, error, errors, problem, right, use

from fused_transducer import TransducerLoss, transducer_loss

RAGGED = [(5, 4), (4, 2)]
LARGE = [(60, 30), (60, 30)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request, monkeypatch):
    return use(request.param, monkeypatch)


def call(case, tensors, **options):
    return transducer_loss(*tensors, case.targets, case.T_lengths, case.U_lengths, **{"reduction": "sum", **options})


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_a_traced_graph_refuses_more_cells_than_it_was_traced_with(backend):
    case, large = problem(RAGGED, dtype=torch.float32), problem(LARGE, dtype=torch.float32)
    given = [*case.leaves(), case.targets, case.T_lengths, case.U_lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: torch.jit is deprecated
        traced = torch.jit.trace(lambda *tensors: transducer_loss(*tensors), given, check_trace=False)
    assert traced(*given).item() == pytest.approx(transducer_loss(*given).item())
    with pytest.raises(RuntimeError):
        traced(*large.leaves(), large.targets, large.T_lengths, large.U_lengths)


def operator_arguments(case, backend, cells, kept=0, gradient=True):
    values = (0, "tanh", 0.0, 1e-8, 0, backend, gradient, cells, kept)
    return [*(x.detach() for x in case.tensors), case.targets, case.T_lengths, case.U_lengths, *values]


@pytest.mark.parametrize("cells, kept, gradient", [(1, 0, True), (0, 0, True), (10**6, 7, False)], ids=str)
def test_the_operator_refuses_sizes_that_do_not_fit(backend, cells, kept, gradient):
    case = problem(LARGE, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="cells|shape"):
        torch.ops.fused_transducer.losses(*operator_arguments(case, backend, cells, kept, gradient))


@pytest.mark.parametrize(
    "index, wrong",
    [
        (0, torch.ones(3, dtype=torch.float64)),  # the gradient of three losses
        (1, torch.zeros(2, 5)),
        (1, torch.zeros(1, 3720)),
        (1, torch.zeros(2, 3720, dtype=torch.float64)),
        (2, torch.zeros(3720, 3)),
        (5, torch.zeros(40, 12)),  # the weight of 40 symbols
        (7, torch.ones(2, 7, dtype=torch.long)),
    ],
    ids=str,
)
def test_the_operator_of_gradients_refuses_what_does_not_belong_together(backend, index, wrong):
    case = problem(LARGE, dtype=torch.float32)
    tensors = operator_arguments(case, backend, 60 * 31 * 2)
    _, _, arcs, kept = torch.ops.fused_transducer.losses(*tensors)
    given = [torch.ones(2, dtype=torch.float64), arcs, kept, *tensors[:7]]
    given[index] = wrong
    with pytest.raises((RuntimeError, ValueError)):
        torch.ops.fused_transducer.gradients(*given, 0, "tanh", 1e-8, 0, backend, [True] * 4)


def test_the_operator_of_gradients_refuses_lengths_beyond_the_frames(backend):
    if backend != "native":
        pytest.skip("the plain code indexes tensors, which torch checks")
    case = problem(LARGE, dtype=torch.float32)
    tensors = operator_arguments(case, backend, 60 * 31 * 2)
    _, _, arcs, kept = torch.ops.fused_transducer.losses(*tensors)
    tensors[5] = torch.tensor([60000, 60000])
    with pytest.raises(ValueError, match="utterance 0"):
        torch.ops.fused_transducer.gradients(
            torch.ones(2, dtype=torch.float64), arcs, kept, *tensors[:7], 0, "tanh", 1e-8, 0, backend, [True] * 4
        )


# -- values that change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["T_lengths", "U_lengths", "targets"])
@pytest.mark.parametrize("way", ["numpy", "data"])
def test_what_changes_after_forward_does_not_change_the_gradient(changed, way):
    """A loader that uses its buffer again, and `.data`: autograd's version counter sees neither."""
    case = problem(RAGGED, negligible=0.0)
    _, expected = right(case)
    buffer = getattr(case, changed).numpy().copy()
    setattr(case, changed, torch.from_numpy(buffer))
    leaves = case.leaves()
    losses = case.loss(leaves)
    if way == "numpy":
        buffer[:] = 1
    else:
        getattr(case, changed).data = torch.full_like(getattr(case, changed), 60000)
    losses.sum().backward()
    assert all(error(leaf.grad, expected[name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


# -- derivatives and shapes ----------------------------------------------------------------------------------------


def test_functional_gradients_are_those_of_backward():
    case = problem(RAGGED)
    _, gradients = computed(case)
    made = torch.func.grad(lambda tensors: call(case, tensors))(case.tensors)
    assert all(torch.equal(x, gradients[name]) for name, x in zip(NAMES, made))


def test_functional_gradients_of_a_module():
    case = problem(RAGGED)
    module = TransducerLoss(12, 11, dtype=torch.float64)
    inputs = (*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    module(*inputs).backward()
    made = torch.func.grad(lambda parameters: torch.func.functional_call(module, parameters, inputs))(
        dict(module.named_parameters())
    )
    assert all(torch.equal(made[name], parameter.grad) for name, parameter in module.named_parameters())


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(grad):
    from torch.autograd import forward_ad

    case = problem(RAGGED)
    tangents = [torch.ones_like(x) for x in case.tensors]
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda *tensors: call(case, tensors), tuple(case.tensors), tuple(tangents))
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        call(case, [*case.tensors[:2], forward_ad.make_dual(case.tensors[2], tangents[2]), case.tensors[3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_shapes_and_dtypes_without_values(dtype, reduction):
    """On the meta device and in FakeTensorMode."""
    from torch._subclasses import FakeTensorMode

    case = problem(RAGGED, dtype=dtype)
    expected = call(case, case.leaves(), reduction=reduction)
    integers = case.targets, case.T_lengths, case.U_lengths
    mode = FakeTensorMode()
    for convert in (lambda x: x.to("meta"), mode.from_tensor):
        leaves = [convert(x).requires_grad_() for x in case.tensors]
        options = {"backend": "torch"} if leaves[0].device.type == "meta" else {}
        with mode if leaves[0].device.type == "cpu" else torch.enable_grad():
            loss = transducer_loss(*leaves, *map(convert, integers), reduction=reduction, **options)
            loss.sum().backward()
        assert (loss.shape, loss.dtype) == (expected.shape, expected.dtype)
        assert all((leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, dtype) for leaf in leaves)


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"T_lengths": [5, 4]},
        {"U_lengths": (4, 2)},
        {"targets": [[1, 2, 3, 4], [1, 2, 0, 0]]},
        {"encoder_out": numpy.zeros((2, 5, 12))},
        {"weight": None},
        {"weight": torch.eye(12, dtype=torch.float64)[:11].to_sparse()},
        {"weight": torch.zeros(11, 12).to_mkldnn()},
        {"decoder_out": torch.nested.nested_tensor([torch.zeros(5, 12), torch.zeros(3, 12)])},
        {"blank": 1.0},
        {"blank": True},
        {"blank": torch.tensor(0)},
        {"blank": None},
        {"tile_cells": 1.5},
        {"tile_cells": "8"},
        {"tile_cells": 2**63},
        {"keep_bytes": -1},
        {"negligible": "1"},
        {"negligible": None},
        {"negligible": torch.tensor(0.0)},
        {"fastemit_lambda": True},
        {"fastemit_lambda": "a lot"},
    ],
    ids=str,
)
def test_arguments_of_other_types_are_one_clear_error(change):
    case = problem(RAGGED)
    given = dict(zip(NAMES, case.leaves()), targets=case.targets, T_lengths=case.T_lengths, U_lengths=case.U_lengths)
    with pytest.raises(ValueError) as refused:
        transducer_loss(**{**given, **change})
    assert str(refused.value).startswith(next(iter(change))) and "\n" not in str(refused.value)


def test_numbers_of_numpy_are_numbers():
    case = problem(RAGGED)
    options = {"blank": numpy.int64(2), "tile_cells": numpy.int32(8), "negligible": numpy.float32(0)}
    assert call(case, case.tensors, **options).item() == call(case, case.tensors, blank=2, tile_cells=8).item()


@pytest.mark.parametrize(
    "options, kind, word",
    [
        ({"activation": "mish"}, ValueError, "mish"),
        ({"reduction": "x"}, ValueError, "reduction"),
        ({"blank": 11}, ValueError, "11"),
        ({"blank": -1}, ValueError, "-1"),
        ({"tile_cells": 1.5}, ValueError, "tile_cells"),
        ({"backend": "opencl"}, ValueError, "opencl"),
        ({"dropout": 1.0}, ValueError, "below 1"),
        ({"dropout": "0.1"}, ValueError, "dropout"),
        ({"delay_penalty": -1.0}, ValueError, "delay_penalty"),
        ({"blnk": 3}, TypeError, "blnk"),
        ({"fastemit": 1}, TypeError, "fastemit_lambda"),
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"joiner_dim": 8.0}, ValueError, "joiner_dim"),
    ],
    ids=str,
)
def test_a_module_checks_its_options_when_it_is_made(options, kind, word):
    with pytest.raises(kind, match=word):
        TransducerLoss(**{"joiner_dim": 8, "vocab_size": 11, **options})


# -- what is left out ----------------------------------------------------------------------------------------------


def test_the_dropped_share_is_the_same_in_each_backend(backend):
    case = problem([(30, 12), (20, 14)], dtype=torch.float32, fastemit_lambda=0.5, negligible=0.05)
    _, expected = case.loss(case.leaves(), return_dropped=True, backend="torch")
    _, plain = case.loss(case.leaves(), return_dropped=True, backend="torch", fastemit_lambda=0.0)
    _, dropped = case.loss(case.leaves(), return_dropped=True, backend=backend)
    assert 0 < error(expected, plain)  # other cells are dropped: their label arcs count for more
    assert (expected <= plain).all()
    assert error(dropped, expected) < 1e-6


def test_fastemit_does_not_change_what_is_right():
    case = problem(RAGGED, fastemit_lambda=0.5, negligible=0.0)
    case.targets.clamp_(min=1)
    assert max(errors(case).values()) < 1e-12
