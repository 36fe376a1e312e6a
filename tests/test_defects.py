"""The programs of docs/defects: each shows a defect of a package, if it is installed, in at most 12 lines."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
from rnnt_bench.core.files import CACHE
from rnnt_bench.setup import extensions, simulated
from rnnt_bench.setup.environments import ENVIRONMENTS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "defects"
PROGRAMS = sorted(FOLDER.glob("*.py"))
#: Of the packages that the programs' names begin with, the environment.
OF_PACKAGE = {"nemo": "nemo", **dict.fromkeys(("transformers", "torchaudio", *extensions.SOURCE_PACKAGES), "main")}

#: Runs a program for CUDA in numba's simulator and Triton's interpreter, or its package's kernels built for the CPU.
SIMULATED = """
import runpy, sys, torch
from losses import nemo_package
torch.Tensor.cuda = lambda tensor: nemo_package.as_if_on_cuda(tensor) if tensor.is_floating_point() else tensor
with nemo_package.on_the_host():
    runpy.run_path(sys.argv[1])
"""
BUILT = """
import runpy, sys, torch
from rnnt_bench.setup import extensions
extensions.load(sys.argv[2], "simulated")
torch.Tensor.cuda = lambda tensor: tensor
runpy.run_path(sys.argv[1])
"""


def installed(python: Path, package: str) -> bool:
    return any(python.parents[1].glob(f"lib/python*/site-packages/{package}/__init__.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short_and_names_the_version_and_the_page_of_the_family_leads_to_it(program):
    lines = program.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 12
    assert re.match(r"# \S+ [\d.]+, \S+", lines[0]) and any("# prints " in line for line in lines)
    assert f"defects/{program.name}" in (FOLDER.parent / "family.md").read_text(encoding="utf-8")


@functools.cache
def key_of(package: str) -> str:
    return extensions.tools(extensions.SOURCE_PACKAGES[package], simulated.DEVICE)[1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_prints_what_it_says(program, thorough, tmp_path):
    package = next(package for package in OF_PACKAGE if program.stem.startswith(package))
    python = ENVIRONMENTS[OF_PACKAGE[package]].python
    without_gpu = "cuda" in program.stem and not pytest.importorskip("torch").cuda.is_available()
    if without_gpu and package == "torchaudio":
        pytest.skip("needs a CUDA GPU: nothing simulates its kernels")
    built = without_gpu and package in extensions.SOURCE_PACKAGES
    key = key_of(package) if built else ""
    if built and not (thorough or any(CACHE.glob(f"{package}-*-{key}"))):
        pytest.skip("with --thorough, which compiles it")
    if not built and not installed(python, package):
        pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    command = [str(python), str(program), package]
    if without_gpu or "simulator" in program.stem:
        command[1:1] = ["-c", BUILT if built else SIMULATED]
        environment.update(NUMBA_ENABLE_CUDASIM="1", TRITON_INTERPRET="1", PYTHONPATH=str(FOLDER.parents[1]))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)  # it may write
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"# prints (.+)", program.read_text(encoding="utf-8"))
    assert set(printed) <= set(done.stdout.splitlines()), done.stdout
