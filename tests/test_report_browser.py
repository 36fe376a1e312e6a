"""The report in a real browser: offline, drawn, without an error, on a screen and on a phone."""

from __future__ import annotations

import pytest
from browsers import AXE, CHROMIUM, DRIVER, Browser
from fixtures_conformance import write_check
from fixtures_runs import timed, traced_run, write_sweep
from fixtures_traces import kineto, memory, steps

from common.analysis import logs
from common.conformance.cases import DIFFERS, PASS, Outcome
from common.show import page

pytest.importorskip("selenium", reason="selenium is not installed in this Python")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)",
)

EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page of runs with traces, one with a hostile name, with a sweep and a conformance matrix."""
    log = tmp_path_factory.mktemp("log")
    window = kineto([*steps([100, 200]), memory(1010, 3 << 20), memory(1130, 9 << 20)])
    for name in ("torchaudio", "optimized_transducer_with_a_long_name", EVIL):
        traced_run(log / str(len(name)), window, name=name)
    timed(log, "fused", [0.01, 0.01, 0.01])
    write_sweep(log / "sweep", {"vocab_size": [500, 4000]}, ["torchaudio", "k2"])
    write_check(log, ragged=Outcome(DIFFERS, EVIL), **{"V-2": Outcome(PASS)})
    return page.write(logs.read_any([log]), log / "report.html", [log])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "look", [{"width": 1200}, {"width": 390, "dark": True}, {"width": 680, "media": "print"}], ids=str
)
def test_the_page_opens_offline_without_an_error_and_fits_its_width(browser, report, look):
    browser.requests()
    browser.open(report, **look)
    browser.unfold()
    assert browser.console() == [] and browser.js("window.broken === undefined")
    assert {address.partition(":")[0] for address in browser.requests()} <= {"file", "data", "blob"}
    plots = browser.js("document.querySelectorAll('.plot').length")
    assert plots >= 5 and browser.js("document.querySelectorAll('.plot .main-svg').length") >= plots
    assert browser.js("document.documentElement.scrollWidth") <= look["width"]
    assert browser.js("document.querySelector('#ratios-group-0 .scatterlayer path') !== null")
    code = "getComputedStyle(document.querySelector('.code pre')).backgroundImage"
    assert look.get("media") or "gradient" in browser.js(code)  # a shade says that it scrolls


def test_a_heading_sorts_its_table(browser, report):
    browser.open(report)
    cells = "[...document.querySelectorAll('#group-0 table.sortable td.name')].map((it) => it.textContent)"
    before = browser.js(cells)
    browser.js("document.querySelector('#group-0 > .scroll th button').click()")
    assert len(before) > 2 and browser.js(cells) != before


@pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
def test_axe_finds_no_violation(browser, report):
    browser.open(report, width=390)
    browser.unfold()
    assert browser.violations() == []
