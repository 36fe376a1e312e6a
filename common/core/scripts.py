"""Benchmark scripts as files: the adapter that one holds, and the row of one that the table does not know.

A copy of benchmark_mine.py, wherever it lies, is an implementation of its own: its workers load that very file, and its
row stands under the copy's name beside those of the table.  Each process learns of it when it loads the file.  No torch
here, and none of a script that imports it within its functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Mapping

from common.core.errors import UserError
from common.core.implementations import BY_NAME, IMPLEMENTATIONS, LAYOUTS, Implementation
from common.core.paths import ROOT

ENDING = ".py"


def load(script: str) -> Any:
    """The ADAPTER of a script, see Implementation.script; that of a file is in the table of this process from then on.
    Raises what importing it raises, and UserError for a file that cannot be a row."""
    if not script.endswith(ENDING):
        return importlib.import_module(script).ADAPTER
    path = Path(script)
    adapter = getattr(_import(path), "ADAPTER", None)
    if adapter is None:
        raise UserError(f"{path}: holds no ADAPTER; start from a copy of benchmark_mine.py")
    adapter.name = _name(adapter, path)
    variants = {variant: kind_of(adapter, changed) for variant, changed in adapter.variants.items()}
    about: Dict[str, Any] = {"kind": kind_of(adapter, {}), "variants": variants, "template": True}
    BY_NAME[adapter.name] = Implementation(adapter.name, script, "main", "torch", **about)
    return adapter


def of_file(file: str) -> Implementation:
    """The implementation that the script `file` measures: its line of the table, or else a row of its own.  Raises
    UserError for a file that cannot be read, does not import, or takes another script's name."""
    path = Path(os.path.abspath(file))
    for implementation in BY_NAME.values():
        if _file_of(implementation) == path.resolve():
            return implementation
    if not path.is_file():
        raise UserError(f"{file}: no such file; give a copy of benchmark_mine.py")
    try:
        return BY_NAME[load(str(path)).name]
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        words = (str(error).strip() or "no message").splitlines()[0]
        raise UserError(
            f"{file}: does not import in {sys.executable} ({type(error).__name__}: {words}); mend that, and what only "
            "another Python has, import within its functions"
        ) from error


def kind_of(adapter: Any, changed: Mapping[str, Any]) -> str:
    """One of common.core.implementations.KINDS, from the layout and the topology of an adapter or of its variant, which
    sets what is `changed`.  Raises UserError for a layout that does not exist."""
    layout, topology = (changed.get(key, getattr(adapter, key)) for key in ("layout", "topology"))
    if layout not in LAYOUTS:
        raise UserError(f"{adapter.name}: layout = {layout!r} is none; choose one of {', '.join(LAYOUTS)}")
    kind = LAYOUTS[layout]
    return "topology" if kind == "exact" and topology != "regular" else kind


def _file_of(implementation: Implementation) -> Path:
    script = implementation.script
    return (Path(script) if script.endswith(ENDING) else ROOT / (script + ENDING)).resolve()


def _import(path: Path) -> ModuleType:
    """As Python imports a script: what lies beside it can be imported, and `inspect` finds its source."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(adapter: Any, path: Path) -> str:
    """The name that the adapter says; where it says none or still the template's, the file's: benchmark_flash.py is
    "flash".  Raises UserError for one that belongs to another script, or would not do in a flag or as a folder."""
    name = getattr(adapter, "name", "")
    if not name or any(one.template and one.name == name for one in IMPLEMENTATIONS):
        name = path.stem[len("benchmark_") :] if path.stem.startswith("benchmark_") else path.stem
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'")
    owner = BY_NAME.get(name)
    if owner is not None and _file_of(owner) != path.resolve():
        raise UserError(f"{path}: its name {name!r} is that of {_file_of(owner)}; give it a name of its own")
    return name
