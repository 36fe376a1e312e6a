"""The report in a real browser: offline, drawn, sorted, dark, on a phone and on paper."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import zlib

import pytest
from browsers import AXE, CHROMIUM, DRIVER, Browser
from commands import ROOT
from fixtures_conformance import made
from fixtures_machines import side_by_side
from fixtures_runs import correctness, header, status, timed, timing, traced_run, write_records, write_run
from fixtures_sweeps import write_sweep
from fixtures_traces import kineto, span, steps, write
from fixtures_traces import memory as memory_event

from common.analysis import logs
from common.conformance import section as conformance
from common.conformance.records import CRASHES, DIFFERS, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT, Outcome
from common.present import table
from common.present.section import Section
from common.show import page, writing

pytest.importorskip("selenium", reason="selenium is not installed in this Python")
pytest.importorskip("jinja2", reason="jinja2 is not installed in this Python")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)",
)

EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
PLOTS = (
    "ratios-0",
    "step-time-0",
    "peak-memory-0",
    "time-memory-0",
    "memory-within-0",
    "samples-0",
    "shape-t-0",
    "shape-padding-0",
    "sweep-vocab-size-time-sweep-0",
    "sweep-dtype-memory-sweep-0",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with the committed matrix, whatever log/ of this checkout has."""
    log = tmp_path_factory.mktemp("log")
    return written(log, log / "none")


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    """The same with a matrix of one row, for what takes long on a large page."""
    log = tmp_path_factory.mktemp("compact")
    results = (DIFFERS, PASS, REFUSES, CRASHES, TIMEOUT, NOT_APPLICABLE)
    cases = ("ragged", "V-2", "no-target", "float16", "bfloat16", "large")
    document = made(**{case: Outcome(result, "a message") for case, result in zip(cases, results)})
    (log / "conformance.json").write_text(document.to_json())
    return written(log, log / "conformance.json")


def written(log, matrix):
    """A page of three runs with traces, one of them with a hostile name, one that failed, and a sweep."""
    window = [*steps([100, 200]), span("joiner", 1120, 80)]
    window += [memory_event(at, total << 20) for at, total in ((1010, 3), (1130, 9), (1180, 4))]
    for name in ("torchaudio", "optimized_transducer_with_a_long_name", EVIL):
        traced_run(log / f"run-{len(name)}", kineto(window), name=name)
    write_records(log / "k2", [header("k2"), status("correctness", "missing", f"{EVIL} pip install k2")])
    write_run(
        log / "died", "died", [correctness(), timing("timing-1", [], [1, 2]), [status("timing-2", "error", "it broke")]]
    )
    write_sweep(log / "sweep", {"vocab_size": [500, 4000], "dtype": ["float32", "bfloat16"]}, [EVIL, "k2"])
    read = logs.read_any([log])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conformance, "LOG", matrix)
        return writing.write(read, log / "report.html")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Losses that are close to each other in time and memory, on a page of their own."""
    log = tmp_path_factory.mktemp("crowded")
    for name, ms, peak in (
        ("k2", 100, 50),
        ("fast_rnnt", 101, 51),
        ("torchaudio", 99, 52),
        ("optimized_transducer", 103, 49),
        ("reference", 400, 300),
        ("warp-transducer", 102, 53),
    ):
        timed(log, name, [ms, ms + 1], peak=peak)
    return writing.write(logs.read_any([log]), log / "report.html")


def heading(browser, title):
    """The button of a column of the first table."""
    xpath = f"(//table)[1]//th/button[starts-with(normalize-space(.), '{title}')]"
    return browser.driver.find_element("xpath", xpath)


def column(browser, number):
    cells = "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[arguments[0]].dataset.value)"
    return browser.js(cells, number)


def test_opens_offline_without_a_word_on_the_console(browser, report):
    browser.requests()
    browser.console()
    browser.open(report)
    assert [url for url in browser.requests() if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    assert browser.console() == []


def test_plots_are_drawn(browser, report):
    browser.open(report)
    browser.unfold()
    for key in PLOTS:
        size = browser.js("document.querySelector(arguments[0]).getBoundingClientRect()", f"#{key} .main-svg")
        assert size["width"] > 200 and size["height"] > 100, key
        drawn = "document.querySelectorAll(arguments[0]).length"
        assert browser.js(drawn, f"#{key} .barlayer path, #{key} .scatterlayer path"), key
        assert browser.js("document.querySelector(arguments[0]).getAttribute('aria-label')", f"#{key} .plot")


@pytest.mark.thorough
def test_every_figure_is_one_that_plotly_knows(browser, report, tmp_path):
    side_by_side(tmp_path)
    write(tmp_path / "c" / "w.1.pt.trace.json", kineto(steps([100, 200])))  # a trace alone
    for path in (report, writing.write(logs.read_any([tmp_path]), tmp_path / "report.html")):
        browser.open(path)
        answer = browser.js("Object.values(figures).map(it => Plotly.validate(it.data, it.layout) || [])")
        assert len(answer) > 8
        for wrong in answer:  # unused: of the template of all plots, which no plot needs whole
            assert [each for each in wrong if each["code"] != "unused"] == []


def test_hostile_names_run_nothing_and_are_seen(browser, report):
    browser.open(report)
    assert browser.js("window.broken") is None
    assert browser.js("document.images.length") == 0
    assert "<script>window.broken" in browser.js("document.querySelector('table').textContent")
    assert "<script>" in browser.js("document.querySelector('#ratios-0 .plot').textContent")
    assert "pip install k2" in browser.js("document.querySelector('.failures').textContent")


def test_a_script_that_slipped_in_would_not_run(browser, report):
    browser.open(report)
    page = "(() => { const it = document.createElement('script'); it.textContent = 'window.slipped = 1';"
    browser.js(f"{page} document.body.append(it); }})()")
    assert browser.js("window.slipped") is None
    assert "Content Security Policy" in str(browser.console())


def test_sorting_by_click(browser, report):
    browser.open(report)
    step = [title.text.split("\n")[0] for title in browser.driver.find_elements("css selector", "th")].index("step ms")
    button = heading(browser, "step ms")
    for direction, sign in (("ascending", 1), ("descending", -1)):
        button.click()
        assert browser.js("arguments[0].closest('th').getAttribute('aria-sort')", button) == direction
        values = [sign * float(value) for value in column(browser, step) if value]
        assert values == sorted(values)
        assert column(browser, step)[-1] == ""  # died was not timed: last, whichever way


@pytest.mark.thorough
def test_sorting_by_keyboard(browser, report):
    from selenium.webdriver.common.keys import Keys

    browser.open(report)
    heading(browser, "status").send_keys(Keys.SHIFT, Keys.TAB)  # to the column before
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    names = column(browser, 0)
    assert names == sorted(names, key=str.lower) and len(names) == 4
    assert browser.js("document.querySelectorAll('th[aria-sort=ascending]').length") == 1
    browser.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert column(browser, 0) == names[::-1]


def test_a_table_downloads(browser, report):
    browser.open(report)
    link = browser.driver.find_element("css selector", ".download a")
    assert link.get_attribute("download") == "results.csv"
    data = base64.b64decode(link.get_attribute("href").partition("base64,")[2]).decode()
    names = {row["implementation"] for row in csv.DictReader(io.StringIO(data))}
    assert names >= {"torchaudio", "died"} and "k2" not in names  # which did not run


@pytest.mark.parametrize("width, dark", [(1200, False), (390, True)])
def test_nothing_overflows_the_page(browser, report, width, dark):
    browser.open(report, width=width, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") <= width
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map(it => it.getBoundingClientRect().right))"
    assert browser.js(widest) <= width
    assert browser.console() == []


def test_the_conformance_matrix_fits_a_screen_and_keeps_its_cases_on_a_phone(browser, report):
    browser.open(report, width=1140)
    document = json.loads((ROOT / "docs" / "conformance.json").read_text())
    judged = [row for row in document["implementations"] if row["status"] == "judged" and row["kind"] == "exact"]
    first = "document.querySelector('.matrix')"  # that of another lattice is folded
    assert browser.js(f"{first}.querySelectorAll('thead th').length") == 1 + len(judged)
    assert browser.js("(it => it.scrollWidth <= it.clientWidth)(document.querySelector('.matrix'))")
    ground = "getComputedStyle(document.querySelector('.matrix tbody th')).backgroundColor"
    assert re.fullmatch(r"rgb\(.*\)", browser.js(ground))  # nothing shines through
    browser.open(report, width=390, dark=True)
    assert re.fullmatch(r"rgb\(.*\)", browser.js(ground))
    left = "document.querySelector('.matrix tbody th').getBoundingClientRect().left"
    before = browser.js(left)
    browser.js("document.querySelector('.matrix').scrollTo(200, 200)")
    assert browser.js("document.querySelector('.matrix').scrollLeft") == 200 and browser.js(left) == before


@pytest.mark.thorough
@pytest.mark.parametrize("width, dark", [(1200, False), (390, True)])
def test_the_first_column_stays_while_a_table_is_scrolled(browser, report, width, dark):
    browser.open(report, width=width, dark=dark)
    browser.js("document.querySelector('button.more').click()")
    rectangle = "document.querySelector('td.name').getBoundingClientRect()"
    before = browser.js(rectangle)
    browser.js("document.querySelector('.scroll').scrollTo(400, 0)")
    after = browser.js(rectangle)
    assert browser.js("document.querySelector('.scroll').scrollLeft") > 100
    assert after["left"] == before["left"] and after["width"] < width / 2
    over = "document.elementFromPoint(arguments[0], arguments[1]).closest('td').className"
    browser.js("document.querySelector('td.name').scrollIntoView({block: 'center'})")
    middle = browser.js(rectangle)
    assert browser.js(over, middle["left"] + middle["width"] / 2, middle["top"] + middle["height"] / 2) == "name"
    assert "rgba" not in browser.js("getComputedStyle(document.querySelector('td.name')).backgroundColor")


def test_what_decides_is_in_view_without_scrolling(browser, report):
    browser.open(report, width=1185)
    right = browser.js("document.querySelector('.scroll').getBoundingClientRect().right")
    for title in ("step ms", "loss ms", "over the fastest", "% of limit, loss", "peak MB"):  # the names here are long
        assert heading(browser, title).rect["x"] + heading(browser, title).rect["width"] <= right, title


def contrast(browser, selector, of="color"):
    """WCAG 2 contrast of what `selector` finds to the page."""
    code = "getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    colors = [browser.js(code, selector, of), browser.js(code, "body", "backgroundColor")]
    luminances = []
    for color in colors:
        parts = [int(part) / 255 for part in color.strip("rgb()").split(",")]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    high, low = max(luminances), min(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(browser, report, dark):
    browser.open(report, dark=dark)
    for selector in (
        "body",
        ".lead",
        "figcaption",
        "summary",
        "th button",
        ".failures",
        ".failures .bad",
        "nav a",
        "footer",
    ):
        assert contrast(browser, selector) >= 4.5, selector
    browser.unfold()
    for selector in ("#step-time-0 .xtick text", "#step-time-0 .annotation-text", "#step-time-0 .legendtext"):
        assert contrast(browser, selector, "fill") >= 4.5, selector


@pytest.mark.thorough
def test_it_prints_dark_or_not_on_white(browser, report):
    browser.open(report, dark=True, media="print")
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.open(report)
    assert browser.printed().startswith(b"%PDF")
    assert browser.js("document.documentElement.scrollWidth") <= 1200  # and the screen is as it was


@pytest.mark.thorough
def test_nothing_is_wider_than_a_sheet(browser, report):
    browser.open(report, width=680, media="print")  # of A4 within its margins
    widest = "Math.max(...[...document.querySelectorAll('table')].map(it => it.getBoundingClientRect().right))"
    assert browser.js(widest) <= 680 and browser.js("document.documentElement.scrollWidth") <= 680
    assert browser.js("document.querySelector('.matrix').getBoundingClientRect().height") < 900  # on one sheet


@pytest.mark.thorough
def test_plots_fill_a_sheet_and_then_the_screen_again(browser, report):
    size = "(({width, height}) => [width, height])(document.querySelector(arguments[0]).getBoundingClientRect())"
    browser.open(report)
    browser.unfold()
    plots = [f"#{key} .main-svg" for key in PLOTS if not key.startswith(("shape", "memory-within"))]
    before = {plot: browser.js(size, plot) for plot in plots}
    browser.js("dispatchEvent(new Event('beforeprint'))")
    for plot in plots:
        width, height = browser.js(size, plot)
        assert width == pytest.approx(670, abs=2) and height <= 801
    browser.js("dispatchEvent(new Event('afterprint'))")
    assert {plot: browser.js(size, plot) for plot in plots} == before


@pytest.mark.thorough
def test_a_plot_follows_the_width(browser, report):
    browser.open(report)
    wide = browser.js("document.querySelector('#ratios-0 .main-svg').getBoundingClientRect().width")
    size = {"width": 600, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    narrow = "document.querySelector('#ratios-0 .main-svg').getBoundingClientRect().width"
    browser.wait.until(lambda _: browser.js(narrow) < min(wide, 600))


# The names of points: each beside its own marker.

PLACED = """(() => {
  const box = (it) => {
    const {left, top, right, bottom} = it.getBoundingClientRect(); return [left, top, right, bottom]; };
  const plot = document.querySelector('#time-memory-0 .plot');
  return {
    plot: box(plot.querySelector('.main-svg')),
    markers: [...plot.querySelectorAll('.scatterlayer .points path')].map(box),
    names: [...plot.querySelectorAll('.annotation')].map((it) => ({
      text: it.textContent, box: box(it.querySelector('.annotation-text')),
      line: it.querySelector('.annotation-arrow-g path') !== null })) };
})()"""


def apart(first, other):
    """Pixels between two boxes, 0 where they meet."""
    across = max(first[0] - other[2], other[0] - first[2], 0)
    return (across**2 + max(first[1] - other[3], other[1] - first[3], 0) ** 2) ** 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("width, paper", [(1440, False), (768, False), (390, False), (1440, True)])
def test_names_stand_beside_their_own_marker_at_every_width(browser, crowded, width, paper):
    browser.open(crowded, width=width)
    if paper:
        browser.js("dispatchEvent(new Event('beforeprint'))")
    answer = browser.js(PLACED)
    names, markers, plot = answer["names"], answer["markers"], answer["plot"]
    assert len(names) == len(markers) == 6
    for at, name in enumerate(names):
        assert apart(name["box"], plot) == 0 and name["box"][0] >= plot[0] - 1 and name["box"][2] <= plot[2] + 1
        assert all(apart(name["box"], other["box"]) > 0 for other in names[at + 1 :]), name
        marker, others = markers[at], [*markers[:at], *markers[at + 1 :]]
        assert all(apart(name["box"], other) > 0 for other in others), name
        assert name["line"] or all(apart(name["box"], marker) < apart(name["box"], other) for other in others), name


# Contents, width, columns.


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1440, 390])
def test_the_contents_stay_and_say_where_one_is(browser, report, width):
    browser.open(report, width=width)
    current = "document.querySelector('nav [aria-current]').hash"
    assert browser.js(current) == "#group-0"
    browser.js("document.querySelector('#conformance').scrollIntoView()")
    browser.wait.until(lambda _: browser.js(current) == "#conformance")
    nav = browser.js("document.querySelector('nav').getBoundingClientRect()")
    assert nav["top"] == 0 and (nav["height"] <= 900 if width > 1000 else nav["height"] < 60)
    top = browser.js("document.querySelector('#conformance-title').getBoundingClientRect().top")
    assert width > 1000 or top >= nav["bottom"]  # not below the contents
    inner = "[...document.querySelectorAll('nav ul ul')].filter((it) => it.offsetHeight).length"
    assert browser.js(inner) == 0  # the conformance matrix has no parts
    browser.js("scrollTo(0, 0)")
    browser.wait.until(lambda _: browser.js(current) == "#group-0")
    assert browser.js(inner) == (width > 1000)


def test_plots_have_the_width_of_the_page(browser, report):
    browser.open(report, width=1440)
    left, right = (
        browser.js(f"document.querySelector('{selector}').getBoundingClientRect()") for selector in ("nav", "main")
    )
    plot = browser.js("document.querySelector('#ratios-0 .main-svg').getBoundingClientRect()")
    assert plot["width"] == pytest.approx(right["width"], abs=2) and plot["width"] > 1000 and left["width"] < 300


SHOWN = "[...document.querySelector('table').tHead.rows[0].cells].filter((it) => it.offsetWidth).length"


@pytest.mark.thorough
def test_a_wide_table_begins_with_eight_columns(browser, report):
    browser.open(report)
    button = browser.driver.find_element("css selector", "button.more")
    every = browser.js("document.querySelector('table').tHead.rows[0].cells.length")
    assert browser.js(SHOWN) == 8 and button.text == f"{every - 8} more columns"
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    assert browser.js(SHOWN) == every and button.get_attribute("aria-expanded") == "true"
    button.click()
    assert browser.js(SHOWN) == 8
    button.click()
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.js(SHOWN) == 8  # on paper, whatever is open


@pytest.mark.thorough
def test_names_wrap_at_underscores_on_a_phone(browser, report):
    browser.open(report, width=390)
    lines = """(() => [...document.querySelectorAll('td.name')]
      .filter((it) => it.textContent.startsWith('optimized_'))
      .map((it) => { const walk = document.createTreeWalker(it, NodeFilter.SHOW_TEXT), found = [];
        while (walk.nextNode()) { const range = document.createRange(); range.selectNodeContents(walk.currentNode);
          found.push([walk.currentNode.data, new Set([...range.getClientRects()].map((box) => box.top)).size]); }
        return found; })[0])()"""
    answer = browser.js(lines)
    assert "".join(words for words, _ in answer) == "optimized_transducer_with_a_long_name"
    assert len(answer) == 6 and all(count == 1 for _, count in answer)
    height = "document.querySelector('td.name').getBoundingClientRect().height"
    assert browser.js(height) > 0


@pytest.mark.thorough
def test_the_titles_of_the_columns_are_on_every_sheet(browser, tmp_path):
    columns = [table.Column(f"column {at}") for at in range(12)]
    rows = [[table.measured(at)] * 12 for at in range(200)]
    section = Section(
        "tools/profile/profile.html.jinja", "long", "Long", table=table.Table("long", "Long", columns, rows)
    )
    (tmp_path / "page.html").write_text(page.assembled([section], tmp_path, "Long", "."))
    browser.open(tmp_path / "page.html")
    browser.js("document.styleSheets[0].insertRule('@media print { th { background: rgb(0, 255, 0) !important } }', 0)")
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", browser.printed(), flags=re.DOTALL)
    drawn = [inflated(stream) for stream in streams]
    sheets = [stream for stream in drawn if stream.count(b"\nBT\n") > 50]
    assert len(sheets) >= 3 and all(stream.count(b" 0 1 0 rg") >= 8 for stream in sheets)


def inflated(stream):
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return stream


# What people who use a keyboard, a magnifier or a screen reader need.


@pytest.mark.skipif(AXE is None, reason="no axe-core-python: make setup")
@pytest.mark.parametrize(
    "look",
    [{"width": 1440}, {"dark": True}, {"width": 390}, {"media": "print"}],
    ids=str,
)
@pytest.mark.thorough
def test_axe_finds_no_violation(browser, compact, look):
    browser.open(compact, **look)
    words = "details:not(:has(table))"  # tables are open elsewhere
    browser.js(f"document.querySelectorAll('{words}').forEach((it) => {{ it.open = true; }})")
    assert browser.violations() == []
