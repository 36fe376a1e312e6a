"""The Triton kernels without a GPU: their results in Triton's interpreter, and that they compile for GPUs.

What needs a GPU runs where there is one: streams, CUDA graphs, TF32, speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from commands import ROOT
from fused_helpers import NAMES, computed, error, problem, right

from fused_transducer.call import Call, any_outside, backend_of

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")
triton_backend = pytest.importorskip("fused_transducer.triton_backend")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def lines_of(script, *arguments, variables=()):
    """Return the lines of JSON that a script of tests/ prints."""
    command = [sys.executable, str(ROOT / "tests" / script), *map(str, arguments)]
    environment = {**os.environ, **dict(variables)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_in_the_interpreter(thorough):
    """Every case of tests/fused_interpreted.py; a process of its own, since Triton reads TRITON_INTERPRET once."""
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    cases = lines_of("fused_interpreted.py", *([] if thorough else ["--few"]), variables=variables)
    for case in cases:
        assert case["right"] and all(value < case["allowed"] for value in case["errors"].values()), case
    assert len(cases) > 50


COMPILED = [
    *((architecture, 500, dtype) for architecture in (80, 86, 89, 90, 100, 120) for dtype in ("float32", "bfloat16")),
    *((architecture, 4096, dtype) for architecture in (80, 90) for dtype in ("float32", "bfloat16")),
    *((90, 501, dtype) for dtype in ("float32", "bfloat16")),  # with an odd H too
    (90, 500, "float16"),
]
#: What of PTX multiplies matrices on the tensor cores of each architecture.
TENSOR_CORES = {**dict.fromkeys((80, 86, 89, 120), "mma.sync"), 90: "wgmma", 100: "tcgen05.mma"}
PRODUCTS = ("log_probabilities", "logit_gradients", "input_gradients", "weight_gradients")


@pytest.mark.parametrize(
    "lattice",
    ["", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tdt", "multi-blank", "constrained", "hat"))],
)
def test_kernels_as_they_are_launched_fit_a_gpu(lattice, thorough):
    """One process, which takes the place of Triton's driver; a fresh checkout needs a quarter of a minute a case."""
    cases = [(80, 500, "float32"), (90, 500, "bfloat16")] if lattice else COMPILED if thorough else COMPILED[1:2]
    words = (word for case in cases for word in case)
    for case, made in zip(cases, lines_of("compiled_launches.py", *([lattice] if lattice else []), *words)):
        for name, kernel in made["kernels"].items():
            most = 200 if case[2] == "float16" else 128
            assert kernel["shared"] <= made["most_shared"] and kernel["stack"] <= most, (case, name, kernel)
            assert not kernel["narrow"], (case, name, kernel)  # rows times cells may be more than 2^31
            assert name not in PRODUCTS or kernel["unit"] == TENSOR_CORES[case[0]], (case, name, kernel)
        assert ("walk" in made["kernels"]) == (lattice in ("tdt", "multi-blank", "constrained"))
        for launch in made["launches"]:
            if launch["kernel"] in ("logit_gradients", "input_gradients"):
                assert 0 <= launch["grid"][0] * launch["BM"] - launch["rows"] < launch["BM"], launch
        for name in ("log_probabilities", "logit_gradients"):
            programs = [launch["grid"][0] for launch in made["launches"] if launch["kernel"] == name]
            assert max(programs) >= 2 * made["multiprocessors"], (case, name)


@pytest.mark.parametrize(
    "name, value, wrong",
    [("T_lengths", 4, False), ("T_lengths", 0, True), ("T_lengths", 5, True), ("U_lengths", 0, False)]
    + [("U_lengths", -1, True), ("U_lengths", 3, True), ("targets", 10, False), ("targets", 11, True)]
    + [("targets", -1, True)],
)
def test_one_number_says_whether_a_length_or_target_is_outside(name, value, wrong):
    case = problem([(4, 2), (3, 1)], dtype=torch.float32)
    case.targets[1, 1] = -100  # of no target
    getattr(case, name).view(-1)[0] = value
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    assert any_outside(call).item() == wrong


def test_half_precision_needs_tensor_cores_where_the_tensors_are(monkeypatch):
    """The current device is a T4, another one an A100."""
    capabilities = {None: (7, 5), 0: (7, 5), 1: (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[device.index])
    for dtype in (torch.bfloat16, torch.float16):
        assert "7.5" in triton_backend.unavailable(torch.device("cuda"), dtype)
        with pytest.raises(ValueError, match="7.5"):
            backend_of("cuda:0", dtype, "triton")
        assert backend_of(torch.device("cuda:1"), dtype) == "triton"
    assert backend_of("cuda", torch.float32) == "triton"


def test_a_gpu_of_99_kb_of_shared_memory_takes_the_small_blocks():
    of = {
        capability: triton_backend._blocks("logits", torch.float32, launched(triton_backend.Gpu(100, capability)))
        for capability in ((8, 9), (9, 0), (10, 3), (12, 0))
    }
    assert of[8, 9] == of[12, 0] != of[9, 0] == of[10, 3]


@pytest.mark.parametrize(
    "programs, blocks, least", [(160, 1584, 0.9), (16, 1584, 0.95), (1, 1584, 0.1), (132, 64, 1.0), (133, 1584, 0.85)]
)
def test_splits_of_the_weight_s_gradient_keep_the_gpu_busy(programs, blocks, least):
    splits, share = triton_backend._splits(programs, blocks, 16, 132)
    assert splits <= 16 and (splits - 1) * share < blocks <= splits * share
    assert programs * blocks / 132 / (-(-programs * splits // 132) * share) >= least


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch):
    current = []

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched = []
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(triton_backend, name, lambda *_: launched.append(list(current)))
    monkeypatch.setattr(Call, "device", torch.device("cuda:1"))
    case = problem([(2, 1)], dtype=torch.float32)
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    empty = torch.empty(0)
    triton_backend.forward(call, True, empty, empty, empty, empty)
    triton_backend.backward(call, empty, empty, empty, [])
    assert launched == [[torch.device("cuda:1")]] * 2


def on_gpu(case):
    case.tensors = [tensor.cuda() for tensor in case.tensors]
    case.targets, case.T_lengths, case.U_lengths = (
        tensor.cuda() for tensor in (case.targets, case.T_lengths, case.U_lengths)
    )
    return case


@needs_gpu
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 5e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_on_the_gpu(dtype, allowed):
    case = problem([(90, 30), (70, 41), (1, 3), (5, 0)], H=200, V=500, dtype=dtype, scale=0.2, negligible=0.0)
    losses, expected = right(case, large=True)
    made, gradients = computed(on_gpu(case))
    assert error(made.cpu(), losses) < allowed
    assert all(error(gradients[name].cpu(), expected[name]) < allowed for name in NAMES)


@needs_gpu
def test_captured_as_a_cuda_graph():
    case = on_gpu(problem([(90, 30), (70, 41)], H=200, V=500, dtype=torch.float32, scale=0.2))
    leaves = case.leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            case.loss(leaves, reduction="sum").backward()
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = case.loss(leaves, reduction="sum")
        loss.backward()
    other = problem([(90, 30), (50, 20)], H=200, V=500, dtype=torch.float32, scale=0.2, seed=5)
    expected = computed(other)
    with torch.no_grad():
        for leaf, tensor in zip(leaves, other.tensors):
            leaf[tuple(slice(size) for size in tensor.shape)].copy_(tensor)
        case.targets[:, :30].copy_(other.targets)
        case.T_lengths.copy_(other.T_lengths)
        case.U_lengths.copy_(other.U_lengths)
    graph.replay()
    assert loss.item() == pytest.approx(expected[0].sum().item(), rel=1e-5)
    assert error(leaves[2].grad.cpu(), expected[1]["weight"]) < 1e-5


def launched(gpu, cells=(1, 3, 2)):
    """A launch of a call of that many utterances, frames and tokens on a GPU, or what refuses it."""
    N, T, U = cells
    case = problem([(4, 2)], H=8, V=500)
    encoder, decoder, *layer = case.tensors
    tensors = (encoder[:, :1].expand(N, T, 8), decoder[:, :1].expand(N, U + 1, 8), *layer)
    targets, lengths = torch.ones(N, U, dtype=torch.int64), torch.full((N,), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "_gpu", lambda device: gpu)
        return triton_backend._Launch(Call(*tensors, targets, lengths, lengths))


def test_any_number_of_cells_is_taken():
    for N in (10, 40, 80):  # rows times cells, and cells, are more than 2^31
        assert launched(triton_backend.Gpu(100, (9, 0)), (N, 7000, 6999)).cells == N * 7000**2


def test_lengths_on_the_host_are_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(Call, "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph.*lengths must be on cuda:1"):
        launched(triton_backend.Gpu(100, (9, 0)))
