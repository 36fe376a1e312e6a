"""`make setup K2_WHEEL=FILE-OR-URL`: another k2 for the k2 environment, with the torch and the Python of its name.

The wheel and all that it needs are resolved from the user's index into a lock with hashes, .venv/k2.wheel.txt.  As long
as that file is there it is the environment's lock, instead of requirements/k2.txt; K2_WHEEL=locked removes it.
Standard library only.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Tuple
from urllib.parse import unquote, urlsplit

from common.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError
from common.core.files import read_bytes
from common.core.guard import say
from common.core.paths import ROOT
from common.setup import environments
from common.setup.uv import Uv
from common.system.locks import locked

#: As https://k2-fsa.github.io/k2 names its wheels.
NAME = re.compile(
    r"k2-[^-+]+\+(?P<build>cpu|cuda[\d.]+)\.torch(?P<torch>\d+\.\d+(?:\.\d+)?)"
    r"-cp(?P<major>\d)(?P<minor>\d+)-cp\d+-[\w.]+\.whl"
)
EXAMPLE = "k2-1.24.4.dev20250714+cuda12.8.torch2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl"
LOCKED = "locked"
#: The first torch that takes numpy 2 and today's setuptools.
MODERN = (2, 4)
#: What the suite runs under.
OLDEST_TORCH, OLDEST_PYTHON = (1, 13), (3, 9)


@dataclass(frozen=True)
class Wheel:
    """source: the file or URL; build: "cpu" or "cuda12.8"; torch, python: "2.7.1", "3.11"."""

    source: str
    name: str
    build: str
    torch: str
    python: str

    @property
    def url(self) -> str:
        return self.source if "://" in self.source else Path(self.source).resolve().as_uri()


def parse(source: str) -> Wheel:
    """Return what the name of a wheel says. Raises UserError for a name that no k2 wheel has, and for a torch or Python
    too old for the suite."""
    name = unquote(urlsplit(source).path).rpartition("/")[2] if "://" in source else Path(source).name
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"K2_WHEEL: {name!r} is no name of a k2 wheel, which is as {EXAMPLE}; keep the name it came with"
        )
    torch, python = match["torch"], f"{match['major']}.{match['minor']}"
    if _version(torch) < OLDEST_TORCH or _version(python) < OLDEST_PYTHON:
        raise UserError(
            f"K2_WHEEL: {name} is for torch {torch} and Python {python}; take one for 1.13 and 3.9 or newer"
        )
    return Wheel(source, name, match["build"], torch, python)


def choose(source: str, sha256: str = "") -> None:
    """Make a wheel, a file or a URL, that of the k2 environment, which the next set-up makes anew; "locked": the locked
    one again.

    sha256: what it must have; a wheel that was chosen before must have the same again.  Raises UserError, and then
    nothing is changed.
    """
    target = environments.ENVIRONMENTS["k2"].chosen_lock
    with locked(environments.LOCK, lambda: say("another set-up is running; waiting for it to end")) as lock:
        if source == LOCKED:
            target.unlink(missing_ok=True)
            return
        wheel, known = parse(source), _recorded(target)
        wanted = sha256.lower() or (known["sha256"] if known.get("wheel") == wheel.name else "")
        digest = _digest(wheel) if wheel.url.startswith("file:") else ""
        _check(wheel, digest or wanted, wanted)
        if known.get("wheel") == wheel.name and known["url"] == wheel.url and known["sha256"] == (digest or wanted):
            return
        text = _resolved(wheel, lock)
        digest = digest or _hash_in(text)
        _check(wheel, digest, wanted)
        head = {"wheel": wheel.name, "url": wheel.url, "sha256": digest, "python": wheel.python}
        lines = [f"# {key}: {value}\n" for key, value in head.items()]
        target.write_text("".join(lines) + text, encoding="utf-8")
    checked = "as required" if wanted else f"not checked; K2_SHA256={digest} would require it"
    say(f"k2: {wheel.name} with torch {wheel.torch} and Python {wheel.python}; its sha256 is {digest} ({checked})")


def imports() -> int:
    """Return an exit code: does the k2 that was asked for import?  One that does not is dropped, with the reason."""
    python, lock = environments.interpreter("k2"), environments.ENVIRONMENTS["k2"].chosen_lock
    if python is None:
        return EXIT_FAILED  # set-up has said why
    if not lock.exists():
        return EXIT_OK
    code = "import torch; print(torch.__version__, torch.version.cuda); import k2"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        return EXIT_OK
    wheel, (torch, cuda) = parse(_recorded(lock)["wheel"]), (done.stdout.split() or ["?", "None"])[:2]
    why = (done.stderr.strip() or "no message").splitlines()[-1]
    say(f"k2: error: {wheel.name} does not import with torch {torch}: {why}{_advice(wheel, cuda)}")
    lock.unlink()
    say("k2: the next `make setup` makes the locked one again")
    return EXIT_FAILED


def _advice(wheel: Wheel, cuda: str) -> str:
    """Return what to do where the index has another build of torch than the wheel was made with."""
    wanted = wheel.build.partition("cuda")[2] or "None"
    if wanted == cuda:
        return ""
    built = "for CPUs" if cuda == "None" else f"for CUDA {cuda}"
    page = wheel.build.replace("cuda", "cu").replace(".", "")
    return (
        f"; the wheel is for {wheel.build}, and the index's torch is {built}: repeat this with "
        f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{page}, which has the other"
    )


def _resolved(wheel: Wheel, lock: int) -> str:
    """Return the lock of the wheel and all that it needs, on this machine.  Raises UserError."""
    lock_path = environments.ENVIRONMENTS["k2"].chosen_lock
    source, log = lock_path.with_suffix(".in"), lock_path.with_suffix(".log")
    source.write_text(_requirements(wheel), encoding="utf-8")
    try:
        with log.open("w", encoding="utf-8") as stream:
            uv = Uv(stream, keep=(lock,))
            python, _ = uv.find_python((wheel.python,), fetch=True)
            return uv.resolve(python, source)
    except NotRunnable as error:
        raise UserError(f"K2_WHEEL: {wheel.name} {error}") from error
    except subprocess.CalledProcessError:
        why = f"{environments.last_error(log)}; see {log.relative_to(ROOT)}"
        raise UserError(f"K2_WHEEL: no environment for {wheel.name} with torch {wheel.torch}: {why}") from None
    finally:
        source.unlink()


def _requirements(wheel: Wheel) -> str:
    """Return requirements/k2.in with this wheel and its torch."""
    text = (ROOT / "requirements" / "k2.in").read_text(encoding="utf-8")
    text = re.sub(r"^k2==.*$", f"k2 @ {wheel.url}", text, flags=re.MULTILINE)
    text = re.sub(r"^torch==\S+", f"torch=={wheel.torch}", text, flags=re.MULTILINE)
    if _version(wheel.torch) >= MODERN:
        text = re.sub(r"^(numpy|setuptools)<\S+", r"\1", text, flags=re.MULTILINE)
    return text


def _digest(wheel: Wheel) -> str:
    path = Path(unquote(urlsplit(wheel.url).path))
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise UserError(f"K2_WHEEL: {path} cannot be read: {error.strerror}; name a wheel file or its URL") from error


def _check(wheel: Wheel, digest: str, wanted: str) -> None:
    if digest != wanted and wanted:
        raise UserError(
            f"K2_WHEEL: the sha256 of {wheel.name} is {digest}, not {wanted}: fetch it again, or give another K2_SHA256"
        )


def _hash_in(lock: str) -> str:
    """Return the sha256 of the wheel as uv got it."""
    match = re.search(r"^k2 @ .*?--hash=sha256:([0-9a-f]{64})", lock, flags=re.MULTILINE | re.DOTALL)
    if match is None:
        raise UserError("K2_WHEEL: uv gave no sha256 for that URL; download the wheel and name the file")
    return match[1]


def _recorded(lock: Path) -> Dict[str, str]:
    """Return the first lines of the lock that was chosen: wheel, url, sha256, python; {} without one."""
    text = lock.read_text(encoding="utf-8") if lock.exists() else ""
    return dict(re.findall(r"^# (\w+): (\S+)$", text, re.MULTILINE))


def _version(text: str) -> Tuple[int, ...]:
    return tuple(map(int, text.split(".")))
