"""What a compilation uses on this machine: torch, Python, the C++ compiler, ninja, the CUDA toolkit, moderngpu.

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
from common.system.processes import output

#: Commit of github.com/moderngpu/moderngpu, January 2026: its context.hxx no longer reads the fields clockRate and
#: memoryClockRate, which CUDA 13 took out of cudaDeviceProp.
MODERNGPU = "267cc8d02c03f00f1656f1205c61c946a1e530b0"


@dataclass(frozen=True)
class Toolchain:
    """device: "cpu" or "cuda"; torch: its version, with the local part; torch_cuda: "" for a torch without CUDA;
    compiler: the command, as torch.utils.cpp_extension finds it; compiler_version: "" when there is none; cuda_home: a
    toolkit with headers; architectures: as in TORCH_CUDA_ARCH_LIST; moderngpu: a checkout, as the user named it."""

    device: str
    torch: str
    torch_cuda: str
    compiler: str
    compiler_version: str
    cuda_home: Optional[Path] = None
    nvcc_version: str = ""
    architectures: str = ""
    moderngpu: Optional[Path] = None

    def key(self, source: SourcePackage) -> str:
        """Changes with everything that the compiled module depends on."""
        python = f"{sysconfig.get_config_var('SOABI')} {sys.version_info[:2]}"
        parts = [self.torch, self.torch_cuda, python, self.compiler, self.compiler_version, self.nvcc_version]
        parts += [self.architectures, source.python, source.module, *source.templates, *source.sources, *source.flags]
        if self.device == "cuda":
            parts += [*source.cuda_sources, source.cuda_define, *source.nvcc_flags]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def environment(self) -> Dict[str, str]:
        """Environment variables under which torch.utils.cpp_extension uses these tools."""
        variables = {"CXX": self.compiler, "PATH": search_path()}
        if self.cuda_home:
            variables["CUDA_HOME"] = str(self.cuda_home)
        if self.architectures:
            variables["TORCH_CUDA_ARCH_LIST"] = self.architectures
        return variables


def find(device: str) -> Toolchain:
    """The tools for `device`.  Raises NotRunnable when there is no torch, or none with CUDA for device "cuda"."""
    torch = _torch_version()
    version, torch_cuda, compiler = torch["__version__"] or "", torch.get("cuda") or "", os.environ.get("CXX", "c++")
    tools = Toolchain(device, version, torch_cuda, compiler, output([compiler, "--version"]).partition("\n")[0])
    if device == "cpu":
        return tools
    if not torch_cuda:
        raise NotRunnable("unsupported", f"this torch ({tools.torch}) has no CUDA: install one that has")
    home, named = next(_toolkits(torch_cuda), None), os.environ.get("MODERNGPU_HOME")
    checkout = Path(named).expanduser().resolve() if named else None
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures()
    release = _release(home) if home else ""
    return replace(tools, cuda_home=home, nvcc_version=release, architectures=architectures, moderngpu=checkout)


def check(source: SourcePackage, tools: Toolchain) -> None:
    """Raise NotRunnable for what a compilation of `source` would fail on, with what to install."""
    if tools.device not in source.devices:
        raise NotRunnable("unsupported", f"{source.package} has no {tools.device} version")
    if tools.device == "cuda" and (lacking := _lacking_for_cuda(source, tools)):
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


def _lacking_for_cuda(source: SourcePackage, tools: Toolchain) -> str:
    if source.needs_moderngpu and tools.moderngpu is None:
        wanted = f"clone github.com/moderngpu/moderngpu, check out {MODERNGPU}"
        return f"moderngpu's headers: {wanted} and set MODERNGPU_HOME to the checkout"
    header = Path(tools.moderngpu or "", "src", "moderngpu", "context.hxx")
    if source.needs_moderngpu and not header.exists():
        missing = f"{tools.moderngpu} has no src/moderngpu/context.hxx"
        return f"moderngpu's headers, and {missing}: set MODERNGPU_HOME to a checkout of moderngpu"
    if source.needs_moderngpu and "prop.clockRate" in header.read_text() and int(tools.torch_cuda.split(".")[0]) >= 13:
        return f"newer headers of moderngpu for CUDA {tools.torch_cuda}: check out {MODERNGPU} in {tools.moderngpu}"
    if tools.cuda_home is None:
        return f"nvcc of CUDA {tools.torch_cuda}: install the CUDA toolkit or set CUDA_HOME"
    major = tools.torch_cuda.partition(".")[0]
    if tools.nvcc_version.partition(".")[0] != major:
        found = f"{tools.cuda_home} is {tools.nvcc_version}"
        return f"nvcc of CUDA {major}, as torch {tools.torch} has, and {found}: set CUDA_HOME to another"
    return ""


def meaningful_line(log: str) -> str:
    """The first error in the output of a compilation; without one, the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(fatal )?error\b( \w*\d+)?:", line, flags=re.IGNORECASE)]
    return errors[0] if errors else (lines or ["no output"])[-1]


def _torch_version() -> Dict[str, Optional[str]]:
    """What torch/version.py says: __version__, cuda, ...  Raises NotRunnable when there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotRunnable("missing", f"{sys.executable} has no torch: pip install torch")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def _toolkits(torch_cuda: str) -> Iterator[Path]:
    """CUDA toolkits with nvcc and headers, best first.  An nvcc on PATH can be a wrapper far from its toolkit."""
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), f"/usr/local/cuda-{torch_cuda}"]
    if nvcc := shutil.which("nvcc"):
        named.append(str(Path(nvcc).resolve().parents[1]))
    for folder in [*named, "/usr/local/cuda", "/opt/cuda"]:
        if folder and Path(folder, "bin", "nvcc").exists() and Path(folder, "include", "cuda_runtime.h").exists():
            yield Path(folder)


def _release(cuda_home: Path) -> str:
    """ "13.0" of the toolkit's nvcc; "" when it does not say."""
    found = re.search(r"release (\d+\.\d+)", output([str(cuda_home / "bin" / "nvcc"), "--version"]))
    return found[1] if found else ""


def _architectures() -> str:
    """ "8.0;9.0": the compute capabilities of this machine's GPUs; "" where there is no nvidia-smi (torch decides)."""
    found = output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
    return ";".join(sorted({line for line in found if re.fullmatch(r"\d+\.\d+", line)}))


def search_path() -> str:
    """PATH with this Python's own scripts: ninja is there, also when the environment is not activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
