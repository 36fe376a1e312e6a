"""Kernels for CUDA alone, judged without a GPU: the contract again, with the simulator of each package switched on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.core import settings
from common.core.errors import NotRunnable
from common.core.implementations import IMPLEMENTATIONS
from common.losses import subject
from common.losses.subject import Context

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
    done = subprocess.run(
        [sys.executable, "-c", PYTEST, "tests/test_contract.py", "-q", "-k", chosen, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, **adapter_of(implementation).simulator},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout
    assert "passed" in last and "skipped" not in last, done.stdout


@pytest.mark.parametrize("implementation", SIMULATED, ids=lambda implementation: implementation.name)
def test_a_simulator_is_never_timed(implementation, monkeypatch):
    adapter = adapter_of(implementation)
    with pytest.raises(NotRunnable, match=f"in the simulator of {adapter.simulator_variables}"):
        adapter.load("cpu")
    for name, value in adapter.simulator.items():
        monkeypatch.setenv(name, value)
    context = Context(adapter.settings, adapter, *5 * [None])
    monkeypatch.setattr(subject, "prepare", lambda job, given: context)
    monkeypatch.setattr(subject, "environment", lambda given: None)
    for name in ("timing", "memory", "trace"):
        with pytest.raises(NotRunnable, match="use --passes correctness"):
            list(subject.run({"pass": name, "settings": adapter.settings.to_json()}))
