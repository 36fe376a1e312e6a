"""--sweep: the settings that can be varied, their values as the flags themselves take them, and the grid of all."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from common.core import settings
from common.core.errors import UserError

#: How a run measures, not what: a sweep has one of each.
FIXED = (
    *("shape_file", "preset", "device", "passes", "scopes", "rounds", "spread", "max_seconds", "max_samples"),
    *("schedule", "record_shapes", "with_stack", "profile_memory", "gzip_traces", "memory_snapshot"),
    *("find_largest", "memory_limit", "largest_cap"),
)
PASSES = ("correctness", "timing", "memory")

Values = Dict[str, Any]


class Axis(NamedTuple):
    """A setting, by its key in Settings, and the values it is given."""

    key: str
    values: Tuple[Any, ...]


def flag(key: str) -> str:
    """A setting as it is written on the command line: "vocab-size"."""
    return key.replace("_", "-")


def cells(axes: Sequence[Axis]) -> List[Values]:
    """All combinations, the values of the last axis varying fastest."""
    return [
        {axis.key: value for axis, value in zip(axes, values)}
        for values in itertools.product(*(axis.values for axis in axes))
    ]


def said(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def words(cell: Mapping[str, Any]) -> str:
    """ "vocab-size 500, dtype float32"."""
    return ", ".join(f"{flag(str(key))} {said(value)}" for key, value in cell.items())


def check(axes: Sequence[Axis], given: Mapping[str, Any]) -> None:
    """Raises UserError for a setting that is swept twice, or both swept and given."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {flag(key)}: is given twice; name all its values in one, as in {flag(key)}=A,B")
        if given.get(key) is not None:
            raise UserError(f"--sweep {flag(key)}: --{flag(key)} is given too; leave one of them out")


def check_passes(passes: Sequence[str]) -> None:
    """Raises UserError for a pass that a sweep has no place for."""
    if "trace" in passes:
        words = f"a sweep has {', '.join(PASSES)} and keeps no traces; run the cell alone to have its trace"
        raise UserError(f"--passes: {words}")


def shared(all_settings: Sequence[settings.Settings], axes: Sequence[Axis]) -> Dict[str, Any]:
    """The settings that all cells have in common, those that are swept left out."""
    first, *others = [resolved.to_json() for resolved in all_settings]
    swept = {axis.key for axis in axes}
    return {
        key: value for key, value in first.items() if key not in swept and all(other[key] == value for other in others)
    }
