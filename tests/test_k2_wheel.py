"""`make setup K2_WHEEL=...`, for real but small: wheels made here, named as k2's are, in a checkout of their own."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from functools import partial

import pytest
from test_environments import RUNNING, Checkout, make_wheel

from common.core.errors import UserError
from common.setup import k2_wheel

DRIVER = """\
import sys
from common.core.guard import guarded
from common.setup import environments
from common.setup.__main__ import setup
Environment = environments.Environment
environments.ENVIRONMENTS = {"main": Environment("main", "a wheel", required=True), "k2": Environment("k2", "k2")}
sys.exit(environments.main() if sys.argv[1:] else guarded("setup", lambda: setup([])))
"""
CP = "cp" + RUNNING.replace(".", "")
TAG = f"{CP}-{CP}-linux_x86_64"
TORCH = {
    "torch/__init__.py": "from .version import __version__\n",
    "torch/version.py": "__version__, cuda = '2.7.1', None\n",
}

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 10), (3, 11), (3, 12), (3, 13)) or not sys.platform.startswith("linux"),
    reason="the environments have Python 3.10 to 3.13",
)


@pytest.mark.parametrize(
    "name, build, torch, python",
    [
        (
            "k2-1.24.4.dev20250714+cuda12.8.torch2.7.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
            *("cuda12.8", "2.7.1", "3.11"),
        ),
        ("k2-1.24.4.dev20240223+cpu.torch2.2.0-cp310-cp310-manylinux2014_x86_64.whl", "cpu", "2.2.0", "3.10"),
        ("k2-1.23.4.dev20230224+cuda11.7.torch1.13.1-cp39-cp39-linux_x86_64.whl", "cuda11.7", "1.13.1", "3.9"),
        (
            "https://a.org/k2/resolve/k2-1.24.4%2Bcpu.torch2.9.0-cp313-cp313-linux_x86_64.whl?download=1",
            "cpu",
            "2.9.0",
            "3.13",
        ),
    ],
)
def test_a_name_tells_torch_and_python(name, build, torch, python):
    wheel = k2_wheel.parse(name)
    assert (wheel.build, wheel.torch, wheel.python) == (build, torch, python)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "k2.whl",
        "k2-1.23.4-cp311-cp311-manylinux2014_x86_64.whl",  # no torch in it
        "torch-2.7.1+cpu-cp311-cp311-linux_x86_64.whl",
        "k2-1.24.4+cpu.torch2.7.1.tar.gz",
        "k2-1.24.4+cpu.torch1.7.1-cp38-cp38-linux_x86_64.whl",  # too old for the suite
        "https://a.org/k2-1.24.4+cpu.torch2.7.1-cp311-cp311-linux_x86_64.whl/",
    ],
)
def test_a_name_that_tells_nothing_is_refused(name):
    with pytest.raises(UserError, match="K2_WHEEL"):
        k2_wheel.parse(name)


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path / "checkout")
    (made.folder / "drive.py").write_text(DRIVER)
    made.lock("k2", make_wheel(made.wheels, "1", "k2"))
    (made.folder / "requirements" / "k2.in").write_text("k2==1 --hash=sha256:00\ntorch==1.13.1  # its own\ntiny<2\n")
    make_wheel(made.wheels, "2.7.1", "torch", files=TORCH)
    made.lock("sources", "")
    (made.folder / "common" / "setup" / "source_packages.py").write_text("SOURCE_PACKAGES = {}\n")
    table = made.folder / "common" / "core" / "implementations.py"
    table.write_text(table.read_text() + "\nIMPLEMENTATIONS = ()\n")  # nothing to compile
    return made


@pytest.fixture
def wheel(tmp_path):
    """Path of a k2 wheel outside of the index."""
    make_wheel(tmp_path / "downloads", "9+cpu.torch2.7.1", "k2", TAG)
    return tmp_path / "downloads" / f"k2-9+cpu.torch2.7.1-{TAG}.whl"


def versions(checkout):
    """{package: version} in the k2 environment."""
    code, python, stderr = checkout.run("path", "k2")
    assert code == 0, stderr
    code = (
        "import json, importlib.metadata as m; print(json.dumps({one.name: one.version for one in m.distributions()}))"
    )
    return json.loads(subprocess.run([python.strip(), "-c", code], check=True, stdout=subprocess.PIPE).stdout)


def test_it_takes_the_place_of_the_locked_one_until_it_is_removed(checkout, wheel):
    code, _, stderr = checkout.run(K2_WHEEL=str(wheel))
    assert code == 0 and "torch 2.7.1" in stderr, stderr
    assert versions(checkout) == {"k2": "9+cpu.torch2.7.1", "torch": "2.7.1", "tiny": "1"}

    made = checkout.venv("k2", "stamp").stat().st_mtime_ns
    assert checkout.run()[0] == 0 and checkout.run(K2_WHEEL=str(wheel))[0] == 0
    assert checkout.venv("k2", "stamp").stat().st_mtime_ns == made  # kept as it is

    assert checkout.run(K2_WHEEL="locked")[0] == 0
    assert versions(checkout) == {"k2": "1"}


def test_what_cannot_be_had_is_one_line_and_changes_nothing(checkout, tmp_path):
    reasons = {
        f"k2-9+cpu.torch2.7.1-{TAG}.whl": "not found",  # no such file
        f"k2-9+cpu.torch9.9.9-{TAG}.whl": "torch 9.9.9",  # no such torch in the index
        "k2-9+cpu.torch2.7.1-cp399-cp399-linux_x86_64.whl": "Python 3.99",
        "k2.whl": "no name of a k2 wheel",
    }
    for name, reason in reasons.items():
        if reason in ("torch 9.9.9", "Python 3.99"):
            make_wheel(tmp_path / "downloads", name.split("-")[1], "k2", name[: -len(".whl")].split("-", 2)[2])
        code, _, stderr = checkout.run(K2_WHEEL=str(tmp_path / "downloads" / name))
        assert code == 2 and reason in stderr and len(stderr.splitlines()) == 1, stderr
        assert not checkout.venv("k2.wheel.txt").exists()
    assert checkout.run()[0] == 0 and versions(checkout) == {"k2": "1"}


def test_one_that_does_not_import_is_dropped(checkout, tmp_path):
    folder, version = tmp_path / "downloads", "9+cuda12.8.torch2.7.1"
    make_wheel(folder, version, "k2", TAG, {"k2.py": "raise ImportError('libcudart.so.12')\n"})
    code, _, stderr = checkout.run(K2_WHEEL=str(folder / f"k2-{version}-{TAG}.whl"))
    assert code == 1 and "Traceback" not in stderr
    assert "libcudart.so.12" in stderr and "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu128" in stderr
    assert checkout.run()[0] == 0 and versions(checkout) == {"k2": "1"}


def test_a_url_and_its_hash(checkout, wheel):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(wheel.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{wheel.name.replace('+', '%2B')}"
        code, _, stderr = checkout.run(K2_WHEEL=f"{url}#sha256={'1' * 64}")
        assert code != 0 and "Traceback" not in stderr and not checkout.venv("k2", "stamp").exists(), stderr
        code, _, stderr = checkout.run(K2_WHEEL=f"{url}#sha256={digest}")
        server.shutdown()
    assert code == 0, stderr
    assert versions(checkout)["k2"] == "9+cpu.torch2.7.1"
    assert checkout.run(K2_WHEEL=f"{url}.zip")[0] == 2
