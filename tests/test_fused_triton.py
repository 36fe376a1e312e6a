"""The Triton kernels without a GPU: their results in Triton's interpreter, and that they compile for GPUs.

What needs a GPU runs where there is one: streams, CUDA graphs, TF32, speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from commands import ROOT
from fused_helpers import NAMES, error, found, problem, right

triton = pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ALLOWED = {"bfloat16": 3e-2, "float16": 4e-3, "logits of 10,000": 1e-3}
CASES = [
    "float32",
    "relu, no bias",
    "none, blank last",
    "more than a block",
    "more than a tile",
    "bfloat16",
    "float16",
    "a target that is the blank",
    "strides",
    "NaN in the padding",
    "an impossible target",
    "what is dropped",
    "FastEmit",
    "frozen inputs",
    "without gradients",
    "repeats",
    "T < U, blank in the middle",
    "expanded inputs",
    "logits of 10,000",
    "too many targets",
]


@pytest.fixture(scope="module")
def interpreted():
    """{case: what tests/fused_interpreted.py found}; one process, since Triton reads TRITON_INTERPRET once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    script = str(ROOT / "tests" / "fused_interpreted.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted, name):
    case = interpreted[name]
    allowed = ALLOWED.get(name, 5e-6)
    if name == "too many targets":
        assert "32769 states" in case["said"] and "\n" not in case["said"]
    assert all(value < allowed for value in case["errors"].values()), case
    if name == "an impossible target":
        assert case["inf"] == [True, False, False, False] and case["finite"]
    if name == "what is dropped":
        assert 0 < case["L1"] <= case["bound"] * 1.001
    if name == "repeats":
        assert case["same"]


def test_every_case_is_asked(interpreted):
    assert set(interpreted) == set(CASES)


POINTERS = {
    "targets": "i64", "T_lengths": "i64", "U_lengths": "i64", "numbers": "i64", "positions": "i32", "arcs": "fp32",
    "losses": "fp64", "dropped": "fp64", "scratch": "fp64", "grad_losses": "fp64", "sums": "fp32", "d_weight": "fp32",
    "d_bias": "fp32", "d_encoder": "fp32", "d_decoder": "fp32",
}  # fmt: skip
OF_OPERANDS = ("encoder", "decoder", "weight", "bias", "activations", "gradients")
CONSTANTS = {
    "H": 48, "V": 100, "KIND": 1, "LISTED": True, "HAS_BIAS": True, "WEIGHT": True, "BIAS": True,
    "SHARE": 64, "GRADIENT": True, "BLOCK": 64, "BM": 16, "BV": 32, "BH": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "capability, dtype, precision",
    [(90, "fp32", "ieee"), (90, "bf16", "ieee"), (80, "fp32", "tf32"), (80, "fp16", "tf32")],
)
def test_they_compile_for_gpus(capability, dtype, precision):
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fused_transducer import kernels

    operand = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}[dtype]
    names = ["activate", "log_probabilities", "logit_gradients", "input_gradients", "weight_gradients"]
    if precision == "ieee" and dtype == "fp32":
        names += ["lattice", "list_cells", "add_to_encoder", "add_to_decoder"]
    for name in names:
        kernel = getattr(kernels, name)
        signature, constants = {}, {}
        for parameter in kernel.params:
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(parameter.num,)] = {**CONSTANTS, "OPERAND": operand, "PRECISION": precision}[parameter.name]
            elif parameter.name in POINTERS or parameter.name in OF_OPERANDS:
                signature[parameter.name] = "*" + POINTERS.get(parameter.name, dtype)
            else:
                signature[parameter.name] = "fp32" if parameter.name in ("negligible", "label_factor") else "i64"
        made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        assert made.asm["cubin"]


# -- with a GPU ----------------------------------------------------------------------------------------------------


def on_gpu(one):
    one.tensors = [tensor.cuda() for tensor in one.tensors]
    one.targets, one.T_lengths, one.U_lengths = (
        tensor.cuda() for tensor in (one.targets, one.T_lengths, one.U_lengths)
    )
    return one


@needs_gpu
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 5e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_on_the_gpu(dtype, allowed):
    one = problem([(90, 30), (70, 41), (1, 3), (5, 0)], H=200, V=500, dtype=dtype, scale=0.2, negligible=0.0)
    losses, expected = right(one, large=True)
    made, gradients = found(on_gpu(one))
    assert error(made.cpu(), losses) < allowed
    assert all(error(gradients[name].cpu(), expected[name]) < allowed for name in NAMES)


@needs_gpu
def test_on_a_side_stream():
    one = problem([(90, 30), (70, 41)], H=200, V=500, dtype=torch.float32, scale=0.2, negligible=0.0)
    losses, _ = right(one, large=True)
    one = on_gpu(one)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made, _ = found(one)
    stream.synchronize()
    assert error(made.cpu(), losses) < 5e-6


@needs_gpu
def test_captured_as_a_cuda_graph():
    one = on_gpu(problem([(90, 30), (70, 41)], H=200, V=500, dtype=torch.float32, scale=0.2))
    leaves = one.leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one.loss(leaves, reduction="sum").backward()
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one.loss(leaves, reduction="sum")
        loss.backward()
    other = problem([(90, 30), (50, 20)], H=200, V=500, dtype=torch.float32, scale=0.2, seed=5)
    expected = found(other)
    with torch.no_grad():
        for leaf, tensor in zip(leaves, other.tensors):
            leaf[tuple(slice(size) for size in tensor.shape)].copy_(tensor)
        one.targets[:, :30].copy_(other.targets)
        one.T_lengths.copy_(other.T_lengths)
        one.U_lengths.copy_(other.U_lengths)
    graph.replay()
    assert loss.item() == pytest.approx(expected[0].sum().item(), rel=1e-5)
    assert error(leaves[2].grad.cpu(), expected[1]["weight"]) < 1e-5
