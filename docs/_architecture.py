"""Draw architecture.svg: the folders of common/ in the layers of pyproject.toml, each with its docstring.

Run ``python docs/_architecture.py`` to write it; a test looks for every folder in it.
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
WIDTH, GAP, LETTER = 1080, 10, 6.5
READS = {"analysis", "present", "show"}
MEASURES = {"data", "flops", "jobs", "losses", "measure"}
STYLE = """\
  text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
  .name { font: bold 14px ui-monospace, monospace }
  .reads { fill: #dcebfb } .measures { fill: #fbe6d4 } .both { fill: #e9ebee }
  rect { stroke: #8a939d } .paper { fill: #fff; stroke: none }"""


def layers() -> List[List[str]]:
    """Return the names of each layer, highest first: [["command"], ["conformance", "tools"], ["cli"], ...]."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r'^type = "layers"$.*?^layers = \[\n(.*?)^\]', text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "pyproject.toml has no contract of layers"
    return [re.findall(r"\w+", line) for line in re.findall(r'"([^"]+)"', block[1])]


def summary(name: str) -> str:
    """Return the first paragraph of the docstring of a folder or module of common/."""
    folder, module = ROOT / "common" / name / "__init__.py", ROOT / "common" / f"{name}.py"
    tree = ast.parse((folder if folder.exists() else module).read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())


def drawing() -> str:
    """Return the picture as SVG."""
    parts, y = [], GAP
    for line in layers():
        width = (WIDTH - GAP * (len(line) + 1)) / len(line)
        texts = [_wrapped(summary(name), int((width - 20) / LETTER)) for name in line]
        height = 26 + 14 * max(map(len, texts))
        for number, (name, text) in enumerate(zip(line, texts)):
            parts += _box(name, text, GAP + number * (width + GAP), y, width, height)
        y += height + GAP
    legend = "blue: reads records, without torch; orange: measures; a folder imports only from lines below its own"
    parts.append(f'<text x="{GAP}" y="{y + 14}">{legend}</text>')
    size = f'width="{WIDTH}" height="{y + 28}" viewBox="0 0 {WIDTH} {y + 28}"'
    top = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>\n{STYLE}\n</style>"]
    return "\n".join([*top, '<rect class="paper" width="100%" height="100%"/>', *parts, "</svg>\n"])


def _box(name: str, text: List[str], x: float, y: int, width: float, height: int) -> List[str]:
    kind = "reads" if name in READS else "measures" if name in MEASURES else "both"
    lines = [f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="6"/>']
    lines.append(f'<text class="name" x="{x + 10:g}" y="{y + 18}">{name}</text>')
    for row, words in enumerate(text):
        lines.append(f'<text x="{x + 10:g}" y="{y + 33 + 14 * row}">{html.escape(words)}</text>')
    return lines


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
