"""Run git in the repository of a folder, whichever repository the environment names.

git gives a hook GIT_DIR, GIT_INDEX_FILE and more, which every git that the hook starts would take: it would read
another repository's revision.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Dict, Optional

#: Variables of `git rev-parse --local-env-vars`, without GIT_CONFIG_PARAMETERS and GIT_CONFIG_COUNT: these hold
#: settings such as safe.directory, which git passes on to the repositories of submodules too.
LOCAL_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)


class GitError(Exception):
    """git failed; the message is its own reason in one line."""


def environment() -> Dict[str, str]:
    """Return this process's environment variables without those that name a repository."""
    return {name: value for name, value in os.environ.items() if name not in LOCAL_VARIABLES}


def run(root: Path, *arguments: str, timeout: Optional[float] = None) -> str:
    """Run git on the repository at `root` and return what it prints on stdout.

    File names that are not UTF-8 have surrogate escapes.  Runs no hooks and takes no lock that another git may wait
    for. Raises GitError with git's own reason if it fails, is missing, or takes more than `timeout` seconds.
    """
    command = ["git", "--no-optional-locks", "-C", str(root), "-c", "core.hooksPath=/dev/null", *arguments]
    try:
        ended = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environment(), timeout=timeout
        )
    except OSError as error:
        raise GitError(f"git cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {arguments[0]}: took more than {timeout:g} s") from error
    if ended.returncode != 0:
        lines = os.fsdecode(ended.stderr).strip().splitlines() or [f"exit code {ended.returncode}"]
        reason = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1])
        raise GitError(f"git {arguments[0]}: {reason}")
    return os.fsdecode(ended.stdout)
