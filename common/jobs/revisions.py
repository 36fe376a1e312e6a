"""Two git revisions measured in alternation: A, B, B, A, ..., each round in fresh processes, in a work tree of its own.

The work trees are in .build/revisions and are removed at the end; the user's files, index and branches are not touched.
They share this checkout's environments and compiled extensions through links, so a revision that locks other packages
is refused.  Correctness and memory are measured once per revision; then each round continues (--resume) the runs of
its revision by one.  Both revisions' runs carry one run_id, since their rounds belong together.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from common.core import scripts
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
#: The files of a revision that knows --limits, and of one that knows --wait.
_LIMITS, _WAITS = "common/measure/peaks.py", "common/jobs/patience.py"


#: The two log folders -> rounds.
RoundsOf = Callable[[Path, Path], int]


@dataclass(frozen=True)
class Flags:
    """Hold the flags of the benchmarks; others as in Settings.

    Attributes:
        given: all flags.
        others: all but those that choose implementations.
        names: the implementations that are chosen.
        rounds, most_rounds: the fewest and the most rounds.
    """

    given: Tuple[str, ...]
    others: Tuple[str, ...]
    names: Tuple[str, ...]
    rounds: int
    most_rounds: int
    passes: Tuple[str, ...]
    in_place: bool


def measure(
    baseline: str, new: str, flags: Flags, rounds_of: RoundsOf, log_dir: Optional[Path] = None
) -> Tuple[Path, Path]:
    """Measure both revisions and return the two log folders.

    rounds_of: called after the last round; returns how many rounds there should be.  Raises UserError for a revision
    that does not exist or cannot be measured here.
    """
    names = baseline, new
    revisions = [_commit(name) for name in names]
    with locked(BUILD / "revisions.lock", lambda: say("another comparison of revisions is running; waiting for it")):
        with _work_trees(revisions) as trees, tempfile.TemporaryDirectory(prefix="compare-") as scratch:
            for tree, name in zip(trees, names):
                _check(tree, name, flags)
            kept = _results_folders(log_dir, names)
            _run_all(trees, names, flags, kept, Path(scratch), rounds_of)
    say(f"results are in {kept[0]} and {kept[1]}")
    return kept


def _git(*arguments: str) -> str:
    """Return what git prints for this checkout.  Raises UserError with git's reason."""
    try:
        return git.run(ROOT, *arguments)
    except git.GitError as error:
        raise UserError(f"--rev: {error}") from error


def _commit(name: str) -> str:
    """Return the full hash of the revision `name`; WORKTREE for itself.  Raises UserError where there is none."""
    top = _git("rev-parse", "--show-toplevel").rstrip("\n")
    if not os.path.samefile(top, ROOT):
        raise UserError(f"--rev: {ROOT} is not a git checkout of its own, but a folder in {top}; clone it with git")
    if name == WORKTREE:
        return name
    try:
        return git.run(ROOT, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").strip()
    except git.GitError as error:
        advice = f"give a commit, branch or tag, or {WORKTREE}"
        raise UserError(f"--rev {name}: no such revision in {ROOT}; {advice} ({error})") from error


def _results_folders(log_dir: Optional[Path], names: Sequence[str]) -> Tuple[Path, Path]:
    """Make the empty folders DIR/baseline and DIR/new, and return them.  Raises UserError where one exists."""
    if log_dir is None:
        safe = ["".join(c if c.isalnum() or c in "._" else "-" for c in name) for name in names]
        log_dir = BUILD / "compare" / f"{safe[0]}--{safe[1]}-{uuid.uuid4().hex[:6]}"
    sides = log_dir / "baseline", log_dir / "new"
    if any(side.exists() for side in sides):
        raise UserError(f"--log-dir {log_dir}: holds an earlier comparison; name another folder")
    try:
        for side in sides:
            side.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); name another folder") from error
    return sides


@contextmanager
def _work_trees(revisions: Sequence[str]) -> Iterator[List[Path]]:
    """Yield a folder with the files of each revision, one for two equal ones, and remove them afterwards."""
    folders = {revision: BUILD / "revisions" / revision[:12] for revision in revisions}
    try:
        for revision, folder in folders.items():
            _remove(folder)  # left by a comparison that was killed
            if revision == WORKTREE:
                _copy_files(folder)
            else:
                _git("worktree", "add", "--detach", "--force", str(folder), revision)
            for name in _SHARED:
                if (ROOT / name).exists():
                    (folder / name).symlink_to(ROOT / name)
        yield [folders[revision] for revision in revisions]
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


def _own_scripts(tree: Path, names: Sequence[str]) -> Dict[str, Path]:
    """Return the files of the `names` that are not in the table of implementations (see common.core.scripts), by name;
    for a file in this checkout, the work tree's copy."""
    script_of = {name: find(name).script for name in names}
    paths = {name: Path(script).resolve() for name, script in script_of.items() if script.endswith(scripts.ENDING)}
    return {name: tree / path.relative_to(ROOT) if ROOT in path.parents else path for name, path in paths.items()}


def _flags_of(tree: Path, flags: Flags) -> List[str]:
    """Return the user's flags for a work tree: a flag that names a file names the work tree's copy."""
    script_of = _own_scripts(tree, flags.names)
    if not script_of:
        return list(flags.given)
    words = [f"{script_of[name]}{re.sub('^[^:@]*', '', name)}" if name in script_of else name for name in flags.names]
    return [*flags.others, "--only", ",".join(words)]


def _check(tree: Path, name: str, flags: Flags) -> None:
    if not (tree / "benchmark_all.py").is_file():
        raise UserError(f"--rev {name}: has no benchmark_all.py; give a later revision")
    for script in _own_scripts(tree, flags.names).values():
        if not script.is_file():
            raise UserError(f"--rev {name}: has no {script.relative_to(tree)}; commit it, or give {WORKTREE}")
    if flags.in_place:
        return
    for key in sorted({find(name).environment for name in flags.names}):
        lock = environments.ENVIRONMENTS[key].requirements
        if not (tree / lock).is_file() or (tree / lock).read_bytes() != (ROOT / lock).read_bytes():
            raise UserError(
                f"--rev {name}: locks other packages ({lock}) than this checkout's environments have; run `make bench` "
                "in a checkout of each revision and compare the two log folders"
            )


def _run_all(
    trees: Sequence[Path],
    names: Sequence[str],
    flags: Flags,
    kept: Sequence[Path],
    scratch: Path,
    rounds_of: RoundsOf,
) -> None:
    """Fill the log folders `kept`: the passes other than timing, then one timing round after the other."""
    before = ",".join(name for name in flags.passes if name != "timing")
    rounds, run_id = flags.rounds if "timing" in flags.passes else 0, uuid.uuid4().hex[:12]
    number = 0
    try:
        while number <= rounds:
            for side in (0, 1) if number % 2 else (1, 0):
                say(f"{f'round {number} of {rounds}' if number else before}: {names[side]}")
                plan = ["--passes", before, "--rounds", "1"]
                if number:
                    _change(kept[side], flags.passes, number, run_id)
                    plan = ["--passes", ",".join(flags.passes), "--rounds", str(number), "--resume"]
                _measure(trees[side], names[side], [*_flags_of(trees[side], flags), *plan], kept[side], scratch)
            if number == rounds and 0 < rounds < flags.most_rounds:
                needed = min(rounds_of(*kept), flags.most_rounds)
                if needed > rounds:
                    say(f"{rounds} rounds differ too much to show such a change (--detect): measuring {needed}")
                    rounds = needed
            number += 1
    finally:  # what was measured before Ctrl-C is kept
        _finish(kept, flags.passes, max(rounds, flags.rounds), run_id)


def _measure(tree: Path, name: str, flags: Sequence[str], log: Path, scratch: Path) -> None:
    """Run the benchmarks of a work tree; UserError where they measured nothing."""
    options = ["--log-dir", str(log), "--quiet"]
    if (tree / _LIMITS).is_file():  # they are the device's, not the revision's
        options += ["--limits", "false"]
    if (tree / _WAITS).is_file():  # a round measured again would not be beside the other side's
        options += ["--wait", "0"]
    code, stderr = _benchmark([sys.executable, str(tree / "benchmark_all.py"), *flags, *options], _environment(scratch))
    if code in STOPPED:
        raise KeyboardInterrupt
    if code == EXIT_USAGE or not list(log.glob(f"*/{schema.FILE_NAME}")):
        last = (stderr.strip().splitlines() or [f"exit code {code}"])[-1]
        raise UserError(f"--rev {name}: {last}")


def _benchmark(command: Sequence[str], environment: Dict[str, str]) -> Tuple[int, str]:
    """Return the exit code and stderr of a benchmark; Ctrl-C and SIGTERM are handed on, and it keeps what it
    measured."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    ) as child:
        try:
            stderr = child.communicate()[1]
        except KeyboardInterrupt:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # and so by the child: nohup, `&` in a script
            child.send_signal(signal.SIGTERM if ignored else signal.SIGINT)  # which earlier revisions know too
            child.communicate()
            raise
    return child.returncode, stderr


def _environment(scratch: Path) -> Dict[str, str]:
    """Return the environment of a work tree's benchmarks, with a repository of its own that ignores the links in it.

    Git would take them for uncommitted changes.
    """
    ignored = scratch / "ignored"
    ignored.write_text("".join(f"/{name}\n" for name in _SHARED))
    return git.with_setting(git.environment(), "core.excludesFile", str(ignored))


def _change(log: Path, passes: Sequence[str], rounds: int, run_id: str) -> None:
    """Set the passes and the number of timing rounds of the runs in `log`, so that the missing ones are resumed."""
    for path in log.glob(f"*/{schema.FILE_NAME}"):
        head = store.first(path)
        if head:
            settings = {**head.settings, "passes": list(passes), "rounds": rounds}
            store.change_first(path, {"run_id": run_id, "settings": settings})


def _finish(kept: Sequence[Path], passes: Sequence[str], rounds: int, run_id: str) -> None:
    """Turn the measurements into one run with two sides; remove a folder without results."""
    for log in kept:
        _change(log, passes, rounds, run_id)
    for folder in [*kept, kept[0].parent]:
        with suppress(OSError):  # goes only when it is empty
            folder.rmdir()
