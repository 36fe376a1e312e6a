"""Fixtures that several test files use."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from rnnt_bench.core.implementations import OTHER_TORCH, Implementation, environments
from rnnt_bench.system import machine

from commands import pass_on_no_ignored_signals

# torch.compile without processes that import torch to compile Triton's kernels, and without a program for each set of
# vector instructions that says whether it runs: the processor tells.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Threads of torch sleep while they wait: by default they spin, and slow down what runs beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No test asks the network: Hugging Face's client, which reads this at its import, would try for half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"
# Commands see an idle machine, whatever runs beside the tests: what they say of load is tested with made-up numbers.
os.environ["HOST_PROC"] = str(Path(__file__).parent / "data" / "idle")

for name in [name for name in os.environ if name.startswith("GIT_") and "CONFIG_" not in name]:
    del os.environ[name]  # of a git hook that runs the tests: they make repositories of their own

pass_on_no_ignored_signals()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the slow tests too, and repeat what is drawn by seed, simulated or garbled as often as a night allows"
    parser.addoption("--thorough", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == "environment_contract":
        chosen = [item for item in items if is_of(item, Path(sys.prefix).name)]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("thorough") and not config.option.thorough:
            item.add_marker(pytest.mark.skip(reason="with --thorough"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m environment_contract` imports only the files with such tests: others need what those environments lack."""
    if config.option.markexpr != "environment_contract" or collection_path.suffix != ".py":
        return None
    return None if "environment_contract" in collection_path.read_text(encoding="utf-8") else True


def is_of(item: pytest.Item, environment: str) -> bool:
    """Return whether a test is of an implementation that is measured in this environment, or of none."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    asked = [value for value in given if isinstance(value, Implementation)]
    return environment not in environments() or all(
        of.environment == environment or OTHER_TORCH in of.controls for of in asked
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Leave the test's name out of its environment: a server of jobs waits for the next job of the same environment."""
    environment = os.environ  # which a test may replace
    name = environment.pop("PYTEST_CURRENT_TEST", "")
    try:
        return (yield)
    finally:
        environment["PYTEST_CURRENT_TEST"] = name


@pytest.fixture(autouse=True)
def process_as_it_was():
    """Undo what a test has changed in its process: variables of the environment, and what a job sets up in torch."""
    with mock.patch.dict(os.environ):
        yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(machine.cpu_count())
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session")
def thorough(request) -> bool:
    """Return whether tests shall repeat what they draw by seed as often as a night allows."""
    return request.config.option.thorough


@pytest.fixture
def tiny_shapes(tmp_path):
    """A shape file of twelve short utterances: a benchmark on it takes no time beside starting Python."""
    import torch

    path = tmp_path / "tiny.pt"
    torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(12)], dtype=torch.int32), path)
    return path


@pytest.fixture
def disk(tmp_path):
    """Return a function that mounts a file system of so many kB and returns its folder."""
    from faults.processes import small_disk

    with contextlib.ExitStack() as stack:

        def sized(kilobytes):
            if not stack.enter_context(small_disk(tmp_path / "disk", kilobytes << 10)):
                pytest.skip("this system does not let us mount a small file system")
            return tmp_path / "disk"

        yield sized
