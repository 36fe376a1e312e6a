"""`make lock`: resolve requirements/<name>.in into <name>.txt, every transitive package pinned by hash, with uv.

Run it after an edit of a .in file, or to take newer versions of what is not pinned there.  No index URL is written:
set-up takes the user's own.  The user's extra indexes are not asked: they may have only some files of a version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Dict

from common.core.errors import NotRunnable
from common.setup.environments import Uv

HERE = Path(__file__).resolve().parent
#: Each lock is good from this Python on.
OLDEST_PYTHON = {
    "uv": "3.9",
    "main": "3.10",
    "k2": "3.11",
    "viewer": "3.10",
    "nemo": "3.10",
    "ray": "3.11",
    "dev": "3.10",
}
OPTIONS = (
    *("--quiet", "--upgrade", "--universal", "--generate-hashes", "--custom-compile-command", "make lock"),
    # Wheels only: what would be compiled is neither quick nor covered by a hash of its build requirements.  Exceptions
    # are named in the .in file.
    *("--only-binary", ":all:", "--emit-build-options", "--no-emit-index-url", "--no-annotate", "--strip-extras"),
)


def chosen_hashes(requirements: str) -> Dict[str, str]:
    """``{"k2": "sha256:..."}``: packages that a .in file pins to one file, which uv widens to all of the version's."""
    return dict(re.findall(r"^([\w.-]+)==\S+ --hash=(sha256:\w+)", requirements, flags=re.MULTILINE))


def keep_one_hash(lock: str, package: str, digest: str) -> str:
    """The text of a lock with only the hash `digest` for `package`.  Raises ValueError when it is not among them."""
    entry = re.compile(rf"^({re.escape(package)}==[^\n]*?) \\\n((?:    --hash=\S+(?: \\)?\n)+)", flags=re.MULTILINE)
    found = entry.search(lock)
    if found is None or digest not in found[2]:
        raise ValueError(f"{package}: the index has no file with hash {digest}")
    return entry.sub(rf"\1 \\\n    --hash={digest}\n", lock)


def lock(name: str) -> None:
    """Write requirements/<name>.txt."""
    source, target = HERE / f"{name}.in", HERE / f"{name}.txt"
    text = Uv(sys.stderr).output("pip", "compile", *OPTIONS, "--python-version", OLDEST_PYTHON[name], str(source))
    for package, digest in chosen_hashes(source.read_text()).items():
        text = keep_one_hash(text, package, digest)
    target.write_text(text)
    print(f"{target.relative_to(HERE.parent)}: {text.count('==')} packages", file=sys.stderr)


if __name__ == "__main__":
    try:
        unknown = sorted(set(sys.argv[1:]) - set(OLDEST_PYTHON))
        if unknown:
            raise ValueError(f"no lock is named {', '.join(unknown)}; there are {', '.join(OLDEST_PYTHON)}")
        for environment in sys.argv[1:] or OLDEST_PYTHON:
            lock(environment)
    except (NotRunnable, subprocess.CalledProcessError, ValueError) as error:
        sys.exit(f"lock: error: {error}")
