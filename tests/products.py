"""``make products``: are right losses accepted and wrong ones refused, whichever library multiplies matrices?

  make products                              with every library that can be had here
  make products ARGS="--only intel,openblas" with some

torch's wheel multiplies by MKL, which takes other kernels on other processors.  Each sums in an order of its own, so
each rounds the logits otherwise.  A library whose products have the bits of torch's own here is left out.

Exit code: 0; 1 when a right loss is refused, or a wrong one accepted.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.setup import libraries

from commands import ROOT, command

#: Prints the bits of products of several sizes.
PRODUCTS = """
import hashlib, torch
torch.manual_seed(0)
sizes = [(2048, 512, 500), (97, 128, 101), (41, 24, 17)]
made = b"".join((torch.randn(m, k) @ torch.randn(k, n)).numpy().tobytes() for m, k, n in sizes)
print(hashlib.sha256(made).hexdigest())
"""
#: Tests in which a loss is judged: those of right ones, and those of wrong ones.
TESTS = ["tests/test_contract.py", "tests/test_broken_losses.py"]


def environments() -> dict[str, dict[str, str] | None]:
    """Return the environment variables of each library by its name; None where it cannot be had."""
    openblas, intel = ctypes.util.find_library("openblas"), None
    with suppress(NotRunnable):
        intel = str(libraries.mkl_as_intel())
    return {
        "torch": {},
        "intel": {"LD_PRELOAD": intel} if intel else None,
        "compatible": {"MKL_CBWR": "COMPATIBLE"},
        "openblas": {"LD_PRELOAD": openblas} if openblas else None,
    }


def bits(variables: dict[str, str]) -> str:
    """Return a hash of products that are made with these environment variables."""
    line = [sys.executable, "-c", PRODUCTS]
    return subprocess.run(line, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True).stdout


def failures(variables: dict[str, str], folder: Path, processes: int) -> list[str]:
    """Run the tests, and the quick benchmark as far as it judges losses; return which of both failed."""
    tests = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "worksteal", *TESTS]
    flags = ["--preset", "quick", "--passes", "correctness,timing", "--quiet", "--log-dir", folder]
    benchmark = command("benchmark_all.py", *flags)
    around, steps = {**os.environ, **variables}, {"tests": tests, "benchmark": benchmark}
    return [name for name, line in steps.items() if subprocess.run(line, cwd=ROOT, env=around).returncode != 0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help="Libraries: torch, intel, compatible, openblas. Default: all")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="Processes of pytest. Default: 3")
    options = parser.parse_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory(prefix="products-") as made:
        found = environments()
        own = bits({})
        for name in options.only.split(",") if options.only else found:
            if name not in found:
                parser.error(f"no library is named {name}: {', '.join(found)}")
            variables = found[name]
            if variables is None:
                print(f"{name}: left out, it cannot be had here (a C compiler; libopenblas0)", flush=True)
                continue
            if variables and bits(variables) == own:
                print(f"{name}: left out, its products have the bits of torch's own here", flush=True)
                continue
            print(f"{name}: {' '.join(f'{key}={value}' for key, value in variables.items())}", flush=True)
            failed += [f"{name} ({step})" for step in failures(variables, Path(made) / name, options.processes)]
    print(f"products: {', '.join(failed) or 'none'} failed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
