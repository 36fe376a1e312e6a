"""The matrix small enough for a README: one symbol a cell, short heads, the legend in words; folded.  No torch.

``python -m common.conformance.compact`` prints the block of the committed matrix, with the two lines that it stands
between; whoever makes docs/conformance.json anew puts it into README.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Mapping

from common.conformance.findings import called
from common.conformance.matrix import LEGEND, escaped, heading, judged_of
from common.conformance.outcomes import CRASHES, DIFFERS, ERROR, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT
from common.settings import ROOT

COMMITTED = ROOT / "docs" / "conformance.json"
BEGIN, END = "<!-- conformance -->", "<!-- /conformance -->"
SYMBOLS = {
    PASS: "\u2713",
    DIFFERS: "\u2717",
    REFUSES: "!",
    CRASHES: "\u2020",
    TIMEOUT: "\u2026",
    ERROR: "?",
    NOT_APPLICABLE: "\u2013",
}
#: Heads of columns; a variant adds its first letter, and what is not here has its own name.
SHORT = {
    "torchaudio": "ta",
    "optimized_transducer": "ot",
    "fast_rnnt": "fr",
    "fast_rnnt-pruned": "fr-p",
    "fast_rnnt-simple": "fr-s",
    "k2-pruned": "k2-p",
    "k2-simple": "k2-s",
    "warprnnt_numba": "wn",
    "nemo": "ne",
    "nemo-triton": "nt",
    "warp-rnnt": "wr",
    "warp-transducer": "wt",
    "speechbrain": "sb",
    "reference": "ref",
    "apex": "ap",
    "awni": "aw",
}


def short(name: str) -> str:
    base, _, variant = name.partition(":")
    return SHORT.get(base, base) + (f":{variant[0]}" if variant else "")


def block(document: Mapping[str, Any]) -> str:
    """Markdown from BEGIN to END."""
    columns = judged_of(document)
    heads = [short(entry["name"]) for entry in columns]
    lines = [
        BEGIN,
        f"<details><summary>All {len(document['cases'])} cases on {escaped(heading(document))}</summary>",
        "",
    ]
    lines += [f"| case | {' | '.join(heads)} |", f"| --- |{' :-: |' * len(heads)}"]
    for case in document["cases"]:
        cells = [SYMBOLS[entry["cells"][case["name"]]["result"]] for entry in columns]
        lines.append(f"| {escaped(case['title'])} | {' | '.join(cells)} |")
    used = {cell["result"] for entry in columns for cell in entry["cells"].values()}
    results = [f"{SYMBOLS[result]} {result}: {words}" for result, words in LEGEND.items() if result in used]
    names = [f"{head} {called(entry)}" for head, entry in zip(heads, columns) if head != called(entry)]
    lines += ["", f"{'; '.join(results)}.", "", f"{escaped(', '.join(names))}.", "", "</details>", END]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(block(json.loads(COMMITTED.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        sys.exit(f"{COMMITTED} cannot be read ({error}): make it with ./conformance.py --output docs")
