"""What a compilation uses on this machine: torch, Python, the C++ compiler, ninja, the CUDA toolkit.

torch is described from its files, not imported, so that finding a build that is there takes milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, Iterator, Optional

from common.core.errors import NotRunnable
from common.core.text import GIB
from common.setup.source_packages import SourcePackage
from common.system import machine
from common.system.memory import available_memory
from common.system.processes import output

#: Architectures for which is compiled where no GPU is to be seen: A100 and H100, and what comes after them.
ARCHITECTURES = "8.0;9.0+PTX"


@dataclass(frozen=True)
class Toolchain:
    """The compilers and the torch that a source package is compiled with.

    Args:
        device: "cpu" or "cuda".
        torch: version of torch, with the local part.
        torch_cuda: its version of CUDA; "" for a torch without.
        compiler: the command, as torch.utils.cpp_extension finds it.
        compiler_version: "" if there is no compiler.
        cuda_home: a toolkit with headers.
        architectures: as in TORCH_CUDA_ARCH_LIST.
    """

    device: str
    torch: str
    torch_cuda: str
    compiler: str
    compiler_version: str
    cuda_home: Optional[Path] = None
    nvcc_version: str = ""
    architectures: str = ""

    def key(self, source: SourcePackage) -> str:
        """Return a hash of everything that the compiled module depends on."""
        parts = [sysconfig.get_config_var("SOABI"), repr(replace(self, cuda_home=None)), source.recipe(self.device)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def environment(self) -> Dict[str, str]:
        """Return environment variables under which torch.utils.cpp_extension uses these tools."""
        variables = {"CXX": self.compiler, "PATH": search_path()}
        if self.cuda_home:
            variables["CUDA_HOME"] = str(self.cuda_home)
        if self.architectures:
            variables["TORCH_CUDA_ARCH_LIST"] = self.architectures
        return variables

    def check(self, source: SourcePackage) -> None:
        """Raise NotRunnable for what a compilation of `source` would fail on, with what to install."""
        if self.device not in source.devices:
            raise NotRunnable("unsupported", f"{source.package} has no {self.device} version")
        if self.device == "cuda" and (lacking := self.lacking_for_cuda()):
            raise NotRunnable("unsupported", f"{source.package} on CUDA needs {lacking}")
        headers = Path(sysconfig.get_path("include"))
        lacking = ""
        if not self.compiler_version:
            lacking = f"a C++ compiler; `{self.compiler}` is none: install gcc and g++ (or set CXX)"
        elif shutil.which("ninja", path=search_path()) is None:
            lacking = "ninja: pip install ninja"
        elif not (headers / "Python.h").exists():
            lacking = "Python's headers, not in {}: install python{}.{}-dev".format(headers, *sys.version_info)
        if lacking:
            raise NotRunnable("missing", f"{source.package} is compiled from source, which needs {lacking}")

    def lacking_for_cuda(self) -> str:
        """Return what is missing to compile for the CUDA of this torch; "" for nothing."""
        if self.cuda_home is None:
            return f"nvcc of CUDA {self.torch_cuda}: install the CUDA toolkit or set CUDA_HOME"
        if not _same_major(self.torch_cuda, self.nvcc_version):
            wanted = f"nvcc of CUDA {self.torch_cuda.partition('.')[0]}, as torch {self.torch} has"
            return f"{wanted}, and {self.cuda_home} is {self.nvcc_version}: set CUDA_HOME to another"
        return ""


def find(device: str) -> Toolchain:
    """Return what would compile for `device`.  Raises NotRunnable: "missing" without torch, "unsupported" for CUDA
    where torch has none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotRunnable("missing", f"{sys.executable} has no torch: pip install torch")
    of_torch = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    compiler = os.environ.get("CXX", "c++")
    version = output([compiler, "--version"]).partition("\n")[0].strip()
    cuda = of_torch.get("cuda") or ""
    tools = Toolchain(device, str(of_torch["__version__"]), cuda, compiler, version)
    if device == "cpu":
        return tools
    if not cuda:
        raise NotRunnable("unsupported", f"this torch ({tools.torch}) has no CUDA: install one that has")
    releases = {home: _release(home) for home in _toolkits(cuda)}
    home = min(releases, key=lambda home: not _same_major(cuda, releases[home]), default=None)
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures() or ARCHITECTURES
    return replace(tools, cuda_home=home, nvcc_version=releases[home] if home else "", architectures=architectures)


def for_cuda() -> bool:
    """Return whether this machine has a GPU's driver, and what compiles for the CUDA of torch."""
    try:
        return machine.gpu_may_be_here() and not find("cuda").lacking_for_cuda()
    except NotRunnable:  # a torch without CUDA
        return False


def meaningful_line(log: str) -> str:
    """Return the first error in the output of a compilation; without one, the last line.

    A linker says its error before the compiler's "ld returned 1 exit status"."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    of_linker = r"\bld(\.\w+)?: (cannot find|.*undefined reference)|: undefined reference to "
    errors = [line for line in lines if re.search(rf"{of_linker}|\b(fatal )?error\b( \w*\d+)?:", line, flags=re.I)]
    return errors[0] if errors else (lines or ["no output"])[-1]


def _toolkits(torch_cuda: str) -> Iterator[Path]:
    """Yield the CUDA toolkits with nvcc and headers: that which the user named, this Python's own (NVIDIA's packages of
    the index), then the machine's.  An nvcc on PATH can be a wrapper far from its toolkit."""
    of_python = Path(sysconfig.get_path("purelib"), "nvidia", f"cu{torch_cuda.partition('.')[0]}")
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), of_python, f"/usr/local/cuda-{torch_cuda}"]
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parents[1])
    for folder in [*folders, "/usr/local/cuda", "/opt/cuda"]:
        if folder and Path(folder, "bin", "nvcc").exists() and Path(folder, "include", "cuda_runtime.h").exists():
            yield Path(folder)


def _same_major(torch_cuda: str, release: str) -> bool:
    return release.partition(".")[0] == torch_cuda.partition(".")[0]


def _release(cuda_home: Path) -> str:
    """Return "13.0" of the toolkit's nvcc; "" when it does not say."""
    match = re.search(r"release (\d+\.\d+)", output([str(cuda_home / "bin" / "nvcc"), "--version"]))
    return match[1] if match else ""


def _architectures() -> str:
    """Return the compute capabilities of this machine's GPUs, "8.0;9.0"; "" where there is no nvidia-smi."""
    lines = output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
    return ";".join(sorted({line for line in lines if re.fullmatch(r"\d+\.\d+", line)}))


def compilers(packages: int = 1) -> str:
    """Return how many compilers may run for each of `packages` at once: the CPUs, 2 GB of free memory each."""
    fit = (available_memory() or 4 * GIB) // (2 * GIB)
    return str(max(1, min(os.cpu_count() or 1, fit) // max(1, packages)))


def search_path() -> str:
    """Return PATH with this Python's own scripts: ninja is there, also when the environment is not activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
