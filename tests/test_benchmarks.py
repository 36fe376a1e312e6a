"""docs/_fused_table.py at toy size, and examples/gpu_node.sh, whose steps that fail cost themselves alone."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
from rnnt_bench.command import COMMANDS

from commands import ROOT, assert_user_error, run

sys.path.append(str(ROOT / "docs"))

import _fused_table as fused_table  # noqa: E402

TABLE = "docs/_fused_table.py"


def test_a_line_of_the_table(tmp_path, tiny_shapes):
    choice = "--workloads long-form --logits trained --size quick --peers reference".split()
    small = "--in-place --rounds 1 --limits false --frames 12 --tokens 4 --vocab-size 101 --encoder-dim 128".split()
    done = run(TABLE, *choice, "--log-dir", tmp_path, "--", *small, "--shape-file", tiny_shapes)
    assert done.returncode == 0, done.stderr
    heads, _, row = (line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|"))
    of = dict(zip(heads, row))
    assert len(row) == len(heads) and of["logits"] == "trained"
    for unit, times in (("ms", "times faster"), ("MB", "times smaller")):
        peer, name = of[f"best exact {unit}"].rstrip(")").split(" (")
        ratio = float(peer) / float(of[f"fused {unit}"])
        assert name == "reference" and abs(float(of[times]) - ratio) < 0.06 * ratio


def test_a_row_that_fails_is_named_and_the_others_are_compared(tmp_path):
    kept = max(path for path in (ROOT / "results").iterdir() if path.name.endswith("-cores"))
    for name in ("fused", "optimized_transducer", "fast_rnnt", "torchaudio"):
        to = tmp_path / ("bpe500-memory" if name == "torchaudio" else "bpe500-random") / name
        (folder,) = (path for path in kept.iterdir() if re.fullmatch(rf"(\d+-)?{name}(-2)?", path.name))
        shutil.copytree(folder, to)
        if name == "fast_rnnt":
            text = (to / "results.jsonl").read_text()
            (to / "results.jsonl").write_text(text.replace('"status":"ok"', '"status":"oom"'))
    page = fused_table.render(tmp_path)
    assert " (optimized_transducer) |" in page and "bpe500: fast_rnnt: oom" in page
    assert " (torchaudio) | " in page  # the smallest, from the run that measured memory alone


def test_the_best_peer_is_chosen_over_shared_batches():
    chosen = fused_table.best(
        {"1": 2.0, "2": 8.0}, {"a": {"1": 10.0}, "b": {"1": 4.0, "2": 1.0}}, fused_table.geometric_mean
    )
    assert chosen == (2.0, 4.0, "b") and chosen.value == 0.5
    assert fused_table.best({"1": 2.0}, {}, max) is None


def test_flags_that_benchmark_all_refuses(tmp_path):
    done = run(TABLE, "--log-dir", tmp_path, "--workloads", "bpe500", "--", "--vocab-size", 1)
    assert done.returncode == 2 and "--vocab-size" in done.stderr and "Traceback" not in done.stderr
    assert_user_error(run(TABLE, "--workloads", "bpe50"), "--workloads", "bpe50")


def steps(*words, **environment):
    command = ["bash", str(ROOT / "examples" / "gpu_node.sh"), *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def test_a_step_that_fails_or_hangs_costs_itself_alone_and_is_repeated(tmp_path):
    """A command stands in place of Python: the list fails, the first measurement hangs, the rest works."""
    node, python = tmp_path / "node", tmp_path / "python"
    cases = "*rnnt-bench\\ list*) exit 3;; *--passes\\ correctness\\ *) sleep 60;;"
    python.write_text(f'#!/bin/sh\necho $@\ncase "$*" in {cases} esac\n')
    python.chmod(0o755)
    names = "machine,first,fast_rnnt,batch-30,report"
    done = steps("--preset", "cpu", "--limit", 1, "--only", names, node, PYTHON=str(python))
    assert done.returncode == 1 and "exit code 3" in done.stderr and "machine.log" in done.stderr
    ended = dict(line.split()[:2] for line in (node / "summary.txt").read_text().splitlines())
    assert ended == {"machine": "3", "first": "124", "fast_rnnt": "0", "batch-30": "0", "report": "0"}
    assert "--device cpu" in (node / "batch-30.log").read_text()
    steps("--preset", "cpu", "--only", "machine,report", node, PYTHON=str(python))
    again = [line.split()[0] for line in (node / "summary.txt").read_text().splitlines()]
    assert again.count("machine") == 2 and again.count("report") == 1


@pytest.mark.parametrize("flags", [("--preset", "tpu", "x"), ("--only",), ()])
def test_bad_usage(flags):
    done = steps(*flags)
    assert done.returncode == 2 and "usage" in done.stderr


def test_each_preset_lists_the_same_steps():
    listed = [steps("--preset", preset, "--list").stdout.splitlines() for preset in ("gpu", "cpu")]
    names = [[line.split()[0] for line in lines] for lines in listed]
    unknown = steps("--only", "first,nothing", "--preset", "cpu", "somewhere")
    assert unknown.returncode == 2 and "'nothing'" in unknown.stderr
    assert names[0] == names[1] and len(names[0]) == len(set(names[0])) > 10
    commands = re.findall(r" (?:rnnt-bench (\w+)|benchmark_all\.py) (.*)", "\n".join([*listed[0], *listed[1]]))
    assert len(commands) > 10
    for name, words in commands:
        known = importlib.import_module(COMMANDS[name or "run"].module).parser()._option_string_actions
        assert {word for word in words.split() if word.startswith("--")} <= {*known}, name
