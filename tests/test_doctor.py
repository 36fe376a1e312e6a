"""rnnt-bench doctor: what works here, what fails and why, in one block."""

from __future__ import annotations

from commands import run

from common.setup.interpreters import Choice
from common.tools import doctor


def test_the_block_has_versions_and_an_answer_of_each_loss():
    done = run("rnnt-bench", "doctor", "--only", "reference,warp-rnnt", "--device", "cpu", "--seconds", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert " ok, " in lines["reference"] and "unsupported" in lines["warp-rnnt"]
    assert {"suite:", "machine:", "driver:", "Python:", "torch:", "compiler:"} <= lines.keys()


def test_it_ends_in_time_and_says_what_was_not_asked():
    done = run("rnnt-bench", "doctor", "--only", "reference", "--device", "cpu", "--seconds", "0.001")
    assert done.returncode == 0 and "not asked within 0.001 s" in done.stdout


def test_a_loss_without_a_python_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor.interpreters, "choose", lambda *_, **__: Choice(None, "run `make setup`"))
    assert doctor.examine(["k2"], "cpu", 1.0) == 0
    assert "missing: run `make setup`" in capsys.readouterr().out
