"""The limits pass: the best rates of the device, measured in each timing round, not taken from a datasheet.

Bandwidth: a sum that is written over one of its terms (two reads and a write, as a loss does, and no line is fetched
only to be overwritten), reading alone and writing alone, of buffers from the size of an utterance's logits to far above
every cache.  Matrix rate: square products in the run's dtype, 2 n^3 operations each.  Exponentials: torch's fastest, of
numbers that stay in the cache on a CPU and in registers on CUDA.  All use the run's threads and device.  Other load can
only make them slower, so the best repeat of all rounds counts; the records keep every repeat.  Leaves out formats that
the losses do not use (TF32 where it is off).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import torch

from common.core.settings import Settings
from common.measure.clock import Clock
from common.measure.device import cache_bytes, facts, host_threads, set_up_torch
from common.system import memory
from common.system.load import ForeignLoad, busy_flags

MIB = 2**20
#: Bytes of the largest buffer at least, and how many times all caches it must be; the others are each a quarter.
BUFFER = {"cpu": 512 * MIB, "cuda": 2048 * MIB}
CACHES = 8
QUARTERS = 4
#: n of the products (n, n) x (n, n).
SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Exponentials: numbers for each thread (in its own cache) and how often each is taken; on CUDA numbers and times.
CPU_EXPS, CUDA_EXPS = 2**16, (2**22, 256)
#: Seconds for each size of a kind, shared by the rounds, and of one round at least; less where the run's own cap on a
#: scope is.
SECONDS, SHORTEST = 0.4, 0.1
FEWEST, MOST = 3, 20  # repeats
#: The SHORT smallest products take less than a time slice, so other load slows all of a few: repeats of each, and how
#: many times `seconds` the next of them may take.
SHORT, FEWEST_SHORT, MOST_SHORT, PATIENCE = 3, 10, 200, 4

#: One size: what was repeated, and the nanoseconds of each repeat.
Measured = Dict[str, Any]


def repeated(
    action: Callable[[], Any], clock: Clock, seconds: float, fewest: int = FEWEST, most: int = MOST
) -> List[int]:
    """Return the nanoseconds of each repeat, after one that does not count: at least `fewest`, until `seconds` are
    full, at most `most`."""
    action()
    taken: List[int] = []
    while len(taken) < fewest or (sum(taken) < seconds * 1e9 and len(taken) < most):
        clock.synchronize()
        begin = clock.mark()
        action()
        end = clock.mark()
        clock.synchronize()
        taken.append(clock.between(begin, end))
    return taken


def streams(device: torch.device, clock: Clock, seconds: float) -> Iterator[Measured]:
    """Reading and writing buffers of QUARTERS sizes, the smallest first; at most a quarter of the free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_memory()
    size = max(BUFFER[device.type], CACHES * (cache_bytes(device) or 0))
    size = size if free is None else min(size, free // 4)
    # ones, not zeros: all zero pages that were never written are one page, which stays in the cache
    whole = torch.ones(max(size // 4, 4**QUARTERS), dtype=torch.float32, device=device)
    for quarter in reversed(range(QUARTERS)):
        part = whole[: len(whole) // 4**quarter // 2 * 2]
        one, other = part.chunk(2)
        kernels: Dict[str, Tuple[Callable[[], Any], int]] = {
            "update": (partial(one.add_, other), 12 * len(one)),
            "read": (part.sum, 4 * len(part)),
            "write": (partial(part.fill_, 1), 4 * len(part)),
        }
        for kernel, (action, moved) in kernels.items():
            taken = repeated(action, clock, seconds / len(kernels))
            yield {"kernel": kernel, "buffer_bytes": 4 * len(part), "moved_bytes": moved, "ns": taken}


def exps(device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float) -> Iterator[Measured]:
    """Exponentials; of half precision in float32, in which the losses sum."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if device.type == "cuda":
        count, times = CUDA_EXPS
        # each is of the last, negated, so that none is left out and none grows
        code = f"template <typename T> T many(T x) {{ for (int i = 0; i < {times}; ++i) x = exp2(-x); return x; }}"
        many = torch.cuda.jiterator._create_jit_fn(code)
        ones = torch.ones(count, dtype=dtype, device=device)
        yield {"kernel": "exp2", "count": count * times, "ns": repeated(partial(many, ones), clock, seconds)}
        return
    numbers = torch.linspace(-10, 0, CPU_EXPS * torch.get_num_threads(), dtype=dtype)
    out = torch.empty_like(numbers)
    for kernel in (torch.exp, torch.exp2):
        taken = repeated(partial(kernel, numbers, out=out), clock, seconds / 2)
        yield {"kernel": kernel.__name__, "count": len(numbers), "ns": taken}


def products(device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float) -> Iterator[Measured]:
    """Yield products of square matrices, the smallest first, of more than SHORT sizes those of which one takes no more
    than `seconds`."""
    generator = torch.Generator().manual_seed(0)
    last = 0.0
    for number, size in enumerate(SIZES):
        short = number < SHORT
        if 8 * last > seconds * 1e9 * (PATIENCE if short else 1):
            return
        # random, since a GPU's clock depends on how many bits change
        one, other = (torch.rand(size, size, generator=generator).to(device, dtype) for _ in range(2))
        out = torch.empty_like(one)
        repeats = (FEWEST_SHORT, MOST_SHORT) if short else (FEWEST, MOST)
        taken = repeated(partial(torch.mm, one, other, out=out), clock, seconds, *repeats)
        last = min(taken)
        yield {"n": size, "ns": taken}


def run(job: Mapping[str, Any]) -> Iterator[Dict[str, Any]]:
    """The ``limits`` record of a job, as common.jobs.spec makes it.  Raises NotRunnable."""
    settings = Settings.from_json(job["settings"])
    yield measure(settings, set_up_torch(settings), max(SECONDS / settings.rounds, SHORTEST))


def measure(settings: Settings, device: torch.device, seconds: float = SECONDS) -> Dict[str, Any]:
    """A ``limits`` record.  What this torch cannot do here (half precision on a CPU) is empty, with the reason.
    seconds: for each size of a kind."""
    clock, load = Clock(device), ForeignLoad()
    seconds = min(seconds, settings.max_seconds)
    dtype = getattr(torch, settings.dtype)
    kinds = {
        "streams": streams(device, clock, seconds),
        "products": products(device, dtype, clock, seconds),
        "exps": exps(device, dtype, clock, seconds),
    }
    found: Dict[str, List[Measured]] = {kind: [] for kind in kinds}
    reasons: List[str] = []
    for kind, measured in kinds.items():
        try:
            with torch.no_grad():
                found[kind] = list(measured)
        except (RuntimeError, AssertionError, AttributeError) as error:  # the last two: a torch without jiterator
            reasons.append(f"{kind}: {str(error).strip().splitlines()[0]}")
    foreign = load.share()
    return {
        "record": "limits",
        **facts(device),
        "dtype": settings.dtype,
        "cache_bytes": cache_bytes(device),
        **found,
        "foreign_cpu": foreign,
        "flags": busy_flags(foreign, host_threads(device)),
        "reason": "; ".join(reasons),
    }
