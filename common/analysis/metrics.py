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
from common.analysis.standing import Standing
from common.core import statistics
from common.core.text import error, gathered, number
from common.core.units import GIB, MB
from common.present.table import Cell
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


def _part(scope: str, part: str) -> Callable[[Row], Optional[float]]:
    """Return a function that returns one part of a row's summary of times."""
    return lambda row: getattr(row.ms(scope), part, None)


def _forward_ms(row: Row) -> Optional[float]:
    return row.step.forward.median if row.step.forward else None


#: Errors of gradients above this are marked: small batches must be within it in float32.
MARKED_ERROR = 1e-4


def _measured_error(row: Row) -> Optional[float]:
    """Return the error of the gradients at the measured size; on small batches where the row has no other."""
    return row.measured_errors[1]


def _measured_error_said(row: Row) -> str:
    """Return that error in words: "1.3e-03 !" where it is above the limit of small batches."""
    value = _measured_error(row)
    mark = " !" if value is not None and value > MARKED_ERROR else ""
    return error(value) + mark


def _searched(key: str) -> Callable[[Row], Optional[float]]:
    """Return a function that returns one field of a search, and None for other rows."""
    return lambda row: getattr(row.largest, key, None)


def _rate_words(row: Row, key: str) -> str:
    """Return a rate as "12.31", or with its interval over rounds as "12.31 [11.9-12.8]" for --find-largest."""
    interval = getattr(row.largest, f"{key}_interval", None)
    return number(getattr(row, key)) + (f" [{'-'.join(number(end, 3) for end in interval)}]" if interval else "")


def _counter(scope: str, counter: str) -> Callable[[Row], Optional[float]]:
    return lambda row: (row.memory.get(scope) or {}).get(f"{counter}_mb")


def _process(row: Row) -> Optional[float]:
    return (row.memory.get("step") or row.memory.get("loss") or {}).get("process_mb")


def _percent(scope: str) -> Callable[[Row], Optional[float]]:
    """Return a function that returns how many percent of a row's time the device's limit is; None above 100, where the
    limit itself is wrong."""

    def value(row: Row) -> Optional[float]:
        percent = row.limit_percent.get(scope)
        return None if percent is None or percent > 100 else percent

    return value


def _percent_words(row: Row, scope: str) -> str:
    """Return "65", or ">100" where the limit is wrong."""
    percent = row.limit_percent.get(scope)
    return ">100" if percent is not None and percent > 100 else number(percent, 2)


def _half(low: float, high: float, middle: float) -> Optional[float]:
    """Return half of the distance between two ends, in percent of the middle; None for a middle of 0."""
    return 50 * (high - low) / middle if middle else None


def of_batches(row: Row, scope: str) -> Optional[float]:
    """Return half of the distance between the 20th and the 80th percentile of the batches' medians, in percent of their
    mean; None for fewer than two batches."""
    batches = gathered((batch, ms) for medians in row.of(scope).medians.values() for batch, ms in medians.items())
    medians = [statistics.median(times) for times in batches.values()]
    if len(medians) < 2:
        return None
    low, high = (statistics.quantile(medians, part) for part in (0.2, 0.8))
    return _half(low, high, statistics.mean(medians))


def of_repeats(row: Row, scope: str) -> Optional[float]:
    """Return half of the same distance for samples over the median of their own batch, which is noise; None where no
    batch was measured twice."""
    times = row.ms(scope)
    if times is None or times.p20 is None or times.p80 is None:
        return None
    return _half(times.p20, times.p80, times.median)


def _half_said(row: Row, scope: str) -> str:
    half = of_batches(row, scope)
    return "-" if half is None else f"+-{number(half, 2)}%"


def _spread(row: Row, scope: str) -> str:
    """Return the median, its spread and the number of samples, as "574.1 +-1.2% 40"."""
    times = row.ms(scope)
    return f"{number(times.median)} {_half_said(row, scope)} {times.n}" if times else "-"


def _over_fastest(row: Row) -> str:
    """Return "1.98x slower" for a row beside the fastest of its kind, and "1.00" for the fastest."""
    standing = row.against_fastest
    if standing is None or standing.times is None:
        return "-"
    return "1.00" if standing.is_fastest else f"{standing.times:.2f}x {_verdict(row)}"


def _verdict(row: Row) -> str:
    """Return the verdict; "one round" where there is no interval to judge by."""
    standing = row.against_fastest
    if standing is None:
        return "-"
    ratio = standing.ratio
    has_one = ratio is not None and ratio.low is None and len(ratio.new) == 1
    return "one round" if has_one and standing.verdict == "unclear" else standing.verdict


def _loss_ratio(row: Row) -> str:
    """Return "1.04 0.91-1.18": the time of the loss alone over that of the fastest, as measured, with its interval."""
    words, interval = number(_loss_over_fastest(row), 3), _interval_words(row.loss_against_fastest)
    return words if interval == "-" else f"{words} {interval}"


def _loss_over_fastest(row: Row) -> Optional[float]:
    return row.loss_against_fastest.times if row.loss_against_fastest else None


def _interval_words(standing: Optional[Standing]) -> str:
    """Return "1.58-1.77", the interval of the ratio as measured."""
    ratio = standing.ratio if standing else None
    return "-" if ratio is None or ratio.low is None else f"{number(ratio.low, 3)}-{number(ratio.high, 3)}"


def _percents(row: Row) -> str:
    both = [_percent_words(row, scope) for scope in SCOPES]
    return "-" if both == ["-", "-"] else " / ".join(both)


def _gap(row: Row) -> Optional[float]:
    gap = row.checked.approximation_gap
    return None if gap is None else abs(gap)


def _status(row: Row) -> str:
    """Return the status, or what impairs the numbers: "busy" where rounds ran beside other load."""
    if row.status != "ok":
        return row.status
    if row.loaded_rounds:
        return "busy"
    return "imprecise" if row.imprecise else row.status


def _version(value: Optional[str]) -> str:
    return (value or "-").split("+")[0]


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
    limit = row.largest.limited_by if row.largest else None
    return {"all": "all there are", "cap": "--largest-cap"}.get(limit or "", limit or "-")


def _heaviest(row: Row) -> str:
    search = row.largest
    if search is None or search.N is None or search.U_max is None:
        return "-"
    return f"{search.N} x {search.T_max} x {search.U_max + 1}"


def _useful(row: Row) -> Optional[float]:
    return None if row.useful_fraction is None else 100 * row.useful_fraction


ALL = (
    Metric("implementation", "implementation", words=lambda row: marked(row.name, row.kind), numeric=False),
    Metric("label", "implementation", words=lambda row: row.marked, numeric=False),
    Metric("version", "version", words=lambda row: _version(row.environment.implementation_version), numeric=False),
    Metric("torch", "torch", words=lambda row: _version(row.environment.torch), numeric=False),
    Metric("status", "status", words=_status, numeric=False),
    Metric("reason", "reason", words=lambda row: row.reason or "-", numeric=False),
    *(Metric(f"{scope}_spread", f"{scope} ms +- n", words=partial(_spread, scope=scope)) for scope in SCOPES),
    *(
        Metric(
            f"{scope}_{part}",
            f"{scope} ms" if part == "median" else part if scope == "step" else "",
            _part(scope, part),
            unit="ms",
            better="lower",
            tag=f"1_time/{scope}_ms_{part}",
        )
        for scope in SCOPES
        for part in ("median", "p20", "p80")
    ),
    Metric("step_n", "n", _part("step", "n")),
    Metric("loss_n", "loss n", _part("loss", "n")),
    Metric(
        "forward_ms", "forward ms", lambda row: getattr(row.step.forward, "median", None), unit="ms", better="lower"
    ),
    Metric("over_fastest", "over the fastest", lambda row: row.over_fastest, _over_fastest),
    *(  # of the step; of --find-largest, of its scope at the largest size
        Metric(key, title, attrgetter(key), partial(_rate_words, key=key), better="higher", tag=f"1_time/{key}")
        for key, title in (("utterances_per_second", "utterances /s"), ("frames_per_second", "frames /s"))
    ),
    Metric("limits", "% of limit step / loss", words=_percents),
    *(
        Metric(
            f"{scope}_limit",
            f"% of limit, {scope}",
            _percent(scope),
            partial(_percent_words, scope=scope),
            unit="%",
            better="higher",
        )
        for scope in SCOPES
    ),
    metric("peak_mb", "peak memory MB", unit="MB", better="lower", on_page="peak MB", tag="2_memory/peak_mb"),
    Metric("process_mb", "process MB", _process, unit="MB", better="lower"),
    *(
        Metric(f"{scope}_{counter}_mb", "", _counter(scope, counter), unit="MB", tag=f"2_memory/{scope}_{counter}_mb")
        for scope in SCOPES
        for counter in COUNTERS
    ),
    Metric("profiled_us", "profiled step us", lambda row: row.profile.average_step_time_us, unit="us", profiled=True),
    Metric("profiled_mb", "profiled peak MB", lambda row: row.profile.peak_memory_mb, unit="MB", profiled=True),
    Metric("inflation", "", lambda row: row.inflation, tag="4_profiled/inflation"),
    metric(
        "loss_error",
        "loss error",
        error,
        attrgetter("checked.loss_error"),
        better="lower",
        tag="3_correctness/loss_error",
    ),
    metric(
        "grad_error",
        "grad error",
        error,
        attrgetter("checked.grad_error"),
        better="lower",
        on_page="gradient error",
        tag="3_correctness/grad_error",
    ),
    Metric(
        "measured_error",
        "grad error",
        _measured_error,
        _measured_error_said,
        better="lower",
        on_page="gradient error at size",
    ),
    Metric("useful", "useful %", _useful, lambda row: number(_useful(row), 3), "%"),
    Metric("gap", "gap to exact", _gap, lambda row: error(_gap(row)), better="lower"),
    # of the first screen
    Metric("name", "implementation", words=lambda row: row.name, numeric=False),
    Metric("half", "batches +-", lambda row: of_batches(row, row.scope), lambda row: _half_said(row, row.scope), "%"),
    Metric("ratio", "over the fastest", lambda row: row.over_fastest, lambda row: number(row.over_fastest, 3)),
    Metric("interval", "95% interval", words=lambda row: _interval_words(row.against_fastest)),
    Metric("loss_ratio", "loss over the fastest", _loss_over_fastest, _loss_ratio),
    Metric("verdict", "verdict", words=_verdict, numeric=False),
    # of --find-largest
    Metric("within", "within", _searched("limit_bytes"), lambda row: amount(_searched("limit_bytes")(row)), "bytes"),
    Metric("largest", "largest that fits", _searched("size"), largest, better="higher"),
    Metric("limited_by", "limited by", words=_limited_by, numeric=False),
    Metric("heaviest", "heaviest batch N x T x U+1", _searched("padded_cells"), _heaviest),
    Metric("heaviest_cells", "padded cells", _searched("padded_cells")),
    Metric("largest_mb", "peak MB", _searched("peak_mb"), unit="MB", better="lower"),
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
    "text tab": ("implementation", "step_median", "over_fastest", "loss_median", "peak_mb"),
    "sweep": ("implementation", "status", *_SHORT, *_ERRORS, "useful", "gap"),
    "search": (
        *("implementation", "status", "within", "largest", "limited_by", "heaviest", "heaviest_cells", "largest_mb"),
        *("searched_spread", *_RATES, "version", "torch"),
    ),
    "page": ("label", "status", *_PAGE, "profiled_us", "profiled_mb", "version", "torch"),
    "page sweep": ("label", "status", *_PAGE, "gap", "reason"),
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
