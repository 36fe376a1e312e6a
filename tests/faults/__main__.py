"""``make faults``: break things by seed, and ask after each what must hold; docs/reliability.md tells what.

  make faults                                        all of them, with the seeds 0, 1, 2, ... of each kind
  make faults ARGS="--from 5000"                     other seeds
  make faults ARGS="--only records,signals --part 10%"
  make faults ARGS="--only records --from 17 --count 1"   one again, as its line says

Exit code: 0; 1 when an invariant does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from commands import pass_on_no_ignored_signals

from faults import files, running, surroundings
from faults.invariants import Broken

KINDS = {**running.KINDS, **surroundings.KINDS, **files.KINDS}  # the slow ones first


def broken_by(kind: str, seed: int) -> Optional[str]:
    """Let one fault happen; None where everything holds, else what does not."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{seed}-"))
    try:
        KINDS[kind][0](seed, folder)
    except Broken as broken:
        return str(broken)
    except BaseException:  # a traceback that a user would see
        return "".join(traceback.format_exc().splitlines(keepends=True)[-12:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def scratch_in(folder: str) -> None:
    """Set up a process of the pool."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def happen(wanted: Sequence[Tuple[str, int]], processes: int) -> Dict[Tuple[str, int], str]:
    """Let all of these faults happen; what is broken after which, printed at once."""
    broken = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        with ProcessPoolExecutor(processes, initializer=scratch_in, initargs=(scratch,)) as pool:
            waiting = {pool.submit(broken_by, *fault): fault for fault in wanted}
            for done in as_completed(waiting):
                (kind, seed), words = waiting[done], done.result()
                if words is not None:
                    broken[kind, seed] = words
                    text = words.strip().replace("\n", "\n    ")
                    print(f'make faults ARGS="--only {kind} --from {seed} --count 1"\n    {text}', flush=True)
    return broken


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(KINDS)
    parser.add_argument(
        "--only", default=",".join(kinds), metavar="A,B", help=f"Kinds of faults: {', '.join(kinds)}. Default: all"
    )
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="First seed. Default: 0")
    parser.add_argument("--count", type=int, metavar="N", help="Faults of each kind. Default: as many as the kind has")
    parser.add_argument("--part", default="100%", metavar="P%", help="Share of these. Default: 100%%")
    parser.add_argument("--processes", type=int, default=2, metavar="K", help="Processes side by side. Default: 2")
    options = parser.parse_args(arguments)
    pass_on_no_ignored_signals()
    share, since = float(options.part.rstrip("%")) / 100, time.monotonic()
    counts = {kind: max(1, round(share * (options.count or KINDS[kind][1]))) for kind in options.only.split(",")}
    wanted = [(kind, seed) for kind, count in counts.items() for seed in range(options.first, options.first + count)]
    broken = happen(wanted, options.processes)
    for kind, count in counts.items():
        seeds = f"{options.first} to {options.first + count - 1}"
        print(f"{kind:10s} {count:5d} faults, seeds {seeds:14s} {sum(kind == of for of, _ in broken)} broken")
    print(f"{len(wanted)} faults in {time.monotonic() - since:.0f} s: {len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
