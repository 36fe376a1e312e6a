"""What generate_shape_info.py does after its flags are checked: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shlex
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data import batching, shapes
from common.data.provenance import path_of
from common.data.sources import bpe, corpora, manifests, published
from common.data.sources.tabulate import Kept, table

SCHEMA = 1
#: Utterances in the batches whose padding is told.
BATCH_SIZE = 30
#: Rows (T, U), the feature frames of each, provenance, and what is written beside them.
Generated = Tuple[np.ndarray, np.ndarray, Dict[str, Any], List[Tuple[Path, bytes]]]


@dataclass
class Options:
    """As the flags of generate_shape_info.py: one of manifest, corpus_dir, kaldi_dir and from_figures, and but for
    figures one of bpe_model and bpe_vocab_size.  frame_shift, min_duration, max_duration: seconds; sampling_rate: Hz;
    limit: utterances;
    write_features: (feature frames, U) too, beside the output."""

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

    @property
    def shape_files(self) -> List[Path]:
        return [self.output, *([self.output.with_suffix(".features.pt")] if self.write_features else [])]


@dataclass
class Source:
    """Where utterances come from.  files: that are read, for their hashes; also: more provenance of the source."""

    kind: str
    files: List[Path]
    utterances: Iterator[manifests.Utterance]
    also: Dict[str, Any] = field(default_factory=dict)


def generate(options: Options) -> List[str]:
    """Write the shape file that `options` ask for; returns lines to show.  Where it raises UserError nothing is
    written."""
    for path in options.shape_files:
        shapes.check_output(path)
    rows, frames, provenance, beside = (_from_figures if options.from_figures else _from_corpus)(options)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(options.output, rows, {"schema": SCHEMA, **provenance}, *beside)
    for path in options.shape_files[1:]:
        of_features = {**provenance, "options": {**provenance["options"], "subsampling_factor": 1}}
        shapes.save(path, np.stack([frames, rows[:, 1]], axis=1), {"schema": SCHEMA, **of_features})
    (t_min, u_min), (t_max, u_max) = rows.min(axis=0), rows.max(axis=0)
    return [
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in beside),
        f"wrote {options.output}: {len(rows):,} utterances, T {t_min} to {t_max}, U {u_min} to {u_max}",
        *(f"wrote {path}: feature frames {frames.min()} to {frames.max()}" for path in options.shape_files[1:]),
        *summary(rows, options.output),
    ]


def summary(rows: np.ndarray, output: Path) -> List[str]:
    """What the rows (utterances, 2) are like, and the next command to type."""
    lines = []
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
        "versions": _versions("torch"),
    }
    rows = published.draw(published.load_figures(), options.seed)
    return rows, shapes.feature_frames(rows[:, 0], Options.subsampling_factor), provenance, []


def _from_corpus(options: Options) -> Generated:
    model = bpe.load(options.bpe_model) if options.bpe_model else None
    trained_at = path_of(options.output).with_suffix(".bpe.model")
    counts: Counter = Counter()
    source = _open(options, counts)
    written = options.shape_files
    outputs = [*written, *map(path_of, written), *([] if model else [trained_at])]
    _keep_inputs(outputs, [*source.files, *([options.bpe_model] if options.bpe_model else [])])
    described = {"kind": source.kind, "files": [_described(path) for path in source.files], **source.also}

    utterances: Iterator[manifests.Utterance] = islice(source.utterances, options.limit)
    beside = []
    if model is None:
        read = list(utterances)  # needed twice: to train, and to count
        texts = [utterance.text for utterance in read if utterance.text]
        model = bpe.train(texts, options.bpe_vocab_size, options.bpe_model_type)
        beside.append((trained_at, model))
        utterances = iter(read)
    kept = Kept(options.subsampling_factor, options.keep_empty, options.min_duration, options.max_duration)
    rows, frames = table(utterances, bpe.counter(model), kept, counts, options.speed_perturbation)
    named = (options.bpe_model or trained_at).name
    about = {"name": named, "sha256": hashlib.sha256(model).hexdigest(), "vocab_size": bpe.vocab_size(model)}
    recorded = ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
    asked = ("min_duration", "max_duration", "perturb_again")  # which are recorded where they are given
    provenance = {
        "source": described,
        "bpe_model": {**about, "trained_here": options.bpe_model_type if beside else None},
        "options": {
            **{name: getattr(options, name) for name in recorded},
            **{name: value for name in asked if (value := getattr(options, name))},
        },
        "counts": dict(sorted(counts.items())),
        "versions": _versions("torch", "lhotse", "sentencepiece"),
    }
    return rows, frames, provenance, beside


def _open(options: Options, counts: Counter) -> Source:
    """The source that `options` name.  Nothing of it is read yet except to check that it is one."""
    timing = manifests.Timing(options.frame_shift, tuple(options.speed_perturbation), options.perturb_again)
    if options.manifest:
        recordings = options.recordings or (None if options.features else manifests.beside(options.manifest))
        utterances = manifests.utterances(options.manifest, timing, counts, recordings, options.features)
        files = [path for path in (options.manifest, recordings, options.features) if path]
        return Source("manifest", files, utterances)
    if options.corpus_dir:
        transcripts = corpora.librispeech_hash(options.corpus_dir, options.part)
        also = {"parts": list(options.part), "transcripts_sha256": transcripts}
        return Source("librispeech", [], corpora.librispeech(options.corpus_dir, options.part, timing, counts), also)
    assert options.kaldi_dir is not None
    utterances = corpora.kaldi(options.kaldi_dir, options.sampling_rate, timing, counts)
    rate = {"sampling_rate": options.sampling_rate}
    return Source("kaldi", corpora.kaldi_files(options.kaldi_dir), utterances, rate)


def _keep_inputs(outputs: List[Path], inputs: List[Path]) -> None:
    """Raise UserError where an output would replace an input, such as cuts.json by the provenance of cuts.pt."""
    for output in outputs:
        for path in inputs:
            if output.exists() and path.exists() and output.samefile(path):
                raise UserError(f"--output {outputs[0]}: the input {output} would be replaced; name another file")


def _described(path: Path) -> Dict[str, str]:
    return {"name": path.name, "sha256": shapes.sha256(path)}


def _versions(*packages: str) -> Dict[str, str]:
    """Without local parts: the same release built for another CUDA gives the same files."""
    return {package: importlib.import_module(package).__version__.split("+")[0] for package in packages}
