"""What generate_shape_info.py does after its flags are checked: a source, its rows, their provenance, the files.

The provenance names files without their folders, and no time except SOURCE_DATE_EPOCH, so that the same input and the
same versions give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from common.core.errors import UserError
from common.data import shapes
from common.data.sources import bpe, corpora, manifests, published
from common.data.sources.tabulate import table

SCHEMA = 1
KALDI_SAMPLING_RATE = 16000


@dataclass
class Source:
    """Where utterances come from.  files: that are read, for their hashes; also: more provenance of the source."""

    kind: str
    files: List[Path]
    utterances: Iterator[manifests.Utterance]
    also: Dict[str, Any] = field(default_factory=dict)


def generate(flags: argparse.Namespace) -> List[str]:
    """Write the shape file that `flags` ask for; returns lines to show.  Where it raises UserError nothing is
    written."""
    shapes.check_output(flags.output)
    rows, provenance, beside = (_from_figures if flags.from_figures else _from_corpus)(flags)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        provenance["created"] = datetime.fromtimestamp(int(epoch), timezone.utc).isoformat()
    shapes.save(flags.output, rows, {"schema": SCHEMA, **provenance}, *beside)
    (t_min, u_min), (t_max, u_max) = rows.min(axis=0), rows.max(axis=0)
    return [
        *(f"{name.replace('_', ' ')}: {count:,}" for name, count in provenance.get("counts", {}).items()),
        *(f"wrote {path}" for path, _ in beside),
        f"wrote {flags.output}: {len(rows):,} utterances, T {t_min} to {t_max}, U {u_min} to {u_max}",
    ]


def _from_figures(flags: argparse.Namespace) -> Tuple[np.ndarray, Dict[str, Any], List[Tuple[Path, bytes]]]:
    seed = published.SEED if flags.seed is None else flags.seed
    provenance = {
        "about": "a draw from the published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1, "
        "not the corpus",
        "source": {"kind": "figures", "files": [_described(published.FIGURES)]},
        "options": {"seed": seed},
        "versions": _versions("torch"),
    }
    return published.draw(published.load_figures(), seed), provenance, []


def _from_corpus(flags: argparse.Namespace) -> Tuple[np.ndarray, Dict[str, Any], List[Tuple[Path, bytes]]]:
    model = bpe.load(flags.bpe_model) if flags.bpe_model else None
    trained_at = shapes.provenance_path(flags.output).with_suffix(".bpe.model")
    counts: Counter = Counter()
    source = _open(flags, counts)
    outputs = [flags.output, shapes.provenance_path(flags.output), *([] if model else [trained_at])]
    _keep_inputs(outputs, [*source.files, *([flags.bpe_model] if model else [])])
    described = {"kind": source.kind, "files": [_described(path) for path in source.files], **source.also}

    utterances: Iterator[manifests.Utterance] = islice(source.utterances, flags.limit)
    beside = []
    if model is None:
        read = list(utterances)  # needed twice: to train, and to count
        texts = [utterance.text for utterance in read if utterance.text]
        model = bpe.train(texts, flags.bpe_vocab_size, flags.bpe_model_type)
        beside.append((trained_at, model))
        utterances = iter(read)
    rows = table(utterances, bpe.counter(model), flags.subsampling_factor, flags.keep_empty, counts)
    provenance = {
        "source": described,
        "bpe_model": {
            "name": (trained_at if beside else flags.bpe_model).name,
            "sha256": hashlib.sha256(model).hexdigest(),
            "vocab_size": bpe.vocab_size(model),
            "trained_here": flags.bpe_model_type if beside else None,
        },
        "options": {
            name: getattr(flags, name)
            for name in ("subsampling_factor", "speed_perturbation", "frame_shift", "keep_empty", "limit")
        },
        "counts": dict(sorted(counts.items())),
        "versions": _versions("torch", "lhotse", "sentencepiece"),
    }
    return rows, provenance, beside


def _open(flags: argparse.Namespace, counts: Counter) -> Source:
    """The source that `flags` name.  Nothing of it is read yet except to check that it is one."""
    timing = manifests.Timing(flags.frame_shift, tuple(flags.speed_perturbation))
    if flags.manifest:
        recordings = flags.recordings or (None if flags.features else manifests.beside(flags.manifest))
        utterances = manifests.utterances(flags.manifest, timing, counts, recordings, flags.features)
        return Source("manifest", [path for path in (flags.manifest, recordings, flags.features) if path], utterances)
    if flags.corpus_dir:
        also = {"parts": flags.part, "transcripts_sha256": corpora.librispeech_hash(flags.corpus_dir, flags.part)}
        return Source("librispeech", [], corpora.librispeech(flags.corpus_dir, flags.part, timing, counts), also)
    rate = flags.sampling_rate or KALDI_SAMPLING_RATE
    utterances = corpora.kaldi(flags.kaldi_dir, rate, timing, counts)
    return Source("kaldi", corpora.kaldi_files(flags.kaldi_dir), utterances, {"sampling_rate": rate})


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
