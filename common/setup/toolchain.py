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
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional

from common.errors import NotRunnable
from common.setup.source_packages import SourcePackage


@dataclass(frozen=True)
class Toolchain:
    """device: "cpu" or "cuda"; torch: its version, with the local part; torch_cuda: "" for a torch without CUDA;
    compiler: the command, as torch.utils.cpp_extension finds it; compiler_version: "" when there is none; cuda_home: a
    toolkit with headers; architectures: as in TORCH_CUDA_ARCH_LIST; moderngpu: a checkout, as the user named it.
    """

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
        variables = {"CXX": self.compiler, "PATH": _path()}
        if self.cuda_home:
            variables["CUDA_HOME"] = str(self.cuda_home)
        if self.architectures:
            variables["TORCH_CUDA_ARCH_LIST"] = self.architectures
        return variables


def find(device: str, moderngpu: Optional[Path] = None) -> Toolchain:
    """The tools for `device`.  Raises NotRunnable when there is no torch, or none with CUDA for device "cuda"."""
    torch = _torch_version()
    torch_cuda = torch.get("cuda") or ""
    compiler = os.environ.get("CXX", "c++")
    tools = Toolchain(device, torch["__version__"], torch_cuda, compiler, _first_line([compiler, "--version"]))
    if device == "cpu":
        return tools
    if not torch_cuda:
        raise NotRunnable("unsupported", f"this torch ({tools.torch}) has no CUDA: install one that has")
    home = next(_toolkits(torch_cuda), None)
    named = moderngpu or os.environ.get("MODERNGPU_HOME")
    return Toolchain(
        *(device, tools.torch, torch_cuda, compiler, tools.compiler_version),
        cuda_home=home,
        nvcc_version=_release(home) if home else "",
        architectures=os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures(),
        moderngpu=Path(named).expanduser().resolve() if named else None,
    )


def check(source: SourcePackage, tools: Toolchain) -> None:
    """Raise NotRunnable for what a compilation of `source` would fail on, with what to install."""
    if tools.device not in source.devices:
        raise NotRunnable("unsupported", f"{source.package} has no {tools.device} version")
    if tools.device == "cuda":
        _check_cuda(source, tools)
    what = f"{source.package} is compiled from source, which needs"
    if not tools.compiler_version:
        raise NotRunnable(
            "missing", f"{what} a C++ compiler; `{tools.compiler}` is none: install gcc and g++ (or set CXX)"
        )
    if shutil.which("ninja", path=_path()) is None:
        raise NotRunnable("missing", f"{what} ninja: pip install ninja")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        version = "{}.{}".format(*sys.version_info)
        raise NotRunnable("missing", f"{what} Python's headers, not in {headers}: install python{version}-dev")


def _check_cuda(source: SourcePackage, tools: Toolchain) -> None:
    what = f"{source.package} on CUDA needs"
    if source.needs_moderngpu and tools.moderngpu is None:
        raise NotRunnable(
            "unsupported",
            f"{what} moderngpu's headers: clone moderngpu from GitHub and set MODERNGPU_HOME to the checkout",
        )
    if source.needs_moderngpu and not (tools.moderngpu / "src" / "moderngpu" / "context.hxx").exists():
        raise NotRunnable(
            "unsupported",
            f"{what} moderngpu's headers, and {tools.moderngpu} has no src/moderngpu/context.hxx: "
            "set MODERNGPU_HOME to a checkout of moderngpu",
        )
    if tools.cuda_home is None:
        raise NotRunnable(
            "unsupported", f"{what} nvcc of CUDA {tools.torch_cuda}: install the CUDA toolkit or set CUDA_HOME"
        )
    if tools.nvcc_version.split(".")[0] != tools.torch_cuda.split(".")[0]:
        raise NotRunnable(
            "unsupported",
            f"{what} nvcc of CUDA {tools.torch_cuda.split('.')[0]}, as torch {tools.torch} has, and {tools.cuda_home} "
            f"is {tools.nvcc_version}: set CUDA_HOME to another",
        )


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
    nvcc = shutil.which("nvcc")
    if nvcc:
        named.append(str(Path(nvcc).resolve().parents[1]))
    for folder in [*named, "/usr/local/cuda", "/opt/cuda"]:
        if folder and Path(folder, "bin", "nvcc").exists() and Path(folder, "include", "cuda_runtime.h").exists():
            yield Path(folder)


def _release(cuda_home: Path) -> str:
    """ "13.0" of the toolkit's nvcc; "" when it does not say."""
    done = subprocess.run([str(cuda_home / "bin" / "nvcc"), "--version"], stdout=subprocess.PIPE, text=True)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else ""


def _architectures() -> str:
    """ "8.0;9.0": the compute capabilities of this machine's GPUs; "" where there is no nvidia-smi (torch decides)."""
    lines = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
    return ";".join(sorted({line for line in lines if re.fullmatch(r"\d+\.\d+", line)}))


def _path() -> str:
    """PATH with this Python's own scripts: ninja is there, also when the environment is not activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def _first_line(command: List[str]) -> str:
    return (_output(command).splitlines() or [""])[0]


def _output(command: List[str]) -> str:
    """What `command` prints; "" when it is not there or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
