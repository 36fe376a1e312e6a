"""Configuration files: YAML as plain data, no key twice, every key known, values over them from the command line."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from common.core import plain_yaml
from common.core.errors import UserError
from common.core.files import read_text
from common.core.text import shown
from common.setup.environments import ENVIRONMENTS

Mapped = Dict[str, Any]


def read(path: Path) -> Mapped:
    """Return the mapping in a YAML file.  Raises UserError."""
    values = parsed(read_text(path, plain_yaml.LARGEST_FILE), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: give keys and values, such as `general:`, not {shown(values)}")
    return values


def parsed(text: str, where: str) -> Any:
    """Return what the YAML `text` says.  where: names it in messages.  Raises UserError."""
    try:
        return plain_yaml.parsed(text, where)
    except ImportError as error:
        raise UserError("configurations need PyYAML, which is not installed here: pip install PyYAML") from error


def check_keys(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises UserError for a key that is not known, with the nearest one that is."""
    for key in found:
        if key not in known:
            raise UserError(f"{where}: unknown key {shown(key)}{nearest(key, known)}; there are {', '.join(known)}")


def nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f", the nearest is {near[0]!r}" if near else ""


def override(config: Mapped, given: Sequence[str], known: Mapping[str, Iterable[str]]) -> None:
    """Set the values of "--part.key=value", or "--key=value", in place; values are YAML.  known: the keys of each part.
    Raises UserError."""
    paths = {f"{part}.{key}": (part, key) for part, keys in known.items() for key in keys}
    short = {key: (part, key) for part, key in paths.values()}
    for word in given:
        name, equals, value = word.partition("=")
        key = name.lstrip("-")
        if not name.startswith("--") or not equals:
            raise UserError(f"{shown(word)}: give --key=value{nearest(key, [*paths])}")
        if key not in paths and key not in short:
            raise UserError(f"--{key}: unknown key{nearest(key, [*paths])}; there are {', '.join(paths)}")
        part, leaf = paths.get(key) or short[key]
        config[part] = {} if config.get(part) is None else config[part]
        if not isinstance(config[part], dict):
            raise UserError(f"{part}: give keys and values, not {shown(config[part])}")
        config[part][leaf] = parsed(value, f"--{key}")


# -- values ----------------------------------------------------------------------------------------------------------


def positive(value: Any, where: str) -> float:
    """A number above 0.  Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{where}: give a number above 0, not {shown(value)}")
    return value


def whole(value: Any, where: str, low: int = 1) -> int:
    """Raises UserError."""
    if type(value) is not int or value < low:
        raise UserError(f"{where}: give a whole number of at least {low}, not {shown(value)}")
    return value


def several(value: Any, where: str, check: Any) -> List[Any]:
    """A list without repetition, of what `check(value, where)` takes.  Raises UserError."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: give a list such as [1, 2], not {shown(value)}")
    found = [check(one, where) for one in value]
    twice = [one for place, one in enumerate(found) if one in found[:place]]
    if twice:
        raise UserError(f"{where}: {shown(twice[0])} is given twice")
    return found


def text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: give a text, not {shown(value)}")
    return value


def truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: give true or false, not {shown(value)}")
    return value


def mapping(value: Any, where: str) -> Mapped:
    """Keys and values; null is an empty mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: give keys and values, not {shown(value)}")
    return value


def environment(value: Any, where: str) -> None:
    """Check the name of an environment, or None; whether it is made shows where it is needed.  Raises UserError."""
    if value is not None and (not isinstance(value, str) or value not in ENVIRONMENTS):
        close = nearest(value, list(ENVIRONMENTS)) if isinstance(value, str) else ""
        raise UserError(f"{where}: there is no environment {shown(value)}{close}; there are {', '.join(ENVIRONMENTS)}")


def located(value: str, config: Path) -> Path:
    """A path as it is seen from the current folder, or from that of the configuration where it is there."""
    here, there = Path(value), config.parent / value
    return (there if not here.exists() and there.exists() else here).absolute()


def python_name(value: str, config: Path) -> str:
    """module:name as it is; file.py:name with the place of the file."""
    file, colon, name = value.rpartition(":")
    return f"{located(file, config)}{colon}{name}" if file.endswith(".py") else value
