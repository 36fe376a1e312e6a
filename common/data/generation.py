"""Makes a shape file of what the flags of the command shapes name: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time, so that the same input and versions give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import math
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import read_bytes
from rnnt_bench.core.text import plain
from rnnt_bench.data import batching, manifests, shapes
from rnnt_bench.data.manifests import Utterance

SCHEMA = 1
#: Utterances in the batches whose padding is printed.
BATCH_SIZE = 30
#: Share of the tokens from which unknown ones are warned of: a model that fits its texts has almost none.
MOST_UNKNOWN = 0.01
#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4
#: T and U, int32 (rows, 2); feature frames and U; the provenance; (path, content) of files that are written beside it.
Generated = Tuple[np.ndarray, np.ndarray, shapes.Provenance, List[Tuple[Path, bytes]]]


def generate(flags: argparse.Namespace) -> List[str]:
    """Write the shape file that the flags ask for, or nothing where it raises UserError; return lines to show."""
    outputs = [flags.output, *([flags.output.with_suffix(".features.pt")] if flags.write_features else [])]
    for path in outputs:
        shapes.check_output(path)
    for path in outputs[1:]:
        _check_own(flags.output, path, shapes.part(path, "shape_file"))
    if flags.bpe_vocab_size:
        _check_own(flags.output, flags.output.with_suffix(".bpe.model"), shapes.part(flags.output, "bpe_model"))
    rows, features, provenance, beside = _from_figures(flags) if flags.from_figures else _from_manifest(flags, outputs)
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
    in_order = (rows, rows[np.argsort(rows[:, 0], kind="stable")])
    cells = [batching.fixed_size(order, BATCH_SIZE).all_cells() for order in in_order]
    in_file, by_length = (f"{1 - useful.sum() / padded.sum():.0%}" for useful, padded in cells)
    lines.append(
        f"padding of batches of {BATCH_SIZE}: {in_file} of the cells in file order, {by_length} sorted by length"
    )
    return [*lines, f"next: {command('run')} --shape-file {shlex.quote(str(flags.output))}"]


def _check_own(output: Path, beside: Path, described: shapes.Provenance) -> None:
    """Raise UserError for a file beside the output that is there and not `described` as made with an earlier one."""
    if os.path.lexists(beside) and not (beside.is_file() and described.get("sha256") == shapes.sha256(beside)):
        raise UserError(f"--output {output}: {beside} would be replaced, which no earlier run made; name another file")


def _described(path: Path) -> Dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _from_figures(flags: argparse.Namespace) -> Generated:
    seed = shapes.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_described(shapes.FIGURES)]},
        "options": {"seed": seed},
        "versions": shapes.versions("torch"),
    }
    return (*shapes.draw(seed), provenance, [])


def _from_manifest(flags: argparse.Namespace, outputs: Sequence[Path]) -> Generated:
    model = load_model(flags.bpe_model) if flags.bpe_model else None
    trained_at, recordings = flags.output.with_suffix(".bpe.model"), flags.recordings
    named = flags.manifest.with_name(flags.manifest.name.replace("supervisions", "recordings"))
    if not (recordings or flags.features) and named != flags.manifest and named.is_file():
        recordings = named
    inputs = [path for path in (flags.manifest, recordings, flags.features) if path]
    for path in filter(Path.exists, [*inputs, *([flags.bpe_model] if flags.bpe_model else [])]):
        for output in filter(Path.exists, [*outputs, *([] if model else [trained_at])]):
            if output.samefile(path):
                raise UserError(f"--output {flags.output}: the input {output} would be replaced; name another file")
    files = [_described(path) for path in inputs]
    counts: Counter = Counter()
    reader = manifests.Reader(flags.manifest, flags.frame_shift, tuple(flags.speed_perturbation), flags.perturb_again)
    entries = itertools.islice(reader.entries(recordings, flags.features), flags.limit)
    utterances = [reader.utterance(number, line, counts) for number, line in entries]
    beside = []
    if model is None:
        texts = [utterance.text for utterance in utterances if utterance.text]
        model = train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        beside.append((trained_at, model))
    processor = _processor(model)
    rows = table(utterances, processor, flags, counts)
    unknown = counts["unknown_tokens"] / max(counts["tokens"], 1)
    if unknown >= MOST_UNKNOWN:
        words = f"{unknown:.0%} of the tokens of {flags.manifest} are <unk> to {flags.bpe_model or trained_at}"
        advice = "does the model have the letter case and the letters of the texts? U is not that of a training"
        print(f"warning: {plain(f'{words}: {advice}')}", file=sys.stderr)
    if not len(rows):
        empty = counts["without_supervision"] + counts["with_empty_text"]
        words = f"{empty} have no text, {counts['rows_left_out_as_too_short']} rows are too short"
        words = (
            f"of {counts['utterances_read']} read, {words}, others are not between --min-duration and --max-duration"
        )
        raise UserError(f"{flags.manifest}: no utterance is left: {words}")
    recorded = ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
    if_given = ("min_duration", "max_duration", "perturb_again")
    options = {name: getattr(flags, name) for name in (*recorded, *if_given)}
    provenance = {
        "source": {"kind": "manifest", "files": files},
        "bpe_model": {
            "name": (flags.bpe_model or trained_at).name,
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": processor.vocab_size(),
            "trained_here": flags.bpe_model_type if beside else None,
        },
        "options": {name: value for name, value in options.items() if value or name in recorded},
        "counts": dict(sorted(counts.items())),
        "versions": shapes.versions("torch", "lhotse", "sentencepiece"),
    }
    return rows[:, :2], rows[:, [2, 1]], provenance, beside


def table(utterances: Sequence[Utterance], processor: Any, flags: argparse.Namespace, counts: Counter) -> np.ndarray:
    """Return int32 (rows, 3), columns T, U and feature frames, one speed after the other; count what is left out."""
    some = [utterance for utterance in utterances if utterance.text or flags.keep_empty]
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if flags.keep_empty else "left_out_without_text"] += empty
    tokens = processor.encode([utterance.text for utterance in some], out_type=int, num_threads=1)
    U = np.array(list(map(len, tokens)), dtype=np.int64)
    counts["tokens"] = int(U.sum())
    counts["unknown_tokens"] = sum(pieces.count(processor.unk_id()) for pieces in tokens)
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


_LOG_NOTHING_BELOW_FATAL = 3


def load_model(path: Path) -> bytes:
    """Return the content of a SentencePiece model's file."""
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
    """Train a SentencePiece model of `texts`, one utterance each; ids: 0 <blk>, 1 <sos/eos>, 2 <unk>.  The same texts
    give the same model.  Raises UserError where they cannot give so many tokens."""
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
        problem = " ".join(str(error).split())  # it has the largest or smallest size that can be
        raise UserError(f"--bpe-vocab-size {vocab_size}: no model of {len(texts)} utterances ({problem})") from error
    return model.getvalue()


def _processor(model: bytes) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    return sentencepiece.SentencePieceProcessor(model_proto=model)
