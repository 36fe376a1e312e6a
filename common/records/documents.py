"""Check what JSON holds against a type."""

from __future__ import annotations

from typing import Any, Type, TypeVar

from common.core.guard import require

require("msgspec")
import msgspec  # noqa: E402

T = TypeVar("T")


def typed(content: Any, kind: Type[T]) -> T:
    """Return what JSON holds as a Struct, or a list of Structs.  Raises ValueError, which says which field is wrong."""
    return msgspec.convert(content, kind)
