"""Every lattice can be ranked, what cannot run says why, and kernels for CUDA are judged in the simulators."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from losses import nemo_package
from losses.benchmark_transformers import Transformers
from rnnt_bench.conformance.judge import simulator
from rnnt_bench.core import settings
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import IMPLEMENTATIONS, LATTICES, OF_FUSED, find, with_variants
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.losses import inputs, judge, layouts, step, subject
from rnnt_bench.losses.subject import Context

pytestmark = pytest.mark.environment_contract

ROOT = Path(__file__).resolve().parents[1]
#: numba's simulator waits in a loop for its threads, which get Python's lock only when that loop has to give it up.
PYTEST = "import sys, pytest; sys.setswitchinterval(1e-4); sys.exit(pytest.main(sys.argv[1:]))"


def adapter_of(implementation):
    return importlib.import_module(implementation.script).ADAPTER(settings.resolve({"preset": "quick"}, "cpu"))


SIMULATED = [implementation for implementation in IMPLEMENTATIONS if adapter_of(implementation).simulator]


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", SIMULATED, ids=lambda implementation: implementation.name)
def test_the_contract_holds_in_the_simulator(implementation):
    if importlib.util.find_spec(implementation.package) is None:
        pytest.skip(f"{implementation.package} is not installed")
    chosen = f"{implementation.name} and every_row"
    line = [sys.executable, "-c", PYTEST, "tests/test_contract.py", "-q", "-k", chosen, "-p", "no:cacheprovider"]
    environment = {**os.environ, **adapter_of(implementation).simulator}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout + done.stderr


@pytest.mark.parametrize("implementation", SIMULATED, ids=lambda implementation: implementation.name)
def test_a_simulator_is_never_timed(implementation, monkeypatch):
    adapter = adapter_of(implementation)
    with pytest.raises(NotRunnable, match=f"in the simulator of {adapter.simulator_variables}"):
        adapter.load("cpu")
    for name, value in adapter.simulator.items():
        monkeypatch.setenv(name, value)
    context = Context(adapter.settings, adapter, *5 * [None])
    monkeypatch.setattr(subject, "prepare", lambda job: context)
    monkeypatch.setattr(subject, "environment", lambda given: None)
    for name in ("timing", "memory", "trace"):
        with pytest.raises(NotRunnable, match="use --passes correctness"):
            list(subject.run(JobSpec(adapter.settings, pass_name=name)))


def test_each_lattice_has_losses_to_rank_a_row_of_fused_among_them():
    TOPOLOGIES = pytest.importorskip("fused_transducer.lattices", exc_type=ImportError).TOPOLOGIES  # torch 2
    assert {*TOPOLOGIES, "delay-penalty", "windowed"} == {"regular", *OF_FUSED} and set(OF_FUSED) <= set(LATTICES)
    for lattice in ("exact", *OF_FUSED):
        assert {"torch", "fused_transducer"} <= {row.package for row in with_variants() if row.kind == lattice}
    for name in ("torchaudio", "optimized_transducer", "fast_rnnt", "k2", "warp-rnnt", "warp-transducer", "nemo"):
        assert find(f"{name}:hat").kind == "hat"  # each takes log-probabilities


def test_a_variant_that_runs_on_a_cpu_is_not_simulated_and_an_exponential_overflows_as_on_a_gpu():
    assert simulator(find("nemo-multi-blank"), "cpu") == {"NUMBA_ENABLE_CUDASIM": "1"}
    assert simulator(find("nemo-multi-blank:pytorch"), "cpu") == simulator(find("nemo-multi-blank"), "cuda") == {}
    assert nemo_package.exponential(0) == 1 and nemo_package.exponential(1e4) == float("inf")


def kernel_of(monkeypatch, get_kernel):
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    adapter = Transformers(settings.resolve({"preset": "quick", "vocab_size": 9, "encoder_dim": 8}, "cpu"), "kernel")
    adapter.load("cuda")
    return adapter


def test_a_kernel_that_the_hub_does_not_give_is_missing_and_says_why(monkeypatch):
    def get_kernel(name, version):
        raise OSError("no route to the hub\nlong story")

    with pytest.raises(NotRunnable, match=r"tdt-loss cannot be loaded from the Hugging Face hub: no route to the hub$"):
        kernel_of(monkeypatch, get_kernel)
    with pytest.raises(NotRunnable, match="transformers:kernel has no cpu version"):
        Transformers(settings.resolve({"preset": "quick"}, "cpu"), "kernel").load("cpu")


def test_a_kernel_of_the_hub_is_called_as_transformers_is(monkeypatch):
    pytest.importorskip("transformers")
    from transformers.loss import loss_tdt

    adapter = kernel_of(monkeypatch, lambda name, version: loss_tdt)
    where = torch.device("cpu")
    model = layouts.of(adapter).model(where, torch.float32)
    batch = inputs.make_batch(
        [(6, 3), (4, 1)], vocab_size=9, encoder_dim=8, device=where, dtype=torch.float32, key=(1, 1)
    )
    ready = partial(step.prepare, adapter, model, batch, "loss")
    answer = judge.ask(lambda: (adapter, model, [ready()]), "loss")
    assert answer.loss_error < 1e-5 and answer.grad_error < 1e-4 and adapter.version() == "1"
