"""What a command ends with: the screen, the verdict, and each row against the fastest of its kind, by hand."""

from __future__ import annotations

import math
import re
import shutil

import pytest
from rnnt_bench import api
from rnnt_bench.analysis import doubts, logs, metrics, ratios, standing, verdict
from rnnt_bench.analysis.groups import collect, groups, label
from rnnt_bench.analysis.row import Row
from rnnt_bench.analysis.times import Times
from rnnt_bench.core import statistics
from rnnt_bench.present.parts import words as in_words
from rnnt_bench.records.schema import Environment, Header
from rnnt_bench.show import cards, tables

from commands import ROOT, has_words, run
from fixtures_runs import (
    MIB,
    change,
    correctness,
    memory,
    one_row,
    read_rows,
    records_of,
    status,
    summarize,
    timed,
    timing,
    write_records,
    write_run,
)


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
    for name, why in (("apex", "has no cpu version; it runs on cuda"), ("speechbrain", "does not take float64")):
        write_run(folder / name, name=name, jobs=[[status("correctness", "unsupported", f"{name} {why}")]])
    write_run(folder / "k2", name="k2", jobs=[correctness(), [status("timing-1", "error", "killed by SIGKILL")]])
    return folder


def test_a_row_of_another_python_says_which(log):
    """Set-up writes these words where that Python is not there (rnnt_bench.setup.environments)."""
    why = "needs Python 3.11; this is Python 3.12: install it, then run `make setup`"
    write_run(log / "k2-pruned", name="k2-pruned", jobs=[[status("correctness", "missing", why)]])
    text = " ".join(screen(log).split())
    assert "k2-pruned (needs Python 3.11)" in text and "nemo (make setup ENVIRONMENTS=nemo)" in text


def test_the_answer_fits_a_screen(log):
    text = screen(log)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 40 and "\x1b" not in text
    begins = ["exact:", "optimized_transducer ", "fast_rnnt ", "torchaudio ", "approximate:", "fast_rnnt-pruned "]
    positions = [next(at for at, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert positions == sorted(positions)
    row = next(line.split() for line in lines if line.startswith("fast_rnnt "))
    assert {"202.0", "2.00", "slower", "90.00"} <= set(row)
    assert text[text.index("VERDICT") :].strip() in summarize(log), "--details ends with another verdict"


def test_losses_under_another_torch_are_a_group_of_their_own(log):
    change(log / "fast_rnnt", "environment", torch="1.13.1")
    table = screen(log).partition("exact, under torch 1.13.1:\n")[2].splitlines()
    assert table[0].startswith("fast_rnnt ") and {"1.00", "fastest"} <= set(table[0].split())
    assert "next is torchaudio at 2.98x" in " ".join(screen(log).split())


@pytest.fixture
def controlled(tmp_path):
    """Two exact losses and their controls, with MKL on its other path; three rounds of one run."""
    folder = tmp_path / "log"
    for name, ms in (("fused", 10), ("optimized_transducer", 33)):
        timed(folder, name, [ms, 1.01 * ms, 0.99 * ms])
    for name, ms in (("fused@fast-mkl", 10), ("optimized_transducer@fast-mkl", 17)):
        timed(folder, name, [ms, 0.98 * ms, 1.01 * ms])
        change(folder / name, "environment", mkl_as_intel=True, variables={"LD_PRELOAD": "/x/mkl_as_intel.so"})
    return folder


def test_controls_tell_what_of_a_ratio_is_torchs_slow_products(controlled):
    text = screen(controlled)
    group = text.partition("exact, with torch's products at the processor's rate:\n")[2].splitlines()
    assert group[0].startswith("fused@fast-mkl ") and "1.70" in group[1] and "LD_PRELOAD" not in text
    words = " ".join(text.split())
    assert "Use fused: 3.3x faster" in words  # the control is no rival
    for part in ("optimized_transducer: 3.3x here", "1.9x are torch's slow products", "1.7x without them (1.7 to 1.7)"):
        assert part in words
    row = next(each for each in read_rows(controlled) if each["name"] == "optimized_transducer")
    ratios_of = row["over_fastest"], row["over_fastest_with_fast_products"]
    assert ratios_of == pytest.approx((3.3, 1.7)) and row["with_fast_products"]["rounds"] == 3
    plain = summarize(controlled, "--format", "csv").splitlines()
    assert "over_fastest_with_fast_products" in plain[0].split(",")
    (card, *_) = cards.cards(logs.read([controlled]).groups[0].rows, [])
    assert "3.3x here" in str(dict(card.lines)["Torch's products"])


def test_without_both_controls_nothing_is_said_of_torchs_products(controlled):
    shutil.rmtree(controlled / "fused@fast-mkl")
    assert "without them" not in screen(controlled)
    row = next(each for each in read_rows(controlled) if each["name"] == "optimized_transducer")
    assert row["over_fastest_with_fast_products"] is None and row["over_fastest"] == pytest.approx(3.3)


def test_what_did_not_run_is_one_line_with_how_to_get_it(log):
    text = " ".join(screen(log).split())
    assert "did not run:" in text and "nemo (make setup ENVIRONMENTS=nemo)" in text and "apex (needs CUDA)" in text
    assert "speechbrain (does not take float64)" in text
    assert "k2: error: timing-1: killed by SIGKILL" in text


def test_the_verdict_is_of_the_rows(log):
    (group,) = groups(logs.rows([log]))
    quick, _, small, approximate = verdict.picks(group)
    assert (quick.row.name, quick.next.name) == ("optimized_transducer", "fast_rnnt")
    assert quick.sure and quick.factor == pytest.approx(2, rel=0.01)
    assert small.row.name == "torchaudio" and small.sure and small.factor == pytest.approx(50 / 40)
    assert small.next is quick.row and small.next_time == pytest.approx(1 / 3, rel=0.01)
    assert approximate.row.name == "fast_rnnt-pruned"
    assert (approximate.time_over_exact.ratio, approximate.peak_over_exact) == pytest.approx((0.1, 0.1), rel=0.01)
    verdict_text = screen(log).partition("VERDICT")[2]
    for name in ("optimized_transducer", "torchaudio", "fast_rnnt-pruned"):
        assert name in verdict_text


def test_memory_is_judged_by_the_smallest_row_by_utterance_too(tmp_path):
    timed(tmp_path, "fused", [100, 101, 102], peak=8)
    timed(tmp_path, "torchaudio", [500, 505, 510], peak=480)
    timed(tmp_path, "torchaudio:by-utterance", [700, 707, 714], exact=True, peak=240, kind="by-utterance")
    (group,) = groups(logs.rows([tmp_path]))
    quick, _, small, _ = verdict.picks(group)
    assert (quick.row.name, quick.next.name) == ("fused", "torchaudio")
    assert (small.next.name, small.factor) == ("torchaudio:by-utterance", 30)
    assert small.next_time == pytest.approx(7, rel=0.01)
    text = " ".join(screen(tmp_path).split())
    assert "by-utterance at 30.0x the peak and 7.0x the time" in text and "30x smaller than torchaudio:by-utter" in text
    assert "exact, an utterance at a time:" in text and cards.title(group) == verdict.headline(quick, small)
    assert "by-utterance at 30.0x the peak" in in_words(verdict.memory_answer(quick.row, small))


@pytest.mark.parametrize(
    "loss_ms, best, words",
    [
        ({"k2": [5, 5.1, 5], "torchaudio": [8, 8.1, 8]}, "k2", ["k2, ", "its loss is the fastest too"]),
        ({"k2": [5, 9, 7], "torchaudio": [6, 5, 8]}, "k2", ["k2, ", "by the loss alone unclear"]),
        ({"k2": [8, 8.1, 8], "torchaudio": [5, 5.1, 5]}, "k2", ["k2, ", "by the loss alone torchaudio"]),
    ],
)
def test_the_pick_for_given_logits_says_what_it_rests_on(tmp_path, loss_ms, best, words):
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
    assert (picked.best and picked.best.row.name) == best
    verdict_text = " ".join(screen(tmp_path).partition("given logits:")[2].split())
    assert all(word in verdict_text for word in words) and verdict_text.startswith(words[0])  # the step comes first
    (page,) = collect(group)
    (card,) = [card for card in cards.cards(page.rows, []) if card.question == "If you need logits"]
    assert card.clear == bool(best) and (card.answer == "k2" or not best)


def test_an_interval_that_tells_nothing_prints_no_long_numbers(tmp_path):
    """The interval is of two rounds, whose ratios are 0.5 and 500."""
    timed(tmp_path, "k2", [10, 10])
    timed(tmp_path, "torchaudio", [5, 5000])
    lines = [screen(tmp_path), summarize(tmp_path)]
    assert all("below 0.001" in " ".join(text.split()) and not re.search(r"\d{6}", text) for text in lines)


@pytest.mark.parametrize("version, words", [("1.4", ""), ("1.5.1+cu130", "older than this package (1.5.1)")])
def test_what_is_said_of_corners_has_a_day_and_a_version(tmp_path, version, words):
    timed(tmp_path, "optimized_transducer", [10, 10, 10])
    change(tmp_path / "optimized_transducer", "environment", implementation_version=version)
    text = " ".join(screen(tmp_path).partition("beware:")[2].split())
    assert re.search(r"\b1\.4 on \d+ \w+ \d{4}\b", text) and ("older" in text) == bool(words) and words in text


def test_errors_are_those_at_the_measured_size_and_large_ones_are_marked(tmp_path):
    sizes = {"batch": 4, "N": 2, "T_max": 407, "U_max": 86, "loss_error": 8e-8, "grad_tolerance": 2e-3, "ok": True}
    for name, grad_error in (("torchaudio", 1.3e-3), ("reference", 5e-6)):
        differ = {"differing": ["given"], "reached_by_padding": ["loss", "given"]}
        jobs = [correctness(at_size={**sizes, "grad_error": grad_error}, **differ)]
        write_run(tmp_path / name, name=name, jobs=jobs, passes=["correctness"])
    text = " ".join(screen(tmp_path).split())
    assert "gradients within 1.3e-03" in text and "at the measured size" in text, text
    assert "above 1e-04: torchaudio 1.3e-03" in text and "torchaudio 1.3e-03, reference" not in text
    table = summarize(tmp_path)
    assert "not deterministic" in table and "reaches the loss and the gradient of its input" in table
    assert "given:" not in table
    metric = metrics.METRICS["grad_error"]
    shown = {row.name: metric.shown(row) for row in logs.rows([tmp_path])}
    assert shown == {"torchaudio": "1.3e-03 !", "reference": "5.0e-06"}
    errors = {row["name"]: (row["grad_error"], row["small_batches"]["grad_error"]) for row in read_rows(tmp_path)}
    assert errors == {"torchaudio": (1.3e-3, 2e-6), "reference": (5e-6, 2e-6)}


def test_a_later_run_that_measured_nothing_hides_no_earlier_one(tmp_path):
    timed(tmp_path, "k2", [10, 10, 10], started="2026-11-20T10:00:00+00:00")
    write_run(tmp_path / "k2.2", name="k2", jobs=[])
    change(tmp_path / "k2.2", "run", started="2026-11-21T10:00:00+00:00", run_id="later")
    (row,) = read_rows(tmp_path)
    assert (row["step_ms"], row["status"], row["earlier_runs"]) == (10, "ok", 0)
    for text in (screen(tmp_path), summarize(tmp_path)):
        assert "1 later run" in text and "k2.2" in text
    timed(tmp_path / "before", "k2", [10, 10, 10])
    done = run("rnnt-bench", "compare", tmp_path / "before", tmp_path)
    assert done.returncode == 0 and "k2.2" in done.stdout and "same" in done.stdout
    assert run("rnnt-bench", "compare", "--save-baseline", "old", tmp_path).returncode == 0
    assert [path.parent.name for path in (tmp_path / "baselines").rglob("results.jsonl")].count("k2.2") == 0
    write_run(tmp_path / "k2.3", name="k2", jobs=[[*correctness(), *timing("timing-1", [50], [5])]])
    change(tmp_path / "k2.3", "run", started="2026-11-22T10:00:00+00:00", run_id="latest")
    assert one_row(tmp_path)["status"] == "interrupted"  # it measured something


def test_of_two_folders_that_are_named_none_is_hidden_without_a_word(tmp_path):
    timed(tmp_path / "a", "k2", [10, 10, 10], started="2026-11-20T10:00:00+00:00")
    timed(tmp_path / "b", "k2", [20, 20, 20], started="2026-11-21T10:00:00+00:00")
    both = run("summarize.py", tmp_path / "a", tmp_path / "b")
    assert (
        str(tmp_path / "a") in both.stderr
        and "1 run not shown" in both.stderr
        and str(tmp_path / "b") not in both.stderr
    )
    assert run("summarize.py", tmp_path).stderr == run("summarize.py", tmp_path / "a", "--all-runs").stderr == ""
    with pytest.warns(UserWarning, match="1 run not shown"):
        (row,) = api.load([tmp_path / "a", tmp_path / "b"])
    assert row["step_ms"] == 20


def test_the_settings_that_differ_between_rows_are_columns(tmp_path):
    timed(tmp_path, "k2", [10, 10, 10])
    settings = records_of(tmp_path / "k2")[0]["settings"]
    assert "logits" not in {key for key in read_rows(tmp_path)[0]} - {"configuration"}
    timed(tmp_path / "other", "k2", [20, 20, 20], settings={**settings, "logits": "trained", "encoder_dim": 128})
    rows = {row["step_ms"]: row for row in read_rows(tmp_path)}
    assert (rows[10]["logits"], rows[20]["logits"]) == ("random", "trained") and rows[20]["encoder_dim"] == 128
    (first, *lines) = summarize(tmp_path, "--format", "csv", details=False).splitlines()
    assert {"logits", "encoder_dim"} <= {*first.split(",")} and len(lines) == 2


def test_the_gaps_of_a_pruned_loss_are_no_range(tmp_path):
    timed(tmp_path, "k2-pruned", [10, 10, 10], exact=False, kind="pruned")
    gaps = {"random": 0.03, "peaky": 0.0015}
    change(tmp_path / "k2-pruned", "correctness", approximation_gap=0.03, approximation_gaps=gaps)
    verdict = " ".join(screen(tmp_path).partition("VERDICT")[2].split())
    assert "off by 3% on random logits" in verdict and "0.15% on peaky logits (made, sharper than a trained" in verdict
    assert "does not bound it in training" in verdict


def test_a_line_has_as_many_columns_as_there_is_room_for_and_colors_change_nothing(log):
    read = logs.read([log])
    heads = {}
    for width in (60, 80, 100, 200):
        text, colored = (tables.screen(read, tables.Terminal(width, colors)) for colors in ({}, tables.COLORS))
        assert max(map(len, text.splitlines())) <= width
        assert width < 80 or " ..." not in text.partition("VERDICT")[2]
        assert "\x1b[" in colored and re.sub(r"\x1b\[[\d;]*m", "", colored) == text
        heads[width] = set(re.findall(r"[a-z]+", text.partition("exact:")[0]))
        advice = " ".join(text.partition("VERDICT\n")[2].split())
        assert advice.startswith("Use optimized_transducer: 2.0x faster (2.0 to 2.0) than the next exact loss")
    assert "torch" in heads[200] and "torch" not in heads[60] and "verdict" in heads[60]


def test_sweeps_end_in_a_verdict_too():
    text = screen(max((ROOT / "results").glob("*-short")))
    assert re.search(r"vocab-size 500: +fused, [\d.]+ ms a step", text)
    assert max(map(len, text.splitlines())) <= 100


def test_losses_of_one_lattice_have_a_verdict_of_their_own(tmp_path):
    timed(tmp_path, "reference:tdt", [10, 11, 10, 11, 10], peak=400, kind="tdt", exact=False)
    timed(tmp_path, "transformers", [40, 41, 40, 41, 40], peak=500, kind="tdt", exact=False)
    (group,) = logs.read([tmp_path]).groups
    quick = verdict.picks(group.rows).fastest
    assert quick.row.name == "reference:tdt" and quick.next.name == "transformers"
    timed(tmp_path, "torchaudio", [5, 5, 5, 5, 5], peak=400)
    (group,) = logs.read([tmp_path]).groups
    assert verdict.picks(group.rows).fastest.row.name == "torchaudio"


def row(name, *rounds, kind="exact", scope="step", run_id="one", torch="2.11.0", **fields):
    """rounds: each {batch: median ms}."""
    times = Times(medians={str(number): batches for number, batches in enumerate(rounds, start=1)})
    place = {"step" if scope == "step" else "loss_alone": times}
    header, environment = Header(name=name, run_id=run_id), Environment(torch=torch)
    return Row(name, kind=kind, header=header, environment=environment, **{**place, **fields})


def filled(*rows):
    standing.rank_times(rows)
    return {each.name: each.against_fastest.as_json() if each.against_fastest else {} for each in rows}


def test_ratios_are_paired_per_batch_and_round():
    a = row("a", {"0": 10, "1": 1000}, {"0": 20, "1": 900})
    b = row("b", {"0": 20, "1": 2000}, {"0": 50, "1": 3240})  # 2 and 2; 2.5 and 3.6
    standings = filled(b, a)
    assert standings["a"]["is_fastest"] and (standings["a"]["ratio"], standings["a"]["verdict"]) == (1.0, "fastest")
    assert standings["b"]["fastest"] == "a" and not standings["b"]["is_fastest"] and standings["b"]["paired"]
    assert standings["b"]["ratio"] == pytest.approx(math.sqrt(2 * 3))
    half = statistics.student_t(0.95, 1) * math.log(3 / 2) / 2  # deviation / sqrt(2) of log 2 and log 3
    assert math.log(standings["b"]["high"] / standings["b"]["ratio"]) == pytest.approx(half)
    assert (standings["b"]["verdict"], standings["b"]["rounds"], standings["b"]["batches"]) == ("unclear", 2, 2)


def test_only_batches_that_both_have_count_and_a_few_make_nobody_the_fastest():
    """c is the fastest on the one batch it was measured on, which says nothing of the other."""
    standings = filled(row("c", {"0": 5}), row("a", {"0": 10, "1": 100}), row("b", {"0": 30, "1": 110}))
    expected = {"a": 1, "b": math.sqrt(3 * 1.1), "c": 0.5}
    assert {name: each["ratio"] for name, each in standings.items()} == pytest.approx(expected)
    assert (standings["b"]["batches"], standings["c"]["batches"]) == (2, 1)
    standings = filled(row("a", {"0": 10}), row("b", {"1": 5}))  # nothing in common
    assert [each["ratio"] for each in standings.values() if not each["is_fastest"]] == [None]


def test_kinds_and_torches_are_apart_and_failed_rows_are_not_compared():
    """No ratio crosses kinds or torches; the torch of most losses in their own environment is home."""
    rows = (
        row("exact", {"0": 10}),
        row("slow", {"0": 20}),
        row("pruned", {"0": 1}, kind="pruned"),
        row("pruned2", {"0": 4}, kind="pruned"),
        row("k2", {"0": 3}, torch="1.13.1"),
        row("exact@k2", {"0": 6}, torch="1.13.1"),
        row("died", {"0": 5}, status="oom"),
        row("missing", status="missing"),
    )
    standings = filled(*rows)
    ratios_of = {name: each["ratio"] and round(each["ratio"], 9) if each else None for name, each in standings.items()}
    expected = {"exact": 1, "slow": 2, "pruned": 1, "pruned2": 4, "k2": 1, "exact@k2": 2, "died": None, "missing": None}
    assert ratios_of == expected
    assert (standings["pruned2"]["fastest"], standings["exact@k2"]["fastest"]) == ("pruned", "k2")
    assert {each.name for each in rows if each.other_torch == "under torch 1.13.1"} == {"k2", "exact@k2"}


def test_a_row_is_compared_by_its_step_or_by_its_loss():
    def timed(name, **of):
        return row(name, **{key: Times(medians={str(at): {"0": ms} for at in range(3)}) for key, ms in of.items()})

    both, loss, step = timed("both", step=10, loss_alone=2), timed("loss", loss_alone=1), timed("step", step=30)
    standings = filled(both, loss, step)
    assert standings["both"]["scope"] == "step" and standings["both"]["is_fastest"]
    assert standings["step"]["ratio"] == pytest.approx(3)
    assert (standings["loss"]["scope"], standings["loss"]["fastest"]) == ("loss", "loss")
    alone = both.loss_against_fastest
    assert alone.factor == pytest.approx(2) and alone.ratio.low is not None and alone.baseline is loss


# The verdict on a ratio.


def ratio(value=1.5, low=1.4, high=1.6, baseline=(1.0,) * 4, new=(1.5,) * 4, error=0.01):
    return ratios.Ratio(value, low, high, 2, baseline, new, error, len(new) - 1)


def judged(of, paired=True, busy=(0.0, 0.0), tolerance=0.02, **fields):
    rounds = len(of.baseline), len(of.new)
    evidence = dict(margins=ratios.Margins(tolerance), ratio=of, paired=paired, rounds=rounds, busy=busy)
    return standing.Standing(Row("a"), Row("b"), "step", **evidence, **fields)


@pytest.mark.parametrize("count, left", [(4, 3), (3, 3)])
def test_a_round_beside_other_load_is_left_out_where_three_are_left(count, left):
    rounds = {number: {"0": 1.0} for number in range(count)}
    (kept,), is_loaded = ratios.without_load([rounds], {0})
    assert len(kept) == left and (0 in kept) is is_loaded is (count == 3)


def test_who_may_be_as_fast_as_the_fastest():
    def is_rival(*numbers):
        return judged(ratio(*numbers)).may_be_as_fast

    assert is_rival(1.2, None, None) and is_rival(4.0, 0.9, 20.0)
    assert not is_rival(3.5, None, None) and not is_rival(1.2, 1.1, 1.3)
    assert judged(ratio(4.0, 3.9, 4.1), beside_load=True).may_be_as_fast
    assert not judged(ratio(11.0, 10.9, 11.1), beside_load=True).may_be_as_fast


@pytest.mark.parametrize(
    "of, paired, busy, words",
    [
        (ratio(baseline=(1.0, 1.0)), True, (0, 0), "2 rounds on a side cannot tell a change from chance"),
        (ratio(low=None, high=None, baseline=(1.0,), error=None), False, (0, 0), "1 round on a side"),
        (ratio(baseline=(1.0, 1.0, 1.6, 1.6)), False, (0, 0), "drifts by 60.0%"),
        (ratio(baseline=(1.0, 1.0, 1.6, 1.6)), True, (0, 0), ""),  # the other side's rounds drifted beside them
        (ratio(baseline=(1.0, 1.0, 1.4, 1.4)), False, (0, 0), ""),
        (ratio(), False, (0.2, 0), "20% of the baseline's samples"),
        (ratio(), False, (0.1, 0.1), ""),
        (ratio(), True, (0.9, 0), ""),
    ],
)
def test_what_puts_a_difference_in_doubt(of, paired, busy, words):
    answer = judged(of, paired, busy)
    assert answer.doubt.startswith(words) if words == "" else words in answer.doubt
    assert (answer.verdict == "unclear") == bool(words)
    assert not words or answer.reason == f"50.0% more time, but {answer.doubt}"


@pytest.mark.parametrize(
    "of, options, verdict, words",
    [
        (ratio(1.05, 0.99, 1.11), {}, "unclear", "more --rounds would narrow it"),
        (ratio(0.8, 0.001, 1081), {}, "unclear", "0.001 to 1081 times the baseline, reaches over"),
        (ratio(0.8, 0.1, 8), {"busy": (0.9, 0.4)}, "unclear", "and 40% of the new ones ran beside other load: end"),
        (ratio(), {"busy": (0.9, 0.4)}, "slower", "ran beside other load"),  # a clear one names it too
        (ratio(1.01, 0.95, 1.07), {}, "unclear", "reaches over"),
        (ratio(1.01, 0.95, 1.07), {"tolerance": 0.1}, "same", "within the 10%"),
        (ratio(1.05, 0.95, 1.12), {"tolerance": 0.1}, "unclear", "reaches over"),
        (ratio(1.01, 0.95, 1.07), {"tolerance": 0.1, "paired": False, "busy": (0.5, 0.0)}, "unclear", "50% of the"),
        (ratio(0.5, 0.45, 0.55), {}, "faster", "50.0% less time"),
        (ratio(), {"beside_load": True}, "beside load", "end what else runs"),
    ],
)
def test_a_verdict_has_its_reason(of, options, verdict, words):
    answer = judged(of, **options)
    assert answer.verdict == verdict and words in answer.reason


# On disk.


def write_pair(folder, factors):
    for name, of in (("quick", [1] * len(factors)), ("late", factors)):
        timed(folder, name, [10 * factor for factor in of])


def test_an_interrupted_row_is_compared_by_the_rounds_that_it_ended(tmp_path):
    write_pair(tmp_path, [2, 2.1, 2.2, 2.1])
    (header, *lines) = records_of(tmp_path / "late")
    write_records(tmp_path / "late", [header, *(line for line in lines if line["job"] != "timing-4")])
    rows = {row["name"]: row for row in read_rows(tmp_path)}
    against = rows["late"]["against_fastest"]
    assert rows["late"]["status"] == "interrupted" and against["ratio"] == pytest.approx(2.1, rel=0.01)
    assert (against["rounds"], against["verdict"]) == (3, "slower")
    text = summarize(tmp_path)
    assert " 2.10x slower " in text and "round by round 2.00, 2.10, 2.20" in text
    change(tmp_path / "late", "correctness", ok=False)
    assert not {row["name"]: row for row in read_rows(tmp_path)}["late"]["against_fastest"]


def test_a_drift_along_the_rounds_is_told_and_noise_is_not(tmp_path):
    """By hand: 10% from the first round to the last on a line; and rounds that go up and down, a slope of 0.00817 of
    the logarithms with an error of 0.01334, times 2.776 (Student's t of 4)."""
    steady = ratios.drift([math.exp(0.02 * at) for at in range(6)])
    assert (steady.factor, steady.low, steady.high) == pytest.approx((math.exp(0.1),) * 3)
    noisy = ratios.drift([1.0, 1.1, 1.0, 1.1, 1.0, 1.1])
    ends = [math.exp(5 * (0.00817 + sign * 2.776 * 0.01334)) for sign in (-1, 1)]
    assert [noisy.low, noisy.high] == pytest.approx(ends, rel=1e-3) and ratios.drift([1, 2, 3]) is None
    write_pair(tmp_path / "steady", [2, 2.1, 2.0, 2.1, 2.0])
    write_pair(tmp_path / "drifting", [2, 2.4, 2.8, 3.4, 4.0])
    for folder, told in (("steady", False), ("drifting", True)):
        for details in (True, False):
            text = " ".join(summarize(tmp_path / folder, details=details).split())
            assert has_words(text, "late step", "from the first round to the last") == told


# What is measured beyond the time.


@pytest.mark.parametrize("kept_mb, noted", [((None, None), 0), ((0.01, 3), 0), ((0.5, 3), 1)])
def test_a_leak_of_each_round_is_noted(kept_mb, noted, tmp_path):
    rounds = []
    for number, mb in enumerate(kept_mb, start=1):
        lines = timing(f"timing-{number}", [10, 20], [1, 2])
        kept = None if mb is None else int(mb * MIB)
        rounds.append(
            [*lines[:-1], {"record": "stop", "job": f"timing-{number}", "scope": "step", "leaked_bytes": kept}]
        )
        rounds[-1].append(lines[-1])
    write_run(tmp_path / "run", jobs=[correctness(), *rounds, memory(8, 32), [status("trace")]])
    (row,) = logs.rows([tmp_path])
    assert sum("keeps 0.5000 MB more" in doubt.words for doubt in doubts.doubts(row)) == noted


def test_a_change_since_the_earlier_run_is_told_under_the_verdict(tmp_path):
    for name, start, ms in (("old", "2025-11-24", 10), ("new", "2025-11-30", 20), ("older", "2025-11-01", 20)):
        timed(tmp_path, "k2", [ms, 1.01 * ms, 0.99 * ms], run_id=name, started=f"{start}T00:00:00+00:00")
        (tmp_path / "k2").rename(tmp_path / name)
    assert re.search(r"since 24 Nov 2025: +k2 \+100%, slower", screen(tmp_path))
    (card,) = cards.cards(logs.read([tmp_path]).groups[0].rows, [])
    assert dict(card.lines)["Since 24 Nov 2025"] == ["k2 +100%, slower", "."]
    change(tmp_path / "old", "environment", threads=7)
    assert re.search(r"since 1 Nov 2025: +k2 \+0%, unclear: separate runs", screen(tmp_path))


def test_memory_beyond_torch_s_allocator_counts_and_is_marked(tmp_path):
    timed(tmp_path, "k2", [10, 10, 10], peak=100)
    timed(tmp_path, "torchaudio", [20, 20, 20], peak=60)
    assert "smallest exact: torchaudio, 60.00 MB" in screen(tmp_path)
    for process, shown in ((60 * 1.09, "60.00"), (60 * 1.11, "66.60 !"), (400, "400.0 !")):
        change(tmp_path / "torchaudio", "memory", process_bytes=int(process * 2**20))
        assert f" {shown} " in summarize(tmp_path)
    assert "smallest exact: k2, 100.0 MB" in screen(tmp_path) and "more memory than torch's" in summarize(tmp_path)
    assert {row["name"]: row["peak_memory_mb"] for row in read_rows(tmp_path)} == {"k2": 100, "torchaudio": 400}


AT_SIZE = {"batch": 4, "N": 2, "T_max": 407, "U_max": 86, "loss_error": 8e-8, "grad_tolerance": 2e-3, "ok": True}


@pytest.mark.parametrize(
    "small, at_size, status",
    [
        ({"grad_error": 3.9e-4, "grad_tolerance": 4e-4}, {}, "ok"),
        ({"grad_error": 4.1e-4, "grad_tolerance": 4e-4}, {}, "error"),
        ({"loss_error": 4.1e-4, "loss_tolerance": 4e-4}, {}, "error"),
        ({"slope_error": 4.1e-5, "slope_tolerance": 4e-5}, {}, "error"),
        ({"grad_error": 0.3, "grad_tolerance": 0.5}, {}, "ok"),
        ({}, {"grad_error": 1.9e-3}, "ok"),
        ({}, {"grad_error": 2.1e-3}, "error"),
        ({}, {"loss_error": 2.1e-3, "loss_tolerance": 2e-3}, "error"),
        ({}, {"grad_error": 0.3, "grad_tolerance": 0.5, "imprecise": 0.3}, "ok"),
        ({}, {"grad_error": 0.6, "grad_tolerance": 0.5, "imprecise": 0.6}, "error"),
    ],
)
def test_errors_are_judged_by_what_the_record_allowed(tmp_path, small, at_size, status):
    write_run(
        tmp_path / "a",
        jobs=[correctness(**small, at_size={**AT_SIZE, "grad_error": 1e-6, **at_size})],
        passes=["correctness"],
    )
    assert [row["status"] for row in read_rows(tmp_path)] == [status]


def test_a_loss_that_computes_in_less_than_float32_is_named(tmp_path):
    """More than ten times float32's rounding; records of before know none, and say nothing."""
    sizes = {"batch": 4, "N": 2, "T_max": 407, "U_max": 86, "loss_error": 8e-8, "grad_tolerance": 2e-3, "ok": True}
    for known, told in ({"reference_error": 2e-5}, True), ({"reference_error": 4e-5}, False), ({}, False):
        timed(tmp_path, "k2", [10, 11, 10])
        change(tmp_path / "k2", "correctness", at_size={**sizes, "grad_error": 3.1e-4, **known})
        verdict_text = screen(tmp_path).partition("VERDICT")[2]
        assert (
            ("less than float32" in verdict_text)
            == ("3.1e-04 < float32" in tables.screen(logs.read([tmp_path]), tables.Terminal(300)))
            == told
        )
        assert ("less than float32" in summarize(tmp_path)) == told


def test_rows_of_one_name_and_one_folder_are_numbered():
    rows = [Row(name=name, folder=ROOT / "log") for name in ("k2", "fused", "k2", "k2", "k2")]
    label(rows)
    assert [row.label for row in rows] == ["k2 (log)", "fused", "k2 (log) 2", "k2 (log) 3", "k2 (log) 4"]
