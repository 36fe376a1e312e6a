"""Entries of a lhotse manifest file, one by one, with a progress bar over its bytes.

Not lhotse's own loaders: they try a path as a command or a URL first, give a .json manifest any kind that parses, and
raise any error for a wrong file.  Here a path is a file, and an error names the line.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Iterator, TextIO, Tuple, Type

from common.core.errors import UserError
from common.core.files import open_file

WANTED = "a lhotse manifest, .json or .jsonl, gzipped or not"
#: Characters of one entry, and of all of a JSON array, which is read whole: a small gzip file can hold any number.
LONGEST_ENTRY, LONGEST_ARRAY = 2**24, 2**29


def lines(path: Path) -> Iterator[Tuple[int, str]]:
    """Yield (entry, counted from 1; its JSON) of the manifest `path`; its content decides the format, not its name.
    Raises UserError for what is no such manifest."""
    try:
        yield from _lines(path)
    except OSError as error:  # a damaged gzip header is one too
        raise UserError(f"cannot read {path}: {error.strerror or error}; name {WANTED}") from error
    except (EOFError, ValueError, RecursionError, MemoryError, zlib.error) as error:
        raise UserError(f"{path}: damaged, or not {WANTED} ({one_line(error)})") from error


def entry(path: Path, number: int, line: str) -> Any:
    """Return the lhotse object of a line of `path`.  Raises UserError with its number."""
    from lhotse.serialization import deserialize_item

    try:
        return deserialize_item(json.loads(line))
    except Exception as error:  # lhotse checks nothing, so a wrong entry can raise anything
        raise UserError(f"{path}: entry {number} is not of {WANTED} ({one_line(error)})") from error


def of_kind(kind: Type, path: Path, number: int, line: str) -> Any:
    """Return the object of a line, as `entry` does.  Raises UserError if it is not a `kind`."""
    item = entry(path, number, line)
    if not isinstance(item, kind):
        raise UserError(f"{path}: entry {number} is a {type(item).__name__}, not a {kind.__name__}")
    for name in ("id", "recording_id"):
        if not isinstance(getattr(item, name, None), (str, int, type(None))):
            raise UserError(f"{path}: entry {number} has the {name} {getattr(item, name)!r:.50}, which is no text")
    return item


def one_line(error: Exception) -> str:
    """Return the error's class and message, at most 200 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else text[:197] + "..."


def progress(**options: Any) -> Any:
    """Return a tqdm bar on stderr, shown only where that is a terminal."""
    from tqdm import tqdm

    return tqdm(disable=not sys.stderr.isatty(), **options)


def _lines(path: Path) -> Iterator[Tuple[int, str]]:
    size = path.stat().st_size
    with open_file(path) as raw, progress(total=size, unit="B", unit_scale=True, desc=path.name) as bar:
        text = io.TextIOWrapper(_decompressed(raw), encoding="utf-8")
        number = 0
        while line := text.readline(LONGEST_ENTRY):
            number += 1
            if line.startswith("["):
                yield from enumerate(map(json.dumps, json.loads(_array(line, text))), start=1)
            elif len(line) == LONGEST_ENTRY:
                raise ValueError(f"entry {number} has more than {LONGEST_ENTRY} characters")
            elif line.strip():
                yield number, line
            bar.update(raw.tell() - bar.n)


def _array(begin: str, rest: TextIO) -> str:
    whole = begin + rest.read(LONGEST_ARRAY)
    if rest.read(1):
        raise ValueError(f"an array of more than {LONGEST_ARRAY} characters")
    return whole


def _decompressed(raw: BinaryIO) -> BinaryIO:
    compressed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if compressed else raw  # type: ignore[return-value]
