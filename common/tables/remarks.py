"""Write the lines below the tables of rows: reasons, intervals, errors at size, limits, stages, options."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from common.analysis import metrics, ranking, wording
from common.analysis.row import Row
from common.core.text import count, error, gathered, number, plain, short
from common.present.text import listed
from common.records.schema import Option

Lines = List[str]


def remarks(rows: Sequence[Row], format: str) -> List[str]:
    """Return blocks of lines in the "table" or "markdown" format."""
    parts = (_reasons, _load, _ratios, _repeats, _clocks, _stopped, _slow, _at_size, _limits, _stages, _options, _notes)
    return [listed(lines, format) for part in parts if (lines := part(rows))]


def _reasons(rows: Sequence[Row]) -> Lines:
    return [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]


def _load(rows: Sequence[Row]) -> Lines:
    line = beside_load(rows)
    return [line] if line else []


def beside_load(rows: Sequence[Row]) -> str:
    """Return a line on the samples of rows whose rounds ran beside other load; "" where no round did.

    "18 of 18 samples ran beside other load (others used 90% of the CPU): a, b; their times are too long ..."
    """
    loaded = [row for row in rows if any(row.loaded_rounds.values())]
    if not loaded:
        return ""
    samples = [
        sample for row in loaded for sample in row.timed if sample.beside_load and sample.foreign_cpu is not None
    ]
    time = sum(sample.ms for sample in samples)
    used = ""
    if time:
        share = sum(sample.ms * (sample.foreign_cpu or 0.0) for sample in samples) / time
        used = f" (others used {share:.0%} of the CPU)"
    number = f"{sum(row.loaded_samples for row in rows)} of {sum(row.samples for row in rows)}"
    names = ", ".join(dict.fromkeys(row.name for row in loaded))
    if any(row.is_beside_load(scope) for row in loaded for scope in row.loaded_rounds):
        advice = "their times are too long; when the machine is quiet, --resume measures these rounds again"
    else:
        advice = "ratios leave these rounds out"
    return f"{number} samples ran beside other load{used}: {names}; {advice}"


def _ratios(rows: Sequence[Row]) -> Lines:
    """Return the intervals behind the column "over the fastest"."""
    compared = [row.against_fastest for row in rows if row.against_fastest]
    alone = [row.loss_against_fastest for row in rows if row.loss_against_fastest]
    alone = [standing for standing in alone if standing not in compared]
    lines = [wording.over_fastest(standing) for standing in [*compared, *alone] if not standing.is_fastest]
    lines += drifts(rows)
    apart = [standing for standing in compared if standing.other_torch]
    if any(standing.control for standing in apart):
        lines.append(
            "same torch: the ratio that a row of another torch would have under the fastest's, by a control that was "
            "measured under both; two assumptions are possible, so it is a range without a verdict"
        )
    if any(not standing.control for standing in apart):
        lines.append(
            "other torch: the two torches differ too, so the ratio has no verdict; measure a loss that runs under "
            "both, such as fast_rnnt and fast_rnnt@k2, in the same run to separate them"
        )
    return lines


def drifts(rows: Sequence[Row]) -> Lines:
    """Return a line for each row whose ratio changes along the rounds."""
    return [wording.drifting(*each) for each in ranking.drifts(rows)]


def _repeats(rows: Sequence[Row]) -> Lines:
    """Return the noise of samples of one batch, since the column "+-" shows how batches differ."""
    halves = [(row.name, scope, metrics.of_repeats(row, scope)) for row in rows for scope in ("step", "loss")]
    spreads = [f"{name} {scope} +-{number(half, 2)}%" for name, scope, half in halves if half is not None]
    return [f"repeats of one batch, half of 20th to 80th percentile: {', '.join(spreads)}"] if spreads else []


def _stopped(rows: Sequence[Row]) -> Lines:
    """Return a line on rows whose time ran out before the wanted spread was reached."""
    cut = [
        f"{row.name} {scope} in {whys['time cap']} of {count(sum(whys.values()), 'round')}"
        for row in rows
        for scope, whys in row.stopped.items()
        if "time cap" in whys
    ]
    if not cut:
        return []
    return [f"sampling ended at the time limit (--max-seconds), not at the wanted spread: {', '.join(cut)}"]


def _slow(rows: Sequence[Row]) -> Lines:
    """Name the rows with fewer rounds than the others, since they are far behind."""
    rounds = [(row, row.header.settings.get("slow_rounds"), row.header.settings.get("rounds")) for row in rows]
    names = [row.name for row, slow, planned in rounds if slow == row.rounds and row.rounds < (planned or 0)]
    few = max((slow for _, slow, _ in rounds if slow), default=0)
    reason = "more than three times as slow as the fastest in each of the first three (--slow-rounds)"
    return [f"timed in {count(few, 'round')}: {', '.join(names)}: {reason}"] if names else []


def _clocks(rows: Sequence[Row]) -> Lines:
    """Return the other clock of each scope, on CUDA: see schema.Sample.ranked_ns."""
    both = [(row.name, row.step_event_ms, row.loss_wall_ms) for row in rows if row.step_event_ms or row.loss_wall_ms]
    medians = [(name, [times.median if times else None for times in each]) for name, *each in both]
    words = [f"{name} {' / '.join(map(number, each))}" for name, each in medians]
    return [f"step by CUDA events / loss by wall time, ms: {', '.join(words)}"] if words else []


def _at_size(rows: Sequence[Row]) -> Lines:
    """Return the errors on a measured batch, a line for each size."""
    judged = [(row.name, row.at_size) for row in rows if row.at_size]
    errors = gathered(
        (f"{size.N} x {size.T_max} x {size.U_max}", f"{name} {error(size.loss_error)} / {error(size.grad_error)}")
        for name, size in judged
    )
    begin = "loss / grad error on a measured batch, N x T x U"
    return [f"{begin} {size}: {', '.join(of_size)}" for size, of_size in errors.items()]


def _limits(rows: Sequence[Row]) -> Lines:
    """Return the device's best rates behind the column "% of limit", and that column if padding had to be computed
    too."""
    of_peaks: Dict[str, List[str]] = {}
    for row in rows:
        padded = [row.limit_percent.get(scope, {}).get("padded") for scope in ("step", "loss")]
        if any(padded):
            peaks = ", ".join(f"{what} {rate_text(row, key, unit)}" for what, key, unit in RATES)
            of_peaks.setdefault(peaks, []).append(f"{row.name} {' / '.join(number(value, 2) for value in padded)}")
    return [
        f"this device's limits, measured beside: {peaks}; % of limit with the padding counted as work: {', '.join(of)}"
        for peaks, of in of_peaks.items()
    ]


#: What the device does at best: in words, the field of a row, the unit.
RATES = (
    ("memory", "bytes_per_second", "GB/s"),
    ("products", "flops_per_second", "GFLOP/s"),
    ("exponentials", "exps_per_second", "G/s"),
)


def rate_text(row: Row, key: str, unit: str) -> str:
    """Return a rate with its range: "40.1 GB/s (31.2 to 40.1 in 10 measurements)"."""
    rate = getattr(row, key)
    words, of = f"{number(rate and rate / 1e9, 3)} {unit}", row.limit_ranges.get(key)
    if not of:
        return words
    low, high = (number(of[end] / 1e9, 3) for end in ("lowest", "highest"))
    return f"{words} ({low} to {high} in {of['measurements']} measurements)"


def _options(rows: Sequence[Row]) -> Lines:
    return [f"{row.name} options: {options_text(row.options)}" for row in rows if row.options]


def options_text(options: Mapping[str, Option]) -> str:
    """Return "blank=0 [default -1], reduction=sum [default mean], clamp=-1", with defaults that are known and
    differ."""
    parts = []
    for name, option in options.items():
        is_other = option.default not in ("-", option.ours)
        parts.append(f"{name}={option.ours}" + (f" [default {option.default}]" if is_other else ""))
    return ", ".join(parts)


def _stages(rows: Sequence[Row]) -> Lines:
    """Return where the time goes: the stages of the timing pass, or labelled spans where there are only traces."""
    lines = []
    for row in rows:
        stages = {scope: (parts, "ms") for scope, parts in row.stages.items() if parts}
        if not stages and row.profiled_stages_us:
            stages = {"profiled": (row.profiled_stages_us, "us")}
        for scope, (parts, unit) in stages.items():
            split = ", ".join(f"{short(plain(name))} {number(value, 3)} {unit}" for name, value in parts.items())
            lines.append(f"{row.name} {scope}: {split}")
    return lines


def _notes(rows: Sequence[Row]) -> Lines:
    """Return each note once, with the rows that have it."""
    names_by_note = gathered((note, row.name) for row in rows for note in row.notes)
    lines = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in names_by_note.items()]
    inflated = [f"{row.name} {number(row.profiler_inflation, 3)}x" for row in rows if row.profiler_inflation]
    if inflated:
        lines.append(f"profiled steps over the same steps without the profiler: {', '.join(inflated)}")
    earlier = sum(row.earlier_runs for row in rows)
    if earlier:
        lines.append(f"{count(earlier, 'earlier run')} of the same configuration not shown (--all-runs shows them)")
    return lines
