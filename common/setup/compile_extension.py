"""Compile one source package with torch.utils.cpp_extension: the child process of common.setup.extensions.

``python -m common.setup.compile_extension PACKAGE SDIST TARGET DEVICE`` puts the Python package and
its compiled module into the folder TARGET, and imports the module once.  What it prints is the log.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import List

import torch
from torch.utils import cpp_extension

from common.setup.source_packages import SOURCE_PACKAGES, SourcePackage


def compile_package(source: SourcePackage, sdist: Path, target: Path, device: str) -> None:
    """Make TARGET/<package>/ and its compiled module, beside or inside it, from the unpacked `sdist`."""
    package = target / source.package
    shutil.copytree(sdist / source.python, package)
    for name in source.templates:
        template = (package / f"{name}.in").read_text(encoding="utf-8")
        (package / name).write_text(template.replace("@TORCH_VERSION@", torch.__version__), encoding="utf-8")
    if source.metadata:
        shutil.copytree(sdist / source.metadata, target / source.metadata)
    compiled = target.joinpath(*source.module.split("."))
    objects = target / "objects"
    objects.mkdir()
    on_cuda = device == "cuda"
    define = [source.cuda_define] if on_cuda and source.cuda_define else []
    sources = _files(sdist, source.sources)
    sources = sources + _files(sdist, source.cuda_sources) if on_cuda else [_as_cpp(path) for path in sources]
    cpp_extension.load(
        compiled.name,
        sources,
        extra_cflags=[*source.flags, *define],
        extra_cuda_cflags=[*source.nvcc_flags, *define] if on_cuda else None,
        extra_include_paths=[str(sdist), str(Path(__file__).parent / source.headers)],
        extra_ldflags=_runtime_library(objects) if on_cuda else None,
        build_directory=str(objects),
        with_cuda=on_cuda,
        verbose=True,
    )
    (objects / f"{compiled.name}.so").rename(compiled.with_name(f"{compiled.name}.so"))
    shutil.rmtree(objects)


def _runtime_library(folder: Path) -> List[str]:
    """Return linker flags with which `-lcudart` finds the runtime: NVIDIA's packages of the index have the library with
    its version alone, so `folder` gets a link without it."""
    library = Path(os.environ.get("CUDA_HOME", ""), "lib")
    versioned = sorted(library.glob("libcudart.so.*"))
    if not versioned or (library / "libcudart.so").exists():
        return []
    (folder / "libcudart.so").symlink_to(versioned[-1])
    return [f"-L{folder}"]


def _as_cpp(path: str) -> str:
    """Return the path, or that of a .cpp copy of a .cu, which the C++ compiler takes."""
    return shutil.copy(path, f"{path[:-2]}cc") if path.endswith(".cu") else path


def _files(folder: Path, patterns: tuple[str, ...]) -> List[str]:
    """Return the sorted matches of all patterns, each of which must match a file."""
    files = [sorted(map(str, folder.glob(pattern))) for pattern in patterns]
    if not all(files):
        raise FileNotFoundError(f"{folder}: a pattern without a file among {patterns}")
    return sum(files, [])


if __name__ == "__main__":
    name, unpacked, into, on = sys.argv[1:]
    compile_package(SOURCE_PACKAGES[name], Path(unpacked), Path(into), on)
