"""The limits pass: the best rates of the device, measured in the same run as the losses, not taken from a datasheet.

Bandwidth: ``copy_`` between two buffers that are far larger than every cache, bytes read plus bytes written.  Matrix
rate: square products in the run's dtype, 2 n^3 operations each.  Both use the run's threads and device.  Other load can
only make them slower, so the best repeat of the best size counts; the record keeps every repeat.  Leaves out the rates
of caches and of formats that the losses do not use (TF32 where it is off).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch

from common.core.settings import Settings
from common.measure.clock import Clock
from common.measure.device import facts, set_up_torch
from common.system import machine, memory
from common.system.load import ForeignLoad, busy_flags

MIB = 2**20
#: The smallest buffer, in bytes, and how many times all caches it must be.
BUFFER = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
CACHES = 4
#: n of the products (n, n) x (n, n).
SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Seconds for each size, less where the run's own cap on a scope is.
SECONDS = 0.4
FEWEST, MOST = 3, 20  # repeats

#: One size: what was repeated, and the nanoseconds of each repeat.
Measured = Dict[str, Any]


def repeated(action: Callable[[], Any], clock: Clock, seconds: float) -> List[int]:
    """Nanoseconds of each repeat, after one that does not count: at least FEWEST, until `seconds` are full, at most
    MOST."""
    action()
    taken: List[int] = []
    while len(taken) < FEWEST or (sum(taken) < seconds * 1e9 and len(taken) < MOST):
        clock.synchronize()
        begin = clock.mark()
        action()
        end = clock.mark()
        clock.synchronize()
        taken.append(clock.between(begin, end))
    return taken


def cache_bytes(device: torch.device) -> Optional[int]:
    """All of the device's last-level cache."""
    if device.type == "cpu":
        return machine.cache_bytes()
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)


def copies(device: torch.device, clock: Clock, seconds: float) -> Iterator[Measured]:
    """Copies between buffers of two sizes; source and target together take at most a quarter of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_memory()
    size = 2 * max(BUFFER[device.type], CACHES * (cache_bytes(device) or 0))
    size = size if free is None else min(size, free // 8)
    # ones, not zeros: all zero pages that were never written are one page, which stays in the cache
    source, target = (torch.ones(max(size // 4, 2), dtype=torch.float32, device=device) for _ in range(2))
    for count in (len(source) // 2, len(source)):
        copy = partial(target[:count].copy_, source[:count])
        yield {"buffer_bytes": 4 * count, "ns": repeated(copy, clock, seconds)}


def products(device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float) -> Iterator[Measured]:
    """Matrix products, smallest first; stops before one that would take more than `seconds`."""
    generator = torch.Generator().manual_seed(0)
    last = 0.0
    for size in SIZES:
        if 8 * last > seconds * 1e9:
            return
        # random, since a GPU's clock depends on how many bits change
        one, other = (torch.rand(size, size, generator=generator).to(device, dtype) for _ in range(2))
        out = torch.empty_like(one)
        taken = repeated(partial(torch.mm, one, other, out=out), clock, seconds)
        last = min(taken)
        yield {"n": size, "ns": taken}


def run(job: Mapping[str, Any]) -> Iterator[Dict[str, Any]]:
    """The ``limits`` record of a job, as common.jobs.spec makes it.  Raises NotRunnable."""
    settings = Settings.from_json(job["settings"])
    yield measure(settings, set_up_torch(settings))


def measure(settings: Settings, device: torch.device) -> Dict[str, Any]:
    """A ``limits`` record.  What this torch cannot do here (half precision on a CPU) is empty, with the reason."""
    clock, load = Clock(device), ForeignLoad()
    cuda = device.type == "cuda"
    seconds = min(SECONDS, settings.max_seconds)
    dtype = getattr(torch, settings.dtype)
    found: Dict[str, List[Measured]] = {"copies": [], "products": []}
    reasons: List[str] = []
    for kind, measured in (
        ("copies", copies(device, clock, seconds)),
        ("products", products(device, dtype, clock, seconds)),
    ):
        try:
            with torch.no_grad():
                found[kind] = list(measured)
        except RuntimeError as error:
            reasons.append(f"{kind}: {str(error).strip().splitlines()[0]}")
    foreign = load.share()
    return {
        "record": "limits",
        **facts(device),
        "dtype": settings.dtype,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else None,
        "cache_bytes": cache_bytes(device),
        **found,
        "foreign_cpu": foreign,
        "flags": busy_flags(foreign),
        "reason": "; ".join(reasons),
    }
