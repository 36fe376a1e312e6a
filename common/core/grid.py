"""--sweep: parses the settings that vary and their values, and makes the grid of all combinations."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from common.core import settings
from common.core.errors import UserError
from common.core.settings import worded
from common.core.text import closest

PASSES = ("correctness", "timing", "memory")

Values = Dict[str, Any]


class Axis(NamedTuple):
    """Hold a setting, by its key in Settings, and the values that it is given."""

    key: str
    values: Tuple[Any, ...]


def axis(text: str) -> Axis:
    """Parse "vocab-size=500,1000", with values as --vocab-size takes them.  Raises UserError."""
    name, _, listed = text.partition("=")
    name = name.strip()
    setting = settings.SWEEPABLE.get(flag(name))
    if setting is None:
        keys = ", ".join(settings.SWEEPABLE)
        advice = closest(flag(name), settings.SWEEPABLE)
        raise UserError(f"{text!r}: give KEY=VALUE,VALUE,... with one of {keys}{advice}")
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not words:
        raise UserError(f"{text!r}: give at least one value, as in {name}=A,B")
    try:
        values = tuple(setting.parse(word) for word in words)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    repeated = [str(value) for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise UserError(f"{name}: {repeated[0]} is given twice")
    return Axis(setting.key, values)


def flag(key: str) -> str:
    """Return a setting as it is written on the command line: "vocab-size"."""
    return key.replace("_", "-")


def cells(axes: Sequence[Axis]) -> List[Values]:
    """Return all combinations, the values of the last axis varying fastest."""
    return [
        {axis.key: value for axis, value in zip(axes, values)}
        for values in itertools.product(*(axis.values for axis in axes))
    ]


def words(cell: Mapping[str, Any]) -> str:
    """Return a cell in words, such as "vocab-size 500, dtype float32"."""
    return ", ".join(f"{flag(str(key))} {worded(value)}" for key, value in cell.items())


def check(axes: Sequence[Axis], given: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that is swept twice, or both swept and given."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {flag(key)} is given twice: name all values in one, as in {flag(key)}=A,B")
        if given.get(key) is not None:
            raise UserError(f"--sweep {flag(key)}: --{flag(key)} is given too; remove one of them")
