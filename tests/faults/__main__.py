"""``make faults``: break things by seed, and ask after each what must hold; docs/reliability.md tells what.

  make faults                                        all of them, with the seeds 0, 1, 2, ... of each kind
  make faults ARGS="--from 5000"                     other seeds
  make faults ARGS="--only logs --from 17 --count 1" one again, as its line says

Exit code: 0; 1 when a promise does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import pass_on_no_ignored_signals
from faults import Broken, files, processes

KINDS: dict[str, tuple[Callable[[int, Path], Any], int]] = {**processes.KINDS, **files.KINDS}


def broken_by(kind: str, seed: int) -> str | None:
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS), metavar="A,B", help=f"Kinds of faults: {', '.join(KINDS)}")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="First seed. Default: 0")
    parser.add_argument("--count", type=int, metavar="N", help="Faults of each kind. Default: as many as the kind has")
    options = parser.parse_args(arguments)
    pass_on_no_ignored_signals()
    all_broken = 0
    for kind in options.only.split(","):
        seeds = range(options.first, options.first + (options.count or KINDS[kind][1]))
        broken = {seed: words for seed in seeds if (words := broken_by(kind, seed)) is not None}
        for seed, words in broken.items():
            indented = words.strip().replace("\n", "\n    ")
            print(f'make faults ARGS="--only {kind} --from {seed} --count 1"\n    {indented}')
        print(f"{kind:10s} {len(seeds):5d} faults from seed {options.first}: {len(broken)} broken", flush=True)
        all_broken += len(broken)
    return int(all_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
