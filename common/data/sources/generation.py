"""What generate_shape_info.py does after its flags are checked: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data import batching, shapes
from common.data.provenance import path_of, versions
from common.data.sources import bpe, corpora, manifests, published
from common.data.sources.parts import Parted, Parts
from common.data.sources.shards import Shard, cut, in_order
from common.data.sources.tabulate import Kept, Work, read_shard, why_none
from common.data.sources.wire import PACKAGES

SCHEMA = 1
#: Has the work of shards done in another place than the processes of this machine.
Elsewhere = Callable[[Work, Iterator[Shard]], Parted]
#: Utterances in the batches whose padding is printed, and in the sample from which a longer file is described.
BATCH_SIZE, SAMPLE = 30, 1_000_000


@dataclass
class Options:
    """As the flags of generate_shape_info.py: one of manifest, corpus_dir, kaldi_dir and from_figures, and but for
    figures one of bpe_model and bpe_vocab_size.  frame_shift, min_duration, max_duration: seconds; sampling_rate: Hz;
    limit: utterances; write_features: (feature frames, U) too, beside the output; jobs: processes."""

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
    """Where utterances come from.  files: that are read, for their hashes; open: gives a reader, and (number, entry) of
    its entries; without a reader they are utterances; also: more provenance of the source."""

    kind: str
    files: List[Path]
    open: Callable[[], Tuple[Optional[manifests.Reader], Iterator[Tuple[int, Any]]]]
    also: Dict[str, Any] = field(default_factory=dict)


@dataclass
class Generated:
    """rows: gives (T, U); features: gives (feature frames, U); beside: (path, content) of more files; notes: to show
    first."""

    rows: Callable[[], np.ndarray]
    features: Callable[[], np.ndarray]
    provenance: Dict[str, Any]
    beside: List[Tuple[Path, bytes]] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)


def generate(options: Options, elsewhere: Optional[Elsewhere] = None) -> List[str]:
    """Write the shape file that `options` ask for; returns lines to show.  Where it raises UserError nothing is
    written.  elsewhere: where the shards are done, but to train a model; default: in processes of this machine."""
    for path in options.shape_files:
        shapes.check_output(path)
    with ExitStack() as stack:
        made = _from_figures(options) if options.from_figures else _from_corpus(options, stack, elsewhere)
        return _write(options, made)


def _write(options: Options, made: Generated) -> List[str]:
    provenance, rows = made.provenance, made.rows()
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(options.output, rows, {"schema": SCHEMA, **provenance}, *made.beside)
    (t_min, u_min), (t_max, u_max) = rows.min(axis=0), rows.max(axis=0)
    lines = [
        *made.notes,
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in made.beside),
        f"wrote {options.output}: {len(rows):,} utterances, T {t_min} to {t_max}, U {u_min} to {u_max}",
    ]
    printed = summary(rows, options.output)
    del rows  # the next are as many
    for path in options.shape_files[1:]:
        features = made.features()
        of_features = {**provenance, "options": {**provenance["options"], "subsampling_factor": 1}}
        shapes.save(path, features, {"schema": SCHEMA, **of_features})
        lines.append(f"wrote {path}: feature frames {features[:, 0].min()} to {features[:, 0].max()}")
    return [*lines, *printed]


def summary(rows: np.ndarray, output: Path) -> List[str]:
    """What the rows (utterances, 2) are like, and the next command to type."""
    lines, every = [], len(rows) // SAMPLE
    if every > 1:  # in memory that does not depend on their number
        rows = rows[: len(rows) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE, 2)[::every].reshape(-1, 2)
        lines.append(f"of one in {every} batches of {BATCH_SIZE}:")
    for column, name in enumerate("TU"):
        low, middle, high = (f"{value:.0f}" for value in np.percentile(rows[:, column], (5, 50, 95)))
        lines.append(f"{name}: median {middle}, 5% to 95%: {low} to {high}, largest {rows[:, column].max()}")
    useful, padded = batching.fixed_size(rows, BATCH_SIZE).all_cells()
    by_length = batching.fixed_size(rows[np.argsort(rows[:, 0], kind="stable")], BATCH_SIZE).all_cells()
    sizes = [f"{1 - of.sum() / total.sum():.0%}" for of, total in ((useful, padded), by_length)]
    padding = f"{sizes[0]} of the cells in file order, {sizes[1]} sorted by length"
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
    rows = partial(published.draw, figures, options.seed)
    return Generated(rows, partial(published.draw_features, figures, options.seed), provenance)


def _from_corpus(options: Options, stack: ExitStack, elsewhere: Optional[Elsewhere]) -> Generated:
    model = bpe.load(options.bpe_model) if options.bpe_model else None
    trained_at = path_of(options.output).with_suffix(".bpe.model")
    counts: Counter = Counter()
    source = _open(options, counts)
    written = options.shape_files
    outputs = [*written, *map(path_of, written), *([] if model else [trained_at])]
    _keep_inputs(outputs, [*source.files, *([options.bpe_model] if options.bpe_model else [])])
    described = {"kind": source.kind, "files": [_described(path) for path in source.files], **source.also}

    reader, entries = source.open()
    entries = islice(entries, options.limit)
    met = np.zeros(reader.recordings.rows if reader else 0, dtype=bool)
    reads, beside = reader, []  # reads: the reader of `entries`
    if model is None:
        found = list(in_order(partial(read_shard, reader), cut(entries), options.jobs))
        for one in found:  # which are needed twice: to train, and to count
            counts.update(one.counts)
            met[one.used] = True
        read = [utterance for one in found for utterance in one.utterances]
        texts = [utterance.text for utterance in read if utterance.text]
        model = bpe.train(texts, options.bpe_vocab_size, options.bpe_model_type)
        beside.append((trained_at, model))
        reads, entries = None, enumerate(read, start=1)
    named = (options.bpe_model or trained_at).name
    about = {"name": named, "sha256": hashlib.sha256(model).hexdigest(), "vocab_size": bpe.vocab_size(model)}
    recorded = ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
    asked = ("min_duration", "max_duration", "perturb_again")  # which are recorded where they are given
    provenance: Dict[str, Any] = {
        "source": described,
        "bpe_model": {**about, "trained_here": options.bpe_model_type if beside else None},
        "options": {
            **{name: getattr(options, name) for name in recorded},
            **{name: value for name in asked if (value := getattr(options, name))},
        },
        "counts": {},
        "versions": versions(*PACKAGES),
    }
    of_part = {**provenance, "source": described["files"][1:], "options": {**provenance["options"], "limit": None}}
    parts = stack.enter_context(Parts(options.output, json.dumps(of_part, sort_keys=True)))
    kept = Kept(options.subsampling_factor, options.keep_empty, options.min_duration, options.max_duration)
    work = Work(reads, model, kept, tuple(options.speed_perturbation))
    parts.make(cut(entries), partial(elsewhere or partial(_here, options.jobs), work))
    for part in parts:
        counts.update(part.counts)
        met[part.used] = True
    if not counts["rows"]:
        raise UserError(why_none(counts))
    if reader and not reader.cuts and (options.limit is None or counts["utterances_read"] < options.limit):
        counts["recordings_without_supervision"] = len(reader.recordings) - int(met.sum())
    provenance["counts"] = dict(sorted(counts.items()))
    notes = [f"taken from {parts.folder}: {parts.taken:,} utterances"] if parts.taken else []
    return Generated(lambda: parts.columns(0, 1), lambda: parts.columns(2, 1), provenance, beside, notes)


def _here(jobs: int, work: Work, shards: Iterator[Shard]) -> Parted:
    yield from enumerate(in_order(work, shards, jobs))


def _open(options: Options, counts: Counter) -> Source:
    """The source that `options` name.  Nothing of it is read yet except to check that it is one."""
    timing = manifests.Timing(options.frame_shift, tuple(options.speed_perturbation), options.perturb_again)
    if options.manifest:
        recordings = options.recordings or (None if options.features else manifests.beside(options.manifest))
        more = (recordings, options.features)
        files = [path for path in (options.manifest, *more) if path]
        return Source("manifest", files, partial(manifests.opened, options.manifest, timing, *more, options.jobs))
    if options.corpus_dir:
        transcripts = corpora.librispeech_hash(options.corpus_dir, options.part)
        also = {"parts": list(options.part), "transcripts_sha256": transcripts}
        utterances = corpora.librispeech(options.corpus_dir, options.part, timing, counts)
        return Source("librispeech", [], lambda: (None, enumerate(utterances, start=1)), also)
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
