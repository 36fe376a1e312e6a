"""fused_transducer as a part of PyTorch: registration, torch.compile, autocast, modules, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from typing import ContextManager

import pytest
import torch
from commands import ROOT
from fused_helpers import NAMES, Problem, computed, error, errors, problem, right
from torch.utils._python_dispatch import TorchDispatchMode

import fused_transducer
from fused_transducer import TransducerLoss, native, plain, transducer_loss
from fused_transducer.call import Call

RAGGED = [(9, 4), (6, 5), (8, 1)]


def cells_of(case: Problem) -> int:
    return int((case.T_lengths * (case.U_lengths + 1)).sum())


def arguments(case: Problem, backend: str, cells: int):
    values = (0, "tanh", 0.0, 1e-8, 0, backend, True, cells, 0)
    return (*case.leaves(), case.targets, case.T_lengths, case.U_lengths, *values)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_operators_registration(backend):
    case = problem(RAGGED, dtype=torch.float32)
    cells = cells_of(case) if backend == "native" else 3 * 9 * 6
    torch.library.opcheck(
        torch.ops.fused_transducer.losses.default,
        arguments(case, backend, cells),
        test_utils=(
            *("test_schema", "test_autograd_registration", "test_faketensor"),
            *(["test_aot_dispatch_dynamic"] if backend == "torch" else []),  # native's room follows from the lengths
        ),
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("V", [11, 1100])
def test_the_gradients_registration(backend, V):
    case = problem([(5, 2), (4, 1)], V=V, dtype=torch.float32)
    cells = cells_of(case) if backend == "native" else 2 * 5 * 3
    given = arguments(case, backend, cells)
    _, _, arcs, kept = torch.ops.fused_transducer.losses(*given)
    given = (torch.ones(2, dtype=torch.float64), arcs, kept, *(tensor.detach() for tensor in given[:7]))
    torch.library.opcheck(
        torch.ops.fused_transducer.gradients.default,
        (*given, 0, "tanh", 1e-8, 0, backend, [True, False, True, True]),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "backend, compiler",
    [("native", "aot_eager"), ("torch", "aot_eager"), ("native", "inductor")],
)
def test_compiled_as_one_graph(backend, compiler):
    settings: ContextManager[None] = nullcontext()
    if compiler == "inductor":
        import torch._inductor.config as config

        settings = config.patch(compile_threads=1)  # a pool of processes takes longer to start
    case = problem(RAGGED, negligible=0.0, backend=backend)
    expected, leaves = right(case), case.leaves()
    with settings:
        losses = torch.compile(case.loss, fullgraph=True, backend=compiler)(leaves)  # for inductor no C++ to compile
        losses.sum().backward()
    assert error(losses.detach(), expected[0]) < 1e-12
    assert all(error(leaf.grad, expected[1][name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


def test_a_compiled_graph_keeps_logits():
    case = problem([(5, 3), (7, 1)], dtype=torch.float32)
    leaves = case.leaves()
    losses = torch.compile(case.loss, fullgraph=True, backend="aot_eager")(leaves, backend="native", keep_bytes=5_000)
    losses.sum().backward()
    expected, gradients = computed(case, backend="native", keep_bytes=0)
    assert torch.equal(losses.detach(), expected)
    assert all(torch.equal(leaf.grad, gradients[name]) for name, leaf in zip(NAMES, leaves))


def test_compiled_with_other_lengths_and_bad_ones():
    case = problem([(9, 4), (9, 4)], negligible=0.0)
    compiled = torch.compile(
        lambda leaves, T_lengths: transducer_loss(
            *leaves, case.targets, T_lengths, case.U_lengths, reduction="none", negligible=0.0
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    for lengths in ([9, 9], [3, 1]):
        case.T_lengths = torch.tensor(lengths)
        assert error(compiled(case.leaves(), case.T_lengths).detach(), right(case)[0]) < 1e-12
    with pytest.raises(ValueError, match="utterance 1"):
        compiled(case.leaves(), torch.tensor([9, 10]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_theirs(dtype):
    case = problem(RAGGED, H=40, dtype=torch.float32, scale=0.5)
    cast = Problem([tensor.to(dtype) for tensor in case.tensors], case.targets, case.T_lengths, case.U_lengths)
    leaves = case.leaves()
    with torch.autocast("cpu", dtype):
        losses = case.loss(leaves)
    losses.sum().backward()
    assert losses.dtype == torch.float32 and torch.equal(losses.detach(), computed(cast)[0])
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert max(error(leaf.grad, computed(cast)[1][name].float()) for name, leaf in zip(NAMES, leaves)) < 1e-6


def test_second_derivatives_are_refused():
    case = problem(RAGGED)
    leaves = case.leaves()
    (gradient,) = torch.autograd.grad(case.loss(leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.square().sum().backward()


class Products(TorchDispatchMode):
    """Counts the matrix products within it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wanted, each",
    [(("bias",), 1), (("weight",), 2), (("encoder_out",), 2), (("encoder_out", "decoder_out"), 2), (NAMES, 3)],
    ids=str,
)
def test_frozen_inputs_skip_their_products(wanted, each):
    """The plain code computes three products a tile: the logits, the weight's gradient and that of both outputs."""
    case, tiles = problem([(6, 3)]), 3
    values, inputs = (0, "tanh", 0.0, 0.0, 8), (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    _, _, arcs, kept = torch.ops.fused_transducer.losses(*inputs, *values, "torch", True, 24, 0)
    gradients = [torch.zeros_like(tensor) if name in wanted else None for name, tensor in zip(NAMES, case.tensors)]
    with Products() as made:
        plain.backward(Call(*inputs, *values), torch.ones(1, dtype=torch.float64), arcs, kept, gradients)
    assert made.count == each * tiles


def test_the_dropped_share_needs_no_gradient():
    case = problem(RAGGED)
    losses, dropped = case.loss(case.leaves(), return_dropped=True)
    assert losses.requires_grad and not dropped.requires_grad and dropped.shape == (3,)


def test_hooks_and_accumulation():
    case = problem(RAGGED)
    leaves = case.leaves()
    seen = []
    leaves[2].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    for _ in range(2):
        case.loss(leaves).sum().backward()
    assert len(seen) == 2 and error(seen[1], 2 * seen[0]) < 1e-12


def test_deterministic_on_request():
    case = problem(RAGGED, H=40, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        for backend in ("native", "torch"):
            first, again = computed(case, backend=backend), computed(case, backend=backend)
            assert all(torch.equal(first[1][name], again[1][name]) for name in NAMES)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_under_ddp(tmp_path):
    """Its hooks get each gradient once, and what they return becomes the gradient."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    case = problem(RAGGED, dtype=torch.float32)
    module = TransducerLoss(12, 11)
    module(*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths).backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ddp'}", rank=0, world_size=1)
    try:
        ddp, seen = DistributedDataParallel(module), []

        def hook(state, bucket):
            seen.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(2 * bucket.buffer())
            return done

        ddp.register_comm_hook(None, hook)
        ddp(*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths).backward()
        assert sum(seen) == 11 * 12 + 11
        for name, parameter in module.named_parameters():
            assert error(parameter.grad, 2 * expected[name]) < 1e-6
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_sharded_weight(tmp_path):
    """The weight of a module that FSDP wraps is whole; a sharded weight alone is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    case = problem(RAGGED, dtype=torch.float32)
    inputs = (*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    module = TransducerLoss(output=torch.nn.Linear(12, 11))
    expected = module(*inputs)
    expected.backward()
    gradient = module.output_linear.weight.grad.clone()
    module.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'fsdp'}", rank=0, world_size=1)
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        loss = module(*inputs)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item())
        assert error(module.output_linear.weight.grad.full_tensor(), gradient) < 1e-6
        sharded = module.output_linear
        sharded._forward_pre_hooks.clear()
        module.reshard()
        with pytest.raises(ValueError, match="sharded"):
            transducer_loss(*case.tensors[:2], sharded.weight, None, *inputs[2:])
    finally:
        torch.distributed.destroy_process_group()


# -- the module ----------------------------------------------------------------------------------------------------


def test_the_module_owns_the_output_layer():
    torch.manual_seed(0)
    case = problem(RAGGED, H=12, V=11, dtype=torch.float32)
    module = TransducerLoss(12, 11, reduction="sum", negligible=0.0)
    case.tensors[2:] = [module.output_linear.weight, module.output_linear.bias]
    expected = right(case)
    loss = module(*case.leaves()[:2], case.targets, case.T_lengths, case.U_lengths)
    loss.backward()
    assert loss.item() == pytest.approx(expected[0].sum().item(), rel=1e-6)
    assert error(module.output_linear.weight.grad, expected[1]["weight"]) < 1e-5
    assert set(module.state_dict()) == {"output_linear.weight", "output_linear.bias"}


def test_the_module_with_projections_is_icefalls_joiner():
    torch.manual_seed(0)
    module = TransducerLoss(8, 11, encoder_dim=6, decoder_dim=5, activation="relu", bias=False, blank=2)
    assert set(module.state_dict()) == {
        "encoder_proj.weight",
        "encoder_proj.bias",
        "decoder_proj.weight",
        "decoder_proj.bias",
        "output_linear.weight",
    }
    encoder_out, decoder_out = torch.randn(2, 7, 6), torch.randn(2, 4, 5)
    targets, T_lengths, U_lengths = torch.randint(3, 11, (2, 3)), torch.tensor([7, 4]), torch.tensor([3, 2])
    from common.losses import oracle

    logits = module.logits(encoder_out.unsqueeze(2), decoder_out.unsqueeze(1))
    expected = oracle.losses(logits, targets, [(7, 3), (4, 2)], 2).mean()
    loss = module(encoder_out, decoder_out, targets, T_lengths, U_lengths)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert "relu" in repr(module)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"T_lengths": torch.tensor([9, 10, 8])}, ("utterance 1", "10", "9 frames")),
        ({"T_lengths": torch.tensor([9, 6, 0])}, ("utterance 2", "T_lengths is 0")),
        ({"U_lengths": torch.tensor([6, 5, 1])}, ("utterance 0", "U_lengths is 6")),
        ({"U_lengths": torch.tensor([4, -1, 1])}, ("utterance 1", "-1")),
        ({"targets": torch.full((3, 5), 11)}, ("utterance 0", "target 0", "11")),
        ({"targets": torch.tensor([[1] * 5, [1, 1, -3, 1, 1], [1] * 5])}, ("utterance 1", "target 2", "-3")),
        ({"targets": torch.ones(3, 4, dtype=torch.long)}, ("targets", "(3, 5)", "(3, 4)")),
        ({"targets": torch.ones(3, 5)}, ("targets", "integers")),
        ({"T_lengths": torch.tensor([9, 6])}, ("T_lengths", "(3,)")),
        ({"U_lengths": torch.tensor([4.0, 5.0, 1.0])}, ("U_lengths", "integers")),
        ({"weight": torch.zeros(11, 13)}, ("weight", "(11, 12)")),
        ({"weight": torch.zeros(11, 12, dtype=torch.float32)}, ("weight", "float32", "float64")),
        ({"bias": torch.zeros(10, dtype=torch.float64)}, ("bias", "(11,)")),
        ({"encoder_out": torch.zeros(0, 9, 12), "T_lengths": torch.zeros(0, dtype=torch.long)}, ("empty",)),
        ({"encoder_out": torch.zeros(3, 9, 12, dtype=torch.long)}, ("encoder_out", "int64")),
        ({"encoder_out": torch.zeros(9, 12)}, ("encoder_out", "(N, T, H)")),
        ({"decoder_out": torch.zeros(2, 6, 12)}, ("decoder_out", "(3, 6, 12)")),
        ({"decoder_out": torch.zeros(3, 6, 12, device="meta", dtype=torch.float64)}, ("decoder_out", "meta", "cpu")),
        ({"blank": 11}, ("blank", "11")),
        ({"activation": "mish"}, ("activation", "mish")),
        ({"reduction": "average"}, ("reduction", "average")),
        ({"negligible": -1.0}, ("negligible",)),
        ({"fastemit_lambda": float("nan")}, ("fastemit_lambda",)),
        ({"tile_cells": -5}, ("tile_cells",)),
        ({"dropout": 1}, ("dropout", "below 1")),
        ({"dropout": 0.1, "dropout_seed": 1.5}, ("dropout_seed", "1.5")),
        ({"dropout": 0.1, "dropout_seed": torch.tensor(1, dtype=torch.int32)}, ("dropout_seed", "int32")),
        ({"backend": "opencl"}, ("backend", "opencl", "native")),
        ({"backend": "triton"}, ("triton", "CUDA")),
    ],
)
def test_every_bad_argument_is_one_clear_error(change, words):
    case = problem(RAGGED)
    given = dict(zip(NAMES, case.leaves()), targets=case.targets, T_lengths=case.T_lengths, U_lengths=case.U_lengths)
    with pytest.raises(ValueError) as refused:
        transducer_loss(**{**given, **change})
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_targets_beyond_the_length_may_be_anything():
    case = problem(RAGGED, negligible=0.0)
    expected = right(case)
    case.targets[2, 1:] = 10_000
    assert max(errors(case, expected).values()) < 1e-12


# -- without a compiler --------------------------------------------------------------------------------------------


PLAIN = """
import torch
from fused_helpers import errors, problem
from fused_transducer import backend_of
print(*(backend_of("cpu", torch.float32) for _ in range(2)))
print(max(errors(problem([(9, 4), (6, 5), (8, 1)], negligible=0.0)).values()) < 1e-12)
"""


def test_without_a_compiler_the_plain_code_runs_and_says_so_once(tmp_path):
    """The test starts a new process, which has looked for no compiler yet."""
    variables = {"FUSED_TRANSDUCER_BACKEND": "", "FUSED_TRANSDUCER_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command, environment = [sys.executable, "-c", PLAIN], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["torch", "torch", "True"], done.stderr
    assert done.stderr.count("UserWarning") == 1 and "no-such-compiler" in done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    fails = tmp_path / "c++"
    fails.write_text("#!/bin/sh\necho broken beyond words >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(native, "_first_load", native._first_load.__wrapped__)  # as if no compiler was looked for yet
    monkeypatch.setenv("FUSED_TRANSDUCER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(fails))
    with pytest.raises(ValueError, match="broken beyond words"):
        fused_transducer.backend_of("cpu", torch.float32, "native")


def test_it_imports_nothing_of_the_suite():
    for path in (fused_transducer.__path__[0],):
        from pathlib import Path

        sources = [*Path(path).glob("*.py"), *Path(path).glob("csrc/*")]
        assert len(sources) > 10
        for source in sources:
            assert "common" not in source.read_text(), source
