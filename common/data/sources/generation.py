"""Makes a shape file of what the flags of generate_shape_info.py name: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data import batching, shapes
from common.data.provenance import Provenance, path_of, versions
from common.data.sources import bpe, corpora, manifests, published
from common.data.sources.shards import cut, in_order
from common.data.sources.tabulate import Kept, Work, read_shard, why_none

SCHEMA = 1
#: On which the rows depend.
PACKAGES = ("torch", "lhotse", "sentencepiece")
#: Utterances in the batches whose padding is printed, and in the sample from which a longer file is described.
BATCH_SIZE, SAMPLE = 30, 1_000_000


@dataclass
class Options:
    """Holds the flags of generate_shape_info.py: one of manifest, corpus_dir, kaldi_dir and from_figures, and without
    figures one of bpe_model and bpe_vocab_size.

    frame_shift, min_duration, max_duration: seconds; sampling_rate: Hz; limit: utterances; write_features: (feature
    frames, U) too, beside the output; jobs: processes.
    """

    output: Path
    manifest: Optional[Path] = None
    corpus_dir: Optional[Path] = None
    kaldi_dir: Optional[Path] = None
    from_figures: bool = False
    recordings: Optional[Path] = None
    features: Optional[Path] = None
    part: Sequence[str] = ()
    sampling_rate: int = 16000
    seed: int = published.SEED
    bpe_model: Optional[Path] = None
    bpe_vocab_size: int = 0
    bpe_model_type: str = "bpe"
    subsampling_factor: int = 4
    speed_perturbation: Sequence[float] = (1.0,)
    frame_shift: float = 0.01
    keep_empty: bool = False
    limit: Optional[int] = None
    write_features: bool = False
    min_duration: Optional[float] = None
    max_duration: Optional[float] = None
    perturb_again: bool = False
    jobs: int = 1

    @property
    def shape_files(self) -> List[Path]:
        return [self.output, *([self.output.with_suffix(".features.pt")] if self.write_features else [])]


@dataclass
class Source:
    """Names where utterances come from.

    files: those that are read, for their hashes; open: returns a reader and (number, entry) of its entries, which are
    utterances where there is no reader; described: more provenance.
    """

    kind: str
    files: List[Path]
    open: Callable[[], Tuple[Optional[manifests.Reader], Iterator[Tuple[int, Any]]]]
    described: Provenance = field(default_factory=dict)


@dataclass
class Generated:
    """A generated shape file.

    Args:
        rows: T and U, int32 (rows, 2).
        features: feature frames and U, int32 (rows, 2), if they are to be written.
        beside: (path, content) of further files.
    """

    rows: np.ndarray
    features: Optional[np.ndarray]
    provenance: Provenance
    beside: List[Tuple[Path, bytes]] = field(default_factory=list)


def generate(options: Options) -> List[str]:
    """Write the shape file that `options` ask for; returns lines to show.  Where it raises UserError nothing is
    written."""
    for path in options.shape_files:
        shapes.check_output(path)
    return _write(options, _from_figures(options) if options.from_figures else _from_corpus(options))


def _write(options: Options, generated: Generated) -> List[str]:
    """Write the files; returns lines to show."""
    provenance, rows = generated.provenance, generated.rows
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(options.output, rows, {"schema": SCHEMA, **provenance}, *generated.beside)
    (t_min, u_min), (t_max, u_max) = rows.min(axis=0), rows.max(axis=0)
    lines = [
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in generated.beside),
        f"wrote {options.output}: {len(rows):,} utterances, T {t_min} to {t_max}, U {u_min} to {u_max}",
    ]
    if generated.features is not None:
        path, features = options.shape_files[1], generated.features
        of_features = {**provenance, "options": {**provenance["options"], "subsampling_factor": 1}}
        shapes.save(path, features, {"schema": SCHEMA, **of_features})
        lines.append(f"wrote {path}: feature frames {features[:, 0].min()} to {features[:, 0].max()}")
    return [*lines, *summary(rows, options.output)]


def summary(rows: np.ndarray, output: Path) -> List[str]:
    """Return lines that describe the rows (utterances, 2), and the next command to type."""
    lines, every = [], len(rows) // SAMPLE
    if every > 1:  # in memory that does not depend on their number
        rows = rows[: len(rows) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE, 2)[::every].reshape(-1, 2)
        lines.append(f"of one in {every} batches of {BATCH_SIZE}:")
    for column, name in enumerate("TU"):
        low, middle, high = (f"{value:.0f}" for value in np.percentile(rows[:, column], (5, 50, 95)))
        lines.append(f"{name}: median {middle}, 5% to 95%: {low} to {high}, largest {rows[:, column].max()}")
    useful, padded = batching.fixed_size(rows, BATCH_SIZE).all_cells()
    by_length = batching.fixed_size(rows[np.argsort(rows[:, 0], kind="stable")], BATCH_SIZE).all_cells()
    in_file_order, sorted_ = (f"{1 - cells.sum() / total.sum():.0%}" for cells, total in ((useful, padded), by_length))
    padding = f"{in_file_order} of the cells in file order, {sorted_} sorted by length"
    lines.append(f"padding of batches of {BATCH_SIZE}: {padding}")
    return [*lines, f"next: ./benchmark_all.py --shape-file {shlex.quote(str(output))}"]


def _from_figures(options: Options) -> Generated:
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_described(published.FIGURES)]},
        "options": {"seed": options.seed},
        "versions": versions("torch"),
    }
    figures = published.load_figures()
    features = published.draw_features(figures, options.seed) if options.write_features else None
    return Generated(published.draw(figures, options.seed), features, provenance)


def _from_corpus(options: Options) -> Generated:
    model = bpe.load(options.bpe_model) if options.bpe_model else None
    trained_at = path_of(options.output).with_suffix(".bpe.model")
    counts: Counter = Counter()
    source = _open(options, counts)
    shape_files = options.shape_files
    outputs = [*shape_files, *map(path_of, shape_files), *([] if model else [trained_at])]
    _keep_inputs(outputs, [*source.files, *([options.bpe_model] if options.bpe_model else [])])
    files = [_described(path) for path in source.files]

    reader, entries = source.open()
    entries = islice(entries, options.limit)
    met = np.zeros(reader.recordings.rows if reader else 0, dtype=bool)
    reads, beside = reader, []  # reads: the reader of `entries`
    if model is None:
        shards = list(in_order(partial(read_shard, reader), cut(entries), options.jobs))
        for shard in shards:
            counts.update(shard.counts)
            met[shard.used] = True
        utterances = [utterance for shard in shards for utterance in shard.utterances]  # to train, and to count
        texts = [utterance.text for utterance in utterances if utterance.text]
        model = bpe.train(texts, options.bpe_vocab_size, options.bpe_model_type)
        beside.append((trained_at, model))
        reads, entries = None, enumerate(utterances, start=1)
    kept = Kept(options.subsampling_factor, options.keep_empty, options.min_duration, options.max_duration)
    work = Work(reads, model, kept, tuple(options.speed_perturbation))
    columns = 3 if options.write_features else 2
    rows_at: List[List[np.ndarray]] = [[] for _ in options.speed_perturbation]
    for part in in_order(work, cut(entries), options.jobs):
        counts.update(part.counts)
        met[part.used] = True
        for rows_of_speed, rows in zip(rows_at, part.rows):
            rows_of_speed.append(rows[:, :columns].copy())
    if not counts["rows"]:
        raise UserError(why_none(counts))
    if reader and not reader.cuts and (options.limit is None or counts["utterances_read"] < options.limit):
        counts["recordings_without_supervision"] = len(reader.recordings) - int(met.sum())
    recorded = ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
    if_given = ("min_duration", "max_duration", "perturb_again")
    provenance = {
        "source": {"kind": source.kind, "files": files, **source.described},
        "bpe_model": {
            "name": (options.bpe_model or trained_at).name,
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": bpe.vocab_size(model),
            "trained_here": options.bpe_model_type if beside else None,
        },
        "options": {
            **{name: getattr(options, name) for name in recorded},
            **{name: value for name in if_given if (value := getattr(options, name))},
        },
        "counts": dict(sorted(counts.items())),
        "versions": versions(*PACKAGES),
    }
    table = np.concatenate([rows for rows_of_speed in rows_at for rows in rows_of_speed])
    features = table[:, [2, 1]] if options.write_features else None
    return Generated(table[:, :2], features, provenance, beside)


def _open(options: Options, counts: Counter) -> Source:
    """Return the source that `options` name.  Nothing of it is read yet except to check that it is one."""
    timing = manifests.Timing(options.frame_shift, tuple(options.speed_perturbation), options.perturb_again)
    if options.manifest:
        recordings = options.recordings or (None if options.features else manifests.beside(options.manifest))
        files = [path for path in (options.manifest, recordings, options.features) if path]
        opened = partial(manifests.opened, options.manifest, timing, recordings, options.features, options.jobs)
        return Source("manifest", files, opened)
    if options.corpus_dir:
        transcripts = corpora.librispeech_hash(options.corpus_dir, options.part)
        described = {"parts": list(options.part), "transcripts_sha256": transcripts}
        utterances = corpora.librispeech(options.corpus_dir, options.part, timing, counts)
        return Source("librispeech", [], lambda: (None, enumerate(utterances, start=1)), described)
    assert options.kaldi_dir is not None
    utterances = corpora.kaldi(options.kaldi_dir, options.sampling_rate, timing, counts)
    rate = {"sampling_rate": options.sampling_rate}
    files = corpora.kaldi_files(options.kaldi_dir)
    return Source("kaldi", files, lambda: (None, enumerate(utterances, start=1)), rate)


def _keep_inputs(outputs: List[Path], inputs: List[Path]) -> None:
    """Raise UserError where an output would replace an input, such as cuts.json by the provenance of cuts.pt."""
    for output in outputs:
        for path in inputs:
            if output.exists() and path.exists() and output.samefile(path):
                raise UserError(f"--output {outputs[0]}: the input {output} would be replaced; name another file")


def _described(path: Path) -> Dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}
