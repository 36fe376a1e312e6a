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
from common.setup.source_packages import SourcePackage
from common.system import machine
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
        python = f"{sysconfig.get_config_var('SOABI')} {sys.version_info[:2]}"
        parts = [self.torch, self.torch_cuda, python, self.compiler, self.compiler_version, self.nvcc_version]
        parts += [self.architectures, source.python, source.module, *source.templates, *source.sources, *source.flags]
        if self.device == "cuda":
            parts += [*source.cuda_sources, source.cuda_define, *source.nvcc_flags, _content(source.headers)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def environment(self) -> Dict[str, str]:
        """Return environment variables under which torch.utils.cpp_extension uses these tools."""
        variables = {"CXX": self.compiler, "PATH": search_path()}
        if self.cuda_home:
            variables["CUDA_HOME"] = str(self.cuda_home)
        if self.architectures:
            variables["TORCH_CUDA_ARCH_LIST"] = self.architectures
        return variables


def find(device: str) -> Toolchain:
    """Return the tools for `device`. Raises NotRunnable when there is no torch, or none with CUDA for device "cuda"."""
    torch = _torch_version()
    version, torch_cuda, compiler = torch["__version__"] or "", torch.get("cuda") or "", os.environ.get("CXX", "c++")
    tools = Toolchain(device, version, torch_cuda, compiler, output([compiler, "--version"]).partition("\n")[0])
    if device == "cpu":
        return tools
    if not torch_cuda:
        raise NotRunnable("unsupported", f"this torch ({tools.torch}) has no CUDA: install one that has")
    releases = {home: _release(home) for home in _toolkits(torch_cuda)}
    home = min(releases, key=lambda home: not _is_of(torch_cuda, releases[home]), default=None)
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures() or ARCHITECTURES
    return replace(tools, cuda_home=home, nvcc_version=releases[home] if home else "", architectures=architectures)


def for_cuda() -> bool:
    """Return whether this machine has a GPU's driver, and what compiles for the CUDA of torch."""
    try:
        return machine.gpu_may_be_here() and not _lacking_for_cuda(find("cuda"))
    except NotRunnable:  # a torch without CUDA
        return False


def check(source: SourcePackage, tools: Toolchain) -> None:
    """Raise NotRunnable for what a compilation of `source` would fail on, with what to install."""
    if tools.device not in source.devices:
        raise NotRunnable("unsupported", f"{source.package} has no {tools.device} version")
    if tools.device == "cuda" and (lacking := _lacking_for_cuda(tools)):
        raise NotRunnable("unsupported", f"{source.package} on CUDA needs {lacking}")
    if lacking := _lacking(tools):
        raise NotRunnable("missing", f"{source.package} is compiled from source, which needs {lacking}")


def _lacking(tools: Toolchain) -> str:
    headers = Path(sysconfig.get_path("include"))
    if not tools.compiler_version:
        return f"a C++ compiler; `{tools.compiler}` is none: install gcc and g++ (or set CXX)"
    if shutil.which("ninja", path=search_path()) is None:
        return "ninja: pip install ninja"
    if not (headers / "Python.h").exists():
        return "Python's headers, not in {}: install python{}.{}-dev".format(headers, *sys.version_info)
    return ""


def _lacking_for_cuda(tools: Toolchain) -> str:
    if tools.cuda_home is None:
        return f"nvcc of CUDA {tools.torch_cuda}: install the CUDA toolkit or set CUDA_HOME"
    if not _is_of(tools.torch_cuda, tools.nvcc_version):
        wanted = f"nvcc of CUDA {tools.torch_cuda.partition('.')[0]}, as torch {tools.torch} has"
        return f"{wanted}, and {tools.cuda_home} is {tools.nvcc_version}: set CUDA_HOME to another"
    return ""


def meaningful_line(log: str) -> str:
    """Return the first error in the output of a compilation; without one, the last line.

    A linker says its error before the compiler's "ld returned 1 exit status"."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    of_linker = r"\bld(\.\w+)?: (cannot find|.*undefined reference)|: undefined reference to "
    errors = [line for line in lines if re.search(rf"{of_linker}|\b(fatal )?error\b( \w*\d+)?:", line, flags=re.I)]
    return errors[0] if errors else (lines or ["no output"])[-1]


def _torch_version() -> Dict[str, Optional[str]]:
    """Return what torch/version.py says: __version__, cuda, ...  Raises NotRunnable when there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotRunnable("missing", f"{sys.executable} has no torch: pip install torch")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


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


def _is_of(torch_cuda: str, release: str) -> bool:
    """Return whether a toolkit of `release` compiles for a torch of CUDA `torch_cuda`: their major versions agree."""
    return release.partition(".")[0] == torch_cuda.partition(".")[0]


def _content(headers: str) -> str:
    """Return the text of all files in a folder of headers; "" without one."""
    files = sorted(Path(headers).rglob("*.hxx")) if headers else []
    return "".join(path.read_text(encoding="utf-8") for path in files)


def _release(cuda_home: Path) -> str:
    """Return "13.0" of the toolkit's nvcc; "" when it does not say."""
    match = re.search(r"release (\d+\.\d+)", output([str(cuda_home / "bin" / "nvcc"), "--version"]))
    return match[1] if match else ""


def _architectures() -> str:
    """Return the compute capabilities of this machine's GPUs, "8.0;9.0"; "" where there is no nvidia-smi."""
    lines = output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
    return ";".join(sorted({line for line in lines if re.fullmatch(r"\d+\.\d+", line)}))


def search_path() -> str:
    """Return PATH with this Python's own scripts: ninja is there, also when the environment is not activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
