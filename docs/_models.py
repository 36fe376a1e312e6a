#!/usr/bin/env python3
"""Run the commands of docs/inference.md, on a machine that does nothing else: six minutes.

The page gets what each command prints and how long it took; docs/ gets their pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "log" / "pages"
AUDIO = ROOT.parent / "shared" / "data" / "librispeech"
BLOCK = re.compile(
    r"(```console\n\$ \./(\S+)([^\n]*)\n).*?```(\n\nIt took \d+ seconds on \d+ cores\.)?", flags=re.DOTALL
)
#: The other systems in the pictures of docs/inference.md.
SYSTEMS = ("s2s", "s2ut", "two_stage")
#: Below LOG -> in docs/.
PICTURES = {
    "inference-profile/rtf.png": "inference-rtf.png",
    "inference-profile/inference-memory.png": "inference-memory.png",
    "png/pipeline-time.png": "pipeline-time.png",
    "png/pipeline-flops.png": "pipeline-flops.png",
}


def printed(script: str, words: str) -> str:
    """Return what the script prints with these words, which may end in a pipe."""
    words = words.replace("--example_audio=", f"--example_audio={AUDIO}/")
    shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} {script} --log-dir {LOG} --png {words}"]
    done = subprocess.run(shell, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.rstrip().replace(f"{AUDIO}/", "")


def measured(page: str) -> str:
    """Return the page with what its commands print now."""

    def anew(block: re.Match[str]) -> str:
        begin = time.monotonic()
        output = printed(block[2], block[3])
        seconds = round(time.monotonic() - begin)
        return f"{block[1]}{output}\n```\n\nIt took {seconds} seconds on {os.cpu_count()} cores."

    return BLOCK.sub(anew, page)


def main() -> None:
    shutil.rmtree(LOG, ignore_errors=True)  # else a second run of the same is in a folder of another name
    page = ROOT / "docs" / "inference.md"
    page.write_text(measured(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in SYSTEMS:
        printed("pipeline_metrics.py", f"--config examples/pipelines/{name}.yaml")
    report = ["report.py", LOG, "--output", LOG / "report.html", "--png", LOG / "png"]
    subprocess.run([sys.executable, *map(str, report)], cwd=ROOT, check=True)
    for source, name in PICTURES.items():
        shutil.copyfile(LOG / source, ROOT / "docs" / name)


if __name__ == "__main__":
    main()
