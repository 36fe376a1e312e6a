"""What we tell a package's functions beside tensors, and what their authors' own defaults are."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, Mapping

Options = Dict[str, Dict[str, Any]]


def described(function: Callable[..., Any], ours: Mapping[str, Any], prefix: str = "") -> Options:
    """{name: {"ours", "default"}} of what we pass and of every other parameter with a default, which then is ours too.

    "-": the signature does not tell (functions in C) or there is no default.  Parameters that default to None are left
    out where we do not pass them: they are tensors, or say nothing.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    found = {name: {"ours": _plain(value), "default": _plain(defaults.get(name, "-"))} for name, value in ours.items()}
    for name, value in defaults.items():
        if name not in ours and value is not None:
            found[name] = {"ours": _plain(value), "default": _plain(value)}
    return {prefix + name: values for name, values in found.items()}


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
