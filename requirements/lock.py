"""`make lock`: resolve requirements/<name>.in into <name>.txt, every transitive package pinned by hash, with uv.

Run it after an edit of a .in file, or to take newer versions of what is not pinned there.  uv is needed here only,
not to install.  No index URL is written: pip takes the user's own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Each lock is good from this Python on.
OLDEST_PYTHON = {"main": "3.10", "k2": "3.11", "viewer": "3.10", "nemo": "3.10"}


def chosen_hashes(requirements: str) -> dict[str, str]:
    """``{"k2": "sha256:..."}``: packages that a .in file pins to one file, which uv widens to all of the version's."""
    return dict(re.findall(r"^([\w.-]+)==\S+ --hash=(sha256:\w+)", requirements, flags=re.MULTILINE))


def keep_one_hash(lock: str, package: str, digest: str) -> str:
    """The text of a lock with only the hash `digest` for `package`.  Raises ValueError when it is not among them."""
    entry = re.compile(rf"^({re.escape(package)}==[^\n]*?) \\\n((?:    --hash=\S+(?: \\)?\n)+)", flags=re.MULTILINE)
    found = entry.search(lock)
    if found is None or digest not in found[2]:
        raise ValueError(f"{package}: the index has no file with hash {digest}")
    return entry.sub(rf"\1 \\\n    --hash={digest}\n", lock)


def exceptions_last(lock: str) -> str:
    """The text of a lock with --only-binary before --no-binary: pip follows the later one, uv writes it first."""
    return re.sub(r"^((?:--no-binary \S+\n)+)(--only-binary :all:\n)", r"\2\1", lock, flags=re.MULTILINE)


def lock(name: str) -> None:
    """Write requirements/<name>.txt."""
    source, target = HERE / f"{name}.in", HERE / f"{name}.txt"
    command = ["uv", "--no-config", "pip", "compile", "--quiet", "--upgrade", "--universal", "--generate-hashes"]
    # Wheels only: what pip would compile is neither quick nor covered by a hash of its build requirements.  Exceptions
    # are named in the .in file.
    command += ["--only-binary", ":all:", "--emit-build-options", "--no-emit-index-url", "--no-annotate"]
    # No extras: what they bring is pinned too, and pip 23 does not take fsspec[http]==1 for a pin of fsspec.
    command += ["--strip-extras", "--python-version", OLDEST_PYTHON[name], "--custom-compile-command", "make lock"]
    text = subprocess.run([*command, str(source)], check=True, stdout=subprocess.PIPE, text=True).stdout
    for package, digest in chosen_hashes(source.read_text()).items():
        text = keep_one_hash(text, package, digest)
    target.write_text(exceptions_last(text))
    print(f"{target.relative_to(HERE.parent)}: {text.count('==')} packages", file=sys.stderr)


if __name__ == "__main__":
    try:
        for environment in sys.argv[1:] or OLDEST_PYTHON:
            lock(environment)
    except FileNotFoundError:
        sys.exit("lock: error: uv is not on PATH; install it (for example with pipx) and run `make lock` again")
    except (subprocess.CalledProcessError, KeyError, ValueError) as error:
        sys.exit(f"lock: error: {error}")
