"""Where the suite is installed."""

from __future__ import annotations

from pathlib import Path

#: The folder that holds the scripts and common/.
ROOT = Path(__file__).resolve().parents[2]
