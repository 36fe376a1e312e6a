"""Which runs are compared with which: two sides read from disk, paired by implementation and settings.

A pair is only made of runs that measured the same thing on the same kind of machine; what differs otherwise is named
in the error.  Leaves out what the pairs say (comparison).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from common import workloads
from common.errors import UserError
from common.results import largest, records
from common.results.exports import plain
from common.results.records import Record

#: Settings that decide what is measured, as tables call them; those of the batches and of the pruned losses see below.
_SETTINGS = {
    "dtype": "dtype",
    "sort_utterance": "sorted",
    "batches": "choice of batches",
    "num_batches": "number of batches",
    "vocab_size": "vocabulary",
    "encoder_dim": "joiner dimension",
    "seed": "seed",
}
#: Likewise, of common.workloads.
WORKLOAD = {
    "subsampling": "subsampling",
    "token_scale": "token scale",
    "concatenate": "utterances as one",
    "frames": "T of every utterance",
    "tokens": "U of every utterance",
    "logits": "logits",
    "margin": "margin",
}


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """One results.jsonl.  jobs: the records of each job's last attempt."""

    path: Path
    header: Record
    jobs: Dict[str, List[Record]]

    @property
    def name(self) -> str:
        return str(self.header["name"])

    @property
    def run_id(self) -> str:
        return str(self.header.get("run_id"))

    @property
    def started(self) -> str:
        return str(self.header.get("started") or "")

    @property
    def environment(self) -> Record:
        """The newest ``environment`` record; empty where no job got so far (a missing package)."""
        found = [line for lines in self.jobs.values() for line in lines if line["record"] == "environment"]
        return found[-1] if found else {}

    @property
    def failure(self) -> Optional[Tuple[str, str]]:
        """(status, reason) of the first job that is not ok; None when all are."""
        for job, lines in self.jobs.items():
            status = lines[-1].get("status") if lines[-1]["record"] == "status" else "interrupted"
            if status != "ok":
                return str(status), f"{job}: {lines[-1].get('reason') or 'stopped before its end'}"
        return None if self.jobs else ("interrupted", "stopped before its first pass")

    @property
    def measured(self) -> bool:
        """Is there anything to compare?"""
        return any(self.lines(kind) for kind in ("sample", "memory")) or self.correctness is not None

    @property
    def correctness(self) -> Optional[Record]:
        """The ``correctness`` record, of a failed check too."""
        found = [line for lines in self.jobs.values() for line in lines if line["record"] == "correctness"]
        return found[-1] if found else None

    def lines(self, kind: str) -> List[Record]:
        """Records of a kind, of the jobs that ended well."""
        ended = [lines for lines in self.jobs.values() if lines[-1].get("status") == "ok"]
        return [line for lines in ended for line in lines if line["record"] == kind]

    def what_it_measures(self) -> Dict[str, Any]:
        """Everything that has to agree with a run it is compared with; None for what is not known or does not apply."""
        settings, environment = self.header["settings"], self.environment
        machine = self.header.get("machine") or {}
        device = environment.get("device") or str(settings.get("device") or "").split(":")[0] or None
        found = {label: settings.get(key) for key, label in _SETTINGS.items()}
        workload = workloads.comparable(settings)
        found.update({label: workload[key] for key, label in WORKLOAD.items()})
        found["max frames" if settings.get("sort_utterance") else "batch size"] = settings.get(
            "max_frames" if settings.get("sort_utterance") else "batch_size"
        )
        shapes = environment.get("shape_file_sha256")
        found.update(
            {
                "shape file": shapes and f"sha256 {shapes[:12]}",
                "batches": _batches(environment.get("batches")),
                "device": device,
                "device name": environment.get("device_name") if device != "cpu" else None,
                "threads": environment.get("threads") or settings.get("threads"),
                "denormals": environment.get("denormals") or settings.get("denormals"),
                "machine": machine.get("cpu") and f"{machine['cpu']}, {machine.get('cores')} cores",
            }
        )
        if records.kind_of(self.header) == "pruned":
            found.update({"pruned recipe": settings.get("pruned_recipe"), "prune range": settings.get("prune_range")})
        return found


@dataclass(frozen=True, eq=False)
class Pair:
    baseline: MeasuredRun
    new: MeasuredRun

    @property
    def name(self) -> str:
        return self.new.name if self.one_loss else f"{self.new.name} against {self.baseline.name}"

    @property
    def one_loss(self) -> bool:
        """Is it one implementation on both sides?"""
        return self.baseline.name == self.new.name

    @property
    def together(self) -> bool:
        """Were both sides measured in the rounds of one run, in alternation?"""
        return self.baseline.run_id == self.new.run_id


@dataclass(frozen=True)
class Sides:
    """What two measurements have in common, and what they have not: runs of the baseline that the new side has none
    for (gone), runs of the new side alone (added)."""

    pairs: List[Pair]
    gone: Sequence[MeasuredRun] = ()
    added: Sequence[MeasuredRun] = ()

    def label(self, run: MeasuredRun) -> str:
        """An implementation's name, or its folder's where the implementation was compared with other settings."""
        compared = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.path.parent.name if compared else run.name


def _batches(described: Optional[List[Dict[str, int]]]) -> Optional[str]:
    """In so many words that other batches read otherwise."""
    if not described:
        return None
    cells = [sum(batch[key] for batch in described) for key in ("useful_cells", "padded_cells")]
    return f"{len(described)} from {described[0]['index']} on of {cells[0]} cells ({cells[1]} padded)"


def differences(one: MeasuredRun, other: MeasuredRun) -> List[str]:
    """What two runs cannot be compared for, as "dtype float32 / float64"; what one of them does not know is no
    difference."""
    mine, theirs = one.what_it_measures(), other.what_it_measures()
    return [
        f"{label} {mine[label]} / {theirs[label]}"
        for label in mine
        if mine[label] is not None and theirs.get(label) is not None and mine[label] != theirs[label]
    ]


def read_runs(path: Path) -> List[MeasuredRun]:
    """The runs at or under `path`: a results.jsonl, a run folder or a log folder.  Raises UserError where there is none
    or one cannot be read."""
    if path.is_dir():
        found = sorted(
            Path(folder) / records.FILE_NAME for folder, _, names in os.walk(path) if records.FILE_NAME in names
        )
    elif path.is_file():
        found = [path]
    else:
        raise UserError(f"{path}: no such file or folder; name a log folder, a run folder or a {records.FILE_NAME}")
    if not found:
        raise UserError(f"{path}: no {records.FILE_NAME} in it; name a folder that a benchmark wrote")
    runs = [run for run in map(_read, found) if not largest.is_search(run.header)]
    if not runs:
        raise UserError(f"{path}: holds only what --find-largest wrote; name a folder with runs that were timed")
    return runs


def _read(path: Path) -> MeasuredRun:
    lines = records.read(path)
    header = records.run_header(lines)
    try:
        run = MeasuredRun(path, header, records.latest_jobs(lines))
        _ = run.name, run.failure, run.what_it_measures()  # raise here what would be raised later
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: not as this suite writes its results ({type(error).__name__}: {error}); "
            f"name a {records.FILE_NAME} that a benchmark wrote"
        ) from error
    return run


def _newest_of_each(runs: Sequence[MeasuredRun]) -> List[MeasuredRun]:
    """Of several runs of one implementation that measured the same, the newest."""
    kept: List[MeasuredRun] = []
    for run in sorted(runs, key=lambda run: run.started, reverse=True):
        if not any(run.name == newer.name and not differences(run, newer) for newer in kept):
            kept.append(run)
    return sorted(kept, key=lambda run: run.path)


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Pairs of two paths, of the implementations of these names where some are given.

    One run on each side is a pair whatever the names.  Raises UserError where nothing is on both sides, and where an
    implementation is but was measured otherwise.
    """
    before, after = (_newest_of_each(read_runs(path)) for path in (baseline, new))
    if len(before) == len(after) == 1 and not only:
        return Sides([checked(before[0], after[0])])
    there = list(dict.fromkeys(run.name for run in [*before, *after]))
    unknown = [name for name in only if name not in there]
    if unknown:
        raise UserError(
            f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(plain, there))}"
        )
    before, after = ([run for run in side if not only or run.name in only] for side in (before, after))
    pairs: List[Pair] = []
    for name in there:
        mine = [run for run in before if run.name == name]
        theirs = [run for run in after if run.name == name]
        fitting = [Pair(one, other) for one in mine for other in theirs if not differences(one, other)]
        pairs += fitting or ([checked(_newest(mine), _newest(theirs))] if mine and theirs else [])
    compared = [id(run) for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if id(run) not in compared] for side in (before, after))
    if not pairs:
        sides = ((baseline, gone), (new, added))
        held = (f"{path} has {', '.join(plain(run.name) for run in runs) or 'none'}" for path, runs in sides)
        raise UserError(f"no implementation is in both: {'; '.join(held)}")
    return Sides(pairs, gone, added)


def within(log: Path, baseline: str, new: str) -> List[Pair]:
    """The pair of two implementations of one log folder: of the newest run that has both, else the newest of each.

    Raises UserError when one is not there or they were measured otherwise.
    """
    found = read_runs(log)
    sides = [[run for run in found if run.name == name] for name in (baseline, new)]
    for name, side in zip((baseline, new), sides):
        if not side:
            there = ", ".join(dict.fromkeys(plain(run.name) for run in found))
            raise UserError(f"{log}: no run of {name} in it; there are {there}")
    pairs = [Pair(one, other) for one in sides[0] for other in sides[1]]
    together = [pair for pair in pairs if pair.together and not differences(pair.baseline, pair.new)]
    if together:
        return [max(together, key=lambda pair: pair.baseline.started)]
    return [checked(_newest(sides[0]), _newest(sides[1]))]


def checked(one: MeasuredRun, other: MeasuredRun) -> Pair:
    """The pair, or UserError with what differs."""
    different = differences(one, other)
    if different:
        raise UserError(
            f"{one.path.parent} and {other.path.parent} are not comparable: "
            f"{'; '.join(map(plain, different))}; "
            "run both with the same flags on the same machine"
        )
    return Pair(one, other)


def _newest(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    return max(runs, key=lambda run: run.started)
