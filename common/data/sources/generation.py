"""Makes a shape file of what the flags of generate_shape_info.py name: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files, for any number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import multiprocessing
import os
import re
import shlex
import signal
from collections import Counter, deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.core.files import read_bytes
from common.data import batching, shapes
from common.data.shapes import Provenance, path_of, versions
from common.data.sources import manifests, published
from common.data.sources.manifests import Utterance
from common.system.processes import die_with_parent

SCHEMA = 1
#: Utterances in the batches whose padding is printed.
BATCH_SIZE = 30
#: Largest chunk that a process works on: less than a second, since Ctrl-C waits for it, and little memory.
ENTRIES, CHARACTERS = 2_000, 2**25
#: Chunks given out, and results that wait for one before them, for each process.
AHEAD = 4
#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4
Chunk = List[Tuple[int, Any]]


#: T and U, int32 (rows, 2); feature frames and U, if they are to be written; the provenance; (path, content) of files
#: that are written beside it.
Generated = Tuple[np.ndarray, Optional[np.ndarray], Provenance, List[Tuple[Path, bytes]]]


def generate(flags: argparse.Namespace) -> List[str]:
    """Write the shape file that the flags ask for; returns lines to show.  Where it raises UserError nothing is
    written."""
    outputs = [flags.output, *([flags.output.with_suffix(".features.pt")] if flags.write_features else [])]
    for path in outputs:
        shapes.check_output(path)
    made = _from_figures(flags) if flags.from_figures else _from_manifest(flags, outputs)
    rows, features, provenance, beside = made
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(flags.output, rows, {"schema": SCHEMA, **provenance}, *beside)
    (t_min, u_min), (t_max, u_max) = rows.min(axis=0), rows.max(axis=0)
    lines = [
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in beside),
        f"wrote {flags.output}: {len(rows):,} utterances, T {t_min} to {t_max}, U {u_min} to {u_max}",
    ]
    if features is not None:
        of_features = {**provenance, "options": {**provenance["options"], "subsampling_factor": 1}}
        shapes.save(outputs[1], features, {"schema": SCHEMA, **of_features})
        lines.append(f"wrote {outputs[1]}: feature frames {features[:, 0].min()} to {features[:, 0].max()}")
    return [*lines, *summary(rows, flags.output)]


def summary(rows: np.ndarray, output: Path) -> List[str]:
    """Return lines that describe the rows (utterances, 2), and the next command to type."""
    lines = []
    for column, name in enumerate("TU"):
        low, middle, high = (f"{value:.0f}" for value in np.percentile(rows[:, column], (5, 50, 95)))
        lines.append(f"{name}: median {middle}, 5% to 95%: {low} to {high}, largest {rows[:, column].max()}")
    useful, padded = batching.fixed_size(rows, BATCH_SIZE).all_cells()
    by_length = batching.fixed_size(rows[np.argsort(rows[:, 0], kind="stable")], BATCH_SIZE).all_cells()
    in_file_order, sorted_ = (f"{1 - cells.sum() / total.sum():.0%}" for cells, total in ((useful, padded), by_length))
    padding = f"{in_file_order} of the cells in file order, {sorted_} sorted by length"
    lines.append(f"padding of batches of {BATCH_SIZE}: {padding}")
    return [*lines, f"next: ./benchmark_all.py --shape-file {shlex.quote(str(output))}"]


def _described(path: Path) -> Dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _from_figures(flags: argparse.Namespace) -> Generated:
    seed = published.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_described(published.FIGURES)]},
        "options": {"seed": seed},
        "versions": versions("torch"),
    }
    figures = published.load_figures()
    features = published.draw_features(figures, seed) if flags.write_features else None
    return published.draw(figures, seed), features, provenance, []


def _from_manifest(flags: argparse.Namespace, outputs: Sequence[Path]) -> Generated:
    model = load_model(flags.bpe_model) if flags.bpe_model else None
    trained_at = path_of(flags.output).with_suffix(".bpe.model")
    recordings = flags.recordings or (None if flags.features else manifests.beside(flags.manifest))
    inputs = [path for path in (flags.manifest, recordings, flags.features) if path]
    for output in [*outputs, *map(path_of, outputs), *([] if model else [trained_at])]:  # cuts.json beside cuts.pt
        for path in filter(Path.exists, [*inputs, *([flags.bpe_model] if flags.bpe_model else [])]):
            if output.exists() and output.samefile(path):
                raise UserError(f"--output {flags.output}: the input {output} would be replaced; name another file")
    files = [_described(path) for path in inputs]

    timing = manifests.Timing(flags.frame_shift, tuple(flags.speed_perturbation), flags.perturb_again)
    reader, entries = manifests.opened(flags.manifest, timing, recordings, flags.features)
    work = partial(_part_of, reader, model, flags)
    parts = list(_in_order(work, _chunks(islice(entries, flags.limit)), flags.jobs))
    beside = []
    if model is None:  # the utterances were read, to train; now they are counted
        texts = [utterance.text for part in parts for utterance in part.utterances if utterance.text]
        model = train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        beside.append((trained_at, model))
        for part in parts:
            part.rows = table(part.utterances, counter(model), flags, part.counts)
    counts: Counter = Counter()
    for part in parts:
        counts.update(part.counts)
    if not counts["rows"]:
        empty = counts["without_supervision"] + counts["with_empty_text"]
        raise UserError(
            f"{flags.manifest}: no utterance is left: of {counts['utterances_read']} read, {empty} have no text, "
            f"{counts['rows_left_out_as_too_short']} rows are too short, others are not between --min-duration and "
            "--max-duration"
        )
    recorded = ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
    if_given = ("min_duration", "max_duration", "perturb_again")
    provenance = {
        "source": {"kind": "manifest", "files": files},
        "bpe_model": {
            "name": (flags.bpe_model or trained_at).name,
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": _processor(model).vocab_size(),
            "trained_here": flags.bpe_model_type if beside else None,
        },
        "options": {
            **{name: getattr(flags, name) for name in recorded},
            **{name: value for name in if_given if (value := getattr(flags, name))},
        },
        "counts": dict(sorted(counts.items())),
        "versions": versions("torch", "lhotse", "sentencepiece"),
    }
    rows = np.concatenate([part.rows[at] for at in range(len(flags.speed_perturbation)) for part in parts])
    features = rows[:, [2, 1]] if flags.write_features else None
    return rows[:, :2], features, provenance, beside


# From entries of a manifest to rows of a shape file, chunk by chunk.


@dataclass
class Part:
    """Hold a chunk's rows: for each speed int32 (rows, 3), columns T, U and feature frames; the utterances, where there
    is no model to count tokens with yet."""

    rows: List[np.ndarray]
    counts: Counter
    utterances: Sequence[Utterance] = ()


def _part_of(reader: manifests.Reader, model: Optional[bytes], flags: argparse.Namespace, chunk: Chunk) -> Part:
    """Make rows of a chunk, in whatever process.  model: a SentencePiece model; None: the utterances alone."""
    counts: Counter = Counter()
    utterances = [reader.utterance(number, line, counts) for number, line in chunk]
    if model is None:
        return Part([], counts, utterances)
    return Part(table(utterances, counter(model), flags, counts), counts)


def table(
    utterances: Sequence[Utterance],
    count_tokens: Callable[[List[str]], List[int]],
    flags: argparse.Namespace,
    counts: Counter,
) -> List[np.ndarray]:
    """Return the rows of the utterances at each speed (see `Part`), and count in `counts` what is left out.  An
    utterance that is kept without text has U = 0."""
    some = [utterance for utterance in utterances if utterance.text or flags.keep_empty]
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if flags.keep_empty else "left_out_without_text"] += empty
    tokens = np.array(count_tokens([utterance.text for utterance in some]), dtype=np.int64)
    speeds = flags.speed_perturbation
    frames = np.array([utterance.frames for utterance in some], dtype=np.int64).reshape(-1, len(speeds))
    seconds = np.array([utterance.seconds for utterance in some])
    return [_kept(tokens, at, seconds / speed, flags, counts) for at, speed in zip(frames.T, speeds)]


def _kept(
    tokens: np.ndarray, frames: np.ndarray, lasts: np.ndarray, flags: argparse.Namespace, counts: Counter
) -> np.ndarray:
    """Return the rows that stay at one speed, at which the utterances last `lasts` seconds."""
    rows = np.stack([shapes.subsampled(frames, flags.subsampling_factor), tokens, frames], axis=1)
    enough = rows[:, 0] >= 1
    counts["rows_left_out_as_too_short"] += int((~enough).sum())
    for key, bound, fits in (
        ("rows_below_min_duration", flags.min_duration, lasts >= (flags.min_duration or 0.0) - ROUNDING),
        ("rows_above_max_duration", flags.max_duration, lasts <= (flags.max_duration or math.inf) + ROUNDING),
    ):
        if bound is not None:
            counts[key] += int((enough & ~fits).sum())
            enough &= fits
    rows = rows[enough]
    counts["rows"] += len(rows)
    if len(rows) and rows.max() > shapes.LARGEST:
        raise UserError(f"an utterance has {rows.max()} frames, more than a shape file can hold ({shapes.LARGEST})")
    return rows.astype(np.int32)


# Processes.


def _chunks(entries: Iterable[Tuple[int, str]]) -> Iterator[Chunk]:
    """Yield (number, entry) pairs in chunks.  A UserError of `entries` comes after the chunk before it."""
    chunk: Chunk = []
    size = 0
    try:
        for number, entry in entries:
            chunk.append((number, entry))
            size += len(entry)
            if len(chunk) >= ENTRIES or size >= CHARACTERS:
                yield chunk
                chunk, size = [], 0
    except UserError:
        yield chunk
        raise
    if chunk:
        yield chunk


#: In a process of `_in_order`: what it does with a chunk.
_work: Callable[[Any], Any]


def _in_order(work: Callable[[Any], Any], items: Iterable[Any], jobs: int) -> Iterator[Any]:
    """Yield ``work(item)`` of each item, in their order, from `jobs` processes; 1: this process does it.

    The first UserError is raised, of `items` and of `work` where its result would be; one too when a process is
    killed.  The processes end with the loop, or with this process.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    waiting: Deque[Future[Any]] = deque()
    # forked, since `work` may hold gigabytes, which the processes then share
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(work, os.getpid())) as pool:
        # Ctrl-C between the fork of a process and its entry in the pool would leave it behind, and then wait for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pool.submit(int)  # starts them all
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            remaining, error = iter(items), None
            while True:
                try:
                    item = next(remaining)
                except (StopIteration, UserError) as end:
                    error = end
                    break
                waiting.append(pool.submit(_serve, item))
                if len(waiting) >= AHEAD * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
            if isinstance(error, UserError):
                raise error
        except BrokenProcessPool as broken:
            reason = "a process ended before its work, perhaps for lack of memory"
            raise UserError(f"--jobs {jobs}: {reason}; start again with fewer of them") from broken
        finally:
            for future in waiting:
                future.cancel()


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """Prepare a process: signals of the terminal go to the parent alone, which ends this one."""
    global _work
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    _work = work


def _serve(item: Any) -> Any:
    return _work(item)


# -- tokens -----------------------------------------------------------------------------------------------------------


_LOG_NOTHING_BELOW_FATAL = 3


def load_model(path: Path) -> bytes:
    """Return the SentencePiece model in `path`.  Raises UserError for a file that is missing or not a model."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UserError(f"--bpe-model {path}: {error.strerror or error}; name a SentencePiece model") from error
    try:
        if not content:  # sentencepiece reads this as a model without pieces
            raise RuntimeError("empty")
        _processor(content)
    except RuntimeError as error:
        advice = "name one, or train one with --bpe-vocab-size"
        raise UserError(f"--bpe-model {path}: not a SentencePiece model; {advice}") from error
    return content


def train(texts: Sequence[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Train a SentencePiece model of `texts`, one utterance each; ids: 0 <blk>, 1 <sos/eos>, 2 <unk>. icefall's own
    lang_bpe_500 has the type ``unigram``, in spite of its name.  The same texts give the same model.  Raises UserError
    where `texts` cannot give so many tokens, with the largest or smallest possible number."""
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # as icefall trains a model
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            user_defined_symbols=["<blk>", "<sos/eos>"],
            unk_id=2,
            bos_id=-1,
            eos_id=-1,
            character_coverage=1.0,
            input_sentence_size=100_000_000,
            minloglevel=_LOG_NOTHING_BELOW_FATAL,
        )
    except RuntimeError as error:
        raise UserError(f"--bpe-vocab-size {vocab_size}: {_advice(str(error), len(texts))}") from error
    return model.getvalue()


@lru_cache(maxsize=1)
def counter(model: bytes) -> Callable[[List[str]], List[int]]:
    """Return a function from texts to the number of tokens of each, in one thread."""
    encode = partial(_processor(model).encode, out_type=int, num_threads=1)
    return lambda texts: list(map(len, encode(texts)))


def _processor(model: bytes) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def _advice(problem: str, texts: int) -> str:
    largest = re.search(r"value <= (\d+)", problem)
    if largest:
        return f"the text of {texts} utterances has no more than {largest[1]} tokens; ask for at most {largest[1]}"
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", problem)
    if smallest:
        return f"the text has so many characters that it takes {smallest[1]} tokens; ask for at least {smallest[1]}"
    return f"no model could be trained on the text of {texts} utterances ({' '.join(problem.split())})"
