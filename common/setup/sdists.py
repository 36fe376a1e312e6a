"""Source packages from the package index: fetched with pip, checked against requirements/sources.txt, unpacked.

pip is the only client, so that a user's own index, proxy and certificates are used.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Tuple

from common.core.errors import NotRunnable
from common.core.guard import say
from common.core.paths import ROOT

PINS = ROOT / "requirements" / "sources.txt"


@dataclass(frozen=True)
class Pin:
    """A line of requirements/sources.txt."""

    package: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}.tar.gz"


def pinned(package: str) -> Pin:
    """Return the pin of `package`.  Raises LookupError when requirements/sources.txt has none."""
    pattern = rf"^{re.escape(package)}==(\S+) --hash=sha256:([0-9a-f]{{64}})$"
    match = re.search(pattern, PINS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if match is None:
        raise LookupError(f"{PINS}: no line {package}==VERSION --hash=sha256:HASH")
    return Pin(package, match[1], match[2])


def fetch(package: str, folder: Path, python: str = "") -> Path:
    """Return the sdist of `package` in `folder`, downloaded unless it is there, by the pip of `python` (default: the
    running one); its own setup.py may fail.  Raises NotRunnable("missing") where the file cannot be had."""
    pin = pinned(package)
    target = folder / pin.file_name
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == pin.sha256:
        return target
    say(f"{package}: fetching {pin.file_name}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        downloaded, output = _download(pin, Path(temporary), python or sys.executable)
        if downloaded is None:  # it may refuse to run where there is no GPU
            stub = Path(temporary) / "stub"
            for name, text in _TORCH_WITH_A_GPU.items():
                (stub / name).parent.mkdir(parents=True, exist_ok=True)
                (stub / name).write_text(text, encoding="utf-8")
            downloaded, _ = _download(pin, Path(temporary), python or sys.executable, PYTHONPATH=str(stub))
        if downloaded is None:
            advice = f"run `make setup` again, or put {pin.file_name} into {folder}"
            raise NotRunnable("missing", f"{package} cannot be fetched: {_error(output)}; {advice}")
        os.replace(downloaded, target)
    return target


#: As much of torch as the setup.py of an extension asks for before it says what the package is.
_TORCH_WITH_A_GPU = {
    "torch/__init__.py": "class cuda:\n    is_available = staticmethod(lambda: True)\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": (
        "from setuptools import Extension as CUDAExtension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
    ),
}


def _download(pin: Pin, folder: Path, python: str, **variables: str) -> Tuple[Optional[Path], str]:
    """Return the sdist that pip downloads into `folder`, or None if it fails, and what pip prints.

    pip runs the sdist's setup.py even here, to ask for its metadata; without isolation that takes what is installed:
    setuptools, torch.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [python, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command += ["--require-hashes", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "-r", str(requirement)]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    file = folder / pin.file_name
    return (file if done.returncode == 0 and file.exists() else None), done.stdout


def _error(output: str) -> str:
    """Return pip's last error in one line; without one, the last error of the package's setup.py."""
    for pattern in (r"^ERROR: *(.+)$", r"^\s*(\w*(?:Error|Exception): .+)$", r"(.+)"):
        errors = re.findall(pattern, output, flags=re.MULTILINE)
        if errors:
            return str(errors[-1]).strip()
    return "pip failed without a message"


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack `sdist`, whose hash is checked, into `folder`; returns the one folder at its top."""
    folder.mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python before 3.9.17, 3.10.12 and 3.11.4
            archive.extractall(folder)
    (top,) = folder.iterdir()
    return top
