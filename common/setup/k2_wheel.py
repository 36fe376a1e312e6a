"""`make setup K2_WHEEL=FILE-OR-URL`: another k2 for the k2 environment, with the torch and the Python of its name.

uv resolves the wheel and all that it needs from the user's index into a lock with hashes, .venv/k2.wheel.txt.  As long
as that file is there it is the environment's lock, instead of requirements/k2.txt; K2_WHEEL=locked removes it.  A URL
may end in #sha256=..., which uv checks.  Standard library only.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Tuple
from urllib.parse import unquote, urlsplit

from common.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError
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
    """A wheel of k2.  source: file or URL; build: "cpu" or "cuda12.8"; torch, python: such as "2.7.1" and "3.11"."""

    source: str
    name: str
    build: str
    torch: str
    python: str

    @property
    def url(self) -> str:
        return self.source if "://" in self.source else Path(self.source).resolve().as_uri()


def parse(source: str) -> Wheel:
    """Parse the file name of a k2 wheel.

    Raises UserError for a name that no k2 wheel has, and for a torch or Python too old for the suite.
    """
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


def choose(source: str) -> None:
    """Choose the wheel that the next set-up installs into the k2 environment.

    source: a file, a URL, or "locked" for the locked one.  Raises UserError, and then changes nothing.
    """
    target = environments.ENVIRONMENTS["k2"].chosen_lock
    with locked(environments.LOCK, lambda: say("another set-up is running; waiting for it to end")) as lock:
        if source == LOCKED:
            target.unlink(missing_ok=True)
            return
        wheel = parse(source)
        if _chosen_url(target) == wheel.url:
            return
        text = _resolved(wheel, lock)
        target.write_text(f"# url: {wheel.url}\n# python: {wheel.python}\n{text}", encoding="utf-8")
    say(f"k2: {wheel.name} with torch {wheel.torch} and Python {wheel.python}")


def imports() -> int:
    """Import the k2 that was asked for; drop it, and print the reason, if that fails.  Returns an exit code."""
    python, lock = environments.interpreter("k2"), environments.ENVIRONMENTS["k2"].chosen_lock
    if python is None:
        return EXIT_FAILED  # set-up has said why
    if not lock.exists():
        return EXIT_OK
    code = "import torch; print(torch.__version__, torch.version.cuda); import k2"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        return EXIT_OK
    wheel, (torch, cuda) = parse(_chosen_url(lock)), (done.stdout.split() or ["?", "None"])[:2]
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


def _chosen_url(lock: Path) -> str:
    """Return the URL of the wheel that was chosen, of which this is the lock; "" without one."""
    text = lock.read_text(encoding="utf-8") if lock.exists() else ""
    match = re.search(r"^# url: (\S+)$", text, re.MULTILINE)
    return match[1] if match else ""


def _version(text: str) -> Tuple[int, ...]:
    return tuple(map(int, text.split(".")))
