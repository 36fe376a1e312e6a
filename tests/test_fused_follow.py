"""fused_transducer's C++ code on logits of a trained model: few cells computed, and the loss of all of them."""

from __future__ import annotations

import pytest
import torch
from fused_helpers import NAMES, Problem, computed, error, problem, right, speech, use

from fused_transducer import align, native, operators
from fused_transducer.call import Call

SHAPES = [(90, 18), (60, 14), (120, 25), (40, 6)]  # as speech() has them
STAGES = ["early", "middle", "trained"]
#: What may be missing of a loss, by the certificate of csrc/follow.h.
ALLOWED = {torch.float32: 1e-9, torch.float64: 1e-16, torch.bfloat16: 1e-9}


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    return use("native", monkeypatch)


def forward(case: Problem, negligible: float = 1e-8):
    """Return (losses, dropped, arcs, for each cell whether forward computed it), of all utterances."""
    options = {name: value for name, value in case.options.items() if name != "fastemit_lambda"}
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    call = Call(*given, **{**options, "negligible": negligible})
    cells = int((case.T_lengths * (case.U_lengths + 1)).sum())
    saved = operators._saved(call, "native", True, cells, cells)
    saved[3].fill_(float("nan"))
    native.forward(call, True, *saved)
    return *saved[:3], ~saved[3].isnan().all(1)


def each(case: Problem, of_cells: torch.Tensor):
    """Return what belongs to the cells of each utterance."""
    return of_cells.split((case.T_lengths * (case.U_lengths + 1)).tolist())


@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_is_that_of_all_cells(stage, dtype):
    """A cell that was left has a posterior below what the loss may miss, and all of them have what is told."""
    case = speech(stage, dtype=dtype)
    losses, dropped, _, computed = forward(case)
    exact, _, arcs, all_computed = forward(case, negligible=0.0)
    assert all_computed.all()
    assert ((losses - exact).abs() <= 1e-14 * exact + ALLOWED[dtype] * exact.clamp(max=1)).all()
    assert (losses >= exact * (1 - 1e-14)).all()  # paths were left, and none added
    posteriors = (arcs[0] + arcs[1]).double()
    for n, (mask, posterior) in enumerate(zip(each(case, computed), each(case, posteriors))):
        left = posterior[~mask]
        assert (left <= ALLOWED[dtype] * min(1.0, exact[n].item())).all()
        assert left.sum() <= dropped[n] * (case.T_lengths[n] + case.U_lengths[n])
    if stage == "trained":
        assert computed.double().mean() < 0.7 and forward(speech("trained", [(300, 60)]))[3].double().mean() < 0.25


def test_a_nan_shows_in_its_utterance_alone_and_random_logits_need_every_cell():
    case = speech("trained")
    case.tensors[0][1, 30, 3] = float("nan")
    assert forward(case)[0].isnan().tolist() == [False, True, False, False]
    case = problem(SHAPES, H=128, V=128, dtype=torch.float32)
    losses, _, _, computed = forward(case)
    assert computed.all() and torch.equal(losses, forward(case, negligible=0.0)[0])


OPTIONS = {
    "dropout": {"dropout": 0.1, "dropout_seed": 5},
    "fastemit": {"fastemit_lambda": 0.5},
    "penalty": {"delay_penalty": 0.01},
    "smoothing": {"label_smoothing": 0.01},
    "some logits kept": {"keep_bytes": 4 * 128 * 1000},
    "hat": {"topology": "hat"},
    "modified": {"topology": "modified"},
    "many symbols": {"V": 1100},
    "blank last": {"blank": 127},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_gradients_of_all_cells(option):
    options = dict(OPTIONS[option])
    case = speech("trained", V=options.pop("V", 128), **options)
    if "blank" in options:  # the last symbol changes places with the blank
        for i in (2, 3):
            case.tensors[i] = case.tensors[i][[127, *range(1, 127), 0]]
    losses, gradients = computed(case)
    exact, expected = computed(case, negligible=0.0)
    assert error(losses, exact) < 1e-7
    assert max(error(gradients[name], expected[name]) for name in NAMES) < 1e-5


def garden(early: float, late: float, turn: int = 20) -> Problem:
    """Return an utterance of case target whose label costs so many nats before frame `turn`, and so many from it on."""
    T, V, H = 40, 128, 64
    case = problem([(T, 1)], H=H, V=V, dtype=torch.float32, activation="none")
    for tensor in case.tensors:
        tensor.zero_()
    case.targets[:] = 1
    case.tensors[0][0, :turn, 0], case.tensors[0][0, turn:, 0] = -early, -late
    case.tensors[2][1, 0] = 1
    case.tensors[3][2:] = -30
    case.tensors[1][0, 1, 1], case.tensors[2][1, 1] = -500, 1  # no second label
    return case


@pytest.mark.parametrize(
    "early, late", [(30, 45), (40, 30), (45, 34), (60, 200), (60, 61), (200, 60), (33, 36), (2, 90)]
)
def test_a_path_that_is_cheap_only_at_first_or_at_last(early, late):
    """All labels but those before, or from, a frame are so improbable that their cells are left at first."""
    case = garden(early, late)
    losses, exact = forward(case)[0], forward(case, negligible=0.0)[0]
    assert ((losses - exact).abs() <= 1e-8 * exact).all()
    assert error(losses, right(case)[0]) < 2e-6


@pytest.mark.parametrize("target", ["blank", "impossible"])
def test_cells_whose_arcs_add_up_to_more_than_1_or_to_nothing(target):
    """Give both arcs of a cell the probability of the blank, or let no path be possible."""
    case = speech("trained")
    if target == "blank":
        case.targets[:, 3] = 0
    else:
        case.tensors[3][case.targets[1, 2]] = -float("inf")
    losses, dropped, _, _ = forward(case)
    exact, _, _, _ = forward(case, negligible=0.0)
    assert torch.equal(losses.isinf(), exact.isinf()) and not dropped.isnan().any()
    finite = exact.isfinite()
    assert ((losses - exact).abs()[finite] <= 1e-9 * exact[finite].abs()).all()


def test_posteriors_and_the_best_path_are_those_of_all_cells():
    case = speech("trained")
    _, posteriors = case.loss(case.tensors, return_posteriors=True)
    _, exact = case.loss(case.tensors, return_posteriors=True, negligible=0.0)
    assert (posteriors - exact).abs().max() < 1e-6
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    assert torch.equal(align(*given)[0], align(*given, backend="torch")[0])
