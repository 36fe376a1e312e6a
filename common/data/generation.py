"""Makes a shape file of what the flags of the command shapes name: a source, its rows, their
provenance, the files.

The provenance names files without their folders, and no time, so that the same input and versions
give the same files.
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
from typing import Any

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
#: Share of the tokens from which unknown ones are warned of: a model that fits its texts has almost
#: none.
MOST_UNKNOWN = 0.01
#: Seconds by which a duration may miss its bound: durations are of whole samples, and speeds divide
#: them.
ROUNDING = 1e-4
#: Return value of _from_figures and from_manifest: T and U, int32 (rows, 2); feature frames and U;
#: the provenance; (path, content) of files that are written beside the shape file.
Generated = tuple[np.ndarray, np.ndarray, shapes.Provenance, list[tuple[Path, bytes]]]


def generate(flags: argparse.Namespace) -> list[str]:
    """Write the shape file that the flags ask for, or nothing where it raises UserError; return
    lines to show."""
    outputs = [flags.output]
    if flags.write_features:
        outputs.append(flags.output.with_suffix(".features.pt"))
    for path in outputs:
        shapes.check_output(path)
    for path in outputs[1:]:
        _check_own(flags.output, path, shapes.entry(path, "shape_file"))
    if flags.bpe_vocab_size:
        _check_own(flags.output, _trained_model(flags), shapes.entry(flags.output, "bpe_model"))
    generated = _from_figures(flags) if flags.from_figures else from_manifest(flags, outputs)
    rows, features, provenance, beside = generated
    provenance = {"schema": SCHEMA, **provenance}
    shapes.save(flags.output, rows, provenance, *beside)
    lines = [
        *(
            f"{name.replace('_', ' ')}: {count:,}"
            for name, count in provenance.get("counts", {}).items()
        ),
        *(f"wrote {path}" for path, _ in beside),
        f"wrote {flags.output}: {len(rows):,} utterances",
    ]
    for path in outputs[1:]:
        options = {**provenance["options"], "subsampling_factor": 1}
        shapes.save(path, features, {**provenance, "options": options})
        frames = features[:, 0]
        lines.append(f"wrote {path}: feature frames {frames.min()} to {frames.max()}")
    for name, column in zip("TU", rows.T):
        low, middle, high = np.percentile(column, (5, 50, 95))
        spread = f"median {middle:.0f}, 5% to 95%: {low:.0f} to {high:.0f}"
        lines.append(f"{name}: {column.min()} to {column.max()}, {spread}")
    in_file = f"{_padding(rows)} of the cells in file order"
    by_length = _padding(rows[np.argsort(rows[:, 0], kind="stable")])
    lines.append(f"padding of batches of {BATCH_SIZE}: {in_file}, {by_length} sorted by length")
    return [*lines, f"next: {command('run')} --shape-file {shlex.quote(str(flags.output))}"]


def _padding(rows: np.ndarray) -> str:
    """Return the share of padding in the cells of batches of BATCH_SIZE rows: "34%"."""
    useful, padded = batching.fixed_size(rows, BATCH_SIZE).all_cells()
    return f"{1 - useful.sum() / padded.sum():.0%}"


def _check_own(output: Path, beside: Path, provenance: shapes.Provenance) -> None:
    """Raise UserError for a file beside the output that is there and that its provenance does not
    name."""
    if not os.path.lexists(beside):
        return
    if not beside.is_file() or provenance.get("sha256") != shapes.sha256(beside):
        raise UserError(
            f"--output {output}: {beside} would be replaced, which no earlier run made; name another file"
        )


def _trained_model(flags: argparse.Namespace) -> Path:
    """Return the file of the model that is trained where none is given."""
    return flags.output.with_suffix(".bpe.model")


def _name_and_hash(path: Path) -> dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _from_figures(flags: argparse.Namespace) -> Generated:
    seed = shapes.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_name_and_hash(shapes.FIGURES)]},
        "options": {"seed": seed},
        "versions": shapes.versions("torch"),
    }
    return (*shapes.draw(seed), provenance, [])


def from_manifest(flags: argparse.Namespace, outputs: Sequence[Path]) -> Generated:
    """Return what the flags of the command shapes say of a manifest.  outputs: files that no input
    may be.  Raises UserError."""
    model = load_model(flags.bpe_model) if flags.bpe_model else None
    model_file = flags.bpe_model or _trained_model(flags)
    recordings = flags.recordings
    sibling = flags.manifest.with_name(flags.manifest.name.replace("supervisions", "recordings"))
    if not (recordings or flags.features) and sibling != flags.manifest and sibling.is_file():
        recordings = sibling
    inputs = [path for path in (flags.manifest, recordings, flags.features) if path]
    if model is None:
        _check_inputs_stay(flags, inputs, [*outputs, model_file])
    else:
        _check_inputs_stay(flags, [*inputs, model_file], outputs)
    files = [_name_and_hash(path) for path in inputs]
    counts: Counter = Counter()
    speeds = tuple(flags.speed_perturbation)
    reader = manifests.Reader(flags.manifest, flags.frame_shift, speeds, flags.perturb_again)
    entries = itertools.islice(reader.entries(recordings, flags.features), flags.limit)
    utterances = [reader.utterance(number, line, counts) for number, line in entries]
    beside = []
    if model is None:
        texts = [utterance.text for utterance in utterances if utterance.text]
        model = train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        beside.append((model_file, model))
    processor = _processor(model)
    rows = table(utterances, processor, flags, counts)
    unknown = counts["unknown_tokens"] / max(counts["tokens"], 1)
    if unknown >= MOST_UNKNOWN:
        line = plain(
            f"{unknown:.0%} of the tokens of {flags.manifest} are <unk> to {model_file}: does the model have "
            "the letter case and the letters of the texts? U is not that of a training"
        )
        print(f"warning: {line}", file=sys.stderr)
    if not len(rows):
        empty = counts["without_supervision"] + counts["with_empty_text"]
        short = counts["rows_left_out_as_too_short"]
        raise UserError(
            f"{flags.manifest}: no utterance is left: of {counts['utterances_read']} read, {empty} have no text, "
            f"{short} rows are too short, others are not between --min-duration and --max-duration"
        )
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
            "trained_here": flags.bpe_model_type if beside else None,
        },
        "options": {name: getattr(flags, name) for name in options},
        "counts": dict(sorted(counts.items())),
        "versions": shapes.versions("torch", "lhotse", "sentencepiece"),
    }
    return rows[:, :2], rows[:, [2, 1]], provenance, beside


def _check_inputs_stay(
    flags: argparse.Namespace, inputs: Sequence[Path], outputs: Sequence[Path]
) -> None:
    """Raise UserError where an output is one of the inputs."""
    for path, output in itertools.product(
        filter(Path.exists, inputs), filter(Path.exists, outputs)
    ):
        if output.samefile(path):
            raise UserError(
                f"--output {flags.output}: the input {output} would be replaced; name another file"
            )


def table(
    utterances: Sequence[Utterance],
    processor: Any,
    flags: argparse.Namespace,
    counts: Counter,
) -> np.ndarray:
    """Return int32 (rows, 3), columns T, U and feature frames, one speed after the other; count
    what is left out."""
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


_LOG_NOTHING_BELOW_FATAL = 3


def load_model(path: Path) -> bytes:
    """Return the content of a SentencePiece model's file."""
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
    """Train a SentencePiece model of `texts`, one utterance each; ids: 0 <blk>, 1 <sos/eos>, 2
    <unk>.  The same texts give the same model.  Raises UserError where they cannot give so many
    tokens."""
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
        raise UserError(
            f"--bpe-vocab-size {vocab_size}: no model of {len(texts)} utterances ({problem})"
        ) from error
    return model.getvalue()


def _processor(model: bytes) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    return sentencepiece.SentencePieceProcessor(model_proto=model)
