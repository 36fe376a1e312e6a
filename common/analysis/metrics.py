"""List the numbers of a row, each with its title, unit and words.

Tables, the report, TensorBoard and the plots of sweeps name keys of METRICS.  A metric that none of the lists below
names stands at the end of the tables of --details, for rows that have it; CSV and JSON have it under its key,
TensorBoard as metrics/KEY, and every sweep has a plot of it.  The screen, the page and the README show only what their
lists name.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from common.analysis.row import COUNTERS, SCOPES, Row, marked, search_of
from common.core import statistics
from common.core.text import GIB, MB, error, gathered, number
from common.present.parts import Cell
from common.records.schema import Record


def _unknown(row: Any) -> Optional[float]:
    return None


class Metric(NamedTuple):
    """Describe a number of a row.

    Attributes:
        title: of its column; "" for no column.
        value: returns the number that is sorted by; None where it is not known.
        words: returns the text of a cell; None for the number itself.
        better: "lower" or "higher"; "" where neither is.
        on_page: the title in the report, where it differs.
        numeric: the column is aligned to the right.
        profiled: the number is from a trace.
        tag: of TensorBoard's scalar.
        scale: shown number / value, 1e3 for milliseconds of a value in seconds.
    """

    key: str
    title: str
    value: Callable[[Any], Optional[float]] = _unknown
    words: Optional[Callable[[Any], str]] = None
    unit: str = ""
    better: str = ""
    on_page: str = ""
    numeric: bool = True
    profiled: bool = False
    tag: str = ""
    scale: float = 1

    def scaled(self, row: Any) -> Optional[float]:
        value = self.value(row)
        return None if value is None else value * self.scale

    def shown(self, row: Any) -> str:
        if self.words:
            return self.words(row)
        value = self.scaled(row)
        return str(value) if isinstance(value, int) else number(value)

    def cell(self, row: Any) -> Cell:
        return Cell(self.shown(row), self.scaled(row) if self.numeric else None)


def metric(
    key: str,
    title: str = "",
    shown: Optional[Callable[[Any], str]] = None,
    value: Optional[Callable[[Any], Optional[float]]] = None,
    **fields: Any,
) -> Metric:
    """Return the metric of the row's field `key`, or of `value`.  shown: returns the text of a value; fields: others of
    Metric."""
    read = value or attrgetter(key)
    return Metric(key, title, read, (lambda row: shown(read(row))) if shown else None, **fields)


def values(metrics: Sequence[Metric], row: Any) -> Record:
    """Return the metrics' values by key, as CSV and JSON hold them."""
    return {each.key: each.value(row) for each in metrics}


def cells(metrics: Sequence[Metric], row: Any) -> Dict[str, Cell]:
    """Return the metrics' cells by title, of those that have one."""
    return {each.title: each.cell(row) for each in metrics if each.title}


def at(path: str) -> Callable[[Any], Any]:
    """Return a function that follows a path of attributes and keys, "step.ms.median"; it returns None where one is
    missing."""

    def value(row: Any) -> Any:
        for key in path.split("."):
            row = row.get(key) if isinstance(row, dict) else getattr(row, key, None)
        return row

    return value


#: Errors of gradients above this are marked: small batches must be within it in float32.
MARKED_ERROR = 1e-4


def _marked_error(row: Row) -> str:
    """Return the error of the gradients at the measured size, "1.3e-03 !" where it is above that."""
    value = row.measured_errors[1]
    return error(value) + (" !" if value is not None and value > MARKED_ERROR else "")


def _rate(row: Row, key: str) -> str:
    """Return a rate as "12.31", or with its interval over rounds as "12.31 [11.9-12.8]" for --find-largest."""
    interval = getattr(row.largest, f"{key}_interval", None)
    return number(getattr(row, key)) + (f" [{'-'.join(number(end, 3) for end in interval)}]" if interval else "")


def _percent(row: Row, scope: str) -> Optional[float]:
    """Return how many percent of a row's time the device's limit is; None above 100, where the limit is wrong."""
    percent = row.limit_percent.get(scope)
    return None if percent is None or percent > 100 else percent


def _percent_words(row: Row, scope: str) -> str:
    """Return "65", or ">100" where the limit is wrong."""
    return ">100" if row.limit_percent.get(scope, 0) > 100 else number(_percent(row, scope), 2)


def of_batches(row: Row, scope: str) -> Optional[float]:
    """Return half of the distance between the 20th and the 80th percentile of the batches' medians, in percent of their
    mean; None for fewer than two batches."""
    batches = gathered((batch, ms) for medians in row.of(scope).medians.values() for batch, ms in medians.items())
    medians = [statistics.median(times) for times in batches.values()]
    if len(medians) < 2:
        return None
    low, high = (statistics.quantile(medians, part) for part in (0.2, 0.8))
    return 50 * (high - low) / statistics.mean(medians)


def of_repeats(row: Row, scope: str) -> Optional[float]:
    """Return half of the same distance for samples over the median of their own batch, which is noise; None where no
    batch was measured twice."""
    times = row.ms(scope)
    if not times or not times.median or times.p20 is None or times.p80 is None:
        return None
    return 50 * (times.p80 - times.p20) / times.median


def _half(row: Row, scope: str) -> str:
    half = of_batches(row, scope)
    return "-" if half is None else f"+-{number(half, 2)}%"


def _spread(row: Row, scope: str) -> str:
    """Return the median, its spread and the number of samples, as "574.1 +-1.2% 40"."""
    times = row.ms(scope)
    return f"{number(times.median)} {_half(row, scope)} {times.n}" if times else "-"


def _over_fastest(row: Row) -> str:
    """Return "1.98x slower" for a row beside the fastest of its kind, and "1.00" for the fastest."""
    if row.over_fastest is None:
        return "-"
    return "1.00" if row.against_fastest.is_fastest else f"{row.over_fastest:.2f}x {_verdict(row)}"


def _verdict(row: Row) -> str:
    """Return the verdict; "one round" where there is no interval to judge by."""
    standing = row.against_fastest
    if standing is None:
        return "-"
    has_one = standing.ratio and standing.ratio.low is None and len(standing.ratio.new) == 1
    return "one round" if has_one and standing.verdict == "unclear" else standing.verdict


def _interval(standing: Any) -> str:
    """Return "1.58-1.77", the interval of the ratio as measured."""
    ratio = standing and standing.ratio
    return "-" if not ratio or ratio.low is None else f"{number(ratio.low, 3)}-{number(ratio.high, 3)}"


def _loss_ratio(row: Row) -> str:
    """Return "1.04 0.91-1.18": the time of the loss alone over that of the fastest, as measured, with its interval."""
    parts = [number(at("loss_against_fastest.times")(row), 3), _interval(row.loss_against_fastest)]
    return " ".join(dict.fromkeys(parts)).replace(" -", "")


def _percents(row: Row) -> str:
    both = [_percent_words(row, scope) for scope in SCOPES]
    return "-" if both == ["-", "-"] else " / ".join(both)


def _status(row: Row) -> str:
    """Return the status, or what impairs the numbers: "busy" where rounds ran beside other load."""
    if row.status == "ok" and row.loaded_rounds:
        return "busy"
    return "imprecise" if row.status == "ok" and row.imprecise else row.status


def amount(size: Optional[float]) -> str:
    """Return bytes in GiB, or in MiB below 1 GiB."""
    if size is None:
        return "-"
    return f"{number(size / GIB)} GiB" if size >= GIB else f"{number(size / MB)} MiB"


def largest(row: Row) -> str:
    """Return the largest size as "24", ">=24" where the search did not end, or "none" where not even the smallest
    fits."""
    search = row.largest
    if search is None or search.size is None:
        return "none" if search and search.too_large is not None else "-"
    return f"{'>=' if search.at_least else ''}{search.size}"


def _limited_by(row: Row) -> str:
    limit = at("largest.limited_by")(row)
    return {"all": "all there are", "cap": "--largest-cap"}.get(limit, limit) or "-"


def _heaviest(row: Row) -> str:
    search = row.largest
    return (
        f"{search.N} x {search.T_max} x {search.U_max + 1}" if search and search.N and search.U_max is not None else "-"
    )


def _text(key: str, title: str, words: Callable[[Any], Optional[str]]) -> Metric:
    """Return the metric of a column of text."""
    return Metric(key, title, words=lambda row: words(row) or "-", numeric=False)


def _made(key: str, title: str, path: str, shown: Optional[Callable[[Any], str]] = None, **fields: Any) -> Metric:
    """Return the metric of what is at `path` of a row."""
    return metric(key, title, shown, at(path), **fields)


_ms = partial(_made, unit="ms", better="lower")
_error = partial(metric, shown=error, better="lower")
ALL = (
    _text("implementation", "implementation", lambda row: marked(row.name, row.kind)),
    _text("label", "implementation", lambda row: row.marked),
    _text("version", "version", lambda row: (row.environment.implementation_version or "").split("+")[0]),
    _text("torch", "torch", lambda row: row.torch),
    _text("status", "status", _status),
    Metric("step_spread", "step ms +- n", words=partial(_spread, scope="step")),
    Metric("loss_spread", "loss ms +- n", words=partial(_spread, scope="loss")),
    *(_ms(f"step_{part}", part, f"step.ms.{part}", tag=f"1_time/step_ms_{part}") for part in ("p20", "p80")),
    *(_ms(f"loss_{part}", "", f"loss_alone.ms.{part}", tag=f"1_time/loss_ms_{part}") for part in ("p20", "p80")),
    _ms("step_median", "step ms", "step.ms.median", tag="1_time/step_ms_median"),
    _ms("loss_median", "loss ms", "loss_alone.ms.median", tag="1_time/loss_ms_median"),
    _made("step_n", "n", "step.ms.n"),
    _made("loss_n", "loss n", "loss_alone.ms.n"),
    _ms("forward_ms", "forward ms", "step.forward.median"),
    Metric("over_fastest", "over the fastest", attrgetter("over_fastest"), _over_fastest),
    *(  # of the step; of --find-largest, of its scope at the largest size
        Metric(key, title, attrgetter(key), partial(_rate, key=key), better="higher", tag=f"1_time/{key}")
        for key, title in (("utterances_per_second", "utterances /s"), ("frames_per_second", "frames /s"))
    ),
    Metric("limits", "% of limit step / loss", words=_percents),
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
    metric("peak_mb", "peak memory MB", unit="MB", better="lower", on_page="peak MB", tag="2_memory/peak_mb"),
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
    _made("profiled_us", "profiled step us", "profile.average_step_time_us", unit="us", profiled=True),
    _made("profiled_mb", "profiled peak MB", "profile.peak_memory_mb", unit="MB", profiled=True),
    _made("inflation", "", "inflation", tag="4_profiled/inflation"),
    _error("loss_error", "loss error", value=at("checked.loss_error"), tag="3_correctness/loss_error"),
    _error(
        "grad_error",
        "grad error",
        value=at("checked.grad_error"),
        on_page="gradient error",
        tag="3_correctness/grad_error",
    ),
    Metric(
        "measured_error",
        "grad error",
        lambda row: row.measured_errors[1],
        _marked_error,
        better="lower",
        on_page="gradient error at size",
    ),
    metric(
        "useful",
        "useful %",
        lambda share: number(share, 3),
        lambda row: row.useful_fraction and 100 * row.useful_fraction,
        unit="%",
    ),
    _error("gap", "gap to exact", value=attrgetter("gap")),
    # of the first screen
    _text("name", "implementation", lambda row: row.name),
    Metric("half", "batches +-", lambda row: of_batches(row, row.scope), lambda row: _half(row, row.scope), "%"),
    metric("ratio", "over the fastest", lambda times: number(times, 3), attrgetter("over_fastest")),
    Metric("interval", "95% interval", words=lambda row: _interval(row.against_fastest)),
    Metric("loss_ratio", "loss over the fastest", at("loss_against_fastest.times"), _loss_ratio),
    _text("verdict", "verdict", _verdict),
    # of --find-largest
    _made("within", "within", "largest.limit_bytes", amount, unit="bytes"),
    Metric("largest", "largest that fits", at("largest.size"), largest, better="higher"),
    Metric("limited_by", "limited by", words=_limited_by, numeric=False),
    Metric("heaviest", "heaviest batch N x T x U+1", at("largest.padded_cells"), _heaviest),
    _made("heaviest_cells", "padded cells", "largest.padded_cells"),
    _made("largest_mb", "peak MB", "largest.peak_mb", unit="MB", better="lower"),
    Metric(
        "searched_spread",
        "ms +- n",
        lambda row: row.median_ms(search_of(row).scope),
        lambda row: _spread(row, search_of(row).scope),
    ),
)

METRICS: Dict[str, Metric] = {each.key: each for each in ALL}

_ERRORS = ("loss_error", "grad_error")
_RATES = ("utterances_per_second", "frames_per_second")
_SHORT = ("step_spread", "loss_spread", "over_fastest", *_RATES, "limits", "peak_mb")
_PAGE = (
    *("step_median", "over_fastest", "interval", "loss_median", "peak_mb", "measured_error"),
    *("step_limit", "loss_limit", *_RATES, *_ERRORS),
    *("step_p20", "step_p80", "step_n", "forward_ms", "loss_n", "process_mb"),
)

#: The columns of each table; those of the report begin with "page", those of the screen with "answer".
COLUMNS: Dict[str, Sequence[str]] = {
    "results": ("implementation", "version", "torch", "status", *_SHORT, "profiled_us", "profiled_mb", *_ERRORS),
    "answer": (
        *("name", "status", "step_median", "half", "ratio", "interval", "verdict", "loss_median"),
        "loss_ratio",
        *("peak_mb", "torch"),
        *(*_RATES, "limits", "measured_error", "profiled_us", "profiled_mb", "version"),
    ),
    "answer search": (
        *("name", "status", "within", "largest", "limited_by", "heaviest", "largest_mb", "utterances_per_second"),
        *("frames_per_second", "torch", "version"),
    ),
    "answer sweep": ("name", "status", "step_median", "ratio", "verdict", "loss_median", "peak_mb", "gap"),
    "sweep": ("implementation", "status", *_SHORT, *_ERRORS, "useful", "gap"),
    "search": (
        *("implementation", "status", "within", "largest", "limited_by", "heaviest", "heaviest_cells", "largest_mb"),
        *("searched_spread", *_RATES, "version", "torch"),
    ),
    "page": ("label", "status", *_PAGE, "profiled_us", "profiled_mb", "version", "torch"),
    "comparison": ("step_median", "loss_median", "peak_mb", *_ERRORS),
    "readme": ("implementation", "step_median", "over_fastest", "interval", "loss_median", "peak_mb", "measured_error"),
}
COLUMNS["page search"] = ("label", *COLUMNS["search"][1:])
#: The tables of --details, which end with the metrics that no list names.
OPEN = ("results", "sweep", "search")
_LISTED = {key for keys in COLUMNS.values() for key in keys}


def others() -> List[Metric]:
    """Return the metrics that have a title and are in no list."""
    return [each for key, each in METRICS.items() if each.title and key not in _LISTED]


def columns(table: str, rows: Sequence[Row]) -> List[Metric]:
    """Return the columns of a table of COLUMNS for these rows.

    Further columns of an OPEN table are left out where no row has a value.  The page has the status only where it is
    not "ok" for every row.
    """
    listed = [METRICS[key] for key in COLUMNS[table]]

    all_ok = table.startswith("page") and all(_status(row) == "ok" for row in rows)

    def is_shown(metric: Metric) -> bool:
        if metric.key == "status" and all_ok:
            return False
        return metric in listed or any(metric.value(row) is not None for row in rows)

    return list(filter(is_shown, [*listed, *(others() if table in OPEN else [])]))


def exported(row: Row) -> Record:
    """Return a row's fields for CSV and JSON."""
    return {**row.as_json(), **values(others(), row)}


def scalars(row: Row) -> Dict[str, float]:
    """Return a row's scalars for TensorBoard, by tag."""
    tagged = {each.tag: each for each in METRICS.values() if each.tag}
    tagged.update({f"metrics/{each.key}": each for each in others() if not each.tag})
    values_of = {tag: metric.value(row) for tag, metric in tagged.items()}
    return {tag: value for tag, value in values_of.items() if value is not None}
