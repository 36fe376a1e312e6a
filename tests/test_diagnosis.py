"""An author is told what is wrong with a loss: the utterance, what it gave, what is right, a guess at the reason."""

from __future__ import annotations

import re

import pytest
from commands import ROOT, rows_of, run

from common.core import scripts, settings
from common.core.implementations import BY_NAME
from common.losses.passes import correctness

torch = pytest.importorskip("torch")
RESULT = "return losses.masked_fill(losses > -LOG_ZERO / 2, torch.inf).sum()  # infinite where no path is possible"


@pytest.fixture
def checked(tmp_path):
    """(loss error, gradient error, words) of a copy of the template that returns another expression."""

    def check(returned):
        text = (ROOT / "benchmark_mine.py").read_text()
        assert text.count(RESULT) == 1
        path = tmp_path / "benchmark_flash.py"
        path.write_text(text.replace(RESULT, returned))
        try:
            adapter = scripts.load(str(path))(settings.resolve({"preset": "quick"}, "cpu"))
            adapter.load("cpu")
            return correctness.check(adapter, torch.device("cpu"), torch.float32)
        finally:
            BY_NAME.pop("flash", None)

    return check


def test_a_right_one_is_told_nothing(checked):
    loss_error, grad_error, words = checked("return losses.sum()")
    assert max(loss_error, grad_error) < 1e-4 and words == ""


@pytest.mark.parametrize(
    "returned, words",
    [
        ("return losses.mean()", ["a batch of 4", "1/4", "1/N", "a mean"]),
        ("return (losses / T_lengths).sum()", ["T 11, U 5", "1/11", "divided by T?"]),
        ("return (losses / U_lengths.clamp(min=1)).sum()", ["T 11, U 5", "1/5", "divided by U?"]),
        ("return -losses.sum()", ["negative"]),
        ("return losses.sum() / 0.6931471805599453", ["base 2"]),
        ("return losses.sum() * 0 + logits.sum() * 0", ["always 0"]),
        ("return losses[:3].sum() + losses[3:].sum().detach()", ["the loss is right", "the gradient"]),
        ("return losses.sum() + 2 * (losses.sum() - losses.sum().detach())", ["the loss is right", "3 times"]),
    ],
)
def test_the_utterance_and_a_guess(checked, returned, words):
    said = checked(returned)[2]
    for word in words:
        assert word in said, said


def test_got_and_expected_are_numbers_of_that_utterance(checked):
    said = checked("return losses.sum() + 1000")[2]
    got, expected = said.partition("loss ")[2].split(", expected ")
    assert float(got) == pytest.approx(float(expected) + 1000, abs=0.01)


@pytest.fixture
def row_of(tmp_path, tiny_shapes):
    """The row of a copy of the template with another text, by the real command."""

    def measure(old, new):
        (tmp_path / "benchmark_flash.py").write_text((ROOT / "benchmark_mine.py").read_text().replace(old, new, 1))
        flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--quiet", "--shape-file", tiny_shapes]
        run("benchmark_all.py", "--only", tmp_path / "benchmark_flash.py", "--log-dir", tmp_path / "log", *flags)
        return rows_of(tmp_path / "log")["flash"]

    return measure


def test_an_exception_is_told_with_file_and_line(row_of):
    row = row_of("    import torch\n", "    import torch\n    targets.reshape(-1, 1000003)\n")
    line = (ROOT / "benchmark_mine.py").read_text().split("    import torch\n")[0].count("\n") + 2
    assert row["status"] == "error" and f"benchmark_flash.py, line {line}, in transducer_loss" in row["reason"]


def test_what_only_a_measured_batch_shows_has_a_place(row_of):
    """Right on small batches; on longer ones the last frames have no gradient."""
    cut = "logits = torch.cat([logits[:, :11], logits[:, 11:].detach()], 1)"
    reason = row_of("    import torch\n", f"    import torch\n    {cut}\n")["reason"]
    assert "on a measured batch" in reason and "utterance" in reason and "expected" in reason


def test_the_screen_has_the_utterance_and_the_numbers(tmp_path):
    """Many gradients are off, and the place is not cut off behind them."""
    text = (ROOT / "benchmark_mine.py").read_text()
    (tmp_path / "benchmark_flash.py").write_text(text.replace(RESULT, "return losses[:8].sum()"))
    shapes = tmp_path / "shapes.pt"
    torch.save(torch.tensor([[12 + n, 2 + n] for n in range(10)], dtype=torch.int32), shapes)
    flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--quiet", "--batch-size", "10"]
    flags += ["--shape-file", shapes, "--log-dir", tmp_path / "log"]
    done = run("benchmark_all.py", "--only", tmp_path / "benchmark_flash.py", *flags)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert re.search(r"loss [\d.]+, expected [\d.]+; .* utterance (9|10) \(T \d+, U \d+\).* expected -?[\d.]+", said)
