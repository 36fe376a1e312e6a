"""examples/train_tiny.py: a few steps with each loss on made tones and on recordings; curves, picture, exit codes."""

from __future__ import annotations

import pytest
from commands import SHARED, assert_user_error, run

SCRIPT = "examples/train_tiny.py"
TRAINED = ("torchaudio", "optimized_transducer", "fused")


def rows_of(done):
    """loss -> the words of its line."""
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: words for words in lines if words and words[0] in TRAINED}


def test_the_curves_of_three_losses_agree(tmp_path):
    picture = tmp_path / "curves.svg"
    done = run(SCRIPT, "--steps", 4, "--audio", "tones", "--picture", picture)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done)
    assert set(rows) == set(TRAINED)
    for _, _, first, last, apart, status in rows.values():
        assert status == "agrees" and float(last) < float(first) and float(apart) < 1e-3
    assert picture.read_text().count("fused") >= 2


def test_curves_that_differ_are_a_failure(tmp_path):
    done = run(SCRIPT, "--steps", 2, "--audio", "tones", "--allowed", "1e-30", "--picture", tmp_path / "curves.svg")
    assert done.returncode == 1 and "differs" in rows_of(done)["fused"], done.stderr


@pytest.mark.skipif(not (SHARED / "librispeech").is_dir(), reason="no recordings beside the repository")
def test_recordings(tmp_path):
    done = run(SCRIPT, "--steps", 1, "--audio", SHARED / "librispeech", "--picture", tmp_path / "curves.png")
    assert done.returncode == 0, done.stderr
    assert "2 utterances of librispeech" in done.stdout and (tmp_path / "curves.png").stat().st_size > 1000


def test_mistakes_are_one_line(tmp_path):
    assert_user_error(run(SCRIPT, "--audio", tmp_path), tmp_path, "trans.txt")
    assert_user_error(run(SCRIPT, "--steps", 0), "--steps")
    nowhere = tmp_path / "missing" / "curves.svg"
    done = run(SCRIPT, "--steps", 1, "--audio", "tones", "--picture", nowhere)
    assert done.returncode == 2 and str(nowhere) in done.stderr and "Traceback" not in done.stderr
