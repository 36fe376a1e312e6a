"""Load benchmark scripts as files: the adapter in one, and the row of one that the table does not know.

A copy of benchmark_mine.py, wherever it is, is an implementation of its own: its workers load that very file, and its
row has the copy's name.  A command learns about a script from a process that imports it (`python -m common.core.scripts
FILE`).  So a file that ends, hangs or changes its process costs its own row alone.  No torch here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Mapping, Optional, Sequence, Tuple

from common.core.errors import NotRunnable, UserError
from common.core.files import read_bytes
from common.core.implementations import BY_NAME, IMPLEMENTATIONS, LAYOUTS, Implementation
from common.core.paths import ROOT, not_a_file

ENDING = ".py"


@dataclass(frozen=True)
class Attributes:
    """Attributes of the class ADAPTER of a script, with the defaults of a script that does not say them."""

    name: Any = ""  # a text, if the script is right
    hint: str = ""
    layout: str = "padded"
    topology: str = "regular"
    variants: Any = field(default_factory=dict)  # {name: {attribute: value}}, if the script is right
    simulator: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "cuda")
    python_loops: Sequence[str] = ()

    def of_variant(self, variant: str) -> Attributes:
        """Return the attributes of a variant; "" for the script itself."""
        changed = self.variants.get(variant, {})
        return replace(self, **{key: value for key, value in changed.items() if key in vars(self)})

    def kind(self, name: str) -> str:
        """Return one of common.core.implementations.KINDS, by the layout and the topology.

        Raises UserError, which calls the implementation `name`, for a layout that does not exist.
        """
        if self.layout not in LAYOUTS:
            raise UserError(f"{name}: layout = {self.layout!r} is none; choose one of {', '.join(LAYOUTS)}")
        kind = LAYOUTS[self.layout]
        return str(self.topology) if kind == "exact" and self.topology != "regular" else kind


LONGEST_IMPORT = 20  # seconds


def load(script: str) -> Any:
    """Return the ADAPTER of a script, see Implementation.script; that of a file is in the table of this process from
    then on.

    Raises what importing it raises, NotRunnable for a module that it lacks, and UserError for a file that cannot be a
    row.
    """
    if not script.endswith(ENDING):
        return importlib.import_module(script).ADAPTER
    try:
        adapter = _import(Path(script)).ADAPTER
    except ModuleNotFoundError as error:
        raise NotRunnable("missing", f"{script} needs {error.name}, which {sys.executable} does not have") from error
    adapter.name = _row(Path(script), _attributes(adapter)).name
    return adapter


def of_file(file: str) -> Implementation:
    """Return the implementation that the script `file` measures: its line of the table, or else a row of its own.

    Raises UserError for a file that cannot be read, holds no adapter, or takes another script's name.
    """
    path = Path(os.path.abspath(file))
    for implementation in BY_NAME.values():
        if file_of(implementation) == Path(os.path.realpath(path)):
            return implementation
    problem = not_a_file(path)
    if problem:
        raise UserError(f"{file}: {problem}; give a copy of benchmark_mine.py")
    return _row(path, described(path))


def _row(path: Path, attributes: Attributes) -> Implementation:
    """Return the row of a file whose adapter has these attributes, and add it to the table of this process."""
    variants = attributes.variants
    if not isinstance(variants, Mapping) or not all(isinstance(changed, Mapping) for changed in variants.values()):
        raise UserError(f"{path}: variants = {variants!r}: give {{name: {{attribute: value}}}}")
    name = _name(attributes.name, path)
    kinds = {variant: attributes.of_variant(variant).kind(name) for variant in variants}
    kind = attributes.kind(name)
    BY_NAME[name] = Implementation(name, str(path), "main", "torch", kind=kind, variants=kinds, template=True)
    return BY_NAME[name]


def described(path: Path) -> Attributes:
    """Return the attributes of the class ADAPTER of the script `path`, as a process that imports it says.

    Those of the whole table are asked at once.  A script that cannot be imported, ends its process or takes too long
    has the defaults: its worker says in its row what is wrong.  Raises UserError for a file that is no Python or holds
    no ADAPTER.
    """
    _parsed(path)
    table = tuple(dict.fromkeys(map(file_of, IMPLEMENTATIONS)))
    attributes = _answers(table if path in table else (path,)).get(str(path), Attributes())
    if attributes is None:
        raise UserError(f"{path}: holds no ADAPTER; start from a copy of benchmark_mine.py")
    return attributes


@cache
def _answers(paths: Tuple[Path, ...]) -> Mapping[str, Optional[Attributes]]:
    """Import scripts in a process of their own; return their attributes by file, None without an ADAPTER.

    Files that cannot be imported are left out.
    """
    ask = [sys.executable, "-m", "common.core.scripts", *map(str, paths)]
    search = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment = {**os.environ, **search}
    try:
        done = subprocess.run(
            ask, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_IMPORT
        )
    except subprocess.TimeoutExpired:
        return {}
    answers = map(json.loads, done.stdout.splitlines())
    return {file: None if attributes is None else Attributes(**attributes) for file, attributes in answers}


def _describe(files: Sequence[str]) -> None:
    """Print a line of JSON for each script that can be imported, see `_answers`; what it prints itself is dropped."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for file in files:
        with suppress(BaseException):  # its worker says why, in the row
            adapter = getattr(_import(Path(file)), "ADAPTER", None)
            attributes = adapter and vars(_attributes(adapter))
            print(json.dumps([file, attributes], default=str), file=answers, flush=True)


def _attributes(adapter: Any) -> Attributes:
    """Return the attributes of an adapter, with defaults for those that it lacks."""
    return Attributes(**{key: getattr(adapter, key, default) for key, default in vars(Attributes()).items()})


def beside(file: Path) -> Optional[Path]:
    """Return the first file or package beside a script that it imports, or None; None too for what lies in the
    checkout.  Raises UserError for a file that is no Python."""
    for node in ast.walk(_parsed(file)) if file.parent not in (ROOT, ROOT / "losses") else ():
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            module = file.parent / name.partition(".")[0]
            for neighbour in (module.with_suffix(ENDING), module / "__init__.py"):
                if neighbour.is_file():
                    return neighbour
    return None


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(read_bytes(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{file}{where}: not Python ({getattr(error, 'msg', None) or error})") from error


def file_of(implementation: Implementation) -> Path:
    """Return the file that holds its ADAPTER."""
    return Path(os.path.realpath(ROOT / implementation.file))


def _import(path: Path) -> ModuleType:
    """Import a file as Python does a script: what lies beside it can be imported, and `inspect` finds its source.  The
    current folder stays."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    here = os.getcwd()
    try:
        spec.loader.exec_module(module)
    finally:
        os.chdir(here)
    return module


def _name(name: Any, path: Path) -> str:
    """Return the name that the adapter says; where it says none or still the template's, the file's:
    benchmark_flash.py is "flash".  Raises UserError for one that belongs to another script, or would not do in a flag
    or as a folder."""
    if not name or any(row.template and row.name == name for row in IMPLEMENTATIONS):
        name = path.stem[len("benchmark_") :] if path.stem.startswith("benchmark_") else path.stem
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'")
    owner = BY_NAME.get(name)
    if owner is not None and file_of(owner) != Path(os.path.realpath(path)):
        raise UserError(f"{path}: its name {name!r} is that of {file_of(owner)}; give it a name of its own")
    return name


if __name__ == "__main__":
    _describe(sys.argv[1:])
