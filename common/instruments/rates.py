"""Measure the best rates of the device in each timing round (the limits pass), instead of trusting
a datasheet.

- Bandwidth: of adding in place (two reads and a write, as a loss does), of reading alone and of
  writing alone.  The buffer is far above every cache, as the logits of a batch are.
- Matrix rate: of square products in the run's dtype, of 2 n^3 operations each.  torch.mm computes
  them.  On a CPU a loop of the suite's own does too, since torch may not use all instructions of
  the processor.

Other load can only slow them down, so the best repeat of a process counts; the records keep every
repeat.
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
#: The buffer has at least these bytes, and at least CACHES times those of all caches.
BUFFER = {"cpu": 512 * MIB, "cuda": 2048 * MIB}
CACHES = 8
#: n of the products (n, n) x (n, n).
SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Seconds for each kind of memory access, and for each size of products: over all rounds, and at
#: least in one round.  The run's cap on a scope may lower both.
SECONDS, SHORTEST = 0.4, 0.1
#: Repeats, at least and at most.
FEWEST, MOST = 3, 200
#: The SHORT smallest sizes of products are always measured, at least FEWEST_SHORT times each: such a
#: product takes less than a time slice, so other load can slow every one of a few repeats.
SHORT, FEWEST_SHORT = 3, 10
#: Least n of the products of the suite's own loop.
LOOP_SIZE = 200
#: Products that each thread of the loop makes in a repeat: many, since starting threads takes up to
#: a tenth of a millisecond.  One thread alone is not started.  It makes few, since a repeat that is
#: longer than a time slice is hardly ever undisturbed.
LOOP_PASSES, LOOP_PASSES_OF_ONE = 64, 8


def repeated(
    action: Callable[[], Any], clock: Clock, seconds: float, fewest: int = FEWEST
) -> list[int]:
    """Repeat an action after a call that warms it up; return the nanoseconds of each repeat.

    The action is repeated until its repeats have taken `seconds`, or MOST times, but at least
    `fewest` times.
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
    """Yield the times of updating, reading and writing a buffer, which takes at most a quarter of
    the free memory."""
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = memory.available_memory()
    size = max(BUFFER[device.type], CACHES * (cache_bytes(device) or 0))
    if free is not None:
        size = min(size, free // 4)
    # Ones, not zeros: all zero pages that were never written share one page, which stays in the
    # cache.
    half = size // 8  # number of entries, of 4 bytes each, in half of the buffer
    whole = torch.ones(2 * half, dtype=torch.float32, device=device)
    first, second = whole.chunk(2)
    kernels = (  # (name, action, entries that it reads and writes)
        ("update", partial(first.add_, second), 3 * half),
        ("read", whole.sum, 2 * half),
        ("write", partial(whole.fill_, 1), 2 * half),
    )
    for kernel, action, moved in kernels:
        yield Stream(kernel, 4 * len(whole), 4 * moved, repeated(action, clock, seconds))


def products(
    device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float
) -> Iterator[Products]:
    """Yield the times of products of square matrices: one record for each of the SHORT smallest
    sizes, and for each larger size whose product is expected to take at most `seconds`.

    seconds: also the time for all repeats of one size."""
    generator = torch.Generator().manual_seed(0)
    next_ns = 0  # expected for the next size: twice the size takes 8 times the operations
    for number, size in enumerate(SIZES):
        is_short = number < SHORT
        if next_ns > seconds * 1e9 and not is_short:
            return
        # Random, since a GPU's clock depends on how many bits change.
        left, right = torch.rand(2, size, size, generator=generator).to(device, dtype)
        action = partial(torch.mm, left, right, out=torch.empty_like(left))
        fewest = FEWEST_SHORT if is_short else FEWEST
        taken = repeated(action, clock, seconds, fewest)
        next_ns = 8 * min(taken)
        yield Products(size, taken)


def products_of_loop(
    library: str, dtype: torch.dtype, threads: int, clock: Clock, seconds: float
) -> Products:
    """Return the times of products by the suite's own loop.

    Every thread multiplies matrices of its own, which stay in its cache.  The time of a repeat is
    divided by the number of products that all threads made in it.

    Args:
        library: path of common/setup/c/multiply.c as it was compiled for the dtype.
        dtype: float32 or float64.
        threads: number of threads.
        clock: a clock of the CPU.
        seconds: time for all repeats.
    """
    loaded = ctypes.CDLL(library)
    loaded.multiply.restype = None
    loaded.multiply.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    # `multiply` takes only sizes that are multiples of both sides of its blocks.
    block = math.lcm(loaded.rows_of_block(), loaded.columns_of_block())
    size = math.ceil(LOOP_SIZE / block) * block
    passes = LOOP_PASSES if threads > 1 else LOOP_PASSES_OF_ONE
    generator = torch.Generator().manual_seed(0)
    matrices_of_threads = [
        torch.rand(3, size, size, generator=generator).to(dtype) for _ in range(threads)
    ]

    def multiply(matrices: torch.Tensor) -> None:
        # Each pass adds the product of the first two matrices to the third.
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
    """Yield the ``limits`` record of a round.  The request of the job has the further
    arguments of `measure`."""
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

    Its `reason` says why products failed, or else why there is no library.

    Args:
        settings: those of the run.
        device: where it runs.
        seconds: time for each kind of memory access, and for each size of products.
        library: path of the library of products_of_loop, "" if there is none.
        no_library: why there is none, else "".
        products_alone: whether bandwidth is not measured.
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
