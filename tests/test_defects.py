"""The programs of docs/defects: each shows a defect of a package, if it is installed, in at most 12 lines."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from common.setup.environments import ENVIRONMENTS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "defects"
PROGRAMS = sorted(FOLDER.glob("*.py"))
#: Environment of the package that a program is about, by the beginning of its name.
OF_PACKAGE = {"nemo": "nemo"}

#: Runs a program for CUDA in numba's simulator and Triton's interpreter.
SIMULATED = """
import runpy, sys, torch
from losses import nemo_package

torch.Tensor.cuda = lambda tensor: nemo_package.as_if_on_cuda(tensor) if tensor.is_floating_point() else tensor
with nemo_package.on_the_host():
    runpy.run_path(sys.argv[1])
"""


def installed(python: Path, package: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return python.exists() and subprocess.run([str(python), "-c", find]).returncode == 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short_and_names_the_version_and_the_page_of_the_family_leads_to_it(program):
    lines = program.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 12
    assert re.match(r"# \S+ [\d.]+, \S+", lines[0]) and any("# prints " in line for line in lines)
    assert f"defects/{program.name}" in (FOLDER.parent / "family.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_prints_what_it_says(program):
    package = program.stem.partition("_")[0]
    python = ENVIRONMENTS[OF_PACKAGE.get(package, "main")].python
    if not installed(python, package):
        pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    command = [str(python), str(program)]
    without_gpu = "cuda" in program.stem and not pytest.importorskip("torch").cuda.is_available()
    if without_gpu or "simulator" in program.stem:
        command[1:1] = ["-c", SIMULATED]
        environment.update(NUMBA_ENABLE_CUDASIM="1", TRITON_INTERPRET="1", PYTHONPATH=str(FOLDER.parents[1]))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"# prints (.+)", program.read_text(encoding="utf-8"))
    assert set(printed) <= set(done.stdout.splitlines()), done.stdout
