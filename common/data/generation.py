"""Make a shape file, and its provenance, of a manifest or of published figures.

The provenance has no folders and no time, so that the same input and versions give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
#: Share of unknown tokens from which a warning is printed.  A model that fits its texts has almost
#: none.
MOST_UNKNOWN = 0.01
#: Seconds by which a duration may miss --min-duration or --max-duration.  Durations are rounded to
#: whole samples, and then divided by the speed.
ROUNDING = 1e-4


class Generated(NamedTuple):
    """Hold what a source gives, before it is written.

    Attributes:
        rows: of the shape file, int32 (rows, 2), columns T and U
        features: the same with feature frames in the place of T
        provenance: of the shape file
        beside: (path, content) of other files to write, such as a trained model
    """

    rows: np.ndarray
    features: np.ndarray
    provenance: shapes.Provenance
    beside: list[tuple[Path, bytes]]


def generate(flags: argparse.Namespace) -> list[str]:
    """Write the shape file that the flags of the command `shapes` ask for; return lines to print.

    Raises UserError, and then writes nothing."""
    shapes.check_output(flags.output)
    outputs = [flags.output]
    features_output = None
    if flags.write_features:
        features_output = flags.output.with_suffix(".features.pt")
        outputs.append(features_output)
        shapes.check_output(features_output)
        _check_own(flags.output, features_output, shapes.entry(features_output, "shape_file"))
    if flags.bpe_vocab_size:
        _check_own(flags.output, _trained_model(flags), shapes.entry(flags.output, "bpe_model"))
    generated = _from_figures(flags) if flags.from_figures else from_manifest(flags, outputs)
    provenance = {"schema": SCHEMA, **generated.provenance}
    shapes.save(flags.output, generated.rows, provenance, *generated.beside)
    counts = provenance.get("counts", {})
    lines = [f"{name.replace('_', ' ')}: {count:,}" for name, count in counts.items()]
    lines += [f"wrote {path}" for path, _ in generated.beside]
    lines.append(f"wrote {flags.output}: {len(generated.rows):,} utterances")
    if features_output:
        # The lengths in this file are those of feature frames, which are not subsampled.
        options = {**provenance["options"], "subsampling_factor": 1}
        shapes.save(features_output, generated.features, {**provenance, "options": options})
        frames = generated.features[:, 0]
        lines.append(f"wrote {features_output}: feature frames {frames.min()} to {frames.max()}")
    lines += _described(generated.rows)
    return [*lines, f"next: {command('run')} --shape-file {shlex.quote(str(flags.output))}"]


def _described(rows: np.ndarray) -> list[str]:
    """Return lines about the lengths in a shape file, and about the padding of its batches."""
    lines = []
    for name, column in zip("TU", rows.T):
        low, middle, high = np.percentile(column, (5, 50, 95))
        spread = f"median {middle:.0f}, 5% to 95%: {low:.0f} to {high:.0f}"
        lines.append(f"{name}: {column.min()} to {column.max()}, {spread}")
    in_file = f"{_padding(rows)} of the cells in file order"
    by_length = _padding(rows[np.argsort(rows[:, 0], kind="stable")])
    lines.append(f"padding of batches of {BATCH_SIZE}: {in_file}, {by_length} sorted by length")
    return lines


def _padding(rows: np.ndarray) -> str:
    """Return the share of padding in the cells of batches of BATCH_SIZE rows: "34%"."""
    useful, padded = batching.fixed_size(rows, BATCH_SIZE).all_cells()
    return f"{1 - useful.sum() / padded.sum():.0%}"


def _check_own(output: Path, beside: Path, provenance: shapes.Provenance) -> None:
    """Raise UserError if writing `output` would replace a file that no earlier run made.

    beside: the file that would be replaced; provenance: what an earlier run noted of it, {} for
    nothing."""
    if not os.path.lexists(beside):
        return
    if not beside.is_file() or provenance.get("sha256") != shapes.sha256(beside):
        raise UserError(
            f"--output {output}: {beside} would be replaced, which no earlier run made; name another file"
        )


def _trained_model(flags: argparse.Namespace) -> Path:
    """Return the path of the model that is trained if --bpe-model gives none."""
    return flags.output.with_suffix(".bpe.model")


def _name_and_hash(path: Path) -> dict[str, str]:
    """Return an input file as the provenance names it."""
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _from_figures(flags: argparse.Namespace) -> Generated:
    """Draw a shape file from the published figures of LibriSpeech (shapes.draw)."""
    seed = shapes.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_name_and_hash(shapes.FIGURES)]},
        "options": {"seed": seed},
        "versions": shapes.versions("torch"),
    }
    rows, features = shapes.draw(seed)
    return Generated(rows, features, provenance, [])


def from_manifest(flags: argparse.Namespace, outputs: Sequence[Path]) -> Generated:
    """Read the manifest that the flags of the command `shapes` name, and count its frames and
    tokens.

    Trains a SentencePiece model if --bpe-model names none.  Warns of many unknown tokens.  Raises
    UserError, also if an input would be replaced.

    outputs: the shape files that will be written."""
    recordings = _recordings(flags)
    inputs = [path for path in (flags.manifest, recordings, flags.features) if path]
    model = None  # is trained below, as one more output, unless it is an input
    if flags.bpe_model:
        model_file = flags.bpe_model
        model = load_model(model_file)
        _check_inputs_stay(flags, [*inputs, model_file], outputs)
    else:
        model_file = _trained_model(flags)
        _check_inputs_stay(flags, inputs, [*outputs, model_file])
    files = [_name_and_hash(path) for path in inputs]
    counts: Counter = Counter()  # filled by the reader and by `_rows`
    speeds = tuple(flags.speed_perturbation)
    reader = manifests.Reader(flags.manifest, flags.frame_shift, speeds, flags.perturb_again)
    entries = itertools.islice(reader.entries(recordings, flags.features), flags.limit)
    utterances = [reader.utterance(number, line, counts) for number, line in entries]
    trained = []
    if model is None:
        texts = [utterance.text for utterance in utterances if utterance.text]
        model = train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        trained.append((model_file, model))
    processor = _processor(model)
    rows = _rows(utterances, processor, flags, counts)
    _check_counts(flags.manifest, model_file, counts)
    options = ["subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit"]
    options += [
        name for name in ("min_duration", "max_duration", "perturb_again") if getattr(flags, name)
    ]
    provenance = {
        "source": {"kind": "manifest", "files": files},
        "bpe_model": {
            "name": model_file.name,
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": processor.vocab_size(),
            "trained_here": flags.bpe_model_type if trained else None,
        },
        "options": {name: getattr(flags, name) for name in options},
        "counts": dict(sorted(counts.items())),
        "versions": shapes.versions("torch", "lhotse", "sentencepiece"),
    }
    # The columns of `rows` are T, U and feature frames.
    return Generated(rows[:, :2], rows[:, [2, 1]], provenance, trained)


def _recordings(flags: argparse.Namespace) -> Path | None:
    """Return the manifest of recordings: that of --recordings, or else one beside the supervisions.

    Beside x_supervisions.jsonl.gz it is x_recordings.jsonl.gz.  With --features, which needs no
    recordings, no such file is looked for.  None if there is no manifest."""
    if flags.recordings or flags.features:
        return flags.recordings
    sibling = flags.manifest.with_name(flags.manifest.name.replace("supervisions", "recordings"))
    return sibling if sibling != flags.manifest and sibling.is_file() else None


def _check_inputs_stay(
    flags: argparse.Namespace, inputs: Sequence[Path], outputs: Sequence[Path]
) -> None:
    """Raise UserError if an output is the same file as an input."""
    for path, output in itertools.product(inputs, outputs):
        if path.exists() and output.exists() and output.samefile(path):
            raise UserError(
                f"--output {flags.output}: the input {output} would be replaced; name another file"
            )


def _check_counts(manifest: Path, model_file: Path, counts: Counter) -> None:
    """Warn of many unknown tokens; raise UserError if no row is left.

    counts: what `_rows` and manifests.Reader counted."""
    unknown = counts["unknown_tokens"] / max(counts["tokens"], 1)
    if unknown >= MOST_UNKNOWN:
        line = plain(
            f"{unknown:.0%} of the tokens of {manifest} are <unk> to {model_file}: does the model have "
            "the letter case and the letters of the texts? U is not that of a training"
        )
        print(f"warning: {line}", file=sys.stderr)
    if not counts["rows"]:
        empty = counts["without_supervision"] + counts["with_empty_text"]
        short = counts["rows_left_out_as_too_short"]
        raise UserError(
            f"{manifest}: no utterance is left: of {counts['utterances_read']} read, {empty} have no text, "
            f"{short} rows are too short, others are not between --min-duration and --max-duration"
        )


def _rows(
    utterances: Sequence[Utterance],
    processor: Any,
    flags: argparse.Namespace,
    counts: Counter,
) -> np.ndarray:
    """Return the rows of utterances: int32 (rows, 3), columns T, U and feature frames.

    All rows of one speed come before those of the next.

    processor: the SentencePieceProcessor that makes tokens; counts: gets the numbers of tokens (at
    one speed), of rows, and of utterances and rows that are left out."""
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if flags.keep_empty else "left_out_without_text"] += empty
    if not flags.keep_empty:
        utterances = [utterance for utterance in utterances if utterance.text]
    texts = [utterance.text for utterance in utterances]
    tokens = processor.encode(texts, out_type=int, num_threads=1)
    U = np.array(list(map(len, tokens)), dtype=np.int64)
    counts["tokens"] = int(U.sum())
    counts["unknown_tokens"] = sum(pieces.count(processor.unk_id()) for pieces in tokens)
    tables = []
    for index, speed in enumerate(flags.speed_perturbation):
        frames = np.array([utterance.frames[index] for utterance in utterances], dtype=np.int64)
        seconds = np.array([utterance.seconds for utterance in utterances]) / speed
        T = shapes.subsampled(frames, flags.subsampling_factor)
        # The count of the rows that fail a condition -> whether each row meets the condition. A row
        # is counted once, for the first condition that it fails.
        fits = {"rows_left_out_as_too_short": T >= 1}
        if flags.min_duration is not None:
            fits["rows_below_min_duration"] = seconds >= flags.min_duration - ROUNDING
        if flags.max_duration is not None:
            fits["rows_above_max_duration"] = seconds <= flags.max_duration + ROUNDING
        kept = np.ones(len(T), dtype=bool)
        for key, mask in fits.items():
            counts[key] += int((kept & ~mask).sum())
            kept &= mask
        tables.append(np.stack([T, U, frames], axis=1)[kept])
    rows = np.concatenate(tables)
    counts["rows"] += len(rows)
    return rows.astype(np.int32)


#: Level of sentencepiece's log that has only fatal errors.
_FATAL = 3


def load_model(path: Path) -> bytes:
    """Return the content of a SentencePiece model's file.  Raises UserError if the file cannot be
    read, or is not a SentencePiece model."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UserError(
            f"--bpe-model {path}: {error.strerror or error}; name a SentencePiece model"
        ) from error
    try:
        if not content:  # sentencepiece reads this as a model without pieces
            raise RuntimeError("empty")
        _processor(content)
    except RuntimeError as error:
        raise UserError(
            f"--bpe-model {path}: not a SentencePiece model; name one, or train one with --bpe-vocab-size"
        ) from error
    return content


def train(texts: Sequence[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Train a SentencePiece model as icefall does, and return the content of its file.

    Its first ids are 0 <blk>, 1 <sos/eos> and 2 <unk>.  The same texts give the same model.  Raises
    UserError if `vocab_size` is larger than the number of different pieces in the texts, or too
    small for all their letters.

    texts: the text of each utterance; model_type: "bpe" or "unigram"."""
    import sentencepiece

    sentencepiece.set_min_log_level(_FATAL)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
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
            minloglevel=_FATAL,
        )
    except RuntimeError as error:
        problem = " ".join(str(error).split())  # it tells the largest or smallest possible size
        raise UserError(
            f"--bpe-vocab-size {vocab_size}: no model of {len(texts)} utterances ({problem})"
        ) from error
    return model.getvalue()


def _processor(model: bytes) -> Any:
    """Return the SentencePieceProcessor of a model.  Raises RuntimeError for bytes that are no
    model."""
    import sentencepiece

    sentencepiece.set_min_log_level(_FATAL)
    return sentencepiece.SentencePieceProcessor(model_proto=model)
