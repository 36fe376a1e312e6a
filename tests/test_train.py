"""examples/train.py for a few steps: equal curves, and a saved model."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from commands import ROOT, run

sys.path[1:1] = [str(ROOT / "examples")]

import train  # noqa: E402

SMALL = ("--steps", 4, "--utterances", 112, "--vocab", 9)


def trained(*flags):
    done = run("examples/train.py", *SMALL, *flags, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_the_curves_of_two_losses_agree():
    torchaudio, fused = (trained("--loss", loss) for loss in ("torchaudio", "fused"))
    assert len(fused["curve"]) == 4 and torchaudio["curve"] == pytest.approx(fused["curve"], rel=1e-6)
    assert fused["curve"][3] < fused["curve"][0] and fused["nats"] == pytest.approx(torchaudio["nats"], rel=1e-4)


@pytest.mark.thorough
def test_a_model_is_saved_and_recognises(tmp_path):
    told = trained("--steps", 20, "--autocast", 1, "--save", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"6.pt", "20.pt"}
    saved = torch.load(tmp_path / "20.pt", weights_only=True)
    model = train.Model(9)
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        assert model.eval().error_rate(saved["held_out"]) == told["error_rate"] <= 2


def test_chords_where_espeak_is_not_there(monkeypatch):
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    slow, fast = (train.speak("ba tri", speed, 50) for speed in (180, 280))
    assert len(slow) > len(fast) and torch.isfinite(slow).all() and 0.1 < slow.abs().max() <= 1
    features, symbols = train.make_utterances(1, 9)[0]
    assert features.shape[1] == 160 and len(features) > len(symbols) and 1 <= min(symbols) <= max(symbols) < 9


def test_an_utterance_whose_loss_is_not_finite_is_skipped_and_told(capsys):
    pairs, model = train.make_utterances(4, 9), train.Model(9).eval()
    longest = max(range(4), key=lambda n: len(pairs[n][0]))
    bad = (longest + 1) % 4
    pairs[bad][0][3] = float("nan")
    loss = model.loss(pairs, "fused")
    assert f"utterance {bad} " in capsys.readouterr().err
    rest = model.loss([pair for n, pair in enumerate(pairs) if n != bad], "fused")
    assert loss.item() == pytest.approx(rest.item(), rel=1e-5) and not capsys.readouterr().err
