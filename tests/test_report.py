"""The report without a browser: what is on the page, verdicts by hand, the memory curve, hostile and broken input."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from urllib.parse import unquote

import msgspec
import pytest
from browsers import unpacked
from commands import ROOT, assert_user_error, has_words, run
from common.present.html import script_hash
from common.show.verdicts import verdicts
from fixtures_conformance import made
from fixtures_runs import correctness, header, records_of, status, timed, traced_run, write_records, write_run
from fixtures_traces import kineto, span, steps, write
from fixtures_traces import memory as memory_event

from common.analysis import logs
from common.analysis.groups import Group, pareto
from common.conformance import section as conformance
from common.conformance.records import DIFFERS, Outcome
from common.present import html, style, table
from common.setup import interpreters
from common.show import facts, headline, runs, trade_off, writing
from common.show.page import LIBRARY as LIBRARY_FILE
from common.show.page import page
from common.traces import memory_curve

LIBRARY = "/* plotly */"


def groups_of(folder):
    return logs.read([folder]).groups


def page_of(folder):
    return page(groups_of(folder), folder, LIBRARY)


def answers(folder):
    (group,) = groups_of(folder)
    return {verdict.question: (verdict.answer, table.words(verdict.reason)) for verdict in verdicts(group.rows)}


# Verdicts.


def test_a_clear_winner_is_named_with_ratio_and_interval(tmp_path):
    timed(tmp_path, "a", [10, 11, 12])
    timed(tmp_path, "b", [20, 22, 24])  # twice as long in every round
    timed(tmp_path, "c", [50, 55, 60])
    answer, reason = answers(tmp_path)["Fastest exact loss, whole step"]
    assert answer == "a"
    assert reason.startswith("11.00 ms a step; next is b at 2.00x the time") and "2.00 to 2.00" in reason


def test_overlap_is_unclear_and_one_round_too(tmp_path):
    timed(tmp_path, "a", [10, 12, 11])
    timed(tmp_path, "b", [11, 10, 13])
    answer, reason = answers(tmp_path)["Fastest exact loss, whole step"]
    assert answer == "unclear" and "more --rounds would narrow it" in reason
    run = tmp_path / "one"
    timed(run, "a", [10])
    timed(run, "b", [20])
    answer, reason = answers(run)["Fastest exact loss, whole step"]
    assert answer == "unclear" and "one round gives no interval" in reason


def test_approximate_losses_win_overall_only_and_failed_ones_nothing(tmp_path):
    timed(tmp_path, "exact", [10, 10, 10], peak=8)
    timed(tmp_path, "pruned", [1, 1, 1], exact=False, peak=4)
    jobs = [correctness(), [status("timing-1", "oom", "no memory")]]
    write_run(tmp_path / "died", name="died", jobs=jobs)
    verdicts = answers(tmp_path)
    assert verdicts["Fastest exact loss, whole step"][0] == "exact"
    assert verdicts["Fastest overall, approximate too"][0] == "pruned (approx.)"
    assert verdicts["Least memory, exact losses"][0] == "exact"
    assert verdicts["Least memory overall, approximate too"][0] == "pruned (approx.)"
    assert "Left out: died (oom)." in verdicts["Fastest exact loss, whole step"][1]


def test_memory_within_two_percent_is_unclear(tmp_path):
    timed(tmp_path, "a", [10, 10], peak=100)
    timed(tmp_path, "b", [10, 10], peak=101)
    assert answers(tmp_path)["Least memory, exact losses"][0] == "unclear"


def test_rounds_of_different_runs_are_not_paired(tmp_path):
    timed(tmp_path, "a", [10, 20, 40], run_id="yesterday")
    timed(tmp_path, "b", [11, 22, 44], run_id="today")  # 1.1 times in every round, were they pairs
    answer, reason = answers(tmp_path)["Fastest exact loss, whole step"]
    assert answer == "unclear" and "different runs" in reason


def test_pareto_front():
    assert pareto([(1, 9), (2, 3), (3, 4), (4, 1), (2, 5)]) == [0, 1, 3]


# What to use.


def cards(folder):
    """Question -> (answer, whether it is sure, {title: words})."""
    (group,) = groups_of(folder)
    return {
        card.question: (card.answer, card.clear, {title: table.words(words) for title, words in card.lines})
        for card in headline.headline(group.rows, [folder])
    }


def test_the_headline_names_one_loss_with_speed_memory_and_what_to_beware_of(tmp_path):
    timed(tmp_path, "a", [10, 11, 12], peak=30)
    timed(tmp_path, "b", [20, 22, 24], peak=10)
    (tmp_path / "conformance.json").write_text(made(ragged=Outcome(DIFFERS, "")).to_json())
    answer, sure, reason = cards(tmp_path)["Use"]
    assert (answer, sure) == ("a", True)
    assert re.findall(r"\d+\.\d+", reason["Speed"]) == ["11.00", "2.00", "2.00", "2.00"] and " b " in reason["Speed"]
    assert re.findall(r"\d+\.\d+", reason["Memory"]) == ["30.00", "3.00", "10.00"] and " b " in reason["Memory"]
    wrong = json.loads((tmp_path / "conformance.json").read_text())["cases"][0]["wrong"]
    assert wrong and reason["Beware"] == f"a: {wrong}."
    assert len(cards(tmp_path)) == 1
    (tmp_path / "conformance.json").write_text(made(ragged=Outcome("pass")).to_json())
    reason = cards(tmp_path)["Use"][2]
    assert "Beware" not in reason and "nothing wrong" in reason["Corners"]


def test_the_headline_says_what_an_approximation_saves_and_how_far_it_is_off(tmp_path):
    timed(tmp_path, "exact", [10, 10, 10], peak=8)
    timed(tmp_path, "pruned", [1, 1, 1], kind="pruned", exact=False, peak=4)
    lines = records_of(tmp_path / "pruned")
    write_records(
        tmp_path / "pruned",
        [{**line, **({"approximation_gap": -0.007} if "grad_error" in line else {})} for line in lines],
    )
    answer, sure, reason = cards(tmp_path)["If an approximation will do"]
    assert (answer, sure) == ("pruned (approx.)", True)
    assert reason["Speed"].startswith("0.10x the time of exact") and reason["Memory"].startswith(
        "0.50x the peak of exact"
    )
    assert "4.000 MB" in reason["Memory"] and "off by 0.7%" in reason["Accuracy"]
    timed(tmp_path, "pruned", [20, 20, 20], kind="pruned", exact=False, peak=16)
    assert list(cards(tmp_path)) == ["Use"]  # it saves nothing


def test_the_headline_names_all_that_cannot_be_told_apart(tmp_path):
    timed(tmp_path, "a", [10, 12, 11])
    timed(tmp_path, "b", [11, 10, 13])
    answer, sure, reason = cards(tmp_path)["Use"]
    assert answer in ("a or b", "b or a") and not sure and "too close to tell" in reason["Speed"]


def test_the_page_says_of_how_many_utterances_it_is(tmp_path):
    timed(tmp_path, "a", [10, 11, 12])
    (group,) = groups_of(tmp_path)
    assert headline.measured(group.rows) == ["4 utterances", "of the 100 in the shape file, in 2 batches and 3 rounds"]
    assert "of the 100 in the shape file" in page_of(tmp_path)


@pytest.mark.parametrize(
    "ms, peaks, words",
    [
        (([10, 11, 12], [20, 22, 24]), (10, 30), "Use a: 2.0x faster (2.0 to 2.0) and 3.0x smaller than the next"),
        (([10, 11, 12], [20, 22, 24]), (30, 10), "Use a: 2.0x faster (2.0 to 2.0) than the next exact loss, with 3.0x"),
        (([10, 12, 11], [11, 10, 13]), (10, 30), "too close to tell"),
    ],
)
def test_the_title_is_the_answer_with_its_interval(tmp_path, ms, peaks, words):
    for name, times, peak in zip("ab", ms, peaks):
        timed(tmp_path, name, times, peak=peak)
    html = page_of(tmp_path)
    title = re.search(r"<h1>(.*?)</h1>", html)[1]
    assert words in title and re.search(r"<title>(.*?)</title>", html)[1] == title


def test_the_title_of_several_configurations_is_the_question(tmp_path):
    timed(tmp_path, "a", [10, 11, 12])
    records = records_of(tmp_path / "a")
    records[0]["settings"] = {**records[0]["settings"], "vocab_size": 77}
    write_records(tmp_path / "b", records)
    assert "Which transducer loss?" in re.search(r"<h1>(.*?)</h1>", page_of(tmp_path))[1]


def test_who_needs_logits_has_a_card_with_code(tmp_path):
    for name, factor in (("fused", 1), ("optimized_transducer", 2), ("torchaudio", 6)):
        timed(tmp_path, name, [10 * factor, 11 * factor, 12 * factor])
    records = [line for line in records_of(tmp_path / "fused") if line.get("scope") != "loss"]
    write_records(tmp_path / "fused", records)
    (group,) = groups_of(tmp_path)
    cards = {card.question: card for card in headline.headline(group.rows, [tmp_path])}
    given = cards["If you need logits"]
    assert given.answer == "optimized_transducer" and "3.00 to 3.00" in str(given.lines)
    for card, name in ((cards["Use"], "fused_transducer"), (given, "optimized_transducer")):
        assert f"from {name} import" in card.code and card.code.count("\n") < 8
    html = page_of(tmp_path)
    assert "from optimized_transducer import transducer_loss" in html and "&#10;" in html


def test_the_contents_of_one_configuration_have_six_entries(tmp_path):
    for name in ("a", "b"):
        traced_run(tmp_path / name, kineto(steps([100, 200])), name=name)
    html = page_of(tmp_path)
    links = re.findall(r'<li><a href="#[^"]*">([^<]*)', html[html.index("<nav") : html.index("</nav>")])
    assert [link.strip() for link in links] == ["Answer", "Table", "Speed", "Memory", "How measured", "Correctness"]


def test_the_page_counts_losses_that_were_measured(tmp_path):
    for name in ("a", "a@k2", "b"):
        timed(tmp_path, name, [10, 11, 12])
    write_run(tmp_path / "gone", "gone", [[status("correctness", "missing", "pip install gone")]])
    write_run(tmp_path / "died", "died", [[status("correctness", "error", "no")]])
    lead = re.search(r'<p class="lead">(.*?)</p>', page_of(tmp_path), re.DOTALL)[1]
    assert "2 losses measured" in lead and "1 failed" in lead and "1 not available here" in lead


# Memory within a step.


def test_curve_is_the_last_step_above_its_start(tmp_path):
    mib = 2**20
    events = [
        span("ProfilerStep#1", 0, 100),
        span("ProfilerStep#2", 100, 100),
        span("joiner", 110, 30),
        span("loss", 145, 50),
        *(memory_event(at, total * mib) for at, total in ((10, 90), (50, 5), (120, 12), (130, 8), (150, 25), (190, 7))),
    ]
    curve = memory_curve.read(write(tmp_path / "w.1.pt.trace.json", kineto(events)))
    assert curve.step == 2 and curve.peak_mb == 20  # 25 MiB on top of the 5 MiB it began with
    assert curve.stage_mb == {"joiner": 7, "loss": 20}
    assert curve.ms == pytest.approx([0, 0.02, 0.03, 0.05, 0.09, 0.1]) and curve.mb == [0, 7, 3, 20, 2, 2]


def test_a_curve_of_many_points_begins_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_curve, "MOST_POINTS", 2)
    events = [memory_event(at, total * 2**20) for at, total in ((1001, 5), (1002, 9), (1003, 7), (1004, 6))]
    curve = memory_curve.read(write(tmp_path / "w.1.pt.trace.json", kineto([*steps([100]), *events])))
    assert curve.mb[0] == 0 and curve.peak_mb == 4 and curve.mb[-1] == 1


def test_curve_keeps_its_peak_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_curve, "MOST_BINS", 64)
    timeline = memory_curve.Timeline()
    for at in range(10_000):
        timeline.add(at, 1000 if at == 7777 else at % 7)
    assert len(timeline.bins) <= 64
    assert max(value for _, value in timeline.between(0, 10_000)) == 1000
    assert timeline.before(20_000) == 9999 % 7


def test_a_trace_without_memory_has_no_curve(tmp_path):
    assert memory_curve.read(write(tmp_path / "w.1.pt.trace.json", kineto(steps([100, 100])))) is None


# The page.


class Seen(HTMLParser):
    """Tags, links and text of a page, scripts and styles apart."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.links, self.words, self.ids = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.ids.append(values.get("id"))
        if tag == "a":
            self.links.append(values["href"])
        assert not any(name.startswith("on") for name in values), values

    def handle_data(self, data):
        self.words.append(data)


def test_numbers_link_to_samples_and_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(conformance, "LOG", tmp_path / "none")  # of this checkout, which would be linked to
    folder = traced_run(tmp_path / "log" / "a b#1", kineto(steps([100, 200])), kineto(steps([100, 200])))
    links = set(Seen(page(groups_of(tmp_path), tmp_path / "pages", LIBRARY)).links)
    (tmp_path / "pages").mkdir()
    targets = {(tmp_path / "pages" / unquote(link)).resolve() for link in links if not link.startswith(("#", "data:"))}
    assert targets == {folder / "results.jsonl", folder / "w.9.pt.trace.json"}


def test_tables_download_as_csv_in_full_precision(tmp_path):
    write_run(tmp_path / "a")
    downloads = [link for link in Seen(page_of(tmp_path)).links if link.startswith("data:text/csv")]
    tables = [base64.b64decode(link.partition("base64,")[2]).decode() for link in downloads]
    (first,) = csv.DictReader(io.StringIO(tables[0]))
    assert first["implementation"] == "torchaudio" and first["step ms"] == "25.0" and first["peak MB"] == "32.0"
    assert first["n"] == "4" and first["profiled step us"] == ""


def test_hostile_names_are_text(tmp_path):
    evil = "<script>alert(1)</script>"
    quotes = "\"'><img src=x onerror=alert(1)>"
    write_run(tmp_path / "a" / "javascript:alert(1)" / quotes.replace("/", ""), name=evil)
    write_records(
        tmp_path / quotes, [header(quotes), status("correctness", "error", f"{evil} <a href='javascript:x'>")]
    )
    html = page_of(tmp_path)
    seen = Seen(html)
    assert seen.tags.count("script") == 3 and "img" not in seen.tags
    assert evil in "".join(seen.words) and "<script>alert" not in html
    assert not [link for link in seen.links if link.startswith("javascript")]
    for script in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html):
        assert "&lt;script&gt;" in json.dumps(json.loads(script))  # plotly takes markup in its texts


def test_the_policy_allows_no_address_and_only_its_own_scripts(tmp_path):
    write_run(tmp_path / "a")
    html = page_of(tmp_path)
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    assert "default-src 'none'" in policy and "http" not in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    script = re.search(r"<script>(.*?)</script>", html, flags=re.DOTALL)[1]
    assert f"script-src {script_hash(LIBRARY)} {script_hash(script)};" in policy


def test_ids_are_unique_with_several_configurations(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", batch_size=8)
    write(tmp_path / "c" / "w.1.pt.trace.json", kineto(steps([100, 200])))
    ids = [name for name in Seen(page_of(tmp_path)).ids if name]
    assert len(ids) == len(set(ids)) and {"group-0", "group-1", "group-2"} <= set(ids)


def test_the_figures_are_on_the_page_in_their_places(tmp_path):
    for name in ("a", "b"):
        traced_run(tmp_path / name, kineto(steps([100, 200])), name=name)
    write(tmp_path / "c" / "w.1.pt.trace.json", kineto(steps([100, 200])))
    html = page_of(tmp_path)
    drawn = json.loads(unpacked(html, "figures"))
    assert re.findall(r'data-figure="([^"]*)"', html) == list(drawn)
    kinds = {key.rsplit("-", 1)[0] for key in drawn}
    assert {"step-time", "peak-memory", "time-memory", "samples", "shape-t", "shape-padding"} <= kinds
    # All that is in the basic plotly.js, but for pie.
    assert {trace["type"] for figure in drawn.values() for trace in figure["data"]} == {"bar", "scatter"}


def test_plotly_is_as_it_was_released():
    folder = LIBRARY_FILE.parent
    digest = hashlib.sha256(LIBRARY_FILE.read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text() and "MIT" in (folder / "LICENSE").read_text()
    version = re.search(r"plotly.js .* v([\d.]+)", LIBRARY_FILE.read_text(encoding="utf-8"))[1]
    assert f"version {version}" in (folder / "README.md").read_text()


def test_the_page_carries_plotly_and_allows_just_it(tmp_path):
    write_run(tmp_path / "a")
    html = page(groups_of(tmp_path), tmp_path)
    source = unpacked(html, "plotly")
    assert source == LIBRARY_FILE.read_text(encoding="utf-8") and script_hash(source) in unescape(html)
    assert len(html) < 1.5e6


def test_nothing_measured_leaves_sections_out(tmp_path):
    write_records(tmp_path / "a", [header("k2"), status("correctness", "missing", "no k2: pip install k2")])
    html = page_of(tmp_path)
    assert "no k2: pip install k2" in html and "Nothing was timed here" in html
    assert 'class="plot"' not in html
    (group,) = groups_of(tmp_path)
    assert trade_off.time_and_memory(group.rows) is None


def test_sections_are_counted_by_kind(tmp_path):
    def titles(*searches):
        groups = [Group(str(at), [], search) for at, search in enumerate(searches)]
        return re.findall(r'<h2 id="group-\d+-title">([^<]*)</h2>', page(groups, tmp_path, LIBRARY))

    assert titles(False, True) == ["Verdict", "Largest batch"]
    assert titles(False, False, True) == ["Configuration 1 of 2", "Configuration 2 of 2", "Largest batch"]
    assert titles(True, False, True) == ["Largest batch 1 of 2", "Verdict", "Largest batch 2 of 2"]


def test_facts_of_a_row_that_did_not_run_say_no_more_than_those_of_one_that_did(tmp_path):
    timed(tmp_path, "a", [10])
    jobs = [[status("correctness", "missing", "no b: pip install b")]]
    write_run(tmp_path / "b", name="b", jobs=jobs, rounds=1)
    (group,) = groups_of(tmp_path)
    rows = dict(facts.machine(group.rows))
    assert rows["Device"] == "cpu Some CPU" and rows["Rounds"] == "1 fresh process"
    assert dict(facts.machine(group.rows[1:]))["Device"] == "cpu"


@pytest.fixture
def without_matrix(tmp_path, monkeypatch):
    """A page without the conformance matrix, which takes most of its time; test_report_conformance.py has it."""
    for name in ("LOG", "COMMITTED"):
        monkeypatch.setattr(conformance, name, tmp_path / "nothing.json")


def test_what_did_not_run_is_below_the_results_and_only_errors_are_red(tmp_path):
    timed(tmp_path, "a", [10])
    write_records(tmp_path / "k2", [header("k2"), status("correctness", "missing", "no k2: pip install k2")])
    write_records(tmp_path / "died", [header("died"), status("correctness", "error", "it broke")])
    shown = page_of(tmp_path)
    results, failures = shown.index(">Table</h3>"), shown.index('<details class="failures errors"')
    assert results < failures < shown.index('<figure id="step-time')
    assert re.findall(r'<li class="error"><strong>([^<]*)<', shown[failures:]) == ["died"]
    assert "1 failed (died)" in shown and "1 not available here (k2)" in shown
    assert re.findall(r'<td data-value="[^"]*" class="name">([^<]*)<', shown[results:failures]) == ["a"]
    (tmp_path / "died" / "results.jsonl").unlink()
    shown = page_of(tmp_path)
    assert '<details class="failures" ' in shown and '<li class="error">' not in shown


def test_every_link_of_the_contents_leads_somewhere(tmp_path):
    timed(tmp_path, "a", [10, 11])
    timed(tmp_path, "b", [20, 21])
    shown = page_of(tmp_path)
    links = [link[1:] for link in Seen(shown[shown.index("<nav") : shown.index("</nav>")]).links]
    assert {"group-0-table", "group-0-speed", "group-0-memory", "conformance"} <= set(links)
    assert set(links) <= set(Seen(shown).ids)


def test_an_implementation_has_one_colour_in_every_plot_and_stages_have_none(tmp_path):
    for name, ms in (("k2", 30), ("torchaudio", 20), ("of my own", 10)):
        traced_run(tmp_path / name, kineto(steps([ms])), name=name)
        timed(tmp_path / "other", name, [ms, ms], batch_size=8)
    log = logs.read([tmp_path])
    styles = {row.name: row.look for group in log.groups for row in group.rows}
    assert len(set(styles.values())) == 3
    for group in log.groups:
        for figure in (part for whole in runs.figures(group.rows) for part in whole.drawn):
            for trace in figure.data:
                colors = trace["marker"].get("color", style.INK)
                if trace["name"] in styles and figure.key != "step-time":
                    assert colors == style.color(styles[trace["name"]]), figure.key
                elif isinstance(colors, list):  # of a stage: a bar of each implementation
                    assert colors == [style.color(row.look) for row in group.rows], figure.key
                else:
                    assert colors in (style.INK, style.NEUTRAL), figure.key


def test_a_family_has_one_colour_and_each_of_it_a_form_of_its_own(tmp_path):
    names = ("k2", "k2-pruned", "fast_rnnt", "fast_rnnt@k2", "fast_rnnt-pruned", "torchaudio", "my own")
    for name in names:
        kind = "pruned" if name.endswith("pruned") else "exact"
        timed(tmp_path, name, [10, 11], kind=kind, exact=kind == "exact")
    (group,) = groups_of(tmp_path)
    look = {row.name: row.look for row in group.rows}
    assert look["k2"].color == look["k2-pruned"].color != look["fast_rnnt"].color
    assert look["fast_rnnt"].color == look["fast_rnnt@k2"].color == look["fast_rnnt-pruned"].color
    assert look["k2"].form == look["fast_rnnt"].form != look["k2-pruned"].form == look["fast_rnnt-pruned"].form
    assert len({look[name] for name in names}) == len(names)
    assert len({look[name].color for name in ("my own", "torchaudio", "k2", "fast_rnnt")}) == 4


# The command.


def test_the_command_writes_page_and_pngs_and_says_where(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    for name in ("a", "b$x$"):
        traced_run(tmp_path / "log" / name, kineto(steps([100, 200])), name=name)
    output = tmp_path / "out" / "page.html"
    done = run("report.py", tmp_path / "log", "--output", output, "--png", tmp_path / "png")
    assert done.returncode == 0 and done.stderr == ""
    names = ["ratios", "step-time", "time-memory", "peak-memory"]
    assert done.stdout.split() == [str(output), *(str(tmp_path / "png" / f"{name}.png") for name in names)]
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    for name in names:
        assert (tmp_path / "png" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]


def test_default_paths(tmp_path):
    pytest.importorskip("jinja2")
    write_run(tmp_path / "log" / "a")
    done = run("report.py", cwd=tmp_path)
    assert done.stdout == "log/report.html\n" and (tmp_path / "log" / "report.html").exists()
    document = made(ragged=Outcome(DIFFERS, "below log/"))
    document.made = "2099-01-01T00:00:00+00:00"
    (tmp_path / "log" / "a" / "conformance.json").write_text(document.to_json())
    assert run("report.py", "--output", "elsewhere/page.html", cwd=tmp_path).returncode == 0
    assert "below log/" in (tmp_path / "elsewhere" / "page.html").read_text(encoding="utf-8")


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
    pytest.importorskip("jinja2")
    write_run(tmp_path / "log" / "a")
    (tmp_path / "empty").mkdir()
    assert_user_error(run("report.py", *arguments, cwd=tmp_path), words)


def test_nothing_readable_is_exit_code_1(tmp_path):
    pytest.importorskip("jinja2")
    write(tmp_path / "log" / "a" / "w.1.pt.trace.json", "{")
    assert run("report.py", cwd=tmp_path).returncode == 1


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python with nothing installed, beside which the main environment is there and has jinja2."""
    main = interpreters.environments.interpreter("main")
    if main is None or subprocess.run([main, "-c", "import jinja2, matplotlib"], capture_output=True).returncode:
        pytest.skip("the main environment is not there, or without jinja2")
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def test_the_command_goes_on_in_the_main_environment_for_what_this_python_lacks(tmp_path, bare):
    write_run(tmp_path / "log" / "a")
    command = [bare, ROOT / "report.py", "--png", "png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log" / "report.html").stat().st_size > 5e5 and (tmp_path / "png" / "step-time.png").exists()
    done = subprocess.run([*command, "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere: no such file" in done.stderr


def test_a_run_under_a_python_without_jinja2_has_its_report_from_the_main_environment(tmp_path, bare):
    log, path = tmp_path / "-log", tmp_path / "-log" / "report.html"
    write_run(log / "a")
    code = "import sys; from pathlib import Path; from common.show import writing;"
    code += "writing.after_run(Path(sys.argv[1]), quiet=False)"
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "msgspec").symlink_to(os.path.dirname(msgspec.__file__))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run([bare, "-c", code, log], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("", f"report: {path}\n") and path.stat().st_size > 5e5
    path.unlink()
    path.mkdir()
    done = subprocess.run([bare, "-c", code, log], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stderr.startswith("warning: no report: ") and f"cannot write {path}" in done.stderr
    assert done.stderr.count("\n") == 1 and done.returncode == 0


def test_a_run_where_no_python_has_jinja2_warns_in_one_line(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a")
    monkeypatch.setattr(interpreters.environments, "interpreter", lambda name: None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html.environment.cache_clear()
    writing.after_run(tmp_path, quiet=True)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: no report: jinja2 is not installed") and warning.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_the_main_environment_does_not_hand_over_to_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreters.environments, "interpreter", lambda name: tmp_path / "bin" / "python")
    assert interpreters.other("main") == tmp_path / "bin" / "python"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert interpreters.other("main") is None


def test_a_failure_of_the_report_is_one_warning_whatever_it_is(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a")
    for failure in (ZeroDivisionError("a\nb"), KeyboardInterrupt()):

        def fail(*_, failure=failure):
            raise failure

        monkeypatch.setattr(writing, "write", fail)
        writing.after_run(tmp_path, quiet=False)
        warning = capsys.readouterr().err
        assert warning.startswith("warning: ") and warning.count("\n") == 1


def test_a_benchmark_writes_the_report_beside_its_runs(tmp_path, tiny_shapes):
    pytest.importorskip("jinja2")
    flags = ("--preset", "quick", "--passes", "correctness", "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log")
    done = run("benchmark_torchaudio.py", *flags)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "log" / "report.html"
    assert done.stderr.splitlines()[-1] == f"report: {path}" and "torchaudio" in path.read_text(encoding="utf-8")
    path.unlink()
    path.mkdir()  # a report that cannot be written costs nothing else
    done = run("benchmark_torchaudio.py", *flags)
    assert done.returncode == 0 and "torchaudio" in done.stdout
    assert "warning: cannot write" in done.stderr and "Traceback" not in done.stderr


def test_help_is_quick_and_nothing_imports_torch_or_jinja2():
    code = "import sys, report; assert not {'torch', 'numpy', 'jinja2', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_rows_and_page_agree_on_what_there_is(tmp_path):
    for day in (1, 2):
        write_run(tmp_path / f"t.{day}", started=f"2026-01-0{day}T00:00:00+00:00")
    assert len(logs.rows([tmp_path])) == 1
    assert has_words(page_of(tmp_path), "1 earlier run", "not shown")
