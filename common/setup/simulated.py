"""Rewrite CUDA sources as C++ for the CPU, to check the answers of kernels without a GPU.

headers/simulated_cuda.h runs a kernel thread by thread.  For it, launches of kernels become calls,
and includes of CUDA's headers are removed.  Checks that a tensor is on a GPU become checks that it
is on the CPU.  Kernels stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: A device of rnnt_bench.setup.extensions, beside "cpu" and "cuda".
DEVICE = "simulated"
HEADER = Path(__file__).parent / "headers" / "simulated_cuda.h"
#: The beginning of a launch: "kernel<float><<<blocks, threads>>>(", or with no arguments all of it.
_LAUNCH = re.compile(r"(\w+(?:<[^<>;()]*>)?)\s*<<<(.*?)>>>\s*\((\s*\))?", re.DOTALL)
#: A line such as "#include <cuda_runtime.h>" or "#include <c10/cuda/CUDAStream.h>".
_INCLUDE = re.compile(
    r'^#include [<"](?:cuda|device_|cooperative_groups|c10/cuda/|ATen/cuda/).*$', re.MULTILINE
)
#: Word of a source -> the word that replaces it.  The first four swap CUDA and CPU, since here the
#: tensors are on the CPU.  The fifth lets the C++ compiler pass for one of CUDA.  The last avoids a
#: check that needs a GPU.
_WORDS = {
    "is_cuda": "is_cpu",
    "is_cpu": "is_cuda",
    "kCUDA": "kCPU",
    "kCPU": "kCUDA",
    "__CUDACC__": "__cplusplus",
    "checkAllSameGPU": "checkAllContiguous",
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")


def flags() -> list[str]:
    """Return the compiler's flags, and those of the variable RNNT_SIMULATED_FLAGS.

    -DNDEBUG is not among them, so assertions in the sources are checked."""
    return ["-O2", "-U_FORTIFY_SOURCE", *os.environ.get("RNNT_SIMULATED_FLAGS", "").split()]


def rewritten(source: str) -> str:
    """Return a CUDA or C++ source as C++ for simulated_cuda.h.

    "kernel<<<blocks, threads>>>(x)" becomes
    "simulated::Launch(blocks, threads).of([](auto... values) { kernel(values...); }, x)"."""
    source = _WORD.sub(lambda match: _WORDS[match[0]], _INCLUDE.sub("", source))
    call = r"simulated::Launch(\2).of([](auto... values) { \1(values...); }"
    # launch[3] is the ")" of a launch without arguments.
    return _LAUNCH.sub(lambda launch: launch.expand(call) + (launch[3] or ", "), source)


def rewrite(folder: Path) -> None:
    """Rewrite the C++ and CUDA files in a folder, and in those below it, in place."""
    for path in folder.rglob("*"):
        if path.suffix in (".cu", ".cc", ".cpp", ".h", ".hxx"):
            path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
