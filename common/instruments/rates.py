"""Measure the best rates of the device in each timing round (the limits pass), instead of trusting
a datasheet.

Bandwidth: adding in place (two reads and a write, as a loss does), reading alone and writing alone.
The buffer is far above every cache, as the logits of a batch are.  Matrix rate: square products in
the run's dtype, of 2 n^3 operations each.  torch.mm computes them, and on a CPU a loop of the
suite's own too, since torch's may not use what the processor has.  Other load can only slow them
down, so the best repeat of a process counts; the records keep every repeat.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.settings import Settings
from rnnt_bench.instruments.clock import Clock
from rnnt_bench.instruments.device import cache_bytes, facts, host_threads, set_up_torch
from rnnt_bench.records.schema import Limits, Products, Stream
from rnnt_bench.system import memory
from rnnt_bench.system.machine import ForeignLoad, busy_flags

MIB = 2**20
#: The buffer has at least these bytes, and CACHES times those of all caches.
BUFFER = {"cpu": 512 * MIB, "cuda": 2048 * MIB}
CACHES = 8
#: n of the products (n, n) x (n, n).
SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Seconds for each size of a kind over all rounds, and at least in one round; the run's cap on a
#: scope may lower both.
SECONDS, SHORTEST = 0.4, 0.1
FEWEST, MOST = 3, 200  # repeats
#: So many sizes of products are measured at least, ten times each: other load can slow every one of
#: a few repeats of what takes less than a time slice.
SHORT, FEWEST_SHORT = 3, 10
#: Least n of the products of the suite's own loop. So many are made at once: starting threads takes
#: up to a tenth of a millisecond; one thread is not started, and few repeats of what is longer than
#: a time slice are undisturbed.
LOOP_SIZE, LOOP_PASSES, LOOP_PASSES_OF_ONE = 200, 64, 8


def repeated(
    action: Callable[[], Any], clock: Clock, seconds: float, fewest: int = FEWEST
) -> list[int]:
    """Return the nanoseconds of repeats of `action`, without those of a first one that warms up.

    Repeats until `seconds` have passed, at least `fewest` and at most MOST times.
    """
    action()
    taken: list[int] = []
    while len(taken) < fewest or (sum(taken) < seconds * 1e9 and len(taken) < MOST):
        clock.synchronize()
        begin = clock.mark()
        action()
        end = clock.mark()
        clock.synchronize()
        taken.append(clock.between(begin, end))
    return taken


def streams(device: torch.device, clock: Clock, seconds: float) -> Iterator[Stream]:
    """Yield the times of reading and writing a buffer of at most a quarter of the free memory."""
    free = (
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_memory()
    )
    size = max(BUFFER[device.type], CACHES * (cache_bytes(device) or 0))
    size = size if free is None else min(size, free // 4)
    # Ones, not zeros: all zero pages that were never written share one page, which stays in the
    # cache.
    whole = torch.ones(size // 8 * 2, dtype=torch.float32, device=device)
    first, second = whole.chunk(2)
    kernels = (
        ("update", partial(first.add_, second), 6),
        ("read", whole.sum, 4),
        ("write", partial(whole.fill_, 1), 4),
    )
    for kernel, action, moved in kernels:
        yield Stream(kernel, 4 * len(whole), moved * len(whole), repeated(action, clock, seconds))


def products(
    device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float
) -> Iterator[Products]:
    """Yield the times of products of square matrices that take less than `seconds`, at least the
    SHORT smallest."""
    generator = torch.Generator().manual_seed(0)
    last = 0.0
    for number, size in enumerate(SIZES):
        short = number < SHORT
        if 8 * last > seconds * 1e9 and not short:
            return
        # Random, since a GPU's clock depends on how many bits change.
        left, right = (
            torch.rand(size, size, generator=generator).to(device, dtype) for _ in range(2)
        )
        action = partial(torch.mm, left, right, out=torch.empty_like(left))
        taken = repeated(action, clock, seconds, FEWEST_SHORT if short else FEWEST)
        last = min(taken)
        yield Products(size, taken)


def products_of_loop(
    library: str, dtype: torch.dtype, threads: int, clock: Clock, seconds: float
) -> Products:
    """Return the times of products by the suite's own loop: every thread multiplies matrices of its
    own, which stay in its cache.  library: compiled from common/setup/c/multiply.c for the
    dtype."""
    loaded = ctypes.CDLL(library)
    loaded.multiply.restype = None
    loaded.multiply.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    step = math.lcm(loaded.rows_of_block(), loaded.columns_of_block())
    size = -(-LOOP_SIZE // step) * step
    passes = LOOP_PASSES if threads > 1 else LOOP_PASSES_OF_ONE
    generator = torch.Generator().manual_seed(0)
    matrices_of_threads = [
        torch.rand(3, size, size, generator=generator).to(dtype) for _ in range(threads)
    ]

    def multiply(matrices: torch.Tensor) -> None:
        left, right, product = (matrix.data_ptr() for matrix in matrices)
        for _ in range(passes):
            loaded.multiply(size, left, right, product)

    with ThreadPoolExecutor(threads) as pool:  # ctypes lets other threads of Python run
        run_all = pool.map if threads > 1 else map
        taken = repeated(
            lambda: list(run_all(multiply, matrices_of_threads)), clock, seconds, FEWEST_SHORT
        )
    return Products(size, [span / (threads * passes) for span in taken], by="loop")


def run(job: JobSpec) -> Iterator[Limits]:
    device = set_up_torch(job.settings)
    seconds = max(SECONDS / job.settings.rounds, SHORTEST)
    yield measure(job.settings, device, seconds, **job.request)


def measure(
    settings: Settings,
    device: torch.device,
    seconds: float = SECONDS,
    library: str = "",
    no_library: str = "",
    products_alone: bool = False,
) -> Limits:
    """Return a ``limits`` record.

    Args:
        seconds: for each size.
        library: of products_of_loop, "" where there is none.
        no_library: why there is none, else "".
        products_alone: whether memory is left out.
    """
    clock = Clock(device)
    load = ForeignLoad()
    reason = no_library
    multiplied: list[Products] = []
    seconds = min(seconds, settings.max_seconds)
    with torch.no_grad():
        moved = [] if products_alone else list(streams(device, clock, seconds))
        try:
            dtype = getattr(torch, settings.dtype)
            multiplied = list(products(device, dtype, clock, seconds))
            if library:
                multiplied.append(
                    products_of_loop(library, dtype, torch.get_num_threads(), clock, seconds)
                )
        except RuntimeError as error:
            reason = f"products: {str(error).strip().splitlines()[0]}"
    foreign = load.share()
    return Limits(
        **facts(device),
        dtype=settings.dtype,
        streams=moved,
        products=multiplied,
        foreign_cpu=foreign,
        flags=busy_flags(foreign, host_threads(device)),
        reason=reason,
    )
