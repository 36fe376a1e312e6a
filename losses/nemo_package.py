"""Share code between the adapters of NeMo's losses on other lattices.  Does not import torch.

NeMo's numba kernels want tensors on a GPU.  In numba's simulator they run on tensors of the CPU
that claim to be on a GPU.  Some of NeMo's code is replaced there: the calls that choose a device
and a stream, the kernel of the normaliser, the number of threads of a block, and exp, which raises
an error where that of a GPU overflows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import Adapter

if TYPE_CHECKING:
    import torch

NUMBA = "nemo.collections.asr.parts.numba.rnnt_loss"
#: Modules of NUMBA: the one that allocates, the one that launches, and the one with the kernels.
MODULES = ("rnnt", "utils.cuda_utils.gpu_rnnt", "utils.cuda_utils.gpu_rnnt_kernel")
#: Threads of a simulated block of gradients, each a thread of Python; on a GPU there are 256.
SIMULATED_THREADS = 32
#: Attributes of the variant that loops over the cells in Python.
PYTORCH = {
    "by_loops": True,
    "imports": "nemo.collections.asr.losses.rnnt_pytorch",
    "dtypes": ("float32", "float16", "bfloat16"),  # its sums are float32
    "python_loops": ("cpu", "cuda"),
}


class NemoPackage(Adapter):
    """Call a loss of NeMo: numba kernels for CUDA alone, or with `by_loops` loops of Python."""

    hint = or_set_up("pip install 'nemo-toolkit[asr]' numba", "nemo")
    imports = NUMBA
    devices = ("cuda",)
    dtypes = ("float32", "float16")  # numba knows no bfloat16
    is_module = True
    simulator = {"NUMBA_ENABLE_CUDASIM": "1"}
    by_loops = False

    def prepare(self, batch):
        return SimpleNamespace(
            labels=batch.targets.long(),
            act_lens=batch.T_lengths.long(),
            label_lens=batch.U_lengths.long(),
        )

    def reduction_name(self) -> str:
        """Return what the class calls the reduction: the mean over the batch has two names."""
        return "mean_batch" if self.by_loops and self.reduction == "mean" else self.reduction

    def numba_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, which the numba classes alone have; none for a loop of Python."""
        return {} if self.by_loops else options

    def call(self, tensors, prepared):
        return self.answer(self.options(), tensors["logits"], prepared)

    def answer(
        self, options: Mapping[str, Any], logits: torch.Tensor, prepared: SimpleNamespace
    ) -> torch.Tensor:
        """Call the class with these options, in the simulator or on a GPU, and return its loss."""
        context: AbstractContextManager[None] = nullcontext()
        if self.simulated and self.by_loops:
            context = without_cuda()
        elif self.simulated:
            context = on_the_host()
            logits = as_if_on_cuda(logits)
        with context:
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
    """Let NeMo's launching code run without a GPU, and pass tensors to the simulated kernels as
    arrays."""
    from numba import cuda

    rnnt, launching, kernels = (importlib.import_module(f"{NUMBA}.{name}") for name in MODULES)
    kernel = type(kernels.compute_alphas_kernel)
    simulate = kernel.__call__
    streams = SimpleNamespace(default_stream=cuda.default_stream, select_device=lambda index: None)
    arrays = SimpleNamespace(as_cuda_array=array)
    math_of_gpu = SimpleNamespace(**{**vars(math), "exp": exponential})

    def simulate_arrays(self: Any, *arguments: Any) -> Any:
        return simulate(self, *map(array, arguments))

    with ExitStack() as stack:
        for owner, name, value in (
            (rnnt, "cuda", streams),
            (launching, "cuda", arrays),
            (launching.GPURNNT, "log_softmax", normalise),
            (kernels, "GPU_RNNT_THREAD_SIZE", SIMULATED_THREADS),
            (kernels, "math", math_of_gpu),
            (kernel, "__call__", simulate_arrays),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def normalise(launcher: Any, logits: torch.Tensor, denominators: Any) -> None:
    """Set the `denominators` (cells,) to minus the log of the sum of exponentials of each cell.

    It stands for a kernel that the simulator cannot run: some of its threads leave a variable unset
    and never use it, which is an error in Python.

    logits: those of all cells, flat.
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
