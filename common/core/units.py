"""Parses sizes and numbers, and writes amounts with their units."""

from __future__ import annotations

import math
import string
from typing import Optional

from common.core.errors import UserError

MB = 2**20
GIB = 2**30
#: The largest size that records keep.
MOST_BYTES = 2**53

#: Bytes of each unit that a size may have.
SIZE_UNITS = {
    f"{letter}{end}": base**power for end, base in (("ib", 1024), ("b", 1000)) for power, letter in enumerate("kmgt", 1)
}


def positive(text: str) -> float:
    """Return the number above 0 in a text.  Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"give a number, not {text!r}") from None
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"must be above 0, not {text}")
    return value


def bytes_of(text: str, device_bytes: int) -> int:
    """Return the bytes of "4GiB", "500MB" or "80%" (of `device_bytes`).  Raises UserError."""
    number = text.rstrip("%" + string.ascii_letters + " ")
    unit = text[len(number) :].strip().lower()
    if unit not in SIZE_UNITS and unit != "%":
        raise UserError(f"give a size such as 4GiB, 500MB or 80% of the device, not {text!r}")
    value = positive(number)
    if unit == "%" and value > 100:
        raise UserError(f"must be at most 100%, not {text}")
    wanted = device_bytes * value / 100 if unit == "%" else value * SIZE_UNITS[unit]
    if wanted > MOST_BYTES:
        raise UserError(f"must be at most {MOST_BYTES} bytes, not {text}")
    size = int(wanted)
    if size < 1:
        raise UserError(f"must be at least a byte, not {text}")
    return size


def quantity(value: Optional[float], unit: str = "") -> str:
    """Return "999 FLOPs", "1.0 KFLOPs", "1.23 MMACs", "94.7 M": at most two decimals, steps of 1000; "-" for None."""
    if value is None:
        return "-"
    scaled: float = round(value)
    for prefix in ("", "K", "M", "G", "T", "P"):
        shown = str(round(scaled, 2) if prefix else scaled)
        if abs(float(shown)) < 1000:
            break
        scaled /= 1000
    return f"{shown} {prefix}{unit}".rstrip()
