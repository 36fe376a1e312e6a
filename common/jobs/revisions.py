"""Two git revisions measured in alternation: A, B, B, A, ..., each round in fresh processes, in a work tree of its own.

The work trees are in .build/revisions and are removed at the end; the user's files, index and branches are not touched.
They share this checkout's environments through links, so a revision that locks other packages is refused.  Correctness
and memory are measured once per revision; then each round continues (--resume) the runs of its revision by one.  Both
revisions' runs carry one run_id, since their rounds belong together.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from common.core.errors import EXIT_USAGE, STOPPED, UserError
from common.core.guard import say
from common.core.implementations import find
from common.core.paths import BUILD, ROOT
from common.records import schema, store
from common.setup import environments
from common.system import git
from common.system.locks import locked

WORKTREE = "WORKTREE"
_SHARED = (".venv", ".build")
#: Limits are the device's, not the revision's; a round measured again would not be beside the other side's.
_ALWAYS = ("--quiet", "--limits", "false", "--wait", "0")


class Flags(NamedTuple):
    """The flags of the benchmarks: all as given, and what of them says how revisions are measured."""

    given: Sequence[str]
    names: Sequence[str]  # of implementations
    rounds: int
    most_rounds: int
    passes: Sequence[str]
    in_place: bool


def measure(
    revisions: Sequence[str], flags: Flags, rounds_of: Callable[[Path, Path], int], log_dir: Optional[Path] = None
) -> Tuple[Path, Path]:
    """Measure both revisions and return the two log folders.

    rounds_of: called with both after the last round; returns how many rounds there should be.  Raises UserError for a
    revision that does not exist or cannot be measured here.
    """
    commits = [_commit(name) for name in revisions]
    with locked(BUILD / "revisions.lock", lambda: say("another comparison of revisions is running; waiting for it")):
        with _work_trees(commits) as trees, tempfile.TemporaryDirectory(prefix="compare-") as scratch:
            for tree, name in zip(trees, revisions):
                _check(tree, name, flags)
            kept = _results_folders(log_dir, revisions)
            ignored = Path(scratch) / "ignored"  # git would take the links for uncommitted changes
            ignored.write_text("".join(f"/{name}\n" for name in _SHARED))
            variables = git.with_setting(git.environment(), "core.excludesFile", str(ignored))
            _run_all(list(zip(revisions, trees, kept)), flags, variables, lambda: rounds_of(*kept))
    say(f"results are in {kept[0]} and {kept[1]}")
    return kept


def _git(*arguments: str, advice: str = "") -> str:
    """Return what git prints for this checkout.  Raises UserError with git's reason."""
    try:
        return git.run(ROOT, *arguments)
    except git.GitError as error:
        raise UserError(f"--rev{advice}: {error}") from error


def _commit(name: str) -> str:
    """Return the full hash of the revision `name`; WORKTREE for itself.  Raises UserError where there is none."""
    top = _git("rev-parse", "--show-toplevel").rstrip("\n")
    if not os.path.samefile(top, ROOT):
        raise UserError(f"--rev: {ROOT} is not a git checkout of its own, but a folder in {top}; clone it with git")
    if name == WORKTREE:
        return name
    advice = f" {name}: no such revision in {ROOT}; give a commit, branch or tag, or {WORKTREE}"
    return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}", advice=advice).strip()


def _results_folders(log_dir: Optional[Path], names: Sequence[str]) -> Tuple[Path, Path]:
    """Make the empty folders DIR/baseline and DIR/new, and return them.  Raises UserError where one exists."""
    safe = "--".join(re.sub(r"[^\w.]", "-", name) for name in names)
    log_dir = log_dir or BUILD / "compare" / f"{safe}-{uuid.uuid4().hex[:6]}"
    sides = log_dir / "baseline", log_dir / "new"
    try:
        for side in sides:
            side.mkdir(parents=True)
    except OSError as error:
        why = "holds an earlier comparison" if isinstance(error, FileExistsError) else f"{error.strerror}"
        raise UserError(f"--log-dir {log_dir}: {why}; name another folder") from error
    return sides


@contextmanager
def _work_trees(commits: Sequence[str]) -> Iterator[List[Path]]:
    """Yield a folder with the files of each commit, one for two equal ones, and remove them afterwards."""
    folders = {commit: BUILD / "revisions" / commit[:12] for commit in commits}
    try:
        for commit, folder in folders.items():
            _remove(folder)  # left by a comparison that was killed
            if commit == WORKTREE:
                _copy_files(folder)
            else:
                _git("worktree", "add", "--detach", "--force", str(folder), commit)
            for name in _SHARED:
                if (ROOT / name).exists():
                    (folder / name).symlink_to(ROOT / name)
        yield [folders[commit] for commit in commits]
    finally:
        for folder in folders.values():
            _remove(folder)
        with suppress(OSError):
            (BUILD / "revisions").rmdir()


def _remove(folder: Path) -> None:
    for name in _SHARED:  # links, and never what they point to
        (folder / name).unlink(missing_ok=True)
    if (folder / ".git").exists():
        with suppress(UserError):  # the folder goes below
            _git("worktree", "remove", "--force", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _copy_files(folder: Path) -> None:
    """Copy the user's files as they are: tracked ones, and new ones that git does not ignore."""
    for name in filter(None, _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _check(tree: Path, name: str, flags: Flags) -> None:
    """Raise UserError for a revision that cannot be measured here."""
    if not (tree / "benchmark_all.py").is_file():
        raise UserError(f"--rev {name}: has no benchmarks; give a later revision")
    _words(tree, name, flags.given)
    for key in () if flags.in_place else sorted({find(name).environment for name in flags.names}):
        lock = environments.ENVIRONMENTS[key].requirements
        if not (tree / lock).is_file() or (tree / lock).read_bytes() != (ROOT / lock).read_bytes():
            raise UserError(
                f"--rev {name}: locks other packages ({lock}) than this checkout's environments have; run `make bench` "
                "in a checkout of each revision and compare the two log folders"
            )


def _run_all(
    sides: Sequence[Tuple[str, Path, Path]], flags: Flags, variables: Dict[str, str], wanted: Callable[[], int]
) -> None:
    """Fill the log folders: the passes other than timing, then one timing round after the other.

    Args:
        sides: name, work tree and log folder of each revision.
        variables: of the environment of the benchmarks.
        wanted: returns how many rounds there should be.
    """
    before, run_id = ",".join(name for name in flags.passes if name != "timing"), uuid.uuid4().hex[:12]
    number, rounds = 0, flags.rounds if "timing" in flags.passes else 0
    try:
        while number <= rounds:
            for name, tree, log in sides if number % 2 else reversed(sides):
                say(f"{f'round {number} of {rounds}' if number else before}: {name}")
                plan = ["--passes", before, "--rounds", "1"]
                if number:
                    _change(log, flags.passes, number, run_id)
                    plan = ["--passes", ",".join(flags.passes), "--rounds", str(number), "--resume"]
                _benchmark(tree, name, [*_words(tree, name, flags.given), *plan, *_ALWAYS], log, variables)
            if number == rounds and 0 < rounds < flags.most_rounds:  # by what these show
                rounds = max(rounds, min(wanted(), flags.most_rounds))
            number += 1
    finally:  # what was measured before Ctrl-C is kept, as one run with two sides
        for _, _, log in sides:
            _change(log, flags.passes, max(rounds, flags.rounds), run_id)
        for folder in [log for _, _, log in sides] + [sides[0][2].parent]:
            with suppress(OSError):  # goes only when it is empty
                folder.rmdir()


def _words(tree: Path, name: str, given: Sequence[str]) -> List[str]:
    """Return the user's flags for a work tree: a flag that names a script of this checkout names the tree's copy.

    Raises UserError where the tree has none."""

    def copy(match: re.Match[str]) -> str:
        path = Path(match[0]).resolve()
        if ROOT not in path.parents:
            return str(path)
        script = tree / path.relative_to(ROOT)
        if not script.is_file():
            raise UserError(f"--rev {name}: has no {path.relative_to(ROOT)}; commit it, or give {WORKTREE}")
        return str(script)

    return [re.sub(r"[^,=]+\.py(?=[,:@]|$)", copy, word) for word in given]


def _benchmark(tree: Path, name: str, flags: Sequence[str], log: Path, variables: Dict[str, str]) -> None:
    """Run the benchmarks of a work tree; Ctrl-C and SIGTERM are handed on, and they keep what they measured.

    Raises UserError where they measured nothing."""
    command = [sys.executable, str(tree / "benchmark_all.py"), *flags, "--log-dir", str(log)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=variables
    ) as child:
        try:
            stderr = child.communicate()[1]
        except KeyboardInterrupt:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # and so by the child: nohup, `&` in a script
            child.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
            child.communicate()
            raise
    if child.returncode in STOPPED:
        raise KeyboardInterrupt
    if child.returncode == EXIT_USAGE or not list(log.glob(f"*/{schema.FILE_NAME}")):
        last = (stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise UserError(f"--rev {name}: {last}")


def _change(log: Path, passes: Sequence[str], rounds: int, run_id: str) -> None:
    """Set the passes and the number of timing rounds of the runs in `log`, so that the missing ones are resumed."""
    for path in log.glob(f"*/{schema.FILE_NAME}"):
        head = store.first(path)
        if head:
            settings = {**head.settings, "passes": list(passes), "rounds": rounds}
            store.change_first(path, {"run_id": run_id, "settings": settings})
