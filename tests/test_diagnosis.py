"""An author is told what is wrong with a loss: the utterance, what it gave, what is right, a guess at the reason."""

from __future__ import annotations

import re

import pytest
from commands import ROOT, rows_of, run

from common.core import scripts, settings
from common.core.implementations import BY_NAME
from common.losses.passes import small_batches

torch = pytest.importorskip("torch")
RESULT = "return losses.masked_fill(losses > -LOG_ZERO / 2, torch.inf).sum()  # infinite where no path is possible"


@pytest.fixture
def checked(tmp_path):
    """(loss error, gradient error, words) of a copy of the template that returns another expression."""

    def check(new, old=RESULT):
        text = (ROOT / "benchmark_mine.py").read_text()
        assert text.count(old) == 1
        path = tmp_path / "benchmark_flash.py"
        path.write_text(text.replace(old, new))
        try:
            adapter = scripts.load(str(path))(settings.resolve({"preset": "quick"}, "cpu"))
            adapter.load("cpu")
            return small_batches.check(adapter, torch.device("cpu"), torch.float32)
        finally:
            BY_NAME.pop("flash", None)

    return check


def test_a_right_one_is_told_nothing(checked):
    right = checked("return losses.sum()")
    assert max(right.loss_error, right.grad_error) < 1e-4 and right.wrong == ""


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
    reason = checked(returned).wrong
    for word in words:
        assert word in reason, reason


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("import torch", "import torch\n    T_lengths = (T_lengths - 1).clamp(min=1)", "T - 1 frames"),
        ("import torch", "import torch\n    U_lengths = (U_lengths - 1).clamp(min=0)", "U - 1 targets"),
        (" + blank[last])", ")", "without the final blank"),
        ("log_probs[..., 0]", "log_probs[..., -1]", "the blank is the last symbol"),
        ("log_softmax(-1, dtype)", "bfloat16().log_softmax(-1).to(dtype)", "as if in bfloat16"),
        ("log_softmax(-1, dtype)", "half().log_softmax(-1).to(dtype)", "as if in float16"),
        (
            "import torch",
            "import torch\n    T_lengths, U_lengths = T_lengths * 0 + len(logits[0]), U_lengths * 0 + targets.size(1)",
            "padding is not masked",
        ),
    ],
)
def test_the_usual_mistakes_are_named(checked, old, new, words):
    wrong = checked(new, old).wrong
    assert f"{words}?" in wrong, wrong


def test_got_and_expected_are_numbers_of_that_utterance(checked):
    reason = checked("return losses.sum() + 1000").wrong
    got, expected = reason.partition("loss ")[2].split(", expected ")
    assert float(got) == pytest.approx(float(expected) + 1000, abs=0.01)


@pytest.fixture
def row_of(tmp_path):
    """The row of a copy of the template with another text, by the real command, on utterances of 60 frames and more."""
    shapes = tmp_path / "shapes.pt"
    torch.save(torch.tensor([[60 + n, 2 + n] for n in range(4)], dtype=torch.int32), shapes)

    def measure(old, new):
        (tmp_path / "benchmark_flash.py").write_text((ROOT / "benchmark_mine.py").read_text().replace(old, new, 1))
        flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--quiet", "--shape-file", shapes]
        run("benchmark_all.py", "--only", tmp_path / "benchmark_flash.py", "--log-dir", tmp_path / "log", *flags)
        return rows_of(tmp_path / "log")["flash"]

    return measure


def test_an_exception_is_told_with_file_and_line(row_of):
    row = row_of("    import torch\n", "    import torch\n    targets.reshape(-1, 1000003)\n")
    line = (ROOT / "benchmark_mine.py").read_text().split("    import torch\n")[0].count("\n") + 2
    assert row["status"] == "error" and f"benchmark_flash.py, line {line}, in transducer_loss" in row["reason"]


def test_what_only_a_measured_batch_shows_has_a_place(row_of):
    """Right on small batches; on longer ones the last frames have no gradient."""
    cut = "logits = torch.cat([logits[:, :48], logits[:, 48:].detach()], 1)"
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
    printed = " ".join(done.stdout.split())
    assert re.search(r"loss [\d.]+, expected [\d.]+; .* utterance (9|10) \(T \d+, U \d+\).* expected -?[\d.]+", printed)
