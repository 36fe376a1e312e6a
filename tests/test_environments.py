"""Set-up, for real but small: environments with one wheel made here, in a checkout of their own, no network."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, wait_for

DRIVER = """\
import sys
from common.setup import environments
from common.setup.__main__ import setup
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
RUNNING = "{}.{}".format(*sys.version_info)

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 10), (3, 11), (3, 12), (3, 13)), reason="the environments have Python 3.10 to 3.13"
)


def make_wheel(folder: Path, version: str) -> str:
    """A wheel of a package whose VERSION is `version`; returns its line for a lock file."""
    folder.mkdir(exist_ok=True)
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"tiny-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without the time, which would be in its hash
    return f"tiny=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


class Checkout:
    """A folder with the set-up code, two tiny lock files and a command line like the real one."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(ROOT / "common", folder / "common")
        (folder / "drive.py").write_text(DRIVER)
        self.wheels = folder / "wheels"
        self.lock("main", make_wheel(self.wheels, "1"))
        for name in ("other", "old", "heavy"):
            self.lock(name, make_wheel(self.wheels, "1"))
        self.lock("uv", (ROOT / "requirements" / "uv.txt").read_text())
        self.venv().mkdir()
        (folder / ".venv" / ".uv").symlink_to(UV)  # no test fetches it
        keep = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        self.environment = {**keep, **pip, "UV_CACHE_DIR": str(folder / "cache")}

    def lock(self, name: str, text: str) -> None:
        (self.folder / "requirements").mkdir(exist_ok=True)
        (self.folder / "requirements" / f"{name}.txt").write_text(text)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-S", "drive.py", *arguments],  # nothing installed can be imported
            cwd=self.folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=300)
        assert "Traceback" not in stderr
        return process.returncode, stdout, stderr

    def installed(self, name: str) -> str:
        """VERSION of the tiny package that the environment's Python imports."""
        code, stdout, stderr = self.run("path", name)
        assert code == 0, stderr
        command = [stdout.strip(), "-c", "import tiny; print(tiny.VERSION)"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def venv(self, *parts: str) -> Path:
        return self.folder.joinpath(".venv", *parts)


@pytest.fixture
def checkout(tmp_path):
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

    assert checkout.run("clean")[0] == 0
    assert not checkout.venv().exists()


def test_what_one_environment_cannot_have_is_its_reason_and_the_others_go_on(checkout):
    checkout.lock("other", "tiny==1 --hash=sha256:" + 64 * "0" + "\n")
    code, _, stderr = checkout.run("setup")
    assert code == 0
    assert checkout.installed("main") == "1"
    assert "other: left out" in stderr and "old: left out" in stderr

    for name, expected in (("old", f"needs Python 3.2; this is Python {RUNNING}"), ("other", "Hash mismatch")):
        note = checkout.venv(f"{name}.reason").read_text()
        assert expected in note and "make setup" in note and note.count("\n") == 1
        assert checkout.run("path", name) == (1, "", note)
    assert not checkout.venv("other").exists()
    assert 64 * "0" in checkout.venv("other.log").read_text()

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


def test_no_main_environment_is_an_error(checkout):
    checkout.lock("main", "no-such-package==1 --hash=sha256:" + 64 * "0" + "\n")
    code, _, stderr = checkout.run("setup")
    assert code == 1
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("environments: error: main cannot be set up: ") and "no-such-package was not found" in last
    assert not checkout.venv("other").exists()  # no two minutes for the others first


def test_a_python_without_ensurepip_is_told_what_to_install(checkout, tmp_path):
    (tmp_path / "ensurepip.py").write_text("raise ImportError\n")  # as on Debian without python3-venv
    checkout.venv(".uv").unlink()
    code, _, stderr = checkout.run("setup", "main", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert f"apt install python{RUNNING}-venv" in stderr.splitlines()[-1]


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
    for_all, for_install = (
        "no-index = no\nfind-links = /nowhere",
        f"no-index = yes\nfind-links =\n    {checkout.wheels}",
    )
    (tmp_path / "pip.conf").write_text(f"[global]\n{for_all}\n[install]\n{for_install}\n")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        del checkout.environment[name]
    assert checkout.run("setup", "main", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))[0] == 0
    assert checkout.installed("main") == "1"


def make_index(folder: Path, wheels: Path, pattern: str) -> str:
    """URL of a package index with the wheels of package ``tiny`` that match `pattern`."""
    (folder / "tiny").mkdir(parents=True)
    links = [f'<a href="{wheel.as_uri()}">{wheel.name}</a>' for wheel in sorted(wheels.glob(pattern))]
    (folder / "tiny" / "index.html").write_text("".join(links))
    return folder.as_uri()


def test_another_build_in_an_extra_index_is_not_taken_and_what_the_index_lacks_is(checkout, tmp_path):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        del checkout.environment[name]
    make_wheel(checkout.wheels, "1+cpu")
    checkout.lock("other", make_wheel(checkout.wheels, "2"))
    indexes = {
        "PIP_INDEX_URL": make_index(tmp_path / "first", checkout.wheels, "tiny-1-*"),
        "PIP_EXTRA_INDEX_URL": make_index(tmp_path / "extra", checkout.wheels, "tiny-[12][+-]*"),
    }
    assert checkout.run("setup", "main", **indexes)[0] == 0
    assert checkout.installed("main") == "1"
    assert checkout.run("setup", "other", PIP_INDEX_URL=indexes["PIP_INDEX_URL"])[0] == 0
    assert "tiny" in checkout.venv("other.reason").read_text()  # the first index has no version 2
    assert checkout.run("setup", "other", **indexes)[0] == 0
    assert checkout.installed("other") == "2"


def test_what_cannot_be_compiled_does_not_stop_set_up(checkout):
    shutil.copy(ROOT / "requirements" / "sources.txt", checkout.folder / "requirements")
    (checkout.folder / "drive.py").write_text(DRIVER.replace("environments.main()", "setup(sys.argv[1:])"))
    code, _, stderr = checkout.run()
    assert code == 0 and "other: ready" in stderr
    assert "left out" in stderr and "has no torch" in stderr  # main has one tiny package here


def test_two_at_once_install_once(checkout):
    both = [checkout.start("setup", "main"), checkout.start("setup", "main")]
    stderr = "".join(process.communicate(timeout=300)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert stderr.count("main: installing") == 1


def test_ctrl_c_is_one_line(checkout):
    process = checkout.start("setup", "main")
    assert "installing" in process.stderr.readline()
    wait_for(checkout.venv("main.log").exists, "installation")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.count("\n") == 1 and "interrupted" in stderr and "`make setup`" in stderr


@pytest.mark.parametrize("name", ["main", "k2", "nemo", "ray", "viewer", "sources"])
def test_lock_files_pin_everything_by_hash_and_name_no_index(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    options = ("#", "--only-binary :all:", "--no-binary antlr4-python3-runtime")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(options)]
    assert lines
    for line in lines:
        assert re.match(r"[\w.-]+(\[[^\]]*\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line
    if name == "k2":
        assert re.search(r"^k2==1\.23\.4 +--hash=sha256:5b5f709b12b9[0-9a-f]{52}$", text, re.MULTILINE)  # one wheel
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_a_lock_keeps_only_the_chosen_hash():
    from requirements import lock

    text = "a==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==2 \\\n    --hash=sha256:cc\n"
    assert lock.chosen_hashes("a==1 --hash=sha256:bb\nb==2\n") == {"a": "sha256:bb"}
    kept = "a==1 \\\n    --hash=sha256:bb\nb==2 \\\n    --hash=sha256:cc\n"
    assert lock.keep_one_hash(text, "a", "sha256:bb") == kept
    with pytest.raises(ValueError, match="no file with hash sha256:dd"):
        lock.keep_one_hash(text, "a", "sha256:dd")
