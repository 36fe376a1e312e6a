"""Compiling source packages: optimized_transducer itself from the cache, the rest with a stand-in of seconds."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Mapping

import pytest
from commands import ROOT, start

from common.setup import extensions, toolchain
from common.setup.source_packages import SOURCE_PACKAGES

OPTIMIZED_TRANSDUCER = SOURCE_PACKAGES["optimized_transducer"]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch in this Python"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++) on PATH"),
]

# A package with the layout of optimized_transducer's sdist: same names, no torch in its C++, so seconds to compile.
PYTHON_FOLDER = "optimized_transducer/python/optimized_transducer"
STAND_IN = {
    "setup.py": (  # one for CUDA alone refuses without a GPU
        "import setuptools, torch\nassert torch.cuda.is_available()\n"
        "setuptools.setup(name='optimized_transducer', version='1.4')\n"
    ),
    "PKG-INFO": "Metadata-Version: 2.1\nName: optimized_transducer\nVersion: 1.4\n",
    f"{PYTHON_FOLDER}/__init__.py": (
        "import math, torch, _optimized_transducer\n"
        "from .torch_version import built_for\n"
        "assert built_for == torch.__version__\n"
        "def transducer_loss(logits, *_, **__):\n"
        "    return logits.new_tensor(_optimized_transducer.answer() * math.log(2))\n"
    ),
    f"{PYTHON_FOLDER}/torch_version.py.in": 'built_for = "@TORCH_VERSION@"\n',
    "optimized_transducer/csrc/cpu.cc": "int answer() { return ANSWER; }\n",
    "optimized_transducer/csrc/transducer-loss.cc": "\n",
    "optimized_transducer/python/csrc/module.cc": (
        "#define PY_SSIZE_T_CLEAN\n"
        "#include <Python.h>\n"
        "int answer();\n"
        "static PyObject *Answer(PyObject *, PyObject *) { return PyLong_FromLong(answer()); }\n"
        'static PyMethodDef methods[] = {{"answer", Answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_optimized_transducer", "", -1, methods};\n'
        "PyMODINIT_FUNC PyInit__optimized_transducer() { return PyModule_Create(&module); }\n"
    ),
}
LOAD = """\
import sys
from common.setup import extensions
from common.core.errors import NotRunnable
try:
    print(extensions.load("optimized_transducer", sys.argv[1]).__file__)
except NotRunnable as error:
    print(error.status, error, sep=": ")
"""


class Checkout:
    """A folder with the code that compiles, and a stand-in sdist that pip finds in a folder of its own."""

    def __init__(self, folder: Path, answer: str = "2", files: Mapping[str, str] = STAND_IN):
        self.folder = folder
        shutil.copytree(ROOT / "common", folder / "common")
        (folder / "load.py").write_text(LOAD)
        (folder / "index").mkdir()
        sdist = folder / "index" / "optimized_transducer-1.4.tar.gz"
        with tarfile.open(sdist, "w:gz") as archive:
            for name, text in files.items():
                data = text.replace("ANSWER", answer).encode()
                entry = tarfile.TarInfo(f"optimized_transducer-1.4/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        (folder / "requirements").mkdir()
        (folder / "requirements" / "sources.txt").write_text(f"optimized_transducer==1.4 --hash=sha256:{digest}\n")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and k not in ("CXX", "MODERNGPU_HOME")}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "index")}
        self.environment = {**clean, **pip, "XDG_CACHE_HOME": str(folder / "cache")}
        self.cache = folder / "cache" / "rnnt-bench" / "losses"

    def start(self, device: str = "cpu", **variables: str):
        return start(self.folder / "load.py", device, cwd=self.folder, env={**self.environment, **variables})

    def load(self, device: str = "cpu", **variables: str) -> tuple[str, str]:
        """(what LOAD printed, progress)"""
        process = self.start(device, **variables)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        return stdout.strip(), stderr


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


@pytest.mark.compiles
def test_optimized_transducer_itself():
    import torch

    from common.setup import extensions

    module = extensions.load("optimized_transducer", "cpu")
    assert extensions.load("optimized_transducer", "cpu") is module
    # T = 2, U = 1, V = 2 at zero logits: two paths of three symbols, each symbol 1/2, so the loss is ln 4.
    logits = torch.zeros(4, 2, requires_grad=True)
    targets, T, U = (torch.tensor(value, dtype=torch.int32) for value in ([[1]], [2], [1]))
    loss = module.transducer_loss(logits * 1, targets, T, U, blank=0, from_log_softmax=False, reduction="sum")
    loss.backward()
    assert math.isclose(loss.item(), math.log(4), rel_tol=1e-6)
    # Each row of the gradient sums to zero: adding a constant to all logits of a cell changes nothing.
    assert logits.grad.sum(dim=1).abs().max() < 1e-6 and logits.grad.abs().max() > 0.1


def test_fetched_compiled_and_then_taken_from_the_cache(checkout):
    loaded, reason = checkout.load()
    (folder,) = [path for path in checkout.cache.glob("optimized_transducer-1.4-cpu-*") if path.is_dir()]
    assert Path(loaded) == folder / "optimized_transducer" / "__init__.py"
    assert "fetching" in reason and "compiling" in reason
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "_optimized_transducer.so",
        "optimized_transducer",
    ]
    assert checkout.load() == (loaded, "")

    shutil.rmtree(folder)
    (checkout.cache / "sources" / "optimized_transducer-1.4.tar.gz").write_bytes(b"garbled")
    again, reason = checkout.load()
    assert again == loaded and "fetching" in reason  # a file with another hash is not trusted


def test_killed_half_way_the_next_one_starts_over(checkout, tmp_path):
    compiler, slow = tmp_path / "slow-c++", tmp_path / "slow"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ ! -e {slow} ] || sleep 600\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    slow.touch()
    process = checkout.start(CXX=str(compiler))
    deadline = time.monotonic() + 120
    while not list(checkout.cache.glob("*.partial/objects/lock")):  # torch's own lock file, which nobody removes now
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    slow.unlink()

    loaded, reason = checkout.load(CXX=str(compiler))
    assert loaded.endswith("__init__.py") and "compiled" in reason
    assert not list(checkout.cache.glob("*.partial"))


def test_what_does_not_compile_says_its_first_error_and_where_the_log_is(tmp_path):
    checkout = Checkout(tmp_path / "checkout", answer="nonsense")
    outcome, _ = checkout.load()
    assert outcome.startswith("missing: optimized_transducer does not compile: ")
    assert "error: 'nonsense' was not declared" in outcome.replace("‘", "'").replace("’", "'")
    log = Path(outcome.partition("see ")[2].partition(",")[0])
    assert "nonsense" in log.read_text() and "run `make setup`" in outcome

    outcome, _ = Checkout(tmp_path / "wrong", answer="3").load()
    assert outcome.startswith("unsupported: ") and "must be 2 ln 2" in outcome


def test_what_cannot_be_fetched(checkout):
    shutil.rmtree(checkout.folder / "index")
    outcome, _ = checkout.load()
    assert outcome.startswith("missing: optimized_transducer cannot be fetched: No matching distribution found")
    assert "put optimized_transducer-1.4.tar.gz into" in outcome


def test_no_compiler(checkout):
    outcome, _ = checkout.load(CXX="/nowhere/c++")
    assert outcome.startswith("missing: ") and "`/nowhere/c++`" in outcome and "install gcc and g++" in outcome


def test_an_installed_package_is_used_but_must_run_on_the_device(checkout):
    package = checkout.folder / "optimized_transducer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import math\ndef transducer_loss(logits, *_, **__):\n    return logits.new_tensor(2 * math.log(2))\n"
    )
    assert checkout.load() == (str(package / "__init__.py"), "")

    (package / "__init__.py").write_text("def transducer_loss(*_, **__): raise RuntimeError('built without CUDA')\n")
    outcome, reason = checkout.load()
    assert outcome.startswith("unsupported: ") and "built without CUDA; uninstall it" in outcome and reason == ""

    (package / "__init__.py").write_text("raise ImportError('built for another torch')\n")
    outcome, reason = checkout.load()
    assert "compiled" in reason  # our own build instead, imported although the broken one comes first on the path
    assert outcome.startswith(str(checkout.cache))


def toolkit(folder, release):
    """A folder that looks like a CUDA toolkit of that release."""
    for name in ("bin", "include"):
        (folder / name).mkdir(parents=True)
    (folder / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.0\n")
    nvcc.chmod(0o755)
    return folder


@pytest.fixture
def cuda_of_torch():
    """The CUDA release of this torch; a torch without CUDA says so, and the test ends."""
    tools = toolchain.find("cpu")
    if not tools.torch_cuda:
        with pytest.raises(toolchain.NotRunnable, match="has no CUDA"):
            toolchain.find("cuda")
        pytest.skip("this torch has no CUDA")
    return tools.torch_cuda


def test_cuda_without_what_it_needs(monkeypatch, tmp_path, cuda_of_torch):
    monkeypatch.setattr(toolchain, "_toolkits", lambda _: iter([toolkit(tmp_path / "old", "5.5")]))
    with pytest.raises(toolchain.NotRunnable, match="old is 5.5: set CUDA_HOME to another") as caught:
        toolchain.find("cuda").check(OPTIMIZED_TRANSDUCER)
    assert caught.value.status == "unsupported"


def test_the_toolkit_of_torchs_cuda_is_taken_among_several(monkeypatch, tmp_path, cuda_of_torch):
    """Among those that the user names, and that of the packages of the index."""
    fitting = toolkit(tmp_path / "nvidia" / f"cu{cuda_of_torch.partition('.')[0]}", cuda_of_torch)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolchain, "_architectures", lambda: "")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "named", "5.5")))
    tools = toolchain.find("cuda")
    assert tools.cuda_home == fitting
    assert tools.environment()["TORCH_CUDA_ARCH_LIST"] == toolchain.ARCHITECTURES


def test_each_item_finds_its_segment(tmp_path):
    program = tmp_path / "search.cc"
    program.write_text(
        """
        #include <cstdio>
        #include "moderngpu/kernel_load_balance.hxx"
        int main() {
          const int starts[] = {0, 0, 3, 3, 3, 4, 9};
          for (int item = 0; item < 12; ++item) std::printf("%d ", mgpu::segment_of(item, starts, 7));
        }
        """
    )
    compiler = ["c++", "-Wall", "-Werror", f"-I{ROOT / 'common' / 'setup' / 'headers'}", str(program)]
    subprocess.run([*compiler, "-o", str(tmp_path / "search")], check=True)
    done = subprocess.run([str(tmp_path / "search")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == "1 1 1 4 5 5 5 5 5 6 6 6".split()


@pytest.mark.skipif(not os.environ.get("COMPILE_FOR_CUDA"), reason="minutes of nvcc: set COMPILE_FOR_CUDA=1")
@pytest.mark.parametrize("package", sorted(SOURCE_PACKAGES))
def test_packages_compile_for_cuda_without_a_gpu(package, monkeypatch, cuda_of_torch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    monkeypatch.setenv("MAX_JOBS", "2")  # a compiler of CUDA takes up to 3 GB
    tools = toolchain.find("cuda")
    try:
        tools.check(SOURCE_PACKAGES[package])
    except toolchain.NotRunnable as error:
        pytest.skip(str(error))
    build = ["-m", "common.setup.extensions", "build", package, "--device", "cuda"]
    done = subprocess.run([sys.executable, *build], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    (library,) = extensions.build(package, "cuda").rglob("*.so")
    triton = pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, brings cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(cuobjdump), "--list-elf", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sm_80" in listed and "sm_90" in listed


def test_a_package_for_cuda_alone_is_not_tried_on_the_cpu():
    from common.setup import extensions

    assert SOURCE_PACKAGES["warp_rnnt"].devices == ("cuda",) and OPTIMIZED_TRANSDUCER.devices == ("cpu", "cuda")
    with pytest.raises(toolchain.NotRunnable, match="warp_rnnt has no cpu version") as caught:
        extensions.build("warp_rnnt", "cpu")
    assert caught.value.status == "unsupported"


@pytest.mark.parametrize(
    "log, line",
    [
        ("[1/2] c++ a.cc\nFAILED: a.o\na.cc:3:1: error: x\nninja: build stopped.", "a.cc:3:1: error: x"),
        (
            "a.cc:1:1: fatal error: a.h: No such file\ncompilation terminated.",
            "a.cc:1:1: fatal error: a.h: No such file",
        ),
        (
            "/usr/bin/ld: cannot find -lcudart: No such file\ncollect2: error: ld returned 1 exit status",
            "/usr/bin/ld: cannot find -lcudart: No such file",
        ),
        ("c++: internal\nKilled\n\n", "Killed"),
        ("", "no output"),
    ],
)
def test_the_meaningful_line_of_a_log(log, line):
    assert toolchain.meaningful_line(log) == line
