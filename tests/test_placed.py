"""Rows of another environment, such as reference@k2: names, where they run, and which of them the default run has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import assert_user_error, rows_of, run
from fixtures_runs import correctness, timing, write_run

from common.cli import flags
from common.cli.parser import Parser, add_choice, standard
from common.core.errors import UserError
from common.core.implementations import find
from common.setup import environments, interpreters

K2 = environments.interpreter("k2")
needs_k2 = pytest.mark.skipif(K2 is None, reason="no k2 environment")
CHECK = ["--preset", "quick", "--limits", "false", "--passes", "correctness"]


def test_names():
    row = find("fast_rnnt:modified@k2")
    assert (row.name, row.environment, row.kind) == ("fast_rnnt:modified@k2", "k2", "modified")
    assert (row.script, row.variant) == (find("fast_rnnt").script, "modified")
    assert not set(row.folder) & set(":@/") and row.folder != find("fast_rnnt:modified").folder
    assert find("k2@k2") == find("k2") and find("reference@main") == find("reference")
    for name in ("fast_rnnt@viewer", "fast_rnnt@", "nobody@k2", "fast_rnnt:packed@k2"):
        with pytest.raises(UserError):
            find(name)


def test_a_name_on_the_command_line():
    parser = Parser()
    add_choice(parser)
    flags.add_flags(parser)
    assert parser.parse_args(["--only", "fast_rnnt@k2,k2@k2,k2:modified@main"]).only == (
        "k2",
        "fast_rnnt@k2",
        "k2:modified@main",
    )
    assert_user_error(run("benchmark_all.py", "--only", "fast_rnnt@nowhere"), "fast_rnnt@nowhere", "main, k2, nemo")
    assert_user_error(run("benchmark_all.py", "--only", "nothing@k2"), "nothing")


def test_it_runs_there_or_nowhere(monkeypatch):
    choice = interpreters.choose(find("reference@k2"), in_place=True, prefer_here=True)
    assert choice.python is None and "--in-place" in choice.reason
    monkeypatch.setattr(environments, "FOLDER", Path("/nowhere"))  # no environments at all
    choice = interpreters.choose(find("reference@k2"), in_place=False, prefer_here=True)
    assert choice.python is None and "make setup" in choice.reason
    assert interpreters.choose(find("reference"), in_place=False, prefer_here=False).python == Path(sys.executable)


@needs_k2
def test_its_row_is_of_that_torch_and_a_package_that_is_not_there_is_missing(tmp_path, tiny_shapes):
    only = "reference,reference@k2,torchaudio@k2"
    done = run(
        "benchmark_all.py", *CHECK, "--shape-file", tiny_shapes, "--log-dir", tmp_path, "--only", only, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert (rows["reference@k2"]["status"], rows["torchaudio@k2"]["status"]) == ("ok", "missing")
    assert "torchaudio is not installed" in rows["torchaudio@k2"]["reason"]
    assert rows["reference@k2"]["torch_version"].startswith("1.13")
    assert rows["reference"]["torch_version"] != rows["reference@k2"]["torch_version"]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "reference-2",
        "reference-at-k2-2",
        "torchaudio-at-k2-2",
    }


@needs_k2
def test_in_a_sweep_too(tmp_path, tiny_shapes):
    swept = ["--sweep", "vocab-size=20,30", "--only", "reference@k2", "--log-dir", tmp_path, "--quiet"]
    done = run("benchmark_all.py", *CHECK, "--shape-file", tiny_shapes, *swept)
    assert done.returncode == 0, done.stderr
    rows = json.loads(run("summarize.py", tmp_path, "--format", "json").stdout)
    assert [(row["name"], row["configuration"]["vocab_size"], row["torch_version"][:4]) for row in rows] == [
        ("reference@k2", 20, "1.13"),
        ("reference@k2", 30, "1.13"),
    ]


@needs_k2
def test_the_default_run_has_a_control_for_each_environment_with_another_torch():
    def controls(*names):
        chosen = {name: interpreters.choose(find(name), in_place=False, prefer_here=False) for name in names}
        return interpreters.controls(chosen, "cpu")

    assert controls("torchaudio", "k2", "reference", "k2-pruned") == {"reference@k2": interpreters.Choice(K2)}
    assert controls("torchaudio", "reference") == {}  # one torch
    assert controls("torchaudio", "k2") == {}  # no loss that runs under both
    (row,) = map(find, controls("fast_rnnt", "k2", "reference", "fast_rnnt-pruned"))  # where gcc is, fast_rnnt's
    assert row.control and row.environment == "k2"
    kinds = {find(name).kind: name for name in controls(*standard()) if name.endswith("@k2")}
    if kinds["exact"] == "fast_rnnt@k2":  # each ratio to a row of k2's torch goes through one of its own kind
        assert kinds == {
            "exact": "fast_rnnt@k2",
            "pruned": "fast_rnnt-pruned@k2",
        }
    else:
        assert kinds == {"exact": "reference@k2"}


def test_two_losses_under_two_torches_are_not_compared_and_one_loss_is(tmp_path):
    for name, torch, ms in (("reference", "2.11.0", 10), ("reference@k2", "1.13.1", 20), ("k2", "1.13.1", 40)):
        jobs = [timing(f"timing-{at}", [ms, ms + at / 10], []) for at in (1, 2, 3)]
        for job in jobs:
            job[0]["torch"] = torch
        head = {"passes": ["correctness", "timing"], "rounds": 3, "scopes": ["step"], "run_id": "one run"}
        write_run(tmp_path / name, name=name, jobs=[correctness(), *jobs], **head)

    def verdict(*names):
        done = run("rnnt-bench", "compare", "--in", tmp_path, *names, "--scope", "step", "--format", "json")
        (change,) = json.loads(done.stdout)
        return change["time"]["step"]["verdict"], change["time"]["step"]["ratio"]

    refused = run("rnnt-bench", "compare", "--in", tmp_path, "reference", "k2")
    assert_user_error(refused, "torch 2.11.0 / 1.13.1", "fast_rnnt@k2")
    assert verdict("reference@k2", "k2") == ("slower", pytest.approx(2, rel=0.02))
    assert verdict("reference", "reference@k2") == ("slower", pytest.approx(2, rel=0.02))
