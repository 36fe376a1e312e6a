"""What the JSON file beside a shape file says of it: its front end, frame shift and vocabulary.  No torch."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any, Dict, Optional

from common.core.files import read_bytes

#: What the JSON file beside a shape file says, or one entry of it.
Provenance = Dict[str, Any]
FACTORS = (1, 2, 4, 6, 8)
#: Seconds between feature frames, where nothing else is said.
FRAME_SHIFT = 0.01


def path_of(shape_file: Path) -> Path:
    return Path(shape_file).with_suffix(".json")


def part(shape_file: Path, name: str) -> Provenance:
    """Return the entry `name` of the file beside a shape file; {} where there is none to be read."""
    try:
        value = json.loads(read_bytes(path_of(shape_file)).decode("utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


def versions(*packages: str) -> Dict[str, str]:
    """Return versions without local parts: the same release built for another CUDA gives the same files."""
    return {package: importlib.import_module(package).__version__.split("+")[0] for package in packages}


def known_factor(shape_file: Path) -> Optional[int]:
    """Return the subsampling factor of a shape file's frames; None if that is not known."""
    factor = part(shape_file, "options").get("subsampling_factor")
    return factor if type(factor) is int and factor in FACTORS else None


def known_vocab_size(shape_file: Path) -> Optional[int]:
    """Return the vocabulary size of the model that counted a shape file's tokens; None if that is not known."""
    size = part(shape_file, "bpe_model").get("vocab_size")
    return size if type(size) is int and size >= 2 else None


def frame_shift(shape_file: Path) -> float:
    """Return the seconds between its feature frames."""
    shift: Any = part(shape_file, "options").get("frame_shift")
    known = type(shift) in (int, float) and 0 < shift < math.inf
    return float(shift) if known else FRAME_SHIFT
