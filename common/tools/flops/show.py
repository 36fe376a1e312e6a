"""Tells from the records of a count how many operations a model takes, by module, by class of module or by operator."""

from __future__ import annotations

from operator import itemgetter
from typing import Dict, List, Optional, Sequence, Union

from rnnt_bench.records import schema

# isort: split
import msgspec

from rnnt_bench.analysis import metrics
from rnnt_bench.core.text import percent, quantity
from rnnt_bench.present.parts import Cell, Table, Values, tabulated
from rnnt_bench.tools import kept

TOOL, TITLE = "flops", "Operations of a model"
JOB = "count"
BREAKDOWNS = ("module", "class", "operator")
AMOUNTS = ("calls", "trainable", "frozen", "macs", "flops", "backward_macs", "backward_flops")


class Config(msgspec.Struct, kw_only=True):
    """Hold what a count was asked: the flags that say what is counted, those of a table, and the input's rate."""

    flags: schema.Record
    by: str
    depth: Optional[schema.Count]
    sample_rate: schema.Positive


class Module(msgspec.Struct, kw_only=True):
    """A module of a counted model: its path ("" of the model), and its own parameters."""

    path: str
    kind: str = msgspec.field(name="class")
    calls: schema.Count
    trainable: schema.Count
    frozen: schema.Count


class Operator(msgspec.Struct, kw_only=True):
    """Operations of one operator within one module, forward or backward, in all runs."""

    path: str
    operator: str
    phase: str
    calls: schema.Count
    macs: schema.Count
    flops: schema.Count


class Bucket(msgspec.Struct, kw_only=True):
    """Hold utterances of similar length: samples and MACs of each, FLOPs of all."""

    name: str
    samples: List[schema.Positive]
    macs: List[float]
    flops: schema.Count

    def row(self, sample_rate: int) -> Values:
        """Return the bucket as CSV and JSON have it; rates in MACs per second of audio."""
        seconds = [samples / sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        lengths = {"utterances": len(seconds), "shortest_s": min(seconds), "longest_s": max(seconds)}
        counts = {"macs": round(sum(self.macs)), "flops": self.flops, "macs_per_s": sum(self.macs) / sum(seconds)}
        return {"bucket": self.name, **lengths, **counts, "macs_per_s_min": min(rates), "macs_per_s_max": max(rates)}


class Counted(msgspec.Struct, kw_only=True):
    """Hold a count: utterances where the input is audio, modules and operators, and what was not counted in words."""

    buckets: List[Bucket]
    modules: List[Module]
    counts: List[Operator]
    not_counted: List[str]


def parts_of(counted: Counted, by: str = "module", depth: Optional[int] = None) -> List[Values]:
    """Return the parts by one of BREAKDOWNS as CSV and JSON have them, and the total at the end.  Modules, each with
    all below it, go down to `depth` names below the model, in its order, then paths that are no module; others begin
    with the largest."""
    kinds = {module.path: module.kind for module in counted.modules}
    parts: Dict[str, Values] = {}

    def part(name: str, kind: str = "") -> Values:
        return parts.setdefault(name, {"name": name, "kind": kind, **dict.fromkeys(AMOUNTS, 0)})

    for module in counted.modules if by == "module" else ():
        if depth is None or len(_above(module.path)) - 1 <= depth:
            part(module.path, module.kind)["calls"] = module.calls
    total: Values = {"name": "total", "kind": "", **dict.fromkeys(AMOUNTS, 0)}
    called = {"class": Module, "operator": Operator}.get(by, ())
    entries: List[Union[Module, Operator]] = [*counted.modules, *counted.counts]
    for each in entries:
        if isinstance(each, Module):
            amounts, keys = {"trainable": each.trainable, "frozen": each.frozen}, []
        else:
            amounts, keys = {"macs": each.macs, "flops": each.flops}, [each.operator]
            if each.phase == "backward":
                amounts.update(backward_macs=each.macs, backward_flops=each.flops)
        if by == "class":
            keys = [kinds.get(each.path, each.path)]
        elif by == "module":  # a path in parentheses is outside of the model
            above = [key for key in _above(each.path) if key in parts and (key or not each.path.startswith("("))]
            keys = above or [each.path]
        for of in [total, *map(part, keys)]:
            of["calls"] += each.calls if isinstance(each, Operator if of is total else called) else 0
            for key, amount in amounts.items():
                of[key] += amount
    rows = [*parts.values()]
    if by != "module":
        rows.sort(key=lambda row: (-row["flops"], -row["macs"], row["name"]))
    for row in [*rows, total]:
        for key in ("macs", "flops"):
            row[f"{key}_share"] = row[key] / total[key] if total[key] else None
    return [*rows, total]


def _above(path: str) -> List[str]:
    """Return the paths of the modules that a module lies in, the model's "" first, and its own."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names) + 1)]


def _amount(key: str, title: str = "", unit: str = "") -> metrics.Metric:
    return metrics.metric(key, title, lambda value: quantity(value, unit), value=itemgetter(key), unit=unit)


NUMBERS = (
    _amount("calls", "calls"),
    _amount("trainable", "trainable"),
    _amount("frozen", "frozen"),
    _amount("macs", "MACs", "MACs"),
    metrics.metric("macs_share", "of MACs", percent, value=itemgetter("macs_share")),
    _amount("flops", "FLOPs", "FLOPs"),
    metrics.metric("flops_share", "of FLOPs", percent, value=itemgetter("flops_share")),
    _amount("backward_macs", "backward MACs", "MACs"),
    _amount("backward_flops", "backward FLOPs", "FLOPs"),
)
BUCKETS = (
    metrics.metric("utterances", "utterances", value=itemgetter("utterances")),
    metrics.metric("shortest_s", "shortest s", "{:.2f}".format, value=itemgetter("shortest_s"), unit="s"),
    metrics.metric("longest_s", "longest s", "{:.2f}".format, value=itemgetter("longest_s"), unit="s"),
    _amount("macs", "MACs", "MACs"),
    _amount("flops", "FLOPs", "FLOPs"),
    _amount("macs_per_s", "MACs per s of audio", "MACs"),
    _amount("macs_per_s_min", "least", "MACs"),
    _amount("macs_per_s_max", "most", "MACs"),
)


def parts_table(parts: Sequence[Values], by: str) -> Table:
    """Return a row for each part, the total last; a column for what is there: the backward, frozen parameters."""
    absent = {key for key in ("frozen", "backward_macs", "backward_flops") if not parts[-1][key]}
    absent |= {"trainable", "frozen"} if by == "operator" else set()
    shown = [number for number in NUMBERS if number.key not in absent]
    rows = []
    for part in parts:
        kind = {"class": Cell(part["kind"], part["kind"])} if by == "module" else {}
        rows.append({by: Cell(part["name"] or "(model)", part["name"]), **kind, **metrics.cells(shown, part)})
    return tabulated(by, f"by {by}" + (", each with all below it" if by == "module" else ""), rows)


def answer(run: kept.Kept) -> kept.Answer:
    """Return what a count found out: the total, utterances by length where the input is audio, and the parts.  Rows for
    CSV and JSON are those of the utterances, without any of the parts and the total."""
    config, job = schema.typed(run.header.config, Config), run.job(JOB)
    if not job.values:
        return kept.Answer(run.header.name, failures=[f"{job.status}: {job.reason}"], statuses=[job.status])
    counted = job.of(Counted)[0]
    parts, buckets = parts_of(counted, config.by, config.depth), counted.buckets
    total = parts[-1]
    parameters = total["trainable"] + total["frozen"]
    if len(buckets) > 1:
        samples, macs = ([each for bucket in buckets for each in getattr(bucket, key)] for key in ("samples", "macs"))
        buckets = [*buckets, Bucket(name="all", samples=samples, macs=macs, flops=total["flops"])]
    spoken = [bucket.row(config.sample_rate) for bucket in buckets]
    by_length = [{"bucket": Cell(row["bucket"]), **metrics.cells(BUCKETS, row)} for row in spoken]
    spoken_table = [tabulated("buckets", "utterances by length", by_length)] if spoken else []
    words = f"trainable {total['trainable']}, frozen {total['frozen']}"
    sums = [f"{quantity(total[key], unit)} ({total[key]})" for key, unit in (("macs", "MACs"), ("flops", "FLOPs"))]
    return kept.Answer(
        run.header.name,
        total=[f"total: {', '.join(sums)}", f"parameters: {quantity(parameters)} ({parameters}; {words})"],
        tables=[*spoken_table, parts_table(parts, config.by)],
        lines=[f"not counted: {line}" for line in counted.not_counted],
        rows=spoken or parts,
        statuses=[job.status],
    )


SLICE = kept.slice_of(TOOL, TITLE, answer)
