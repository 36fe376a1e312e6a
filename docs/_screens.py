#!/usr/bin/env python3
"""Take the pictures of docs/ in a browser: `docs/_screens.py [results/FOLDER]`, with chromium and selenium.

time-memory.png: time against memory; the losses that one can choose from are large and have names, all others are small
and grey.  report-*.png: the upper part of the report, light and dark, on a phone and on paper.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "tests")]

from browsers import Browser  # noqa: E402
from rnnt_bench.analysis import logs, verdict  # noqa: E402
from rnnt_bench.analysis.row import Row  # noqa: E402
from rnnt_bench.core.text import number  # noqa: E402
from rnnt_bench.present.parts import Figure, Section  # noqa: E402
from rnnt_bench.present.style import NEUTRAL, axis_of, layout, marker, points, span  # noqa: E402
from rnnt_bench.show import page, plots  # noqa: E402

from _figures import CHOICES  # noqa: E402

FOLDER = "results/2026-11-27-amd-epyc-2-cores"
SMALL, LARGE, WINNER = 8, 20, 30  # pixels of a marker
WIDTH, HEIGHT = 900, 430  # pixels
#: Name -> how the page is opened, and how many pixels of it are shown.
SCREENS = {
    "light": ({"width": 1440}, 1900),
    "dark": ({"width": 1440, "dark": True}, 1900),
    "phone": ({"width": 390}, 1700),
    "paper": ({"width": 680, "media": "print"}, 1000),
}


def picture(rows: list[Row]) -> Figure:
    """Return the plot of rows of one configuration, without those of another environment than their own."""
    places = plots.positions(rows)
    both = [row for row in rows if "@" not in row.name and row.label in places]
    at = [places[row.label] for row in both]
    pick = verdict.fastest(rows)
    data = []
    for row, (ms, mb) in sorted(zip(both, at), key=lambda pair: pair[0].name in CHOICES):
        if row.name not in CHOICES:
            data.append(points(row.name, [(ms, mb)], {"symbol": "circle", "size": SMALL, "color": NEUTRAL}))
        elif pick is not None and row is pick.row:
            words = f"<b>{row.name}: {number(ms / 1e3, 2)} s, {number(mb, 1)} MB</b>"
            text = {"mode": "markers+text", "text": [words], "textposition": "top left"}
            data.append(points(row.name, [(ms, mb)], marker(row.look, WINNER), **text))
        else:
            text = {
                "mode": "markers+text",
                "text": [row.marked_label],
                "textposition": "top center",
                "cliponaxis": False,
            }
            data.append(points(row.name, [(ms, mb)], marker(row.look, LARGE, hollow=bool(row.other_torch)), **text))
    across = span([0.6 * min(ms for ms, _ in at), *(ms for ms, _ in at)])  # with room for a name at the left
    up = span([mb for _, mb in at])
    frame = layout(HEIGHT, None, xaxis=axis_of("step, ms", across), yaxis=axis_of("peak, MB", up))
    title = "Time and memory of a training step (lower left is better; grey: other losses; hollow: another torch)"
    return Figure("picture", title, "", title, data, frame)


def main(folder: str) -> None:
    """Write the pictures of the runs in a folder."""
    paths = [ROOT / folder]
    log = logs.read_any(paths)
    with TemporaryDirectory() as scratch:
        report = page.write(log, Path(scratch) / "report.html", paths)
        drawn = page.assembled([Section("picture", "", figures=[picture(log.groups[0].rows)])], Path(scratch), "", "")
        (Path(scratch) / "picture.html").write_text(drawn, encoding="utf-8")
        browser = Browser(Path(scratch) / "profile")
        try:
            browser.open(Path(scratch) / "picture.html", width=WIDTH)
            browser.screenshot(ROOT / "docs" / "time-memory.png", of="figure")
            for name, (how, height) in SCREENS.items():
                browser.open(report, **how)
                if name == "paper":
                    browser.js("dispatchEvent(new Event('beforeprint'))")
                browser.screenshot(ROOT / "docs" / f"report-{name}.png", height)
        finally:
            browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=FOLDER, help=f"Folder of records. Default: {FOLDER}")
    main(parser.parse_args().folder)
