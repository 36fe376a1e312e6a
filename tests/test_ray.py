"""--executor ray: flags of the cells, their folders, and cells on a real cluster of two nodes, one killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from rnnt_bench.cli import cluster
from rnnt_bench.setup import environments

from commands import ROOT, assert_user_error, command, piped, rows_of, run, wait_for
from fixtures_runs import write_run

PYTHON = os.environ.get(cluster.PYTHON) or environments.interpreter("ray")
needs_ray = pytest.mark.skipif(not PYTHON, reason="no Ray: make setup ENVIRONMENTS=ray, or RAY_PYTHON=its Python")
QUICK = ["--preset", "quick", "--device", "cpu", "--passes", "correctness,timing", "--scope", "loss"]


@pytest.mark.parametrize(
    "axis", [["--sweep=vocab-size=5,6"], ["--sweep", "vocab-size=5,6"], ["vocab-size=5,6"]], ids=" ".join
)
def test_a_cell_gets_the_flags_but_those_of_this_machine(axis):
    words = ["--only", "k2", *axis, "--executor", "ray", "--log-dir", "here", "--dtype", "float64"]
    assert cluster.shared(words) == ["--only", "k2", "--dtype", "float64", "--quiet"]


def packed(*folders):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for folder in folders:
            archive.add(folder, folder.name)
    return stream.getvalue()


def test_folders_come_back_under_names_that_are_free(tmp_path):
    content = packed(write_run(tmp_path / "node" / "k2-2", name="k2"))
    assert [path.name for _ in range(2) for path in cluster.unpacked(content, tmp_path / "log")] == ["k2-2", "k2-2.2"]
    assert list(rows_of(tmp_path / "log"))


def test_what_does_not_go_with_a_cluster_is_refused(tmp_path):
    for flag in ("--resume", "--in-place"):
        assert_user_error(run("benchmark_all.py", "--executor", "ray", flag, "--log-dir", tmp_path), flag, "ray")
    assert_user_error(run("benchmark_torchaudio.py", "--executor", "ray"), "--executor")


def test_without_ray_it_says_what_to_do(monkeypatch):
    monkeypatch.setenv(cluster.PYTHON, "/nowhere/python")
    assert_user_error(run("benchmark_all.py", "--executor", "ray"), "--executor ray", "/nowhere/python")
    lacks = {**os.environ, cluster.PYTHON: "/usr/bin/false"}
    assert_user_error(run("benchmark_all.py", "--executor", "ray", env=lacks), "--executor ray", "Ray")


@pytest.fixture(scope="module")
def nodes():
    """The address of a cluster, and the process numbers of its nodes."""
    line = [str(PYTHON), str(Path(__file__).with_name("ray_nodes.py")), str(ROOT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, text=True, **pipes)
    yield json.loads(process.stdout.readline())
    process.stdin.close()
    process.wait()


def flags(nodes, tiny_shapes, log, *words):
    where = ["--executor", "ray", "--ray-address", nodes["address"], "--log-dir", log, "--shape-file", tiny_shapes]
    return ["--only", "reference", *QUICK, *where, *words]


ENVIRONMENT = {**os.environ, cluster.PYTHON: str(PYTHON)}


def cells(log):
    """Return the swept values of each folder that came back, and its status."""
    rows = json.loads(run("summarize.py", log, "--format", "json", "--all-runs").stdout)
    return sorted((row["configuration"]["vocab_size"], row["status"]) for row in rows)


@needs_ray
def test_each_cell_is_measured_on_a_node(nodes, tiny_shapes, tmp_path):
    words = flags(nodes, tiny_shapes, tmp_path, "--sweep", "vocab-size=10,20", "--sweep", "dtype=float32,float64")
    done = run("benchmark_all.py", *words, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert cells(tmp_path) == [(10, "ok"), (10, "ok"), (20, "ok"), (20, "ok")]
    assert done.stderr.count("measured on") == 4 and "reference" in done.stdout


@needs_ray
def test_a_cell_that_no_node_can_measure_is_named(nodes, tiny_shapes, tmp_path):
    words = flags(nodes, "/nowhere/shapes.pt", tmp_path)
    assert_user_error(run("benchmark_all.py", *words, env=ENVIRONMENT), "--shape-file")
    words = flags({"address": "127.0.0.1:1"}, tiny_shapes, tmp_path)
    assert_user_error(run("benchmark_all.py", *words, env=ENVIRONMENT), "127.0.0.1:1")


@needs_ray
def test_ctrl_c_keeps_what_came_back_and_leaves_no_process(nodes, tiny_shapes, tmp_path):
    long = ["--rounds", "40", "--max-seconds", "2"]
    words = flags(nodes, tiny_shapes, tmp_path, "--sweep", "vocab-size=10,20", *long)
    process = piped(command("benchmark_all.py", *words), env=ENVIRONMENT)
    wait_for(lambda: workers(tiny_shapes), "a job on a node", seconds=120)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    wait_for(lambda: not workers(tiny_shapes), "the end of what ran on the nodes", seconds=120)


def workers(shapes):
    """Return the processes on the nodes that measure this shape file."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().decode(errors="replace"))
    return [line for line in lines if "benchmark_all.py" in line and str(shapes) in line and "cell-" in line]


@needs_ray
def test_the_cells_of_a_node_that_dies_are_run_again(nodes, tiny_shapes, tmp_path):
    words = flags(nodes, tiny_shapes, tmp_path, "--sweep", "vocab-size=10,20,30", "--rounds", "3")
    process = piped(command("benchmark_all.py", *words), env=ENVIRONMENT)
    wait_for(lambda: len(workers(tiny_shapes)) >= 2, "a job on each node", seconds=120)
    os.kill(nodes["raylets"].pop(), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert cells(tmp_path) == [(10, "ok"), (20, "ok"), (30, "ok")] and "reference" in output
