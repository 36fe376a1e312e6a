"""--sweep: the settings that can be varied, their values as the flags themselves take them, and the grid of all."""

from __future__ import annotations

import argparse
import itertools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from common import settings
from common.errors import UserError

#: How a run measures, not what: a sweep has one of each.
FIXED = (
    "shape_file",
    "preset",
    "device",
    "passes",
    "scopes",
    "rounds",
    "spread",
    "max_seconds",
    "max_samples",
    "schedule",
    "record_shapes",
    "with_stack",
    "profile_memory",
    "gzip_traces",
    "find_largest",
    "memory_limit",
    "largest_cap",
    "memory_snapshot",
)
PASSES = ("correctness", "timing", "memory")

Cell = Dict[str, Any]


class Axis(NamedTuple):
    """A setting, by its key in Settings, and the values it is given."""

    key: str
    values: Tuple[Any, ...]


def flag(key: str) -> str:
    """A setting as it is written on the command line: "vocab-size"."""
    return key.replace("_", "-")


def sweepable(parser: argparse.ArgumentParser) -> Dict[str, argparse.Action]:
    """The flags of `parser` that --sweep takes, by their names without dashes: those of one value that say what is
    measured."""
    known = {field.name for field in settings.fields(settings.Settings)} - set(FIXED)
    return {
        flag(action.dest): action
        for action in parser._actions
        if action.dest in known and action.option_strings and action.nargs in (None, "?")
    }


def axis_of(parser: argparse.ArgumentParser) -> Callable[[str], Axis]:
    """The type of --sweep: "vocab-size=500,1000" with values as --vocab-size takes them."""

    def parse(text: str) -> Axis:
        name, _, listed = text.partition("=")
        there = sweepable(parser)
        action = there.get(flag(name.strip()))
        if action is None:
            raise argparse.ArgumentTypeError(f"{text!r}: give KEY=VALUE,VALUE,... with one of {', '.join(there)}")
        words = [word.strip() for word in listed.split(",") if word.strip()]
        if not words:
            raise argparse.ArgumentTypeError(f"{text!r}: give at least one value, as in {name.strip()}=A,B")
        try:
            values = tuple(_value(action, word) for word in words)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name.strip()}: {error}") from None
        twice = [str(value) for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise argparse.ArgumentTypeError(f"{name.strip()}: {twice[0]} is given twice")
        return Axis(action.dest, values)

    return parse


def _value(action: argparse.Action, word: str) -> Any:
    """A value as the flag itself would take it.  Raises ArgumentTypeError."""
    convert = action.type or str
    try:
        value = convert(word)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"not a value of --{flag(action.dest)}: {word!r}") from None
    if action.choices is not None and value not in action.choices:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(map(str, action.choices))}")
    return value


def cells(axes: Sequence[Axis]) -> List[Cell]:
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
        raise UserError(
            f"--passes: a sweep has {', '.join(PASSES)} and keeps no traces; run the cell alone to have its trace"
        )


def shared(all_settings: Sequence[settings.Settings], axes: Sequence[Axis]) -> Dict[str, Any]:
    """The settings that all cells have in common, those that are swept left out."""
    first, *others = [chosen.to_json() for chosen in all_settings]
    swept = {axis.key for axis in axes}
    return {
        key: value for key, value in first.items() if key not in swept and all(other[key] == value for other in others)
    }
