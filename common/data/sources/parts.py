"""The finished shards of a shape file in the making, in a folder beside it, so that the next start goes on from them.

A part has the name of what it was made of: the text of its shard, the model, the options and the versions.  So a
changed manifest, or another option, takes over the parts that are still right, and no others.  A last, short shard is
done again.
"""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Tuple

import numpy as np

from common.core.errors import UserError
from common.core.files import another, make_folder, open_file, write_whole
from common.data.sources.shards import Shard
from common.data.sources.tabulate import Part, lines
from common.system.locks import Claim, Held

#: A part, and what write_whole leaves when it is killed.
OURS = re.compile(r"[0-9a-f]{32}[.]npz|[.][0-9a-f]{12}[.]tmp")
ADVICE = "free some space or " + another("--output")
#: The number and the part of each shard that was asked for, counted from 0, in any order.
Parted = Generator[Tuple[int, Part], None, None]


class Parts:
    """Of the shape file `output`, in the order of the shards.  question: on what a part depends beside its shard.

    At the end of a ``with`` block the folder is removed, and kept where an error or Ctrl-C ended it."""

    def __init__(self, output: Path, question: str):
        self.folder = output.with_name(output.name + ".part")
        self.question = question.encode("utf-8", "backslashreplace")
        self.taken = 0  # entries of parts of an earlier start
        self.kept = 0  # of those and of the parts written by this one
        self._names: List[str] = []
        self._short: Dict[str, Part] = {}  # not written
        self._claim: Optional[Claim] = None

    def make(self, shards: Iterator[Shard], work: Callable[[Iterator[Shard]], Parted]) -> None:
        """Have `work` do what is missing of the shards."""
        missing: Dict[int, Tuple[str, bool, int]] = {}
        numbers = count()

        def asked() -> Iterator[Shard]:
            for shard in shards:
                name = self._name(shard)
                self._names.append(name)
                if shard.whole and self._path(name).is_file():
                    self._claimed()
                    self.taken += len(shard.entries)
                    self.kept += len(shard.entries)
                    continue
                missing[next(numbers)] = name, shard.whole, len(shard.entries)
                yield shard

        with closing(work(asked())) as parts:
            for number, part in parts:
                name, whole, entries = missing.pop(number)
                if whole:
                    self._write(name, part)
                    self.kept += entries
                else:
                    self._short[name] = part

    def __iter__(self) -> Iterator[Part]:
        return map(self._part, self._names)

    def columns(self, *columns: int) -> np.ndarray:
        """These columns of all parts, int32 (rows, columns): the first speed of all, then the next."""
        sizes = np.array([[len(rows) for rows in part.rows] for part in self], dtype=np.int64)
        ends = sizes.T.cumsum().reshape(sizes.T.shape).T
        found = np.empty((int(sizes.sum()), len(columns)), dtype=np.int32)
        for part, of_part in zip(self, ends):
            for end, rows in zip(of_part, part.rows):
                found[end - len(rows) : end] = rows[:, columns]
        return found

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._claim is None:
            return
        if kind is None:
            for path in self.folder.iterdir():  # what else is there stays
                if OURS.fullmatch(path.name):
                    path.unlink()
        self._claim.release()
        with suppress(OSError):
            self.folder.rmdir()
        if kind is not None and self.kept:
            print(f"{self.kept:,} utterances are kept in {self.folder}: the same command goes on", file=sys.stderr)

    def _name(self, shard: Shard) -> str:
        digest = hashlib.blake2b(self.question, digest_size=16)
        digest.update("\0".join(lines(shard)).encode())
        return digest.hexdigest()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"

    def _claimed(self) -> None:
        """Hold the folder, made when missing.  Raises UserError where another process has it."""
        if self._claim is not None:
            return
        make_folder(self.folder, ADVICE)
        try:
            self._claim = Claim(self.folder / "lock")
        except Held as error:
            raise UserError(
                f"{self.folder}: process {error.holder} makes this file now; name another --output"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror or error}; {ADVICE}") from error

    def _write(self, name: str, part: Part) -> None:
        self._claimed()
        write_whole(ADVICE, (self._path(name), part.content()))

    def _part(self, name: str) -> Part:
        if name in self._short:
            return self._short[name]
        path = self._path(name)
        try:
            with open_file(path) as stream:
                return Part.of(stream)
        except Exception as error:  # a damaged archive can raise anything
            raise UserError(f"{path}: damaged; remove the folder {self.folder}, and start again") from error
