"""rnnt-bench doctor: what works here, what fails and why, in one block."""

from __future__ import annotations

from commands import run


def test_the_block_has_versions_and_an_answer_of_each_loss():
    done = run("rnnt-bench", "doctor", "--only", "reference,warp-rnnt", "--device", "cpu", "--seconds", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    heads = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert {"suite:", "machine:", "driver:", "Python:", "torch:", "compiler:", "reference"} <= heads
    assert "warp-rnnt (needs CUDA)" in done.stdout and "correct: 1 row" in done.stdout


def test_it_ends_in_time_and_says_that_not_all_was_asked():
    done = run("rnnt-bench", "doctor", "--only", "reference", "--device", "cpu", "--seconds", "0.001")
    assert done.returncode == 130 and "not all was asked within 0.001 s" in done.stdout
