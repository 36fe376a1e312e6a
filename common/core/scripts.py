"""Benchmark scripts as files: the adapter that one holds, and the row of one that the table does not know.

A copy of benchmark_mine.py, wherever it lies, is an implementation of its own: its workers load that very file, and its
row has the copy's name, beside those of the table.  What a command needs of a file is read from its text;
nothing in it is run but in a worker, so that a file that ends, hangs or changes its process costs its own row alone.
No torch here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from common.core.errors import NotRunnable, UserError
from common.core.files import read_bytes
from common.core.implementations import BY_NAME, IMPLEMENTATIONS, LAYOUTS, Implementation
from common.core.paths import ROOT, not_a_file

ENDING = ".py"
#: What is read from a script's text: attributes of the class Adapter.
ATTRIBUTES = ("name", "hint", "layout", "topology", "variants", "devices", "simulator")
#: Where the defaults of these are.
BASE = ROOT / "common" / "losses" / "adapter.py"


def load(script: str) -> Any:
    """The ADAPTER of a script, see Implementation.script; that of a file is in the table of this process from then on.
    Raises what importing it raises, NotRunnable for a module that it lacks, and UserError for a file that cannot be a
    row."""
    if not script.endswith(ENDING):
        return importlib.import_module(script).ADAPTER
    implementation = of_file(script)
    try:
        adapter = _import(Path(script)).ADAPTER
    except ModuleNotFoundError as error:
        raise NotRunnable("missing", f"{script} needs {error.name}, which {sys.executable} does not have") from error
    adapter.name = implementation.name
    return adapter


def of_file(file: str) -> Implementation:
    """The implementation that the script `file` measures: its line of the table, or else a row of its own.  Raises
    UserError for a file that cannot be read, holds no adapter, or takes another script's name."""
    path = Path(os.path.abspath(file))
    for implementation in BY_NAME.values():
        if file_of(implementation) == Path(os.path.realpath(path)):
            return implementation
    problem = not_a_file(path)
    if problem:
        raise UserError(f"{file}: {problem}; give a copy of benchmark_mine.py")
    said = described(path)
    name = _name(said["name"], path)
    variants = {variant: kind_of(name, {**said, **changed}) for variant, changed in said["variants"].items()}
    about: Dict[str, Any] = {"kind": kind_of(name, said), "variants": variants, "template": True}
    found = BY_NAME[name] = Implementation(name, str(path), "main", "torch", **about)
    return found


def kind_of(name: str, said: Mapping[str, Any]) -> str:
    """One of common.core.implementations.KINDS, from the layout and the topology of an adapter or of its variant.
    Raises UserError for a layout that does not exist."""
    layout = said["layout"]
    if layout not in LAYOUTS:
        raise UserError(f"{name}: layout = {layout!r} is none; choose one of {', '.join(LAYOUTS)}")
    kind = LAYOUTS[layout]
    return "topology" if kind == "exact" and said["topology"] != "regular" else kind


def described(path: Path) -> Dict[str, Any]:
    """What the class ADAPTER of the script `path` has for ATTRIBUTES, its own or inherited, read from the text of the
    files: plain values.  Raises UserError."""
    found = _find("ADAPTER", path)
    if found is None:
        raise UserError(f"{path}: holds no ADAPTER; start from a copy of benchmark_mine.py")
    base = _find("Adapter", BASE)
    assert base is not None
    said: Dict[str, Any] = {"name": "", "hint": "", **_values(base)}
    inherited = {(one.file, one.node.name): one for one in reversed(list(_ancestry(found)))}
    for one in inherited.values():  # a class before those that inherit from it
        said.update(_values(one))
    if not isinstance(said["variants"], dict) or not all(isinstance(one, dict) for one in said["variants"].values()):
        raise UserError(f"{path}: variants = {said['variants']!r}: give {{name: {{attribute: value}}}}")
    return said


class _Class(NamedTuple):
    """A class in the text of a file."""

    file: Path
    node: ast.ClassDef


def _find(name: str, file: Path) -> Optional[_Class]:
    """The class that `name` means at the top level of a file, where that is a class of this file or of one that it
    imports it from; None for anything else.  Raises UserError for a file that is no Python."""
    seen: Set[Tuple[str, Path]] = set()
    while (name, file) not in seen:
        seen.add((name, file))
        for node in reversed(_parsed(file).body):  # the last binding counts
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _Class(file, node)
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and isinstance(node.value, ast.Name)
                and name in _targets(node)
            ):
                name = node.value.id
                break
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                original = {alias.asname or alias.name: alias.name for alias in node.names}.get(name)
                beside = [
                    folder.joinpath(*node.module.split(".")).with_suffix(ENDING) for folder in (file.parent, ROOT)
                ]
                there = [path for path in beside if os.path.isfile(path)]
                if original and there:
                    name, file = original, there[0]
                    break
    return None


def _ancestry(one: _Class, below: int = 0) -> Iterator[_Class]:
    """The class and what it inherits from, as far as files tell; a class may come several times."""
    yield one
    for base in one.node.bases:
        found = _find(base.id, one.file) if isinstance(base, ast.Name) and below < 20 else None
        if found is not None:
            yield from _ancestry(found, below + 1)


def _values(one: _Class) -> Dict[str, Any]:
    """Those of ATTRIBUTES that the body of a class sets.  Raises UserError for one that is not a plain value."""
    found: Dict[str, Any] = {}
    for node in one.node.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for name in set(_targets(node)) & set(ATTRIBUTES):
                try:
                    found[name] = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    where = f"{one.file}, line {node.lineno}"
                    raise UserError(f"{where}: {name} is read and not run; write it as a plain value") from None
    return found


def _targets(node: Any) -> List[str]:
    """The names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def beside(file: Path) -> Optional[Path]:
    """The first file or package beside a script that it imports; None without any, and for what lies in the checkout.
    Raises UserError for a file that is no Python."""
    for node in ast.walk(_parsed(file)) if file.parent != ROOT else ():
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            module = file.parent / name.partition(".")[0]
            for found in (module.with_suffix(ENDING), module / "__init__.py"):
                if found.is_file():
                    return found
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
    """The file that holds its ADAPTER."""
    script = implementation.script
    return Path(os.path.realpath(script if script.endswith(ENDING) else ROOT / (script + ENDING)))


def _import(path: Path) -> ModuleType:
    """As Python imports a script: what lies beside it can be imported, and `inspect` finds its source.  The current
    folder stays."""
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
    """The name that the adapter says; where it says none or still the template's, the file's: benchmark_flash.py is
    "flash".  Raises UserError for one that belongs to another script, or would not do in a flag or as a folder."""
    if not name or any(one.template and one.name == name for one in IMPLEMENTATIONS):
        name = path.stem[len("benchmark_") :] if path.stem.startswith("benchmark_") else path.stem
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'")
    owner = BY_NAME.get(name)
    if owner is not None and file_of(owner) != Path(os.path.realpath(path)):
        raise UserError(f"{path}: its name {name!r} is that of {file_of(owner)}; give it a name of its own")
    return name
