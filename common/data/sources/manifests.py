"""Utterances of lhotse manifests: their text and how many feature frames they have.  No audio or feature is opened.

A cut is one utterance, with the texts of its supervisions in time order.  In a supervisions manifest each supervision
is one, from its start to its end or to that of its recording, as lhotse's trim_to_supervisions cuts them.  The
recordings of a manifest may be shell commands; none is run.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional, Set, Tuple

from common.core.errors import UserError
from common.data.shapes import LARGEST
from common.data.sources import manifest_files
from common.data.sources.manifest_files import lines, of_kind, one_line
from common.data.sources.shards import Shard, cut, in_order
from common.data.sources.spans import Named, Span, Spans

TOLERANCE = 0.001  # seconds by which lhotse lets the ends of supervisions, features and recordings differ


@dataclass(frozen=True)
class Utterance:
    """An utterance of a manifest.

    Args:
        text: the text of all its supervisions; "" if there is none.
        frames: number of feature frames at each speed asked for.
        seconds: duration of its audio before any perturbation.
    """

    text: str
    frames: Tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Counts the frames of utterances.

    Args:
        frame_shift: seconds between frames, for cuts without features.
        speeds: factors of speed perturbation; 1.0 is none.
        again: whether cuts that are perturbed already are perturbed again.
    """

    frame_shift: float
    speeds: Tuple[float, ...]
    again: bool = False

    def frames(self, span: Span) -> Tuple[int, ...]:
        """Return the frames of `span` at each speed: as its features say at 1.0, else of its duration, by lhotse's
        rules. As in lhotse, another speed drops the features: the frames are counted from the perturbed duration and
        the frame shift of the features."""
        from lhotse.utils import compute_num_samples, perturb_num_samples

        counts = []
        for speed in self.speeds:
            if speed == 1.0:
                counts.append(self.frames_of(span.seconds, span) if span.num_frames is None else span.num_frames)
            else:
                samples = perturb_num_samples(compute_num_samples(span.seconds, span.sampling_rate), speed)
                counts.append(self.frames_of(samples / span.sampling_rate, span))
        if max(counts) > LARGEST:
            raise ValueError(f"{max(counts)} frames, more than a shape file can hold ({LARGEST})")
        return tuple(counts)

    def frames_of(self, seconds: float, span: Span) -> int:
        """Return the frames of `seconds` of audio at the sampling rate and the frame shift of `span`."""
        from lhotse.utils import compute_num_frames

        shift = span.frame_shift or self.frame_shift
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a duration of {seconds} s")
        if round(shift * span.sampling_rate) < 1:
            raise ValueError(f"a frame shift of {shift} s is not one sample at {span.sampling_rate} Hz")
        if seconds > LARGEST * shift:
            raise ValueError(f"a duration of {seconds} s is more than {LARGEST} frames")
        return compute_num_frames(seconds, frame_shift=shift, sampling_rate=span.sampling_rate)


#: How lhotse (at the end) and Kaldi (in front) mark ids of what they have speed-perturbed.
PERTURBED = re.compile(r"_sp(\d+\.?\d*)$|^sp(\d+\.\d+)-")


def perturbed(entry: Any) -> str:
    """Return the speed at which a cut, supervision or recording was perturbed already, as its id or its recording says;
    "" for none."""
    for name in (getattr(entry, "id", None), getattr(entry, "recording_id", None)):
        match = PERTURBED.search(str(name or ""))
        if match:
            return match[1] or match[2]
    recording = getattr(entry, "recording", None) if getattr(entry, "has_recording", False) else entry
    for transform in getattr(recording, "transforms", None) or ():
        fields = transform if isinstance(transform, dict) else vars(transform)
        if fields.get("name") == "Speed" or type(transform).__name__ == "Speed":
            return str((fields.get("kwargs") or fields).get("factor", "another speed"))
    return ""


def _refuse_twice(path: Path, number: int, entry: Any, timing: Timing) -> None:
    """Raise UserError for an entry that is speed-perturbed already where it would be again."""
    speed = "" if timing.again or timing.speeds == (1.0,) else _guarded(path, number, perturbed, entry)
    if speed:
        wanted = " ".join(f"{speed:g}" for speed in timing.speeds)
        raise UserError(
            f"{path}: entry {number} ({entry.id}) is at speed {speed} already, as icefall's training cuts are; with "
            f"--speed-perturbation {wanted} each would count again, at products of both speeds: leave the flag out, or "
            "add --perturb-again if that is meant"
        )


@dataclass
class Reader:
    """From entries of the manifest `path`, all cuts or all supervisions, to utterances.  It can be sent to a process.

    recordings, features: of supervisions.  used: the rows of `recordings` that were met."""

    path: Path
    timing: Timing
    cuts: bool
    recordings: Spans = field(default_factory=Spans)
    features: Spans = field(default_factory=Spans)
    used: Set[int] = field(default_factory=set)

    def utterance(self, number: int, line: str, counts: Counter) -> Utterance:
        """Return the utterance of an entry, its JSON; counts what it meets in `counts`. Raises UserError with the
        number."""
        from lhotse import SupervisionSegment
        from lhotse.cut import Cut

        return self.of(number, of_kind(Cut if self.cuts else SupervisionSegment, self.path, number, line), counts)

    def of(self, number: int, entry: Any, counts: Counter) -> Utterance:
        """Return the utterance of a lhotse cut or supervision."""
        _refuse_twice(self.path, number, entry, self.timing)
        return _guarded(self.path, number, self._of_cut if self.cuts else self._of_supervision, entry, counts)

    def _of_cut(self, cut: Any, counts: Counter) -> Utterance:
        from lhotse.cut import MixedCut

        timing = self.timing
        text = _text(cut.supervisions, counts)
        if not (cut.has_features or cut.has_recording):
            raise ValueError("neither features nor a recording, so it has no frames")
        shift = cut.frame_shift if cut.has_features else None
        num_frames = cut.num_frames if cut.has_features else None
        if num_frames is not None:
            counts["frames_from_features"] += 1
        span = Span(cut.start, cut.duration, cut.sampling_rate, num_frames, shift)
        if not (isinstance(cut, MixedCut) and cut.has_recording):
            return Utterance(text, timing.frames(span), span.seconds)
        # each track of a mixed cut is perturbed and rounded to samples separately
        plain = cut.drop_features()
        at_one = Timing(timing.frame_shift, (1.0,))
        frames = (
            at_one.frames(span)[0] if speed == 1.0 else timing.frames_of(plain.perturb_speed(speed).duration, span)
            for speed in timing.speeds
        )
        return Utterance(text, tuple(frames), span.seconds)

    def _of_supervision(self, supervision: Any, counts: Counter) -> Utterance:
        text = _text([supervision], counts)
        start, seconds = supervision.start, supervision.duration
        row, recordings = self.recordings.named(supervision.recording_id)
        if recordings:
            self.used.add(row)
        for span in self.features.named(supervision.recording_id)[1]:
            if span.start - TOLERANCE <= start and start + seconds <= span.start + span.seconds + TOLERANCE:
                counts["frames_from_features"] += 1
                whole = span.seconds - seconds <= TOLERANCE
                part = Span(start, seconds, span.sampling_rate, span.num_frames if whole else None, span.frame_shift)
                return Utterance(text, self.timing.frames(part), seconds)
        if not recordings:
            have = "recordings or features" if len(self.features) else "recordings"
            raise ValueError(f"its recording {supervision.recording_id} is not among the {have}; name them all")
        recording = recordings[-1]
        left = max(0.0, recording.seconds - start)
        if seconds > left + TOLERANCE:
            counts["cut_at_end_of_recording"] += 1
        span = Span(start, min(seconds, left), recording.sampling_rate)
        return Utterance(text, self.timing.frames(span), span.seconds)


def opened(
    path: Path, timing: Timing, recordings: Optional[Path] = None, features: Optional[Path] = None, jobs: int = 1
) -> Tuple[Reader, Iterator[Tuple[int, str]]]:
    """Return a reader for the manifest `path`, and its (number, JSON) entries.  recordings, features: manifests for
    supervisions, which need one of them (cuts have their own), read by so many `jobs`.  Raises UserError where the
    first entry is neither cut nor supervision."""
    from lhotse import SupervisionSegment
    from lhotse.cut import Cut

    entries = lines(path)
    first = next(entries, None)
    if first is None:
        raise UserError(f"{path}: an empty manifest; name one of cuts or supervisions")
    entry = manifest_files.entry(path, *first)
    if isinstance(entry, Cut):
        if recordings or features:
            raise UserError(f"{path}: cuts bring their recordings and features; leave out --recordings and --features")
    elif isinstance(entry, SupervisionSegment):
        if not (recordings or features):
            raise UserError(f"{path}: supervisions need their recordings; name that manifest with --recordings")
    else:
        advice = "name one of cuts or supervisions (recordings go with --recordings, features with --features)"
        raise UserError(f"{path}: a manifest of {type(entry).__name__} entries; {advice}")
    named = (_spans(kind, listed, jobs) for kind, listed in (("Recording", recordings), ("Features", features)))
    return Reader(path, timing, isinstance(entry, Cut), next(named), next(named)), itertools.chain([first], entries)


def _spans(kind: str, path: Optional[Path], jobs: int) -> Spans:
    """Return the spans of all entries of a manifest of recordings or features."""
    if path is None:
        return Spans()
    return Spans(in_order(partial(_named, kind, path), cut(lines(path)), jobs))


def _named(kind: str, path: Path, shard: Shard) -> Named:
    import lhotse

    spans = Named()
    for number, line in shard:
        entry = of_kind(getattr(lhotse, kind), path, number, line)
        _guarded(path, number, _add_recording if kind == "Recording" else _add_features, entry, spans)
    return spans


def _add_recording(entry: Any, spans: Named) -> None:
    """Add all of a lhotse recording."""
    spans.add(entry.id, Span(0.0, entry.duration, entry.sampling_rate))


def _add_features(entry: Any, spans: Named) -> None:
    span = Span(entry.start, entry.duration, entry.sampling_rate, entry.num_frames, entry.frame_shift)
    spans.add(entry.recording_id, span)


def of_supervisions(
    path: Path, supervisions: Iterable[Any], recordings: Iterable[Any], timing: Timing, counts: Counter
) -> Iterator[Utterance]:
    """Yield an utterance of each lhotse supervision; path: where they are from, for errors."""
    spans = Named()
    for recording in recordings:
        _add_recording(recording, spans)
    reader = Reader(path, timing, False, Spans([spans]))
    for number, supervision in enumerate(supervisions, start=1):
        yield reader.of(number, supervision, counts)
    counts["recordings_without_supervision"] += len(reader.recordings) - len(reader.used)


def beside(path: Path) -> Optional[Path]:
    """Return the recordings manifest whose name fits that of the supervisions manifest `path`, if it exists."""
    named = path.with_name(path.name.replace("supervisions", "recordings"))
    return named if named != path and named.is_file() else None


def _text(supervisions: List[Any], counts: Counter) -> str:
    """Return the texts in time order, joined by a space; "" where there is none. Counts unusual cases. Raises
    ValueError for half of a surrogate pair, which JSON can hold, and which has no tokens."""
    counts["utterances_read"] += 1
    in_time = sorted(supervisions, key=lambda supervision: supervision.start)
    text = " ".join(filter(None, ((supervision.text or "").strip() for supervision in in_time)))
    text.encode()
    if not in_time:
        counts["without_supervision"] += 1
    elif not text:
        counts["with_empty_text"] += 1
    if len(in_time) > 1:
        counts["with_several_supervisions"] += 1
    return text


def _guarded(path: Path, number: int, function: Callable[..., Any], entry: Any, *arguments: Any) -> Any:
    """Return ``function(entry, ...)``; an error becomes a UserError of one line that names the entry."""
    try:
        return function(entry, *arguments)
    except Exception as error:  # a manifest can hold any value anywhere
        problem = str(error) if type(error) is ValueError else one_line(error)
        raise UserError(f"{path}: entry {number} ({getattr(entry, 'id', '?')}): {problem}") from error
