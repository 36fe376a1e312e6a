"""The Triton kernels of each lattice without a GPU: their results in Triton's interpreter, and that they compile."""

from __future__ import annotations

import pytest
import test_fused_triton
from commands import ROOT
from sanitize import LATTICES
from test_fused_triton import PRODUCTS, TENSOR_CORES, lines_of

triton = pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")


once = test_fused_triton.once

#: Those that run without --thorough.
FEW = ("tdt", "modified-last-blank", "star")


@pytest.fixture(scope="module")
def interpreted(once, thorough):
    """Return what tests/interpreted_lattices.py prints: one process for all lattices."""
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return once("lattices", "interpreted_lattices.py", *([] if thorough else ["--few", *FEW]), variables=variables)


@pytest.mark.parametrize("topology", LATTICES)
def test_a_lattice_is_that_of_the_oracle_and_of_the_other_backends(topology, interpreted, thorough):
    if topology not in FEW and not thorough:
        pytest.skip("with --thorough")
    cases = {case["name"]: case for case in interpreted if case["name"].startswith(f"{topology}: ")}
    for name, case in cases.items():
        allowed = {"bfloat16": 3e-2, "thousands of nats": 1e-5}.get(name.split(": ")[1], 5e-6)
        assert all(value < allowed for value in case["errors"].values()), case
    assert cases[f"{topology}: what is dropped"]["share"] > 0
    if not thorough:
        return
    unknown = cases[f"{topology}: a NaN"]
    assert unknown["losses"] == unknown["gradients"] == [False, True, False]
    assert cases[f"{topology}: thousands of nats"]["loss"] > 1000


@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["tdt", "multi-blank", "constrained", "hat"])
def test_the_kernels_of_a_lattice_fit_a_gpu(topology):
    for made in lines_of("compiled_launches.py", topology, 80, 500, "float32", 90, 500, "bfloat16"):
        unit = TENSOR_CORES[80 if made["multiprocessors"] == 108 else 90]
        for name, kernel in made["kernels"].items():
            assert kernel["shared"] <= made["most_shared"] and kernel["stack"] <= 128, (name, kernel)
            assert name not in PRODUCTS or kernel["unit"] == unit, (name, kernel)
        assert ("walk" in made["kernels"]) == (topology != "hat")
