"""fused_transducer as it is installed: a wheel with which the README's example runs, beside torch alone, and where its
compiled code is kept: whom it trusts, and what it does without a home, room or compiler."""

from __future__ import annotations

import _ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import fused_transducer
import pytest
import torch
from fused_transducer import compiling, native

from commands import ROOT
from fused_helpers import copying_compiler

compiled = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(native.unavailable(torch.device("cpu"), torch.float32)),
    reason="needs Linux and the compiled code",
)


def built(tmp_path, **variables):
    """Return a wheel of the sources, and {name: text} of its files that are no binaries."""
    ignored = shutil.ignore_patterns("__pycache__", "build")
    source = shutil.copytree(ROOT / "fused_transducer", tmp_path / "source", ignore=ignored)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=source, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        return wheel, {name: "" if name.endswith(".so") else archive.read(name).decode() for name in names}


def test_a_wheel_says_what_it_is(tmp_path):
    wheel, files = built(tmp_path, CXX="no-such-compiler")
    assert wheel.name == f"fused_transducer-{fused_transducer.__version__}-py3-none-any.whl"  # nothing was compiled
    (of_wheel,) = (text for file, text in files.items() if file.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in of_wheel and f"Version: {fused_transducer.__version__}" in of_wheel
    (licence,) = (text for file, text in files.items() if file.endswith("/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_text()
    assert not re.search(r"\]\(|docs/", (ROOT / "fused_transducer" / "README.md").read_text())  # no links out of it
    returned = re.findall(r"custom_op\(.*?\) -> (\w+)\[", files["fused_transducer/operators.py"], re.DOTALL)
    assert returned == ["tuple"] * 2  # torch 2.6 knows no Tuple where an operator is made


#: Before and after the README's example: nothing but torch can be imported.
BEFORE = "import sys\nsys.modules.update(dict.fromkeys(['numpy', 'torchaudio', 'msgspec', 'pytest', 'common']))\n"
AFTER = """
import fused_transducer
print(fused_transducer.__file__, fused_transducer.backend_of("cpu", torch.float32))
print(encoder_out.grad.abs().sum().item() > 0)
"""


@compiled
@pytest.mark.thorough
def test_with_a_compiler_it_is_native_code_for_every_python_of_a_platform(tmp_path, thorough):
    """The compiler is the real one with --thorough.  Where the wheel is installed, nothing can be compiled any more."""
    wheel, files = built(tmp_path, **({} if thorough else {"CXX": str(copying_compiler(tmp_path))}))
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)
    assert sum(file.startswith("fused_transducer/_native-") for file in files) == 1
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "-t", installed, wheel]
    subprocess.run(command, check=True)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "fused_transducer" / "README.md").read_text(), re.DOTALL)
    variables = {"FUSED_TRANSDUCER_CACHE": str(tmp_path / "empty"), "PYTHONPATH": str(installed), "CXX": "none"}
    command = [sys.executable, "-c", BEFORE + code + AFTER]
    done = subprocess.run(command, env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [f"{installed}/fused_transducer/__init__.py", "native", "True"], done.stderr


#: The least torch that is promised, and some on the way to the one that the suite has.
TORCHES = ("2.4.1", "2.5.1", "2.6.0", "2.8.0", "2.10.0")
#: A step of both backends, and one graph of torch.compile.
STEPS = """
import warnings
import torch
from fused_transducer import TransducerLoss
warnings.simplefilter("ignore")  # no numpy
for backend in ("native", "torch"):
    torch.manual_seed(0)
    module = TransducerLoss(8, 10, encoder_dim=6, backend=backend)
    T, U = torch.tensor([7, 5]), torch.tensor([3, 2])
    batch = torch.randn(2, 7, 6), torch.randn(2, 4, 8), torch.ones(2, 3).long(), T, U
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        loss = call(*batch)
        loss.backward()
        print(round(loss.item(), 4), round(module.encoder_proj.weight.grad.norm().item(), 4))
"""


@pytest.mark.skipif(not os.environ.get("TORCH_FROM_INDEX"), reason="with TORCH_FROM_INDEX=1: gigabytes are fetched")
@pytest.mark.parametrize("version", TORCHES)
def test_each_torch_that_is_promised_gives_the_same_numbers(version, tmp_path, monkeypatch):
    from rnnt_bench.setup.environments import Uv

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    expected = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True).stdout
    with (tmp_path / "log").open("w") as log:
        way = (
            "run",
            "--no-project",
            "--isolated",
            "--python",
            sys.executable,
            "--with",
            f"torch=={version}",
            "--with",
            "setuptools",
        )
        assert Uv(log).output(*way, "python", "-c", STEPS) == expected and len(set(expected.splitlines())) == 1


@compiled
def test_the_import_takes_what_torch_has_already():
    """torch._dynamo and sympy take 0.8 s and 60 MB, Triton 50 MB."""
    code = "import torch, sys; before = set(sys.modules); import fused_transducer; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} == {"fused_transducer"}


@pytest.fixture
def compiler(tmp_path):
    """Give the test a home of its own, and no other folder, and return a compiler; undo what it sets, CXX too."""
    with mock.patch.dict(os.environ, HOME=str(tmp_path / "home")):
        for name in ("FUSED_TRANSDUCER_CACHE", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        yield copying_compiler(tmp_path)


def first_use(**variables):
    """Return (whether the compiled code was loaded, why not, the warnings) of a first use with these variables."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        loaded, reason = native._first_load.__wrapped__()
    return loaded is not None, reason, [str(warning.message) for warning in given]


@compiled
def test_no_library_of_the_current_folder_is_loaded(compiler, tmp_path, monkeypatch):
    planted = tmp_path / "fused_transducer" / compiling.library_name()
    planted.parent.mkdir()
    planted.write_text("not a library")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / ".cache" / "fused_transducer"
    assert compiling.cache_folder() == folder
    for value in ("relative/folder", ""):  # as if it were not set
        assert first_use(XDG_CACHE_HOME=value, CXX=compiler) == (True, "", []) and compiling.cache_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / compiling.library_name()).exists()


@compiled
@pytest.mark.parametrize("what", ["folder", "file", "folder of another user", "file of another user"])
def test_what_others_can_write_is_not_loaded(what, compiler, tmp_path):
    path = tmp_path / "cache" / compiling.library_name()
    path.parent.mkdir(mode=0o700)
    path.write_bytes((tmp_path / "whole.so").read_bytes()[:-8] + b"planted!")
    opened = path.parent if what.startswith("folder") else path
    if "another user" in what:
        if os.getuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(opened, 54321, 54321)
    else:
        opened.chmod(0o777)
    loaded, _, given = first_use(FUSED_TRANSDUCER_CACHE=path.parent, CXX=compiler)
    assert loaded and (tmp_path / "links").read_text().split() == ["linked"]
    if opened == path.parent:  # compiled for the process alone
        assert path.read_bytes().endswith(b"planted!")
        assert len(given) == 1 and str(path.parent) in given[0]
    else:
        assert not path.read_bytes().endswith(b"planted!") and not compiling.refusal(path)


@compiled
def test_another_library_of_that_name_is_named(compiler, tmp_path):
    path = tmp_path / "cache" / compiling.library_name()
    path.parent.mkdir(mode=0o700)
    path.write_bytes(Path(_ctypes.__file__).read_bytes())
    loaded, reason, _ = first_use(FUSED_TRANSDUCER_CACHE=path.parent)
    assert not loaded and str(path) in reason


@compiled
@pytest.mark.parametrize("CXX", ["g++ '", "no-such-compiler", "/dev/null", "   ", "{folder}/fails"])
def test_an_odd_compiler_is_a_reason(CXX, compiler, tmp_path, monkeypatch):
    (tmp_path / "fails").write_text("#!/bin/sh\necho broken beyond words >&2\nexit 1\n")
    (tmp_path / "fails").chmod(0o755)
    if not CXX.strip():
        monkeypatch.setenv("PATH", str(tmp_path))  # with no word in CXX it would find the real one
    monkeypatch.setattr(native, "_first_load", native._first_load.__wrapped__)  # as if none was looked for yet
    os.environ.update(FUSED_TRANSDUCER_CACHE=str(tmp_path / "cache"), CXX=CXX.format(folder=tmp_path))
    with pytest.raises(ValueError, match="broken beyond words" if "fails" in CXX else "native"):
        fused_transducer.backend_of("cpu", torch.float32, "native")


@compiled
def test_without_a_home_it_is_compiled_for_the_process(compiler, tmp_path, monkeypatch):
    import pwd

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError, as of a user that the system does not know
    loaded, _, given = first_use(CXX=compiler)
    assert loaded and len(given) == 1 and "home" in given[0]


@compiled
def test_a_full_disk_leaves_no_part_of_a_library(tmp_path):
    import resource  # a limit on the size of files ends a write in the middle, as a full disk does

    made = tmp_path / "made.so"
    made.write_bytes(bytes(200_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError):
            compiling.install(made, tmp_path / "placed.so")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["made.so"]


@compiled
def test_threads_that_come_first_compile_once(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_first_load", functools.cache(native._first_load.__wrapped__))
    os.environ.update(FUSED_TRANSDUCER_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: native.unavailable(torch.device("cpu"), torch.float32), range(4)))
    assert made == [""] * 4 and (tmp_path / "links").read_text().split() == ["linked"]
