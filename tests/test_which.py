"""rnnt-bench which: the answer from committed results, at once and without a package."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, run

from common.jobs import costs
from common.tools.which import answer, rows
from common.tools.which.answer import Question

sys.path.append(str(ROOT / "docs"))
import _figures  # noqa: E402


def entry(device="cpu", **settings):
    """Return a made measurement with these settings."""
    given = {"vocab_size": 500, "dtype": "float32", "batch_size": 2, "max_frames": None, "sort_utterance": False}
    row = {"kind": "exact", "step_ms": 10.0, "loss_ms": 2.0, "peak_mb": 100.0}
    content = {
        **{"results": "r", "date": "2026-01-01", "device": device, "device_name": "a CPU", "cores": 2},
        "torch": "2.11.0",
        "settings": {**given, "encoder_dim": 512, "frames": "as in the shape file", "tokens": None, **settings},
        "picks": {
            "outputs": {"name": "a", "scope": "step", "rivals": [], "next": "b", "times": [2.0, 1.5, 2.5]},
            "logits": {"name": "a", "scope": "step", "rivals": ["b"], "next": "b", "times": [1.1, 0.9, 1.2]},
        },
        "rows": [{"name": "a", **row}, {"name": "b", **row, "peak_mb": 50.0}, {"name": "c", **row, "loss_ms": None}],
    }
    return answer.Measurement.from_json(content)


def test_the_committed_file_is_what_the_records_say():
    assert rows.text() == answer.FILE.read_text(encoding="utf-8")


def test_the_committed_costs_are_what_the_records_say():
    assert _figures.costs() == costs.FILE.read_text(encoding="utf-8")


def test_the_nearest_vocabulary_and_device_are_taken():
    entries = [entry(), entry(vocab_size=4096), entry("cuda", vocab_size=30)]
    sizes = {V: answer.nearest(Question(V), entries).settings.vocab_size for V in (500, 700, 3000, 30)}
    assert sizes == {500: 500, 700: 500, 3000: 4096, 30: 500}
    assert answer.nearest(Question(4096, device="cuda"), entries).device == "cuda"


def test_the_answer_has_the_pick_its_interval_the_machine_and_the_date():
    text = "\n".join(answer.lines(Question(500), entry()))
    assert "use a: 2.0x faster than b" in text and "1.5 to 2.5" in text
    assert "a CPU" in text and "2026-01-01" in text and "rnnt-bench run --vocab-size 500" in text


def test_an_uncertain_lead_is_no_pick():
    text = "\n".join(answer.lines(Question(500, need="logits"), entry()))
    assert "not certain" in text and "b takes the least memory" in text and "use a" not in text
    assert "\n  c " not in text  # takes no logits


def test_memory_becomes_utterances():
    text = "\n".join(answer.lines(Question(500, memory_bytes=2**30), entry()))
    assert "about 20" in text and "about 41" in text  # of 100 and of 50 MB for two


def test_another_device_is_said():
    assert "no results of cuda" in "\n".join(answer.lines(Question(500, device="cuda"), entry()))


@pytest.mark.parametrize("flags", [[], ["--need", "logits", "--memory", "16GB"]])
def test_the_command_answers_without_any_package(flags, tmp_path):
    line = [sys.executable, "-I", "-S", str(ROOT / "rnnt-bench"), "which", "--vocab-size", "4096", *flags]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "V 4096" in done.stdout and "fast_rnnt" in done.stdout


def test_the_file_is_small_and_a_mistake_is_one_line():
    assert len(json.loads(answer.FILE.read_text())) >= 3 and answer.FILE.stat().st_size < 100_000
    assert_user_error(run("rnnt-bench", "which", "--need", "logit"), "--need", "logits")
