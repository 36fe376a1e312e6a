"""examples/train.py for a few steps: equal curves, and a saved model."""

from __future__ import annotations

import itertools
import json
import math
import sys

import pytest
import torch

from commands import ROOT, run

sys.path[1:1] = [str(ROOT / "examples")]

import mwer  # noqa: E402
import train  # noqa: E402

SMALL = ("--steps", 12, "--utterances", 112, "--vocab", 9)


def trained(*flags):
    done = run("examples/train.py", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_the_curves_of_two_losses_agree():
    torchaudio, fused = (trained("--loss", loss) for loss in ("torchaudio", "fused"))
    assert len(fused["curve"]) == 12 and torchaudio["curve"] == pytest.approx(fused["curve"], rel=1e-6)
    assert fused["curve"][-1] < fused["curve"][0] and fused["nats"] == pytest.approx(torchaudio["nats"], rel=1e-4)


@pytest.mark.thorough
def test_a_model_is_saved_and_recognises(tmp_path):
    told = trained("--steps", 20, "--autocast", 1, "--save", tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"6.pt", "20.pt"}
    saved = torch.load(tmp_path / "saved" / "20.pt", weights_only=True)
    model = train.Model(9)
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        assert model.eval().error_rate(saved["held_out"]) == told["error_rate"] <= 2


def test_a_loss_whose_package_is_not_here_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--loss", "fast_rnnt-pruned"])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "fast_rnnt is not installed" in capsys.readouterr().err


def test_the_beam_is_the_sum_over_all_alignments(monkeypatch):
    torch.manual_seed(0)
    model, frames, scores = train.Model(3, width=8).eval(), torch.randn(3, 8), {}
    with torch.no_grad():
        for symbols in itertools.product(range(3), repeat=3):
            path, score = (), 0.0
            for frame, symbol in zip(frames, symbols):
                state = model.decoder(torch.tensor(path[-1] if path else 0))
                score += model.joiner.logits(frame, state).log_softmax(-1)[symbol].item()
                path += (symbol,) if symbol else ()
            scores[path] = scores.get(path, 0) + math.exp(score)
        found = [tuple(path.tolist()) for path in mwer.search(model, frames, 15)]
    assert found == sorted(scores, key=scores.get, reverse=True)


@pytest.mark.thorough
def test_a_checkpoint_is_trained_on_by_its_expected_errors(tmp_path):
    trained("--save", tmp_path)
    flags = ("--steps", 2, "--utterances", 112)
    done = run("examples/mwer.py", tmp_path / "12.pt", *flags)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(0 <= told[name] for name in ("before", "mwer", "transducer loss"))


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
