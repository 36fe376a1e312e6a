"""Opens the folder of a profile of training steps, and reads the sizes that are profiled there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Optional, Tuple

from common.core.errors import UserError
from common.core.files import another, write_whole
from common.records import documents, run
from common.records.schema import Record
from common.system.locks import Claim
from common.tools.profile.documents import Profile, ProfileHead

#: The file of the sizes that ended, and the file that tells profiles apart.
FILE_NAME, HEADER_NAME = "profile.json", "run.json"


def start(log_dir: Path, name: str, identity: Record) -> Claim:
    """Return the lock of a new folder.  identity: whatever makes two profiles the same.  Raises UserError."""
    claim = run.claim_folder(log_dir, name)
    try:
        header = json.dumps({"started": run.now(), "identity": identity}) + "\n"
        write_whole(another("--log-dir", "folder"), (claim.path.with_name(HEADER_NAME), header))
    except UserError:
        claim.release()
        raise
    return claim


def resume(log_dir: Path, identity: Record) -> Tuple[Claim, List[Profile]]:
    """Return the lock of the folder of the newest profile of this identity, and its documents.  Raises UserError."""
    wanted = json.loads(json.dumps(identity))
    newest: Optional[Tuple[str, Path]] = None
    unreadable: List[str] = []
    for path in sorted(log_dir.glob(f"*/{HEADER_NAME}")):
        try:
            head = documents.read(path, ProfileHead)
            if head.identity == wanted:
                newest = max(newest or ("", path), (head.started, path))
        except (FileNotFoundError, UserError):
            unreadable.append(path.parent.name)
    run.warn_of_unreadable(unreadable, log_dir)
    if newest is None:
        raise run.NothingToResume(
            f"--resume: no profile with these flags under {log_dir}; remove the flag to start one"
        )
    claim, path = run.claim_held(newest[1].parent), newest[1].with_name(FILE_NAME)
    try:
        return claim, documents.read(path, List[Profile])
    except FileNotFoundError:
        return claim, []
    except UserError as error:
        claim.release()
        raise UserError(f"--resume: {path} cannot be read ({error}); remove the flag") from error
