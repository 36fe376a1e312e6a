#!/usr/bin/env python3
"""Draw README's picture of committed records: `docs/_picture.py [results/FOLDER]` writes docs/time-memory.png.

The losses that one can choose from are large and have names; all others are small and grey.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import matplotlib  # noqa: E402
from _figures import CHOICES  # noqa: E402
from common.present.labels import Names  # noqa: E402

from common.analysis import logs, verdict  # noqa: E402
from common.analysis.row import Row  # noqa: E402
from common.core.text import number  # noqa: E402
from common.present import scales  # noqa: E402
from common.present.style import NEUTRAL, Figure, Trace, axis_of, layout, marker, points  # noqa: E402
from common.show import png, trade_off  # noqa: E402

FOLDER = "results/2026-11-24-amd-epyc-2-cores"
PICTURE = ROOT / "docs" / "time-memory.png"
SMALL, LARGE, WINNER = 8, 20, 30  # pixels of a marker
HEIGHT = 430  # pixels


def picture(rows: List[Row]) -> Tuple[Figure, List[Tuple[float, float, str]]]:
    """Return the figure of rows of one configuration, and (ms, MB, words) of the fastest exact loss, where there is
    one.  Rows of another environment than their own are left out."""
    both, _, at = trade_off.known([row for row in rows if "@" not in row.name])
    pick = verdict.fastest(rows)
    data: List[Trace] = []
    names, winner = [], []
    for row, (ms, mb) in sorted(zip(both, at), key=lambda pair: pair[0].name in CHOICES):
        is_best = pick is not None and row is pick.row
        words = row.marked if row.name in CHOICES else ""
        look = {"symbol": "circle", "size": SMALL, "color": NEUTRAL}
        if words:
            look = marker(row.look, WINNER if is_best else LARGE)
        if is_best:
            winner.append((ms, mb, f"{row.name}: {number(ms / 1e3, 2)} s, {number(mb, 1)} MB"))
            words = ""
        data.append(points(row.name, [(ms, mb)], look, showlegend=False))
        names.append((ms, mb, words))
    across, up = (scales.span([point[axis] for point in at]) for axis in (0, 1))
    frame = layout(HEIGHT, None, xaxis=axis_of("step, ms", across), yaxis=axis_of("peak, MB", up))
    title = "Time and memory of a training step (lower left is better; grey: other losses)"
    return Figure("time-memory", title, "", "", data, frame, None, names=Names(names, [], across, up)), winner


def write(folder: str = FOLDER) -> None:
    """Write the picture of the runs in a folder."""
    (group,) = logs.read([ROOT / folder]).groups
    figure, winner = picture(group.rows)
    with matplotlib.rc_context(png.STYLE):
        drawn = png.draw(figure)
        (axes,) = drawn.axes
        for text in axes.texts:
            text.set_fontsize(9)
        for ms, mb, words in winner:
            style = {"textcoords": "offset points", "va": "center", "fontsize": 12, "fontweight": "bold"}
            axes.annotate(words, (ms, mb), (16, 0), **style)
        drawn.savefig(PICTURE)


if __name__ == "__main__":
    write(*sys.argv[1:])
