"""Configuration files: YAML as plain data, converted to Structs that say which keys there are and
of which type.

Every mistake is one line: the file, the key, what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import not_a_file, read_text
from rnnt_bench.core.text import closest, plain, short, shown

#: Bytes of the largest file that is read: more than anyone writes by hand.
LARGEST_FILE = 2**20
#: Digits of the longest whole number.
LONGEST_NUMBER = 30
Converted = TypeVar("Converted", bound=Struct)

Text = Annotated[str, Meta(min_length=1)]
#: Whole numbers from 1 and from 0 on.
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
#: A number above 0.
Seconds = Annotated[float, Meta(gt=0)]


def parsed(text: str, where: str) -> Any:
    """Return what YAML says, without tags that make objects or a key twice.  where: for messages.
    Raises UserError."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(
            f"{where} needs PyYAML, which is not installed here: pip install PyYAML"
        ) from error

    class Plain(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for index, key in enumerate(keys):
                if key in keys[:index]:
                    raise yaml.YAMLError(
                        f"{key!r} is given twice, again{node.value[index][0].start_mark}; keep one"
                    )
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            if len(node.value) > LONGEST_NUMBER:
                raise yaml.YAMLError(f"a whole number of {len(node.value)} digits{node.start_mark}")
            return super().construct_yaml_int(node)

        def construct_yaml_float(self, node: Any) -> float:
            value = super().construct_yaml_float(node)
            if not math.isfinite(value):  # which no record can hold
                raise yaml.YAMLError(
                    f"{node.value} is not finite{node.start_mark}; give a finite number"
                )
            return float(value)

    Plain.add_constructor("tag:yaml.org,2002:int", Plain.construct_yaml_int)
    Plain.add_constructor("tag:yaml.org,2002:float", Plain.construct_yaml_float)
    try:
        return yaml.load(text, Plain)
    # PyYAML raises errors of any kind for a text that its tag cannot take
    except Exception as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"{where}: no YAML of plain data ({reason})") from error


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values in a YAML file.  Raises UserError."""
    values = parsed(read_text(path, LARGEST_FILE), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: give keys and values, such as `key: 1`, not {shown(values)}")
    return values


def converted(values: Any, kind: type[Converted], where: str) -> Converted:
    """Return plain values as the Struct `kind`, whose keys are all that there may be.  Raises
    UserError."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message, _, path = short(plain(str(error)), 500).partition(" - at ")
        unknown = re.search("unknown field `(.*)`", message)
        near = (
            f"{closest(unknown[1], keys_of(kind))}; there are {', '.join(keys_of(kind))}"
            if unknown
            else ""
        )
        wrong = re.search("Invalid enum value '(.*)'", message)
        if wrong:
            choices = choices_of(kind, re.sub(r".*\.|\W", "", path))
            near = f"{closest(wrong[1], choices)}; there are {', '.join(choices)}"
        raise UserError(
            ": ".join(filter(None, [where, path.strip("`").lstrip("$."), message])) + near
        ) from None


def keys_of(kind: type[Struct]) -> list[str]:
    """Return the keys of a Struct, and of the Structs in it."""
    keys = []
    for field in msgspec.structs.fields(kind):
        inner = isinstance(field.type, type) and issubclass(field.type, Struct)
        keys += [field.name, *(keys_of(field.type) if inner else [])]
    return keys


def choices_of(kind: type[Struct], key: str) -> list[str]:
    """Return the texts that a key of the Struct, or of those in it, may have; [] where any is."""
    for field in msgspec.structs.fields(kind):
        if field.name == key:
            types = [field.type, *get_args(field.type)]
            return [
                text for part in types if get_origin(part) is Literal for text in get_args(part)
            ]
        inner = isinstance(field.type, type) and issubclass(field.type, Struct)
        if inner and choices_of(field.type, key):
            return choices_of(field.type, key)
    return []


def check_list(values: Sequence[float], name: str) -> None:
    """Raise ValueError, which `converted` turns into UserError, for a value that is there twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{name}: {shown(value)} is given twice")


def located(value: str, config: Path) -> Path:
    """Return a path as it is seen from the current folder, or from that of the configuration where
    it is there."""
    here, beside = Path(value), config.parent / value
    return (beside if not here.exists() and beside.exists() else here).absolute()


def python_name(value: str, config: Path) -> str:
    """Return module:name as it is; file.py:name with the absolute path of the file."""
    file, colon, name = value.rpartition(":")
    return f"{located(file, config)}{colon}{name}" if file.endswith(".py") else value


def file(
    value: str,
    config: Path,
    where: str,
    advice: str = "the path of a Python, such as .venv/k2/bin/python",
) -> str:
    """Return the path of a file, of a Python without `advice`, that a configuration names.  Raises
    UserError."""
    path = located(value, config)
    problem = not_a_file(path)
    if problem:
        raise UserError(f"{where}: {path}: {problem}; give {advice}")
    return str(path)
