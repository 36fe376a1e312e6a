"""Load benchmark scripts: the adapter in one, and the row of one that the table does not know.

A copy of benchmark_mine.py, wherever it is, is an implementation of its own: its workers load that very file, and its
row has the copy's name.  No torch here, unless a user's script imports it at its top.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Mapping, Sequence

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


def load(script: str) -> Any:
    """Return the ADAPTER of a script, see Implementation.script; that of a file is in the table of this process from
    then on.

    Raises what importing it raises, NotRunnable for a module that it lacks, and UserError for a file that cannot be a
    row.
    """
    if not script.endswith(ENDING):
        return importlib.import_module(script).ADAPTER
    try:
        adapter = imported(Path(script)).ADAPTER
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
    return _row(path, _attributes_of_file(path))


def described(implementation: Implementation) -> Attributes:
    """Return the attributes of its ADAPTER; the defaults where its script cannot be imported here."""
    if implementation.script.endswith(ENDING):
        return _attributes_of_file(Path(implementation.script))
    return _attributes(load(implementation.script))


@cache
def _attributes_of_file(path: Path) -> Attributes:
    """Return the attributes of the ADAPTER in a file.

    One that cannot be imported has the defaults: its worker says in its row what is wrong.  Raises UserError for a file
    that is no Python or holds no ADAPTER.
    """
    try:
        ast.parse(read_bytes(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{where}: not Python ({getattr(error, 'msg', None) or error})") from error
    search = list(sys.path)
    try:
        with redirect_stdout(sys.stderr):
            adapter = getattr(imported(path), "ADAPTER", None)
    except (Exception, SystemExit):
        return Attributes()
    finally:
        sys.path[:] = search
    if adapter is None:
        raise UserError(f"{path}: holds no ADAPTER; start from a copy of benchmark_mine.py")
    return _attributes(adapter)


def _attributes(adapter: Any) -> Attributes:
    """Return the attributes of an adapter, with defaults for those that it lacks."""
    return Attributes(**{key: getattr(adapter, key, default) for key, default in vars(Attributes()).items()})


def _row(path: Path, attributes: Attributes) -> Implementation:
    """Return the row of a file whose adapter has these attributes, and add it to the table of this process.

    Its name is the adapter's; where that says none or still the template's, the file's: benchmark_flash.py is "flash".
    Raises UserError for a name that belongs to another script, or would not do in a flag or as a folder.
    """
    variants = attributes.variants
    if not isinstance(variants, Mapping) or not all(isinstance(changed, Mapping) for changed in variants.values()):
        raise UserError(f"{path}: variants = {variants!r}: give {{name: {{attribute: value}}}}")
    name = attributes.name
    if not name or any(row.template and row.name == name for row in IMPLEMENTATIONS):
        name = path.stem[len("benchmark_") :] if path.stem.startswith("benchmark_") else path.stem
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'")
    owner = BY_NAME.get(name)
    if owner is not None and file_of(owner) != Path(os.path.realpath(path)):
        raise UserError(f"{path}: its name {name!r} is that of {file_of(owner)}; give it a name of its own")
    kinds = {variant: attributes.of_variant(variant).kind(name) for variant in variants}
    kind = attributes.kind(name)
    BY_NAME[name] = Implementation(name, str(path), "main", "torch", kind=kind, variants=kinds, template=True)
    return BY_NAME[name]


def file_of(implementation: Implementation) -> Path:
    """Return the file that holds its ADAPTER."""
    return Path(os.path.realpath(ROOT / implementation.file))


def imported(path: Path) -> ModuleType:
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
