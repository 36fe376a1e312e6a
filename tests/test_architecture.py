"""The import rule of common/, as pyproject.toml has it, and what no contract can say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_contract_is_kept():
    pytest.importorskip("importlinter")
    command = "from importlinter.cli import lint_imports_command as run; run()"
    lint = [sys.executable, "-c", command, "--no-cache", "--no-logo"]
    done = subprocess.run(lint, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def test_a_broken_contract_is_found(tmp_path):
    """Two folders that import each other."""
    pytest.importorskip("importlinter")
    for folder, text in {"core": "import common.cli", "cli": "import common.core"}.items():
        (tmp_path / "common" / folder).mkdir(parents=True)
        (tmp_path / "common" / folder / "__init__.py").write_text(text)
    (tmp_path / "fused_transducer").mkdir()
    for package in ("common", "fused_transducer"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    command = "from importlinter.cli import lint_imports_command as run; run()"
    lint = [sys.executable, "-c", command, "--no-cache", "--no-logo", "--contract", "acyclic"]
    done = subprocess.run(lint, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode != 0 and " 1 broken" in done.stdout


def test_no_module_lies_loose_in_common():
    assert {path.name for path in (ROOT / "common").glob("*.py")} == {"__init__.py", "command.py"}


def test_every_folder_says_its_thought():
    folders = [path.parent for path in (ROOT / "common").rglob("__init__.py") if path.parent.name != "common"]
    assert folders
    for folder in folders:
        assert (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""'), folder
