"""The Triton kernels: results in Triton's interpreter, that they compile for GPUs, and what needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import fused_transducer
import numpy
import pytest
import torch
from fused_transducer import align, call, transducer_loss, window_of
from fused_transducer.call import Call, any_outside, backend_of
from fused_transducer.lattices import SMOOTHABLE

from commands import ROOT
from fused_helpers import (
    LATTICES,
    NAMES,
    Problem,
    certain,
    computed,
    error,
    errors,
    interpret_faster,
    lattice_problem,
    problem,
    right,
)

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")
triton_backend = pytest.importorskip("fused_transducer.triton_backend")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def lines_of(*words, variables=()):
    """Return the lines of JSON that Python prints, called with these words."""
    command, environment = [sys.executable, *map(str, words)], {**os.environ, **dict(variables)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


COMPILED = [
    *((architecture, 500, dtype) for architecture in (80, 86, 89, 90, 100, 120) for dtype in ("float32", "bfloat16")),
    *((architecture, 4096, dtype) for architecture in (80, 90) for dtype in ("float32", "bfloat16")),
    *((90, 501, dtype) for dtype in ("float32", "bfloat16")),  # with an odd H too
    (90, 500, "float16"),
]
OF_OTHER_CALLS = ("tdt", "multi-blank", "constrained", "hat", "shared", "window", "modified in a window")
#: What of PTX multiplies matrices on the tensor cores of each architecture.
TENSOR_CORES = {**dict.fromkeys((80, 86, 89, 120), "mma.sync"), 90: "wgmma", 100: "tcgen05.mma"}
PRODUCTS = ("log_probabilities", "logit_gradients", "input_gradients", "weight_gradients")


@pytest.mark.parametrize(
    "lattice",
    ["", *(pytest.param(name, marks=pytest.mark.thorough) for name in OF_OTHER_CALLS)],
)
def test_kernels_as_they_are_launched_fit_a_gpu(lattice, thorough):
    cases = [(80, 500, "float32"), (90, 500, "bfloat16")] if lattice else COMPILED if thorough else COMPILED[1:2]
    words = (word for case in cases for word in case)
    for case, made in zip(
        cases, lines_of(ROOT / "tests" / "compiled_launches.py", *([lattice] if lattice else []), *words)
    ):
        for name, kernel in made["kernels"].items():
            most = 200 if case[2] == "float16" else 128
            assert kernel["shared"] <= made["most_shared"] and kernel["stack"] <= most, (case, name, kernel)
            assert not kernel["narrow"], (case, name, kernel)  # rows times cells may be more than 2^31
            assert name not in PRODUCTS or kernel["unit"] == TENSOR_CORES[case[0]], (case, name, kernel)
        assert ("walk" in made["kernels"]) == (lattice in ("tdt", "multi-blank", "constrained", "modified in a window"))
        for launch in made["launches"]:
            if launch["kernel"] in ("logit_gradients", "input_gradients"):
                assert 0 <= launch["grid"][0] * launch["BM"] - launch["rows"] < launch["BM"], launch
        for name in ("log_probabilities", "logit_gradients"):
            programs = [launch["grid"][0] for launch in made["launches"] if launch["kernel"] == name]
            assert max(programs) >= 2 * made["multiprocessors"], (case, name)


RANGES = [("T_lengths", 1, 4), ("U_lengths", 0, 2), ("targets", 0, 10), ("utterance_of", 0, 1)]


@pytest.mark.parametrize("name, least, most", RANGES)
def test_one_number_says_whether_what_indexes_a_tensor_is_outside(name, least, most):
    case = problem([(4, 2), (3, 1)], dtype=torch.float32)
    case.targets[1, 1] = -100  # of no target
    integers = {"targets": case.targets, "T_lengths": case.T_lengths, "U_lengths": case.U_lengths}
    integers["utterance_of"] = torch.tensor([0, 1])
    for value in (least - 1, least, most, most + 1):
        integers[name].view(-1)[0] = value
        call = Call(*case.tensors, **integers)
        assert any_outside(call).item() == (not least <= value <= most)


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


def test_an_amd_gpu_runs_the_plain_code_with_a_warning(monkeypatch):
    """Its compute capability says 9.0 or 9.4, as Hopper's; the kernels want more shared memory than it has."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.delenv("FUSED_TRANSDUCER_BACKEND", raising=False)
    call._warn_of_torch.cache_clear()
    with pytest.warns(UserWarning, match="AMD"):
        assert [backend_of("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)] == ["torch", "torch"]
    with pytest.raises(ValueError, match="AMD"):
        backend_of("cuda", torch.float32, "triton")


def test_a_gpu_of_99_kb_of_shared_memory_takes_the_small_blocks():
    gpus = [triton_backend.Gpu(100, capability) for capability in ((8, 9), (12, 0), (9, 0), (10, 3))]
    small, other, large, same = (triton_backend._blocks("logits", torch.float32, launched(gpu)) for gpu in gpus)
    assert small == other != large == same


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
    triton_backend.forward(call, True, empty, empty, empty)
    triton_backend.backward(call, empty, empty, empty, [])
    assert launched == [[torch.device("cuda:1")]] * 2


def on_gpu(case):
    integers = (tensor.cuda() for tensor in (case.targets, case.T_lengths, case.U_lengths))
    return Problem([tensor.cuda() for tensor in case.tensors], *integers, case.options)


#: A GPU's errors beside the interpreter's, whose exp is exact to the last bit: 7.6e-6 for 5e-6 on an H200.
OF_A_GPU = 4


@needs_gpu
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
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
        return triton_backend._Launch(Call(*tensors, targets, lengths, lengths), N * T * (U + 1))


def test_any_number_of_cells_is_taken():
    for N in (10, 40, 80):  # rows times cells, and cells, are more than 2^31
        assert launched(triton_backend.Gpu(100, (9, 0)), (N, 7000, 6999)).cells == N * 7000**2


def test_lengths_on_the_host_are_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(Call, "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph.*lengths must be on cuda:1"):
        launched(triton_backend.Gpu(100, (9, 0)))


# -- in the interpreter: in a process of its own, since Triton reads TRITON_INTERPRET once -------------------------

FEW = "--few" in sys.argv
RAGGED = [(5, 2), (3, 3), (1, 1), (2, 0)]
EXACT = {"dtype": torch.float32, "backend": "triton", "negligible": 0.0}
HALF = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def report(name, errors, allowed=5e-6, right=True):
    print(json.dumps({"name": name, "errors": errors, "allowed": allowed, "right": bool(right)}), flush=True)


def made(lengths=RAGGED, **options):
    return problem(lengths, **{**EXACT, **options})


def of_options():
    """Pairs of options that share no kernel's branch come once; every activation and dtype, odd sizes, a last blank."""
    cases = {
        "float32": made(),
        "relu, no bias": made(activation="relu", bias=False),
        "none, blank last": made(activation="none", blank=10),
        "leaky_relu, more than a tile": made([(6, 3), (4, 4)], activation="leaky_relu", tile_cells=20),
        "dropout, more than a block": made([(20, 7)], H=140, V=150, scale=0.4, dropout=0.2, dropout_seed=2**40 + 5),
        "dropout, bfloat16": made(H=40, dtype=torch.bfloat16, scale=0.5, dropout=0.6, dropout_seed=-7),
        "float16": made(H=40, V=150, dtype=torch.float16, scale=0.4),
        "odd H and V, sigmoid": made(H=37, V=41, scale=0.4, activation="sigmoid"),
        **{name: made([(4, 2), (3, 1)], activation=name) for name in ("silu", "gelu", "selu", "hardtanh")},
        "odd H and V, bfloat16": made(H=31, V=77, dtype=torch.bfloat16, scale=0.4, activation="relu"),
        "T < U, blank in the middle": made([(2, 4), (1, 2)], blank=5),
    }
    for name, case in cases.items():
        report(name, errors(case), HALF[case.tensors[0].dtype])
    precision = triton_backend._precision
    triton_backend._precision = lambda gpu, dtype: "tf32x3"
    report("the weight's halves", errors(cases["odd H and V, sigmoid"]))
    triton_backend._precision, adders, triton_backend.ADDERS = precision, triton_backend.ADDERS, 2
    report("more frames and states than programs", errors(cases["leaky_relu, more than a tile"]))
    triton_backend.ADDERS = adders


def of_numbers():
    """Numbers that are large, small, not finite, or of no utterance."""
    long = made([(48, 20) if FEW else (120, 50)], H=24, V=200, scale=0.5, seed=1)
    report("a long path", errors(long, right(long, large=True)))
    apart = made([(4, 2), (3, 2)])
    apart.tensors[2] *= 1e4 / apart.tensors[2].abs().max()
    report("logits of 10,000", errors(apart), 1e-3)

    sure = certain(20, 6, 40, backend="triton")
    (losses, gradients), (expected_losses, expected) = computed(sure), right(sure, large=True)
    differences = [(gradients[name] - expected[name]).abs().max().item() for name in NAMES]
    report("a loss of 1e-5", {"loss": error(losses, expected_losses)}, 1e-6, max(differences) < 1e-9)

    case = made()
    case.tensors[0][1, 2, 0] = float("nan")
    losses, gradients = computed(case)
    nan = [bool(gradients["encoder_out"][n].isnan().any()) for n in range(4)]
    leaves = case.leaves()
    case.loss(leaves, utterance_weights=torch.tensor([1.0, 0.0, 1.0, 1.0])).sum().backward()
    left_out = all(leaf.grad.isfinite().all() for leaf in leaves)
    leaves = case.leaves()
    loss, skipped = case.loss(leaves, nonfinite="skip", return_skipped=True)
    loss.sum().backward()
    left_out &= skipped.tolist() == [False, True, False, False]
    left_out &= all(leaf.grad.isfinite().all() for leaf in leaves)
    with pytest.raises(ValueError, match="utterance 1.*frame 2"):
        case.loss(leaves, nonfinite="raise")
    report("a NaN", {}, right=left_out and losses.isnan().tolist() == nan == [False, True, False, False])

    for topology in ("regular", "hat"):
        for tensor, place in ((3, 9), (1, (0, 0, 0))):  # of one symbol, and of all symbols of a position
            case = lattice_problem(topology, [(5, 2), (1, 0)], **EXACT)
            case.tensors[tensor][place] = float("nan")
            wrong, both = computed(case)[0].isnan().tolist(), topology == "regular" and tensor == 3
            report(f"{topology}: a NaN of {NAMES[tensor]}", {}, right=wrong == [True, both])

    case = made()
    case.targets[:], case.targets[0, 1], case.tensors[3][5] = 1, 5, -float("inf")
    losses, gradients = computed(case)
    finite = all(gradient.isfinite().all() for gradient in gradients.values())
    report("an impossible target", {}, right=finite and losses.isinf().tolist() == [True, False, False, False])

    case = made()
    case.targets[:, 1] = 0
    report("a target that is the blank", errors(case))


UPSTREAM = {
    "one": lambda losses: losses.sum(),
    "-2": lambda losses: -2 * losses.sum(),
    "0": lambda losses: 0 * losses.sum(),
    "each utterance's": lambda losses: (losses * torch.tensor([0.5, -1.0, 3.0])[: losses.numel()]).sum(),
    "every second number": lambda losses: torch.stack([losses, losses], -1).mul(torch.tensor([-0.5, 1.5])).sum(),
}


def of_calls():
    _, expected = right(made())
    frozen = {}
    for wanted in NAMES:
        leaves = [tensor.detach().requires_grad_(name == wanted) for name, tensor in zip(NAMES, made().tensors)]
        made().loss(leaves).sum().backward()
        frozen[wanted] = error(leaves[NAMES.index(wanted)].grad, expected[wanted])
    report("frozen inputs", frozen)
    expanded = made([(4, 2), (3, 2)])
    expanded.tensors[0] = expanded.tensors[0][:, :1].expand(2, 4, -1)
    report("expanded inputs", errors(expanded))

    for dtype, allowed in HALF.items():
        of_dtype = made([(5, 2), (3, 2), (4, 1)], dtype=dtype, scale=0.4)
        reductions = ("none", "sum", "mean") if dtype == torch.float32 else ("none",)
        for number, (name, weigh) in enumerate(UPSTREAM.items()):
            by_backend = []
            for backend in ("triton", "torch"):
                leaves = of_dtype.leaves()
                reduction = reductions[number % len(reductions)]
                weigh(of_dtype.loss(leaves, reduction=reduction, backend=backend)).backward()
                by_backend.append([leaf.grad for leaf in leaves])
            report(f"upstream {name}, {dtype}", dict(zip(NAMES, map(error, *by_backend))), allowed)

    rows = made([(5, 2), (3, 3), (1, 1), (2, 0), (4, 1)], scale=0.4, tile_cells=16).sharing([1, 0, 1, 3, 0])
    expected, (first, *again) = right(rows), [computed(rows) for _ in range(3)]
    same_bits = all(torch.equal(first[1]["encoder_out"], other[1]["encoder_out"]) for other in again)
    report("rows that share an encoder", errors(rows, expected), right=same_bits)
    report("and in bfloat16", errors(made(dtype=torch.bfloat16, scale=0.4).sharing([1, 1, 0, 0])), 3e-2)

    long = made([(1, 2**15)], H=1, V=2)
    with pytest.raises(ValueError, match="32769 states"):
        long.loss(long.tensors)


def of_lattice(topology):
    def on(lengths=((5, 2), (4, 1), (3, 0)), **options):
        return lattice_problem(topology, lengths, **{**EXACT, "scale": 0.5, **options})

    case = on([(5, 2), (3, 4), (1, 2), (4, 0)])  # T < U and T = 1 among them: some have no path
    expected, of_finite = right(case)
    case.spoil_padding()
    case.tensors[2] = case.tensors[2].t().contiguous().t()
    losses, gradients = computed(case)
    finite = expected.isfinite()
    of_case = {"loss": error(losses[finite], expected[finite])}
    of_case.update({name: error(gradients[name], of_finite[name]) for name in NAMES})
    nothing = gradients["encoder_out"][~finite].abs().sum() == 0
    report(f"{topology}: no path", of_case, right=nothing and torch.equal(losses.isinf(), ~finite))

    case, by_backend = on(negligible=0.3), []
    for backend in ("triton", "native"):
        leaves = case.leaves()
        frames = torch.tensor([[0, 2], [1, -1], [-1, -1]])
        how = {"return_posteriors": True, "return_delay": True, "reference_frames": frames}
        losses, posteriors, delays = case.loss(leaves, backend=backend, **how)
        (losses * torch.tensor([1.0, -2.0, 0.0])).sum().backward()
        by_backend.append([posteriors, delays[:2], *(leaf.grad for leaf in leaves)])
    of_each, of_cells = dict(zip(("posteriors", "delays", *NAMES), map(error, *by_backend))), by_backend[0][0].sum(-1)
    report(f"{topology}: negligible cells", of_each, right=((0 < of_cells) & (of_cells < 0.3)).any())

    case = on([(9, 3), (6, 4), (5, 2), (4, 0)], negligible=0.3)
    frames = torch.tensor([[2, 5, 6, 0], [0, 1, 3, 5], [4, 0, 0, 0], [0, 0, 0, 0]])  # the third has no path
    case.options["window"], by_backend = window_of(frames, 2, 1, case.T_lengths), []
    for backend in ("triton", "native"):
        leaves = case.leaves()
        losses, posteriors = case.loss(leaves, backend=backend, return_posteriors=True)
        losses[losses.isfinite()].sum().backward()
        by_backend.append([losses.nan_to_num(posinf=0), posteriors, *(leaf.grad for leaf in leaves)])
    of_each = dict(zip(("loss", "posteriors", *NAMES), map(error, *by_backend)))
    report(f"{topology}: a window", of_each, right=losses.isinf().tolist() == [False, False, True, False])

    many = {"V": 259, "H": 37, "blank": 130, "tile_cells": 9, "fastemit_lambda": 0.3, "delay_penalty": 0.1}
    many.update(activation="sigmoid", dropout=0.3, dropout_seed=5, clamp=0.1)
    case = on(**many, label_smoothing=0.1 if topology in SMOOTHABLE else 0.0)
    (losses, gradients), (expected_losses, expected) = computed(case), computed(case, backend="native")
    report(f"{topology}: every option, loss", {"loss": error(losses, expected_losses)})
    report(f"{topology}: every option", {name: error(gradients[name], expected[name]) for name in NAMES})
    given = (*on().tensors, on().targets, on().T_lengths, on().U_lengths)
    of_lattice = {"topology": topology, **LATTICES.get(topology, {})}
    paths = (align(*given, backend=name, confidence_span=1, **of_lattice) for name in ("triton", "native"))
    report(f"{topology}: best paths", dict(zip(("frames", "scores", "confidences"), map(error, *paths))))
    if FEW:
        return
    report(f"{topology}: FastEmit", errors(on(fastemit_lambda=0.3, delay_penalty=0.1, blank=10)))
    report(f"{topology}: bfloat16", errors(on(dtype=torch.bfloat16)), 3e-2)
    for durations in {"tdt": [[1, 2, 4], [0, 3], [2, 2]], "multi-blank": [[30_000], [3, 3]]}.get(topology, ()):
        report(f"{topology}: durations {durations}", errors(on([(6, 2), (12, 1), (6, 0)], durations=durations)))
    case = on([(24, 8)], H=24, seed=1)
    case.tensors[3][10] += 150
    case.targets[case.targets == 10] = 1
    report(f"{topology}: thousands of nats", errors(case), 1e-5, right(case)[0].item() > 1000)


def interpreted():
    """Solve the cases in the interpreter, where torch has no GPU."""
    warnings.simplefilter("ignore")  # numpy's, of -inf minus -inf where Triton chooses another value
    numpy.seterr(all="ignore")
    interpret_faster()
    all_cases(["regular", "tdt", "modified-last-blank"] if FEW else ["regular", *LATTICES])
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    report("TF32 by torch's new setting", errors(made()))


def on_cuda(topologies):
    """Solve the cases on the GPU: what the Triton backend gets is copied there, and what it returns comes back."""

    def moved(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    def loss(case, leaves, **options):
        options = {"reduction": "none", **case.options, **options}
        given = [*leaves, case.targets, case.T_lengths, case.U_lengths]
        if options.get("backend") != "triton":
            return transducer_loss(*given, **options)
        options = {name: moved(value) for name, value in options.items()}
        results = transducer_loss(*map(moved, given), **options)
        return results.cpu() if isinstance(results, torch.Tensor) else tuple(result.cpu() for result in results)

    def best_path(*given, backend, **options):
        given = map(moved, given) if backend == "triton" else given
        return [tensor.cpu() for tensor in fused_transducer.align(*given, backend=backend, **options)]

    Problem.loss = loss
    globals()["align"] = best_path
    all_cases(topologies)


def all_cases(topologies):
    """Print a line of JSON for each case: name, errors, the largest that is allowed, whether the rest is right."""
    if "regular" in topologies:
        of_options()
        of_numbers()
        of_calls()
    for topology in topologies:
        of_lattice(topology)


def right_cases(call, *words, variables=(), factor=1):
    """Return the cases that `call` of this file prints, each right within `factor` times what is allowed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, **dict(variables)}
    cases = lines_of("-c", f"import test_fused_triton; test_fused_triton.{call}", *words, variables=variables)
    for case in cases:
        assert case["right"] and all(value < factor * case["allowed"] for value in case["errors"].values()), case
    return cases


def test_in_the_interpreter(thorough):
    words = [] if thorough else ["--few"]
    assert len(right_cases("interpreted()", *words, variables={"TRITON_INTERPRET": "1"})) > 50


@needs_gpu
@pytest.mark.parametrize("topology", ["regular", *LATTICES])
def test_cases_of_the_interpreter_on_the_gpu(topology):
    assert len(right_cases(f"on_cuda([{topology!r}])", factor=OF_A_GPU)) > 5
