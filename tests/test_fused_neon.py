"""The C++ code of fused_transducer for aarch64, run by qemu: the same numbers as on this processor."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from commands import ROOT

from fused_transducer import compiling
from fused_transducer.call import ACTIVATIONS

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(
        not shutil.which(CROSS) or not shutil.which(QEMU) or not shutil.which("g++"),
        reason=f"needs g++, {CROSS} and {QEMU} (Debian: g++-aarch64-linux-gnu, qemu-user)",
    ),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return the commands that run tests/neon.cpp here and for aarch64."""
    folder = tmp_path_factory.mktemp("neon")
    flags = [flag for flag in compiling.FLAGS if flag not in ("-fPIC", "-O3")] + ["-O1", "-fopenmp"]
    kernels, main = str(ROOT / "fused_transducer" / "csrc" / "kernels.cpp"), str(ROOT / "tests" / "neon.cpp")
    objects = []
    for number, of_set in enumerate(compiling.instruction_sets()):
        objects.append(str(folder / f"{number}.o"))
        subprocess.run(["g++", *flags, *of_set, "-c", kernels, "-o", objects[-1]], check=True)
    subprocess.run(["g++", *flags, main, *objects, "-o", str(folder / "here")], check=True)
    subprocess.run([CROSS, *flags, main, kernels, "-static", "-o", str(folder / "there")], check=True)
    return [str(folder / "here")], [QEMU, str(folder / "there")]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("drop_below", [0, 858993459])
def test_aarch64_gives_the_same_numbers(programs, activation, drop_below):
    made = []
    for program in programs:
        command = [*program, str(ACTIVATIONS.index(activation)), str(drop_below)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        made.append([float(line) for line in done.stdout.split()])
    assert len(made[0]) == 10
    assert made[0] == pytest.approx(made[1], rel=1e-5, abs=1e-4)
