#!/usr/bin/env python3
"""The table on README's first screen, from committed records: `docs/_figures.py` writes it between its two marks.

tests/test_docs.py asks that the page has what the records say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.analysis import logs  # noqa: E402
from common.analysis.groups import groups  # noqa: E402
from common.tables import results, text  # noqa: E402

PAGE = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- table of (\S+), written by docs/_figures\.py -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def table(folder: str) -> str:
    """Markdown: a row for each loss that was measured."""
    (group,) = groups(logs.read([ROOT / folder]).rows)
    measured = results.table("readme", "", [row for row in group if row.status == "ok"])
    return "\n".join(line for line in text.block(measured, "markdown").splitlines() if line.startswith("|"))


def written(page: str) -> str:
    """The page with each table as the records have it."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
