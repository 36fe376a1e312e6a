"""The report: cards, plots, sweeps and machines by hand, hostile and broken input, and a real browser."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from html import unescape
from urllib.parse import unquote

import pytest
from rnnt_bench.analysis import logs
from rnnt_bench.conformance.outcomes import CRASHES, DIFFERS, PASS, Outcome
from rnnt_bench.present import parts, style
from rnnt_bench.setup import interpreters
from rnnt_bench.show import cards as cards_of
from rnnt_bench.show import page, plots

from browsers import AXE, Browser, needs_browser, unpacked
from commands import assert_user_error, has_words, run
from fixtures_model_runs import write_check
from fixtures_runs import (
    allocation,
    change,
    correctness,
    environment,
    header,
    kineto,
    read_rows,
    records_of,
    sample,
    status,
    steps,
    summarize,
    three,
    timed,
    traced_run,
    write,
    write_records,
    write_run,
    write_sweep,
)

LIBRARY = "/* plotly */"


def groups_of(folder):
    return logs.read([folder]).groups


def rows_of(folder):
    (group,) = groups_of(folder)
    return group.rows


def page_of(folder):
    return page.page(groups_of(folder), folder, LIBRARY)


# The answer.


def cards(folder):
    """Question -> (answer, whether it is sure, {title: words})."""
    return {
        card.question: (card.answer, card.clear, {title: parts.words(words) for title, words in card.lines})
        for card in cards_of.cards(rows_of(folder), [folder])
    }


def test_the_card_names_one_loss_with_speed_memory_and_what_to_beware_of(tmp_path):
    timed(tmp_path, "a", [10, 11, 12], peak=30)
    timed(tmp_path, "b", [20, 22, 24], peak=10)
    write_check(tmp_path, ragged=Outcome(DIFFERS, ""))
    answer, sure, reason = cards(tmp_path)["Use"]
    assert (answer, sure, len(cards(tmp_path))) == ("a", True, 1)
    assert re.findall(r"\d+\.\d+", reason["Speed"]) == ["11.00", "2.00", "2.00", "2.00"] and " b " in reason["Speed"]
    assert re.findall(r"\d+\.\d+", reason["Memory"]) == ["30.00", "3.00", "10.00"] and " b " in reason["Memory"]
    assert reason["Beware"].startswith("a: ")
    write_check(tmp_path, ragged=Outcome("pass"))
    assert "nothing wrong" in cards(tmp_path)["Use"][2]["Corners"]


def test_the_card_of_an_approximation_says_what_it_saves_and_how_far_it_is_off(tmp_path):
    timed(tmp_path, "exact", [10, 10, 10], peak=8)
    timed(tmp_path, "pruned", [1, 1, 1], kind="pruned", exact=False, peak=4)
    change(tmp_path / "pruned", "correctness", approximation_gap=-0.007)
    answer, sure, reason = cards(tmp_path)["If an approximation will do"]
    assert (answer, sure) == ("pruned (approx.)", True) and "off by 0.7%" in reason["Gain"]
    assert has_words(reason["Gain"], "0.10x the time", "0.50x the peak")
    timed(tmp_path, "pruned", [20, 20, 20], kind="pruned", exact=False, peak=16)
    assert list(cards(tmp_path)) == ["Use"]  # it saves nothing


def test_the_card_names_all_that_cannot_be_told_apart(tmp_path):
    timed(tmp_path, "a", [10, 12, 11])
    timed(tmp_path, "b", [11, 10, 13])
    answer, sure, reason = cards(tmp_path)["Use"]
    assert answer in ("a or b", "b or a") and not sure and "too close to tell" in reason["Speed"]
    assert "too close to tell" in cards_of.title(rows_of(tmp_path))


def test_who_needs_logits_has_a_card_with_code(tmp_path):
    for name, factor in (("fused", 1), ("optimized_transducer", 2), ("torchaudio", 6)):
        timed(tmp_path, name, [10 * factor, 11 * factor, 12 * factor])
    records = [line for line in records_of(tmp_path / "fused") if line.get("scope") != "loss"]
    write_records(tmp_path / "fused", records)
    use, given = cards_of.cards(rows_of(tmp_path), [tmp_path])
    assert given.question == "If you need logits" and given.answer == "optimized_transducer"
    assert "3.00 to 3.00" in str(given.lines)
    assert "own" in dict(use.lines)["Origin"][0] and "Origin" not in dict(given.lines)
    assert "from fused_transducer import" in use.code and "from optimized_transducer import" in given.code
    shown = page_of(tmp_path)
    assert "from optimized_transducer import transducer_loss" in shown and "&#10;" in shown


def test_the_title_is_the_answer_of_one_configuration_and_else_the_question(tmp_path):
    timed(tmp_path, "a", [10, 11, 12], peak=10)
    timed(tmp_path, "b", [20, 22, 24], peak=30)
    assert "<h1>Use a: 2.0x faster (2.0 to 2.0) than the next exact loss and 3.0x smaller than b" in page_of(tmp_path)
    words = cards_of.sample_size(rows_of(tmp_path))
    assert has_words(words, "4 utterances", "2 batches and 3 rounds")
    records = records_of(tmp_path / "a")
    records[0]["settings"] = {**records[0]["settings"], "vocab_size": 77}
    write_records(tmp_path / "c", records)
    assert "<h1>Which transducer loss?" in page_of(tmp_path)


# The plots.


def test_spans_from_zero_or_logarithmic_with_plain_ticks():
    near, far = style.span([10, 100]), style.span([10, 1000])
    assert (near.low, near.logarithmic, far.logarithmic) == (0, False, True)
    assert far.ticks == pytest.approx([10, 20, 50, 100, 200, 500, 1000])
    assert style.Span(38, 72, True).ticks == [40, 50, 60, 70]


def test_ratios_have_a_dot_and_a_whisker_on_a_logarithmic_axis_with_a_line_at_one(tmp_path):
    timed(tmp_path, "a", [10, 11, 12])
    timed(tmp_path, "b", [20, 24, 25])
    timed(tmp_path, "approx", [1, 1.1, 1.2], kind="pruned", exact=False)
    timed(tmp_path, "other", [1, 1.1, 1.2], kind="modified", exact=False)
    rows = rows_of(tmp_path)
    figure = plots.over_fastest(rows)
    dots = {trace["name"]: trace for trace in figure.data}
    assert list(dots) == ["a", "b", "approx (approx.)"] and "other" in figure.caption
    ratio = next(row for row in rows if row.name == "b").against_fastest.ratio
    assert dots["b"]["x"] == [ratio.ratio] and dots["approx (approx.)"]["x"] == [pytest.approx(0.1)]
    assert ratio.ratio + dots["b"]["error_x"]["array"][0] == pytest.approx(ratio.high)
    assert figure.layout["xaxis"]["type"] == "log" and [line["x0"] for line in figure.layout["shapes"]] == [1]
    assert "error_x" not in dots["a"]
    assert plots.over_fastest([row for row in rows if row.name == "a"]) is None


def test_the_trade_off_has_a_front_of_exact_losses_and_other_models_are_on_none(tmp_path):
    of = [("quick", 10, 400, "exact"), ("small", 40, 100, "exact"), ("beaten", 50, 500, "exact")]
    for name, ms, peak, kind in [*of, ("pruned", 5, 50, "pruned"), ("modified", 2, 20, "modified")]:
        timed(tmp_path, name, [ms, ms], peak=peak, kind=kind, exact=kind == "exact")
    rows = rows_of(tmp_path)
    assert [place.row.label for place in plots.front(plots.positions(rows))] == ["quick", "small"]
    figure = plots.time_and_memory(rows)
    hollow = {trace["name"] for trace in figure.data if trace["marker"].get("symbol", "").endswith("-open")}
    named = [trace["text"] for trace in figure.data if "text" in trace["mode"]]
    assert {name.partition(" ")[0] for name in hollow} == {"modified"}
    assert sorted(named) == [["quick"], ["small"]]
    assert has_words(figure.caption, "quick, small", "not ranked")
    assert plots.time_and_memory(rows[:1]) is None


def test_samples_far_from_the_median_are_at_the_edge(tmp_path):
    samples = [sample("timing-1", "step", 4, ms) for ms in (10, 10, 10, 40, 6)]
    write_run(tmp_path / "a", "a", [correctness(), [environment("timing-1"), *samples, status("timing-1")]])
    (row,) = rows_of(tmp_path)
    figure = plots.drift([row])
    (trace,) = figure.data
    assert trace["y"] == pytest.approx([0, 0, 0, plots.FARTHEST, -plots.FARTHEST])  # of +300% and -40%
    assert trace["customdata"][3][1] == "+300.0%"


def test_the_samples_of_a_loss_with_one_a_batch_are_drawn_by_their_cells(tmp_path):
    """Three batches, the second of twice and the third of three times the cells; the last takes 1.2 times as long."""
    batches = [
        {"index": at, "N": 1, "T_max": 10, "U_max": 9, "useful_cells": 60 * size, "padded_cells": 100 * size}
        for at, size in ((0, 1), (1, 2), (2, 3))
    ]
    samples = [sample("timing-1", "step", at, ms) for at, ms in ((0, 10), (1, 20), (2, 36))]
    measured = [environment("timing-1", batches=batches), *samples, status("timing-1")]
    write_run(tmp_path / "a", "a", [correctness(), measured])
    (trace,) = plots.drift(rows_of(tmp_path)).data
    assert [told[1] for told in trace["customdata"]] == ["+0.0%", "+0.0%", "+20.0%"]


def test_memory_within_a_step_is_drawn_to_one_scale(tmp_path):
    for name, peak in (("a", 9), ("b", 40)):
        events = [*steps([100, 200]), *(allocation(at, total << 20) for at, total in ((1010, 3), (1130, peak)))]
        traced_run(tmp_path / name, kineto(events), name=name)
    figure = plots.memory_within(rows_of(tmp_path))
    lines = [trace for trace in figure.data if trace["mode"] == "lines"]
    heights = [max(trace["y"]) - min(trace["y"]) for trace in lines]
    assert heights[0] / heights[1] == pytest.approx(6 / 37, abs=0.01) and all(max(trace["x"]) == 1 for trace in lines)


def test_an_implementation_has_one_colour_in_every_plot_and_a_family_one_colour(tmp_path):
    names = ("k2", "k2-pruned", "fast_rnnt", "fast_rnnt@k2", "fast_rnnt-pruned", "torchaudio", "my own")
    for name in names:
        kind = "pruned" if name.endswith("pruned") else "exact"
        timed(tmp_path, name, [10, 11], kind=kind, exact=kind == "exact")
    rows = rows_of(tmp_path)
    look = {row.name: row.look for row in rows}
    assert look["k2"].color == look["k2-pruned"].color != look["fast_rnnt"].color
    assert look["fast_rnnt"].color == look["fast_rnnt@k2"].color == look["fast_rnnt-pruned"].color
    assert len({look[name] for name in names}) == len(names)


# The page.


def attributes(name, text):
    """Return the values of all attributes of this name; code has none."""
    return [unescape(value) for value in re.findall(rf'\s{name}="([^"]*)"', text)]


def test_what_lies_beside_a_page_and_was_not_named_is_not_read(tmp_path):
    timed(tmp_path / "log", "a", [10, 11, 12])
    log, page_path = [tmp_path / "log"], tmp_path / "report.html"
    write_check(tmp_path / "other", **{"V-2": Outcome(CRASHES)})
    assert "V = 2" not in page.write(logs.read_any(log), page_path, log).read_text()
    write_check(tmp_path / "log", **{"V-2": Outcome(CRASHES)})
    assert "V = 2" in page.write(logs.read_any(log), page_path, log).read_text()


def test_a_configuration_is_answer_ratios_table_plots_and_conditions(tmp_path):
    for name in ("a", "b"):
        traced_run(tmp_path / name, kineto([*steps([100, 200]), allocation(1010, 3), allocation(1130, 9)]), name=name)
    write_records(tmp_path / "k2", [header("k2"), status("correctness", "missing", "no k2: pip install k2")])
    write_records(tmp_path / "died", [header("died"), status("correctness", "error", "it broke")])
    section = page.sections(groups_of(tmp_path), tmp_path, [], [])[0]
    assert section.cards[0].question == "Use" and section.lead.key == "ratios"
    (results,), versions = section.tables, section.conditions
    assert [row[0].shown for row in results.rows] == ["a", "b"] and versions[0].name == "versions"
    assert [figure.key for figure in section.figures] == ["time-memory", "samples", "memory-within"]
    assert {failure.name: failure.is_error for failure in section.failures} == {"died": True, "k2": False}
    assert "in 2 batches" in section.heading
    shown = page_of(tmp_path)
    above = shown[: shown.index("<dt>Use</dt>")]  # the first screen: what was measured is on it
    body = above[above.index('class="configuration"') :]
    assert has_words(body, "batch size 30", "V 500", "joiner 512", "float32", "Some CPU", "2 threads", "random logits")
    linked = re.findall(r'<li><a href="#([^"]+)">', above)
    assert len(linked) > 5 and all(f'id="{each}"' in shown for each in linked)
    assert "1 failed (died)" in shown and "1 not available here (k2)" in shown
    places = [shown.index(words) for words in ("2 losses measured", "<dt>Use</dt>", 'id="ratios-group-0"', "<table")]
    assert places == sorted(places)
    assert re.findall(r'data-figure="([^"]*)"', shown) == list(json.loads(unpacked(shown, "figures")))


def test_the_table_has_a_heading_above_the_rows_of_a_kind(tmp_path):
    timed(tmp_path, "a", [10, 11])
    timed(tmp_path, "b", [20, 22], kind="pruned", exact=False)
    change(tmp_path / "a", "environment", torch="1.13.1")
    for name in ("c", "d"):
        timed(tmp_path, name, [9, 9])
    headings = re.findall(r'<tr class="kind">.*?>([^<]*)</th>', page_of(tmp_path))
    assert [words.partition(",")[0] for words in headings] == ["exact", "exact", "approximate"], headings
    assert "under torch 1.13.1" in headings[1]


def test_several_configurations_are_numbered_by_kind_and_have_ids_of_their_own(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", batch_size=8)
    write(tmp_path / "c" / "w.1.pt.trace.json", kineto(steps([100, 200])))
    shown = page_of(tmp_path)
    ids = attributes("id", shown)
    assert len(ids) == len(set(ids)) and {"group-0", "group-1", "group-2"} <= set(ids)
    assert {link[1:] for link in attributes("href", shown) if link.startswith("#")} <= set(ids)
    assert "<h2>Configuration, 3 of 3</h2>" in shown


@pytest.mark.parametrize(
    "sections, words",
    [
        (lambda base, paths: 1 / 0, "ZeroDivisionError"),
        (lambda base, paths: [parts.Section("x", "A tool", tables=[None])], "UndefinedError"),
        (
            lambda base, paths: [
                parts.Section("x", "A tool", figures=[parts.Figure("k", "t", "c", "s", [{"x": 1j}], {})])
            ],
            "error",
        ),
    ],
)
def test_a_section_that_fails_is_a_line_on_the_page_and_not_its_end(tmp_path, monkeypatch, sections, words):
    monkeypatch.setattr(
        parts, "slices", lambda: [parts.Slice(sections), parts.Slice(lambda *_: [parts.Section("y", "Another")])]
    )
    timed(tmp_path, "a", [10])
    shown = page_of(tmp_path)
    assert words in shown and ">Another</h2>" in shown and "<dt>Use</dt>" in shown


def test_numbers_link_to_samples_and_traces(tmp_path):
    folder = traced_run(tmp_path / "log" / "a b#1", kineto(steps([100, 200])), kineto(steps([100, 200])))
    (tmp_path / "pages").mkdir()
    links = attributes("href", page.page(groups_of(tmp_path), tmp_path / "pages", LIBRARY))
    links = [unquote(link) for link in links if link[0] != "#" and link[:5] != "data:"]
    targets = {(tmp_path / "pages" / link).resolve() for link in links}
    assert targets == {folder / "results.jsonl", folder / "w.9.pt.trace.json"}


def test_hostile_names_are_text(tmp_path):
    evil = "<script>alert(1)</script>"
    quotes = "\"'><img src=x onerror=alert(1)>"
    write_run(tmp_path / "a" / "javascript:alert(1)" / quotes.replace("/", ""), name=evil)
    died = status("correctness", "error", f"{evil} <a href='javascript:x'>")
    write_records(tmp_path / quotes, [header(quotes), died])
    shown = page_of(tmp_path)
    assert shown.count("<script") == 3 and "<img" not in shown and "&lt;script&gt;alert(1)" in shown
    assert not [link for link in attributes("href", shown) if link.startswith("javascript")]
    body = re.sub(r'"[^"]*"', '""', shown.partition("</style>")[2].partition("<script")[0])
    assert not re.search(r"<[^>]*\son\w+=", body)  # no tag has an attribute of its own
    assert "<script" not in unpacked(shown, "figures")  # plotly takes markup in its texts


def test_the_page_carries_plotly_as_released_and_allows_just_its_own_scripts(tmp_path):
    write_run(tmp_path / "a")
    shown = page.page(groups_of(tmp_path), tmp_path)
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', shown)[1])
    assert "default-src 'none'" in policy and "http" not in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    script = re.search(r"<script>(.*?)</script>", shown, flags=re.DOTALL)[1]
    source = unpacked(shown, "plotly")
    assert f"script-src {page._script_hash(source)} {page._script_hash(script)};" in policy and len(shown) < 1.5e6
    digest = hashlib.sha256(page.LIBRARY.read_bytes()).hexdigest()
    assert source == page.LIBRARY.read_text(encoding="utf-8")
    assert digest in (page.LIBRARY.parent / "README.md").read_text()


# The command.


def test_the_command_writes_the_page_of_what_is_in_log_and_says_where(tmp_path):
    write_run(tmp_path / "log" / "a")
    done = run("rnnt-bench", "report", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "log/report.html\n", "")
    write(tmp_path / "broken" / "w.1.pt.trace.json", "{")
    assert run("rnnt-bench", "report", "broken", cwd=tmp_path).returncode == 1
    write_check(tmp_path / "log", ragged=Outcome(DIFFERS, "below log/"))
    assert run("rnnt-bench", "report", "--output", "elsewhere/page.html", cwd=tmp_path).returncode == 0
    assert "below log/" in (tmp_path / "elsewhere" / "page.html").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["--outputs", "x"], "unrecognized arguments"),
        (["empty"], "no runs under empty"),
        (["log", "--output", "log/a/results.jsonl/x"], "cannot write log/a/results.jsonl"),
        (["log", "--output", "/dev/full"], "No space left"),
    ],
)
def test_bad_usage_is_one_clear_line(tmp_path, arguments, words):
    write_run(tmp_path / "log" / "a")
    (tmp_path / "empty").mkdir()
    assert_user_error(run("rnnt-bench", "report", *arguments, cwd=tmp_path), words)


def no_jinja2(monkeypatch):
    monkeypatch.setattr(interpreters.environments, "interpreter", lambda name: None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page.environment.cache_clear()


def fails_with(error):
    def fail(*_):
        raise error

    return lambda monkeypatch: monkeypatch.setattr(page, "write", fail)


@pytest.mark.parametrize(
    "fail, words",
    [
        (no_jinja2, "no report: jinja2 is not installed"),
        (fails_with(ZeroDivisionError("a\nb")), "no report: ZeroDivisionError: a"),
        (fails_with(KeyboardInterrupt()), "interrupted"),
    ],
)
def test_a_failure_after_a_run_is_one_warning_whatever_it_is(tmp_path, monkeypatch, capsys, fail, words):
    write_run(tmp_path / "a")
    fail(monkeypatch)
    page.after_run(tmp_path, quiet=False)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and words in warning and warning.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page of runs with traces, one with a hostile name, with a sweep and a conformance matrix."""
    log = tmp_path_factory.mktemp("log")
    window = kineto([*steps([100, 200]), allocation(1010, 3 << 20), allocation(1130, 9 << 20)])
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


@needs_browser
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


@needs_browser
def test_a_heading_sorts_its_table(browser, report):
    browser.open(report)
    cells = "[...document.querySelectorAll('#group-0 table.sortable td.name')].map((it) => it.textContent)"
    before = browser.js(cells)
    browser.js("document.querySelector('#group-0 > .scroll th button').click()")
    assert len(before) > 2 and browser.js(cells) != before


@needs_browser
@pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
def test_axe_finds_no_violation(browser, report):
    browser.open(report, width=390)
    browser.unfold()
    assert browser.violations() == []


GRID = {"vocab_size": [500, 1000, 4000], "dtype": ["float32", "bfloat16"]}


def jobs_of(name, values):
    """linear grows as V, square as V^2 and dies at the last one, neither half precision."""
    V, half = values["vocab_size"], values["dtype"] == "bfloat16"
    if name == "square" and half:
        return [[status("correctness", "unsupported", "takes float32 only")]]
    if name == "square" and V == 4000:
        return [correctness(), [status("timing-1", "oom", "no memory")]]
    return three((V / 100) ** (2 if name == "square" else 1) / (2 if half else 1), peak_mb=V / 50)


@pytest.fixture
def log(tmp_path):
    return write_sweep(tmp_path / "log", GRID, ["square", "linear"], jobs_of)


def test_the_screen_is_grouped_by_cell_and_the_files_have_the_keys(log):
    (sweep,) = logs.read([log]).sweeps
    assert [row.over_fastest for row in sweep.rows if row.name == "square"][:3:2] == pytest.approx([5, 10])
    text = summarize(log, details=False)
    lines = text.splitlines()
    assert lines[0].startswith("sweep over vocab-size 500, 1000, 4000 x dtype float32, bfloat16; ")
    at = lines.index("vocab-size 4000, dtype float32, exact:")
    assert lines[at + 1].split()[:3] == ["linear", "40.00", "1.00"] and "square: oom: timing-1: no memory" in text
    assert "vocab-size 4000, dtype float32:  linear, 40.00 ms a step" in text and max(map(len, lines)) <= 100
    assert "| vocab-size | dtype | implementation |" in summarize(log, "--format", "markdown")
    rows = list(csv.DictReader(io.StringIO(summarize(log, "--format", "csv"))))
    assert len(rows) == 12 and rows[-1]["vocab_size"] == "4000" and rows[-1]["dtype"] == "bfloat16"
    assert read_rows(log)[0]["sweep"] == {"vocab_size": 500, "dtype": "float32"}


def test_the_newest_of_a_cell_is_shown(tmp_path):
    for day in (1, 2):
        write_sweep(tmp_path / f"s.{day}", {"threads": [1, 2]}, started=f"2026-01-0{day}T00:00:00+00:00")
    assert [(row.folder.parent.name, len(row.earlier)) for row in logs.read([tmp_path]).swept] == [("s.2", 1)] * 2


def test_curves_over_numbers_and_points_over_words(log):
    drawn = {figure.key: figure for figure in plots.swept(logs.read([log]).sweeps[0])}
    curve = drawn["sweep-vocab-size-time"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in curve.data] == [
        ("linear", [500, 1000, 4000], [5, 10, 40]),
        ("square", [500, 1000], [25, 100]),
    ]
    assert curve.layout["xaxis"]["type"] == curve.layout["yaxis"]["type"] == "log"
    assert "At dtype float32." in curve.caption and "Not drawn: square at 4000 (oom)." in curve.caption
    assert drawn["sweep-vocab-size-memory"].data[0]["y"] == [10, 20, 80]
    points = [(trace["mode"], trace["x"], trace["y"]) for trace in drawn["sweep-dtype-time"].data]
    assert points == [("markers", ["float32", "bfloat16"], [5, 2.5]), ("markers", ["float32"], [25])]


def test_the_page_has_a_section_for_each_sweep(log, tmp_path):
    write_sweep(tmp_path / "log" / "other", {"threads": [1, 2]}, ["<script>alert(1)</script>"])
    read = logs.read([log])
    html = page.page(read.groups, log, LIBRARY, read.sweeps)
    assert "<h2>Sweep over threads</h2>" in html and "<h2>Sweep over vocab-size and dtype</h2>" in html
    assert "timing-1: no memory" in html and "<script>alert" not in html
