"""``make faults``: break things by seed, and ask after each what must hold; docs/reliability.md tells what.

  make faults                                        all of them, with the seeds 0, 1, 2, ... of each kind
  make faults ARGS="--from 5000"                     other seeds
  make faults ARGS="--only logs,signals --part 10%"
  make faults ARGS="--only logs --from 17 --count 1" one again, as its line says

Exit code: 0; 1 when a promise does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from commands import pass_on_no_ignored_signals

from faults import Broken, files, processes

KINDS: Dict[str, Tuple[Callable[[int, Path], Any], int]] = {**processes.KINDS, **files.KINDS}


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


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS), metavar="A,B", help=f"Kinds of faults: {', '.join(KINDS)}")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="First seed. Default: 0")
    parser.add_argument("--count", type=int, metavar="N", help="Faults of each kind. Default: as many as the kind has")
    parser.add_argument("--part", default="100%", metavar="P%", help="Share of these. Default: 100%%")
    options = parser.parse_args(arguments)
    pass_on_no_ignored_signals()
    share, since, all_broken = float(options.part.rstrip("%")) / 100, time.monotonic(), 0
    for kind in options.only.split(","):
        count = max(1, round(share * (options.count or KINDS[kind][1])))
        broken = 0
        for seed in range(options.first, options.first + count):
            words = broken_by(kind, seed)
            if words is not None:
                broken += 1
                text = words.strip().replace("\n", "\n    ")
                print(f'make faults ARGS="--only {kind} --from {seed} --count 1"\n    {text}', flush=True)
        print(f"{kind:10s} {count:5d} faults from seed {options.first}: {broken} broken", flush=True)
        all_broken += broken
    print(f"{time.monotonic() - since:.0f} s: {all_broken} broken")
    return 1 if all_broken else 0


if __name__ == "__main__":
    sys.exit(main())
