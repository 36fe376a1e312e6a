"""Configuration files: YAML as plain data, converted to Structs that say which keys there are and of which type.

Values of the command line go over those of the file.  Every mistake is one line: the file, the key, what to write."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Type,
    TypeVar,
    Union,
    get_args,
    get_type_hints,
)

from common.core import plain_yaml
from common.core.errors import UserError
from common.core.files import read_text
from common.core.guard import require
from common.core.text import closest, shown, without_middle
from common.setup.environments import ENVIRONMENTS

require("msgspec")

import msgspec  # noqa: E402
from msgspec import Meta, Struct  # noqa: E402

from common.records.schema import Record, as_written  # noqa: E402

Converted = TypeVar("Converted", bound=Struct)

Text = Annotated[str, Meta(min_length=1)]
#: Whole numbers from 1 and from 0 on.
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Numbers = Annotated[List[Union[int, float]], Meta(min_length=1)]

LONGEST_MESSAGE = 500  # characters of what msgspec says
#: How messages call the types of YAML.
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list such as [1, 2]",
    "object": "keys and values",
}
BOUNDS = {">": "above", "<": "below", ">=": "of at least", "<=": "of at most"}


def read(path: Path) -> Dict[str, Any]:
    """Return the parts in a YAML file by name; null is a part without keys.  Raises UserError."""
    values = parsed(read_text(path, plain_yaml.LARGEST_FILE), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: give keys and values, such as `general:`, not {shown(values)}")
    return {key: {} if value is None else value for key, value in values.items()}


def parsed(text: str, where: str) -> Any:
    """Return what the YAML `text` says.  where: names it in messages.  Raises UserError."""
    try:
        return plain_yaml.parsed(text, where)
    except ImportError as error:
        raise UserError("configurations need PyYAML, which is not installed here: pip install PyYAML") from error


def converted(values: Any, kind: Type[Converted], where: str) -> Converted:
    """Return plain values as the Struct `kind`.  where: names them in messages.  Raises UserError."""
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        of_key, path = path.startswith("`key` in "), path.replace("`key` in ", "").strip("`").lstrip("$.")
        location = f"{where}: {path}: " if path else f"{where}: "
        value = "" if of_key else _value_at(values, path)
        raise UserError(location + _reason(without_middle(message, LONGEST_MESSAGE), kind, path, value)) from None


def _value_at(values: Any, path: str) -> str:
    """Return the value at a path such as "grid.sizes[1]" for a message; "" where the path is none of plain keys."""
    for key in re.findall(r"[^.\[\]]+", path):
        try:
            values = values[int(key) if isinstance(values, list) else key]
        except (KeyError, ValueError, IndexError, TypeError):
            return ""
    return shown(values)


def _reason(message: str, kind: Type[Struct], path: str, value: str) -> str:
    """Return what msgspec says of the value at a path of a Struct, in words of YAML.  value: as the message shows it;
    "" leaves it out."""
    unknown = re.match("Object contains unknown field `(.*)`$", message)
    if unknown:
        keys = keys_of(_hint(kind, path))
        return f"unknown key {shown(unknown[1])}{closest(unknown[1], keys)}; there are {', '.join(keys)}"
    choice = re.match("Invalid enum value '(.*)'$", message)
    if choice:
        choices = [value for value in get_args(_hint(kind, path)) if isinstance(value, str)]
        return f"unknown {shown(choice[1])}{closest(choice[1], choices)}; there are {', '.join(choices)}"
    missing = re.match("Object missing required field `(.*)`$", message)
    if missing:
        return f"{missing[1]} is missing"
    wanted = re.match(r"Expected `([^`]*)`(?: of length)?(?: ([<>]=?) (\S+?)\.?0?)?(?:, got `.*`)?$", message)
    if not wanted:
        return message
    types, comparison, bound = wanted.groups()
    text = " or ".join(TYPE_NAMES.get(name, name) for name in types.split(" | "))
    if comparison and types in ("str", "array"):
        text += " that is not empty"
    elif comparison:
        text += f" {BOUNDS[comparison]} {bound}"
    return f"give {text}" + (f", not {value}" if value else "")


def _hint(kind: Type[Struct], path: str) -> Any:
    """Return the type of the value at a path such as "pretrained_model.type"; of a choice that may be null, the
    choice."""
    hint: Any = kind
    for key in filter(None, path.split(".")):
        hint = get_type_hints(hint)[key]
    options = [option for option in get_args(hint) if option is not type(None) and get_args(option)]
    return options[0] if options else hint


def keys_of(kind: Type[Struct]) -> List[str]:
    """Return the keys of a Struct, in order."""
    return list(kind.__struct_fields__)


def as_data(value: Struct) -> Record:
    """Return a Struct as plain data, as records and jobs have it."""
    data: Record = as_written(value)
    return data


def check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise UserError for a key that is not known."""
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key {shown(key)}{closest(key, known)}; there are {', '.join(known)}")


def override(values: Dict[str, Any], given: Sequence[str], known: Mapping[str, Sequence[str]]) -> None:
    """Set the values of "--part.key=value", or "--key=value", in place; values are YAML.  known: the keys of each part.
    Raises UserError."""
    parts_of = {f"{part}.{key}": (part, key) for part, keys in known.items() for key in keys}
    short = {key: (part, key) for part, key in parts_of.values()}
    for word in given:
        name, equals, value = word.partition("=")
        key = name.lstrip("-")
        if not name.startswith("--") or not equals:
            raise UserError(f"{shown(word)}: give --key=value{closest(key, [*parts_of, *short])}")
        if key not in parts_of and key not in short:
            near = closest(key, [*parts_of, *short])
            raise UserError(f"--{key}: unknown key{near}; there are {', '.join(parts_of)}")
        part, leaf = parts_of.get(key) or short[key]
        if not isinstance(values.setdefault(part, {}), dict):
            raise UserError(f"{part}: give keys and values, not {shown(values[part])}")
        values[part][leaf] = parsed(value, f"--{key}")


def check_positive(values: Sequence[float], name: str) -> None:
    """Raise ValueError, which `converted` turns into UserError, for what is no finite number above 0."""
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: give numbers above 0, not {value}")


def check_distinct(values: Sequence[Any], name: str) -> None:
    """Raise ValueError, which `converted` turns into UserError, for a value that a list has twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{name}: {shown(value)} is given twice")


def check_environment(name: Optional[str], where: str) -> None:
    """Check the name of an environment, or None; whether it is made shows where it is needed.  Raises UserError."""
    if name is not None and name not in ENVIRONMENTS:
        near = closest(name, ENVIRONMENTS)
        raise UserError(f"{where}: there is no environment {shown(name)}{near}; there are {', '.join(ENVIRONMENTS)}")


def located(value: str, config: Path) -> Path:
    """Return a path as it is seen from the current folder, or from that of the configuration where it is there."""
    here, beside = Path(value), config.parent / value
    return (beside if not here.exists() and beside.exists() else here).absolute()


def python_name(value: str, config: Path) -> str:
    """Return module:name as it is; file.py:name with the absolute path of the file."""
    file, colon, name = value.rpartition(":")
    return f"{located(file, config)}{colon}{name}" if file.endswith(".py") else value
