#!/usr/bin/env python3
"""Draw pictures of the report of committed records: `docs/_screens.py results/FOLDER`, with chromium and selenium.

The pictures are docs/report-*.png: the upper part of the page on a screen, light and dark, on a phone and on paper.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browsers import Browser  # noqa: E402

from common import command  # noqa: E402
from common.analysis import logs  # noqa: E402
from common.show import writing  # noqa: E402

command.register()

#: Name -> how the page is opened, and how many pixels of it are shown.
SCREENS = {
    "light": ({"width": 1440}, 1900),
    "dark": ({"width": 1440, "dark": True}, 1900),
    "phone": ({"width": 390}, 1700),
    "paper": ({"width": 680, "media": "print"}, 1000),
}


def main(folder: str) -> None:
    paths = [Path(folder)]
    with TemporaryDirectory() as scratch:
        report = writing.write(logs.read_any(paths), Path(scratch) / "report.html", paths)
        browser = Browser(Path(scratch) / "profile")
        try:
            for name, (how, height) in SCREENS.items():
                browser.open(report, **how)
                if name == "paper":
                    browser.js("dispatchEvent(new Event('beforeprint'))")
                browser.screenshot(ROOT / "docs" / f"report-{name}.png", height)
        finally:
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
