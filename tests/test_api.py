"""The suite from Python: rows, measuring and checking a function, the helper for tests; and --loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, rows_of, run

import rnnt_bench

torch = pytest.importorskip("torch")

#: A package with a right loss and a wrong one, and a name that the suite has too.
PACKAGE = """
import sys
sys.path.insert(0, {root!r})
from common.losses import vectorised
del sys.path[0]

def loss(logits, targets, T_lengths, U_lengths, blank=0, reduction="mean"):
    return vectorised.transducer_loss(logits, targets, T_lengths, U_lengths, blank=blank, reduction=reduction)

def broken(logits, targets, T_lengths, U_lengths):
    raise ValueError("as planned")

def negative(logits, targets, T_lengths, U_lengths):
    return -loss(logits, targets, T_lengths, U_lengths, reduction="none")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the package `mypackage` and the module mypackage.rnnt."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").touch()
    (folder / "mypackage" / "rnnt.py").write_text(PACKAGE.format(root=str(ROOT)))
    return folder


QUICK = ("--preset", "quick", "--device", "cpu", "--quiet")


def test_a_function_of_a_package_is_measured_as_a_row(folder, tmp_path):
    flags = ["--loss", "mypackage.rnnt:loss", "--loss", "minus=mypackage.rnnt:negative", "--skip", "all"]
    flags += ["--loss", "broken=mypackage/rnnt.py:broken"]
    done = run("benchmark_all.py", *flags, *QUICK, "--passes", "timing", "--log-dir", tmp_path, cwd=folder)
    rows = rows_of(tmp_path)
    assert done.returncode == 1 and rows.keys() == {"mypackage.rnnt.loss", "minus", "broken"}, done.stderr
    assert rows["mypackage.rnnt.loss"]["status"] == "ok" and rows["mypackage.rnnt.loss"]["loss_ms"]["median"] > 0
    assert rows["minus"]["status"] == "error" and "log-likelihood" in rows["minus"]["reason"]
    assert rows["broken"]["status"] == "error" and "(rnnt.py, line " in rows["broken"]["reason"]
    again = rnnt_bench.load(tmp_path)
    assert {row["name"] for row in again} == rows.keys()


def test_a_loss_that_is_not_there_is_one_line(folder):
    assert_user_error(run("benchmark_all.py", "--loss", "nowhere.rnnt:loss", cwd=folder), "--loss", "nowhere")
    assert_user_error(run("benchmark_all.py", "--loss", "nowhere.py:loss", cwd=folder), "--loss", "no such file")
    assert_user_error(run("benchmark_all.py", "--loss", "loss", cwd=folder), "--loss", "MODULE:FUNCTION")


def test_a_function_of_a_file_is_checked(folder):
    result = rnnt_bench.check(f"{folder}/mypackage/rnnt.py:loss", cases="ragged", device="cpu")
    assert result.right and result.cells["ragged"]["result"] == "pass"
    wrong = rnnt_bench.check(f"{folder}/mypackage/rnnt.py:negative", cases="ragged", device="cpu")
    assert not wrong and wrong.findings[0].startswith("ragged: ")


SCRIPT = """
import json, sys
import torch
import common  # a package of the user's, which stays as it is
import rnnt_bench

def my_loss(logits, targets, T_lengths, U_lengths):
    from mypackage.rnnt import loss
    return loss(logits, targets, T_lengths, U_lengths, reduction="sum")

if __name__ == "__main__":
    rows = rnnt_bench.measure(my_loss, vocab_size=20, preset="quick", passes="timing", device="cpu")
    rnnt_bench.assert_is_transducer_loss(lambda *given: my_loss(*given))
    assert common.MINE and sys.modules["common"] is common
    frame = rows.to_frame()
    print(json.dumps([rows[0]["name"], rows[0]["status"], rows[0]["configuration"]["vocab_size"], len(frame)]))
"""


@pytest.mark.thorough
def test_a_script_measures_its_own_function(folder):
    (folder / "common.py").write_text("MINE = True\n")
    (folder / "mine.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}  # as installed, with what else the checkout has
    line = [sys.executable, "mine.py"]
    done = subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["mine.my_loss", "ok", 20, 1]


def reference(logits, targets, T_lengths, U_lengths):
    from common.losses import vectorised

    return vectorised.transducer_loss(logits, targets, T_lengths, U_lengths, reduction="none")


def test_the_helper_for_tests_says_what_is_wrong():
    rnnt_bench.assert_is_transducer_loss(reference)
    with pytest.raises(AssertionError, match="mean over the batch"):
        rnnt_bench.assert_is_transducer_loss(lambda *given: reference(*given).mean())


def test_a_closure_cannot_be_measured_in_another_process():
    with pytest.raises(ValueError, match="top level"):
        rnnt_bench.measure(lambda *given: 0)


def test_a_folder_without_results_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no runs"):
        rnnt_bench.load(tmp_path)
