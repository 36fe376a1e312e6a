"""Print how much there is to read: files, lines, statements (no docstrings) of Python, and words of the pages."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "common": ["common/**/*.py"],
    "tests": ["tests/**/*.py"],
    "fused_transducer": ["fused_transducer/**/*.py"],
    "docs scripts": ["docs/_*.py"],
}
PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md"]


def statements(text: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def main() -> None:
    print(f"{'':26}{'files':>6}{'lines':>8}{'statements':>12}")
    for name, patterns in PARTS.items():
        texts = [path.read_text(encoding="utf-8") for pattern in patterns for path in ROOT.glob(pattern)]
        lines = sum(text.count("\n") for text in texts)
        print(f"{name:26}{len(texts):6}{lines:8,}{sum(map(statements, texts)):12,}")
    words = sum(len(path.read_text(encoding="utf-8").split()) for pattern in PAGES for path in ROOT.glob(pattern))
    print(f"{'words of the pages':26}{words:14,}")


if __name__ == "__main__":
    main()
