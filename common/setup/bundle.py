"""`make bundle BUNDLE=FOLDER`: everything that set-up would fetch, in one folder, for machines without an index.

``make setup BUNDLE=FOLDER`` there installs from it alone: pip and uv take PIP_NO_INDEX and PIP_FIND_LINKS.  The folder
has the wheels of each environment and of uv, and the source packages that are compiled.  NAME.txt lists an environment,
with hashes; index.html links to all files, so that the folder can be served.  Files that are there are not
fetched again; the hashes of the locks are checked here and at set-up.  Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Sequence, Set
from urllib.parse import quote

from common.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError
from common.core.files import make_folder
from common.core.guard import guarded, say
from common.core.paths import ROOT
from common.setup import environments, sdists
from common.setup.environments import ENVIRONMENTS, last_error
from common.setup.source_packages import SOURCE_PACKAGES
from common.setup.uv import Uv

#: What a machine with a torch of its own has already.
OF_TORCH = re.compile(r"(torch|torchaudio|triton|nvidia-\S+|cuda-\S+)==")
#: glibc of the manylinux tags that pip is given, up to that of PLATFORM.
OLDEST_GLIBC = 5
UV = ROOT / "requirements" / "uv.txt"


def bundle(folder: Path, names: Sequence[str] = (), platform: str = "", without_torch: bool = False) -> int:
    """Fill the folder; returns an exit code.  names: environments, default: all but the optional ones; platform: as uv
    names it ("aarch64-manylinux_2_28"), default: this machine.  A source package that cannot be fetched is an error at
    the end; one for CUDA alone is left out where its setup.py wants a compiler or a torch that is not here.  Raises
    UserError and NotRunnable."""
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        raise UserError(f"no environment is named {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    chosen = [known for name, known in ENVIRONMENTS.items() if name in names or (not names and not known.optional)]
    tags = list(_tags(platform))
    make_folder(folder, "name another folder with BUNDLE")
    log = folder / "log.txt"
    try:
        with log.open("w", encoding="utf-8") as stream:
            uv = Uv(stream)
            for environment in chosen:
                say(f"{environment.name}: fetching")
                python, version = uv.find_python(environment.allowed)
                wanted = folder / f"{environment.name}.txt"
                lock = ROOT / environment.requirements
                entries = _entries(lock.read_text(encoding="utf-8"), uv.needed(lock, version, platform), without_torch)
                wanted.write_text("".join(entries), encoding="utf-8")
                uv.download(python, wanted, folder, tags and [*tags, "--python-version", version])
            uv.download(python, UV, folder, tags)
    except subprocess.CalledProcessError:
        say(f"bundle: error: {last_error(log)}; see {log}")
        return EXIT_FAILED
    missing = []
    for package in SOURCE_PACKAGES if ENVIRONMENTS["main"] in chosen else ():
        try:
            sdists.fetch(package, folder, str(environments.interpreter("main") or ""))
        except NotRunnable as error:
            missing.append(f"bundle: error: {error}")
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    (folder / "index.html").write_text("".join(_page(files)), encoding="utf-8")
    size = sum(path.stat().st_size for path in files) / 1e9
    for line in missing:
        say(line)
    if missing:
        return EXIT_FAILED
    say(f"{folder}: {len(files)} files, {size:.1f} GB; on the other machine: make setup BUNDLE={folder}")
    return EXIT_OK


def _entries(lock: str, needed: Set[str], without_torch: bool) -> Iterator[str]:
    """Yield the options of a lock and its entries with their hashes, of what is `needed`, without the conditions."""
    for entry in re.split(r"^(?=\S)", lock, flags=re.MULTILINE):
        wanted = entry.split(" ")[0] in needed and not (without_torch and OF_TORCH.match(entry))
        if entry.startswith("--") or wanted:
            yield re.sub(r" ; .*?(?= \\$)", "", entry, flags=re.MULTILINE)


def _tags(platform: str) -> Iterator[str]:
    """Yield pip's options for the wheels of a platform.  UserError for one that is not Linux with glibc."""
    if not platform:
        return
    match = re.fullmatch(r"(x86_64|aarch64)-manylinux_2_(\d+)", platform)
    if not match:
        raise UserError(f"PLATFORM={platform}: give x86_64-manylinux_2_GLIBC or aarch64-manylinux_2_GLIBC (2_28, say)")
    yield from ("--only-binary", ":all:")
    names = [f"manylinux_2_{minor}_{match[1]}" for minor in range(int(match[2]), OLDEST_GLIBC - 1, -1)]
    for name in (*names, *(f"manylinux{year}_{match[1]}" for year in (2014, 2010, 1)), f"linux_{match[1]}"):
        yield from ("--platform", name)


def _page(files: List[Path]) -> Iterator[str]:
    yield "<!DOCTYPE html>\n<title>packages</title>\n"
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f'<a href="{quote(path.name)}#sha256={digest}">{html.escape(path.name)}</a><br>\n'


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bundle", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="Folder to fill.")
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help="Optional environments to include.")
    parser.add_argument("--platform", default="", help="Platform of the other machine, such as aarch64-manylinux_2_28.")
    parser.add_argument("--without-torch", action="store_true", help="Leave torch out.")
    parsed = parser.parse_args()

    def run() -> int:
        try:
            return bundle(parsed.folder, parsed.names, parsed.platform, parsed.without_torch)
        except (NotRunnable, OSError) as error:
            say(f"bundle: error: {error}")
            return EXIT_FAILED

    return guarded("bundle", run, interrupted="interrupted; run it again, what is there is not fetched again")


if __name__ == "__main__":
    sys.exit(main())
