"""Read the utterances of lhotse manifests: their texts and numbers of feature frames.

Audio and features are not opened.  A cut is one utterance, with the texts of its supervisions in
time order.  In a manifest of supervisions, each is one utterance.  It ends at the end of its
recording at the latest, as lhotse's trim_to_supervisions cuts it.

lhotse's own loaders are not used.  They try a path as a command or a URL first, take a .json
manifest for any kind that parses, and raise any error for a wrong file.  Here a path is a file, an
error names the entry, and a recording that is a shell command is not run.
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

#: Seconds by which lhotse lets the ends of supervisions, features and recordings differ.
TOLERANCE = 0.001
WANTED = "a lhotse manifest, .json or .jsonl, gzipped or not"
#: Most characters of one entry, or of a whole JSON array: a small gzip file could have any number.
LONGEST = 2**29
#: The speed in the id of perturbed audio: "1089-134686_sp1.1" of lhotse, "sp0.9-1089" of Kaldi.  An
#: end such as "_sp12" is no speed: it may be a speaker.
PERTURBED = re.compile(r"_sp(\d+\.\d+)$|^sp(\d+\.\d+)-")


@dataclass(frozen=True)
class Utterance:
    """Hold an utterance.

    Attributes:
        text: all its text; "" for none
        frames: numbers of feature frames, at each speed of the Reader
        seconds: duration of its audio at speed 1
    """

    text: str
    frames: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Span:
    """Hold a part of a recording.

    Attributes:
        start, seconds: its start in the recording and its duration, in seconds
        num_frames, frame_shift: of its features, in frames and seconds; None without features
        speed: the speed to which the recording is perturbed already, such as "1.1"; "" for none
    """

    start: float
    seconds: float
    sampling_rate: float
    num_frames: int | None = None
    frame_shift: float | None = None
    speed: str = ""


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, JSON text) of each entry of a manifest, numbered from 1.

    The content of the file decides whether it is a JSON array, JSON lines, or either gzipped; its
    name does not matter.  Raises UserError."""
    try:
        with open_file(path) as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = gzip.GzipFile(fileobj=raw) if compressed else raw
            text = io.TextIOWrapper(content, encoding="utf-8")
            number = 0
            while line := text.readline(LONGEST):
                number += 1
                if line.startswith("["):  # an array, read whole: each of its entries as a line
                    entries = json.loads(line + text.read(LONGEST))
                    yield from enumerate(map(json.dumps, entries), 1)
                elif line.strip():
                    yield number, line
    except OSError as error:  # also for a damaged gzip header
        raise UserError(f"cannot read {path}: {error.strerror or error}; name {WANTED}") from error
    except (EOFError, ValueError, RecursionError, MemoryError, zlib.error) as error:
        raise UserError(f"{path}: damaged, or not {WANTED} ({type(error).__name__})") from error


@contextmanager
def _naming(path: Path, number: int, entry: Any = None) -> Iterator[None]:
    """Turn any error of the block, except a UserError, into a UserError that names the entry.

    lhotse does not check entries, so it may raise anything.  number: the number of the entry, from
    1; entry: the lhotse object, if there is one yet."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        name = getattr(entry, "id", "?")
        raise UserError(f"{path}: entry {number} ({name}): {problem}") from error


def _entry(path: Path, number: int, line: str, *kinds: str) -> Any:
    """Return the lhotse object of an entry of the manifest `path`.

    Raises UserError if the entry is no lhotse object, or its class is not among `kinds`; the
    message names the first of these as the one that was expected.

    number: of the entry, from 1; line: its JSON text; kinds: names of lhotse's classes, no names
    if any class will do."""
    from lhotse.serialization import deserialize_item

    with _naming(path, number):
        item = deserialize_item(json.loads(line))
    kind = type(item).__name__
    if kinds and kind not in kinds:
        raise UserError(f"{path}: entry {number} is a {kind}, not a {kinds[0]}; name {WANTED}")
    return item


#: lhotse's classes of cuts.
CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut", "DataCut")
SUPERVISION = "SupervisionSegment"
#: Id of a recording -> parts of it.
Spans = dict[str, list[Span]]


@dataclass
class Reader:
    """Make utterances of the entries of a manifest, which are all cuts or all supervisions.

    Args:
        path: of the manifest.
        frame_shift: seconds between frames, if there are no features.
        speeds: factors of speed perturbation; 1.0 leaves the audio as it is.
        perturb_again: whether audio that is perturbed already may be perturbed again.

    Attributes that `entries` sets:
        cuts: whether the entries are cuts.
        recordings, features: for supervisions, the recordings and their parts that have features.
    """

    path: Path
    frame_shift: float
    speeds: tuple[float, ...]
    perturb_again: bool
    cuts: bool = True
    recordings: Spans = field(default_factory=dict)
    features: Spans = field(default_factory=dict)

    def entries(self, recordings: Path | None, features: Path | None) -> Iterator[tuple[int, str]]:
        """Return an iterator over (number, JSON text) of all entries, numbered from 1.  Set `cuts`,
        `recordings` and `features`.

        Raises UserError for an empty manifest, and for one of anything but cuts or supervisions.

        recordings, features: paths of further manifests.  Supervisions need at least one of the
        two; with cuts neither is allowed."""
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
        """Return the utterance of an entry, as `entries` returned it.

        counts: gets one more of "utterances_read" and of each other count that holds for this
          utterance, such as "with_empty_text" and "frames_from_features"."""
        kinds = CUTS if self.cuts else (SUPERVISION,)
        entry = _entry(self.path, number, line, *kinds)
        with _naming(self.path, number, entry):
            return self._of_cut(entry, counts) if self.cuts else self._of_supervision(entry, counts)

    def frames(self, span: Span, speed: float, seconds: float | None = None) -> int:
        """Return the number of feature frames of `span` at a speed.

        At speed 1.0 that is the number in its features, if it has any.  Otherwise it is computed
        from the duration, as lhotse does.  Raises ValueError for an impossible duration.

        seconds: the duration at that speed; None to compute it."""
        from lhotse.utils import compute_num_frames, compute_num_samples, perturb_num_samples

        if speed == 1.0 and span.num_frames is not None:
            return span.num_frames
        if seconds is None:
            seconds = span.seconds
            if speed != 1.0:
                samples = compute_num_samples(seconds, span.sampling_rate)
                seconds = perturb_num_samples(samples, speed) / span.sampling_rate
        shift = span.frame_shift or self.frame_shift
        if not 0 <= seconds <= LARGEST * shift:
            raise ValueError(f"a duration of {seconds} s")
        return int(compute_num_frames(seconds, frame_shift=shift, sampling_rate=span.sampling_rate))

    def _refuse_twice(self, entry: Any, *recorded: str) -> None:
        """Raise ValueError if an entry is speed-perturbed already and would be again.

        recorded: the speeds of its recordings, "" for those that are not perturbed."""
        perturbed = [speed for speed in (*recorded, _speed_in(entry.id)) if speed]
        if perturbed and not self.perturb_again and self.speeds != (1.0,):
            raise ValueError(
                f"perturbed already (speed {perturbed[0]}), as icefall's training cuts are; "
                "leave out --speed-perturbation, or add --perturb-again if that is meant"
            )

    def _of_cut(self, cut: Any, counts: Counter) -> Utterance:
        """Return the utterance of a cut.  Raises ValueError, and what lhotse raises.

        counts: as in `utterance`."""
        is_mixed = hasattr(cut, "tracks")
        tracks = [track.cut for track in cut.tracks] if is_mixed else [cut]
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
            seconds = None  # self.frames computes them
            if speed != 1.0 and is_mixed and cut.has_recording:
                # lhotse perturbs each track of a mixed cut by itself, and rounds it to samples.
                seconds = cut.drop_features().perturb_speed(speed).duration
            frames.append(self.frames(span, speed, seconds))
        return Utterance(text, tuple(frames), span.seconds)

    def _of_supervision(self, supervision: Any, counts: Counter) -> Utterance:
        """Return the utterance of a supervision, with the frames of its features, else those of its
        recording.

        Raises ValueError if neither is there, or as `_refuse_twice`, `_text` and `frames` do.

        counts: as in `utterance`."""
        name = str(supervision.recording_id)
        recordings = self.recordings.get(name, [])
        self._refuse_twice(supervision, *(recording.speed for recording in recordings))
        text = _text([supervision], counts)
        span = self._span_in_features(supervision)
        if span is not None:
            counts["frames_from_features"] += 1
        elif recordings:
            recording = recordings[-1]  # the last, if several entries have this id
            seconds_left = max(0.0, recording.seconds - supervision.start)
            if supervision.duration > seconds_left + TOLERANCE:
                counts["cut_at_end_of_recording"] += 1
            seconds = min(supervision.duration, seconds_left)
            span = Span(supervision.start, seconds, recording.sampling_rate)
        else:
            manifests = "recordings or features" if self.features else "recordings"
            raise ValueError(f"its recording {name} is not among the {manifests}; name them all")
        frames = tuple(self.frames(span, speed) for speed in self.speeds)
        return Utterance(text, frames, span.seconds)

    def _span_in_features(self, supervision: Any) -> Span | None:
        """Return the part of a recording that a supervision is about, if features contain it.

        The part has `num_frames` only if the features are no longer than the supervision.  Returns
        None if no features contain the part."""
        start = supervision.start
        end = start + supervision.duration
        for span in self.features.get(str(supervision.recording_id), []):
            if span.start - TOLERANCE <= start and end <= span.start + span.seconds + TOLERANCE:
                is_whole = span.seconds - supervision.duration <= TOLERANCE
                frames = span.num_frames if is_whole else None
                return replace(span, start=start, seconds=supervision.duration, num_frames=frames)
        return None


def _spans(path: Path, kind: str) -> Spans:
    """Return the spans of a manifest whose entries are of `kind`: "Recording" or "Features".

    A Recording gives the span of the whole recording.  Features give the span that they cover, so a
    recording has a span for each entry of its features."""
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
    """Return the speed to which a recording is perturbed, by its transforms or its id.

    "" for none; "another speed" if the transform does not tell which."""
    for transform in getattr(recording, "transforms", None) or ():
        fields = transform if isinstance(transform, dict) else vars(transform)
        if fields.get("name") == "Speed" or type(transform).__name__ == "Speed":
            return str((fields.get("kwargs") or fields).get("factor", "another speed"))
    return _speed_in(getattr(recording, "id", ""))


def _speed_in(name: Any) -> str:
    """Return the speed in the id of perturbed audio (see PERTURBED), such as "1.1"; "" for any
    other id."""
    match = PERTURBED.search(str(name))
    return (match[1] or match[2]) if match else ""


def _text(supervisions: list[Any], counts: Counter) -> str:
    """Return the texts of the supervisions of an utterance in time order, joined by spaces.

    Raises ValueError for half of a surrogate pair, of which sentencepiece makes no tokens.

    counts: gets one more of "utterances_read", and of what the utterance lacks."""
    counts["utterances_read"] += 1
    in_time = sorted(supervisions, key=lambda supervision: supervision.start)
    texts = ((supervision.text or "").strip() for supervision in in_time)
    text = " ".join(filter(None, texts))
    text.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    if not in_time:
        counts["without_supervision"] += 1
    elif not text:
        counts["with_empty_text"] += 1
    return text
