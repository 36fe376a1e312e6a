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
    """Set the run's threads, denormals, TF32 and device; return the torch.device.

    Raises NotRunnable if torch is missing or cannot use the device or flush denormals.
    """
    torch = import_torch(f"; {or_set_up('install torch')}")
    device = torch.device(settings.device)
    # before the first parallel region
    flushed = settings.denormals == "flush" and torch.set_flush_denormal(True)
    if settings.denormals == "flush" and not flushed and device.type == "cpu":
        raise NotRunnable("unsupported", "this CPU cannot flush denormals: use --denormals keep")
    torch.set_num_threads(settings.threads or machine.cpu_count())
    # False must be set too: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have set the first, and the second
    # is True by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    return current(device)


def import_torch(advice: str = "") -> Any:
    """Return the module torch.

    Raises NotRunnable, with `advice` at its end, if torch cannot be imported, MemoryError if memory
    is short of its libraries.
    """
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that cannot be loaded raises either
        if memory.tells_of_no_memory(str(error)):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            within = (
                ""
                if limit == resource.RLIM_INFINITY
                else f" within ulimit -v {limit // 1024} (kB); raise it"
            )
            raise MemoryError(f"torch does not load{within} ({error})") from error
        raise NotRunnable(
            "missing", f"torch does not import in {sys.executable} ({error}){advice}"
        ) from error
    return torch


def current(device: Any) -> Any:
    """Return the device with its index, a GPU as torch's current device; raise NotRunnable if torch
    does not see it."""
    import torch

    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not torch.cuda.is_available() or device.index >= torch.cuda.device_count():
            raise NotRunnable(
                "unsupported", f"torch {torch.__version__} in {sys.prefix} does not see {device}"
            )
        torch.cuda.set_device(device)
        # fast_rnnt always launches on the legacy default stream: only there do its work and our
        # events keep their order
        torch.cuda.set_stream(torch.cuda.default_stream(device))
    return device


def host_threads(device: Any) -> int:
    """Return how many CPU threads a step keeps busy: those of torch, or one where a GPU
    computes."""
    import torch

    return 1 if device.type == "cuda" else torch.get_num_threads()


def state() -> dict[str, object]:
    """Return what a loss may change of its process and times depend on, by name."""
    import torch

    ones = torch.ones(1, 1)
    return {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "the flushing of denormals": not bool(torch.full((1,), 1e-40).mul(1)),
        "the random seed": torch.initial_seed(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled(), ones.mm(ones).dtype),  # on CUDA; on the CPU
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
    """Return torch and the device as they are now, as ``environment`` and ``limits`` records have
    them."""
    import torch

    result = dict(torch=str(torch.__version__), device=device.type, threads=torch.get_num_threads())
    if device.type != "cuda":
        return {
            **result,
            "device_name": machine.cpu_name(),
            "mkl_as_intel": machine.mkl_as_intel(),
        }
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # from torch 2.5 on
    gpu = machine.gpu(None if uuid is None else str(uuid))
    return dict(
        **result,
        device_name=torch.cuda.get_device_name(device),
        tf32=torch.backends.cuda.matmul.allow_tf32,
        gpu=Gpu(**gpu) if gpu else None,
    )


def environment(settings: Settings, device: Any) -> Environment:
    """Return the ``environment`` record of a job that runs in this process."""
    import torch

    cpus = memory.proc_field("/proc/self/status", "Cpus_allowed_list")
    threads = torch.get_num_threads()
    shared = device.type == "cpu" and threads > len(machine.CPUS)
    return Environment(
        **facts(device),
        **machine.tuning(),
        affinity=cpus,
        python=platform.python_version(),
        cuda=torch.version.cuda if device.type == "cuda" else None,
        denormals=settings.denormals,
        allocator=settings.allocator,
        warnings=[f"{threads} threads share the CPUs {cpus} (affinity): times vary"]
        if shared
        else [],
    )
