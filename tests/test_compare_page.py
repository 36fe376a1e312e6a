"""The page of a comparison: the title says what changed, cards why, and it is one file that opens offline."""

from __future__ import annotations

import re

import pytest
from browsers import AXE, CHROMIUM, DRIVER, Browser, unpacked
from commands import run
from fixtures_runs import timed

pytest.importorskip("jinja2", reason="jinja2 is not installed in this Python")


def compared(tmp_path, *rows):
    """Return the page of two log folders.  rows: (name, baseline ms, new ms) of the rounds."""
    for name, *sides in rows:
        for side, ms in zip(("baseline", "new"), sides):
            timed(tmp_path / side, name, ms, run_id=side)
    done = run("rnnt-bench", "compare", tmp_path / "baseline", tmp_path / "new", "--output", tmp_path / "page.html")
    assert done.returncode == 0 and "VERDICT" in done.stdout and str(tmp_path / "page.html") in done.stderr
    return (tmp_path / "page.html").read_text(encoding="utf-8")


STEADY, SLOWER = [10, 10.1, 10.2, 10.1, 10], [20, 20.2, 20.3, 20.1, 20]


def test_the_title_counts_what_changed_and_cards_say_why(tmp_path):
    page = compared(tmp_path, ("k2", STEADY, SLOWER), ("torchaudio", STEADY, STEADY))
    assert re.search(r"<h1>Times: 2 slower, 2 same</h1>", page)
    (card,) = re.findall(r'<div class="card clear bad"><dt>Slower</dt>.*?</div>', page, re.DOTALL)
    assert "k2, step time" in card and "more time" in card and "torchaudio" not in card
    drawn = unpacked(page, "figures")
    assert "k2, step" in drawn and '"type":"log"' in drawn


@pytest.mark.skipif(not (CHROMIUM and DRIVER and AXE), reason="needs chromium, chromedriver and axe-core")
def test_it_opens_offline_and_axe_finds_no_violation(tmp_path):
    pytest.importorskip("selenium")
    compared(tmp_path, ("k2", STEADY, SLOWER), ("<b>own", SLOWER, STEADY))
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(tmp_path / "page.html")
        assert browser.violations() == [] and browser.console() == []
        assert browser.js("document.querySelectorAll('.scatterlayer .points path').length") == 4
    finally:
        browser.close()
