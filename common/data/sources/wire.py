"""The shards of a shape file on their way to another machine, what does their work there, and their parts on the way
back: all as text and arrays, and nothing is unpickled.  `common.jobs.node` finds `Worker` here by its name.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import asdict
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from common.data.provenance import versions
from common.data.sources.manifests import Reader, Timing, Utterance
from common.data.sources.shards import Ended, Processes, Shard
from common.data.sources.spans import Spans
from common.data.sources.tabulate import Kept, Part, Work, joined, lines

#: Entries: less are not worth a process of their own.
PIECE = 100
#: On which the parts depend, too.
PACKAGES = ("torch", "lhotse", "sentencepiece")
SPANS = ("recordings", "features")
FASTEST = 1  # of zlib


def save(path: Path, work: Work) -> None:
    """As a file for `Worker`."""
    about: Dict[str, Any] = {"versions": versions(*PACKAGES), "kept": asdict(work.kept), "speeds": list(work.speeds)}
    arrays: Dict[str, Any] = {"model": np.frombuffer(work.model, dtype=np.uint8)}
    reader = work.reader
    if reader:
        about["reader"] = {"path": str(reader.path), "timing": asdict(reader.timing), "cuts": reader.cuts}
        for name in SPANS:
            arrays[f"{name}_keys"], arrays[f"{name}_numbers"] = getattr(reader, name).arrays
    with open(path, "wb") as stream:
        np.savez(stream, about=np.array(json.dumps(about)), **arrays)


def packed(shard: Shard) -> str:
    """The entries of a shard: a line of JSON says the number and the length of each, then they follow."""
    texts = lines(shard)
    about = [[number for number, _ in shard.entries], list(map(len, texts))]
    whole = "".join([json.dumps(about), "\n", *texts])
    return base64.b64encode(zlib.compress(whole.encode(), FASTEST)).decode()


def part(text: str) -> Part:
    """Of what `Worker` answered."""
    return Part.of(BytesIO(base64.b64decode(text)))


class Worker:
    """On a node: makes parts of shards, by the work in the file `path` and in so many processes (None: one for each CPU
    that this process may use)."""

    def __init__(self, path: str, jobs: Optional[int]):
        with np.load(path, allow_pickle=False) as found:
            about, model = json.loads(str(found["about"])), found["model"].tobytes()
            of = about.get("reader")
            spans: Dict[str, Any] = {
                name: Spans.of(found[f"{name}_keys"], found[f"{name}_numbers"]) for name in SPANS if of
            }
        here, wanted = versions(*PACKAGES), about["versions"]
        differ = [f"{name} {here[name]}, not {wanted[name]}" for name in PACKAGES if here[name] != wanted[name]]
        self.unfit = f"it has {' and '.join(differ)} as the driver; run `make setup` on both" if differ else ""
        reader = None
        if of:
            timing = Timing(**{**of["timing"], "speeds": tuple(of["timing"]["speeds"])})
            reader = Reader(Path(of["path"]), timing, of["cuts"], **spans)
        self.reads = reader is not None
        work = Work(reader, model, Kept(**about["kept"]), about["speeds"])
        self.processes = Processes(work, jobs or len(os.sched_getaffinity(0)))

    def answer(self, request: Mapping[str, Any]) -> Dict[str, str]:
        """The part of the shard that came, or why this node can make none.  Raises UserError for the first entry that
        is wrong."""
        if self.unfit:
            return {"unfit": self.unfit}
        entries = _unpacked(request["shard"], self.reads)
        size = max(PIECE, -(-len(entries) // self.processes.jobs))
        pieces = [Shard(entries[begin : begin + size]) for begin in range(0, max(1, len(entries)), size)]
        try:
            made = joined(list(self.processes.in_order(pieces)))
        except Ended as error:
            return {"unfit": str(error)}
        return {"part": base64.b64encode(made.content()).decode()}


def _unpacked(text: str, reads: bool) -> List[Tuple[int, Any]]:
    """reads: is there a reader, to whom entries are text; else they are utterances."""
    about, _, whole = zlib.decompress(base64.b64decode(text)).decode().partition("\n")
    numbers, lengths = json.loads(about)
    ends = accumulate(lengths)
    texts = (whole[end - length : end] for end, length in zip(ends, lengths))
    return [(number, one if reads else _utterance(*json.loads(one))) for number, one in zip(numbers, texts)]


def _utterance(text: str, frames: List[int], seconds: float) -> Utterance:
    return Utterance(text, tuple(frames), seconds)
