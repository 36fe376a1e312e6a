"""Find the files of this machine that a task reads, so that their content is sent to the node where it runs.

A value of a model or a stage may be any argument, so each text that names a file counts as that file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Tuple

from common.core import scripts
from common.core.errors import UserError
from common.core.paths import ROOT

#: "module:name"; group 1 is what is imported first.
IMPORTED = re.compile(r"(\w+)[\w.]*:\w+")


def files(given: Any) -> Tuple[str, ...]:
    """Return the files that the values of a task name, "file.py:name" too.

    Raises UserError for what cannot go along: a folder, a file of Python that imports from beside it, a module of this
    machine alone.
    """
    return tuple(dict.fromkeys(file for text in _texts(given) if (file := _named(text))))


def placed(given: Any, files: Mapping[str, str]) -> Any:
    """Return the values of a task with other files in the place of those that they name, which are the keys."""
    if isinstance(given, dict):
        return {key: placed(value, files) for key, value in given.items()}
    if isinstance(given, list):
        return [placed(value, files) for value in given]
    file, colon, name = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    if file.endswith(scripts.ENDING) and file in files:
        return f"{files[file]}{colon}{name}"
    return files.get(given, given) if isinstance(given, str) else given


def located(given: Any) -> Any:
    """Return the values of a task with absolute paths for the files that they name, seen from the current folder."""
    return placed(given, {text: os.path.abspath(text) for text in _texts(given) if os.path.isfile(text)})


def _texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    values = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
    for value in values:
        yield from _texts(value)


def _named(text: str) -> Optional[str]:
    """Return the file that a text names, as jobs see it: their current folder is the checkout."""
    file = text.rpartition(":")[0]
    file = file if file.endswith(scripts.ENDING) else text
    if os.path.isfile(ROOT / file):
        return alone(file) if file.endswith(scripts.ENDING) else file
    if "/" in file and os.path.isdir(ROOT / file):
        raise UserError(f"--executor ray: {file} is a folder of this machine, which does not go to nodes; name a file")
    match = IMPORTED.fullmatch(text)
    if match:
        _check_module(match[1], text)
    return None


def alone(file: str) -> str:
    """Return a file of Python that needs nothing beside it.  Raises UserError for another."""
    other = scripts.beside(ROOT / file)
    if other is not None:
        problem = f"imports {other.name} from beside it, and one file goes to nodes; put both into one"
        raise UserError(f"--executor ray: {file} {problem}")
    return file


def _check_module(module: str, text: str) -> None:
    """Raise UserError for a module that is neither of the checkout nor of what is installed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return
    origin = spec and spec.origin
    if not origin or origin in ("built-in", "frozen"):
        return  # the node says whether it has it
    path, homes = Path(origin), (ROOT / "common", Path(sys.prefix), Path(sys.base_prefix))
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    if not installed and not any(home in path.parents for home in homes):
        name = text.rpartition(":")[2]
        how = f"name its file, {path}:{name}" if path.name != "__init__.py" else "install it there"
        raise UserError(f"--executor ray: {text}: {module} is of this machine alone ({path}); {how}")
