"""The screen that results are shown on: its width, and whether it shows colors."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Dict, Mapping

from common.tables import answer

NARROWEST = 60


def width() -> int:
    """Characters of a line; answer.WIDTH where stdout is no terminal."""
    if not sys.stdout.isatty():
        return answer.WIDTH
    return max(NARROWEST, shutil.get_terminal_size((answer.WIDTH, 40)).columns)


def in_color() -> bool:
    """On a terminal, unless NO_COLOR (no-color.org) is set or the terminal is dumb."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def how() -> Dict[str, Any]:
    """Arguments of what renders for the terminal."""
    colors: Mapping[str, str] = answer.COLORS if in_color() else answer.NO_COLORS
    return {"width": width(), "colors": colors}
