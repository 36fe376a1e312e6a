"""uv, which makes the environments and resolves their locks.  pip fetches it, pinned by hash, into .venv/.uv.

uv does not read pip's settings.  They are handed over as environment variables, so that the user's own index, proxy and
certificates are used.  Standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Sequence, TextIO, Tuple

from common.core.errors import NotRunnable
from common.core.paths import ROOT

RUNNING = "{}.{}".format(*sys.version_info)
#: Not sys.executable: in a virtual environment that is a link, which is gone when the environment is made anew.
PYTHON = getattr(sys, "_base_executable", None) or sys.executable
FOLDER = ROOT / ".venv" / ".uv"
#: Setting of pip -> the variable of uv that means the same.
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
    """The pinned uv with the user's settings.  Installs it where it is not there.  log: the file that takes what the
    commands print; keep: descriptors that the commands keep open.  A command that fails raises
    subprocess.CalledProcessError, and its error is in the log.  So does __init__ when uv cannot be installed; a Python
    without the means to is NotRunnable("missing")."""

    def __init__(self, log: TextIO, keep: Sequence[int] = ()):
        self._options: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": log, "text": True, "pass_fds": keep}
        self._log = log
        self._fetch()
        settings = self._settings_of_pip()
        alone = settings.pop("UV_NO_INDEX", "").lower() in ("1", "y", "yes", "t", "true", "on")
        self._no_index = ("--no-index",) if alone else ()  # uv has no variable for it
        extra = () if self._no_index else ("UV_INDEX", "UV_FIND_LINKS")
        self._extra = {name: settings.pop(name) for name in extra if name in settings}
        self._options["env"] = {**settings, **os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        self._choose_cache()

    def run(self, *arguments: str) -> None:
        """Run ``uv ARGUMENTS``; what it prints goes to the log."""
        self._run(str(FOLDER / "bin" / "uv"), *arguments, stdout=self._log)

    def output(self, *arguments: str) -> str:
        """Return what ``uv ARGUMENTS`` prints."""
        return self._run(str(FOLDER / "bin" / "uv"), *arguments, stdout=subprocess.PIPE)

    def install(self, python: Path, requirements: Path) -> None:
        """Make the environment of `python` what the lock file `requirements` says.  pip's extra indexes and links are
        used only where its index lacks something: uv would take another build of the same version from there (torch
        2.11.0+cpu), which the lock does not allow."""
        # Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each start of torch would cost seconds more.
        # Elsewhere the first import of a module writes its own: all of them take 18 seconds, and few are ever imported.
        compiled = ("--compile-bytecode",) if sys.dont_write_bytecode else ()
        options = (*compiled, "--require-hashes", *self._no_index)
        command = ("pip", "sync", "--python", str(python), *options, str(requirements))
        try:
            self.run(*command)
        except subprocess.CalledProcessError:
            if not self._extra:
                raise
            self._use_every_index()
            self.run(*command)

    def _use_every_index(self) -> None:
        every = {**self._extra, "UV_INDEX_STRATEGY": "unsafe-best-match"}  # look into every index, as pip does
        self._options["env"] = {**every, **self._options["env"]}

    def find_python(self, versions: Sequence[str]) -> Tuple[str, str]:
        """Return (command, minor version) of a Python with one of `versions`: the running one where it fits, else one
        that uv finds.  Raises NotRunnable("missing") when there is none."""
        if RUNNING in versions:
            return PYTHON, RUNNING
        for version in versions:
            with contextlib.suppress(subprocess.CalledProcessError):
                return self.output("python", "find", "--system", version).strip(), version
        needed = " or ".join(sorted(versions, key=lambda version: int(version.split(".")[1])))
        words = f"needs Python {needed}; this is Python {RUNNING}: install it, then run `make setup`"
        raise NotRunnable("missing", words)

    def _fetch(self) -> None:
        requirements, stamp = ROOT / "requirements" / "uv.txt", FOLDER / "stamp"
        python, wanted = FOLDER / "bin" / "python", hashlib.sha256(requirements.read_bytes()).hexdigest()
        if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError:
            advice = f"install them (Debian, Ubuntu: apt install python{RUNNING}-venv), then run `make setup`"
            raise NotRunnable("missing", f"Python {RUNNING} has no venv or ensurepip: {advice}") from None
        shutil.rmtree(FOLDER, ignore_errors=True)
        install = ("install", "--require-hashes", "--no-input", "--progress-bar", "off", "-r", str(requirements))
        self._run(PYTHON, "-m", "venv", str(FOLDER), stdout=self._log)
        self._run(str(python), "-m", "pip", "--disable-pip-version-check", *install, stdout=self._log)
        stamp.write_text(wanted, encoding="utf-8")

    def _settings_of_pip(self) -> Dict[str, str]:
        """Return pip's settings as uv's variables. PIP_ variables come before settings for `pip install` alone, and
        these before settings for all of pip."""
        variables: Dict[str, str] = {}
        listed = self._run(str(FOLDER / "bin" / "python"), "-m", "pip", "config", "list", stdout=subprocess.PIPE)
        for section in ("global.", "install.", ":env:."):
            for line in listed.splitlines():
                name, equals, value = line.partition("=")
                variable = VARIABLES.get(name[len(section) :])
                if equals and name.startswith(section) and variable:
                    separator = "," if variable == "UV_FIND_LINKS" else " "
                    variables[variable] = separator.join(ast.literal_eval(value).split())
        return variables

    def _choose_cache(self) -> None:
        """Put the cache into .venv where uv's own is on another disk: uv can link files only on one disk."""
        cache = Path(self.output("cache", "dir").strip())
        existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
        if "UV_CACHE_DIR" not in os.environ and existing.stat().st_dev != FOLDER.stat().st_dev:
            self._options["env"]["UV_CACHE_DIR"] = str(FOLDER.with_name(".cache"))

    def _run(self, *command: str, stdout: Any) -> str:
        printed: str = subprocess.run(command, check=True, stdout=stdout, **self._options).stdout
        return printed
