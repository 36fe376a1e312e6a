"""What a command ends with: one screen with a table by kind, what did not run, correctness and the verdict."""

from __future__ import annotations

import re

import pytest
from commands import ROOT
from fixtures_runs import (
    correctness,
    records_of,
    status,
    summarize,
    timed,
    timing,
    write_records,
    write_run,
)

from common.analysis import logs, metrics, verdict
from common.analysis.groups import collect, groups
from common.show import answer, cards


def screen(log):
    return summarize(log, details=False)


@pytest.fixture
def log(tmp_path):
    """Three exact losses, one approximation, one that is missing, one that failed; three rounds of one run."""
    folder = tmp_path / "log"
    timed(folder, "optimized_transducer", [100, 101, 102], peak=50)
    timed(folder, "fast_rnnt", [200, 202, 203], peak=90)
    timed(folder, "torchaudio", [300, 303, 301], peak=40)
    timed(folder, "fast_rnnt-pruned", [10, 10.1, 10.2], exact=False, peak=5, kind="pruned")
    missing = "the nemo environment is not there; run `make setup ENVIRONMENTS=nemo`"
    write_run(folder / "nemo", name="nemo", jobs=[[status("correctness", "missing", missing)]])
    why = "apex has no cpu version; it runs on cuda"
    write_run(folder / "apex", name="apex", jobs=[[status("correctness", "unsupported", why)]])
    write_run(folder / "k2", name="k2", jobs=[correctness(), [status("timing-1", "error", "killed by SIGKILL")]])
    return folder


def test_the_answer_fits_a_screen(log):
    text = screen(log)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 40 and "\x1b" not in text
    begins = ["exact:", "optimized_transducer ", "fast_rnnt ", "torchaudio ", "approximate:", "fast_rnnt-pruned "]
    positions = [next(at for at, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert positions == sorted(positions)
    row = next(line.split() for line in lines if line.startswith("fast_rnnt "))
    assert {"202.0", "2.00", "slower", "90.00"} <= set(row)


def test_losses_under_another_torch_are_a_group_of_their_own(log):
    lines = records_of(log / "fast_rnnt")
    lines = [{**line, "torch": "1.13.1"} if line["record"] == "environment" else line for line in lines]
    write_records(log / "fast_rnnt", lines)
    table = screen(log).partition("exact, under torch 1.13.1:\n")[2].splitlines()
    assert table[0].startswith("fast_rnnt ") and {"1.00", "fastest"} <= set(table[0].split())
    assert "next is torchaudio at 2.98x" in " ".join(screen(log).split())


def test_what_did_not_run_is_one_line_with_how_to_get_it(log):
    text = " ".join(screen(log).split())
    assert "did not run:" in text and "nemo (make setup ENVIRONMENTS=nemo)" in text and "apex (needs CUDA)" in text
    assert "k2: error: timing-1: killed by SIGKILL" in text


def test_the_verdict_is_of_the_rows(log):
    (group,) = groups(logs.rows([log]))
    answer = verdict.of(group)
    assert (answer.fastest.row.name, answer.fastest.next.name) == ("optimized_transducer", "fast_rnnt")
    assert answer.fastest.sure and answer.fastest.times == pytest.approx(2, rel=0.01)
    assert answer.smallest.row.name == "torchaudio" and answer.smallest.times == pytest.approx(50 / 40)
    assert answer.approximate.row.name == "fast_rnnt-pruned"
    assert answer.approximate.over.ratio == pytest.approx(0.1, rel=0.01)
    assert answer.approximate.memory == pytest.approx(0.1)
    verdict_text = screen(log).partition("VERDICT")[2]
    for name in ("optimized_transducer", "torchaudio", "fast_rnnt-pruned"):
        assert name in verdict_text


@pytest.mark.parametrize(
    "loss_ms, basis, words",
    [
        ({"k2": [5, 5.1, 5], "torchaudio": [8, 8.1, 8]}, "both", ["k2, ", "its step is the fastest too"]),
        (
            {"k2": [5, 9, 7], "torchaudio": [6, 5, 8]},
            "step",
            ["k2, ", "Ranked by the step", "by the loss alone unclear"],
        ),
        (
            {"k2": [8, 8.1, 8], "torchaudio": [5, 5.1, 5]},
            "",
            ["unclear: by the loss alone torchaudio", "by the step k2"],
        ),
    ],
)
def test_the_pick_for_given_logits_says_what_it_rests_on(tmp_path, loss_ms, basis, words):
    """Beside a loss that takes no logits and has the fastest step of all."""
    for name, step in (("k2", 100), ("torchaudio", 200), ("fused", 10)):
        alone = loss_ms.get(name)
        rounds = [
            timing(f"timing-{at}", [step + at, step + at], [alone[at - 1]] * 2 if alone else []) for at in (1, 2, 3)
        ]
        jobs = [correctness(), *rounds]
        write_run(tmp_path / name, name=name, jobs=jobs, rounds=3, run_id="one run", passes=["correctness", "timing"])
    (group,) = groups(logs.rows([tmp_path]))
    picked = verdict.given_logits(group)
    assert picked.basis == basis and (picked.row and picked.row.name) == ("k2" if basis else None)
    verdict_text = " ".join(screen(tmp_path).partition("given logits:")[2].split())
    assert all(word in verdict_text for word in words)
    (page,) = collect(group)
    (card,) = [card for card in cards.cards(page.rows, []) if card.question == "If you need logits"]
    assert card.clear == bool(basis) and (card.answer == "k2" or not basis)


def test_errors_are_those_at_the_measured_size_and_large_ones_are_marked(tmp_path):
    sizes = {"batch": 4, "N": 2, "T_max": 407, "U_max": 86, "loss_error": 8e-8, "grad_tolerance": 2e-3, "ok": True}
    for name, grad_error in (("torchaudio", 1.3e-3), ("reference", 5e-6)):
        jobs = [correctness(at_size={**sizes, "grad_error": grad_error}, differing=["given"])]
        write_run(tmp_path / name, name=name, jobs=jobs, passes=["correctness"])
    text = " ".join(screen(tmp_path).split())
    assert "gradients within 1.3e-03" in text and "at the measured size" in text, text
    assert "above 1e-04: torchaudio 1.3e-03" in text and "reference 5.0e-06" not in text
    table = summarize(tmp_path)
    assert "not deterministic" in table
    metric = metrics.METRICS["measured_error"]
    shown = {row.name: metric.shown(row) for row in logs.rows([tmp_path])}
    assert shown == {"torchaudio": "1.3e-03 !", "reference": "5.0e-06"}


def test_the_gaps_of_a_pruned_loss_are_no_range(tmp_path):
    timed(tmp_path, "k2-pruned", [10, 10, 10], exact=False, kind="pruned")
    lines = records_of(tmp_path / "k2-pruned")
    gaps = {"approximation_gap": 0.03, "approximation_gaps": {"random": 0.03, "peaky": 0.0015}}
    write_records(
        tmp_path / "k2-pruned", [{**line, **gaps} if line["record"] == "correctness" else line for line in lines]
    )
    verdict = " ".join(screen(tmp_path).partition("VERDICT")[2].split())
    assert "off by 3% on random logits" in verdict and "0.15% on peaky logits (made, sharper than a trained" in verdict
    assert "does not bound it in training" in verdict


def test_a_line_has_as_many_columns_as_there_is_room_for_and_colors_change_nothing(log):
    rows = logs.rows([log])
    heads = {}
    for width in (60, 80, 100, 200):
        text, colored = answer.render(rows, width), answer.render(rows, width, answer.COLORS)
        assert max(map(len, text.splitlines())) <= width
        assert width < 80 or " ..." not in text.partition("VERDICT")[2]
        assert "\x1b[" in colored and re.sub(r"\x1b\[[\d;]*m", "", colored) == text
        heads[width] = set(re.findall(r"[a-z]+", text.partition("exact:")[0]))
        advice = " ".join(text.partition("VERDICT\n")[2].split())
        assert advice.startswith("Use optimized_transducer: 2.0x faster (2.0 to 2.0) and 1.8x smaller")
    assert "torch" in heads[200] and "torch" not in heads[60] and "verdict" in heads[60]


def test_details_have_what_the_screen_leaves_out(log):
    short, details = screen(log), summarize(log)
    for word in ("fast_rnnt step: joiner 20", "approximate by design"):
        assert word in details and word not in short


def test_searches_and_sweeps_end_in_a_verdict_too():
    """On the newest committed records of each."""
    of = {name: screen(max((ROOT / "results").glob(f"*-{name}"))) for name in ("largest", "vocabulary")}
    assert re.search(r"largest batch, exact: +fused, \d+ utterances", of["largest"])
    assert re.search(r"vocab-size 500: +fused, [\d.]+ ms a step", of["vocabulary"])
    assert max(len(line) for text in of.values() for line in text.splitlines()) <= 100


def test_losses_of_one_lattice_have_a_verdict_of_their_own(tmp_path):
    timed(tmp_path, "reference:tdt", [10, 11, 10, 11, 10], peak=400, kind="tdt", exact=False)
    timed(tmp_path, "transformers", [40, 41, 40, 41, 40], peak=500, kind="tdt", exact=False)
    (group,) = logs.read([tmp_path]).groups
    picks = verdict.of(group.rows)
    assert picks.fastest.row.name == "reference:tdt" and picks.fastest.next.name == "transformers"
    timed(tmp_path, "torchaudio", [5, 5, 5, 5, 5], peak=400)
    (group,) = logs.read([tmp_path]).groups
    assert verdict.of(group.rows).fastest.row.name == "torchaudio"
