"""The Triton kernels without a GPU: their results in Triton's interpreter, and that they compile for GPUs.

What needs a GPU runs where there is one: streams, CUDA graphs, TF32, speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from commands import ROOT
from fused_helpers import NAMES, computed, error, problem, right

from common.system import locks

triton = pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
UPSTREAM = "reductions and upstream gradients, "
KEPT_CASES = ["500", "4096", "parts of H", "smoothing", "float16", "left to other kernels", "frozen"]
ALLOWED = {
    **{"bfloat16": 3e-2, "dropout, gelu, bfloat16": 3e-2, "float16": 4e-3, "logits of 10,000": 1e-3},
    **{"odd H and V, bfloat16": 3e-2, "a loss of 1e-5": 1e-6},
    **{f"kept activations, {name}": 3e-2 for name in KEPT_CASES},
    **{UPSTREAM + "bfloat16": 3e-2, UPSTREAM + "float16": 4e-3},
}
CASES = [
    "float32",
    "relu, no bias",
    "none, blank last",
    *(f"activation {name}" for name in ("sigmoid", "silu", "gelu", "leaky_relu", "snake")),
    "dropout",
    "dropout, gelu, bfloat16",
    "delay penalty",
    "label smoothing",
    "posteriors",
    "best paths",
    "more than a block",
    "more than a tile",
    "bfloat16",
    "float16",
    "odd H and V",
    "odd H and V, bfloat16",
    *(f"kept activations, {name}" for name in KEPT_CASES),
    "the weight's halves",
    "a long path",
    "a loss of 1e-5",
    "a NaN",
    "a target that is the blank",
    "strides",
    "NaN in the padding",
    "an impossible target",
    "what is dropped",
    "what is dropped with FastEmit",
    "sizes that do not fit",
    "FastEmit",
    "frozen inputs",
    "without gradients",
    "repeats",
    "T < U, blank in the middle",
    "expanded inputs",
    "logits of 10,000",
    UPSTREAM + "float32",
    UPSTREAM + "bfloat16",
    UPSTREAM + "float16",
    "more frames and states than programs",
    "too many targets",
    "TF32 by torch's new setting",
]


def lines_of(script, *arguments, variables=()):
    """Return the lines of JSON that a script of tests/ prints."""
    command = [sys.executable, str(ROOT / "tests" / script), *map(str, arguments)]
    environment = {**os.environ, **dict(variables)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return a function that returns what `lines_of` does; of all processes of the tests the first runs the script."""

    def made_once(name, *arguments, **options):
        folder = tmp_path_factory.getbasetemp()
        kept = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"{name}.json"
        with locks.locked(kept.with_suffix(".lock"), lambda: None):
            if not kept.exists():
                kept.write_text(json.dumps(lines_of(*arguments, **options)))
            return json.loads(kept.read_text())

    return made_once


@pytest.fixture(scope="module")
def interpreted(once, thorough):
    """{case: what tests/fused_interpreted.py computed}; one process, since Triton reads TRITON_INTERPRET once."""
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    words = [] if thorough else ["--few"]
    return {case["name"]: case for case in once("interpreted", "fused_interpreted.py", *words, variables=variables)}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted, name, thorough):
    if name not in interpreted and not thorough:
        pytest.skip("with --thorough")
    case = interpreted[name]
    allowed = ALLOWED.get(name, 5e-6)
    if name == "too many targets":
        assert "32769 states" in case["message"] and "\n" not in case["message"]
    assert all(value < allowed for value in case["errors"].values()), case
    if name == "an impossible target":
        assert case["inf"] == [True, False, False, False] and case["finite"]
    if name == "a loss of 1e-5":
        assert max(case["differences"]) < 1e-9
    if name == "a NaN":
        assert case["nan"] == [False, True, False, False] and case["gradient"] and case["others"]
    if name == "what is dropped":
        assert 0 < case["L1"] <= case["bound"] * 1.001
    if name == "what is dropped with FastEmit":
        assert case["share"] > 0
    if name == "sizes that do not fit":
        assert len(case["refused"]) == 3
    if name == "repeats":
        assert case["same"]


def test_every_case_is_asked(interpreted, thorough):
    assert set(interpreted) == set(CASES) if thorough else set(interpreted) < set(CASES)


COMPILED = [
    *((architecture, 500, dtype) for architecture in (80, 86, 89, 90, 100) for dtype in ("float32", "bfloat16")),
    *((architecture, 4096, dtype) for architecture in (80, 90) for dtype in ("float32", "bfloat16")),
    *((90, 501, dtype) for dtype in ("float32", "bfloat16")),  # with an odd H too
    (90, 500, "float16"),
]
#: Those that are compiled without --thorough: a fresh checkout needs a quarter of a minute for each.
COMMON = [(80, 500, "bfloat16")]
#: What of PTX multiplies matrices on the tensor cores of each architecture.
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
PERSISTENT = ("arcs_of_cells", "gradients_of_cells")
PRODUCTS = ("log_probabilities", "logit_gradients", "input_gradients", "weight_gradients", *PERSISTENT)


@pytest.fixture(scope="module")
def launched(once, thorough):
    """Return a function from (architecture, V, dtype) to its launches; all are of one process, which takes the place of
    Triton's driver.  It skips the test of a case that is compiled with --thorough alone."""
    cases = COMPILED if thorough else COMMON
    made = dict(zip(cases, once("launched", "compiled_launches.py", *(word for case in cases for word in case))))

    def of_case(*case):
        return made[case] if case in made else pytest.skip("with --thorough")

    return of_case


RECIPES = (80, 500, "bfloat16", 90, 500, "float32", 90, 500, "bfloat16")


@pytest.mark.thorough
def test_the_kernels_of_a_recipe_fit_a_gpu():
    """The recipe has another activation, dropout and label smoothing."""
    for made in lines_of("compiled_launches.py", "recipe", *RECIPES):
        for name, kernel in made["kernels"].items():
            assert kernel["shared"] <= made["most_shared"] and kernel["stack"] <= 200, (name, kernel)


@pytest.mark.parametrize("architecture, V, dtype", COMPILED)
def test_kernels_as_they_are_launched_fit_a_gpu(architecture, V, dtype, launched):
    made = launched(architecture, V, dtype)
    for name, kernel in made["kernels"].items():
        assert kernel["shared"] <= made["most_shared"] and kernel["stack"] <= 200, (name, kernel)
        assert dtype == "float16" or kernel["stack"] <= 128, (name, kernel)
        assert name not in PRODUCTS or kernel["unit"] == TENSOR_CORES[architecture], (name, kernel)
    for launch in made["launches"]:
        if launch["kernel"] in ("logit_gradients", "input_gradients"):
            assert 0 <= launch["grid"][0] * launch["BM"] - launch["rows"] < launch["BM"], launch
    for name in ("log_probabilities", "logit_gradients", *PERSISTENT):
        programs = [launch["grid"][0] for launch in made["launches"] if launch["kernel"] == name]
        waves = 1 if name in PERSISTENT else 2
        assert not programs or max(programs) >= waves * made["multiprocessors"], name


@pytest.mark.parametrize("architecture, V, dtype", [case for case in COMPILED if case[2] != "float32"])
def test_activations_of_16_bits_are_kept_where_they_fit(architecture, V, dtype, launched):
    names = set(launched(architecture, V, dtype)["kernels"])
    assert ("arcs_of_cells" in names) == (architecture in (80, 90))
    assert ("gradients_of_cells" in names) == (architecture in (80, 90) and dtype == "bfloat16")
    assert ("activate" in names) == (not names.issuperset(PERSISTENT))


@pytest.mark.parametrize(
    "capability, H, options, kept",
    [((8, 0), 511, {}, True), ((9, 0), 640, {}, False), ((8, 0), 320, {}, False), ((9, 0), 320, {}, True)]
    + [((8, 0), 512, {"activation": "gelu"}, False), ((9, 0), 512, {"activation": "gelu"}, True)]
    + [((8, 6), 512, {}, False), ((10, 0), 512, {}, False), ((9, 0), 512, {"topology": "modified"}, False)],
)
def test_activations_are_kept_where_it_pays(capability, H, options, kept, monkeypatch):
    from fused_transducer import triton_backend
    from fused_transducer.call import Call

    monkeypatch.setattr(triton_backend, "_gpu", lambda device: triton_backend.Gpu(100, capability))
    case = problem([(4, 2), (3, 1)], H=H, V=500, dtype=torch.bfloat16)
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths, 0, "tanh", 0.0, 0.0, 0)
    launch = triton_backend._Launch(replace(call, **options))
    assert bool(triton_backend._kept("gradients_of_cells", torch.bfloat16, launch)) == kept
    assert not triton_backend._kept("gradients_of_cells", torch.float32, launch)


@pytest.mark.thorough
def test_fifty_batches_compile_few_kernels_and_launch_them_seldom():
    for made in lines_of("compiled_launches.py", "specialisations", 90, 500, "float32", 90, 500, "bfloat16"):
        assert made["specialisations"] <= 12, made["by_kernel"]
        assert max(made["launches"]) <= 100


@pytest.mark.parametrize(
    "name, value, wrong",
    [("T_lengths", 4, False), ("T_lengths", 0, True), ("T_lengths", 5, True), ("U_lengths", 0, False)]
    + [("U_lengths", -1, True), ("U_lengths", 3, True), ("targets", 10, False), ("targets", 11, True)]
    + [("targets", -1, True)],
)
def test_one_number_says_whether_a_length_or_target_is_outside(name, value, wrong):
    from fused_transducer.call import Call, any_outside

    case = problem([(4, 2), (3, 1)], dtype=torch.float32)
    case.targets[1, 1] = -100  # of no target
    getattr(case, name).view(-1)[0] = value
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths, 0, "tanh", 0.0, 0.0, 0)
    assert any_outside(call).item() == wrong


def test_half_precision_needs_tensor_cores(monkeypatch):
    from fused_transducer import triton_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "7.5" in triton_backend.unavailable("cuda", torch.bfloat16)
    assert "7.5" in triton_backend.unavailable("cuda", torch.float16)
    assert not triton_backend.unavailable("cuda", torch.float32)


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch):
    from fused_transducer import triton_backend
    from fused_transducer.call import Call

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
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths, 0, "tanh", 0.0, 0.0, 0)
    empty = torch.empty(0)
    triton_backend.forward(call, True, empty, empty, empty, empty)
    triton_backend.backward(call, empty, empty, empty, [])
    assert launched == [[torch.device("cuda:1")]] * 2


# -- with a GPU ----------------------------------------------------------------------------------------------------


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
def test_on_a_side_stream():
    case = problem([(90, 30), (70, 41)], H=200, V=500, dtype=torch.float32, scale=0.2, negligible=0.0)
    losses, _ = right(case, large=True)
    case = on_gpu(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made, _ = computed(case)
    stream.synchronize()
    assert error(made.cpu(), losses) < 5e-6


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


def test_more_cells_than_kernels_count_are_refused(monkeypatch):
    from fused_transducer import triton_backend
    from fused_transducer.call import Call

    monkeypatch.setattr(triton_backend, "_gpu", lambda device: triton_backend.Gpu(100, (9, 0)))
    case = problem([(4, 2)], H=8, V=500)
    encoder, decoder, *layer = case.tensors
    tensors = (encoder[:, :1].expand(40, 7000, 8), decoder[:, :1].expand(40, 7000, 8), *layer)
    targets, lengths = torch.ones(40, 6999, dtype=torch.int64), torch.full((40,), 6999)
    with pytest.raises(ValueError, match="1,960,000,000 cells"):
        triton_backend._Launch(Call(*tensors, targets, lengths, lengths, 0, "tanh", 0.0, 0.0, 0))
