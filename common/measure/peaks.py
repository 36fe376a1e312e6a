"""Measure the best rates of the device in each timing round (the limits pass), instead of trusting a datasheet.

Bandwidth: adding in place (two reads and a write, as a loss does), reading alone and writing alone.  The buffers range
from the size of an utterance's logits to far above every cache.  Matrix rate: square products in the run's dtype, of
2 n^3 operations each.  Exponentials: torch's fastest, of numbers that stay in the cache on a CPU and in registers on
CUDA.  All use the run's threads and device.  Other load can only slow them down, so the best repeat of all rounds
counts; the records keep every repeat.  Leaves out formats that the losses do not use (TF32 if it is off).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple, TypeVar

import torch

from common.core.settings import Settings
from common.measure.clock import Clock
from common.measure.device import cache_bytes, facts, host_threads, set_up_torch
from common.records.schema import Exps, Limits, Products, Stream
from common.system import memory
from common.system.load import ForeignLoad, busy_flags

MIB = 2**20
#: The largest buffer has at least these bytes, and CACHES times those of all caches; each other has a quarter of the
#: bytes of the one before, and there are QUARTERS of them in all.
BUFFER = {"cpu": 512 * MIB, "cuda": 2048 * MIB}
CACHES = 8
QUARTERS = 4
#: n of the products (n, n) x (n, n).
SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Exponentials: numbers of each thread on a CPU, which fit its own cache; on CUDA, numbers, and exponentials of each.
CPU_EXPS, CUDA_EXPS = 2**16, (2**22, 256)
#: Seconds for each size of a kind over all rounds, and at least in one round; the run's cap on a scope may lower both.
SECONDS, SHORTEST = 0.4, 0.1
FEWEST, MOST = 3, 20  # repeats
#: The SHORT smallest products take less than a time slice, so other load can slow every one of a few repeats.  They are
#: repeated FEWEST_SHORT to MOST_SHORT times, and each may take PATIENCE times `seconds`.
SHORT, FEWEST_SHORT, MOST_SHORT, PATIENCE = 3, 10, 200, 4


Measured = TypeVar("Measured", Stream, Exps, Products)


def repeated(
    action: Callable[[], Any], clock: Clock, seconds: float, fewest: int = FEWEST, most: int = MOST
) -> List[int]:
    """Repeat `action` and return the nanoseconds of each repeat, without those of a first one that warms up.

    Repeats until `seconds` have passed, at least `fewest` and at most `most` times.
    """
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


def streams(device: torch.device, clock: Clock, seconds: float) -> Iterator[Stream]:
    """Yield the times of reading and writing buffers of QUARTERS sizes, the smallest first.

    The largest takes at most a quarter of the free memory.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_memory()
    size = max(BUFFER[device.type], CACHES * (cache_bytes(device) or 0))
    size = size if free is None else min(size, free // 4)
    # ones, not zeros: all zero pages that were never written share one page, which stays in the cache
    whole = torch.ones(max(size // 4, 4**QUARTERS), dtype=torch.float32, device=device)
    for quarter in reversed(range(QUARTERS)):
        part = whole[: len(whole) // 4**quarter // 2 * 2]
        first, second = part.chunk(2)
        kernels: Dict[str, Tuple[Callable[[], Any], int]] = {
            "update": (partial(first.add_, second), 12 * len(first)),
            "read": (part.sum, 4 * len(part)),
            "write": (partial(part.fill_, 1), 4 * len(part)),
        }
        for kernel, (action, moved) in kernels.items():
            taken = repeated(action, clock, seconds / len(kernels))
            yield Stream(kernel, 4 * len(part), moved, taken)


def exps(device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float) -> Iterator[Exps]:
    """Yield the times of exponentials, in float64 or else in float32, in which losses of half precision sum."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if device.type == "cuda":
        count, times = CUDA_EXPS
        # each takes the result of the last, negated, so that the compiler drops none and none grows
        code = f"template <typename T> T many(T x) {{ for (int i = 0; i < {times}; ++i) x = exp2(-x); return x; }}"
        many = torch.cuda.jiterator._create_jit_fn(code)
        ones = torch.ones(count, dtype=dtype, device=device)
        yield Exps("exp2", count * times, repeated(partial(many, ones), clock, seconds))
        return
    numbers = torch.linspace(-10, 0, CPU_EXPS * torch.get_num_threads(), dtype=dtype)
    out = torch.empty_like(numbers)
    for kernel in (torch.exp, torch.exp2):
        taken = repeated(partial(kernel, numbers, out=out), clock, seconds / 2)
        yield Exps(kernel.__name__, len(numbers), taken)


def products(device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float) -> Iterator[Products]:
    """Yield the times of products of square matrices, the smallest first.

    After the SHORT smallest sizes it ends before a product that would take more than `seconds`.
    """
    generator = torch.Generator().manual_seed(0)
    last = 0.0
    for number, size in enumerate(SIZES):
        short = number < SHORT
        if 8 * last > seconds * 1e9 * (PATIENCE if short else 1):
            return
        # random, since a GPU's clock depends on how many bits change
        left, right = (torch.rand(size, size, generator=generator).to(device, dtype) for _ in range(2))
        out = torch.empty_like(left)
        repeats = (FEWEST_SHORT, MOST_SHORT) if short else (FEWEST, MOST)
        taken = repeated(partial(torch.mm, left, right, out=out), clock, seconds, *repeats)
        last = min(taken)
        yield Products(size, taken)


def run(job: Mapping[str, Any]) -> Iterator[Limits]:
    """Yield the ``limits`` record of a job of common.jobs.spec; raise NotRunnable if torch cannot run it."""
    settings = Settings.from_json(job["settings"])
    yield measure(settings, set_up_torch(settings), max(SECONDS / settings.rounds, SHORTEST))


def measure(settings: Settings, device: torch.device, seconds: float = SECONDS) -> Limits:
    """Return a ``limits`` record, measured for `seconds` for each size of a kind.

    A kind that this torch cannot do here (half precision on a CPU) is empty, and the field "reason" tells why.
    """
    clock, load = Clock(device), ForeignLoad()
    seconds = min(seconds, settings.max_seconds)
    dtype = getattr(torch, settings.dtype)
    reasons: List[str] = []

    def all_of(kind: str, measured: Iterator[Measured]) -> List[Measured]:
        """Return all measurements of a kind, [] with a reason if it cannot be measured."""
        try:
            with torch.no_grad():
                return list(measured)
        except (RuntimeError, AssertionError, AttributeError) as error:  # a torch without jiterator raises the last two
            reasons.append(f"{kind}: {str(error).strip().splitlines()[0]}")
            return []

    measured_streams = all_of("streams", streams(device, clock, seconds))
    measured_products = all_of("products", products(device, dtype, clock, seconds))
    measured_exps = all_of("exps", exps(device, dtype, clock, seconds))
    foreign = load.share()
    return Limits(
        **facts(device),
        dtype=settings.dtype,
        cache_bytes=cache_bytes(device),
        streams=measured_streams,
        products=measured_products,
        exps=measured_exps,
        foreign_cpu=foreign,
        flags=busy_flags(foreign, host_threads(device)),
        reason="; ".join(reasons),
    )
