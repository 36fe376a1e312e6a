"""Opens and reads runs about a model and no loss, profiles of inference and pipelines: each a folder with one file."""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Tuple, Type, TypeVar

from common.core.errors import UserError
from common.records import run, schema, store
from common.records.run import Run
from common.records.schema import FirstLine, InferenceHeader, Line, PipelineHeader, Record
from common.tools.files import IDENTITY

FILE_NAMES = {"inference": schema.INFERENCE_FILE_NAME, "pipeline": schema.PIPELINE_FILE_NAME}
HeaderKind = TypeVar("HeaderKind", InferenceHeader, PipelineHeader)


@contextmanager
def open_run(header: Record, log_dir: Path, resume: bool) -> Iterator[Run]:
    """Yield a new run, or the newest one with the same header to go on with.

    Args:
        header: keys of its first line: ``record`` ("inference" or "pipeline") and those of IDENTITY.
        log_dir: the folder that the run's own lies in.
        resume: go on with an earlier run.

    Raises UserError where there is no such run, or another process is measuring it."""
    file_name = FILE_NAMES[header["record"]]
    if resume:
        earlier = run.earlier(log_dir, file_name, FirstLine)
        same = [path for head, path in earlier if _identity(schema.as_written(head)) == _identity(header)]
        if not same:
            words = f"no run of {header['name']} with these flags under {log_dir}; remove the flag to start one"
            raise run.NothingToResume(f"--resume: {words}")
        with run.claim_again(same[-1]) as claim:
            opened = Run(same[-1], store.read(same[-1]), claim)
    else:
        claim = run.claim_folder(log_dir, f"{header['record']}-{header['name']}")
        opened = Run(claim.path.with_name(file_name), claim=claim)
        origin = {"run_id": uuid.uuid4().hex[:12], "command": sys.argv, "started": run.now(), **run.origin()}
        try:
            opened.add({**header, "schema": schema.SCHEMA, **origin})
        except store.NotWritten:
            opened.discard_if_empty()
            raise
    try:
        yield opened
    finally:
        opened.close()


def _identity(head: Record) -> Any:
    """Return what tells runs apart, as JSON has it: lists and tuples are the same."""
    return json.loads(json.dumps({key: head.get(key) for key in IDENTITY}))


def read(path: Path, kind: Type[HeaderKind]) -> Tuple[HeaderKind, List[Line]]:
    """Return the header and all records of a file.  Raises UserError."""
    records = store.read(path)
    if not records or not isinstance(records[0], kind):
        word = kind.__struct_config__.tag
        raise UserError(f"{path}: does not begin with a record {word!r}; {store.ANEW}")
    return records[0], records
