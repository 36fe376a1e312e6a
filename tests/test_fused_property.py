"""fused_transducer against the oracle over drawn shapes, dtypes, strides, lengths and options."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis draws the examples: pip install hypothesis")

from fused_helpers import ACTIVATIONS, Problem, computed, error, problem, right  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402
from hypothesis.internal.constants_ast import Constants  # noqa: E402
from sanitize import LATTICES  # noqa: E402

ALLOWED = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: Of the losses; bfloat16 activations may be rounded before the product.
ALLOWED_LOSS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 1e-5}


@pytest.fixture(autouse=True, scope="module")
def the_same_examples_in_every_order():
    """hypothesis draws constants from the source of the modules that are loaded, which are those of the tests before;
    it wakes lazy modules to find their files, and SpeechBrain's end in an ImportError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", Constants)
        yield


def spread(tensor: torch.Tensor, order: int, step: int) -> torch.Tensor:
    """The same values, with dimensions laid out in another order and gaps between them."""
    dims = list(range(tensor.dim()))
    dims = dims[order % len(dims) :] + dims[: order % len(dims)]
    back = [dims.index(d) for d in range(tensor.dim())]
    return torch.stack([tensor.permute(dims)] * step, -1)[..., 0].permute(back)


@st.composite
def lattices(draw) -> Dict[str, Any]:
    """Options of a lattice, every third time of the regular one."""
    topology = draw(st.sampled_from([*LATTICES, *(["regular"] * 4)]))
    options: Dict[str, Any] = {"topology": topology}
    if topology in ("tdt", "multi-blank"):
        least = 0 if topology == "tdt" else 1
        options["durations"] = draw(st.lists(st.integers(least, 9), min_size=1, max_size=6).filter(any))
        options["sigma"] = draw(st.sampled_from([0.0, 0.05]))
    if topology == "star":
        options["skip"] = draw(st.sampled_from([0.0, -3.0]))
    return options


@st.composite
def problems(draw) -> Problem:
    lengths = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), min_size=1, max_size=4))
    V = draw(st.integers(1, 70))
    case = problem(
        lengths,
        H=draw(st.integers(1, 50)),
        V=V,
        dtype=draw(st.sampled_from(list(ALLOWED))),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        scale=draw(st.sampled_from([0.1, 0.5, 1.0])),
        negligible=0.0,
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        blank=draw(st.integers(0, V - 1)),
        tile_cells=draw(st.sampled_from([None, 1, 5, 64, 10_000])),
        keep_bytes=draw(st.sampled_from([None, 0, 3_000])),
        backend=draw(st.sampled_from(["native", "torch"])),
    )
    if draw(st.booleans()):
        case.options["fastemit_lambda"] = 0.3
    if draw(st.booleans()):
        case.options.update(
            dropout=draw(st.sampled_from([0.1, 0.5])), dropout_seed=draw(st.integers(-(2**63), 2**63 - 1))
        )
    if draw(st.booleans()):
        case.tensors[0] = case.tensors[0][:, :1].expand(case.tensors[0].shape)
    if draw(st.booleans()):
        case.tensors[1] = case.tensors[1][:1].expand(case.tensors[1].shape)
    order, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    case.tensors = [
        tensor if tensor is None or 0 in tensor.stride() else spread(tensor, order, step) for tensor in case.tensors
    ]
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    case.targets, case.T_lengths, case.U_lengths = (
        tensor.to(integers) for tensor in (case.targets, case.T_lengths, case.U_lengths)
    )
    return case


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(problems(), lattices(), st.sampled_from([0.0, 0.2]))
def test_it_is_the_oracles_on_every_lattice(drawn, options, delay_penalty):
    """The last columns drawn are durations'; utterances without a path cost inf and have no gradient."""
    further = len(options.get("durations", ()))
    V = len(drawn.tensors[2])
    hypothesis.assume(V > further + 1)
    blank = drawn.options["blank"] % (V - further)
    case = drawn.with_options(**options, blank=blank, delay_penalty=delay_penalty)
    case.targets = case.targets % (V - further - 1)
    case.targets += case.targets >= blank
    expected_losses, expected = right(case)
    losses, gradients = computed(case)
    assert torch.equal(losses.isinf(), expected_losses.isinf())
    finite, dtype = losses.isfinite(), case.tensors[0].dtype
    scale = max([1e-2, *(gradient.abs().max().item() for gradient in expected.values())])
    losses, expected_losses = losses[finite], expected_losses[finite]
    assert error(losses, expected_losses) < ALLOWED_LOSS[dtype] or expected_losses.abs().max() < 1e-5
    for name, gradient in expected.items():
        assert (gradients[name].double() - gradient).abs().max().item() < ALLOWED[dtype] * scale, name
