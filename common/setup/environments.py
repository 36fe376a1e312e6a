"""Create the virtual environments in .venv, and tell where their Pythons are.

An environment is current if its stamp, the last file written into it, has the hash of its lock file
and a supported Python.  If one cannot be made (no such Python, a failed download), the reason is
kept in ``.venv/<name>.reason`` and shown in the rows of its implementations.  Only the standard
library is imported: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rnnt_bench.core import implementations
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError, guarded, say
from rnnt_bench.core.files import ROOT, locked
from rnnt_bench.setup import libraries

#: Minor version of the running Python, such as "3.11".
RUNNING = "{}.{}".format(*sys.version_info)
#: The running Python.  In a virtual environment sys.executable is a link in there, which is gone
#: when that environment is made anew.
PYTHON = getattr(sys, "_base_executable", None) or sys.executable
#: The virtual environment that uv is installed in.
UV = ROOT / ".venv" / ".uv"
#: Folder of the lock files.
LOCKS = Path(__file__).resolve().parent / "requirements"
#: Setting of pip -> the environment variable of uv that means the same.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}


class Uv:
    """Run the pinned version of uv with the user's settings of pip; install it first if need be.

    A command that fails raises subprocess.CalledProcessError.  A Python without venv or ensurepip
    raises NotRunnable("missing").

    log: gets what the commands print; keep: descriptors that they inherit, such as a lock."""

    def __init__(self, log: TextIO, keep: Sequence[int] = ()):
        self._log = log
        self._keep = keep
        # Until the settings of pip are read, commands run with the variables of this process.
        self._variables: dict[str, str] = {**os.environ}
        self._fetch()
        of_pip = self._settings_of_pip()
        no_index = of_pip.pop("UV_NO_INDEX", "").lower() in ("1", "y", "yes", "t", "true", "on")
        #: Flags of `install`: that there is no main index has a flag of uv, but no variable.
        self._flags = ["--no-index"] if no_index else []
        # Without a main index the extra ones are used at once: they stay in of_pip.
        later = () if no_index else ("UV_INDEX", "UV_FIND_LINKS")
        #: Variables of uv with the user's extra indexes and links.  `install` uses them only if it
        #: fails with the main index alone.
        self._extra = {name: of_pip.pop(name) for name in later if name in of_pip}
        # The user's variables win over the settings of pip.
        self._variables = {**of_pip, **os.environ, "UV_PYTHON_DOWNLOADS": "never"}

    def run(self, *arguments: str) -> None:
        """Run uv with these arguments; what it prints goes to the log."""
        self._run(str(UV / "bin" / "uv"), *arguments, stdout=self._log)

    def output(self, *arguments: str) -> str:
        """Run uv with these arguments, and return what it prints on stdout."""
        return self._run(str(UV / "bin" / "uv"), *arguments, stdout=subprocess.PIPE)

    def install(self, python: Path, requirements: Path) -> None:
        """Install exactly the packages of a lock file into the environment of `python`.

        The user's extra indexes and links are tried only if this fails with the main index alone,
        and then also in all later calls.  Otherwise uv might take another build from them, such as
        torch 2.11.0+cpu, which is not in the lock."""
        command = ["pip", "sync", "--python", str(python), "--require-hashes", *self._flags]
        # Under PYTHONDONTWRITEBYTECODE no import writes bytecode, so each start of torch would take
        # seconds more.  Otherwise imports write what they need; to compile all takes 18 seconds.
        if sys.dont_write_bytecode:
            command.append("--compile-bytecode")
        try:
            self.run(*command, str(requirements))
        except subprocess.CalledProcessError:
            if not self._extra:
                raise
            # With this strategy uv looks for a file in every index, as pip does.
            strategy = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
            self._variables = {**self._extra, **strategy, **self._variables}
            self.run(*command, str(requirements))

    def find_python(self, versions: Sequence[str]) -> tuple[str, str]:
        """Return (path, minor version) of the running Python, or of the first that uv finds.

        Raises NotRunnable("missing") if there is none.

        versions: minor versions that will do, such as "3.11"."""
        if RUNNING in versions:
            return PYTHON, RUNNING
        for version in versions:
            with contextlib.suppress(subprocess.CalledProcessError):
                return self.output("python", "find", "--system", version).strip(), version
        needed = " or ".join(sorted(versions, key=lambda version: int(version.split(".")[1])))
        raise NotRunnable(
            "missing",
            f"needs Python {needed}; this is Python {RUNNING}: install it, then run `make setup`",
        )

    def _fetch(self) -> None:
        """Install the uv of requirements/uv.txt, unless it is there.

        Raises NotRunnable without venv or ensurepip, and CalledProcessError if pip fails."""
        requirements = LOCKS / "uv.txt"
        digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
        stamp = UV / "stamp"
        python = UV / "bin" / "python"
        if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError:
            raise NotRunnable(
                "missing",
                f"Python {RUNNING} has no venv or ensurepip: install them (Debian, Ubuntu: "
                f"apt install python{RUNNING}-venv), then run `make setup`",
            ) from None
        shutil.rmtree(UV, ignore_errors=True)
        self._run(PYTHON, "-m", "venv", str(UV), stdout=self._log)
        pip = "-m pip --disable-pip-version-check install --require-hashes --no-input --progress-bar off"
        self._run(str(python), *pip.split(), "-r", str(requirements), stdout=self._log)
        stamp.write_text(digest, encoding="utf-8")

    def _settings_of_pip(self) -> dict[str, str]:
        """Return the user's settings of pip as environment variables of uv.

        `pip config list` has lines such as "global.timeout='60'".  Settings of PIP_ variables,
        ":env:.", win over those of `pip install`, which win over global ones."""
        variables: dict[str, str] = {}
        python = str(UV / "bin" / "python")
        settings = self._run(python, "-m", "pip", "config", "list", stdout=subprocess.PIPE)
        for section in ("global.", "install.", ":env:."):  # a later one wins
            for line in settings.splitlines():
                name, _, value = line.partition("=")
                variable = VARIABLES.get(name.removeprefix(section))
                if variable and name.startswith(section):
                    separator = "," if variable == "UV_FIND_LINKS" else " "
                    variables[variable] = separator.join(ast.literal_eval(value).split())
        return variables

    def _run(self, *command: str, stdout: Any) -> str:
        """Run a command; return what it prints if `stdout` is subprocess.PIPE."""
        printed: str = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=self._log,
            text=True,
            pass_fds=self._keep,
            env=self._variables,
        ).stdout
        return printed


INTERRUPTED = "interrupted; `make setup` starts the unfinished environment again"
FOLDER = ROOT / ".venv"
LOCK = FOLDER / ".lock"


@dataclass(frozen=True)
class Environment:
    """Describe a virtual environment of the suite.

    Attributes:
        description: its content, size and the time to make it, for messages
        pythons: supported minor versions; if the running one is not among them, the first that is
            there is used
        required: whether set-up fails if it cannot be made
        optional: whether set-up makes it only if it is named; once there, it is kept current
    """

    name: str
    description: str
    pythons: tuple[str, ...] = ("3.11", "3.12", "3.13", "3.10")
    required: bool = False
    optional: bool = False

    @property
    def command(self) -> str:
        """Return the command that makes this environment."""
        return f"make setup ENVIRONMENTS={self.name}" if self.optional else "make setup"

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """Return the path of its lock file."""
        return LOCKS / f"{self.name}.txt"

    def side_file(self, suffix: str) -> Path:
        """Return the path .venv/NAME.SUFFIX.  suffix: log or reason."""
        return FOLDER / f"{self.name}.{suffix}"

    def stamp(self) -> dict[str, str]:
        """Return what the environment was made from: the hash of its lock file ("lock") and the
        minor version of Python ("python").

        {} for an environment that is not there or not complete."""
        try:
            return dict(json.loads((self.folder / "stamp").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def lock_hash(self) -> str:
        """Return the SHA-256 of its lock file, in hex."""
        return hashlib.sha256(self.requirements.read_bytes()).hexdigest()

    def current(self) -> bool:
        """Tell whether the environment is complete and made of today's lock file.

        False if one of these files cannot be read."""
        stamp = self.stamp()
        try:
            is_fresh = stamp.get("lock") == self.lock_hash() and stamp.get("python") in self.pythons
            return is_fresh and self.python.exists()
        except OSError:
            return False


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("main", "torch 2.11 and torchaudio: 5.3 GB, about a minute", required=True),
        Environment(
            "k2", "k2 1.23.4 with its torch 1.13: 3.4 GB, about half a minute", pythons=("3.11",)
        ),
        Environment("nemo", "NeMo's speech collection: 7 GB, about two minutes", optional=True),
        Environment("ray", "Ray: 0.3 GB, a few seconds", pythons=("3.11",), optional=True),
        Environment("viewer", "TensorBoard with the profiler plugin: 0.2 GB, a few seconds"),
        Environment("dev", "ruff, mypy and MkDocs: 0.2 GB, a few seconds", optional=True),
    )
}


def interpreter(name: str) -> Path | None:
    """Return the Python of an environment; None if that is not there, not complete or not current.

    Raises UserError for an unknown name."""
    environment = _environment(name)
    return environment.python if environment.current() else None


def reason(name: str) -> str:
    """Return why `interpreter(name)` is None, and what to do next; "" if it is not None."""
    environment = _environment(name)
    if environment.current():
        return ""
    file = environment.side_file("reason")
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    state = "is out of date" if environment.stamp() else "is not there"
    return f"the {name} environment {state}; run `{environment.command}`"


def setup(names: Iterable[str] = ()) -> int:
    """Make the environments that are not current, and return an exit code.

    The reason why an environment cannot be made is kept.  The code is EXIT_FAILED only if that
    environment is required (main).  A current environment is made anew if it has another Python
    than the running one, and supports the running one.  Raises UserError for an unknown name.

    names: of the environments; () for all but the optional ones that are not there."""
    chosen = [_environment(name) for name in names] or [
        environment
        for environment in ENVIRONMENTS.values()
        if not environment.optional or environment.folder.exists()
    ]
    with locked(LOCK, lambda: say("another set-up is running; waiting for it to end")) as lock:
        for environment in chosen:
            version = environment.stamp().get("python")
            if environment.current() and (version == RUNNING or RUNNING not in environment.pythons):
                continue
            try:
                _create(environment, lock)
            except NotRunnable as error:
                environment.side_file("reason").write_text(f"{error}\n", encoding="utf-8")
                if environment.required:
                    say(f"environments: error: {environment.name} cannot be set up: {error}")
                    return EXIT_FAILED
                say(f"{environment.name}: left out: {error}")
    return EXIT_OK


def setup_and_build(names: list[str]) -> int:
    """Do what `make setup` does, and return the exit code of `setup`.

    Compile the suite's own C libraries, and install the environment main; stop if main cannot be
    installed.  Then install the other environments, while all source packages are compiled for
    main.  Some losses are also measured under the torch of other environments (the control
    OTHER_TORCH): last, compile their packages for these environments.  A package that cannot be
    compiled does not change the exit code.

    names: of the environments, as for `setup`."""
    libraries.build()
    code = setup(["main"])
    if code != EXIT_OK:
        return code
    builds: list[subprocess.Popen[bytes]] = []

    def build(environment: str, *packages: str) -> None:
        """Start to compile packages (none: all) for an environment, if that is there."""
        if python := interpreter(environment):
            command = [str(python), "-m", "rnnt_bench.setup.extensions", *packages]
            builds.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))

    try:
        build("main")
        code = setup(names)
        packages = {
            loss.package
            for loss in implementations.IMPLEMENTATIONS
            if loss.built and implementations.OTHER_TORCH in loss.controls
        }
        for name in set(implementations.environments()).intersection(ENVIRONMENTS) - {"main"}:
            build(name, *packages)
        for process in builds:
            process.wait()
        return code
    finally:
        for process in builds:
            process.terminate()  # some still run after Ctrl-C
            process.wait()


def _create(environment: Environment, lock: int) -> None:
    """Remove and install an environment, and write its stamp last.  Raises NotRunnable.

    lock: descriptor of the lock, which child processes inherit."""
    stamp = environment.folder / "stamp"
    stamp.unlink(missing_ok=True)  # first, so that a folder that is removed in part is not current
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.side_file("reason").unlink(missing_ok=True)
    say(f"{environment.name}: installing ({environment.description})")
    # The digest is taken before uv reads the file: then a later edit of it is noticed.
    digest = environment.lock_hash()
    log = environment.side_file("log")
    try:
        with log.open("w", encoding="utf-8") as stream:
            uv = Uv(stream, keep=(lock,))
            python, version = uv.find_python(environment.pythons)
            uv.run("venv", "--python", python, str(environment.folder))
            uv.install(environment.python, environment.requirements)
    except subprocess.CalledProcessError:
        shutil.rmtree(environment.folder, ignore_errors=True)
        raise NotRunnable(
            "missing",
            f"{last_error(log)}; see {log.relative_to(ROOT)}, then run `{environment.command}`",
        ) from None
    temporary = stamp.with_suffix(".tmp")
    temporary.write_text(json.dumps({"lock": digest, "python": version}), encoding="utf-8")
    os.replace(temporary, stamp)
    say(f"{environment.name}: ready")


def clean() -> int:
    """Remove what set-up made in .venv, and .venv itself if it is empty then; return an exit code.

    What a user made there stays.  If .venv is a link, everything stays."""
    if FOLDER.is_symlink():
        say(f".venv is a link to {FOLDER.resolve()}, which stays: remove it yourself")
        return EXIT_OK
    with locked(LOCK, lambda: say("a set-up is running; waiting for it to end")):
        names = [f"{name}{end}" for name in ENVIRONMENTS for end in ("", ".log", ".reason")]
        for path in (UV, *(FOLDER / name for name in names), LOCK):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    others = sorted(path.name for path in FOLDER.iterdir())
    if others:
        say(f".venv: these were not made by `make setup` and stay: {', '.join(others)}")
    else:
        FOLDER.rmdir()
    return EXIT_OK


#: Flags of ``uv pip compile``.  Only wheels are taken, but for packages that the .in file names:
#: others would be compiled, which takes time and needs build requirements that have no hash here.
#: No index is written down: set-up uses the user's own.
LOCKING = """--quiet --upgrade --universal --generate-hashes --only-binary :all: --emit-build-options
    --no-emit-index-url --no-annotate --strip-extras""".split()


def lock(names: Iterable[str] = ()) -> int:
    """Resolve requirements into lock files, with every package pinned by hash; return an exit code.

    NAME.in becomes NAME.txt.  The user's extra indexes are not asked: they may have only some files
    of a version.  Raises UserError.

    names: environments, or "uv"; default: all."""
    for name in names or ("uv", *ENVIRONMENTS):
        # The environment of uv is made with any Python that runs set-up.  What is locked for Python
        # 3.9 also holds for later ones.  The minor version of "3.9" is 9.
        minors = [9] if name == "uv" else [int(item[2:]) for item in _environment(name).pythons]
        source = LOCKS / f"{name}.in"
        flags = [*LOCKING, "--custom-compile-command", "make lock"]
        flags += ["--python-version", f"3.{min(minors)}"]
        text = Uv(sys.stderr).output("pip", "compile", *flags, str(source))
        text = _with_given_hashes(text, source.read_text())
        source.with_suffix(".txt").write_text(text, encoding="utf-8")
        say(f"{name}.txt: {text.count('==')} packages")
    return EXIT_OK


def _with_given_hashes(locked: str, requirements: str) -> str:
    """Return the text of a lock file without the hashes that the requirements rule out.

    "k2==1.24 --hash=sha256:..." in NAME.in pins one file.  uv writes the hashes of all files of
    that version; the hash of the pinned file alone is kept.  Raises UserError if the index lacks
    that file.

    locked: the text that uv wrote; requirements: the text of NAME.in."""
    pinned = re.findall(r"^(\S+==\S+) --hash=(\S+)", requirements, flags=re.MULTILINE)
    for package, digest in pinned:
        # The line "k2==1.24 \", then a line for each hash, "    --hash=sha256:...".  All lines but
        # the last end with " \".
        entry = re.compile(
            rf"^{re.escape(package)} \\\n((?: +--hash=\S+(?: \\)?\n)+)", flags=re.MULTILINE
        )
        if digest not in "".join(entry.findall(locked)):
            raise UserError(f"{package}: the index has no file with hash {digest}")
        locked = entry.sub(f"{package} \\\\\n    --hash={digest}\n", locked)
    return locked


def last_error(log: Path) -> str:
    """Return the last error in a log of uv or pip, and its innermost cause, in one line.

    Without an error it is the last line of the log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    last = text[max(text.rfind("\nerror:"), 0) :]
    # uv: "error: Failed to fetch", "  cause: timed out"; pip: "ERROR: No matching distribution"
    errors = re.findall(r"^(?:error:|ERROR:|  cause:) (.*)$", last, flags=re.MULTILINE)
    if not errors:
        return text.rpartition("\n")[2]
    return errors[0] if errors[0] == errors[-1] else f"{errors[0]}: {errors[-1]}"


def _environment(name: str) -> Environment:
    """Return the environment of that name.  Raises UserError if there is none."""
    if name not in ENVIRONMENTS:
        raise UserError(f"no environment is named {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def main(arguments: list[str] | None = None) -> int:
    """Run this module as a command, and return its exit code.  arguments: None for sys.argv."""
    parser = argparse.ArgumentParser(
        prog="python -m rnnt_bench.setup.environments",
        description="The environments in .venv. setup: create what is missing or out of date. build: set up main, then "
        "the others, and compile packages for them. path: print the Python of each, or why there is none, and then "
        "exit with 1. clean: remove what setup and build made in .venv. lock: resolve the requirements anew.",
    )
    parser.add_argument("command", choices=("setup", "build", "path", "clean", "lock"))
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="Default: all environments but the optional ones"
    )
    parsed = parser.parse_args(arguments)
    return guarded(
        "environments", lambda: _run(parsed.command, parsed.names), interrupted=INTERRUPTED
    )


def _run(command: str, names: list[str]) -> int:
    """Run a command of `main`, and return its exit code; an error is a line on stderr."""
    try:
        if command == "clean":
            return clean()
        if command == "setup":
            return setup(names)
        if command == "build":
            return setup_and_build(names)
        if command == "lock":
            return lock(names)
    except (NotRunnable, subprocess.CalledProcessError) as error:  # `lock` raises these
        say(f"environments: error: {error}")
        return EXIT_FAILED
    except OSError as error:
        say(
            f"environments: error: {error}; make {FOLDER} writable or free some space, then run it again"
        )
        return EXIT_FAILED
    # The command is "path".
    pythons = {name: interpreter(name) for name in names or ENVIRONMENTS}
    for name, python in pythons.items():
        print(python or reason(name), file=sys.stdout if python else sys.stderr)
    return EXIT_OK if all(pythons.values()) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
