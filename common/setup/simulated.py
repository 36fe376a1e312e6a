"""CUDA kernels of source packages as C++ for the CPU, to judge their answers where there is no GPU.

headers/simulated_cuda.h runs a kernel thread by thread.  Here a package's sources are rewritten for
it: launches become calls, includes of CUDA's headers go, and tensors that must be on a GPU must be
on the CPU.  Kernels stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: What rnnt_bench.setup.extensions builds for, beside "cpu" and "cuda".
DEVICE = "simulated"
HEADER = Path(__file__).parent / "headers" / "simulated_cuda.h"
_LAUNCH = re.compile(r"(\w+(?:<[^<>;()]*>)?)\s*<<<(.*?)>>>\s*\((\s*\))?", re.DOTALL)
_INCLUDE = re.compile(
    r'^#include [<"](?:cuda|device_|cooperative_groups|c10/cuda/|ATen/cuda/).*$', re.MULTILINE
)
#: Words that swap their meaning, since tensors are on the CPU, and two that need a compiler for
#: CUDA or a GPU.
_WORDS = {
    **{"is_cuda": "is_cpu", "is_cpu": "is_cuda", "kCUDA": "kCPU", "kCPU": "kCUDA"},
    **{"__CUDACC__": "__cplusplus", "checkAllSameGPU": "checkAllContiguous"},
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")


def flags() -> list[str]:
    """Return the compiler's flags, with those of RNNT_SIMULATED_FLAGS, such as -fsanitize=address;
    assertions hold."""
    return ["-O2", "-U_FORTIFY_SOURCE", *os.environ.get("RNNT_SIMULATED_FLAGS", "").split()]


def rewritten(source: str) -> str:
    """Return the text of a CUDA or C++ source as C++ for simulated_cuda.h."""
    source = _WORD.sub(lambda match: _WORDS[match[0]], _INCLUDE.sub("", source))
    call = r"simulated::Launch(\2).of([](auto... values) { \1(values...); }"
    return _LAUNCH.sub(lambda launch: launch.expand(call) + (launch[3] or ", "), source)


def rewrite(folder: Path) -> None:
    """Rewrite the sources below `folder` in place."""
    for path in folder.rglob("*"):
        if path.suffix in (".cu", ".cc", ".cpp", ".h", ".hxx"):
            path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
