"""Which Python each implementation needs: the virtual environments of `make setup`, created, reused and re-created.

An environment is current while its stamp, the last file written into it, names today's lock file and a Python it may
have; so a half-made one is never taken for a whole one.  What cannot be had (no such Python, a failed download) is a
reason in ``.venv/<name>.reason``, shown in the rows of its implementations.  Leaves out what is compiled from a source
package (extensions).  Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, List, Optional, Tuple

from common.commands import guarded
from common.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError
from common.setup import pythons
from common.setup.locks import locked

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED_PYTHONS = ("3.11", "3.12", "3.13", "3.10")  # in the order tried when the running Python is none of them


@dataclass(frozen=True)
class Environment:
    """name: the folder below .venv; pythons: minor versions it can have (None: SUPPORTED_PYTHONS); requirements: its
    lock file in requirements/; description: what set-up says while it installs; required: set-up fails without it;
    optional: so heavy that it is made only when it is named, and kept current from then on."""

    name: str
    pythons: Optional[Tuple[str, ...]]
    requirements: str
    description: str
    required: bool = False
    optional: bool = False

    @property
    def command(self) -> str:
        """What makes it."""
        return f"make setup ENVIRONMENTS={self.name}" if self.optional else "make setup"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("main", None, "main.txt", "torch 2.11 and torchaudio, 5 GB, about 2 minutes", required=True),
        Environment("k2", ("3.11",), "k2.txt", "k2 1.23.4 with its torch 1.13, 4 GB, about 2 minutes"),
        Environment("nemo", None, "nemo.txt", "NeMo's speech collection, 7 GB, about 5 minutes", optional=True),
        Environment("viewer", None, "viewer.txt", "TensorBoard with the profiler plugin, about half a minute"),
    )
}


def interpreter(name: str) -> Optional[Path]:
    """The Python of environment `name`, or None when that is not there, half-made or out of date (see `reason`)."""
    environment = _environment(name)
    stamp = _read_stamp(environment)
    python = _folder(environment) / "bin" / "python"
    current = stamp.get("lock") == _lock_hash(environment) and stamp.get("python") in _pythons(environment)
    return python if current and python.exists() else None


def reason(name: str) -> str:
    """Why `interpreter` has none for `name`, with what to do next; "" when it has one."""
    environment = _environment(name)
    if interpreter(name) is not None:
        return ""
    note = _beside(environment, "reason")
    if note.exists():
        return note.read_text(encoding="utf-8").strip()
    state = "is out of date" if _read_stamp(environment) else "is not there"
    return f"the {name} environment {state}; run `{environment.command}`"


def setup(names: Iterable[str] = ()) -> int:
    """Make the environments `names` (default: all but the optional ones that are not there) current and return an
    exit code.

    Only a missing required environment (main) is a failure; the others leave their reason.  Raises UserError for a name
    that is none.
    """
    wanted = [_environment(name) for name in names] or [
        environment
        for environment in ENVIRONMENTS.values()
        if not environment.optional or _folder(environment).exists()
    ]
    with locked(_lock_path(), lambda: _say("another set-up is running; waiting for it to end")) as lock:
        for environment in wanted:
            if _is_as_asked(environment):
                continue
            try:
                _create(environment, lock)
            except NotRunnable as error:
                _beside(environment, "reason").write_text(f"{error}\n", encoding="utf-8")
                if environment.required:
                    _say(f"environments: error: {environment.name} cannot be set up: {error}")
                    return EXIT_FAILED
                _say(f"{environment.name}: left out: {error}")
    return EXIT_OK


def clean(names: Iterable[str] = ()) -> None:
    """Remove the environments `names`; without names, all of .venv."""
    chosen = [_environment(name) for name in names]
    if not _lock_path().parent.exists():
        return
    with locked(_lock_path(), lambda: _say("a set-up is running; waiting for it to end")):
        for environment in chosen:
            _remove(environment)
        if not chosen:
            shutil.rmtree(_lock_path().parent)


def _create(environment: Environment, lock: int) -> None:
    """Install `environment` anew, the stamp last.  Raises NotRunnable.  `lock`: descriptor that the children keep."""
    python, version = pythons.find(_pythons(environment))
    _remove(environment)
    _say(f"{environment.name}: installing ({environment.description})")
    folder, log = _folder(environment), _beside(environment, "log")
    install = ["-m", "pip", "install", "--require-hashes", "--no-input", "--disable-pip-version-check"]
    install += ["--progress-bar", "off", "-r", str(_requirements(environment))]
    lock_hash = _lock_hash(environment)  # before pip reads the file, so that an edit meanwhile makes the result stale
    with log.open("w", encoding="utf-8") as stream:
        for command in ([python, "-m", "venv", str(folder)], [str(folder / "bin" / "python"), *install]):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, pass_fds=(lock,))
            if done.returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
                line = _last_error(log, done.returncode)
                raise NotRunnable("missing", f"{line}; see {log.relative_to(ROOT)}, then run `{environment.command}`")
    stamp = {"lock": lock_hash, "python": version}
    temporary = folder / "stamp.tmp"
    temporary.write_text(json.dumps(stamp), encoding="utf-8")
    os.replace(temporary, folder / "stamp")
    _say(f"{environment.name}: ready")


def _is_as_asked(environment: Environment) -> bool:
    """Whether `environment` is current and has the running Python, if it can have that one."""
    if interpreter(environment.name) is None:
        return False
    return pythons.RUNNING not in _pythons(environment) or pythons.RUNNING == _read_stamp(environment)["python"]


def _last_error(log: Path, returncode: int) -> str:
    """What went wrong, in one line: pip's last ERROR line, else the log's last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return re.sub(r"^ERROR:\s*", "", (errors or lines or [f"exit code {returncode} and no output"])[-1])


def _read_stamp(environment: Environment) -> dict:
    try:
        return json.loads((_folder(environment) / "stamp").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remove(environment: Environment) -> None:
    folder = _folder(environment)
    (folder / "stamp").unlink(missing_ok=True)  # first, so that a removal cut short leaves a half-made one
    shutil.rmtree(folder, ignore_errors=True)
    for suffix in ("reason", "log"):
        _beside(environment, suffix).unlink(missing_ok=True)


def _environment(name: str) -> Environment:
    if name not in ENVIRONMENTS:
        raise UserError(f"no environment is named {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def _pythons(environment: Environment) -> Tuple[str, ...]:
    return environment.pythons or SUPPORTED_PYTHONS


def _lock_hash(environment: Environment) -> str:
    return hashlib.sha256(_requirements(environment).read_bytes()).hexdigest()


def _requirements(environment: Environment) -> Path:
    return ROOT / "requirements" / environment.requirements


def _folder(environment: Environment) -> Path:
    return ROOT / ".venv" / environment.name


def _beside(environment: Environment, suffix: str) -> Path:
    return ROOT / ".venv" / f"{environment.name}.{suffix}"


def _lock_path() -> Path:
    return ROOT / ".venv" / ".lock"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m common.setup.environments", description="The environments in .venv."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (
        ("setup", "create what is missing or out of date (default: all environments but the optional ones)"),
        ("status", "one line for each environment: its Python, or why it has none"),
        ("path", "the Python of each named environment; exit code 1 and the reason when there is none"),
        ("clean", "remove the named environments (default: all of .venv)"),
    ):
        commands.add_parser(command, help=text, description=text).add_argument("names", nargs="*", metavar="NAME")
    parsed = parser.parse_args(arguments)
    return guarded(
        "environments",
        lambda: _run(parsed.command, parsed.names),
        interrupted="interrupted; `make setup` starts the unfinished environment again",
    )


def _run(command: str, names: List[str]) -> int:
    try:
        if command == "setup":
            return setup(names)
        if command == "clean":
            clean(names)
            return EXIT_OK
        return _show(names or list(ENVIRONMENTS), names_too=command == "status")
    except BrokenPipeError:  # not of these files
        raise
    except OSError as error:
        _say(f"environments: error: {error}; make {ROOT / '.venv'} writable or free some space, then run it again")
        return EXIT_FAILED


def _show(names: List[str], names_too: bool) -> int:
    code = EXIT_OK
    for name in names:
        python = interpreter(name)
        if names_too:
            print(f"{name:8}{python or reason(name)}")
        elif python is not None:
            print(python)
        else:
            _say(reason(name))
            code = EXIT_FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
