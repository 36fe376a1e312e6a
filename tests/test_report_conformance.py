"""The conformance matrix on the page: which one is shown, what its cells say, and what a garbled one costs."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import pytest
from commands import has_words
from fixtures_conformance import made

from common.analysis.groups import Group
from common.conformance import section as conformance
from common.conformance.records import CRASHES, DIFFERS, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT, Outcome
from common.show.page import page

LIBRARY = "/* plotly */"


@pytest.fixture(autouse=True)
def no_log(tmp_path, monkeypatch):
    """This checkout's log/ is not looked at."""
    monkeypatch.setattr(conformance, "LOG", tmp_path / "log of the suite" / "conformance.json")


def write(folder, day, message):
    """Write a matrix made on that day of 2099 that quotes `message`."""
    folder.mkdir(parents=True, exist_ok=True)
    document = made(ragged=Outcome(DIFFERS, message, 0.5, 0.25))
    document.made = f"2099-01-{day:02d}T00:00:00+00:00"
    (folder / "conformance.json").write_text(document.to_json())


def test_the_committed_matrix_is_shown_where_there_is_no_other_and_says_so(tmp_path):
    document = json.loads(conformance.COMMITTED.read_text())
    revision = document["git_revision"]
    shown = page([], tmp_path, LIBRARY)
    assert "Committed with the suite as docs/conformance.json" in shown and f"suite {revision[:12]}" in shown
    rows, cases = (document[key] for key in ("implementations", "cases"))
    judged = sum(bool(row["cells"]) for row in rows)
    assert f"{judged} of {len(rows)} implementations and variants, {len(cases)} cases." in shown
    assert shown.count('<th scope="col" title="') == judged
    assert shown.count('<div class="scroll matrix"') == len({row["kind"] for row in rows if row["cells"]})


def test_a_row_of_another_run_says_of_which(tmp_path):
    document = made(ragged=Outcome(PASS))
    row = document.implementations[0]
    row.made, row.git_revision = "2020-02-03T04:05", "earlier"
    (tmp_path / "conformance.json").write_text(document.to_json())
    assert (
        page([], tmp_path, LIBRARY).count("torch 2; judged 2020-02-03; suite earlier") == 2
    )  # head of its column, list


def test_the_newest_is_shown_wherever_it_lies(tmp_path):
    write(tmp_path / "page", 2, "beside the page")
    write(tmp_path / "log" / "deep", 3, "below a log")
    write(tmp_path / "other", 1, "in another log")
    for paths, expected in (([], "beside the page"), (["other"], "beside the page"), (["other", "log"], "below a log")):
        shown = page([], tmp_path / "page", LIBRARY, paths=[tmp_path / path for path in paths])
        for message in ("beside the page", "below a log", "in another log"):
            assert (message in shown) == (message == expected)
        assert "Committed with the suite" not in shown
    assert 'href="../log/deep/conformance.json"' in shown
    write(conformance.LOG.parent, 4, "in log/")
    assert "in log/" in page([], tmp_path / "page", LIBRARY)


def test_the_contents_lead_to_it(tmp_path):
    write(tmp_path, 1, "x")
    assert 'id="conformance"' in page([], tmp_path, LIBRARY)
    assert '<a href="#conformance">' in page([Group("a heading", [])], tmp_path, LIBRARY)


def test_a_cell_has_a_symbol_and_words(tmp_path):
    cells = {
        "ragged": Outcome(DIFFERS, "loss <b>1</b> instead of 2", 0.5, 0.25),
        "V-2": Outcome(PASS),
        "no-target": Outcome(REFUSES, "assert U > 0"),
        "float16": Outcome(CRASHES, "killed by SIGSEGV"),
        "bfloat16": Outcome(TIMEOUT, "ended after 120 s"),
        "large": Outcome(NOT_APPLICABLE, "not asked without --large"),
    }
    (tmp_path / "conformance.json").write_text(made(**cells).to_json())
    shown = page([], tmp_path, LIBRARY)
    symbols = re.findall(r'<td class="\w+" title="[^"]*"><span role="img" aria-label="([^"]*)">(.)</span>', shown)
    assert sorted(symbols) == sorted(
        [
            ("differs 5e-01", "\u2717"),
            ("pass", "\u2713"),
            ("refuses", "!"),
            ("crashes", "\u2020"),
            ("timeout", "\u2026"),
        ]
    )
    assert 'title="ragged batch, a: differs 5e-01: loss &lt;b&gt;1&lt;/b&gt; instead of 2"' in shown
    assert "<strong>crashes</strong>: its process died" in shown  # the legend
    assert "<strong>error</strong>" not in shown  # of results that occur
    assert has_words(shown, "<summary>a:", "1 pass", "1 differs", "1 n/a")
    assert "<strong>ragged batch</strong>: differs 5e-01: loss &lt;b&gt;1&lt;/b&gt; instead of 2</li>" in shown
    assert "pip install &lt;gone&gt;" in shown and "U = 0 is refused: a." in shown
    (link,) = re.findall(r'download="conformance-exact.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', shown)
    assert "ragged batch,differs 5e-01" in base64.b64decode(link).decode()


@pytest.mark.parametrize("garbled", ["", "{}", "[1]", '{"implementations": [{"status": 3}]}', "[" * 10**5])
def test_a_garbled_matrix_costs_one_line(tmp_path, garbled):
    (tmp_path / "conformance.json").write_text(garbled)
    shown = page([], tmp_path, LIBRARY)
    assert '<a href="conformance.json">conformance.json</a> cannot be read (' in shown
    assert "Committed with the suite" in shown


def test_a_hostile_matrix_is_text(tmp_path):
    evil = "\"'><script>alert(1)</script>"
    document = made(ragged=Outcome(DIFFERS, evil))
    row = document.implementations[0]
    row.name = row.version = row.simulator = evil
    document.cases = [replace(case, title=evil, asks=evil) for case in document.cases]
    (tmp_path / "conformance.json").write_text(document.to_json())
    shown = page([], tmp_path, LIBRARY)
    assert "alert(1)" in shown and "<script>alert" not in shown and "\"'>&lt;script" not in shown
