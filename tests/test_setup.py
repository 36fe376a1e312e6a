"""Set-up, for real but small and without a network: environments with one wheel made here, a stand-in for a package."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rnnt_bench.core.errors import UserError
from rnnt_bench.setup import environments, extensions
from rnnt_bench.setup.extensions import SOURCE_PACKAGES

from commands import ROOT, start, wait_for

torch = pytest.importorskip("torch")

DRIVER = """\
import sys
from rnnt_bench.setup import environments
Environment = environments.Environment
environments.ENVIRONMENTS = {e.name: e for e in (
    Environment("main", "a wheel", required=True),
    Environment("other", "a wheel"),
    Environment("old", "a wheel", pythons=("3.2",)),
    Environment("heavy", "a wheel", optional=True),
)}
sys.exit(environments.main())
"""
UV = ROOT / ".venv" / ".uv"
LOCKS = Path("common", "setup", "requirements")
RUNNING = "{}.{}".format(*sys.version_info)


def make_wheel(folder: Path, version: str) -> str:
    """Make a wheel of a package whose VERSION is `version`; return its line for a lock file."""
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    encoded = {path: base64.urlsafe_b64encode(digest).rstrip(b"=").decode() for path, digest in digests.items()}
    rows = [f"{path},sha256={encoded[path]},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"tiny-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without the time, which would be in its hash
    return f"tiny=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


class Copy:
    """A folder with the code of set-up, where pip finds packages in a folder alone."""

    def __init__(self, folder: Path, packages: str, **variables: str):
        self.folder = folder
        shutil.copytree(ROOT / "common", folder / "common")
        (folder / "rnnt_bench").symlink_to("common")
        (folder / packages).mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "CXX", "MODERNGPU"))}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / packages)}
        self.environment = {**clean, **pip, **variables}

    def lock(self, name: str, text: str) -> None:
        (self.folder / LOCKS / f"{name}.txt").write_text(text)


class Checkout(Copy):
    """A folder with the set-up code, tiny lock files and a command line like the real one."""

    def __init__(self, folder: Path):
        super().__init__(folder, "wheels", UV_CACHE_DIR=str(folder / "cache"))
        (folder / "drive.py").write_text(DRIVER)
        self.wheels = folder / "wheels"
        wheel = make_wheel(self.wheels, "1")
        for name in ("main", "other", "old", "heavy"):
            self.lock(name, wheel)
        self.venv().mkdir()
        (folder / ".venv" / ".uv").symlink_to(UV)  # no test fetches it

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, "-S", "drive.py", *arguments]  # nothing installed can be imported
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env={**self.environment, **variables}, **pipes)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=300)
        assert "Traceback" not in stderr
        return process.returncode, stdout, stderr

    def installed(self, name: str) -> str:
        """VERSION of the tiny package that the environment's Python imports."""
        command = [self.run("path", name)[1].strip(), "-c", "import tiny; print(tiny.VERSION)"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def venv(self, *parts: str) -> Path:
        return self.folder.joinpath(".venv", *parts)


@pytest.fixture
def checkout(tmp_path):
    if sys.version_info[:2] not in ((3, 10), (3, 11), (3, 12), (3, 13)):
        pytest.skip("the environments have Python 3.10 to 3.13")
    return Checkout(tmp_path / "checkout")


def test_created_reused_and_created_anew_when_the_pin_changes(checkout):
    code, _, stderr = checkout.run("setup", "nope")
    assert code == 2 and stderr.count("\n") == 1 and all(name in stderr for name in ("'nope'", "main", "heavy"))
    code, _, stderr = checkout.run("setup", "main")
    assert code == 0 and "main: ready" in stderr
    assert checkout.installed("main") == "1"
    made = checkout.venv("main", "stamp").stat().st_mtime_ns
    assert checkout.run("setup", "main") == (0, "", "")  # nothing to do, nothing said
    assert checkout.venv("main", "stamp").stat().st_mtime_ns == made
    checkout.lock("main", make_wheel(checkout.wheels, "2"))
    code, _, stderr = checkout.run("path", "main")
    assert code == 1 and "out of date" in stderr and "make setup" in stderr
    assert checkout.run("setup", "main")[0] == 0
    assert checkout.installed("main") == "2"
    checkout.venv("main", "stamp").unlink()  # what a set-up that was killed leaves: all files but the last
    code, _, stderr = checkout.run("path", "main")
    assert code == 1 and "is not there" in stderr
    checkout.venv("bin").mkdir()  # of a user's own environment in .venv
    code, _, stderr = checkout.run("clean")
    assert code == 0 and "bin" in stderr and [path.name for path in checkout.venv().iterdir()] == ["bin"]
    checkout.venv("bin").rmdir()
    assert checkout.run("clean") == (0, "", "") and not checkout.venv().exists()
    (checkout.folder / "main").mkdir()
    checkout.venv().symlink_to(".")  # as of a second worktree
    code, _, stderr = checkout.run("clean")
    assert code == 0 and "link" in stderr and (checkout.folder / "main").exists()


def test_what_one_environment_cannot_have_is_its_reason_and_the_others_go_on(checkout):
    checkout.lock("other", "tiny==1 --hash=sha256:" + 64 * "0" + "\n")
    code, _, stderr = checkout.run("setup")
    assert code == 0 and checkout.installed("main") == "1"
    assert "other: left out" in stderr and "old: left out" in stderr
    for name, expected in (("old", f"needs Python 3.2; this is Python {RUNNING}"), ("other", "Hash mismatch")):
        note = checkout.venv(f"{name}.reason").read_text()
        assert expected in note and "make setup" in note and note.count("\n") == 1
        assert checkout.run("path", name) == (1, "", note)
    assert not checkout.venv("other").exists() and 64 * "0" in checkout.venv("other.log").read_text()
    checkout.lock("other", make_wheel(checkout.wheels, "1"))  # the cause is gone: so is the reason
    assert checkout.run("setup", "other")[0] == 0
    assert not checkout.venv("other.reason").exists()


def test_an_optional_one_is_made_when_it_is_named_and_kept_current_then(checkout):
    code, _, stderr = checkout.run("path", "heavy")
    assert code == 1 and stderr.count("\n") == 1 and "make setup ENVIRONMENTS=heavy" in stderr
    assert checkout.run("setup", "heavy")[0] == 0
    checkout.lock("heavy", make_wheel(checkout.wheels, "2"))
    assert checkout.run("setup")[0] == 0
    assert checkout.installed("heavy") == "2" and checkout.installed("other") == "1"


def test_no_main_environment_is_an_error(checkout, tmp_path):
    checkout.lock("main", "no-such-package==1 --hash=sha256:" + 64 * "0" + "\n")
    code, _, stderr = checkout.run("setup")
    assert code == 1 and "environments: error: main cannot be set up: " in stderr.splitlines()[-1]
    assert "no-such-package was not found" in stderr.splitlines()[-1]
    assert not checkout.venv("other").exists()  # no two minutes for the others first
    (tmp_path / "ensurepip.py").write_text("raise ImportError\n")  # as on Debian without python3-venv
    checkout.venv(".uv").unlink()
    code, _, stderr = checkout.run("setup", "main", PYTHONPATH=str(tmp_path))
    assert code == 1 and f"apt install python{RUNNING}-venv" in stderr.splitlines()[-1]


def test_killed_half_way_its_children_keep_the_lock_and_the_next_one_starts_over(checkout):
    with socket.create_server(("127.0.0.1", 0)) as silent_index:  # takes connections and never answers
        url = f"http://127.0.0.1:{silent_index.getsockname()[1]}/"
        first = checkout.start("setup", "main", PIP_NO_INDEX="0", PIP_INDEX_URL=url, PIP_RETRIES="0")
        silent_index.settimeout(120)
        connection, _ = silent_index.accept()  # pip is at work
        os.kill(first.pid, signal.SIGKILL)
        first.communicate(timeout=60)
        assert checkout.venv("main", "bin", "python").exists()
        assert checkout.run("path", "main")[0] == 1  # half-made is not there
        second = checkout.start("setup", "main")
        assert "waiting" in second.stderr.readline()  # for the pip that the first one left
        connection.close()
    _, stderr = second.communicate(timeout=300)
    assert second.returncode == 0, stderr
    assert checkout.installed("main") == "1"


def test_settings_in_a_file_of_pip_are_used(checkout, tmp_path):
    for_install = f"no-index = yes\nfind-links =\n    {checkout.wheels}"
    for_all = f"[global]\nno-index = no\nfind-links = /nowhere\n[install]\n{for_install}\n"
    (tmp_path / "pip.conf").write_text(for_all)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        del checkout.environment[name]
    assert (
        checkout.run("setup", "main", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))[0] == 0
        and checkout.installed("main") == "1"
    )


def test_another_build_in_an_extra_index_is_not_taken_and_what_the_index_lacks_is(checkout, tmp_path):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        del checkout.environment[name]
    make_wheel(checkout.wheels, "1+cpu")
    checkout.lock("other", make_wheel(checkout.wheels, "2"))
    indexes = {}
    for variable, pattern in (("PIP_INDEX_URL", "tiny-1-*"), ("PIP_EXTRA_INDEX_URL", "tiny-[12][+-]*")):
        (tmp_path / variable / "tiny").mkdir(parents=True)
        links = [f'<a href="{wheel.as_uri()}">{wheel.name}</a>' for wheel in sorted(checkout.wheels.glob(pattern))]
        (tmp_path / variable / "tiny" / "index.html").write_text("".join(links))
        indexes[variable] = (tmp_path / variable).as_uri()
    assert checkout.run("setup", "main", **indexes)[0] == 0
    assert checkout.installed("main") == "1"
    assert checkout.run("setup", "other", PIP_INDEX_URL=indexes["PIP_INDEX_URL"])[0] == 0
    assert "tiny" in checkout.venv("other.reason").read_text()  # the first index has no version 2
    assert checkout.run("setup", "other", **indexes)[0] == 0
    assert checkout.installed("other") == "2"


def test_what_cannot_be_compiled_does_not_stop_set_up(checkout):
    code, _, stderr = checkout.run("build")
    assert code == 0 and "other: ready" in stderr
    assert "left out" in stderr and "has no torch" in stderr  # main has one tiny package here


def test_ctrl_c_is_one_line(checkout):
    process = checkout.start("setup", "main")
    assert "installing" in process.stderr.readline()
    wait_for(checkout.venv("main.log").exists, "installation")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 130 and stderr.count("\n") == 1 and "interrupted" in stderr and "`make setup`" in stderr
    )


@pytest.mark.parametrize("name", ["main", "k2", "nemo", "ray", "viewer", "sources"])
def test_lock_files_pin_everything_by_hash_and_name_no_index(name):
    text = (ROOT / LOCKS / f"{name}.txt").read_text().replace("\\\n", " ")
    options = ("#", "--only-binary :all:", "--no-binary antlr4-python3-runtime")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(options)]
    pinned = re.compile(r"[\w.-]+(\[[^\]]*\])?==\S+ .*--hash=sha256:[0-9a-f]{64}")
    assert lines and not [line for line in lines if not pinned.match(line)]
    if name == "k2":
        assert re.search(r"^k2==1\.23\.4 +--hash=sha256:5b5f709b12b9[0-9a-f]{52}$", text, re.MULTILINE)  # one wheel
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_a_lock_keeps_only_the_chosen_hash(tmp_path, monkeypatch):
    text = "a==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==2 \\\n    --hash=sha256:cc\n"
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    monkeypatch.setattr(environments, "Uv", lambda log: SimpleNamespace(output=lambda *words: text))
    (tmp_path / "main.in").write_text("a==1 --hash=sha256:bb\nb==2\n")
    assert environments.lock(["main"]) == 0
    assert (tmp_path / "main.txt").read_text() == text.replace("    --hash=sha256:aa \\\n", "")
    (tmp_path / "main.in").write_text("a==1 --hash=sha256:dd\n")
    with pytest.raises(UserError, match="no file with hash sha256:dd"):
        environments.lock(["main"])


# A package with the layout of optimized_transducer's sdist: same names, no torch in its C++, so seconds to compile.
PYTHON_FOLDER = "optimized_transducer/python/optimized_transducer"
STAND_IN = {
    "setup.py": """\
import setuptools, torch
assert torch.cuda.is_available()  # one for CUDA alone refuses without a GPU
setuptools.setup(name='optimized_transducer', version='1.4')
""",
    "PKG-INFO": "Metadata-Version: 2.1\nName: optimized_transducer\nVersion: 1.4\n",
    f"{PYTHON_FOLDER}/__init__.py": """\
import torch, _optimized_transducer
from .torch_version import built_for
assert built_for == torch.__version__ and _optimized_transducer.answer() == 2
""",
    f"{PYTHON_FOLDER}/torch_version.py.in": 'built_for = "@TORCH_VERSION@"\n',
    "optimized_transducer/csrc/cpu.cc": "int answer() { return ANSWER; }\n",
    "optimized_transducer/csrc/transducer-loss.cc": "\n",
    "optimized_transducer/python/csrc/module.cc": (
        "#define PY_SSIZE_T_CLEAN\n"
        "#include <Python.h>\n"
        "int answer();\n"
        "static PyObject *Answer(PyObject *, PyObject *) { return PyLong_FromLong(answer()); }\n"
        'static PyMethodDef methods[] = {{"answer", Answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_optimized_transducer", "", -1, methods};\n'
        "PyMODINIT_FUNC PyInit__optimized_transducer() { return PyModule_Create(&module); }\n"
    ),
}
LOAD = """\
import os, sys
os.umask(int(os.environ.get("UMASK", "022"), 8))
from rnnt_bench.setup import extensions
from rnnt_bench.core.errors import NotRunnable
try:
    print(extensions.load("optimized_transducer", sys.argv[1]).__file__)
except NotRunnable as error:
    print(error.status, error, sep=": ")
"""


class Sources(Copy):
    """A folder with the code that compiles, and a stand-in sdist that pip finds in a folder of its own."""

    def __init__(self, folder: Path, answer: str = "2"):
        super().__init__(folder, "index", XDG_CACHE_HOME=str(folder / "cache"))
        (folder / "load.py").write_text(LOAD)
        sdist = folder / "index" / "optimized_transducer-1.4.tar.gz"
        with tarfile.open(sdist, "w:gz") as archive:
            for name, text in STAND_IN.items():
                data = text.replace("ANSWER", answer).encode()
                entry = tarfile.TarInfo(f"optimized_transducer-1.4/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        self.lock("sources", f"optimized_transducer==1.4 --hash=sha256:{digest}\n")
        self.cache = folder / "cache" / "rnnt-bench" / "losses"

    def start(self, device: str = "cpu", **variables: str):
        return start(self.folder / "load.py", device, cwd=self.folder, env={**self.environment, **variables})

    def load(self, device: str = "cpu", **variables: str) -> tuple[str, str]:
        process = self.start(device, **variables)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        return stdout.strip(), stderr


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++) on PATH")


@pytest.fixture
def sources(tmp_path):
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (c++) on PATH")
    return Sources(tmp_path / "sources")


def test_fetched_compiled_and_then_taken_from_the_cache(sources):
    loaded, reason = sources.load()
    (folder,) = [path for path in sources.cache.glob("optimized_transducer-1.4-cpu-*") if path.is_dir()]
    assert Path(loaded) == folder / "optimized_transducer" / "__init__.py"
    assert "fetching" in reason and "compiling" in reason and sources.load() == (loaded, "")
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"_optimized_transducer.so", folder.name[:20]}

    shutil.rmtree(folder)
    (sources.cache / "sources" / "optimized_transducer-1.4.tar.gz").write_bytes(b"garbled")
    again, reason = sources.load()
    assert again == loaded and "fetching" in reason  # a file with another hash is not trusted


def test_a_compilation_killed_half_way_starts_over(sources, tmp_path):
    compiler, slow = tmp_path / "slow-c++", tmp_path / "slow"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ ! -e {slow} ] || sleep 600\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    slow.touch()
    process = sources.start(CXX=str(compiler))
    # torch's own lock file, which nobody removes now
    wait_for(lambda: list(sources.cache.glob("*.partial/objects/lock")), "compilation")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    slow.unlink()
    loaded, reason = sources.load(CXX=str(compiler))
    assert loaded.endswith("__init__.py") and "compiled" in reason
    assert not list(sources.cache.glob("*.partial"))


def test_what_others_may_have_written_is_not_loaded(sources, tmp_path):
    """The sources are fused_transducer's.

    The compiler fails once the loss is compiled: what is loaded then is the cache's."""
    compiler, broken = tmp_path / "c++", tmp_path / "broken"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ ! -e {broken} ] || exit 1\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    loaded, _ = sources.load(CXX=str(compiler), UMASK="002")
    broken.touch()
    folder, planted = Path(loaded).parents[1], Path(loaded)
    assert sources.load(CXX=str(compiler)) == (loaded, "") and sources.cache.stat().st_mode & 0o777 == 0o700
    shutil.copytree(sources.cache, tmp_path / "whole")
    ways = {"file": planted, "folder": planted.parent, "build": folder, "cache": sources.cache}
    owners = [0o777, *([54321] if os.getuid() == 0 else [])]
    for path, number in itertools.product(ways.values(), owners):
        if number == 0o777:
            path.chmod(number)
        else:
            os.chown(path, number, number)
        outcome, _ = sources.load(CXX=str(compiler))
        is_made_safe = (path, number) == (sources.cache, 0o777)  # what is in it is nobody else's
        assert (outcome == loaded) is is_made_safe and outcome.startswith((loaded, "missing: ")), (path, number)
        shutil.rmtree(sources.cache)
        shutil.copytree(tmp_path / "whole", sources.cache)


def test_no_loss_of_the_current_folder_is_loaded(sources):
    """A relative XDG_CACHE_HOME is as if it were not set, by its specification."""
    loaded, _ = sources.load(XDG_CACHE_HOME="cache", HOME=str(sources.folder / "home"))
    assert loaded.startswith(str(sources.folder / "home" / ".cache" / "rnnt-bench"))


@needs_compiler
def test_what_does_not_compile_says_its_first_error_and_where_the_log_is(tmp_path):
    outcome, _ = Sources(tmp_path / "sources", answer="nonsense").load()
    assert outcome.startswith("missing: optimized_transducer does not compile: ") and ": error: " in outcome
    log = Path(outcome.partition("see ")[2].partition(",")[0])
    assert "nonsense" in log.read_text() and "measure again" in outcome


def test_without_the_headers_of_python_the_error_names_their_package(sources):
    compiler = sources.folder / "c++"
    drop = '-I*/include/python3*) ;; */include/python3*) set -- "$@" /nowhere ;; *) set -- "$@" "$word" ;;'
    compiler.write_text(f'#!/bin/sh\nfor word; do shift; case "$word" in {drop} esac; done\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    outcome, _ = sources.load(CXX=str(compiler))
    assert "Python.h" in outcome and "apt install python{}.{}-dev".format(*sys.version_info) in outcome


def test_no_compiler_and_no_source_package(sources):
    outcome, _ = sources.load(CXX="/nowhere/c++")
    assert outcome.startswith("missing: ") and "`/nowhere/c++`" in outcome and "install gcc and g++" in outcome
    shutil.rmtree(sources.folder / "index")
    outcome, _ = sources.load()
    assert outcome.startswith("missing: ") and "No matching distribution found" in outcome
    assert "put optimized_transducer-1.4.tar.gz into" in outcome


def test_an_installed_package_is_used_where_it_can_be_imported(sources):
    package = sources.folder / "optimized_transducer"
    package.mkdir()
    (package / "__init__.py").touch()
    assert sources.load() == (str(package / "__init__.py"), "")
    (package / "__init__.py").write_text("raise ImportError('built for another torch')\n")
    outcome, reason = sources.load()
    assert "compiled" in reason  # our own build instead, imported although the broken one comes first on the path
    assert outcome.startswith(str(sources.cache))


def toolkit(folder, release):
    """A folder that looks like a CUDA toolkit of that release."""
    nvcc, header = folder / "bin" / "nvcc", folder / "include" / "cuda_runtime.h"
    for path in (nvcc, header):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.0\n")
        path.chmod(0o755)
    return folder


@pytest.fixture
def cuda_of_torch():
    """The CUDA release of this torch; a torch without CUDA says so, and the test ends."""
    if not torch.version.cuda:
        with pytest.raises(extensions.NotRunnable, match="has no CUDA"):
            extensions.build("fast_rnnt", "cuda")
        pytest.skip("this torch has no CUDA")
    return torch.version.cuda


def test_the_toolkit_of_torchs_cuda_is_taken_among_several(monkeypatch, tmp_path, cuda_of_torch):
    monkeypatch.setattr(extensions.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(extensions, "_architectures", lambda: "")
    for name in ("TORCH_CUDA_ARCH_LIST", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "named", "5.5")))
    if not Path("/usr/local/cuda").exists():
        with pytest.raises(extensions.NotRunnable, match="install the CUDA toolkit or set CUDA_HOME") as caught:
            extensions.build("optimized_transducer", "cuda")
        assert caught.value.status == "unsupported"
    fitting = toolkit(tmp_path / "nvidia" / f"cu{cuda_of_torch.partition('.')[0]}", cuda_of_torch)
    variables, _ = extensions.tools(SOURCE_PACKAGES["optimized_transducer"], "cuda")
    assert variables["CUDA_HOME"] == str(fitting) and variables["TORCH_CUDA_ARCH_LIST"] == extensions.ARCHITECTURES


SEARCH = """
#include <cstdio>
#include "moderngpu/kernel_load_balance.hxx"
int main() {
  const int starts[] = {0, 0, 3, 3, 3, 4, 9};
  for (int item = 0; item < 12; ++item) std::printf("%d ", mgpu::segment_of(item, starts, 7));
}
"""


@needs_compiler
def test_each_item_finds_its_segment(tmp_path):
    program = tmp_path / "search.cc"
    program.write_text(SEARCH)
    compiler = ["c++", "-Wall", "-Werror", f"-I{ROOT / 'common' / 'setup' / 'headers'}", str(program)]
    subprocess.run([*compiler, "-o", str(tmp_path / "search")], check=True)
    done = subprocess.run([str(tmp_path / "search")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == "1 1 1 4 5 5 5 5 5 6 6 6".split()


@pytest.mark.skipif(not os.environ.get("COMPILE_FOR_CUDA"), reason="minutes of nvcc: set COMPILE_FOR_CUDA=1")
@pytest.mark.parametrize("package", sorted(SOURCE_PACKAGES))
def test_packages_compile_for_cuda_without_a_gpu(package, monkeypatch, cuda_of_torch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    monkeypatch.setenv("MAX_JOBS", "2")  # a compiler of CUDA takes up to 3 GB
    try:
        extensions.tools(SOURCE_PACKAGES[package], "cuda")
    except extensions.NotRunnable as error:
        pytest.skip(str(error))
    build = ["-m", "rnnt_bench.setup.extensions", package, "--device", "cuda"]
    done = subprocess.run([sys.executable, *build], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    (library,) = extensions.build(package, "cuda").rglob("*.so")
    triton = pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, brings cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(cuobjdump), "--list-elf", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sm_80" in listed and "sm_90" in listed


def test_a_package_for_cuda_alone_is_not_tried_on_the_cpu():
    of = {name: source.devices for name, source in SOURCE_PACKAGES.items()}
    assert "cpu" not in of["warp_rnnt"] and {"cpu", "cuda"} <= {*of["optimized_transducer"]}
    with pytest.raises(extensions.NotRunnable, match="warp_rnnt has no cpu version") as caught:
        extensions.build("warp_rnnt", "cpu")
    assert caught.value.status == "unsupported"


#: The output of a compilation, whose meaningful line is marked.
LOGS = [
    "[1/2] c++ a.cc\nFAILED: a.o\n*a.cc:3:1: error: x\nninja: build stopped.",
    "*a.cc:1:1: fatal error: a.h: No such file\ncompilation terminated.",
    "*/usr/bin/ld: cannot find -lcudart: No such file\ncollect2: error: ld returned 1 exit status",
    "c++: internal\n*Killed\n\n",
]


@pytest.mark.parametrize("log", LOGS)
def test_the_meaningful_line_of_a_log(log):
    assert extensions.meaningful_line(log.replace("*", "")) == log.partition("*")[2].partition("\n")[0]
