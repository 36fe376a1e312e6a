"""Compile csrc/ into one shared library, and find it.

setup.py puts the library beside the package when it is installed. Else it is in a cache, where it
is compiled when it is first needed. That takes a C++17 compiler (GCC or Clang; CXX names another),
and neither torch's headers nor Python's. On x86-64 the library has kernels for three instruction
sets and chooses one when it runs, so that a wheel may go to another machine.

To load a library is to run its code. So it is not loaded if others could have written it: neither
it nor its folder may belong to another user, or be open to others for writing. If no cache is safe,
the library is compiled for this process alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Iterator, List, Sequence

CSRC = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]


class BuildError(RuntimeError):
    """The compiler is missing, or failed; the message has what it said."""


def machine() -> str:
    """Return the name of the processor to compile for, such as "x86_64": this machine's, unless
    FUSED_TRANSDUCER_MACHINE is set, as for a cross compiler (CXX)."""
    return os.environ.get("FUSED_TRANSDUCER_MACHINE") or platform.machine()


def instruction_sets() -> List[List[str]]:
    """Return the flags of each instruction set, for which kernels.cpp is compiled once."""
    return [[], AVX2, AVX512] if machine().lower() in ("x86_64", "amd64") else [[]]


def library_name() -> str:
    """Return the file name of the library. It has a digest of the sources and flags, so that a
    library of other sources is not mistaken for it."""
    content = hashlib.sha256(
        repr((FLAGS, instruction_sets(), machine(), platform.system())).encode()
    )
    for path in sorted(CSRC.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"_native-{content.hexdigest()[:16]}.so"


def compiler() -> List[str]:
    """Return the command of the compiler: CXX, or the first of c++, g++ and clang++ that exists.
    Raises BuildError."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}: {error}") from error
    for words in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]):
            return words
    raise BuildError(f"there is no C++ compiler ({chosen[0] if chosen else 'c++, g++ or clang++'})")


def _run(command: Sequence[str]) -> None:
    """Run a command; raise BuildError with the end of its output if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stdout.strip()[-2000:]}")


def build(target: Path, flags: Sequence[str] = ()) -> None:
    """Compile the library and write it to `target`, whole or not at all. Raises BuildError,
    OSError.

    flags: for the compiler, after FLAGS."""
    words, flags = compiler(), [*FLAGS, *flags]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        openmp = folder / "openmp.cpp"
        openmp.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        try:
            _run([*words, "-fopenmp", str(openmp), "-o", str(folder / "openmp")])
            flags.append("-fopenmp")
        except BuildError:  # without OpenMP the library has one thread
            flags.append("-Wno-unknown-pragmas")
        jobs = [("dispatch.cpp", str(folder / "dispatch.o"), flags)]
        jobs += [
            ("kernels.cpp", str(folder / f"{i}.o"), flags + set_flags)
            for i, set_flags in enumerate(instruction_sets())
        ]
        commands = [
            [*words, *flags_of_job, "-c", str(CSRC / source), "-o", compiled]
            for source, compiled, flags_of_job in jobs
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))  # `list` raises the BuildError of a command
        made = folder / "made.so"
        objects = [compiled for _, compiled, _ in jobs]
        _run([*words, *flags, "-shared", *objects, "-o", str(made)])
        install(made, target)


def install(made: Path, target: Path) -> None:
    """Copy a file to `target` by a rename, so that a crash, a full disk or another process never
    leaves a part of it there."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as folder:
        partial = Path(folder) / target.name
        with partial.open("wb") as stream:
            stream.write(made.read_bytes())
            stream.flush()
            os.fsync(stream.fileno())
        partial.chmod(0o644)
        partial.replace(target)


def cache_folder() -> Path:
    """Return $FUSED_TRANSDUCER_CACHE, or else the folder fused_transducer in the user's cache.

    Raises OSError if the user's cache is needed and the user has no home directory."""
    folder = os.environ.get("FUSED_TRANSDUCER_CACHE")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # XDG's specification ignores an empty or relative path
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("there is no home directory")
    return Path(base, "fused_transducer")


def refusal(path: Path) -> str:
    """Return why a file or folder must not be trusted; "" if it may be.

    It may be trusted if this user or root owns it, and nobody else can write to it. On a system
    without such owners (Windows) it is always trusted. Raises OSError."""
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {status.st_uid})"
    is_open = hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"others can write to {path} (chmod go-w mends that)" if is_open else ""


def _in_cache() -> Path:
    """Return the path of the library in the cache. If it is not there, one process compiles it and
    others wait. Raises BuildError if the compilation fails, OSError if there is no safe cache."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get("FUSED_TRANSDUCER_CACHE"):  # a folder of the user's choice keeps its mode
        with suppress(PermissionError):  # root may own the folder, with the library in it
            folder.chmod(0o700)
    if refusal(folder):
        raise PermissionError(refusal(folder))
    path = folder / library_name()

    def is_usable() -> bool:
        return path.is_file() and not path.is_symlink() and not refusal(path)

    if not is_usable():
        with (folder / "lock").open("a") as lock:
            # Where files cannot be locked, two processes may do the same work.
            with suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_usable():
                build(path)
    return path


@contextmanager
def located() -> Iterator[Path]:
    """Yield the path of the compiled library; compile it if need be.

    Without a usable cache warn, and compile it into a temporary folder, which is deleted when the
    context ends. Raises BuildError; OSError if that folder cannot be written."""
    path = Path(__file__).parent / library_name()
    with ExitStack() as stack:
        if not path.is_file():
            try:
                path = _in_cache()
            except OSError as error:
                warnings.warn(
                    f"fused_transducer: no cache for the compiled code: {error}; it is compiled for this process "
                    "alone. Set FUSED_TRANSDUCER_CACHE to a folder of your own, to which nobody else can write",
                    stacklevel=4,
                )
                private = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="fused_transducer-")
                )
                path = Path(private) / library_name()
                build(path)
        yield path
