"""Render data as HTML by templates, which are named by their path below common/.

All text is escaped and, except code, shown on one line, whatever file it is from; every address is relative to the
page's folder.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Mapping
from urllib.parse import quote

from common.core.errors import UserError
from common.core.text import plain
from common.present.parts import Table
from common.present.text import csv_text

COMMON = Path(__file__).resolve().parents[1]
DIGITS = 6  # significant ones of a number that is drawn: far below a pixel


def render(template: str, base: Path, **content: Any) -> str:
    """Render the template with its content, for a page in the folder `base`.  Raises UserError without jinja2."""
    return environment().get_template(template).render(base=base, **content)


@cache
def environment() -> Any:
    """Return jinja2's environment, with the filters that the templates use."""
    try:
        import jinja2
        from markupsafe import Markup, escape
    except ImportError:
        advice = "`make report` uses an environment that has it, or pip install jinja2"
        raise UserError(f"no report: jinja2 is not installed in {sys.executable}; {advice}") from None

    options: Any = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    options["finalize"] = lambda value: value if isinstance(value, Markup) else plain(value)
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(COMMON), **options)
    templates.filters.update(
        href=jinja2.pass_context(lambda context, target: href(target, context["base"])),
        csv=lambda table: Markup(csv_address(table)),
        code=lambda text: Markup(str(escape(text)).replace("\n", "&#10;")),
        wrap=lambda text: escape(plain(text)).replace("_", Markup("_<wbr>")),
    )
    return templates


def href(target: Path, base: Path) -> str:
    """Return the address of `target`, relative to the page's folder `base`."""
    relative = os.path.relpath(target.resolve(), base.resolve())
    return quote(os.fsencode(relative), safe="/")


def drawn(value: Any) -> Any:
    """Return data for plots as JSON can have it: numbers in DIGITS digits, infinity and NaN as None."""
    if isinstance(value, Mapping):
        return {key: drawn(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [drawn(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def script_hash(source: str) -> str:
    """Return the source expression by which a content security policy allows this one script."""
    digest = base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def packed(source: str) -> str:
    """Pack text for page.js to unpack: gzip, in base64."""
    return base64.b64encode(gzip.compress(source.encode("utf-8"), 9, mtime=0)).decode()


def csv_address(table: Table) -> str:
    """Return a data address that holds the table as a CSV file."""
    rows = table.values() or [{column.title: None for column in table.columns}]
    encoded = base64.b64encode(csv_text(rows).encode("utf-8")).decode()
    return f"data:text/csv;charset=utf-8;base64,{encoded}"
