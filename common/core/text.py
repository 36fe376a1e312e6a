"""Numbers and names as people read them, in the terminal, in Markdown and on the page."""

from __future__ import annotations

import html
import math
import re
from typing import Optional

LONGEST_CELL = 26  # characters of a name or version in the terminal, of a label anywhere


def number(value: Optional[float], digits: int = 4) -> str:
    """About `digits` significant digits, never an exponent for what people measure; "-" where nothing is known."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def error(value: Optional[float]) -> str:
    """A relative error; what is not finite is stored as 1e300."""
    return "-" if value is None else "inf" if value >= 1e300 else f"{value:.1e}"


def short(cell: str) -> str:
    return cell if len(cell) <= LONGEST_CELL else cell[: LONGEST_CELL - 3] + "..."


def escaped(text: str) -> str:
    """Markdown that shows `text` itself: no markup, no links."""
    return re.sub(r"([\\`*|~]|\](?=[(\[:]))", r"\\\1", html.escape(text, quote=False))
