"""Share code between the adapters of NeMo's losses on other lattices.  Does not import torch.

NeMo's numba kernels want tensors on a GPU.  In numba's simulator they run on tensors of the CPU
that claim to be on a GPU.  Replaced there are the calls that choose a device and a stream, the
kernel of the normaliser, and the number of threads of a block.  So is exp, which raises where that
of a GPU overflows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import Adapter

if TYPE_CHECKING:
    import torch

NUMBA = "nemo.collections.asr.parts.numba.rnnt_loss"
#: Of it: what allocates, what launches, and the kernels.
MODULES = ("rnnt", "utils.cuda_utils.gpu_rnnt", "utils.cuda_utils.gpu_rnnt_kernel")
#: Threads of a simulated block of gradients, each a thread of Python; on a GPU there are 256.
SIMULATED_THREADS = 32
#: What the variant in loops of Python changes of an adapter.
PYTORCH = {
    "by_loops": True,
    "imports": "nemo.collections.asr.losses.rnnt_pytorch",
    "dtypes": ("float32", "float16", "bfloat16"),  # its sums are float32
    "python_loops": ("cpu", "cuda"),
}


class NemoPackage(Adapter):
    """A loss of NeMo: numba kernels for CUDA alone, or loops of Python over the cells
    (`by_loops`)."""

    hint = or_set_up("pip install 'nemo-toolkit[asr]' numba", "nemo")
    imports = NUMBA
    devices = ("cuda",)
    dtypes = ("float32", "float16")  # numba knows no bfloat16
    is_module = True
    simulator = {"NUMBA_ENABLE_CUDASIM": "1"}
    by_loops = False

    def reduction_name(self) -> str:
        """Return the reduction as the class calls it; both mean that over the batch."""
        return "mean_batch" if self.by_loops and self.reduction == "mean" else self.reduction

    def numba_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options that the numba classes alone have."""
        return {} if self.by_loops else options

    def call(self, tensors, prepared):
        return self.answer(self.options(), tensors["logits"], prepared)

    def answer(
        self, options: Mapping[str, Any], logits: torch.Tensor, prepared: SimpleNamespace
    ) -> torch.Tensor:
        """Call the class with these options, in the simulator or on a GPU, and return its loss."""
        with ExitStack() as stack:
            if self.simulated:
                stack.enter_context(without_cuda() if self.by_loops else on_the_host())
                logits = logits if self.by_loops else as_if_on_cuda(logits)
            losses: torch.Tensor = self.function()(**options)(logits, **vars(prepared))
            return losses


@contextmanager
def without_cuda() -> Iterator[None]:
    """Make Tensor.cuda return the tensor itself, so that code which calls it runs on a CPU."""
    import torch

    with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        yield


@contextmanager
def on_the_host() -> Iterator[None]:
    """Let NeMo's launching code run without a device, and the simulated kernels take tensors of the
    CPU, as arrays."""
    from numba import cuda

    rnnt, launching, kernels = (importlib.import_module(f"{NUMBA}.{name}") for name in MODULES)
    kernel = type(kernels.compute_alphas_kernel)
    simulate = kernel.__call__
    streams = SimpleNamespace(default_stream=cuda.default_stream, select_device=lambda index: None)
    with ExitStack() as stack:
        stack.enter_context(patch.object(rnnt, "cuda", streams))
        stack.enter_context(patch.object(launching, "cuda", SimpleNamespace(as_cuda_array=array)))
        stack.enter_context(patch.object(launching.GPURNNT, "log_softmax", normalise))
        stack.enter_context(patch.object(kernels, "GPU_RNNT_THREAD_SIZE", SIMULATED_THREADS))
        stack.enter_context(
            patch.object(kernels, "math", SimpleNamespace(**{**vars(math), "exp": exponential}))
        )
        stack.enter_context(
            patch.object(
                kernel, "__call__", lambda self, *arguments: simulate(self, *map(array, arguments))
            )
        )
        yield


def normalise(launcher: Any, logits: torch.Tensor, denominators: Any) -> None:
    """Set the (cells,) `denominators` to those of flat logits, in place of a kernel that the
    simulator cannot run.

    Some of its threads leave a variable unset and never use it, which is an error in Python.
    """
    denominators[:] = -logits.view(-1, launcher.alphabet_size_).logsumexp(-1).numpy()


def exponential(x: float) -> float:
    """Return e to the x; inf where that overflows, as on a GPU."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def array(value: Any) -> Any:
    """Return a tensor of the CPU as an array that shares its memory; other values as they are."""
    import torch

    return value.numpy() if isinstance(value, torch.Tensor) else value


def as_if_on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor of the CPU whose is_cuda is True."""
    import torch

    return tensor.as_subclass(type("OnDevice", (torch.Tensor,), {"is_cuda": True}))
