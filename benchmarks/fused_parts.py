#!/usr/bin/env python3
"""Measure where the time of a step of `fused` goes on a CPU: products, exponentials, activations, lattice, the rest.

    .venv/main/bin/python benchmarks/fused_parts.py log/fused-table/bpe500-random/fused-2

Each argument is the folder of a run of `fused`.  Its largest batch is measured again, with its settings, by a copy of
the C++ code that reads a clock when a thread goes on to another part (fused_parts.h).  Output is a line of JSON for
each, of the fastest repeat: nanoseconds of forward and backward, of the parts summed over all threads, and the floating
point operations of the products.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.cli.parser import Parser  # noqa: E402
from common.core import flag_types  # noqa: E402
from common.core.errors import EXIT_OK, UserError  # noqa: E402
from common.core.guard import guarded  # noqa: E402
from common.core.settings import Settings  # noqa: E402
from common.data.batching import heaviest  # noqa: E402
from common.losses import context as contexts  # noqa: E402
from common.records import store  # noqa: E402

HEADER = Path(__file__).with_name("fused_parts.h")
#: In the order of `Part` of the header; "outside" is no time of the kernels.
PARTS = ("outside", "preparing", "activations", "products", "exponentials", "lattice", "adding", "waiting")
FORWARD, BACKWARD = 2, 6  # operations for each H, symbol and cell: one product; the logits again and two gradients


class Call(NamedTuple):
    """Nanoseconds of a call, operations of its products, and nanoseconds of its parts summed over all threads."""

    ns: int
    flops: int
    parts_ns: Dict[str, int]


class Watch:
    """Replaces native.forward and native.backward and times them; `newest` has the last call of each."""

    def __init__(self, library: ctypes.CDLL, native: Any):
        self.library = library
        self.newest: Dict[str, Call] = {}
        library.fused_transducer_cells.restype = ctypes.c_int64
        native._library = lambda: (library, "")
        native.forward, native.backward = self._timed(native.forward), self._timed(native.backward)

    def parts(self) -> List[int]:
        numbers = (ctypes.c_int64 * len(PARTS))()
        self.library.fused_transducer_parts(numbers)
        return list(numbers)

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def run(call: Any, *others: Any) -> None:
            flops, cells = self._flops(function.__name__, call, *others), self.library.fused_transducer_cells()
            before, begin = self.parts(), time.perf_counter_ns()
            function(call, *others)
            spent = time.perf_counter_ns() - begin
            flops += FORWARD * call.H * call.V * (self.library.fused_transducer_cells() - cells)
            parts = {name: after - old for name, old, after in zip(PARTS, before, self.parts()) if name != "outside"}
            self.newest[function.__name__] = Call(spent, flops, parts)

        return run

    @staticmethod
    def _flops(name: str, call: Any, first: Any, *others: Any) -> int:
        """Return the operations of backward; 0 for forward, whose operations are counted.

        first, others: the arguments of native.forward (gradient, losses, dropped, arcs, kept) or of native.backward
        (grad_losses, arcs, kept, gradients).
        """
        if name == "forward":
            return 0
        arcs, kept, _ = others
        posteriors = arcs[0] + arcs[1]
        counted = int(((posteriors >= call.negligible) & (posteriors != 0)).sum())
        return (BACKWARD - FORWARD * bool(len(kept))) * call.H * call.V * counted


class Step(NamedTuple):
    """The parts of a step on the heaviest batch of a run; needed cells of that batch are counted in the run too."""

    run: str
    batch: int
    threads: int
    forward: Call
    backward: Call

    def to_json(self) -> str:
        return json.dumps({**self._asdict(), "forward": self.forward._asdict(), "backward": self.backward._asdict()})


def measured(folder: Path, watch: Watch, repeats: int) -> Step:
    """Return the fastest step on the batch with the most cells of the run in `folder`.  Raises UserError."""
    import torch

    header, _ = store.read_run(folder)
    if header.name != "fused" or not str(header.settings["device"]).startswith("cpu"):
        raise UserError(f"{folder}: is not of fused on a CPU; name the folder of such a run")
    job = {"script": "benchmark_fused", "variant": "", "pass": "timing"}
    context = contexts.prepare(job, Settings.from_json(header.settings))
    batch = heaviest(context.all_batches, context.batches)[0]
    steps = []
    for repeat in range(-1, repeats):
        context.step("step", batch, max(repeat, 0)).run()
        if repeat >= 0:  # the first warms up
            steps.append(dict(watch.newest))
    fastest = min(steps, key=lambda calls: sum(call.ns for call in calls.values()))
    return Step(folder.parent.name, batch, torch.get_num_threads(), **fastest)


def main(arguments: argparse.Namespace) -> int:
    from fused_transducer import compiling, native

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "parts.so"
        try:
            compiling.build(path, ["-include", str(HEADER)])
            watch = Watch(native.loaded(path), native)
        except (compiling.BuildError, OSError, AttributeError) as error:
            raise UserError(
                f"{HEADER.name}: cannot be compiled ({error}); it needs GCC or Clang with OpenMP"
            ) from error
        for folder in arguments.runs:
            print(measured(folder, watch, arguments.repeats).to_json(), flush=True)
    return EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    result.add_argument("runs", nargs="+", type=flag_types.path, metavar="DIR", help="Folders of runs of fused.")
    result.add_argument(
        "--repeats", type=flag_types.whole(1), default=3, metavar="N", help="Number of steps. Default: 3"
    )
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("fused_parts.py", lambda: main(given)))
