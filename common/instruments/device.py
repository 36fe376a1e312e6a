"""Set up torch for a run, and describe torch and the device."""

from __future__ import annotations

import os
import platform
import resource
import sys
from typing import Any

from rnnt_bench.core.called import or_set_up
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.settings import Settings
from rnnt_bench.records.schema import Environment, Gpu
from rnnt_bench.system import machine, memory


def set_up_torch(settings: Settings) -> Any:
    """Set torch's threads, denormals, TF32 and current device; return the torch.device.

    Raises NotRunnable if torch is missing, or cannot use the device or flush denormals.
    """
    torch = import_torch(f"; {or_set_up('install torch')}")
    device = torch.device(settings.device)
    if settings.denormals == "flush":
        # It must come before the first parallel region, whose threads inherit it.
        can_flush = torch.set_flush_denormal(True)
        if not can_flush and device.type == "cpu":
            raise NotRunnable(
                "unsupported", "this CPU cannot flush denormals: use --denormals keep"
            )
    torch.set_num_threads(settings.threads or machine.cpu_count())
    # False must be set too: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have set it for cuBLAS, and cuDNN
    # has TF32 by default.
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32
    return current(device)


def import_torch(advice: str = "") -> Any:
    """Return the module torch.

    Raises MemoryError if its libraries do not fit into memory, and NotRunnable, whose message ends
    with `advice`, if it cannot be imported for another reason.
    """
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that cannot be loaded raises either
        if memory.tells_of_no_memory(str(error)):
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
            reason = "torch does not load"
            if limit != resource.RLIM_INFINITY:
                reason += f" within ulimit -v {limit // 1024} (kB); raise it"
            raise MemoryError(f"{reason} ({error})") from error
        reason = f"torch does not import in {sys.executable} ({error}){advice}"
        raise NotRunnable("missing", reason) from error
    return torch


def current(device: Any) -> Any:
    """Return this torch.device; a GPU also gets its index, becomes torch's current device, and its
    default stream becomes the current stream.

    Raises NotRunnable if torch does not see the GPU."""
    import torch

    if device.type != "cuda":
        return device
    device = torch.device("cuda", device.index or 0)
    if not torch.cuda.is_available() or device.index >= torch.cuda.device_count():
        reason = f"torch {torch.__version__} in {sys.prefix} does not see {device}"
        raise NotRunnable("unsupported", reason)
    torch.cuda.set_device(device)
    # fast_rnnt always launches on the legacy default stream, so events must be on this stream too:
    # only then are its work and the events in order.
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    return device


def host_threads(device: Any) -> int:
    """Return how many CPU threads a step keeps busy: all threads of torch, or one if a GPU
    computes."""
    import torch

    return 1 if device.type == "cuda" else torch.get_num_threads()


def state() -> dict[str, object]:
    """Return the settings of this process on which times depend and which a loss may change, by
    name.  The timing pass compares the state before a loss was loaded with that after its steps."""
    import torch

    ones = torch.ones(1, 1)
    return {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "the flushing of denormals": not bool(torch.full((1,), 1e-40).mul(1)),  # gives 0 if flushed
        "the random seed": torch.initial_seed(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        # For CUDA, torch tells; on the CPU, a product under autocast has another dtype.
        "autocast": (torch.is_autocast_enabled(), ones.mm(ones).dtype),
        "the precision of products": torch.get_float32_matmul_precision(),
        "the priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "the CPUs that it may use": os.sched_getaffinity(0),
    }


def cache_bytes(device: Any) -> int | None:
    """Return the bytes of all last-level caches of the device; None if unknown (CUDA before torch
    2.5)."""
    import torch

    if device.type == "cpu":
        return machine.cache_bytes()
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)


def facts(device: Any) -> dict[str, Any]:
    """Return fields of ``environment`` and ``limits`` records: torch and the device as they are
    now."""
    import torch

    result: dict[str, Any] = dict(
        torch=str(torch.__version__), device=device.type, threads=torch.get_num_threads()
    )
    if device.type != "cuda":
        result.update(device_name=machine.cpu_name(), mkl_as_intel=machine.mkl_as_intel())
        return result
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # from torch 2.5 on
    gpu = machine.gpu(None if uuid is None else str(uuid))
    result.update(
        device_name=torch.cuda.get_device_name(device),
        tf32=torch.backends.cuda.matmul.allow_tf32,
        gpu=Gpu(**gpu) if gpu else None,
    )
    return result


def environment(settings: Settings, device: Any) -> Environment:
    """Return the ``environment`` record of a job that runs in this process, without the fields of a
    loss and its batches."""
    import torch

    cpus = memory.proc_field("/proc/self/status", "Cpus_allowed_list")
    threads = torch.get_num_threads()
    warnings = []
    if device.type == "cpu" and threads > len(machine.CPUS):
        warnings = [f"{threads} threads share the CPUs {cpus} (affinity): times vary"]
    return Environment(
        **facts(device),
        **machine.tuning(),
        affinity=cpus,
        python=platform.python_version(),
        cuda=torch.version.cuda if device.type == "cuda" else None,
        denormals=settings.denormals,
        allocator=settings.allocator,
        warnings=warnings,
    )
