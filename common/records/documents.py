"""Read files that are one JSON document, and check them against a type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Type, TypeVar

from common.core.guard import require

require("msgspec")
import msgspec  # noqa: E402

from common.core.errors import UserError  # noqa: E402
from common.core.files import read_bytes  # noqa: E402
from common.core.text import clipped  # noqa: E402

T = TypeVar("T")


def typed(content: Any, kind: Type[T]) -> T:
    """Return what JSON holds as a Struct, or a list of Structs.  Raises ValueError, which says which field is wrong."""
    return msgspec.convert(content, kind)


def read(path: Path, kind: Type[T]) -> T:
    """Return what a file holds as `kind`.  Raises FileNotFoundError, and UserError with the reason for what cannot be
    read."""
    try:
        return typed(json.loads(read_bytes(path).decode("utf-8")), kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"{type(error).__name__}: {clipped(str(error))}") from error
