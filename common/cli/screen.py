"""Tells the width of the screen that results are shown on, and whether it shows colors."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Mapping, TypedDict

from common.show import answer

NARROWEST = 60


class How(TypedDict):
    """Arguments of functions that render for the terminal."""

    width: int  # characters
    colors: Mapping[str, str]


def in_color() -> bool:
    """Tell whether stdout is a terminal of colors, and NO_COLOR (no-color.org) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def how() -> How:
    """Return the arguments of functions that render for the terminal; answer.WIDTH where stdout is none."""
    columns = shutil.get_terminal_size((answer.WIDTH, 40)).columns
    width = max(NARROWEST, columns) if sys.stdout.isatty() else answer.WIDTH
    return {"width": width, "colors": answer.COLORS if in_color() else answer.NO_COLORS}
