"""Windows of fused_transducer: against every path, against the ranges of fast_rnnt and k2, what is not computed."""

from __future__ import annotations

import math
import os
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_transducer import TransducerLoss, native, transducer_loss, window_of
from fused_transducer.call import Call
from rnnt_bench.core.implementations import find, load
from rnnt_bench.core.settings import Settings
from rnnt_bench.setup import interpreters

from fused_helpers import LATTICES, NAMES, Problem, computed, error, lattice_problem, logits_of, problem, use
from test_oracle import PARAMETERS, summed_over_paths

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
#: (T, U), and windows of its labels: around a path, of a single frame, in any order, over all frames, without a path.
WINDOWS = [
    ((5, 3), [(0, 2), (1, 3), (3, 4)]),
    ((5, 4), [(1, 1), (2, 2), (3, 3), (3, 4)]),
    ((4, 3), [(2, 9), (0, 3), (-5, 2)]),
    ((3, 2), [(0, 2), (0, 2)]),
    ((1, 1), [(0, 0)]),
    ((4, 0), []),
    ((5, 3), [(1, 2), (4, 4), (0, 3)]),
    ((2, 4), [(0, 1), (0, 0), (1, 1), (1, 1)]),
    ((5, 2), [(3, 2), (0, 4)]),
]


def with_windows(topology: str, windows, **options) -> Problem:
    """Return a problem whose utterances have these lengths and windows; in the padding there are other numbers."""
    case = lattice_problem(topology, [lengths for lengths, _ in windows], **{"V": 4, **options})
    window = torch.full((len(windows), case.targets.shape[1], 2), -7)
    for n, (_, of_labels) in enumerate(windows):
        window[n, : len(of_labels)] = torch.tensor(of_labels).view(-1, 2)
    return case.with_options(window=window)


@BACKENDS
@pytest.mark.filterwarnings("ignore:utterance")
@pytest.mark.parametrize("topology", ["regular", *LATTICES])
def test_a_window_is_the_sum_over_the_paths_within_it(topology, backend, monkeypatch):
    use(backend, monkeypatch)
    case = with_windows(topology, WINDOWS, **PARAMETERS.get(topology, {}))
    leaves = case.leaves()
    logits = logits_of(leaves)
    losses = torch.stack(
        [
            summed_over_paths(topology, logits[n], case.targets[n].tolist(), T, U, of_labels)
            for n, ((T, U), of_labels) in enumerate(WINDOWS)
        ]
    )
    losses[losses.isfinite()].sum().backward()
    made, gradients = computed(case)
    finite = losses.isfinite()
    assert 3 <= finite.sum() <= len(WINDOWS) - 2 and torch.equal(made.isfinite(), finite)
    assert error(made[finite], losses[finite].detach()) < 1e-12
    for name, leaf in zip(NAMES, leaves):
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=0, atol=1e-12)


def cells_of_paths(T, U, window):
    """Return the cells (t, u) that the paths of the regular lattice within a window pass."""
    passed = set()

    def go(t, u, cells):
        if (t, u) == (T, U):
            passed.update(cells)
        elif t < T:
            go(t + 1, u, [*cells, (t, u)])
            if u < U and window[u][0] <= t <= window[u][1]:
                go(t, u + 1, [*cells, (t, u)])

    go(0, 0, [])
    return passed


def test_only_cells_that_a_path_passes_are_computed():
    """There is room for no others; where both outputs are infinite, the sum of such a cell would be NaN."""
    case = with_windows("regular", WINDOWS)
    expected = [cells_of_paths(*lengths, window) for lengths, window in WINDOWS]
    call = Call(*case.tensors, case.targets, case.T_lengths, case.U_lengths, window=case.options["window"])
    assert call.cells().tolist() == [len(cells) for cells in expected]
    assert native.room(call) == sum(map(len, expected)) < 0.6 * sum(T * (U + 1) for (T, U), _ in WINDOWS)
    (T, U), window = WINDOWS[0]
    for t, u in {(t, u) for t in range(T) for u in range(U + 1)} - expected[0]:
        case = with_windows("regular", WINDOWS[:1])
        case.tensors[0][0, t, 0], case.tensors[1][0, u, 0] = math.inf, -math.inf
        for backend in ("native", "torch"):
            assert case.loss(case.tensors, backend=backend).isfinite().all(), (t, u, backend)


@BACKENDS
@pytest.mark.parametrize("topology, window, label", [
    ("regular", [(1, 2), (4, 4), (0, 3)], 1), ("modified", [(2, 2), (2, 2), (4, 4)], 0), ("tdt", [(0, 4), (9, 9)], 1),
])  # fmt: skip
def test_a_window_without_a_path_costs_inf_and_names_the_label(topology, window, label, backend, monkeypatch):
    use(backend, monkeypatch)
    right = ((5, len(window)), [(0, 4)] * len(window))
    case = with_windows(topology, [right, ((5, len(window)), window)], **LATTICES.get(topology, {}))
    with pytest.warns(UserWarning, match=f"utterance 1: .* label {label} "):
        losses, gradients = computed(case)
    assert losses.isinf().tolist() == [False, True]
    assert gradients["encoder_out"][0].any() and not gradients["encoder_out"][1].any()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    nowhere = case.with_options(window=case.options["window"][1:].expand(2, -1, -1))
    with pytest.warns(UserWarning, match="utterance 0"):
        losses, posteriors, delays = nowhere.loss(case.tensors, return_posteriors=True, return_delay=True)
    assert losses.isinf().all() and not posteriors.any() and delays.isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.with_options(window=case.options["window"][:1].expand(2, -1, -1)).loss(case.tensors)


@BACKENDS
def test_posteriors_other_options_and_modules_take_a_window(backend, monkeypatch):
    use(backend, monkeypatch)
    case = with_windows("regular", WINDOWS[:6])
    losses, posteriors = case.loss(case.tensors, return_posteriors=True)
    for n, (lengths, window) in enumerate(WINDOWS[:6]):
        cells = {tuple(cell) for cell in posteriors[n].sum(-1).nonzero().tolist()}
        assert cells == cells_of_paths(*lengths, window)
        for u, (first, last) in enumerate(window):
            assert posteriors[n, max(first, 0) : last + 1, u, 1].sum().item() == pytest.approx(1)
    layer = TransducerLoss(output=torch.nn.Linear(12, 4, dtype=torch.float64), reduction="none")
    tensors = (*case.tensors[:2], case.targets, case.T_lengths, case.U_lengths)
    how = {"output": layer.output_linear, "reduction": "none", "window": case.options["window"]}
    expected = transducer_loss(*tensors[:2], None, None, *tensors[2:], **how)
    assert torch.equal(layer(*tensors, window=case.options["window"]), expected)
    assert (expected - layer(*tensors)).max() > 0.1


def test_a_window_of_all_frames_changes_nothing():
    case = lattice_problem("regular", [(9, 4), (6, 2)])
    everything = torch.tensor([0, 8]).expand(2, 4, 2)
    for backend in ("native", "torch"):
        (losses, gradients), (windowed, of_window) = (
            computed(case, backend=backend),
            computed(case, backend=backend, window=everything),
        )
        assert torch.equal(losses, windowed) and all(torch.equal(gradients[name], of_window[name]) for name in NAMES)


def test_window_of_an_alignment():
    frames = torch.tensor([[2, 5, 9], [0, -1, -1]])
    window = window_of(frames, 3, 2, torch.tensor([10, 4]))
    assert window.tolist() == [[[0, 4], [2, 7], [6, 9]], [[0, 2], [0, 3], [0, 3]]]
    for arguments, words in (
        ((frames.double(), 3, 2, torch.tensor([10, 4])), "frames"),
        ((frames, -1, 2, torch.tensor([10, 4])), "left"),
        ((frames, 3, 2.5, torch.tensor([10, 4])), "right"),
        ((frames, 3, 2, torch.tensor([10])), "T_lengths"),
    ):
        with pytest.raises(ValueError, match=words):
            window_of(*arguments)


@pytest.mark.parametrize("window", [torch.zeros(2, 3, 2), torch.zeros(2, 4, 2).long(), [[[0, 1]]]], ids=str)
def test_a_wrong_window_is_one_clear_error(window):
    case = lattice_problem("regular", [(5, 3), (4, 2)])
    with pytest.raises(ValueError, match="window"):
        case.loss(case.tensors, window=window)


#: Reads (am, lm, symbols, boundary, leaves) from the file argv[2]; writes its ranges, losses and gradients there.
PRUNED = """
import importlib, sys, torch
module = importlib.import_module(sys.argv[1])
am, lm, symbols, boundary, leaves = torch.load(sys.argv[2])
shared = {"symbols": symbols, "termination_symbol": 0, "boundary": boundary}
_, gradients = module.rnnt_loss_smoothed(lm=lm, am=am, reduction="sum", return_grad=True, **shared)
ranges = module.get_rnnt_prune_ranges(px_grad=gradients[0], py_grad=gradients[1], boundary=boundary, s_range=5).long()
leaves = [leaf.detach().requires_grad_() for leaf in leaves]
pruned = module.do_rnnt_pruning(am=leaves[0], lm=leaves[1], ranges=ranges)
logits = torch.nn.functional.linear(torch.tanh(sum(pruned)), *leaves[2:])
losses = module.rnnt_loss_pruned(logits=logits, ranges=ranges, reduction="none", **shared)
losses.sum().backward()
torch.save((ranges, losses.detach(), [leaf.grad for leaf in leaves]), sys.argv[2])
"""


@pytest.mark.parametrize("package", ["fast_rnnt", "k2"])
def test_pruned_ranges_are_windows(package, tmp_path):
    """The package's pruned loss of its own ranges, on the joiner that both have, is the loss of their window."""
    python = interpreters.choose(find(f"{package}-pruned"), in_place=False, prefer_here=False).python
    variables = dict(os.environ)
    if python is None:
        pytest.skip(f"no Python here has {package}")
    if package == "fast_rnnt":
        adapter = load("losses.benchmark_fast_rnnt_pruned")(Settings())
        adapter.load("cpu")  # which builds it
        variables["PYTHONPATH"] = str(Path(adapter.module.__file__).parents[1])
    case = problem([(40, 14), (31, 9)], V=20, dtype=torch.float64, negligible=0.0)
    case.targets = 1 + case.targets % 19
    boundary = torch.stack([torch.zeros(2).long(), torch.zeros(2).long(), case.U_lengths, case.T_lengths], 1)
    draw = torch.Generator().manual_seed(3)
    am, lm = (torch.randn(2, size, 20, generator=draw) for size in (40, 15))
    file = tmp_path / "pruned.pt"
    torch.save((am, lm, case.targets, boundary, [leaf.detach() for leaf in case.leaves()]), file)
    subprocess.run([python, "-c", PRUNED, package, file], env=variables, check=True)
    ranges, expected, theirs = torch.load(file, weights_only=True)
    # a label u leads from state u to u + 1, which both are in the range of its frame
    u = torch.arange(case.targets.shape[1]).view(1, -1, 1)
    allowed = (ranges[..., 0].unsqueeze(1) <= u) & (ranges[..., -1].unsqueeze(1) >= u + 1)
    allowed &= torch.arange(40) < case.T_lengths.view(-1, 1, 1)
    first, last = allowed.int().argmax(-1), 39 - allowed.flip(-1).int().argmax(-1)
    case = replace(case, options={**case.options, "window": torch.stack([first, last], -1)})
    losses, gradients = computed(case)
    assert error(losses, expected) < 1e-9
    assert all(error(gradients[name], gradient) < 1e-9 for name, gradient in zip(NAMES, theirs))
    whole = case.loss(case.tensors, window=None)
    assert (losses - whole > 1e-3).all()
