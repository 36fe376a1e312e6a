"""List the metrics of a row, each with its title, its unit and the tables that show it.

A metric that names no tables is in those of --details, in the plots of sweeps, and in CSV and JSON
under its key. TensorBoard shows a metric under its tag; one that has no tag, but is in the plots of
sweeps, is metrics/KEY there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from rnnt_bench.analysis import doubts
from rnnt_bench.analysis.row import COUNTERS, SCOPES, Row, gaps, with_kind
from rnnt_bench.core import settings, statistics, text
from rnnt_bench.present.parts import Cell
from rnnt_bench.records import schema

Value = float | str | None


#: Tables of --details.
DETAILS = "results sweep"
#: Tables of a metric that names none.
OPEN = f"{DETAILS} csv plot"


class Metric(NamedTuple):
    """Describe a number, or a text, of a row.

    Attributes:
        key: its name in CSV and JSON
        title: of its column; "" for none
        value: returns the number or text of a row, by which columns are sorted; always None for a
            metric that has `words` alone
        words: returns the text of a row's cell; None to show the value
        tables: names of the tables that show it: "answer" is the screen, "answer-sweep" that of a
            sweep, "results" and "sweep" are --details, "page" the report, "readme" README's; "csv"
            is CSV, JSON and data frames, "plot" a plot of every sweep
        room: where a screen is too narrow for all columns, those with the smallest numbers stay
        better: "lower", "higher" or ""
        numeric: whether the value is a number, which is aligned to the right
        profiled: whether it is from a trace
        tag: of TensorBoard's scalar
        scale: factor from the value to the number that is shown, 1e3 for milliseconds of seconds
    """

    key: str
    title: str
    value: Callable[[Any], Value] = lambda row: None
    words: Callable[[Any], str] | None = None
    tables: str = OPEN
    room: int = 100
    unit: str = ""
    better: str = ""
    numeric: bool = True
    profiled: bool = False
    tag: str = ""
    scale: float = 1

    def is_in(self, table: str) -> bool:
        return table in self.tables.split()

    def scaled(self, row: Any) -> float | None:
        """Return the number that is shown; None where the value is no number."""
        value = self.value(row)
        return value * self.scale if isinstance(value, (int, float)) else None

    def shown(self, row: Any) -> str:
        """Return the text of a row's cell; "-" where it has no value."""
        if self.words:
            return self.words(row)
        if not self.numeric:
            return str(self.value(row) or "-")
        value = self.scaled(row)
        # `number` shortens floats, and returns "-" for None.
        return str(value) if isinstance(value, int) else text.number(value)

    def cell(self, row: Any) -> Cell:
        """Return a row's cell: its text, with its number if the metric is numeric."""
        return Cell(self.shown(row), self.scaled(row) if self.numeric else None)


def metric(
    key: str,
    title: str = "",
    shown: Callable[[Any], str] | None = None,
    value: str | Callable[[Any], Any] = "",
    **fields: Any,
) -> Metric:
    """Return a metric.

    Args:
        key, title: as in Metric
        shown: returns the text of a value; None to show the value itself
        value: returns the value of a row, or is its path in a row (see `at`); "" for the path `key`
        fields: further attributes of Metric
    """
    read = at(value or key) if isinstance(value, str) else value
    words = (lambda row: shown(read(row))) if shown else None
    return Metric(key, title, read, words, **fields)


def values(metrics: Sequence[Metric], row: Any) -> schema.Record:
    """Return key -> value of a row."""
    return {metric.key: metric.value(row) for metric in metrics}


def cells(metrics: Sequence[Metric], row: Any) -> dict[str, Cell]:
    """Return title -> cell of a row, for the metrics that have a title."""
    return {metric.title: metric.cell(row) for metric in metrics if metric.title}


def at(path: str) -> Callable[[Any], Any]:
    """Return a function of a row that follows a path of attributes or keys, such as
    "step.ms.median". It returns None where a part is missing."""

    def value(row: Any) -> Any:
        for key in path.split("."):
            row = row.get(key) if isinstance(row, dict) else getattr(row, key, None)
        return row

    return value


def _marked_error(row: Row) -> str:
    """Return the gradient's error: "2.0e-06", "1.3e-03 !" if it is large, "1.3e-03 < float32" if
    the loss computes in less than float32."""
    error = text.error(row.errors.gradient)
    if "coarse" in doubts.kinds(row):
        return f"{error} < float32"
    return f"{error} !" if doubts.is_far_off(row) else error


def _percent(row: Row, scope: str) -> float | None:
    """Return the percent of a row's time that the device needs at least. None if it is not known,
    or above 100: then the limit is wrong."""
    percent = row.limit_percent.get(scope)
    return None if percent is None or percent > 100 else percent


def _percent_words(row: Row, scope: str) -> str:
    """Return the percent of a row's time that the device needs at least, as "65"; ">100" if it is
    above 100, "-" if it is not known."""
    return ">100" if row.limit_percent.get(scope, 0) > 100 else text.number(_percent(row, scope), 2)


def _batch_spread(row: Row, scope: str) -> float | None:
    """Return half of the distance between the 20th and 80th percentile of the batches' median
    times, in percent of their mean; None if there are fewer than two batches.

    A batch that was timed in several rounds counts once, with the median over its rounds."""
    medians_of_batch = text.gathered(
        (batch, ms)
        for of_round in row.times_of(scope).medians.values()
        for batch, ms in of_round.items()
    )
    medians = list(map(median, medians_of_batch.values()))
    if len(medians) < 2:
        return None
    low, high = (statistics.quantile(medians, part) for part in (0.2, 0.8))
    return 50 * (high - low) / fmean(medians)


def _spread_words(row: Row, scope: str) -> str:
    """Return the spread over batches as "+-1.2%"; "-" if there are fewer than two batches."""
    spread = _batch_spread(row, scope)
    return "-" if spread is None else f"+-{text.number(spread, 2)}%"


def _time_words(row: Row, scope: str) -> str:
    """Return the median time in ms, the spread over batches and the number of samples, as "574.1
    +-1.2% 40"; "-" where the scope was not timed."""
    summary = row.times_of(scope).ms
    if summary is None:
        return "-"
    return f"{text.number(summary.median)} {_spread_words(row, scope)} {summary.n}"


def _over_fastest(row: Row) -> str:
    """Return the time over the fastest row's, as "1.98x slower"; "-" for a row that is not ranked.

    The fastest row has "1.00", with a mark if it is faster than the device's limit allows."""
    if row.over_fastest is None:
        return "-"
    if row.against_fastest.is_fastest:
        return doubts.with_mark("1.00", row, "above limit")
    return f"{row.over_fastest:.2f}x {_verdict(row)}"


def _verdict(row: Row) -> str | None:
    """Return the verdict on a row; None if it is not ranked.

    An "unclear" that comes from a single round, which gives no interval, becomes "one round"."""
    standing = row.against_fastest
    if standing is None:
        return None
    is_single = standing.ratio and standing.ratio.low is None and len(standing.ratio.new) == 1
    return "one round" if is_single and standing.verdict == "unclear" else str(standing.verdict)


def _verdict_words(row: Row) -> str:
    """Return the verdict; "-" for a row that is not ranked.

    "fastest" has a mark if the row is faster than the device's limit allows."""
    word = _verdict(row) or "-"
    return doubts.with_mark(word, row, "above limit") if word == "fastest" else word


def _interval(standing: Any) -> str:
    """Return the interval of a standing's ratio as "0.91-1.18"; "-" where there is none."""
    if standing is None or standing.ratio is None:
        return "-"
    return text.interval(standing.ratio.low, standing.ratio.high, joint="-") or "-"


def _loss_ratio(row: Row) -> str:
    """Return "1.04 0.91-1.18": the time of the loss alone over that of the fastest row, then the
    ratio's interval, if there is one; "-" without a ratio."""
    factor = text.number(at("loss_against_fastest.factor")(row), 3)
    interval = _interval(row.loss_against_fastest)
    return factor if interval == "-" else f"{factor} {interval}"


def _status_words(row: Row) -> str:
    """Return the status for tables. It is "busy" or "imprecise" in place of "ok" if other load or
    rounding makes the numbers doubtful. CSV and JSON have the status itself."""
    if row.status != "ok":
        return row.status
    kinds = doubts.kinds(row)
    if "beside load" in kinds:
        return "busy"
    return "imprecise" if "imprecise" in kinds else "ok"


def amount(size: float | None) -> str:
    """Return a number of bytes as "1.500 GiB", or as "12.00 MiB" below 1 GiB; "-" for None."""
    if size is None:
        return "-"
    if size >= text.GIB:
        return f"{text.number(size / text.GIB)} GiB"
    return f"{text.number(size / text.MB)} MiB"


_ms = partial(metric, unit="ms", better="lower")
_text = partial(metric, numeric=False)
_mb = partial(metric, unit="MB", better="lower")
_error = partial(metric, shown=text.error, better="lower")
#: Of CSV, JSON and data frames alone.
_plain = partial(metric, tables="csv")
#: Every metric, in the order of columns.
ALL = (
    _text(
        "implementation",
        "implementation",
        value=lambda row: with_kind(row.name, row.kind),
        tables=f"{DETAILS} readme",
    ),
    _text("label", "implementation", value="marked_label", tables="page"),
    _text("name", "implementation", tables="answer answer-sweep csv", room=0),
    _plain("kind"),
    Metric(
        "status",
        "status",
        at("status"),
        _status_words,
        tables=f"{DETAILS} answer answer-sweep page csv",
        room=1,
        numeric=False,
    ),
    # times
    Metric(
        "step_spread",
        "step ms +- n",
        words=partial(_time_words, scope="step"),
        tables="results sweep",
    ),
    Metric(
        "loss_spread",
        "loss ms +- n",
        words=partial(_time_words, scope="loss"),
        tables="results sweep",
    ),
    _ms(
        "step_ms",
        "step ms",
        value="step.ms.median",
        tables="answer answer-sweep page readme csv",
        room=2,
        tag="1_time/step_ms_median",
    ),
    # Both are None where the step has no interval.
    _plain("step_ms_low", value=lambda row: (row.step.interval or (None,))[0]),
    _plain("step_ms_high", value=lambda row: (row.step.interval or (None,))[-1]),
    Metric(
        "half",
        "batches +-",
        lambda row: _batch_spread(row, row.scope),
        lambda row: _spread_words(row, row.scope),
        tables="answer",
        room=8,
        unit="%",
    ),
    metric(
        "ratio",
        "over the fastest",
        lambda factor: text.number(factor, 3),
        "over_fastest",
        tables="answer answer-sweep",
        room=3,
    ),
    Metric(
        "over_fastest",
        "over the fastest",
        at("over_fastest"),
        _over_fastest,
        tables="results sweep page readme csv",
    ),
    _plain("over_fastest_with_fast_products", value="with_fast_products.factor"),
    Metric(
        "interval",
        "95% interval",
        words=lambda row: _interval(row.against_fastest),
        tables="answer page readme",
        room=7,
    ),
    Metric(
        "verdict",
        "verdict",
        _verdict,
        _verdict_words,
        tables="answer answer-sweep csv",
        room=4,
        numeric=False,
    ),
    _ms(
        "loss_ms",
        "loss ms",
        value="loss_alone.ms.median",
        tables="answer answer-sweep page readme csv",
        room=6,
        tag="1_time/loss_ms_median",
    ),
    Metric(
        "loss_ratio",
        "loss over the fastest",
        at("loss_against_fastest.factor"),
        _loss_ratio,
        tables="answer",
        room=9,
    ),
    # memory
    Metric(
        "peak_memory_mb",
        "peak memory MB",
        at("peak_mb"),
        lambda row: doubts.with_mark(text.number(row.peak_mb), row, "beyond"),
        tables="results sweep answer answer-sweep page readme csv",
        room=5,
        unit="MB",
        better="lower",
        tag="2_memory/peak_mb",
    ),
    # errors
    _error(
        "loss_error",
        "loss error",
        value=lambda row: row.errors.loss,
        tables="results sweep page csv",
        tag="3_correctness/loss_error",
    ),
    Metric(
        "grad_error",
        "grad error",
        lambda row: row.errors.gradient,
        _marked_error,
        tables="results sweep answer page readme csv",
        room=20,
        better="lower",
        tag="3_correctness/grad_error",
    ),
    _plain("imprecise"),
    metric(
        "useful",
        "useful %",
        lambda share: text.number(share, 3),
        lambda row: row.useful_fraction and 100 * row.useful_fraction,
        tables="sweep",
        unit="%",
    ),
    _error("gap", "gap to exact", tables="sweep answer-sweep csv", room=10),
    # rates, and parts of the times
    Metric(
        "limits",
        "% of limit step / loss",
        words=lambda row: (
            " / ".join(_percent_words(row, scope) for scope in SCOPES) if row.limit_percent else "-"
        ),
        tables="results sweep answer",
        room=21,
    ),
    *(
        Metric(
            f"{scope}_limit",
            f"% of limit, {scope}",
            partial(_percent, scope=scope),
            partial(_percent_words, scope=scope),
            tables="page csv",
            unit="%",
            better="higher",
        )
        for scope in SCOPES
    ),
    *(
        metric(
            f"{unit}_per_second",
            f"{unit} /s",
            tables="results sweep answer page csv",
            room=16,
            better="higher",
            tag=f"1_time/{unit}_per_second",
        )
        for unit in ("utterances", "frames")
    ),
    *(
        _ms(
            f"step_{part}",
            part,
            value=f"step.ms.{part}",
            tables="page",
            tag=f"1_time/step_ms_{part}",
        )
        for part in ("p20", "p80")
    ),
    *(
        _ms(f"loss_{part}", value=f"loss_alone.ms.{part}", tables="", tag=f"1_time/loss_ms_{part}")
        for part in ("p20", "p80")
    ),
    metric("step_n", "n", value="step.ms.n", tables="page"),
    _ms("forward_ms", "forward ms", value="step.forward.median", tables="page csv"),
    metric("loss_n", "loss n", value="loss_alone.ms.n", tables="page"),
    _mb(
        "process_mb",
        "process MB",
        value=lambda row: at("memory.step.process_mb")(row) or at("memory.loss.process_mb")(row),
        tables="page csv",
    ),
    *(
        metric(
            f"{scope}_{counter}_mb",
            value=f"memory.{scope}.{counter}_mb",
            tables="",
            unit="MB",
            tag=f"2_memory/{scope}_{counter}_mb",
        )
        for scope in SCOPES
        for counter in COUNTERS
    ),
    metric(
        "average_step_time_us",
        "profiled step us",
        value="profile.average_step_time_us",
        tables="results answer page csv",
        room=17,
        unit="us",
        profiled=True,
    ),
    metric(
        "profiled_peak_mb",
        "profiled peak MB",
        value="profile.peak_memory_mb",
        tables="results answer page csv",
        room=18,
        unit="MB",
        profiled=True,
    ),
    # the code that was measured
    _text(
        "version",
        "version",
        value=lambda row: (row.environment.implementation_version or "").split("+")[0] or None,
        tables="results answer page csv",
    ),
    _text(
        "torch",
        "torch",
        value=lambda row: row.torch or None,
        tables="results answer page csv",
        room=15,
    ),
    # These are columns of CSV and JSON alone.
    *(_plain(key) for key in ("device", "device_name")),
    _plain("dtype", value="configuration.dtype"),
    _plain("preset", value="header.settings.preset"),
    *(
        _plain(key, value=f"configuration.{key}")
        for key in ("vocab_size", "batch_size", "max_frames", "threads")
    ),
    _plain("rounds"),
    _plain("samples", value=lambda row: len(row.timed)),
    _plain("flagged_samples", value=lambda row: sum(sample.is_flagged for sample in row.timed)),
    _plain("loaded_samples", value=lambda row: sum(sample.beside_load for sample in row.timed)),
    _plain("repeated_rounds", value=lambda row: sum(row.repeated.values())),
    _plain("others_cpu"),
    _plain("bytes_per_second", value="rates.memory"),
    _plain("torch_operations_per_second", value="rates.torch"),
    _plain("loop_operations_per_second", value="rates.loop"),
    _plain("measured_batches", value=lambda row: len(row.batches) or None),
    _plain("useful_cells", value=lambda row: row.cells[0] or None),
    _plain("padded_cells", value=lambda row: row.cells[1] or None),
    _plain("earlier_runs", value=lambda row: len(row.earlier)),
    *(_plain(key, value=f"header.{key}") for key in ("suffix", "run_id", "started")),
    _plain("log_dir", value=lambda row: str(row.folder)),
    _plain("reason"),
)
METRICS: dict[str, Metric] = {metric.key: metric for metric in ALL}


def columns(table: str, rows: Sequence[Row]) -> list[Metric]:
    """Return the columns of a table that are shown for these rows: those where any row has a value,
    and the status if any row has one other than "ok".

    Tables of --details show their columns without values too. But a metric that is also in the
    plots of sweeps needs a value in every table."""

    def tells(metric: Metric) -> bool:
        """Tell whether any row has a value, or a status other than "ok"."""
        if metric.key == "status":
            return any(_status_words(row) != "ok" for row in rows)
        return any(metric.shown(row) not in ("-", "") for row in rows)

    in_table = [metric for metric in METRICS.values() if metric.is_in(table)]
    if table in DETAILS.split():
        return [metric for metric in in_table if not metric.is_in("plot") or tells(metric)]
    return [metric for metric in in_table if tells(metric)]


def differing(rows: Sequence[Row]) -> list[str]:
    """Return the keys of the settings with different values in `rows`, without settings that are
    columns of CSV anyway. A value of None is not known, and is left out."""
    items = (item for row in rows for item in row.configuration.items())
    by_key = text.gathered((key, value) for key, value in items if value is not None)
    differ = [key for key, group in by_key.items() if any(value != group[0] for value in group)]
    return [key for key in differ if key not in METRICS or not METRICS[key].is_in("csv")]


def plain(row: Row, further: Sequence[str] = ()) -> schema.Record:
    """Return a row's values as CSV has them, with its swept settings.

    further: keys of settings to add, such as those that `differing` returns
    """
    record = values([metric for metric in METRICS.values() if metric.is_in("csv")], row)
    for key in further:
        value = row.configuration.get(key)
        record[key] = settings.worded(tuple(value)) if isinstance(value, list) else value
    return {**record, **row.header.values}


def exported(row: Row, further: Sequence[str] = ()) -> schema.Record:
    """Return a row's values as JSON has them: first those of CSV, then those for which CSV has no
    room, most of them dicts or lists. Times are in ms, memory is in MB (2**20 bytes).

    further: keys of settings to add, such as those that `differing` returns
    """
    checked = row.checked
    parts = {
        "with_fast_products": _standing(row.with_fast_products),
        "rates": row.rates._asdict(),
        "step": row.step._asdict(),
        "loss": row.loss_alone._asdict(),
        "memory": row.memory,
        "against_fastest": _standing(row.against_fastest),
        "loss_against_fastest": _standing(row.loss_against_fastest),
        "limit_percent": row.limit_percent,
        "at_size": checked.at_size or {},
        "small_batches": {
            key: getattr(checked, key) for key in ("loss_error", "grad_error", "slope_error")
        },
        "approximation_gaps": gaps(checked),
        "windows": row.profile.windows,
        "profiled_stages_us": row.profile.label_us,
        "options": row.environment.options,
        "configuration": row.configuration,
        "sweep": row.header.values,
        "notes": [doubt.words for doubt in doubts.doubts(row)],
    }
    return {**plain(row, further), **schema.as_written(parts)}


def _standing(standing: Any) -> schema.Record:
    """Return a Standing as JSON has it; {} for None."""
    return standing.as_json() if standing else {}


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row that TensorBoard shows, by their tags."""
    result = {}
    for metric in METRICS.values():
        tag = metric.tag or (f"metrics/{metric.key}" if metric.is_in("plot") else "")
        value = metric.scaled(row)
        if tag and value is not None:
            result[tag] = value
    return result
