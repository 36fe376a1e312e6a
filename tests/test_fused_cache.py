"""Where fused_transducer keeps its compiled code: whom it trusts, and what it does without a home, room or compiler.

The compiler of these tests copies the library that is there; what is tested is all around it.
"""

from __future__ import annotations

import _ctypes
import functools
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fused_helpers import copying_compiler

from fused_transducer import compiling, library, native

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(native.unavailable("cpu", torch.float32)),
    reason="needs Linux and the compiled code",
)


@pytest.fixture
def compiler(tmp_path):
    return copying_compiler(tmp_path)


@pytest.fixture(autouse=True)
def empty_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("FUSED_TRANSDUCER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def first_use(**variables):
    """Return (whether the compiled code was loaded, why not, the warnings) of a first use with these variables."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        loaded, reason = native._first_load.__wrapped__()
    return loaded is not None, reason, [str(warning.message) for warning in given]


@pytest.mark.parametrize("value", ["", "relative/folder", None])
def test_without_an_absolute_xdg_folder_it_is_that_of_the_home(value, monkeypatch, tmp_path):
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert library.cache_folder() == tmp_path / "home" / ".cache" / "fused_transducer"


def test_no_library_of_the_current_folder_is_loaded(compiler, tmp_path, monkeypatch):
    planted = tmp_path / "fused_transducer" / compiling.library_name()
    planted.parent.mkdir()
    planted.write_text("not a library")
    monkeypatch.chdir(tmp_path)
    assert first_use(XDG_CACHE_HOME="", CXX=compiler) == (True, "", [])
    folder = tmp_path / "home" / ".cache" / "fused_transducer"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / compiling.library_name()).exists()


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
        assert not path.read_bytes().endswith(b"planted!") and not library.refusal(path)


def test_another_library_of_that_name_is_named(tmp_path):
    path = tmp_path / "cache" / compiling.library_name()
    path.parent.mkdir(mode=0o700)
    path.write_bytes(Path(_ctypes.__file__).read_bytes())
    loaded, reason, _ = first_use(FUSED_TRANSDUCER_CACHE=path.parent)
    assert not loaded and str(path) in reason


@pytest.mark.parametrize("CXX", ["g++ '", "no-such-compiler", "/dev/null", "   "])
def test_an_odd_compiler_is_a_reason(CXX, tmp_path, monkeypatch):
    if not CXX.strip():
        monkeypatch.setenv("PATH", str(tmp_path))  # with no word in CXX it would find the real one
    loaded, reason, _ = first_use(FUSED_TRANSDUCER_CACHE=tmp_path / "cache", CXX=CXX)
    assert not loaded and reason


def test_without_a_home_it_is_compiled_for_the_process(compiler, tmp_path, monkeypatch):
    import pwd

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError, as of a user that the system does not know
    loaded, _, given = first_use(CXX=compiler)
    assert loaded and len(given) == 1 and "home" in given[0]


def test_a_full_disk_leaves_no_part_of_a_library(tmp_path):
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    import resource

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


def test_threads_that_come_first_compile_once(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_first_load", functools.cache(native._first_load.__wrapped__))
    os.environ.update(FUSED_TRANSDUCER_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: native.unavailable("cpu", torch.float32), range(4)))
    assert made == [""] * 4 and (tmp_path / "links").read_text().split() == ["linked"]
