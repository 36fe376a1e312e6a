"""Compile the suite's own C files, common/setup/c, with the machine's C compiler.

They are small libraries that do not use Python, so one build serves every environment, through
ctypes or LD_PRELOAD.  Only the standard library is imported."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.files import BUILD
from rnnt_bench.system import memory, processes

SOURCES = Path(__file__).parent / "c"
COMPILED = BUILD / "libraries"
#: Dtype -> the type in C for which multiply.c is compiled.
NUMBERS = {"float32": "float", "float64": "double"}


def multiplication(dtype: str) -> Path:
    """Return a library that multiplies matrices with the widest vectors of this processor.

    Raises NotRunnable if it cannot be compiled.

    dtype: a key of NUMBERS."""
    return built("multiply", "-O3", *vector_flags(), f"-DNUMBER={NUMBERS[dtype]}")


def mkl_as_intel() -> Path:
    """Return a library for LD_PRELOAD, with which MKL uses its fast path for Intel's processors.

    Raises NotRunnable if it cannot be compiled."""
    return built("mkl_as_intel", "-O2")


def build() -> None:
    """Compile the libraries that are not compiled yet.

    The first error ends the function and is not raised: a later call for that library raises it
    again."""
    with suppress(NotRunnable):
        # The paths are dropped: a later call finds the library compiled.
        mkl_as_intel()
        for dtype in NUMBERS:
            multiplication(dtype)


def vector_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the widest vectors with multiply-add on this processor."""
    features = (memory.proc_field("/proc/cpuinfo", "flags") or "").split()
    if "avx512f" in features:
        return "-mavx512f", "-mfma"
    if "avx2" in features and "fma" in features:
        return "-mavx2", "-mfma"
    return ()


def compiler_version(compiler: str) -> str:
    """Return the first line that ``COMPILER --version`` prints; "" if there is no such compiler."""
    return processes.output([compiler, "--version"]).partition("\n")[0].strip()


def built(name: str, *flags: str) -> Path:
    """Return the path of the shared library of SOURCES/NAME.c; compile it if it does not exist yet.

    The name of its file has a digest of the source, compiler and flags.  Raises
    NotRunnable("missing") if there is no compiler, or it fails, or COMPILED cannot be written."""
    source = SOURCES / f"{name}.c"
    compiler = os.environ.get("CC", "cc")
    version = compiler_version(compiler)
    if not version:
        raise NotRunnable(
            "missing", f"it needs a C compiler; `{compiler}` is none: install gcc (or set CC)"
        )
    conditions = "\n".join([source.read_text(encoding="utf-8"), compiler, version, *flags])
    digest = hashlib.sha256(conditions.encode()).hexdigest()[:12]
    target = COMPILED / f"{name}-{digest}.so"
    try:
        if not target.exists():
            COMPILED.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=COMPILED) as folder:
                new = Path(folder) / target.name
                _compile(compiler, source, flags, new)
                os.replace(new, target)
    except OSError as error:
        advice = f"make room in {COMPILED} or make it writable"
        raise NotRunnable(
            "missing", f"{source.name} cannot be compiled: {error}; {advice}"
        ) from error
    return target


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile a C file into a shared library.  Raises NotRunnable with the compiler's error."""
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(library)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["no output"]
        reason = next((line for line in lines if "error:" in line), lines[-1])
        raise NotRunnable("missing", f"{compiler} does not compile {source.name}: {reason}")
