"""List the numbers of a row, each with its title, unit and words.

Tables, the report, CSV, JSON, TensorBoard and the plots of sweeps name keys of METRICS.  A metric that no list below
names stands at the end of the tables of --details, for rows that have it.  In CSV and JSON it has its key, in
TensorBoard it is metrics/KEY."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from statistics import fmean, median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Union

from rnnt_bench.analysis import doubts
from rnnt_bench.analysis.row import COUNTERS, SCOPES, Row, gaps, with_kind
from rnnt_bench.core import settings, statistics, text
from rnnt_bench.present.parts import Cell
from rnnt_bench.records import schema

Value = Union[float, str, None]


class Metric(NamedTuple):
    """Describe a number of a row. title: "" for no column; value: what is sorted by, a number or text; words: the text
    of a cell, None for the number; better: "lower", "higher" or ""; numeric: aligned to the right; profiled: from a
    trace; tag: of TensorBoard's scalar; scale: shown number / value, 1e3 for milliseconds of seconds."""

    key: str
    title: str
    value: Callable[[Any], Value] = lambda row: None
    words: Optional[Callable[[Any], str]] = None
    unit: str = ""
    better: str = ""
    numeric: bool = True
    profiled: bool = False
    tag: str = ""
    scale: float = 1

    def scaled(self, row: Any) -> Optional[float]:
        value = self.value(row)
        return value * self.scale if isinstance(value, (int, float)) else None

    def shown(self, row: Any) -> str:
        if self.words:
            return self.words(row)
        if not self.numeric:
            return str(self.value(row) or "-")
        value = self.scaled(row)
        return str(value) if isinstance(value, int) else text.number(value)

    def cell(self, row: Any) -> Cell:
        return Cell(self.shown(row), self.scaled(row) if self.numeric else None)


def metric(
    key: str,
    title: str = "",
    shown: Optional[Callable[[Any], str]] = None,
    value: Optional[Callable[[Any], Optional[float]]] = None,
    **fields: Any,
) -> Metric:
    """Return the metric of the row's field `key`, or of `value`. shown: returns the text of a value."""
    read = value or attrgetter(key)
    return Metric(key, title, read, (lambda row: shown(read(row))) if shown else None, **fields)


def values(metrics: Sequence[Metric], row: Any) -> schema.Record:
    return {each.key: each.value(row) for each in metrics}


def cells(metrics: Sequence[Metric], row: Any) -> Dict[str, Cell]:
    return {each.title: each.cell(row) for each in metrics if each.title}


def at(path: str) -> Callable[[Any], Any]:
    """Return a function that follows a path, "step.ms.median", and returns None where a part is missing."""

    def value(row: Any) -> Any:
        for key in path.split("."):
            row = row.get(key) if isinstance(row, dict) else getattr(row, key, None)
        return row

    return value


#: Errors of gradients above this are marked: small batches must be within it in float32.
MARKED_ERROR = 1e-4


def _marked_error(row: Row) -> str:
    value = row.errors[1]
    if "coarse" in doubts.kinds(row):
        return f"{text.error(value)} < float32"
    return text.error(value) + (" !" if value is not None and value > MARKED_ERROR else "")


def _percent(row: Row, scope: str) -> Optional[float]:
    """Return how many percent of a row's time the limit is; None above 100, where the limit is wrong."""
    percent = row.limit_percent.get(scope)
    return None if percent is None or percent > 100 else percent


def _percent_words(row: Row, scope: str) -> str:
    """Return "65", or ">100" where the limit is wrong."""
    return ">100" if row.limit_percent.get(scope, 0) > 100 else text.number(_percent(row, scope), 2)


def of_batches(row: Row, scope: str) -> Optional[float]:
    """Return half of the distance between p20 and p80 of the batches' medians, in percent of their mean."""
    batches = text.gathered((batch, ms) for medians in row.of(scope).medians.values() for batch, ms in medians.items())
    medians = [median(times) for times in batches.values()]
    if len(medians) < 2:
        return None
    low, high = (statistics.quantile(medians, part) for part in (0.2, 0.8))
    return 50 * (high - low) / fmean(medians)


def _half(row: Row, scope: str) -> str:
    half = of_batches(row, scope)
    return "-" if half is None else f"+-{text.number(half, 2)}%"


def _spread(row: Row, scope: str) -> str:
    """Return the median, its spread and the number of samples, as "574.1 +-1.2% 40"."""
    times = row.of(scope).ms
    return f"{text.number(times.median)} {_half(row, scope)} {times.n}" if times else "-"


def _over_fastest(row: Row) -> str:
    """Return "1.98x slower" for a row beside the fastest of its kind, and "1.00" for the fastest, marked as in
    _verdict_words."""
    if row.over_fastest is None:
        return "-"
    if row.against_fastest.is_fastest:
        return "1.00 !" if "above limit" in doubts.kinds(row) else "1.00"
    return f"{row.over_fastest:.2f}x {_verdict(row)}"


def _verdict(row: Row) -> Optional[str]:
    standing = row.against_fastest
    if standing is None:
        return None
    has_one = standing.ratio and standing.ratio.low is None and len(standing.ratio.new) == 1
    return "one round" if has_one and standing.verdict == "unclear" else str(standing.verdict)


def _verdict_words(row: Row) -> str:
    """Return the verdict, with a mark where the fastest is above the device's limit."""
    word = _verdict(row) or "-"
    return f"{word} !" if word == "fastest" and "above limit" in doubts.kinds(row) else word


def _interval(standing: Any) -> str:
    ratio = standing and standing.ratio
    return text.interval(ratio.low, ratio.high, joint="-") or "-" if ratio else "-"


def _loss_ratio(row: Row) -> str:
    """Return "1.04 0.91-1.18": the time of the loss alone over that of the fastest, as measured, with its interval."""
    parts = [text.number(at("loss_against_fastest.times")(row), 3), _interval(row.loss_against_fastest)]
    return " ".join(dict.fromkeys(parts)).replace(" -", "")


def _status(row: Row) -> str:
    """Return the status, or what impairs the numbers: "busy", "imprecise"."""
    kinds = doubts.kinds(row) if row.status == "ok" else ()
    if "beside load" in kinds:
        return "busy"
    return "imprecise" if "imprecise" in kinds else row.status


def amount(size: Optional[float]) -> str:
    """Return bytes in GiB, or in MiB below 1 GiB."""
    if size is None:
        return "-"
    return f"{text.number(size / text.GIB)} GiB" if size >= text.GIB else f"{text.number(size / text.MB)} MiB"


def _text(key: str, title: str, value: Callable[[Any], Optional[str]]) -> Metric:
    return Metric(key, title, value, numeric=False)


def _made(key: str, title: str, path: str, shown: Optional[Callable[[Any], str]] = None, **fields: Any) -> Metric:
    return metric(key, title, shown, at(path), **fields)


_ms = partial(_made, unit="ms", better="lower")
_error = partial(metric, shown=text.error, better="lower")
ALL = (
    _text("implementation", "implementation", lambda row: with_kind(row.name, row.kind)),
    _text("label", "implementation", lambda row: row.marked),
    _text("name", "implementation", attrgetter("name")),
    _text("kind", "kind", attrgetter("kind")),
    _text("version", "version", lambda row: (row.environment.implementation_version or "").split("+")[0] or None),
    _text("torch", "torch", lambda row: row.torch or None),
    Metric("status", "status", attrgetter("status"), _status, numeric=False),
    Metric("step_spread", "step ms +- n", words=partial(_spread, scope="step")),
    Metric("loss_spread", "loss ms +- n", words=partial(_spread, scope="loss")),
    *(_ms(f"step_{part}", part, f"step.ms.{part}", tag=f"1_time/step_ms_{part}") for part in ("p20", "p80")),
    *(_ms(f"loss_{part}", "", f"loss_alone.ms.{part}", tag=f"1_time/loss_ms_{part}") for part in ("p20", "p80")),
    _ms("step_ms", "step ms", "step.ms.median", tag="1_time/step_ms_median"),
    _ms("loss_ms", "loss ms", "loss_alone.ms.median", tag="1_time/loss_ms_median"),
    Metric("step_ms_low", "", lambda row: (row.step.interval or (None,))[0]),
    Metric("step_ms_high", "", lambda row: (row.step.interval or (None,))[-1]),
    _made("step_n", "n", "step.ms.n"),
    _made("loss_n", "loss n", "loss_alone.ms.n"),
    _ms("forward_ms", "forward ms", "step.forward.median"),
    Metric("over_fastest", "over the fastest", attrgetter("over_fastest"), _over_fastest),
    *(  # of the step
        metric(key, title, better="higher", tag=f"1_time/{key}")
        for key, title in (("utterances_per_second", "utterances /s"), ("frames_per_second", "frames /s"))
    ),
    Metric(
        "limits",
        "% of limit step / loss",
        words=lambda row: " / ".join(_percent_words(row, scope) for scope in SCOPES) if row.limit_percent else "-",
    ),
    *(
        Metric(
            f"{scope}_limit",
            f"% of limit, {scope}",
            partial(_percent, scope=scope),
            partial(_percent_words, scope=scope),
            unit="%",
            better="higher",
        )
        for scope in SCOPES
    ),
    Metric(
        "peak_memory_mb",
        "peak memory MB",
        attrgetter("peak_mb"),
        lambda row: text.number(row.peak_mb) + (" !" if "beyond" in doubts.kinds(row) else ""),
        unit="MB",
        better="lower",
        tag="2_memory/peak_mb",
    ),
    Metric(
        "process_mb",
        "process MB",
        lambda row: at("memory.step.process_mb")(row) or at("memory.loss.process_mb")(row),
        unit="MB",
        better="lower",
    ),
    *(
        _made(f"{path}_mb", "", f"memory.{scope}.{counter}_mb", unit="MB", tag=f"2_memory/{path}_mb")
        for scope in SCOPES
        for counter in COUNTERS
        for path in [f"{scope}_{counter}"]
    ),
    _made("average_step_time_us", "profiled step us", "profile.average_step_time_us", unit="us", profiled=True),
    _made("profiled_peak_mb", "profiled peak MB", "profile.peak_memory_mb", unit="MB", profiled=True),
    _error("loss_error", "loss error", value=lambda row: row.errors[0], tag="3_correctness/loss_error"),
    Metric(
        "grad_error",
        "grad error",
        lambda row: row.errors[1],
        _marked_error,
        better="lower",
        tag="3_correctness/grad_error",
    ),
    metric(
        "useful",
        "useful %",
        lambda share: text.number(share, 3),
        lambda row: row.useful_fraction and 100 * row.useful_fraction,
        unit="%",
    ),
    _error("gap", "gap to exact", value=attrgetter("gap")),
    # of the first screen
    Metric("half", "batches +-", lambda row: of_batches(row, row.scope), lambda row: _half(row, row.scope), "%"),
    Metric("over_fastest_with_fast_products", "", at("with_fast_products.times")),
    metric("ratio", "over the fastest", lambda times: text.number(times, 3), attrgetter("over_fastest")),
    Metric("interval", "95% interval", words=lambda row: _interval(row.against_fastest)),
    Metric("loss_ratio", "loss over the fastest", at("loss_against_fastest.times"), _loss_ratio),
    Metric("verdict", "verdict", _verdict, _verdict_words, numeric=False),
    # of CSV and JSON alone
    *(_text(key, "", attrgetter(key)) for key in ("reason", "device", "device_name")),
    *(_text(key, "", at(f"configuration.{key}")) for key in ("dtype", "preset")),
    *(_made(key, "", f"configuration.{key}") for key in ("vocab_size", "batch_size", "max_frames", "threads")),
    *(_text(key, "", at(f"header.{key}")) for key in ("run_id", "started", "suffix")),
    _text("log_dir", "", lambda row: str(row.folder)),
    *(_made(key, "", key) for key in ("imprecise", "rounds", "others_cpu")),
    _made("bytes_per_second", "", "rates.memory"),
    _made("torch_operations_per_second", "", "rates.torch"),
    _made("loop_operations_per_second", "", "rates.loop"),
    Metric("samples", "", lambda row: len(row.timed)),
    Metric("flagged_samples", "", lambda row: sum(sample.flagged for sample in row.timed)),
    Metric("loaded_samples", "", lambda row: sum(sample.beside_load for sample in row.timed)),
    Metric("repeated_rounds", "", lambda row: sum(row.repeated.values())),
    Metric("measured_batches", "", lambda row: len(row.batches) or None),
    Metric("useful_cells", "", lambda row: row.cells[0] or None),
    Metric("padded_cells", "", lambda row: row.cells[1] or None),
    Metric("earlier_runs", "", lambda row: len(row.earlier)),
)

METRICS: Dict[str, Metric] = {each.key: each for each in ALL}

_ERRORS = ("loss_error", "grad_error")
_RATES = ("utterances_per_second", "frames_per_second")
_SHORT = ("step_spread", "loss_spread", "over_fastest", *_RATES, "limits", "peak_memory_mb")
_PAGE = (
    *("step_ms", "over_fastest", "interval", "loss_ms", "peak_memory_mb", "grad_error"),
    *("step_limit", "loss_limit", *_RATES, "loss_error"),
    *("step_p20", "step_p80", "step_n", "forward_ms", "loss_n", "process_mb"),
)

#: The columns of CSV, JSON and data frames, the same for every run; the table's first.
PLAIN = (
    *("name", "kind", "status", "step_ms", "step_ms_low", "step_ms_high", "over_fastest"),
    *("over_fastest_with_fast_products", "verdict", "loss_ms"),
    *("peak_memory_mb", "grad_error", "device", "dtype", "vocab_size", "batch_size", "max_frames", "threads"),
    *(
        "loss_error",
        "gap",
        "imprecise",
        *_RATES,
        "forward_ms",
        "step_limit",
        "loss_limit",
        "process_mb",
    ),
    *("average_step_time_us", "profiled_peak_mb", "rounds", "samples", "flagged_samples", "loaded_samples"),
    "repeated_rounds",
    *("others_cpu", "bytes_per_second", "torch_operations_per_second", "loop_operations_per_second"),
    *("measured_batches", "useful_cells", "padded_cells", "version", "torch"),
    *("device_name", "preset", "suffix", "run_id", "started", "earlier_runs", "log_dir", "reason"),
)
#: The columns of each table; those of the report begin with "page", those of the screen with "answer".
COLUMNS: Dict[str, Sequence[str]] = {
    "results": (
        "implementation",
        "version",
        "torch",
        "status",
        *_SHORT,
        "average_step_time_us",
        "profiled_peak_mb",
        *_ERRORS,
    ),
    "answer": (
        *("name", "status", "step_ms", "half", "ratio", "interval", "verdict", "loss_ms"),
        "loss_ratio",
        *("peak_memory_mb", "torch"),
        *(*_RATES, "limits", "grad_error", "average_step_time_us", "profiled_peak_mb", "version"),
    ),
    "answer sweep": ("name", "status", "step_ms", "ratio", "verdict", "loss_ms", "peak_memory_mb", "gap"),
    "sweep": ("implementation", "status", *_SHORT, *_ERRORS, "useful", "gap"),
    "page": ("label", "status", *_PAGE, "average_step_time_us", "profiled_peak_mb", "version", "torch"),
    "comparison": ("step_ms", "loss_ms", "peak_memory_mb", *_ERRORS),
    "readme": ("implementation", "step_ms", "over_fastest", "interval", "loss_ms", "peak_memory_mb", "grad_error"),
}
COLUMNS["plain"] = PLAIN
#: The tables of --details, which end with the metrics that no list names.
OPEN = ("results", "sweep")
_LISTED = {key for keys in COLUMNS.values() for key in keys}


def others() -> List[Metric]:
    """Return the metrics that have a title and are in no list."""
    return [each for key, each in METRICS.items() if each.title and key not in _LISTED]


def columns(table: str, rows: Sequence[Row]) -> List[Metric]:
    """Return the columns of a table of COLUMNS, further ones of an OPEN table where a row has a value. The page has the
    status only where it is not "ok" for every row."""
    hidden = {"status"} if table.startswith("page") and all(_status(row) == "ok" for row in rows) else ()
    further = [each for each in others() if any(each.value(row) is not None for row in rows)] if table in OPEN else []
    return [*(METRICS[key] for key in COLUMNS[table] if key not in hidden), *further]


def differing(rows: Sequence[Row]) -> List[str]:
    """Return the settings, beside those of PLAIN, of which two rows are known to have different values."""
    by_key = text.gathered(
        (key, value) for row in rows for key, value in row.configuration.items() if value is not None
    )
    return [key for key, known in by_key.items() if key not in PLAIN and any(value != known[0] for value in known)]


def plain(row: Row, further: Sequence[str] = ()) -> schema.Record:
    """Return a row's values as CSV has them, with the settings `further` (see `differing`) and those of a sweep."""
    own = {key: row.configuration.get(key) for key in further}
    words = {key: settings.worded(tuple(value)) if isinstance(value, list) else value for key, value in own.items()}
    return {**values([METRICS[key] for key in PLAIN], row), **words, **row.header.values}


def exported(row: Row, further: Sequence[str] = ()) -> schema.Record:
    """Return a row as JSON has it: its plain values, then what has parts, in ms and MB (2**20 bytes)."""
    checked, profile = row.checked, row.profile
    standings = (row.against_fastest, row.loss_against_fastest, row.with_fast_products)
    against, loss_against, with_fast_products = (standing.as_json() if standing else {} for standing in standings)
    small = {key: getattr(checked, key) for key in ("loss_error", "grad_error", "slope_error")}
    parts = {
        **{"with_fast_products": with_fast_products, "rates": row.rates._asdict()},
        **{"step": row.step._asdict(), "loss": row.loss_alone._asdict(), "memory": row.memory},
        **{"against_fastest": against, "loss_against_fastest": loss_against, "limit_percent": row.limit_percent},
        **{"at_size": checked.at_size or {}, "small_batches": small, "approximation_gaps": gaps(checked)},
        **{"windows": profile.windows, "profiled_stages_us": profile.label_us, "options": row.environment.options},
        **{"configuration": row.configuration, "sweep": row.header.values},
        "notes": [doubt.words for doubt in doubts.doubts(row)],
    }
    return {**plain(row, further), **values(others(), row), **schema.as_written(parts)}


def scalars(row: Row) -> Dict[str, float]:
    tagged = {each.tag: each for each in METRICS.values() if each.tag}
    tagged.update({f"metrics/{each.key}": each for each in others() if not each.tag})
    values_of = {tag: metric.scaled(row) for tag, metric in tagged.items()}
    return {tag: value for tag, value in values_of.items() if value is not None}
