"""Read files that are one JSON document, and check them against a type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.core.guard import require

require("msgspec")
import msgspec  # noqa: E402

from common.core.errors import UserError  # noqa: E402
from common.core.files import read_bytes  # noqa: E402
from common.core.text import clipped  # noqa: E402


def read(path: Path, kind: Any) -> Any:
    """The JSON of a file, checked.  kind: of its content.  Raises FileNotFoundError, and UserError with the reason for
    what cannot be read."""
    try:
        content = json.loads(read_bytes(path).decode("utf-8"))
        msgspec.convert(content, kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"{type(error).__name__}: {clipped(str(error))}") from error
    return content
