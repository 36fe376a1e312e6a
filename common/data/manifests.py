"""Utterances of lhotse manifests: their text and how many feature frames they have.  No audio or
feature is opened.

A cut is one utterance, with the texts of its supervisions in time order.  In a supervisions
manifest each supervision is one, from its start to its end or to that of its recording, as lhotse's
trim_to_supervisions cuts them.

Not lhotse's own loaders: they try a path as a command or a URL first, give a .json manifest any
kind that parses, and raise any error for a wrong file.  Here a path is a file, an error names the
entry, and a recording that is a shell command is not run.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import open_file
from rnnt_bench.data.shapes import LARGEST

# seconds by which lhotse lets the ends of supervisions, features and recordings differ
TOLERANCE = 0.001
WANTED = "a lhotse manifest, .json or .jsonl, gzipped or not"
#: Characters of one entry, or of all of a JSON array, which is read whole: a small gzip file can
#: hold any number.
LONGEST = 2**29
#: The speed of what is perturbed ends lhotse's ids and begins Kaldi's.  "_sp12" may be a speaker.
PERTURBED = re.compile(r"_sp(\d+\.\d+)$|^sp(\d+\.\d+)-")


@dataclass(frozen=True)
class Utterance:
    """An utterance: all its text, feature frames at each speed asked for, seconds of audio before
    perturbation."""

    text: str
    frames: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Span:
    """A span of a recording in seconds; num_frames and frame_shift (s) if it has features; speed:
    at which the recording is perturbed already, "" for none."""

    start: float
    seconds: float
    sampling_rate: float
    num_frames: int | None = None
    frame_shift: float | None = None
    speed: str = ""


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, JSON) of each entry of a manifest, whose content decides the format,
    not its name."""
    try:
        with open_file(path) as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = gzip.GzipFile(fileobj=raw) if compressed else raw
            text = io.TextIOWrapper(content, encoding="utf-8")
            number = 0
            while line := text.readline(LONGEST):
                number += 1
                if line.startswith("["):
                    entries = json.loads(line + text.read(LONGEST))
                    yield from enumerate(map(json.dumps, entries), 1)
                elif line.strip():
                    yield number, line
    except OSError as error:  # a damaged gzip header is one too
        raise UserError(f"cannot read {path}: {error.strerror or error}; name {WANTED}") from error
    except (EOFError, ValueError, RecursionError, MemoryError, zlib.error) as error:
        raise UserError(f"{path}: damaged, or not {WANTED} ({type(error).__name__})") from error


@contextmanager
def _naming(path: Path, number: int, entry: Any = None) -> Iterator[None]:
    """Make a UserError, which names the entry, of any error: lhotse checks nothing."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        name = getattr(entry, "id", "?")
        raise UserError(f"{path}: entry {number} ({name}): {problem}") from error


def _entry(path: Path, number: int, line: str, *kinds: str) -> Any:
    """Return the lhotse object of a line of `path`; UserError where it is none of `kinds`."""
    from lhotse.serialization import deserialize_item

    with _naming(path, number):
        item = deserialize_item(json.loads(line))
    kind = type(item).__name__
    if kinds and kind not in kinds:
        raise UserError(f"{path}: entry {number} is a {kind}, not a {kinds[0]}; name {WANTED}")
    return item


#: Classes of lhotse whose objects are an utterance each.
CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut", "DataCut")
SUPERVISION = "SupervisionSegment"
Spans = dict[Any, list[Span]]


@dataclass
class Reader:
    """Makes utterances of the entries of a manifest, all cuts or all supervisions.

    Args:
        path: of the manifest.
        frame_shift: seconds between frames, where there are no features.
        speeds: factors of speed perturbation; 1.0 is none.
        perturb_again: whether what is perturbed already is perturbed again.
        cuts, recordings, features: what `entries` finds: cuts or supervisions, for these the spans
          of each recording.
    """

    path: Path
    frame_shift: float
    speeds: tuple[float, ...]
    perturb_again: bool
    cuts: bool = True
    recordings: Spans = field(default_factory=dict)
    features: Spans = field(default_factory=dict)

    def entries(self, recordings: Path | None, features: Path | None) -> Iterator[tuple[int, str]]:
        """Return (number, JSON) of all entries.  recordings, features: manifests for supervisions,
        which need one."""
        entries = lines(self.path)
        first = next(entries, None)
        if first is None:
            raise UserError(f"{self.path}: an empty manifest; name one of cuts or supervisions")
        kind = type(_entry(self.path, *first)).__name__
        self.cuts = kind in CUTS
        if self.cuts and (recordings or features):
            raise UserError(
                f"{self.path}: cuts bring their recordings and features; leave out --recordings and --features"
            )
        if kind == SUPERVISION and not (recordings or features):
            raise UserError(
                f"{self.path}: supervisions need their recordings; name that manifest with --recordings"
            )
        if kind not in (*CUTS, SUPERVISION):
            raise UserError(
                f"{self.path}: a manifest of {kind} entries; name one of cuts or supervisions "
                "(recordings go with --recordings, features with --features)"
            )
        if recordings:
            self.recordings = _spans(recordings, "Recording")
        if features:
            self.features = _spans(features, "Features")
        return itertools.chain([first], entries)

    def utterance(self, number: int, line: str, counts: Counter) -> Utterance:
        """Return the utterance of an entry; count what it meets."""
        kinds = CUTS if self.cuts else (SUPERVISION,)
        entry = _entry(self.path, number, line, *kinds)
        with _naming(self.path, number, entry):
            return self._of_cut(entry, counts) if self.cuts else self._of_supervision(entry, counts)

    def frames(self, span: Span, speed: float, seconds: float | None = None) -> int:
        """Return the frames of `span` at a speed: at 1.0 those of its features, else of its
        duration, by lhotse's rules.  As in lhotse, another speed drops the features but for their
        frame shift.  seconds: duration at that speed; None: it is computed.  Raises ValueError for
        a duration that cannot be."""
        from lhotse.utils import compute_num_frames, compute_num_samples, perturb_num_samples

        if speed == 1.0 and span.num_frames is not None:
            return span.num_frames
        if seconds is None and speed != 1.0:
            samples = perturb_num_samples(
                compute_num_samples(span.seconds, span.sampling_rate), speed
            )
            seconds = samples / span.sampling_rate
        elif seconds is None:
            seconds = span.seconds
        shift = span.frame_shift or self.frame_shift
        if not 0 <= seconds <= LARGEST * shift:
            raise ValueError(f"a duration of {seconds} s")
        return int(compute_num_frames(seconds, frame_shift=shift, sampling_rate=span.sampling_rate))

    def _refuse_twice(self, entry: Any, *speeds: str) -> None:
        """Raise ValueError for an entry that is speed-perturbed already where it would be again."""
        speed = next(filter(None, (*speeds, _speed_in(entry.id))), "")
        if speed and not self.perturb_again and self.speeds != (1.0,):
            raise ValueError(
                f"perturbed already (speed {speed}), as icefall's training cuts are; "
                "leave out --speed-perturbation, or add --perturb-again if that is meant"
            )

    def _of_cut(self, cut: Any, counts: Counter) -> Utterance:
        tracks = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
        recordings = [getattr(track, "recording", None) for track in tracks]
        self._refuse_twice(cut, *map(_speed, recordings))
        text = _text(cut.supervisions, counts)
        if not (cut.has_features or cut.has_recording):
            raise ValueError("neither features nor a recording, so it has no frames")
        span = Span(cut.start, cut.duration, cut.sampling_rate)
        if cut.has_features:
            counts["frames_from_features"] += 1
            span = replace(span, num_frames=cut.num_frames, frame_shift=cut.frame_shift)
        frames = []
        for speed in self.speeds:
            seconds = None
            if speed != 1.0 and hasattr(cut, "tracks") and cut.has_recording:
                # lhotse perturbs each track, and rounds it to samples, separately
                seconds = cut.drop_features().perturb_speed(speed).duration
            frames.append(self.frames(span, speed, seconds))
        return Utterance(text, tuple(frames), span.seconds)

    def _of_supervision(self, supervision: Any, counts: Counter) -> Utterance:
        name = str(supervision.recording_id)
        recordings = self.recordings.get(name, [])
        self._refuse_twice(supervision, *(recording.speed for recording in recordings))
        text = _text([supervision], counts)
        span = self._span_in_features(supervision)
        if span is not None:
            counts["frames_from_features"] += 1
        elif recordings:
            recording = recordings[-1]
            left = max(0.0, recording.seconds - supervision.start)
            if supervision.duration > left + TOLERANCE:
                counts["cut_at_end_of_recording"] += 1
            seconds = min(supervision.duration, left)
            span = Span(supervision.start, seconds, recording.sampling_rate)
        else:
            manifests = "recordings or features" if self.features else "recordings"
            raise ValueError(f"its recording {name} is not among the {manifests}; name them all")
        return Utterance(
            text, tuple(self.frames(span, speed) for speed in self.speeds), span.seconds
        )

    def _span_in_features(self, supervision: Any) -> Span | None:
        """Return the span of a supervision within features, with their frames if it is all of them;
        None without."""
        start = supervision.start
        end = start + supervision.duration
        for span in self.features.get(str(supervision.recording_id), []):
            if span.start - TOLERANCE <= start and end <= span.start + span.seconds + TOLERANCE:
                is_whole = span.seconds - supervision.duration <= TOLERANCE
                frames = span.num_frames if is_whole else None
                return replace(span, start=start, seconds=supervision.duration, num_frames=frames)
        return None


def _spans(path: Path, kind: str) -> Spans:
    """Return the spans of each recording by a manifest of entries of `kind`, "Recording" or
    "Features"."""
    spans: Spans = {}
    for number, line in lines(path):
        entry = _entry(path, number, line, kind)
        with _naming(path, number, entry):
            if kind == "Recording":
                name = entry.id
                span = Span(0.0, entry.duration, entry.sampling_rate, speed=_speed(entry))
            else:
                name = entry.recording_id
                span = Span(
                    entry.start,
                    entry.duration,
                    entry.sampling_rate,
                    entry.num_frames,
                    entry.frame_shift,
                )
            spans.setdefault(str(name), []).append(span)
    return spans


def _speed(recording: Any) -> str:
    """Return the speed at which a recording is perturbed already, by its transforms or its id; ""
    for none."""
    for transform in getattr(recording, "transforms", None) or ():
        fields = transform if isinstance(transform, dict) else vars(transform)
        if fields.get("name") == "Speed" or type(transform).__name__ == "Speed":
            return str((fields.get("kwargs") or fields).get("factor", "another speed"))
    return _speed_in(getattr(recording, "id", ""))


def _speed_in(name: Any) -> str:
    """Return the speed that an id tells; "" for none."""
    match = PERTURBED.search(str(name))
    return (match[1] or match[2]) if match else ""


def _text(supervisions: list[Any], counts: Counter) -> str:
    """Return the texts in time order, joined by a space, and count those without any."""
    counts["utterances_read"] += 1
    in_time = sorted(supervisions, key=lambda supervision: supervision.start)
    texts = ((supervision.text or "").strip() for supervision in in_time)
    text = " ".join(filter(None, texts))
    text.encode()  # raises ValueError for half of a surrogate pair, which has no tokens
    if not in_time:
        counts["without_supervision"] += 1
    elif not text:
        counts["with_empty_text"] += 1
    return text
