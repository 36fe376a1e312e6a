"""Utterances directly from a corpus on disk, by lhotse's own recipes: they read audio headers and make no features.

No command in a corpus is run.  lhotse would run some: a Kaldi wav.scp can hold shell commands, and lhotse reads .sph
and .opus files through a shell, by their names.  Such files are refused, unless reco2dur makes it unnecessary to open
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator, List, Sequence

from common.core.errors import UserError
from common.core.files import open_file
from common.core.paths import not_a_folder
from common.data.shapes import sha256
from common.data.sources.manifest_files import one_line
from common.data.sources.manifests import Timing, Utterance, of_supervisions

KALDI_FILES = ("wav.scp", "segments", "text", "utt2spk", "reco2dur")
READ_THROUGH_A_SHELL = (".sph", ".opus")


def librispeech(corpus: Path, parts: Sequence[str], timing: Timing, counts: Counter) -> Iterator[Utterance]:
    """Yield the utterances of `parts` of LibriSpeech, sorted by id within a part; lhotse's order is that of the file
    system. corpus: the folder that holds the parts, e.g. LibriSpeech with train-clean-100."""
    _check_parts(corpus, parts)
    from lhotse.recipes import prepare_librispeech

    with _lhotse(f"--corpus-dir {corpus}", counts):
        threads = min(8, os.cpu_count() or 1)  # they wait for the disk: one header per utterance
        prepared = prepare_librispeech(corpus, dataset_parts=list(parts), num_jobs=threads)
    for part in parts:
        supervisions = sorted(prepared[part]["supervisions"], key=lambda supervision: supervision.id)
        yield from of_supervisions(corpus / part, supervisions, prepared[part]["recordings"], timing, counts)


def librispeech_hash(corpus: Path, parts: Sequence[str]) -> str:
    """Return a hash of the names and contents of all transcripts of `parts`."""
    _check_parts(corpus, parts)
    digest = hashlib.sha256()
    for path in sorted(path for part in parts for path in (corpus / part).rglob("*.trans.txt")):
        digest.update(f"{path.relative_to(corpus).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()


def kaldi(folder: Path, sampling_rate: int, timing: Timing, counts: Counter) -> Iterator[Utterance]:
    """Yield the utterances of a Kaldi data folder: of ``segments``, else (with ``utt2spk``) one per recording, in
    lhotse's order. Durations are those of ``reco2dur`` if it exists, else of the audio headers. ``feats.scp`` is not
    opened."""
    _check_kaldi(folder)
    from lhotse.kaldi import load_kaldi_data_dir

    with _lhotse(f"--kaldi-dir {folder}", counts):
        # without a frame shift lhotse leaves feats.scp alone
        recordings, supervisions, _ = load_kaldi_data_dir(folder, sampling_rate=sampling_rate, frame_shift=None)
    if supervisions is None:
        raise UserError(f"--kaldi-dir {folder}: neither segments nor utt2spk, so no utterances; add one of them")
    yield from of_supervisions(folder, supervisions, recordings, timing, counts)


def kaldi_files(folder: Path) -> List[Path]:
    """Return the files of a Kaldi data folder on which the shapes depend."""
    return [folder / name for name in KALDI_FILES if (folder / name).is_file()]


def _check_parts(corpus: Path, parts: Sequence[str]) -> None:
    problem = not_a_folder(corpus)
    if problem:
        raise UserError(f"--corpus-dir {corpus}: {problem}; name the one that holds train-clean-100 and the like")
    for part in parts:
        if not os.path.isdir(corpus / part):
            folders = ", ".join(sorted(path.name for path in corpus.iterdir() if path.is_dir())) or "none"
            raise UserError(f"--part {part}: no such folder in {corpus}; folders there: {folders}")


def _check_kaldi(folder: Path) -> None:
    """Raise UserError for a folder without wav.scp, and for one where lhotse would run a command."""
    try:
        with open_file(folder / "wav.scp") as stream:
            lines = stream.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--kaldi-dir {folder}: no wav.scp that can be read there ({one_line(error)})") from error
    if (folder / "reco2dur").is_file():
        return
    for number, line in enumerate(lines, start=1):
        source = line.strip().partition(" ")[2].strip()
        if source.endswith("|") or Path(source).suffix.lower() in READ_THROUGH_A_SHELL:
            raise UserError(
                f"{folder / 'wav.scp'}, line {number}: only a shell could read this recording, and none is run; "
                "add a reco2dur (Kaldi's utils/data/get_reco2dur.sh makes it)"
            )
        if not Path(source).is_file():
            raise UserError(f"{folder / 'wav.scp'}, line {number}: no such file: {source or 'nothing named'}")


@contextlib.contextmanager
def _lhotse(source: str, counts: Counter) -> Iterator[None]:
    """Count lhotse's warnings instead of showing them, and turn its errors into one line that starts with `source`.
    Its progress bars are shown only on a terminal."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [_Count(counts)]
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # recipes check little, so a wrong corpus can raise anything
        raise UserError(f"{source}: lhotse cannot read it ({one_line(error)})") from error
    finally:
        root.handlers = handlers


class _Count(logging.Handler):
    """Counts warnings of lhotse, e.g. of audio files that are not there."""

    def __init__(self, counts: Counter):
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        self._counts["warnings_of_lhotse"] += 1
