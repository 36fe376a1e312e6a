"""Makes a shape file of what the flags of generate_shape_info.py name: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import math
import os
import re
import shlex
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from common.core.errors import UserError, as_called
from common.core.files import read_bytes
from common.data import batching, manifests, shapes, streams
from common.data.manifests import Utterance

SCHEMA = 1
#: Utterances in the batches whose padding is printed.
BATCH_SIZE = 30
#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4
#: T and U, int32 (rows, 2); feature frames and U; the provenance; (path, content) of files that are written beside it.
Generated = Tuple[np.ndarray, np.ndarray, shapes.Provenance, List[Tuple[Path, bytes]]]


def generate(flags: argparse.Namespace) -> List[str]:
    """Write the shape file that the flags ask for; returns lines to show.  Where it raises UserError nothing is
    written."""
    outputs = [flags.output, *([flags.output.with_suffix(".features.pt")] if flags.write_features else [])]
    for path in outputs:
        shapes.check_output(path)
    rows, features, provenance, beside = _from_figures(flags) if flags.from_figures else _from_manifest(flags, outputs)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(flags.output, rows, {"schema": SCHEMA, **provenance}, *beside)
    lines = [
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in beside),
        f"wrote {flags.output}: {len(rows):,} utterances",
    ]
    if flags.write_features:
        of_features = {**provenance, "options": {**provenance["options"], "subsampling_factor": 1}}
        shapes.save(outputs[1], features, {"schema": SCHEMA, **of_features})
        lines.append(f"wrote {outputs[1]}: feature frames {features[:, 0].min()} to {features[:, 0].max()}")
    for name, column in zip("TU", rows.T):
        low, middle, high = np.percentile(column, (5, 50, 95))
        spread = f"median {middle:.0f}, 5% to 95%: {low:.0f} to {high:.0f}"
        lines.append(f"{name}: {column.min()} to {column.max()}, {spread}")
    padding = []
    for order in (rows, rows[np.argsort(rows[:, 0], kind="stable")]):
        useful, padded = batching.fixed_size(order, BATCH_SIZE).all_cells()
        padding.append(f"{1 - useful.sum() / padded.sum():.0%}")
    words = f"{padding[0]} of the cells in file order, {padding[1]} sorted by length"
    lines.append(f"padding of batches of {BATCH_SIZE}: {words}")
    return [*lines, as_called(f"next: ./benchmark_all.py --shape-file {shlex.quote(str(flags.output))}")]


def _described(path: Path) -> Dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _from_figures(flags: argparse.Namespace) -> Generated:
    seed = streams.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_described(streams.FIGURES)]},
        "options": {"seed": seed},
        "versions": shapes.versions("torch"),
    }
    return (*streams.draw(seed), provenance, [])


def _from_manifest(flags: argparse.Namespace, outputs: Sequence[Path]) -> Generated:
    model = load_model(flags.bpe_model) if flags.bpe_model else None
    trained_at = shapes.path_of(flags.output).with_suffix(".bpe.model")
    recordings = flags.recordings or (None if flags.features else manifests.beside(flags.manifest))
    inputs = [path for path in (flags.manifest, recordings, flags.features) if path]
    for output in [*outputs, *map(shapes.path_of, outputs), *([] if model else [trained_at])]:  # cuts.json by cuts.pt
        for path in filter(Path.exists, [*inputs, *([flags.bpe_model] if flags.bpe_model else [])]):
            if output.exists() and output.samefile(path):
                raise UserError(f"--output {flags.output}: the input {output} would be replaced; name another file")
    files = [_described(path) for path in inputs]

    timing = manifests.Timing(flags.frame_shift, tuple(flags.speed_perturbation), flags.perturb_again)
    reader, entries = manifests.opened(flags.manifest, timing, recordings, flags.features)
    counts: Counter = Counter()
    entries = itertools.islice(entries, flags.limit)
    utterances = [reader.utterance(number, line, counts) for number, line in entries]
    beside = []
    if model is None:
        texts = [utterance.text for utterance in utterances if utterance.text]
        model = train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        beside.append((trained_at, model))
    processor = _processor(model)
    rows = table(utterances, processor, flags, counts)
    if not len(rows):
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
            "vocab_size": processor.vocab_size(),
            "trained_here": flags.bpe_model_type if beside else None,
        },
        "options": {
            **{name: getattr(flags, name) for name in recorded},
            **{name: value for name in if_given if (value := getattr(flags, name))},
        },
        "counts": dict(sorted(counts.items())),
        "versions": shapes.versions("torch", "lhotse", "sentencepiece"),
    }
    return rows[:, :2], rows[:, [2, 1]], provenance, beside


def table(utterances: Sequence[Utterance], processor: Any, flags: argparse.Namespace, counts: Counter) -> np.ndarray:
    """Return the rows of the utterances, one speed after the other: int32 (rows, 3), columns T, U and feature frames.
    What is left out is counted in `counts`.  An utterance that is kept without text has U = 0."""
    some = [utterance for utterance in utterances if utterance.text or flags.keep_empty]
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if flags.keep_empty else "left_out_without_text"] += empty
    tokens = processor.encode([utterance.text for utterance in some], out_type=int, num_threads=1)
    U = np.array(list(map(len, tokens)), dtype=np.int64)
    kept = []
    for at, speed in enumerate(flags.speed_perturbation):
        frames = np.array([utterance.frames[at] for utterance in some], dtype=np.int64)
        seconds = np.array([utterance.seconds for utterance in some]) / speed
        rows = np.stack([shapes.subsampled(frames, flags.subsampling_factor), U, frames], axis=1)
        enough = rows[:, 0] >= 1
        counts["rows_left_out_as_too_short"] += int((~enough).sum())
        for key, bound, fits in (
            ("rows_below_min_duration", flags.min_duration, seconds >= (flags.min_duration or 0.0) - ROUNDING),
            ("rows_above_max_duration", flags.max_duration, seconds <= (flags.max_duration or math.inf) + ROUNDING),
        ):
            if bound is not None:
                counts[key] += int((enough & ~fits).sum())
                enough &= fits
        kept.append(rows[enough])
    every = np.concatenate(kept)
    counts["rows"] += len(every)
    return every.astype(np.int32)


# Tokens.


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
        problem = f"no model could be trained on the text of {len(texts)} utterances ({' '.join(str(error).split())})"
        if largest := re.search(r"value <= (\d+)", str(error)):
            problem = f"the text has no more than {largest[1]} tokens; ask for at most {largest[1]}"
        elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
            problem = f"the characters of the text take {smallest[1]} tokens; ask for at least {smallest[1]}"
        raise UserError(f"--bpe-vocab-size {vocab_size}: {problem}") from error
    return model.getvalue()


def _processor(model: bytes) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor
