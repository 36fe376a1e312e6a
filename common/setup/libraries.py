"""The suite's own C files (common/setup/c), each compiled once by the C compiler that is there.

They are small libraries without Python, so that one serves every environment: `built` gives the
file, for ctypes or for LD_PRELOAD.  Standard library only."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.files import BUILD
from rnnt_bench.system import memory, processes

SOURCES = Path(__file__).parent / "c"
COMPILED = BUILD / "libraries"
#: Dtype that multiply.c takes -> its name in C.
NUMBERS = {"float32": "float", "float64": "double"}


def multiplication(dtype: str) -> Path:
    """Return the library that multiplies matrices of a dtype of NUMBERS with this processor's
    widest vectors.

    Raises NotRunnable."""
    return built("multiply", "-O3", *vector_flags(), f"-DNUMBER={NUMBERS[dtype]}")


def mkl_as_intel() -> Path:
    """Return the library that, preloaded, makes MKL take the path that it takes on Intel's
    processors.

    Raises NotRunnable."""
    return built("mkl_as_intel", "-O2")


def build() -> None:
    """Compile what is not compiled yet; what cannot be is left out, and says so when it is
    wanted."""
    with suppress(NotRunnable):
        mkl_as_intel()
        for dtype in NUMBERS:
            multiplication(dtype)


def vector_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the widest vectors with multiply-add that this processor
    has."""
    features = (memory.proc_field("/proc/cpuinfo", "flags") or "").split()
    if "avx512f" in features:
        return "-mavx512f", "-mfma"
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= {*features} else ()


def compiler_version(compiler: str) -> str:
    """Return the first line that a compiler says of itself; "" where there is no such compiler."""
    return processes.output([compiler, "--version"]).partition("\n")[0].strip()


def built(name: str, *flags: str) -> Path:
    """Return the shared library of SOURCES/NAME.c, compiled first unless it is there.

    Raises NotRunnable("missing") without a C compiler, or without a folder to keep it in."""
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
                done = subprocess.run(
                    [compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(new)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    errors="replace",
                )
                if done.returncode != 0:
                    lines = done.stderr.splitlines() or ["no output"]
                    reason = next((line for line in lines if "error:" in line), lines[-1])
                    raise NotRunnable(
                        "missing", f"{compiler} does not compile {source.name}: {reason}"
                    )
                os.replace(new, target)
    except OSError as error:
        advice = f"make room in {COMPILED} or make it writable"
        raise NotRunnable(
            "missing", f"{source.name} cannot be compiled: {error}; {advice}"
        ) from error
    return target
