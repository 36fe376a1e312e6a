"""Keep what the readers say of every folder of results/ and of ten damaged copies, to hold a change of code against it.

python tests/answers.py keep DIR      write the answers of this checkout into DIR
python tests/answers.py diff DIR DIR  print the files that differ, with their first different lines
"""

from __future__ import annotations

import argparse
import difflib
import html
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DAMAGED = 10
LINES = 20


def printed_by(*words: object, folder: Path) -> str:
    """Return what a command of the suite prints, and its exit code; `folder` is written FOLDER."""
    command = [sys.executable, "rnnt-bench", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return f"{ended.stdout}\n{ended.stderr}\nexit {ended.returncode}\n".replace(str(folder), "FOLDER")


def page_text(page: Path) -> str:
    """Return the words and numbers of a page, a line each, without its scripts and styles."""
    if not page.exists():
        return "no page\n"
    text = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "", page.read_text(encoding="utf-8"))
    return "\n".join(filter(None, (line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "\n", text)).split("\n"))))


def damage(folder: Path, seed: int) -> None:
    """Cut, garble, repeat or remove lines of some records below a folder, by seed."""
    draw = random.Random(seed)
    for path in draw.sample(sorted(folder.rglob("results.jsonl")), 3):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        index = draw.randrange(len(lines))
        lines[index] = draw.choice(["", lines[index][: len(lines[index]) // 2], lines[index] * 2, "{}\n", "null\n"])
        path.write_text("".join(lines[: index + 1] if draw.random() < 0.3 else lines), encoding="utf-8")


def keep(target: Path) -> None:
    target.mkdir(parents=True)
    folders = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    with tempfile.TemporaryDirectory() as scratch:
        copies = {folder.name: folder for folder in folders}
        for seed in range(DAMAGED):
            copies[f"damaged-{seed}"] = Path(shutil.copytree(folders[-1], Path(scratch, f"damaged-{seed}")))
            damage(copies[f"damaged-{seed}"], seed)
        for name, folder in copies.items():
            page = Path(scratch, "page.html")
            page.unlink(missing_ok=True)
            for kind, flags in {"table": [], "details": ["--details"], "json": ["--format", "json"]}.items():
                (target / f"{name}.{kind}").write_text(printed_by("summarize", folder, *flags, folder=folder))
            printed_by("report", folder, "--output", page, folder=folder)
            (target / f"{name}.page").write_text(page_text(page))
        for other in folders[:-1]:
            words = "compare", other, folders[-1], "--details"
            (target / f"{other.name}.compare").write_text(printed_by(*words, folder=other))


def diff(before: Path, after: Path) -> int:
    """Print how two kept folders differ; return 1 if they do."""
    changed = 0
    for name in sorted({path.name for folder in (before, after) for path in folder.iterdir()}):
        sides = [path.read_text().splitlines() if path.exists() else [] for path in (before / name, after / name)]
        lines = [line for line in difflib.unified_diff(*sides, lineterm="", n=0) if not line.startswith(("---", "+++"))]
        if lines:
            changed += 1
            print(f"{name}: {len(lines)} lines differ", *lines[:LINES], sep="\n")
    return int(bool(changed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name, folders in (("keep", 1), ("diff", 2)):
        actions.add_parser(name).add_argument("folders", nargs=folders, type=Path, metavar="DIR")
    given = parser.parse_args()
    sys.exit({"keep": keep, "diff": diff}[given.action](*given.folders))
