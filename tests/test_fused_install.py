"""`pip install ./fused_transducer` into an environment of its own, where the README's example runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from commands import ROOT

for needed in ("pip", "setuptools", "torch"):  # not by find_spec: when asked for pip, setuptools' finder gives up
    if not any(metadata.distributions(name=needed)):
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

import torch  # noqa: E402
from fused_helpers import copying_compiler  # noqa: E402

from fused_transducer import native  # noqa: E402


def link(name: str, to: Path, linked: set) -> None:
    """Links to a distribution of this environment, and to those that it requires."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # required elsewhere alone
        return
    if distribution.metadata["Name"] in linked:
        return
    linked.add(distribution.metadata["Name"])
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (to / top).exists():
            (to / top).symlink_to(distribution.locate_file(top))
    for line in distribution.requires or ():
        if "extra ==" not in line:
            link(re.match(r"[\w.-]+", line)[0], to, linked)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that has this one's torch and setuptools, and no more; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    linked = set()
    for name in ("torch", "setuptools", "wheel"):  # wheel: of setuptools before 70.1
        link(name, Path(packages), linked)
    others = "import importlib.util as i; print(*filter(i.find_spec, ('numpy', 'torchaudio', 'msgspec', 'pytest')))"
    alone = subprocess.run([python, "-c", f"import torch; {others}"], check=True, capture_output=True, text=True)
    assert not alone.stdout.split()
    shutil.copytree(ROOT / "fused_transducer", folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build"))
    return folder


def install(environment, package, **variables):
    pip = [
        *(sys.executable, "-m", "pip", "--python", environment / "venv" / "bin" / "python"),
        "install",
        "--no-index",
        "--no-deps",
        "--force-reinstall",
    ]
    done = subprocess.run(
        [*pip, "--no-build-isolation", package],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def example(environment):
    """The README's example, and which code it ran; nothing can be compiled any more."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "fused_transducer" / "README.md").read_text(), re.DOTALL)
    tail = """
import fused_transducer
print(fused_transducer.__file__)
print(fused_transducer.backend_of("cpu", torch.float32))
print(encoder_out.grad.abs().sum().item() > 0)
"""
    variables = {"CXX": "no-such-compiler", "FUSED_TRANSDUCER_CACHE": str(environment / "empty")}
    done = subprocess.run(
        [environment / "venv" / "bin" / "python", "-c", code + tail],
        env={**os.environ, **variables},
        cwd=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    path, backend, differentiated = done.stdout.split()
    assert path.startswith(str(environment / "venv")) and differentiated == "True"
    return backend


def built(environment, tmp_path, **variables):
    """Return {name: text} of the files of a wheel that has no suffix of a binary, and the wheel's name."""
    import zipfile

    source = shutil.copytree(environment / "source", tmp_path / "source", ignore=shutil.ignore_patterns("build"))
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=source, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: "" if name.endswith(".so") else archive.read(name).decode() for name in archive.namelist()
        }, wheel.name


def test_a_wheel_says_what_it_is(environment, tmp_path):
    import fused_transducer

    files, name = built(environment, tmp_path, CXX="no-such-compiler")
    assert name == f"fused_transducer-{fused_transducer.__version__}-py3-none-any.whl"  # nothing was compiled
    (metadata_of_wheel,) = (text for file, text in files.items() if file.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata_of_wheel
    assert f"Version: {fused_transducer.__version__}" in metadata_of_wheel
    (licence,) = (text for file, text in files.items() if file.endswith("/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_text()
    assert not re.search(r"\]\(|docs/", (ROOT / "fused_transducer" / "README.md").read_text())  # no links out of it


@pytest.mark.thorough
def test_with_a_compiler_it_is_native_code_for_every_python_of_a_platform(environment, tmp_path, thorough):
    """`pip install` makes this wheel and installs it.  The compiler copies the library that the suite has compiled from
    the same sources; with --thorough it is the real one."""
    if native.unavailable("cpu", torch.float32):
        pytest.skip(native.unavailable("cpu", torch.float32))
    variables = {} if thorough else {"CXX": str(copying_compiler(tmp_path))}
    files, name = built(environment, tmp_path, **variables)
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", name)
    assert sum(file.startswith("fused_transducer/_native-") for file in files) == 1
    install(environment, tmp_path / name)
    assert example(environment) == "native"
