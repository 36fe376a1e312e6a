"""The C++ code for aarch64, run by qemu: every lattice against the oracle, random problems, and denormals."""

from __future__ import annotations

import ctypes
import hashlib
import select
import shutil
import subprocess

import pytest
import torch
from fused_transducer import compiling, native
from rnnt_bench.core import files

from commands import ROOT
from fused_helpers import LATTICES, computed, errors, lattice_problem, problem, solve_random, use

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = [
    pytest.mark.compiles,
    pytest.mark.thorough,
    pytest.mark.skipif(
        not shutil.which(CROSS) or not shutil.which(QEMU),
        reason=f"needs {CROSS} and {QEMU} (Debian: g++-aarch64-linux-gnu, qemu-user)",
    ),
]


@pytest.fixture(scope="module")
def program():
    """Start tests/neon.cpp with the C++ code, compiled for aarch64 into .build; yield its process."""
    flags = [flag for flag in compiling.FLAGS if flag not in ("-fPIC", "-O3")] + ["-O1", "-fopenmp", "-static"]
    sources = [ROOT / "tests" / "neon.cpp", compiling.CSRC / "kernels.cpp", compiling.CSRC / "dispatch.cpp"]
    command = [CROSS, *flags, *map(str, sources)]
    content = f"{command} {compiling.library_name()}".encode() + sources[0].read_bytes()
    path = ROOT / ".build" / "neon" / hashlib.sha256(content).hexdigest()[:16]
    with files.locked(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            partial = path.with_suffix(".partial")
            subprocess.run([*command, "-o", str(partial)], check=True)
            partial.rename(path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([QEMU, str(path)], **pipes, text=True, bufsize=1) as process:
        yield process


@pytest.fixture(autouse=True)
def emulated(program, tmp_path, monkeypatch):
    """Let fused_transducer run the C++ code of `program`; return the list of the functions that ran."""
    use("native", monkeypatch)
    ran = []

    def run(arguments, function):
        arcs = arguments.lattice_arcs
        pieces = [(ctypes.addressof(arcs), ctypes.sizeof(arcs))]
        pieces += [(tensor.data_ptr(), spanned(tensor)) for tensor in arguments.tensors if tensor.data_ptr()]
        content = [ctypes.string_at(address, size) for address, size in pieces]
        path = tmp_path / "step"
        with path.open("wb") as stream:
            stream.write(bytes(arguments.problem))
            for (address, size), data in zip(pieces, content):
                stream.write(address.to_bytes(8, "little") + size.to_bytes(8, "little") + data)
        print(function, path, file=program.stdin)
        answered, _, _ = select.select([program.stdout], [], [], 120)
        assert answered and program.stdout.readline() == "0\n"
        with path.open("rb") as stream:
            for (address, size), before in zip(pieces, content):
                after = stream.read(size)
                if after != before:
                    ctypes.memmove(address, after, size)
        ran.append(function)

    monkeypatch.setattr(native._Arguments, "run", run)
    return ran


def spanned(tensor):
    """Return the bytes from the first element of a tensor to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


@pytest.mark.parametrize("topology", ["regular", *LATTICES])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_aarch64_agrees_with_the_oracle(topology, dtype, allowed, emulated):
    case = lattice_problem(topology, [(12, 4), (9, 3), (8, 1), (7, 0)], H=37, V=70, dtype=dtype, scale=0.3)
    assert max(errors(case).values()) <= allowed
    assert emulated == ["forward", "backward"]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_problems_on_aarch64_agree_with_plain_pytorch(seed, emulated, capsys, thorough):
    problems = 25 if thorough else 8
    solve_random(problems, seed)
    assert emulated.count("forward") >= problems


def test_aarch64_flushes_denormals_and_restores_them_after_a_step(emulated):
    """A step with a denormal upstream gradient leaves gradients of 0; the program checks that the next sum has them."""
    case = problem([(12, 4), (9, 3)], H=37, V=70, dtype=torch.float32, negligible=0.0)
    leaves = case.leaves()
    (case.loss(leaves) * 1e-39).sum().backward()
    assert emulated == ["forward", "backward"]
    assert not any(leaf.grad.any() for leaf in leaves)
    assert computed(case)[1]["weight"].any()  # as it is with an upstream gradient of 1
