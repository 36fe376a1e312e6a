"""Compile the Triton kernels exactly as a training step of 30 utterances launches them, for GPUs that are not here.

`python tests/compiled_launches.py [NAME OF CALLS] ARCHITECTURE V DTYPE ...` prints for each such triple a line of JSON:
the launches, and what each kernel takes of the GPU.  A process of its own: it takes the place of Triton's driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".build" / "triton"))

import torch  # noqa: E402
import triton  # noqa: E402
from fused_transducer import kernels, triton_backend  # noqa: E402
from fused_transducer.call import Call  # noqa: E402
from rnnt_bench.data import batching, shapes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

#: Multiprocessors, and KiB of shared memory that a block may have, of A100, A10, L4, H100, B200 and RTX PRO 6000.
GPUS = {80: (108, 163), 86: (72, 99), 89: (58, 99), 90: (132, 227), 100: (148, 227), 120: (188, 99)}
UTTERANCES = 30
#: The share of the cells that have a gradient under random logits.
WITH_GRADIENT = 0.54
KERNELS = {
    name: kernel
    for name, kernel in vars(kernels).items()
    if isinstance(kernel, triton.JITFunction) and not name.startswith("_")
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class Recorded:
    """A kernel whose launches are compiled, by Triton's own launcher, and recorded."""

    kernel: Any
    launches: list[dict[str, Any]]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            named = dict(zip(self.kernel.arg_names, arguments))
            numbers = {name: value for name, value in named.items() if isinstance(value, int)}
            blocks = {name: options.get(name) for name in ("BM", "BV", "BH")}
            launched = {"kernel": self.kernel.fn.__name__, "grid": list(grid), **blocks, **numbers}
            self.launches.append({**launched, "compiled": compiled})

        return launch


def pretend(architecture: int) -> list[dict[str, Any]]:
    """Compile for a GPU of `architecture`, which is not here; return the list into which the launches go."""
    of_triton = {
        "get_current_target": lambda: GPUTarget("cuda", architecture, 32),
        "get_current_device": lambda: architecture,  # Triton keeps what it has compiled by device
        "get_current_stream": lambda device: 0,
    }
    driver.set_active(SimpleNamespace(**of_triton))
    gpu = triton_backend.Gpu(GPUS[architecture][0], divmod(architecture, 10))
    triton_backend._gpu = lambda device: gpu
    launches: list[dict[str, Any]] = []
    for name, kernel in KERNELS.items():
        setattr(kernels, name, Recorded(kernel, launches))
    return launches


#: Options of a call that are not those of every step.
CALLS: dict[str, dict[str, Any]] = {
    "": {},
    "recipe": {"activation": "gelu", "dropout": 0.2, "seed": torch.tensor(1), "label_smoothing": 0.1},
    "tdt": {"topology": "tdt", "durations": (0, 1, 2, 3, 4), "sigma": 0.05},
    "multi-blank": {"topology": "multi-blank", "durations": (2, 4, 8), "sigma": 0.05},
    "constrained": {"topology": "constrained"},
    "hat": {"topology": "hat"},
    "shared": {"utterance_of": torch.arange(UTTERANCES) // 8},
    "window": {},
    "modified in a window": {"topology": "modified"},
}


def step(T: int, U: int, V: int, dtype: torch.dtype, useful: float = 1.0, options: str = "") -> None:
    """Launch forward and backward of at most T frames and U tokens; useful: the share of cells that are no padding."""
    N, U1, H = UTTERANCES, U + 1, 511 if V == 501 else 512  # with an odd V an odd H
    V += len(CALLS[options].get("durations", ()))
    sizes, integers = ((N, T, H), (N, U1, H), (V, H), (V,)), ((N, U), (N,), (N,))
    tensors = [*(torch.empty(size, dtype=dtype) for size in sizes)]
    tensors += [torch.empty(size, dtype=torch.int64) for size in integers]
    window = torch.zeros(N, U, 2, dtype=torch.int64) if "window" in options else None
    call = Call(*tensors, negligible=1e-8, window=window, **CALLS[options])
    losses, none_kept = torch.empty(N, dtype=torch.float64), torch.empty(0, V)
    arcs = torch.empty(triton_backend.rows(call), N * T * U1)
    triton_backend.forward(call, True, losses, arcs, none_kept)
    arcs.zero_()[:, : int(arcs.shape[1] * useful * WITH_GRADIENT)] = 1  # posteriors
    gradients = [torch.empty(N, T, H), torch.empty(N, U1, H), torch.empty(V, H), torch.empty(V)]
    triton_backend.backward(call, losses, arcs, none_kept, gradients)


def resources(compiled: Any) -> dict[str, Any]:
    """Return what a compiled kernel takes: bytes of stack of a thread and of shared memory of a block; the matrix unit
    that its PTX uses ("" for none); its products of 32 bits with the number of cells."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    units = [unit for unit in ("wgmma", "tcgen05.mma", "mma.sync", "fma.rn.f32") if unit in compiled.asm["ptx"]]
    stack = re.search(r"STACK:(\d+)", usage).group(1)
    narrow = re.findall(r"arith\.muli [^:]*%cells\b.*: i32", compiled.asm["ttir"])
    return {"stack": int(stack), "shared": compiled.metadata.shared, "unit": (units or [""])[0], "narrow": narrow}


def describe(architecture: int, V: int, dtype: torch.dtype, options: str = "") -> dict[str, Any]:
    """Return the launches of a step of a random batch of the shape file, and the resources of each kernel."""
    launches = pretend(architecture)
    batches = batching.fixed_size(shapes.load(ROOT / "shape_info.pt"), UTTERANCES)
    (batch,) = (batches.describe(index) for index in batching.select(batches, "random", 1, seed=0))
    step(batch["T_max"], batch["U_max"], V, dtype, batch["useful_cells"] / batch["padded_cells"], options)
    compiled_of = {launch["kernel"]: launch.pop("compiled") for launch in launches}
    return {
        "launches": launches,
        "kernels": {name: resources(compiled) for name, compiled in compiled_of.items()},
        "multiprocessors": GPUS[architecture][0],
        "most_shared": GPUS[architecture][1] * 1024,
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    options = words.pop(0) if words[0] in CALLS else ""
    for architecture, V, dtype in zip(*[iter(words)] * 3):
        print(json.dumps(describe(int(architecture), int(V), getattr(torch, dtype), options)), flush=True)
