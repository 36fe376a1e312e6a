"""Compile losses from their source packages (sdists), once for each user.

All checkouts share a cache of builds.  A build is named after its package, torch, Python, compiler
and device, and has that name only if it is complete.  The sources are compiled with
torch.utils.cpp_extension, not with the sdist's cmake: that downloads pybind11 and moderngpu, and
asks for another C++ standard than today's torch.  An installed package that can be imported is used
instead of a build.  torch is imported only to compile, so finding a build takes milliseconds.

The code of a build runs when it is imported.  So a build that another user can write to is made
anew, and a cache that others can write to is refused.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rnnt_bench.core.called import or_set_up
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, guarded, say
from rnnt_bench.core.files import CACHE, ROOT, locked, refusal
from rnnt_bench.setup import libraries, simulated
from rnnt_bench.system import machine, memory, processes


@dataclass(frozen=True)
class SourcePackage:
    """Describe a package that is compiled from its sdist.

    Paths and globs are relative to the top of the sdist, which is also an include folder.

    Attributes:
        package: its name in Python and in the package index
        python: folder of its Python package
        module: the name under which the Python package imports the compiled module
        sources: globs of the files that every device needs; a .cu file is compiled as C++ for the
            CPU.  () for a package without a version for the CPU
        templates: files of the Python package to make: X of X.in, where @TORCH_VERSION@ is replaced
        metadata: a folder with the package's metadata, if it reads its own version; "" for none
        flags: of the C++ compiler
        cuda_sources: globs of further files for CUDA; () for a package without a version for CUDA
        cuda_define: flag with which the sources know that they are compiled for CUDA
        nvcc_flags: of nvcc
        headers: folder beside this file, from which the sources for CUDA include; "" for none
    """

    package: str
    python: str
    module: str
    sources: tuple[str, ...]
    templates: tuple[str, ...] = ()
    metadata: str = ""
    # -std is left out: torch adds the one that its headers need.
    flags: tuple[str, ...] = ("-O3", "-DNDEBUG")
    cuda_sources: tuple[str, ...] = ()
    cuda_define: str = ""
    nvcc_flags: tuple[str, ...] = ()
    headers: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that the package can be compiled for: some of "cpu", "cuda",
        "simulated"."""
        on_cuda = ("cuda", simulated.DEVICE) if self.cuda_sources else ()
        return ("cpu", *on_cuda) if self.sources else on_cuda

    @property
    def header_folder(self) -> Path:
        """Return the path of `headers`; without headers, the folder of this file."""
        return Path(__file__).parent / self.headers

    def recipe(self, device: str) -> str:
        """Return a text that changes if our part of a build for a device changes.

        Our part is the fields of `self`, with the flags; for devices other than "cpu" the files of
        `header_folder`; and for "simulated" our header, the code that rewrites the sources, and its
        flags.  The version of the sdist is not in the text."""
        text = repr(self)
        files: list[Path] = []
        if device != "cpu" and self.headers:
            files += sorted(self.header_folder.rglob("*.hxx"))
        if device == simulated.DEVICE:
            files += [simulated.HEADER, Path(simulated.__file__)]
            text += repr(simulated.flags())
        return text + "".join(path.read_text(encoding="utf-8") for path in files)

    def source_files(self, sdist: Path, device: str) -> list[Path]:
        """Return the files of the unpacked sdist to compile for a device."""
        globs = self.sources if device == "cpu" else self.sources + self.cuda_sources
        return [path for glob in globs for path in sorted(sdist.glob(glob))]


def pinned(package: str) -> tuple[str, str]:
    """Return the version of a source package and the SHA-256 of its sdist, in hex, as
    requirements/sources.txt pins them."""
    pattern = rf"^{re.escape(package)}==(\S+) --hash=sha256:([0-9a-f]{{64}})$"
    pins = (Path(__file__).parent / "requirements" / "sources.txt").read_text(encoding="utf-8")
    ((version, digest),) = re.findall(pattern, pins, flags=re.MULTILINE)
    return version, digest


SOURCE_PACKAGES = {
    source.package: source
    for source in (
        SourcePackage(
            "optimized_transducer",
            python="optimized_transducer/python/optimized_transducer",
            templates=("torch_version.py",),
            module="_optimized_transducer",
            sources=(
                "optimized_transducer/csrc/cpu.cc",
                "optimized_transducer/csrc/transducer-loss.cc",
                "optimized_transducer/python/csrc/*.cc",
            ),
            cuda_sources=("optimized_transducer/csrc/*.cu",),
            cuda_define="-DOT_WITH_CUDA",
            nvcc_flags=(  # those of its cmake
                "-O3",
                "-lineinfo",
                "--expt-extended-lambda",
                "-use_fast_math",
                "-Xptxas=-w",
            ),
            headers="headers",  # has the one function of moderngpu that it calls
        ),
        SourcePackage(
            package="fast_rnnt",
            python="fast_rnnt/python/fast_rnnt",
            module="_fast_rnnt",
            sources=("fast_rnnt/csrc/mutual_information_cpu.cu", "fast_rnnt/python/csrc/*.cu"),
            cuda_sources=("fast_rnnt/csrc/mutual_information_cuda.cu",),
            cuda_define="-DFT_WITH_CUDA",
            nvcc_flags=("-O3", "-lineinfo", "--expt-extended-lambda"),
        ),
        SourcePackage(
            package="warp_rnnt",
            python="warp_rnnt",
            metadata="warp_rnnt.egg-info",
            module="warp_rnnt._C",
            sources=(),
            cuda_sources=("binding.cpp", "core*.cu"),
            nvcc_flags=("-O3",),
        ),
    )
}


#: Free memory in bytes that one compiler needs.
COMPILER_BYTES = 2**31
#: On a machine without a GPU, kernels are compiled for A100, H100 and later GPUs.
ARCHITECTURES = "8.0;9.0+PTX"


def tools(source: SourcePackage, device: str) -> tuple[dict[str, str], str]:
    """Find the tools that compile a package for a device.

    Returns the environment variables that torch.utils.cpp_extension needs, and a hash of everything
    on which the build depends.  Raises NotRunnable: "missing" without torch or a compiler,
    "unsupported" if the package, torch or the machine has no CUDA."""
    if device not in source.devices:
        raise NotRunnable("unsupported", f"{source.package} has no {device} version")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotRunnable("missing", f"{sys.executable} has no torch: pip install torch")
    versions = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    compiler = os.environ.get("CXX", "c++")
    compiler_version = libraries.compiler_version(compiler)
    if not compiler_version:
        raise NotRunnable(
            "missing",
            f"{source.package} is compiled from source, which needs a C++ compiler; `{compiler}` is none: "
            "install gcc and g++ (or set CXX)",
        )
    # ninja is a script of this Python, which is not on PATH unless the environment is activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    variables = {"CXX": compiler, "PATH": path}
    conditions = [
        sysconfig.get_config_var("SOABI"),
        versions["__version__"],
        compiler_version,
        source.recipe(device),
    ]
    if device == "cuda":
        if not versions.get("cuda"):
            raise NotRunnable("unsupported", f"this torch ({versions['__version__']}) has no CUDA")
        home, release = _toolkit(versions["cuda"])
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures() or ARCHITECTURES
        variables.update(CUDA_HOME=str(home), TORCH_CUDA_ARCH_LIST=architectures)
        conditions += [release, architectures]
    conditions.append(compiler)  # its name too: two compilers may tell the same version
    return variables, hashlib.sha256("\n".join(conditions).encode()).hexdigest()[:12]


def _toolkit(torch_cuda: str) -> tuple[Path, str]:
    """Return the folder and the release ("13.0") of a CUDA toolkit of torch's major version.

    Looks into CUDA_HOME and CUDA_PATH, then NVIDIA's packages of this Python, then the folders where
    toolkits are installed.  Raises NotRunnable.

    torch_cuda: the version of CUDA that torch is built for, such as "13.0"."""
    major = torch_cuda.partition(".")[0]
    folders = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        f"{sysconfig.get_path('purelib')}/nvidia/cu{major}",
        f"/usr/local/cuda-{torch_cuda}",
        "/usr/local/cuda",
        "/opt/cuda",
    ]
    for folder in map(Path, filter(None, folders)):
        text = processes.output([str(folder / "bin" / "nvcc"), "--version"])
        release = re.search(r"release ((\d+)\.\d+)", text)  # "release 13.0, V13.0.48"
        if release and release[2] == major and (folder / "include" / "cuda_runtime.h").exists():
            return folder, release[1]
    raise NotRunnable(
        "unsupported",
        f"to compile for CUDA needs nvcc of CUDA {major}, as this torch has: install the CUDA toolkit or set CUDA_HOME",
    )


def _architectures() -> str:
    """Return the compute capabilities of this machine's GPUs, "8.0;9.0"; "" without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    words = processes.output(command).split()
    return ";".join(sorted({word for word in words if re.fullmatch(r"\d+\.\d+", word)}))


def meaningful_line(log: str) -> str:
    """Return the first error in the output of a compilation; without one, the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no output"]
    # "/usr/bin/ld: cannot find -lcudart", "x.o: undefined reference to `f'", "x.cc:3:1: error: ..."
    linker = r"\bld(\.\w+)?: (cannot find|.*undefined reference)|: undefined reference to "
    error = re.compile(rf"{linker}|\b(fatal )?error\b( \w*\d+)?:", flags=re.I)
    return next(filter(error.search, lines), lines[-1])


#: File -> its text, for a sham torch.  It claims to have a GPU, and has what the setup.py of an
#: extension imports from torch.
_TORCH_WITH_A_GPU = {
    "torch/__init__.py": "class cuda:\n    is_available = staticmethod(lambda: True)\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": (
        "from setuptools import Extension as CUDAExtension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
    ),
}


def load(package: str, device: str) -> ModuleType:
    """Import a source package for a device, compiled first if it is not installed.

    Raises NotRunnable: "missing" if it cannot be compiled, or torch, a compiler or the download is
    missing; "unsupported" if there is no CUDA.

    device: "cpu", "cuda" or simulated.DEVICE."""
    if device != simulated.DEVICE:  # no installed package is built for the simulated device
        # The package may be absent, built for another torch, or lack a shared library (OSError).
        with suppress(ImportError, OSError):
            return importlib.import_module(package)
    # Submodules that were imported before an error must not be mixed with those of our build.
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]
    folder = build(package, device)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise NotRunnable(
            "missing", f"{package} does not import: {error}; delete {folder} to compile it anew"
        ) from error
    finally:
        sys.path.remove(str(folder))


def build(package: str, device: str) -> Path:
    """Return the folder that sys.path needs for a package compiled for this Python and torch.

    Compiles the package unless the cache has it.  Raises NotRunnable."""
    source = SOURCE_PACKAGES[package]
    variables, key = tools(source, device)
    version, _ = pinned(package)
    folder = CACHE / f"{package}-{version}-{device}-{key}"
    waiting = f"{package}: another process is compiling it; waiting for that to end"
    try:
        if not CACHE.is_absolute():
            raise FileNotFoundError("there is no home directory")
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(PermissionError):  # root may have made it
            CACHE.chmod(0o700)
        reason = refusal(CACHE)
        if reason:
            raise PermissionError(reason)
        if not _is_usable(folder):
            with locked(CACHE / f"{folder.name}.lock", lambda: say(waiting)) as lock:
                if not _is_usable(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    _compile(source, device, variables, folder, lock)
    except OSError as error:
        raise NotRunnable(
            "missing",
            f"{package} cannot be compiled: {error}; make room in {CACHE} or make it writable, or name a folder "
            "of your own in XDG_CACHE_HOME",
        ) from error
    return folder


def _is_usable(folder: Path) -> bool:
    """Tell whether a compiled package is there, and no other user can have written to it."""
    return folder.is_dir() and not any(map(refusal, [folder, *folder.rglob("*")]))


def _compile(
    source: SourcePackage, device: str, variables: dict[str, str], folder: Path, lock: int
) -> None:
    """Make a build: the sdist's Python package with its compiled module.  Raises NotRunnable.

    Args:
        variables: what `tools` returned.
        folder: of the build.  It is made under another name, and renamed when it is complete.
        lock: descriptor of the lock, which the process that compiles inherits."""
    partial = folder.with_name(f"{folder.name}.partial")
    # A killed build may have left a lock file in there, for which torch would wait.
    shutil.rmtree(partial, ignore_errors=True)
    sdist = partial / "sdist"
    sdist.mkdir(parents=True)
    shutil.unpack_archive(_fetch(source.package), sdist)
    (unpacked,) = sdist.iterdir()
    say(f"{source.package}: compiling for {device} with {variables['CXX']}, about a minute")
    # cpp_extension also imports what it has compiled, here from a folder that is renamed later.  So
    # another process compiles.
    code = "import sys; from rnnt_bench.setup.extensions import compile_package; compile_package(*sys.argv[1:])"
    memory_bytes = memory.available_memory() or 2 * COMPILER_BYTES
    jobs = max(1, min(os.cpu_count() or 1, memory_bytes // COMPILER_BYTES))
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            [sys.executable, "-c", code, source.package, str(unpacked), str(partial), device],
            env={"MAX_JOBS": str(jobs), **os.environ, **variables},
            cwd=ROOT,
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        error = meaningful_line(log.read_text(encoding="utf-8", errors="replace"))
        advice = f"see {log}"
        if "Python.h" in error:
            version = "{}.{}".format(*sys.version_info)
            advice = f"install the headers of Python {version} (Debian, Ubuntu: apt install python{version}-dev)"
        raise NotRunnable(
            "missing", f"{source.package} does not compile: {error}; {advice}, then measure again"
        )
    shutil.rmtree(sdist)
    # Compiled to bytecode here, since Python would make the folders of bytecode with the user's
    # umask, with which others may be able to write to them.
    compileall.compile_dir(partial, quiet=2, stripdir=str(partial), prependdir=str(folder))
    for path in [partial, *partial.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o022)
    partial.rename(folder)
    say(f"{source.package}: compiled")


def compile_package(name: str, unpacked: str, into: str, device: str) -> None:
    """Make the Python package `name` with its compiled module, in the folder `into`.

    name: of SOURCE_PACKAGES; unpacked: folder of its sdist, whose files may be changed; device:
    "cpu", "cuda" or simulated.DEVICE."""
    source = SOURCE_PACKAGES[name]
    sdist, target = Path(unpacked), Path(into)
    _copy_package(source, sdist, target)
    if device == simulated.DEVICE:
        if source.headers:
            shutil.copytree(source.header_folder, sdist, dirs_exist_ok=True)
        simulated.rewrite(sdist)
    _compile_module(source, device, sdist, target)


def _copy_package(source: SourcePackage, sdist: Path, target: Path) -> None:
    """Copy the Python package and its metadata out of the sdist, and fill in its templates.

    target: the folder to copy them into."""
    import torch

    package = target / source.package
    shutil.copytree(sdist / source.python, package)
    for name in source.templates:
        template = (package / f"{name}.in").read_text(encoding="utf-8")
        text = template.replace("@TORCH_VERSION@", torch.__version__)
        (package / name).write_text(text, encoding="utf-8")
    if source.metadata:
        shutil.copytree(sdist / source.metadata, target / source.metadata)


def _compile_module(source: SourcePackage, device: str, sdist: Path, target: Path) -> None:
    """Compile the sources of a package, and put the module where the package imports it from.

    For "cuda", nvcc compiles the .cu files.  For the other devices the C++ compiler compiles copies
    of them that end in .cc.  For the simulated device, flags of rnnt_bench.setup.simulated replace
    those of the package.

    target: the folder that holds the Python package."""
    from torch.utils import cpp_extension

    module = target.joinpath(*source.module.split("."))
    objects = target / "objects"
    objects.mkdir()
    files = source.source_files(sdist, device)
    # The simulated device runs the code for CUDA too, so it also gets the flag.
    define = [source.cuda_define] if device != "cpu" and source.cuda_define else []
    flags = list(source.flags)
    nvcc_flags: list[str] = []
    linker_flags: list[str] = []
    if device == "cuda":
        nvcc_flags = [*source.nvcc_flags, *define]
        linker_flags = _runtime_library(objects)
    else:
        for index, path in enumerate(files):
            if path.suffix == ".cu":  # an ending that the C++ compiler does not know
                files[index] = Path(shutil.copy(path, path.with_suffix(".cc")))
    if device == simulated.DEVICE:
        flags = [*simulated.flags(), "-include", str(simulated.HEADER)]
        linker_flags = [flag for flag in flags if "sanitize" in flag]  # a sanitizer is linked too
    cpp_extension.load(
        module.name,
        list(map(str, files)),
        extra_cflags=[*flags, *define],
        extra_cuda_cflags=nvcc_flags,
        extra_include_paths=[str(sdist), str(source.header_folder)],
        extra_ldflags=linker_flags,
        build_directory=str(objects),
        with_cuda=device == "cuda",
        verbose=True,
    )
    (objects / f"{module.name}.so").rename(module.with_name(f"{module.name}.so"))
    shutil.rmtree(objects)


def _runtime_library(folder: Path) -> list[str]:
    """Return the linker flags that `-lcudart` needs to find CUDA's runtime; [] if it needs none, or
    if CUDA_HOME has no runtime.

    The linker looks for libcudart.so, but NVIDIA's Python packages have only a file such as
    libcudart.so.13.  Then this makes a link libcudart.so to that file in `folder`."""
    library = Path(os.environ.get("CUDA_HOME", ""), "lib")
    versioned = sorted(library.glob("libcudart.so.*"))
    if not versioned or (library / "libcudart.so").exists():
        return []
    (folder / "libcudart.so").symlink_to(versioned[-1])
    return [f"-L{folder}"]


def _fetch(package: str) -> Path:
    """Return the path of a package's sdist in the cache; download the sdist if it is not there.

    pip downloads it, with the user's index, proxy and certificates.  pip also runs the setup.py of
    the sdist.  A setup.py may refuse to run without torch or a GPU, so it imports the sham torch of
    _TORCH_WITH_A_GPU.
    Raises NotRunnable("missing")."""
    version, digest = pinned(package)
    target = CACHE / "sources" / f"{package}-{version}.tar.gz"
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == digest:
        return target
    say(f"{package}: fetching {target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary)
        for name, text in _TORCH_WITH_A_GPU.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        requirement = folder / "requirement.txt"
        requirement.write_text(f"{package}=={version} --hash=sha256:{digest}\n", encoding="utf-8")
        pip = "-m pip --disable-pip-version-check download --no-deps --no-binary :all: --no-input"
        flags = ["--require-hashes", "--no-build-isolation", "--dest", temporary]
        done = subprocess.run(
            [sys.executable, *pip.split(), *flags, "-r", str(requirement)],
            env={**os.environ, "PYTHONPATH": temporary},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode != 0 or not (folder / target.name).exists():
            errors = re.findall(r"^ERROR: *(.+)$", done.stdout, flags=re.MULTILINE)
            error = (errors or done.stdout.split("\n"))[-1].strip()
            advice = or_set_up(f"put {target.name} into {target.parent}")
            raise NotRunnable("missing", f"{package} cannot be fetched: {error}; {advice}")
        os.replace(folder / target.name, target)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run this module as a command, and return its exit code.  arguments: None for sys.argv."""
    parser = argparse.ArgumentParser(
        prog="python -m rnnt_bench.setup.extensions",
        description="Compile source packages for this Python, unless they are compiled or installed already, and print "
        "their folders, for PYTHONPATH. The exit code is 1 when one cannot be compiled.",
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="Default: all")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", simulated.DEVICE],
        help="Device. Default: cpu, and cuda too where there is a GPU's driver",
    )
    parsed = parser.parse_args(arguments)
    wrong = [name for name in parsed.packages if name not in SOURCE_PACKAGES]
    if wrong:
        parser.error(
            f"no source package is named {wrong[0]}; there are {', '.join(SOURCE_PACKAGES)}"
        )
    return guarded(
        "extensions", lambda: _main(parsed.packages or [*SOURCE_PACKAGES], parsed.device)
    )


def _main(packages: list[str], device: str | None) -> int:
    """Print the folder of each package; build the package first unless it is installed.

    Returns EXIT_FAILED if a package cannot be built, else EXIT_OK.

    device: to build for; None: for the CPU, and also for CUDA if there is a driver and the package
      has code for CUDA."""
    code = EXIT_OK
    devices = [device] if device else ["cpu"]
    if not device and machine.gpu_may_be_here():
        devices.append("cuda")
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec:
            print(Path(str(spec.origin)).parents[1])
            continue
        for name in devices:
            if not device and name not in SOURCE_PACKAGES[package].devices:
                continue
            try:
                print(build(package, name))
            except NotRunnable as error:
                say(f"{package} on {name}: left out: {error}")
                code = EXIT_FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
