"""Finds the committed measurement nearest to a question, and says what it answers.  Standard library only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Union

from common.core.errors import UserError
from common.core.paths import ROOT
from common.core.text import number
from common.core.units import GIB, MB

FILE = ROOT / "results" / "which.json"
#: What --need may be: what a user has, which the loss takes.
NEEDS = {"outputs": "encoder and decoder outputs", "logits": "logits of the joiner"}
#: Weights of a difference, beside that of V, which counts by its factor.
OTHER_DTYPE, FIXED_LENGTHS, OTHER_BATCH = 0.5, 0.1, 0.05


@dataclass(frozen=True)
class Workload:
    """Settings that tell measurements apart."""

    vocab_size: int
    dtype: str
    batch_size: Optional[int]  # utterances; None for sorted batches
    max_frames: Optional[int]  # of sorted batches
    sort_utterance: bool
    encoder_dim: int
    frames: Union[int, str, None]  # of every utterance; a text if they are those of the shape file
    tokens: Union[int, str, None]  # likewise


@dataclass(frozen=True)
class Timed:
    """A loss that was measured; None for a number that was not."""

    name: str
    kind: str
    step_ms: Optional[float]
    loss_ms: Optional[float]
    peak_mb: Optional[float]


@dataclass(frozen=True)
class Picked:
    """The loss to use."""

    name: str
    scope: str  # whose time decides: "step" or "loss"
    rivals: List[str]  # losses that may be as fast
    next: Optional[str]  # the next loss
    times: Optional[List[Optional[float]]]  # how many times faster than the next, and the ends of the interval


@dataclass(frozen=True)
class Measurement:
    """A configuration that was measured."""

    results: str  # folder of results/
    date: str
    device: str
    device_name: Optional[str]
    cores: Optional[int]  # None of a GPU
    torch: str  # version
    settings: Workload
    picks: Dict[str, Picked]  # by a key of NEEDS, or "approximation"
    rows: List[Timed]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        """Return a measurement as the file holds it."""
        parts = {
            "settings": Workload(**content["settings"]),
            "picks": {need: Picked(**pick) for need, pick in content["picks"].items()},
            "rows": [Timed(**row) for row in content["rows"]],
        }
        return cls(**{**content, **parts})


@dataclass(frozen=True)
class Question:
    """A question to `rnnt-bench which`.

    need: a key of NEEDS; memory_bytes: the memory that a step may take, if that is asked.
    """

    vocab_size: int = 500
    need: str = "outputs"
    device: str = "cpu"
    dtype: str = "float32"
    memory_bytes: Optional[int] = None


def measurements() -> List[Measurement]:
    """Return the measurements in the file.  Raises UserError."""
    try:
        return list(map(Measurement.from_json, json.loads(FILE.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{FILE}: cannot be read: {error}; install the package again") from error


def nearest(question: Question, entries: List[Measurement]) -> Measurement:
    """Return the measurement nearest to the question, one on its device where there is any."""
    on_device = [entry for entry in entries if entry.device == question.device]
    able = [entry for entry in on_device or entries if question.need in entry.picks]
    return min(able or entries, key=lambda entry: (_distance(question, entry.settings), entry.results))


def _distance(question: Question, settings: Workload) -> float:
    """Return how far a measurement is from the question, 0 for one of the same V."""
    far = abs(math.log(question.vocab_size / settings.vocab_size))
    far += OTHER_DTYPE if settings.dtype != question.dtype else 0.0
    far += FIXED_LENGTHS if isinstance(settings.frames, int) else 0.0
    return far + (OTHER_BATCH if settings.sort_utterance else 0.0)


def lines(question: Question, entry: Measurement) -> List[str]:
    """Return the answer as lines of text: the pick, the table it rests on, and what was measured where."""
    asked = f"V {question.vocab_size}, {question.dtype}, {question.device}, given {NEEDS[question.need]}"
    result = [f"Which loss: {asked}?", "", *_picked(question, entry), ""]
    heads = ["loss", "step ms", "loss alone ms", "peak MB"]
    taken = [row for row in entry.rows if row.loss_ms is not None and row.kind == "exact"]
    rows = entry.rows if question.need == "outputs" else taken
    shown = [[row.name, *(number(value, 3) for value in (row.step_ms, row.loss_ms, row.peak_mb))] for row in rows]
    if question.memory_bytes and entry.settings.batch_size:
        heads.append(f"utterances in {question.memory_bytes / GIB:.3g} GiB")
        for cells, row in zip(shown, rows):
            cells.append(_fitting(question.memory_bytes, row.peak_mb, entry.settings.batch_size))
    widths = [max(map(len, column)) for column in zip(heads, *shown)]
    for cells in [heads, *shown]:
        first, *others = (f"{cell:>{width}s}" for cell, width in zip(cells, widths))
        result.append("  ".join([f"  {first.strip():{widths[0]}s}", *others]).rstrip())
    return [*result, "", *_measured(question, entry)]


def _picked(question: Question, entry: Measurement) -> List[str]:
    """Return the pick in a sentence, then that of the approximations where outputs are given."""
    pick = entry.picks.get(question.need)
    if pick is None:
        return [f"  no loss was measured, given {NEEDS[question.need]}; the table has the others"]
    if pick.rivals:
        return [_unclear(entry, [pick.name, *pick.rivals]), *_approximation(question, entry)]
    ratio = ""
    if pick.times and pick.next:
        times, low, high = pick.times
        interval = f" (95% interval {number(low, 2)} to {number(high, 2)})" if low and high else ""
        ratio = f": {number(times, 2)}x faster than {pick.next}, the next exact loss{interval}"
    alone = ", by the time of the loss alone" if pick.scope == "loss" else ""
    result = [f"  use {pick.name}{ratio}{alone}"]
    return [*result, *_approximation(question, entry)]


def _unclear(entry: Measurement, names: List[str]) -> str:
    """Return the advice where no loss is the fastest for sure: the smallest of those that may be."""
    peaks = [(row.peak_mb, row.name) for row in entry.rows if row.name in names]
    words = f"  {' or '.join(names)}: which is faster is not certain"
    if not all(peak for peak, _ in peaks):
        return words
    peak, name = min(peaks, key=lambda known: known[0] or 0.0)
    return f"{words}; {name} takes the least memory, {number(peak, 3)} MB"


def _approximation(question: Question, entry: Measurement) -> List[str]:
    other = entry.picks.get("approximation")
    if other and question.need == "outputs":
        row = next(row for row in entry.rows if row.name == other.name)
        return [f"  if an approximation will do: {other.name}, {number(row.step_ms, 3)} ms a step"]
    return []


def _fitting(memory_bytes: int, peak_mb: Optional[float], batch_size: int) -> str:
    """Return how many utterances of the measured lengths fit, as "about 48": the peak grows with their number."""
    return f"about {number(memory_bytes / MB / peak_mb * batch_size, 2)}" if peak_mb else "-"


def _measured(question: Question, entry: Measurement) -> List[str]:
    """Return what was measured, where and when, and how to measure the question itself."""
    settings = entry.settings
    of = f"{settings.max_frames} frames" if settings.sort_utterance else f"{settings.batch_size} utterances"
    lengths = f", T {settings.frames}, U {settings.tokens}" if isinstance(settings.frames, int) else ""
    cores = f", {entry.cores} cores" if entry.cores else ""
    what = f"V {settings.vocab_size}, batches of {of}{lengths}, {settings.dtype}"
    where = f"{entry.device_name}{cores}, torch {entry.torch}, {entry.date}"
    result = [f"measured: {what}", f"on:       {where} (results/{entry.results})"]
    if entry.device != question.device:
        result.append(f"beware:   no results of {question.device} come with the suite yet; these are of {entry.device}")
    flags = f"--vocab-size {question.vocab_size} --dtype {question.dtype} --device {question.device}"
    return [*result, f"here:     rnnt-bench run {flags}"]
