"""A count of operations on disk: the document of one command, in a folder of its own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Mapping

from common.core.files import another, write_whole
from common.records import run
from common.records.schema import Record
from common.system.locks import Claim

FILE_NAME = "flops.json"


def start(log_dir: Path, model: str) -> Claim:
    """Return the lock of a new folder, named after the model.  Raises UserError where none can be made."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"
    return run.claim_folder(log_dir, f"flops-{name}")


def write(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write a Counted of documents.py with where and when it was made; return its path.

    Raises UserError where it cannot be written.
    """
    head: Record = {"started": run.now(), "command": sys.argv, **run.origin()}
    path = folder / FILE_NAME
    write_whole(another("--log-dir", "folder"), (path, json.dumps({**head, **record}) + "\n"))
    return path
