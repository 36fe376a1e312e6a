"""examples/train.py for a few steps: equal curves, a saved model, and the table of benchmarks/train_table.py."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from commands import ROOT, assert_user_error, run

sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import train  # noqa: E402
import train_table  # noqa: E402

SMALL = ("--steps", 4, "--utterances", 112, "--vocab", 9)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The file of a table of one seed of each loss."""
    path = tmp_path_factory.mktemp("trained") / "results.jsonl"
    done = run("benchmarks/train_table.py", "--seeds", 1, "--rounds", 0, "--output", path, "--", *SMALL)
    assert done.returncode == 0, done.stderr
    assert all(f"| {loss} |" in done.stdout for loss in train_table.LOSSES)
    return path


@pytest.mark.thorough
def test_the_curves_of_two_losses_agree(results):
    (torchaudio,), (fused,), (pruned,) = train_table.known(results).values()
    assert len(fused["curve"]) == 4 and torchaudio["curve"] == pytest.approx(fused["curve"], rel=1e-6)
    assert fused["curve"][3] < fused["curve"][0] and pruned["curve"] != pytest.approx(fused["curve"], rel=1e-2)
    assert fused["nats"] == pytest.approx(torchaudio["nats"], rel=1e-4)


@pytest.mark.thorough
def test_times_come_from_trainings_of_their_own(results):
    """And a training that is in the file is not repeated."""
    shown = train_table.render(results)
    assert "| - | - |" in next(line for line in shown.splitlines() if line.startswith("| fused |"))
    flags = ("--losses", "fused", "--seeds", 1, "--rounds", 1, "--output", results)
    done = run("benchmarks/train_table.py", *flags, "--", *SMALL)
    assert done.returncode == 0 and done.stderr.count("% errors") == 1, done.stderr
    ((timed,),) = train_table.known(results, timed=True).values()
    assert len(results.read_text().splitlines()) == 4 and timed["loss"] == "fused" and timed["seconds"] > 0
    ms = f"| {1e3 * timed['seconds'] / timed['steps']:.1f} |"
    assert ms in next(line for line in train_table.render(results).splitlines() if line.startswith("| fused |"))


def test_intervals_and_differences_by_hand():
    assert train_table.with_interval([1.0, 3.0]) == "2.00 ± 12.71" and train_table.with_interval([1.0]) == "1.00"
    short, long = [{"seed": 0, "curve": [2.0, 1.0]}], [{"seed": 0, "curve": [2.0, 4.0]}, {"seed": 1, "curve": [9.0]}]
    assert train_table.largest_difference(short, long) == 0.75


def test_a_table_of_nothing(tmp_path):
    assert_user_error(run("benchmarks/train_table.py", "--losses", "mine"), "--losses")
    with pytest.raises(train_table.UserError, match="no result"):
        train_table.render(tmp_path / "none")


@pytest.mark.thorough
def test_a_model_is_saved_and_recognises(tmp_path):
    """Under autocast, whose joiner multiplies in bfloat16."""
    flags = (*SMALL, "--steps", 20, "--autocast", 1, "--save", tmp_path)
    done = run("examples/train.py", *flags, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"6.pt", "20.pt"}
    saved = torch.load(tmp_path / "20.pt", weights_only=True)
    model = train.Model(9)
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        assert model.eval().error_rate(saved["held_out"]) == json.loads(done.stdout)["error_rate"] <= 2


def test_chords_where_espeak_is_not_there(monkeypatch):
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    slow, fast = (train.speak("ba tri", speed, 50) for speed in (180, 280))
    assert len(slow) > len(fast) and torch.isfinite(slow).all() and 0.1 < slow.abs().max() <= 1
    features, symbols = train.make_utterances(1, 9)[0]
    assert features.shape[1] == 160 and len(features) > len(symbols) and 1 <= min(symbols) <= max(symbols) < 9
