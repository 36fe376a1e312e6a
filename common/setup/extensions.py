"""Losses compiled from their source packages: fetched once, compiled once, kept in .build/ and imported from there.

A build is named after the package, torch, Python, compiler and device, and gets that name only when it is complete.
Sources and Python package are the sdist's own, compiled with torch.utils.cpp_extension: the sdist's cmake downloads
pybind11 and moderngpu and wants another C++ standard than today's torch.  An installed package that imports is used
instead.  Leaves out how a loss is called (the adapters).  torch is imported only to compile.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import List, Optional

from common.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable
from common.core.guard import guarded, say
from common.core.paths import BUILD, ROOT
from common.setup import sdists, toolchain
from common.setup.source_packages import SOURCE_PACKAGES, SourcePackage
from common.system.locks import locked


def load(package: str, device: str) -> ModuleType:
    """Import `package` such that it runs on `device` ("cpu" or "cuda"), compiling it first when need be.  Raises
    NotRunnable, with what to do: "missing" (no torch, compiler, download, or a failed compilation), "unsupported" (no
    CUDA, no headers)."""
    source = SOURCE_PACKAGES[package]
    module = _import(package)
    if module is None:
        folder = build(package, device)
        sys.path.insert(0, str(folder))
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            advice = f"delete {folder} to compile it anew"
            raise NotRunnable("missing", f"{package} does not import: {error}; {advice}") from error
        finally:
            sys.path.remove(str(folder))
    try:
        source.probe(module, device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        line = str(error).strip().partition("\n")[0]
        installed = BUILD not in Path(str(module.__file__)).resolve().parents
        advice = f"; {source.without_device}" if installed else ""
        raise NotRunnable("unsupported", f"{module.__file__} does not run on {device}: {line}{advice}") from error
    return module


def build(package: str, device: str) -> Path:
    """Return the folder with `package` and its compiled module for this Python and torch, compiled first when it is not
    there. Raises NotRunnable like `load`."""
    source = SOURCE_PACKAGES[package]
    tools = toolchain.find(device)
    folder = BUILD / f"{package}-{sdists.pinned(package).version}-{device}-{tools.key(source)}"
    if folder.exists():
        return folder
    toolchain.check(source, tools)
    waiting = f"{package}: another process is compiling it; waiting for that to end"
    try:
        with locked(BUILD / f"{folder.name}.lock", lambda: say(waiting)) as lock:
            if not folder.exists():
                _compile(source, tools, folder, lock)
    except OSError as error:
        advice = f"make room in {BUILD} or make it writable"
        raise NotRunnable("missing", f"{package} cannot be compiled: {error}; {advice}") from error
    return folder


def _compile(source: SourcePackage, tools: toolchain.Toolchain, folder: Path, lock: int) -> None:
    """Make `folder`: the sdist's Python package with its compiled module beside it.  Raises NotRunnable."""
    partial, log = folder.with_name(f"{folder.name}.partial"), folder.with_name(f"{folder.name}.log")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed build: torch would wait for the lock file in it
    unpacked = sdists.unpack(sdists.fetch(source.package, BUILD / "sources"), partial / "sdist")
    say(f"{source.package}: compiling for {tools.device} with {tools.compiler_version}, about a minute")
    # In a process of its own: its output goes to a log, and torch.utils.cpp_extension loads what it has compiled, which
    # this process is to load from the final folder.
    command = [sys.executable, "-m", "common.setup.compile_extension", source.package, str(unpacked), str(partial)]
    command += [tools.device]
    environment = {**os.environ, **tools.environment()}
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, pass_fds=(lock,)
        )
    if done.returncode != 0:
        error = toolchain.meaningful_line(log.read_text(encoding="utf-8", errors="replace"))
        raise NotRunnable("missing", f"{source.package} does not compile: {error}; see {log}, then run `make setup`")
    shutil.rmtree(partial / "sdist")
    partial.rename(folder)
    say(f"{source.package}: compiled")


def _import(package: str) -> Optional[ModuleType]:
    """Return the installed `package`, or None when there is none or it does not import (built for another torch,
    say)."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError):  # OSError: a shared library that it loads is not there
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]  # submodules imported before the error would be mixed with those of our build
        return None


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m common.setup.extensions",
        description="build: compile source packages for this Python, unless they are compiled or installed already. "
        "The exit code is 1 when one cannot be compiled. path: print the folder of one, for PYTHONPATH.",
    )
    parser.add_argument("command", choices=["build", "path"], help="What to do.")
    parser.add_argument("package", nargs="?", choices=[*SOURCE_PACKAGES], help="Package. Default: all, with build")
    where = "Device. Default: cpu, and cuda too where there are a GPU driver and nvcc"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=where)
    parsed = parser.parse_args(arguments)
    if parsed.command == "build":
        devices = [parsed.device] if parsed.device else ["cpu", *(["cuda"] if toolchain.for_cuda() else [])]
        packages = [parsed.package] if parsed.package else [*SOURCE_PACKAGES]
        return guarded("extensions", lambda: _build_all(packages, devices))
    if parsed.package is None:
        parser.error("path needs a package")
    return _print_path(parsed.package, parsed.device or "cpu")


def _build_all(packages: List[str], devices: List[str]) -> int:
    code = EXIT_OK
    for package in packages:
        if importlib.util.find_spec(package) is not None:  # installed: used as it is
            continue
        for device in sorted(set(devices).intersection(SOURCE_PACKAGES[package].devices)):
            try:
                build(package, device)
            except NotRunnable as error:
                say(f"{package} on {device}: left out: {error}")
                code = EXIT_FAILED
    return code


def _print_path(package: str, device: str) -> int:
    installed = importlib.util.find_spec(package)
    try:
        print(Path(str(installed.origin)).parents[1] if installed else build(package, device))
    except NotRunnable as error:
        say(f"{package} on {device}: {error}")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
