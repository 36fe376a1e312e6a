"""A plot as HTML: title, caption, the place that page.js draws it into, and its numbers as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Union

from common.report.look import Figure
from common.report.markup import Table, table, text


def plot(figure: Figure, place: Union[int, str], figures: Dict[str, Figure], base: Path) -> str:
    """A plot with its caption, registered in `figures`; its numbers follow as a table that can be opened.  place: of
    its section, so that keys are unique on the page."""
    key = f"{figure.key}-{place}"
    figures[key] = figure
    level = "h4" if figure.small else "h3"
    numbers = "" if figure.small or figure.table is None else numbers_of(figure.table, base)
    return (
        f'<figure id="{text(key)}"><{level}>{text(figure.title)}</{level}>'
        f"<figcaption>{text(figure.caption)}</figcaption>"
        f'<div class="plot" role="img" aria-label="{text(figure.summary)}" data-figure="{text(key)}" '
        f'style="min-height:{figure.height}px"></div>\n{numbers}</figure>\n'
    )


def numbers_of(numbers: Table, base: Path, summary: str = "The numbers of this plot") -> str:
    return f"<details><summary>{text(summary)}</summary>\n{table(numbers, base)}</details>"
