"""Tell which runs measured the same: the settings, machine and batches of two rows, and the newest of equal runs."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, TypeVar

from common.analysis.row import Configuration, Row
from common.core.settings import SETTINGS
from common.records.schema import Batch

Item = TypeVar("Item")


def differing(first: Mapping[str, object], other: Mapping[str, object]) -> List[str]:
    """Return the keys that both have and whose values differ.

    A run whose package was missing knows no hash of the shape file, and that alone does not set it apart.
    """
    return [
        key for key, value in first.items() if value is not None and other.get(key) is not None and other[key] != value
    ]


def same_configuration(first: Configuration, other: Configuration) -> bool:
    """Return whether rows of these configurations stand in one table."""
    return not differing(first, other)


def conditions(row: Row) -> Dict[str, object]:
    """Return all that must agree between two runs that are compared, by the name that messages use: settings, shape
    file, batches, device and machine."""
    known, machine = row.configuration, row.header.machine
    shapes = known["shape_file_sha256"]
    return {
        **{setting.label: known.get(key) for key, setting in SETTINGS.items() if setting.label},
        "shape file": shapes and f"sha256 {shapes[:12]}",
        "batches": _batches(row.batches),
        "device name": row.device_name if row.device != "cpu" else None,
        "machine": machine.cpu and f"{machine.cpu}, {machine.cores} cores",
    }


def _batches(batches: Sequence[Batch]) -> Optional[str]:
    """Return a text that two runs share only if their batches are the same; None where these are not known."""
    if not batches:
        return None
    useful, padded = sum(batch.useful_cells for batch in batches), sum(batch.padded_cells for batch in batches)
    return f"{len(batches)} from {batches[0].index} on of {useful} cells ({padded} padded)"


def differences(first: Row, other: Row) -> List[str]:
    """Return why two runs cannot be compared, as "dtype float32 / float64"; [] where they can."""
    mine, theirs = conditions(first), conditions(other)
    return [f"{label} {mine[label]} / {theirs[label]}" for label in differing(mine, theirs)]


def grouped(items: Iterable[Item], fits: Callable[[List[Item], Item], bool]) -> List[List[Item]]:
    """Return the items in groups: each item joins the first group that it fits, or begins a new one."""
    groups: List[List[Item]] = []
    for item in items:
        group = next((group for group in groups if fits(group, item)), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def newest_first(rows: Sequence[Row]) -> List[Row]:
    """Return the rows by the start of their runs, the newest first; of runs that began at once the last in the list
    comes first."""
    return sorted(reversed(rows), key=lambda row: row.started or "", reverse=True)


def newest_of_each(rows: Sequence[Row], same: Callable[[Row, Row], bool]) -> List[Row]:
    """Return the newest row of each set that is the `same`, in the order given; its `earlier_runs` counts the
    others."""
    groups = grouped(newest_first(rows), lambda group, row: same(group[0], row))
    for newest, *earlier in groups:
        newest.earlier_runs = len(earlier)
    kept = {id(group[0]) for group in groups}
    return [row for row in rows if id(row) in kept]
