"""Describe every kind of record and every field, from common/records/schema.py, for _generate.py."""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import Any, NamedTuple

from msgspec import inspect
from rnnt_bench.records import schema


class Field(NamedTuple):
    """unit: "" where it has none; required: every version writes it."""

    name: str
    type: str
    unit: str
    text: str
    required: bool


class Description(NamedTuple):
    """Describe a kind of record, or a part of records."""

    name: str
    text: str
    fields: list[Field]


def describe() -> list[Description]:
    """Return every kind of record by its name in ``record``, then the parts of records and of whole documents."""
    descriptions = []
    parts = schema.PARTS
    for name, kind in [*schema.KINDS.items(), *((part.__name__, part) for part in parts)]:
        info: Any = inspect.type_info(kind)
        text = " ".join(cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0].split())
        meanings = _meanings(kind)
        descriptions.append(Description(name, text, [_field(field, meanings) for field in info.fields]))
    return descriptions


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return the words about fields in the docstrings of a class and its bases."""
    meanings = {}
    for each in reversed(kind.__mro__):
        about = cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for names, text in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", about, re.MULTILINE):
            meanings.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return meanings


def _field(field: Any, meanings: dict[str, str]) -> Field:
    (type_, text, unit), words = _in_words(field.type), field.name.replace("_", " ")
    return Field(field.encode_name, type_, unit, meanings.get(field.name, text) or words, field.required)


def _in_words(type_: Any) -> tuple[str, str, str]:
    """Return the type in words, the description and the unit."""
    if isinstance(type_, inspect.Metadata):
        words, text, unit = _in_words(type_.type)
        text = (type_.extra_json_schema or {}).get("description", text)
        return words, text, (type_.extra or {}).get("unit", unit)
    if isinstance(type_, inspect.UnionType):
        parts = [_in_words(part) for part in type_.types]
        return " or ".join(words for words, _, _ in parts), "", "".join(unit for _, _, unit in parts)
    if isinstance(type_, inspect.ListType):
        words, text, unit = _in_words(type_.item_type)
        return f"list of {words}", text, unit
    if isinstance(type_, inspect.DictType):
        words, text, unit = _in_words(type_.value_type)
        return f"{{name: {words}}}", text, unit
    if isinstance(type_, inspect.DataclassType):
        return f"{{{', '.join(field.name for field in type_.fields)}}}", "", ""
    if isinstance(type_, inspect.StructType):
        return type_.cls.__name__, "", ""
    return _WORDS.get(type(type_), "any"), "", ""


_WORDS: dict[Any, str] = {
    inspect.IntType: "int",
    inspect.FloatType: "number",
    inspect.BoolType: "bool",
    inspect.StrType: "text",
    inspect.NoneType: "null",
}
