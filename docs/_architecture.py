"""Draw architecture.svg: the folders of common/ in the layers of pyproject.toml, each with its one thought.

``python docs/_architecture.py`` writes it; a test compares it with what this draws.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[1]
PICTURE = Path(__file__).with_name("architecture.svg")
WIDTH, GAP, LETTER = 1080, 10, 6.1
READS = {"tables", "plots", "analysis", "report"}
MEASURES = {"measure", "losses", "conformance", "models", "jobs", "data"}
STYLE = """\
  text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
  .name { font: bold 14px ui-monospace, monospace }
  .reads { fill: #dcebfb } .measures { fill: #fbe6d4 } .both { fill: #e9ebee }
  rect { stroke: #8a939d } .paper { fill: #fff; stroke: none }"""


def layers() -> List[List[str]]:
    """[["cli"], ["report"], ["tables", "plots"], ...]: folders that there are, highest layer first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r'^type = "layers"$.*?^layers = \[\n(.*?)^\]', text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "pyproject.toml has no contract of layers"
    lines = [re.findall(r"\w+", line) for line in re.findall(r'"([^"]+)"', block[1])]
    return [[name for name in line if (ROOT / "common" / name / "__init__.py").exists()] for line in lines]


def thought(folder: str) -> str:
    """The docstring of a folder of common/."""
    module = ast.parse((ROOT / "common" / folder / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(module) or "").split())


def drawing() -> str:
    parts, y = [], GAP
    for line in layers():
        width = (WIDTH - GAP * (len(line) + 1)) / len(line)
        texts = [_wrapped(thought(folder), int((width - 20) / LETTER)) for folder in line]
        height = 26 + 14 * max(map(len, texts))
        for place, (folder, text) in enumerate(zip(line, texts)):
            parts += _box(folder, text, GAP + place * (width + GAP), y, width, height)
        y += height + GAP
    legend = "blue: reads records, without torch; orange: measures; a folder imports only folders below it"
    parts.append(f'<text x="{GAP}" y="{y + 14}">{legend}</text>')
    size = f'width="{WIDTH}" height="{y + 28}" viewBox="0 0 {WIDTH} {y + 28}"'
    top = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>\n{STYLE}\n</style>"]
    return "\n".join([*top, '<rect class="paper" width="100%" height="100%"/>', *parts, "</svg>\n"])


def _box(folder: str, text: List[str], x: float, y: int, width: float, height: int) -> List[str]:
    side = "reads" if folder in READS else "measures" if folder in MEASURES else "both"
    found = [f'<rect class="{side}" x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="6"/>']
    found.append(f'<text class="name" x="{x + 10:g}" y="{y + 18}">{folder}</text>')
    for row, words in enumerate(text):
        found.append(f'<text x="{x + 10:g}" y="{y + 33 + 14 * row}">{html.escape(words)}</text>')
    return found


def _wrapped(text: str, letters: int) -> List[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(PICTURE, file=sys.stderr)
