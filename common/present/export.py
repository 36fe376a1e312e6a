"""Write rows as CSV and JSON, and make text harmless.

Names and reasons come from files anyone may have written: they are shown as plain text, with no control characters, no
markup, no formulas.
"""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any, Sequence

from common.core.text import plain
from common.present.table import Values

#: Each batch and round, each option of a package would be columns of their own.
NOT_IN_CSV = ("round_medians_ms", "options")


def json_text(rows: Sequence[Values]) -> str:
    """Return the rows as a JSON list of objects, in ASCII, so that no control character gets through."""
    return json.dumps([_finite(row) for row in rows], indent=2, allow_nan=False) + "\n"


def csv_text(rows: Sequence[Values]) -> str:
    """Return a line for each row, with flat columns: step_ms_median, memory_step_process_mb, ..."""
    flat = [_flat({key: value for key, value in row.items() if key not in NOT_IN_CSV}) for row in rows]
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_cell(name) for name in names)
    writer.writerows([_cell(cells.get(name)) for name in names] for cells in flat)
    return stream.getvalue()


def _flat(value: Values, prefix: str = "") -> Values:
    """Flatten to one level: {"step_ms": {"p20": 1}} -> {"step_ms_p20": 1}; a list becomes one cell."""
    result: Values = {}
    for key, item in value.items():
        if isinstance(item, dict):
            result.update(_flat(item, f"{prefix}{key}_"))
        elif isinstance(item, list):
            parts = (json.dumps(_finite(part)) if isinstance(part, dict) else str(part) for part in item)
            result[prefix + key] = "; ".join(parts)
        else:
            result[prefix + key] = item
    return result


def _cell(value: Any) -> Any:
    """Return a cell as text; text that a spreadsheet would take for a formula is marked."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = plain(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not _reads_as_number(text) else text


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
