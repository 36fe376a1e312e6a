"""Random problems through the C++ code of fused_transducer under GCC's address and undefined-behaviour sanitizers, with
each instruction set of this processor, beside the plain PyTorch code.

PYTHONPATH=tests python -m sanitize (make sanitize) compiles the code, and runs it in processes into which libasan is
loaded first.  It ends with 1 where a sanitizer reports or a result is wrong, and with 2 without such a compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

from commands import ROOT

from fused_transducer import compiling

FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
INSTRUCTION_SETS = ["avx512", "avx2", "baseline"]


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=150, help="Problems for each instruction set. Default: 150")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the problems. Default: 0")
    options = parser.parse_args(arguments)
    try:
        words = [*compiling.compiler(), "-print-file-name=libasan.so"]
    except compiling.BuildError as error:
        parser.error(str(error))
    preload = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(preload):
        parser.error("the compiler has no libasan; install that of GCC, or set CXX=g++")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        compiling.build(Path(folder) / compiling.library_name(), FLAGS)
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        for instruction_set in INSTRUCTION_SETS if on_x86 else INSTRUCTION_SETS[-1:]:
            environment = {
                **os.environ,
                "LD_PRELOAD": preload,
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "FUSED_TRANSDUCER_CACHE": folder,
                "FUSED_TRANSDUCER_ISA": instruction_set,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            }
            script = f"import fused_helpers; fused_helpers.solve_random({options.count}, {options.seed})"
            done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
            print(f"{instruction_set}: {done.stdout.strip()}", flush=True)
            failed |= done.returncode != 0
            print(done.stderr[:8000] if done.returncode else "", end="", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
