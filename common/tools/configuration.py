"""Read configuration files: YAML of plain data, converted to Structs that declare the keys and
their types.

A mistake in a file is a UserError of one line: the file, the key, what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import not_a_file, read_text
from rnnt_bench.core.text import closest, plain, short, shown

#: Bytes of the largest file that is read: more than anyone writes by hand.
LARGEST_FILE = 2**20
#: Digits of the longest whole number that is read.
LONGEST_NUMBER = 30
#: Letters of the longest reason in a message.
LONGEST_REASON = 500
Converted = TypeVar("Converted", bound=Struct)

Text = Annotated[str, Meta(min_length=1)]
#: A whole number of at least 1, and one of at least 0.
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
#: A number above 0.
Seconds = Annotated[float, Meta(gt=0)]


def parsed(text: str, where: str) -> Any:
    """Return the value of a YAML text.

    Raises UserError if PyYAML is missing, and for a text that is not YAML.  A tag that makes a
    Python object, a repeated key, infinity, NaN and a whole number of more than LONGEST_NUMBER
    digits are refused in the same way.

    where: the file or flag that the text comes from; the message begins with it."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(
            f"{where} needs PyYAML, which is not installed here: pip install PyYAML"
        ) from error

    class Plain(yaml.SafeLoader):
        """Makes plain data alone, and refuses repeated keys, long numbers, infinity and NaN."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for index, key in enumerate(keys):
                if key in keys[:index]:
                    raise yaml.YAMLError(
                        f"{key!r} is given twice, again{node.value[index][0].start_mark}; keep one"
                    )
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            # From some thousand digits on, int() raises a ValueError.
            if len(node.value) > LONGEST_NUMBER:
                raise yaml.YAMLError(f"a whole number of {len(node.value)} digits{node.start_mark}")
            return super().construct_yaml_int(node)

        def construct_yaml_float(self, node: Any) -> float:
            value = super().construct_yaml_float(node)
            if not math.isfinite(value):  # JSON has no such number
                raise yaml.YAMLError(
                    f"{node.value} is not finite{node.start_mark}; give a finite number"
                )
            return float(value)

    Plain.add_constructor("tag:yaml.org,2002:int", Plain.construct_yaml_int)
    Plain.add_constructor("tag:yaml.org,2002:float", Plain.construct_yaml_float)
    try:
        return yaml.load(text, Plain)
    except Exception as error:  # PyYAML raises errors of any type, such as ValueError for a date
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        raise UserError(f"{where}: no YAML of plain data ({reason})") from error


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file.  Raises UserError."""
    values = parsed(read_text(path, LARGEST_FILE), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: give keys and values, such as `key: 1`, not {shown(values)}")
    return values


def converted(values: Any, kind: type[Converted], where: str) -> Converted:
    """Return plain values as a Struct of the type `kind`.  Raises UserError for a value of a wrong
    type, or a key that the Struct does not have.  where: begins the message."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # "Invalid enum value 'cpu1' - at `$.stages[...].device`"
        message, _, path = short(plain(str(error)), LONGEST_REASON).partition(" - at ")
        line = ": ".join(filter(None, [where, path.strip("`").lstrip("$."), message]))
        raise UserError(line + _choices(message, path, kind)) from None


def _choices(message: str, path: str, kind: type[Struct]) -> str:
    """Return what to add to a message of msgspec about an unknown key or value: the closest one
    that exists, and all that exist.  Return "" for any other message.

    path: where the unknown value is, as msgspec writes it; kind: the Struct that has the keys."""
    unknown_key = re.search("unknown field `(.*)`", message)
    unknown_value = re.search("Invalid enum value '(.*)'", message)
    if unknown_key:
        word = unknown_key[1]
        choices = keys_of(kind)
    elif unknown_value:
        word = unknown_value[1]
        key = re.findall(r"\.(\w+)", path)[-1]  # "device" of "`$.stages[...].device`"
        choices = _choices_of(kind, key)
    else:
        return ""
    return f"{closest(word, choices)}; there are {', '.join(choices)}"


def _fields(kind: type[Struct]) -> Iterator[msgspec.structs.FieldInfo]:
    """Yield the fields of a Struct, each followed by those of the Struct in it."""
    for field in msgspec.structs.fields(kind):
        yield field
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            yield from _fields(field.type)


def keys_of(kind: type[Struct]) -> list[str]:
    """Return the keys of a Struct, and of the Structs in it."""
    return [field.name for field in _fields(kind)]


def _choices_of(kind: type[Struct], key: str) -> list[str]:
    """Return the values that the Literal of a key allows; [] if the key has no Literal.

    key: a key of the Struct `kind`, or of a Struct in it."""
    for field in _fields(kind):
        for part in (field.type, *get_args(field.type)):  # of `Literal[...] | None` too
            if field.name == key and get_origin(part) is Literal:
                return list(get_args(part))
    return []


def check_list(values: Sequence[float], name: str) -> None:
    """Raise ValueError for a value that is given twice.  If a Struct's __post_init__ calls this,
    `converted` makes a UserError of it.

    name: of the key, with which the message begins."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{name}: {shown(value)} is given twice")


def located(value: str, config: Path) -> Path:
    """Return the absolute path of a file that a configuration names: beside the configuration if
    the file is only there, else in the current folder, where it may be missing.

    value: the path in the configuration; config: the path of the configuration"""
    here = Path(value)
    beside = config.parent / value
    return (beside if beside.exists() and not here.exists() else here).absolute()


def python_name(value: str, config: Path) -> str:
    """Return "file.py:name" with the absolute path of the file; "module:name" as it is."""
    file, colon, name = value.rpartition(":")
    return f"{located(file, config)}{colon}{name}" if file.endswith(".py") else value


def file(
    value: str,
    config: Path,
    where: str,
    advice: str = "the path of a Python, such as .venv/k2/bin/python",
) -> str:
    """Return the absolute path of a file that a configuration names.  Raises UserError where there
    is none.

    where: begins the message; advice: what to give in place of the value."""
    path = located(value, config)
    problem = not_a_file(path)
    if problem:
        raise UserError(f"{where}: {path}: {problem}; give {advice}")
    return str(path)
