"""Compiles csrc/ into one shared library: by setup.py where the package is installed, or when it is first needed.

On x86-64 it has the kernels for three instruction sets, and takes what the processor has when it runs, so a wheel may
go to another machine.  It needs a C++17 compiler (GCC or Clang; CXX names another) and neither torch's headers nor
Python's.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import List, Sequence

CSRC = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]


class BuildError(RuntimeError):
    """The compiler is missing, or failed; the message has what it said."""


def machine() -> str:
    """Return the processor to compile for: this one, or for a cross compiler (CXX) that of FUSED_TRANSDUCER_MACHINE."""
    return os.environ.get("FUSED_TRANSDUCER_MACHINE") or platform.machine()


def instruction_sets() -> List[List[str]]:
    """Return the flags of each object file."""
    return [[], AVX2, AVX512] if machine().lower() in ("x86_64", "amd64") else [[]]


def digest() -> str:
    """Names what the library is made of, so that none of other sources is taken for it."""
    content = hashlib.sha256(repr((FLAGS, instruction_sets(), machine(), platform.system())).encode())
    for path in sorted(CSRC.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def library_name() -> str:
    return f"_native-{digest()}.so"


def compiler() -> List[str]:
    """Return the words that call the compiler: CXX, or the first that there is.  Raises BuildError."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}: {error}") from error
    for words in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]):
            return words
    raise BuildError(f"there is no C++ compiler ({given[0] if given else 'c++, g++ or clang++'})")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stdout.strip()[-2000:]}")


def _has_openmp(words: Sequence[str], folder: Path) -> bool:
    source = folder / "openmp.cpp"
    source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
    try:
        _run([*words, "-fopenmp", str(source), "-o", str(folder / "openmp")])
    except BuildError:
        return False
    return True


def build(target: Path, flags: Sequence[str] = ()) -> None:
    """Write the library to `target`, at once and whole; flags: added to FLAGS.  Raises BuildError, OSError."""
    words = compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        flags = [*FLAGS, *flags] + (["-fopenmp"] if _has_openmp(words, folder) else ["-Wno-unknown-pragmas"])
        jobs = [("dispatch.cpp", folder / "dispatch.o", flags)]
        jobs += [("kernels.cpp", folder / f"{i}.o", flags + of_set) for i, of_set in enumerate(instruction_sets())]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
            list(pool.map(lambda job: _run([*words, *job[2], "-c", str(CSRC / job[0]), "-o", str(job[1])]), jobs))
        made = folder / "made.so"
        _run([*words, *flags, "-shared", *(str(job[1]) for job in jobs), "-o", str(made)])
        install(made, target)


def install(made: Path, target: Path) -> None:
    """Copy a file to `target` such that a crash, a full disk or another process never leaves a part of it there."""
    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(made.read_bytes())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
